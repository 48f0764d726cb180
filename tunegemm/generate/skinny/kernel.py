"""The kernel for few rows: B, of which there is most, goes straight from memory to the threads that use it.

The product is computed transposed: 16 lines of B are the rows of a tensor-core instruction (mma.sync), and 8
rows of A its columns. Fewer rows cost nothing more than lanes that read the same line again; the tensor cores
idle anyhow while memory works.

A sum over k may be taken in any order as long as both operands have the same. So each of the four lanes
that share a line reads neighbouring elements, a vector of 16 bytes, and those are its elements of two
instructions: nothing is exchanged between threads, and nothing is written to shared memory for another to
read. The ring in shared memory is of slots that belong to one thread each; cp.async fills them, `stages - 1`
steps ahead, across the borders of tiles, without one barrier in the main loop.

Warps share a step's k in equal parts. Their sums meet in shared memory, and those of k splits in a
workspace, from which the last CTA to arrive adds them: both in the order of k, so that no bit depends on who
was late. Nor does one depend on m, n, the tile's rows and columns, or the number of stages: each element is
summed by itself, in an order that `tile_k`, `warps_k`, `vector_bytes` and the split of k decide.

Extents, strides, split count and grid are arguments of the launch.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from tunegemm.describe.problem import operand_dtypes
from tunegemm.generate.skinny.config import LANES_K, MMA_M, MMA_N, WARP, KernelConfig

DTYPES = {
    "bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32, "int32": cutlass.Int32,
}  # fmt: skip
#: The bits of an fp32 without its sign.
MAGNITUDE = 0x7FFFFFFF
# Instructions by element; fp8 becomes fp16, exactly, and is multiplied as that.
MMAS = {
    "bf16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "fp16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "fp8": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "int8": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
}


class Arguments(NamedTuple):
    """What a launch is given, in this order, before the epilogue's words and the stream."""

    a_address: Int64
    b_address: Int64
    d_address: Int64
    m: Int32
    n: Int32
    k: Int32
    batch: Int32
    lda: Int64
    """Strides count elements."""
    ldb: Int64
    ldd: Int64
    a_batch_stride: Int64
    b_batch_stride: Int64
    d_batch_stride: Int64
    ctas: Int32
    """The grid."""
    split_k: Int32
    partials_address: Int64
    """With k splits room for the sums of each tile of each."""
    counters_address: Int64
    """With k splits zeros, one for each tile, which the kernel leaves as zeros."""


class Units(NamedTuple):
    """How the product is cut: a unit of work is a k split of a tile."""

    tiles_m: Int32
    tiles_n: Int32
    batch: Int32
    split_k: Int32
    steps: Int32
    """Steps of `tile_k` in each unit."""


class Place(NamedTuple):
    """Where a unit is: its tile's first row and column, batch entry, k split and number of the tile."""

    row: Int32
    column: Int32
    entry: Int32
    split: Int32
    tile: Int32


