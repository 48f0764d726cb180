"""Chooses the kernel of db/block_groups.toml for groups of rows with block scales, by their mean rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunegemm.generate import block_groups
from tunegemm.generate.block_groups.config import BlockGroupConfig
from tunegemm.model.tables import reader_of


def choose(rows: int, groups: int, path: Path | None = None) -> BlockGroupConfig:
    """The kernel for so many rows in so many groups. Raises BadValueError if the table is damaged."""
    return next(config for most, config in _table(path) if rows <= most * groups)


def invariant() -> BlockGroupConfig:
    """The kernel for policy `batch_invariant`. Those of many rows promote a row by two operations if scales
    of rows beside it ask for that, so its last bits depend on them.
    """
    return next(config for config in reversed(listed()) if config.few)


def listed(path: Path | None = None) -> tuple[BlockGroupConfig, ...]:
    """All kernels of the table, which ship compiled. Raises BadValueError if the table is damaged."""
    return tuple(config for _, config in _table(path))


@reader_of("block_groups.toml")
def _table(table: dict[str, Any]) -> tuple[tuple[int, BlockGroupConfig], ...]:
    lines = tuple(
        (
            int(line["rows_per_group"]),
            block_groups.config_of(dict(zip(table["parameters"], line["values"], strict=True))),
        )
        for line in table["kernels"].values()
    )
    if lines[-1][0] < 2**31 - 1:
        raise ValueError("the last kernel must serve any number of rows")
    return lines
