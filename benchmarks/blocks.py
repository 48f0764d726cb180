"""Times products of fp8 with scales of blocks, 1x128 of A and 128x128 of the weights.

    python -m benchmarks.blocks                      # DeepSeek-V3's and Qwen3-235B's layers, 1 to 8192 rows
    python -m benchmarks.blocks --seconds 60         # so long; the next run begins with what is missing
    python -m benchmarks.blocks --rows 1,16 --every  # every kernel of db/blocks.toml, in all k splits

Beside `tunegemm.scaled_mm` torch's own of the same operands and scales, torch's of bf16 weights, and
DeepGEMM's where `deep_gemm` is installed (sgl-deep-gemm: it compiles by nvcc at each kernel's first call).
Operands are quantised before: activations take as long for all. Writes results/GPU/blocks.json after each
row.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

import tunegemm
from benchmarks.command import choose_names, command, parser_of
from benchmarks.graphs import Graph, Side, begin, in_rounds, within
from benchmarks.results import Results, geometric_mean, meta, results_path
from tunegemm.describe.device import Device
from tunegemm.errors import one_line
from tunegemm.generate import blocks
from tunegemm.generate.blocks import BLOCK, BlockKernel
from tunegemm.model.blocks import candidates, choose, splits_of
from tunegemm.store.provided import Provided, provide_blocks

METHOD = (
    "each side in one CUDA graph over as many sets of weights as pass 3x the L2; all in shuffled order in "
    "each round, one replay of some ms; from 2048 rows on each has turn_ms to itself in a round, the second "
    "half of which is timed; medians over rounds. torch: torch._scaled_mm of the same block scales; bf16: "
    "torch.mm; deepgemm: fp8_gemm_nt, scales in its own layout; kernel: the chosen kernel, served or not; "
    "ratio_to_torch, ratio_to_deepgemm, ratio_to_bf16: to tunegemm.scaled_mm; bandwidth_share: bytes of "
    "operands, scales and result a second, to those of a copy of 1 GiB; error: to fp64, in parts of the "
    "magnitudes"
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
ROWS = ("1", "2", "4", "8", "16", "32", "64", "65", "128", "129", "256", "257", "512", "2048", "8192")
_STEADY_ROWS = 2048
_TURN_MS = 24.0
_GRAPH: dict[str, Any] = {"short_ms": 0.5, "most": 200}
_ERROR = 4e-3
_SHOWN = ("torch", "bf16", "deepgemm", "tunegemm", "kernel")
FP8 = torch.float8_e4m3fn


class Case(NamedTuple):
    """A product of a layer."""

    layer: str
    rows: int

    @property
    def n(self) -> int:
        return LAYERS[self.layer][0]

    @property
    def k(self) -> int:
        return LAYERS[self.layer][1]

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of N and of K."""
        return -(-self.n // BLOCK), -(-self.k // BLOCK)


class Operands:
    """A and as many sets of weights, with their scales as torch takes them."""

    def __init__(self, case: Case, sets: int) -> None:
        across, along = case.blocks
        self.a = _drawn(case.rows, case.k)
        self.scale_a = (torch.rand(along, case.rows, device="cuda") + 0.5).t() * 1e-2
        self.weights = [_drawn(case.n, case.k) for _ in range(sets)]
        # torch wants lines of K blocks that begin at multiples of 16 bytes.
        self.scales = [
            (torch.rand(across, -(-along // 4) * 4, device="cuda") + 0.5)[:, :along].t() for _ in range(sets)
        ]

    def error_of(self, result: torch.Tensor, case: Case) -> float:
        """Of the first set's product in up to 256 rows, relative to the sum of magnitudes."""
        rows = slice(0, min(case.rows, 256))
        expanded = self.scales[0].t().repeat_interleave(BLOCK, 0)[: case.n].repeat_interleave(BLOCK, 1)
        weight = self.weights[0].double() * expanded[:, : case.k]
        a = self.a[rows].double() * self.scale_a[rows].repeat_interleave(BLOCK, 1)[:, : case.k]
        magnitude = a.abs() @ weight.abs().t()
        return float(((result[rows].double() - a @ weight.t()).abs() / magnitude).max())


def _drawn(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.float16) * 40).to(FP8)


def sides_of(
    case: Case, operands: Operands, device: Device, provided: Provided, every: bool
) -> dict[str, Side]:
    """What is timed, by name; each takes the number of a set of weights. every: all kernels."""
    a, scale_a = operands.a, operands.scale_a
    weights, scales = operands.weights, operands.scales
    wide = torch.randn(case.rows, case.k, device="cuda", dtype=torch.bfloat16)
    # Of bf16 half as many sets are as many bytes.
    plain = [
        torch.randn(case.n, case.k, device="cuda", dtype=torch.bfloat16)
        for _ in weights[: -(-len(weights) // 2)]
    ]

    def of_torch(i: int) -> torch.Tensor:
        return torch._scaled_mm(a, weights[i].t(), scale_a, scales[i], out_dtype=torch.bfloat16)

    def bf16(i: int) -> torch.Tensor:
        return torch.mm(wide, plain[i % len(plain)].t())

    def ours(i: int) -> torch.Tensor:
        return tunegemm.scaled_mm(a, weights[i].t(), scale_a, scales[i], out_dtype=torch.bfloat16)

    found: dict[str, Side] = {"torch": of_torch, "bf16": bf16, "tunegemm": ours}
    choice = choose(case.rows, case.n, case.k, gpu=device.name)
    out = torch.empty(case.rows, case.n, device="cuda", dtype=torch.bfloat16)
    if (peer := deep_gemm()) is not None:
        layout = importlib.import_module("deep_gemm.utils.layout")
        own_a = layout.get_mn_major_tma_aligned_tensor(scale_a.contiguous())
        own = [each.t().contiguous() for each in scales]

        def deepgemm(i: int) -> torch.Tensor:
            peer.fp8_gemm_nt((a, own_a), (weights[i], own[i]), out)
            return out

        found["deepgemm"] = deepgemm
    for each in candidates():
        if not each.first_row <= case.rows <= each.last_row:
            continue
        chosen = choice is not None and each.name == choice.name
        artifact = provided.of(blocks.kernel_key(each.config))
        if artifact is None or not (every or chosen):
            continue
        kernel = BlockKernel.load(each.config, artifact.path)
        for split in splits_of(each.config, case.rows, case.n, case.k):
            launch = kernel.bound(
                a, weights[0], scale_a, scales[0].t(), out, device=device, split_k=split,
                l2_hint=2 if each.config.few and case.rows <= each.config.rows else 0,
            )  # fmt: skip

            def run(i: int, launch: Callable[..., None] = launch) -> torch.Tensor:
                given = a, weights[i], scale_a, scales[i], out
                launch(*(tensor.data_ptr() for tensor in given))
                return out

            if chosen and choice is not None and split == choice.split_k:
                found["kernel"] = run
            if every:
                found[f"{each.name} k{split}"] = run
    return found


@cache
def deep_gemm() -> Any:
    """DeepGEMM, None where it is not installed or does not load."""
    try:
        return importlib.import_module("deep_gemm")
    except (ImportError, OSError, AssertionError) as error:
        print(f"without DeepGEMM: {type(error).__name__}: {one_line(error)}", flush=True)
        return None


def copied_gbs() -> float:
    """GB/s that a copy reads and writes."""
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    graph = Graph.capture(lambda _: target.copy_(source), 1, **_GRAPH)
    return 2 * source.numel() / statistics.median(graph.us(0.0) for _ in range(9)) * 1e-3


def measure(
    case: Case, device: Device, provided: Provided, every: bool, rounds: int, copied: float
) -> dict[str, Any]:
    """A row."""
    steady = case.rows >= _STEADY_ROWS
    sets = 1 if steady else max(1, math.ceil(3 * device.l2_bytes / (case.n * case.k)))
    operands = Operands(case, sets)
    sides = sides_of(case, operands, device, provided, every)
    refused: dict[str, str] = {}
    errors: dict[str, float] = {}
    for name, side in list(sides.items()):
        try:
            result = side(0)
            if name != "bf16":
                errors[name] = operands.error_of(result, case)
        except (RuntimeError, ValueError) as error:
            refused[name] = str(error).partition("\n")[0]
            del sides[name]
    graphs = {name: Graph.capture(side, sets, **_GRAPH) for name, side in sides.items()}
    turn_ms = _TURN_MS if steady else 0.0
    samples = in_rounds(graphs, max(3, rounds // 3) if steady else rounds, lambda _: turn_ms)
    us = {name: statistics.median(times) for name, times in samples.items()}
    own = us["tunegemm"]
    kernels = [name for name in us if name not in _SHOWN]
    choice = choose(case.rows, case.n, case.k, gpu=device.name)
    across, along = case.blocks
    moved = case.n * case.k + case.rows * (case.k + 2 * case.n) + 4 * along * (across + case.rows)
    row = {
        "model": case.layer, "m": case.rows, "n": case.n, "k": case.k, "block": [BLOCK, BLOCK],
        "with_quantising": False,
        "ratio_to_torch": round(us["torch"] / own, 4) if "torch" in us else None,
        "ratio_to_deepgemm": round(us["deepgemm"] / own, 4) if "deepgemm" in us else None,
        "ratio_to_bf16": round(us["bf16"] / own, 4),
        "bandwidth_share": round(moved / own * 1e-3 / copied, 4),
        "tflops": round(2 * case.rows * case.n * case.k / own * 1e-6, 1),
        "chosen": None if choice is None else f"{choice.name} k{choice.split_k}",
        "error": round(errors["tunegemm"], 6),
        "us": {name: round(value, 2) for name, value in us.items()},
        "wrong": [name for name, error in errors.items() if not error < _ERROR], "turn_ms": turn_ms,
    }  # fmt: skip
    if refused:
        row["refused"] = refused
    if kernels:
        best = min(kernels, key=us.__getitem__)
        row |= {"best": best, "best_to_chosen": round(own / us[best], 4)}
    return row


@torch.no_grad()
def run(options: argparse.Namespace) -> int:
    """Prints and writes a row for each case, those that the file lacks first; 1 where a result is wrong."""
    device = begin(options.device)
    results = Results(results_path(options.out, device, "blocks.json"), meta(device, METHOD))
    cases = [Case(layer, rows) for rows in map(int, options.rows) for layer in options.layers]
    cases.sort(key=lambda case: results.find(_named(case)) is not None)
    provided = provide_blocks()
    copied = copied_gbs()
    print(f"{device.name}: a copy moves {copied:.0f} GB/s", flush=True)
    found: list[dict[str, Any]] = []
    for case in within(options.seconds, cases):
        row = measure(case, device, provided, options.every, options.rounds, copied)
        found.append(row)
        results.put(row)
        shown = {name: us for name, us in row["us"].items() if name in _SHOWN}
        print(
            f"{case.layer} {case.rows}: {row['ratio_to_torch']} x torch, {row['ratio_to_deepgemm']} x "
            f"DeepGEMM, {row['ratio_to_bf16']} x bf16, "
            f"{row['bandwidth_share']} of a copy, {row['tflops']} Tflop/s by {row['chosen']}; "
            f"best {row.get('best')} {row.get('best_to_chosen')}; "
            f"{shown} us"
            f"{' WRONG ' + ','.join(row['wrong']) if row['wrong'] else ''} {row.get('refused', '')}",
            flush=True,
        )  # fmt: skip
    for words in ("ratio_to_torch", "ratio_to_deepgemm", "ratio_to_bf16"):
        if values := [row[words] for row in found if row[words]]:
            print(f"{words}: {geometric_mean(values):.3f}, least {min(values):.3f}")
    return 0 if not any(row["wrong"] for row in found) else 1


def _named(case: Case) -> dict[str, Any]:
    """What of a row names it."""
    return {"model": case.layer, "m": case.rows, "n": case.n, "k": case.k}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a result is wrong."""
    parser = parser_of("benchmarks.blocks", __doc__)
    parser.add_argument("--layers", default=",".join(LAYERS), help="default: all of %(default)s")
    parser.add_argument("--rows", default=",".join(ROWS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds; a third with turns")
    parser.add_argument("--seconds", type=float, default=0, help="begin no further row after so many")
    parser.add_argument(
        "--every", action="store_true", help="time every kernel, too, in every number of k splits"
    )
    options = parser.parse_args(arguments)
    choose_names(options, layers=tuple(LAYERS), rows=ROWS)
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
