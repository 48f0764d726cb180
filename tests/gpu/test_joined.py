"""One A with several weights where they lie, by real kernels: against fp32, with NaN beside every operand."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from tunegemm.describe.device import Device, find_device
from tunegemm.generate import joined
from tunegemm.generate.cute_sm90.config import KernelConfig
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.joined import JoinedKernel
from tunegemm.model.joined import choose, listed
from tunegemm.store import packs
from tunegemm.store.provided import Provided, provide_joined

pytestmark = pytest.mark.gpu

WHERE = "cuda"
POISON = 776.0
"""What bf16 and fp16 hold."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CONFIGS = listed()
FEW_ROWS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 48, 49, 63, 64, 65, 96, 100, 127, 128, 129, 130)
MANY_ROWS = (1, 8, 63, 64, 65, 100, 127, 128, 129, 130, 250, 256, 257, 300, 511, 520)
#: How a gate and its up lie to each other.
ORDERS = ("gate first", "up first", "rows in turns", "side by side")
#: K; (N; K) of q, k and v and of gate and up in five models.
MODELS = {
    "Llama-3-8B": (4096, (4096, 1024, 1024), False, 14336),
    "Llama-3.2-3B": (3072, (3072, 1024, 1024), False, 8192),
    "Mistral-Nemo": (5120, (4096, 1024, 1024), False, 14336),
    "Qwen2.5-7B": (3584, (3584, 512, 512), True, 18944),
    "Qwen3-32B": (5120, (8192, 1024, 1024), False, 25600),
}


def named(config: KernelConfig) -> str:
    return " ".join(filter(None, (config.in_dtype, config.label, config.epilogue)))


@cache
def kernel_of(config: KernelConfig) -> JoinedKernel:
    """A kernel, compiled where it does not ship."""
    key = joined.FAMILY.key_of(config)
    artifact = packs.find(key) or compiled().of(key)
    assert artifact is not None and artifact.resources.spill_bytes == 0, named(config)
    return JoinedKernel.load(config, artifact.path)


@cache
def compiled() -> Provided:
    provided = provide_joined()
    assert not provided.failures
    return provided


@cache
def device() -> Device:
    return find_device("cuda:0")


def dtype_of(config: KernelConfig) -> torch.dtype:
    return DTYPES[config.in_dtype]


# Operands


def beside_nan(values: torch.Tensor) -> torch.Tensor:
    """The matrix in memory that is NaN all around, before and behind each row."""
    rows, columns = values.shape
    memory = torch.full((rows + 4, columns + 16), float("nan"), device=WHERE, dtype=values.dtype)
    inside = memory[2:-2, 8:-8]
    return inside.copy_(values)


def vector(n: int, dtype: torch.dtype, whole: bool) -> torch.Tensor:
    """A bias at an odd address, NaN on both sides."""
    memory = torch.full((n + 2,), float("nan"), device=WHERE, dtype=dtype)
    return memory[1:-1].copy_(drawn((n,), dtype, whole))


def drawn(shape: tuple[int, ...], dtype: torch.dtype, whole: bool, scale: float = 1.0) -> torch.Tensor:
    """By chance; whole: small whole numbers."""
    if whole:
        return torch.randint(-2, 3, shape, device=WHERE).to(dtype)
    return (torch.randn(shape, device=WHERE) * scale).to(dtype)


def gate_and_up(n: int, k: int, dtype: torch.dtype, order: str) -> list[torch.Tensor]:
    """Both in one memory, NaN all around."""
    columns = 2 * k + 24 if order == "side by side" else k + 16
    memory = torch.full((2 * n + 6, columns), float("nan"), device=WHERE, dtype=dtype)
    if order == "side by side":
        pair = [memory[2 : n + 2, 8 : k + 8], memory[2 : n + 2, k + 16 : 2 * k + 16]]
    elif order == "rows in turns":
        pair = [memory[2 : 2 * n + 2 : 2, 8:-8], memory[3 : 2 * n + 3 : 2, 8:-8]]
    else:
        pair = [memory[2 : n + 2, 8:-8], memory[n + 4 : 2 * n + 4, 8:-8]]
    for weight in pair:
        weight.copy_(drawn((n, k), dtype, False, k**-0.5))
    return pair[::-1] if order == "up first" else pair


def weights_of(ns: Sequence[int], k: int, dtype: torch.dtype, whole: bool = False) -> list[torch.Tensor]:
    return [beside_nan(drawn((n, k), dtype, whole, k**-0.5)) for n in ns]


