"""From a record to a prepared launcher: the kernel is taken from the object store, never compiled here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch.operands import ALIGNMENT
from tunegemm.errors import ArtifactError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import is_torch
from tunegemm.generate.launching import Launcher, tma_takes
from tunegemm.store.checks import record_objection

if TYPE_CHECKING:
    from tunegemm.store.record import Record


@dataclass(frozen=True)
class Prepared:
    """A launcher for one problem on one device, and what it asks of its operands."""

    launch: Launcher | None
    """None where torch itself is the recorded winner."""
    tma: bool = False
    """Reads its operands through TMA: 16-byte addresses and strides."""
    packed: bool = False
    """Wants dense operands: a library's algorithm was chosen and timed for these leading dimensions."""
    ratio: float = 0.0
    """How many times as fast as torch: by the record, or as it is expected of a near hit."""
    record: Record | None = None
    """What it was prepared of; None in `TORCH`."""

    @property
    def address_bytes(self) -> int:
        """What addresses must be multiples of, beyond what the problem's alignment says of a and b."""
        return ALIGNMENT if self.tma or self.packed else 1


TORCH = Prepared(None)

_MAX_SERVED = 1024
#: The launchers served last: those of a weight's numbers of rows come back when records are read again.
_served: dict[tuple[Problem, Candidate, str, int, Path | None], Launcher] = {}
#: Launchers that cannot keep their kernel alone.
_kept: list[Launcher] = []


def prepare(record: Record, device: Device) -> Prepared:
    """The launcher of a record.

    Raises a TunegemmError, ValueError or RuntimeError that says why the kernel cannot run here: its
    family's packages are missing, its object is not in the store or was changed, or it fails to load.
    """
    problem, candidate = record.problem, record.candidate
    if is_torch(candidate):
        return TORCH
    family, path = families.get(candidate.family), find_object(record, device)
    key = (problem, candidate, device.spec, device.sm_count, path)
    if (launch := _served.get(key)) is None:
        if len(_served) >= _MAX_SERVED:
            _served.clear()
        launch = _served[key] = family.load(problem, candidate, device, path)
        # Captured graphs run the kernel, and the compiler's runtime unloads it with its last reference.
        getattr(launch, "keep", partial(_kept.append, launch))()
    # Where TMA does not take a problem's operands, its family copies them.
    return Prepared(launch, tma=family.tma and tma_takes(problem), packed=not family.compiled)


def find_object(record: Record, device: Device) -> Path | None:
    """The compiled object that the record's kernel is in; None for a library's, which needs none.

    Raises an ArtifactError that says why the kernel cannot run here.
    """
    problem, candidate = record.problem, record.candidate
    family = families.get(candidate.family)
    if (missing := family.unavailable(launching=True)) is not None:
        raise ArtifactError(missing)
    if wrong := record_objection(record, device):
        raise ArtifactError(f"its record cannot run here: {wrong}")
    if not family.compiled:
        return None
    from tunegemm.store import packs

    artifact = packs.find(family.kernel_key(problem, candidate, device))
    if artifact is None:
        raise ArtifactError("its compiled kernel is not in the object store")
    return artifact.path