class Gemm:
    """D[m, n] = A[m, k] B[n, k]^T for one `KernelConfig`."""

    def __init__(self, config: KernelConfig):
        if objection := config.objection:
            raise ValueError(objection)
        self.config = config
        self.kind = "fp8" if config.in_dtype.startswith("fp8") else config.in_dtype
        self.of_a, self.of_b = operand_dtypes(config.in_dtype)
        self.out_dtype = DTYPES[config.out_dtype]
        self.acc_dtype = Int32 if self.kind == "int8" else cutlass.Float32
        self.smem_bytes = 0

    # ---- host side: runs on the CPU at every launch -------------------------------------------------

    @cute.jit
    def __call__(self, *arguments):
        """Launch. arguments: those of `Arguments`; where the epilogue has operands, 64-bit words that say
        what they are; the stream.
        """
        count = len(Arguments._fields)
        words = arguments[count : count + self.config.fused.words]
        self.launch(Arguments(*arguments[:count]), words, arguments[-1])

    @cute.jit
    def launch(self, given, words, stream):
        """See `__call__`."""
        config = self.config
        units = Units(
            cute.ceil_div(given.m, config.tile_m), cute.ceil_div(given.n, config.tile_n), given.batch,
            given.split_k, cute.ceil_div(cute.ceil_div(given.k, config.tile_k), given.split_k),
        )  # fmt: skip
        partials = cute.make_ptr(
            self.acc_dtype, given.partials_address, cute.AddressSpace.gmem, assumed_align=16
        )
        counters = cute.make_ptr(Int32, given.counters_address, cute.AddressSpace.gmem, assumed_align=4)
        self.smem_bytes = config.smem_bytes
        self.kernel(
            (given.a_address, given.b_address, given.d_address), (given.m, given.n, given.k),
            (given.lda, given.ldb, given.ldd),
            (given.a_batch_stride, given.b_batch_stride, given.d_batch_stride),
            units, partials, counters, tuple(words),
        ).launch(
            grid=(given.ctas, 1, 1),
            block=(config.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=100,
        )  # fmt: skip

    # ---- device side --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        addresses: tuple[Int64, Int64, Int64],
        extents: tuple[Int32, Int32, Int32],
        leading: tuple[Int64, Int64, Int64],
        batch_strides: tuple[Int64, Int64, Int64],
        units: Units,
        partials: cute.Pointer,
        counters: cute.Pointer,
        words: tuple,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        total = units.tiles_m * units.tiles_n * units.batch * units.split_k

        ring = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16)
        slots = ring.toint() + thread * config.vector_bytes
        sums = cute.recast_ptr(ring + config.stages * config.stage_bytes, dtype=self.acc_dtype)
        finish = Finish(config, addresses[2], extents, leading[2], batch_strides[2], words)
        amax = cute.make_rmem_tensor(1, Int32)  # the bits of a magnitude: they order as integers, NaN last
        amax[0] = Int32(0)

        # The next step to be loaded: its unit, its place in that, and where its lines are.
        lines = cute.make_rmem_tensor(config.lines, Int64)
        ahead = cute.make_rmem_tensor(4, Int32)  # unit, step, k left, slot
        ahead[0] = Int32(block)
        ahead[3] = Int32(0)
        self.begin(lines, ahead, addresses, extents, leading, batch_strides, units, thread, total)
        for _ in cutlass.range_constexpr(config.stages - 1):
            self.load(
                slots, lines, ahead, addresses, extents, leading, batch_strides, units, thread, total, blocks
            )

        slot = Int32(0)
        unit = Int32(block)
        while unit < total:
            accumulators = cute.make_rmem_tensor(config.accumulators, self.acc_dtype)
            accumulators.fill(0)
            for _ in cutlass.range(units.steps, unroll=1):
                cute.arch.cp_async_wait_group(config.stages - 2)
                # Into the slot that the previous step has left.
                self.load(
                    slots, lines, ahead, addresses, extents, leading, batch_strides, units, thread, total,
                    blocks,
                )  # fmt: skip
                self.multiply(accumulators, slots + slot * config.stage_bytes)
                slot += 1
                if slot == config.stages:
                    slot = Int32(0)
            place = self.place_of(unit, units)
            self.leave(accumulators, sums, thread)
            cute.arch.sync_threads()
            self.add(sums, partials, counters, place, units, finish, amax, thread)
            cute.arch.sync_threads()
            unit += blocks
        finish.publish_amax(amax, thread % WARP)

    @cute.jit
    def place_of(self, unit, units):
        """Where a unit is. Rows of tiles lie side by side, as they read the same lines of B; then columns."""
        rest = Int32(Uint32(unit) // Uint32(units.tiles_m))
        tile_m = unit - rest * units.tiles_m
        column = Int32(Uint32(rest) // Uint32(units.tiles_n))
        tile_n = rest - column * units.tiles_n
        entry = Int32(Uint32(column) // Uint32(units.split_k))
        split = column - entry * units.split_k
        tile = (entry * units.tiles_n + tile_n) * units.tiles_m + tile_m
        return Place(tile_m * self.config.tile_m, tile_n * self.config.tile_n, entry, split, tile)

    @cute.jit
    def begin(self, lines, ahead, addresses, extents, leading, batch_strides, units, thread, total):
        """Point at the first step of the unit `ahead`. Lines beyond the extents are the last one again."""
        config = self.config
        m, n, k = extents
        ahead[1] = Int32(0)
        if ahead[0] < total:
            place = self.place_of(ahead[0], units)
            warp, lane = thread // WARP, thread % WARP
            warp_k, warp_n = warp % config.warps_k, warp // config.warps_k
            first_k = (
                place.split * units.steps * config.tile_k
                + warp_k * (config.unroll * config.chunk)
                + lane % LANES_K * config.vector
            )
            ahead[2] = k - first_k
            own = place.column + warp_n * (config.groups * MMA_N) + lane // LANES_K
            b = addresses[1] + (Int64(place.entry) * batch_strides[1] + first_k) * config.element_bytes
            for line in cutlass.range_constexpr(2 * config.groups):
                column = cutlass.min(own + line * MMA_M, n - 1)
                lines[line] = b + Int64(column) * leading[1] * config.element_bytes
            a = addresses[0] + (Int64(place.entry) * batch_strides[0] + first_k) * config.element_bytes
            for group in cutlass.range_constexpr(config.row_groups):
                row = cutlass.min(place.row + lane // LANES_K + group * MMA_M, m - 1)
                lines[2 * config.groups + group] = a + Int64(row) * leading[0] * config.element_bytes

    @cute.jit
    def load(
        self, slots, lines, ahead, addresses, extents, leading, batch_strides, units, thread, total, blocks
    ):  # fmt: skip
        """Start the copies of the step `ahead` and go on to the next one. k beyond its extent becomes 0."""
        config = self.config
        if ahead[0] < total:
            target = slots + ahead[3] * config.stage_bytes
            for chunk in cutlass.range_constexpr(config.unroll):
                size = Int32(config.vector_bytes) if ahead[2] > chunk * config.chunk else Int32(0)
                for line in cutlass.range_constexpr(config.lines):
                    place = (chunk * config.lines + line) * config.threads * config.vector_bytes
                    copy_async(
                        target + place,
                        lines[line] + chunk * config.chunk * config.element_bytes,
                        config.vector_bytes,
                        size,
                        line >= 2 * config.groups,
                    )
            for line in cutlass.range_constexpr(config.lines):
                lines[line] = lines[line] + config.tile_k * config.element_bytes
            ahead[2] = ahead[2] - config.tile_k
            ahead[1] = ahead[1] + 1
            ahead[3] = ahead[3] + 1
            if ahead[3] == config.stages:
                ahead[3] = Int32(0)
            if ahead[1] == units.steps:
                ahead[0] = ahead[0] + blocks
                self.begin(lines, ahead, addresses, extents, leading, batch_strides, units, thread, total)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def multiply(self, accumulators, slot):
        """Multiply the step in a slot of the ring, all of which this thread has copied itself."""
        config = self.config
        vector_words = config.vector_bytes // 4
        for chunk in cutlass.range_constexpr(config.unroll):
            read = []
            for line in cutlass.range_constexpr(config.lines):
                place = (chunk * config.lines + line) * config.threads * config.vector_bytes
                vector = words_at(slot + place, vector_words)
                if const_expr(self.kind == "fp8"):
                    dtype = self.of_b if const_expr(line < 2 * config.groups) else self.of_a
                    vector = [half for word in vector for half in halves_of(word, dtype)]
                read.append(vector)
            for group in cutlass.range_constexpr(config.groups):
                low, high = read[2 * group], read[2 * group + 1]
                for row_group in cutlass.range_constexpr(config.row_groups):
                    rows = read[2 * config.groups + row_group]
                    first = 4 * (group * config.row_groups + row_group)
                    for step in cutlass.range_constexpr(len(rows) // 2):
                        two = slice(2 * step, 2 * step + 2)
                        multiply_add(
                            MMAS[self.kind], self.acc_dtype, accumulators, first,
                            (low[two][0], high[two][0], low[two][1], high[two][1]), rows[two],
                        )  # fmt: skip

    @cute.jit
    def leave(self, accumulators, sums, thread):
        """Write a warp's sums to its tile in shared memory: (rows of A, lines of B), lines side by side."""
        config = self.config
        warp, lane = thread // WARP, thread % WARP
        warp_k, warp_n = warp % config.warps_k, warp // config.warps_k
        start = (warp_k * config.tile_m + lane % LANES_K * 2) * config.pitch
        start += warp_n * (config.groups * MMA_N) + lane // LANES_K
        mine = cute.make_tensor(sums + start, cute.make_layout(config.tile_m * config.pitch))
        for group in cutlass.range_constexpr(config.groups):
            for row_group in cutlass.range_constexpr(config.row_groups):
                first = 4 * (group * config.row_groups + row_group)
                for value in cutlass.range_constexpr(4):
                    row, column = row_group * MMA_M + value % 2, group * MMA_N + value // 2 * MMA_M
                    mine[row * config.pitch + column] = accumulators[first + value]

    @cute.jit
    def add(self, sums, partials, counters, place, units, finish, amax, thread):
        """Add the sums of all warps along k, and those of the k splits, and store what comes of them."""
        config = self.config
        pairs = config.tile_n // 2
        rows_left = finish.extents[0] - place.row
        count = config.tile_m * pairs
        own = partials + Int64(place.tile * units.split_k) * (config.tile_m * config.tile_n)
        for index in cutlass.range_constexpr(-(-count // config.threads)):
            number = thread + index * config.threads
            row, column = number // pairs, number % pairs * 2
            if number < count and row < rows_left:
                total = cute.make_rmem_tensor(2, self.acc_dtype)
                total.fill(0)
                for warp in cutlass.range_constexpr(config.warps_k):
                    at = (warp * config.tile_m + row) * config.pitch + column
                    theirs = pair_at(sums + at)
                    total[0] = total[0] + theirs[0]
                    total[1] = total[1] + theirs[1]
                if units.split_k == 1:
                    finish.store(total, place, row, column, amax)
                else:
                    at = place.split * (config.tile_m * config.tile_n) + row * config.tile_n + column
                    cute.autovec_copy(total, tensor_of_pair(own + at))
        if units.split_k > 1:
            arrived = cute.make_tensor(
                cute.recast_ptr(sums + config.warps_k * config.tile_m * config.pitch, dtype=Int32),
                cute.make_layout(1),
            )
            # Each thread's sums are visible before the one thread counts, and counting orders it before the
            # readers: release and acquire at device scope on both sides of the barrier.
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_threads()
            if thread == 0:
                arrived[0] = cute.arch.atomic_add(counters + place.tile, Int32(1), sem="acq_rel", scope="gpu")
            cute.arch.sync_threads()
            if arrived[0] == units.split_k - 1:
                cute.arch.fence_acq_rel_gpu()
                if thread == 0:
                    cute.make_tensor(counters + place.tile, cute.make_layout(1))[0] = Int32(0)
                for index in cutlass.range_constexpr(-(-count // config.threads)):
                    number = thread + index * config.threads
                    row, column = number // pairs, number % pairs * 2
                    if number < count and row < rows_left:
                        total = cute.make_rmem_tensor(2, self.acc_dtype)
                        total.fill(0)
                        for split in cutlass.range(units.split_k, unroll=4):
                            at = split * (config.tile_m * config.tile_n) + row * config.tile_n + column
                            theirs = pair_at(own + at)
                            total[0] = total[0] + theirs[0]
                            total[1] = total[1] + theirs[1]
                        finish.store(total, place, row, column, amax)


@dataclass(frozen=True)
class Finish:
    """What becomes of two neighbouring columns of a row, of which one thread has the sums."""

    config: KernelConfig
    address: Int64
    """Where D begins."""
    extents: tuple[Int32, Int32, Int32]
    leading: Int64
    """Leading dimension of D, in elements; the other stride too."""
    batch_stride: Int64
    words: tuple
    """Words of the epilogue's operands."""

    @property
    def out_dtype(self):
        return DTYPES[self.config.out_dtype]

    def words_of(self, operand):
        operands = self.config.fused.operands
        first = sum(each.words for each in operands[: operands.index(operand)])
        return self.words[first : first + operand.words]

    @cute.jit
    def store(self, total, place, tile_row, tile_column, amax):
        """Apply the epilogue, convert, and write what lies inside D."""
        config, fused = self.config, self.config.fused
        m, n, _ = self.extents
        row, column = place.row + tile_row, place.column + tile_column
        values = {}
        result = total
        out_column, out_n, count = column, n, 2
        if const_expr(fused):
            sums = cute.make_rmem_tensor(2, cutlass.Float32)
            sums.store(total.load().to(cutlass.Float32))
            for operand in fused.operands:
                if const_expr(operand.name not in ("residual", "amax")):
                    values[operand.name] = self.fetch(operand, row, column, place.entry, n, 2)
            value = fused.before_gate(sums.load(), values)
            if const_expr(fused.gated):
                sums.store(value)
                even = cute.make_rmem_tensor(1, cutlass.Float32)
                odd = cute.make_rmem_tensor(1, cutlass.Float32)
                even[0] = sums[0]
                odd[0] = sums[1]
                value = fused.gate(even.load(), odd.load())
                out_column, out_n, count = column // 2, n // 2, 1
            for operand in fused.operands:
                if const_expr(operand.name == "residual"):
                    values["residual"] = self.fetch(operand, row, out_column, place.entry, out_n, count)
            result = cute.make_rmem_tensor(count, cutlass.Float32)
            result.store(fused.after_gate(value, values))
        bytes_each = self.out_dtype.width // 8
        start = self.address + Int64(place.entry) * self.batch_stride * bytes_each
        for each in cutlass.range_constexpr(count):
            across = out_column + each
            offset = Int64(row) * self.leading + across
            if const_expr(config.out_major == "m"):
                offset = Int64(across) * self.leading + row
            target = element_at(self.out_dtype, start + offset * bytes_each)
            if const_expr("amax" in fused.steps):
                magnitude = result[each].bitcast(Int32) & MAGNITUDE
                amax[0] = cutlass.max(amax[0], magnitude if across < out_n else Int32(0))
            converted = result[each].to(self.out_dtype)
            if across < out_n:
                target[0] = converted

    @cute.jit
    def fetch(self, operand: cutlass.Constexpr, row, column, entry, n, count: cutlass.Constexpr):
        """An operand's values for `count` neighbouring columns, in fp32; of a number or scalar just one.

        n: the operand's columns, beyond which the last one stands for what is never stored.
        """
        words = self.words_of(operand)
        if const_expr(operand.kind == "number"):
            return Int32(words[0]).bitcast(cutlass.Float32)
        dtype = cutlass.Float32 if const_expr(operand.fp32) else self.out_dtype
        if const_expr(operand.kind == "scalar"):
            return element_at(dtype, words[0])[0]
        values = cute.make_rmem_tensor(count, cutlass.Float32)
        for each in cutlass.range_constexpr(count):
            across = cutlass.min(column + each, n - 1)
            offset = Int64(across)
            if const_expr(operand.kind == "m"):
                offset = Int64(row)
            elif const_expr(operand.kind == "matrix"):
                offset = Int64(row) * words[1] + across
                if const_expr(self.config.out_major == "m"):
                    offset = Int64(across) * words[1] + row
                offset += Int64(entry) * words[2]
            found = element_at(dtype, words[0] + offset * (dtype.width // 8))
            values[each] = found[0].to(cutlass.Float32)
        return values.load()

    @cute.jit
    def publish_amax(self, amax, lane):
        """The largest of a warp into the scalar, as an integer."""
        if const_expr("amax" in self.config.fused.steps):
            largest = amax[0]
            for step in cutlass.range_constexpr(5):
                largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=16 >> step))
            if lane == 0:
                place = cute.make_ptr(Int32, self.words[-1], cute.AddressSpace.gmem, assumed_align=4)
                cute.arch.atomic_max(place, largest, sem="relaxed", scope="gpu")


def element_at(dtype, address):
    """One element of global memory, as a tensor."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1))


def tensor_of_pair(pointer):
    """Two neighbouring sums, the first at an even place."""
    return cute.make_tensor(pointer.align(8), cute.make_layout(2))


def pair_at(pointer):
    """The values of a `tensor_of_pair`, in registers."""
    pair = cute.make_rmem_tensor(2, pointer.dtype)
    cute.autovec_copy(tensor_of_pair(pointer), pair)
    return pair


def words_at(address, count):
    """That many neighbouring words of shared memory."""
    outputs = ", ".join(f"{{$w{index}}}" for index in range(count))
    return list(
        cute.arch.inline_ptx(
            f"ld.shared.v{count}.b32 {{{outputs}}}, [{{$r0}}];",
            write_only_types=[Int32] * count,
            read_only_args=[address],
        )
    )


def halves_of(word, dtype):
    """Four fp8 values as two words of two fp16 values each, exactly."""
    letters = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}[dtype]
    found = []
    for part in range(2):
        pair = cutlass.Int16(word >> (16 * part)) if part else cutlass.Int16(word)
        found.append(
            cute.arch.inline_ptx(
                f"cvt.rn.f16x2.{letters}x2 {{$w0}}, {{$r0}};", write_only_types=[Int32], read_only_args=[pair]
            )
        )
    return found


def multiply_add(instruction, dtype, accumulators, first, a, b):
    """One instruction of the tensor cores on four accumulators from `first` on."""
    parts = [", ".join(f"{{$r{index}}}" for index in places) for places in (range(4), (4, 5), range(6, 10))]
    sources = ", ".join(f"{{{part}}}" for part in parts)
    results = cute.arch.inline_ptx(
        f"{instruction} {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, {sources};",
        write_only_types=[dtype] * 4,
        read_only_args=[*a, *b, *(accumulators[first + value] for value in range(4))],
    )
    for value in range(4):
        accumulators[first + value] = results[value]


def copy_async(target, source, vector_bytes, size, shared_by_warps: Any):
    """cp.async of `vector_bytes` to shared memory, of which the first `size` are read and the rest zeros.

    What other warps read, too, stays in the L1; 16 bytes that nobody else reads bypass it (.cg).
    """
    cache = "cg" if vector_bytes == 16 and not shared_by_warps else "ca"
    cute.arch.inline_ptx(
        f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {vector_bytes}, {{$r2}};",
        read_only_args=[target, source, size],
    )
