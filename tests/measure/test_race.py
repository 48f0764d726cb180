"""Order, pipelining and dropping of rounds, over replays whose device is a list."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tunegemm.measure import race as own
from tunegemm.measure.race import SteadyState, groups_of, is_in_doubt, leads, race, steady_race
from tunegemm.measure.settings import FINAL, QUICK_FINAL, SCREEN, RaceSettings


class Device:
    """Keeps what is in flight; at most two, and nothing twice."""

    def __init__(self, times: list[float]) -> None:
        self.times, self.in_flight, self.started = times, [], []
        self.waited: list[int] = []

    def replays(self) -> list[Replay]:
        return [Replay(self, index) for index in range(len(self.times))]


class Replay:
    def __init__(self, device: Device, index: int) -> None:
        self.device, self.index = device, index

    def start(self, untimed: int = 0, timed: int = 1) -> None:
        assert self.index not in self.device.in_flight
        self.device.in_flight.append(self.index)
        self.device.started.append(self.index)
        assert len(self.device.in_flight) <= 2

    def finish(self) -> float:
        assert self.device.waited[-1] == self.index, "the one waited for was not announced"
        assert self.device.in_flight.pop(0) == self.index
        return self.device.times[self.index]


def run(times: list[float], settings: RaceSettings, kept: int = 2) -> tuple[Device, list[list[float]]]:
    device = Device(times)
    samples = race(device.replays(), kept, settings, device.waited.append)
    assert not device.in_flight
    return device, samples


@pytest.mark.parametrize("count", [2, 3, 7])
def test_every_replay_once_a_round(count: int) -> None:
    settings = RaceSettings(rounds=10, min_replay_ms=1, race_after=10, race_margin=0.5)
    device, samples = run([float(i + 1) for i in range(count)], settings, kept=count)
    assert samples == [[float(i + 1)] * 10 for i in range(count)]
    rounds = [device.started[1 + r * count : 1 + (r + 1) * count] for r in range(10)]
    assert all(sorted(order) == list(range(count)) for order in rounds)
    if count > 2:
        assert len({tuple(order) for order in rounds}) > 1, "the order changes"


def test_the_same_seed_gives_the_same_order() -> None:
    settings = RaceSettings(rounds=5, min_replay_ms=1, race_after=5, race_margin=0.5, seed=3)
    assert run([1.0] * 6, settings)[0].started == run([1.0] * 6, settings)[0].started


def test_the_slow_drop_out_and_the_baseline_stays() -> None:
    settings = RaceSettings(rounds=12, min_replay_ms=1, race_after=3, race_margin=0.05)
    _, samples = run([130.0, 130.0, 100.0, 101.0, 120.0, 300.0], settings)
    counts = [len(s) for s in samples]
    assert counts == [12, 12, 12, 12, 3, 3], "after three rounds"


def test_one_replay_alone() -> None:
    _, samples = run([5.0], RaceSettings(rounds=3, min_replay_ms=1, race_after=1, race_margin=0.1), kept=1)
    assert samples == [[5.0] * 3]


def test_a_fault_is_blamed_on_the_one_waited_for() -> None:
    device = Device([1.0] * 5)
    replays = device.replays()

    def fault() -> float:
        raise RuntimeError("an illegal memory access was encountered")

    replays[3].finish = fault  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        race(replays, 2, SCREEN, device.waited.append)
    assert device.waited[-1] == 3


class Chip:
    """At its power cap: the clock follows the power that was drawn lately, a fifth of the way per replay."""

    def __init__(self) -> None:
        self.power = 1.0


class Draws:
    """A replay of so many cycles at so much power."""

    def __init__(self, chip: Chip, cycles: float, power: float) -> None:
        self.chip, self.cycles, self.power = chip, cycles, power
        self.times: list[float] = []

    def start(self, untimed: int = 0, timed: int = 1) -> None:
        times = []
        for _ in range(untimed + timed):
            self.chip.power += (self.power - self.chip.power) / 5
            times.append(self.cycles * self.chip.power)
        self.times.append(sum(times[untimed:]) / timed)

    def finish(self) -> float:
        return self.times.pop(0)


def test_steady_state_timing_gives_each_its_own_clocks() -> None:
    """Fewer cycles for more power: ahead in interleaved timing, behind in steady state."""

    def ratio(steady: bool) -> float:
        chip = Chip()
        replays = [Draws(chip, 100.0, 1.0), Draws(chip, 95.0, 1.1)]
        runners = [SteadyState(replay, 25, 25) for replay in replays] if steady else replays
        settings = RaceSettings(rounds=9, min_replay_ms=1, race_after=10, race_margin=0.5)
        baseline, own = race(runners, 2, settings, lambda _: None)
        return statistics.median(a / b for a, b in zip(baseline, own, strict=True))

    assert ratio(steady=False) > 1.0
    assert ratio(steady=True) == pytest.approx(100 / (95 * 1.1), rel=0.01)


def test_rounds_of_steady_state_timing_are_few() -> None:
    for preset in (FINAL, QUICK_FINAL):
        assert 2 <= len(preset.steady_groups) < preset.rounds
        assert 900 <= preset.steady_ms <= 1100, "a swing of the power controller"
        assert preset.settle_again == 1, "what is stored is of clocks that settled"
    assert SCREEN.steady_ms == 0


STEADY = RaceSettings(
    rounds=99, min_replay_ms=1, race_after=1, race_margin=0.01, steady_ms=960, steady_spread=0.02,
    steady_groups=(4,) * 7,
)  # fmt: skip


class Turn(Replay):
    """A replay of a millisecond, which says when it was timed and for how long."""

    def start(self, untimed: int = 0, timed: int = 1) -> None:
        super().start(untimed, timed)
        self.device.started[-1] = (self.index, untimed, timed)


def run_steady(
    times: list[float], settings: RaceSettings = STEADY, kept: int = 2
) -> tuple[Device, list[list[float]]]:
    device = Device(times)
    turns = [(Turn(device, index), 1e-3) for index in range(len(times))]
    samples = steady_race(turns, kept, settings, device.waited.append)
    assert not device.in_flight
    return device, samples


@pytest.mark.parametrize(
    ("count", "most", "sizes"),
    [
        (8, 4, [4, 4]),
        (7, 4, [3, 4]),
        (5, 4, [2, 3]),
        (4, 4, [4]),
        (9, 4, [3, 3, 3]),
        (2, 1, [1, 1]),
        (8, 8, [8]),
    ],
)
def test_a_round_lasts_as_long_for_each_group(count: int, most: int, sizes: list[int]) -> None:
    """In it all take their turns three times in one order; or one has a turn that lasts all of it."""
    settings = replace(STEADY, steady_groups=(most,))
    device, samples = run_steady([float(i + 1) for i in range(count)], settings, kept=count)
    assert samples == [[float(i + 1)] for i in range(count)]
    started, seen = list(device.started), set()
    for size in sizes:
        times = 3 if size > 1 else 1
        group, started = started[: size * times], started[size * times :]
        order = [index for index, *_ in group]
        assert order == order[:size] * times and len(set(order)) == size
        assert sum(untimed + timed for _, untimed, timed in group) == pytest.approx(
            960 * math.ceil(size / 4), abs=size * times
        )
        assert all(
            untimed == pytest.approx(min(80, (untimed + timed) / 2), abs=1) for _, untimed, timed in group
        )
        seen |= set(order)
    assert not started and seen == set(range(count))


def test_a_swing_of_the_clocks_changes_no_order() -> None:
    """As a power controller's: 5 %, with a period of a round, and half of that after each."""

    class Swinging(Turn):
        def finish(self) -> float:
            _, untimed, timed = next(one for one in reversed(self.device.started) if one[0] == self.index)
            started = self.device.started
            before = sum(u + t for _, u, t in started[: started.index((self.index, untimed, timed))])
            super().finish()
            started[started.index((self.index, untimed, timed))] = (-1, untimed, timed)
            at = [(before + untimed + ms) / 960 for ms in range(timed)]
            return statistics.fmean(
                self.device.times[self.index] * (1 + 0.05 * 0.5**t * math.cos(2 * math.pi * t)) for t in at
            )

    def spread(steady_groups: tuple[int, ...], count: int = 8) -> float:
        device = Device([100.0] * count)
        turns = [(Swinging(device, index), 1e-3) for index in range(count)]
        settings = replace(STEADY, steady_groups=steady_groups)
        samples = steady_race(turns, count, settings, device.waited.append)
        return statistics.pstdev(one for (one,) in samples)

    assert spread((1,)) < 0.3
    assert spread((4,)) < 0.8
    assert spread((1,), count=2) < spread((2,), count=2) < 1.0


