"""Chooses the kernel of db/joined.toml that multiplies one A by several separate weights, by an estimate.

With few rows, the estimate is the time to read the weights from memory; with many rows, it counts the waves
of tiles. Functions here raise BadValueError if the table is damaged.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunegemm.generate import joined
from tunegemm.generate.cute_sm90.config import KernelConfig
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.model.tables import reader_of

#: Memory bandwidth in GB/s by a word in the GPU's name: the one that recorded kernels reach, and the one of a
#: single multiprocessor if few of them read (one row, 40 to 64 tiles; db/records, 2026-11-24).
_GBS = {"H200": (4300.0, 68.0), "": (3000.0, 61.0)}
_SMS = 132
"""Multiprocessors of an H100 and of an H200."""
_WAVE_NS = 300.0
"""Time of each wave of tiles beyond that of its bytes."""
_MOST_BY_MEMORY = 64
"""Up to this many rows memory bounds a product; above, the waves of tiles do."""
_MOST_BY_WIDER = 512
"""Up to this many rows small tiles fill a GPU that large tiles of narrow weights leave half idle."""


@dataclass(frozen=True)
class JoinedChoice:
    """A kernel and its launch: the keyword arguments of `JoinedKernel.bound`, except the device."""

    name: str
    """Its name in the table."""
    config: KernelConfig
    l2_hint: int = 0

    @property
    def words(self) -> Mapping[str, Any]:
        return {"l2_hint": self.l2_hint}


def choose(
    rows: int, ns: Sequence[int], k: int, *,
    gate: str = "", dtype: str = "bf16", bias: bool = False, gpu: str = "", path: Path | None = None,
) -> JoinedChoice | None:  # fmt: skip
    """The kernel for A (rows x K) and weights (each N x K); None if the table has none for such a product.

    ns: N of each weight; two equal values with a gate. gate: a gated step of `tunegemm.describe.epilogue`,
    such as swiglu. bias: whether any weight has a bias. gpu: its name, such as NVIDIA H200.
    """
    parts = list(ns[:1] if gate else ns)
    results = [
        each for each in candidates(gate=gate, dtype=dtype, bias=bias, path=path) if each.fits(rows, parts)
    ]
    inside = [each for each in results if each.serves(rows)]
    if not inside:  # narrow weights and many rows: take the kernels for the most rows
        most = max((each.last_row for each in results), default=0)
        inside = [each for each in results if each.last_row == most]
    best = min(inside, key=lambda each: each.estimate(rows, parts, k, gpu), default=None)
    return None if best is None else best.choice


def listed(path: Path | None = None) -> tuple[KernelConfig, ...]:
    """All kernels of the table, which ship compiled."""
    return tuple(dict.fromkeys(each.choice.config for each in _table(path)))


def candidates(
    *, gate: str = "", dtype: str = "bf16", bias: bool = False, path: Path | None = None
) -> tuple[Listed, ...]:
    """The kernels for a kind of product."""
    asked = dtype, gate, bias
    return tuple(each for each in _table(path) if (each.dtype, each.gate, bias) == asked and each.takes(bias))


@dataclass(frozen=True)
class Listed:
    """A kernel of the table."""

    choice: JoinedChoice
    dtype: str
    gate: str
    biased: bool
    """Whether it was compiled for biases; all kernels for few rows take them."""
    first_row: int
    last_row: int
    """`first_row` to `last_row`: the rows that the kernel is for; it also serves others if no kernel is."""
    relative: float
    wider: float | None = None
    """`relative` beyond _MOST_BY_MEMORY rows, for a kernel that also serves up to _MOST_BY_WIDER."""

    def serves(self, rows: int) -> bool:
        """Whether the kernel is for so many rows."""
        return self.first_row <= rows <= (self.last_row if self.wider is None else _MOST_BY_WIDER)

    def takes(self, bias: bool) -> bool:
        """Whether the kernel takes products with biases, or without if `bias` is false."""
        return isinstance(self.choice.config, GroupedConfig) or self.biased == bias

    def fits(self, rows: int, ns: Sequence[int]) -> bool:
        """Whether no weight is narrower than a tile of a kernel for many rows; the last one may be."""
        config = self.choice.config
        return isinstance(config, GroupedConfig) or all(n >= config.tile_n for n in ns[:-1])

    def estimate(self, rows: int, ns: Sequence[int], k: int, gpu: str) -> float:
        """A number that ranks kernels for these rows and weights: the smallest predicts the fastest."""
        config = self.choice.config
        tiles = joined.tiles_of(config, rows, ns) * config.cluster_size
        if rows > _MOST_BY_MEMORY:
            relative = self.relative if self.wider is None else self.wider
            return -(-tiles // _SMS) * config.tile_m * config.tile_n / relative
        memory, of_sm = next(rates for word, rates in _GBS.items() if word in gpu)
        tile_bytes = 2 * k * (config.tile_m if isinstance(config, GroupedConfig) else config.tile_n)
        waves, rest = divmod(tiles, _SMS)
        last_ns = max(rest * tile_bytes / memory, tile_bytes / of_sm if rest else 0.0)
        waves_ns = waves * (_SMS * tile_bytes / memory + _WAVE_NS)
        return (waves_ns + last_ns + (_WAVE_NS if rest else 0.0)) / self.relative


@reader_of("joined.toml")
def _table(table: dict[str, Any]) -> tuple[Listed, ...]:
    return tuple(
        each
        for dtype in table["dtypes"]
        for form in ("few", "many")
        for name, words in table[form].items()
        if name != "parameters"
        for each in _listed(name, form, dtype, table[form]["parameters"], **words)
    )


def _listed(
    name: str, form: str, dtype: str, parameters: Sequence[str], *,
    values: Sequence[int], rows: Sequence[int], relative: float = 1.0, gates: Sequence[str] = ("",),
    biased: bool = False, l2_hint: int = 0, wider: float | None = None,
) -> list[Listed]:  # fmt: skip
    """The kernels of a line of the table: one per gate, and for many rows one with biases if `biased`."""
    tile: dict[str, Any] = dict(zip(parameters, values, strict=True))
    first, last = rows
    results = []
    for gate, bias in itertools.product(gates, (False, True)[: 1 + biased]):
        config: KernelConfig
        if form == "few":
            config = joined.few({"schedule": "cooperative"} | tile, dtype=dtype, gate=gate)
        else:
            config = joined.many(tile, dtype=dtype, gate=gate, bias=bias)
        choice = JoinedChoice(name, config, l2_hint)
        results.append(Listed(choice, dtype, gate, bias, first, last, relative, wider))
    return results
