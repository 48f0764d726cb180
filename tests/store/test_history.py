"""History: who was the record when, where a search may begin, and what a new toolchain changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.store.test_database import DEVICE, FINGERPRINT, KERNEL, PROBLEM, measurement
from tests.support.commands import printed as run
from tunegemm.describe.device import Device
from tunegemm.describe.space import Candidate
from tunegemm.measure.evidence import QUALIFYING, STEADY_FINAL, leaders
from tunegemm.measure.outcome import Measurement
from tunegemm.store import Database, Record
from tunegemm.store.history import Change, changes, compare, related, seeds

OTHER = KERNEL.with_launch(swizzle_size=8)
ROUNDS = 8


def raced(
    ratio: float, candidate: Candidate = KERNEL, scale: float = 1.0, noise: float = 0.002
) -> Measurement:
    """Rounds that wobble by 0.1 %, as a quiet GPU's do."""
    baseline = tuple(scale * 210 * (1 + 0.001 * ((7 * i) % 5 - 2) / 2) for i in range(ROUNDS))
    samples = tuple(time / ratio * (1 + 0.001 * ((3 * i) % 5 - 2) / 2) for i, time in enumerate(baseline))
    return Measurement(candidate, samples, baseline, 1e-3, noise)


def under(**facts: str) -> Device:
    return replace(DEVICE, fingerprint=replace(FINGERPRINT, **facts))


