"""Encodes records for storage and decodes them: no other module converts stored data to values.

A measurement is stored as the cells of a row, by their names, or as a JSON object: a line of shipped
records, or a row of an export (db/exchange.schema.json). `decode_` makes values, `encode_` makes cells or
JSON. A cell may hold anything, because SQLite keeps text in columns of numbers and users edit files by hand:
an impossible value raises one of `UNREADABLE`. JSON is untrusted: malformed JSON raises one of `BAD`. The
module does not load SQLAlchemy, because dispatch reads records.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from numbers import Real
from types import UnionType
from typing import Any, TypeVar, get_args

from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.describe.stored import FIELDS, document_of, fields_from
from tunegemm.errors import BadValueError, DatabaseError, SpaceError, TunegemmError
from tunegemm.generate import families
from tunegemm.generate.families import kernel_source_hash
from tunegemm.measure.evidence import METHODS, SCREEN
from tunegemm.measure.outcome import Failure, Measurement, Stage
from tunegemm.store.checks import LONGEST_US, SHORTEST_US, check_roofline, objection
from tunegemm.store.record import UNKNOWN_TIME, Record
from tunegemm.store.schema import FASTEST
from tunegemm.untrusted import (
    decoded,
    line,
    listed,
    members,
    moment,
    number,
    printable,
    shown,
    tree,
    whole,
)

Cells = Mapping[str, Any]
Json = dict[str, Any]
Value = TypeVar("Value", Problem, Fingerprint)

FINGERPRINT_FIELDS = tuple(field.name for field in dataclasses.fields(Fingerprint))
_RESOURCES = tuple(field.name for field in dataclasses.fields(Resources))

#: Telemetry with cells of its own; all other telemetry is kept as JSON.
TELEMETRY_NUMBERS = ("sm_clock_mhz", "power_w", "temperature_c")
THROTTLE = "throttle_reasons"

#: Errors that decoding raises for a cell that it cannot understand.
UNREADABLE = (
    TunegemmError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip
#: Errors that malformed JSON raises.
BAD = (TunegemmError, ValueError)


# Cells as values


def finite(cell: Any, least: float = -math.inf, kind: str = "a number") -> float:
    """A finite number of at least this size. Raises ValueError for any other value."""
    if not isinstance(cell, int | float) or not math.isfinite(cell) or cell < least:
        raise ValueError(f"{cell!r:.40} is not {kind}")
    return float(cell)


#: Least and most of a time in microseconds and of a ratio. Reports divide by them and take logarithms.
LEAST, MOST = 1e-12, 1e12


def positive(cell: Any) -> float:
    """A time or a ratio. Raises ValueError for any other value."""
    if (value := finite(cell, LEAST, kind=(kind := f"a number from {LEAST:g} to {MOST:g}"))) > MOST:
        raise ValueError(f"{value:g} is not {kind}")
    return value


not_negative = functools.partial(finite, least=0.0, kind="a number from zero on")


def text(cell: Any) -> str:
    """Text. Raises ValueError."""
    if not isinstance(cell, str):
        raise ValueError(f"{cell!r:.40} is not text")
    return cell


def flag(cell: Any) -> bool:
    """True or false; a missing cell is false. Raises ValueError for any other value."""
    if cell not in (True, False, None):
        raise ValueError(f"{cell!r:.40} is neither true nor false")
    return bool(cell)


def known(cell: datetime | None) -> datetime:
    """A moment, unless its text could not be read: then raises ValueError."""
    if cell is None:
        raise ValueError("its time is not an ISO 8601 time")
    return cell


def times(cell: Any) -> tuple[float, ...]:
    """Samples, us. Raises ValueError."""
    if not isinstance(cell, list) or not cell:
        raise ValueError(f"{cell!r:.40} is not a list of times")
    return tuple(map(positive, cell))


def decode_fingerprint(digest: str, *facts: Any) -> Fingerprint:
    """A stored fingerprint. Raises ValueError if it is damaged."""
    fingerprint = Fingerprint(*facts)
    for field, value in zip(dataclasses.fields(Fingerprint), facts, strict=True):
        if type(value).__name__ != field.type:
            raise ValueError(f"{field.name} {shown(value)} of a fingerprint: its type is not {field.type}")
    if fingerprint.digest != digest:
        raise ValueError(f"fingerprint {digest} has the facts of fingerprint {fingerprint.digest}")
    return fingerprint


def decode_candidate(text: str, digest: str) -> Candidate:
    """A stored candidate. Raises SpaceError if it is damaged."""
    candidate = Candidate.from_json(text)
    if candidate.digest != digest:
        raise SpaceError(f"candidate {digest} has the parameters of candidate {candidate.digest}")
    return candidate


def is_readable(decode: Callable[..., object], *cells: Any) -> bool:
    """Whether cells are possible values."""
    try:
        decode(*cells)
    except UNREADABLE:
        return False
    return True


#: The cells of a record besides its problem, candidate, fingerprint and telemetry.
_CELLS: Mapping[str, Callable[[Any], Any]] = {
    "label": text, "median_us": positive, "baseline_median_us": positive, "ratio": positive, "noise": finite,
    "relative_error": not_negative, "confirmed": flag, "kernel_source": text, "method": text, "origin": text,
    "measured_at": known, "chosen_at": lambda cell: cell or UNKNOWN_TIME, "samples_us": times,
    "baseline_us": times,
}  # fmt: skip


def decode_record(
    cells: Cells, problem: Problem, candidate: Candidate, fingerprint: Fingerprint, layer: str
) -> Record:
    """A record from a row's cells; a narrow query reads few of them. Raises one of `UNREADABLE`."""
    facts = {name: check(cells[name]) for name, check in _CELLS.items() if name in cells}
    if "chosen_at" in cells and cells["confirmed"] is not None:  # a measurement need not be a record
        known(cells["chosen_at"])
    if "samples_us" in cells:
        if len(facts["samples_us"]) != len(facts["baseline_us"]):
            raise ValueError("its samples are from different rounds")
        facts["telemetry"] = _decode_telemetry(cells)
    return Record(problem, candidate, fingerprint, **facts, layer=layer)


