"""Times fp8 products with block scales, 1x128 of A and 128x128 of the weights.

    python -m benchmarks.blocks                      # DeepSeek-V3's and Qwen3-235B's layers, 1 to 8192 rows
    python -m benchmarks.blocks --seconds 60         # for so long; the next run continues with missing rows
    python -m benchmarks.blocks --every [TABLE]      # races the kernels of a table, by default db/blocks.toml
    python -m benchmarks.blocks --with-quantising    # from bf16 activations
    python -m benchmarks.blocks --groups             # their layers of experts, 1 to 4096 tokens
    python -m benchmarks.blocks --vllm               # beside vLLM's products, if it is installed

Compares `tunegemm.scaled_mm` with torch's own product of the same operands and scales, torch's product of
bf16 weights, and DeepGEMM's if `deep_gemm` is installed (sgl-deep-gemm: it compiles by nvcc at each kernel's
first call). Operands are quantised in advance, because that takes as long for all. With `--groups` compares
`tunegemm.scaled_grouped_mm` with `tunegemm.grouped_mm` of bf16 weights. Writes results/GPU/blocks.json,
without DeepGEMM blocks-alone.json, or block_groups.json, blocks-quantising.json or blocks-vllm.json, after
each row. A race has no DeepGEMM; it goes to blocks-race.json with its table, from which `fit.blocks` makes
db/blocks.toml.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tunegemm
from benchmarks.command import chosen, command, parser_of
from benchmarks.experts import divide
from benchmarks.graphs import Graph, Side, begin, race, within
from benchmarks.results import Results, report
from tunegemm.describe.device import Device
from tunegemm.errors import one_line
from tunegemm.generate import block_groups, blocks, quantize
from tunegemm.generate.block_groups import BlockGroupKernel
from tunegemm.generate.blocks import BLOCK, BlockKernel
from tunegemm.generate.blocks.config import BlockConfig
from tunegemm.generate.quantize import QuantizeConfig, Quantizer
from tunegemm.model.block_groups import choose as choose_of_groups
from tunegemm.model.block_groups import listed as listed_of_groups
from tunegemm.model.blocks import candidates, choose, splits_of
from tunegemm.resources import data_path
from tunegemm.store.provided import Provided, provide_blocks, provide_grouped

METHOD = (
    "each side in one CUDA graph over as many sets of weights as pass 3x the L2; all in shuffled order in "
    "each round, one replay of some ms; from 2048 rows on each has turn_ms to itself in a round, the second "
    "half of which is timed; medians over rounds. torch: torch._scaled_mm of the same block scales; bf16: "
    "torch.mm; deepgemm: fp8_gemm_nt, scales in its own layout; kernel: the chosen kernel, served or not; "
    "ratio_to_torch, ratio_to_deepgemm, ratio_to_bf16: to tunegemm.scaled_mm; bandwidth_share: bytes of "
    "operands, scales and result a second, to those of a copy of 1 GiB; error: to fp64, in parts of the "
    "magnitudes"
)
METHOD_OF_GROUPS = (
    f"{METHOD}; m rows of tokens' experts, sets are divisions of these (skew as in benchmarks.experts), "
    "bf16 is tunegemm.grouped_mm, bytes are those of groups that have rows; contiguous, masked: DeepGEMM's "
    "m-grouped fp8 products, rows laid out before as it wants them (each group padded to its alignment; a "
    "slot of the largest group's rows for each); ratio_to_deepgemm: to the faster of them"
)
METHOD_QUANTISING = (
    f"{METHOD}; activations are bf16: tunegemm and deepgemm quantise by the kernel of tunegemm.quantize, "
    "torch by its operations; quantize: the kernel alone"
)
#: N and K of each layer's products.
LAYERS = {
    "DeepSeek-V3 q_a+kv_a": (2112, 7168),
    "DeepSeek-V3 q_b": (24576, 1536),
    "DeepSeek-V3 kv_b": (32768, 512),
    "DeepSeek-V3 o": (7168, 16384),
    "DeepSeek-V3 gate+up": (36864, 7168),
    "DeepSeek-V3 down": (7168, 18432),
    "DeepSeek-V3 shared gate+up": (4096, 7168),
    "DeepSeek-V3 shared down": (7168, 2048),
    "Qwen3-235B qkv": (9216, 4096),
    "Qwen3-235B o": (4096, 8192),
    "Qwen3-235B gate+up": (3072, 4096),
    "Qwen3-235B down": (4096, 1536),
}
#: Experts, experts per token, N and K.
GROUPS = {
    "DeepSeek-V3 experts gate+up": (256, 8, 4096, 7168),
    "DeepSeek-V3 experts down": (256, 8, 7168, 2048),
    "Qwen3-235B experts gate+up": (128, 8, 3072, 4096),
    "Qwen3-235B experts down": (128, 8, 4096, 1536),
    # One of eight GPUs that share the experts gets as many rows as there are tokens.
    "DeepSeek-V3 32 experts gate+up": (32, 1, 4096, 7168),
    "DeepSeek-V3 32 experts down": (32, 1, 7168, 2048),
}
TOKENS = ("1", "16", "128", "1024", "4096")
ROWS = ("1", "2", "4", "8", "16", "32", "64", "65", "128", "129", "256", "257", "512", "2048", "8192")
BETWEEN = (
    *("48", "96", "192", "384", "1024", "4096"),
    *("24", "33", "40", "80", "112", "160", "200", "320", "448", "640", "768"),
)  # of races
_STEADY_ROWS = 2048
_TURN_MS = 24.0
_MOST_DIVISIONS = 24
_MASKED_BYTES = 8 << 30  # DeepGEMM's masked product has room for the largest group in all groups
_ERROR = 4e-3
#: Ratios of a row, by the sides of which they have the fastest one.
_RATIOS = {
    "torch": ("torch",), "deepgemm": ("deepgemm", "contiguous", "masked"), "bf16": ("bf16",),
    "cutlass": ("cutlass",), "triton": ("triton",),
}  # fmt: skip
_SHOWN = (*itertools.chain(*_RATIOS.values()), "tunegemm", "kernel", "quantize")
FP8 = torch.float8_e4m3fn


class Case(NamedTuple):
    """A product of a layer; with a skew, of a layer of experts, whose tokens `rows` counts."""

    layer: str
    rows: int
    skew: str = ""

    @property
    def named(self) -> dict[str, Any]:
        """What of a row names it."""
        if not self.skew:
            n, k = LAYERS[self.layer]
            return {"model": self.layer, "m": self.rows, "n": n, "k": k}
        groups, each, n, k = GROUPS[self.layer]
        named = {"model": self.layer, "m": self.rows * each, "n": n, "k": k}
        return named | {"groups": groups, "skew": self.skew}


class Run(NamedTuple):
    """What all rows of a run share."""

    device: Device
    provided: Provided
    copied: float
    """GB/s of a copy."""
    options: argparse.Namespace


def errors_of(
    a: torch.Tensor, scale_a: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> Callable[[torch.Tensor], float]:
    """The largest error of a result in up to 256 rows, relative to the sum of magnitudes.

    weight: (N, K). scale: (N / 128, K / 128).
    """
    n, k = weight.shape
    wide = weight.double() * scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    left = a[:256].double() * scale_a[:256].repeat_interleave(BLOCK, 1)[:, :k]
    exact, magnitudes = left @ wide.t(), left.abs() @ wide.abs().t()
    return lambda result: float(((result[:256].double() - exact).abs() / magnitudes).max())


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _fp8(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.float16) * 40).to(FP8)


def _scales(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda") + 0.5


def quantised_by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales, by torch's operations in a user's code."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2).clamp(min=1e-10) / 448
    return (blocks / scales.unsqueeze(2)).to(FP8).flatten(1), scales.t().contiguous().t()


def quantiser(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, provided: Provided
) -> Callable[[], None]:
    """The launch of `tunegemm.quantize`'s kernel for bf16 into these tensors, in any layout."""
    config = QuantizeConfig("bf16")
    artifact = provided.of(quantize.FAMILY.key_of(config))
    assert artifact is not None
    launch = Quantizer.load(config, artifact.path).bound(x, values, scales)
    return lambda: launch(x.data_ptr(), values.data_ptr(), scales.data_ptr())


