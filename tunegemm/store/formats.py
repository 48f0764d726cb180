"""Rows of `exchange` as files: JSON and Parquet. Each holds every row, and each can be imported.

A file is read row by row, so that a damaged row costs no other: in its place comes the error that says
what is wrong with it.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.errors import BadValueError, DatabaseError
from tunegemm.files import read_bytes, replacing
from tunegemm.store.exchange import Row
from tunegemm.untrusted import decoded, listed, members, printable, shown

FORMAT = "tunegemm-database/1"

_PROBLEM = tuple(Problem.__dataclass_fields__)
_FINGERPRINT = tuple(Fingerprint.__dataclass_fields__)
_INTEGERS = ("m", "n", "k", "batch", "alignment", "sm_count", "sm_budget")
_LISTS = ("samples_us", "baseline_us")
_OBJECTS = ("candidate", "evidence", "resources")
_NUMBERS = ("relative_error", "noise")
_TEXTS = ("label", "kernel_source", "origin", "policy", "measured_at", "stage", "reason")
_CHOICE = ("measurement", "confirmed", "chosen_at")
#: For the reader of a table only; computed anew from the samples on import.
_DERIVED = ("median_us", "baseline_median_us", "ratio")
COLUMNS = (
    "kind", "id", *_PROBLEM, *_FINGERPRINT, *_TEXTS, *_DERIVED, *_NUMBERS, *_LISTS, *_OBJECTS, *_CHOICE,
)  # fmt: skip
_KNOWN = frozenset(COLUMNS)


class Format(StrEnum):
    """Names of file formats, as on the command line."""

    json = "json"
    parquet = "parquet"


def write(rows: Iterable[Row], path: Path, format: Format) -> None:
    """Write rows to a file. Raises DatabaseError when it cannot be written; then it is as it was."""
    writers = {Format.json: _write_json, Format.parquet: _write_parquet}
    with replacing(path, DatabaseError) as part:
        writers[format](rows, part)


def read(path: Path, format: Format) -> Iterator[Row | BadValueError]:
    """The rows of a file, unchecked, and for one that cannot be read the reason.

    Raises DatabaseError for a file that is not of that format, before the first row.
    """
    readers = {Format.json: _read_json, Format.parquet: _read_parquet}
    content = read_bytes(path, DatabaseError)
    try:
        yield from readers[format](content)
    except (BadValueError, UnicodeDecodeError) as error:
        raise DatabaseError(f"{path}: not a {format} export ({error}); check --format") from None


def _write_json(rows: Iterable[Row], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"format": "{FORMAT}", "rows": [')
        for number, row in enumerate(rows):
            file.write(("," if number else "") + "\n" + json.dumps(row, sort_keys=True, allow_nan=False))
        file.write("\n]}\n")


_HEAD = re.compile(r'\s*\{\s*"format"\s*:\s*"([^"]*)"\s*,\s*"rows"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_TAIL = re.compile(r"\]\s*\}?\s*\Z")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)


def _read_json(content: bytes) -> Iterator[Row | BadValueError]:
    text = _text(content)
    head = _HEAD.match(text)
    if head is None or head[1] != FORMAT:  # in another order than we write, or none of ours
        data = members(decoded(text), "the file", ("format", "rows"))
        if data["format"] != FORMAT:
            raise BadValueError(f"format {shown(data['format'])}, not {FORMAT}")
        yield from listed(data["rows"], "rows", len(content))
        return
    decode, at = json.JSONDecoder().raw_decode, head.end()
    while (at := _BETWEEN.match(text, at).end()) < len(text):  # type: ignore[union-attr]
        if _TAIL.match(text, at):
            return
        try:
            row, at = decode(text, at)
        except (ValueError, RecursionError):
            end = _end(text, at)
            try:
                yield decoded(text[at:end])
            except BadValueError as error:
                yield error
            at = end
        else:
            yield row
    yield BadValueError("the file is cut off here")


def _end(text: str, start: int) -> int:
    """Where a value that cannot be decoded ends: at its closing bracket, or before the next line's row."""
    next_row = text.find("\n{", start + 1)
    stop, depth = len(text) if next_row < 0 else next_row, 0
    for token in _TOKEN.finditer(text, start, stop):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)
        if depth <= 0 and token[0][0] != '"':
            return token.end()
    return stop