def _decode_telemetry(cells: Cells) -> dict[str, Any]:
    telemetry, throttle = cells["telemetry"], cells[THROTTLE]
    if not isinstance(telemetry, dict | None):
        raise ValueError("its evidence is not an object")
    if not isinstance(throttle, list | None):
        raise ValueError("its throttle reasons are not a list")
    further: dict[str, Any] = {
        name: finite(cells[name]) for name in TELEMETRY_NUMBERS if cells[name] is not None
    }
    if throttle is not None:
        further[THROTTLE] = tuple(map(text, throttle))
    return {**(telemetry or {}), **further}


def decode_failure(row: Sequence[Any]) -> Failure:
    """A failure from a row: the candidate's JSON and digest, the stage and the reason."""
    json_text, digest, stage, reason = row
    if stage not in get_args(Stage):
        raise ValueError(f"stage {stage!r:.40} is not known")
    return Failure(decode_candidate(json_text, digest), stage, text(reason))


# Values as cells


def require(value: object, kind: type | UnionType, name: str) -> None:
    """Raises DatabaseError for a value of another type."""
    if not isinstance(value, kind):
        wanted = getattr(kind, "__name__", kind)
        raise DatabaseError(f"{name} {shown(value)}: its type is {type(value).__name__}; give a {wanted}")


