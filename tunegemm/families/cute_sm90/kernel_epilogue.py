"""What a Hopper kernel does with its accumulators before it stores them; see `tunegemm.epilogue`."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from tunegemm.families.cute_sm90.config import MMA_ATOM_M, WARPGROUP_THREADS


class Fusion:
    """The part of `kernel.Gemm` that knows epilogues."""

    @cute.jit
    def fuse(self, fragment, columns: cutlass.Constexpr, group_thread, place, mD, n, words, amax):
        """What the epilogue makes of 64 rows and `columns` columns; half as many values where they gate.

        A thread holds two neighbouring columns of rows 8 apart, for each 8 columns (PTX ISA, wgmma, register
        fragment of D): value = 4 * block + 2 * half + pair. Loads beyond the edge are clamped to it: what
        they give is never stored.
        """
        config = self.config
        epilogue = self.epilogue
        first_row, first_column, entry = place
        m, out_n, _ = mD.shape
        count = MMA_ATOM_M * columns // WARPGROUP_THREADS
        row = first_row + group_thread // 32 * 16 + group_thread % 32 // 4
        column = first_column + group_thread % 4 * 2
        values = {}
        word = 0
        for operand in cutlass.range_constexpr(len(epilogue.operands)):
            described = epilogue.operands[operand]
            given = words[word : word + described.words]
            word += described.words
            if const_expr(described.name not in ("residual", "amax")):
                values[described.name] = self.fetch(described, given, count, row, column, entry, m, n, False)
        flat = cute.make_tensor(fragment.iterator, cute.make_layout(count))
        result = epilogue.before_gate(flat.load(), values)
        if const_expr(epilogue.gated):
            flat.store(result)
            count = count // 2
            even = cute.make_rmem_tensor(count, self.acc_dtype)
            odd = cute.make_rmem_tensor(count, self.acc_dtype)
            for value in cutlass.range_constexpr(count):
                even[value] = flat[2 * value]
                odd[value] = flat[2 * value + 1]
            result = epilogue.gate(even.load(), odd.load())
            column = first_column // 2 + group_thread % 4
        if const_expr("residual" in epilogue.steps):
            described = next(operand for operand in epilogue.operands if operand.name == "residual")
            word = sum(operand.words for operand in epilogue.operands[: epilogue.operands.index(described)])
            values["residual"] = self.fetch(
                described, words[word : word + described.words], count, row, column, entry, m, out_n,
                epilogue.gated,
            )  # fmt: skip
        result = epilogue.after_gate(result, values)
        if const_expr(epilogue.gated):
            fused = cute.make_rmem_tensor(count, self.acc_dtype)
            fused.store(result)
        else:
            flat.store(result)
            fused = fragment
        if const_expr("amax" in epilogue.steps):
            self.track_amax(fused, row, column, m, out_n, amax)
        return fused

    @cute.jit
    def fetch(
        self, operand: cutlass.Constexpr, words, count: cutlass.Constexpr, row, column, entry, m, n,
        gated: cutlass.Constexpr,
    ):  # fmt: skip
        """An operand's values for a fragment as `fuse` describes it, in fp32; of a number or scalar just one.

        gated: the fragment has one column of each pair: value = 2 * block + half.
        """
        config = self.config
        if const_expr(operand.kind == "number"):
            return Int32(words[0]).bitcast(self.acc_dtype)
        dtype = self.acc_dtype if const_expr(operand.fp32) else self.operand_dtype
        if const_expr(operand.kind == "scalar"):
            pointer = cute.make_ptr(dtype, words[0], cute.AddressSpace.gmem, assumed_align=4)
            return cute.make_tensor(pointer, cute.make_layout(1))[0]
        pairs = 1 if const_expr(gated) else 2
        # Pairs of columns lie side by side where extents are even; elsewhere each value is read alone.
        width = pairs if const_expr(config.out_major == "n") else 1
        bytes_each = dtype.width // 8
        along = operand.kind
        if const_expr(config.transposed and along != "matrix"):
            along = "n" if const_expr(along == "m") else "m"
        loaded = cute.make_rmem_tensor(count, self.acc_dtype)
        for block in cutlass.range_constexpr(count // (2 * pairs)):
            for half in cutlass.range_constexpr(2):
                line = cutlass.min(row + half * 8, m - 1)
                for pair in cutlass.range_constexpr(0, pairs, width):
                    value = (block * 2 + half) * pairs + pair
                    if const_expr(along == "m" and block > 0):
                        loaded[value] = loaded[half * pairs]
                        if const_expr(width == 2):
                            loaded[value + 1] = loaded[half * pairs]
                    elif const_expr(along == "n" and half > 0):
                        loaded[value] = loaded[value - pairs]
                        if const_expr(width == 2):
                            loaded[value + 1] = loaded[value + 1 - pairs]
                    elif const_expr(along == "m"):
                        pointer = cute.make_ptr(
                            dtype, words[0] + Int64(line) * bytes_each, cute.AddressSpace.gmem,
                            assumed_align=bytes_each,
                        )  # fmt: skip
                        loaded[value] = cute.make_tensor(pointer, cute.make_layout(1))[0].to(self.acc_dtype)
                        if const_expr(width == 2):
                            loaded[value + 1] = loaded[value]
                    else:
                        across = cutlass.min(column + block * 4 * pairs + pair, n - width)
                        offset = Int64(across)
                        if const_expr(along == "matrix"):
                            offset = Int64(entry) * words[2]
                            if const_expr(config.out_major == "n"):
                                offset += Int64(line) * words[1] + across
                            else:
                                offset += Int64(across) * words[1] + line
                        pointer = cute.make_ptr(
                            dtype, words[0] + offset * bytes_each, cute.AddressSpace.gmem,
                            assumed_align=width * bytes_each,
                        )  # fmt: skip
                        piece = cute.make_rmem_tensor(width, dtype)
                        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(width)), piece)
                        for lane in cutlass.range_constexpr(width):
                            loaded[value + lane] = piece[lane].to(self.acc_dtype)
        return loaded.load()

    @cute.jit
    def stage_halves(self, converted, sD, group_thread, buffer):
        """Put a gated fragment, one column of each pair, into its staging buffer, element by element."""
        row = group_thread // 32 * 16 + group_thread % 32 // 4
        column = group_thread % 4
        for value in cutlass.range_constexpr(cute.size(converted)):
            sD[row + value % 2 * 8, column + value // 2 * 4, buffer] = converted[value]

    @cute.jit
    def track_amax(self, fragment, row, column, m, n, amax):
        """The largest magnitude so far, of what lies inside the output."""
        pairs = 1 if const_expr(self.epilogue.gated) else 2
        for value in cutlass.range_constexpr(cute.size(fragment)):
            line = row + value // pairs % 2 * 8
            across = column + value // (2 * pairs) * (4 * pairs) + value % pairs
            magnitude = cute.arch.fmax(fragment[value], -fragment[value])
            if line < m and across < n:
                amax[0] = cute.arch.fmax(amax[0], magnitude)

    @cute.jit
    def publish_amax(self, words, amax, lane):
        """The largest of a warp into the scalar: magnitudes order as the integers of the same bits do."""
        largest = amax[0]
        for step in cutlass.range_constexpr(5):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=16 >> step))
        if lane == 0:
            place = cute.make_ptr(Int32, words[len(words) - 1], cute.AddressSpace.gmem, assumed_align=4)
            cute.arch.atomic_max(place, largest.bitcast(Int32), sem="relaxed", scope="gpu")
