"""Large products at the cap without a GPU: what is chosen can be launched, and sums find what was planted.

Its kernels are compiled where `make kernels` has not made them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import large_kernels, power_cap, power_kernels
from benchmarks.batch_invariance import of_kind
from benchmarks.power_kernels import SHAPES
from benchmarks.results import Results
from benchmarks.tables import power
from tests.support.processes import compile_workers
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError
from tunegemm.generate import energy, families, shortlist
from tunegemm.generate.artifacts import ArtifactStore
from tunegemm.generate.compile import CompilePool
from tunegemm.measure.race import Replay
from tunegemm.store import packs

PROBLEMS = [Problem.parse(shape) for shape in SHAPES]
#: Kernels of the list beside the records', so many that six launches of a product can be unlike.
LISTED = 14


@pytest.fixture(scope="module")
def device() -> Device:
    return find_device("model:h200")


@pytest.fixture(scope="module")
def compiled(device: Device, shared_folder: Path) -> Iterator[None]:
    """Kernels for large products, in a store: a checkout without `make kernels` has none."""
    records = [r for r in power_cap.read_shipped()[0] if r.problem in PROBLEMS]
    wanted = [families.completed(r.candidate) for r in records if r.candidate.family == "cute_sm90"]
    listed = [one for one in shortlist.listed() if one.family == "cute_sm90" and one["tile_m"] >= 128]
    wanted += [shortlist.launched(PROBLEMS[0], one) for one in listed[:LISTED]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEGEMM_CACHE_DIR", str(shared_folder / "large-kernels"))
        with CompilePool(ArtifactStore(), shipped=packs.shipped(), workers=compile_workers()) as pool:
            family = families.get("cute_sm90")
            keys = [family.kernel_key(PROBLEMS[0], one, device) for one in wanted]
            for future in [pool.submit("cute_sm90", key) for key in keys]:
                assert future.result().artifact is not None, future.result().failure
        yield


def assert_launchable(problem: Problem, candidates: list[Candidate], device: Device) -> None:
    for candidate in candidates:
        family = families.get(candidate.family)
        assert family.check(problem, candidate, device).runs, family.label(candidate)
        assert large_kernels.object_of(problem, candidate, device).is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("problem", PROBLEMS, ids=SHAPES)
def test_six_unlike_launches_of_a_product(problem: Problem, device: Device) -> None:
    chosen = power_kernels.pairs(problem, device)
    assert chosen.candidates == power_kernels.pairs(problem, device).candidates
    assert_launchable(problem, list(chosen.candidates), device)
    assert len({chosen.label(i) for i in range(power_kernels.KERNELS)}) == power_kernels.KERNELS
    assert chosen.mj[0] == large_kernels.launches(problem, device).mj.min() == chosen.mj.min()
    assert chosen.mj.max() <= power_kernels.MOST_MJ * chosen.mj.min()
    tiles = {(c["tile_m"], c["tile_n"]) for c in chosen.candidates}
    clusters = {(c.params.get("cluster_m", 1), c.params.get("cluster_n", 1)) for c in chosen.candidates}
    assert len(tiles) >= 4
    assert len(clusters) >= 2
    assert {c.params.get("schedule") for c in chosen.candidates} >= {"cooperative", "pingpong"}


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("problem", PROBLEMS, ids=SHAPES)
def test_candidates_have_the_record_and_the_fewest_joules(problem: Problem, device: Device) -> None:
    chosen = power_cap.candidates(problem, device)
    assert chosen == power_cap.candidates(problem, device)
    assert len(set(chosen)) == len(chosen) <= power_cap.STAGES[0].own
    assert_launchable(problem, chosen, device)
    assert power_kernels.pairs(problem, device).candidates[0] in chosen
    for record in power_cap.read_shipped()[0]:
        own = record.problem == problem and record.candidate.family == "cute_sm90"
        if own and record.fingerprint.device_name == device.fingerprint.device_name:
            assert families.completed(record.candidate) == chosen[0]


@pytest.mark.parametrize("kind", ["swiglu", "fp8"])
def test_other_kinds_take_what_ships_for_them(kind: str, device: Device) -> None:
    problem = of_kind("4096x28672x4096", kind)
    chosen = power_cap.candidates(problem, device)
    assert {one.kernel for one in chosen} >= set(shortlist.of_the_class(problem)), "and the product's record"
    assert len(chosen) >= 10


def test_a_kind_that_is_none_is_named() -> None:
    with pytest.raises(TunegemmError, match="--kinds fp5: use bf16"):
        of_kind("8x8x8", "fp5")


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_at_the_models_clock_and_time_the_prediction_is_the_models(device: Device) -> None:
    chosen = power_kernels.pairs(PROBLEMS[0], device)
    table = large_kernels.table_of(device)
    clock, us = float(chosen.steady.clock_mhz[0]), float(chosen.steady.us[0])
    told = power_kernels.predicted(PROBLEMS[0], chosen.take([0]), clock, us, table)
    assert told["predicted_mj"] == pytest.approx(chosen.mj[0], rel=1e-4)
    assert told["predicted_mj"] == pytest.approx(sum(told["terms_mj"].values()), rel=1e-4)
    watts = told["predicted_mj"] * 1e3 / us
    assert 0.9 * table.cap_w < watts <= table.cap_w  # the highest clock that fits
    # A higher clock at the same time costs the voltage's share, and device memory nothing.
    faster = power_kernels.predicted(PROBLEMS[0], chosen.take([0]), clock + 100, us, table)
    assert faster["predicted_mj"] > told["predicted_mj"]
    assert faster["terms_mj"]["dram"] == told["terms_mj"]["dram"]


def rows_of(part: float, noise: float) -> list[dict[str, Any]]:
    """Rows of a chip on which reads of L2 cost by a part more than the table says."""
    draw = random.Random(2)
    rows = []
    for number in range(60):
        terms = {
            "flops": draw.uniform(60, 64), "filled": draw.uniform(4, 7), "l2_read": draw.uniform(8, 24),
            "stored": draw.uniform(1, 4), "crossing": 2.0, "dram": draw.uniform(3, 8), "static": 13.0,
        }  # fmt: skip
        told = sum(terms.values())
        measured = (told + part * terms["l2_read"]) * draw.gauss(1, noise)
        rows.append(
            {
                "m": 4096, "n": 4096, "k": 64 * (number + 1), "label": f"k{number % 6}",
                "measured_mj": measured, "predicted_mj": told, "error": told / measured - 1,
                "terms_mj": terms, "clock_mhz": 1500.0, "power_w": 695.0, "us": 200.0,
                "predicted_us": 201.0, "torch_us": 210.0, "tflops": 700.0,
                "share_of_roof": None,
            }
        )  # fmt: skip
    return rows


def test_the_residuals_go_with_the_term_that_was_planted() -> None:
    found = power_kernels.summary(rows_of(part=0.3, noise=0.0))
    assert found["pairs"] == 60
    assert -0.08 < found["worst"] < found["mean"] < -0.02
    term = found["residuals"].pop("l2_read")
    assert term["part"] == pytest.approx(0.3, abs=1e-3)
    assert term["explains"] > 0.99
    assert found["residuals"].pop("rms_left") < 1e-4
    assert all(abs(other["part"]) < 1e-3 for other in found["residuals"].values())


def test_errors_count_as_within_five_percent() -> None:
    rows = rows_of(part=0.0, noise=0.0)[:4]
    for row, factor in zip(rows, (1.04, 0.97, 1.06, 0.9), strict=True):
        row["measured_mj"] = row["predicted_mj"] / factor
    found = power_kernels.summary(rows)
    assert found["within_5_percent"] == 0.5
    assert found["worst"] == pytest.approx(-0.1)
    assert power_kernels.summary([]) == {}


def test_counted_bytes_take_the_place_of_the_models() -> None:
    row = rows_of(part=0.0, noise=0.0)[0]
    told = {"l2_read": 2e9, "crossing": 1e8, "dram": 2e8}
    moved = {"l2_read_bytes": 3e9, "crossing_bytes": 1e8, "dram_bytes": 4e8, "arrived_bytes": 9e9}
    found = power_kernels.by_counters(row, told, moved)
    terms = row["terms_mj"]
    assert found["counted_mj"] == pytest.approx(
        row["predicted_mj"] + 0.5 * terms["l2_read"] + terms["dram"], rel=1e-4
    )
    assert found["told"] == told and found["counted"] == {"l2_read": 3e9, "crossing": 1e8, "dram": 4e8}
    assert found["counted_error"] == pytest.approx(found["counted_mj"] / row["measured_mj"] - 1, abs=1e-4)
    summed = power_kernels.summary([row | found, *rows_of(part=0.0, noise=0.0)[1:]])
    assert summed["counted"] == {
        "launches": 1, "within_5_percent": 0.0, "rms": abs(found["counted_error"]),
        "mean": found["counted_error"], "worst": found["counted_error"],
    }  # fmt: skip


def test_without_counters_a_result_file_stays_as_it_is(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results(tmp_path / "power_kernels.json", {"gpu": "NVIDIA H200", "command": ""})
    results.put(*rows_of(part=0.0, noise=0.0))
    before = results.path.read_bytes()
    monkeypatch.setattr(power_kernels, "counted_kernels", lambda *_: ([], {"one": {}}))
    monkeypatch.setattr(power_kernels, "find_device", lambda _: device)
    assert power_kernels.main(["--count", str(results.path)]) == 2
    assert "ncu counted 0 kernels of 1 launches" in capsys.readouterr().err
    monkeypatch.setattr(power_kernels, "counted_kernels", lambda *_: ([], {}))
    assert power_kernels.main(["--count", str(results.path)]) == 2
    assert results.path.read_bytes() == before
    assert power_kernels.main(["--count", str(tmp_path / "none.json")]) == 2


def test_what_was_measured_is_predicted_anew(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches that ship today; what is not among them stays as it was told."""
    problem = Problem.parse("4096x14336x4096")
    tile = {
        "tile_m": 256,
        "tile_n": 160,
        "tile_k": 64,
        "stages": 4,
        "cluster_m": 1,
        "cluster_n": 2,
        "epi_n": 32,
    }
    launch = Candidate.make(
        "cute_sm90", {"schedule": "cooperative", **tile}, {"raster_order": "along_n", "swizzle_size": 8}
    )
    one = large_kernels.told(problem, launch, device)
    monkeypatch.setattr(power_kernels, "launches", lambda *_: one)
    results = Results(tmp_path / "power_kernels.json", {"gpu": "NVIDIA H200", "command": ""})
    planted, gone = rows_of(part=0.0, noise=0.0)[:2]
    extents = {"m": problem.m, "n": problem.n, "k": problem.k}
    results.put(planted | extents | {"label": one.label(0)}, gone | extents | {"label": "gone"})
    found = power_kernels.summed_up(results.path, device)
    assert found["pairs"] == 2
    first, second = json.loads(results.path.read_text())["rows"]
    assert second["predicted_mj"] == gone["predicted_mj"]
    table = large_kernels.table_of(device)
    told = power_kernels.predicted(problem, one, first["clock_mhz"], first["us"], table)
    assert first["predicted_mj"] == told["predicted_mj"] != planted["predicted_mj"]
    assert first["measured_mj"] == planted["measured_mj"]
    assert first["error"] == pytest.approx(told["predicted_mj"] / planted["measured_mj"] - 1, abs=1e-4)


