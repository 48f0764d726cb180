"""Times layers of models through torch.compile's backend `tunegemm` and through Inductor, nothing tuned.

    python -m benchmarks.layers --models llama-3-8b --rows d16,4096 --modes graph
    python -m benchmarks.layers --within 150 --sample-ms 20        # in order, until the time is over
    python -m benchmarks.layers --device cpu --tiny --modes backend  # without a GPU: results, no times

Two layers in plain torch with random weights: modules of modules, or (a name that ends with `-whole`) all of
a layer in one forward. Rows are the tokens of one prompt, or, as in d16, one token for each of so many
sequences that attend to 512 tokens. Modes: *backend* times eager calls, *patched* those of the model after
``patch(fuse=True)``, *graph* the backend's in a CUDA graph; *inductor* the model compiled by Inductor
without and with the pass of `tunegemm.enable`. *Merged* is torch alone with q, k and v, and gate and up, as
one product each and a compiled gate, as serving engines have it; *unguarded* is the backend without Dynamo's
guards on modules (docs/guide/layers.md); `--with-inductor N` adds the compiled model, for up to N rows, to
the modes but the last. Writes results/GPU/layers.json.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tunegemm
from benchmarks import harness
from benchmarks.clients import CONTEXT
from benchmarks.command import add_names, command
from benchmarks.graphs import within
from benchmarks.harness import Step
from benchmarks.results import report
from benchmarks.shapes import LISTED
from tunegemm.errors import BadValueError, one_line
from tunegemm.layers.backend import tunegemm as backend

METHOD = (
    "wall time of two layers with the device idle before and after, as many steps a sample as take a row's "
    "sample_ms, after as many that are not timed; torch, torch again and the others in shuffled order in a "
    "round, of which eager modes have three times as many, of a third as long; ratios are medians over "
    "rounds; noise of timing torch twice a round; host_us is the host's time for a step that nobody waits "
    "for; errors are relative to the same layers in fp32"
)
MODES = ("backend", "patched", "graph", "inductor")
#: Further libraries that rows have ratios to, if they were timed.
OTHERS = ("merged", "inductor")
LAYERS = 2
#: Modes in which the host's time matters: how many times as many rounds they have, and how much shorter.
_EAGER = ("backend", "patched")
_HOSTS_ROUNDS, _HOSTS_SHARE = 3, 1 / 3


@dataclass(frozen=True)
class Size:
    """Of a layer; without an MLP where `intermediate` is 0."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int = 128
    activation: str = "silu"


SIZES = {name: Size(*facts) for name, facts in LISTED["layers"].items()}
#: Tokens of a prompt, and sequences that are decoded.
ROWS = ("d1", "d16", "d64", "256", "1024", "4096")


