"""The Hopper kernel body: persistent, warp-specialized TMA + WGMMA, cooperative or pingpong.

One producer warpgroup (one warp of it issues TMA loads) feeds a ring of A and B tiles in shared memory;
consumer warpgroups multiply them by WGMMA and store through shared memory by TMA. Barriers:

    full[s]    1 arrival and the bytes of a stage      producer -> consumers
    empty[s]   one arrival of each consumer warp, of   consumers -> producer, at every CTA that
               every CTA that this CTA's tiles reach   multicasts into the released stage
    order[w]   named barrier, pingpong only: warpgroup w may issue its mainloop

With split-K, a tile's k range is cut into equal parts, each a piece of work of its own; with stream-K so that
every cluster has as much to do (`kernel_stream`). `kernel_sums` says how their sums become one.

An epilogue (`tunegemm.epilogue`) works on a warpgroup's accumulators, fp32 and in registers, one subtile at a
time between the mainloop and the staging buffers. A tile's values of its vectors are read once, before; its
matrices come by TMA or are read where they are used. With split-K it runs once, on the total.

Extents, strides, raster order, swizzle size, split count and grid are arguments of the launch.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.utils import LayoutEnum, SmemAllocator

from tunegemm.epilogue import Operand, operand_dtype
from tunegemm.families.cute_sm90.config import (
    MMA_ATOM_M,
    SMEM_ALIGNMENT,
    WARPGROUP_THREADS,
    KernelConfig,
)
from tunegemm.families.cute_sm90.kernel_epilogue import Fusion
from tunegemm.families.cute_sm90.kernel_stream import Pieces
from tunegemm.families.cute_sm90.kernel_sums import Sums
from tunegemm.families.cute_sm90.kernel_tf32 import MmaTf32
from tunegemm.problem import operand_dtypes

DTYPES = {
    "bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32, "tf32": cutlass.TFloat32,
    "fp8_e4m3": cutlass.Float8E4M3FN, "fp8_e5m2": cutlass.Float8E5M2, "int8": cutlass.Int8,
    "int32": cutlass.Int32,
}  # fmt: skip
WARPS = WARPGROUP_THREADS // 32

# Named barriers; 0 is the whole block's.
EPILOGUE_BARRIER = 1  # + consumer warpgroup
ORDER_BARRIER = 4  # + consumer warpgroup
START_BARRIER = 6  # the ring's barriers are there; without a cluster

# L2 cache policies of TMA loads, as createpolicy.fractional makes them for the whole of an access.
EVICT_NORMAL = 0x1000000000000000
EVICT_FIRST = 0x12F0000000000000

# Where a tile begins that begins nowhere inside.
NOWHERE = 2**31 - 1


class Gemm(Fusion, Pieces, Sums):
    """D[m, n] = A[m, k] B[n, k]^T for one `KernelConfig`."""

    def __init__(self, config: KernelConfig):
        self.config = config
        self.a_dtype, self.b_dtype = (DTYPES[name] for name in operand_dtypes(config.in_dtype))
        self.out_dtype = DTYPES[config.out_dtype]
        self.acc_dtype = cutlass.Int32 if config.in_dtype == "int8" else cutlass.Float32
        self.epilogue = config.fused
        # Vectors and matrices of an epilogue have the output's dtype, but that of fp8 outputs is too coarse.
        self.operand_dtype = DTYPES[operand_dtype(Operand("", "matrix"), config.out_dtype)]
        self.staged_matrix = config.staged_matrix
        self.cluster_size = config.cluster_m * config.cluster_n
        self.smem_bytes = 0

    # ---- host side: runs on the CPU at every launch -------------------------------------------------

    @cute.jit
    def __call__(
        self,
        a_address: Int64,
        b_address: Int64,
        d_address: Int64,
        m: Int32,
        n: Int32,
        k: Int32,
        batch: Int32,
        lda: Int64,
        ldb: Int64,
        ldd: Int64,
        a_batch_stride: Int64,
        b_batch_stride: Int64,
        d_batch_stride: Int64,
        raster_along_m: Int32,
        swizzle_size: Int32,
        clusters: Int32,
        split_k: Int32,
        second_kernel: Int32,
        l2_hint: Int32,
        partials_address: Int64,
        counters_address: Int64,
        stream,
    ):
        """Encode the TMA descriptors and launch.

        Strides count elements; `clusters` is the grid; `l2_hint` names the operand whose lines leave the L2
        first: 1 A, 2 B, 0 neither. With stream-K, `split_k` is the number of cluster tiles that are cut.
        Where tiles have parts, `partials` holds fp32 sums (`Division` in the package says how many), which a
        second kernel adds where `second_kernel` is 1; where it is 0 they meet in pairs, counted by
        `counters`, zeros that the kernel leaves as zeros.
        """
        self.launch(
            a_address, b_address, d_address, m, n, k, batch, lda, ldb, ldd, a_batch_stride, b_batch_stride,
            d_batch_stride, raster_along_m, swizzle_size, clusters, split_k, second_kernel, l2_hint,
            partials_address, counters_address, (), stream,
        )  # fmt: skip

    @cute.jit
    def launch(
        self, a_address, b_address, d_address, m, n, k, batch, lda, ldb, ldd, a_batch_stride, b_batch_stride,
        d_batch_stride, raster_along_m, swizzle_size, clusters, split_k, second_kernel, l2_hint,
        partials_address, counters_address, words, stream,
    ):  # fmt: skip
        """See `__call__`; words: what an epilogue's operands are (see `FusedGemm`)."""
        config = self.config
        mA = self.operand(a_address, self.a_dtype, (m, k, batch), config.a_major == "k", lda, a_batch_stride)
        mB = self.operand(b_address, self.b_dtype, (n, k, batch), config.b_major == "k", ldb, b_batch_stride)
        out_n = n
        if const_expr(self.epilogue.gated):
            out_n = n // 2
        mD = self.operand(
            d_address, self.out_dtype, (m, out_n, batch), config.out_major == "n", ldd, d_batch_stride
        )
        a_layout, b_layout = LayoutEnum.from_tensor(mA), LayoutEnum.from_tensor(mB)

        tiled_mma = self.tiled_mma(a_layout, b_layout, config.tile_warpgroups, config.tile_n)
        sA_layout = self.ring_layout(a_layout, self.a_dtype, config.tile_m, config.stages)
        sB_layout = self.ring_layout(b_layout, self.b_dtype, config.tile_n, config.stages)

        # Layouts of one stage are made anew: slicing a swizzled ring aborts the compiler where a stage is no
        # multiple of 1024 elements, as of tf32 at tile_n 48 (nvidia-cutlass-dsl 4.8.1).
        stage_a = self.ring_layout(a_layout, self.a_dtype, config.tile_m)
        stage_b = self.ring_layout(b_layout, self.b_dtype, config.tile_n)
        box_b = (config.tile_n, config.tile_k)
        gated_ring = None
        if const_expr(config.gates_halves):
            mB, stage_b, gated_ring, box_b = self.halves(b_layout, mB, ldb)
        tma_a, gA = self.tma_load(mA, stage_a, (config.tile_m, config.tile_k), config.cluster_n)
        tma_b, gB = self.tma_load(mB, stage_b, box_b, config.cluster_m)
        epilogue_mma = None
        sD_layout = None
        tma_d = None
        gD = mD
        matrix = ()
        if const_expr(config.epi_n > 0):
            # The same atom, as wide as what is converted at a time: which thread holds which element of that.
            epilogue_mma = self.tiled_mma(a_layout, b_layout, 1, config.converted_columns)
            d_layout = LayoutEnum.from_tensor(mD)
            sD_layout = self.staging_layout(
                d_layout, config.out_epi_n, config.consumers * config.epilogue_buffers
            )
            one_buffer = self.staging_layout(d_layout, config.out_epi_n)
            tma_d, gD = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                mD,
                one_buffer,
                (MMA_ATOM_M, config.out_epi_n),
            )
            if const_expr(self.staged_matrix is not None):
                address, leading, step = self.words_of(self.staged_matrix, words)
                mC = self.operand(
                    address, self.out_dtype, (m, out_n, batch), config.out_major == "n", leading, step
                )
                tma_c, gC = cpasync.make_tiled_tma_atom(
                    cpasync.CopyBulkTensorTileG2SOp(),
                    mC,
                    one_buffer,
                    (MMA_ATOM_M, config.out_epi_n),
                )
                matrix = (tma_c, gC)
        Storage = self.shared_storage(cute.cosize(sA_layout), cute.cosize(sB_layout))

        self.storage = Storage
        self.smem_bytes = Storage.size_in_bytes()

        # Work is counted in clusters.
        work_m = cute.ceil_div(m, config.tile_m * config.cluster_m)
        work_n = cute.ceil_div(n, config.tile_n * config.cluster_n)
        k_tiles = cute.ceil_div(k, config.tile_k)
        if const_expr(not self.streams):
            k_tiles = cute.ceil_div(k_tiles, split_k)
        partials = cute.make_ptr(self.acc_dtype, partials_address, cute.AddressSpace.gmem, assumed_align=16)
        counters = cute.make_ptr(Int32, counters_address, cute.AddressSpace.gmem, assumed_align=4)

        walk = (work_m, work_n, batch, split_k, raster_along_m, swizzle_size, second_kernel, clusters)
        last = self.last_begins(m, n, d_address, words)
        fused = (n, *words) if const_expr(self.epilogue) else ()

        self.kernel(
            tma_a, gA, tma_b, gB, tma_d, gD, matrix, tiled_mma, epilogue_mma, sA_layout, sB_layout,
            gated_ring, sD_layout, k_tiles, walk, last, l2_hint, partials, counters, fused,
        ).launch(
            grid=(config.cluster_m, config.cluster_n, clusters),
            block=(config.threads, 1, 1),
            cluster=(config.cluster_m, config.cluster_n, 1),
            smem=self.smem_bytes,
            stream=stream,
            # Without it ptxas ignores setmaxnreg (warning C7508).
            min_blocks_per_mp=1,
        )  # fmt: skip
        if second_kernel != 0:
            self.launch_sum(mD, a_layout, b_layout, k_tiles, walk, last, partials, fused, stream)

    @cute.jit
    def last_begins(self, m, n, d_address, words):
        """Row and column where the last tiles begin: inside, so that they end with the matrix.

        What hangs over the edge TMA fills with zeros, more slowly than it loads. Where tiles overlap they
        store the same values twice. But for two cases: stream-K cuts tiles at different places of k, so that
        their sums differ in the last bits; and a matrix that an epilogue reads where D lies must be read by
        one tile alone, before it stores.
        """
        config = self.config
        if const_expr(self.streams):
            return Int32(NOWHERE), Int32(NOWHERE)
        unit_m, unit_n = config.edge_units
        last_m = cute.ceil_div(cutlass.max(m - config.tile_m, 0), unit_m) * unit_m
        last_n = cute.ceil_div(cutlass.max(n - config.tile_n, 0), unit_n) * unit_n
        word = 0
        for operand in cutlass.range_constexpr(len(self.epilogue.operands)):
            described = self.epilogue.operands[operand]
            if const_expr(described.kind == "matrix"):
                if words[word] == d_address:
                    last_m = Int32(NOWHERE)
                    last_n = Int32(NOWHERE)
            word += described.words
        return last_m, last_n

    @cute.jit
    def begin(self, tile_m, tile_n, last):
        """First row and column of a tile."""
        row, column = tile_m * self.config.tile_m, tile_n * self.config.tile_n
        return cutlass.min(row, last[0]), cutlass.min(column, last[1])

    @cute.jit
    def operand(self, address, dtype, shape, minor_is_second, leading, batch_stride):
        """A (rows, columns, batch) tensor at a raw address, with the 16-byte strides that TMA wants."""
        divisor = 128 // dtype.width
        leading = cute.assume(leading, divby=divisor)
        batch_stride = cute.assume(batch_stride, divby=divisor)
        if const_expr(minor_is_second):
            stride = (leading, 1, batch_stride)
        else:
            stride = (1, leading, batch_stride)
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))

    def tiled_mma(self, a_layout, b_layout, warpgroups, columns):
        """WGMMAs of 64 rows and so many columns, one per warpgroup along m."""
        a_major, b_major = a_layout.sm90_mma_major_mode(), b_layout.sm90_mma_major_mode()
        if self.config.in_dtype == "tf32":
            op = MmaTf32(columns, a_major, b_major)
            return cute.make_tiled_mma(cute.make_mma_atom(op), (warpgroups, 1, 1))
        return sm90.make_trivial_tiled_mma(
            self.a_dtype,
            self.b_dtype,
            a_major,
            b_major,
            self.acc_dtype,
            (warpgroups, 1, 1),
            tiler_mn=(MMA_ATOM_M, columns),
        )

    def shared_storage(self, a_elements, b_elements):
        """Barriers, rings and staging buffers: what `KernelConfig.smem_bytes` counts."""
        config = self.config

        class Storage:
            full: cute.struct.MemRange[Int64, config.stages]
            empty: cute.struct.MemRange[Int64, config.stages]
            arrived: cute.struct.MemRange[Int32, 4]
            loaded: cute.struct.MemRange[Int64, max(1, config.consumers * config.epilogue_buffers)]
            a: cute.struct.Align[cute.struct.MemRange[self.a_dtype, a_elements], SMEM_ALIGNMENT]
            b: cute.struct.Align[cute.struct.MemRange[self.b_dtype, b_elements], SMEM_ALIGNMENT]

        if config.epi_n > 0:
            staged = config.epilogue_bytes * 8 // self.out_dtype.width
            Storage.__annotations__["d"] = cute.struct.Align[
                cute.struct.MemRange[self.out_dtype, staged], SMEM_ALIGNMENT
            ]
        return cute.struct(Storage)

    def ring_layout(self, layout, dtype, rows, *stages):
        """Swizzled (rows, tile_k, stages) layout of an operand's ring, or of one stage."""
        shape = (rows, self.config.tile_k, *stages)
        k_major = layout.sm90_mma_major_mode() == warpgroup.OperandMajorMode.K
        atom = warpgroup.make_smem_layout_atom(
            sm90.get_smem_layout_atom(layout, dtype, self.config.tile_k if k_major else rows),
            dtype,
        )
        order = (0, 1, 2) if k_major else (1, 0, 2)
        return cute.tile_to_shape(atom, shape, order=order[: len(shape)])

    @cute.jit
    def halves(self, layout, mB, ldb):
        """B as its even and its odd rows, so that one box of it is the even rows of a tile and then the odd
        ones; the layouts of a stage and of the ring, and the box.
        """
        config = self.config
        n, k, batch = mB.shape
        ldb = cute.assume(ldb, divby=128 // self.b_dtype.width)
        split = cute.make_layout((n // 2, k, 2, batch), stride=(2 * ldb, 1, ldb, mB.stride[2]))
        atom = warpgroup.make_smem_layout_atom(
            sm90.get_smem_layout_atom(layout, self.b_dtype, config.tile_k), self.b_dtype
        )
        box = (config.tile_n // 2, config.tile_k, 2)
        stage = cute.tile_to_shape(atom, box, order=(0, 2, 1))
        ring = cute.tile_to_shape(atom, (*box, config.stages), order=(0, 2, 1, 3))
        return cute.make_tensor(mB.iterator, split), stage, ring, box

    def staging_layout(self, layout, columns, *buffers):
        """Swizzled (64, columns, buffers) layout of the output's staging buffers, or of one."""
        n_major = self.config.out_major == "n"
        shape = (MMA_ATOM_M, columns, *buffers)
        if n_major and columns % 16:
            # Lines of an odd number of 16 bytes lie in different banks without a swizzle.
            stride = (columns, 1, MMA_ATOM_M * columns)
            plain = cute.make_layout(shape, stride=stride[: len(shape)])
            return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, plain)
        atom = warpgroup.make_smem_layout_atom(
            sm90.get_smem_layout_atom(layout, self.out_dtype, columns if n_major else MMA_ATOM_M),
            self.out_dtype,
        )
        order = (0, 1, 2) if n_major else (1, 0, 2)
        return cute.tile_to_shape(atom, shape, order=order[: len(shape)])

    def tma_load(self, tensor, stage_layout, box, multicast):
        """TMA load atom of one stage; with a cluster each CTA loads its share and multicasts it."""
        op = (
            cpasync.CopyBulkTensorTileG2SOp()
            if multicast == 1
            else cpasync.CopyBulkTensorTileG2SMulticastOp()
        )
        return cpasync.make_tiled_tma_atom(op, tensor, stage_layout, box, num_multicast=multicast)

    # ---- device side --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        tma_d: cute.CopyAtom | None,
        mD: cute.Tensor,
        matrix: tuple,
        tiled_mma: cute.TiledMma,
        epilogue_mma: cute.TiledMma | None,
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
        gated_ring: cute.ComposedLayout | None,
        sD_layout: cute.ComposedLayout | None,
        k_tiles: Int32,
        walk: tuple[Int32, Int32, Int32, Int32, Int32, Int32, Int32, Int32],
        last: tuple[Int32, Int32],
        l2_hint: Int32,
        partials: cute.Pointer,
        counters: cute.Pointer,
        fused: tuple,
    ):
        """`walk`: cluster tiles along m and n, batch, split count (of stream-K: tiles that are cut), whether
        along m, width of a band, whether a second kernel adds the parts, clusters of the grid.

        `last`: see `last_begins`. `matrix`: how TMA loads the epilogue's matrix; empty without one.
        `gated_ring`: see `halves`.

        `fused`, where there is an epilogue: columns of the product, of which D has half where they gate each
        other, and the words of its operands. Without one it is empty.
        """
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        group = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        work_m, work_n, batch, split_k, _, _, second_kernel, _ = walk
        total_work = work_m * work_n * batch
        if const_expr(not self.streams):
            total_work *= split_k

        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            if const_expr(config.epi_n > 0):
                cpasync.prefetch_descriptor(tma_d)
            if const_expr(self.staged_matrix is not None):
                cpasync.prefetch_descriptor(matrix[0])

        if second_kernel != 0:
            cute.arch.griddepcontrol_launch_dependents()

        storage = SmemAllocator().allocate(self.storage)
        full = storage.full.data_ptr()
        empty = storage.empty.data_ptr()
        releases = config.tile_warpgroups * WARPS * (config.cluster_m + config.cluster_n - 1)
        if thread == 0:
            for stage in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, releases)
            if const_expr(self.staged_matrix is not None):
                for buffer in cutlass.range_constexpr(config.consumers * config.epilogue_buffers):
                    cute.arch.mbarrier_init(storage.loaded.data_ptr() + buffer, 1)
        cute.arch.mbarrier_init_fence()
        # Nobody waits here: the producer goes on to its first loads, the others to where they need a barrier.
        if const_expr(self.cluster_size > 1):
            cute.arch.cluster_arrive_relaxed()

        sA = storage.a.get_tensor(sA_layout.outer, swizzle=sA_layout.inner)
        sB = storage.b.get_tensor(sB_layout.outer, swizzle=sB_layout.inner)
        sD = None
        if const_expr(config.epi_n > 0):
            sD = storage.d.get_tensor(sD_layout.outer, swizzle=sD_layout.inner)

        load_registers, mma_registers = config.registers
        started = 32 + config.consumers * WARPGROUP_THREADS
        if group == 0:
            cute.arch.setmaxregister_decrease(load_registers)
            if const_expr(self.cluster_size > 1):
                if warp_index != 0:
                    cute.arch.cluster_wait()
            if warp_index == 0:
                if const_expr(self.cluster_size == 1):
                    cute.arch.sync_warp()
                    cute.arch.barrier_arrive(barrier_id=START_BARRIER, number_of_threads=started)
                sB_loaded = sB
                if const_expr(config.gates_halves):
                    sB_loaded = storage.b.get_tensor(gated_ring.outer, swizzle=gated_ring.inner)
                self.produce(
                    tma_a, mA, tma_b, mB, sA, sB_loaded, full, empty, k_tiles, walk, last,
                    total_work, l2_hint,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(mma_registers)
            if const_expr(self.cluster_size > 1):
                cute.arch.cluster_wait()
            else:
                cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=started)
            self.consume(
                tma_d, mD, (*matrix, storage.loaded.data_ptr()), tiled_mma, epilogue_mma, sA, sB, sD, full,
                empty, storage.arrived.data_ptr(), thread - WARPGROUP_THREADS, group - 1, k_tiles, walk, last,
                total_work, partials, counters, fused,
            )  # fmt: skip

    @cute.jit
    def tile_of(self, work, walk):
        """(tile m, tile n, batch entry, part of k) of this CTA for a work index."""
        cta_m, cta_n, _ = cute.arch.block_idx()
        tile, part = self.split_work(work, walk)
        tile_m, tile_n, entry = self.cluster_tile_of(tile, walk)
        return tile_m * self.config.cluster_m + cta_m, tile_n * self.config.cluster_n + cta_n, entry, part

    @cute.jit
    def cluster_tile_of(self, tile, walk):
        """(cluster tile along m, along n, batch entry) for a tile's index.

        Batch entries are outermost. The walk over an entry goes along the raster order's mode in bands
        `swizzle_size` cluster tiles wide; the last band may be narrower, so no index is a phantom tile.
        """
        work_m, work_n, _, _, raster_along_m, swizzle_size, _, _ = walk
        length = work_n
        width = work_m
        if raster_along_m != 0:
            length = work_m
            width = work_n
        per_entry = work_m * work_n
        rest = Int32(tile)
        entry = Int32(0)
        if rest >= per_entry:  # most launches have one entry: no division for them
            entry = Int32(Uint32(rest) // Uint32(per_entry))
            rest -= entry * per_entry
        band = Int32(Uint32(rest) // Uint32(length * swizzle_size))
        rest -= band * length * swizzle_size
        first = band * swizzle_size
        columns = width - first
        if columns > swizzle_size:
            columns = swizzle_size
        step = Int32(Uint32(rest) // Uint32(columns))
        across = first + rest - step * columns
        tile_m = across
        tile_n = step
        if raster_along_m != 0:
            tile_m = step
            tile_n = across
        return tile_m, tile_n, entry

    @cute.jit
    def place_of(self, work, walk, last):
        """Of the tile of a work index: first row and column, entry of the batch."""
        tile_m, tile_n, entry, _ = self.tile_of(work, walk)
        row, column = self.begin(tile_m, tile_n, last)
        return row, column, entry

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

    @cute.jit
    def consume(
        self, tma_d, mD, matrix, tiled_mma, epilogue_mma, sA, sB, sD, full, empty, arrived, thread, group,
        k_tiles, walk, last, total_work, partials, counters, fused,
    ):  # fmt: skip
        """One consumer warpgroup: multiply, convert, store."""
        config = self.config
        pingpong = const_expr(config.schedule == "pingpong")
        two_level = const_expr(config.accumulation == "two_level")
        cta_m, cta_n, _ = cute.arch.block_idx()
        group_thread = thread % WARPGROUP_THREADS
        lane = thread % 32

        # WGMMA operands are descriptors; the slice of a warpgroup's first thread stands for all of it.
        first_thread = Int32(0) if const_expr(pingpong) else group * WARPGROUP_THREADS
        slice_mma = tiled_mma.get_slice(first_thread)
        tCrA = tiled_mma.make_fragment_A(slice_mma.partition_A(sA))
        tCrB = tiled_mma.make_fragment_B(slice_mma.partition_B(sB))
        accumulators = cute.make_rmem_tensor(
            slice_mma.partition_shape_C((config.tile_m, config.tile_n)), self.acc_dtype
        )

        partial = None
        if const_expr(two_level):
            partial = cute.make_rmem_tensor(accumulators.layout, self.acc_dtype)

        # Which CTAs wait for this CTA's release of a stage: those that multicast into it.
        signal = lane == 0
        peer = None
        if const_expr(self.cluster_size > 1):
            peer = lane % self.cluster_size
            peer_m = peer % config.cluster_m
            peer_n = peer // config.cluster_m
            signal = lane < self.cluster_size and (peer_m == cta_m or peer_n == cta_n)

        # The largest magnitude of what this thread stores, over all of its tiles.
        amax = cute.make_rmem_tensor(1, cutlass.Float32)
        amax[0] = cutlass.Float32(0.0)
        # Phases of the barriers of the matrix's loads, a bit for each staging buffer of this warpgroup.
        phases = Int32(0)

        stage = Int32(0)
        phase = Int32(0)
        work, _, count, left = self.first_piece(k_tiles, walk)
        if const_expr(pingpong):
            if group == 1:
                # The second warpgroup takes the cluster's second piece, the first one's k tiles deeper in the
                # ring.
                stage = count % config.stages
                phase = (count // config.stages) & 1
                work, _, count, left = self.next_piece(work, count, left, k_tiles, walk)
                cute.arch.barrier_arrive(barrier_id=ORDER_BARRIER, number_of_threads=2 * WARPGROUP_THREADS)

        while work < total_work:
            if const_expr(pingpong):
                cute.arch.barrier(barrier_id=ORDER_BARRIER + group, number_of_threads=2 * WARPGROUP_THREADS)

            if const_expr(two_level):
                if const_expr(self.staged_matrix is not None):
                    if not self.has_parts(work, walk):
                        self.load_matrix(matrix, sD, group, group_thread, self.place_of(work, walk, last))
                stage, phase = self.sum_two_level(
                    tiled_mma, accumulators, partial, tCrA, tCrB, full, empty, stage, phase, count, signal,
                    peer,
                )  # fmt: skip
            else:
                # The first k tile overwrites the accumulators, the others add to them. One WGMMA group stays
                # in flight, so that the tensor cores have work while a stage is released and one awaited.
                cute.arch.mbarrier_wait(full + stage, phase)
                warpgroup.fence()
                tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    self.multiply(tiled_mma, accumulators, tCrA, tCrB, block, stage)
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                if const_expr(self.staged_matrix is not None):
                    # Nobody else may have this tile to store; with parts of k it shows in the end who has.
                    if not self.has_parts(work, walk):
                        self.load_matrix(matrix, sD, group, group_thread, self.place_of(work, walk, last))
                previous = stage
                stage += 1
                if stage == config.stages:
                    stage = Int32(0)
                    phase ^= 1
                for _ in cutlass.range(count - 1, unroll=1):
                    cute.arch.mbarrier_wait(full + stage, phase)
                    warpgroup.fence()
                    for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                        self.multiply(tiled_mma, accumulators, tCrA, tCrB, block, stage)
                    warpgroup.commit_group()
                    warpgroup.wait_group(1)
                    if signal:
                        cute.arch.mbarrier_arrive(empty + previous, peer)
                    previous = stage
                    stage += 1
                    if stage == config.stages:
                        stage = Int32(0)
                        phase ^= 1
            if const_expr(pingpong):
                cute.arch.barrier_arrive(
                    barrier_id=ORDER_BARRIER + 1 - group, number_of_threads=2 * WARPGROUP_THREADS
                )
            # The divisions of the tile's coordinates run under the last WGMMAs.
            tile_m, tile_n, entry, _ = self.tile_of(work, walk)
            if const_expr(not two_level):
                warpgroup.wait_group(0)
                if signal:
                    cute.arch.mbarrier_arrive(empty + previous, peer)

            holds_sum = cutlass.Boolean(True)
            if self.has_parts(work, walk):
                rank = cta_n * config.cluster_m + cta_m
                sharer = 0 if const_expr(pingpong) else group
                piece = self.piece_of(work)
                if walk[6] != 0:
                    self.deposit(accumulators, partials, piece, rank, sharer, group_thread)
                    holds_sum = cutlass.Boolean(False)
                else:
                    first, parts = self.parts_of(self.split_work(work, walk)[0], k_tiles, walk)
                    holds_sum = self.reduce(
                        accumulators, partials, counters, arrived + group, first, piece - first, parts, rank,
                        sharer, group, group_thread,
                    )  # fmt: skip
            if holds_sum:
                place = (*self.begin(tile_m, tile_n, last), entry)
                if const_expr(config.epi_n > 0):
                    if const_expr(self.staged_matrix is not None):
                        if self.has_parts(work, walk):
                            self.load_matrix(matrix, sD, group, group_thread, place)
                    phases = self.store(
                        tma_d, mD, matrix, epilogue_mma, accumulators, sD, group, group_thread, place,
                        fused, amax, phases,
                    )  # fmt: skip
                else:
                    self.store_directly(mD, accumulators, group, group_thread, place)

            if const_expr(pingpong):
                # Skip the other warpgroup's piece.
                work, _, count, left = self.next_piece(work, count, left, k_tiles, walk)
                skipped = stage + count
                phase ^= (skipped // config.stages) & 1
                stage = skipped % config.stages
            work, _, count, left = self.next_piece(work, count, left, k_tiles, walk)

        if const_expr("amax" in self.epilogue.steps):
            self.publish_amax(fused[1:], amax, lane)
        # The staging buffers must stay until TMA has read them.
        if const_expr(config.epi_n > 0):
            if group_thread < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def multiply(self, tiled_mma, accumulators, tCrA, tCrB, block, stage):
        """The WGMMAs of one 32-byte block of k in one stage."""
        index = (None, None, block, stage)
        cute.gemm(tiled_mma, accumulators, tCrA[index], tCrB[index], accumulators)

    @cute.jit
    def sum_two_level(
        self, tiled_mma, sums, partial, tCrA, tCrB, full, empty, stage, phase, k_tiles, signal, peer
    ):  # fmt: skip
        """The main loop where the tensor cores add up one k tile only, and fp32 registers all of them.

        Nothing stays in flight while a warpgroup adds; with two at one tile the other's WGMMAs run then.
        """
        config = self.config
        sums.fill(0)
        for _ in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
            for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                self.multiply(tiled_mma, partial, tCrA, tCrB, block, stage)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if signal:
                cute.arch.mbarrier_arrive(empty + stage, peer)
            for value in cutlass.range_constexpr(config.accumulator_registers):
                sums[value] = sums[value] + partial[value]
            stage += 1
            if stage == config.stages:
                stage = Int32(0)
                phase ^= 1
        return stage, phase

    @cute.jit
    def store(
        self, tma_d, mD, matrix, epilogue_mma, accumulators, sD, group, group_thread, tile, fused, amax,
        phases,
    ):  # fmt: skip
        """Convert and store one warpgroup's rows, subtile by subtile, without the other warpgroups.

        A subtile is staged in one of `epilogue_buffers` buffers, from which TMA reads it while the next is
        converted. Buffer reuse needs the earlier read to be done, which only the issuing warp can await:
        with three buffers or more it awaits it one subtile early and the barrier that publishes a subtile
        also hands out the next buffer; with fewer that would serialize, so each subtile takes two barriers.
        Where TMA brought a matrix into the buffers, its arrival says that a buffer is free.

        `tile`: its first row and column in the product, and its entry of the batch. Returns the new `phases`
        of these arrivals.
        """
        config = self.config
        first_row, first_column, entry = tile
        buffers = config.epilogue_buffers
        loads = const_expr(self.staged_matrix is not None)
        pairs = const_expr(config.fused.gated and not config.gates_halves)
        store_op, load_op = cute.nvgpu.CopyUniversalOp(), cute.nvgpu.CopyUniversalOp()
        if const_expr(self.out_dtype.width == 16):
            matrices = min(4, config.converted_columns // 4)
            store_op = warp.StMatrix8x8x16bOp(config.out_major == "m", matrices)
            load_op = warp.LdMatrix8x8x16bOp(config.out_major == "m", matrices)
        tiled_copy, tRS_sD, tiled_load, tSR_sC = None, None, None, None
        if const_expr(not pairs):
            tiled_copy = cute.make_tiled_copy_C(cute.make_copy_atom(store_op, self.out_dtype), epilogue_mma)
            tRS_sD = tiled_copy.get_slice(group_thread).partition_D(sD)
        if const_expr(loads):
            tiled_load = cute.make_tiled_copy_C(cute.make_copy_atom(load_op, self.out_dtype), epilogue_mma)
            tSR_sC = tiled_load.get_slice(group_thread).partition_S(sD)
        bSG_sD, bSG_gD = self.staged_boxes(tma_d, mD, sD, tile)
        subtiles = config.tile_n // config.subtile_n
        columns = config.converted_columns * config.subtile_n // config.out_epi_n  # of the product
        values = MMA_ATOM_M * columns // WARPGROUP_THREADS
        pieces = config.subtile_n // columns
        out_shape = epilogue_mma.partition_shape_C((MMA_ATOM_M, config.converted_columns))
        issues = group_thread < 32

        held = ()
        if const_expr(self.epilogue):
            rows_apart = MMA_ATOM_M * config.tile_warpgroups
            own_row = first_row + group % config.tile_warpgroups * MMA_ATOM_M
            held = self.hold_vectors(
                fused[1:], group_thread, (own_row, first_column, entry), mD.shape[0], fused[0],
                config.atoms_per_warpgroup, rows_apart, config.tile_n,
            )  # fmt: skip
        if const_expr(not loads):
            # The previous tile's stores have had a whole mainloop to be read.
            self.await_buffers(issues, 0)
            self.epilogue_barrier(group)
        for index in cutlass.range_constexpr(config.subtiles):
            atom, subtile = index // subtiles, index % subtiles
            own_buffer = index % buffers
            buffer = group * buffers + own_buffer
            row, column = self.subtile_place(index, group)
            if const_expr(loads):
                phase = (phases >> own_buffer) ^ (index // buffers)
                cute.arch.mbarrier_wait(matrix[2] + buffer, phase & 1)
            for piece in cutlass.range_constexpr(pieces):
                fragment = cute.make_rmem_tensor(values, self.acc_dtype)
                for value in cutlass.range_constexpr(values):
                    source = (index * pieces + piece) * values + value
                    if const_expr(config.gates_halves):
                        # Four columns, gate and up in turns, from where the tile has either half.
                        source = (
                            (atom * 2 + value % 2) * (config.tile_n // 4)
                            + (subtile * pieces + piece) * (values // 2) + value // 4 * 2 + value // 2 % 2
                        )  # fmt: skip
                    fragment[value] = accumulators[source]
                if const_expr(self.epilogue):
                    loaded = None
                    if const_expr(loads):
                        given = cute.make_rmem_tensor(out_shape, self.out_dtype)
                        cute.copy(
                            tiled_load, tSR_sC[(None, None, piece, buffer)],
                            tiled_load.retile(given)[(None, None, 0)],
                        )  # fmt: skip
                        loaded = self.flat(given).load().to(cutlass.Float32)
                    tile_column = subtile * config.subtile_n + piece * columns
                    place = (first_row + row * MMA_ATOM_M, first_column + tile_column, entry)
                    fragment = self.fuse(
                        fragment, columns, group_thread, place, mD, fused[0], fused[1:], held, atom,
                        tile_column, loaded, amax,
                    )  # fmt: skip
                converted = cute.make_rmem_tensor(out_shape, self.out_dtype)
                self.flat(converted).store(fragment.load().to(self.out_dtype))
                if const_expr(piece == 0 and buffers <= 2 and index >= buffers and not loads):
                    self.await_buffers(issues, buffers - 1)
                    self.epilogue_barrier(group)
                if const_expr(pairs):
                    self.stage_halves(converted, sD, group_thread, piece, buffer)
                else:
                    cute.copy(
                        tiled_copy, tiled_copy.retile(converted)[(None, None, 0)],
                        tRS_sD[(None, None, piece, buffer)],
                    )  # fmt: skip
            cute.arch.fence_view_async_shared()
            if const_expr(buffers > 2 and index >= buffers - 1 and not loads):
                self.await_buffers(issues, buffers - 2)
            self.epilogue_barrier(group)
            if issues:
                cute.copy(tma_d, bSG_sD[(None, buffer)], bSG_gD[(None, row, column, entry)])
                cute.arch.cp_async_bulk_commit_group()
            if const_expr(loads):
                self.load_next(index, matrix, sD, group, group_thread, tile)
        if const_expr(loads):
            odd = sum(1 << own for own in range(buffers) if len(range(own, config.subtiles, buffers)) % 2)
            phases ^= odd
        return phases

    @cute.jit
    def subtile_place(self, index: cutlass.Constexpr, group):
        """A subtile's coordinates in its tile, counted in subtiles."""
        config = self.config
        subtiles = config.tile_n // config.subtile_n
        row = Int32(index // subtiles * config.tile_warpgroups)
        if const_expr(config.tile_warpgroups > 1):
            row += group
        return row, index % subtiles

    @cute.jit
    def staged_boxes(self, tma, tensor, sD, tile):
        """The staging buffers and a tensor's subtiles from a tile on, as TMA copies between them."""
        row, column, _ = tile
        if const_expr(self.epilogue.gated):
            column = column // 2
        inside = cute.domain_offset((row, column, 0), tensor)
        tiled = cute.local_tile(inside, (MMA_ATOM_M, self.config.out_epi_n), (None, None, None))
        return cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(tiled, 0, 2)
        )

    @cute.jit
    def store_directly(self, mD, accumulators, group, group_thread, tile):
        """Convert and store one warpgroup's rows from registers, pair by pair of columns.

        A thread holds two neighbouring columns of rows 8 apart, for each 8 columns of the tile (PTX ISA,
        wgmma, register fragment of D). Extents of the output's major mode are multiples of 16 bytes.
        """
        config = self.config
        m, n, _ = mD.shape
        first_row, first_column, entry = tile
        row = first_row + group_thread // 32 * 16 + group_thread % 32 // 4
        if const_expr(config.tile_warpgroups > 1):
            row += group * MMA_ATOM_M
        column = first_column + group_thread % 4 * 2
        rows_apart = MMA_ATOM_M * config.tile_warpgroups
        out_bytes = self.out_dtype.width // 8
        for half in cutlass.range_constexpr(2 * config.atoms_per_warpgroup):
            atom = half // 2
            line = row + atom * rows_apart + half % 2 * 8
            start = atom * (config.tile_n // 2) + half % 2 * 2
            if line < m:
                for block in cutlass.range_constexpr(config.tile_n // 8):
                    place = column + block * 8
                    pair = cute.make_rmem_tensor(2, self.out_dtype)
                    for value in cutlass.range_constexpr(2):
                        pair[value] = accumulators[start + block * 4 + value].to(self.out_dtype)
                    if place < n:
                        if const_expr(config.out_major == "n"):
                            address = mD.iterator.toint() + out_bytes * cute.crd2idx(
                                (line, Int64(place), entry), mD.layout
                            )
                            target = cute.make_ptr(
                                self.out_dtype, address, cute.AddressSpace.gmem, assumed_align=2 * out_bytes
                            )
                            cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))
                        else:
                            mD[line, place, entry] = pair[0]
                            if place + 1 < n:
                                mD[line, place + 1, entry] = pair[1]

    @cute.jit
    def await_buffers(self, issues, pending: cutlass.Constexpr):
        """The issuing warp waits until TMA has read all but the `pending` newest staged subtiles."""
        if issues:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)

    @cute.jit
    def epilogue_barrier(self, group):
        """All threads of one consumer warpgroup."""
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + group, number_of_threads=WARPGROUP_THREADS)


class FusedGemm(Gemm):
    """A `Gemm` with an epilogue that has operands: 64-bit words of the launch say what they are.

    A number is its fp32 bits; a scalar or a vector its address; a matrix its address, leading dimension and
    batch stride. Words beyond those of the epilogue's operands are ignored.
    """

    @cute.jit
    def __call__(
        self,
        a_address: Int64,
        b_address: Int64,
        d_address: Int64,
        m: Int32,
        n: Int32,
        k: Int32,
        batch: Int32,
        lda: Int64,
        ldb: Int64,
        ldd: Int64,
        a_batch_stride: Int64,
        b_batch_stride: Int64,
        d_batch_stride: Int64,
        raster_along_m: Int32,
        swizzle_size: Int32,
        clusters: Int32,
        split_k: Int32,
        second_kernel: Int32,
        l2_hint: Int32,
        partials_address: Int64,
        counters_address: Int64,
        word0: Int64,
        word1: Int64,
        word2: Int64,
        word3: Int64,
        word4: Int64,
        word5: Int64,
        word6: Int64,
        word7: Int64,
        word8: Int64,
        word9: Int64,
        word10: Int64,
        word11: Int64,
        stream,
    ):
        """See `Gemm.__call__`."""
        words = (word0, word1, word2, word3, word4, word5, word6, word7, word8, word9, word10, word11)
        self.launch(
            a_address, b_address, d_address, m, n, k, batch, lda, ldb, ldd, a_batch_stride, b_batch_stride,
            d_batch_stride, raster_along_m, swizzle_size, clusters, split_k, second_kernel, l2_hint,
            partials_address, counters_address, words[: self.epilogue.words], stream,
        )  # fmt: skip
