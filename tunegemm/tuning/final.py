"""The final race: who is in it, and what the record is chosen by, unless the GPU did other work meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM, is_torch
from tunegemm.measure.outcome import Measurement, Outcome
from tunegemm.measure.settings import RaceSettings
from tunegemm.measure.statistics import final_choice, slowdown
from tunegemm.search.efforts import Effort, profile
from tunegemm.tuning.progress import TuneResult
from tunegemm.tuning.run import Run, label, speed

Measured = Mapping[Candidate, Measurement]


_LAUNCHES_PER_FINALIST = 2


def finalists(
    screened: Measured, effort: Effort, at_cap: Mapping[Candidate, float] | None = None
) -> list[Candidate]:
    """Those of which most is expected, those that took the least time, the library's best, and torch.mm.

    at_cap: for a GPU at its power cap, what is expected there of each of our own candidates
    (`tunegemm.model.rank.steady_ratios`). The fastest by an interleaved screen need not be the fastest in
    use: all share the clocks that their mixture leaves, so that a candidate which draws less power gives what
    it gains to the others (docs/decisions/0012-steady-state-at-the-power-cap.md).

    By time, too, since for some shapes torch.mm has two speeds, some 10 % apart, and keeps one for most
    interleaves throughout: a candidate that met the slow one leads by ratio
    (H200, 2026-11-22).
    """
    numbers = profile(effort)
    places = numbers.interleaved if at_cap is None else numbers.steady
    own, library = _by_ratio(screened)
    if at_cap is None:
        expected, quickest = own, sorted(own, key=lambda m: m.median_us)
    else:
        expected, quickest = sorted(own, key=lambda m: -at_cap[m.candidate]), own
    chosen = [*_of_several_kernels(expected, places.own), *_of_several_kernels(quickest, places.quickest)]
    algorithms = [candidate for candidate in library if not is_torch(candidate)][: places.library]
    # torch.mm, too, where only families without it were asked for: it is the record when all of them lose.
    return [*dict.fromkeys([*chosen, *algorithms]), TORCH_MM] if screened else []


def _of_several_kernels(measurements: Iterable[Measurement], count: int) -> list[Candidate]:
    """The first candidates, but few launches of one kernel.

    They are often all in front together and would leave no room for others, which the screen's few rounds
    in other moments of clock and power may have put too low.
    """
    chosen: list[Candidate] = []
    launches: Counter[Candidate] = Counter()
    for candidate in (measurement.candidate for measurement in measurements):
        launches[candidate.kernel] += 1
        if len(chosen) < count and launches[candidate.kernel] <= _LAUNCHES_PER_FINALIST:
            chosen.append(candidate)
    return chosen


def _by_ratio(measured: Measured) -> tuple[list[Measurement], list[Candidate]]:
    """Our own measurements and the library's candidates, the fastest first."""
    fastest_first = sorted(measured.values(), key=lambda m: -m.ratio)
    own = [m for m in fastest_first if m.candidate.family != TORCH_MM.family]
    return own, [m.candidate for m in fastest_first if m.candidate.family == TORCH_MM.family]


#: Noise of a final race above which another process used the GPU. Of 60 races on H200s without one
#: (2026-11-21) the noisiest had 0.4 %; beside one 70 and 144 % were seen, with a winner at 1.5 of torch.mm.
_DISTURBED = 0.05
#: Steady-state rounds are few, and clocks move between them: with the GPU to itself the noisiest of 36 races
#: had 3.4 % (H200, 2026-11-22).
_DISTURBED_IN_STEADY_STATE = 0.1
#: Likewise of torch.mm's time relative to that while searching. 52 undisturbed races had 1.22 and less (H200,
#: 2026-11-22), most of all large products, whose first
#: interleaves ended before the power cap was felt: clocks did not settle first then. Beside another process
#: 1.38, 3.1 and 3.4 were seen, that of 3.1 with a noise of 0.3 % and a winner at 3.2.
_SLOWED = 1.3


def race(run: Run, runners: Sequence[Candidate], settings: RaceSettings) -> TuneResult:
    """The finalists once more, in one interleave with more rounds; the winner becomes the record."""
    raced = run.evaluate(runners, settings, stage="final")
    run.chosen = confirm(run, [outcome for outcome in raced if isinstance(outcome, Measurement)])
    run.report(stage="done")
    return run.result(run.chosen, note=run.note)


def confirm(run: Run, raced: Sequence[Measurement]) -> Measurement | None:
    """The winner of a final race, which becomes the confirmed record, by the rounds that did not choose it.

    Where the GPU did other work, what was measured is kept, and the note says why nothing is confirmed.
    """
    # What dropped out was clearly slower, if not by the ratio of the few rounds that it was in. A replayed
    # measurement has the rounds of its own recording.
    stayed = [one for one in raced if len(one.samples_us) >= one.telemetry.get("of_rounds", 0)]
    # Nothing that the race shows to be slower than torch.mm, by however little, takes its place.
    stayed = [one for one in stayed if (speed(one) or 0.0) >= 1 or is_torch(one.candidate)]
    if not stayed:
        run.note = run.note or "nothing could be measured; see the failures"
        return None
    best = final_choice(run.problem, stayed)
    if run.problem.groups and not measured_kernels(run.outcomes):
        # A record of torch's would take the place of the table that ships, beside which nothing was measured.
        run.note = f"{run.note}; " * bool(run.note) + "no kernel was measured, so no record is confirmed"
    elif sign := disturbance(best, run.outcomes):
        run.note = (
            f"{sign}: {run.device.spec} does other work, too, so no record is confirmed; run the same "
            "command again when it is free (nvidia-smi lists who uses it)"
        )
    elif run.database is not None:
        run.database.confirm(
            run.problem,
            run.device,
            best,
            resources=run.resources.get(best.candidate),
            label=label(best.candidate),
        )
    return best


def measured_kernels(outcomes: Iterable[Outcome]) -> bool:
    """Whether a kernel of ours was measured."""
    return any(isinstance(one, Measurement) and one.candidate.family != TORCH_MM.family for one in outcomes)


def disturbance(best: Measurement, outcomes: Iterable[Outcome]) -> str:
    """What of the race's baseline shows that others used the GPU; empty for nothing."""
    if best.noise > (_DISTURBED_IN_STEADY_STATE if best.is_steady else _DISTURBED):
        return f"torch.mm timed twice differs by {best.noise:.0%}"
    sound = (o for o in outcomes if isinstance(o, Measurement) and speed(o) is not None)
    slowed = slowdown(best, sound)
    return f"torch.mm takes {slowed:.1f} times as long as while searching" if slowed > _SLOWED else ""
