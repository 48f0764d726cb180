"""The producer warp of the Hopper kernel: fills the ring by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

# L2 cache policies of TMA loads, as createpolicy.fractional makes them for the whole of an access.
EVICT_NORMAL = 0x1000000000000000
EVICT_FIRST = 0x12F0000000000000


class Loads:
    """The part of `kernel.Gemm` that the producer warp runs."""

    @cute.jit
    def produce(self, tma_a, mA, tma_b, mB, sA, sB, full, empty, k_tiles, walk, last, total_work, l2_hint):
        """One warp: fill the ring, tile after tile."""
        cta_m, cta_n, _ = cute.arch.block_idx()
        config = self.config
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

        stage = Int32(0)
        phase = Int32(1)  # of a fresh barrier the previous phase counts as done: the ring starts empty
        work, first_k_tile, count, left = self.first_piece(k_tiles, walk)
        # The divisions of a tile's coordinates run while others are waited for: the first tile's under the
        # start of the cluster, the others' under the loads in flight.
        tile_m, tile_n, entry, part = self.tile_of(work, walk)
        if const_expr(self.cluster_size > 1):
            cute.arch.cluster_wait()
        while work < total_work:
            if const_expr(not self.streams):
                first_k_tile = part * k_tiles
            row, column = self.begin(tile_m, tile_n, last)
            # CTAs of one cluster row share A tiles, those of one column share B tiles.
            tAsA, tAgA = self.tile_at(
                tma_a, mA, sA, row, (config.tile_m, config.tile_k), cta_n, config.cluster_n
            )
            tBsB, tBgB = self.tile_at(tma_b, mB, sB, column // halves, b_box, cta_m, config.cluster_m)
            for k_tile in cutlass.range(count, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, config.stage_bytes)
                cute.copy(
                    tma_a,
                    tAgA[(None, first_k_tile + k_tile, entry)],
                    tAsA[(None, stage)],
                    tma_bar_ptr=full + stage,
                    mcast_mask=a_mask,
                    cache_policy=a_policy,
                )
                cute.copy(
                    tma_b,
                    tBgB[(None, first_k_tile + k_tile, entry)],
                    tBsB[(None, stage)],
                    tma_bar_ptr=full + stage,
                    mcast_mask=b_mask,
                    cache_policy=b_policy,
                )
                stage += 1
                if stage == config.stages:
                    stage = Int32(0)
                    phase ^= 1
            work, first_k_tile, count, left = self.next_piece(work, count, left, k_tiles, walk)
            tile_m, tile_n, entry, part = self.tile_of(work, walk)

        # A CTA must outlive the arrivals that its cluster's consumers send to its barriers.
        if const_expr(self.cluster_size > 1):
            for _ in cutlass.range(config.stages, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                stage += 1
                if stage == config.stages:
                    stage = Int32(0)
                    phase ^= 1

    @cute.jit
    def tile_at(
        self, tma, tensor, ring, first, box: cutlass.Constexpr, rank, ways: cutlass.Constexpr
    ):  # fmt: skip
        """A CTA's shares of the ring's stages and of an operand's tile that begins at row `first`."""
        modes = len(box)
        inside = cute.domain_offset((first, *[0] * modes), tensor)
        tile = cute.local_tile(inside, box, (0, None, *[0] * (modes - 2), None))
        return cpasync.tma_partition(
            tma,
            rank,
            cute.make_layout(ways),
            cute.group_modes(ring, 0, modes),
            cute.group_modes(tile, 0, modes),
        )