@cache
def deep_gemm() -> Any:
    """DeepGEMM, None where it is not installed or does not load."""
    try:
        return importlib.import_module("deep_gemm")
    except (ImportError, OSError, AssertionError) as error:
        print(f"without DeepGEMM: {type(error).__name__}: {one_line(error)}", flush=True)
        return None


def of_vllm(
    a: torch.Tensor, scale_a: torch.Tensor, weights: list[torch.Tensor], scales: list[torch.Tensor]
) -> dict[str, Side]:
    """vLLM's products by CUTLASS and by Triton, the latter with its table for a layer or its default."""
    cutlass = importlib.import_module("vllm._custom_ops").cutlass_scaled_mm
    name = "vllm.model_executor.layers.quantization.utils.fp8_utils"
    by_triton = importlib.import_module(name).w8a8_triton_block_scaled_mm
    own, block, out = [each.t().contiguous() for each in scales], [BLOCK, BLOCK], torch.bfloat16
    return {
        "cutlass": lambda i: cutlass(a, weights[i].t(), scale_a, own[i].t(), out),
        "triton": lambda i: by_triton(a, weights[i], scale_a, own[i], block, out),
    }


def aligned(scales: torch.Tensor) -> torch.Tensor:
    """Scales of rows in DeepGEMM's layout."""
    layout = importlib.import_module("deep_gemm.utils.layout")
    result: torch.Tensor = layout.get_mn_major_tma_aligned_tensor(scales)
    return result


