"""Times layers of experts of transformers' models: `tunegemm.experts` beside transformers' own methods.

    python -m benchmarks.expert_layers --tokens 16
    python -m benchmarks.expert_layers --vllm       # beside vLLM's Triton method, too, if vLLM is installed

A row has the time of a CUDA graph's replay (`us`), as when servers decode, and of eager calls (`eager_us`),
as in a program that calls the model. Needs transformers. Writes results/GPU/expert_layers.json after each
row.
"""

from __future__ import annotations

import importlib
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch

from benchmarks.command import add_names, command, parser_of
from benchmarks.graphs import Graph, begin, timed_ms, within
from benchmarks.harness import error_of
from benchmarks.results import Results, report
from benchmarks.shapes import LISTED
from tunegemm.engines import transformers as integration

METHOD = (
    "one layer of experts, random weights and routes; each way in one CUDA graph over draws of routes whose "
    "weights together pass 3x the L2, all ways in shuffled order in each round, medians; from 1024 tokens on "
    "each has turn_ms to itself, the second half of which is timed; eager: 10 calls in a row, 3 from 256 "
    "tokens on, without a graph, after two that do not count; "
    "ratio: the faster of transformers' grouped_mm and batched_mm (up to 16 tokens) to ours; vllm_ratio: "
    "vLLM's fused_experts, of its tables' Triton kernels, to ours, in a graph"
)
#: Experts, of a token, hidden, inner; the class of the layer in transformers.
MODELS = LISTED["expert_layers"]
TOKENS = ("1", "16", "64", "256", "4096")
_DRAWS = 6
_STEADY_TOKENS = 1024
_TURN_MS = 120.0
_MOST_BATCHED = 16
_VLLM = "vllm.model_executor.layers.fused_moe.fused_moe"


def layer_of(name: str) -> torch.nn.Module:
    """The layer of a model, its weights drawn by chance."""
    from transformers import AutoConfig

    count, each, hidden, inner, place = MODELS[name]
    module, _, cls = place.rpartition(".")
    kind = module.partition(".")[0]
    config = AutoConfig.for_model(
        kind, num_local_experts=count, num_experts=count, num_experts_per_tok=each, hidden_size=hidden,
        intermediate_size=inner, moe_intermediate_size=inner,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made: torch.nn.Module = getattr(importlib.import_module(f"transformers.models.{module}"), cls)(config)
    torch.set_default_dtype(torch.float32)
    for parameter in made.parameters():
        for part in parameter:  # transformers leaves it uninitialised
            part.normal_(std=0.02)
    return made


def timed(run: Callable[[], Any], times: int) -> float:
    """Microseconds of one run."""
    return timed_ms(lambda: [run() for _ in range(times)]) * 1e3 / times


def measure(name: str, layer: torch.nn.Module, tokens: int, rounds: int, vllm: Any = None) -> dict[str, Any]:
    """A row. vllm: its function of a layer, where it is timed, too."""
    config: Any = layer.config
    count, each, hidden, _, _ = MODELS[name]
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    routes = []
    for _ in range(_DRAWS):
        weights, index = torch.rand(tokens, count, device="cuda").topk(each)
        routes.append((index, (weights / weights.sum(1, keepdim=True)).to(torch.bfloat16)))
    ways = ["grouped_mm", "tunegemm"] + (["batched_mm"] if tokens <= _MOST_BATCHED else [])
    if vllm is not None and not getattr(layer, "is_transposed", False):
        ways.append("vllm")
        # In the form of vLLM's router.
        theirs_routes = [(weights.float(), index.int()) for index, weights in routes]
    results, graphs = {}, {}
    samples: dict[str, list[float]] = {way: [] for way in ways}
    eager: dict[str, list[float]] = {way: [] for way in ways}

    def run(way: str, draw: int) -> torch.Tensor:
        if way == "vllm":
            return vllm(x, layer.gate_up_proj, layer.down_proj, *theirs_routes[draw])
        config._experts_implementation = way
        result: torch.Tensor = layer(x, *routes[draw])
        return result

    for way in ways:
        results[way] = run(way, 0).float()
        graphs[way] = Graph.capture(partial(run, way), _DRAWS, short_ms=0.0, most=_DRAWS)  # all draws, once
    turn_ms = _TURN_MS if tokens >= _STEADY_TOKENS else 0.0
    for _ in range(rounds):
        for way in random.sample(ways, len(ways)):
            samples[way].append(graphs[way].us(turn_ms))
            # The first calls after other work are slower: a program sees the speed of the others.
            timed(partial(run, way, 0), 2)
            eager[way].append(timed(partial(run, way, 0), 10 if tokens < 256 else 3))
    us, eager_us = ({w: statistics.median(t) for w, t in of.items()} for of in (samples, eager))
    reference = results["grouped_mm"]
    theirs = {way: value for way, value in us.items() if way in ("grouped_mm", "batched_mm")}
    best, error = min(theirs, key=theirs.__getitem__), error_of(results["tunegemm"], reference)
    return {
        "model": name, "rows": tokens, "dtype": "bf16", "best_peer": best,
        "ratio": round(us[best] / us["tunegemm"], 4),
        "eager_ratio": round(min(eager_us[way] for way in theirs) / eager_us["tunegemm"], 4),
        **({"vllm_ratio": round(us["vllm"] / us["tunegemm"], 4)} if "vllm" in us else {}),
        "us": {way: round(value, 2) for way, value in us.items()},
        "eager_us": {way: round(value, 2) for way, value in eager_us.items()},
        "error": round(error, 5), "right": error < 0.02, "turn_ms": turn_ms,
    }  # fmt: skip


@command
@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a result is wrong."""
    parser = parser_of("benchmarks.expert_layers", __doc__, rounds=5)
    add_names(parser, "models", MODELS)
    add_names(parser, "tokens", TOKENS)
    parser.add_argument("--vllm", action="store_true", help="time vLLM's Triton method, too")
    options = parser.parse_args(arguments)
    if options.vllm and find_spec("vllm") is None:
        parser.error("vllm is not installed: pip install vllm, or leave out --vllm")
    device = begin(options.device)
    integration.register()
    results = Results.of(options.out, device, "expert_layers.json", METHOD)
    vllm = importlib.import_module(_VLLM).fused_experts if options.vllm else None
    made: dict[str, torch.nn.Module] = {}

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal made
        for name, tokens in within(options.seconds, [*product(options.models, map(int, options.tokens))]):
            if name not in made:
                made = {name: layer_of(name)}  # replaces the previous one
            yield measure(name, made[name], tokens, options.rounds, vllm)

    return int(report(results, rows(), ratios=("ratio", "eager_ratio")) > 0)


if __name__ == "__main__":
    sys.exit(main())
