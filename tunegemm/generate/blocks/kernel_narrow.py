"""Scales of 32 of k, fp32 or E8M0: the warps that copy them into the ring, and the sums that they scale.

A WGMMA of fp8 multiplies 32 of k, so a stage has four groups, each with a scale for every line: a row of the
product, or of the weights. In shared memory they are fp32, group after group, the rows' lines first. Behind
them each copying warp says whether one is of an unusual magnitude.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from tunegemm.generate.blocks.config import GROUPS, BlockConfig
from tunegemm.generate.blocks.kernel_scales import ScaleProducer, copy_async
from tunegemm.generate.cute_sm90.kernel.fusion import first_row_of

#: Bits of 2^-100 and 2^100. A WGMMA's sums may be multiplied by scales in between, or by 0, in any order.
SMALL, LARGE = 27 << 23, 227 << 23
#: Those of 1.
ONE = 127 << 23


class LineEnds(NamedTuple):
    """What there are scales of."""

    rows: Int32
    columns: Int32
    k: Int32
    """Groups of 32 of k."""
    sharing: Int32
    """Rows of the weights that share a scale."""


@dataclass(frozen=True)
class Lines:
    """The scales of one operand that one lane copies: of lines 32 apart."""

    config: BlockConfig
    words: cute.Tensor
    """(SCALE, STAGE): shared memory, as int32."""
    begin: int
    """The operand's first line there."""
    count: int
    stride: Int32
    """Bytes from the scales of a line to those of the next that shares none."""
    k_stride: Int32
    """Bytes from one group's scale to the next's: 1 of E8M0, whose lines begin at multiples of 4 bytes."""
    lane: Int32
    part: Int32

    @property
    def chunks(self):
        """How many lines each lane copies at most."""
        return -(-self.count // (32 * self.config.scale_warps))

    def line(self, chunk):
        """One of the lane's lines, in the tile."""
        return self.part * (32 * self.chunks) + self.lane + 32 * chunk

    @cute.jit
    def offsets_of(self, offsets, first, last, sharing):
        """The bytes from the scales of the tile's first line to those of the lane's; behind the last line
        there is, that one's.
        """
        for chunk in cutlass.range_constexpr(self.chunks):
            blocks = cutlass.min(first + self.line(chunk), last) // sharing - first // sharing
            offsets[chunk] = blocks * self.stride

    @cute.jit
    def copy(self, offsets, source, stage, left):
        """Copy the scales of a stage. source: where those of the tile's first line lie. left: groups from
        there on; behind the last one zeros, as TMA brings.
        """
        for chunk in cutlass.range_constexpr(self.chunks):
            if self.line(chunk) < self.count:
                place = stage * self.config.stage_scales + (self.begin + self.line(chunk))
                target = self.words.iterator.toint() + place * 4
                own = source + Int64(offsets[chunk])
                if self.k_stride == 1:  # four bytes, which `finish` takes apart
                    copy_async(target, own, cutlass.min(cutlass.max(left, 0), GROUPS))
                else:
                    for group in cutlass.range_constexpr(GROUPS):
                        size = Int32(4) if group < left else Int32(0)
                        copy_async(target + group * (4 * self.config.lines), own, size)
                        own += Int64(self.k_stride)

    @cute.jit
    def finish(self, stage, plain):
        """Make fp32 of a stage's E8M0. Returns whether `plain` holds and the lane's scales are usual."""
        words = self.words
        for chunk in cutlass.range_constexpr(self.chunks):
            if self.line(chunk) < self.count:
                line = self.begin + self.line(chunk)
                if self.k_stride == 1:
                    word = words[line, stage]
                    for group in cutlass.range_constexpr(GROUPS):
                        exponent = (word >> (8 * group)) & 255
                        # 0 is 2^-127, and 255 NaN.
                        bits = cutlass.max(exponent << 23, 1 << 22) + ((exponent + 1) >> 8 << 22)
                        words[group * self.config.lines + line, stage] = bits
                        plain = cutlass.and_(plain, is_usual(bits))
                else:
                    for group in cutlass.range_constexpr(GROUPS):
                        plain = cutlass.and_(plain, is_usual(words[group * self.config.lines + line, stage]))
        return plain


def is_usual(bits):
    """Whether an fp32 scale is; NaN is not."""
    size = bits & 0x7FFFFFFF
    return cutlass.or_(size == 0, cutlass.and_(size >= SMALL, size <= LARGE))


@dataclass(frozen=True)
class LineProducer(ScaleProducer):
    """One of the warps that copy the scales of each stage, or of its turn's stages, as they lie in memory.
    A few stages later they are there, and it makes fp32 of E8M0.
    """

    @cute.jit
    def run(self, schedule):
        """See there."""
        config, ring, scales, ends = self.config, self.ring, self.scales, self.ends
        pointer = cute.make_ptr(
            Int32, self.sScales.iterator.toint(), cute.AddressSpace.smem, assumed_align=16
        )
        words, own = cute.make_tensor(pointer, self.sScales.layout), (self.lane, self.part)
        strides = [Int32(each) for each in (scales.row_stride, scales.rows_k_stride)]
        rows = Lines(config, words, 0, config.rows, *strides, *own)
        strides = [Int32(each) for each in (scales.block_stride, scales.weights_k_stride)]
        weights = Lines(config, words, config.rows, config.columns, *strides, *own)
        of_rows = cute.make_rmem_tensor(rows.chunks, Int32)
        of_weights = cute.make_rmem_tensor(weights.chunks, Int32)
        row_step, weight_step = Int64(rows.k_stride * GROUPS), Int64(weights.k_stride * GROUPS)
        state = oldest = ring.producer_start()
        if const_expr(config.turns > 1):
            oldest = ring.skip(oldest, self.turn)
        pending = Int32(0)
        unit = schedule.first()
        while schedule.has(unit):
            row, column, block, first, state, end = self.of_unit(schedule, unit, state)
            rows.offsets_of(of_rows, row, ends.rows - 1, 1)
            weights.offsets_of(of_weights, column, ends.columns - 1, ends.sharing)
            left = ends.k - (block + first) * GROUPS
            source = scales.rows_address + Int64(row) * scales.row_stride + row_step * (block + first)
            weight = Int64(column // ends.sharing) * scales.block_stride + weight_step * (block + first)
            weight = scales.weights_address + weight
            for _ in cutlass.range(first, unit.k_tiles, config.turns, unroll=1):
                ring.wait_empty(state)
                rows.copy(of_rows, source, state.stage, left)
                weights.copy(of_weights, weight, state.stage, left)
                cute.arch.cp_async_commit_group()
                if pending == config.lag:
                    cute.arch.cp_async_wait_group(config.lag)
                    self.finish(rows, weights, oldest.stage)
                    oldest = ring.advance_turn(oldest)
                else:
                    pending += 1
                source += config.turns * row_step
                weight += config.turns * weight_step
                left -= config.turns * GROUPS
                state = ring.advance_turn(state)
            if const_expr(config.turns > 1):
                state = end
            unit = schedule.next(unit)
        cute.arch.cp_async_wait_group(0)
        for _ in cutlass.range(pending, unroll=1):
            self.finish(rows, weights, oldest.stage)
            oldest = ring.advance_turn(oldest)

    @cute.jit
    def finish(self, rows, weights, stage):
        """Hand a stage's scales to the consumers."""
        plain = weights.finish(stage, rows.finish(stage, Boolean(True)))
        plain = cute.arch.vote_all_sync(plain)
        words, place = rows.words, GROUPS * self.config.lines + self.part
        if self.lane == 0:
            words[place, stage] = Int32(0) if plain else Int32(ONE)
        cute.arch.mbarrier_arrive(self.ring.full + stage)


class NarrowSums:
    """What a consumer does with scales of 32 of k."""

    @cute.jit
    def sum_groups(self, sums, parts, fragments, ring, state, k_tiles):
        """`sum`: a warpgroup has up to `parts` groups in the tensor cores, and promotes them in turn."""
        count, early = self.config.parts, self.config.reads_early
        for _ in cutlass.range(k_tiles, unroll=1):
            ring.wait_full(state)
            for group in cutlass.range_constexpr(count):
                self.multiply_group(parts[group], fragments, group, state.stage)
            own, plain = self.own_scales(state.stage), self.are_usual(state.stage)
            for group in cutlass.range_constexpr(GROUPS):
                pairs, is_last = self.pairs_of(state.stage, group), const_expr(group == GROUPS - 1)
                if const_expr(early):
                    pairs = self.kept(pairs)
                warpgroup.wait_group(min(count, GROUPS - group) - 1)
                if const_expr(is_last and early):
                    ring.release(state.stage)
                part = parts[group % count]
                self.promote_group(sums, part, (own[2 * group], own[2 * group + 1]), pairs, plain)
                if const_expr(is_last and not early):
                    ring.release(state.stage)
                if const_expr(group + count < GROUPS):
                    self.multiply_group(part, fragments, group + count, state.stage)
            state = ring.advance_turn(state)
        return state

    @cute.jit
    def multiply_group(self, part, fragments, group: cutlass.Constexpr, stage):
        """Begin the WGMMA of one group."""
        tCrA, tCrB = fragments
        warpgroup.fence()
        a = cute.append_ones(tCrA[(None, 0, group, stage)])  # (MMA, 1)
        cute.gemm(self.tiled_mma, part, a, tCrB[(None, None, group, stage)], part)
        warpgroup.commit_group()

    @cute.jit
    def own_scales(self, stage):
        """Of this thread's two lines of WGMMA's m, 8 apart, for each group."""
        config = self.config
        own = cute.make_rmem_tensor(2 * GROUPS, Float32)
        line = first_row_of(self.first_of(0), self.thread) + (config.rows if config.few else 0)
        for group in cutlass.range_constexpr(GROUPS):
            for half in cutlass.range_constexpr(2):
                own[2 * group + half] = self.sScales[group * config.lines + line + 8 * half, stage]
        return own

    @cute.jit
    def are_usual(self, stage):
        """Whether the copying warps found no unusual scale in a stage."""
        found = Float32(0.0)
        for warp in cutlass.range_constexpr(self.config.scale_warps):
            found += self.sScales[GROUPS * self.config.lines + warp, stage]
        return cute.arch.vote_all_sync(found == 0.0)

    def pairs_of(self, stage, group):
        """(2, 8 COLUMNS): of a group, this thread's scales of each 8 lines of WGMMA's n."""
        config = self.config
        first = group * config.lines + (0 if config.few else config.rows)
        source = self.sScales.iterator + stage * config.stage_scales + first + self.thread % 4 * 2
        pointer = cute.make_ptr(Float32, source.toint(), cute.AddressSpace.smem, assumed_align=8)
        return cute.make_tensor(pointer, cute.make_layout((2, config.tile_n // 8), stride=(1, 8)))

    @cute.jit
    def promote_group(self, sums, part, own, pairs, plain):
        """Add one group's sums, scaled. A product of two scales may leave the range of fp32, so each sum is
        multiplied twice; by the smaller scale first where one of the stage's is unusual.
        """
        if plain:
            for index in cutlass.range_constexpr(self.config.atom_registers):
                scale, other = own[index // 2 % 2], pairs[index % 2, index // 4]
                place = self.place_of(index)
                sums[place] = sums[place] + part[index] * scale * other
        else:
            for index in cutlass.range_constexpr(self.config.atom_registers):
                first, second = own[index // 2 % 2], pairs[index % 2, index // 4]
                if cutlass.max(first, -first) > cutlass.max(second, -second):  # not of NaN
                    first, second = second, first
                place = self.place_of(index)
                sums[place] = sums[place] + part[index] * first * second
