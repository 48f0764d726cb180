"""The real families, except that the compiler gives up on one width of tile and dies on another."""

import os
from collections.abc import Mapping
from pathlib import Path

from tunegemm.generate import families
from tunegemm.generate.ptxas import Resources

#: Widths of tiles, by what becomes of them.
RAISES, ABORTS = 96, 112


class _Planted:
    def __init__(self, name: str) -> None:
        self._family = families.get(name)

    def compile(self, key: Mapping[str, str | int | bool], out: Path) -> Resources:
        if key["tile_n"] == RAISES:
            raise ValueError("a tile that the compiler refuses")
        if key["tile_n"] == ABORTS:
            os.abort()
        return self._family.compile(key, out)


def get(name: str) -> _Planted:
    return _Planted(name)
