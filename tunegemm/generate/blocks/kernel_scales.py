"""The block scales of a stage: where they lie, the warps that copy them, and the ring that waits for them.

Scales come by cp.async, one by one, so that they lie in any order and at any address.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from tunegemm.generate.blocks.config import BLOCK, BlockConfig
from tunegemm.generate.cute_sm90.kernel import ring
from tunegemm.generate.cute_sm90.kernel.layouts import START_BARRIER

#: The ring's barriers are there, for the warps that copy scales. They have a barrier of their own: synccheck
#: takes waits for one barrier in two places of the code for threads that diverge.
SCALES_BARRIER = START_BARRIER + 1


class Scales(NamedTuple):
    """Where the scales lie, fp32. Strides count elements."""

    rows_address: Int64
    """(rows, K / 128)"""
    row_stride: Int64
    rows_k_stride: Int64
    weights_address: Int64
    """(N / 128, K / 128)"""
    block_stride: Int64
    weights_k_stride: Int64


WORDS = len(Scales._fields)
"""64-bit arguments of a launch behind those of `cute_sm90`."""


class Ends(NamedTuple):
    """What there are scales of."""

    rows: Int32
    columns: Int32
    """Blocks of columns."""
    k: Int32
    """Blocks of k."""


@dataclass(frozen=True)
class Ring(ring.Ring):
    """A stage is full once TMA has loaded it and each thread that copies its scales has arrived."""

    @cute.jit
    def make_barriers(self):
        config = self.config
        releases = config.tile_warpgroups * ring.WARPS * (config.cluster_m + config.cluster_n - 1)
        for stage in cutlass.range_constexpr(config.stages):
            cute.arch.mbarrier_init(self.full + stage, 1 + 32 * config.scale_warps)
            cute.arch.mbarrier_init(self.empty + stage, releases)

    @cute.jit
    def release(self, stage):
        """Once each lane of the consumer warp has read its scales: one lane arrives for all of them.

        The lane is elected. A branch by a thread's number lets ptxas take the loop of some tiles for one in
        which a warp's threads part: it keeps no descriptor in uniform registers, and the kernel takes up to
        19 % longer.
        """
        cute.arch.sync_warp()
        size = self.config.cluster_size
        with cute.arch.elect_one():
            for peer in cutlass.range_constexpr(size):  # clusters are a line: all multicast to each other
                cute.arch.mbarrier_arrive(self.empty + stage, peer if const_expr(size > 1) else None)

    @cute.jit
    def advance_turn(self, state):
        """The next stage of the same turn. Their number is even, so each stage belongs to one turn: who would
        pass one over could wait for its next round before this one is full.
        """
        stage, phase = state
        stage += self.config.turns
        if stage >= self.config.stages:
            stage -= self.config.stages
            phase ^= 1
        return ring.RingState(stage, phase)

    def before_turn(self, state, turn):
        """Stages from here to the first one of a turn."""
        return (state.stage + turn) & 1


@dataclass(frozen=True)
class ScaleProducer:
    """One of the warps that copy the scales of each stage, or of its turn's stages, into shared memory.

    A warp that computes all addresses for each block of k takes longer than the multiplication, so this one
    computes them once a tile.
    """

    config: BlockConfig
    scales: Scales
    ends: Ends
    sScales: cute.Tensor
    """(SCALE, STAGE)"""
    ring: Ring
    lane: Int32
    turn: Int32
    part: Int32
    """Which of the warps with the same stages this is: each copies as many rows."""

    @cute.jit
    def of_unit(self, schedule, unit, state):
        """Where a work unit begins: its row, column and block of k, and which of its blocks is this turn's
        first; then the stages of that block and of the next unit.
        """
        config, ring, tile = self.config, self.ring, schedule.tile(unit.index)
        block = tile.split * schedule.params.k_tiles
        origin = schedule.origin(tile)
        row, column = origin.row, origin.column
        if const_expr(config.few):
            row, column = origin.column, origin.row
        first, end = Int32(0), state
        if const_expr(config.turns > 1):
            first, end = ring.before_turn(state, self.turn), ring.skip(state, unit.k_tiles)
            state = ring.skip(state, first)
        return row, column, block, first, state, end

    @cute.jit
    def run(self, schedule):
        """Work unit after work unit, as the producer of tiles."""
        config, ring, scales, ends = self.config, self.ring, self.scales, self.ends
        rows = RowScales(config, self.part, self.lane, scales.row_stride)
        first_target = self.sScales.iterator.toint() + rows.first * 4
        weight_target = self.sScales.iterator.toint() + (config.rows + self.lane) * 4
        offsets = rows.offsets()
        row_step = config.turns * scales.rows_k_stride * 4
        weight_step = config.turns * scales.weights_k_stride * 4
        state = ring.producer_start()
        unit = schedule.first()
        while schedule.has(unit):
            row, column, block, first, state, end = self.of_unit(schedule, unit, state)
            # Behind the last row that one's: nothing of it is stored.
            rows.set(offsets, ends.rows - 1 - row)
            begin = Int64(block + first)
            source = Int64(row) * scales.row_stride + begin * scales.rows_k_stride
            source = scales.rows_address + source * 4
            own = cutlass.min(column // BLOCK + self.lane, ends.columns - 1)
            weight = Int64(own) * scales.block_stride + begin * scales.weights_k_stride
            weight = scales.weights_address + weight * 4
            for k_tile in cutlass.range(first, unit.k_tiles, config.turns, unroll=1):
                ring.wait_empty(state)
                # Behind the last block zeros, as TMA brings.
                size = Int32(4) if block + k_tile < ends.k else Int32(0)
                place = state.stage * (config.stage_scales * 4)
                rows.copy(first_target + place, source, offsets, size)
                if self.part == 0 and self.lane < config.spans:
                    copy_async(weight_target + place, weight, size)
                cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + state.stage)
                source += row_step
                weight += weight_step
                state = ring.advance_turn(state)
            if const_expr(config.turns > 1):
                state = end
            unit = schedule.next(unit)


@dataclass(frozen=True)
class RowScales:
    """The row scales that one lane copies: of rows 32 apart, from `first` on."""

    config: BlockConfig
    part: Int32
    lane: Int32
    row_stride: Int64

    @property
    def chunks(self):
        """How many rows each lane copies at most."""
        return -(-self.config.rows // (32 * self.config.scale_warps))

    @property
    def first(self):
        """The lane's first row in the tile."""
        return self.part * (32 * self.chunks) + self.lane

    def offsets(self):
        """Registers for the bytes from the tile's first row to each of the lane's."""
        return cute.make_rmem_tensor(self.chunks, Int32)

    @cute.jit
    def set(self, offsets, last):
        """last: the last row that has a scale, counted from the tile's first."""
        stride = Int32(self.row_stride) * 4
        for chunk in cutlass.range_constexpr(self.chunks):
            offsets[chunk] = cutlass.min(self.first + 32 * chunk, last) * stride

    @cute.jit
    def copy(self, target, source, offsets, size):
        """Copy the scales of one block of k. source: where that of the tile's first row lies."""
        for chunk in cutlass.range_constexpr(self.chunks):
            if const_expr(self.config.rows % (32 * self.chunks * self.config.scale_warps) == 0):
                copy_async(target + 128 * chunk, source + Int64(offsets[chunk]), size)
            elif self.first + 32 * chunk < self.config.rows:
                copy_async(target + 128 * chunk, source + Int64(offsets[chunk]), size)


def copy_async(target, source, size):
    """cp.async of 4 bytes to shared memory, of which the first `size` are read and the rest zeros."""
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};", read_only_args=[target, source, size]
    )
