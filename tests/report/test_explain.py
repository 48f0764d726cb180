"""`explain`: the same selection as dispatch, in words, for tensors and for shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tunegemm
from tests.choose.test_neighbours import kernel
from tests.support.commands import here
from tests.support.recorded import fill, recorded_device
from tunegemm.choose.policies import Policy
from tunegemm.choose.snapshot import read_snapshot
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.describe.device import Device, cuda_device_count
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import ProblemError
from tunegemm.measure.outcome import Measurement
from tunegemm.report import explain
from tunegemm.report.explain import candidate_of, explain_problem, over_skews
from tunegemm.report.space import Space
from tunegemm.store import Database, Record

SHAPE = "128x7168x16384"


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A recorded shape with its history, and two shapes that vouch for one between them."""
    path = fill(tmp_path_factory.mktemp("explain") / "tuning.sqlite", [SHAPE])
    device = recorded_device()
    with Database.open(path, create=True) as database:
        for m in (64, 128):
            measured = Measurement(kernel(), (10.0, 10.1, 10.2), (12.0, 12.1, 12.2), 1e-3, 0.003)
            database.confirm(Problem(m, 4096, 4096), device, measured, label="pp64x64x64")
    return str(path)


@pytest.fixture(scope="module")
def device() -> Device:
    """As recorded; not real, so that no compiled object is asked for."""
    return replace(recorded_device(), spec="replay:h200")


def test_a_hit_with_its_evidence_and_its_runner_up(location: str, device: Device) -> None:
    found = explain_problem(Problem.parse(SHAPE), device, database=location)
    assert found.outcome == "hit" and found.record is not None and found.offer is None
    assert found.percent_of_roofline == pytest.approx(100 * found.roofline_us / found.record.median_us)
    assert found.runner_up is not None and found.runner_up.ratio <= found.record.ratio
    text = str(found)
    assert f"dispatch  {found.record.label}: {found.record.median_us:.1f} us" in text
    measured = f"{found.record.measured_at:%Y-%m-%d}"
    assert text == (
        f"{SHAPE} bf16 tn on NVIDIA H200\n"
        "  work      30.1 GFLOP, at least 241 MB of device memory\n"
        "  intensity 125 FLOP/B, ridge point 206: memory-bound (989.4 TFLOP/s, 4800 GB/s)\n"
        "  roofline  50.19 us, 599 TFLOP/s\n"
        "  dispatch  cublaslt a66 t128x64 s64xAUTO c4x2x1 o3: 63.5 us, 1.114 x torch.mm, "
        "79.0 % of the roofline, 47.8 % of peak\n"
        f"  evidence  63.5 us, torch.mm 70.6 us, noise 0.2%, confirmed: it won a final race, {measured}\n"
        "  runner-up co64x128x64 s8 c2x2 e64 rm w16 all: 62.3 us, 1.104 x torch.mm in the search\n"
        "  change    a wider search; another driver, toolchain or kernel source:\n"
        f"            tunegemm tune --shape {SHAPE} --dtype bf16 --layout tn --effort full"
    )
    assert (found.why_not, found.asdict()["record"]["percent_of_peak"]) == ("", found.percent_of_peak)


def test_a_near_hit_names_its_origin_and_shows_no_time_as_its_own(location: str, device: Device) -> None:
    found = explain_problem(Problem(112, 4096, 4096), device, database=location)
    assert found.outcome == "near" and found.offer is not None and found.record is not None
    assert found.percent_of_roofline is None and found.asdict()["record"]["shape"] in str(found)
    assert found.tile is not None and found.tile.candidate["tile_m"] == 64
    assert str(found).splitlines()[4:9] == [
        "  tile      cute_sm90 pp64x64x64 s4 c1x1 e32 rm w1 all: feasible",
        "            32 FLOP per byte of shared memory filled: 154 TFLOP/s from device memory alone, "
        "without L2",
        "            128 tiles on 132 multiprocessors: 1 waves, 97% busy; 99328 B of shared memory",
        "  dispatch  near hit, pp64x64x64 from 128x4096x4096 (1.198 x torch there, 1 waves; 1 here): "
        "1.195 x torch expected, 1.03 required",
        "  evidence  10.1 us, torch.mm 12.1 us, noise 0.3%, confirmed: it won a final race, "
        f"{found.record.measured_at:%Y-%m-%d}",
    ]
    assert found.why_not == "" and found.tile.smem_bytes == 99328
    assert found.change.startswith("tunegemm tune --shape 112x4096x4096")
    assert found.asdict()["expected_ratio"] == found.offer.record.ratio