def copied_gbs() -> float:
    """GB/s that a copy reads and writes."""
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    graph = Graph.capture(lambda _: target.copy_(source), 1, short_ms=0.5, most=200)
    return 2 * source.numel() / statistics.median(graph.us(0.0) for _ in range(9)) * 1e-3


def row_of(
    case: Case, sides: dict[str, Side], sets: int, error: Callable[[str, torch.Tensor], float], run: Run, *,
    moved: float, chosen: str | None,
) -> dict[str, Any]:  # fmt: skip
    """A row: each side's result is checked, then those that take the product are timed.

    error: of a named side's result. moved: bytes. chosen: the kernel that is to be the fastest.
    """
    named = case.named
    turn_ms = _TURN_MS if named["m"] >= _STEADY_ROWS else 0.0
    refused: dict[str, str] = {}
    errors: dict[str, float] = {}
    for name, side in list(sides.items()):
        try:
            result = side(0)
            if name not in ("bf16", "quantize"):
                errors[name] = error(name, result)
        except (RuntimeError, ValueError) as failure:
            refused[name] = one_line(failure)
            del sides[name]
    us = race(sides, sets, run.options.rounds, turn_ms)
    own = us["tunegemm"]
    times = {
        name: [us[side] for side in those if side in us and errors.get(side, 0.0) < _ERROR]
        for name, those in _RATIOS.items() if any(each in sides or each in refused for each in those)
    }  # fmt: skip
    row = named | {
        "block": [BLOCK, BLOCK], "with_quantising": run.options.with_quantising,
        **{f"ratio_to_{name}": round(min(some) / own, 4) if some else None for name, some in times.items()},
        "bandwidth_share": round(moved / own * 1e-3 / run.copied, 4),
        "tflops": round(2 * named["m"] * named["n"] * named["k"] / own * 1e-6, 1), "chosen": chosen,
        "error": round(errors["tunegemm"], 6), "us": {name: round(value, 2) for name, value in us.items()},
        "wrong": [name for name, each in errors.items() if not each < _ERROR], "turn_ms": turn_ms,
    }  # fmt: skip
    if refused:
        row["refused"] = refused
    if kernels := [name for name in us if name not in _SHOWN]:
        best = min(kernels, key=us.__getitem__)
        row |= {"best": best, "best_to_chosen": round(own / us[best], 4)}
    return row


