"""Validates records from elsewhere: their figures must be plausible and their family able to make the kernel.

Exchange files, merged databases, packs and the shipped records all pass these checks. The module does not
load SQLAlchemy, because dispatch calls it, too.
"""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING

from tunegemm.describe.architectures import ARCHITECTURES, PARTS, Part, part_named
from tunegemm.describe.device import Device, Fingerprint, device_from_part
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import BadValueError, TunegemmError, one_line
from tunegemm.generate import families
from tunegemm.generate.cublaslt import is_torch
from tunegemm.measure.operands import tolerance
from tunegemm.untrusted import shown

if TYPE_CHECKING:
    from tunegemm.store.record import Record

#: Plausible times of one product, us. Below a nanosecond or above an hour, the measurement is broken.
SHORTEST_US, LONGEST_US = 1e-3, 3.6e9

#: How far a chip can exceed the datasheet's peaks: its highest clock (H200: 1980 MHz) over the datasheet's
#: (1830 MHz). The fastest of 103 shipped records reaches 0.94 of its roofline.
_ABOVE_DATASHEET = 1.1


def check_roofline(problem: Problem, fingerprint: Fingerprint, *medians_us: float) -> None:
    """Raises BadValueError for times that the named device cannot reach. Unknown devices pass."""
    name = fingerprint.device_name
    part = next((part for part in PARTS.values() if name.startswith(part.device_name)), None)
    if part is None:
        return
    floor_us = device_from_part(f"model:{name}", part, fingerprint).roofline_us(problem)
    if min(medians_us) < floor_us / _ABOVE_DATASHEET:
        raise BadValueError(
            f"{min(medians_us):.4g} us for {problem} beats the roofline of {part.device_name}, "
            f"{floor_us:.4g} us"
        )


#: Plausible speeds relative to torch.mm. Shipped records lie between 0.96 and 5.1; tuning does not wait for a
#: kernel that takes 50 times as long as torch.mm.
_LEAST_RATIO, _MOST_RATIO = 1e-3, 1e3
#: How far an error may exceed today's tolerance: older releases had another.
_OLDER = 2.0


def objection(
    problem: Problem,
    candidate: Candidate,
    device: Device | Fingerprint,
    *,
    ratio: float = nan,
    relative_error: float = nan,
) -> str:
    """The reason not to launch a record from elsewhere, as one clause; empty if it may run.

    All records from elsewhere pass this one check: their figures, if known, must be those of a correct
    kernel's measurement, and their family must be able to make the kernel on that device. Any error that a
    family raises is a reason, too. device: a fingerprint stands for the device of its datasheet.
    """
    if ratio == ratio and not _LEAST_RATIO <= ratio <= _MOST_RATIO:
        return f"ratio {shown(ratio)} is outside {_LEAST_RATIO:g} to {_MOST_RATIO:g}"
    most = _OLDER * tolerance(problem)
    if relative_error == relative_error and not 0 <= relative_error <= most:
        return f"relative error {shown(relative_error)} is outside 0 to {most:.3g}: its kernel is wrong"
    if is_torch(candidate):
        return ""
    try:
        if wrong := families.wrong_parameter(candidate, listed=True):
            return wrong
        if isinstance(device, Fingerprint):
            if (known := device_of(device)) is None:
                return ""
            device = known
        family = families.get(candidate.family)
        if not (verdict := family.check(problem, candidate, device)).runs:
            return str(verdict)
        if family.compiled:
            family.kernel_key(problem, candidate, device)
        family.workspace(problem, candidate, device)
    except TunegemmError as error:
        return one_line(error)
    except Exception as error:  # a foreign candidate or another package's family may raise any
        return f"{candidate.family} cannot read it ({type(error).__name__}: {one_line(error)})"
    return ""


def record_objection(record: Record, device: Device | None = None) -> str:
    """As `objection`, for a record; device: by default the one that measured it."""
    figures = {"ratio": record.ratio, "relative_error": record.relative_error}
    return objection(record.problem, record.candidate, device or record.fingerprint, **figures)


def device_of(fingerprint: Fingerprint) -> Device | None:
    """The measured device, as far as a kernel key needs it; it need not be here. None for an unknown
    architecture.
    """
    part = part_named(fingerprint.device_name)
    if part is None:
        names = {".".join(map(str, capability)): capability for capability in ARCHITECTURES}
        if (capability := names.get(fingerprint.capability)) is None:
            return None
        part = Part(fingerprint.device_name, capability, fingerprint.sm_count, 0.0, 0.0, 0, 0)
    return device_from_part(f"model:{fingerprint.device_name}", part, fingerprint)