def encode_keys(
    problem: Problem, fingerprint: Fingerprint, candidate: Candidate, label: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The cells of the three rows that a result refers to."""
    require(label, str, "label")
    row = {"digest": candidate.digest, "family": candidate.family, "json": candidate.to_json()}
    facts = {"digest": fingerprint.digest, **fingerprint.asdict()}
    return document_of(problem), facts, row | {"label": printable(label, 200)}


def encode_outcome(
    outcome: Measurement | Failure, resources: Resources | None, method: str
) -> dict[str, Any]:
    """The columns of an outcome's row, without keys and time. Raises DatabaseError for an invalid outcome."""
    require(outcome.candidate, Candidate, "candidate")
    made = {"kernel_source": kernel_source_hash(outcome.candidate.family), "origin": ""}
    if isinstance(outcome, Failure):
        if outcome.stage not in get_args(Stage):
            raise DatabaseError(f"stage {shown(outcome.stage)}: use one of {', '.join(get_args(Stage))}")
        # The last output of a crashed process may have NUL and undecodable bytes.
        reason = str(outcome.reason).replace("\0", "").encode("utf-8", "replace").decode()
        return {**made, "stage": outcome.stage, "reason": reason}
    if resources is not None:
        require(resources, Resources, "resources")
    compiled = {} if resources is None else dataclasses.asdict(resources)
    return {**made, "policy": method, **_encode_measurement(outcome), **compiled}


def _encode_measurement(measurement: Measurement) -> dict[str, Any]:
    samples, baseline = measurement.samples_us, measurement.baseline_us
    if not samples or len(samples) != len(baseline):
        raise DatabaseError(
            f"{len(samples)} samples but {len(baseline)} of the baseline; measure both in the same rounds"
        )
    if not all(_is_number(time) and SHORTEST_US <= time <= LONGEST_US for time in (*samples, *baseline)):
        raise DatabaseError(
            f"samples of {measurement.candidate} are not all positive times, from {SHORTEST_US:g} to "
            f"{LONGEST_US:g} us; measure it again"
        )
    if not _is_number(measurement.relative_error) or not _is_number(measurement.noise):
        raise DatabaseError(
            f"relative error or noise of {measurement.candidate} is not finite; measure it again"
        )
    require(measurement.telemetry, Mapping, "telemetry")
    telemetry = plain(dict(measurement.telemetry))
    columns: dict[str, Any] = {}
    for name, kind in (*((name, int | float) for name in TELEMETRY_NUMBERS), (THROTTLE, list)):
        columns[name] = telemetry.pop(name) if isinstance(telemetry.get(name), kind) else None
    names = ("samples_us", "baseline_us", "median_us", "baseline_median_us", "ratio", "spread")
    return columns | {
        **{name: getattr(measurement, name) for name in names},
        "baseline_spread": dataclasses.replace(measurement, samples_us=baseline).spread,
        "noise": float(measurement.noise),
        "relative_error": float(measurement.relative_error),
        "evidence": telemetry,
    }


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def plain(value: Any) -> Any:
    """`value` in JSON's types only: telemetry may hold tuples, numpy scalars or NaN.

    NaN and infinities become None (JSON lacks both); any other type becomes its `str`, on one line.
    """
    if hasattr(value, "item") and not isinstance(value, str | bytes):  # numpy and torch scalars
        value = value.item()
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, int | float) else printable(str(value))


# JSON as values

#: Fields that documents of an earlier version lack; their defaults apply.
_ADDED = {"epilogue", "accumulation"}
#: Longest text of a field, in letters; other fields may have 64, like their columns.
_WIDTHS = {"device_name": 128, "epilogue": 128, "capability": 8, "mig": 32}
#: Allowed letters of device names and software versions: no markup of a terminal, plot or page.
_FACT = re.compile(r"[A-Za-z0-9 ._+()/:,@#~-]*")


def decode_fields(kind: type[Value], data: Any) -> Value:
    """A problem or fingerprint from a JSON object with exactly its fields."""
    name = kind.__name__.lower()
    names = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if kind is Problem:
        names = {name: names[name] for name in FIELDS}
    data = members(
        data, f"its {name}", [field for field in names if field not in _ADDED], _ADDED & names.keys()
    )
    values: dict[str, Any] = {}
    for field, value in data.items():
        if names[field] == "int":
            values[field] = whole(value, field)
        else:
            values[field] = line(value, field, _WIDTHS.get(field, 64))
            if kind is Fingerprint and not _FACT.fullmatch(value):
                raise BadValueError(f"{field} {shown(value)} has characters that names of devices lack")
    if kind is Problem:
        values |= fields_from(values["batch"], values.get("epilogue", ""))
    return kind(**values)


def _decode_candidate_object(data: Any) -> Candidate:
    """A candidate of a known family, from its JSON object."""
    data = members(data, "its candidate", ("family", "compile", "launch"))
    families.require(line(data["family"], "family", 64))
    for table in ("compile", "launch"):
        if not isinstance(data[table], dict) or len(data[table]) > 64:
            raise BadValueError(f"{table} {shown(data[table])} is not an object of at most 64 parameters")
        for name, value in data[table].items():
            line(name, "a parameter's name", 64)
            if isinstance(value, str):
                line(value, f"parameter {name}", 64)
            elif not isinstance(value, bool):
                whole(value, f"parameter {name}", -(2**31))
    return Candidate.make(data["family"], data["compile"], data["launch"])


#: Least and most value of each figure of a shipped record.
_FIGURES = {
    "median_us": (SHORTEST_US, LONGEST_US),
    "baseline_median_us": (SHORTEST_US, LONGEST_US),
    "ratio": (LEAST, MOST),
    "noise": (0, 1e6),
    "relative_error": (0, 1e6),
}
_SHIPPED = (
    "problem", "label", "candidate", *_FIGURES, "confirmed", "fingerprint", "kernel_source", "measured_at",
)  # fmt: skip


