"""Chooses the kernel of db/blocks.toml for a block-scaled fp8 product, and its k splits, by an estimate.

A tile computes its blocks of k one after the other. Each block takes as long as the slower of two: its
multiplications and promotions, or the transfer of its bytes. All tiles of a wave run at the same time.
Functions here raise BadValueError if the table is damaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunegemm.generate import blocks
from tunegemm.generate.blocks import BLOCK, NARROW
from tunegemm.generate.blocks.config import BlockConfig
from tunegemm.model.tables import reader_of

_SMS = 132
"""Multiprocessors of an H100 and of an H200."""
#: Memory bandwidth in bytes per nanosecond, of all multiprocessors together and the most that a single one
#: gets, by a word in the GPU's name. The H200's are fitted, others its scaled.
_RATES = {"H200": (3900.0, 66.0), "": (2740.0, 58.0)}
_L2_RATE = 11500.0
"""What all multiprocessors together get of L2, fitted on an H200."""
_LAUNCH_NS = 2500.0
"""Time of a launch beyond that of its tiles, as products in one CUDA graph take it."""
_MISSING_ROW_NS, _STAGE_NS = 5.2, 80.0
"""Time in which TMA fills a row that A lacks with zeros, and brings the rest of a stage, on an H200: of three
kernels with tiles of 64 rows, at 33 to 56 rows. No file keeps these runs."""
_MOST_SPLITS = 8
_LEAST_BLOCKS = 4
"""The fewest blocks of k in a split."""
_TORCHS_LEAD = 0.95
"""The part of a kernel's estimate below which torch's own computes, whose estimate is off by 8.5 %. Choices
lose 0.7 % to the fastest of blocks-race.json with it, 1.4 % with 1, and 1.6 % without torch's."""


@dataclass(frozen=True)
class BlockChoice:
    """A kernel and its launch: the keyword arguments of `BlockKernel.bound`, except the device."""

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
    """`first_row` to `last_row`: the numbers of rows that the kernel is for."""
    block_ns: float
    """Time of one block of k of a tile if its bytes have arrived."""
    tile_ns: float
    """Time of a tile beyond that of its blocks."""
    split_ns: float
    """Time to add up k splits, each time that their number doubles."""

    def estimate(self, rows: int, n: int, k: int, split_k: int, gpu: str) -> float:
        """Estimated nanoseconds of a product."""
        memory, of_sm = next(rates for word, rates in _RATES.items() if word in gpu)
        size, count = self.config.cluster_size, -(-k // BLOCK)
        tiles = blocks.tiles_of(self.config, rows, n)
        # Tiles read the rows repeatedly, from L2; the weights come from memory once.
        weight_bytes = BLOCK * self.config.columns / max(1, -(-rows // self.config.rows))
        missing = 0 if self.config.loads_short else max(0, self.config.rows - rows)
        block_ns = max(self.block_ns, _STAGE_NS + missing * _MISSING_ROW_NS)
        stage_bytes = BLOCK * self.config.lines_loaded(rows)

        def block(active: int) -> float:
            of_all = max(weight_bytes / memory, stage_bytes / _L2_RATE)
            return max(block_ns, of_all * active, weight_bytes / of_sm)

        resident = _SMS // size
        total = _LAUNCH_NS + self.split_ns * (split_k - 1).bit_length()
        waves, rest = divmod(tiles * split_k, resident)
        for active, times in ((resident, waves), (rest, 1 if rest else 0)):
            if times:
                total += times * (-(-count // split_k) * block(active * size) + self.tile_ns)
        return total


def choose(
    rows: int, n: int, k: int, *,
    out_dtype: str = "bf16", scale_k: int = BLOCK, gpu: str = "", may_split: bool = True,
    or_torch: bool = False, path: Path | None = None,
) -> BlockChoice | None:  # fmt: skip
    """The kernel for A (rows x K) and weights (N x K) whose scales are of so many of k; None if the table has
    no kernel for such a product.

    gpu: its name, such as NVIDIA H200. may_split: whether k may be split, which takes memory. or_torch:
    return None also where torch's own kernel is estimated to be clearly faster.
    """
    results = [
        (each.estimate(rows, n, k, split, gpu), each.name, split, each)
        for each in candidates(out_dtype, path, scale_k)
        if each.first_row <= rows <= each.last_row
        for split in (splits_of(each.config, rows, n, k) if may_split else [1])
    ]
    if not results:
        return None
    least, name, split, best = min(results, key=lambda result: result[:3])
    _, by_torch = table(path)
    lead = _TORCHS_LEAD * least
    if or_torch and rows >= by_torch.first_row and by_torch.estimate(rows, n, k, 1, gpu) < lead:
        return None
    return BlockChoice(name, best.config, split, 2 if rows <= best.config.rows and best.config.few else 0)


def splits_of(config: BlockConfig, rows: int, n: int, k: int) -> list[int]:
    """The numbers of k splits that a kernel may use: above 1 only if its tiles leave multiprocessors idle."""
    tiles, count = blocks.tiles_of(config, rows, n) * config.cluster_size, -(-k // BLOCK)
    most = min(_MOST_SPLITS, count // _LEAST_BLOCKS, 2 * _SMS // tiles)
    return [1, *range(2, most + 1)]


def listed(path: Path | None = None) -> tuple[BlockConfig, ...]:
    """All kernels of the table, which ship compiled."""
    return tuple(dict.fromkeys(each.config for each in (*table(path)[0], *narrow(path))))


def candidates(out_dtype: str = "bf16", path: Path | None = None, scale_k: int = BLOCK) -> tuple[Listed, ...]:
    """The kernels with this output dtype, and scales of so many of k."""
    kernels = table(path)[0] if scale_k == BLOCK else narrow(path)
    return tuple(each for each in kernels if each.config.out_dtype == out_dtype)


@reader_of("blocks.toml")
def table(data: dict[str, Any]) -> tuple[tuple[Listed, ...], Listed]:
    """The kernels, and torch's as one of them."""
    values = dict(zip(data["parameters"], data["torch"]["values"], strict=True))
    return _kernels(data, data["kernels"]), _listed("torch", values, "bf16", data["torch"])


@reader_of("blocks.toml")
def narrow(data: dict[str, Any]) -> tuple[Listed, ...]:
    """The kernels of scales of 32 of k."""
    return _kernels(data, data.get("narrow", {}), scale_k=NARROW)


def _kernels(data: dict[str, Any], lines: dict[str, Any], **more: int) -> tuple[Listed, ...]:
    return tuple(
        _listed(name, dict(zip(data["parameters"], line["values"], strict=True)) | more, dtype, line)
        for name, line in lines.items()
        for dtype in line.get("dtypes", data["dtypes"])
    )


def _listed(name: str, parameters: dict[str, Any], dtype: str, line: dict[str, Any]) -> Listed:
    first, last = line["rows"]
    return Listed(
        name, blocks.config_of(parameters, out_dtype=dtype), first, last,
        *(float(line[word]) for word in ("block_ns", "tile_ns", "split_ns")),
    )  # fmt: skip
