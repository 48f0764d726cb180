"""Times a Llama model of `transformers` end to end, with and without tunegemm, in one interleave each.

    python -m benchmarks.clients --workloads decode-16 --modes graph
    TUNEGEMM_DB=FILE python -m benchmarks.clients --model 1B --workloads train  # clients_training.json
    python -m benchmarks.clients --device cpu --tiny              # without a GPU: the results alone, no times

The layers are those of an 8B model, or all of a 1B model, with random weights; nothing is downloaded. Prefill
is one prompt of 4096 tokens, decode one token for each of 1 to 256 sequences behind 512 tokens of context,
train one step of AdamW on 4096 tokens or `--sequences` of them. Each runs eagerly, in a CUDA graph of the
eager code, and under torch.compile. Rows say whether products were `tuned` for them, into the database that
TUNEGEMM_DB names, and how many of them a kernel has `served` by then.
Writes results/GPU/clients.json after each workload, so that it can run in slices.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

import tunegemm
from benchmarks.command import choose_names, command, parser_of
from benchmarks.results import Results, meta, results_path
from tunegemm.describe.device import find_device, package_version
from tunegemm.dispatch import api
from tunegemm.errors import TunegemmError, TunegemmWarning
from tunegemm.measure.statistics import aa_noise

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM
    from transformers.cache_utils import Cache

METHOD = (
    "wall time of a step with the device idle before and after, as many steps a sample as take {} ms, after "
    "as many that are not timed, so that the chip runs at the clocks that this variant leaves it; "
    "with and without tunegemm in shuffled order in each round, medians, ratio the median over rounds of "
    "torch's sample to tunegemm's; noise of timing torch's step twice a round; errors are relative to the "
    "same model in fp32, of logits, for train of a weight's gradient; AdamW has a learning rate of 0; peak "
    "memory is that of a step, with weights and gradients, outside of CUDA graphs"
)
MODES = ("eager", "graph", "compile")
CONTEXT = 512
#: A sample has as many steps as fill this time, unless `--sample-ms` is given, and so have the untimed steps
#: before it: a chip at its power cap takes some 60 ms to settle at the clocks of new work
#: (docs/decisions/0012).
_SAMPLE_MS = 100.0
#: A result may be this much further from fp32 than torch's result.
_TOLERANCE = 1.25

Step = Callable[[], torch.Tensor]


class ClientError(TunegemmError):
    """A model or mode that cannot be run here."""


@dataclass(frozen=True)
class Size:
    """Of the model and its inputs."""

    layers: int
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    prompt: int = 4096
    context: int = CONTEXT

    tied: bool = False
    """Whether the head's weight is the embedding's."""

    sequences: int = 1
    """How many prompts a training step has."""

    @classmethod
    def of(cls, model: str, layers: int | None, sequences: int = 1) -> Size:
        """8B, by default with two layers; 1B; or tiny, for a test of the parts that shows nothing about
        speed.
        """
        if model == "tiny":
            return cls(layers or 2, 128, 256, 4, 2, 512, 64, 16, sequences=sequences)
        if model == "1B":
            return cls(layers or 16, 2048, 8192, tied=True, sequences=sequences)
        return cls(layers or 2, sequences=sequences)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a result is further from fp32 than torch's error allows."""
    parser = parser_of("benchmarks.clients", __doc__)
    parser.add_argument("--model", choices=("8B", "1B"), default="8B", help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="decoder layers (default: 2 of the 32 of 8B, all of 1B)")
    parser.add_argument(
        "--tiny", dest="model", action="store_const", const="tiny", help="a model of a few thousand weights"
    )
    parser.add_argument("--sequences", type=int, default=1, help="prompts of a training step")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="default: all of %(default)s")
    parser.add_argument("--modes", default=",".join(MODES), help="default: all of %(default)s")
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds")
    parser.add_argument("--sample-ms", type=float, default=_SAMPLE_MS, help="default: %(default)s")
    parser.add_argument(
        "--within", type=float, default=math.inf, metavar="SECONDS", help="begin no workload later"
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu, which is not timed")
    options = parser.parse_args(arguments)
    choose_names(options, workloads=tuple(WORKLOADS), modes=MODES)
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Checks and times the requested workloads and modes; prints and writes a row for each."""
    place = torch.device(options.device)
    size = Size.of(options.model, options.layers, options.sequences)
    results = None
    if place.type == "cuda":
        torch.cuda.set_device(place)
        device = find_device(options.device)
        facts = meta(device, METHOD.format(f"{options.sample_ms:g}"))
        facts["packages"] |= {"transformers": package_version("transformers")}
        name = "clients_training.json" if options.workloads == ["train"] else "clients.json"
        results = Results(results_path(options.out, device, name), facts)
    model = build(size, place)
    # The same weights under tuned layers, so that nothing is switched on and off between steps.
    tuned = _twin(model)
    print(f"{tunegemm.patch(tuned)} linear layers patched", flush=True)
    wrong, begun = 0, time.monotonic()
    for name in options.workloads:
        if time.monotonic() - begun > options.within:
            print(f"{name}: no time is left")
            continue
        rows = measure(name, {"torch": model, "tunegemm": tuned}, size, place, options)
        if results is not None:
            results.put(*rows)
        wrong += sum(not row["right"] for row in rows)
        print(*map(_brief, rows), sep="\n", flush=True)
    if results is not None:
        print(f"written: {results.path}")
    return 1 if wrong else 0


def build(size: Size, place: torch.device) -> LlamaForCausalLM:
    """The model in bf16 with random weights."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ClientError(f"{error}; pip install 'tunegemm[bench]'") from None
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=2 * size.prompt,
        attn_implementation="sdpa",
        tie_word_embeddings=size.tied,
    )
    torch.manual_seed(0)
    with place:
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def _twin(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy with the same weights."""
    return copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})


def prefill(model: LlamaForCausalLM, size: Size, place: torch.device) -> Step:
    """One prompt; the logits of its last token."""
    ids = _tokens((1, size.prompt), size, place)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    return step


def decode(
    batch: int, model: LlamaForCausalLM, size: Size, place: torch.device, of: int | None = None
) -> Step:
    """The next token of each sequence; the same token each time, at the end of a full cache.

    of: number of sequences, of which the last ones are decoded; all by default.
    """
    ids = _tokens((of or batch, 1), size, place)[-batch:].clone()
    positions = torch.full((batch, 1), size.context, device=place)
    cache = _context(model, batch, size, place, of or batch)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True).logits

    return step


def train(
    model: LlamaForCausalLM, size: Size, place: torch.device, optimizer: torch.optim.Optimizer | None = None
) -> Step:
    """Forward, backward and an optimizer's step, if there is one; returns the gradient of the first layer's
    first weight."""
    ids = _tokens((size.sequences, size.prompt), size, place)
    watched = model.model.layers[0].self_attn.q_proj.weight

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if optimizer is not None:
            optimizer.step()
        assert watched.grad is not None
        return watched.grad

    return step


def adamw(model: LlamaForCausalLM, place: torch.device) -> torch.optim.Optimizer:
    """A learning rate of 0 does all the work but keeps the weights for the next variant."""
    on_gpu = place.type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True, capturable=on_gpu)


WORKLOADS: Mapping[str, Callable[[Any, Size, torch.device], Step]] = {
    "prefill": prefill,
    **{f"decode-{sequences}": partial(decode, sequences) for sequences in (1, 16, 64, 256)},
    "train": train,
}


def _tokens(shape: tuple[int, int], size: Size, place: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(size.vocabulary, shape, generator=generator).to(place)


@cache
def _full_layer() -> Any:
    """The class of one layer of such a cache, shared because torch.compile would recompile for each cache."""
    from transformers.cache_utils import CacheLayerMixin

    class Layer(CacheLayerMixin):  # type: ignore[misc]
        is_compileable = True
        is_sliding = False

        def lazy_initialization(self, *_: Any) -> None: ...

        def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
            self.keys[:, :, -1:].copy_(keys)
            self.values[:, :, -1:].copy_(values)
            return self.keys, self.values

        def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
            return self.keys.shape[2], 0

        def get_seq_length(self, *_: Any) -> int:
            return self.keys.shape[2] - 1

        def get_max_length(self) -> int:
            return self.keys.shape[2]

    return Layer


def _context(model: LlamaForCausalLM, batch: int, size: Size, place: torch.device, of: int) -> Cache:
    """A cache that is full except for the last token, which each step rewrites: of the last of so many
    sequences."""
    from transformers.cache_utils import Cache

    generator = torch.Generator(place).manual_seed(1)
    shape = (of, size.kv_heads, size.context + 1, size.hidden // size.heads)
    dtype = next(model.parameters()).dtype
    layers = []
    for _ in range(size.layers):
        layer = _full_layer()()
        layer.keys, layer.values = (
            torch.randn(shape, generator=generator, device=place, dtype=dtype)[-batch:].clone()
            for _ in range(2)
        )
        layer.is_initialized = True
        layers.append(layer)
    return Cache(layers=layers)


def measure(
    workload: str,
    models: Mapping[str, LlamaForCausalLM],
    size: Size,
    place: torch.device,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """A row for each mode; without times on a CPU. models: torch and tunegemm."""
    make, modes, rounds = WORKLOADS[workload], options.modes, options.rounds
    reference = copy.deepcopy(models["torch"]).float()
    expected = make(reference, size, place)().float().clone()
    del reference
    if make is train:  # all models have the same weights
        make = partial(train, optimizer=adamw(models["torch"], place))
    steps: dict[tuple[str, str], Step] = {}
    errors: dict[tuple[str, str], float] = {}
    peaks: dict[tuple[str, str], float] = {}
    served: dict[str, int] = {}
    left: set[str] = set()
    for mode in modes:
        for library, model in models.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", TunegemmWarning)
                step = prepare(mode, make, model, size, place)
                got = step().float()
            said = (str(warning.message) for warning in caught if warning.category is TunegemmWarning)
            left |= {message for message in said if "to torch" in message}
            errors[mode, library] = ((got - expected).norm() / expected.norm()).item()
            steps[mode, library] = step
            del got
            if place.type == "cuda" and not isinstance(step, _Replay):
                peaks[mode, library] = peak_mib(step, model)
        served[mode] = len({problem for problem, _ in api.dispatcher.planner.tuned()})
    for message in sorted(left):
        print(f"  {workload}: {message}")
    samples = interleave(steps, rounds, options.sample_ms) if place.type == "cuda" else {}
    rows = []
    for mode in modes:
        bound = max(_TOLERANCE * errors[mode, "torch"], 1e-6)
        row: dict[str, Any] = {"workload": workload, "mode": mode, "model": options.model}
        row |= {"layers": size.layers, "dtype": "bf16"}
        if workload == "train":
            row |= {"sequences": size.sequences} if size.sequences > 1 else {}
            row |= {"tokens": size.sequences * size.prompt}
        row |= {"tuned": True} if os.environ.get("TUNEGEMM_DB") else {}
        row["served"] = served[mode]
        row |= {f"{library}_error": errors[mode, library] for library in models}
        row["right"] = all(errors[mode, library] <= bound for library in models)
        if samples:
            row |= _times(samples, mode)
            row |= {"rounds": rounds, "left_to_torch": len(left), "sample_ms": options.sample_ms}
        row |= {f"{library}_peak_mib": round(peak, 1) for (of, library), peak in peaks.items() if of == mode}
        rows.append(row)
    steps.clear()
    torch.compiler.reset()
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def peak_mib(step: Step, model: torch.nn.Module) -> float:
    """The model's peak memory in a step, without its optimizer's state; other models may be in memory."""
    torch.cuda.synchronize()
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [each.grad for each in model.parameters() if each.grad is not None]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (sum(storages.values()) + torch.cuda.max_memory_allocated() - before) / 2**20


def prepare(
    mode: str, make: Callable[[Any, Size, torch.device], Step], model: Any, size: Size, place: torch.device
) -> Step:
    """The step of a workload in a mode, warm."""
    if mode == "graph" and place.type != "cuda":
        raise ClientError(f"--modes graph needs a GPU; use eager,compile with --device {place}")
    if mode == "compile":
        model = Compiled(model, torch.compile(model, dynamic=False))
    step = make(model, size, place)
    if mode == "graph":
        return captured(step)
    for _ in range(3):
        step()
    return step


def captured(step: Step) -> _Replay:
    """A step in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # workspaces and autotuning, outside the capture
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    return _Replay(graph, result, step)


@dataclass
class _Replay:
    """A captured step. The graph reads the step's data, such as its tokens, at their original addresses."""

    graph: Any
    result: torch.Tensor
    step: Step

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.result


class Compiled:
    """A compiled model whose parts have the same names as those of the original model."""

    def __init__(self, model: Any, compiled: Callable[..., Any]) -> None:
        self._model, self._compiled = model, compiled

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._compiled(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


#: Name of torch's second timing in a round, for the noise.
AGAIN = "again"


def interleave(
    steps: Mapping[tuple[str, str], Step], rounds: int, sample_ms: float = _SAMPLE_MS
) -> dict[tuple[str, str], list[float]]:
    """Microseconds per step of each variant, a sample a round."""
    timed = dict(steps) | {
        (mode, AGAIN): step for (mode, library), step in steps.items() if library == "torch"
    }
    calls = {key: max(1, math.ceil(sample_ms * 1e3 / _time_us(step, 1))) for key, step in timed.items()}
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in timed}
    generator = random.Random(0)
    with undisturbed():
        for _ in range(rounds):
            for key in generator.sample(list(timed), len(timed)):
                for _ in range(calls[key]):
                    timed[key]()
                samples[key].append(_time_us(timed[key], calls[key]))
    return samples


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keeps this thread on one core, and stops garbage collection."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        os.sched_setaffinity(0, cores)


def _time_us(step: Step, calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e6


def _times(samples: Mapping[tuple[str, str], Sequence[float]], mode: str) -> dict[str, Any]:
    torchs = samples[mode, "torch"]
    times: dict[str, Any] = {
        "torch_us": round(statistics.median(torchs), 1),
        "noise": round(aa_noise(samples[mode, AGAIN], torchs), 5),
    }
    ours = samples[mode, "tunegemm"]
    ratio = statistics.median(t / o for t, o in zip(torchs, ours, strict=True))
    return times | {"tunegemm_us": round(statistics.median(ours), 1), "ratio": round(ratio, 4)}


def _brief(row: Mapping[str, Any]) -> str:
    tokens = f" of {row['tokens']} tokens" if "tokens" in row else ""
    words = [f"{row['workload']} {row['mode']}{tokens}:"]
    if "torch_us" in row:
        words.append(f"torch {row['torch_us'] / 1e3:.3f} ms")
        words.append(f"tunegemm {row['tunegemm_us'] / 1e3:.3f} ms, {row['ratio']:.3f} x torch")
        words.append(f"(noise {100 * row['noise']:.1f} %)")
    if "torch_peak_mib" in row:
        words.append(f"peak {row['torch_peak_mib']:.0f}, {row['tunegemm_peak_mib']:.0f} MiB")
    words.append(f"error {row['torch_error']:.2e}")
    words.append(f"tunegemm {row['tunegemm_error']:.2e}{'' if row['right'] else ' WRONG'}")
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