def decode_shipped(row: Any, fingerprints: Mapping[str, Fingerprint], layer: str) -> Record:
    """The record on a line of shipped records. fingerprints: the file's, by name."""
    row = members(row, "it", _SHIPPED)
    figures: dict[str, Any] = {name: number(row[name], name, *bounds) for name, bounds in _FIGURES.items()}
    problem = decode_fields(Problem, row["problem"])
    toolchain = line(row["fingerprint"], "fingerprint", 64)
    if toolchain not in fingerprints:
        raise BadValueError(f"fingerprint {shown(toolchain)} is missing in the file")
    check_roofline(problem, fingerprints[toolchain], figures["median_us"], figures["baseline_median_us"])
    return Record(
        problem, _decode_candidate_object(row["candidate"]), fingerprints[toolchain],
        line(row["label"], "label", 200),
        **figures, confirmed=row["confirmed"] is True, layer=layer,
        measured_at=moment(row["measured_at"], "measured_at"),
        kernel_source=line(row["kernel_source"], "kernel_source", 16),
    )  # fmt: skip


def encode_shipped(record: Record, toolchain: str) -> str:
    """A record as a line. toolchain: its fingerprint's name in the file."""
    row: Json = {
        "problem": document_of(record.problem),
        "label": record.label,
        "candidate": json.loads(record.candidate.to_json()),
        **{name: float(f"{getattr(record, name):.6g}") for name in _FIGURES},
        "confirmed": record.confirmed,
        "fingerprint": toolchain,
        "kernel_source": record.kernel_source,
        "measured_at": record.measured_at.isoformat(timespec="seconds"),
    }
    return json.dumps(row)


@dataclass(frozen=True)
class Exported:
    """A measurement or failure of an export, checked, as cells."""

    id: str
    """Its name for the choices of the same file; empty if they cannot refer to it."""
    label: str
    keys: tuple[Json, Json, Json]
    """Of the rows that it refers to, as `encode_keys`."""
    cells: Json
    """Of its own row, as `encode_outcome`."""
    measured_at: datetime


def decode_exported(row: Any) -> Exported:
    """A measurement or failure from its JSON object in an export."""
    if isinstance(row, BadValueError):
        raise row
    if not isinstance(row, dict) or row.get("kind") not in ("measurement", "failure"):
        raise BadValueError("its kind is not measurement, failure or choice")
    widths = {"id": 64, "label": 200, "kernel_source": 16, "origin": 4096, "policy": 16}
    id_, label, source, origin, method = (
        line(_cell(row, name, ""), name, longest) for name, longest in widths.items()
    )
    if method and method not in METHODS:
        raise BadValueError(f"policy {shown(method)} is not known; use one of {', '.join(METHODS)}")
    problem = decode_fields(Problem, row.get("problem"))
    fingerprint = decode_fields(Fingerprint, row.get("fingerprint"))
    outcome = _decode_outcome(row, problem, fingerprint, source)
    resources = None if row.get("resources") is None else _decode_resources(row["resources"])
    keys = encode_keys(problem, fingerprint, outcome.candidate, "")
    cells = encode_outcome(outcome, resources, method or SCREEN)
    at = moment(row.get("measured_at"), "measured_at")
    return Exported(id_, label, keys, cells | {"kernel_source": source, "origin": origin}, at)


def _cell(row: Json, name: str, default: Any) -> Any:
    """A cell, or its default if it is missing or null. The empty bytes of a damaged cell are neither."""
    value = row.get(name)
    return default if value is None else value


def _decode_outcome(
    row: Json, problem: Problem, fingerprint: Fingerprint, source: str
) -> Measurement | Failure:
    candidate = _decode_candidate_object(row.get("candidate"))
    if row["kind"] == "failure":
        if row.get("stage") not in list(get_args(Stage)):
            raise BadValueError(f"stage {shown(row.get('stage'))} is not one of {', '.join(get_args(Stage))}")
        return Failure(candidate, row["stage"], line(_cell(row, "reason", ""), "reason"))
    telemetry = tree(_cell(row, "evidence", {}), "evidence")
    if not isinstance(telemetry, dict):
        raise BadValueError("its evidence is not an object")
    if telemetry.get("source") == "replayed":
        raise BadValueError("its times were replayed from a recording; import measured rows only")
    samples_us, baseline_us = (
        tuple(number(time, name, SHORTEST_US, LONGEST_US) for time in listed(row.get(name), name))
        for name in ("samples_us", "baseline_us")
    )
    if not samples_us or len(samples_us) != len(baseline_us):
        raise BadValueError(f"{len(samples_us)} samples but {len(baseline_us)} of the baseline")
    error, noise = (number(row.get(name), name, 0, 1e6) for name in ("relative_error", "noise"))
    measurement = Measurement(candidate, samples_us, baseline_us, error, noise, telemetry)
    if source == kernel_source_hash(candidate.family):  # rows of other sources are history and never launched
        figures = {"ratio": measurement.ratio, "relative_error": error}
        if wrong := objection(problem, candidate, fingerprint, **figures):
            raise BadValueError(printable(wrong, 200))
    check_roofline(problem, fingerprint, measurement.median_us, measurement.baseline_median_us)
    return measurement