def biases_of(ns: Sequence[int], dtype: torch.dtype, which: str, whole: bool = False) -> list[Any]:
    """which: all, some (not the first one), none."""
    found: list[Any] = [] if which == "none" else [vector(n, dtype, whole) for n in ns]
    if which == "some":
        found[0] = None
    return found


def reference(config: KernelConfig, a: Any, weights: Sequence[Any], biases: Sequence[Any]) -> torch.Tensor:
    parts = []
    for weight, bias in itertools.zip_longest(weights, biases):
        part = a.float() @ weight.float().t()
        parts.append(part if bias is None else part + bias.float())
    return config.fused.gate(*parts) if config.fused.gated else torch.cat(parts, 1)


def check(
    config: KernelConfig, a: Any, weights: Sequence[Any], biases: Sequence[Any] = (), *,
    exact: bool = False, wanted: torch.Tensor | None = None, **words: Any,
) -> torch.Tensor:  # fmt: skip
    """Launch, and compare every element and all that lies around the output. Returns the output."""
    wanted = reference(config, a, weights, biases) if wanted is None else wanted
    rows, columns = wanted.shape
    memory = torch.full((rows + 4, columns + 16), POISON, device=WHERE, dtype=a.dtype)
    out = memory[2:-2, 8:-8].fill_(float("nan"))
    refused = joined.refusal(a, weights, out, biases, gated=config.fused.gated)
    what = (
        named(config),
        rows,
        [tuple(weight.shape) for weight in weights],
        [b is None for b in biases],
        words,
    )
    assert refused == "", (refused, what)
    kernel_of(config).launch(a, weights, out, biases, device=device(), **words)
    if exact:
        near = out == wanted.to(out.dtype)
    else:
        near = (out.float() - wanted).abs() <= 1e-2 * wanted.abs() + 1e-2  # NaN is not
    if not bool(near.all()):
        wrong = (~near).nonzero()
        raise AssertionError(
            f"{what}: {len(wrong)} wrong, first {wrong[:3].tolist()}, last {wrong[-1].tolist()}"
        )
    result = out.clone()
    out.fill_(POISON)
    assert bool((memory == POISON).all()), what
    return result


def parts_of(config: KernelConfig) -> list[tuple[int, ...]]:
    """Rows of the weights of products that a kernel takes: ragged, of one tile, less than one."""
    few, gated = isinstance(config, GroupedConfig), config.fused.gated
    if few:
        return [(n, n) for n in (8, 64, 72, 200)] if gated else [(8,), (72, 8, 136), (64, 64), (200, 640, 24)]
    tile = config.tile_n // (1 + gated)
    if gated:
        return [(n, n) for n in (8, tile, tile + 8, 3 * tile + 40)]
    return [(8,), (tile,), (tile + 8, 24), (tile, 2 * tile + 40, tile + 8), (2 * tile, tile, tile)]


def bias_kinds(config: KernelConfig) -> tuple[str, ...]:
    if isinstance(config, GroupedConfig):
        return "none", "all", "some"
    return ("all", "some") if "bias_n" in config.fused.steps else ("none",)


# Tests


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_a_kernel_is_right_at_every_edge(config: KernelConfig) -> None:
    torch.manual_seed(0)
    dtype, gated = dtype_of(config), config.fused.gated
    rows_of = FEW_ROWS if isinstance(config, GroupedConfig) else MANY_ROWS
    ks, orders = itertools.cycle((8, 64, 72, 200, 520, 1096)), itertools.cycle(ORDERS)
    kinds, launches = (
        itertools.cycle(bias_kinds(config)),
        itertools.cycle(
            {"swizzle_size": swizzle, "along_m": along_m, "l2_hint": hint}
            for swizzle, along_m, hint in (
                (8, True, 0),
                (1, True, 2),
                (3, False, 1),
                (8, False, 2),
                (2, True, 0),
            )
        ),
    )
    for ns in parts_of(config):
        for rows in rows_of:
            k, kind = next(ks), next(kinds)
            a = beside_nan(drawn((rows, k), dtype, False))
            weights = gate_and_up(ns[0], k, dtype, next(orders)) if gated else weights_of(ns, k, dtype)
            check(config, a, weights, biases_of(ns, dtype, kind), **next(launches))


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_many_tiles_of_whole_numbers_are_exact(config: KernelConfig) -> None:
    """Blocks take several tiles each, whose weights begin inside what would be one; again, the same bits."""
    torch.manual_seed(1)
    dtype, few, gated = dtype_of(config), isinstance(config, GroupedConfig), config.fused.gated
    kind = bias_kinds(config)[-1]
    for rows in (1, config.tile_n + 1) if few else (1000, 2048):
        ns, k = ((14336, 14336) if gated else (12288, 4104, 4096)) if few else (4096, 4096), 64
        if not few and not gated:
            ns = 4096, 1032, 1024
        a = beside_nan(drawn((rows, k), dtype, not gated))
        weights = gate_and_up(ns[0], k, dtype, "up first") if gated else weights_of(ns, k, dtype, True)
        biases = biases_of(ns, dtype, kind, not gated)
        wanted = reference(config, a, weights, biases)
        first = check(config, a, weights, biases, exact=not gated, wanted=wanted)
        for hint in (0, 2):
            again = check(config, a, weights, biases, exact=not gated, wanted=wanted, l2_hint=hint)
            assert torch.equal(first, again), named(config)


