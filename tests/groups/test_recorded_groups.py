"""What a recording says of a call of torch's grouped products, and why no kernel serves another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tunegemm.groups import scaled_groups
from tunegemm.groups.recorded_groups import GroupedCall

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
A, B, OFFS = (
    torch.zeros(32, 64).to(BF16),
    torch.zeros(4, 64, 48).to(BF16),
    torch.tensor([8, 8, 16, 32], dtype=torch.int32),
)
RESULT = torch.zeros(32, 48).to(BF16)
CALL = GroupedCall("grouped_mm", A, B.mT.contiguous().mT, OFFS)
SCALED = GroupedCall(
    "scaled_grouped_mm", A.to(FP8), B.mT.contiguous().to(FP8).mT, OFFS, None,
    torch.ones(32), torch.ones(4, 48), use_fast_accum=True,
)  # fmt: skip


def test_a_call_is_read_by_the_names_of_its_operator() -> None:
    call = GroupedCall.of("_grouped_mm", [A, B, OFFS], {"out_dtype": BF16})
    assert (call.op, call.a is A, call.b is B, call.offs is OFFS, call.out_dtype) == (
        "grouped_mm",
        True,
        True,
        True,
        BF16,
    )
    named = GroupedCall.of("_grouped_mm", [], {"self": A, "mat2": B, "offs": None})
    assert named.a is A and named.b is B and named.tensors == []
    scaled = GroupedCall.of("_scaled_grouped_mm", [A, B, *(torch.ones(n) for n in (1, 2)), OFFS], {})
    assert [len(each) for each in scaled.tensors] == [4, 1, 2] and scaled.key[-1] == (True, False, False)


def test_a_served_call_is_its_problem() -> None:
    kind = CALL.kind(RESULT)
    assert (kind.m, kind.n, kind.k, kind.groups, kind.refusal, kind.bias) == (32, 48, 64, 4, "", "none")
    assert (kind.a_major, kind.b_major, kind.out_major, kind.op) == ("k", "k", "n", "grouped_mm")
    assert replace(CALL, bias=torch.zeros(4, 48).to(BF16)).kind(RESULT).bias == "vector"
    assert replace(CALL, b=B).kind(RESULT).b_major == "n"
    assert replace(CALL, gate="swiglu").kind(RESULT).epilogue == "swiglu"
    assert SCALED.kind(RESULT).in_dtype == "fp8_e4m3" and SCALED.kind(RESULT).refusal == ""


ROOM = torch.zeros(32 * 64 + 8).to(BF16)


@pytest.mark.parametrize(
    ("call", "changes", "says"),
    [
        (CALL, {"a": B[0].mT, "b": B[0]}, "lie along k"), (CALL, {"offs": None}, "do not divide a's rows"),
        (CALL, {"a": B.mT}, "do not divide a's rows"), (CALL, {"out_dtype": BF16}, ""),
        (CALL, {"out_dtype": torch.float32}, "store bf16, not torch.float32"),
        (SCALED, {"out_dtype": BF16}, ""),
        (SCALED, {"out_dtype": torch.float16}, "store bf16, not torch.float16"),
        (SCALED, {"use_fast_accum": False}, "use_fast_accum=True"),
        (SCALED, {"bias": torch.zeros(4, 48)}, "without a bias"),
        (SCALED, {"scale_result": torch.ones(1)}, "a scale of the result"),
        (SCALED, {"scale_b": None}, "do not read"),
        (CALL, {"a": A.double()}, "do not read operands"),
        (CALL, {"a": ROOM[1 : 32 * 64 + 1].view(32, 64)}, "do not read"),
        (CALL, {"a": ROOM[8 : 32 * 64 + 8].view(32, 64)}, ""), (CALL, {"offs": OFFS.long()}, "do not read"),
    ],
)  # fmt: skip
def test_why_no_kernel_serves_a_call(call: GroupedCall, changes: dict[str, Any], says: str) -> None:
    found = replace(call, **changes).kind(RESULT).refusal
    assert says in found and bool(says) == bool(found)


@pytest.mark.parametrize(
    ("compiling", "plain", "served", "by"),
    [(False, True, True, "ours"), (False, True, False, "torch's, packed"), (False, False, True, "torch's"),
     (True, True, True, "torch's"), (True, False, True, "torch's")],
)  # fmt: skip
def test_scaled_groups_are_ours_for_plain_calls_outside_of_tracing(
    monkeypatch: pytest.MonkeyPatch, compiling: bool, plain: bool, served: bool, by: str
) -> None:
    ours, offs = torch.ones(1), torch.tensor([[8, 0], [16, 0]], dtype=torch.int32)[:, 0]
    asked: list[Any] = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    monkeypatch.setattr(scaled_groups, "are_of_blocks", lambda *_: False)
    monkeypatch.setattr(scaled_groups, "are_plain", lambda *_: plain)
    monkeypatch.setattr(scaled_groups, "below_autograd", lambda *_, **__: ours if served else None)
    monkeypatch.setattr(
        torch, "_scaled_grouped_mm", lambda *_, **words: asked.append(words["offs"]) or "torch's"
    )
    result = scaled_groups.scaled_grouped_mm(A, B, torch.ones(1), torch.ones(1), offs=offs)
    if by == "ours":
        assert torch.equal(result, ours) and not asked
    else:
        assert result == "torch's" and asked[0].is_contiguous() == (by == "torch's, packed")  # type: ignore[comparison-overlap]
