"""Rounds, interleaved or in steady state: all have a sample of each, and the slow drop out."""

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

#: Rounds of steady-state timing that a winner has at least.
_FEWEST_STEADY = 2
#: What of a turn in steady state is not timed; half of one that is shorter than twice that.
_UNTIMED_MS = 80.0
#: Turns of each in a round of steady-state timing, where it shares one with others, and how many of those
#: share a swing of the clocks: turns of 80 ms.
_TURNS, _SHARE = 3, 4


class Runner(Protocol):
    """What takes part in a race."""

    def start(self) -> None:
        """Enqueue it, with its clock."""

    def finish(self) -> float:
        """Wait for it: microseconds per product. Raises RuntimeError when the device failed."""


class Replay(Runner, Protocol):
    """A fixed stretch of work that can be run again."""

    def start(self, untimed: int = 0, timed: int = 1) -> None:
        """Enqueue it so many times in a row, with its clock around the timed ones."""


@dataclass(frozen=True)
class SteadyState:
    """A replay again and again, until the GPU runs at the clocks that this work alone leaves it; then timed.

    A GPU at its power cap lowers its clocks in steps of some 20 ms, and has a new work's after three of them
    (H200, benchmarks/results/h200/turns-2026-11-22.json): the beginning is not timed.
    """

    replay: Replay
    untimed: int
    timed: int
    """Replays in a round."""

    @classmethod
    def of(cls, replay: Replay, replay_seconds: float, steady_ms: float) -> SteadyState:
        """As many replays as fill the time, two at least."""
        times = max(2, ceil(steady_ms * 1e-3 / replay_seconds))
        untimed = min(times - times // 2, ceil(times * _UNTIMED_MS / steady_ms))
        return cls(replay, untimed, times - untimed)

    def start(self) -> None:
        self.replay.start(self.untimed, self.timed)

    def finish(self) -> float:
        return self.replay.finish()


def race(
    replays: Sequence[Runner], kept: int, settings: RaceSettings, waiting_for: Callable[[int], None]
) -> list[list[float]]:
    """Samples of every runner, in rounds order; shorter for those that dropped out.

    The first `kept` replays (the baseline's) never drop out. `waiting_for(i)` is called before replay i
    is waited for: when the device hangs or faults, that one is to blame.

    The next replay is enqueued before the last is waited for. So its clock starts on a busy device and
    holds no launch latency, which on an idle one is some 10 us, 1 % of a replay; and of two replays in
    flight the one waited for is the one that runs. A first replay, not counted, makes the device busy.
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
            if index != running:  # the same one cannot be in flight twice
                replays[index].start()
            sample = replays[running].finish()
            if counted:
                samples[running].append(sample)
            if index == running:
                replays[index].start()
            running, counted = index, True
        if round_index + 1 >= settings.race_after:
            active = _survivors(active, kept, samples, settings)
    waiting_for(running)
    samples[running].append(replays[running].finish())
    return samples


def steady_race(
    timed: Sequence[tuple[Replay, float]],
    kept: int,
    settings: RaceSettings,
    waiting_for: Callable[[int], None],
) -> list[list[float]]:
    """Samples as `race` gives them, of replays and the seconds that each takes, in steady state: each has
    turns that are long enough for clocks of its own.

    A GPU keeps its power cap by a control that swings, at first by several per cent, with a period of some
    950 ms (docs/decisions/0023-turns-outlast-the-power-controller.md). So a round takes `settings.steady_ms`
    for each group of up to four replays, and twice that for up to eight. They take their turns three times
    in that time: a sample is the mean of three turns at thirds of the swing, or of one that lasts all of it.
    """
    generator = random.Random(settings.seed)
    samples: list[list[float]] = [[] for _ in timed]
    active = list(range(len(timed)))
    in_doubt = settings.steady_groups[-1:] if settings.steady_doubt else ()
    for round_index, size in enumerate(settings.steady_groups + in_doubt):
        is_alone = len(active) <= kept + 1
        if round_index >= len(settings.steady_groups) and not _in_doubt(active, kept, samples, settings):
            break
        for group in _groups(generator.sample(active, len(active)), size):
            for index, sample in zip(
                group,
                _take_turns(timed, group, settings.steady_ms * ceil(len(group) / _SHARE), waiting_for),
                strict=True,
            ):
                samples[index].append(sample)
        active = [*range(kept), *_may_be_fastest(active[kept:], samples, settings)]
        if round_index + 1 < _FEWEST_STEADY:
            continue
        if settings.steady_doubt and not _ahead(active, kept, samples, settings.steady_doubt[0]):
            break  # the baseline is as fast as any
        if is_alone and not _in_doubt(active, kept, samples, settings):
            break  # the last round did not choose, and says how fast the one is that is left
    return samples


def _ahead(active: Sequence[int], kept: int, samples: list[list[float]], least: float) -> list[float]:
    """By how much those that are left are ahead of the baseline, where it is more than that."""
    baseline = fmean(map(fmean, samples[:kept]))
    ahead = (baseline / fmean(samples[index]) - 1 for index in active[kept:])
    return [one for one in ahead if one > least]


def _in_doubt(active: Sequence[int], kept: int, samples: list[list[float]], settings: RaceSettings) -> bool:
    """Whether one of those that are left may be faster than the baseline, and may not."""
    if not settings.steady_doubt:
        return False
    least, most = settings.steady_doubt
    return any(one < most for one in _ahead(active, kept, samples, least))


def _groups(order: Sequence[int], most: int) -> list[Sequence[int]]:
    """In as few groups as there can be, all about as large."""
    count = ceil(len(order) / most)
    cuts = [len(order) * number // count for number in range(count + 1)]
    return [order[first:last] for first, last in pairwise(cuts)]


def _take_turns(
    timed: Sequence[tuple[Replay, float]], group: Sequence[int], ms: float, waiting_for: Callable[[int], None]
) -> list[float]:
    """The mean of the turns of each of the group. The next turn is enqueued before the last is waited for."""
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


def _may_be_fastest(active: Sequence[int], samples: list[list[float]], settings: RaceSettings) -> list[int]:
    """Those that had all rounds and may be the fastest."""
    if not active:
        return []
    leader = min(active, key=lambda index: median(samples[index]))
    limit = settings.race_margin + settings.steady_spread / sqrt(len(samples[leader]))
    behind = {index: slower_by(samples[index], samples[leader]) for index in active}
    near = sorted((index for index in active if behind[index] <= limit), key=lambda index: behind[index])
    return sorted(near[: settings.steady_left])


def _survivors(active: list[int], kept: int, samples: list[list[float]], settings: RaceSettings) -> list[int]:
    """All of `active` but those clearly slower than the fastest. The one in flight lacks its last sample, so
    that two compare by the rounds that both have.
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
