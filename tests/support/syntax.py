"""The syntax of source files, each parsed once by a process."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file."""
    return [*ast.walk(ast.parse(path.read_text(), str(path)))]
