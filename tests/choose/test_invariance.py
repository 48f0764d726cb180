"""Policy `batch_invariant`: what it admits, what serves each number of rows, and what it says of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.choose.test_neighbours import kernel
from tests.support.serving import Row
from tunegemm.choose import invariance
from tunegemm.choose.forest import read
from tunegemm.choose.invariance import Ranked, ranked
from tunegemm.choose.neighbours import library_us
from tunegemm.choose.policies import Policy
from tunegemm.choose.selection import select
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch.launchers import find_object
from tunegemm.errors import TunegemmError, TunegemmWarning
from tunegemm.generate import families
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.families import completed, kernel_source_hash, reduction_class
from tunegemm.model.features import OF_ORDER
from tunegemm.model.shortlist import ordered_kernels
from tunegemm.resources import data_path
from tunegemm.store.record import Record
from tunegemm.store.shipped import read_shipped

POLICY = Policy("batch_invariant")
BF16_PROBLEM, FP16_PROBLEM = Problem.parse("64x4096x4096"), Problem.parse("64x4096x4096", dtype="fp16")
FP8_PROBLEM = Problem.parse("64x4096x4096", dtype="fp8_e4m3")
#: Of a kind for which no kernel of the class ships.
UNLISTED_PROBLEM = Problem.parse("64x4096x4096", epilogue="relu")
#: Kinds of products that kernels of the class ship for.
KINDS: list[dict[str, str]] = [
    {}, {"dtype": "fp16"}, {"dtype": "fp8_e4m3", "epilogue": "scale_rowwise"}, {"epilogue": "swiglu"},
    {"epilogue": "bias_n+gelu_tanh"}, {"epilogue": "residual"}, {"epilogue": "geglu_tanh"},
]  # fmt: skip
ROWS = [1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 64, 65, 127, 300, 1025, 4096, 16384]

#: A plain kernel of each family.
BASES: dict[str, dict[str, Any]] = {
    "cute_sm90": {
        "schedule": "cooperative", "tile_scheduler": "static", "tile_m": 128, "tile_n": 128, "tile_k": 64,
        "stages": 4, "cluster_m": 1, "cluster_n": 1, "epi_n": 32,
        "swap_ab": False, "raster_order": "along_m", "swizzle_size": 1, "cluster_order": "index",
        "ctas": "all", "split_k": 1, "reduction": "pairs", "l2_hint": "none",
    },
    "cute_sm80": {
        "tile_m": 128, "tile_n": 128, "tile_k": 32, "stages": 3, "warps_m": 2, "warps_n": 2, "atoms_n": 2,
        "smem_swizzle": 2, "vector_bytes": 16, "ctas_per_sm": 1, "acc_dtype": "fp32",
        "raster_order": "along_m", "swizzle_size": 1, "ctas": "tiles", "split_k": 1,
    },
    "triton_tma": {
        "schedule": "pipelined", "tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 3, "warps": 8,
        "epi_n": 64, "swap_ab": False, "raster_order": "along_m", "swizzle_size": 1, "ctas": "all",
        "split_k": 1,
    },
    "gluon_wgmma": {
        "schedule": "cooperative", "tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 4, "warps": 8,
        "instr_n": 256, "lhs_in_registers": False, "occupancy": 1, "swap_ab": False,
        "raster_order": "along_m", "swizzle_size": 1, "ctas": "all",
    },
    "skinny": {
        "tile_m": 16, "tile_n": 32, "tile_k": 256, "warps_n": 1, "warps_k": 8, "stages": 4,
        "vector_bytes": 16, "ctas_per_sm": 1, "ctas": "tiles", "split_k": 1,
    },
}  # fmt: skip


def of(family: str, **changes: Any) -> Candidate:
    values = {**BASES[family], **changes}
    names = families.get(family).parameters
    compiled, launched = ({name: values[name] for name in names[table]} for table in ("compile", "launch"))
    return Candidate.make(family, compiled, launched)


@pytest.mark.parametrize(
    ("problem", "candidate", "expected"),
    [(BF16_PROBLEM, of("cute_sm90"), "ordered"), (FP16_PROBLEM, of("cute_sm90"), "ordered"),
     (FP8_PROBLEM, of("cute_sm90", tile_k=128), "ordered"), (BF16_PROBLEM, of("cute_sm90", split_k=2), ""),
     (BF16_PROBLEM, of("cute_sm90", tile_scheduler="stream_k"), ""),
     (BF16_PROBLEM, of("triton_tma"), "ordered"), (BF16_PROBLEM, of("triton_tma", split_k=2), ""),
     (FP16_PROBLEM, of("triton_tma"), ""), (BF16_PROBLEM, of("gluon_wgmma"), "ordered"),
     (BF16_PROBLEM, of("cute_sm80"), "ordered"), (BF16_PROBLEM, of("cute_sm80", acc_dtype="fp16"), ""),
     (BF16_PROBLEM, of("skinny"), ""), (BF16_PROBLEM, TORCH_MM, "")],
)  # fmt: skip
def test_reduction_classes(problem: Problem, candidate: Candidate, expected: str) -> None:
    assert reduction_class(problem, candidate) == expected


# Selection


@pytest.fixture(scope="module", params=["h200", "h100-sxm"])
def shipped(request: pytest.FixtureRequest) -> tuple[Snapshot, Device]:
    """The shipped records, as if their kernels were today's, and a GPU: an H100 has few of its own."""
    device = find_device(f"model:{request.param}")
    records = [
        replace(
            record,
            kernel_source=kernel_source_hash(record.candidate.family),
            candidate=completed(record.candidate),
        )
        for record in read_shipped()[0]
    ]
    own = next(one.fingerprint for one in records if one.fingerprint.device_name == device.name)
    return Snapshot(records), replace(device, fingerprint=own)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: " ".join(kind.values()) or "bf16")
