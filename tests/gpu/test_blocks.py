"""Block-scaled fp8 by real kernels: against fp64, on hostile scales, with NaN beside every operand."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

import tunegemm
from tunegemm.describe.device import Device, find_device
from tunegemm.generate import blocks
from tunegemm.generate.blocks import BLOCK, NARROW, BlockKernel
from tunegemm.generate.blocks.config import BlockConfig
from tunegemm.model.blocks import choose, listed, splits_of
from tunegemm.store import packs
from tunegemm.store.provided import Provided, provide_blocks

pytestmark = pytest.mark.gpu

WHERE = "cuda"
FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
POISON = 776.0
"""What bf16 and fp16 hold."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: What a result may be off, relative to itself.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-10, "fp32": 2.0**-20}
CONFIGS = tuple(config for config in listed() if not config.narrow)
NARROWS = tuple(config for config in listed() if config.narrow)
NAN, INF = float("nan"), float("inf")
#: Rows, N and K: edges of tiles, of blocks of scales and of k splits.
SHAPES = (
    (1, 128, 128), (3, 136, 256), (17, 264, 400), (64, 640, 1040), (65, 200, 2048), (130, 1000, 1536),
    (300, 2112, 896), (513, 384, 512),
    # All but some rows of a tile of 64, and of one of 128.
    (56, 136, 528), (57, 136, 528), (63, 264, 256), (121, 200, 400), (127, 136, 256),
)  # fmt: skip


def named(config: BlockConfig) -> str:
    return f"{config.label} {config.out_dtype}"


@cache
def kernel_of(config: BlockConfig) -> BlockKernel:
    """A kernel, compiled where it does not ship."""
    key = blocks.FAMILY.key_of(config)
    artifact = packs.find(key) or compiled().of(key)
    assert artifact is not None and artifact.resources.spill_bytes == 0, named(config)
    return BlockKernel.load(config, artifact.path)


@cache
def compiled() -> Provided:
    provided = provide_blocks()
    assert not provided.failures
    return provided


@cache
def device() -> Device:
    return find_device("cuda:0")


# Operands


def beside_nan(values: torch.Tensor, gap: int) -> torch.Tensor:
    """The matrix in memory that is NaN all around, before and behind each line."""
    rows, columns = values.shape
    memory = torch.full((rows + 4, columns + 2 * gap), NAN, device=WHERE).to(values.dtype)
    return memory[2:-2, gap:-gap].copy_(values)


def drawn(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, device=WHERE) * 40).to(FP8)


