"""Times a Llama-like model of `transformers` as users run it: patched, or compiled by one line.

    python -m benchmarks.llama --workloads generate-1 --first-calls ""
    python -m benchmarks.llama --device cpu --tiny --first-calls 2  # without a GPU: results, no times

*Forward* is one prompt, without a cache; *generate* makes 32 tokens for each of so many prompts of 128
tokens. Modes: *patch* is ``tunegemm.patch(model, fuse=True)``, *backend*
``model.compile(backend="tunegemm")``. *First calls* time a model of so many layers that is compiled from
scratch, by the backend and by Inductor without its caches: seconds, and Dynamo's graphs. Writes
results/GPU/llama.json after each workload.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import tunegemm
from benchmarks import harness
from benchmarks.clients import Size, build, prefill, tokens_of
from benchmarks.command import add_names, command
from benchmarks.graphs import within
from benchmarks.harness import Step
from benchmarks.results import report
from tunegemm.errors import BadValueError, one_line
from tunegemm.layers.backend import tunegemm as backend

METHOD = (
    "wall time of a call with the device idle before and after, as many calls a sample as take 100 ms, after "
    "as many that are not timed; torch, torch again and the others in shuffled order in a round; ratios are "
    "medians over rounds; noise of timing torch twice a round; errors of forward's last logits are relative "
    "to the same model in fp32; of generate the share of tokens that are torch's; a first call is timed "
    "once, after that of another compiled function"
)
PROMPT, NEW_TOKENS = 128, 32


def forward(tokens: int, model: Any, size: Size, place: torch.device) -> Step:
    """One prompt; the logits of its last token."""
    return prefill(model, dataclasses.replace(size, prompt=tokens), place)


def generate(sequences: int, model: Any, size: Size, place: torch.device) -> Step:
    """Greedy generation of the tokens after so many prompts."""
    ids = tokens_of((sequences, PROMPT), size, place)
    mask = torch.ones_like(ids)

    def step() -> torch.Tensor:
        made: torch.Tensor = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, pad_token_id=0, eos_token_id=None,
            min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS,
        )  # fmt: skip
        return made[:, PROMPT:]

    return step


WORKLOADS: Mapping[str, tuple[Callable[..., Step], int]] = {
    **{f"forward-{tokens}": (forward, tokens) for tokens in (256, 1024, 4096)},
    **{f"generate-{sequences}": (generate, sequences) for sequences in (1, 16)},
}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a result is further from fp32 than torch's error allows."""
    parser = harness.model_parser("benchmarks.llama", __doc__, rounds=7)
    add_names(parser, "workloads", WORKLOADS)
    parser.add_argument("--layers", type=int, default=8, help="default: %(default)s")
    parser.add_argument(
        "--first-calls", default="8,32", metavar="LAYERS", help="time those, too (default: %(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights")
    options = parser.parse_args(arguments)
    numbers = options.first_calls.split(",") if options.first_calls else []
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise BadValueError(f"--first-calls {options.first_calls!r} are not numbers; give some such as 8,32")
    options.first_calls = [int(number) for number in numbers]
    begun, wrong = time.monotonic(), 0
    place, results = harness.opened(options, "llama.json", METHOD, "transformers")
    size = Size.of("tiny" if options.tiny else "8B", options.layers)
    size = dataclasses.replace(size, vocabulary=512 if options.tiny else 32000)
    model = build(size, place)
    models = {"torch": model, "patch": harness.twin(model), "backend": harness.twin(model)}
    tunegemm.patch(models["patch"], fuse=True)
    models["backend"].compile(backend=backend)  # as by its name, without an installed package
    for name in within(options.within, options.workloads):
        wrong += report(results, measure(name, models, size, place, options), _brief)
    models.clear()
    del model
    harness.clear(place)
    calls = [*itertools.product(options.first_calls, ("forward-256", "generate-1"), ("backend", "inductor"))]
    left = max(1e-9, options.within - (time.monotonic() - begun))
    for layers, workload, mode in within(left, calls):
        try:
            row = first_call(workload, mode, dataclasses.replace(size, layers=layers), place)
            report(results, [row], _brief)
        except RuntimeError as error:  # such as missing memory: others may need less
            print(f"first {workload} of {layers} layers by {mode}: {one_line(error)}", flush=True)
        harness.clear(place)
    return 1 if wrong else 0


def measure(
    name: str, models: Mapping[str, Any], size: Size, place: torch.device, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each mode; without times on a CPU."""
    make, number = WORKLOADS[name]
    steps = {(name, mode): make(number, model, size, place) for mode, model in models.items()}
    got = {mode: [step() for _ in range(3)][-1].clone() for (_, mode), step in steps.items()}
    quality_of: dict[str, dict[str, Any]] = {}
    if make is forward:
        reference = make(number, copy.deepcopy(models["torch"]).float(), size, place)()
        errors = {mode: harness.error_of(each, reference) for mode, each in got.items()}
        quality_of = {mode: harness.quality(errors["torch"], error) for mode, error in errors.items()}
    else:
        for mode, tokens in got.items():  # near ties end otherwise in bf16, and so does all behind them
            equal = round((tokens == got["torch"]).float().mean().item(), 4)
            quality_of[mode] = {"equal_tokens": equal, "right": tokens.shape == got["torch"].shape}
    got.clear()
    _collect(place)
    samples = harness.interleave(steps, options.rounds) if place.type == "cuda" else {}
    rows = []
    for mode in [mode for mode in models if mode != "torch"]:
        row: dict[str, Any] = {"workload": name, "mode": mode, "layers": size.layers, "dtype": "bf16"}
        if samples:
            row |= harness.compared(samples, name, mode)
        rows.append(row | quality_of[mode])
    return rows


def first_call(workload: str, mode: str, size: Size, place: torch.device) -> dict[str, Any]:
    """Seconds of a compiled model's first call, and the number of graphs that Dynamo makes."""
    from torch._dynamo.utils import counters
    from torch._inductor import config

    torch.compiler.reset()
    model = build(size, place)
    make, number = WORKLOADS[workload]
    make(number, model, size, place)()  # the library's own first call
    seconds = []
    with config.patch(force_disable_caches=True):
        library: Any = backend if mode == "backend" else mode
        torch.compile(torch.neg, backend=library)(torch.ones(2, device=place))
        counters.clear()
        model.compile(backend=library)
        step = make(number, model, size, place)
        for _ in range(2):
            _collect(place)
            begin = time.perf_counter()
            step()
            _collect(place)
            seconds.append(round(time.perf_counter() - begin, 2))
            if len(seconds) == 1:
                graphs = counters["stats"]["unique_graphs"]
    return {
        "workload": f"first {workload}", "mode": mode, "layers": size.layers, "dtype": "bf16",
        "graphs": graphs, "seconds": seconds[0], "second_call_seconds": seconds[1],
    }  # fmt: skip


def _collect(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize()


def _brief(row: Mapping[str, Any]) -> str:
    more = []
    if "graphs" in row:
        more.append(f"{row['graphs']} graphs, {row['seconds']} s, then {row['second_call_seconds']} s")
    if "equal_tokens" in row:
        more.append(f"{100 * row['equal_tokens']:.0f} % of the tokens are torch's")
    return harness.line(f"{row['workload']} of {row['layers']} layers, {row['mode']}", row, *more)


if __name__ == "__main__":
    sys.exit(main())
