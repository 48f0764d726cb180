"""Grouped products by real kernels: each against fp32, its neighbours' rows untouched; captured, compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import tunegemm
from tests.support.grouped import DTYPES
from tunegemm.generate.grouped import GroupedKernel
from tunegemm.groups import grouped
from tunegemm.model.grouped import kinds, listed, maker_of
from tunegemm.store.provided import provide_grouped

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
POISON = 776.0
"""What all types of output hold."""
#: Rows of each group, N and K. Tiles end inside groups, and hang over N and K.
DIVISIONS: dict[str, tuple[list[int], int, int]] = {
    "exact": ([256, 256], 256, 128),
    "ragged": ([1, 131, 0, 7], 256, 256),
    "empty": ([0, 0, 3, 0, 0], 128, 192),
    "nothing": ([0, 0, 0], 128, 128),
    "edges": ([9, 8, 17, 33, 65, 2], 200, 200),
    "odd tiles": ([300, 0, 517, 1, 64], 640, 320),  # so that a cluster of two has one
    "even tiles": ([170, 175, 177, 352, 353, 529], 256, 128),  # about one, two and three of the widest
    "one hot": ([0, 1500, 0, 0, 0, 0, 0, 0], 1024, 512),
    "more than a window": ([group % 5 for group in range(300)], 136, 128),
    "first": ([300, *[0] * 69], 384, 320),
    "last": ([*[0] * 69, 300], 384, 320),
}


@cache
def of_kind(kind: str) -> dict[str, GroupedKernel]:
    """A kind's kernels by their labels, compiled where they do not ship."""
    provided = provide_grouped(kind)
    assert not provided.failures
    found = {}
    for config in listed(kind=kind):
        artifact = provided.of(maker_of(config).key_of(config))
        assert artifact is not None and artifact.resources.spill_bytes == 0, config.label
        found[config.label] = maker_of(config).kernel(config, artifact.path)
    return found


@pytest.fixture(scope="module")
def loaded() -> dict[str, GroupedKernel]:
    """The kernels that are served."""
    return of_kind("bf16") | of_kind("gated") | of_kind("n_major")


def operands(
    sizes: list[int], n: int, k: int, extra: int = 0, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, ...]:
    """a, the weights, the groups' ends and a bias for each; `extra` rows behind the last group are NaN."""
    torch.manual_seed(0)
    rows = sum(sizes)
    a = torch.randn(rows + extra, k, device="cuda")
    a[rows:] = float("nan")
    a, weights = a.to(dtype), (torch.randn(len(sizes), n, k, device="cuda") * k**-0.5).to(dtype)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    return a, weights, ends, torch.randn(len(sizes), n, device="cuda").to(dtype)


def expected(
    sizes: list[int], a: Any, weights: Any, bias: Any = None, gate: Any = None, interleaved: bool = False
) -> torch.Tensor:
    parts, first = [], 0
    for group, size in enumerate(sizes):
        part = a[first : first + size].float() @ weights[group].float().t()
        part = part if bias is None else part + bias[group].float()
        if gate is not None:
            part = gate(*((part[:, 0::2], part[:, 1::2]) if interleaved else part.chunk(2, dim=1)))
        parts.append(part)
        first += size
    return torch.cat(parts)


def scaled(product: torch.Tensor, sizes: list[int], scale_a: Any, scale_b: Any) -> torch.Tensor:
    """A product with a scale for each row, and of each group for each column."""
    group = torch.tensor([g for g, size in enumerate(sizes) for _ in range(size)], device="cuda").long()
    return product * scale_a[: len(group), None] * scale_b[group]


def ones(kernel: GroupedKernel, groups: int, n: int, rows: int) -> tuple[Any, Any]:
    """What stands for the bias, and the rows' scales, of kernels that have to have them."""
    if not kernel.config.fused.scales:
        return None, None
    return torch.ones(groups, n, device="cuda"), torch.ones(rows, device="cuda")


