"""Computes the contents of the page's figures and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tunegemm.describe.space import Candidate
from tunegemm.measure.evidence import SCREEN
from tunegemm.measure.statistics import NOISE_FLOOR
from tunegemm.report.contents import Details, Winner
from tunegemm.report.leaderboard import VENDOR_FAMILY
from tunegemm.search.study import finished_trials
from tunegemm.search.study import importances as importances_of
from tunegemm.store.record import Record

#: Trials of a family whose parameters are weighed, at most.
MOST_WEIGHED = 300


@dataclass(frozen=True)
class Grid:
    """The best candidate of each tile shape, for one family and schedule."""

    title: str
    tile_m: tuple[int, ...]
    tile_n: tuple[int, ...]
    best: Mapping[tuple[int, int], Record]
    """By (tile_m, tile_n); tiles that were not tried are missing."""


def best_so_far(trials: Sequence[Record]) -> list[tuple[int, float]]:
    """The trial number and ratio of each trial that was better than all before it."""
    steps: list[tuple[int, float]] = []
    for number, trial in enumerate(trials, 1):
        if not steps or trial.ratio > steps[-1][1]:
            steps.append((number, trial.ratio))
    return steps


def gap(details: Details) -> str:
    """Why the record's ratio differs from the end of its search's curve; empty if they agree."""
    record, tried = details.winner.record, details.tried
    if not tried or abs(math.log(best_so_far(tried)[-1][1] / record.ratio)) <= math.log1p(NOISE_FLOOR):
        return ""
    own = [trial.ratio for trial in tried if trial.candidate == record.candidate]
    if not own:
        return f"The record, at {record.ratio:.3f}, is a candidate that this search did not try."
    race = "its final race" if record.confirmed else "a later measurement"
    return (
        f"The search measured the record's candidate at {own[-1]:.3f}, in few rounds beside many others; its "
        f"{record.ratio:.3f} is from {race} with {details.winner.rounds} rounds. The two do not compare."
    )


def tile_grids(trials: Sequence[Record]) -> list[Grid]:
    """The best candidate of each tile, per family and schedule, with the fastest grid first. Libraries have
    no tiles.

    If there was a search, only its trials count: their ratios do not compare with those of a race.
    """
    result: dict[tuple[str, str], dict[tuple[int, int], Record]] = {}
    for trial in [trial for trial in trials if trial.method == SCREEN] or trials:
        family, params = trial.candidate.family, trial.candidate.params
        tile_m, tile_n = params.get("tile_m"), params.get("tile_n")
        if family == VENDOR_FAMILY or not (isinstance(tile_m, int) and isinstance(tile_n, int)):
            continue
        grid = result.setdefault((family, str(params.get("schedule", ""))), {})
        old = grid.get((tile_m, tile_n))
        if old is None or trial.ratio > old.ratio:
            grid[tile_m, tile_n] = trial
    # One set of tiles for all schedules of a family, so that they can be compared at a glance.
    grids = []
    for (family, schedule), best in result.items():
        tiles = {tile for (other, _), grid in result.items() if other == family for tile in grid}
        rows, columns = sorted({m for m, _ in tiles}), sorted({n for _, n in tiles})
        grids.append(Grid(" ".join(filter(None, (family, schedule))), tuple(rows), tuple(columns), best))
    return sorted(grids, key=lambda grid: -max(trial.ratio for trial in grid.best.values()))


def importances(trials: Iterable[Record]) -> dict[str, dict[str, float]]:
    """How much each parameter decides, by family; libraries and families with too few trials are left out.

    If there are many trials, a sample counts, taken evenly from the fastest to the slowest: Optuna takes a
    millisecond per trial.
    """
    ratios: dict[str, dict[Candidate, float]] = {}
    for trial in trials:
        if trial.candidate.family != VENDOR_FAMILY and trial.method == SCREEN:
            ratios.setdefault(trial.candidate.family, {})[trial.candidate] = trial.ratio
    weighed: list[tuple[Candidate, float]] = []
    for ratio in ratios.values():
        ranked = sorted(ratio.items(), key=lambda item: -item[1])
        weighed += ranked[:: -(-len(ranked) // MOST_WEIGHED)]
    return importances_of(finished_trials(weighed)) if weighed else {}


def ratio_limits(winners: Sequence[Winner]) -> tuple[float, float]:
    """The ends of a common axis for speed-ups. It contains every ratio, 1, and intervals of up to twice the
    width."""
    low = min(min(winner.record.ratio for winner in winners), 0.98)
    high = max(max(winner.record.ratio for winner in winners), 1.02)
    reach = (high / low) ** 0.25
    low = max(low / reach, min(min(winner.low for winner in winners), low))
    high = min(high * reach, max(max(winner.high for winner in winners), high))
    margin = (high / low) ** 0.04
    return low / margin, high * margin