def scales(kind: str, lines: int, count: int) -> torch.Tensor:
    """usual: of one magnitude; hostile: from 1e-30 to 1e30, and zeros; mixed: some columns are hostile;
    special: NaN and infinities, too. As E8M0, of lines that begin at units of 4 bytes, e8m0: of usual
    magnitudes; wide: all numbers; every: NaN, too.
    """
    if kind in ("e8m0", "wide", "every"):
        first, end = {"e8m0": (117, 137), "wide": (0, 255), "every": (0, 256)}[kind]
        memory = torch.full((lines + 4, -(-count // 4) * 4 + 8), 255, device=WHERE, dtype=torch.uint8)
        memory[2:-2, 4:-4].random_(first, end)
        return memory.view(E8M0)[2:-2, 4 : 4 + count]
    if kind == "usual":
        return torch.rand(lines, count, device=WHERE) * 1e-2 + 1e-3
    if kind == "hostile":
        found = (10.0 ** (torch.rand(lines, count, device=WHERE, dtype=torch.float64) * 60 - 30)).float()
        return found.masked_fill(torch.rand(lines, count, device=WHERE) < 0.05, 0.0)
    if kind == "mixed":
        is_hostile = torch.rand(count, device=WHERE) < 0.3
        return torch.where(is_hostile, scales("hostile", lines, count), scales("usual", lines, count))
    found = torch.rand(lines, count, device=WHERE) + 0.5
    for value in (NAN, INF, -INF):
        found.masked_fill_(torch.rand(lines, count, device=WHERE) < 0.02, value)
    return found


def reference(
    a: Any, weight: Any, scale_a: Any, scale_b: Any, scale_k: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product and the sum of magnitudes, in fp64."""
    scale_a, scale_b = scale_a.float(), scale_b.float()
    shared = 1 if scale_b.shape[0] == weight.shape[0] else scale_k
    total = torch.zeros(a.shape[0], weight.shape[0], device=WHERE, dtype=torch.float64)
    magnitude = total.clone()
    for block in range(scale_a.shape[1]):
        part = slice(block * scale_k, (block + 1) * scale_k)
        left, right = a[:, part].double(), weight[:, part].double()
        across = scale_b[:, block].double().repeat_interleave(shared)[: weight.shape[0]]
        scale = scale_a[:, block, None].double() * across
        total += (left @ right.t()) * scale
        magnitude += (left.abs() @ right.abs().t()) * scale.abs()
    return total, magnitude


def near(out: torch.Tensor, wanted: torch.Tensor, magnitude: torch.Tensor, dtype: str) -> torch.Tensor:
    """Whether each element is what fp32 sums of the tensor cores' own sums may be.

    Where magnitudes leave fp32, infinity and NaN are right, too.
    """
    found, rounded = out.double(), wanted.to(out.dtype).double()
    least = 6e-8 if dtype == "fp16" else 1e-38
    within = (found - wanted).abs() <= ROUNDING[dtype] * wanted.abs() + magnitude * 2.0**-11 + least
    beyond = (magnitude > 3e38) & ~found.isfinite()
    if dtype == "fp16":  # what may be off by more than is left below fp16's largest may be infinity
        beyond |= (wanted.abs() + magnitude * 2.0**-11 > 65000) & (found.abs() > 65000)
    return within | beyond | (found == rounded) | (found.isnan() & rounded.isnan())


def check(
    config: BlockConfig,
    rows: int,
    n: int,
    k: int,
    kind: str = "usual",
    *,
    row_major: bool = False,
    shared: int = BLOCK,
    **words: Any,
) -> None:
    """Launch, and compare every element and all that lies around the output. shared: rows of the weights that
    share a scale."""
    count, across = -(-k // config.scale_k), -(-n // shared)
    a, weight = beside_nan(drawn(rows, k), 16), beside_nan(drawn(n, k), 16)
    scale_a, scale_b = scales(kind, rows, count), scales(kind, across, count)
    if scale_a.dtype is not E8M0:
        scale_a, scale_b = beside_nan(scale_a.t(), 1).t(), beside_nan(scale_b, 1)
        if row_major:
            scale_a = beside_nan(scale_a, 3)
    memory = torch.full((rows + 4, n + 16), POISON, device=WHERE, dtype=DTYPES[config.out_dtype])
    out = memory[2:-2, 8:-8].fill_(NAN)
    kernel_of(config).launch(a, weight, scale_a, scale_b, out, device=device(), **words)
    expected = reference(a, weight, scale_a, scale_b, config.scale_k)
    wrong = (~near(out, *expected, config.out_dtype)).nonzero()
    what = named(config), (rows, n, k), kind, words
    assert not len(wrong), (
        f"{what}: {len(wrong)} wrong, first {wrong[:3].tolist()}, last {wrong[-1].tolist()}"
    )
    out.fill_(POISON)
    assert bool((memory == POISON).all()), what


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_a_kernel_is_right_at_every_edge_and_for_every_scale(config: BlockConfig) -> None:
    torch.manual_seed(0)
    splits, majors = itertools.cycle((1, 2, 1, 8, 3)), itertools.cycle((False, True))
    launches = itertools.cycle(
        {"swizzle_size": swizzle, "along_m": along_m, "l2_hint": hint}
        for swizzle, along_m, hint in ((8, True, 0), (1, True, 2), (3, False, 1), (8, False, 2))
    )
    for shape in SHAPES:
        for kind in ("usual", "hostile", "mixed", "special"):
            check(config, *shape, kind, row_major=next(majors), split_k=next(splits), **next(launches))


@pytest.mark.parametrize("config", NARROWS, ids=named)
@pytest.mark.parametrize("shared", [1, 32])
def test_scales_of_32_of_k_are_right_at_every_edge(config: BlockConfig, shared: int) -> None:
    torch.manual_seed(0)
    splits, majors = itertools.cycle((1, 2, 1, 8, 3)), itertools.cycle((False, True))
    for shape in SHAPES:
        for kind in ("usual", "hostile", "special", "e8m0", "wide", "every"):
            check(config, *shape, kind, row_major=next(majors), shared=shared, split_k=next(splits))


@pytest.mark.parametrize("config", NARROWS, ids=named)
def test_scales_of_32_of_k_may_be_of_two_dtypes_and_strided(config: BlockConfig) -> None:
    torch.manual_seed(4)
    rows, n, k = 70, 264, 400
    a, weight = drawn(rows, k), drawn(n, k)
    wide = scales("usual", 2 * rows, 2 * 13)
    coarse = scales("e8m0", 2 * n, 13)
    out = torch.empty(rows, n, device=WHERE, dtype=DTYPES[config.out_dtype])
    for scale_a, scale_b in (
        (wide[::2, ::2], coarse[::2]),
        (scales("e8m0", rows, 13), scales("usual", n, 13)),
        (wide[:1, :13].expand(rows, 13), coarse[:n]),
        (wide[:rows, :1].expand(rows, 13), coarse[n:]),
    ):
        kernel_of(config).launch(a, weight, scale_a, scale_b, out.fill_(NAN), device=device(), split_k=2)
        assert bool(near(out, *reference(a, weight, scale_a, scale_b, 32), config.out_dtype).all())


@pytest.mark.parametrize("first", range(1, 301, 50))
@pytest.mark.parametrize("scale_k", [BLOCK, NARROW])
def test_every_number_of_rows_is_right_by_the_kernel_that_is_chosen(first: int, scale_k: int) -> None:
    torch.manual_seed(1)
    for rows in range(first, first + 50):
        choice = choose(rows, 512, 1024, scale_k=scale_k, gpu=device().name)
        assert choice is not None
        for kind, shared in (("usual", BLOCK),) if scale_k == BLOCK else (("e8m0", 1), ("e8m0", 32)):
            check(choice.config, rows, 512, 1024, kind, shared=shared, **choice.words)


@pytest.mark.parametrize("rows", [1, 16, 100, 300, 1024, 4096])
def test_the_public_door_takes_scales_of_32_of_k(rows: int) -> None:
    """By a kernel, by one that reads E8M0 which lies at no units of 4 bytes as fp32, or by bf16 copies."""
    torch.manual_seed(5)
    n, k = 2112, 2048
    a, weight, count = drawn(rows, k), drawn(n, k), k // NARROW
    for out_dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        if choice := choose(rows, n, k, out_dtype=name, scale_k=NARROW, gpu=device().name):
            kernel_of(choice.config)  # else it would be compiled in the background
        for across in (n, n // NARROW):
            scale_a, scale_b = scales("e8m0", rows, count), scales("e8m0", across, count)
            wanted = reference(a, weight, scale_a, scale_b, NARROW)
            apart = torch.empty(rows, count + 1, device=WHERE, dtype=torch.uint8)[:, 1:]
            apart = apart.copy_(scale_a.view(torch.uint8)).view(E8M0)
            for given in ((scale_a, scale_b), (apart, scale_b), (scale_a.float(), scale_b.float())):
                out = tunegemm.scaled_mm(a, weight.t(), given[0], given[1].t(), out_dtype=out_dtype)
                assert bool(near(out, *wanted, name).all())
            if out_dtype is torch.bfloat16 and across == n:
                kind, plain = ScalingType.BlockWise1x32, SwizzleType.NO_SWIZZLE
                with tunegemm.enable():
                    served = torch.nn.functional.scaled_mm(
                        a, weight.t(), scale_a, kind, scale_b, kind, plain, plain
                    )
                assert bool(near(served, *wanted, name).all())


@pytest.mark.parametrize("config", CONFIGS[:1] + CONFIGS[-1:], ids=named)
def test_a_graph_gives_the_same_bits_in_every_replay(config: BlockConfig) -> None:
    """Blocks take several tiles each and add k splits, on operands that change between replays."""
    torch.manual_seed(2)
    rows, n, k = 700, 8192, 1024
    split = splits_of(config, 16, 512, k)[-1]
    a, weight = drawn(rows, k), drawn(n, k)
    scale_a, scale_b = scales("usual", rows, k // BLOCK), scales("usual", n // BLOCK, k // BLOCK)
    outs = [torch.empty(rows, n, device=WHERE, dtype=DTYPES[config.out_dtype]) for _ in range(3)]
    launch = kernel_of(config).bound(a, weight, scale_a, scale_b, outs[0], device=device(), split_k=split)

    def run() -> None:
        for out in outs:
            launch(*(each.data_ptr() for each in (a, weight, scale_a, scale_b, out)))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        a.copy_(drawn(rows, k))
        for out in outs:
            out.fill_(NAN)
        graph.replay()
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2])
        assert bool(near(outs[0], *reference(a, weight, scale_a, scale_b), config.out_dtype).all())


def as_torch_wants(scale_a: torch.Tensor, scale_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of (rows, K / 128) and (N / 128, K / 128) as ``torch._scaled_mm`` wants them: column-major,
    those of B as (K / 128, N / 128) whose columns begin at multiples of 16 bytes.
    """
    across, count = scale_b.shape
    padded = torch.zeros(across, -(-count // 4) * 4, device=WHERE)
    padded[:, :count] = scale_b
    return scale_a.t().contiguous().t(), padded[:, :count].t()


@pytest.mark.parametrize("rows", [1, 16, 100, 300, 1024])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_the_public_door_gives_what_the_kernel_does(rows: int, out_dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    n, k = 2112, 7168
    a, weight = drawn(rows, k), drawn(n, k)
    scale_a, scale_b = scales("usual", rows, k // BLOCK), scales("usual", -(-n // BLOCK), k // BLOCK)
    wanted, magnitude = reference(a, weight, scale_a, scale_b)
    choice = choose(
        rows, n, k, out_dtype="bf16" if out_dtype is torch.bfloat16 else "fp32", gpu=device().name
    )
    assert choice is not None
    kernel_of(choice.config)  # else it would be compiled in the background
    for given in ((scale_a, scale_b.t()), as_torch_wants(scale_a, scale_b)):
        out = tunegemm.scaled_mm(a, weight.t(), *given, out_dtype=out_dtype)
        assert bool(near(out, wanted, magnitude, "bf16" if out_dtype is torch.bfloat16 else "fp32").all())
    if out_dtype is not torch.bfloat16:
        return
    scale_a, scale_b = as_torch_wants(scale_a, scale_b)
    kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    with tunegemm.enable():
        for served in (
            torch._scaled_mm(a, weight.t(), scale_a, scale_b, out_dtype=out_dtype),
            torch.nn.functional.scaled_mm(a, weight.t(), scale_a, kinds[0], scale_b, kinds[1]),
        ):
            assert torch.equal(served, out)
