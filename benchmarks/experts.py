"""Times layers of experts: `tunegemm.grouped_mm` beside torch's grouped product and a loop of torch.mm.

    python -m benchmarks.experts                                   # all layers, rows and skews: 3 minutes
    python -m benchmarks.experts --layers unlisted --rows 16384 --skews hot
    python -m benchmarks.experts --drawn 40                # so many layers that are in no list, once each
    python -m benchmarks.experts --kernels                 # each kernel of db/grouped.toml, too: a row's `us`
    python -m benchmarks.experts --kinds gated,fp8         # other kinds; along_k: weights' gradients
    python -m benchmarks.experts --peers quack,vllm        # their kernels, too, if they are installed

A skew is a router's division of the rows: *uniform*, *typical* (shares of a gamma distribution), *hot* (one
expert has most). Writes results/GPU/experts.json after each row, so that it can run in slices: layers
alternate, so that `--seconds`, which kinds share evenly, leaves as many rows of each. along_k has its file
experts_along_k.json, `--kernels` experts_kernels.json, from which `fit.expert_choices` draws.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from importlib.util import find_spec
from typing import Any

import torch
import triton.language as tl

import tunegemm
from benchmarks.command import add_names, command, parser_of
from benchmarks.graphs import Graph, Side, begin, in_rounds, within
from benchmarks.harness import error_of, ratio_of
from benchmarks.results import Results, report
from benchmarks.shapes import LISTED
from tunegemm.describe.device import Device
from tunegemm.errors import one_line
from tunegemm.generate import along_k
from tunegemm.generate.drawn.config import DrawnConfig
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.parted.config import PartedConfig
from tunegemm.groups import grouped
from tunegemm.measure.statistics import aa_noise
from tunegemm.model.grouped import FP8, choose, choose_along_k, configs, kinds, listed_along_k, maker_of
from tunegemm.store.provided import provide_grouped

METHOD = (
    "each side in one CUDA graph over divisions of the rows whose weights together pass 3x the L2; all sides "
    "in shuffled order in each round; from 4096 rows on each has turn_ms to itself in a round, the second "
    "half of which is timed, so that the chip's clocks are its own, else one replay of some ms; medians over "
    "rounds; noise of timing torch twice a round; loop: torch.mm for each group, whose sizes the host knows; "
    "share_of_bound: of the larger of two times, of the bytes of the experts that are used at what copies "
    "reach, and of flops at 720 Tflop/s, of fp8 twice that"
)
#: Experts, hidden, inner, rows of a token.
MODELS, UNLISTED_MODELS = LISTED["experts"], LISTED["unlisted_experts"]


def layers_of(models: Mapping[str, tuple[int, int, int, int]]) -> dict[str, tuple[int, int, int]]:
    """Groups, N, K of each model's gate and up, and of its down."""
    return {
        f"{name}-{part}": (count, *((2 * inner, hidden) if part == "up" else (hidden, inner)))
        for name, (count, hidden, inner, _) in models.items()
        for part in ("up", "down")
    }


LAYERS, UNLISTED = layers_of(MODELS), layers_of(UNLISTED_MODELS)
#: What the choices of db/grouped.toml were drawn from.
ANCHOR = tuple(LAYERS)[:6]
ROWS = ("1", "8", "16", "64", "208", "256", "512", "1024", "4096", "16384", "32768")
BETWEEN = ("32", "100", "128", "300", "700", "2000", "3000", "8000")  # of races
SKEWS = ("uniform", "typical", "hot")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, FP8: torch.float8_e4m3fn}
#: The bandwidth that copies reach, B/s, and the rate that dense products sustain, flop/s.
_BANDWIDTH = {"H100": 3.0e12, "H200": 4.3e12}
_FLOPS = 720e12
#: Peers that need to be installed, and all peers beside torch's grouped product: some rows leave them out.
PEERS = {"quack": "quack-kernels", "vllm": "vllm"}
_OPTIONAL = ("loop", *PEERS)
_VLLM = "vllm.model_executor.layers.fused_moe.fused_moe"
_STEADY_ROWS = 4096
_TURN_MS, _RACE_TURN_MS = 120.0, 30.0
_SHORT_MS = 1.5
_MOST_DIVISIONS = 24
#: Relative to fp32: the error of rounding to bf16.
_ERROR = 4e-3
_FAST: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}


