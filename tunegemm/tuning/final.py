"""The final race: what the record is chosen by, unless the GPU did other work meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import is_torch
from tunegemm.measure.outcome import Measurement, Outcome
from tunegemm.measure.settings import RaceSettings
from tunegemm.measure.statistics import final_choice, slowdown
from tunegemm.tuning.progress import TuneResult
from tunegemm.tuning.run import Run, label, speed

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
    if sign := disturbance(best, run.outcomes):
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


def disturbance(best: Measurement, outcomes: Iterable[Outcome]) -> str:
    """What of the race's baseline shows that others used the GPU; empty for nothing."""
    if best.noise > (_DISTURBED_IN_STEADY_STATE if best.is_steady else _DISTURBED):
        return f"torch.mm timed twice differs by {best.noise:.0%}"
    sound = (o for o in outcomes if isinstance(o, Measurement) and speed(o) is not None)
    slowed = slowdown(best, sound)
    return f"torch.mm takes {slowed:.1f} times as long as while searching" if slowed > _SLOWED else ""
