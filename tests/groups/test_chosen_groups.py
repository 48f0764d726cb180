"""Which kernel a product of groups asks for: a record's, the table's, or one for any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import grouped_mm as torchs

import tunegemm
from tests.support.grouped import BF16, DTYPES, GROUPS, K, Loops, N, groups_of, operands
from tests.support.serving import Row, dispatcher_of
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch import api
from tunegemm.errors import TunegemmWarning
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.families import kernel_source_hash
from tunegemm.generate.grouped import config_of
from tunegemm.groups import grouped
from tunegemm.model.grouped import GroupedChoice, choose

RECORDED = Candidate.make(
    "grouped",
    {"schedule": "pingpong", "tile_m": 64, "tile_n": 32, "tile_k": 64, "stages": 16, "epi_n": 32,
     "narrow": 8, "cluster_m": 1},
    {"swizzle_size": 2, "l2_hint": "weights_first"},
)  # fmt: skip


@pytest.fixture
def recorded(loops: Loops, device: Device) -> Callable[..., list[GroupedChoice]]:
    """Serves by a record of so many rows; which kernels were asked for."""
    asked: list[GroupedChoice] = []

    def make(
        rows: int, candidate: Candidate = RECORDED, kind: dict[str, str] | None = None, **facts: Any
    ) -> list[GroupedChoice]:
        def load(choice: GroupedChoice, index: int) -> Callable[..., None] | None:
            asked.append(choice)
            return loops.load(choice, index)

        problem = Problem.of_groups(rows, N, K, GROUPS, **kind or {})
        row = Row(problem, device.fingerprint, candidate, kernel_source=kernel_source_hash(candidate.family))
        api.serve_by(dispatcher_of([replace(row, **facts)]))
        grouped.groups = groups_of(load)
        return asked

    return make


@pytest.mark.parametrize("rows", [13, 16])
def test_a_record_of_the_bucket_serves(recorded: Callable[..., list[GroupedChoice]], rows: int) -> None:
    asked = recorded(rows)
    a, b, offs = operands()
    assert torch.equal(tunegemm.grouped_mm(a, b, offs=offs), torchs(a, b, offs=offs))
    (choice,) = asked
    assert (choice.config.label, choice.swizzle_size, choice.l2_hint) == ("pp64x32x64 s16 e32 w8", 2, 1)
    bias = torch.randn(N, dtype=BF16)
    assert tunegemm.grouped_mm(a, b, offs=offs, bias=bias).shape == (13, N)
    assert asked == [choice] * 2


@pytest.mark.parametrize(
    "kind",
    [{"gate": "swiglu"}, {"gate": "geglu_tanh"}, {"gate": "swiglu", "dtype": "fp16"}, {"dtype": "fp16"},
     {"b_major": "n"}, {"dtype": "fp8_e4m3"}],
    ids=lambda kind: " ".join(kind.values()),
)  # fmt: skip
def test_records_of_every_kind_serve_it_alone(
    recorded: Callable[..., list[GroupedChoice]], kind: dict[str, str]
) -> None:
    """Gates that no table names, and fp8, whose kernels wait for their times, too."""
    candidate = Candidate.make(
        "grouped", dict(RECORDED.compile_params) | {"epi_n": 16}, dict(RECORDED.launch_params)
    )
    asked = recorded(16, candidate, kind)
    a, b, offs = operands()
    gate, dtype = kind.get("gate", ""), DTYPES[kind.get("dtype", "bf16")]
    a, b = a.to(dtype), b.contiguous() if "b_major" in kind else b.mT.to(dtype).mT
    if a.element_size() == 1:
        scale_a, scale_b = torch.rand(len(a)) + 0.5, torch.rand(GROUPS, N) + 0.5
        words = {"offs": offs, "out_dtype": BF16, "use_fast_accum": True}
        assert tunegemm.scaled_grouped_mm(a, b, scale_a, scale_b, **words).shape == (13, N)
    elif gate:
        for interleaved in (False, True):
            result = grouped.groups(a, b, offs, None, gate, interleaved)
            assert result is not None and result.shape == (13, N // 2)
    else:
        tunegemm.grouped_mm(a, b, offs=offs)
    problem = Problem.of_groups(16, N, K, GROUPS, **kind)
    assert {choice.config for choice in asked} == {config_of(problem, candidate)}
    asked.clear()
    grouped.groups(a.to(BF16), b.to(BF16), offs, None)  # another kind
    assert all(choice.config != config_of(problem, candidate) for choice in asked)


@pytest.mark.parametrize(
    ("rows", "major"), [(17, "k"), (8, "k"), (13, "n")], ids=["more rows", "fewer rows", "b's n contiguous"]
)
def test_what_a_record_is_not_of_the_table_serves(
    recorded: Callable[..., list[GroupedChoice]], rows: int, major: str
) -> None:
    asked = recorded(rows)
    a, b, offs = operands()
    b = b if major == "k" else b.contiguous()
    assert torch.equal(tunegemm.grouped_mm(a, b, offs=offs), torchs(a, b, offs=offs))
    (choice,) = asked
    assert choice == choose(GROUPS, N, K, 13, major=major)


def test_a_record_of_torchs_kernel_is_torchs(recorded: Callable[..., list[GroupedChoice]]) -> None:
    asked = recorded(13, TORCH_MM, ratio=1.0, confirmed=True)
    a, b, offs = operands()
    assert torch.equal(tunegemm.grouped_mm(a, b, offs=offs), torchs(a, b, offs=offs))
    assert asked == []


def test_a_record_that_cannot_run_is_told_of_and_is_torchs(
    recorded: Callable[..., list[GroupedChoice]],
) -> None:
    wide = Candidate.make(
        "grouped", dict(RECORDED.compile_params) | {"tile_n": 24}, dict(RECORDED.launch_params)
    )
    asked = recorded(13, wide)
    a, b, offs = operands()
    with pytest.warns(TunegemmWarning, match=r"groups4 cannot run here: .*tile_n 24"):
        assert torch.equal(tunegemm.grouped_mm(a, b, offs=offs), torchs(a, b, offs=offs))
    assert asked == []


@pytest.fixture
def one_order(loops: Loops, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GroupedChoice]]:
    """Policy batch_invariant; which kernels were asked for."""
    asked: list[GroupedChoice] = []

    def load(choice: GroupedChoice, index: int) -> Callable[..., None] | None:
        asked.append(choice)
        return loops.load(choice, index)

    monkeypatch.setattr(grouped, "groups", groups_of(load))
    with tunegemm.policy("batch_invariant"):
        yield asked


@pytest.mark.parametrize("gate", ["", "swiglu"])
def test_one_order_of_sums_at_any_number_of_rows(
    one_order: list[GroupedChoice], loops: Loops, monkeypatch: pytest.MonkeyPatch, gate: str
) -> None:
    monkeypatch.setattr(grouped.extension, "gpu_of", lambda device: "NVIDIA H100 80GB HBM3")
    loops.quiet = True
    weights = torch.zeros(2, 128, 3136, dtype=BF16)
    usual = []
    for rows in (1, 2, 16, 300, 1200, 4096, 20000):
        ends = torch.full((2,), rows, dtype=torch.int32)
        result = grouped.groups(torch.zeros(rows, 3136, dtype=BF16), weights.mT, ends, None, gate)
        assert result is not None, rows
        usual.append(choose(2, 128, 3136, rows, gpu="NVIDIA H100 80GB HBM3", gate=gate))
    assert len(loops.calls) == 7 and one_order and not any(c.is_few for c in one_order)
    # Without the policy one row has another kernel, and many have torch's.
    assert usual[0] is not None and usual[0].is_few and (gate or None in usual)


def test_what_no_kernel_takes_is_outside_of_the_promise_and_said(
    one_order: list[GroupedChoice], loops: Loops
) -> None:
    a, b, offs = operands()
    with pytest.warns(
        TunegemmWarning, match="has no kernel here, and falls back to torch: batch_invariant does not hold"
    ):
        tunegemm.grouped_mm(a.float(), b.float(), offs=offs)
    tunegemm.grouped_mm(a[:3].float(), b.float(), offs=offs.clamp(max=3))  # once: warnings are errors here
    tunegemm.grouped_mm(a, b, offs=offs)
    assert len(loops.calls) == 1


def test_a_record_of_torchs_kernel_does_not_serve_one_order(
    recorded: Callable[..., list[GroupedChoice]],
) -> None:
    asked = recorded(13, TORCH_MM, ratio=1.0, confirmed=True)
    a, b, offs = operands()
    with tunegemm.policy("batch_invariant"):
        assert torch.equal(tunegemm.grouped_mm(a, b, offs=offs), torchs(a, b, offs=offs))
    assert len(asked) == 1
