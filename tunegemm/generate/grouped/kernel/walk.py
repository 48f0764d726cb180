"""Which tiles of which groups a block takes: each warp finds out for itself, from the offsets on the device.

The tiles of all groups are numbered in a row, group after group; block b takes b, b + grid, b + 2 grid, ...
In clusters so many neighbouring tiles along the product's columns, of the same rows, count as one: cluster c
takes c, c + clusters, ..., and each of its blocks one tile of these, or none of the product's where their
number is odd.
A warp looks at 32 groups at a time, its *window*: each lane holds where its group begins and ends, and how
many tiles there are up to it. So a tile is found by a vote, and the next window, where there is one, by 32
loads and a scan. Nothing is shared, and there is no limit to the number of groups.

Within a group tiles of the same weights follow each other, so that blocks that work at the same time share
them in the L2; of a group with many rows `swizzle_size` tiles of rows at a time.

A group's rows are divided evenly among its tiles where the config has a main loop for each such width: two
tiles of 104 rows, and not one of 176 and one of 32. A narrow tile takes longer than its share, as it loads
the same weights, and blocks would end at different times.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.kernel_rasterization import raster_of, tile_at

LANES = 32


class WalkParams(NamedTuple):
    """What the launch decides."""

    groups: Int32
    rows: Int32
    """Rows of A and D: no group reaches beyond, whatever its offset says."""
    tiles_m: Int32
    """Clusters' tiles along the product's columns."""
    swizzle_size: Int32
    clusters: Int32
    """The grid, in clusters: blocks where they have none."""


class Unit(NamedTuple):
    """A tile by its number, and the window of groups that it lies in."""

    index: Int32
    total: Int32
    """Tiles up to the end of the window; the unit is none where its index is not below."""
    base: Int32
    """The window's first group."""
    before: Int32
    """Tiles of the groups before the window."""
    until: Int32
    """Tiles up to the end of this lane's group."""
    start: Int32
    """The first row of this lane's group."""
    end: Int32
    """The row behind its last."""


class Place(NamedTuple):
    """Where a tile lies. All lanes have the same."""

    column: Int32
    """Its first of the product."""
    row: Int32
    """Its first row in A and D."""
    rows: Int32
    """How many rows of its group there are from there on, at most a tile's: at least one."""
    group: Int32


@dataclass(frozen=True)
class Walk:
    """The tiles of one block: `first`, `next` while `has`, and the `place` of each. For whole warps.

    Blocks of a cluster have as many, in the same order.
    """

    config: GroupedConfig
    params: WalkParams
    offsets: Any
    """Pointer to the groups' ends."""
    lane: Int32
    cluster: Int32
    """The block's."""
    rank: Int32
    """The block's in its cluster."""

    def has(self, unit):
        return unit.index < unit.total

    @cute.jit
    def first(self):
        """This block's first tile."""
        until, start, end = self.window(Int32(0), Int32(0))
        return self.seek(self.cluster, Int32(0), Int32(0), until, start, end)

    @cute.jit
    def next(self, unit, steps: cutlass.Constexpr):
        """The tile that the block takes so many steps later."""
        index, _, base, before, until, start, end = unit
        return self.seek(index + steps * self.params.clusters, base, before, until, start, end)

    @cute.jit
    def seek(self, index, base, before, until, start, end):
        """Move the window to where a tile lies, or to the last one."""
        total = cute.arch.shuffle_sync(until, LANES - 1)
        while total <= index and base + LANES < self.params.groups:
            base += LANES
            before = total
            until, start, end = self.window(base, before)
            total = cute.arch.shuffle_sync(until, LANES - 1)
        return Unit(index, total, base, before, until, start, end)

    @cute.jit
    def window(self, base, before):
        """(tiles up to the end of this lane's group, its first row, the row behind its last)."""
        offsets = cute.make_tensor(self.offsets, cute.make_layout(2**31 - 1))
        group = base + self.lane
        start, end = Int32(0), Int32(0)
        if group < self.params.groups:
            end = offsets[group]
            if group > 0:
                start = offsets[group - 1]
        # Whatever offsets say, no tile begins or ends outside, and no difference leaves 32 bits.
        start = cutlass.min(cutlass.max(start, 0), self.params.rows)
        end = cutlass.min(cutlass.max(end, 0), self.params.rows)
        until = self.row_tiles(cutlass.max(end - start, 0)) * self.params.tiles_m
        for step in cutlass.range_constexpr(5):
            lower = cute.arch.shuffle_sync_up(until, 1 << step)
            if self.lane >= 1 << step:
                until += lower
        return until + before, start, end

    def row_tiles(self, rows):
        return Int32(Uint32(rows + self.config.tile_n - 1) // Uint32(self.config.tile_n))

    def even_rows(self, rows):
        """The rows of each of a group's tiles, the last of which may have fewer."""
        step, tiles = Uint32(self.config.step), Uint32(self.row_tiles(rows))
        steps = Uint32(rows + self.config.step - 1) // step
        return Int32((steps + tiles - Uint32(1)) // tiles * step)

    @cute.jit
    def place(self, unit):
        """Where a tile lies that there is."""
        index, _, base, before, until, start, end = unit
        lane = cute.arch.popc(cute.arch.vote_ballot_sync(until <= index))
        previous = cute.arch.shuffle_sync(until, cutlass.max(lane - 1, 0))
        if lane > 0:
            before = previous
        start = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(start, lane))
        end = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(end, lane))
        raster = raster_of(
            self.params.tiles_m, self.row_tiles(end - start), Int32(1), self.params.swizzle_size
        )
        tile_m, tile_row = tile_at(cute.arch.make_warp_uniform(index - before), raster)
        if const_expr(self.config.cluster_m > 1):
            tile_m = tile_m * self.config.cluster_m + self.rank
        most = Int32(self.config.tile_n)
        if const_expr(self.config.splits_evenly):
            most = self.even_rows(end - start)
        row = start + tile_row * most
        rows = cutlass.min(end - row, most)
        return Place(tile_m * self.config.tile_columns, row, rows, cute.arch.make_warp_uniform(base + lane))