class TestRecordsOverTime:
    def test_every_record_that_ever_was_is_kept(self, database: Database) -> None:
        database.publish(PROBLEM, DEVICE, measurement(1.01), label="a")
        database.publish(PROBLEM, DEVICE, measurement(1.00, OTHER), label="slower")
        database.publish(PROBLEM, DEVICE, measurement(1.08, OTHER), label="b")
        database.confirm(PROBLEM, DEVICE, measurement(1.05), label="a")
        found = database.history(PROBLEM)
        assert [(round(c.ratio, 2), c.confirmed) for c in found] == [
            (1.01, False), (1.08, False), (1.05, True),
        ]  # fmt: skip
        assert [c.chosen_at for c in found] == sorted(c.chosen_at for c in found)
        assert database.records()[0].ratio == found[-1].ratio

    def test_a_record_of_older_sources_yields_to_a_search_but_a_confirmed_one_does_not(
        self, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tunegemm.store.codec.kernel_source_hash", lambda family: "older")
        database.publish(PROBLEM, DEVICE, measurement(1.3))
        monkeypatch.undo()
        assert database.records()[0].is_outdated
        database.publish(PROBLEM, DEVICE, measurement(1.1))
        assert database.records()[0].ratio == pytest.approx(1.1) and not database.records()[0].is_outdated
        monkeypatch.setattr("tunegemm.store.codec.kernel_source_hash", lambda family: "older")
        database.confirm(PROBLEM, DEVICE, measurement(1.2))
        monkeypatch.undo()
        database.publish(PROBLEM, DEVICE, measurement(1.15))
        assert database.records()[0].ratio == pytest.approx(1.2) and not database.records()[0].is_outdated


class TestSeeds:
    def test_leaders_of_other_toolchains_nearest_first(self, database: Database) -> None:
        names = ("same", "patched", "minor", "h100", "a100")
        candidates = {name: KERNEL.with_launch(swizzle_size=i) for i, name in enumerate(names)}
        devices = {
            "same": DEVICE, "patched": under(driver="580.1.1"), "minor": under(cutlass_dsl="4.7.0"),
            "h100": under(device_name="NVIDIA H100 NVL"),
            "a100": under(device_name="NVIDIA A100", capability="8.0"),
        }  # fmt: skip
        for name in ("h100", "a100", "minor", "patched", "same"):
            database.confirm(PROBLEM, devices[name], measurement(1.1, candidates[name]))
        assert seeds(database, PROBLEM, FINGERPRINT) == [
            candidates["patched"], candidates["minor"], candidates["h100"],
        ]  # fmt: skip

    def test_records_of_the_same_product_most_alike_first(self, database: Database) -> None:
        fused = replace(PROBLEM, epilogue="silu")
        named = {
            "half": (replace(PROBLEM, in_dtype="fp16", out_dtype="fp16"), DEVICE),
            "h100": (PROBLEM, under(device_name="NVIDIA H100 NVL")),
            "a100": (PROBLEM, under(device_name="NVIDIA A100", capability="8.0")),
            "wider": (replace(PROBLEM, in_dtype="tf32", out_dtype="fp32"), DEVICE),
            "transposed": (replace(PROBLEM, b_major="n"), DEVICE),
            "longer": (replace(PROBLEM, k=2 * PROBLEM.k), DEVICE),
            "relu": (replace(PROBLEM, epilogue="relu"), DEVICE),
            "plain": (PROBLEM, DEVICE),
            "itself": (fused, under(torch="2.10.0")),
        }
        candidates = {name: KERNEL.with_launch(swizzle_size=i) for i, name in enumerate(named)}
        for name, (problem, device) in named.items():
            database.confirm(problem, device, measurement(1.1, candidates[name]))
        found = related(database.records(), fused, FINGERPRINT)
        assert found == [candidates[name] for name in ("itself", "plain", "relu", "half", "h100")]

    def test_what_had_the_chip_to_itself_counts_more_than_a_race_at_shared_clocks(
        self, database: Database
    ) -> None:
        hungry, lucky, best = (KERNEL.with_launch(swizzle_size=size) for size in (1, 2, 4))
        for candidate, ratio, method in (
            (best, 1.02, STEADY_FINAL), (hungry, 1.06, "race"), (hungry, 0.97, STEADY_FINAL),
            (lucky, 1.04, QUALIFYING), (OTHER, 1.05, "race"),
        ):  # fmt: skip
            database.publish(PROBLEM, DEVICE, measurement(ratio, candidate), method=method)
        found = [
            (e.candidate, round(e.measurement.ratio, 2)) for e in leaders(database.measurements(PROBLEM))
        ]
        assert found == [(best, 1.02), (hungry, 0.97), (lucky, 1.04), (OTHER, 1.05)]


class TestChanges:
    def changes(self, database: Database) -> list[Change | None]:
        return changes(database.history(PROBLEM, samples=True))

    def test_each_is_compared_with_the_one_before(self, database: Database) -> None:
        for ratio, kernel in ((1.05, KERNEL), (1.01, OTHER), (1.08, KERNEL)):
            database.confirm(PROBLEM, DEVICE, raced(ratio, kernel))
        found = [change and change.verdict for change in self.changes(database)]
        assert found == [None, "slower", "faster"]

    def test_long_turns_are_compared_with_long_turns(self, database: Database) -> None:
        def alone(ratio: float) -> Measurement:
            return replace(raced(ratio), telemetry={"turn_ms": 160.0})

        database.confirm(PROBLEM, DEVICE, raced(1.05))
        database.confirm(PROBLEM, DEVICE, alone(1.04))
        assert self.changes(database) == [None, None], "of shared clocks before"
        assert [entry.method for entry in database.measurements(PROBLEM)] == ["final", STEADY_FINAL]
        database.confirm(PROBLEM, DEVICE, alone(1.0))
        found = self.changes(database)[-1]
        assert found is not None and found.verdict == "slower"
        assert found.change == pytest.approx(0.04, abs=0.005)


class TestCommands:
    SHAPE = ("--shape", "4096x4096x4096")

    def test_history(self, database: Database, path: Path) -> None:
        database.confirm(PROBLEM, DEVICE, raced(1.15), label="pp128x256")
        out, _ = run("history", *self.SHAPE, "--db", path)
        assert "pp128x256" in out and FINGERPRINT.digest in out
        database.confirm(PROBLEM, under(driver="580.200"), raced(1.05))
        assert run("history", *self.SHAPE, "--db", path)[0].rstrip().endswith("]  slower (+9.5 % by ratio)")
        first, second = json.loads(run("history", *self.SHAPE, "--db", path, "--json")[0])
        assert first["label"] == "pp128x256" and first["change"] is None
        assert second["change"]["verdict"] == "slower"
        _, err = run("history", "--shape", "8x8x8", "--db", path, code=2)
        assert err.count("\n") == 1 and "no record of 8x8x8" in err

    def test_exchange(self, database: Database, path: Path, tmp_path: Path) -> None:
        database.confirm(PROBLEM, DEVICE, raced(1.05))
        export, other, into = (tmp_path / name for name in ("export.json", "other.sqlite", "all.sqlite"))
        run("db", "export", "--out", export, "--db", path)
        assert "1 rows added, 0 known already, 0 left out" in run("db", "import", export, "--db", other)[0]
        assert "1 rows added, 1 known already" in run("db", "merge", path, other, "--into", into)[0]
        run("db", "export", "--records", tmp_path / "records", "--db", into)
        assert (tmp_path / "records" / "NVIDIA-H200.json").exists()
        run("db", "layers")
        for arguments, named in (
            (("db", "export"), "needs --out FILE"),
            (("db", "export", "--out", "/nowhere/x.json", "--db", path), "choose another --out"),
        ):
            _, err = run(*arguments, code=2)
            assert named in err and err.count("\n") == 1, err


def test_intervals_that_touch_are_no_change() -> None:
    """Even where the medians differ by more than the noise; a little further apart they are one."""

    def record(*samples: float) -> Any:
        fingerprint = replace(FINGERPRINT, torch=str(samples), cuda="13.0")
        return Record(
            PROBLEM, KERNEL, fingerprint, noise=0.01, samples_us=samples, baseline_us=(12.0,) * len(samples)
        )

    first = record(*[10.0] * 5)
    for least, verdict in ((10.0, "same"), (10.01, "slower")):
        after = record(least, 11.0, 12.0, 13.0, 13.0)
        assert compare(first, after).verdict == verdict
        assert compare(after, first).verdict == ("same" if verdict == "same" else "faster")


@pytest.mark.parametrize(
    ("before", "after", "noise", "verdict"),
    [
        (1.5, 1.0, 0.5, "same"), (1.5, 1.0, 0.49, "slower"), (1.0, 2.0, 0.5, "same"),
        (1.0, 2.0, 0.49, "faster"),
        (1.0, 1.0, 0.0, "same"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("library", ["2.13", "2.14"])
def test_a_change_is_one_beyond_the_noise(
    before: float, after: float, noise: float, verdict: str, library: str
) -> None:
    def record(ratio: float, torch: str) -> Any:
        fingerprint = replace(FINGERPRINT, torch=torch, cuda="13.0")
        return Record(
            PROBLEM, KERNEL, fingerprint, noise=noise, samples_us=(12.0 / ratio,) * 8, baseline_us=(12.0,) * 8
        )

    found = compare(record(before, "2.13"), record(after, library))
    assert (found.verdict, found.by) == (verdict, "ratio" if library == "2.13" else "time")
    assert found.change == pytest.approx(before / after - 1)
