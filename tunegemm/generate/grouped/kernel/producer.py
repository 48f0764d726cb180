"""The producer warp: fills the ring of weights' and rows' tiles by TMA."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from tunegemm.describe.problem import DTYPE_BYTES
from tunegemm.generate.cute_sm90.kernel.layouts import TmaTensor
from tunegemm.generate.cute_sm90.kernel.producer import EVICT_FIRST, EVICT_NORMAL
from tunegemm.generate.cute_sm90.kernel.ring import Ring
from tunegemm.generate.grouped.config import GroupedConfig


def takes_width(widths, index, rows):
    """Whether so many rows are loaded and multiplied as `widths[index]`: the narrowest that has room."""
    if index == 0:
        return rows <= widths[0]
    if index == len(widths) - 1:
        return rows > widths[index - 1]
    return cutlass.and_(rows > widths[index - 1], rows <= widths[index])


@dataclass(frozen=True)
class Producer:
    """One warp. Loads of weights' and rows' tiles from global memory into the ring.

    Blocks of a cluster have rows in common: each loads its share of them into the rings of all.
    """

    config: GroupedConfig
    weights: TmaTensor
    """(N, K, GROUP); with a gate (8, K, 2, N / 8, GROUP): see `gemm.gated_weights`."""
    rows: tuple
    """(ROW, K) for each of the config's widths"""
    sA: cute.Tensor
    """(bM, bK, STAGE); with a gate (8, bK, 2, bM / 16, STAGE)"""
    sB: tuple
    """(width, bK, STAGE) for each of the widths"""
    ring: Ring
    rank: Int32
    """The block's in its cluster."""

    @cute.jit
    def run(self, walk, k_tiles, l2_hint):
        """Fill the ring, tile after tile."""
        widths = self.config.widths
        policy = Int64(EVICT_NORMAL)
        if l2_hint == 1:
            policy = Int64(EVICT_FIRST)
        state = self.ring.producer_start()
        unit = walk.first()
        if const_expr(self.config.cluster_size > 1):
            cute.arch.cluster_wait()
        while walk.has(unit):
            place = walk.place(unit)
            if const_expr(len(widths) == 1):
                state = self.fill(place, 0, state, k_tiles, policy)
            else:
                for index in cutlass.range_constexpr(len(widths)):
                    if takes_width(widths, index, place.rows):
                        state = self.fill(place, index, state, k_tiles, policy)
            unit = walk.next(unit, 1)
        # A block must outlive the arrivals that its cluster's consumers send to its barriers.
        if const_expr(self.config.cluster_size > 1):
            for _ in cutlass.range(self.config.stages, unroll=1):
                self.ring.wait_empty(state)
                state = self.ring.advance(state)

    @cute.jit
    def fill(self, place, index: cutlass.Constexpr, state, k_tiles, policy):
        """Load what a tile multiplies, k tile after k tile. Returns where the ring then is."""
        config, ring, width = self.config, self.ring, self.config.widths[index]
        everyone = None
        if const_expr(config.cluster_size > 1):
            everyone = Int16((1 << config.cluster_size) - 1)
        # Whichever block of the cluster has loaded them.
        stage_bytes = (config.tile_m + width) * config.tile_k * DTYPE_BYTES[config.in_dtype]
        if const_expr(config.fused.gated):
            inside = cute.domain_offset((0, 0, 0, place.column // 8, 0), self.weights.tensor)
            box = (8, config.tile_k, 2, config.tile_m // 16)
            tile = cute.local_tile(inside, box, (0, None, 0, 0, None))  # (*box, RestK, GROUP)
            tAsA, tAgA = views(self.weights.atom, self.sA, tile, 4)
        else:
            inside = cute.domain_offset((place.column, 0, 0), self.weights.tensor)
            tile = cute.local_tile(inside, (config.tile_m, config.tile_k), (0, None, None))
            tAsA, tAgA = views(self.weights.atom, self.sA, tile)  # of (bM, bK, RestK, GROUP)
        inside = cute.domain_offset((place.row, 0), self.rows[index].tensor)
        tile = cute.local_tile(inside, (width, config.tile_k), (0, None))  # (width, bK, RestK)
        tBsB, tBgB = views(self.rows[index].atom, self.sB[index], tile, 2, self.rank, config.cluster_m)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            ring.wait_empty(state)
            full = ring.full + state.stage
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, stage_bytes)
            cute.copy(
                self.weights.atom, tAgA[(None, k_tile, place.group)], tAsA[(None, state.stage)],
                tma_bar_ptr=full, cache_policy=policy,
            )  # fmt: skip
            cute.copy(
                self.rows[index].atom, tBgB[(None, k_tile)], tBsB[(None, state.stage)],
                tma_bar_ptr=full, mcast_mask=everyone,
            )  # fmt: skip
            state = ring.advance(state)
        return state


def views(atom, ring_tensor, tile, modes=2, rank=0, ways=1):
    """The stages of a ring and tiles of global memory, of so many modes, as TMA copies one to the other; of
    as many blocks as load a tile the share of one.
    """
    return cpasync.tma_partition(
        atom, rank, cute.make_layout(ways), cute.group_modes(ring_tensor, 0, modes),
        cute.group_modes(tile, 0, modes),
    )  # fmt: skip
