"""Makes foreign text safe to show: names, labels and reasons from a database or a file.

The author of the file chose them. A terminal obeys escape sequences, a table breaks at line ends, and marks
of writing direction make one name look like another.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

#: Most letters of a shown value; a candidate with all its parameters has some 300.
LONGEST = 500


def clean(value: object, longest: int = LONGEST) -> str:
    r"""One printable line: unprintable characters become escapes, such as ``\x1b``; a long line is cut."""
    text = str(value)
    if len(text) > longest:
        text = text[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )


def markdown(text: str) -> str:
    """The text as a cell of GitHub's Markdown, without any markup."""
    return re.sub(r"([\\`*\[\]<>|$&])", r"\\\1", clean(text, 2000))


def fitted(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    words: Mapping[str, int],
    *,
    dispensable: Sequence[str] = (),
    width: int | None = None,
    caption: str = "",
    styles: Sequence[str] = (),
) -> Table:
    """A table for a terminal with this many characters.

    If the terminal is too narrow, columns go in the order of `dispensable`. Then headings fold, and so do
    columns of words, but not below the width that `words` has for each. Figures never fold, because a cut
    figure would be another figure. styles: those of the rows.
    """
    from rich.table import Table
    from rich.text import Text

    longest = {heading: max((len(row[at]) for row in rows), default=0) for at, heading in enumerate(headings)}
    least = {
        heading: max(min(longest[heading], words.get(heading, longest[heading])), *map(len, heading.split()))
        for heading in headings
    }
    for heading in dispensable:
        if width is not None and sum(least.values()) + 3 * len(least) + 1 > width:
            least.pop(heading, None)
    fits = width is None or sum(least.values()) + 3 * len(least) + 1 <= width
    whole = sum(max(len(heading), longest[heading]) + 3 for heading in least) + 1
    table = Table(title=Text(clean(title)), title_justify="left", title_style="")
    if caption:
        table.caption, table.caption_justify, table.caption_style = Text(clean(caption, 2000)), "left", ""
    for heading, fewest in least.items():
        if heading in words:
            table.add_column(heading, min_width=fewest if fits else 5, overflow="fold")
        else:
            fixed = fewest if width is not None and whole > width else None
            table.add_column(heading, justify="right", width=fixed, min_width=fewest)
    for number, row in enumerate(rows):
        shown = (cell for heading, cell in zip(headings, row, strict=True) if heading in least)
        cells = (Text(clean(cell)) if isinstance(cell, str) else cell for cell in shown)
        table.add_row(*cells, style=styles[number] if styles else "")
    return table


def counted(count: int, noun: str) -> str:
    """``1 kernel``, ``2 kernels``, ``3 processes``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def significant(value: float, digits: int = 4) -> str:
    """A positive number with this many significant digits, large ones as whole numbers; empty for anything
    else."""
    if not 0 < value < math.inf:
        return ""
    if value < 1e-9:
        return f"{value:.{digits}g}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(value)))}f}"


def to_json(document: Any, indent: int | None = 2) -> str:
    """JSON in ASCII, so that no terminal obeys an escape sequence in it; a number that is not finite becomes
    null."""
    return json.dumps(_finite(document), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
