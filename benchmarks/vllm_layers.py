"""Times the linear layers that vLLM makes of a model, without its engine, and with tunegemm's plug-in or not.

    python -m benchmarks.vllm_layers                      # bf16 and fp8
    python -m benchmarks.vllm_layers --invariant          # bf16, with VLLM_BATCH_INVARIANT=1

The products of one decoder layer of Llama-3-8B and its logits, by vLLM's classes, in one CUDA graph each.
Writes results/GPU/vllm_layers.json.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.clients import AGAIN, interleave
from benchmarks.results import Results, geometric_mean, meta, results_path
from benchmarks.vllm import chosen, doors
from benchmarks.vllm_engine import Setting, arguments, fill, variables
from tunegemm.describe.device import find_device, package_version
from tunegemm.errors import TunegemmError
from tunegemm.measure.statistics import aa_noise

METHOD = (
    "microseconds of the products of one decoder layer and of logits, by vLLM's layers with weights of their "
    "own, in a CUDA graph, each on the same activations; with and without the plug-in in shuffled order in "
    "each round, samples of 30 ms after as many that are not timed, medians, ratio the median over rounds; "
    "noise of timing vLLM's twice a round; difference: the largest of all outputs, over their deviation"
)
ROWS = (1, 16, 64, 256, 512, 8192)
#: A step has logits of sequences, not of all tokens.
_MOST_LOGITS = 256


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm_layers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", default="bf16,fp8", help="some of %(default)s")
    parser.add_argument("--invariant", action="store_true", help="bf16, with VLLM_BATCH_INVARIANT=1")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    options = parser.parse_args(arguments)
    try:
        dtypes = ["bf16"] if options.invariant else chosen(options.only, ("bf16", "fp8"), "only")
        settings = [Setting(dtype, True, options.invariant, layers=1) for dtype in dtypes]
        run(settings, options.rounds, options.out)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(settings: Sequence[Setting], rounds: int, out: Path | None) -> None:
    """Times what was asked for; prints and writes a row for each dtype and number of rows."""
    device = find_device("cuda:0")
    facts = meta(device, METHOD)
    facts["packages"] |= {"vllm": package_version("vllm")}
    results = Results(results_path(out, device, "vllm_layers.json"), facts)
    mode = "batch_invariant" if settings[0].is_invariant else "fastest"
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        doors(Path(scratch))
        _begin(settings[0], Path(scratch))
        for setting in settings:
            models = {name: _model(setting, Path(scratch), name == "tunegemm") for name in _LIBRARIES}
            for rows in ROWS:
                row = {"dtype": setting.dtype, "mode": mode, "rows": rows, **_measured(models, rows, rounds)}
                results.put(row)
                print(row, flush=True)
            del models
    ratios = [row["ratio"] for row in results.rows if row["mode"] == mode]
    print(f"{mode}: geometric mean {geometric_mean(ratios):.3f}, least {min(ratios):.3f}")


#: The names that `benchmarks.clients` has for whoever it compares with, and for this project.
_LIBRARIES = ("torch", "tunegemm")


def _measured(models: dict[str, Any], rows: int, rounds: int) -> dict[str, float]:
    found = {name: _captured(model, rows, name == "tunegemm") for name, model in models.items()}
    steps = {("graph", name): replay for name, (replay, _) in found.items()}
    samples = interleave(steps, rounds, 30)
    theirs, ours = (samples["graph", name] for name in _LIBRARIES)
    differences = [
        float((one - two).abs().max() / one.std())
        for one, two in zip(*(results for _, results in found.values()), strict=True)
    ]
    return {
        "engine_us": round(statistics.median(theirs), 1),
        "tunegemm_us": round(statistics.median(ours), 1),
        "ratio": round(statistics.median(one / two for one, two in zip(theirs, ours, strict=True)), 4),
        "noise": round(aa_noise(samples["graph", AGAIN], theirs), 5),
        "difference": round(max(differences), 5),
    }


def _of_vllm(name: str) -> Any:
    return importlib.import_module(f"vllm.{name}")


def _begin(setting: Setting, scratch: Path) -> None:
    """Loads the plug-ins, and makes this process the only one of its model."""
    os.environ.update(variables(setting, scratch))
    _of_vllm("plugins").load_general_plugins()
    with _of_vllm("config").set_current_vllm_config(_config(setting, scratch)):
        distributed = _of_vllm("distributed")
        distributed.init_distributed_environment(1, 0, f"file://{scratch}/store", 0)
        distributed.initialize_model_parallel(1)


def _config(setting: Setting, scratch: Path) -> Any:
    # Its own kernels for activations too, which its compiler would else write.
    given = arguments(setting, scratch / setting.name) | {"compilation_config": {"custom_ops": ["all"]}}
    return _of_vllm("engine.arg_utils").EngineArgs(**given).create_engine_config()


def _model(setting: Setting, scratch: Path, served: bool) -> Any:
    """A model of one layer. Kernel classes of fp8 layers are chosen as it is made."""
    linear = _of_vllm("model_executor.kernels.linear")
    kernels = linear._POSSIBLE_FP8_KERNELS[_of_vllm("platforms").PlatformEnum.CUDA]
    ours = [] if served else [kernel for kernel in kernels if "Tunegemm" in kernel.__name__]
    for kernel in ours:
        kernels.remove(kernel)
    try:
        config = _config(setting, scratch)
        with _of_vllm("config").set_current_vllm_config(config):
            model = _of_vllm("model_executor.model_loader").get_model(vllm_config=config)
    finally:
        kernels[:0] = ours
    fill(model)
    return model


def _captured(model: Any, rows: int, served: bool) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """The products in a graph, and their results. 16-bit layers look their function up as they are called."""
    layer = model.model.layers[0]
    generator = torch.Generator("cuda").manual_seed(rows)
    x, wide = (
        torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, generator=generator)
        for width in (4096, 14336)
    )

    def products() -> list[torch.Tensor]:
        found = [
            each.quant_method.apply(each, values)
            for each, values in (
                (layer.self_attn.qkv_proj, x),
                (layer.self_attn.o_proj, x),
                (layer.mlp.gate_up_proj, x),
                (layer.mlp.down_proj, wide),
            )
        ]
        return [*found, model.lm_head.quant_method.apply(model.lm_head, x[:_MOST_LOGITS])]

    functions = [
        ("model_executor.layers.utils", "default_unquantized_gemm"),
        ("model_executor.layers.linear", "linear_batch_invariant"),
        ("model_executor.layers.vocab_parallel_embedding", "linear_batch_invariant"),
    ]
    replaced = [] if served else [(_of_vllm(place), name) for place, name in functions]
    put = [(place, name, getattr(place, name)) for place, name in replaced]
    for place, name, function in put:
        setattr(place, name, getattr(function, "tunegemm_own", function))
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # plans and workspaces, outside the capture
            for _ in range(3):
                products()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = products()
    finally:
        for place, name, function in put:
            setattr(place, name, function)
    graph.replay()
    return graph.replay, results


if __name__ == "__main__":
    sys.exit(main())
