"""The system layer: records of known GPUs as text files, one record a line, so that a change can be reviewed.

`tunegemm db export --records` writes them from a database. They name kernels and times, never code:
a record whose object is not in the store is left to torch until `tunegemm verify` or `tune` compiles it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.files import replacing
from tunegemm.resources import data_path
from tunegemm.store.checks import BAD, candidate_of, moment_of, number_of, one_line, text_of, typed
from tunegemm.store.record import Record

FORMAT = "tunegemm-records/1"
_NUMBERS = ("median_us", "baseline_median_us", "ratio", "noise", "relative_error")


def read_shipped(folder: Path | None = None, *, layer: str = "system") -> tuple[list[Record], list[str]]:
    """The records of a folder, by default the shipped one, and one line for each bad file or record."""
    records: list[Record] = []
    problems: list[str] = []
    try:
        paths = sorted((folder or data_path("db", "records")).glob("*.json"))
    except FileNotFoundError:
        paths = []
    for path in paths:
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}, not {FORMAT}")
            fingerprints = {name: typed(Fingerprint, facts) for name, facts in data["fingerprints"].items()}
            rows = list(data["records"])
        except (OSError, *BAD) as error:
            problems.append(f"{path}: not a file of records ({one_line(error)}); restore or delete it")
            continue
        for number, row in enumerate(rows, 1):
            try:
                records.append(_record(row, fingerprints, layer))
            except BAD as error:
                problems.append(f"{path}: record {number} is left out: {one_line(error)}")
    return records, problems


def latest_settled(records: Iterable[Record]) -> list[Record]:
    """Per problem and GPU the record that was settled last: of older toolchains none is shipped."""
    latest: dict[tuple[Problem, str], Record] = {}
    for record in records:
        key = record.problem, record.fingerprint.device_name
        if record.confirmed and (key not in latest or record.measured_at > latest[key].measured_at):
            latest[key] = record
    return list(latest.values())


def write_records(records: Iterable[Record], folder: Path) -> list[Path]:
    """One sorted file per GPU, replaced as a whole: the same records give the same bytes."""
    by_device: dict[str, list[Record]] = {}
    for record in records:
        by_device.setdefault(record.fingerprint.device_name, []).append(record)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, group in sorted(by_device.items()):
        distinct = sorted(
            {record.fingerprint for record in group}, key=lambda one: sorted(one.asdict().items())
        )
        names = {fingerprint: f"toolchain-{number}" for number, fingerprint in enumerate(distinct, 1)}
        lines = sorted(
            ((record.problem, names[record.fingerprint]), _line(record, names)) for record in group
        )
        text = (
            "{\n"
            f' "format": {json.dumps(FORMAT)},\n'
            ' "fingerprints": {\n'
            + ",\n".join(f"  {json.dumps(names[one])}: {json.dumps(one.asdict())}" for one in distinct)
            + '\n },\n "records": [\n'
            + ",\n".join(f"  {line}" for _, line in lines)
            + "\n ]\n}\n"
        )
        path = folder / (re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-") + ".json")
        with replacing(path) as part:
            part.write_text(text)
        written.append(path)
    return written


def _line(record: Record, names: Mapping[Fingerprint, str]) -> str:
    problem = {name: getattr(record.problem, name) for name in Problem.__dataclass_fields__}
    row: dict[str, Any] = {
        "problem": problem,
        "label": record.label,
        "candidate": json.loads(record.candidate.to_json()),
        **{name: float(f"{getattr(record, name):.6g}") for name in _NUMBERS},
        "settled": record.confirmed,
        "fingerprint": names[record.fingerprint],
        "kernel_source": record.kernel_source,
        "measured_at": record.measured_at.isoformat(timespec="seconds"),
    }
    return json.dumps(row)


def _record(row: Any, fingerprints: Mapping[str, Fingerprint], layer: str) -> Record:
    median_us, baseline_median_us, ratio, noise, relative_error = (number_of(row, name) for name in _NUMBERS)
    if not min(median_us, baseline_median_us, ratio) > 0:
        raise ValueError("its times are not positive")
    return Record(
        typed(Problem, row["problem"]),
        candidate_of(row["candidate"]),
        fingerprints[row["fingerprint"]],
        text_of(row, "label", longest=200),
        median_us,
        baseline_median_us,
        ratio,
        noise,
        relative_error,
        row["settled"] is True,
        moment_of(row["measured_at"]),
        text_of(row, "kernel_source", longest=16),
        layer,
    )