@pytest.mark.parametrize("n_k", ["4096x4096", "6144x4096", "2112x7168", "1000x520"])
def test_every_number_of_rows_has_a_kernel_of_the_class(
    shipped: tuple[Snapshot, Device], kind: dict[str, Any], n_k: str
) -> None:
    snapshot, device = shipped
    for m in ROWS:
        problem = Problem.parse(f"{m}x{n_k}", **kind)
        found = select(snapshot, problem, device, policy=POLICY)
        assert found.options, (problem, found.why)
        for record in found.options:
            assert record.problem == problem
            assert reduction_class(problem, record.candidate) == "ordered"
            assert families.get(record.candidate.family).check(problem, record.candidate, device).runs
        assert (found.outcome == "near") == (len(found.offers) == len(found.options))


def test_a_record_of_the_class_is_served_though_torch_is_faster(device: Device) -> None:
    record = Row(BF16_PROBLEM, device.fingerprint, kernel(), ratio=0.9)
    found = select(Snapshot([record]), BF16_PROBLEM, device, policy=POLICY)
    assert found.outcome == "hit" and found.options[0] is record
    assert select(Snapshot([record]), BF16_PROBLEM, device).outcome == "miss"


def test_the_best_measured_kernel_of_the_class_comes_first(device: Device) -> None:
    """Then those of other problems, in case that it is not compiled here."""
    row: Callable[..., Record] = partial(Row, fingerprint=device.fingerprint)
    split, slow, fast = kernel(split_k=4), kernel(64, 128), kernel(64, 32)
    other = row(replace(UNLISTED_PROBLEM, m=128), candidate=kernel(128, 128))
    rivals = [
        row(UNLISTED_PROBLEM, candidate=slow, ratio=0.8),
        row(UNLISTED_PROBLEM, candidate=fast, ratio=0.9),
    ]
    snapshot = Snapshot([row(UNLISTED_PROBLEM, candidate=split), other])
    found = select(snapshot, UNLISTED_PROBLEM, device, policy=POLICY, rivals=lambda _: rivals)
    assert found.outcome == "hit" and "order of sums" in found.why
    assert [one.candidate["tile_n"] for one in found.options] == [32, 128]
    without = select(snapshot, UNLISTED_PROBLEM, device, policy=POLICY)
    assert without.outcome == "near" and without.offers[0].origin is other
    assert str(without.offers[0]) == "from 128x4096x4096 (1.100 x torch there)"
    exact = select(snapshot, UNLISTED_PROBLEM, device, policy=POLICY, near=False)
    assert exact.outcome == "miss" and not exact.options, "mode exact borrows nothing"


@pytest.mark.parametrize(
    ("changes", "is_todays", "found"),
    [
        ({}, True, "launched"),
        ({}, False, ""),
        ({"device_name": "NVIDIA H100 80GB HBM3"}, True, "borrowed"),
        ({"device_name": "NVIDIA H100 80GB HBM3"}, False, ""),
        ({"capability": "8.0"}, True, ""),
        ({"capability": "8.0"}, False, ""),
    ],
)
def test_another_gpus_kernel_is_borrowed_where_its_sources_are_todays(
    device: Device, changes: dict[str, str], is_todays: bool, found: str
) -> None:
    """Never its times, and no kernel of another architecture."""
    source = kernel_source_hash("cute_sm90") if is_todays else "of other kernels"
    there = replace(device.fingerprint, **changes)  # type: ignore[arg-type]
    snapshot = Snapshot([Row(BF16_PROBLEM, there, kernel(), kernel_source=source)])
    assert (snapshot.find(BF16_PROBLEM, device.fingerprint) is not None) == (found == "launched")
    assert (snapshot.find_kernel(BF16_PROBLEM, device.fingerprint) is not None) == bool(found)


