"""Whether a sequence's logits depend on who else is decoded with it, and how many steps a second that takes.

    python -m benchmarks.decode_bits                         # eager, in CUDA graphs, under torch.compile
    python -m benchmarks.decode_bits --modes eager,graph     # a slice: its rows go into the same file
    python -m benchmarks.decode_bits --device cpu --tiny --modes eager     # without a GPU, and without times

The model is that of `benchmarks.clients`: two layers of an 8B Llama and its head, random weights, one token a
step behind 512 tokens of context. The last 1, 4 and 16 of 64 sequences are decoded alone and must have the
bits that they have among all 64, at another place in the batch: under policy `batch_invariant` by
`tunegemm.patch`, beside policy `fastest` and torch's own products.

What is not a product must not depend on the batch either, and is the same for all three. Attention is torch's
memory-efficient kernel, which takes all keys of a head in one block; its flash attention splits keys by the
number of sequences. A norm is `torch.nn.functional.rms_norm`, a block for each row; `mean(-1)`, as the model
has it, reduces otherwise for another number of rows. Compiled code leaves the norm to that kernel, too, and
rounds between operations as eager code does (`emulate_precision_casts`), however it fuses them. The model as
transformers makes it, with attention that torch chooses, is timed beside the others, but not compiled.
Which operation is the first to differ is found eagerly, module by module. Writes
results/GPU/decode_bits.json.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tunegemm
from benchmarks import clients
from benchmarks.clients import Size, Step
from benchmarks.results import Results, meta, results_path
from tunegemm.choose.policies import Preference
from tunegemm.describe.device import find_device, package_version
from tunegemm.errors import TunegemmError, TunegemmWarning
from tunegemm.measure.statistics import aa_noise

METHOD = (
    "logits of the last sequences, decoded alone, compared bit by bit with those of all {most}, for each "
    "mode apart; wall time of a step with the device idle before and after, as many steps a sample as take "
    "{sample_ms:.0f} ms, after as many that are not timed; all variants in shuffled order in each of "
    "{rounds} rounds, medians; ratios are medians over rounds, above 1 where batch_invariant is faster; "
    "attention and norms that do not depend on the batch in all variants but `usual`; compiled code is the "
    "same for both policies"
)
SEQUENCES = (1, 4, 16, 64)
MODES = ("eager", "graph", "compile")
SAMPLE_MS = 25.0
ATTENTION = "one_token"
#: Variants and the policy of each; the others' products are torch's.
POLICIES: Mapping[str, Preference] = {"invariant": "batch_invariant", "fastest": "fastest"}


@torch.library.custom_op("tunegemm_benchmarks::rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)


@_rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.empty_like(x)


class Norm(torch.nn.Module):
    """Torch's own kernel, also in compiled code: a block for each row."""

    def __init__(self, weight: torch.nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return cast(torch.Tensor, _rms_norm(x, self.weight, self.epsilon))
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any,
    scaling: float | None = None, **named: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Of one token behind a full context, as transformers asks for it: (sequences, heads, 1, width).

    Query heads that share keys are rows of one product with them.
    """
    sequences, heads, _, width = query.shape
    rows = query.reshape(sequences, key.shape[1], -1, width)
    found = torch.nn.functional.scaled_dot_product_attention(rows, key, value, scale=scaling)
    return found.reshape(sequences, 1, heads, width), None


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 1 for logits that differ on a GPU, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode_bits", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--layers", type=int, default=2, help="decoder layers (default: 2)")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights")
    parser.add_argument("--sequences", default=",".join(map(str, SEQUENCES)), help="default: %(default)s")
    parser.add_argument("--modes", default=",".join(MODES), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu, which is not timed")
    options = parser.parse_args(arguments)
    try:
        options.modes = clients.chosen(options.modes, MODES, "modes")
        words = clients.chosen(options.sequences, list(map(str, range(1, 4097))), "sequences")
        return run(sorted(map(int, words)), options)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2


def run(sequences: Sequence[int], options: argparse.Namespace) -> int:
    """Compares and times all modes; prints and writes their rows."""
    place = torch.device(options.device)
    size = Size.tiny(options.layers) if options.tiny else Size(options.layers)
    device = find_device(options.device) if place.type == "cuda" else None
    results = None
    if device is not None:
        torch.cuda.set_device(place)
        facts = meta(device, METHOD.format(most=sequences[-1], sample_ms=SAMPLE_MS, rounds=options.rounds))
        facts["packages"] |= {"transformers": package_version("transformers")}
        results = Results(results_path(options.out, device, "decode_bits.json"), facts)
    models = variants(size, place)
    differing = 0
    for mode in options.modes:
        begun = time.monotonic()
        rows = measure(mode, models, sequences, size, place, options.rounds)
        differing += sum(row["differing_logits"] for row in rows)
        print(*map(brief, rows), f"  {mode}: {time.monotonic() - begun:.1f} s", sep="\n", flush=True)
        if results is not None:
            results.put(*rows)
    if results is not None:
        print(f"written: {results.path}")
    return int(differing > 0 and device is not None)  # a CPU has torch's products alone


def variants(size: Size, place: torch.device) -> dict[str, Any]:
    """By name the models, which share their weights: `usual` is transformers' own, in `torch` nothing but the
    products depends on the batch, and the products of `ours` are tunegemm's."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    usual = clients.build(size, place)
    shared = {id(each): each for each in (*usual.parameters(), *usual.buffers())}
    theirs = copy.deepcopy(usual, dict(shared))
    theirs.config._attn_implementation = ATTENTION
    for parent in list(theirs.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(parent, name, Norm(child.weight, child.variance_epsilon))
    ours = copy.deepcopy(theirs, dict(shared))
    tunegemm.patch(ours)
    return {"usual": usual, "torch": theirs, "ours": ours}


def of_variant(models: Mapping[str, Any], variant: str) -> Any:
    return models["ours" if variant in POLICIES else variant]


@contextmanager
def conditions(variant: str, place: torch.device) -> Iterator[None]:
    """What holds while a variant's step runs."""
    policy = tunegemm.policy(POLICIES[variant]) if variant in POLICIES else nullcontext()
    own = place.type == "cuda" and variant != "usual"
    with policy, sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if own else nullcontext():
        yield


def measure(
    mode: str,
    models: Mapping[str, Any],
    sequences: Sequence[int],
    size: Size,
    place: torch.device,
    rounds: int,
) -> list[dict[str, Any]]:
    """A row for each number of sequences; without times on a CPU."""
    most = sequences[-1]
    wanted = ["torch", *POLICIES, *(["usual"] if mode != "compile" else [])]
    if mode == "compile":
        models = {name: compiled(models[name], name) for name in ("torch", "ours")}
    logits: dict[tuple[str, int], torch.Tensor] = {}
    said: dict[int, list[str]] = {}
    samples: dict[int, Mapping[tuple[str, str], Sequence[float]]] = {}
    for count in sequences:
        make = partial(clients.decode, count, of=most)
        steps: dict[tuple[str, str], Step] = {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", TunegemmWarning)
            for variant in wanted:
                with conditions(variant, place):
                    how = "eager" if mode == "compile" else mode
                    step = clients.prepare(how, make, of_variant(models, variant), size, place, ours=True)
                    logits[variant, count] = step().clone()
                steps[mode, variant] = step if mode == "graph" else under(variant, place, step)
        said[count] = [str(one.message) for one in caught if issubclass(one.category, TunegemmWarning)]
        if place.type == "cuda":
            samples[count] = clients.interleave(steps, rounds, SAMPLE_MS)
        steps.clear()
        gc.collect()
    rows = []
    for count in sequences:
        row: dict[str, Any] = {"workload": f"decode-{count}", "mode": mode, "layers": size.layers}
        row |= {"dtype": "bf16", "sequences": count}
        for variant in ("invariant", "fastest", "torch"):
            name = "differing_logits" if variant == "invariant" else f"{variant}_differing_logits"
            row[name] = different(logits[variant, count], logits[variant, most][-count:])
        if mode == "eager":
            for variant in ("invariant", "torch"):
                name = "first_difference" if variant == "invariant" else f"{variant}_first_difference"
                row[name] = first_difference(variant, models, count, most, size, place)
        row |= {"warnings": len(said[count]), "first_warning": next(iter(said[count]), "")}
        rows.append(row | (speeds(mode, samples[count]) if samples else {}))
    torch.compiler.reset()
    gc.collect()
    return rows


def under(variant: str, place: torch.device, step: Step) -> Step:
    """The step under its conditions: a graph has them since it was captured."""

    def run() -> torch.Tensor:
        with conditions(variant, place):
            return step()

    return run


def compiled(model: Any, name: str) -> Any:
    """Once for all numbers of sequences but 1."""
    # torch 2.11 does not see that layers are of another class, and would take the other model's code unless
    # their options differ. `max_autotune` is off by default.
    own = {"max_autotune": False} if name == "ours" else {}
    options: dict[str, Any] = {"emulate_precision_casts": True, **own}
    return clients.Compiled(model, torch.compile(model, options=options))


def different(found: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many elements differ in a bit."""
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    return int((found.contiguous().view(ints) != wanted.contiguous().view(ints)).sum())


def first_difference(
    variant: str, models: Mapping[str, Any], count: int, most: int, size: Size, place: torch.device
) -> str:
    """The first module, or what comes right before it, that gives other bits; empty where there is none."""
    model = of_variant(models, variant)
    with conditions(variant, place):
        alone, together = (
            trace(model, clients.decode(many, model, size, place, most)) for many in (count, most)
        )
    for (name, found), (_, wanted) in zip(alone, together, strict=True):
        if number := different(found, wanted[-count:]):
            return f"{name} ({number} of {found.numel()})"
    return ""


def trace(model: torch.nn.Module, step: Step) -> list[tuple[str, torch.Tensor]]:
    """What goes into each innermost module and what comes out, in the order of a step."""
    found: list[tuple[str, torch.Tensor]] = []

    def keep(name: str, values: Any) -> None:
        first = values if isinstance(values, torch.Tensor) else values[0]
        found.append((name, first.clone()))

    hooks = []
    for name, module in model.named_modules():
        if not list(module.children()):
            before = partial(_before, keep, name)
            hooks += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(partial(_behind, keep, name)),
            ]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _before(keep: Callable[[str, Any], None], name: str, _: Any, given: Any, named: Any) -> None:
    keep(f"what goes into {name}", given or tuple(named.values()))


def _behind(keep: Callable[[str, Any], None], name: str, _: Any, __: Any, result: Any) -> None:
    keep(name, result)


def speeds(mode: str, samples: Mapping[tuple[str, str], Sequence[float]]) -> dict[str, Any]:
    """Steps a second of each variant, and how `batch_invariant` compares."""
    ours = samples[mode, "invariant"]
    found: dict[str, Any] = {"steps_per_s": round(1e6 / statistics.median(ours), 1)}
    found["noise"] = round(aa_noise(samples[mode, clients.AGAIN], samples[mode, "torch"]), 5)
    for variant in ("torch", "fastest", "usual"):
        theirs = samples.get((mode, variant))
        ratio = "ratio" if variant == "torch" else f"ratio_to_{variant}"
        found |= {f"{variant}_steps_per_s": None, ratio: None}
        if theirs is not None:
            found[f"{variant}_steps_per_s"] = round(1e6 / statistics.median(theirs), 1)
            pairs = zip(theirs, ours, strict=True)
            found[ratio] = round(statistics.median(other / own for other, own in pairs), 4)
    return found


def brief(row: Mapping[str, Any]) -> str:
    """One line for the terminal."""
    words = [f"{row['sequences']} {row['mode']}: {row['differing_logits']} logits differ"]
    words.append(f"(fastest {row['fastest_differing_logits']}, torch {row['torch_differing_logits']})")
    if "steps_per_s" in row:
        words.append(f"{row['steps_per_s']:.0f} steps/s, {row['ratio']:.3f} x torch")
        words.append(f"{row['ratio_to_fastest']:.3f} x fastest")
        if row["usual_steps_per_s"]:
            words.append(f"{row['ratio_to_usual']:.3f} x usual")
    for who in ("", "torch_"):
        if row.get(f"{who}first_difference"):
            words.append(f"\n    {who or 'first '}differs from {row[f'{who}first_difference']}")
    if row["warnings"]:
        words.append(f"\n    {row['warnings']} warnings: {row['first_warning']}")
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
