"""Which kernel of db/blocks.toml computes block-scaled fp8, and in how many k splits: by an estimate.

A tile's time is that of its blocks of k, one after the other: each takes as long as its multiplications and
promotions, or as its bytes take to come. All tiles of a wave are there at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tunegemm.errors import BadValueError
from tunegemm.generate import blocks
from tunegemm.generate.blocks import BLOCK
from tunegemm.generate.blocks.config import BlockConfig
from tunegemm.resources import data_path

_SMS = 132
"""Multiprocessors of an H100 and of an H200."""
#: By a word in a GPU's name bytes a nanosecond that all multiprocessors get of its memory, and one at most.
_RATES = {"H200": (4.2, 0.066), "": (2.9, 0.058)}
_MOST_SPLITS = 8
_LEAST_BLOCKS = 4
"""Blocks of k that a split has at least."""


@dataclass(frozen=True)
class BlockChoice:
    """A kernel and how it is launched: the words of `BlockKernel.bound`, but for the device."""

    name: str
    """Its name in the table."""
    config: BlockConfig
    split_k: int = 1
    l2_hint: int = 0

    @property
    def words(self) -> Mapping[str, Any]:
        return {"split_k": self.split_k, "l2_hint": self.l2_hint}


@dataclass(frozen=True)
class Listed:
    """A kernel of the table."""

    name: str
    config: BlockConfig
    first_row: int
    last_row: int
    """It is for so many rows."""
    block_ns: float
    """What one block of k of a tile takes where its bytes are there."""
    tile_ns: float
    """What a tile takes beside its blocks."""
    split_ns: float
    """What k splits take to become one, for each time that their number doubles."""

    def estimate(self, rows: int, n: int, k: int, split_k: int, gpu: str) -> float:
        """Nanoseconds of a product."""
        memory, of_sm = next(rates for word, rates in _RATES.items() if word in gpu)
        work = blocks.tiles_of(self.config, rows, n) * self.config.cluster_size * split_k
        count = -(-k // BLOCK)
        per_split = -(-count // split_k)
        waves, rest = divmod(work, _SMS)
        # Rows are read again and again, and lie in the L2; the weights come from memory once.
        weight_bytes = BLOCK * self.config.columns / max(1, -(-rows // self.config.rows))
        total = 0.0
        for active, times in ((_SMS, waves), (rest, 1 if rest else 0)):
            if times:
                block = max(self.block_ns, weight_bytes * active / memory, weight_bytes / of_sm)
                total += times * (per_split * block + self.tile_ns)
        return total + self.split_ns * (split_k - 1).bit_length()


def choose(
    rows: int, n: int, k: int, *,
    out_dtype: str = "bf16", gpu: str = "", may_split: bool = True, path: Path | None = None,
) -> BlockChoice | None:  # fmt: skip
    """The kernel for A of rows x K with weights of N x K; None where there is none for such a product.

    gpu: its name, such as NVIDIA H200. may_split: whether k may be split, which takes memory.

    Raises BadValueError for a damaged table.
    """
    found = [
        (each.estimate(rows, n, k, split, gpu), each.name, split, each)
        for each in candidates(out_dtype, path)
        if each.first_row <= rows <= each.last_row
        for split in (splits_of(each.config, rows, n, k) if may_split else [1])
    ]
    if not found:
        return None
    _, name, split, best = min(found, key=lambda one: one[:3])
    return BlockChoice(name, best.config, split, 2 if rows <= best.config.rows and best.config.few else 0)


def splits_of(config: BlockConfig, rows: int, n: int, k: int) -> list[int]:
    """In how many k splits a kernel may compute a product: several only where tiles alone leave room."""
    tiles, count = blocks.tiles_of(config, rows, n) * config.cluster_size, -(-k // BLOCK)
    most = min(_MOST_SPLITS, count // _LEAST_BLOCKS, 2 * _SMS // tiles)
    return [1, *range(2, most + 1)]


def listed(path: Path | None = None) -> tuple[BlockConfig, ...]:
    """All kernels, which ship compiled. Raises BadValueError for a damaged table."""
    return tuple(dict.fromkeys(each.config for each in _table(path)))


def candidates(out_dtype: str = "bf16", path: Path | None = None) -> tuple[Listed, ...]:
    """The kernels of an output's dtype. Raises BadValueError for a damaged table."""
    return tuple(each for each in _table(path) if each.config.out_dtype == out_dtype)


@cache
def _table(path: Path | None) -> tuple[Listed, ...]:
    import tomllib  # with the first such product: other programs do without

    path = path or data_path("db", "blocks.toml")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return tuple(
            _listed(name, dict(zip(table["parameters"], line["values"], strict=True)), dtype, line)
            for name, line in table["kernels"].items()
            for dtype in line.get("dtypes", table["dtypes"])
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadValueError(f"{path}: {type(error).__name__}: {error}; install the package anew") from None


def _listed(name: str, parameters: dict[str, Any], dtype: str, line: dict[str, Any]) -> Listed:
    first, last = line["rows"]
    return Listed(
        name, blocks.config_of(parameters, out_dtype=dtype), first, last,
        *(float(line[word]) for word in ("block_ns", "tile_ns", "split_ns")),
    )  # fmt: skip
