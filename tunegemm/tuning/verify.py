"""Races stored records again under the current software, and predictions for the first time.

`verify` races the stored top five of a record. `measure` races the kernels that dispatch would launch by
prediction against torch.mm. The winner becomes the record, and nothing else is stored: a record precedes any
prediction, and if it is torch.mm, dispatch falls back from then on. Mode `online` loads this module, and with
it the tuner, when there is something to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from tunegemm.choose.neighbours import Offer
from tunegemm.choose.predictions import outlook
from tunegemm.choose.selection import select
from tunegemm.choose.snapshot import Snapshot, read_snapshot
from tunegemm.describe.device import Device, Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.errors import MeasureError
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.evidence import leaders
from tunegemm.store import Database
from tunegemm.store.history import TOP
from tunegemm.store.record import Record
from tunegemm.store.validity import Grade, Judgement, judge_stored
from tunegemm.tuning.progress import TuneResult
from tunegemm.tuning.run import label
from tunegemm.tuning.tuner import Tuner


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


def verify(tuner: Tuner, record: Record, top: int = TOP) -> TuneResult:
    """Race a record against its stored rivals; the winner is the record under this device's fingerprint.

    Kernels that are not in the object store are compiled. Raises DeviceError if nothing can be timed.
    """
    stored: Sequence[Record] = tuner.database.measurements(record.problem) if tuner.database else ()
    same = [e for e in stored if e.fingerprint == record.fingerprint]
    rivals = leaders(e for e in same if judge_stored(e, tuner.device.fingerprint).usable)[:top]
    # Each candidate in its family's current form, unless the family cannot read it.
    candidates = (
        candidate if candidate.family == TORCH_MM.family else tuner.kernels.usable(candidate)
        for candidate in dict.fromkeys([record.candidate, *(rival.candidate for rival in rivals)])
    )  # fmt: skip
    return tuner.race(record.problem, [candidate for candidate in candidates if candidate is not None])


def predictions(snapshot: Snapshot, problem: Problem, device: Device) -> tuple[Sequence[Offer], str]:
    """The kernels that dispatch would launch by prediction; if there are none, the reason in one clause.

    Includes kernels that dispatch launched earlier, if the later race ended early or ran beside other work
    and its record is unconfirmed.
    """
    selection = select(snapshot, problem, device)
    if selection.outcome == "predicted" and selection.offers:
        return selection.offers, ""
    if selection.outcome != "hit":
        return (), f"not predicted: {selection.why}"
    (record,) = selection.options
    options = () if record.confirmed else outlook(problem, device).options
    if options and (record.is_torch or record.candidate in [option.record.candidate for option in options]):
        return options, ""
    return (), f"not predicted: it has a record, {label(record.candidate)}"


def measure(tuner: Tuner, problem: Problem, options: Sequence[Offer]) -> TuneResult:
    """Race the predicted kernels of a problem, the best first, with torch.mm; the winner becomes the record.

    Kernels that neither ship nor are in the object store are compiled. Raises DeviceError if nothing can be
    timed, MeasureError if none of the kernels can run.
    """
    predicted = (option.record.candidate for option in options)
    runs = [candidate for candidate in predicted if tuner.kernels.is_feasible(problem, candidate)]
    if not runs:  # a race of torch.mm alone would make it the record
        raise MeasureError(
            f"{problem}: {options[0].record.label} was predicted but cannot run here; leave this shape out"
        )
    return tuner.race(problem, runs)


Measure = Callable[[Problem, Sequence[Offer], float], TuneResult | None]
"""Measures the predictions for a problem, or tunes a problem without any, within so many seconds; None if it
has a record by now."""


@contextmanager
def measuring(device: Device) -> Iterator[Measure]:
    """A tuner of the device with the user's database, as long as there is something to measure."""
    with Database.open() as database, Tuner(device, database) as tuner:

        def measure_unless_known(
            problem: Problem, options: Sequence[Offer], seconds: float
        ) -> TuneResult | None:
            if read_snapshot().find(problem, device.fingerprint) is not None:
                return None
            if options:
                return measure(tuner, problem, options)
            return tuner.tune(problem, budget_seconds=seconds)

        yield measure_unless_known
