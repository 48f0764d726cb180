"""Which pieces of work a cluster takes: whole tiles in turn, parts of a split, or a share of stream-K.

Stream-K (arXiv 2301.03598) gives every cluster the same number of k tiles. The first tiles of the walk, as
many as the last wave would leave unbalanced, are laid in a row, k tile after k tile, and the row is cut into
one share for each cluster: the end of a tile, perhaps, and the beginning of another, a piece each. The other
tiles follow whole, a wave at a time, so that sums that had to meet did so long before the end.

All is arithmetic. The number of a piece is tile + cluster: no two pieces share it, and the parts of a tile
have theirs in a row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr


class Pieces:
    """The part of `kernel.Gemm` that knows pieces of work; they are those of `kernel_sums`.

    A piece is (work index, first k tile, k tiles, k tiles of the share from it on); the last two tell
    `next_piece` how to go on. Where no stream-K is compiled, all but the work index are constants.
    """

    @property
    def streams(self):
        return self.config.tile_scheduler == "stream_k"

    @cute.jit
    def share(self, k_tiles, walk):
        """(k tiles of a share, how many of the first shares have one more)."""
        clusters = walk[7]
        total = walk[3] * k_tiles
        each = Int32(Uint32(total) // Uint32(clusters))
        return each, total - each * clusters

    @cute.jit
    def first_piece(self, k_tiles, walk):
        """This cluster's first piece."""
        cluster = walk[10]
        work = Int32(cluster)
        first = Int32(0)
        count = Int32(k_tiles)
        left = Int32(0)
        if const_expr(self.streams):
            each, longer = self.share(k_tiles, walk)
            start = cluster * each + cutlass.min(cluster, longer)
            left = each
            if cluster < longer:
                left += 1
            work += walk[3]
            if left > 0:
                work = Int32(Uint32(start) // Uint32(k_tiles))
                first = start - work * k_tiles
                count = cutlass.min(k_tiles - first, left)
        return work, first, count, left

    @cute.jit
    def next_piece(self, work, count, left, k_tiles, walk):
        """The piece after one that begins with `work`."""
        clusters = walk[7]
        first = Int32(0)
        if const_expr(self.streams):
            left -= count
            count = Int32(k_tiles)
            if left > 0:
                work += 1
                count = cutlass.min(k_tiles, left)
            else:
                if work < walk[3]:
                    work = walk[3] + walk[10]
                else:
                    work += clusters
        else:
            work += clusters
        return work, first, count, left

    @cute.jit
    def has_parts(self, work, walk):
        """Whether the sums of a piece may be a part only."""
        if const_expr(self.streams):
            return work < walk[3]
        return walk[3] > 1

    @cute.jit
    def piece_of(self, work, walk):
        """The number of this cluster's piece with this work index."""
        piece = Int32(work)
        if const_expr(self.streams):
            piece += walk[10]
        elif const_expr(self.config.gathered):
            tile, part = self.split_work(work, walk)
            piece = tile * walk[3] + part
        return piece

    @cute.jit
    def split_work(self, work, walk):
        """(index of the cluster tile, part of k) of a work index. Stream-K's are those of tiles.

        Clusters that read the same k should share a GPC (docs/decisions/0013). Gathered ones that follow each
        other do: parts follow all tiles. Others are dealt to the GPCs in turn: parts of a tile follow each
        other, which at 512x512x65536 in 8 parts, for eight GPCs, gains 2 to 8 per cent (H200, 2026-11-22).
        """
        tile = Int32(work)
        part = Int32(0)
        if const_expr(not self.streams):
            if walk[3] > 1:
                if const_expr(self.config.gathered):
                    tiles = walk[0] * walk[1] * walk[2]
                    part = Int32(Uint32(work) // Uint32(tiles))
                    tile = work - part * tiles
                else:
                    tile = Int32(Uint32(work) // Uint32(walk[3]))
                    part = work - tile * walk[3]
        return tile, part

    @cute.jit
    def parts_of(self, tile, k_tiles, walk):
        """(piece of a tile's first part, how many they are); theirs are in a row."""
        parts = walk[3]
        piece = tile * parts
        if const_expr(self.streams):
            first = self.owner(tile * k_tiles, k_tiles, walk)
            last = self.owner(tile * k_tiles + k_tiles - 1, k_tiles, walk)
            piece = tile + first
            parts = last - first + 1
        return piece, parts

    @cute.jit
    def owner(self, place, k_tiles, walk):
        """The cluster whose share has this k tile of the row."""
        each, longer = self.share(k_tiles, walk)
        behind = place - longer * (each + 1)
        cluster = Int32(0)
        if behind < 0:
            cluster = Int32(Uint32(place) // Uint32(each + 1))
        else:
            cluster = longer + Int32(Uint32(behind) // Uint32(each))
        return cluster
