"""Times a Llama model of `transformers` end to end, with and without tunegemm, in one interleave each.

    python -m benchmarks.clients --workloads decode-16 --modes graph
    TUNEGEMM_DB=FILE python -m benchmarks.clients --model 1B --workloads train  # clients_training.json
    python -m benchmarks.clients --device cpu --tiny              # without a GPU: the results alone, no times

Prefill is one prompt of 4096 tokens, decode one token for each of 1 to 256 sequences behind 512 tokens of
context, train one step of AdamW on 4096 tokens or `--sequences` of them. Rows say whether products were
`tuned` for them, into the database that TUNEGEMM_DB names, and how many of them a kernel has `served` by
then. Writes results/GPU/clients.json after each workload, so that it can run in slices.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

import tunegemm
from benchmarks import harness
from benchmarks.command import add_names, command
from benchmarks.graphs import within
from benchmarks.harness import Step
from benchmarks.results import report
from tunegemm.dispatch import api
from tunegemm.errors import BadValueError, TunegemmWarning

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
    parser = harness.model_parser("benchmarks.clients", __doc__, rounds=11)
    parser.add_argument("--model", choices=("8B", "1B"), default="8B", help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="decoder layers (default: 2 of the 32 of 8B, all of 1B)")
    parser.add_argument("--tiny", dest="model", action="store_const", const="tiny", help="a tiny model")
    parser.add_argument("--sequences", type=int, default=1, help="prompts of a training step")
    add_names(parser, "workloads", WORKLOADS)
    add_names(parser, "modes", MODES)
    parser.add_argument("--sample-ms", type=float, default=harness.SAMPLE_MS, help="default: %(default)s")
    options = parser.parse_args(arguments)
    name = "clients_training.json" if options.workloads == ["train"] else "clients.json"
    place, results = harness.opened(options, name, METHOD.format(f"{options.sample_ms:g}"), "transformers")
    size = Size.of(options.model, options.layers, options.sequences)
    model = build(size, place)
    # The same weights under tuned layers, so that nothing is switched on and off between steps.
    tuned, wrong = harness.twin(model), 0
    print(f"{tunegemm.patch(tuned)} linear layers patched", flush=True)
    for name in within(options.within, options.workloads):
        rows = measure(name, {"torch": model, "tunegemm": tuned}, size, place, options)
        wrong += report(results, rows, _brief)
    return int(wrong > 0)


def build(size: Size, place: torch.device) -> LlamaForCausalLM:
    """The model in bf16 with random weights."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise BadValueError(f"{error}; pip install 'tunegemm[bench]'") from None
    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=size.intermediate,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        max_position_embeddings=2 * size.prompt, attn_implementation="sdpa", tie_word_embeddings=size.tied,
    )  # fmt: skip
    torch.manual_seed(0)
    with place:
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def prefill(model: LlamaForCausalLM, size: Size, place: torch.device) -> Step:
    """One prompt; the logits of its last token."""
    ids = tokens_of((1, size.prompt), size, place)
    return _forward(model, input_ids=ids, use_cache=False, logits_to_keep=1)


def decode(batch: int, model: LlamaForCausalLM, size: Size, place: torch.device) -> Step:
    """The next token of each sequence; the same token each time, at the end of a full cache."""
    ids = tokens_of((batch, 1), size, place)
    positions = torch.full((batch, 1), size.context, device=place)
    cache = _context(model, batch, size, place)
    return _forward(model, input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)


def _forward(model: LlamaForCausalLM, **inputs: Any) -> Step:
    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(**inputs).logits

    return step


def train(
    model: LlamaForCausalLM, size: Size, place: torch.device, optimizer: torch.optim.Optimizer | None = None
) -> Step:
    """Forward, backward and an optimizer's step, if there is one; returns the gradient of the first layer's
    first weight."""
    ids = tokens_of((size.sequences, size.prompt), size, place)
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


def tokens_of(shape: tuple[int, int], size: Size, place: torch.device) -> torch.Tensor:
    """The same ones at each call."""
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


def _context(model: LlamaForCausalLM, batch: int, size: Size, place: torch.device) -> Cache:
    """A cache that is full except for the last token, which each step rewrites."""
    from transformers.cache_utils import Cache

    generator = torch.Generator(place).manual_seed(1)
    shape = (batch, size.kv_heads, size.context + 1, size.hidden // size.heads)
    dtype = next(model.parameters()).dtype
    layers = []
    for _ in range(size.layers):
        layer = _full_layer()()
        layer.keys, layer.values = (
            torch.randn(shape, generator=generator, device=place, dtype=dtype) for _ in range(2)
        )
        layer.is_initialized = True
        layers.append(layer)
    return Cache(layers=layers)


def measure(
    workload: str, models: Mapping[str, LlamaForCausalLM], size: Size, place: torch.device,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each mode; without times on a CPU. models: torch and tunegemm."""
    make, modes = WORKLOADS[workload], options.modes
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
                got = step()
            said = (str(warning.message) for warning in caught if warning.category is TunegemmWarning)
            left |= {message for message in said if "to torch" in message}
            errors[mode, library] = harness.error_of(got, expected)
            steps[mode, library] = step
            del got
            if place.type == "cuda" and not isinstance(step, harness.Replay):
                peaks[mode, library] = peak_mib(step, model)
        served[mode] = len({problem for problem, _ in api.dispatcher.planner.tuned()})
    for message in sorted(left):
        print(f"  {workload}: {message}")
    samples = harness.interleave(steps, options.rounds, options.sample_ms) if place.type == "cuda" else {}
    rows = []
    for mode in modes:
        row: dict[str, Any] = {
            "workload": workload, "mode": mode, "model": options.model, "layers": size.layers, "dtype": "bf16"
        }  # fmt: skip
        if workload == "train":
            row |= {"sequences": size.sequences} if size.sequences > 1 else {}
            row |= {"tokens": size.sequences * size.prompt}
        row |= {"tuned": True} if os.environ.get("TUNEGEMM_DB") else {}
        row |= {"served": served[mode]} | harness.quality(errors[mode, "torch"], errors[mode, "tunegemm"])
        if samples:
            times = harness.compared(samples, mode)
            row |= {"torch_us": round(1e3 * times.pop("torch_ms"), 1)} | times
            row |= {"tunegemm_us": round(statistics.median(samples[mode, "tunegemm"]), 1)}
            row |= {"left_to_torch": len(left), "sample_ms": options.sample_ms}
        row |= {f"{library}_peak_mib": round(peak, 1) for (of, library), peak in peaks.items() if of == mode}
        rows.append(row)
    steps.clear()
    harness.clear(place)
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
        raise BadValueError(f"--modes graph needs a GPU; use eager,compile with --device {place}")
    if mode == "compile":
        model = harness.Compiled(model, torch.compile(model, dynamic=False))
    step = make(model, size, place)
    if mode == "graph":
        return harness.captured(step)
    for _ in range(3):
        step()
    return step


def _brief(row: Mapping[str, Any]) -> str:
    tokens = f" of {row['tokens']} tokens" if "tokens" in row else ""
    more = []
    if "torch_peak_mib" in row:
        more.append(f"peak {row['torch_peak_mib']:.0f}, {row['tunegemm_peak_mib']:.0f} MiB")
    return harness.line(f"{row['workload']} {row['mode']}{tokens}", row, *more)


if __name__ == "__main__":
    sys.exit(main())
