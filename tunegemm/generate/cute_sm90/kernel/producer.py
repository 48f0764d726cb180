"""The producer warp: fills the ring of A and B tiles by TMA."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from tunegemm.generate.cute_sm90.config import KernelConfig
from tunegemm.generate.cute_sm90.kernel.layouts import TmaTensor
from tunegemm.generate.cute_sm90.kernel.ring import Ring

# L2 cache policies of TMA loads, as createpolicy.fractional makes them for the whole of an access.
EVICT_NORMAL = 0x1000000000000000
EVICT_FIRST = 0x12F0000000000000


@dataclass(frozen=True)
class Producer:
    """One warp. Loads of A and B tiles, multicast in a cluster, from global memory into the ring."""

    config: KernelConfig
    a: TmaTensor
    """(M, K, L)"""
    b: TmaTensor
    """(N, K, L), or of gated halves (N / 2, K, 2, L): see `Layouts.gated_halves`."""
    sA: cute.Tensor
    """(bM, bK, STAGE)"""
    sB: cute.Tensor
    """(bN, bK, STAGE), or (bN / 2, bK, 2, STAGE)"""
    ring: Ring

    @cute.jit
    def run(self, schedule, l2_hint):
        """Fill the ring, work unit after work unit."""
        config, ring = self.config, self.ring
        cta_m, cta_n, _ = cute.arch.block_idx()
        cta_layout = cute.make_layout((config.cluster_m, config.cluster_n))
        b_box, halves = (config.tile_n, config.tile_k), 1
        if const_expr(config.gates_halves):
            b_box, halves = (config.tile_n // 2, config.tile_k, 2), 2
        a_mask = None
        b_mask = None
        if const_expr(config.cluster_n > 1):
            a_mask = cute.make_layout_image_mask(cta_layout, (cta_m, cta_n), mode=1)
        if const_expr(config.cluster_m > 1):
            b_mask = cute.make_layout_image_mask(cta_layout, (cta_m, cta_n), mode=0)

        a_policy = Int64(EVICT_NORMAL)
        b_policy = Int64(EVICT_NORMAL)
        if l2_hint == 1:
            a_policy = Int64(EVICT_FIRST)
        if l2_hint == 2:
            b_policy = Int64(EVICT_FIRST)

        state = ring.producer_start()
        unit = schedule.first()
        # The divisions of a tile's coordinates run while others are waited for: the first tile's under the
        # start of the cluster, the others' under the loads in flight.
        tile = schedule.tile(unit.index)
        if const_expr(config.cluster_size > 1):
            cute.arch.cluster_wait()
        while schedule.has(unit):
            first_k_tile = unit.first_k_tile
            if const_expr(not schedule.streams):
                first_k_tile = tile.split * schedule.params.k_tiles
            origin = schedule.origin(tile)
            # CTAs of one cluster row share A tiles, those of one column share B tiles.
            # tAsA: ((ATOM_V, REST_V), STAGE), tAgA: ((ATOM_V, REST_V), RestK, L); those of B alike
            tAsA, tAgA = self.partition(
                self.a, self.sA, origin.row, (config.tile_m, config.tile_k), cta_n, config.cluster_n
            )
            tBsB, tBgB = self.partition(
                self.b, self.sB, origin.column // halves, b_box, cta_m, config.cluster_m
            )
            for k_tile in cutlass.range(unit.k_tiles, unroll=1):
                ring.wait_empty(state)
                ring.expect_bytes(state)
                cute.copy(
                    self.a.atom,
                    tAgA[(None, first_k_tile + k_tile, tile.batch)],
                    tAsA[(None, state.stage)],
                    tma_bar_ptr=ring.full + state.stage,
                    mcast_mask=a_mask,
                    cache_policy=a_policy,
                )
                cute.copy(
                    self.b.atom,
                    tBgB[(None, first_k_tile + k_tile, tile.batch)],
                    tBsB[(None, state.stage)],
                    tma_bar_ptr=ring.full + state.stage,
                    mcast_mask=b_mask,
                    cache_policy=b_policy,
                )
                state = ring.advance(state)
            unit = schedule.next(unit)
            tile = schedule.tile(unit.index)

        # A CTA must outlive the arrivals that its cluster's consumers send to its barriers.
        if const_expr(config.cluster_size > 1):
            for _ in cutlass.range(config.stages, unroll=1):
                ring.wait_empty(state)
                state = ring.advance(state)

    @cute.jit
    def partition(
        self, operand, ring_tensor, first_row, box: cutlass.Constexpr, rank, ways: cutlass.Constexpr
    ):  # fmt: skip
        """A CTA's shares of the ring's stages and of an operand's tile that begins at row `first_row`."""
        modes = len(box)
        # (M, K, L) from the tile's first row on; of gated halves (N / 2, K, 2, L)
        inside = cute.domain_offset((first_row, *[0] * modes), operand.tensor)
        # (bM, bK, RestK, L); of gated halves (bN / 2, bK, 2, RestK, L)
        tile = cute.local_tile(inside, box, (0, None, *[0] * (modes - 2), None))
        return cpasync.tma_partition(
            operand.atom,
            rank,
            cute.make_layout(ways),
            cute.group_modes(ring_tensor, 0, modes),
            cute.group_modes(tile, 0, modes),
        )
