"""Text from elsewhere made safe to show: the names, labels and reasons that a database or a file holds.

The author of the file chose them. A terminal obeys escape sequences, a table breaks at line ends, and marks
of writing direction make one name look like another.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

#: Letters of a value that are shown; a candidate with all its parameters has some 300.
LONGEST = 500


def clean(value: object, longest: int = LONGEST) -> str:
    """One printable line: what does not print stands as its escape, such as ``\\x1b``; a long one is cut."""
    text = str(value)
    if len(text) > longest:
        text = text[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )


def markdown(text: str) -> str:
    """The text as a cell of GitHub's Markdown, in which nothing is markup."""
    return re.sub(r"([\\`*\[\]<>|$&])", r"\\\1", clean(text, 2000))


def counted(count: int, noun: str) -> str:
    """``1 kernel``, ``2 kernels``, ``3 processes``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def significant(value: float, digits: int = 4) -> str:
    """A positive number with so many significant digits, whole numbers above; empty for any other."""
    if not 0 < value < math.inf:
        return ""
    if value < 1e-9:
        return f"{value:.{digits}g}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(value)))}f}"


def to_json(document: Any, indent: int | None = 2) -> str:
    """JSON in ASCII, whose escapes no terminal obeys; a number that is not finite is null."""
    return json.dumps(_finite(document), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
