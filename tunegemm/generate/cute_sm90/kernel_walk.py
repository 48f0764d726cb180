"""From a work index to a tile of the Hopper kernel, and to where that begins."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

# Where a tile begins that begins nowhere inside.
NOWHERE = 2**31 - 1


class Walk:
    """The part of `kernel.Gemm` that knows which tile is next, and where it lies."""

    @cute.jit
    def last_begins(self, m, n, d_address, words):
        """Row and column where the last tiles begin: inside, so that they end with the matrix.

        What hangs over the edge TMA fills with zeros, more slowly than it loads. Where tiles overlap they
        store the same values twice. But for two cases: stream-K cuts tiles at different places of k, so that
        their sums differ in the last bits; and a matrix that an epilogue reads where D lies must be read by
        one tile alone, before it stores.
        """
        config = self.config
        if const_expr(self.streams):
            return Int32(NOWHERE), Int32(NOWHERE)
        unit_m, unit_n = config.edge_units
        last_m = cute.ceil_div(cutlass.max(m - config.tile_m, 0), unit_m) * unit_m
        last_n = cute.ceil_div(cutlass.max(n - config.tile_n, 0), unit_n) * unit_n
        word = 0
        for operand in cutlass.range_constexpr(len(self.epilogue.operands)):
            described = self.epilogue.operands[operand]
            if const_expr(described.kind == "matrix"):
                if words[word] == d_address:
                    last_m = Int32(NOWHERE)
                    last_n = Int32(NOWHERE)
            word += described.words
        return last_m, last_n

    @cute.jit
    def begin(self, tile_m, tile_n, last):
        """First row and column of a tile."""
        row, column = tile_m * self.config.tile_m, tile_n * self.config.tile_n
        return cutlass.min(row, last[0]), cutlass.min(column, last[1])

    @cute.jit
    def place_in_walk(self, places):
        """The first work index of this block's cluster: its own index, or what the table has for that."""
        _, _, cluster = cute.arch.block_idx()
        place = Int32(cluster)
        if const_expr(self.config.gathered):
            if places.toint() != 0:
                place = cute.make_tensor(places, cute.make_layout(NOWHERE))[cluster]
            # The compiler does not know that all threads of a block load the same.
            place = cute.arch.make_warp_uniform(place)
        return place

    @cute.jit
    def tile_of(self, work, walk):
        """(tile m, tile n, batch entry, part of k) of this CTA for a work index."""
        cta_m, cta_n, _ = cute.arch.block_idx()
        tile, part = self.split_work(work, walk)
        tile_m, tile_n, entry = self.cluster_tile_of(tile, walk)
        return tile_m * self.config.cluster_m + cta_m, tile_n * self.config.cluster_n + cta_n, entry, part

    @cute.jit
    def cluster_tile_of(self, tile, walk):
        """(cluster tile along m, along n, batch entry) for a tile's index.

        Batch entries are outermost. The walk over an entry goes along the raster order's mode in bands
        `swizzle_size` cluster tiles wide; the last band may be narrower, so no index is a phantom tile. It
        goes line by line; where clusters are gathered block by block, so that tiles which follow each other
        make a rectangle of so many across the band and along it.
        """
        work_m, work_n, _, _, raster_along_m, swizzle_size, _, _, block_across, block_along = walk[:10]
        length = work_n
        width = work_m
        if raster_along_m != 0:
            length = work_m
            width = work_n
        per_entry = work_m * work_n
        rest = Int32(tile)
        entry = Int32(0)
        if rest >= per_entry:  # most launches have one entry: no division for them
            entry = Int32(Uint32(rest) // Uint32(per_entry))
            rest -= entry * per_entry
        band = Int32(Uint32(rest) // Uint32(length * swizzle_size))
        rest -= band * length * swizzle_size
        first = band * swizzle_size
        columns = width - first
        if columns > swizzle_size:
            columns = swizzle_size
        step = Int32(0)
        if const_expr(self.config.gathered):
            lines = Int32(Uint32(rest) // Uint32(columns * block_along)) * block_along
            rest -= lines * columns
            deep = cutlass.min(block_along, length - lines)
            before = Int32(Uint32(rest) // Uint32(block_across * deep)) * block_across
            rest -= before * deep
            first += before
            columns = cutlass.min(block_across, columns - before)
            step = lines
        line = Int32(Uint32(rest) // Uint32(columns))
        across = first + rest - line * columns
        step += line
        tile_m = across
        tile_n = step
        if raster_along_m != 0:
            tile_m = step
            tile_n = across
        return tile_m, tile_n, entry

    @cute.jit
    def place_of(self, work, walk, last):
        """Of the tile of a work index: first row and column, entry of the batch."""
        tile_m, tile_n, entry, _ = self.tile_of(work, walk)
        row, column = self.begin(tile_m, tile_n, last)
        return row, column, entry