@pytest.mark.parametrize("gate", ["", "swiglu"])
@pytest.mark.parametrize("rows", [1, 16, 64, 130, 256, 1024, 2048])
@pytest.mark.parametrize("model", MODELS)
def test_models_are_right_by_the_kernel_that_is_chosen(model: str, rows: int, gate: str) -> None:
    torch.manual_seed(2)
    k, ns, bias, n = MODELS[model]
    bias = bias and not gate
    ns = (n, n) if gate else ns
    choice = choose(rows, ns, k, gate=gate, bias=bias, gpu=device().name)
    assert choice is not None
    a = beside_nan(drawn((rows, k), torch.bfloat16, False))
    weights = weights_of(ns, k, torch.bfloat16)  # wherever torch puts them
    biases = biases_of(ns, torch.bfloat16, "all" if bias else "none")
    wanted = reference(choice.config, a, weights, biases)
    for pair in (weights, weights[::-1]) if gate else (weights,):
        check(
            choice.config, a, pair, biases, **choice.words,
            wanted=wanted if pair is weights else reference(choice.config, a, pair, biases),
        )  # fmt: skip


def sample() -> list[KernelConfig]:
    """Of bf16 each form's kernels, side by side and with SwiGLU."""
    return [config for config in CONFIGS if config.in_dtype == "bf16" and config.epilogue in ("", "swiglu")]


@pytest.mark.parametrize("config", sample(), ids=named)
def test_a_graph_of_launches_behind_each_other_holds_for_other_rows(config: KernelConfig) -> None:
    """They follow each other without a wait, and find the barriers of the one before gone."""
    torch.manual_seed(3)
    gated, few = config.fused.gated, isinstance(config, GroupedConfig)
    rows, ns, k = (50 if few else 700), ((2048, 2048) if gated else (2048, 512, 520)), 512
    a = beside_nan(drawn((rows, k), torch.bfloat16, False))
    weights = weights_of(ns, k, torch.bfloat16)
    columns = ns[0] if gated else sum(ns)
    outs = [torch.empty(rows, columns, device=WHERE, dtype=torch.bfloat16) for _ in range(3)]
    kernel = kernel_of(config)
    launch_at = kernel.bound(a, weights, outs[0], device=device())
    launch_at(a.data_ptr(), outs[0].data_ptr())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            launch_at(a.data_ptr(), out.data_ptr())
    for _ in range(3):
        a.copy_(drawn((rows, k), torch.bfloat16, False))
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        wanted = reference(config, a, weights, ())
        for out in outs:
            assert bool(((out.float() - wanted).abs() <= 1e-2 * wanted.abs() + 1e-2).all()), named(config)


@pytest.mark.parametrize("config", sample(), ids=named)
def test_threads_launch_one_kernel_on_streams_of_their_own(config: KernelConfig) -> None:
    torch.manual_seed(4)
    gated, few = config.fused.gated, isinstance(config, GroupedConfig)
    rows, ns, k = (33 if few else 300), ((1032, 1032) if gated else (1032, 264, 256)), 264
    weights = weights_of(ns, k, torch.bfloat16)
    kernel, columns = kernel_of(config), ns[0] if gated else sum(ns)
    given = [beside_nan(drawn((rows, k), torch.bfloat16, False)) for _ in range(4)]
    wanted = [reference(config, a, weights, ()) for a in given]
    outs = [
        [torch.empty(rows, columns, device=WHERE, dtype=torch.bfloat16) for _ in range(25)] for _ in given
    ]
    torch.cuda.synchronize()

    def launch(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for out in outs[number]:
                kernel.launch(given[number], weights, out, device=device())
        stream.synchronize()

    threads = [threading.Thread(target=launch, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, mine in enumerate(outs):
        for out in mine:
            near = (out.float() - wanted[number]).abs() <= 1e-2 * wanted[number].abs() + 1e-2
            assert bool(near.all()), (named(config), number)
