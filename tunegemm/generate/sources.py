"""Hashes the sources that a family's kernels are compiled from: records and objects hold for the code that
made them.

The hash ignores comments, docstrings and blank lines, so rewording them makes nothing stale.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from pathlib import Path


def _string(quote: str) -> str:
    """A regular expression for a string in such quotes, without its prefix."""
    mark = quote[0]
    plain, inside = (rf"[^{mark}\\\n]*", r"\\.")
    if len(quote) == 3:
        plain, inside = rf"[^{mark}\\]*", rf"(?:\\.|{mark}(?!{mark}{mark}))"
    return f"{quote}{plain}(?:{inside}{plain})*{quote}"


#: A comment or a string: nothing else in Python holds a `#` or a quote.
_TOKEN = re.compile("|".join([r"#[^\n]*", *map(_string, ('"""', "'''", '"', "'"))]), re.DOTALL)
_OF_FAMILY = re.compile(r"^from tunegemm\.generate\.(\w+)\.", re.MULTILINE)
_PREFIX = re.compile(r"\b[rbuf]{1,2}\Z", re.IGNORECASE)
_REST_OF_LINE = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")


@functools.cache
def kernel_sources(folder: Path) -> tuple[Path, ...]:
    """The files that end up in a family's kernels.

    In its folder these are ``config.py``, ``kernel*.py``, and the files of a folder ``kernel``; of the
    ``kernel*.py`` here, which families share, those that one of these imports. Then follow those of another
    family, if one of these imports any. ``kernel_minimal.py`` is not among them, since no candidate runs it.
    """
    names = ("config.py", "kernel*.py", "kernel/**/*.py")
    own = {path for name in names for path in folder.glob(name) if path.name != "kernel_minimal.py"}
    contents = [path.read_text(encoding="utf-8") for path in own]
    shared = {
        path
        for path in Path(__file__).parent.glob("kernel*.py")
        if any(f"from tunegemm.generate.{path.stem} import" in content for content in contents)
    }
    imported = {name for content in contents for name in _OF_FAMILY.findall(content)} - {folder.name}
    others = (kernel_sources(folder.with_name(name)) for name in sorted(imported))
    return (*sorted(own | shared), *itertools.chain.from_iterable(others))


@functools.cache
def hash_of_code(paths: tuple[Path, ...]) -> str:
    """SHA-256 (16 hex digits) over the names and the code of Python files; empty for no file."""
    parts = [f"{path.name}\0{code_of(path.read_text(encoding='utf-8'))}\0" for path in paths]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16] if parts else ""


def code_of(source: str) -> str:
    """The code in a Python source, for comparison: sources with the same code give the same text.

    It uses a regular expression, because `tokenize` takes 40 times as long and differs between Python
    versions. It keeps what it cannot be sure of: a comment behind an f-string, whose expressions may hold
    quotes (Python 3.12).
    """
    code: list[str] = []
    strings: list[str] = []
    end, depth, counted, formatted = 0, 0, 0, -1
    for match in _TOKEN.finditer(source):
        start, token = match.start(), match[0]
        code.append(source[end:start])
        end = match.end()
        if token[0] == "#":
            if formatted < 0 or "\n" in source[formatted:start]:
                continue
        else:
            found = _PREFIX.search(source, max(start - 3, 0), start)
            prefix = found[0].lower() if found else ""
            line = source.rfind("\n", 0, start) + 1
            if not source[line : start - len(prefix)].strip() and source[max(line - 2, 0) : line] != "\\\n":
                before = "".join(code[counted:])
                depth += sum(map(before.count, "([{")) - sum(map(before.count, ")]}"))
                counted = len(code)
                # A docstring is a string that is a statement of its own.
                if depth == 0 and prefix in ("", "r", "u") and _REST_OF_LINE.match(source, end):
                    code[-1] = code[-1].removesuffix(source[start - len(prefix) : start])
                    continue
            if "f" in prefix:
                formatted = end
        strings.append(token)
        code.append("\0")
    code.append(source[end:])
    lines = "".join(code).split("\n")
    return "\n".join([*filter(None, map(str.rstrip, lines)), *strings])