def test_in_steady_state_the_slow_go_after_each_round() -> None:
    """More than 3 % after one round, 2.4 % after two, 1.8 % after all."""
    _, samples = run_steady([103.0, 103.0, 100.0, 100.5, 102.5, 104.0])
    assert [len(one) for one in samples] == [7, 7, 7, 7, 2, 1]
    _, of_two = run_steady([103.0, 103.0, 100.0, 100.5, 100.2, 104.0], replace(STEADY, steady_left=2))
    assert [len(one) for one in of_two] == [7, 7, 7, 1, 7, 1], "the fastest"


class Noisy(Turn):
    """Another time each round, in turn."""

    def finish(self) -> float:
        self.turns = getattr(self, "turns", -1) + 1
        super().finish()
        return [102.5, 99.0, 99.0, 99.0, 106.0, 99.0, 99.0][self.turns // 3]


def test_in_steady_state_one_bad_round_is_no_reason_to_go() -> None:
    """Two rounds of a kernel differ by some 2 %: the spread bears that, the median what is worse later."""
    device = Device([103.0, 103.0, 100.0, 0.0])
    turns = [(one(device, index), 1e-3) for index, one in enumerate([Turn, Turn, Turn, Noisy])]
    samples = steady_race(turns, 2, STEADY, device.waited.append)
    assert [len(one) for one in samples] == [7] * 4


@pytest.mark.parametrize("rivals", [[130.0, 150.0], []])
def test_in_steady_state_the_last_one_ends_the_race_after_two_rounds(rivals: list[float]) -> None:
    _, samples = run_steady([103.0, 103.0, 100.0, *rivals])
    assert [len(one) for one in samples[:3]] == [2, 2, 2]
    assert [len(one) for one in samples[3:]] == [1] * len(rivals)
    _, alone = run_steady([103.0, 103.0])
    assert [len(one) for one in alone] == [2, 2], "torch.mm itself"


def test_a_final_race_is_longer_and_stricter_than_a_screen() -> None:
    assert SCREEN.rounds < FINAL.rounds and FINAL.race_margin < SCREEN.race_margin


@pytest.mark.parametrize(
    ("replay_ms", "steady_ms", "untimed", "timed"),
    [
        (1000.0, 240.0, 1, 1),  # at least two
        (120.0, 240.0, 1, 1),
        (80.0, 240.0, 1, 2),
        (10.0, 240.0, 8, 16),
        (10.1, 240.0, 8, 16),
        (9.99, 240.0, 9, 16),
        (1.0, 60.0, 30, 30),  # never more than half
    ],
)
def test_replays_that_fill_a_turn(replay_ms: float, steady_ms: float, untimed: int, timed: int) -> None:
    found = SteadyState.of(None, replay_ms * 1e-3, steady_ms)  # type: ignore[arg-type]
    assert (found.untimed, found.timed) == (untimed, timed)


def test_who_may_be_the_fastest() -> None:
    settings = replace(FINAL, race_margin=0.25, steady_spread=0.0, steady_left=2)
    samples = [[100.0], [125.0], [124.0], [150.0], [112.0]]
    assert own.may_be_fastest([], samples, settings) == []
    assert own.may_be_fastest([0, 3], samples, settings) == [0]
    assert own.may_be_fastest([0, 1, 3], samples, settings) == [0, 1], "at the margin"
    assert own.may_be_fastest([0, 1, 2, 4], samples, settings) == [0, 4], "the nearest"
    wide = replace(settings, steady_spread=0.5)  # over the root of four rounds
    assert own.may_be_fastest([0, 3], [[100.0] * 4, [], [], [150.0] * 4], wide) == [0, 3]
    assert own.may_be_fastest([0, 3], [[100.0] * 4, [], [], [150.1] * 4], wide) == [0]


def test_survivors_compare_by_the_rounds_that_both_have() -> None:
    settings = replace(FINAL, race_margin=0.01, confidence=0.5)
    slow, lucky = [110.0] * 6, [90.0] * 5 + [200.0]
    assert own.survivors([0, 1, 2], 1, [slow, slow, lucky], settings) == [0, 2], "the baseline stays"
    assert own.survivors([0, 1, 2], 0, [slow, slow, lucky], settings) == [2]
    assert own.survivors([0, 1], 0, [[], []], settings) == [0, 1]
    assert own.survivors([0, 1], 0, [[], lucky], settings) == [0, 1], "it has no round yet"
    assert own.survivors([0, 1], 0, [[90.5], [90.0, 50.0, 50.0]], settings) == [0, 1]
    assert own.survivors([0, 1], 0, [[91.5], [90.0, 95.0, 95.0]], settings) == [0, 1], "one leads by luck"
    assert own.survivors([0, 1], 0, [[96.0], [90.0, 95.0, 95.0]], settings) == [1]


@pytest.mark.parametrize(
    ("times", "least", "found"),
    [([[10.0, 10.0], [10.0]], 0.0, []), ([[10.0], [8.0]], 0.0, [0.25]), ([[10.0], [8.0]], 0.25, []),
     ([[10.0], [8.0], [16.0]], -1.0, [0.25, -0.375])],
)  # fmt: skip
def test_leads_over_the_baseline_that_exceed_a_limit(
    times: list[list[float]], least: float, found: list[float]
) -> None:
    assert leads(range(len(times)), 1, times, least) == pytest.approx(found)
    assert leads([0, 2], 1, [[10.0], [1.0], [8.0]], 0.0) == pytest.approx([0.25]), "those that remain"
    assert leads([0, 1, 2], 2, [[12.0], [8.0], [8.0]], 0.0) == pytest.approx([0.25]), (
        "of two captures the mean"
    )


@pytest.mark.parametrize(
    ("doubt", "own", "is_open"),
    [((), 8.0, False), ((0.0, 0.25), 8.0, False), ((0.0, 0.26), 8.0, True), ((0.25, 0.5), 8.0, False),
     ((0.24, 0.5), 8.0, True), ((0.0, 0.5), 10.0, False)],
)  # fmt: skip
def test_a_lead_between_two_limits_is_in_doubt(doubt: tuple[float, ...], own: float, is_open: bool) -> None:
    settings: Any = SimpleNamespace(steady_doubt=doubt)
    assert is_in_doubt([0, 1], 1, [[10.0], [own]], settings) == is_open


def test_groups_are_few_and_of_about_equal_size() -> None:
    for count, most in itertools.product(range(1, 20), range(1, 7)):
        groups = groups_of(range(count), most)
        sizes = list(map(len, groups))
        assert [item for group in groups for item in group] == list(range(count))
        assert len(groups) == math.ceil(count / most) and max(sizes) - min(sizes) <= 1 and max(sizes) <= most