def _decode_resources(data: Any) -> Resources:
    data = members(data, "its resources", _RESOURCES)
    registers, spill_bytes, smem_bytes = (whole(data[name], name) for name in _RESOURCES[:3])
    warnings = tuple(line(entry, "a warning", 200) for entry in listed(data["warnings"], "warnings", 1000))
    seconds = number(data["compile_seconds"], "compile_seconds", 0, 1e7)
    return Resources(registers, spill_bytes, smem_bytes, warnings, seconds)


def decode_choice(row: Json, measured: Mapping[str, Json]) -> Json:
    """The columns of a choice. measured: those that it has of its measurement, by the measurement's name."""
    reference = line(row.get("measurement"), "measurement", 64)
    if reference not in measured:
        raise BadValueError(f"measurement {shown(reference)} is not among the accepted rows")
    confirmed = row.get("confirmed")
    if type(confirmed) is not bool:
        raise BadValueError(f"confirmed {shown(confirmed)} is neither true nor false")
    return {
        **measured[reference],
        "goal": line(_cell(row, "policy", ""), "policy", 32) or FASTEST,
        "confirmed": confirmed,
        "chosen_at": moment(row.get("chosen_at"), "chosen_at"),
    }


# Rows as JSON. Export keeps rows as stored, damaged cells included; the reader checks them.


def encode_row(row: Any, problem: Any, fingerprint: Any, candidate: Any) -> Json:
    """A measurement or failure with its problem, fingerprint and candidate, as an export's object."""
    shared = _identity(row, problem, fingerprint, candidate)
    shared |= {"label": candidate.label, "origin": row.origin}
    if hasattr(row, "stage"):
        reason = printable(row.reason) if isinstance(row.reason, str) else row.reason
        return {"kind": "failure", **shared, "stage": row.stage, "reason": reason}
    telemetry = row.telemetry if row.telemetry is not None else {}
    if isinstance(telemetry, dict):
        columns = {name: getattr(row, name) for name in (*TELEMETRY_NUMBERS, THROTTLE)}
        telemetry = telemetry | {name: value for name, value in columns.items() if value is not None}
    resources = {name: getattr(row, name) for name in _RESOURCES}
    figures = ("samples_us", "baseline_us", "relative_error", "noise")
    full = {
        "kind": "measurement",
        **shared,
        "policy": row.method,
        **{name: getattr(row, name) for name in figures},
        "evidence": telemetry,
        "resources": None if resources["registers"] is None else resources,
    }
    return full | {"id": _id_of(full)}


def encode_choice(choice: Any, row: Any, problem: Any, fingerprint: Any, candidate: Any) -> Json:
    """The choice of a measurement as an export's object."""
    measured = _identity(row, problem, fingerprint, candidate) | {"samples_us": row.samples_us}
    return {
        "kind": "choice",
        "measurement": _id_of(measured),
        "policy": choice.goal,
        "confirmed": bool(choice.confirmed),
        "chosen_at": _iso(choice.chosen_at),
    }


def _identity(row: Any, problem: Any, fingerprint: Any, candidate: Any) -> Json:
    return {
        "problem": {name: getattr(problem, name) for name in FIELDS},
        "fingerprint": {name: getattr(fingerprint, name) for name in FINGERPRINT_FIELDS},
        "candidate": decoded(candidate.json),
        "kernel_source": row.kernel_source,
        "measured_at": _iso(row.created_at),
    }


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="microseconds")


def _id_of(row: Json) -> str:
    """A measurement's name within an export: a hash of the values that identify it."""
    names = ("problem", "fingerprint", "candidate", "kernel_source", "measured_at", "samples_us")
    text = json.dumps([row[name] for name in names], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