def as_config(weights: torch.Tensor, kernel: GroupedKernel) -> torch.Tensor:
    """The weights as a kernel wants them to lie."""
    return weights.contiguous() if kernel.config.a_major == "k" else weights.mT.contiguous().mT


def error(result: torch.Tensor, reference: torch.Tensor) -> float:
    if not reference.numel():
        return 0.0
    return float((result.float() - reference).norm() / reference.norm())


@pytest.mark.parametrize("name", DIVISIONS)
@pytest.mark.parametrize("kind", kinds())
def test_each_kernel_is_right_and_writes_no_other_rows(kind: str, name: str) -> None:
    sizes, n, k = DIVISIONS[name]
    rows = sum(sizes)
    for label, kernel in of_kind(kind).items():
        config, dtype = kernel.config, DTYPES[kernel.config.in_dtype]
        gate = config.fused.gate if config.fused.gated else None
        whole = k + -k % (16 // dtype.itemsize)  # TMA takes lines of whole 16 bytes
        a, weights, ends, bias = operands(sizes, n * (1 if gate is None else 2), whole, 37, dtype)
        weights, scales = as_config(weights, kernel), None
        if config.fused.scales:
            scales, bias = torch.rand(a.shape[0], device="cuda") + 0.5, bias.float().abs() + 0.5
        for blocks, given, swizzle, turns in (
            (132, None, 8, False), (7, bias, 1, True), (132, bias, 3, False), (132, None, 2, True),
        ):  # fmt: skip
            if scales is not None and given is None:
                continue
            memory = torch.full((32 + a.shape[0] + 32, n), POISON, device="cuda").to(DTYPES[config.out_dtype])
            out = memory[32:-32]
            kernel.launch(
                a, weights, out, ends, given,
                blocks=blocks, swizzle_size=swizzle, interleaved=turns, scales=scales,
            )  # fmt: skip
            if scales is None:
                reference = expected(sizes, a, weights, given, gate, turns)
            else:
                reference = scaled(expected(sizes, a, weights), sizes, scales, given)
            assert error(out[:rows], reference) < 4e-3, (label, blocks, turns)
            assert bool((memory[:32] == POISON).all()) and bool((memory[32 + rows :] == POISON).all()), label


@pytest.mark.parametrize("kind", kinds())
def test_no_offsets_make_a_kernel_write_outside(kind: str) -> None:
    for ends in ([80, 40, 120], [-5, 30, 2**31 - 1], [2**31 - 1, -(2**31), 7], [200, 300, 400], [-1, -2, -3]):
        given = torch.tensor(ends, device="cuda", dtype=torch.int32)
        for label, kernel in of_kind(kind).items():
            config = kernel.config
            a, weights, _, _ = operands(
                [40, 40, 40], 256 if config.fused.gated else 128, 128, dtype=DTYPES[config.in_dtype]
            )
            memory = torch.full((32 + 120 + 32, 128), POISON, device="cuda").to(DTYPES[config.out_dtype])
            bias, scales = ones(kernel, 3, 128, 120)
            weights = as_config(weights, kernel)
            kernel.launch(a, weights, memory[32:-32], given, bias, blocks=132, scales=scales)
            outside = torch.cat((memory[:32], memory[-32:]))
            assert bool((outside == POISON).all()), (label, ends)


@pytest.mark.parametrize("kind", kinds())
def test_many_divisions_are_exact(thorough: bool, kind: str) -> None:
    """Small whole numbers, whose sums bf16 holds; of gated products no more than what an exponential's
    approximation leaves. Rows behind the last group and around the product are poisoned.

    Of all kinds 100,000 divisions and more where the test is thorough, in some 10 s.
    """
    torch.manual_seed(1)
    groups, rows, n, k, at_once, around = 40, 257, 64, 64, 400, 16
    whole_a = torch.randint(-2, 3, (rows, k), device="cuda")
    whole_weights = torch.randint(-2, 3, (groups, 2 * n, k), device="cuda")
    number = torch.arange(rows, device="cuda", dtype=torch.int32)
    found = of_kind(kind)
    for label, kernel in found.items():
        fused, dtype = kernel.config.fused, DTYPES[kernel.config.in_dtype]
        out_dtype = DTYPES[kernel.config.out_dtype]
        a, weights = whole_a.to(dtype), whole_weights.to(dtype)
        sums = torch.einsum("rk,gnk->grn", a.float(), weights.float())
        bound = 0.0
        if fused.gated:
            products, bound = fused.gate(sums[..., :n], sums[..., n:]).to(out_dtype), 2.0**-7
        else:
            products, weights = sums[..., :n].to(out_dtype), weights[:, :n]
        bias, scales = ones(kernel, groups, n, rows)
        weights = as_config(weights, kernel)
        wrong = torch.zeros((), device="cuda", dtype=torch.int64)
        for _ in range(-(-100_000 // len(kinds()) // len(found) // at_once) if thorough else 1):
            share = torch.rand(at_once, groups, device="cuda")
            share **= torch.randint(1, 9, (at_once, 1), device="cuda")
            used = torch.randint(0, rows + 1, (at_once, 1), device="cuda").clamp_(min=rows // 4)
            part = share.cumsum(1) / share.sum(1, keepdim=True)
            ends = (part * used).round().to(torch.int32).clamp_(max=rows)
            out = torch.full((at_once, rows + 2 * around, n), POISON, device="cuda", dtype=out_dtype)
            for each in range(at_once):
                own = out[each, around:-around]
                kernel.launch(a, weights, own, ends[each], bias, blocks=132, scales=scales)
            of_row = torch.searchsorted(ends, number.expand(at_once, rows).contiguous(), right=True)
            right = torch.full_like(out, POISON)
            inside = products[of_row.clamp(max=groups - 1), number.long()]
            right[:, around:-around] = torch.where((of_row < groups)[..., None], inside, POISON)
            near = (out - right).abs() <= bound * right.abs() + bound  # NaN is not
            wrong += (~near).flatten(1).any(1).sum()
        assert int(wrong) == 0, label


def test_a_graph_of_each_kernel_holds_for_other_divisions() -> None:
    """Launches follow each other without a wait, and find the barriers of the one before gone."""
    sizes = [500, 0, 300, 200]
    a, weights, ends, _ = operands(sizes, 640, 512)
    for label, kernel in of_kind("bf16").items():
        outs = [torch.empty(1000, 640, device="cuda", dtype=BF16) for _ in range(3)]
        graph = torch.cuda.CUDAGraph()
        kernel.launch(a, weights, outs[0], ends, blocks=132)
        with torch.cuda.graph(graph):
            for out in outs:
                kernel.launch(a, weights, out, ends, blocks=132)
        for other in ([0, 1000, 0, 0], [1, 2, 3, 994], [0, 0, 0, 1], sizes):
            ends.copy_(torch.tensor(other, device="cuda").cumsum(0))
            graph.replay()
            for out in outs:
                assert error(out[: sum(other)], expected(other, a, weights)) < 4e-3, (label, other)


@pytest.fixture
def only_ours(loaded: dict[str, GroupedKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which torch computes a product of groups of rows."""
    monkeypatch.setattr(grouped, "groups", grouped.Groups())

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("torch's grouped product")

    monkeypatch.setattr(grouped, "by_torch", refuse)


@pytest.fixture
def every_kind(only_ours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of all kinds are compiled."""
    for kind in kinds():
        provide_grouped(kind)


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("rows", [1, 16, 300, 1200])
def test_calls_are_served(rows: int) -> None:
    sizes = [rows // 3, 0, rows - rows // 3, 0]
    a, weights, ends, bias = operands(sizes, 1088, 256)  # of smaller N 300 rows are torch's
    for given, reference in ((None, None), (bias, bias), (bias[0], bias[0].expand(4, 1088))):
        result = tunegemm.grouped_mm(a, weights.mT, offs=ends, bias=given)
        assert error(result, expected(sizes, a, weights, reference)) < 4e-3


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("rows", [1, 16, 300, 800])  # of 256 rows a group on they are torch's
def test_calls_with_n_contiguous_are_served(rows: int) -> None:
    sizes = [rows // 3, 0, rows - rows // 3, 0]
    a, weights, ends, bias = operands(sizes, 512, 256)
    result = tunegemm.grouped_mm(a, weights.mT.contiguous(), offs=ends, bias=bias)
    assert error(result, expected(sizes, a, weights, bias)) < 4e-3


@pytest.mark.usefixtures("every_kind")
@pytest.mark.parametrize("rows", [1, 16, 300, 1200])
def test_calls_of_fp16_are_served(rows: int) -> None:
    sizes = [rows // 3, 0, rows - rows // 3, 0]
    a, weights, ends, bias = operands(sizes, 512, 256, dtype=torch.float16)
    result = tunegemm.grouped_mm(a, weights.mT, offs=ends, bias=bias)
    assert result.dtype is torch.float16 and error(result, expected(sizes, a, weights, bias)) < 4e-3


@pytest.mark.usefixtures("every_kind")
@pytest.mark.parametrize("rows", [1, 16, 300, 1200])
def test_calls_of_fp8_are_served_as_torchs(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    sizes = [rows // 3, 0, rows - rows // 3, 0]
    a, weights, ends, _ = operands(sizes, 512, 256, dtype=torch.float8_e4m3fn)
    scale_a, scale_b = torch.rand(rows, device="cuda") + 0.5, torch.rand(4, 512, device="cuda") + 0.5
    arguments = a, weights.mT, scale_a, scale_b
    words: dict[str, Any] = {"offs": ends, "out_dtype": BF16, "use_fast_accum": True}
    theirs = torch._scaled_grouped_mm(*arguments, **words)
    with tunegemm.enable():
        taken_over = torch._scaled_grouped_mm(*arguments, **words)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("torch's grouped product")

    monkeypatch.setattr(torch, "_scaled_grouped_mm", refuse)
    result = tunegemm.scaled_grouped_mm(*arguments, **words)
    reference = scaled(expected(sizes, a, weights), sizes, scale_a, scale_b)
    for found in (result, taken_over, theirs):
        assert error(found, reference) < 4e-3


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("tokens", [1, 33, 700])
def test_layers_of_experts_are_served(tokens: int) -> None:
    torch.manual_seed(0)
    count, hidden, inner = 16, 1088, 256  # of smaller N 700 tokens are torch's
    x = torch.randn(tokens, hidden, device="cuda", dtype=BF16)
    gate_up = torch.randn(count, 2 * inner, hidden, device="cuda", dtype=BF16) * hidden**-0.5
    down = torch.randn(count, hidden, inner, device="cuda", dtype=BF16) * inner**-0.5
    weights, index = torch.rand(tokens, count, device="cuda", dtype=BF16).topk(4)
    weights, index = weights.contiguous(), index.contiguous()
    index[::5, 0] = count  # of another process
    reference = torch.zeros(tokens, hidden, device="cuda")
    for expert in range(count):
        share = (weights.float() * (index == expert)).sum(1, keepdim=True)
        gate, up = (x.float() @ gate_up[expert].float().t()).chunk(2, dim=1)
        reference += share * ((torch.nn.functional.silu(gate) * up) @ down[expert].float().t())
    result = tunegemm.experts(x, gate_up, down, index, weights, elsewhere=True)
    assert error(result, reference) < 8e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = tunegemm.experts(x, gate_up, down, index, weights, elsewhere=True)
    graph.replay()
    assert error(result, reference) < 8e-3


@pytest.mark.usefixtures("only_ours")
def test_a_captured_graph_holds_for_other_divisions() -> None:
    sizes = [50, 0, 30, 20]
    a, weights, ends, _ = operands(sizes, 512, 256)
    tunegemm.grouped_mm(a, weights.mT, offs=ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = tunegemm.grouped_mm(a, weights.mT, offs=ends)
    for other in ([0, 100, 0, 0], [1, 2, 3, 94], sizes):
        ends.copy_(torch.tensor(other, device="cuda").cumsum(0))
        graph.replay()
        assert error(result, expected(other, a, weights)) < 4e-3, other


def test_what_is_captured_before_a_call_is_torchs(loaded: dict[str, GroupedKernel]) -> None:
    a, weights, ends, _ = operands([50, 0, 30, 20], 520, 264)
    torch._grouped_mm(a, weights.mT, offs=ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = tunegemm.grouped_mm(a, weights.mT, offs=ends)
    graph.replay()
    assert error(result, expected([50, 0, 30, 20], a, weights)) < 4e-3


def test_gradients_are_as_torchs(loaded: dict[str, GroupedKernel]) -> None:
    sizes = [50, 0, 30, 20]
    a, weights, ends, _ = operands(sizes, 512, 256)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for call in (tunegemm.grouped_mm, torch._grouped_mm):
        x, w = (each.detach().clone().requires_grad_() for each in (a, weights))
        (call(x, w.mT, offs=ends).float() ** 2).sum().backward()
        assert x.grad is not None and w.grad is not None
        found.append((x.grad, w.grad))
    for ours, theirs in zip(*found, strict=True):
        assert error(ours, theirs.float()) < 1e-2
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.usefixtures("only_ours")
def test_compiled_code_is_served(mode: str) -> None:
    sizes = [50, 0, 30, 20]
    a, weights, ends, bias = operands(sizes, 512, 256)

    def layer(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return tunegemm.grouped_mm(x * 1, w.mT, offs=offs, bias=b) * 2

    compiled: Callable[..., torch.Tensor] = torch.compile(layer, mode=mode, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            result = compiled(a, weights, ends, bias).clone()
    assert error(result, 2 * expected(sizes, a, weights, bias)) < 4e-3


@pytest.mark.usefixtures("only_ours")
def test_a_takeover_serves_torchs_operator_and_the_gradient_of_a() -> None:
    sizes = [50, 0, 30, 20]
    a, weights, ends, _ = operands(sizes, 512, 256)
    with tunegemm.enable():
        x = a.clone().requires_grad_()
        result = torch.nn.functional.grouped_mm(x, weights.mT, offs=ends)
        result.float().square().sum().backward()
    reference = expected(sizes, a, weights)
    assert error(result.detach(), reference) < 4e-3
    back = expected(sizes, 2 * reference, weights.mT)
    assert x.grad is not None and error(x.grad, back) < 2e-2


@pytest.mark.parametrize("sizes", [[500, 0, 30, 20], [0, 1, 0, 0]], ids=["some rows", "one row"])
def test_a_policy_bounds_the_multiprocessors(loaded: dict[str, GroupedKernel], sizes: list[int]) -> None:
    a, weights, ends, _ = operands(sizes, 512, 256)
    reference = expected(sizes, a, weights)
    assert error(tunegemm.grouped_mm(a, weights.mT, offs=ends), reference) < 4e-3
    with tunegemm.policy("fastest", max_sms=16):
        assert error(tunegemm.grouped_mm(a, weights.mT, offs=ends), reference) < 4e-3


def test_a_launch_is_on_the_current_stream(loaded: dict[str, GroupedKernel]) -> None:
    sizes = [50, 0, 30, 20]
    a, weights, ends, _ = operands(sizes, 512, 256)
    tunegemm.grouped_mm(a, weights.mT, offs=ends)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = a * 2
        result = tunegemm.grouped_mm(late, weights.mT, offs=ends)
    stream.synchronize()
    assert error(result, 2 * expected(sizes, a, weights)) < 4e-3
