"""What benchmarks of layers and models share: steps in CUDA graphs, samples in turns, and their rows."""

from __future__ import annotations

import argparse
import copy
import gc
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.command import parser_of
from benchmarks.results import Results
from tunegemm.describe.device import find_device
from tunegemm.measure.statistics import aa_noise

Step = Callable[[], torch.Tensor]

#: By default a sample has as many steps as fill this time, and so have the untimed steps before it: a chip at
#: its power cap takes some 60 ms to settle at the clocks of new work (docs/decisions/0012).
SAMPLE_MS = 100.0
#: Name of torch's second timing in a round, for the noise.
AGAIN = "again"
#: A result may be this much further from fp32 than torch's result.
_TOLERANCE = 1.25


def model_parser(name: str, text: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """As `parser_of`, with the options of a benchmark that also runs without a GPU, where it is not timed."""
    parser = parser_of(name, text)
    parser.add_argument("--rounds", type=int, default=rounds, help="interleaved rounds")
    parser.add_argument(
        "--within", type=float, default=math.inf, metavar="SECONDS", help="begin no row later"
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu, which is not timed")
    return parser


def opened(
    options: argparse.Namespace, name: str, method: str, *packages: str
) -> tuple[torch.device, Results | None]:
    """The device, and on a GPU the result file of that name. packages: further ones that rows depend on."""
    place = torch.device(options.device)
    if place.type != "cuda":
        return place, None
    torch.cuda.set_device(place)
    return place, Results.of(options.out, find_device(options.device), name, method, *packages)


def twin(model: Any) -> Any:
    """A copy with the same weights."""
    return copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})


def clear(place: torch.device) -> None:
    """Frees the memory and the code of a finished or failed model."""
    torch.compiler.reset()
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()


def captured(step: Step) -> Replay:
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

    return Replay(graph, result, step)


@dataclass
class Replay:
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


def interleave(
    steps: Mapping[tuple[str, str], Step], rounds: int, sample_ms: float = SAMPLE_MS
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


def ratio_of(others: Sequence[float], ours: Sequence[float]) -> float:
    """The speed-up over the others: the median over rounds."""
    return round(statistics.median(other / our for other, our in zip(others, ours, strict=True)), 4)


def compared(
    samples: Mapping[tuple[str, str], Sequence[float]], mode: str, own: str = "tunegemm",
    others: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """A row's times, from samples in us by mode and library. others: ratios are to those that were timed."""
    torchs, again, ours = (samples[mode, name] for name in ("torch", AGAIN, own))
    timed = {name: samples[mode, name] for name in others if (mode, name) in samples}
    return {
        "torch_ms": round(statistics.median(torchs) / 1e3, 4),
        "ratio": ratio_of(torchs, ours),
        **{f"ratio_to_{name}": ratio_of(other, ours) for name, other in timed.items()},
        "noise": round(aa_noise(again, torchs), 5),
        "rounds": len(torchs),
    }


def error_of(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The error relative to the result of fp32."""
    return ((result.float() - expected).norm() / expected.norm()).item()


def quality(torchs: float, ours: float) -> dict[str, Any]:
    """A row's errors, and whether ours is small enough."""
    return {"torch_error": torchs, "tunegemm_error": ours, "right": ours <= max(_TOLERANCE * torchs, 1e-6)}


def line(name: str, row: Mapping[str, Any], *more: str) -> str:
    """A row in one line. more: further facts of the row."""
    words = [*more]
    if "ratio" in row:
        torch_ms = row["torch_ms"] if "torch_ms" in row else row["torch_us"] / 1e3
        noise = 100 * row["noise"]
        words.insert(0, f"torch {torch_ms:.3f} ms, {row['ratio']:.3f} x torch (noise {noise:.1f} %)")
    if "torch_error" in row:
        words.append(f"error {row['torch_error']:.2e}, tunegemm {row['tunegemm_error']:.2e}")
    return f"{name}: {', '.join(words)}"
