"""Qualifying rounds: where a GPU is at its power cap, the fastest by an interleaved screen need not be the
fastest in use.

In an interleave all share the clocks that their mixture leaves, so that a candidate which draws less power
gives what it gains to the others. In steady-state timing each has the clocks that it alone leaves
(docs/decisions/0012-steady-state-at-the-power-cap.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.measure.policy import QUALIFYING
from tunegemm.search import gpc_aware, launches_around
from tunegemm.tuning import finalists
from tunegemm.tuning.kernels import Kernels
from tunegemm.tuning.trials import Trials

#: Seconds below which there are no qualifying rounds: few candidates are raced. They take some 18.
LEAST_S = 22.0
#: Kernels of which other launches run in a second round, and how many.
_LEADERS, _LAUNCHES = 2, 8
#: Kernels whose clusters run in the GPCs' order there, too.
_GPC_AWARE = 6


def qualify(trials: Trials, kernels: Kernels, left_s: float) -> list[Candidate]:
    """The candidates of the final race: by steady-state timing where that differs and there is time."""
    if not trials.is_throttled:
        return finalists.of_interleaved(trials.screened)
    if left_s < LEAST_S:
        return finalists.without_qualifying(trials.screened)

    def round_of(candidates: Iterable[Candidate]) -> None:
        batch = list(dict.fromkeys(candidates))
        for _ in trials.evaluate(batch, QUALIFYING, stage="qualifying"):
            pass

    # First what is expected to be fast in steady state. Another order of clusters is another kernel: cores
    # are idle while this round keeps the GPU busy, so that those are compiled meanwhile.
    first = finalists.for_qualifying(trials.screened)
    trials.compile_ahead([launch for one in first for launch in _gpc_aware(trials, kernels, one)])
    round_of(first)
    # Then other launches of the best: to read less from L2 and device memory saves power, too.
    others: list[Candidate] = []
    for leader in finalists.leaders_of(trials.qualified, _LEADERS):
        around = launches_around(leader, kernels.space(leader.family).launch_values)
        others += itertools.islice((c for c in around if _is_new(trials, kernels, c)), _LAUNCHES)
    for leader in finalists.leaders_of(trials.qualified, _GPC_AWARE):
        others += _gpc_aware(trials, kernels, leader)
    round_of(others)
    return finalists.of_qualified(trials.qualified) or finalists.of_interleaved(trials.screened)


def _gpc_aware(trials: Trials, kernels: Kernels, leader: Candidate) -> list[Candidate]:
    """New launches of a kernel that give a GPC neighbouring tiles."""
    if not families.get(leader.family).compiled:
        return []
    values = kernels.space(leader.family).launch_values
    return [launch for launch in gpc_aware(leader, values) if _is_new(trials, kernels, launch)]


def _is_new(trials: Trials, kernels: Kernels, launch: Candidate) -> bool:
    return launch not in trials.qualified and kernels.is_worth_a_trial(trials.problem, launch)
