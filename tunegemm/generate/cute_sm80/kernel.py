"""The Ampere kernel body: a ring of tiles filled by cp.async, ldmatrix, and mma.sync.m16n8k16.

All warps copy, multiply and store. One block barrier per tile of k: behind it the next tile is readable and
the slot of the previous one free (Volkov's and CUTLASS's multistage scheme).

Every copy says how many of its bytes exist; cp.async fills up with zeros. So extents need no divisibility,
and a vector needs no more alignment than `vector_bytes`.

With split-K, a tile's k range is cut into equal splits, each a work unit of its own. A block leaves its
partial sums in a workspace; the last to arrive adds all of them, in the order of k, and stores: the result
does not depend on who was last, and nobody waits.

Extents, strides, raster order, swizzle size, split count and grid are arguments of the launch.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warp

from tunegemm.generate.cute_sm80.config import MMA_K, MMA_M, MMA_N, WORD_BYTES, KernelConfig
from tunegemm.generate.cute_sm80.kernel_feed import Feed
from tunegemm.generate.kernel_rasterization import raster_of, tile_at

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}
# 16-byte pieces of partial sums that a thread adds up at a time.
REDUCED_CHUNKS = 16


class Schedule(NamedTuple):
    """What the launch decides about the order of work units."""

    tiles_m: Int32
    tiles_n: Int32
    batch: Int32
    split_k: Int32
    raster_along_m: Int32
    swizzle_size: Int32


class Arguments(NamedTuple):
    """What a launch is given, in this order, before the stream."""

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
    raster_along_m: Int32
    swizzle_size: Int32
    ctas: Int32
    """The grid."""
    split_k: Int32
    partials_address: Int64
    """With k splits: room for their fp32 sums."""
    counters_address: Int64
    """With k splits: zeros, which the kernel leaves as zeros."""


class Operands(NamedTuple):
    """Where A, B and D are, in this order, and how large."""

    addresses: tuple[Int64, Int64, Int64]
    extents: tuple[Int32, Int32, Int32]
    """M, N and K."""
    leading: tuple[Int64, Int64, Int64]
    """Leading dimensions, in elements."""
    batch_strides: tuple[Int64, Int64, Int64]


class Origin(NamedTuple):
    """Where a work unit begins."""

    row: Int32
    column: Int32
    first_k: Int32
    entry: Int32
    """Which one of the batch."""


class Gemm:
    """D[m, n] = A[m, k] B[n, k]^T for one `KernelConfig`."""

    def __init__(self, config: KernelConfig):
        self.config = config
        self.in_dtype = DTYPES[config.in_dtype]
        self.out_dtype = DTYPES[config.out_dtype]
        self.acc_dtype = DTYPES[config.acc_dtype]
        self.element_bytes = self.in_dtype.width // 8
        self.a_copy, self.b_copy = config.copy("a"), config.copy("b")
        # Byte offsets in shared memory: rings of A and B, then the spare words of their lines.
        self.b_ring = config.stages * config.tile_m * config.tile_k * self.element_bytes
        self.a_spare = config.stages * config.stage_bytes
        self.b_spare = self.a_spare + config.stages * self.a_copy.lines * WORD_BYTES
        self.smem_bytes = 0

    # ---- host side: runs on the CPU at every launch -------------------------------------------------

    @cute.jit
    def __call__(self, *arguments):
        """Launch. arguments: those of `Arguments`, then the stream."""
        self.launch(Arguments(*arguments[:-1]), arguments[-1])

    @cute.jit
    def launch(self, given, stream):
        """See `__call__`."""
        config = self.config
        tiled_mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(self.in_dtype, self.acc_dtype, (MMA_M, MMA_N, MMA_K)),
            cute.make_layout((config.warps_m, config.warps_n, 1)),
            # ldmatrix.x4 brings four 8x8 matrices: one 16x16 atom of A, but two 8x16 atoms of B, so that
            # the tile of all warps is two atoms wide along n for each of them.
            permutation_mnk=(MMA_M * config.warps_m, MMA_N * config.atoms_n * config.warps_n, MMA_K),
        )
        tiles_m = cute.ceil_div(given.m, config.tile_m)
        tiles_n = cute.ceil_div(given.n, config.tile_n)
        k_tiles = cute.ceil_div(cute.ceil_div(given.k, config.tile_k), given.split_k)
        partials = cute.make_ptr(
            cutlass.Float32, given.partials_address, cute.AddressSpace.gmem, assumed_align=16
        )
        counters = cute.make_ptr(Int32, given.counters_address, cute.AddressSpace.gmem, assumed_align=4)
        operands = Operands(
            (given.a_address, given.b_address, given.d_address),
            (given.m, given.n, given.k),
            (given.lda, given.ldb, given.ldd),
            (given.a_batch_stride, given.b_batch_stride, given.d_batch_stride),
        )
        schedule = Schedule(
            tiles_m, tiles_n, given.batch, given.split_k, given.raster_along_m, given.swizzle_size
        )
        self.smem_bytes = config.smem_bytes
        self.kernel(
            tiled_mma, self.ring_layout("a"), self.ring_layout("b"), operands, k_tiles, schedule, partials,
            counters,
        ).launch(
            grid=(given.ctas, 1, 1),
            block=(config.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=100,
        )  # fmt: skip

    def ring_layout(self, operand):
        """(rows, tile_k, stages) of an operand's ring: lines in swizzled blocks of 128 or 64 bytes.

        `Feed` computes the same addresses for its copies.
        """
        config = self.config
        copy = config.copy(operand)
        rows = config.tile_m if operand == "a" else config.tile_n
        k_major = (config.a_major if operand == "a" else config.b_major) == "k"
        shape, stride = ((8, copy.block), (copy.block, 1)) if k_major else ((copy.block, 8), (1, copy.block))
        # In elements: 8 of them are a 16-byte chunk, 64 a row of all banks.
        atom = cute.make_composed_layout(
            cute.make_swizzle(config.smem_swizzle, 3, 3), 0, cute.make_layout(shape, stride=stride)
        )
        return cute.tile_to_shape(
            atom, (rows, config.tile_k, config.stages), order=(0, 1, 2) if k_major else (1, 0, 2)
        )

    # ---- device side --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
        operands: Operands,
        k_tiles: Int32,
        schedule: Schedule,
        partials: cute.Pointer,
        counters: cute.Pointer,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        split_k = schedule.split_k
        total_work = schedule.tiles_m * schedule.tiles_n * schedule.batch * split_k

        ring = cute.arch.get_dyn_smem(self.in_dtype, alignment=1024)
        sA = cute.make_tensor(ring, sA_layout)
        sB = cute.make_tensor(ring + self.b_ring // self.element_bytes, sB_layout)

        work = Int32(block)
        while work < total_work:
            tile_m, tile_n, entry, split = self.tile_of(work, schedule)
            first_k = split * k_tiles * config.tile_k
            origin = Origin(tile_m * config.tile_m, tile_n * config.tile_n, first_k, entry)
            accumulators = cute.make_rmem_tensor(
                tiled_mma.partition_shape_C((config.tile_m, config.tile_n)), self.acc_dtype
            )
            accumulators.fill(0.0)
            self.multiply(tiled_mma, accumulators, sA, sB, ring, thread, operands, origin, k_tiles)
            # The ring is drained and free: its memory stages sums and output.
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            sums = cute.make_rmem_tensor(accumulators.layout, cutlass.Float32)
            sums.store(accumulators.load().to(cutlass.Float32))
            holds_sum = cutlass.Boolean(True)
            if split_k > 1:
                tile = (entry * schedule.tiles_n + tile_n) * schedule.tiles_m + tile_m
                holds_sum = self.reduce(sums, partials, counters, ring, tile, split, split_k, thread)
            if holds_sum:
                self.store(tiled_mma, sums, ring, thread, operands, origin)
            cute.arch.sync_threads()
            work += blocks

    @cute.jit
    def tile_of(self, work, schedule):
        """(tile m, tile n, batch entry, k split) for a work index.

        k splits are outermost, so that blocks that run together share operands; then batch entries.
        """
        tiles_m, tiles_n, batch, _, raster_along_m, swizzle_size = schedule
        raster = raster_of(tiles_m, tiles_n, raster_along_m, swizzle_size)
        per_entry = tiles_m * tiles_n
        entry = Int32(Uint32(work) // Uint32(per_entry))
        rest = work - entry * per_entry
        split = Int32(Uint32(entry) // Uint32(batch))
        entry -= split * batch
        tile_m, tile_n = tile_at(rest, raster)
        return tile_m, tile_n, entry, split

    @cute.jit
    def multiply(self, tiled_mma, accumulators, sA, sB, ring, thread, operands, origin, k_tiles):
        """The main loop of one tile: the ring runs `stages - 1` tiles of k ahead."""
        config = self.config
        stages = config.stages
        blocks = config.tile_k // MMA_K
        early = config.shifts and stages > 2
        base = ring.toint()
        addresses, (extent_m, extent_n, extent_k), leading, batch_strides = operands
        row, column, first_k, entry = origin
        a = Feed(config, "a", self.element_bytes, base, base + self.a_spare, thread)
        b = Feed(config, "b", self.element_bytes, base + self.b_ring, base + self.b_spare, thread)
        a_place = a.start(addresses[0], batch_strides[0], entry, leading[0], row, first_k)
        b_place = b.start(addresses[1], batch_strides[1], entry, leading[1], column, first_k)
        rows_left = extent_m - row
        columns_left = extent_n - column
        k_left = extent_k - first_k

        # Tiles of k that lie inside the extents as a whole, as the first ones of an inner tile do.
        whole = Int32(0)
        if rows_left >= config.tile_m + config.shifts and columns_left >= config.tile_n + config.shifts:
            whole = cutlass.min(cutlass.max(k_left - config.shifts, 0) // config.tile_k, k_tiles)

        for slot in cutlass.range(stages - 1, unroll=1):
            if slot < whole:
                a.load_part(a_place, leading[0], slot, True, 0, 1)
                b.load_part(b_place, leading[1], slot, True, 0, 1)
            elif slot < k_tiles:
                a.load(a_place, leading[0], rows_left, k_left, slot)
                b.load(b_place, leading[1], columns_left, k_left, slot)
            cute.arch.cp_async_commit_group()
            a_place += a.step(leading[0])
            b_place += b.step(leading[1])
            k_left -= config.tile_k

        slice_mma = tiled_mma.get_slice(thread)
        tCrA = tiled_mma.make_fragment_A(slice_mma.partition_A(sA[None, None, 0]))
        tCrB = tiled_mma.make_fragment_B(slice_mma.partition_B(sB[None, None, 0]))
        copy_a = cute.make_tiled_copy_A(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(config.a_major != "k", 4), self.in_dtype), tiled_mma
        )
        copy_b = cute.make_tiled_copy_B(
            cute.make_copy_atom(
                warp.LdMatrix8x8x16bOp(config.b_major != "k", 2 * config.atoms_n), self.in_dtype
            ),
            tiled_mma,
        )
        tSsA = copy_a.get_slice(thread).partition_S(sA)
        tSsB = copy_b.get_slice(thread).partition_S(sB)
        tSrA = copy_a.retile(tCrA)
        tSrB = copy_b.retile(tCrB)

        read = Int32(0)
        write = Int32(stages - 1)
        cute.arch.cp_async_wait_group(stages - 2)
        self.shift(a, b, leading, a_place, b_place, read)
        cute.arch.sync_threads()
        cute.copy(copy_a, tSsA[None, None, 0, read], tSrA[None, None, 0])
        cute.copy(copy_b, tSsB[None, None, 0, read], tSrB[None, None, 0])
        for k_tile in cutlass.range(k_tiles, unroll=1):
            for index in cutlass.range_constexpr(blocks):
                if const_expr(index == blocks - 1):
                    # The last fragments of this tile are in registers: make the next tile readable.
                    read += 1
                    if read == stages:
                        read = Int32(0)
                    if const_expr(not early):
                        cute.arch.cp_async_wait_group(stages - 2)
                        self.shift(a, b, leading, a_place, b_place, read)
                    cute.arch.sync_threads()
                following = (index + 1) % blocks
                cute.copy(copy_a, tSsA[None, None, following, read], tSrA[None, None, following])
                cute.copy(copy_b, tSsB[None, None, following, read], tSrB[None, None, following])
                if const_expr(index == 0):
                    ahead = k_tile + stages - 1
                    is_whole = ahead < whole
                    if ahead >= whole and ahead < k_tiles:
                        a.load(a_place, leading[0], rows_left, k_left, write)
                        b.load(b_place, leading[1], columns_left, k_left, write)
                    if const_expr(early):
                        # The next tile arrives a stage earlier, to be shifted before the barrier.
                        cute.arch.cp_async_wait_group(stages - 3)
                        cute.arch.sync_warp()  # spare words are copied by other lanes of the warp
                        following_slot = read + 1
                        if following_slot == stages:
                            following_slot = Int32(0)
                        a.shift_even(a_place, leading[0], following_slot)
                        b.shift_even(b_place, leading[1], following_slot)
                if const_expr(index < blocks - 1):
                    # Copies among the products of all steps but the last: the tensor cores stay busy.
                    if const_expr(early):
                        a.shift_part(a_place, leading[0], following_slot, index, blocks - 1)
                        b.shift_part(b_place, leading[1], following_slot, index, blocks - 1)
                    a.load_part(a_place, leading[0], write, is_whole, index, blocks - 1)
                    b.load_part(b_place, leading[1], write, is_whole, index, blocks - 1)
                if const_expr(index == blocks - 2):
                    cute.arch.cp_async_commit_group()
                    a_place += a.step(leading[0])
                    b_place += b.step(leading[1])
                    k_left -= config.tile_k
                    write += 1
                    if write == stages:
                        write = Int32(0)
                cute.gemm(
                    tiled_mma, accumulators, tCrA[None, None, index], tCrB[None, None, index], accumulators
                )

    @cute.jit
    def shift(self, a, b, leading, a_place, b_place, slot):
        """Shift the odd lines of the tiles in a slot, each warp those that it copied."""
        if const_expr(self.config.shifts):
            cute.arch.sync_warp()  # spare words are copied by other lanes of the warp
            a.shift(a_place, leading[0], slot)
            b.shift(b_place, leading[1], slot)

    @cute.jit
    def reduce(self, sums, partials, counters, ring, tile, split, splits, thread):
        """Leave this k split's sums in the workspace; true for the last, which then holds the total.

        Only the same threads of other blocks touch these sums, so that their layout is free: four
        neighbours of a thread, then threads, for 16-byte accesses.
        """
        config = self.config
        values, threads = config.accumulators, config.threads
        layout = cute.make_layout((4, values // 4), stride=(1, 4 * threads))
        own = cute.make_tensor(sums.iterator, cute.make_layout((4, values // 4)))
        first = partials + Int64(tile * splits) * (values * threads) + thread * 4
        mine = cute.make_tensor(first + Int64(split) * (values * threads), layout)
        for chunk in cutlass.range_constexpr(values // 4):
            cute.autovec_copy(own[(None, chunk)], mine[(None, chunk)])
        arrived = cute.make_tensor(cute.recast_ptr(ring, dtype=Int32), cute.make_layout(1))
        # Each thread's sums are visible before the one thread counts, and counting orders it before the
        # readers: release and acquire at device scope on both sides of the barrier.
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_threads()
        if thread == 0:
            arrived[0] = cute.arch.atomic_add(counters + tile, Int32(1), sem="acq_rel", scope="gpu")
        cute.arch.sync_threads()
        last = arrived[0] == splits - 1
        if last:
            cute.arch.fence_acq_rel_gpu()
            if thread == 0:
                cute.make_tensor(counters + tile, cute.make_layout(1))[0] = Int32(0)
            # By 64 values: what is not summed yet needs no registers, which leaves room for loads in flight.
            for group in cutlass.range_constexpr(0, values // 4, REDUCED_CHUNKS):
                end = min(group + REDUCED_CHUNKS, values // 4)
                for chunk in cutlass.range_constexpr(group, end):
                    for value in cutlass.range_constexpr(4):
                        own[value, chunk] = cutlass.Float32(0.0)
                for index in cutlass.range(splits, unroll=1):
                    theirs = cute.make_tensor(first + Int64(index) * (values * threads), layout)
                    for chunk in cutlass.range_constexpr(group, end):
                        piece = cute.make_rmem_tensor(4, cutlass.Float32)
                        cute.autovec_copy(theirs[(None, chunk)], piece)
                        for value in cutlass.range_constexpr(4):
                            own[value, chunk] = own[value, chunk] + piece[value]
        cute.arch.sync_threads()
        return last

    @cute.jit
    def store(self, tiled_mma, sums, ring, thread, operands, origin):
        """Convert, stage in shared memory, and store along the output's lines."""
        config = self.config
        row, column, extents, leading = origin.row, origin.column, operands.extents, operands.leading[2]
        bytes_each = self.out_dtype.width // 8
        address = operands.addresses[2] + Int64(origin.entry) * operands.batch_strides[2] * bytes_each
        n_major = const_expr(config.out_major == "n")
        pitch = config.staging_pitch
        staged = cute.make_tensor(
            cute.recast_ptr(ring, dtype=self.out_dtype),
            cute.make_layout((config.tile_m, config.tile_n), stride=(pitch, 1) if n_major else (1, pitch)),
        )
        converted = cute.make_rmem_tensor(sums.layout, self.out_dtype)
        converted.store(sums.load().to(self.out_dtype))
        cute.autovec_copy(converted, tiled_mma.get_slice(thread).partition_C(staged))
        cute.arch.sync_threads()

        lines, extent = (config.tile_m, config.tile_n) if n_major else (config.tile_n, config.tile_m)
        first_line, first_element = (row, column) if n_major else (column, row)
        lines_left = (extents[0] if n_major else extents[1]) - first_line
        elements_left = (extents[1] if n_major else extents[0]) - first_element
        corner = address + (Int64(first_line) * leading + first_element) * bytes_each
        # Vectors where every line starts at a multiple of 16 bytes; else elements, which lanes side by side
        # still write as one piece.
        if (Int32(corner) | Int32(leading * bytes_each)) & 15 == 0:
            self.store_lines(
                ring, thread, corner, leading, lines, extent, lines_left, elements_left, 16 // bytes_each
            )
        else:
            self.store_lines(ring, thread, corner, leading, lines, extent, lines_left, elements_left, 1)

    @cute.jit
    def store_lines(
        self, ring, thread, corner, leading, lines: cutlass.Constexpr, extent: cutlass.Constexpr, lines_left,
        elements_left, vector: cutlass.Constexpr,
    ):  # fmt: skip
        """Write the staged lines, `vector` elements at a time."""
        threads = self.config.threads
        per_line = extent // vector
        bytes_each = self.out_dtype.width // 8
        staged = cute.recast_ptr(ring, dtype=self.out_dtype)
        layout = cute.make_layout(vector)
        for index in cutlass.range((lines * per_line + threads - 1) // threads, unroll=4):
            place = thread + index * threads
            line = place // per_line
            element = (place - line * per_line) * vector
            if line < cutlass.min(lines_left, lines) and element < elements_left:
                source = (staged + (line * self.config.staging_pitch + element)).align(vector * bytes_each)
                target = cute.make_ptr(
                    self.out_dtype,
                    corner + (Int64(line) * leading + element) * bytes_each,
                    cute.AddressSpace.gmem,
                    assumed_align=vector * bytes_each,
                )
                values = cute.make_rmem_tensor(vector, self.out_dtype)
                cute.autovec_copy(cute.make_tensor(source, layout), values)
                out = cute.make_tensor(target, layout)
                if element + vector <= elements_left:
                    cute.autovec_copy(values, out)
                else:
                    for value in cutlass.range_constexpr(vector):
                        if element + value < elements_left:
                            out[value] = values[value]
