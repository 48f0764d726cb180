"""Times one A with several weights in place: q, k and v; gate and up. Every kernel of db/joined.toml.

    python -m benchmarks.joined --seconds 60           # for so long; the next run continues with missing rows
    python -m benchmarks.joined --rows 1,16 --models Llama-3-8B

Compares them, in CUDA graphs and in one interleave, with torch's products, apart and merged. `chosen` is the
kernel that `tunegemm.model.joined.choose` returns. Writes results/GPU/joined.json.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear, silu

from benchmarks.command import add_names, command, parser_of
from benchmarks.graphs import Side, begin, race, within
from benchmarks.harness import error_of
from benchmarks.results import Results, report
from benchmarks.shapes import LISTED
from tunegemm.describe.device import Device
from tunegemm.generate import joined
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.joined import JoinedKernel
from tunegemm.model.joined import Listed, candidates, choose
from tunegemm.resources import data_path
from tunegemm.store import packs
from tunegemm.store.provided import provide_joined

METHOD = (
    "each side in one CUDA graph over as many sets of weights as pass 3x the L2; all in shuffled order in "
    "each round, one replay of some ms; from 1024 rows on each has turn_ms to itself in a round, the second "
    "half of which is timed; medians over rounds. separate: torch's products one by one, and silu and a "
    "product of a gate; merged: torch's of one weight. ratio, ratio_to_merged: to the chosen kernel; best: "
    "the fastest kernel"
)
#: K; rows of q, k and v; whether they have biases; rows of gate.
MODELS = LISTED["joined"]
ROWS = ("1", "16", "64", "128", "256", "384", "640", "1024", "4096")
BETWEEN = ("32", "96", "192", "320", "512", "768", "896", "1280", "1536", "2048", "8192")  # for `fit`
_STEADY_ROWS, _TURN_MS = 1024, 12.0
#: Kernels for few rows are timed up to this many, kernels for many from this many on.
_MOST_FEW, _LEAST_MANY = 512, 64
_ERROR = 8e-3


class Case(NamedTuple):
    """A product: the weights of a model's attention or of its gate."""

    name: str
    rows: int
    k: int
    ns: tuple[int, ...]
    bias: bool = False
    gate: str = ""

    @property
    def columns(self) -> int:
        return self.ns[0] if self.gate else sum(self.ns)

    @property
    def named(self) -> dict[str, Any]:
        """What of a row names it."""
        return {"model": self.name, "rows": self.rows, "dtype": "bf16", "k": self.k}


class Weights:
    """The weights of one model's attention or gate, apart and merged."""

    def __init__(self, case: Case, sets: int) -> None:
        scale = case.k**-0.5

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        self.apart = [[drawn(n, case.k) * scale for n in case.ns] for _ in range(sets)]
        self.merged = [torch.cat(weights) for weights in self.apart]
        self.biases = [drawn(n) for n in case.ns] if case.bias else []
        self.bias = torch.cat(self.biases) if case.bias else None


_compiled = cache(provide_joined)


def kernel_of(listed: Listed) -> JoinedKernel | None:
    """A kernel, compiled where it does not ship; None where it cannot be compiled."""
    key = joined.FAMILY.key_of(listed.choice.config)
    artifact = packs.find(key) or _compiled().of(key)
    return None if artifact is None else JoinedKernel.load(listed.choice.config, artifact.path)


