"""The roofline of a problem and of one candidate for it, and what dispatch would do.

Arithmetic intensity counts twice: *globally*, every operand once through device memory, and *per tile*, what
a block must bring into shared memory for the flops of one step of k. The second bounds a kernel without an
L2; the truth lies between the two. See S. Williams et al., "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Literal

from tunegemm import families
from tunegemm.database import Database
from tunegemm.database import Record as StoredRecord
from tunegemm.database.layers import read_records
from tunegemm.device import Device
from tunegemm.dispatch.snapshot import Snapshot
from tunegemm.errors import DatabaseError, DeviceError
from tunegemm.families.tiles import tile_count
from tunegemm.problem import DTYPE_BYTES, Problem
from tunegemm.space import Candidate

Bound = Literal["compute", "memory"]


@dataclass(frozen=True)
class TileFacts:
    """One candidate's share of the roofline."""

    candidate: Candidate
    label: str
    verdict: str
    """``feasible``, or the rule that forbids it and why."""
    flops_per_smem_byte: float
    """2 m n k of a tile over the bytes of its A and B tiles: the seed's arithmetic intensity."""
    tile_tflops: float
    """What that intensity allows at the device's memory bandwidth, were there no L2."""
    tiles: int
    """Pieces of work: output tiles, times the parts of k."""
    waves: int
    """Of one block per multiprocessor."""
    wave_efficiency: float
    """Pieces of work over waves times multiprocessors: 1 without a tail."""
    smem_bytes: int
    """Shared memory of a block, computed."""


@dataclass(frozen=True)
class Explanation:
    """What is known of a problem before and after tuning."""

    problem: Problem
    device: Device
    flops: int
    bytes: int
    """Fewest bytes through device memory."""
    flops_per_byte: float
    """Global arithmetic intensity."""
    ridge_flops_per_byte: float
    """Where the device's two bounds meet: peak over bandwidth."""
    bound: Bound
    roofline_us: float
    """The floor: the larger of arithmetic and memory time at datasheet peaks."""
    roofline_tflops: float
    """The rate at that floor."""
    tile: TileFacts | None
    """Of the candidate asked about, or else of the record; None when neither cuts tiles."""
    record: StoredRecord | None
    """What dispatch would launch; None when it would leave the product to torch."""
    why_not: str
    """Why there is no record, in one clause; empty when there is one."""

    @property
    def percent_of_roofline(self) -> float | None:
        """Of the record's measured time."""
        return None if self.record is None else 100 * self.roofline_us / self.record.median_us

    @property
    def percent_of_peak(self) -> float | None:
        """Of the device's arithmetic peak, by the record's measured time."""
        if self.record is None:
            return None
        return 100 * self.flops / self.record.median_us / 1e6 / self.device.peak_tflops_of(self.problem)

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("flops", "bytes", "flops_per_byte", "ridge_flops_per_byte", "bound", "roofline_us")
        facts: dict[str, Any] = {"problem": asdict(self.problem), "device": self.device.spec}
        facts |= {name: getattr(self, name) for name in (*names, "roofline_tflops", "why_not")}
        facts["tile"] = None
        if self.tile is not None:
            facts["tile"] = asdict(self.tile) | {"candidate": dict(self.tile.candidate.params)}
        facts["record"] = None
        if self.record is not None:
            facts["record"] = {
                "family": self.record.candidate.family,
                "candidate": dict(self.record.candidate.params),
                "label": self.record.label,
                "layer": self.record.layer,
                "median_us": self.record.median_us,
                "ratio": self.record.ratio,
                "percent_of_roofline": self.percent_of_roofline,
                "percent_of_peak": self.percent_of_peak,
            }
        return facts


def explain(
    problem: Problem, device: Device, *, candidate: Candidate | None = None, database: str | None = None
) -> Explanation:
    """The roofline of a problem on a device, of a candidate or else of the record, and the record itself.

    database: where to look for the record; in all layers, as dispatch does, when None.
    Raises DeviceError for a device whose peaks are not known.
    """
    if not device.peak_tflops:
        raise DeviceError(
            f"{device.name}: its peak and bandwidth are not known to tunegemm; use --device model:h200"
        )
    record, why_not = _record(problem, device, database)
    shown = candidate or (record.candidate if record is not None else None)
    ridge = device.peak_tflops_of(problem) * 1e3 / device.bandwidth_gbps
    roofline_us = device.roofline_us(problem)
    return Explanation(
        problem=problem,
        device=device,
        flops=problem.flops,
        bytes=problem.bytes,
        flops_per_byte=problem.arithmetic_intensity,
        ridge_flops_per_byte=ridge,
        bound="compute" if problem.arithmetic_intensity >= ridge else "memory",
        roofline_us=roofline_us,
        roofline_tflops=problem.flops / roofline_us / 1e6,
        tile=None if shown is None or "tile_m" not in shown.params else _tile(problem, shown, device),
        record=record,
        why_not=why_not,
    )


def candidate_of(family: str, values: Mapping[str, str]) -> Candidate:
    """A candidate from ``name=value`` texts; parameters that are not given take the space's first value.

    Raises SpaceError for a family or a parameter that is not known.
    """
    from tunegemm.errors import SpaceError

    space = families.load_space(family)
    known = {**space.compile_values, **space.launch_values}
    for name in values:
        if name not in known:
            raise SpaceError(f"{family} has no parameter {name!r}; it has {', '.join(known)}")
    chosen = {name: _value(values[name]) if name in values else listed[0] for name, listed in known.items()}
    return Candidate.make(
        family,
        {name: chosen[name] for name in space.compile_values},
        {name: chosen[name] for name in space.launch_values},
    )


def _value(text: str) -> int | str | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.lstrip("-").isdigit() else text


def _tile(problem: Problem, candidate: Candidate, device: Device) -> TileFacts:
    family = families.get(candidate.family)
    tile_m, tile_n, tile_k = (candidate[name] for name in ("tile_m", "tile_n", "tile_k"))
    loaded = (tile_m + tile_n) * tile_k * DTYPE_BYTES[problem.in_dtype]
    intensity = 2 * tile_m * tile_n * tile_k / loaded
    work = tile_count(problem, candidate) * int(candidate.params.get("split_k", 1))
    waves = ceil(work / device.sm_count)
    return TileFacts(
        candidate=candidate,
        label=family.label(candidate),
        verdict=str(family.check(problem, candidate, device)),
        flops_per_smem_byte=intensity,
        tile_tflops=min(device.peak_tflops_of(problem), intensity * device.bandwidth_gbps / 1e3),
        tiles=work,
        waves=waves,
        wave_efficiency=work / (waves * device.sm_count),
        smem_bytes=family.smem_bytes(problem, candidate),
    )


def _record(problem: Problem, device: Device, location: str | None) -> tuple[StoredRecord | None, str]:
    """As dispatch looks it up, in all layers or in one database; one that is not there has no record."""
    warnings: list[str] = []
    if location is None:
        records, warnings = read_records()
    else:
        try:
            with Database.open(location, read_only=True) as database:
                records = database.records()
        except DatabaseError as error:
            return None, str(error)
    snapshot = Snapshot(records)
    found = snapshot.find(problem, device.fingerprint)
    if isinstance(found, StoredRecord):
        return found, ""
    return None, "; ".join([snapshot.why_not(problem, device.fingerprint), *warnings])
