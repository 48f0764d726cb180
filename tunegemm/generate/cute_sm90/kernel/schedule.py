"""Which work units a cluster takes: whole tiles in turn, k splits of tiles, or a share of stream-K.

Stream-K (arXiv 2301.03598) gives every cluster the same number of k tiles. The first tiles, as many as the
last wave would leave unbalanced, are laid in a row, k tile after k tile, and the row is cut into one share
for each cluster: the end of a tile, perhaps, and the beginning of another, a work unit each. The other tiles
follow whole, a wave at a time, so that sums that had to meet did so long before the end.

All is arithmetic. The number of a unit is tile + cluster: no two units share it, and the k splits of a tile
have theirs in a row.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from tunegemm.generate.cute_sm90.config import KernelConfig
from tunegemm.generate.kernel_rasterization import Block, raster_of, tile_at

#: Where a tile begins that begins nowhere inside.
NOWHERE = 2**31 - 1


class ScheduleParams(NamedTuple):
    """What the launch decides. Tiles are those of clusters."""

    k_tiles: Int32
    """k tiles of a work unit; of stream-K those of a whole tile."""
    tiles_m: Int32
    tiles_n: Int32
    batch: Int32
    split_k: Int32
    """k splits of every tile; of stream-K the tiles that are cut."""
    raster_along_m: Int32
    swizzle_size: Int32
    second_kernel: Int32
    """1 where a second kernel adds up the k splits, else 0."""
    clusters: Int32
    """The grid."""
    block_across: Int32
    """The block of GPC-aware rasterization: see `kernel_rasterization.Block`."""
    block_along: Int32
    last_row: Int32
    """Where the last tiles begin, see `last_origin`."""
    last_column: Int32


class WorkUnit(NamedTuple):
    """What a cluster multiplies next. Where no stream-K is compiled, all but the index are constants."""

    index: Int32
    """The index of the tile and its k split; of stream-K that of the tile."""
    first_k_tile: Int32
    k_tiles: Int32
    share: Int32
    """k tiles of the cluster's share of stream-K from this unit on."""


class TileCoord(NamedTuple):
    """Where a CTA works: its tile along m and n, batch entry, k split."""

    m: Int32
    n: Int32
    batch: Int32
    split: Int32


class Origin(NamedTuple):
    """First row and column of a tile in the product, and its batch entry."""

    row: Int32
    column: Int32
    batch: Int32


def streams(config):
    return config.tile_scheduler == "stream_k"


@cute.jit
def last_origin(config, m, n, reads_d):
    """Row and column where the last tiles begin: inside, so that they end with the matrix.

    What hangs over the edge TMA fills with zeros, more slowly than it loads. Where tiles overlap they store
    the same values twice. But for two cases: stream-K cuts tiles at different places of k, so that their sums
    differ in the last bits; and a matrix that an epilogue reads where D lies must be read by one tile alone,
    before it stores. reads_d: for each matrix of the epilogue, whether it lies there.
    """
    if const_expr(streams(config)):
        return Int32(NOWHERE), Int32(NOWHERE)
    unit_m, unit_n = config.edge_units
    last_m = cute.ceil_div(cutlass.max(m - config.tile_m, 0), unit_m) * unit_m
    last_n = cute.ceil_div(cutlass.max(n - config.tile_n, 0), unit_n) * unit_n
    for matrix in cutlass.range_constexpr(len(reads_d)):
        if reads_d[matrix]:
            last_m = Int32(NOWHERE)
            last_n = Int32(NOWHERE)
    return last_m, last_n


@cute.jit
def first_index(config, first_tiles):
    """The first work index of this block's cluster: its own index, or what a table has for it."""
    _, _, cluster = cute.arch.block_idx()
    first = Int32(cluster)
    if const_expr(config.gpc_aware):
        if first_tiles.toint() != 0:
            first = cute.make_tensor(first_tiles, cute.make_layout(NOWHERE))[cluster]
        # The compiler does not know that all threads of a block load the same.
        first = cute.arch.make_warp_uniform(first)
    return first


