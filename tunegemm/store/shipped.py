"""The system layer: records of known GPUs as text files, one record a line, so that changes can be reviewed.

`tunegemm db export --records` writes them from a database. They name kernels and times, never code. If a
record's object is missing, dispatch calls torch while it compiles the object in the background.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.stored import FIELDS, cells_of
from tunegemm.errors import BadValueError, one_line
from tunegemm.files import make_folder, read_text, write_text
from tunegemm.resources import data_path
from tunegemm.store.codec import BAD, decode_fields, decode_shipped, encode_shipped
from tunegemm.store.record import Record
from tunegemm.untrusted import decoded, listed, members, shown

FORMAT = "tunegemm-records/1"

_log = logging.getLogger(__name__)


def read_shipped(folder: Path | None = None, *, layer: str = "system") -> tuple[list[Record], list[str]]:
    """The records of a folder, by default the shipped one, and one line for each bad file or record."""
    records: list[Record] = []
    problems: list[str] = []
    for path in sorted((folder or data_path("db", "records")).glob("*.json")):
        try:
            at = path.stat()
        except OSError:  # reading it will report the error
            result, bad = _read_file.__wrapped__(path, layer, 0, 0)
        else:
            result, bad = _read_file(path, layer, at.st_mtime_ns, at.st_size)
        records += result
        problems += bad
    return records, problems


class ShippedLookup:
    """The shipped records by problem, decoded on demand, as `Lookup` does for a database.

    A program needs few of them. Decoding a thousand would cost its first product 15 ms, and making values of
    them another 60 ms.
    """

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Mapping[str, Fingerprint], str]]] = {}
        """By the problem as JSON; rows as JSON, too."""
        self.warnings: list[str] = []
        """One line for each file that cannot be read."""
        try:
            paths = sorted(data_path("db", "records").glob("*.json"))
        except OSError as error:  # copied without its data: zip, PyInstaller, vendored
            self.warnings.append(
                f"{error}; install tunegemm from its wheel, or bundle all its files "
                "(PyInstaller: --collect-all tunegemm)"
            )
            return
        for path in paths:
            try:
                fingerprints, rows = _undecoded(path)
            except BAD as error:
                self.warnings.append(_bad_file(path, error))
                continue
            for problem, row in rows:
                self._rows.setdefault(problem, []).append((fingerprints, row))

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def problems(self) -> list[tuple[Any, ...]]:
        """The fields of every problem that has a record."""
        return [key for text in self._rows if (key := _key({"problem": json.loads(text)})) is not None]

    def find(self, problem: Problem) -> list[Record]:
        """The problem's records of all GPUs. Skips and logs an unreadable record."""
        results = []
        for fingerprints, row in self._rows.get(_problem_text(cells_of(problem)), ()):
            try:
                results.append(decode_shipped(decoded(row), fingerprints, "system"))
            except BAD as error:
                _log.warning("skipped a shipped record of %s: %s", problem, one_line(error))
        return results


#: The text that `write_records` writes around a file's records, and a record's line with its problem.
_BEGIN, _BETWEEN, _END = '"records": [\n', ",\n", "\n ]\n}\n"
#: A value that needs no decoding to be sure that it can be decoded.
_VALUE = r'(?:"[^"\\\x00-\x1f]*"|[1-9]\d{0,9})'
_LINE = re.compile(
    '  {"problem": (?P<problem>{' + ", ".join(f'"{name}": {_VALUE}' for name in FIELDS) + "}), .*}"
)


def _problem_text(key: Iterable[Any]) -> str:
    """A problem's fields as they appear in a record's line."""
    return json.dumps(dict(zip(FIELDS, key, strict=True)))


def _undecoded(path: Path) -> tuple[dict[str, Fingerprint], list[tuple[str, str]]]:
    """A file's fingerprints by name, and its rows as JSON, each after its problem's. Raises one of BAD.

    Rows of a file from `write_records` are not decoded, because each is a line. Others are.
    """
    text = read_text(path)
    head, _, body = text.partition(_BEGIN)
    matches = [_LINE.fullmatch(row) for row in body.removesuffix(_END).split(_BETWEEN)]
    results = [(match["problem"], match[0]) for match in matches if match]
    if len(results) == len(matches) and body.endswith(_END):
        return _parts(f"{head}{_BEGIN}]}}")[0], results
    fingerprints, rows = _parts(text)
    keys = [(key, row) for row in rows if (key := _key(row)) is not None]
    return fingerprints, [(_problem_text(key), json.dumps(row)) for key, row in keys]