def test_a_neighbour_is_preferred_to_what_is_expected_to_be_little_better(device: Device) -> None:
    def in_order(problem: Problem) -> list[Ranked]:
        return sorted(ranked(problem, ordered_kernels(problem), device), key=lambda one: -one.expected)

    problem, first, second = next(
        (problem, *order[:2])
        for problem in (replace(BF16_PROBLEM, n=n) for n in range(4096, 8192, 64))
        if 0 < (order := in_order(problem))[0].expected - order[1].expected < 0.015
    )
    near = Row(replace(problem, m=problem.m // 2), device.fingerprint, candidate=second.candidate)
    assert select(Snapshot([near]), problem, device, policy=POLICY).offers[0].origin is near
    far = Snapshot([replace(near, problem=replace(problem, m=problem.m // 8))])
    assert select(far, problem, device, policy=POLICY).options[0].candidate == first.candidate


def test_a_damaged_order_is_one_warning_and_the_models_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: Device
) -> None:
    text = data_path("db", "order.json").read_text(encoding="utf-8")
    path = tmp_path / "order.json"
    for damaged in (text[:1000], text.replace("0.", "1.", 1), "[]", text.replace("log_m", "log_x")):
        path.write_text(damaged, encoding="utf-8")
        with pytest.raises(TunegemmError, match=r"order\.json is damaged.*install"):
            read(path, OF_ORDER)
    monkeypatch.setattr(invariance, "data_path", lambda *_: path)
    invariance.order_here.cache_clear()
    try:
        with pytest.warns(TunegemmWarning, match="the model's order"):
            assert select(Snapshot(), BF16_PROBLEM, device, policy=POLICY).options
    finally:
        invariance.order_here.cache_clear()


def test_where_nothing_is_of_the_class_the_reason_names_the_promise(device: Device) -> None:
    snapshot = Snapshot([Row(UNLISTED_PROBLEM, device.fingerprint, kernel(split_k=4))])
    for problem in (UNLISTED_PROBLEM, replace(UNLISTED_PROBLEM, in_dtype="fp16", out_dtype="fp16")):
        found = select(snapshot, problem, device, policy=POLICY)
        assert found.outcome == "miss" and found.advises_tuning
        assert "number of rows" in found.why


def test_multiprocessors_can_be_left_free_as_well(device: Device) -> None:
    policy = Policy("batch_invariant", max_sms=100)
    row: Callable[..., Record] = partial(Row, BF16_PROBLEM, device.fingerprint)
    assert select(Snapshot([row(kernel())]), BF16_PROBLEM, device, policy=policy).outcome == "hit"
    tiles = Snapshot([row(kernel().with_launch(ctas="tiles"))])
    found = select(tiles, BF16_PROBLEM, device, policy=policy)
    assert found.outcome == "near" and {one.candidate["ctas"] for one in found.options} == {"all"}


def test_the_model_knows_the_library_at_an_odd_number_of_rows(device: Device) -> None:
    """Of gates it swaps the product, and pairs of columns would be pairs of rows."""
    assert library_us(Problem.parse("33x4096x4096", epilogue="swiglu"), device) > 0


def test_a_kernel_that_only_computes_too_much_is_launched_all_the_same(device: Device) -> None:
    wide = kernel(128, 128, cluster_m=2)
    record = Row(replace(BF16_PROBLEM, m=3), device.fingerprint, wide)
    verdict = families.get("cute_sm90").check(record.problem, wide, device)
    assert verdict.rule == "cluster_extent" and verdict.runs and not verdict
    with pytest.raises(Exception, match="not in the object store"):
        find_object(record, device)


def test_few_rows_take_small_tiles_and_many_take_large_ones(device: Device) -> None:
    for kind in KINDS:
        rows = []
        for m in (1, 8192):
            chosen = select(
                Snapshot(), Problem.parse(f"{m}x4096x4096", **kind), device, policy=POLICY
            ).options[0]
            rows.append(chosen.candidate["tile_m"] * chosen.candidate["tile_n"])
        assert rows[0] <= 64 * 64 < 128 * 128 <= rows[1], kind
