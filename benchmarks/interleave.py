"""Times any number of callables on one problem in one interleave, by the rules of `tunegemm.measure`.

Unlike the tuner's worker this runs in the caller's process and takes foreign callables: peers bring
their own caches and compiled code. The operands, the reference, the check and the order of rounds are
the worker's own.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tunegemm.describe.problem import Problem
from tunegemm.generate.launching import Launcher
from tunegemm.measure import operands as made
from tunegemm.measure.backend import CudaBackend, warm_us
from tunegemm.measure.operands import Operands, make_operands, tolerance
from tunegemm.measure.race import Replay, SteadyState, race
from tunegemm.measure.settings import RaceSettings
from tunegemm.measure.statistics import aa_noise

#: Takes a launcher's arguments and computes the product into out, or returns a new tensor with it.
Run = Callable[..., Any]

METHOD = (
    "each provider in one CUDA graph over operand sets that together pass 3x the L2; all providers in "
    "shuffled order in each round, after a second of dense work; where the chip has lowered its clocks then "
    "each has turn_ms to itself in a round, the second half of which is timed, elsewhere (turn_ms 0) one "
    "replay; median of the rounds, iqr_us their interquartile range, ratio the median over rounds of torch's "
    "sample to the provider's, ratio_shared the same of rounds of one replay each, in which all share the "
    "clocks of their mixture; operands uniform in [-1, 1); relative_error is ||D - fp32|| / ||fp32|| on the "
    "first set"
)

#: A chip that reaches its power cap first lowers its clocks too far, so the first round flatters the sides
#: that come early: for 196 products with the same kernel on both sides, the mean of the second side was 0.972
#: in three rounds of one order without this (H200, 2026-11-23).
_SETTLE_STEADY_S = 0.7

#: Name of the baseline's second capture.
_AGAIN = "(again)"


@dataclass(frozen=True)
class Timing:
    """One callable's samples, a round each."""

    samples_us: tuple[float, ...]
    relative_error: float

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    def ratio_to(self, baseline: Timing) -> float:
        """Speed relative to the baseline, round by round: rounds in which the clock moved count as others."""
        pairs = zip(baseline.samples_us, self.samples_us, strict=True)
        return statistics.median(b / own for b, own in pairs)

    @property
    def iqr_us(self) -> float:
        low, _, high = statistics.quantiles(self.samples_us, n=4)
        return high - low


@dataclass(frozen=True)
class Interleave:
    """The result for one problem."""

    timings: Mapping[str, Timing]
    skipped: Mapping[str, str]
    """Callables that failed or gave a wrong result, with the reason in one line."""
    noise: float
    """How far two captures of the baseline differed."""
    operand_sets: int
    products_per_replay: int
    rounds: int
    turn_ms: float = 0.0
    """How long each had the chip to itself in a round; 0 where the chip held its clocks."""
    shared: Mapping[str, Timing] = field(default_factory=dict)
    """For timing in turns: the result of one replay each before, at shared clocks."""


