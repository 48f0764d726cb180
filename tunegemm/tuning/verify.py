"""Re-verification: races the stored top five of a record again under the current software."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.evidence import STEADY_METHODS, Evidence, leaders
from tunegemm.measure.outcome import Measurement
from tunegemm.measure.statistics import tie
from tunegemm.store.history import TOP
from tunegemm.store.record import Record
from tunegemm.store.validity import Grade, Judgement, judge_stored
from tunegemm.tuning.progress import TuneResult
from tunegemm.tuning.tuner import Tuner


@dataclass(frozen=True)
class Move:
    """One candidate then and now, by its speed relative to torch.mm."""

    candidate: Candidate
    label: str
    before: float | None
    """None if the database has no time of it."""
    after: float | None
    """None if it failed or cannot run here; `reason` says why."""
    moved: bool
    """Whether the two ratios differ by more than the noise; False if they do not compare."""
    reason: str = ""
    """Why there is no time now, or why the two do not compare."""


@dataclass(frozen=True)
class Verification:
    """The result of verifying one record."""

    record: Record
    """The record before the race."""
    judgement: Judgement
    """What it was worth before."""
    result: TuneResult
    moves: tuple[Move, ...]

    @property
    def replaced(self) -> bool:
        """Whether another candidate is the record now."""
        return self.result.best is not None and self.result.best.candidate != self.record.candidate


def due(
    records: Iterable[Record], fingerprint: Fingerprint, *, everything: bool = False
) -> list[tuple[Judgement, Record]]:
    """Return each problem's best record, if the device uses it but it comes from other software.

    everything: include records of the current software. Narrower layers come last in `records`, and win.
    """
    best: dict[Problem, tuple[Judgement, Record]] = {}
    for record in records:
        judgement = judge_stored(record, fingerprint)
        known = best.get(record.problem)
        if judgement.usable and (known is None or judgement.grade >= known[0].grade):
            best[record.problem] = judgement, record
    return [best[problem] for problem in sorted(best) if everything or best[problem][0].grade is Grade.VERIFY]


def verify(tuner: Tuner, record: Record, judgement: Judgement, top: int = TOP) -> Verification:
    """Race a record against its stored rivals; the winner is the record under this device's fingerprint.

    Kernels that are not in the object store are compiled. Raises DeviceError if nothing can be timed.
    """
    stored: Sequence[Record] = tuner.database.measurements(record.problem) if tuner.database else ()
    same = [e for e in stored if e.fingerprint == record.fingerprint]
    rivals = leaders(e for e in same if judge_stored(e, tuner.device.fingerprint).usable)[:top]
    by_candidate = {rival.candidate: rival for rival in rivals}
    # Each candidate in its family's current form; None if the family cannot read it.
    candidates = {
        candidate: candidate if candidate.family == TORCH_MM.family else tuner.kernels.usable(candidate)
        for candidate in (record.candidate, *by_candidate)
    }
    result = tuner.race(record.problem, [c for c in candidates.values() if c is not None])
    outcomes = {outcome.candidate: outcome for outcome in result.outcomes}
    moves = []
    for candidate, now in candidates.items():
        before, outcome = by_candidate.get(candidate, record), outcomes.get(now) if now else None
        if isinstance(outcome, Measurement):
            alike = is_alike(before, outcome)
            moved = alike and not tie(before, outcome)
            reason = "" if alike else "timed in another way then"
            moves.append(Move(candidate, before.label, before.ratio, outcome.ratio, moved, reason))
        else:
            reason = f"{outcome.stage}: {outcome.reason}" if outcome else "not feasible here"
            moves.append(Move(candidate, before.label, before.ratio, None, True, reason))
    return Verification(record, judgement, result, tuple(moves))


def is_alike(before: Record, outcome: Measurement) -> bool:
    """Whether a stored result is also of a final race with the same timing: only then do ratios compare."""
    if not before.samples_us:  # a shipped record, which has no more to say
        return before.confirmed
    was_steady = before.method in STEADY_METHODS
    return before.evidence in (Evidence.RACE, Evidence.FINAL) and was_steady == outcome.is_steady
