"""What a consumer does with many rows: they are WGMMA's m, and a thread has two of them in each WGMMA.

A product of two scales may leave the range of fp32 where neither scaled sum does. A warpgroup that has such a
pair multiplies each sum twice. It asks for the next block while the tensor cores have this one, and goes one
of two ways through the block: a branch around the sums alone costs up to 7 % (decision 35).
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from tunegemm.generate.blocks.config import BLOCK
from tunegemm.generate.cute_sm90.kernel.fusion import first_row_of

#: A product of two scales between 2^-100 and 2^100 may multiply a block's sum at once. The bits of a number
#: grow like its logarithm, so these are half the sums of two scales' bits, with the exponent's bias twice.
SMALLEST, LARGEST = (254 - 100) << 22, (254 + 100) << 22


class ManySums:
    """Scales of 128 of k."""

    @cute.jit
    def sum_many(self, sums, part, fragments, ring, state, k_tiles, origin):
        """`sum`: one WGMMA's rows after the other. A thread reads the scales of a block while it multiplies
        the one before, so that they are there before the sums.
        """
        kept, left = self.kept_scales(), k_tiles
        own = self.fragments_of(fragments, state.stage)
        ring.wait_full(state)
        plain = self.keep(kept, state.stage)
        while left > 0:
            while cutlass.and_(left > 0, plain):
                left -= 1
                plain, state, own = self.sum_block(
                    sums, part, fragments, own, ring, state, left, kept, origin, True
                )
            if left > 0:
                left -= 1
                plain, state, own = self.sum_block(
                    sums, part, fragments, own, ring, state, left, kept, origin, False
                )
        return state

    @cute.jit
    def sum_block(
        self, sums, part, fragments, own, ring, state, left, kept, origin, plain: cutlass.Constexpr
    ):  # fmt: skip
        """Add up one block, and read the scales of the next of those that are left. Returns `keep` of it,
        where it lies, and its fragments.
        """
        scales, last = self.scales_of(kept, origin), self.config.atoms_per_warpgroup - 1
        following, next_plain, products = ring.advance_turn(state), Boolean(True), None
        for atom in cutlass.range_constexpr(last):
            self.multiply(part, own, atom)
            warpgroup.wait_group(0)
            self.promote(sums, part, atom, scales, plain)
        self.multiply(part, own, last)
        if const_expr(plain and self.config.multiplies_early):
            products = self.products_of(*scales)
        next_own = self.fragments_of(fragments, following.stage)
        if const_expr(plain):
            if left > 0:
                ring.wait_full(following)
                next_plain = self.keep(kept, following.stage)
        warpgroup.wait_group(0)
        ring.release(state.stage)
        if const_expr(products is None):
            self.promote(sums, part, last, scales, plain)
        else:
            self.add_products(sums, part, products)
        if const_expr(not plain):  # registers hold no further scales
            if left > 0:
                ring.wait_full(following)
                next_plain = self.keep(kept, following.stage)
        return next_plain, following, next_own

    @cute.jit
    def sum_many_alternately(self, sums, parts, fragments, ring, state, k_tiles, origin):
        """`sum` where a warpgroup has one WGMMA's rows, and adds up one block while the tensor cores have the
        next: two blocks at a time, whose scales it has read before.
        """
        kept, left = (self.kept_scales(), self.kept_scales()), k_tiles - 1
        ring.wait_full(state)
        self.multiply(parts[0], self.fragments_of(fragments, state.stage), 0)
        plain = self.keep(kept[0], state.stage)
        if left > 0:
            plain = cutlass.and_(plain, self.keep_next(kept[1], ring, state))
        while left > 2:
            while cutlass.and_(left > 2, plain):
                left -= 2
                plain, state = self.sum_two(sums, parts, fragments, ring, state, kept, origin, True)
            if left > 2:
                left -= 2
                plain, state = self.sum_two(sums, parts, fragments, ring, state, kept, origin, False)
        if left == 0:
            state = self.add(sums, parts[0], ring, state, kept[0], origin, 0, plain)
        else:
            following = ring.advance_turn(state)
            self.multiply(parts[1], self.fragments_of(fragments, following.stage), 0)
            state = self.add(sums, parts[0], ring, state, kept[0], origin, 1, plain)
            if left == 1:
                state = self.add(sums, parts[1], ring, state, kept[1], origin, 0, plain)
            else:
                last_plain = self.keep_next(kept[0], ring, state)
                following = ring.advance_turn(state)
                self.multiply(parts[0], self.fragments_of(fragments, following.stage), 0)
                state = self.add(sums, parts[1], ring, state, kept[1], origin, 1, plain)
                state = self.add(sums, parts[0], ring, state, kept[0], origin, 0, last_plain)
        return state

    @cute.jit
    def sum_two(self, sums, parts, fragments, ring, state, kept, origin, plain: cutlass.Constexpr):
        """Add up the block that the tensor cores have and the next, and begin the one behind. Returns whether
        this one and another are usual (`keep`), and where it lies.
        """
        scales = self.scales_of(kept[0], origin), self.scales_of(kept[1], origin)
        following = ring.advance_turn(state)
        behind = ring.advance_turn(following)
        self.multiply(parts[1], self.fragments_of(fragments, following.stage), 0)
        warpgroup.wait_group(1)
        ring.release(state.stage)
        self.promote(sums, parts[0], 0, scales[0], plain)
        ring.wait_full(behind)
        self.multiply(parts[0], self.fragments_of(fragments, behind.stage), 0)
        warpgroup.wait_group(1)
        ring.release(following.stage)
        self.promote(sums, parts[1], 0, scales[1], plain)
        usual = self.keep(kept[0], behind.stage)
        return cutlass.and_(usual, self.keep_next(kept[1], ring, behind)), behind

    @cute.jit
    def keep_next(self, kept, ring, state):
        """`keep` of the block behind one."""
        following = ring.advance_turn(state)
        ring.wait_full(following)
        return self.keep(kept, following.stage)

    @cute.jit
    def add(self, sums, part, ring, state, kept, origin, begun: cutlass.Constexpr, plain):
        """Add up a block behind which so many others were begun. Returns where the next lies."""
        scales = self.scales_of(kept, origin)
        warpgroup.wait_group(begun)
        ring.release(state.stage)
        if plain:
            self.promote(sums, part, 0, scales, True)
        else:
            self.promote(sums, part, 0, scales, False)
        return ring.advance_turn(state)

    def kept_scales(self):
        """Registers for the scales of a block: of two rows 8 apart for each WGMMA, then of the weights."""
        config = self.config
        return cute.make_rmem_tensor(2 * config.atoms_per_warpgroup + config.spans, Float32)

    @cute.jit
    def keep(self, kept, stage):
        """Read the scales of a stage into `kept_scales`. Returns whether all products of two scales that the
        warpgroup has are of a usual magnitude: each warp looks at all rows, as all take the same way.
        """
        config, count = self.config, 2 * self.config.atoms_per_warpgroup
        address = self.sScales.iterator + stage * config.stage_scales
        own = cute.make_tensor(address, cute.make_layout(config.stage_scales))
        pointer = cute.make_ptr(Int32, address.toint(), cute.AddressSpace.smem, assumed_align=8)
        bits = cute.make_tensor(pointer, own.layout)
        rows, weights = [], []
        for atom in cutlass.range_constexpr(config.atoms_per_warpgroup):
            first = self.first_of(atom)
            row = first_row_of(first, self.thread)
            kept[2 * atom], kept[2 * atom + 1] = own[row], own[row + 8]
            pair = cute.make_rmem_tensor(2, Int32)
            those = cute.domain_offset(first + self.thread % 32 * 2, bits)
            cute.autovec_copy(cute.make_tensor(those.iterator, cute.make_layout(2)), pair)
            rows += [pair[0], pair[1]]
        for span in cutlass.range_constexpr(config.spans):
            kept[count + span] = own[config.rows + span]
            weights.append(bits[config.rows + span])
        least, most = extremes(rows)
        least_weight, most_weight = extremes(weights)
        usual = cutlass.and_(least + least_weight >= SMALLEST, most + most_weight <= LARGEST)
        return cute.arch.vote_all_sync(usual)

    def scales_of(self, kept, origin):
        """(scales of this thread's two rows of each WGMMA, scales of each 8 columns or of all of them)."""
        config, count = self.config, 2 * self.config.atoms_per_warpgroup
        rows = tuple(kept[index] for index in range(count))
        return rows, self.of_columns(tuple(kept[count + span] for span in range(config.spans)), origin)

    @cute.jit
    def of_columns(self, weights, origin):
        """The scale of each 8 columns, or of all of them."""
        config = self.config
        if const_expr(config.spans == 1):
            return weights
        if const_expr(config.columns % BLOCK == 0):
            return tuple(weights[group * 8 // BLOCK] for group in range(config.tile_n // 8))
        end = BLOCK - origin.column % BLOCK  # of the first block
        # Tiles begin at multiples of `unit`: its columns share a scale, and the products with rows' scales.
        unit, found = math.gcd(config.columns, BLOCK), []
        for column in cutlass.range_constexpr(0, config.columns, unit):
            scale = weights[0] if column < end else weights[1]
            found += [scale] * (unit // 8)
        return tuple(found)

    def products_of(self, rows, columns):
        """The products of two usual scales of each row, multiplied here, while the tensor cores compute the
        sums: the compiler multiplies where a product is used, which holds up the additions.
        """
        pairs = {(id(row), id(column)): (row, column) for row in rows for column in columns}
        found = {
            ids: cute.arch.inline_ptx(
                "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=list(pair)
            )
            for ids, pair in pairs.items()
        }
        return [[found[id(row), id(column)] for column in columns] for row in rows]

    def add_products(self, sums, part, products):
        """`promote` by `products_of` the scales of one WGMMA's rows."""
        for value in range(self.config.atom_registers):
            own, place = products[value // 2 % 2], self.place_of(value)
            sums[place] = sums[place] + part[value] * own[0 if len(own) == 1 else value // 4]

    def promote(self, sums, part, atom, scales, plain):
        """Add one block's sums, scaled, to those of all blocks.

        A thread holds two neighbouring columns of rows 8 apart, for each 8 columns (PTX ISA, wgmma, register
        fragment of D).
        """
        rows, columns = scales
        for value in range(self.config.atom_registers):
            row, column = rows[2 * atom + value // 2 % 2], columns[0 if len(columns) == 1 else value // 4]
            place = atom * self.config.atom_registers + self.place_of(value)
            if plain:
                sums[place] = sums[place] + part[value] * (row * column)
            else:
                sums[place] = sums[place] + part[value] * row * column


def extremes(bits):
    """Half the bits of the least and of the largest magnitude of fp32 numbers; NaN is large."""
    sizes = [each & 0x7FFFFFFF for each in bits]
    least = most = sizes[0]
    for size in sizes[1:]:
        least, most = cutlass.min(least, size), cutlass.max(most, size)
    return least >> 1, most >> 1
