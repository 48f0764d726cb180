"""Kernels around products of groups: by Triton's interpreter beside torch, and compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import run_interpreted
from tunegemm.compile.triton_object import read_object
from tunegemm.generate import routing

#: Triton decides at the import whether kernels are interpreted: a process of their own.
SCRIPT = """
import itertools, torch
from tunegemm.generate import routing
from tunegemm.generate.routing import kernel

torch.manual_seed(0)
POISON = 776.0

def check_route(tokens, chosen, count, dtype, hidden=72, own_rows=1, far=False):
    index = torch.randint(-1 if far else 0, count + (5 if far else 0), (tokens, chosen)).to(dtype)
    wide = torch.randn(tokens, hidden + 16).bfloat16()
    x, total = wide[:, :hidden], tokens * chosen
    place, ends = torch.full((total + 2,), -9, dtype=torch.int32), torch.full((count + 2,), -9).int()
    rows = torch.full((total + 2, hidden), POISON).bfloat16()
    given = dict(
        step=dtype.itemsize // 4, tokens=tokens, chosen=chosen, count=count, units=hidden // 8,
        x_units=wide.stride(0) // 8)
    blocks, numbers = routing.route_numbers(**given, own_rows=own_rows or 1)
    tensors = place, ends, rows.view(torch.int64)
    if own_rows:
        kernel.route[(blocks,)](
            index.view(torch.int32), wide.view(torch.int64), *tensors, **numbers, own_rows=own_rows,
            others=256, experts=32, words=512)
    else:
        blocks, numbers = routing.spread_numbers(**given)
        counts = torch.empty(blocks * routing.BINS, dtype=torch.int32)
        few = {name: numbers[name] for name in ("step", "total", "count")}
        constants = {"own_rows": routing.SPREAD_ROWS, "bins": routing.BINS}
        kernel.tally[(blocks,)](index.view(torch.int32), counts, **few, **constants)
        kernel.spread[(blocks,)](
            index.view(torch.int32), wide.view(torch.int64), counts, *tensors, **numbers, **constants,
            others=32, words=32, together=16)
    flat = index.reshape(-1).long()
    flat = torch.where((flat < 0) | (flat >= count), count, flat)
    ids, order = flat.sort(stable=True)
    assert torch.equal(ends[:count].long(), torch.searchsorted(ids, torch.arange(count), right=True))
    assert torch.equal(place[:total].long()[order], torch.arange(total))
    assert torch.equal(rows[:total], x[order // chosen])
    assert (place[total:] == -9).all() and (ends[count:] == -9).all() and (rows[total:] == POISON).all()

for tokens, chosen, count, own_rows, dtype, far in (
    (1, 8, 128, 1, torch.int64, False), (1, 1, 1, 1, torch.int32, False), (3, 2, 8, 1, torch.int64, True),
    (40, 4, 32, 8, torch.int32, True), (65, 8, 33, 8, torch.int64, True), (260, 1, 9, 8, torch.int32, False),
):
    check_route(tokens, chosen, count, dtype, own_rows=own_rows, far=far)
check_route(5, 2, 4, torch.int64, hidden=2056)
check_route(300, 3, 129, torch.int64, own_rows=0, far=True)
check_route(1100, 4, 8, torch.int32, own_rows=0)

def check_combine(tokens, chosen, dtype, weights_dtype, place_dtype, hidden=520, count=6):
    total = tokens * chosen
    used = total - total // 3
    rows = torch.randn(total, hidden).to(dtype)
    rows[used:] = float("nan")
    weights = torch.rand(tokens, chosen + 3).to(weights_dtype)[:, :chosen]
    place = torch.randperm(total).to(place_dtype)
    ends = torch.full((count,), used, dtype=torch.int32)
    out = torch.full((tokens + 1, hidden), POISON).to(dtype)
    blocks, numbers = routing.combine_numbers(
        step=place_dtype.itemsize // 4, tokens=tokens, chosen=chosen, count=count, units=hidden // 8,
        weights_stride=weights.stride(0))
    kernel.combine[(blocks,)](
        rows, place.view(torch.int32), ends, weights, out, **numbers,
        columns=routing.COLUMNS, together=4)
    each = rows.float()[place.long()].view(tokens, chosen, hidden)
    each = torch.where((place < used).view(tokens, chosen, 1), each, 0.0)
    expected = (each * weights.float()[..., None]).sum(1)
    torch.testing.assert_close(out[:tokens].float(), expected, rtol=2**-7, atol=1e-2)
    assert (out[tokens:] == POISON).all()

for chosen, dtype, weights_dtype, place_dtype in (
    (1, torch.bfloat16, torch.float32, torch.int64), (2, torch.float16, torch.float16, torch.int32),
    (6, torch.bfloat16, torch.bfloat16, torch.int32), (8, torch.float16, torch.float32, torch.int64),
):
    check_combine(3, chosen, dtype, weights_dtype, place_dtype)

def check_gate(rows, inner, dtype, alternate, slope, limit, offset):
    both = torch.randn(rows, 2 * inner).mul(6).to(dtype)
    both[0, :4] = float("nan")
    out = torch.full((rows + 1, inner), POISON).to(dtype)
    blocks, numbers = routing.gate_numbers(
        rows=rows, units=inner // 8, slope=slope, limit=limit, offset=offset)
    kernel.gate[(blocks,)](both, out, **numbers, columns=routing.GATE_COLUMNS, alternate=alternate)
    gate, up = (both[:, ::2], both[:, 1::2]) if alternate else both.chunk(2, 1)
    gate, up = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    expected = (up + offset) * gate * torch.sigmoid(slope * gate)
    torch.testing.assert_close(out[:rows].float(), expected, rtol=2**-7, atol=1e-3, equal_nan=True)
    assert bool(expected[0].isnan().any()) and (out[rows:] == POISON).all()

for dtype, alternate in itertools.product((torch.bfloat16, torch.float16), (False, True)):
    check_gate(3, 1032, dtype, alternate, 1.702, 7.0, 1.0)
    check_gate(2, 96, dtype, alternate, 1.0, float("inf"), 0.0)

def check_few(sizes, n, k, dtype, gated=False, interleaved=False, bias=None, extra=0):
    count, total = len(sizes), sum(sizes) + extra
    a = torch.randn(total, k + 8).to(dtype)[:, :k]
    a[sum(sizes):] = float("nan")
    weights = (torch.randn(count, n * (1 + gated) + 1, k + 16) * k**-0.5).to(dtype)[:, :-1, :k]
    ends = torch.tensor(sizes).cumsum(0).int()
    lines = weights.shape[1]
    added = {None: None, 1: torch.randn(lines), 2: torch.randn(count, lines)}[bias]
    added = None if added is None else added.to(dtype).expand(count, lines)
    out = torch.full((total + 1, n), POISON).to(dtype)
    strides = a.stride(0) // 8, weights.stride(0) // 8, weights.stride(1) // 8
    blocks, numbers = routing.few_numbers(
        rows=total, count=count, n=n, units=k // 8, strides=strides, gated=gated, interleaved=interleaved,
        bias_stride=None if added is None else added.stride(0))
    kernel.few[(blocks,)](
        a, weights, ends, a if added is None else added, out, **numbers, lines=routing.FEW_LINES,
        length=routing.FEW_LENGTH, groups=routing.FEW_GROUPS, gated=gated)
    group = torch.repeat_interleave(torch.arange(count), torch.tensor(sizes))
    expected = torch.einsum("rk,rnk->rn", a[:sum(sizes)].float(), weights[group].float())
    if added is not None:
        expected += added[group].float()
    if gated:
        gate, up = (expected[:, ::2], expected[:, 1::2]) if interleaved else expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out[:sum(sizes)].float(), expected, rtol=2**-7, atol=1e-2)
    assert (out[sum(sizes):] == POISON).all()

check_few([0, 1, 0], 24, 1040, torch.bfloat16)
check_few([1, 0, 3, 0, 0, 2], 10, 72, torch.float16, bias=2, extra=2)
check_few([0] * 299 + [1, 0], 8, 48, torch.bfloat16, bias=1)
check_few([0, 0], 8, 48, torch.bfloat16, extra=1)
check_few([1, 0, 2], 6, 1032, torch.bfloat16, gated=True)
check_few([1, 0, 2], 5, 40, torch.bfloat16, gated=True, interleaved=True, bias=2, extra=1)
check_few([2, 1], 8, 40, torch.bfloat16, gated=True, bias=1)

def check_layer(
    tokens, chosen, count, inner, hidden, dtype, number, bias=False, interleaved=False, weights_dtype=None,
    gate=(1.0, float("inf"), 0.0), far=False,
):
    index = torch.randint(-1 if far else 0, count + (3 if far else 0), (tokens, chosen)).to(number)
    is_here = (index >= 0) & (index < count)
    x = torch.randn(tokens, hidden + 8).to(dtype)[:, :hidden]
    up = (torch.randn(count, 2 * inner + 1, hidden + 16) * hidden**-0.5).to(dtype)[:, :-1, :hidden]
    down = (torch.randn(count, hidden, inner + 8) * inner**-0.5).to(dtype)[..., :inner]
    biases = [torch.randn(count, n).to(dtype) if bias else None for n in (2 * inner, hidden)]
    factors = torch.rand(tokens, chosen + 1).to(weights_dtype or dtype)[:, :chosen]
    factors[~is_here] = float("nan")
    rows = torch.full((tokens * chosen + 1, inner), POISON).to(dtype)
    out = torch.full((tokens + 1, hidden), POISON).to(dtype)
    common = dict(step=number.itemsize // 4, chosen=chosen, count=count)
    blocks, numbers = routing.few_up_numbers(
        **common, total=tokens * chosen, n=inner, units=hidden // 8, interleaved=interleaved,
        strides=(x.stride(0) // 8, up.stride(0) // 8, up.stride(1) // 8),
        bias_stride=2 * inner if bias else None, slope=gate[0], limit=gate[1], offset=gate[2])
    numbers32 = index.view(torch.int32)
    given = [x if each is None else each for each in biases]
    kernel.few_up[(blocks,)](
        numbers32, x, up, given[0], rows, **numbers, lines=routing.UP_LINES,
        length=32)
    assert (rows[:-1][~is_here.reshape(-1)] == POISON).all() and (rows[-1] == POISON).all()
    for down_kernel in routing.DOWNS.values():
        constants = {"together": down_kernel.together, "lines": down_kernel.lines, "length": 32}
        blocks, numbers = routing.few_down_numbers(
            **common, tokens=tokens, n=hidden, units=inner // 8, lines=down_kernel.lines,
            strides=(down.stride(0) // 8, down.stride(1) // 8),
            bias_stride=hidden if bias else None, factors_stride=factors.stride(0))
        kernel.few_down[(blocks,)](
            numbers32, rows, down, given[1], factors, out, **numbers, **constants)
        groups = index.long().clamp(0, count - 1)
        both = torch.einsum("tk,tjnk->tjn", x.float(), up[groups].float())
        if bias:
            both += biases[0][groups].float()
        first, second = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
        first, second = first.clamp(max=gate[1]), second.clamp(-gate[1], gate[1])
        inside = ((second + gate[2]) * first * torch.sigmoid(gate[0] * first)).to(dtype).float()
        each = torch.einsum("tjk,tjnk->tjn", inside, down[groups].float())
        if bias:
            each += biases[1][groups].float()
        each = torch.where(is_here[..., None], each * factors.float()[..., None], 0.0)
        torch.testing.assert_close(out[:tokens].float(), each.sum(1), rtol=2**-7, atol=2e-2)
        assert (out[tokens:] == POISON).all()

check_layer(1, 8, 16, 40, 72, torch.bfloat16, torch.int64)
check_layer(1, 2, 3, 72, 40, torch.float16, torch.int32, bias=True, interleaved=True)
check_layer(3, 9, 5, 8, 24, torch.bfloat16, torch.int32, far=True, weights_dtype=torch.float32)
check_layer(2, 3, 4, 32, 16, torch.bfloat16, torch.int64, bias=True, gate=(1.702, 7.0, 1.0), far=True)
"""


@pytest.mark.slow
def test_each_kernel_is_what_torch_gives() -> None:
    run_interpreted(SCRIPT)


@pytest.mark.slow
@pytest.mark.long
def test_all_compile_with_their_arguments_in_order(tmp_path: Path) -> None:
    """No GPU needed: without spills, and with pointers first, which a launch takes by their order."""
    for number, (name, key) in enumerate(routing.kernels().items()):
        assert routing.FAMILY.compile(key, tmp_path / str(number)).spill_bytes == 0, name
        header, _ = read_object((tmp_path / str(number)).read_bytes())
        kinds = [argument.type for argument in header.arguments]
        first = kinds.index("i32")
        assert set(kinds[:first]) == {"pointer"} and set(kinds[first:]) == {"i32"}, name


def test_keys_tell_kernels_apart() -> None:
    found = routing.kernels()
    assert len({tuple(sorted(key.items())) for key in found.values()}) == len(found) == 25
    assert {"route 1", "combine bf16 fp32", "gate fp16 True"} <= set(found)
