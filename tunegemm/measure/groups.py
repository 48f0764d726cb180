"""Divisions of rows into groups for checking and timing a grouped product.

Only the device knows the division when such a product is computed, and its record has to be fast for every
division. So each kernel is timed over several divisions, `SKEWS`, and its time is their geometric mean.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.errors import ProblemError
from tunegemm.generate.cublaslt.eager import SIZES
from tunegemm.measure.operands import L2_MULTIPLE, MAX_SETS, Operands
from tunegemm.measure.race import Replay
from tunegemm.measure.settings import SKEWS
from tunegemm.untrusted import named, shown

#: Shape of the gamma distribution: with 0.5, the largest of 32 groups has some 5 times the mean size.
_GAMMA = 0.5
#: Up to this many rows are drawn one by one; more are divided in proportion to the shares.
_MOST_DRAWN = 1 << 14
#: In place of a skew, for a check: ends inside tiles, groups without rows, and rows behind the last group.
RAGGED = "ragged"


def divide(groups: int, rows: int, skew: str, seed: int = 0) -> list[int]:
    """Return the number of rows of each group. Deterministic for a seed."""
    generator = random.Random(seed)
    if skew == "uniform":
        return [rows // groups + (group < rows % groups) for group in range(groups)]
    sizes = [0] * groups
    if skew == "one_hot":
        sizes[seed % groups] = rows
        return sizes
    shares = [generator.gammavariate(_GAMMA, 1.0) for _ in range(groups)]
    if skew == RAGGED:
        shares = [0.0 if group % 3 == 1 else share for group, share in enumerate(shares)]
        rows -= rows // 8
    if rows <= _MOST_DRAWN:
        for group in generator.choices(range(groups), shares, k=rows):
            sizes[group] += 1
        return sizes
    sizes = [int(rows * share / sum(shares)) for share in shares]
    sizes[max(range(groups), key=sizes.__getitem__)] += rows - sum(sizes)
    return sizes


def divided(problem: Problem, operands: Operands, skew: str, seed: int) -> Operands:
    """Return a set of a grouped problem with this division of rows.

    No kernel may write rows behind the last group: the output ends before them, and they belong to its guard.
    """
    import torch

    sizes = divide(problem.groups, problem.m, skew, seed)
    ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=operands.a.device)
    vars(ends)[SIZES] = sizes
    fused = ends, *operands.fused
    if (used := sum(sizes)) == problem.m:
        return replace(operands, fused=fused)
    behind = operands.out[used:].view(torch.uint8).view(-1)
    return replace(operands, out=operands.out[:used], guards=(*operands.guards, behind), fused=fused)


def checked_skews(names: Sequence[str] | str) -> tuple[str, ...]:
    """Return the skews of these names, or of a single name, in the order of SKEWS. Raises ProblemError if a
    name is unknown or there is none."""
    names, known = named(names), ", ".join(SKEWS)
    if not names:
        raise ProblemError(f"no skews given; use some of {known}")
    if unknown := [name for name in names if name not in SKEWS]:
        raise ProblemError(f"skew {shown(unknown[0])} is not known; use some of {known}")
    return tuple(skew for skew in SKEWS if skew in names)


def measured_skews(telemetry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the skews of a measurement; all of SKEWS if it does not name them."""
    result = telemetry.get("skews")
    return tuple(skew for skew in SKEWS if skew in result) if isinstance(result, Mapping) else SKEWS


def over_skews(
    problem: Problem, sets: Sequence[Operands], l2_bytes: int, seed: int, skews: Sequence[str] = SKEWS
) -> list[list[Operands]]:
    """Return the sets of each skew. With one hot group, the sets move it from group to group, because
    otherwise its few weights would stay in the L2.
    """
    weights = len(sets) * problem.groups
    of_one = problem.n * problem.k * DTYPE_BYTES[problem.in_dtype]
    cold = min(weights, math.ceil(L2_MULTIPLE * l2_bytes / of_one), MAX_SETS)
    counts = {"one_hot": max(len(sets), cold)}
    return [
        [
            divided(problem, sets[number % len(sets)], skew, seed + number // len(sets))
            for number in range(counts.get(skew, len(sets)))
        ]
        for skew in skews
    ]


class OverSkews:
    """Runs a replay of each skew in turn as a single replay: its time is their geometric mean."""

    def __init__(self, replays: Sequence[Replay]) -> None:
        self._replays = replays
        self.samples: list[list[float]] = [[] for _ in replays]
        """Time per product of each skew in every run, microseconds."""

    def start(self, untimed: int = 0, timed: int = 1) -> None:
        """As `Replay.start`; the untimed replays precede each skew."""
        for replay in self._replays:
            replay.start(untimed, timed)

    def finish(self) -> float:
        """Return the geometric mean of the skews' times per product, microseconds."""
        for replay, samples in zip(self._replays, self.samples, strict=True):
            samples.append(replay.finish())
        return math.exp(sum(math.log(samples[-1]) for samples in self.samples) / len(self.samples))


def ratios(replay: Any, baseline: Any, skews: Sequence[str] = SKEWS) -> dict[str, float]:
    """Return the speed of a replay relative to the baseline's by skew: medians over the runs."""
    from statistics import median

    pairs = zip(skews, replay.samples, baseline.samples, strict=True)
    return {skew: median(theirs) / median(own) for skew, own, theirs in pairs}
