"""The products that engines compute for a model: which layers they merge, how they divide them among ranks,
and how many rows they have."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from tunegemm.describe.problem import Problem
from tunegemm.describe.workload.matrices import Layer, Linear
from tunegemm.describe.workload.models import Model
from tunegemm.describe.workload.products import Kind, Product, Workload
from tunegemm.errors import ProblemError, WorkloadError
from tunegemm.untrusted import shown


@dataclass(frozen=True)
class Engine:
    """An engine with its defaults on a GPU with at least 70 GB."""

    merges: bool
    """Whether q, k and v, and gate and up, are one matrix, and attention's latent vectors are absorbed."""
    vocabulary: int
    """The engine pads the columns of the logits to a multiple of this."""
    decode: Callable[[int], Sequence[int]]
    """Numbers of rows of its decode steps, by the number of ranks: it captures these and pads the numbers in
    between."""
    prefill: tuple[int, ...]
    """Numbers of rows of its steps that read prompts; the largest is its chunk."""
    sequences: int
    """The most sequences that run at once; each has a row of the logits."""
    experts: bool = False
    """Whether tunegemm serves its layers of experts."""


def _vllm_sizes(ranks: int) -> list[int]:
    # `_set_cudagraph_sizes` of vllm/config/vllm.py: up to min(2 * max_num_seqs, 512).
    return [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def _sglang_sizes(ranks: int) -> list[int]:
    # `_generate_cuda_graph_batch_sizes` of sglang/srt/server_args.py: up to 256, of 4 ranks and more 512.
    most = 256 if ranks < 4 else 512
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), 512]
    return [size for size in sizes if size <= most]


ENGINES = {
    # `get_batch_defaults` of vllm/engine/arg_utils.py: a step has 8192 tokens in a server, 16384 in `LLM`.
    "vllm": Engine(True, 64, _vllm_sizes, (1024, 2048, 4096, 8192, 16384), 1024),
    # sglang/srt/server_args.py: chunked_prefill_size 8192.
    "sglang": Engine(True, 64, _sglang_sizes, (1024, 2048, 4096, 8192), 512),
    # Layers as in the model; rows are sequences or tokens of any calling program.
    "transformers": Engine(
        False, 1, lambda _: [1, 2, 4, 8, 16, 32], (512, 1024, 2048, 4096), 1024, experts=True
    ),
}


class Arithmetic(NamedTuple):
    """How a layer is computed."""

    in_dtype: str
    out_dtype: str
    epilogue: str
    """The scales; empty without any."""


@dataclass(frozen=True)
class Shapes:
    """The products that an engine computes for a model."""

    workload: Workload
    layers: Mapping[str, int]
    """How often a step computes each layer, by the layer's name and size."""
    refused: Mapping[str, str]
    """Why the other layers have no kernels."""


def shapes(
    model: Model, engine: str, *, ranks: int = 1, rows: Sequence[int] = (), dtype: str | None = None
) -> Shapes:
    """The products of one step, for each number of rows.

    rows: replaces the engine's own numbers. dtype: replaces the model's dtype for layers that are not
    quantised. Raises WorkloadError if the ranks cannot divide the model, or if no layer has kernels.
    """
    how = ENGINES[engine]
    if (plain := dtype or model.dtype) == "fp32":
        raise WorkloadError(
            f"{model.where}: its weights are fp32; add the dtype they will have: --dtype bf16"
        )
    arithmetic = _arithmetic(model, plain)
    layers: Counter[str] = Counter()
    calls: Counter[Kind] = Counter()
    refused = {}
    for layer in model.layers:
        if layer.left_out:
            refused[layer.name] = layer.left_out
            continue
        result = arithmetic(layer.parts[0])  # equal for all merged parts
        if layer.experts and not isinstance(result, str):
            if not how.experts:
                result = f"{engine} computes experts with its own kernels"
            elif result.epilogue:
                result = f"{engine} computes quantised experts with its own kernels"
        for columns, depth, bias in _matrices(layer, how, ranks):
            name = f"{layer.name} {columns}x{depth}" + f" of {layer.experts}" * bool(layer.experts)
            if isinstance(result, str):
                refused[name] = result
                continue
            steps = [layer.gate] if layer.experts else [result.epilogue, *["bias_n"] * bias]
            epilogue = "+".join(filter(None, steps))
            said = "+".join(filter(None, ["grouped" * bool(layer.experts), epilogue]))
            layers[f"{name} {result.in_dtype} {said}".rstrip()] += 1
            more = {
                "b_major": "n" if layer.transposed else "k", "in_dtype": result.in_dtype,
                "out_dtype": result.out_dtype, "epilogue": epilogue, "groups": layer.experts,
            }  # fmt: skip
            try:
                for m in _rows(layer, how, ranks, rows):
                    calls[_kind(bias, m * layer.each, columns, depth, **more)] += 1
            except ProblemError as error:
                raise WorkloadError(f"{model.where}: {layer.name}: {error}") from None
    if not calls:
        first = next((f", the first because {reason}" for reason in refused.values()), "")
        raise WorkloadError(f"{model.where}: no layer has kernels{first}")
    return Shapes(Workload(tuple(Product(kind, calls[kind]) for kind in sorted(calls))), layers, refused)