def sides_of(case: Case, weights: Weights, device: Device) -> dict[str, Side]:
    """The timed sides, by name; each takes the number of a set of weights."""
    a = torch.randn(case.rows, case.k, device="cuda", dtype=torch.bfloat16)
    n, apart, merged = case.ns[0], weights.apart, weights.merged
    biases: Sequence[Any] = weights.biases or [None] * len(case.ns)

    def separate(i: int) -> Any:
        parts = [linear(a, weight, bias) for weight, bias in zip(apart[i], biases, strict=True)]
        return silu(parts[0]) * parts[1] if case.gate else parts

    def of_merged(i: int) -> torch.Tensor:
        product = linear(a, merged[i], weights.bias)
        return silu(product[:, :n]) * product[:, n:] if case.gate else product

    result: dict[str, Side] = {"separate": separate, "merged": of_merged}
    out = torch.empty(case.rows, case.columns, device="cuda", dtype=torch.bfloat16)
    for each in candidates(gate=case.gate, bias=case.bias):
        few = isinstance(each.choice.config, GroupedConfig)
        timed = case.rows <= _MOST_FEW if few else case.rows >= _LEAST_MANY
        if not timed or not each.fits(case.rows, case.ns[:1] if case.gate else case.ns):
            continue
        if (kernel := kernel_of(each)) is None:
            continue
        launches = [
            kernel.bound(a, own, out, weights.biases, device=device, **each.choice.words) for own in apart
        ]

        def run(i: int, launches: Sequence[Callable[[int, int], None]] = launches) -> torch.Tensor:
            launches[i](a.data_ptr(), out.data_ptr())
            return out

        result[each.choice.name] = run
    return result


def measure(case: Case, device: Device, rounds: int) -> dict[str, Any]:
    """A row."""
    each_bytes = sum(case.ns) * case.k * 2
    sets = 1 if case.rows >= _STEADY_ROWS else max(1, math.ceil(3 * device.l2_bytes / each_bytes))
    weights = Weights(case, sets)
    sides = sides_of(case, weights, device)
    choice = choose(case.rows, case.ns, case.k, gate=case.gate, bias=case.bias, gpu=device.name)
    chosen = "" if choice is None else choice.name
    parts = sides["separate"](0)
    reference = (parts if case.gate else torch.cat(parts, 1)).float()
    errors = {name: error_of(side(0), reference) for name, side in sides.items() if name != "separate"}
    turn_ms = _TURN_MS if case.rows >= _STEADY_ROWS else 0.0
    us = race(sides, sets, rounds, turn_ms)
    kernels = [name for name in us if name not in ("separate", "merged")]
    best = min(kernels, key=us.__getitem__)
    return case.named | {
        "ns": list(case.ns), "ratio": round(us["separate"] / us[chosen], 4),
        "ratio_to_merged": round(us["merged"] / us[chosen], 4), "chosen": chosen, "best": best,
        "best_to_chosen": round(us[chosen] / us[best], 4),
        "gbs": round((each_bytes + 2 * case.rows * (case.k + case.columns)) / us[best] * 1e-3),
        "tflops": round(2 * case.rows * sum(case.ns) * case.k / us[best] * 1e-6),
        "us": {name: round(value, 2) for name, value in us.items()},
        "wrong": [name for name in kernels if not errors[name] < _ERROR], "turn_ms": turn_ms,
    }  # fmt: skip


@command
@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a result is wrong."""
    parser = parser_of("benchmarks.joined", __doc__, rounds=9)
    add_names(parser, "models", MODELS)
    add_names(parser, "rows", ROWS + BETWEEN, default=",".join(ROWS))
    options = parser.parse_args(arguments)
    device = begin(options.device)
    results = Results.of(options.out, device, "joined.json", METHOD)
    results.summary["table"] = data_path("db", "joined.toml").read_text(encoding="utf-8")
    cases = []
    for count, model in itertools.product(map(int, options.rows), options.models):
        k, qkv, bias, gate = MODELS[model]
        cases.append(Case(f"{model} qkv", count, k, tuple(qkv), bias=bias))
        cases.append(Case(f"{model} gate", count, k, (gate, gate), gate="swiglu"))
    cases.sort(key=lambda case: results.find(case.named) is not None)
    rows = (measure(case, device, options.rounds) for case in within(options.seconds, cases))
    return int(report(results, rows, ratios=("ratio", "ratio_to_merged")) > 0)


if __name__ == "__main__":
    sys.exit(main())