def test_a_miss_says_why_and_what_would_change_it(location: str, device: Device) -> None:
    found = explain_problem(Problem(160, 2048, 4096), device, database=location)
    assert found.outcome == "miss" and found.record is None
    assert "torch: no record; predictions are for up to 128 rows; no recorded shape is" in str(found)
    assert "change    its own record:\n            tunegemm tune --shape 160x2048x4096" in str(found)


def test_modes_and_policies_are_heeded(
    location: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(96, 4096, 4096)
    monkeypatch.setenv("TUNEGEMM_MODE", "exact")
    assert explain_problem(problem, device, database=location).outcome == "miss"
    monkeypatch.setenv("TUNEGEMM_MODE", "off")
    hit = explain_problem(Problem.parse(SHAPE), device, database=location)
    assert hit.record is not None and "torch computes it: TUNEGEMM_MODE=off" in str(hit)
    monkeypatch.delenv("TUNEGEMM_MODE")
    energy = explain_problem(Problem.parse(SHAPE), device, database=location, policy=Policy("min_energy"))
    assert "was not measured" in energy.why


def test_a_kernel_without_an_object_is_said_to_be_torchs(
    location: str, device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(tmp_path))
    assert ArtifactStore().root.parent == tmp_path
    real = recorded_device()
    monkeypatch.setattr(Device, "resident_clusters", lambda self, size: 132 // size)
    found = explain_problem(Problem(112, 4096, 4096), real, database=location)
    assert "not in the object store" in found.why_not or "not installed" in found.why_not
    assert "but torch computes it" in str(found)


def test_tensors_and_the_command_line_say_the_same() -> None:
    """Without a device named, too: without a GPU both tell of the recorded one, whose records serve it."""
    a, b = torch.empty(512, 4096, dtype=torch.bfloat16), torch.empty(6144, 4096, dtype=torch.bfloat16).t()
    found = tunegemm.explain(a, b)
    assert found.problem == Problem(512, 6144, 4096)
    command = ("explain", "--shape", "512x6144x4096")
    assert here(*command).stdout == f"{found}\n"
    if not cuda_device_count():
        assert found.device.spec == "replay:h200"
        known = read_snapshot().find(found.problem, found.device.fingerprint)
        assert (found.outcome == "hit") == (known is not None), "its records serve it"
    fused = tunegemm.explain(a, b, epilogue="bias_n+gelu", out_dtype=torch.float32)
    assert fused.problem == Problem(512, 6144, 4096, out_dtype="fp32", epilogue="bias_n+gelu")
    assert "--out-dtype fp32 --layout tn --epilogue bias_n+gelu" in fused.change
    assert json.loads(here(*command, "--json").stdout) == [json.loads(json.dumps(found.asdict()))]


def test_a_small_product_has_figures_too(location: str, device: Device) -> None:
    text = str(explain_problem(Problem(1, 1, 1), device, database=location))
    assert "0.333 FLOP/B" in text and "roofline  0.000001250 us, 1.60 TFLOP/s" in text


def test_what_no_memory_holds_is_said(location: str, device: Device) -> None:
    fits, huge = Problem(150000, 150000, 100000), Problem(200000, 200000, 100000)
    assert "too large" not in str(explain_problem(fits, device, database=location))
    assert "operands and output of 160 GB > 1" in str(explain_problem(huge, device, database=location))


@pytest.mark.parametrize(("dtype", "peak"), [("bf16", "989.4"), ("fp8_e4m3", "1978.8"), ("tf32", "494.7")])
def test_the_peak_is_of_the_operands_dtype(location: str, device: Device, dtype: str, peak: str) -> None:
    found = explain_problem(Problem.parse("4096x4096x4096", dtype=dtype), device, database=location)
    assert f"compute-bound ({peak} TFLOP/s, 4800 GB/s)" in str(found)


@pytest.mark.parametrize(
    ("family", "values", "verdict"),
    [
        ("cute_sm90", {"tile_m": "7"}, "mma_tile: tile_m 7 is not 64, 128, 192 or 256"),
        (
            "gluon_wgmma",
            {"warps": "3", "stages": "3", "tile_m": "64"},
            "warpgroups: warps 3 is not 4 or 8, or 16 without a producer",
        ),
        # What the shipped spaces do not list, and kernels have.
        ("cute_sm90", {"epi_n": "0"}, "feasible"),
        ("cute_sm90", {"cluster_n": "8", "swizzle_size": "3"}, "feasible"),
    ],
)
def test_values_that_no_space_lists_get_a_verdict(
    location: str, device: Device, family: str, values: dict[str, str], verdict: str
) -> None:
    problem = Problem(4096, 4096, 4096)
    candidate = candidate_of(",".join([family, *(f"{name}={value}" for name, value in values.items())]))
    found = explain_problem(problem, device, candidate=candidate, database=location)
    assert found.tile is not None and found.tile.verdict == verdict
    assert ("B of shared memory" in str(found)) == (found.tile.smem_bytes is not None)
    assert found.tile.smem_bytes is not None or verdict != "feasible"


def test_a_candidate_starts_from_what_dispatch_would_launch(location: str, device: Device) -> None:
    problem = Problem(128, 4096, 4096)
    record = explain_problem(problem, device, database=location).record
    assert record is not None
    family, known = record.candidate.family, record.candidate.params
    found = explain_problem(problem, device, candidate=f"{family},stages=3", database=location)
    assert found.tile is not None and found.tile.candidate.params == known | {"stages": 3}
    # One of another family starts from the kernel that the model ranks first among those with its values.
    found = explain_problem(problem, device, candidate="triton_tma,tile_n=64", database=location)
    assert found.tile is not None and found.tile.verdict == "feasible"
    first = next(
        one for one in Space.of("triton_tma", problem, device).ranked() if one.candidate["tile_n"] == 64
    )
    assert found.tile.candidate == first.candidate


def test_extents_and_problems_are_explained_too() -> None:
    problem = Problem(512, 6144, 4096, epilogue="bias_n")
    for asked in (problem, "512x6144x4096", (512, 6144, 4096)):
        assert tunegemm.explain(asked, epilogue="bias_n").problem == problem
    with pytest.raises(ProblemError, match=r"problem 3: give a Problem, \(m, n, k\) or text"):
        tunegemm.explain(3)  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="takes two tensors, or a Problem"):
        tunegemm.explain("512x6144x4096", torch.empty(4, 4))


def test_divisions_of_the_rows_are_those_of_the_records_best_measurement() -> None:
    def entry(tile: int, ratio: float, **telemetry: Any) -> Record:
        candidate, fingerprint = Candidate.make("cute_sm90", {"tile_m": tile}), recorded_device().fingerprint
        return Record(Problem(64, 64, 64), candidate, fingerprint, ratio=ratio, telemetry=telemetry)

    record = entry(64, 1.1)
    skews = {"hot": 0.9, "uniform": 1.2}
    others = [entry(128, 1.3, skews={"hot": 3.0}), entry(64, 1.2), entry(64, 1.1, skews=skews)]
    found = explain.with_skews(record, others)
    assert found.telemetry == {"skews": skews}
    assert explain.with_skews(record, others[:2]) is record
    assert over_skews(found.telemetry) == "over divisions of the rows: hot 0.900, uniform 1.200; worst hot"
    assert over_skews({}) == over_skews({"skews": {"hot": "fast"}}) == ""


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [((3, 4), (5, 6), r"\(3, 4\) and \(5, 6\) do not fit: a has 4 columns and b 5 rows"),
     ((2, 3, 4), (2, 5, 6), "a has 4 columns and b 5 rows"), ((3, 4), None, "takes two tensors"),
     ((4,), (4,), r"torch\.matmul computes")],
)  # fmt: skip
def test_operands_that_do_not_fit_are_said(a: tuple[int, ...], b: tuple[int, ...] | None, says: str) -> None:
    left = torch.zeros(a, dtype=torch.bfloat16)
    right: Any = "text" if b is None else torch.zeros(b, dtype=torch.bfloat16)
    with pytest.raises(ProblemError, match=says):
        tunegemm.explain(left, right)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("False", False), ("12", 12), ("-3", -3), ("a", "a")]
)
def test_values_of_a_candidate_are_read(text: str, value: int | str | bool) -> None:
    found = explain.parsed_value(text)
    assert found == value and type(found) is type(value)