def measure(case: Case, run: Run) -> dict[str, Any]:
    """The row of a dense product; each side takes the number of a set of weights."""
    (n, k), rows = LAYERS[case.layer], case.rows
    across, along = -(-n // BLOCK), -(-k // BLOCK)
    quantising, every = run.options.with_quantising, run.options.every
    sets = 1 if rows >= _STEADY_ROWS else max(1, math.ceil(3 * run.device.l2_bytes / (n * k)))
    wide = _bf16(rows, k)
    a, scale_a = tunegemm.quantize(wide) if quantising else (_fp8(rows, k), _scales(along, rows).t() * 1e-2)
    weights = [_fp8(n, k) for _ in range(sets)]
    # torch requires lines of K blocks that begin at multiples of 16 bytes.
    scales = [_scales(across, -(-along // 4) * 4)[:, :along].t() for _ in range(sets)]
    # Half as many bf16 sets have as many bytes.
    plain = [_bf16(n, k) for _ in range(-(-sets // 2))]

    def of_torch(i: int) -> torch.Tensor:
        left = quantised_by_torch(wide) if quantising else (a, scale_a)
        return torch._scaled_mm(left[0], weights[i].t(), left[1], scales[i], out_dtype=torch.bfloat16)

    def ours(i: int) -> torch.Tensor:
        left = tunegemm.quantize(wide) if quantising else (a, scale_a)
        return tunegemm.scaled_mm(left[0], weights[i].t(), left[1], scales[i], out_dtype=torch.bfloat16)

    sides: dict[str, Side] = {
        "torch": of_torch, "bf16": lambda i: torch.mm(wide, plain[i % len(plain)].t()), "tunegemm": ours
    }  # fmt: skip
    choice = choose(rows, n, k, gpu=run.device.name)
    assert choice is not None, "the table has a kernel for any rows"
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    if run.options.vllm:
        sides |= of_vllm(a, scale_a, weights, scales)
    elif not every and (peer := deep_gemm()) is not None:
        arguments = a, aligned(scale_a.contiguous())
        quantise = quantiser(wide, *arguments, run.provided) if quantising else None
        own = [each.t().contiguous() for each in scales]

        def deepgemm(i: int) -> torch.Tensor:
            if quantise is not None:
                quantise()
            peer.fp8_gemm_nt(arguments, (weights[i], own[i]), out)
            return out

        sides["deepgemm"] = deepgemm
    if quantising:
        sides["quantize"] = lambda _: tunegemm.quantize(wide)
    launches = raced(run, (rows, n, k)) if every else {"kernel": (choice.config, choice.split_k)}
    for name, (config, split) in () if quantising else launches.items():
        if (artifact := run.provided.of(blocks.FAMILY.key_of(config))) is None:
            continue
        launch = BlockKernel.load(config, artifact.path).bound(
            a, weights[0], scale_a, scales[0].t(), out, device=run.device, split_k=split,
            l2_hint=2 if config.few and rows <= config.rows else 0,
        )  # fmt: skip

        def launched(i: int, launch: Callable[..., None] = launch) -> torch.Tensor:
            launch(*(each.data_ptr() for each in (a, weights[i], scale_a, scales[i], out)))
            return out

        sides[name] = launched
    error = errors_of(a, scale_a, weights[0], scales[0].t())
    return row_of(
        case, sides, sets, lambda _, result: error(result), run,
        moved=n * k + 4 * along * across + rows * ((2 * k if quantising else k + 4 * along) + 2 * n),
        chosen=f"{choice.name} k{choice.split_k}",
    )  # fmt: skip


def raced(run: Run, shape: tuple[int, int, int]) -> dict[str, tuple[BlockConfig, int]]:
    """By its name each kernel of a race, and its k splits: of each the two with the least estimates, if those
    are up to 1.4 times the least of all. shape: rows, N, K.
    """
    found: list[tuple[float, str, BlockConfig, int]] = []
    for each in candidates(path=run.options.every):
        if each.first_row <= shape[0] <= each.last_row:
            times = {by: each.estimate(*shape, by, run.device.name) for by in splits_of(each.config, *shape)}
            best = sorted(times, key=times.__getitem__)[:2]
            found += [(times[by], f"{each.name} k{by}", each.config, by) for by in best]
    most = 1.4 * min(time for time, *_ in found)
    return {name: (config, by) for time, name, config, by in found if time <= most}


class Experts:
    """All weights of a layer of experts, in fp8 with their scales, and in bf16."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        groups, _, n, k = GROUPS[layer]
        self.weights = torch.empty(groups, n, k, device="cuda", dtype=FP8)
        self.plain = torch.empty(groups, n, k, device="cuda", dtype=torch.bfloat16)
        for weight, wide in zip(self.weights, self.plain, strict=True):  # one by one: they are many GB
            weight.copy_(_fp8(n, k))
            wide.normal_()
        self.scales = _scales(groups, -(-n // BLOCK), -(-k // BLOCK))


def measure_groups(case: Case, experts: Experts, run: Run) -> dict[str, Any]:
    """The row of a product of groups; each side takes the number of a division."""
    weights, scales, plain = experts.weights, experts.scales, experts.plain
    (groups, n, k), rows = weights.shape, case.named["m"]
    divisions: list[list[int]] = []
    used = 0
    while not divisions or (used * n * k < 3 * run.device.l2_bytes and len(divisions) < _MOST_DIVISIONS):
        divisions.append(divide(groups, rows, case.skew))
        used += sum(size > 0 for size in divisions[-1])
    ends = [torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32) for sizes in divisions]
    a, wide = _fp8(rows, k), _bf16(rows, k)
    scale_a = _scales(-(-k // BLOCK), rows).t() * 1e-2
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)

    def ours(i: int) -> torch.Tensor:
        return tunegemm.scaled_grouped_mm(
            a, weights.mT, scale_a, scales.mT, offs=ends[i], out_dtype=torch.bfloat16
        )

    sides: dict[str, Side] = {
        "bf16": lambda i: tunegemm.grouped_mm(wide, plain.mT, offs=ends[i]), "tunegemm": ours
    }  # fmt: skip
    peers = peers_of_groups(experts, a, scale_a, divisions)
    sides |= {name: side for name, (side, _) in peers.items()}
    for config in listed_of_groups() if run.options.every else ():
        if (artifact := run.provided.of(block_groups.FAMILY.key_of(config))) is None:
            continue
        launch = BlockGroupKernel.load(config, artifact.path).bound(
            a, weights, scale_a, scales, ends[0], out, blocks=run.device.sm_count
        )

        def kernel(i: int, launch: Callable[..., None] = launch) -> torch.Tensor:
            launch(*(each.data_ptr() for each in (a, weights, scale_a, scales, ends[i], out)))
            return out

        sides[config.label] = kernel

    def error(name: str, result: torch.Tensor) -> float:
        """Of the first division's first four groups."""
        if name in peers:
            result = result.reshape(-1, n)[peers[name][1]]
        results: list[float] = []
        start = 0
        for group, size in enumerate(divisions[0]):
            own = slice(start, start + size)
            if size and len(results) < 4:
                results.append(errors_of(a[own], scale_a[own], weights[group], scales[group])(result[own]))
            start += size
        return max(results)

    across, along = scales.shape[1:]
    return row_of(
        case, sides, len(divisions), error, run, chosen=choose_of_groups(rows, groups).label,
        moved=used / len(divisions) * (n * k + 4 * across * along) + rows * (k + 2 * n + 4 * along),
    )  # fmt: skip


def peers_of_groups(
    experts: Experts, a: torch.Tensor, scale_a: torch.Tensor, divisions: list[list[int]]
) -> dict[str, tuple[Side, torch.Tensor]]:
    """DeepGEMM's two products of groups, each with the rows of its first division's result that belong to
    `a`; empty if it is missing.
    """
    if (peer := deep_gemm()) is None:
        return {}
    (groups, n, k), (rows, along) = experts.weights.shape, scale_a.shape
    weights = experts.weights, experts.scales
    sizes = torch.tensor(divisions)
    group_of = [torch.arange(groups).repeat_interleave(division).cuda() for division in sizes]

    def begins_at(room: torch.Tensor) -> list[torch.Tensor]:
        """The place of each row of `a` if group g has room for room[g] rows."""
        return [
            torch.arange(rows, device="cuda")
            + (own.cumsum(0) - own - division.cumsum(0) + division).cuda()[group]
            for own, division, group in zip(room, sizes, group_of, strict=True)
        ]

    def spread(places: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.zeros(count, k, device="cuda", dtype=torch.uint8)
        values[places] = a.view(torch.uint8)
        scales = torch.zeros(count, along, device="cuda")
        scales[places] = scale_a
        return values.view(FP8), scales

    unit = importlib.import_module("deep_gemm.utils.layout").get_mk_alignment_for_contiguous_layout()
    padded = -(-sizes // unit) * unit
    of_contiguous = begins_at(padded)
    contiguous_rows = [
        (values, aligned(scales)) for values, scales in map(spread, of_contiguous, padded.sum(1).tolist())
    ]
    indices = [torch.arange(groups).repeat_interleave(own).to(torch.int32).cuda() for own in padded]
    contiguous_out = torch.empty(int(padded.sum(1).max()), n, device="cuda", dtype=torch.bfloat16)

    def contiguous(i: int) -> torch.Tensor:
        out = contiguous_out[: len(indices[i])]
        peer.m_grouped_fp8_gemm_nt_contiguous(contiguous_rows[i], weights, out, indices[i])
        return out

    def masked(i: int) -> torch.Tensor:
        peer.fp8_m_grouped_gemm_nt_masked(masked_rows[i], weights, masked_out, masks[i], expected)
        return masked_out

    sides: dict[str, tuple[Side, torch.Tensor]] = {"contiguous": (contiguous, of_contiguous[0])}
    room = -(-int(sizes.max()) // 64) * 64
    if groups * room * (k * len(divisions) + 2 * n) < _MASKED_BYTES:
        of_masked = begins_at(torch.full_like(sizes, room))
        masked_rows = []
        for places in of_masked:
            values, scales = spread(places, groups * room)
            masked_rows.append((values.view(groups, room, k), aligned(scales.view(groups, room, along))))
        masks = list(sizes.to(torch.int32).cuda())
        masked_out = torch.empty(groups, room, n, device="cuda", dtype=torch.bfloat16)
        expected = -(-rows // max(1, int((sizes[0] > 0).sum())))
        sides["masked"] = masked, of_masked[0]
    return sides


def _rows(results: Results, run: Run) -> Iterator[dict[str, Any]]:
    """Layer by layer, because drawing weights of experts takes longer than a row."""
    skews, experts = ("uniform", "typical") if run.options.groups else ("",), None
    every = itertools.product(run.options.layers, map(int, run.options.rows), skews)
    cases = sorted(itertools.starmap(Case, every), key=lambda case: results.find(case.named) is not None)
    for case in within(run.options.seconds, cases):
        if case.skew and (experts is None or experts.layer != case.layer):
            experts = None  # frees memory before the next ones
            experts = Experts(case.layer)
        yield measure(case, run) if experts is None else measure_groups(case, experts, run)


def _brief(row: Mapping[str, Any]) -> str:
    ratios = ", ".join(f"{row[f'ratio_to_{name}']} x {name}" for name in _RATIOS if f"ratio_to_{name}" in row)
    shown = {name: us for name, us in row["us"].items() if name in _SHOWN}
    return (
        f"{row['model']} {row['m']} {row.get('skew', '')}: {ratios}, {row['bandwidth_share']} of a copy, "
        f"{row['tflops']} Tflop/s by {row['chosen']}; best {row.get('best')} {row.get('best_to_chosen')}; "
        f"{shown} us {row.get('refused', '')}"
    )


@command
@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a result is wrong."""
    parser = parser_of("benchmarks.blocks", __doc__, rounds=9)
    parser.add_argument("--groups", action="store_true", help="time layers of experts; --rows counts tokens")
    parser.add_argument("--with-quantising", action="store_true", help="begin with bf16 activations")
    parser.add_argument("--vllm", action="store_true", help="vLLM's products in place of DeepGEMM's")
    parser.add_argument("--layers", help="default: all")
    parser.add_argument("--rows", help=f"default: {','.join(ROWS)}; of groups {','.join(TOKENS)}")
    table = data_path("db", "blocks.toml")
    says = "race all kernels of a table (default: %(const)s), or of groups"
    parser.add_argument("--every", metavar="TABLE", nargs="?", type=Path, const=table, help=says)
    options = parser.parse_args(arguments)
    if sum(map(bool, (options.groups or options.every, options.with_quantising, options.vllm))) > 1:
        parser.error("--with-quantising and --vllm are of served dense products: one of them, and no other")
    layers, rows = (GROUPS, TOKENS) if options.groups else (LAYERS, ROWS)
    options.layers = chosen(options.layers or ",".join(layers), tuple(layers), "layers")
    options.rows = chosen(options.rows or ",".join(rows), rows + BETWEEN, "rows")
    device = begin(options.device)
    name, method = "blocks", METHOD
    if options.groups:
        name, method = "block_groups", METHOD_OF_GROUPS
    elif options.with_quantising:
        name, method = "blocks-quantising", METHOD_QUANTISING
    elif options.vllm:
        name, method = "blocks-vllm", f"{METHOD}; cutlass, triton: vLLM's two products"
    elif options.every or deep_gemm() is None:
        name = "blocks-race" if options.every else "blocks-alone"
    results = Results.of(options.out, device, f"{name}.json", method)
    provided, copied = provide_blocks(options.every), copied_gbs()
    if options.groups:
        provide_grouped("bf16")  # or torch computes while they compile
    elif options.every:
        results.summary["table"] = options.every.read_text(encoding="utf-8")
    print(f"{device.name}: a copy moves {copied:.0f} GB/s", flush=True)
    measured = _rows(results, Run(device, provided, copied, options))
    return int(report(results, measured, _brief, [f"ratio_to_{name}" for name in _RATIOS]) > 0)


if __name__ == "__main__":
    sys.exit(main())
