"""Whether what a record from elsewhere says can be: its figures, and that its family can make its kernel.

Exchange files, merged databases, packs and the shipped records all come through here. No SQLAlchemy is
loaded: dispatch asks, too.
"""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING

from tunegemm.describe.architectures import ARCHITECTURES, PARTS, Part, part_named
from tunegemm.describe.device import Device, Fingerprint, device_from_part
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import BadValueError, TunegemmError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import is_torch
from tunegemm.measure.operands import tolerance
from tunegemm.untrusted import printable, shown

if TYPE_CHECKING:
    from tunegemm.store.record import Record

#: Times of one product, us: under a nanosecond or over an hour nothing was measured.
SHORTEST_US, LONGEST_US = 1e-3, 3.6e9

#: How far above the datasheet's peaks a chip can be: its highest clock (H200: 1980 MHz) over that of the
#: datasheet (1830 MHz). Of 103 shipped records the fastest is at 0.94 of its roofline.
_ABOVE_DATASHEET = 1.1


def check_roofline(problem: Problem, fingerprint: Fingerprint, *medians_us: float) -> None:
    """Raises BadValueError for times that the named device cannot reach. One that is not known passes."""
    name = fingerprint.device_name
    part = next((part for part in PARTS.values() if name.startswith(part.device_name)), None)
    if part is None:
        return
    floor_us = device_from_part(f"model:{name}", part, fingerprint).roofline_us(problem)
    if min(medians_us) < floor_us / _ABOVE_DATASHEET:
        raise BadValueError(
            f"{min(medians_us):.4g} us for {problem} is beyond the roofline of {part.device_name}, "
            f"{floor_us:.4g} us"
        )


#: Times as fast as torch.mm: shipped records are at 0.96 to 5.1, and what takes 50 times as long
#: as torch.mm is not waited for.
_LEAST_RATIO, _MOST_RATIO = 1e-3, 1e3
#: How far above the tolerance of today an error may be: that of older releases was another.
_OLDER = 2.0


def objection(
    problem: Problem,
    candidate: Candidate,
    device: Device | Fingerprint,
    *,
    ratio: float = nan,
    relative_error: float = nan,
) -> str:
    """Why what a record says is not to be launched, in one clause; empty where it may be.

    The one check of records from elsewhere, whichever way they come: its figures, where they are known, are
    those of a measurement of a right kernel, and its family can make the kernel on that device. Whatever a
    family raises is a reason, too. device: one that is only named is as the datasheet says.
    """
    if ratio == ratio and not _LEAST_RATIO <= ratio <= _MOST_RATIO:
        return f"ratio {shown(ratio)} is not one of {_LEAST_RATIO:g} to {_MOST_RATIO:g}"
    most = _OLDER * tolerance(problem)
    if relative_error == relative_error and not 0 <= relative_error <= most:
        return f"relative error {shown(relative_error)} is not one of 0 to {most:.3g}: its kernel is wrong"
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
    except Exception as error:  # of a foreign candidate, or of another package's family
        return f"{candidate.family} cannot read it ({type(error).__name__}: {one_line(error)})"
    return ""


def record_objection(record: Record, device: Device | None = None) -> str:
    """The same of a record, on this device or else on the one that it was measured on."""
    figures = {"ratio": record.ratio, "relative_error": record.relative_error}
    return objection(record.problem, record.candidate, device or record.fingerprint, **figures)


def device_of(fingerprint: Fingerprint) -> Device | None:
    """The device that was measured, as far as a kernel key asks: it need not be here. None for one of an
    architecture that is not known.
    """
    part = part_named(fingerprint.device_name)
    if part is None:
        names = {".".join(map(str, capability)): capability for capability in ARCHITECTURES}
        if (capability := names.get(fingerprint.capability)) is None:
            return None
        part = Part(fingerprint.device_name, capability, fingerprint.sm_count, 0.0, 0.0, 0, 0)
    return device_from_part(f"model:{fingerprint.device_name}", part, fingerprint)


def one_line(error: Exception) -> str:
    """What is wrong, as a printable line."""
    return printable(" ".join(str(error).split()), 300)
