"""Sweeps are written, read back the same, and answer like a measuring worker. The numbers are made up."""

import json
import lzma
import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from fit.sweep_files import write_sweep
from tunegemm.describe.architectures import PARTS
from tunegemm.describe.device import Device, Fingerprint, device_from_part
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DeviceError
from tunegemm.measure.outcome import Failure, Measurement, Outcome
from tunegemm.measure.replay import ReplayDevice, open_replay, replay_names
from tunegemm.measure.settings import Job

PROBLEM = Problem.parse("512x6144x4096")
WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def gpu(sm_count: int = 132) -> Device:
    fingerprint = Fingerprint(
        "NVIDIA H200", sm_count, "9.0", "", sm_count, "580.1", "13.0", "2.11", "4.8.1", "3.6"
    )
    return device_from_part("cuda:0", replace(PARTS["h200"], sm_count=sm_count), fingerprint)


def tile(tile_n: int, swizzle: int = 1) -> Candidate:
    return Candidate.make(
        "cute_sm90", {"tile_m": 128, "tile_n": tile_n, "multicast": True}, {"swizzle_size": swizzle}
    )


def library(**params: int) -> Candidate:
    return Candidate.make("cublaslt", params)


def outcomes() -> list[Outcome]:
    first, second = (40.0, 41.25, 40.5), (44.125, 43.0, 44.0)
    return [
        Measurement(
            tile(128), (38.0, 39.5, 38.25), first, 0.0021, 0.004, {"sm_clock_mhz": 1755, "power_w": 640.5}
        ),
        Failure(tile(256), "compile", "ptxas: C7510 wgmma serialized"),
        Measurement(library(algo=7, split_k=2), (39.0, 40.0, 39.5), first, 0.0019, 0.004, {}),
        Measurement(
            tile(128, swizzle=8), (41.0, 41.5, 41.75), second, 0.0021, 0.007, {"throttle": ["sw_power_cap"]}
        ),
        Measurement(library(algo=3), (44.0, 43.125, 44.0), second, 0.0, 0.007, {}),
        Failure(tile(192), "timeout", "no answer in 10 s"),
    ]


@pytest.fixture
def replay(tmp_path: Path) -> ReplayDevice:
    write_sweep(tmp_path, "h200", gpu(), PROBLEM, outcomes(), recorded_at=WHEN, command="tunegemm tune")
    return open_replay("h200", root=tmp_path)


def test_round_trip(replay: ReplayDevice) -> None:
    sweep = replay.sweep(PROBLEM)
    assert set(sweep.outcomes) == {outcome.candidate for outcome in outcomes()}
    for written in outcomes():
        read = sweep.outcomes[written.candidate]
        if isinstance(written, Failure):
            assert read == written
            continue
        assert isinstance(read, Measurement)
        assert read == written  # telemetry is not compared, so:
        assert read.telemetry == written.telemetry | {
            "source": "replayed",
            "recorded_at": "2026-01-02T03:04:05+00:00",
        }
        assert read.ratio == written.ratio
    assert sweep.fingerprint == gpu().fingerprint


