"""The one type of a stored result: a measurement of a candidate, with where and how it was taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import nan
from typing import Any

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import is_torch
from tunegemm.generate.families import kernel_source_hash
from tunegemm.measure.evidence import FINAL, Evidence, evidence_of
from tunegemm.measure.outcome import Measurement

#: Where a narrow reading leaves the time out.
UNKNOWN_TIME = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Record:
    """A stored measurement, usually the best one of its problem under its fingerprint.

    Dispatch reads neither label nor times, and samples are read only on request: a field that was not read
    has its default.
    """

    problem: Problem
    candidate: Candidate
    fingerprint: Fingerprint
    """Device, driver and packages under which it was measured."""
    label: str = ""
    """Short name for tables, as the family writes it."""
    median_us: float = nan
    """Median device time of one product, microseconds."""
    baseline_median_us: float = nan
    """torch.mm in the same interleave, microseconds."""
    ratio: float = nan
    """Speed relative to torch.mm; above 1 is faster."""
    noise: float = nan
    """A/A noise of the interleave, relative: differences below it are ties."""
    relative_error: float = nan
    """||D - fp32 reference|| / ||fp32 reference||."""
    confirmed: bool = False
    """Whether it won a final race and is, or was, the record."""
    measured_at: datetime = UNKNOWN_TIME
    """UTC."""
    kernel_source: str = ""
    """Hash of the sources of the candidate's family when it was measured; empty for a library's kernels."""
    layer: str = ""
    """Layer it was read from: system, pack, user or project; empty for a database opened by name."""
    method: str = FINAL
    """Measurement method: one of `tunegemm.measure.evidence.METHODS`."""
    origin: str = ""
    """Source of an imported record; empty if it was measured into the database that it was read from."""
    samples_us: tuple[float, ...] = ()
    """Device time of one product per round, microseconds."""
    baseline_us: tuple[float, ...] = ()
    """torch.mm in the same rounds, in the same order."""
    telemetry: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """As `Measurement.telemetry`: clocks, power, temperature, throttle reasons, rounds."""
    chosen_at: datetime = UNKNOWN_TIME
    """When it became the record, UTC."""

    @property
    def measurement(self) -> Measurement:
        """Its samples as measured, if they were read."""
        error, noise = self.relative_error, self.noise
        return Measurement(
            self.candidate, self.samples_us, self.baseline_us, error, noise, dict(self.telemetry)
        )

    @property
    def evidence(self) -> Evidence:
        """The strength of its evidence."""
        return evidence_of(self.method, confirmed=self.confirmed)

    @property
    def is_foreign(self) -> bool:
        """Whether it was imported or merged."""
        return self.origin != ""

    @property
    def is_outdated(self) -> bool:
        """Whether other kernel sources than this program's made it, and it is not confirmed."""
        return not self.confirmed and self.kernel_source != kernel_source_hash(self.candidate.family)

    @property
    def is_torch(self) -> bool:
        """Whether the candidate is torch.mm itself."""
        return is_torch(self.candidate)

    @property
    def replayed(self) -> bool:
        """Whether its times come from a recording."""
        return self.telemetry.get("source") == "replayed"