def test_both_tables_are_of_their_files(tmp_path: Path) -> None:
    assert "Nothing measured yet" in power.power_kernels(tmp_path)
    assert "Nothing measured yet" in power.power_cap(tmp_path)
    results = Results(tmp_path / "power_kernels.json", {"gpu": "NVIDIA H200", "command": ""})
    rows = rows_of(part=0.3, noise=0.01)
    for row in rows:  # of one problem and several launches none replaces another
        row["k"] = 4096
        row["label"] = f"k{rows.index(row)}"
        results.summary = power_kernels.summary([*results.rows, row])
        results.put(row)
    text = power.power_kernels(tmp_path)
    assert text.count("\n| 4096x4096x4096 |") == 60 + 1, "and the one with the fewest joules"
    least = min(rows, key=lambda row: row["measured_mj"])
    multiplied = least["terms_mj"]["flops"] / least["measured_mj"]
    assert f"| 4096x4096x4096 | `{least['label']}` | {multiplied:.1%} |" in text
    assert "of 60 launches are within 5 %" in text
    cap = Results(tmp_path / "power_cap.json", {"gpu": "NVIDIA H200", "command": ""})
    row = {
        "m": 8192, "n": 8192, "k": 8192, "own": "a", "cublaslt": None, "ratio_to_torch": 1.05,
        "ratio_to_best_cublaslt": None, "tflops": {"own": 700.0, "torch": 667.0}, "share_of_roof": 0.84,
    }  # fmt: skip
    cap.summary = power_cap.summary([row, row | {"ratio_to_torch": 1.1}])
    cap.put(row)
    assert json.loads(cap.path.read_text())["ratio_to_torch"] == pytest.approx((1.05 * 1.1) ** 0.5, abs=1e-4)
    assert "| geometric mean of 2 |  | 1.075 |  |" in power.power_cap(tmp_path)
    assert "stored tiles" not in power.power_cap(tmp_path), "nothing metered"
    roof = Results(tmp_path / "power_roof.json", {"gpu": "NVIDIA H200", "command": ""})
    for name, tflops in (("none", 830.0), ("near 100 %, stores k 4096", 718.0), ("near 100 %", 733.0)):
        roof.put({"label": name, "workload": name, "tflops": tflops})
    assert "make 718 TFLOP/s" in (text := power.power_cap(tmp_path)) and "97.5% to 97.5%" in text


class Takes:
    """A replay on a clock of its own: so many microseconds a product."""

    def __init__(self, us: float) -> None:
        self.us = us

    def start(self, untimed: int = 0, timed: int = 1) -> None:
        pass

    def finish(self) -> float:
        return self.us


def test_a_stage_times_each_in_every_round() -> None:
    times = {Candidate.make("cute_sm90", {"tile_m": n}): 100.0 + n for n in range(5)}
    runners: dict[Candidate, tuple[Replay, float]] = {one: (Takes(us), 1e-3) for one, us in times.items()}
    found = power_cap.raced(runners, power_cap.FINAL)
    assert {one: set(samples) for one, samples in found.items()} == {one: {us} for one, us in times.items()}
    assert {len(samples) for samples in found.values()} == {power_cap.FINAL.rounds}


def test_a_device_without_a_table_is_refused(device: Device) -> None:
    from dataclasses import replace

    other = replace(device, fingerprint=replace(device.fingerprint, device_name="NVIDIA L4"))
    assert energy.table_of("NVIDIA L4") is None
    with pytest.raises(large_kernels.MeasureError, match="no table of joules"):
        large_kernels.table_of(other)