def is_raced(config: GroupedConfig, rows: int, groups: int) -> bool:
    """Whether a kernel may be the best for so many rows."""
    if isinstance(config, PartedConfig):  # each of its tiles reads weights again
        return rows <= 4 * config.tile_n
    if isinstance(config, DrawnConfig):  # drawing does not help few tiles: each block has one or two
        return rows >= _STEADY_ROWS
    return config.tile_n >= 64 or (rows < _STEADY_ROWS and rows / groups < 4 * 64)


def launches(config: GroupedConfig, rows: int) -> tuple[dict[str, int], ...]:
    """How a kernel is launched in races."""
    if isinstance(config, PartedConfig):
        return ({"l2_hint": 1},)
    ordered = {"swizzle_size": 4}, {"swizzle_size": 16}
    return ordered if rows >= _STEADY_ROWS else (*ordered, {"l2_hint": 1})


def divide(groups: int, rows: int, skew: str) -> list[int]:
    """Rows of each group. Few rows are drawn one by one, as a router's tokens are."""
    if skew == "uniform":
        return [rows // groups + (group < rows % groups) for group in range(groups)]
    shares = [random.gammavariate(0.5, 1.0) if skew == "typical" else 0.02 for _ in range(groups)]
    if skew == "hot":
        shares[random.randrange(groups)] = 1.0
    sizes = [0] * groups
    if rows <= 4096:
        for group in random.choices(range(groups), shares, k=rows):
            sizes[group] += 1
    else:
        sizes = [int(rows * share / sum(shares)) for share in shares]
        sizes[max(range(groups), key=sizes.__getitem__)] += rows - sum(sizes)
    return sizes


class Case:
    """One layer's weights, rows, and divisions of them."""

    def __init__(
        self, weights: torch.Tensor, rows: int, skew: str, least_bytes: int, kind: str, name: str
    ) -> None:
        """Enough divisions to read that many bytes of weights together. kind: of the table's. name: of the
        layer."""
        self.weights, self.kind, self.name = weights, kind, name
        (count, n, k), place = weights.shape, weights.device
        self.divisions: list[list[int]] = []
        used = 0
        while used < least_bytes and len(self.divisions) < _MOST_DIVISIONS:
            self.divisions.append(divide(count, rows, skew))
            used += sum(size > 0 for size in self.divisions[-1]) * n * k * weights.element_size()
        self.a = torch.randn(rows, k, device=place).to(weights.dtype)
        # Of fp8: of a's rows, and of each group's columns.
        self.scales = torch.rand(rows, device=place) + 0.5, torch.rand(count, n, device=place) + 0.5
        self.ends = [torch.tensor(sizes, device=place).cumsum(0).to(torch.int32) for sizes in self.divisions]
        self.b, self.is_fp8 = self.weights.mT, self.kind == "fp8"
        self.gate = "swiglu" if self.kind == "gated" else ""

    @cached_property
    def out(self) -> torch.Tensor:
        """For a product without a gate."""
        dtype = torch.bfloat16 if self.is_fp8 else self.a.dtype
        return self.a.new_empty((len(self.a), self.weights.shape[1]), dtype=dtype)

    @cached_property
    def gated_out(self) -> torch.Tensor:
        """What kernels write, which apply the gate."""
        return self.out[:, : self.out.shape[1] // 2].contiguous() if self.gate else self.out

    def spans(self, number: int) -> Iterator[tuple[int, slice]]:
        """The groups of a division, and their rows."""
        ends = list(itertools.accumulate(self.divisions[number], initial=0))
        yield from enumerate(itertools.starmap(slice, itertools.pairwise(ends)))

    def gated(self, product: torch.Tensor) -> torch.Tensor:
        """What torch makes of the product."""
        if not self.gate:
            return product
        gate, up = product.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    def loop(self, number: int) -> torch.Tensor:
        b, (scale_a, scale_b) = self.b, self.scales
        for group, own in self.spans(number):
            if own.start == own.stop:
                continue
            if self.is_fp8:
                of_group = scale_a[own, None], scale_b[group, None]
                torch._scaled_mm(self.a[own], b[group], *of_group, out=self.out[own], **_FAST)
            else:
                torch.mm(self.a[own], b[group], out=self.out[own])
        return self.gated(self.out)

    def torchs(self, number: int) -> torch.Tensor:
        b, offs = self.b, self.ends[number]
        if self.is_fp8:
            return torch._scaled_grouped_mm(self.a, b, *self.scales, offs=offs, **_FAST)
        return self.gated(torch._grouped_mm(self.a, b, offs=offs))

    def ours(self, number: int) -> torch.Tensor:
        b, offs = self.b, self.ends[number]
        if self.is_fp8:
            return tunegemm.scaled_grouped_mm(self.a, b, *self.scales, offs=offs, **_FAST)
        result = grouped.groups(self.a, b, offs, None, self.gate)
        return self.gated(tunegemm.grouped_mm(self.a, b, offs=offs)) if result is None else result

    def sides(self, *, each_kernel: bool, peers: Sequence[str]) -> dict[str, Side]:
        """The timed sides, by name; each takes the number of a division."""
        results: dict[str, Side] = {
            "torch": self.torchs, "torch again": lambda i: self.torchs(i), "tunegemm": self.ours,
            "loop": self.loop,
        }  # fmt: skip
        if not self.is_fp8:
            results |= {name: getattr(self, name)() for name in peers}
        return results | (self.kernels() if each_kernel else {})

    def kernels(self) -> dict[str, Side]:
        """Each kernel that may be the best, in each way to launch it."""
        results: dict[str, Side] = {}
        provided = provide_grouped(self.kind, every=self.kind != "along_k")
        for config, maker, ways in self.listed():
            if (artifact := provided.of(maker.key_of(config))) is not None:
                kernel = maker.kernel(config, artifact.path)
                for way in ways:
                    name = " ".join([config.label, *(f"{word[0]}{value}" for word, value in way.items())])
                    results[name] = partial(self.launched, kernel, way)
        return results

    def listed(self) -> Iterator[tuple[Any, Any, tuple[dict[str, int], ...]]]:
        """Of each of these its config, its family, and the ways to launch it."""
        for config in configs(self.kind).values():
            if is_raced(config, len(self.a), len(self.weights)):
                yield config, maker_of(config), launches(config, len(self.a))

    def launched(self, kernel: Any, launch: Mapping[str, int], number: int) -> torch.Tensor:
        """A kernel's result for a division."""
        more = {"bias": self.scales[1], "scales": self.scales[0]} if self.is_fp8 else {}
        kernel.launch(
            self.a, self.weights, self.gated_out, self.ends[number], blocks=_blocks(), **launch, **more
        )
        return self.gated_out

    def quack(self) -> Side:
        """quack's default kernel for such products: tuning each would take up to a minute."""
        from quack.gemm_interface import gemm

        starts = [torch.nn.functional.pad(each, (1, 0)) for each in self.ends]
        a, b, out = self.a, self.b, self.out
        return lambda i: self.gated(gemm(a, b, out=out, cu_seqlens_m=starts[i], tuned=False))

    def vllm(self) -> Side:
        """vLLM's Triton kernel with the settings of its tables, or else its defaults, for the layer."""
        theirs = importlib.import_module(_VLLM)
        count, n, k = self.weights.shape
        model, _, part = self.name.rpartition("-")
        inner, rows = n // 2 if part == "up" else k, len(self.a)
        tokens = max(1, rows // (MODELS | UNLISTED_MODELS).get(model, (0, 0, 0, 4))[3])
        config = theirs.try_get_optimal_moe_config((count, 2 * inner, k), (count, k, inner), 1, None, tokens)
        numbers = torch.arange(count, device=self.a.device, dtype=torch.int32)
        blocks = []
        for sizes in self.divisions:
            expert = numbers.repeat_interleave(torch.tensor(sizes, device=self.a.device))[:, None]
            blocks.append(theirs._prepare_expert_assignment(expert, config, rows, 1, count, None))
        dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[self.a.dtype]
        words = dict.fromkeys(
            ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"), False
        )

        def vllm(number: int) -> torch.Tensor:
            theirs.invoke_fused_moe_triton_kernel(
                self.a, self.weights, self.out[:, None], None, None, None, *blocks[number], False, 1, config,
                dtype, **words,
            )  # fmt: skip
            return self.gated(self.out)

        return vllm

    def poisoned(self, side: Side) -> torch.Tensor:
        """A side's result for the first division, with NaN in rows that a kernel did not store."""
        (self.weights if self.kind == "along_k" else self.gated_out).fill_(math.nan)
        return side(0)

    def error(self, result: torch.Tensor) -> float:
        """Of the first division, to fp32."""
        parts = []
        for group, own in self.spans(0):
            if own.start < own.stop:
                product = self.a[own].float() @ self.weights[group].float().t()
                if self.is_fp8:
                    product *= self.scales[0][own, None] * self.scales[1][group]
                parts.append(self.gated(product))
        return error_of(result, torch.cat(parts))

    def facts(self, gpu: str) -> dict[str, Any]:
        """The product's fields of a row, and the label of the kernel that the table chooses."""
        count, n, k = self.weights.shape
        major = "n" if self.kind == "n_major" else "k"
        dtype = next(name for name, each in _DTYPES.items() if each is self.a.dtype)
        words: dict[str, Any] = {"gpu": gpu, "dtype": dtype, "gate": self.gate, "major": major}
        result = choose(count, n, k, len(self.a), **words)
        layout, label = "tn" if major == "k" else "nn", result.label if result else "torch"
        return {"dtype": dtype, "epilogue": self.gate, "layout": layout, "kernel": label}

    def used(self) -> float:
        """Groups whose weights a product reads or writes, in the mean."""
        return statistics.mean(sum(size > 0 for size in sizes) for sizes in self.divisions)

    def bound_us(self, device: Device) -> float:
        """The larger of the times of bytes and flops, as the mean over divisions."""
        (n, k), rows, each = self.weights.shape[1:], len(self.a), self.a.element_size()
        bandwidth = next((rate for name, rate in _BANDWIDTH.items() if name in device.name), math.nan)
        moved = each * (self.used() * n * k + rows * k) + 2 * rows * (n // (2 if self.gate else 1))
        return max(moved / bandwidth, 2 * rows * n * k / _FLOPS * each / 2) * 1e6


class AlongKCase(Case):
    """A layer's weights' gradient: of each group the product of the output's gradient and of the rows, summed
    over the rows. The weights are as the gradient is.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.grad = torch.randn(len(self.a), self.weights.shape[1], device=self.a.device, dtype=self.a.dtype)

    def loop(self, number: int) -> torch.Tensor:
        for group, own in self.spans(number):
            if own.start < own.stop:
                torch.mm(self.grad[own].t(), self.a[own], out=self.weights[group])
            else:
                self.weights[group].zero_()
        return self.weights

    def torchs(self, number: int) -> torch.Tensor:
        return torch._grouped_mm(self.grad.t(), self.a, offs=self.ends[number])

    def ours(self, number: int) -> torch.Tensor:
        return tunegemm.grouped_mm(self.grad.t(), self.a, offs=self.ends[number])

    def listed(self) -> Iterator[tuple[Any, Any, tuple[dict[str, int], ...]]]:
        ways = tuple({"swizzle_size": width} for width in (4, 8, 16))
        return ((config, along_k, ways) for config in listed_along_k())

    def launched(self, kernel: Any, launch: Mapping[str, int], number: int) -> torch.Tensor:
        kernel.launch(self.grad, self.a, self.weights, self.ends[number], blocks=_blocks(), **launch)
        return self.weights

    def error(self, result: torch.Tensor) -> float:
        """Of the first division, to fp32: of the worst group."""
        errors = []
        for group, own in self.spans(0):
            reference = self.grad[own].float().t() @ self.a[own].float()
            off = float((result[group].float() - reference).norm())
            errors.append(off / float(reference.norm()) if own.start < own.stop else off)
        return max(errors, key=lambda error: (math.isnan(error), error))

    def facts(self, gpu: str) -> dict[str, Any]:
        count, n, k = self.weights.shape
        result = choose_along_k(count, n, k, len(self.a), gpu=gpu)
        label = result.config.label if result else "torch"
        return {"dtype": "bf16", "grouping": "k", "epilogue": "", "layout": "nt", "kernel": label}

    def used(self) -> float:
        return len(self.weights)


@cache
def _blocks() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def captured(sides: dict[str, Side], divisions: int) -> dict[str, Graph]:
    """Each side as a graph; peers that cannot compute this are left out, as cuBLAS for some fp8 rows."""
    result = {}
    for name, side in sides.items():
        may_lack = name in _OPTIONAL
        try:
            result[name] = Graph.capture(side, divisions, short_ms=_SHORT_MS, most=400, may_wait=not may_lack)
        except Exception as error:  # a peer may raise anything
            if not may_lack:
                raise
            torch.cuda.synchronize()
            print(f"without {name}: {one_line(error)}", flush=True)
    return result


def measure(case: Case, skew: str, device: Device, options: argparse.Namespace) -> dict[str, Any]:
    """A row."""
    each_kernel, rounds = options.kernels, options.rounds
    sides = case.sides(each_kernel=each_kernel, peers=options.peers)
    # Tensor cores add fp8 products with fewer bits than fp32, for torch's kernel and for ours.
    most = max(_ERROR, 1.2 * case.error(sides["torch"](0))) if case.kind == "fp8" else _ERROR
    ours = [side for name, side in sides.items() if name not in ("torch", "torch again", *_OPTIONAL)]
    right = all(case.error(case.poisoned(side)) < most for side in ours)
    graphs = captured(sides, len(case.divisions))
    rows = case.a.shape[0]
    turn_ms = (_RACE_TURN_MS if each_kernel else _TURN_MS) if rows >= _STEADY_ROWS else 0.0
    # Torch's second timing and the loop are not worth turns of their own.
    brief = () if each_kernel else ("torch again", "loop")
    samples = in_rounds(
        graphs, max(3, rounds // 2) if turn_ms else rounds,
        lambda name: turn_ms / 3 if name in brief else turn_ms,
    )  # fmt: skip
    us = {name: statistics.median(times) for name, times in samples.items()}
    best = min((name for name in ("torch", *_OPTIONAL) if name in us), key=us.__getitem__)
    count, n, k = case.weights.shape
    row: dict[str, Any] = case.facts(device.name) | {
        "groups": count, "n": n, "k": k, "rows": rows, "skew": skew,
        "torch_us": round(us["torch"], 2), "tunegemm_us": round(us["tunegemm"], 2),
        "ratio": ratio_of(samples["torch"], samples["tunegemm"]),
        "best_peer": best, "ratio_to_best_peer": round(us[best] / us["tunegemm"], 4),
        "share_of_bound": round(case.bound_us(device) / us["tunegemm"], 4),
        "torch_share_of_bound": round(case.bound_us(device) / us["torch"], 4),
        "noise": round(aa_noise(samples["torch again"], samples["torch"]), 5),
        "turn_ms": turn_ms, "torch_captured": graphs["torch"].is_captured, "right": right,
    }  # fmt: skip
    if each_kernel:
        row["us"] = {name: round(value, 2) for name, value in us.items()}
    return row


def drawn(count: int, seed: int = 0) -> dict[str, tuple[int, int, int]]:
    """So many layers that are in no list, of up to 4 GiB, the same at each call with a seed."""
    chance = random.Random(seed)
    result: dict[str, tuple[int, int, int]] = {}
    while len(result) < count:
        groups = chance.choice((4, 6, 12, 16, 24, 40, 48, 64, 72, 96, 160, 192, 256))
        n, k = (64 * round(2 ** chance.uniform(2.5, 8)) for _ in range(2))
        if groups * n * k < 1 << 31 and (groups, n, k) not in (LAYERS | UNLISTED).values():
            result[f"drawn-{groups}x{n}x{k}-up"] = groups, n, k
    return result


def order(layers: Sequence[str], rows: Sequence[str], skews: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """All of them; each time that the layers were all there, each has had other rows and another skew."""
    pairs = [(int(each), skew) for skew in skews for each in rows]
    random.Random(0).shuffle(pairs)
    for turn in range(len(pairs)):
        for number, layer in enumerate(layers):
            yield layer, *pairs[(turn + number) % len(pairs)]


def cases(kind: str, options: argparse.Namespace, device: Device) -> Iterator[tuple[Case, str]]:
    """Each case of a kind and its skew."""
    dtype = {"fp16": torch.float16, "fp8": torch.float8_e4m3fn}.get(kind, torch.bfloat16)
    layers = LAYERS | UNLISTED
    names = [name for name in options.layers if kind != "gated" or name.endswith("-up")]
    plan = list(order(names, options.rows, options.skews))
    if options.drawn:
        layers = drawn(options.drawn, options.seed)
        some = [*itertools.product(map(int, options.rows), options.skews)]
        random.Random(1).shuffle(some)
        plan = [(name, *pair) for name, pair in zip(layers, itertools.cycle(some), strict=False)]
    kept: dict[str, torch.Tensor] = {}
    for name, rows, skew in within(options.seconds / len(options.kinds), plan):
        count, n, k = layers[name]
        if name not in kept:
            if options.drawn:
                kept.clear()
            extents = (count, k, n) if kind == "n_major" else (count, n, k)
            weights = torch.empty(*extents, device=options.device, dtype=dtype)
            for each in weights:
                each.copy_(torch.randn(each.shape, device=each.device) * k**-0.5)
            kept[name] = weights.mT if kind == "n_major" else weights
        random.seed(f"{name} {rows} {skew}")
        case = AlongKCase if kind == "along_k" else Case
        yield case(kept[name], rows, skew, 3 * device.l2_bytes, kind, name), skew


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a result is wrong."""
    groups = {"anchor": ANCHOR, "unlisted": tuple(UNLISTED)}
    parser = parser_of("benchmarks.experts", __doc__, rounds=7)
    add_names(
        parser, "layers", (*LAYERS, *UNLISTED, *groups), default=",".join(LAYERS),
        help="or `anchor`, the first six, or `unlisted`; default: all of %(default)s",
    )  # fmt: skip
    parser.add_argument("--drawn", type=int, default=0, help="so many layers that are in no list, instead")
    help = "of all groups together: default %(default)s"
    add_names(parser, "rows", ROWS + BETWEEN, default=",".join(ROWS), help=help)
    add_names(parser, "skews", SKEWS)
    parser.add_argument("--seed", type=int, default=2, help="of drawn layers; choices saw those of 0 and 1")
    every = (*kinds(), "along_k")
    add_names(parser, "kinds", every, default="bf16", help=f"of {', '.join(every)}: default %(default)s")
    add_names(
        parser, "peers", PEERS, default="", help=f"also time kernels of {', '.join(PEERS)}, as they come"
    )
    parser.add_argument("--kernels", action="store_true", help="time each kernel of the table, too")
    options = parser.parse_args(arguments)
    options.layers = [each for name in options.layers for each in groups.get(name, (name,))]
    if "along_k" in options.kinds and (len(options.kinds) > 1 or options.peers):
        parser.error("along_k has a file of its own, and no peers: leave out other --kinds, and --peers")
    for name in options.peers:
        if find_spec(name) is None:
            parser.error(f"{name} is not installed: pip install {PEERS[name]}, or leave it out of --peers")
    device = begin(options.device)
    for kind in options.kinds:
        provide_grouped(kind)
    name = "experts_kernels.json" if options.kernels else "experts.json"
    if "along_k" in options.kinds:
        name = "experts_along_k.json"
    results = Results.of(options.out, device, name, METHOD)
    rows = (
        measure(case, skew, device, options)
        for kind in options.kinds
        for case, skew in cases(kind, options, device)
    )
    return int(report(results, rows, ratios=("ratio", "ratio_to_best_peer", "share_of_bound")) > 0)


if __name__ == "__main__":
    sys.exit(main())