class Attention(nn.Module):
    """Of a prompt, or of the next token of sequences behind a context."""

    past: torch.Tensor

    def __init__(self, size: Size, sequences: int) -> None:
        """sequences: how many are decoded; 0 for a prompt."""
        super().__init__()
        self.size = size
        self.register_buffer("past", torch.randn(2, sequences, size.kv_heads, CONTEXT, size.head))
        wide, narrow = size.heads * size.head, size.kv_heads * size.head
        self.q_proj = nn.Linear(size.hidden, wide, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(size.hidden, narrow, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(wide, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x)))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (-1, self.size.head)).transpose(1, 2) for each in (q, k, v))
        decodes = self.past.shape[1] > 0
        if decodes:
            k, v = self.past
        if q.dtype is torch.float32:  # the reference, head by head: no kernel spares it its scores' memory
            group = q.shape[1] // k.shape[1]
            heads = [
                F.scaled_dot_product_attention(
                    q[:, head, None], k[:, head // group, None], v[:, head // group, None],
                    is_causal=not decodes,
                )
                for head in range(q.shape[1])
            ]  # fmt: skip
            mixed = torch.cat(heads, 1)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=not decodes, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


class MergedAttention(Attention):
    """With one weight for q, k and v."""

    def __init__(self, other: Attention) -> None:
        nn.Module.__init__(self)
        self.size, self.past, self.o_proj = other.size, other.past, other.o_proj
        parts = (other.q_proj.weight, other.k_proj.weight, other.v_proj.weight)
        self.rows, self.weight = [part.shape[0] for part in parts], nn.Parameter(torch.cat(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.attend(*F.linear(x, self.weight).split(self.rows, -1)))


class MLP(nn.Module):
    """As transformers writes it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(size.hidden, size.intermediate, bias=False) for _ in range(2)
        )
        self.down_proj = nn.Linear(size.intermediate, size.hidden, bias=False)
        self.act = nn.SiLU() if size.activation == "silu" else nn.GELU("tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class MergedMLP(nn.Module):
    """With one weight for gate and up, and a compiled gate."""

    def __init__(self, other: MLP, *, compiles: bool) -> None:
        super().__init__()
        self.down_proj = other.down_proj
        self.weight = nn.Parameter(torch.cat((other.gate_proj.weight, other.up_proj.weight)))
        self.gated = _gate(isinstance(other.act, nn.SiLU), compiles)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = F.linear(x.flatten(0, -2), self.weight)
        return self.down_proj(self.gated(both).unflatten(0, x.shape[:-1]))


@cache
def _gate(is_silu: bool, compiles: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """For gate and up side by side. Shared by all rows and models, because each would take seconds."""

    def gated(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return (F.silu(gate) if is_silu else F.gelu(gate, approximate="tanh")) * up

    return torch.compile(gated) if compiles else gated


class Block(nn.Module):
    """A layer with its norms and residuals."""

    def __init__(self, size: Size, attention: nn.Module, mlp: nn.Module | None) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x if self.mlp is None else x + self.mlp(self.between(x))


class Whole(nn.Module):
    """The same layer in a single forward."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        assert isinstance(block.attention, Attention) and isinstance(block.mlp, MLP)
        self.attention, self.act = block.attention, block.mlp.act
        self.n1, self.n2 = block.before, block.between
        self.q, self.k, self.v = block.attention.q_proj, block.attention.k_proj, block.attention.v_proj
        self.o, self.gate, self.up = block.attention.o_proj, block.mlp.gate_proj, block.mlp.up_proj
        self.down = block.mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.n1(x)
        x = x + self.o(self.attention.attend(self.q(h), self.k(h), self.v(h)))
        h = self.n2(x)
        return x + self.down(self.act(self.gate(h)) * self.up(h))


def build(size: Size, place: torch.device, sequences: int) -> nn.Sequential:
    """As users have them, in bf16."""
    torch.manual_seed(0)
    with place:
        blocks = [
            Block(size, Attention(size, sequences), MLP(size) if size.intermediate else None)
            for _ in range(LAYERS)
        ]
    return nn.Sequential(*blocks).to(torch.bfloat16).eval()


def merged(model: nn.Sequential, *, compiles: bool) -> nn.Sequential:
    """The same layers with merged weights; compiles: whether to compile the gates, if nothing else is."""
    result: nn.Sequential = harness.twin(model)
    for block in result:
        assert isinstance(block.attention, Attention)
        block.attention = MergedAttention(block.attention)
        if isinstance(block.mlp, MLP):
            block.mlp = MergedMLP(block.mlp, compiles=compiles)
    return result


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a result is further from fp32 than torch's error allows."""
    parser = harness.model_parser("benchmarks.layers", __doc__, rounds=9)
    add_names(parser, "models", SIZES)
    add_names(parser, "rows", ROWS, help="tokens of a prompt, or dN: default %(default)s")
    add_names(parser, "modes", MODES)
    parser.add_argument("--with-inductor", type=int, default=0, help="time it, too, for up to so many rows")
    parser.add_argument("--sample-ms", type=float, default=harness.SAMPLE_MS, help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="layers of a few thousand weights")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not set(options.modes) <= set(_EAGER):
        raise BadValueError(f"--modes {','.join(options.modes)} need a GPU; on a CPU use --modes backend")
    place, results = harness.opened(options, "layers.json", METHOD)
    torch._dynamo.config.recompile_limit = 64  # of `_gate`
    phases = [[m for m in options.modes if (m == "inductor") is last] for last in (False, True)]
    wrong = 0
    cases = [*itertools.product(filter(None, phases), options.rows, options.models)]
    for modes, rows, model in within(options.within, cases):
        size = SIZES[model]
        if options.tiny:
            size = Size(64, 96 if size.intermediate else 0, 4, 2, 16, size.activation)
        try:
            result = measure(model, size, rows, place, modes, options)
        except RuntimeError as error:  # such as missing memory: other rows may need less
            print(f"{model} {rows} {','.join(modes)}: {one_line(error)}", flush=True)
            result, wrong = [], wrong + 1
        harness.clear(place)
        wrong += report(results, result, _brief)
    return 1 if wrong else 0


def measure(
    name: str, size: Size, rows: str, place: torch.device, modes: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each mode; without times on a CPU."""
    decodes = rows.startswith("d")
    tokens, sequences = (1, int(rows[1:])) if decodes else (int(rows), 1)
    model = build(size, place, sequences if decodes else 0)
    x = torch.randn(sequences, tokens, size.hidden, device=place, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = copy.deepcopy(model).float()(x.float())
    if name.endswith("-whole"):
        model = nn.Sequential(*(Whole(block) for block in model if isinstance(block, Block)))
    results = []
    for mode in modes:
        steps = _steps(mode, model, x, options.with_inductor)
        errors = {library: harness.error_of(step(), expected) for (_, library), step in steps.items()}
        row: dict[str, Any] = {"model": name, "rows": rows, "mode": mode, "layers": LAYERS, "dtype": "bf16"}
        row |= {"sample_ms": options.sample_ms} | harness.quality(errors["torch"], errors["tunegemm"])
        if "unguarded" in errors:
            row["right"] &= harness.quality(errors["torch"], errors["unguarded"])["right"]
        if place.type == "cuda":
            rounds, sample_ms = options.rounds, options.sample_ms
            if mode in _EAGER:
                rounds, sample_ms = _HOSTS_ROUNDS * rounds, _HOSTS_SHARE * sample_ms
                names = {"tunegemm": "host_us", "torch": "torch_host_us", "unguarded": "unguarded_host_us"}
                sides = {each: steps[mode, key] for key, each in names.items() if (mode, key) in steps}
                row |= dict(zip(sides, host_us(*sides.values()), strict=True))
            row |= times(harness.interleave(steps, rounds, sample_ms), mode)
        results.append(row)
    return results


def _steps(
    mode: str, model: nn.Sequential, x: torch.Tensor, with_inductor: int
) -> dict[tuple[str, str], Step]:
    """The warmed-up steps to time beside each other, by mode and library."""
    sides: dict[str, Step] = {}

    def compiled(**options: Any) -> Step:
        return _step(x, harness.Compiled(model, torch.compile(model, **options)))

    if mode == "inductor":
        for library, enabled in (("torch", nullcontext), ("tunegemm", tunegemm.enable)):
            torch.compiler.reset()  # Dynamo keeps code for the model, whoever compiles it again
            with enabled():
                sides[library] = harness.captured(compiled(dynamic=False))
        return {(mode, library): step for library, step in sides.items()}
    sides["torch"] = _step(x, model)
    if mode == "patched":
        tunegemm.patch(patched := harness.twin(model), fuse=True)
        sides["tunegemm"] = _step(x, patched)
    else:
        sides["tunegemm"] = compiled(backend=backend)
        if all(isinstance(block, Block) for block in model):
            sides["merged"] = _step(x, merged(model, compiles=x.is_cuda))
    if mode == "backend":
        # Dynamo keeps one graph for equal backends: `partial` makes another one.
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
        sides["unguarded"] = compiled(backend=partial(backend), options=options)
    if x.numel() // x.shape[-1] <= with_inductor:
        sides["inductor"] = compiled(dynamic=False)
    if mode in _EAGER or not x.is_cuda:
        for step in sides.values():
            for _ in range(3):
                step()
        return {(mode, library): step for library, step in sides.items()}
    return {(mode, library): harness.captured(step) for library, step in sides.items()}


def host_us(*kinds: Step, steps: int = 5, rounds: int = 25) -> list[float]:
    """The host's time for a step of each kind: of a few that the device's queue has room for."""
    results: list[list[float]] = [[] for _ in kinds]
    with harness.undisturbed():
        for _ in range(rounds):
            for step, times_of in zip(kinds, results, strict=True):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(steps):
                    step()
                times_of.append((time.perf_counter() - begin) / steps * 1e6)
    torch.cuda.synchronize()
    return [round(statistics.median(each), 1) for each in results]


def _step(x: torch.Tensor, model: Any) -> Step:
    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    return step


def times(samples: dict[tuple[str, str], list[float]], mode: str) -> dict[str, Any]:
    """Times from samples in us, by mode and library, one per round."""
    row = harness.compared(samples, mode, others=OTHERS)
    if unguarded := samples.get((mode, "unguarded")):
        row["unguarded_ratio"] = harness.ratio_of(samples[mode, "torch"], unguarded)
    return row


def _brief(row: dict[str, Any]) -> str:
    more = [f"{row[f'ratio_to_{other}']:.3f} x {other}" for other in OTHERS if f"ratio_to_{other}" in row]
    if "host_us" in row:
        more.append(f"host {row['host_us']:.0f} us, torch {row['torch_host_us']:.0f}")
    if "unguarded_ratio" in row:
        more.append(f"unguarded {row['unguarded_ratio']:.3f} x torch")
    return harness.line(f"{row['model']} {row['rows']} {row['mode']}", row, *more)


if __name__ == "__main__":
    sys.exit(main())
