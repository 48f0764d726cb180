"""Families whose objects take no time to compile; the compiler gives up on one width of tile and dies on
another. PLANTED_WAITS=WIDTH:FILE has those of a third one wait for a file.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from tunegemm.compile.ptxas import Resources

#: Widths of tiles, by what becomes of them.
RAISES, ABORTS = 96, 112


class _Planted:
    def compile(self, key: Mapping[str, str | int | bool], out: Path) -> Resources:
        if key["tile_n"] == RAISES:
            raise ValueError("a tile that the compiler refuses")
        if key["tile_n"] == ABORTS:
            os.abort()
        width, _, awaited = os.environ.get("PLANTED_WAITS", "").partition(":")
        while awaited and key["tile_n"] == int(width) and not Path(awaited).exists():
            time.sleep(0.01)  # then looked again: the test makes the file when it has seen what it waits for
        out.write_bytes(repr(sorted(key.items())).encode())
        return Resources(128, 0, 1024, (), 0.0)


def compiler(name: str) -> _Planted:
    return _Planted()


def import_compiler() -> None:
    """There is none."""