def _key(row: Any) -> tuple[Any, ...] | None:
    """The fields of a row's problem; None if they cannot be a problem's."""
    facts = row.get("problem") if isinstance(row, dict) else None
    if not isinstance(facts, dict):
        return None
    key = tuple(map(facts.get, FIELDS))
    are_extents = all(type(item) is int and item > 0 for item in key[:3])
    return key if are_extents and all(isinstance(item, str | int | bool | None) for item in key) else None


@lru_cache(maxsize=8)  # tuning reads it for each product, and a thousand records take 0.2 s
def _read_file(path: Path, layer: str, mtime_ns: int, size: int) -> tuple[list[Record], list[str]]:
    """The records of one file in its current state, and a line for each bad record or for a bad file."""
    records: list[Record] = []
    problems: list[str] = []
    try:
        fingerprints, rows = _parts(read_text(path))
    except BAD as error:
        return [], [_bad_file(path, error)]
    for position, row in enumerate(rows, 1):
        try:
            records.append(decode_shipped(row, fingerprints, layer))
        except BAD as error:
            problems.append(f"{path}: skipped record {position}: {one_line(error)}")
    return records, problems


def _parts(text: str) -> tuple[dict[str, Fingerprint], list[Any]]:
    """A file's fingerprints by name, and its rows, undecoded. Raises one of BAD."""
    data = members(decoded(text), "it", ("format", "fingerprints", "records"))
    if data["format"] != FORMAT:
        raise BadValueError(f"format {shown(data['format'])}, not {FORMAT}")
    facts = members(data["fingerprints"], "fingerprints", (), None)
    fingerprints = {name: decode_fields(Fingerprint, item) for name, item in facts.items()}
    return fingerprints, listed(data["records"], "records")


def _bad_file(path: Path, error: Exception) -> str:
    return f"{path}: not a records file ({one_line(error)}); restore or delete it"


def latest_confirmed(records: Iterable[Record]) -> list[Record]:
    """Per problem and GPU the record that was confirmed last: of older toolchains none is shipped."""
    confirmed = (record for record in records if record.confirmed)
    ordered = sorted(confirmed, key=lambda record: record.measured_at)
    return list({(record.problem, record.fingerprint.device_name): record for record in ordered}.values())


def write_records(records: Iterable[Record], folder: Path) -> list[Path]:
    """One sorted file per GPU, replaced as a whole: the same records give the same bytes.

    GPUs whose names differ only in characters that file names cannot have get separate files. Without records
    nothing is written. Raises FileError.
    """
    by_device: dict[str, list[Record]] = {}
    for record in records:
        by_device.setdefault(record.fingerprint.device_name, []).append(record)
    if not by_device:
        return []
    make_folder(folder)
    alike = Counter(_file_name(device).lower() for device in by_device)
    written = []
    for device, group in sorted(by_device.items()):
        distinct = sorted(
            {record.fingerprint for record in group},
            key=lambda fingerprint: sorted(fingerprint.asdict().items()),
        )
        names = {fingerprint: f"toolchain-{number}" for number, fingerprint in enumerate(distinct, 1)}
        named = [(record, names[record.fingerprint]) for record in group]
        lines = sorted(((record.problem, name), encode_shipped(record, name)) for record, name in named)
        text = (
            "{\n"
            f' "format": {json.dumps(FORMAT)},\n'
            ' "fingerprints": {\n'
            + ",\n".join(f"  {json.dumps(names[item])}: {json.dumps(item.asdict())}" for item in distinct)
            + "\n },\n "
            + _BEGIN
            + _BETWEEN.join(f"  {line}" for _, line in lines)
            + _END
        )
        name = _file_name(device)
        if alike[name.lower()] > 1:
            name += "-" + hashlib.sha256(device.encode("utf-8", "backslashreplace")).hexdigest()[:8]
        write_text(folder / f"{name}.json", text)
        written.append(folder / f"{name}.json")
    return written


def _file_name(device: str) -> str:
    """A device's name as a file name, which begins with a letter or digit, as a pack's entries do."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", device[:100]).strip("-.") or "unnamed"
