"""Times vLLM's layers of experts by its door, `TUNEGEMM_VLLM_EXPERTS=1`, beside vLLM's own Triton.

    python -m benchmarks.vllm_experts              # all models and numbers of tokens: a minute

vLLM's modular kernel of a layer, as its engine makes it, with either class of experts: random weights and
routes, CUDA graphs. Needs vLLM. Writes results/GPU/vllm_experts.json after each row.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.command import choose_names, command, parser_of
from benchmarks.expert_layers import graph_of, sampled
from benchmarks.provided import provide_grouped
from benchmarks.results import Results, geometric_mean, meta, results_path
from tunegemm.describe.device import find_device, package_version
from tunegemm.engines.vllm_experts import serve_experts
from tunegemm.measure.statistics import aa_noise

METHOD = (
    "one layer of experts by vLLM's modular kernel, random weights and routes, in CUDA graphs of six draws "
    "of routes; vLLM's class twice and ours in shuffled order in each round, 3 replays each (30 ms at least, "
    "behind as many that do not count, from 1024 tokens on), medians; ratio of a round's two of vLLM's to "
    "ours; noise of those two"
)
#: Experts, of a token, hidden, inner of a rank.
MODELS = {
    "Mixtral-8x7B/TP2": (8, 2, 4096, 7168),
    "Mixtral-8x7B/TP4": (8, 2, 4096, 3584),
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
}
TOKENS = ("1", "4", "16", "64", "256", "1024", "4096")
_LAYERS = "vllm.model_executor.layers.fused_moe"
_STEADY_TOKENS, _TURN_MS = 1024, 30.0


def kernels_of(count: int, each: int, hidden: int, inner: int, device: str) -> tuple[Any, Any]:
    """vLLM's kernel of a layer by its own class of experts, and by ours."""
    config, oracle, workspace = (
        importlib.import_module(name)
        for name in (f"{_LAYERS}.config", f"{_LAYERS}.oracle.unquantized", "vllm.v1.worker.workspace")
    )
    serve_experts()
    workspace.init_workspace_manager(torch.device(device))
    known = {field.name for field in dataclasses.fields(config.FusedMoEConfig)}
    words = {
        "num_experts": count, "experts_per_token": each, "hidden_dim": hidden, "intermediate_size": inner,
        "num_local_experts": count, "num_logical_experts": count, "device": device,
        "activation": config.MoEActivation.SILU, "in_dtype": torch.bfloat16,
        "routing_method": config.RoutingMethodType.Renormalize,
        "moe_parallel_config": config.FusedMoEParallelConfig.make_no_parallel(),
    }  # fmt: skip
    of_layer = config.FusedMoEConfig(**{name: value for name, value in words.items() if name in known})
    triton = oracle.UnquantizedMoeBackend.TRITON
    ours, theirs = oracle.backend_to_kernel_cls(triton)
    plain = config.FUSED_MOE_UNQUANTIZED_CONFIG
    made = [oracle.make_unquantized_moe_kernel(plain, of_layer, triton, each) for each in (theirs, ours)]
    return made[0], made[1]


def apply(kernel: Any, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, route: Any) -> Any:
    """A layer. route: weights (tokens, chosen) in fp32, and numbers of experts in int32."""
    activation = importlib.import_module(f"{_LAYERS}.activation").MoEActivation.SILU
    return kernel.apply(
        hidden_states=x, w1=gate_up, w2=down, topk_weights=route[0], topk_ids=route[1],
        activation=activation, global_num_experts=gate_up.shape[0], expert_map=None,
        apply_router_weight_on_input=False,
    )  # fmt: skip


def measure(name: str, kernels: Any, weights: Any, tokens: int, rounds: int) -> dict[str, Any]:
    """A row."""
    count, each, hidden, _ = MODELS[name]
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    chances = [torch.rand(tokens, count, device="cuda").softmax(1).topk(each) for _ in range(6)]
    routes = [(values, index.int()) for values, index in chances]
    ways = dict(zip(("vllm", "again", "tunegemm"), (kernels[0], *kernels), strict=True))

    def call(way: str) -> Callable[[int], Any]:
        return lambda draw: apply(ways[way], x, weights[0], weights[1], routes[draw])

    results = {way: call(way)(0).float().clone() for way in ways}
    graphs = {way: graph_of(call(way)) for way in ways}
    samples: dict[str, list[float]] = {way: [] for way in ways}
    turn_ms = _TURN_MS if tokens >= _STEADY_TOKENS else 0.0
    for _ in range(rounds):
        for way in random.sample([*ways], len(ways)):
            samples[way].append(sampled(graphs[way].replay, turn_ms) / len(routes))
    error = (results["tunegemm"] - results["vllm"]).norm() / results["vllm"].norm()
    triples = zip(*samples.values(), strict=True)
    return {
        "model": name, "rows": tokens, "dtype": "bf16",
        "ratio": round(statistics.median((one + two) / 2 / ours for one, two, ours in triples), 4),
        "noise": round(aa_noise(samples["again"], samples["vllm"]), 4),
        "us": {way: round(statistics.median(of), 2) for way, of in samples.items()},
        "error": round(float(error), 5),
    }  # fmt: skip


@torch.inference_mode()
def run(options: argparse.Namespace) -> int:
    """Prints and writes a row for each layer and number of tokens; 1 where a result is wrong."""
    device = find_device(options.device)
    torch.cuda.set_device(device.index)
    torch.manual_seed(0)
    for kind in ("bf16", "gated", "routing"):
        provide_grouped(kind)
    facts = meta(device, METHOD)
    facts["packages"] |= {"vllm": package_version("vllm")}
    results = Results(results_path(options.out, device, "vllm_experts.json"), facts)
    for name in options.models:
        count, _, hidden, inner = sizes = MODELS[name]
        kernels = kernels_of(*sizes, f"cuda:{device.index}")
        weights = [
            torch.randn(sides, device="cuda", dtype=torch.bfloat16) * sides[-1] ** -0.5
            for sides in ((count, 2 * inner, hidden), (count, hidden, inner))
        ]
        for tokens in map(int, options.tokens):
            row = measure(name, kernels, weights, tokens, options.rounds)
            results.put(row)
            print(
                f"{name} {tokens}: {row['ratio']:.3f} (noise {100 * row['noise']:.1f} %), {row['us']}, error "
                f"{row['error']}{'' if row['error'] < 0.01 else ' WRONG'}", flush=True
            )  # fmt: skip
    ratios = [row["ratio"] for row in results.rows]
    print(f"geometric mean {geometric_mean(ratios):.3f}, least {min(ratios):.3f}")
    return 0 if all(row["error"] < 0.01 for row in results.rows) else 1


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a result is wrong."""
    parser = parser_of("benchmarks.vllm_experts", __doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="default: all of %(default)s")
    parser.add_argument("--tokens", default=",".join(TOKENS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds")
    options = parser.parse_args(arguments)
    if find_spec("vllm") is None:
        parser.error("vllm is not installed: pip install vllm")
    choose_names(options, models=tuple(MODELS), tokens=TOKENS)
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
