"""The stored best of one problem on one device, as a plain value."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from tunegemm.describe.device import Fingerprint, kernel_source_hash
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import is_torch
from tunegemm.measure.evidence import STEADY_POLICIES, Evidence, Standing, evidence_of, rank
from tunegemm.measure.outcome import Measurement

#: The same under its old name.
ALONE = STEADY_POLICIES


@dataclass(frozen=True)
class Record:
    """Which candidate to launch for a problem under a fingerprint, and the evidence for it."""

    problem: Problem
    candidate: Candidate
    fingerprint: Fingerprint
    """Device, driver, packages and kernel sources under which it was measured."""
    label: str
    """Short name for tables; the family's word for it."""
    median_us: float
    """Median device time of one product, microseconds."""
    baseline_median_us: float
    """torch.mm in the same interleave, microseconds."""
    ratio: float
    """Speed relative to torch.mm; above 1 is faster."""
    noise: float
    """A/A noise of the interleave, relative: differences below it are ties."""
    relative_error: float
    """||D - fp32 reference|| / ||fp32 reference||."""
    settled: bool
    """True when it won a final race; False when it is merely the best of an unfinished search."""
    measured_at: datetime
    """UTC."""
    kernel_source: str
    """Hash of the sources of the candidate's family when it was measured; empty for a library's kernels."""
    layer: str = ""
    """Where it was read from: system, pack, user or project; empty for a database that was opened by name."""


@dataclass(frozen=True)
class Entry:
    """One measurement of the history, with everything that the database has of it."""

    problem: Problem
    fingerprint: Fingerprint
    kernel_source: str
    """As in `Record`."""
    label: str
    policy: str
    """``screen`` while searching, ``race`` for a final race; of long turns with the chip to oneself ``heat``
    before it and ``alone``."""
    measurement: Measurement
    measured_at: datetime
    """UTC."""
    origin: str
    """Empty when measured into this database, else what it was merged or imported from."""
    confirmed: bool = False
    """Whether it won a final race and is the record."""

    @property
    def candidate(self) -> Candidate:
        return self.measurement.candidate

    @property
    def ratio(self) -> float:
        return self.measurement.ratio

    @property
    def evidence(self) -> Evidence:
        """How much it proves, for comparison with others: see `tunegemm.measure.evidence`."""
        return evidence_of(self.policy, confirmed=self.confirmed)

    @property
    def is_foreign(self) -> bool:
        return self.origin != ""

    @property
    def is_outdated(self) -> bool:
        return not self.confirmed and self.kernel_source != kernel_source_hash(self.candidate.family)

    @property
    def is_torch(self) -> bool:
        return is_torch(self.candidate)

    @property
    def rank(self) -> tuple[Standing, float]:
        """For sorting: the better evidence first, then the speed relative to torch.mm."""
        return rank(self)


@dataclass(frozen=True)
class Choice:
    """One line in the history of a problem's record."""

    chosen_at: datetime
    """When it became the record; UTC."""
    record: Record