@dataclass(frozen=True)
class Schedule:
    """The work units of one cluster: `first`, `next` while `has`, and the `tile` of each."""

    config: KernelConfig
    params: ScheduleParams
    cluster: Any = None
    """`first_index` of the cluster; the second kernel, which has none, asks for tiles only."""
    end: Any = None
    """Indices of work units are below."""

    @property
    def streams(self):
        return streams(self.config)

    def tiles(self):
        """Tiles of all clusters."""
        return self.params.tiles_m * self.params.tiles_n * self.params.batch

    def begun_by(self, cluster):
        """The schedule as a cluster goes through it."""
        end = self.tiles()
        if not self.streams:
            end *= self.params.split_k
        return Schedule(self.config, self.params, cluster, end)

    # ---- which units --------------------------------------------------------------------------------

    def has(self, unit):
        return unit.index < self.end

    @cute.jit
    def first(self):
        """This cluster's first work unit."""
        k_tiles = self.params.k_tiles
        index = Int32(self.cluster)
        first_k_tile = Int32(0)
        count = Int32(k_tiles)
        share = Int32(0)
        if const_expr(self.streams):
            each, longer = self._shares()
            start = self.cluster * each + cutlass.min(self.cluster, longer)
            share = each
            if self.cluster < longer:
                share += 1
            index += self.params.split_k
            if share > 0:
                index = Int32(Uint32(start) // Uint32(k_tiles))
                first_k_tile = start - index * k_tiles
                count = cutlass.min(k_tiles - first_k_tile, share)
        return WorkUnit(index, first_k_tile, count, share)

    @cute.jit
    def next(self, unit):
        """The unit that this cluster takes after another."""
        params = self.params
        index, _, count, share = unit
        if const_expr(self.streams):
            share -= count
            count = Int32(params.k_tiles)
            if share > 0:
                index += 1
                count = cutlass.min(params.k_tiles, share)
            else:
                if index < params.split_k:
                    index = params.split_k + self.cluster
                else:
                    index += params.clusters
        else:
            index += params.clusters
        return WorkUnit(index, Int32(0), count, share)

    # ---- where a unit lies --------------------------------------------------------------------------

    @cute.jit
    def tile(self, index):
        """This CTA's tile of a work unit."""
        config = self.config
        cta_m, cta_n, _ = cute.arch.block_idx()
        tile, split = self.tile_and_split(index)
        tile_m, tile_n, batch = self.cluster_tile(tile)
        return TileCoord(tile_m * config.cluster_m + cta_m, tile_n * config.cluster_n + cta_n, batch, split)

    @cute.jit
    def tile_and_split(self, index):
        """(index of the cluster tile, k split) of a work unit. Stream-K's indices are those of tiles.

        Clusters that read the same k should share a GPC (docs/decisions/0013). With GPC-aware rasterization
        those that follow each other do: k splits follow all tiles. Others are dealt to the GPCs in turn: the
        k splits of a tile follow each other, which at 512x512x65536 in 8 splits, for eight GPCs, gains 2 to 8
        per cent (H200, 2026-11-22).
        """
        tile = Int32(index)
        split = Int32(0)
        if const_expr(not self.streams):
            if self.params.split_k > 1:
                if const_expr(self.config.gpc_aware):
                    tiles = self.tiles()
                    split = Int32(Uint32(index) // Uint32(tiles))
                    tile = index - split * tiles
                else:
                    tile = Int32(Uint32(index) // Uint32(self.params.split_k))
                    split = index - tile * self.params.split_k
        return tile, split

    @cute.jit
    def cluster_tile(self, tile):
        """(cluster tile along m, along n, batch entry) for a tile's index. Batch entries are outermost."""
        params = self.params
        raster = raster_of(params.tiles_m, params.tiles_n, params.raster_along_m, params.swizzle_size)
        per_entry = params.tiles_m * params.tiles_n
        rest = Int32(tile)
        batch = Int32(0)
        if rest >= per_entry:  # most launches have one entry: no division for them
            batch = Int32(Uint32(rest) // Uint32(per_entry))
            rest -= batch * per_entry
        block = None
        if const_expr(self.config.gpc_aware):
            block = Block(params.block_across, params.block_along)
        tile_m, tile_n = tile_at(rest, raster, block)
        return tile_m, tile_n, batch

    def origin(self, tile):
        """Where a CTA's tile begins."""
        row, column = tile.m * self.config.tile_m, tile.n * self.config.tile_n
        return Origin(
            cutlass.min(row, self.params.last_row), cutlass.min(column, self.params.last_column), tile.batch
        )

    # ---- the k splits of a tile ---------------------------------------------------------------------

    def is_split(self, unit):
        """Whether the sums of a unit may be a k split's only."""
        if self.streams:
            return unit.index < self.params.split_k
        return self.params.split_k > 1

    @cute.jit
    def number(self, unit):
        """The number of this cluster's unit: its place in the workspace."""
        number = Int32(unit.index)
        if const_expr(self.streams):
            number += self.cluster
        elif const_expr(self.config.gpc_aware):
            tile, split = self.tile_and_split(unit.index)
            number = tile * self.params.split_k + split
        return number

    @cute.jit
    def splits(self, tile):
        """(number of the unit with a tile's first k split, how many splits it has); numbers are in a row."""
        splits = self.params.split_k
        number = tile * splits
        if const_expr(self.streams):
            k_tiles = self.params.k_tiles
            first = self._cluster_with(tile * k_tiles)
            last = self._cluster_with(tile * k_tiles + k_tiles - 1)
            number = tile + first
            splits = last - first + 1
        return number, splits

    def _shares(self):
        """Stream-K: (k tiles of a share, how many of the first shares have one more)."""
        total = self.params.split_k * self.params.k_tiles
        each = Int32(Uint32(total) // Uint32(self.params.clusters))
        return each, total - each * self.params.clusters

    @cute.jit
    def _cluster_with(self, k_tile):
        """Stream-K: the cluster whose share has this k tile of the row."""
        each, longer = self._shares()
        behind = k_tile - longer * (each + 1)
        cluster = Int32(0)
        if behind < 0:
            cluster = Int32(Uint32(k_tile) // Uint32(each + 1))
        else:
            cluster = longer + Int32(Uint32(behind) // Uint32(each))
        return cluster
