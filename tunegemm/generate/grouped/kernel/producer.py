"""The producer warp: fills the ring of weights' and rows' tiles by TMA."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr
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
    """One warp. Loads of weights' and rows' tiles from global memory into the ring."""

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

    @cute.jit
    def run(self, walk, k_tiles, l2_hint):
        """Fill the ring, tile after tile."""
        widths = self.config.widths
        policy = Int64(EVICT_NORMAL)
        if l2_hint == 1:
            policy = Int64(EVICT_FIRST)
        state = self.ring.producer_start()
        unit = walk.first()
        while walk.has(unit):
            place = walk.place(unit)
            if const_expr(len(widths) == 1):
                state = self.fill(place, 0, state, k_tiles, policy)
            else:
                for index in cutlass.range_constexpr(len(widths)):
                    if takes_width(widths, index, place.rows):
                        state = self.fill(place, index, state, k_tiles, policy)
            unit = walk.next(unit, 1)

    @cute.jit
    def fill(self, place, index: cutlass.Constexpr, state, k_tiles, policy):
        """Load what a tile multiplies, k tile after k tile. Returns where the ring then is."""
        config, ring, width = self.config, self.ring, self.config.widths[index]
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
        tBsB, tBgB = views(self.rows[index].atom, self.sB[index], tile)
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
                self.rows[index].atom, tBgB[(None, k_tile)], tBsB[(None, state.stage)], tma_bar_ptr=full
            )
            state = ring.advance(state)
        return state


def views(atom, ring_tensor, tile, modes=2):
    """The stages of a ring and tiles of global memory, of so many modes, as TMA copies one to the other."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(ring_tensor, 0, modes),
        cute.group_modes(tile, 0, modes),
    )  # fmt: skip