def _write_parquet(rows: Iterable[Row], path: Path) -> None:
    pyarrow, parquet = _pyarrow()
    types = dict.fromkeys(COLUMNS, pyarrow.string())
    types |= dict.fromkeys(_INTEGERS, pyarrow.int64())
    types |= dict.fromkeys((*_NUMBERS, *_DERIVED), pyarrow.float64())
    types |= dict.fromkeys(_LISTS, pyarrow.list_(pyarrow.float64())) | {"confirmed": pyarrow.bool_()}
    schema = pyarrow.schema(list(types.items()))
    remaining = map(_flat, rows)
    with parquet.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True) as writer:
        while batch := list(islice(remaining, 10_000)):
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))


def _read_parquet(content: bytes) -> Iterator[Row | BadValueError]:
    pyarrow, parquet = _pyarrow()
    broken = (OSError, ValueError, MemoryError, pyarrow.ArrowException)
    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(content), page_checksum_verification=True)
        if "kind" not in file.schema_arrow.names:
            raise BadValueError("it has no column `kind`")
    except broken as error:
        raise BadValueError(_first_line(error)) from None
    for group in range(file.num_row_groups):
        try:
            table = file.read_row_group(group)
        except broken as error:
            yield BadValueError(f"the {file.metadata.row_group(group).num_rows} rows of a group are damaged: "
                                f"{_first_line(error)}")  # fmt: skip
            continue
        for number in range(table.num_rows):
            try:
                (flat,) = table.slice(number, 1).to_pylist()
            except broken as error:
                yield BadValueError(_first_line(error))
                continue
            given = {name: cell for name, cell in flat.items() if name in _KNOWN and cell is not None}
            yield _nested(given)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise DatabaseError("Parquet needs pyarrow: pip install 'tunegemm[parquet]'") from None
    return pyarrow, parquet


def _first_line(error: BaseException) -> str:
    return printable((str(error).strip() or type(error).__name__).splitlines()[0], 200)


def _text(content: bytes) -> str:
    """Bytes that are not UTF-8 stay in the cell or row that they are in, which is then refused."""
    return content.decode("utf-8-sig", "surrogateescape")


def _flat(row: Row) -> Row:
    """A row as one line of a table: objects as JSON text, the figures that people look for computed."""
    flat = {name: value for name, value in row.items() if name in COLUMNS}
    flat |= row.get("problem") or {}
    flat |= row.get("fingerprint") or {}
    for name in _OBJECTS:
        if flat.get(name) is not None:
            flat[name] = json.dumps(flat[name], sort_keys=True, separators=(",", ":"))
    if row["kind"] == "measurement":
        samples, baseline = row["samples_us"], row["baseline_us"]
        flat["median_us"], flat["baseline_median_us"] = map(statistics.median, (samples, baseline))
        flat["ratio"] = statistics.median(b / s for b, s in zip(baseline, samples, strict=True))
    return flat


def _nested(flat: Row) -> Row | BadValueError:
    for name in _OBJECTS:
        if name in flat:
            try:
                flat[name] = decoded(flat[name]) if isinstance(flat[name], str) else flat[name]
            except BadValueError as error:
                return BadValueError(f"{name} {shown(flat[name])}: {error}")
    row = {name: value for name, value in flat.items() if name not in (*_PROBLEM, *_FINGERPRINT, *_DERIVED)}
    if row.get("kind") != "choice":
        row["problem"] = {name: flat[name] for name in _PROBLEM if name in flat}
        # A table does not tell an empty text from none; of a device's facts any may be empty.
        row["fingerprint"] = {name: flat.get(name, "") for name in _FINGERPRINT}
    return row