def interleave(
    problem: Problem, runs: Mapping[str, Run], backend: CudaBackend, *, l2_bytes: int, rounds: int = 15,
    min_replay_ms: float = 1.0, settle_s: float = 1.0, turn_ms: float = 160.0, turns: int = 7,
    settle_steady_s: float = _SETTLE_STEADY_S, seed: int = 0, tolerances: Mapping[str, float] | None = None,
) -> Interleave:  # fmt: skip
    """Checks every callable against fp32, captures the correct ones, and times them together.

    The first of `runs` is the baseline: it is captured twice, which yields the noise. A replay runs all
    operand sets as often as the baseline needs for `min_replay_ms`. If the chip has then lowered its clocks,
    a round gives each `turn_ms` alone, `turns` times (docs/decisions/0012); turn_ms 0: never. `backend` is
    open. Raises RuntimeError if the baseline itself fails.
    """
    count = made.count_sets(problem, l2_bytes, backend.free_bytes())
    sets = [make_operands(problem, backend.torch_device, seed + index) for index in range(count)]
    wanted = made.expected(problem, sets[0])
    baseline = next(iter(runs))
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for name, run in runs.items():
        limit = (tolerances or {}).get(name, tolerance(problem))
        verdict = _verdict(limit, run, sets[0], wanted, backend)
        if isinstance(verdict, str):
            skipped[name] = verdict
        else:
            errors[name] = verdict
    if baseline in skipped:
        raise RuntimeError(f"the baseline {baseline} failed on {problem}: {skipped[baseline]}")
    del wanted
    launchers = {name: _holding(runs[name], count) for name in errors}
    passes = max(1, math.ceil(min_replay_ms * 1e3 / (warm_us(backend, launchers[baseline], sets) * count)))
    replays = {_AGAIN: backend.capture(launchers[baseline], sets, passes)}
    for name, launcher in launchers.items():
        try:
            replays[name] = backend.capture(launcher, sets, passes)
        except Exception as error:  # foreign code may raise anything; the others still run
            skipped[name] = f"no CUDA graph: {one_line(error)}"
    if baseline in skipped:
        raise RuntimeError(f"the baseline {baseline} failed on {problem}: {skipped[baseline]}")

    # The clock falls during a second of dense work, until the chip is at its power cap; earlier samples do
    # not represent a busy program. Without this, torch.mm's own samples at 4096^3 had an interquartile range
    # of 13 % (results/h200/peers.json); it is not shown yet that this mends it.
    def settle(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            replays[baseline].start()
            replays[baseline].finish()

    settle(settle_s)
    replays[baseline].start()
    throttled = bool(backend.telemetry().get("throttle_reasons"))
    replays[baseline].finish()

    def timed(runners: Sequence[Replay | SteadyState], rounds: int) -> tuple[dict[str, Timing], float]:
        # Nobody drops out: the slowest peer is timed as often as the fastest.
        settings = RaceSettings(rounds, min_replay_ms, race_after=rounds + 1, race_margin=math.inf, seed=seed)
        samples = dict(zip(replays, race(runners, len(runners), settings, lambda _: None), strict=True))
        timings = {name: Timing(tuple(samples[name]), errors[name]) for name in runs if name in samples}
        return timings, aa_noise(samples[_AGAIN], samples[baseline])

    products = passes * count
    shared, noise = timed(list(replays.values()), rounds)
    if not throttled or not turn_ms:
        return Interleave(shared, skipped, noise, count, products, rounds)
    names = [baseline if name == _AGAIN else name for name in replays]
    lengths = [shared[name].median_us * products * 1e-6 for name in names]
    lasting = [SteadyState.of(*pair, turn_ms) for pair in zip(replays.values(), lengths, strict=True)]
    settle(settle_steady_s)
    steady, noise = timed(lasting, turns)
    return Interleave(steady, skipped, noise, count, products, turns, turn_ms, shared)


def _verdict(
    limit: float, run: Run, operands: Operands, wanted: torch.Tensor, backend: CudaBackend
) -> float | str:
    """The relative error of a correct result, or the reason for a failure. This call is also the warm-up."""
    made.restore(operands)
    results: list[torch.Tensor | None] = []
    try:
        backend.launch(lambda *arguments: results.append(run(*arguments)), operands)
    except Exception as error:  # foreign code may raise anything; the others still run
        return one_line(error)
    if isinstance(results[0], torch.Tensor):
        operands = dataclasses.replace(operands, out=results[0])
    result = made.check(operands, wanted)
    return result.objection(limit) or result.relative_error


def _holding(run: Run, count: int) -> Launcher:
    """A launcher that keeps the last results of an allocating callable.

    If they were freed immediately, the next product would go to the same place, still in the L2, whereas the
    other providers write to another operand set's output.
    """
    held: deque[Any] = deque(maxlen=count)

    def launch(*operands: Any) -> None:
        held.append(run(*operands))

    return launch


def one_line(error: BaseException) -> str:
    """The error's class and first line, cut to the width of a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]
