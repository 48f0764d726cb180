"""What the measuring process decides by numbers, without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.measure import session as own
from tunegemm.measure.outcome import Failure
from tunegemm.measure.session import SETTLE_STEADY_MS, Bench, Entry, Lost, Session
from tunegemm.measure.settings import RaceSettings
from tunegemm.measure.worker import Broken, Discover, Done, Measure, Step

DEVICE, PROBLEM = find_device("model:h200"), Problem(64, 64, 64)
CANDIDATE = Candidate.make("planted", {"what": "good"})
SETTINGS = RaceSettings(rounds=2, min_replay_ms=0.1, race_after=2, race_margin=0.5)


class Planted:
    """A device that answers these readings, one after the other."""

    def __init__(self, *reasons: list[str], energy_mj: float | None = 1.0, alive: bool = True) -> None:
        self.reasons, self.meter, self.lives = [*reasons], energy_mj, alive

    def telemetry(self) -> dict[str, Any]:
        return {"throttle_reasons": self.reasons.pop(0)}

    def energy_mj(self) -> float | None:
        return self.meter

    def alive(self) -> bool:
        return self.lives


def session_of(backend: Any) -> tuple[Session, list[Any]]:
    sent: list[Any] = []
    return Session(DEVICE, backend, sent.append), sent


def bench_of(*counts: int) -> Bench:
    lists: Any = [[None] * count for count in counts]
    return Bench(PROBLEM, (), lists, [], None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("product_us", "sets", "passes"),
    [([10.0], (2,), [5]), ([12.0], (2,), [5]), ([10.1], (2,), [5]), ([1000.0], (2,), [1]),
     ([0.01], (3,), [170]),
     ([10.0, 25.0], (2, 1), [5, 4])],
)  # fmt: skip
def test_a_replay_fills_its_time_with_at_most_512_products(
    product_us: list[float], sets: tuple[int, ...], passes: list[int]
) -> None:
    session, bench = session_of(None)[0], bench_of(*sets)
    assert session.passes_of(product_us, bench, SETTINGS) == passes
    expected = sum(us * count * each for us, count, each in zip(product_us, passes, sets, strict=True))
    assert session.replay_seconds_of(product_us, passes, bench) == pytest.approx(expected * 1e-6)


@pytest.mark.parametrize(
    ("steady_ms", "throttled", "readings", "busy_ms", "is_steady"),
    [(0.0, True, [["cap"]], [30.0], False), (20.0, False, [[]], [30.0], False),
     (20.0, True, [[], []], [30.0, SETTLE_STEADY_MS], False),
     (20.0, True, [[], ["cap"]], [30.0, SETTLE_STEADY_MS], True),
     (20.0, False, [["cap"], ["cap"]], [30.0, SETTLE_STEADY_MS], True)],
)  # fmt: skip
def test_a_race_is_steady_if_clocks_are_lower_for_its_own_work(
    monkeypatch: pytest.MonkeyPatch,
    steady_ms: float, throttled: bool, readings: list[list[str]], busy_ms: list[float], is_steady: bool,
) -> None:  # fmt: skip
    busy: list[float] = []
    monkeypatch.setattr(own, "keep_busy", lambda replays, for_ms: busy.append(for_ms))
    session, sent = session_of(Planted(*readings))
    settings = replace(SETTINGS, settle_ms=30.0, steady_ms=steady_ms)
    assert session.settled([], settings, 0.25, throttled) == (
        {"throttle_reasons": readings[-1]}, is_steady
    )  # fmt: skip
    assert busy == busy_ms
    assert [step.device_seconds for step in sent[::2]] == [ms * 1e-3 + 0.5 for ms in busy_ms]
    assert {step.device_seconds for step in sent[1::2]} == {0.25}


def test_energy_is_metered_where_there_is_a_meter_and_a_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "metered_mj", lambda *_: 7.0)
    entry = Entry(3, CANDIDATE, None, 0.0, 1, 0.0)  # type: ignore[arg-type]
    for meter, wanted_ms, found in ((1.0, 5.0, 7.0), (None, 5.0, None), (1.0, 0.0, None), (0.0, 5.0, 7.0)):
        session, sent = session_of(Planted(energy_mj=meter))
        assert session.energy_mj_of(entry, replace(SETTINGS, energy_ms=wanted_ms)) == found
        assert [(step.job, step.stage) for step in sent] == [(3, "launch")] * (found is not None)


def test_an_error_is_a_failure_unless_the_device_is_lost() -> None:
    error = RuntimeError("one\ntwo")
    assert session_of(Planted())[0].failed(CANDIDATE, "load", error) == Failure(CANDIDATE, "load", "one")
    with pytest.raises(Lost, match=r"^one$") as raised:
        session_of(Planted(alive=False))[0].failed(CANDIDATE, "load", error)
    assert raised.value.stage == "crash"


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (RuntimeError("an error\nof torch"), Broken(5, "an error")),
        (Lost("timeout", "gone"), Broken(5, "gone", "timeout")),
    ],
)
def test_requests_are_answered_until_the_device_is_lost(
    monkeypatch: pytest.MonkeyPatch, error: Exception, broken: Broken
) -> None:
    session, sent = session_of(None)
    raised = iter([None, error])

    def measure(request: Measure) -> None:
        session.announce(5, "launch")
        if (error := next(raised)) is not None:
            raise error

    monkeypatch.setattr(session, "measure", measure)
    monkeypatch.setattr(session, "discover", lambda problem: [CANDIDATE])
    again = Measure(PROBLEM, (), SETTINGS)
    requests = iter([again, Discover(PROBLEM), "something else", again, again])
    session.serve(lambda: next(requests))
    first, second, last = (each for each in sent if not isinstance(each, Step))
    assert isinstance(first, Done) and first.value is None
    assert second == Done([CANDIDATE], second.seconds) and set(second.seconds) == {"library"}
    assert last == broken and [*requests] == [again], "nothing is answered after that"
