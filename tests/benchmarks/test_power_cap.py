"""Large products at the cap without a GPU: what is chosen can be launched, and sums find what was planted.

Its kernels are compiled where `make kernels` has not made them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import large_kernels, power_cap
from benchmarks.batch_invariance import of_kind
from benchmarks.power_cap import SHAPES
from benchmarks.results import Results
from benchmarks.tables import power
from tests.support.processes import compile_workers
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import CompilePool
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError
from tunegemm.generate import families
from tunegemm.measure.race import Replay
from tunegemm.model import energy, shortlist
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
def test_candidates_have_the_record_and_the_fewest_joules(problem: Problem, device: Device) -> None:
    chosen = power_cap.candidates(problem, device)
    assert chosen == power_cap.candidates(problem, device)
    assert len(set(chosen)) == len(chosen) <= power_cap.STAGES[0].own
    assert_launchable(problem, chosen, device)
    every = large_kernels.launches(problem, device)
    assert every.candidates[every.mj.argmin()] in chosen
    for record in power_cap.read_shipped()[0]:
        own = record.problem == problem and record.candidate.family == "cute_sm90"
        if own and record.fingerprint.device_name == device.fingerprint.device_name:
            assert families.completed(record.candidate) == chosen[0]


@pytest.mark.parametrize("kind", ["swiglu", "fp8"])
def test_other_kinds_take_what_ships_for_them(kind: str, device: Device) -> None:
    problem = of_kind("4096x28672x4096", kind)
    chosen = power_cap.candidates(problem, device)
    assert {one.kernel for one in chosen} >= set(shortlist.ordered_kernels(problem)), (
        "and the product's record"
    )
    assert len(chosen) >= 10


def test_a_kind_that_is_none_is_named() -> None:
    with pytest.raises(TunegemmError, match="--kinds fp5: use bf16"):
        of_kind("8x8x8", "fp5")


def test_the_table_is_of_its_file(tmp_path: Path) -> None:
    assert "Nothing measured yet" in power.power_cap(tmp_path)
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
