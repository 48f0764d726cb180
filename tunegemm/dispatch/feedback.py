"""Measures predictions: races the kernels that dispatch would launch against torch.mm.

The winner becomes the record, and nothing else is stored: a record precedes any prediction, and if it is
torch.mm, dispatch falls back from then on. `tunegemm verify --predicted` and mode `online` load this module,
and with it the tuner, when there is something to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tunegemm.choose.neighbours import Offer
from tunegemm.choose.predictions import outlook
from tunegemm.choose.selection import select
from tunegemm.choose.snapshot import Snapshot, read_snapshot
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.errors import MeasureError
from tunegemm.generate.cublaslt import is_torch
from tunegemm.measure.outcome import Measurement
from tunegemm.store import Database
from tunegemm.tuning.progress import TuneResult
from tunegemm.tuning.run import label
from tunegemm.tuning.tuner import Tuner


@dataclass(frozen=True)
class Feedback:
    """What became of a product's prediction."""

    predicted: Offer
    """The kernel with the highest predicted speed."""
    result: TuneResult

    @property
    def measured(self) -> Measurement | None:
        """What the predicted kernel measured; None where it failed."""
        result = {
            outcome.candidate: outcome for outcome in self.result.outcomes if isinstance(outcome, Measurement)
        }
        return result.get(self.predicted.record.candidate)

    def __str__(self) -> str:
        """One line for people."""
        ahead, best = self.predicted, self.result.best
        text = f"{self.result.problem}: {ahead.record.label} was predicted at {ahead.expected:.3f} x torch.mm"
        if best is None:
            return f"{text}; nothing could be measured ({self.result.note})"
        text += " and failed" if self.measured is None else f" and measured at {self.measured.ratio:.3f}"
        if best.candidate == ahead.record.candidate:
            outcome = "won, and is the record"
        elif is_torch(best.candidate):
            outcome = "lost, and torch.mm is the record"
        else:
            name = self.result.labels[best.candidate.digest]
            outcome = f"the record is {name}, also predicted, and measured at {best.ratio:.3f}"
        return f"{text}: {self.result.note or outcome}"


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


def measure(tuner: Tuner, problem: Problem, options: Sequence[Offer]) -> Feedback:
    """Race the predicted kernels of a problem, the best first, with torch.mm; the winner becomes the record.

    Kernels that neither ship nor are in the object store are compiled. Raises DeviceError if nothing can be
    timed, MeasureError if none of the kernels can run.
    """
    expected = {option.record.candidate: option.expected or 0.0 for option in options}
    runs = [candidate for candidate in expected if tuner.kernels.is_feasible(problem, candidate)]
    if not runs:  # a race of torch.mm alone would make it the record
        raise MeasureError(
            f"{problem}: {options[0].record.label} was predicted but cannot run here; leave this shape out"
        )
    return Feedback(options[0], tuner.race(problem, runs, expected=expected))


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
                return measure(tuner, problem, options).result
            return tuner.tune(problem, budget_seconds=seconds)

        yield measure_unless_known
