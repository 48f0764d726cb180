"""Times sides of a product beside each other, each in one CUDA graph over several sets of operands."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tunegemm.describe.device import Device, find_device

Side = Callable[[int], Any]
"""A timed side; takes the number of a set of operands."""
_T = TypeVar("_T")


@dataclass
class Graph:
    """A side over all sets: captured, or where it waits for the host as it is called."""

    replay: Callable[[], Any]
    calls: int
    is_captured: bool = True

    @classmethod
    def capture(cls, side: Side, sets: int, *, short_ms: float, most: int, may_wait: bool = False) -> Graph:
        """A graph of some `short_ms`, with at most so many calls.

        may_wait: whether to time a side without a graph if it cannot be captured. Raises RuntimeError for a
        side that does not support the product.
        """

        def captured(again: int) -> torch.cuda.CUDAGraph:
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                run(again)
            graph.replay()
            return graph

        def run(again: int = 1) -> None:
            for number in [*range(sets)] * again:
                side(number)

        run()
        try:
            graph = captured(1)
        except RuntimeError:  # torch's grouped product of fp16 reads the sizes from the device
            if not may_wait:
                raise
            torch.cuda.synchronize()
            return cls(run, sets, False)
        # By the GPU's time: fewer calls of a slow host would share the start of a graph.
        again = max(1, min(int(short_ms / timed_ms(graph.replay)), most // sets))
        return cls(captured(again).replay, again * sets)

    def us(self, turn_ms: float) -> float:
        """Microseconds per call: of one replay, or of the second half of a turn."""
        replays = max(1, math.ceil(turn_ms / 2 / timed_ms(self.replay))) if turn_ms else 1
        for _ in range(replays if turn_ms else 0):
            self.replay()

        def again() -> None:
            for _ in range(replays):
                self.replay()

        return timed_ms(again) * 1e3 / self.calls / replays


def timed_ms(run: Callable[[], Any]) -> float:
    """Its time on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def in_rounds(
    graphs: Mapping[str, Graph], rounds: int, turn_ms: Callable[[str], float]
) -> dict[str, list[float]]:
    """us a call of each graph, a sample a round, in shuffled order. turn_ms: of each by its name."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name in random.sample(list(graphs), len(graphs)):
            samples[name].append(graphs[name].us(turn_ms(name)))
    return samples


def race(sides: Mapping[str, Side], sets: int, rounds: int, turn_ms: float) -> dict[str, float]:
    """Median us of a call of each side: of one replay of some 0.5 ms a round, or of turns of that length in a
    third as many rounds.
    """
    graphs = {name: Graph.capture(side, sets, short_ms=0.5, most=200) for name, side in sides.items()}
    samples = in_rounds(graphs, max(3, rounds // 3) if turn_ms else rounds, lambda _: turn_ms)
    return {name: statistics.median(times) for name, times in samples.items()}


def begin(spec: str) -> Device:
    """Makes a GPU torch's current device, and seeds torch so that each run draws the same numbers."""
    device = find_device(spec)
    torch.cuda.set_device(device.index)
    torch.manual_seed(0)
    random.seed(0)
    return device


def within(seconds: float, cases: Sequence[_T]) -> Iterator[_T]:
    """The cases that begin within so many seconds, or all for 0; prints how many are left."""
    begun = time.monotonic()
    for number, case in enumerate(cases):
        if seconds and time.monotonic() - begun > seconds:
            print(f"no time is left after {seconds:g} s: {number} of {len(cases)} are done", flush=True)
            return
        yield case
