"""What a consumer does with few rows: they are WGMMA's n, and each pair of columns has scales of its own."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import warpgroup

from tunegemm.generate.blocks.config import BLOCK


class FewSums:
    """Scales of 128 of k."""

    @cute.jit
    def sum_few(self, sums, part, fragments, ring, state, k_tiles, origin):
        """`sum`: one WGMMA's rows after the other."""
        own = self.fragments_of(fragments, state.stage)
        for _ in cutlass.range(k_tiles, unroll=1):
            ring.wait_full(state)
            following = ring.advance_turn(state)
            next_own = self.fragments_of(fragments, following.stage)
            for atom in cutlass.range_constexpr(self.config.atoms_per_warpgroup):
                self.multiply(part, own, atom)
                last = const_expr(atom == self.config.atoms_per_warpgroup - 1)
                self.add_few(sums, part, ring, state.stage, atom, origin, 0, last)
            state, own = following, next_own
        return state

    @cute.jit
    def sum_few_alternately(self, sums, parts, fragments, ring, state, k_tiles, origin):
        """`sum` where a warpgroup has one WGMMA's rows, and adds up one block while the tensor cores have the
        next.
        """
        ring.wait_full(state)
        self.multiply(parts[0], self.fragments_of(fragments, state.stage), 0)
        previous = state.stage
        state = ring.advance_turn(state)
        for _ in cutlass.range((k_tiles - 1) // 2, unroll=1):
            for turn in cutlass.range_constexpr(2):
                ring.wait_full(state)
                self.multiply(parts[1 - turn], self.fragments_of(fragments, state.stage), 0)
                self.add_few(sums, parts[turn], ring, previous, 0, origin, 1, True)
                previous = state.stage
                state = ring.advance_turn(state)
        if k_tiles % 2 == 0:
            ring.wait_full(state)
            self.multiply(parts[1], self.fragments_of(fragments, state.stage), 0)
            self.add_few(sums, parts[0], ring, previous, 0, origin, 1, True)
            self.add_few(sums, parts[1], ring, state.stage, 0, origin, 0, True)
            state = ring.advance_turn(state)
        else:
            self.add_few(sums, parts[0], ring, previous, 0, origin, 0, True)
        return state

    @cute.jit
    def add_few(
        self, sums, part, ring, stage, atom: cutlass.Constexpr, origin, behind: cutlass.Constexpr,
        last: cutlass.Constexpr,
    ):  # fmt: skip
        """Wait for a block's WGMMAs, behind which so many groups of others were begun, give back the stage
        that they were the last to read, and promote their sums.
        """
        weight, pairs = self.weight_of(stage, atom, origin), self.pairs_at(stage)
        if const_expr(self.config.reads_early):
            pairs = self.kept(pairs)
        warpgroup.wait_group(behind)
        if const_expr(last and self.config.reads_early):
            ring.release(stage)
        self.promote_pairs(sums, part, atom, weight, pairs)
        if const_expr(last and not self.config.reads_early):
            ring.release(stage)

    def weight_of(self, stage, atom: cutlass.Constexpr, origin):
        """The scale of the weights of one WGMMA."""
        config, first = self.config, self.first_of(atom)
        if const_expr(config.tile_m % BLOCK != 0 and config.spans > 1):
            first = first + origin.row % BLOCK
        index = config.rows
        if const_expr(config.spans > 1):
            index = config.rows + first // BLOCK
        return self.sScales[index, stage]

    def pairs_at(self, stage):
        """(2, 4, GROUP), this thread's scales of each 8 columns in its first row."""
        config = self.config
        source = self.sScales.iterator + stage * config.stage_scales + self.thread % 4 * 2
        pointer = cute.make_ptr(Float32, source.toint(), cute.AddressSpace.smem, assumed_align=8)
        return cute.make_tensor(pointer, cute.make_layout((2, config.tile_n // 8), stride=(1, 8)))

    @cute.jit
    def kept(self, pairs):
        """`pairs_at` in registers."""
        registers = cute.make_rmem_tensor(cute.make_layout((2, self.config.tile_n // 8)), Float32)
        for group in cutlass.range_constexpr(self.config.tile_n // 8):
            cute.autovec_copy(pairs[(None, group)], registers[(None, group)])
        return registers

    @cute.jit
    def promote_pairs(self, sums, part, atom: cutlass.Constexpr, weight, pairs):
        """Add one block's sums, scaled, to those of all blocks. Each is multiplied twice: there are as many
        products of two scales as columns, and to ask whether these are plain takes longer.
        """
        first = atom * self.config.atom_registers
        for group in cutlass.range_constexpr(self.config.tile_n // 8):
            pair = cute.make_rmem_tensor(2, Float32)
            cute.autovec_copy(pairs[(None, group)], pair)
            for value in cutlass.range_constexpr(4):
                index = group * 4 + value
                place = first + self.place_of(index)
                sums[place] = sums[place] + part[index] * weight * pair[value % 2]
