"""Records of our own kernels in scratch databases, where results or host time are looked at and not speed."""

from __future__ import annotations

from dataclasses import replace

from tunegemm.describe.problem import Problem
from tunegemm.generate.cublaslt import is_torch
from tunegemm.measure.outcome import Measurement
from tunegemm.store import Database
from tunegemm.tuning.tuner import Tuner

#: The stored figures of a kernel that is slower than torch.mm, so that dispatch serves it anyway.
_ENOUGH = 1.01


def record_own(
    database: Database, tuner: Tuner, problem: Problem, trials: int, following: Problem | None = None
) -> bool:
    """Tune a problem and make the tuner's fastest kernel its record, however fast. Returns whether there is
    one.

    A winner that gains less than dispatch requires, for example beside other work on the GPU, is stored with
    a sufficient gain.

    database: a scratch one, because the stored ratio of a losing kernel is made up. following: as of
        `Tuner.tune`.
    """
    result = tuner.tune(problem, trials=trials, following=following)
    # Not the tuning's best: a race decided by noise leaves the record to torch.
    record = database.best(problem, tuner.device.fingerprint)
    if record is not None and not is_torch(record.candidate) and record.ratio >= _ENOUGH:
        return True
    measured = [o for o in result.outcomes if isinstance(o, Measurement) and not is_torch(o.candidate)]
    if not measured:
        return False
    best = min(measured, key=lambda item: item.median_us)
    served = replace(best, baseline_us=tuple(_ENOUGH * us for us in best.samples_us))
    database.confirm(problem, tuner.device, served, label=result.labels.get(best.candidate.digest, ""))
    return True