def _rows(layer: Layer, engine: Engine, ranks: int, counts: Sequence[int]) -> list[int]:
    if layer.name == "logits":
        return [m for m in counts or engine.decode(ranks) if m <= engine.sequences]
    if counts:
        return sorted(set(counts))
    decode = () if layer.only_prefill and engine.merges else engine.decode(ranks)
    return sorted({*decode, *engine.prefill})


def _matrices(layer: Layer, engine: Engine, ranks: int) -> list[tuple[int, int, bool]]:
    """Columns, depth and bias of a rank's matrices. Raises WorkloadError."""
    if layer.name == "logits":
        (head,) = layer.parts
        padded = -(-head.columns // engine.vocabulary) * engine.vocabulary
        if padded % ranks:
            raise WorkloadError(
                f"--tp {ranks}: {padded} columns of the logits cannot be divided by {ranks} ranks"
            )
        return [(padded // ranks, head.depth, False)]
    parts = [(*part.of_rank(ranks), part.bias) for part in layer.parts]
    if not engine.merges and not layer.is_one:
        merged = parts
    else:
        merged = [(sum(columns for columns, *_ in parts), parts[0][1], any(bias for *_, bias in parts))]
    if ranks > 1 and layer.parts[0].split == "depth":  # the first rank adds the bias to the sum of all
        merged += [(columns, depth, False) for columns, depth, bias in merged if bias]
    return merged


@functools.cache  # most layers are like an earlier one
def _kind(bias: bool, m: int, n: int, k: int, **more: Any) -> Kind:
    """A product as `tunegemm record` would write it. Raises ProblemError if no kernel takes it."""
    problem = Problem(m, n, k, **more)
    names = {field.name for field in fields(Kind)} & {field.name for field in fields(Problem)}
    shared: dict[str, Any] = {name: getattr(problem, name) for name in names}
    op = "scaled_mm" if problem.fused.scales else "addmm" if bias else "mm"
    op = "grouped_mm" if problem.groups else op
    return Kind(**shared, op=op, bias="vector" if bias else "none")


def _arithmetic(model: Model, plain: str) -> Callable[[Linear], Arithmetic | str]:
    """How each linear layer is computed, or why it has no kernels: by the model's quantisation.

    Logits and the gates of experts keep their dtype, as in engines.
    """
    usual, config = Arithmetic(plain, plain, ""), model.quantization
    if not config:
        return lambda _: usual
    if _method(config) == "mxfp4":  # which quantises experts only
        why = "quantised with mxfp4, which has no kernels"
        return lambda linear: why if ".experts." in linear.path else usual
    names = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
    lists = (config.get(name) for name in names)
    patterns = [text for each in lists for text in _texts(each)]
    groups = _groups(config, plain)

    def of(linear: Linear) -> Arithmetic | str:
        path = linear.path
        if path == "lm_head" or path.endswith((".gate", ".router")) or _matches(path, patterns):
            return usual
        return next((how for targets, how in groups if _matches(path, targets)), usual)

    return of


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern names a module or its parent; ``Linear`` is all, ``re:`` begins a regex."""
    names = _in_checkpoints(path)
    for pattern in patterns:
        if pattern == "Linear":
            return True
        if pattern.startswith("re:"):
            with suppress(re.error):
                if any(re.match(pattern[3:], name) for name in names):
                    return True
        elif "*" in pattern:
            if any(fnmatchcase(name, end) for name in names for end in (pattern, f"{pattern}.*")):
                return True
        elif any(f".{pattern}." in f".{name}." for name in names):
            return True
    return False


def _in_checkpoints(path: str) -> list[str]:
    """A module's path as checkpoints may have it: in a text model, a multimodal one, Llama 4, Nemotron-H."""
    inner = path.removeprefix("model.")
    llama4 = path.replace(".mlp.", ".feed_forward.")
    mixer = re.sub(r"\.(self_attn|mlp)(?=\.)", ".mixer", inner)
    return [
        path, f"model.language_model.{inner}", f"language_model.{path}", f"language_model.{llama4}",
        f"backbone.{mixer}",
    ]  # fmt: skip


def _method(config: Mapping[str, Any]) -> Any:
    """Engines compare names of methods without case."""
    method = config.get("quant_method")
    return method.lower() if isinstance(method, str) else method


def _texts(value: Any) -> list[str]:
    value = [value] if isinstance(value, str) else value
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _groups(config: Mapping[str, Any], plain: str) -> list[tuple[list[str], Arithmetic | str]]:
    """How the modules of each group are computed: patterns, and their arithmetic or why it has no kernels."""
    method, everything = _method(config), ["Linear"]
    if method == "modelopt" or (method is None and "quant_algo" in config):
        return _modelopt(config, plain)
    if method == "fbgemm_fp8":
        return [(everything, Arithmetic("fp8_e4m3", plain, "scale_rowwise"))]
    if method == "fp8" and config.get("weight_block_size"):
        return [(everything, "tunegemm serves no block scales in engines")]
    if method == "fp8":
        scales = "scale_tensor" if config.get("activation_scheme") == "static" else "scale_rowwise"
        return [(everything, Arithmetic("fp8_e4m3", plain, scales))]
    if method == "compressed-tensors" and isinstance(groups := config.get("config_groups"), dict):
        return [
            (_texts(group.get("targets")) or everything, _compressed(group, plain))
            for group in groups.values()
            if isinstance(group, dict)
        ]
    named = "an unnamed method" if method is None else shown(method)
    return [(everything, f"quantised with {named}, which has no kernels")]


#: Algorithms of NVIDIA's ModelOpt by the scales of their products.
_MODELOPT = {"FP8": "scale_tensor", "FP8_PER_CHANNEL_PER_TOKEN": "scale_rowwise"}


def _modelopt(config: Mapping[str, Any], plain: str) -> list[tuple[list[str], Arithmetic | str]]:
    def how(algorithm: Any) -> Arithmetic | str:
        if isinstance(algorithm, str) and algorithm.upper() in _MODELOPT:
            return Arithmetic("fp8_e4m3", plain, _MODELOPT[algorithm.upper()])
        return f"quantised with ModelOpt's {shown(algorithm)}, which has no kernels"

    each = config.get("quantized_layers")  # of MIXED_PRECISION
    if isinstance(each, dict):
        named = {name: item.get("quant_algo") for name, item in each.items() if isinstance(item, dict)}
        return [([name], how(algorithm)) for name, algorithm in named.items()]
    algorithm = config.get("quant_algo")
    return [] if algorithm is None else [(["Linear"], how(algorithm))]  # None: its cache alone is quantised


def _compressed(group: Mapping[str, Any], plain: str) -> Arithmetic | str:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or not isinstance(inputs, dict):
        return "only its weights are quantised, which kernels do not support"
    formats = {f"{item.get('type')} {item.get('num_bits')}" for item in (weights, inputs)}
    dtype = {"float 8": "fp8_e4m3", "int 8": "int8"}.get(formats.pop())
    if dtype is None or formats:
        return "its numbers are neither fp8 nor int8, the only formats with kernels"
    strategies = {str(item.get("strategy")) for item in (weights, inputs)}
    if strategies <= {"tensor", "channel", "token"}:
        return Arithmetic(dtype, plain, "scale_tensor" if strategies == {"tensor"} else "scale_rowwise")
    return "kernels do not support scales of groups or blocks"
