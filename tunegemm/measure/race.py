"""Rounds, interleaved or in steady state: each takes a sample of every candidate, and slow candidates drop
out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import ceil, sqrt
from statistics import fmean, median
from typing import Protocol

from tunegemm.measure.settings import RaceSettings
from tunegemm.measure.statistics import clearly_slower, slower_by

#: The fewest steady-state rounds of a winner.
_FEWEST_STEADY = 2
#: The untimed beginning of a steady-state turn; half of a turn that is shorter than twice this.
_UNTIMED_MS = 80.0
#: Turns of each candidate in a shared round of steady-state timing, and how many candidates share one swing
#: of the clocks: turns of 80 ms.
_TURNS, _SHARE = 3, 4


class Replay(Protocol):
    """A fixed stretch of work that can be run again."""

    def start(self, untimed: int = 0, timed: int = 1) -> None:
        """Enqueue it several times in a row, with its clock around the timed ones."""

    def finish(self) -> float:
        """Wait for it: microseconds per product. Raises RuntimeError when the device failed."""


@dataclass(frozen=True)
class SteadyState:
    """Repeats a replay until the GPU runs at the clocks of this work alone, and then times it.

    A GPU at its power cap changes its clocks in steps of some 20 ms and settles on new work after three steps
    (H200, benchmarks/results/h200/turns-2026-11-22.json), so the beginning is not timed.
    """

    replay: Replay
    untimed: int
    timed: int
    """Replays in a round."""

    @classmethod
    def of(cls, replay: Replay, replay_seconds: float, steady_ms: float) -> SteadyState:
        """Return as many replays as fill the time, at least two."""
        times = max(2, ceil(steady_ms * 1e-3 / replay_seconds))
        untimed = min(times - times // 2, ceil(times * _UNTIMED_MS / steady_ms))
        return cls(replay, untimed, times - untimed)

    def start(self) -> None:
        self.replay.start(self.untimed, self.timed)

    def finish(self) -> float:
        return self.replay.finish()


def race(
    replays: Sequence[Replay | SteadyState],
    kept: int,
    settings: RaceSettings,
    waiting_for: Callable[[int], None],
) -> list[list[float]]:
    """Return the samples of every replay in the order of rounds; fewer for those that dropped out.

    The first `kept` replays (the baseline's) never drop out. `waiting_for(i)` is called before replay i
    is waited for: if the device hangs or faults, replay i caused it.

    The next replay is enqueued before the wait for the last one. So its clock starts on a busy device and
    excludes launch latency, which on an idle device is some 10 us, 1 % of a replay. Of two replays in
    flight, the one that is waited for is running. An uncounted first replay makes the device busy.
    """
    generator = random.Random(settings.seed)
    samples: list[list[float]] = [[] for _ in replays]
    active = list(range(len(replays)))
    waiting_for(0)
    replays[0].start()
    running, counted = 0, False
    for round_index in range(settings.rounds):
        order = generator.sample(active, len(active))
        if order[0] == running and len(order) > 1:
            order.append(order.pop(0))
        for index in order:
            waiting_for(running)
            if index != running:  # a replay cannot be in flight twice
                replays[index].start()
            sample = replays[running].finish()
            if counted:
                samples[running].append(sample)
            if index == running:
                replays[index].start()
            running, counted = index, True
        if round_index + 1 >= settings.race_after:
            active = survivors(active, kept, samples, settings)
    waiting_for(running)
    samples[running].append(replays[running].finish())
    return samples


def steady_race(
    timed: Sequence[tuple[Replay, float]],
    kept: int,
    settings: RaceSettings,
    waiting_for: Callable[[int], None],
) -> list[list[float]]:
    """Return samples as `race` does, in steady state, from replays and the seconds that each takes: the turns
    are long enough for each replay to have its own clocks.

    The controller that holds a GPU at its power cap swings, at first by several per cent, with a period of
    some 950 ms (docs/decisions/0023-turns-outlast-the-power-controller.md). So a round takes
    `settings.steady_ms` for each group of up to four replays, and twice that for up to eight. Each replay has
    three turns in that time: a sample is the mean of three turns at thirds of the swing, or of a single turn
    over the whole swing.
    """
    generator = random.Random(settings.seed)
    samples: list[list[float]] = [[] for _ in timed]
    active = list(range(len(timed)))
    in_doubt = settings.steady_groups[-1:] if settings.steady_doubt else ()
    for round_index, size in enumerate(settings.steady_groups + in_doubt):
        is_alone = len(active) <= kept + 1
        if round_index >= len(settings.steady_groups) and not is_in_doubt(active, kept, samples, settings):
            break
        for group in groups_of(generator.sample(active, len(active)), size):
            for index, sample in zip(
                group,
                _take_turns(timed, group, settings.steady_ms * ceil(len(group) / _SHARE), waiting_for),
                strict=True,
            ):
                samples[index].append(sample)
        active = [*range(kept), *may_be_fastest(active[kept:], samples, settings)]
        if round_index + 1 < _FEWEST_STEADY:
            continue
        if settings.steady_doubt and not leads(active, kept, samples, settings.steady_doubt[0]):
            break  # the baseline is as fast as any
        if is_alone and not is_in_doubt(active, kept, samples, settings):
            break  # the last round did not choose, so it reports the speed of the remaining one
    return samples


def leads(active: Sequence[int], kept: int, samples: list[list[float]], least: float) -> list[float]:
    """Return the leads of the remaining replays over the baseline that exceed a limit."""
    baseline = fmean(map(fmean, samples[:kept]))
    ahead = (baseline / fmean(samples[index]) - 1 for index in active[kept:])
    return [item for item in ahead if item > least]


def is_in_doubt(active: Sequence[int], kept: int, samples: list[list[float]], settings: RaceSettings) -> bool:
    """Whether it is undecided that a remaining replay beats the baseline."""
    if not settings.steady_doubt:
        return False
    least, most = settings.steady_doubt
    return any(item < most for item in leads(active, kept, samples, least))


def groups_of(order: Sequence[int], most: int) -> list[Sequence[int]]:
    """Split into as few groups as possible, of about equal size."""
    count = ceil(len(order) / most)
    cuts = [len(order) * number // count for number in range(count + 1)]
    return [order[first:last] for first, last in pairwise(cuts)]


def _take_turns(
    timed: Sequence[tuple[Replay, float]], group: Sequence[int], ms: float, waiting_for: Callable[[int], None]
) -> list[float]:
    """The mean of the turns of each in the group. The next turn is enqueued before waiting for the last."""
    turns = list(group) * (_TURNS if len(group) > 1 else 1)
    runners = {index: SteadyState.of(*timed[index], ms / len(turns)) for index in group}
    taken: dict[int, list[float]] = {index: [] for index in group}
    for running, following in zip_longest([None, *turns], turns):
        if running is not None:
            waiting_for(running)
        if following is not None:
            runners[following].start()
        if running is not None:
            taken[running].append(runners[running].finish())
    return [fmean(taken[index]) for index in group]


def may_be_fastest(active: Sequence[int], samples: list[list[float]], settings: RaceSettings) -> list[int]:
    """Return the replays with all rounds that may be the fastest."""
    if not active:
        return []
    leader = min(active, key=lambda index: median(samples[index]))
    limit = settings.race_margin + settings.steady_spread / sqrt(len(samples[leader]))
    behind = {index: slower_by(samples[index], samples[leader]) for index in active}
    near = sorted((index for index in active if behind[index] <= limit), key=lambda index: behind[index])
    return sorted(near[: settings.steady_left])


def survivors(active: list[int], kept: int, samples: list[list[float]], settings: RaceSettings) -> list[int]:
    """Return `active` without the replays that are clearly slower than the fastest. The one in flight lacks
    its last sample, so two replays compare by the rounds that both have.
    """
    timed = [index for index in active if samples[index]]
    if not timed:
        return active
    leader = min(timed, key=lambda index: median(samples[index]))

    def is_slower(index: int) -> bool:
        rounds = min(len(samples[index]), len(samples[leader]))
        if rounds == 0:
            return False
        mine, leading = samples[index][:rounds], samples[leader][:rounds]
        return clearly_slower(mine, leading, settings.race_margin, settings.confidence)

    return [index for index in active if index < kept or not is_slower(index)]
