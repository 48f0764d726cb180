"""What a Hopper kernel does with its accumulators before it stores them; see `tunegemm.describe.epilogue`."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, WARPGROUP_THREADS


class Fusion:
    """The part of `kernel.Gemm` that knows epilogues."""

    @property
    def vectors(self):
        """The epilogue's vectors, in their order."""
        return [operand for operand in self.epilogue.operands if operand.kind in ("m", "n")]

    def is_across(self, vector):
        """Whether a vector has a value for each of the kernel's columns, not of its rows."""
        return (vector.kind == "n") != self.config.transposed

    def words_of(self, operand, words):
        """The words of a launch that say where an operand is."""
        operands = self.epilogue.operands
        first = sum(each.words for each in operands[: operands.index(operand)])
        return words[first : first + operand.words]

    @cute.jit
    def flat(self, fragment):
        """The same registers, counted from 0."""
        return cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))

    @cute.jit
    def load_matrix(self, matrix, sD, group, group_thread, tile):
        """Start the loads of a tile's matrix into all of this warpgroup's staging buffers.

        TMA has read what the previous tile left there by then: it had a k tile's time, with pingpong a main
        loop's.
        """
        config = self.config
        if group_thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            for index in cutlass.range_constexpr(min(config.epilogue_buffers, config.subtiles)):
                self.load_subtile(index, matrix, sD, group, tile)

    @cute.jit
    def load_next(self, index: cutlass.Constexpr, matrix, sD, group, group_thread, tile):
        """Start the load of the subtile that comes next into a buffer whose store has been issued.

        With three buffers or more that of the store before: this one's has only begun.
        """
        config = self.config
        behind = 1 if const_expr(config.epilogue_buffers > 2) else 0
        following = index - behind + config.epilogue_buffers
        if const_expr(index >= behind and following < config.subtiles):
            if group_thread < 32:
                cute.arch.cp_async_bulk_wait_group(behind, read=True)
                self.load_subtile(following, matrix, sD, group, tile)

    @cute.jit
    def load_subtile(self, index: cutlass.Constexpr, matrix, sD, group, tile):
        """One warp: let TMA bring a subtile of the matrix into the staging buffer that it will leave from."""
        config = self.config
        tma, tensor, loaded = matrix
        bGS_sC, bGS_gC = self.staged_boxes(tma, tensor, sD, tile)
        buffer = group * config.epilogue_buffers + index % config.epilogue_buffers
        row, column = self.subtile_place(index, group)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(loaded + buffer, config.subtile_bytes)
        cute.copy(
            tma, bGS_gC[(None, row, column, tile[2])], bGS_sC[(None, buffer)], tma_bar_ptr=loaded + buffer
        )

    @cute.jit
    def hold_vectors(
        self, words, group_thread, place, m, n, atoms: cutlass.Constexpr, rows_apart: cutlass.Constexpr,
        columns: cutlass.Constexpr,
    ):  # fmt: skip
        """The vectors' values for a warpgroup's atoms and columns, in fp32 registers, all read at once.

        A warp has each value once, 32 in a register of all its threads, who then hand them round (`spread`):
        32 columns, or its 16 rows of two atoms. Read where they are used, in turn with the barriers of the
        subtiles, they cost 2 % of 4096x7168x2048 in fp8 (H200, 2026-11-22). Handing rows round, too, where a
        thread could hold its own, keeps the compiler from computing subtiles all at once, which spills.
        """
        first_row, first_column, _ = place
        held = []
        for vector in self.vectors:
            dtype = cutlass.Float32 if const_expr(vector.fp32) else self.operand_dtype
            bytes_each = dtype.width // 8
            address = self.words_of(vector, words)[0]
            across = const_expr(self.is_across(vector))
            count = -(-columns // 32) if const_expr(across) else -(-atoms // 2)
            values = cute.make_rmem_tensor(count, cutlass.Float32)
            for value in cutlass.range_constexpr(count):
                if const_expr(across):
                    index = cutlass.min(first_column + value * 32 + group_thread % 32, n - 1)
                else:
                    row = first_row + group_thread // 32 * 16 + group_thread % 16
                    atom = value * 2 + group_thread % 32 // 16
                    index = cutlass.min(row + atom * rows_apart, m - 1)
                pointer = cute.make_ptr(
                    dtype, address + Int64(index) * bytes_each, cute.AddressSpace.gmem,
                    assumed_align=bytes_each,
                )  # fmt: skip
                values[value] = cute.make_tensor(pointer, cute.make_layout(1))[0].to(cutlass.Float32)
            held.append(values)
        return tuple(held)

    @cute.jit
    def spread(
        self, vector: cutlass.Constexpr, held, count: cutlass.Constexpr, atom: cutlass.Constexpr,
        column: cutlass.Constexpr, group_thread, run: cutlass.Constexpr,
    ):  # fmt: skip
        """A vector's values for a fragment as `fuse` describes it, `column` columns into the tile."""
        values = cute.make_rmem_tensor(count, cutlass.Float32)
        for value in cutlass.range_constexpr(count):
            block, half, pair = value // (2 * run), value // run % 2, value % run
            if const_expr(self.is_across(vector)):
                first, source = value - half * run, column + block * (4 * run) + pair
                lane = source % 32 + group_thread % 4 * run
            else:
                first, source = half * run, atom * 16 + half * 8
                lane = source % 32 + group_thread % 32 // 4
            if const_expr(value == first):
                values[value] = cute.arch.shuffle_sync(held[source // 32], lane)
            else:
                values[value] = values[first]
        return values.load()

    @cute.jit
    def fuse(
        self, fragment, columns: cutlass.Constexpr, group_thread, place, mD, n, words, held,
        atom: cutlass.Constexpr, tile_column: cutlass.Constexpr, loaded, amax,
    ):  # fmt: skip
        """What the epilogue makes of 64 rows and `columns` columns, as fp32; half as many where they gate.

        A thread holds two neighbouring columns of rows 8 apart, for each 8 columns (PTX ISA, wgmma, register
        fragment of D): value = 4 * block + 2 * half + pair; of halves that gate each other four columns of
        each 16. `held`: see `hold_vectors`, of whose atoms and columns these are those of `atom` and from
        `tile_column` on. `loaded`: what TMA brought of the `staged_matrix`. Loads beyond the edge are clamped
        to it: what they give is never stored.
        """
        config = self.config
        epilogue = self.epilogue
        first_row, first_column, entry = place
        m, out_n, _ = mD.shape
        row = first_row + group_thread // 32 * 16 + group_thread % 32 // 4
        run = 4 if const_expr(config.gates_halves) else 2
        column = first_column + group_thread % 4 * run
        count = MMA_ATOM_M * columns // WARPGROUP_THREADS
        values = {}
        for operand in epilogue.operands:
            if const_expr(operand == self.staged_matrix):
                values[operand.name] = loaded
            elif const_expr(operand in self.vectors):
                values[operand.name] = self.spread(
                    operand, held[self.vectors.index(operand)], count, atom, tile_column, group_thread, run
                )
            elif const_expr(operand.name not in ("residual", "amax")):
                values[operand.name] = self.fetch(
                    operand, self.words_of(operand, words), count, row, column, entry, m, n, run
                )
        flat = fragment
        if const_expr(self.acc_dtype != cutlass.Float32):
            flat = cute.make_rmem_tensor(count, cutlass.Float32)
            flat.store(fragment.load().to(cutlass.Float32))
        result = epilogue.before_gate(flat.load(), values)
        if const_expr(epilogue.gated):
            flat.store(result)
            count, run = count // 2, run // 2
            even = cute.make_rmem_tensor(count, cutlass.Float32)
            odd = cute.make_rmem_tensor(count, cutlass.Float32)
            for value in cutlass.range_constexpr(count):
                even[value] = flat[2 * value]
                odd[value] = flat[2 * value + 1]
            result = epilogue.gate(even.load(), odd.load())
            column = first_column // 2 + group_thread % 4 * run
        for operand in epilogue.operands:
            if const_expr(operand.name == "residual" and operand != self.staged_matrix):
                values["residual"] = self.fetch(
                    operand, self.words_of(operand, words), count, row, column, entry, m, out_n, run
                )
        fused = cute.make_rmem_tensor(count, cutlass.Float32)
        fused.store(epilogue.after_gate(result, values))
        if const_expr("amax" in epilogue.steps):
            self.track_amax(fused, row, column, m, out_n, run, amax)
        return fused

    @cute.jit
    def fetch(
        self, operand: cutlass.Constexpr, words, count: cutlass.Constexpr, row, column, entry, m, n,
        run: cutlass.Constexpr,
    ):  # fmt: skip
        """A matrix's values for a fragment as `fuse` describes it, in fp32; of a number or scalar just one.

        run: how many columns side by side a thread has: value = (2 * block + half) * run + column.
        """
        config = self.config
        if const_expr(operand.kind == "number"):
            return Int32(words[0]).bitcast(cutlass.Float32)
        dtype = cutlass.Float32 if const_expr(operand.fp32) else self.operand_dtype
        if const_expr(operand.kind == "scalar"):
            pointer = cute.make_ptr(dtype, words[0], cute.AddressSpace.gmem, assumed_align=4)
            return cute.make_tensor(pointer, cute.make_layout(1))[0]
        # Pairs of columns lie side by side where extents are even; elsewhere each value is read alone.
        width = min(run, 2) if const_expr(config.out_major == "n") else 1
        bytes_each = dtype.width // 8
        loaded = cute.make_rmem_tensor(count, cutlass.Float32)
        for block in cutlass.range_constexpr(count // (2 * run)):
            for half in cutlass.range_constexpr(2):
                line = cutlass.min(row + half * 8, m - 1)
                for pair in cutlass.range_constexpr(0, run, width):
                    value = (block * 2 + half) * run + pair
                    across = cutlass.min(column + block * 4 * run + pair, n - width)
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
                        loaded[value + lane] = piece[lane].to(cutlass.Float32)
        return loaded.load()

    @cute.jit
    def stage_halves(self, converted, sD, group_thread, piece: cutlass.Constexpr, buffer):
        """Put a gated fragment, one column of each pair, into its staging buffer, element by element."""
        row = group_thread // 32 * 16 + group_thread % 32 // 4
        column = piece * self.config.converted_columns + group_thread % 4
        for value in cutlass.range_constexpr(cute.size(converted)):
            sD[row + value % 2 * 8, column + value // 2 * 4, buffer] = converted[value]

    @cute.jit
    def track_amax(self, fragment, row, column, m, n, run: cutlass.Constexpr, amax):
        """The largest magnitude so far, of what lies inside the output."""
        for value in cutlass.range_constexpr(cute.size(fragment)):
            line = row + value // run % 2 * 8
            across = column + value // (2 * run) * (4 * run) + value % run
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
