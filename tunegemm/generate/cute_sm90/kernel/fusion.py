"""What a kernel's epilogue makes of its sums before they are stored; see `tunegemm.describe.epilogue`."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, WARPGROUP_THREADS, KernelConfig
from tunegemm.generate.cute_sm90.kernel.layouts import Dtypes
from tunegemm.generate.cute_sm90.kernel.schedule import Origin

#: The bits of an fp32 without its sign.
MAGNITUDE = 0x7FFFFFFF


def words_of(epilogue, operand, words):
    """The words of a launch that say where an epilogue's operand is."""
    operands = epilogue.operands
    first = sum(each.words for each in operands[: operands.index(operand)])
    return words[first : first + operand.words]


def first_row_of(row, thread):
    """The first of the two rows, 8 apart, whose accumulators a thread holds; of 64 that begin with `row`."""
    return row + thread // 32 * 16 + thread % 32 // 4


def flat(fragment):
    """The same registers, counted from 0."""
    return cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))


@dataclass(frozen=True)
class Fusion:
    """An epilogue's arithmetic, from the side of one thread of a warpgroup.

    A thread holds two neighbouring columns of rows 8 apart, for each 8 columns (PTX ISA, wgmma, register
    fragment of D): value = 4 * block + 2 * half + pair; of halves that gate each other four columns of each
    16.
    """

    config: KernelConfig
    dtypes: Dtypes
    mD: cute.Tensor
    """(M, N, L), or (M, N / 2, L) where pairs of columns gate each other."""
    words: tuple
    """Columns of the product, then the words of a launch that say what the operands are."""
    thread: Int32
    """The thread's index in the warpgroup."""
    amax: Any = None
    """One register: the bits of the largest magnitude of what this thread stores, over all of its tiles.

    Magnitudes order as the integers of the same bits do, and NaN is the largest.
    """

    @classmethod
    def of(cls, config, dtypes, mD, words, thread):
        amax = None
        if "amax" in config.fused.steps:
            amax = cute.make_rmem_tensor(1, Int32)
            amax[0] = Int32(0)
        return cls(config, dtypes, mD, words, thread, amax)

    @property
    def vectors(self):
        """The epilogue's vectors, in their order."""
        return [operand for operand in self.config.fused.operands if operand.kind in ("m", "n")]

    def _is_across(self, vector):
        """Whether a vector has a value for each of the kernel's columns, not of its rows."""
        return (vector.kind == "n") != self.config.transposed

    def words_of(self, operand):
        return words_of(self.config.fused, operand, self.words[1:])

    @cute.jit
    def hold_vectors(
        self, origin, atoms: cutlass.Constexpr, rows_apart: cutlass.Constexpr, columns: cutlass.Constexpr
    ):  # fmt: skip
        """The vectors' values for a warpgroup's atoms and columns, in fp32 registers, all read at once.

        A warp has each value once, 32 in a register of all its threads, who then hand them round (`_spread`):
        32 columns, or its 16 rows of two atoms. Read where they are used, in turn with the barriers of the
        subtiles, they cost 2 % of 4096x7168x2048 in fp8 (H200, 2026-11-22). Handing rows round, too, where a
        thread could hold its own, keeps the compiler from computing subtiles all at once, which spills.
        """
        thread, m, n = self.thread, self.mD.shape[0], self.words[0]
        held = []
        for vector in self.vectors:
            dtype = cutlass.Float32 if const_expr(vector.fp32) else self.dtypes.operand
            bytes_each = dtype.width // 8
            address = self.words_of(vector)[0]
            across = const_expr(self._is_across(vector))
            count = -(-columns // 32) if const_expr(across) else -(-atoms // 2)
            values = cute.make_rmem_tensor(count, cutlass.Float32)
            for value in cutlass.range_constexpr(count):
                if const_expr(across):
                    index = cutlass.min(origin.column + value * 32 + thread % 32, n - 1)
                else:
                    row = origin.row + thread // 32 * 16 + thread % 16
                    atom = value * 2 + thread % 32 // 16
                    index = cutlass.min(row + atom * rows_apart, m - 1)
                pointer = cute.make_ptr(
                    dtype, address + Int64(index) * bytes_each, cute.AddressSpace.gmem,
                    assumed_align=bytes_each,
                )  # fmt: skip
                values[value] = cute.make_tensor(pointer, cute.make_layout(1))[0].to(cutlass.Float32)
            held.append(values)
        return tuple(held)

    @cute.jit
    def _spread(
        self, vector: cutlass.Constexpr, held, count: cutlass.Constexpr, atom: cutlass.Constexpr,
        column: cutlass.Constexpr, run: cutlass.Constexpr,
    ):  # fmt: skip
        """A vector's values for a fragment of `count` values, `column` columns into the tile."""
        values = cute.make_rmem_tensor(count, cutlass.Float32)
        for value in cutlass.range_constexpr(count):
            block, half, pair = value // (2 * run), value // run % 2, value % run
            if const_expr(self._is_across(vector)):
                first, source = value - half * run, column + block * (4 * run) + pair
                lane = source % 32 + self.thread % 4 * run
            else:
                first, source = half * run, atom * 16 + half * 8
                lane = source % 32 + self.thread % 32 // 4
            if const_expr(value == first):
                values[value] = cute.arch.shuffle_sync(held[source // 32], lane)
            else:
                values[value] = values[first]
        return values.load()

    @cute.jit
    def apply(
        self, fragment, columns: cutlass.Constexpr, origin, held, atom: cutlass.Constexpr,
        tile_column: cutlass.Constexpr, loaded,
    ):  # fmt: skip
        """What the epilogue makes of 64 rows and `columns` columns, as fp32; half as many where they gate.

        held: see `hold_vectors`, of whose atoms and columns these are those of `atom` and from `tile_column`
        on. loaded: what TMA brought of the `staged_matrix`. Loads beyond the edge are clamped to it: what
        they give is never stored.
        """
        config, epilogue = self.config, self.config.fused
        m, out_n, _ = self.mD.shape
        row = first_row_of(origin.row, self.thread)
        run = 4 if const_expr(config.gates_halves) else 2
        column = origin.column + self.thread % 4 * run
        count = MMA_ATOM_M * columns // WARPGROUP_THREADS
        values = {}
        for operand in epilogue.operands:
            if const_expr(operand == config.staged_matrix):
                values[operand.name] = loaded
            elif const_expr(operand in self.vectors):
                values[operand.name] = self._spread(
                    operand, held[self.vectors.index(operand)], count, atom, tile_column, run
                )
            elif const_expr(operand.name not in ("residual", "amax")):
                values[operand.name] = self._fetch(
                    operand, count, Origin(row, column, origin.batch), self.words[0], run
                )
        sums = fragment
        if const_expr(self.dtypes.acc != cutlass.Float32):
            sums = cute.make_rmem_tensor(count, cutlass.Float32)
            sums.store(fragment.load().to(cutlass.Float32))
        result = epilogue.before_gate(sums.load(), values)
        if const_expr(epilogue.gated):
            sums.store(result)
            count, run = count // 2, run // 2
            even = cute.make_rmem_tensor(count, cutlass.Float32)
            odd = cute.make_rmem_tensor(count, cutlass.Float32)
            for value in cutlass.range_constexpr(count):
                even[value] = sums[2 * value]
                odd[value] = sums[2 * value + 1]
            result = epilogue.gate(even.load(), odd.load())
            column = origin.column // 2 + self.thread % 4 * run
        for operand in epilogue.operands:
            if const_expr(operand.name == "residual" and operand != config.staged_matrix):
                values["residual"] = self._fetch(
                    operand, count, Origin(row, column, origin.batch), out_n, run
                )
        fused = cute.make_rmem_tensor(count, cutlass.Float32)
        fused.store(epilogue.after_gate(result, values))
        if const_expr("amax" in epilogue.steps):
            self._track_amax(fused, row, column, run)
        return fused

    @cute.jit
    def fetch_staged_matrix(self, origin, columns: cutlass.Constexpr):
        """The values of the `staged_matrix` for 64 rows and so many columns of D, as `apply` takes them; read
        from global memory, as the second kernel does.
        """
        run, out_n = 2, self.mD.shape[1]
        column = origin.column
        if const_expr(self.config.fused.gated):
            column = column // 2
        first = Origin(first_row_of(origin.row, self.thread), column + self.thread % 4 * run, origin.batch)
        count = MMA_ATOM_M * columns // WARPGROUP_THREADS
        return self._fetch(self.config.staged_matrix, count, first, out_n, run)

    @cute.jit
    def _fetch(
        self, operand: cutlass.Constexpr, count: cutlass.Constexpr, first, n, run: cutlass.Constexpr
    ):  # fmt: skip
        """A matrix's values for a fragment, in fp32; of a number or scalar just one.

        first: row, column and entry of the thread's first value. n: the matrix's columns. run: how many
        columns side by side a thread has: value = (2 * block + half) * run + column.
        """
        config, words = self.config, self.words_of(operand)
        if const_expr(operand.kind == "number"):
            return Int32(words[0]).bitcast(cutlass.Float32)
        dtype = cutlass.Float32 if const_expr(operand.fp32) else self.dtypes.operand
        if const_expr(operand.kind == "scalar"):
            pointer = cute.make_ptr(dtype, words[0], cute.AddressSpace.gmem, assumed_align=4)
            return cute.make_tensor(pointer, cute.make_layout(1))[0]
        m = self.mD.shape[0]
        # Pairs of columns begin at even ones, where lines are aligned. An odd last column has one beside it
        # that belongs to the line's last 16 bytes, and is never stored. Rows are read one by one.
        width = min(run, 2) if const_expr(config.out_major == "n") else 1
        last = (n - 1) & -width
        bytes_each = dtype.width // 8
        loaded = cute.make_rmem_tensor(count, cutlass.Float32)
        for block in cutlass.range_constexpr(count // (2 * run)):
            for half in cutlass.range_constexpr(2):
                line = cutlass.min(first.row + half * 8, m - 1)
                for pair in cutlass.range_constexpr(0, run, width):
                    value = (block * 2 + half) * run + pair
                    across = cutlass.min(first.column + block * 4 * run + pair, last)
                    offset = Int64(first.batch) * words[2]
                    if const_expr(config.out_major == "n"):
                        offset += Int64(line) * words[1] + across
                    else:
                        offset += Int64(across) * words[1] + line
                    pointer = cute.make_ptr(
                        dtype, words[0] + offset * bytes_each, cute.AddressSpace.gmem,
                        assumed_align=width * bytes_each,
                    )  # fmt: skip
                    read = cute.make_rmem_tensor(width, dtype)
                    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(width)), read)
                    for lane in cutlass.range_constexpr(width):
                        loaded[value + lane] = read[lane].to(cutlass.Float32)
        return loaded.load()

    @cute.jit
    def _track_amax(self, fragment, row, column, run: cutlass.Constexpr):
        """The largest magnitude so far, of what lies inside the output."""
        m, n, _ = self.mD.shape
        amax = self.amax
        for value in cutlass.range_constexpr(cute.size(fragment)):
            line = row + value // run % 2 * 8
            across = column + value // (2 * run) * (4 * run) + value % run
            magnitude = fragment[value].bitcast(Int32) & MAGNITUDE
            if line < m and across < n:
                amax[0] = cutlass.max(amax[0], magnitude)

    @cute.jit
    def publish_amax(self, lane):
        """The largest of a warp into the scalar, as an integer."""
        if const_expr("amax" in self.config.fused.steps):
            largest = self.amax[0]
            for step in cutlass.range_constexpr(5):
                largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=16 >> step))
            if lane == 0:
                place = cute.make_ptr(Int32, self.words[-1], cute.AddressSpace.gmem, assumed_align=4)
                cute.arch.atomic_max(place, largest, sem="relaxed", scope="gpu")
