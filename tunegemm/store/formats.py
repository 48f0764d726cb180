"""Rows of `exchange` as a file of JSON, a row a line (db/exchange.schema.json).

A file is read row by row, so that a damaged row costs no other: in its place comes the error that says
what is wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tunegemm.errors import BadValueError, DatabaseError
from tunegemm.files import read_bytes, replacing
from tunegemm.store.exchange import Row
from tunegemm.untrusted import decoded, listed, members, shown

FORMAT = "tunegemm-database/1"


def write(rows: Iterable[Row], path: Path) -> None:
    """Write rows to a file. Raises DatabaseError when it cannot be written; then it is as it was."""
    with replacing(path, DatabaseError) as part, part.open("w", encoding="utf-8") as file:
        file.write(f'{{"format": "{FORMAT}", "rows": [')
        for number, row in enumerate(rows):
            file.write(("," if number else "") + "\n" + json.dumps(row, sort_keys=True, allow_nan=False))
        file.write("\n]}\n")


def read(path: Path) -> Iterator[Row | BadValueError]:
    """The rows of a file, unchecked, and for one that cannot be read the reason.

    Raises DatabaseError for a file that is no export, before the first row.
    """
    # Bytes that are not UTF-8 stay in the row that they are in, which is then refused.
    text = read_bytes(path, DatabaseError).decode("utf-8-sig", "surrogateescape")
    try:
        yield from _rows(text)
    except BadValueError as error:
        raise DatabaseError(
            f"{path}: not an export ({error}); give what `tunegemm db export` wrote"
        ) from None


_HEAD = re.compile(r'\s*\{\s*"format"\s*:\s*"([^"]*)"\s*,\s*"rows"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_TAIL = re.compile(r"\]\s*\}?\s*\Z")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)


def _rows(text: str) -> Iterator[Row | BadValueError]:
    head = _HEAD.match(text)
    if head is None or head[1] != FORMAT:  # in another order than we write, or none of ours
        data = members(decoded(text), "the file", ("format", "rows"))
        if data["format"] != FORMAT:
            raise BadValueError(f"format {shown(data['format'])}, not {FORMAT}")
        yield from listed(data["rows"], "rows", len(text))
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