def test_thousands_of_rows_stay_small(tmp_path: Path) -> None:
    """2,000 candidates of ten rounds in under 150 kB."""
    rows: list[Outcome] = []
    for number in range(2000):
        noise = [math.sin(number * 37.0 + i) for i in range(20)]
        samples = tuple(40 + number / 100 + noise[i] for i in range(10))
        baseline = tuple(40 + noise[number // 40 % 10 + i] for i in range(10))
        rows.append(Measurement(tile(number), samples, baseline, 0.002, 0.004))
    path = write_sweep(tmp_path, "h200", gpu(), PROBLEM, rows, recorded_at=WHEN, command="x")
    assert path.stat().st_size < 150_000
    read = open_replay("h200", root=tmp_path).sweep(PROBLEM).outcomes
    assert len(read) == 2000
    assert read[tile(1234)].median_us == pytest.approx(rows[1234].median_us, abs=0.001)


def test_problems_come_from_file_names(tmp_path: Path) -> None:
    problems = [
        PROBLEM,
        Problem.parse("64x64x64x5", dtype="fp16", layout="nt"),
        Problem.parse("64x128x64", out_dtype="fp32"),
        replace(Problem.parse("64x128x64"), out_major="m"),
    ]
    for problem in problems:
        write_sweep(tmp_path, "h200", gpu(), problem, outcomes(), recorded_at=WHEN, command="x")
    replay = open_replay("h200", root=tmp_path)
    assert replay.problems() == sorted(problems)
    assert all(replay.swept(problem) for problem in problems)


def test_measures_like_the_worker(replay: ReplayDevice) -> None:
    jobs = [Job(tile(256)), Job(tile(128, swizzle=8)), Job(tile(128))]
    results = list(replay.measure(PROBLEM, jobs, settings=None))
    assert [result.candidate for result in results] == [job.candidate for job in jobs]
    assert isinstance(results[0], Failure)
    assert [result.telemetry["source"] for result in results[1:]] == ["replayed", "replayed"]
    assert set(replay.discover(PROBLEM)) == {library(algo=7, split_k=2), library(algo=3)}
    assert replay.swept(PROBLEM) == {outcome.candidate for outcome in outcomes()}
    assert replay.swept(replace(PROBLEM, m=64)) == frozenset()


def test_what_was_not_recorded_is_refused(replay: ReplayDevice) -> None:
    with pytest.raises(DeviceError, match=r"swizzle_size=4 was not recorded on replay:h200.* has 6 others"):
        list(replay.measure(PROBLEM, [Job(tile(128, swizzle=4))]))
    with pytest.raises(DeviceError, match=r"64x64x64 bf16 tn was not recorded.*512x6144x4096 bf16 tn"):
        replay.sweep(Problem.parse("64x64x64"))


def test_unknown_names_list_the_known(replay: ReplayDevice, tmp_path: Path) -> None:
    assert replay_names(tmp_path) == ["h200"]
    with pytest.raises(DeviceError, match="'replay:h100': no such recording; recorded: h200"):
        open_replay("h100", root=tmp_path)
    with pytest.raises(DeviceError, match="there are no recordings; use model:h200"):
        open_replay("h200", root=tmp_path / "empty")
    with pytest.raises(DeviceError, match="no such recording"):
        open_replay("../h200", root=tmp_path)


def _edited(change) -> bytes:
    def edit(content: bytes) -> bytes:
        data = json.loads(lzma.decompress(content))
        change(data)
        return lzma.compress(json.dumps(data).encode())

    return edit


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:40] + bytes(8) + content[48:],
        lambda content: b"version https://git-lfs.github.com/spec/v1\n",
        lambda content: lzma.compress(b"not json"),
        lambda content: lzma.compress(b"[1, 2]"),
        _edited(lambda data: data.update(format=4)),
        _edited(lambda data: data.update(problem="1x1x1-bf16-tn")),
        _edited(lambda data: data["measured"].pop("evidence")),
        _edited(lambda data: data["measured"]["samples_us"].pop()),
        _edited(lambda data: data["measured"]["samples_us"][0].pop()),
        _edited(lambda data: data["measured"]["samples_us"].__setitem__(0, ["a", "b", "c"])),
        _edited(lambda data: data["measured"]["row"].__setitem__(0, 99)),
        _edited(lambda data: data["measured"]["row"].__setitem__(0, data["measured"]["row"][1])),
        _edited(lambda data: data["failed"]["stage"].__setitem__(0, "misc")),
        _edited(lambda data: data["candidates"][2]["compile"]["tile_n"].pop()),
        _edited(lambda data: data["candidates"][2]["compile"].pop("tile_n")),
        _edited(lambda data: data["fingerprint"].pop("driver")),
        _edited(lambda data: data["candidates"][0].update(count=10**6)),
    ],
)  # fmt: skip
def test_a_damaged_sweep_is_named(replay: ReplayDevice, damage) -> None:
    path = next(replay.folder.glob("*.xz"))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DeviceError, match=r"512x6144x4096-bf16-tn\.json\.xz: not a readable sweep") as caught:
        replay.sweep(PROBLEM)
    assert "\n" not in str(caught.value)


def test_damage_of_the_rest_of_the_folder_is_named(replay: ReplayDevice) -> None:
    (replay.folder / "notes.json.xz").write_bytes(b"")
    with pytest.raises(DeviceError, match=r"notes\.json\.xz: not a sweep"):
        replay.problems()
    (replay.folder / "device.json").write_text('{"name": "x"}')
    with pytest.raises(DeviceError, match=r"device\.json: not a readable device"):
        open_replay("h200", root=replay.folder.parent)


def test_only_a_real_device_is_recorded(tmp_path: Path) -> None:
    for spec in ("model:h200", "replay:h200"):
        with pytest.raises(DeviceError, match=f"{spec} measures nothing"):
            write_sweep(
                tmp_path,
                "h200",
                replace(gpu(), spec=spec),
                PROBLEM,
                outcomes(),
                recorded_at=WHEN,
                command="x",
            )
    assert not list(tmp_path.rglob("*.xz"))


def test_a_sweep_without_a_time_zone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no time zone"):
        write_sweep(
            tmp_path, "h200", gpu(), PROBLEM, outcomes(), recorded_at=WHEN.replace(tzinfo=None), command="x"
        )


def test_the_fastest_of_a_family_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = open_replay("h200")

    def outcome(family: str, tile: int, ratio: float | None) -> Measurement | Failure:
        candidate = Candidate.make(family, {"tile_m": tile} if tile else {})
        if ratio is None:
            return Failure(candidate, "load", "no")
        return Measurement(candidate, (1.0,), (ratio,), 0.0, 0.0)

    outcomes = [outcome("a", 1, 1.1), outcome("b", 2, 1.5), outcome("a", 3, 1.2), outcome("a", 4, None),
                outcome("library", 0, 1.0)]  # fmt: skip
    sweep = SimpleNamespace(outcomes={each.candidate: each for each in outcomes})
    monkeypatch.setattr(ReplayDevice, "sweep", lambda *_: sweep)
    assert [each["tile_m"] for each in replay.fastest_first(PROBLEM, "a")] == [3, 1]
    assert [each.family for each in replay.discover(PROBLEM)] == ["library"]


def test_every_shipped_sweep_can_be_read() -> None:
    for replay in map(open_replay, replay_names()):
        assert replay.problems()
        for problem in replay.problems():
            assert any(
                isinstance(outcome, Measurement) for outcome in replay.sweep(problem).outcomes.values()
            )
