"""The power roof without a GPU: kernels compile, work is counted, and the fit finds what was planted."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import power_fit, power_roof, power_variants
from benchmarks.power_variants import Build, RoofError, Variant

NVCC = shutil.which("nvcc")
L2_BYTES = 50 << 20
#: pJ per flop, byte and cycle; W.
PLANTED = {
    "filled_bytes": 9.0, "l2_read_bytes": 14.0, "crossing_bytes": 8.0, "stored_bytes": 30.0,
    "dram_bytes": 60.0, "sm_cycles": 150.0, "static": 90.0,
}  # fmt: skip
VOLTAGE = power_fit.Voltage(0.8, 1.5)


def planted_rows(noise: float) -> list[dict[str, Any]]:
    """Rows of all variants on a chip with the planted table, each at a clock of its own."""
    draw = random.Random(1)
    rows = []
    for variant in power_variants.variants():
        build, blocks, clock = variant.build, variant.blocks or 132, draw.uniform(1300, 1980)
        per_s = power_roof.work_of_launch(variant, blocks, 1024, {}, L2_BYTES)
        per_s = {name: 1500 * amount for name, amount in per_s.items()}
        per_s["crossing_bytes"] = per_s["l2_read_bytes"] * (0.4 if variant.footprint == "halves" else 0.1)
        per_s["sm_cycles"] = blocks * clock * 1e6
        row = {
            "workload": variant.label, "width": build.width, "operand": build.operand,
            "data": variant.data, "wait": build.wait,
            "nvml_clock_mhz": clock, "per_s": per_s,
        }  # fmt: skip
        terms = power_fit.terms_of([row | {"data": "normal"}])
        costs = {term: planted_cost(term) for term in terms}
        row["power_w"] = power_fit.predicted_w([row], costs, VOLTAGE)[0] * draw.gauss(1, noise)
        rows.append(row)
    return rows


def planted_cost(term: str) -> float:
    operand, _, width = term.partition("_n")
    return PLANTED[term] if term in PLANTED else 0.5 + 8 / int(width) + 0.1 * (operand == "smem")


def test_the_fit_finds_what_was_planted() -> None:
    found = power_fit.fit(planted_rows(noise=0.0))
    assert found.voltage.slope == pytest.approx(VOLTAGE.slope, abs=1e-2)
    assert found.voltage.bend == pytest.approx(VOLTAGE.bend, abs=2e-2)
    for term, value in found.coefficients.items():
        assert value == pytest.approx(planted_cost(term), rel=1e-2), term
    assert max(map(abs, found.left_out.values())) < 1e-2


def test_the_fit_stands_noise_of_a_percent_and_says_it() -> None:
    found = power_fit.fit(planted_rows(noise=0.01))
    for term in ("smem_n256", "registers_n64", "dram_bytes", "static"):
        assert found.coefficients[term] == pytest.approx(planted_cost(term), rel=0.15), term
    assert 0.5 < power_fit.spread(found.residuals.values())["rms"] < 1.2
    told = found.asdict()
    assert told["residual_percent"]["rms"] <= told["left_out_percent"]["rms"]
    assert "| smem_n256 |" in power_fit.table(found)


def test_controls_are_shown_and_not_fitted() -> None:
    found = power_fit.fit(planted_rows(noise=0.0))
    labels = {variant.label for variant in power_variants.variants()}
    assert labels - set(found.residuals) == {
        "smem, n256, 2 wg, zeros", "smem, n256, 2 wg, near 100 %, spin", "waiting, 2 wg, spin"
    }  # fmt: skip
    for label, terms in found.terms_w.items():
        assert set(terms) == set(found.coefficients) and min(terms.values()) >= 0, label


def test_too_few_rows_are_an_error() -> None:
    with pytest.raises(power_fit.FitError, match="3 rows cannot tell"):
        power_fit.fit(planted_rows(noise=0.0)[:3])


def test_no_coefficient_is_below_zero() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert power_fit.non_negative(matrix, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert power_fit.non_negative(matrix, np.array([2.0, 3.0, 4.0])) == pytest.approx([1.0, 1.0])
    assert power_fit.non_negative(-matrix, np.ones(3)) == pytest.approx([0.0, 0.0])


def test_labels_tell_variants_apart() -> None:
    labels = [variant.label for variant in power_variants.variants()]
    assert len(set(labels)) == len(labels)
    assert "smem, n256, 2 wg, cluster 2x1, near 100 %" in labels


def test_work_is_counted_from_the_construction() -> None:
    variant = Variant(Build(cluster=(2, 2)), loads_percent=50)
    work = power_roof.work_of_launch(variant, 132, 1024, {}, L2_BYTES)
    assert work["flops"] == 2 * 128 * 256 * 64 * 132 * 1024
    assert work["filled_bytes"] == 132 * 512 * (128 + 256) * 128
    assert work["l2_read_bytes"] == work["filled_bytes"] / 2
    assert work["dram_bytes"] == work["stored_bytes"] == 0
    streamed = power_roof.work_of_launch(Variant(Build(), 100, "dram"), 132, 1024, {}, L2_BYTES)
    assert streamed["dram_bytes"] == streamed["filled_bytes"] == streamed["l2_read_bytes"]
    counted = {"l2_read_bytes": 2.0, "crossing_bytes": 1.0, "dram_bytes": 0.5}
    told = power_roof.work_of_launch(variant, 132, 1024, counted, L2_BYTES)
    assert told == work | {name: amount * 132 * 1024 for name, amount in counted.items()}


def test_counters_become_bytes_of_a_stage() -> None:
    kernel = {
        "l2_read_bytes": 6400.0, "l2_read_sectors": 100.0, "l2_fabric_sectors": 10.0,
        "dram_read_bytes": 64.0, "dram_write_bytes": 16.0,
    }  # fmt: skip
    found = power_roof.counted_bytes(kernel, 10)
    assert found == {
        "arrived_bytes": 640.0, "l2_read_bytes": 320.0, "crossing_bytes": 32.0, "dram_bytes": 8.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"width": 72}, "width 72: use one of 64, 96"),
        ({"operand": "l2"}, "operand 'l2': use one of smem, registers"),
        ({"warpgroups": 4}, "warpgroups 4"),
        ({"width": 256, "warpgroups": 3}, "registers are too few"),
        ({"cluster": (3, 1)}, "cluster"),
        ({"width": 96, "store": True}, "panels of 64 columns"),
        ({"wait": "sleep"}, "wait 'sleep'"),
    ],
)
def test_a_kernel_that_cannot_be_is_an_error(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(RoofError, match=told):
        Build(**fields)


def test_rings_fit_shared_memory() -> None:
    for variant in power_variants.variants():
        build = variant.build
        assert 3 <= build.stages <= 8 and build.smem_bytes <= 232448, build


@pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize(
    "build",
    [
        Build(64, warpgroups=1), Build(208, "registers"), Build(128, warpgroups=3, across=2),
        Build(cluster=(2, 2), wait="spin"), Build(128, store=True), Build(multiply=False),
    ],
    ids=str,
)  # fmt: skip
def test_kernels_compile_without_spills(build: Build, tmp_path: Path) -> None:
    path = power_variants.compile_one(build, tmp_path)
    assert path.stat().st_size > 1000
    assert power_variants.compile_one(build, tmp_path) == path


def test_without_nvcc_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(RoofError, match="nvcc is not on PATH; install"):
        power_variants.compile_one(Build(), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "n257"], "no label has 'n257'"),
        (["--fit", "missing.json"], "missing.json: not a result file"),
        (["--device", "replay:h200"], "replay:h200"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert power_roof.main(arguments) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_a_file_is_fitted_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.results import Results, _read

    path = tmp_path / "power_roof.json"
    shared = dict.fromkeys(("gpu", "driver", "packages", "method"), "x")
    results = Results(path, shared | {"command": "python -m benchmarks.power_roof"})
    results.put(*planted_rows(noise=0.0))
    assert power_roof.main(["--fit", str(path)]) == 0
    assert "left out" in capsys.readouterr().out
    data = _read(path)
    assert data["fit"]["coefficients"]["dram_bytes"] == pytest.approx(PLANTED["dram_bytes"], rel=1e-2)
    assert data["meta"]["command"] == "python -m benchmarks.power_roof"
    fitted = [row for row in data["rows"] if "fitted_w" in row]
    assert len(fitted) == data["fit"]["rows"]
    assert all(sum(row["terms_w"].values()) == pytest.approx(row["fitted_w"], abs=1) for row in fitted)


def test_the_committed_table_is_the_fit_of_its_rows() -> None:
    path = Path(power_roof.__file__).parent / "results" / "h200" / "power_roof.json"
    data = json.loads(path.read_text())
    told, found = data["fit"], power_fit.fit(data["rows"])
    assert found.coefficients == pytest.approx(told["coefficients"], rel=1e-3, abs=1e-3)
    voltage = {"slope": found.voltage.slope, "bend": found.voltage.bend}
    assert voltage == pytest.approx(told["voltage"], abs=1e-3)
