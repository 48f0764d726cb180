"""The Hopper kernel body: persistent, warp-specialized TMA + WGMMA, cooperative or pingpong.

One producer warpgroup (one warp of it issues TMA loads) feeds a ring of A and B tiles in shared memory;
consumer warpgroups multiply them by WGMMA and store through shared memory by TMA. Barriers:

    full[s]    1 arrival and the bytes of a stage      producer -> consumers
    empty[s]   one arrival of each consumer warp, of   consumers -> producer, at every CTA that
               every CTA that this CTA's tiles reach   multicasts into the released stage
    order[w]   named barrier, pingpong only: warpgroup w may issue its mainloop

With split-K, a tile's k range is cut into equal parts, each a piece of work of its own; with stream-K so that
every cluster has as much to do (`kernel_stream`). `kernel_sums` says how their sums become one.

An epilogue (`describe.epilogue`) works on a warpgroup's accumulators, fp32 and in registers, one subtile at a
time between the mainloop and the staging buffers. A tile's values of its vectors are read once, before; its
matrices come by TMA or are read where they are used. With split-K it runs once, on the total.

Extents, strides, raster order, swizzle size, split count and grid are arguments of the launch.

This module has the launch and what a block begins with. `Gemm` inherits the rest: `kernel_layouts`, what the
host prepares; `kernel_walk` and `kernel_stream`, which work there is; `kernel_load`, the producer;
`kernel_multiply` and `kernel_store`, the consumers; `kernel_sums` and `kernel_epilogue`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import LayoutEnum, SmemAllocator

from tunegemm.describe.epilogue import Operand, operand_dtype
from tunegemm.describe.problem import operand_dtypes
from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, WARPGROUP_THREADS, KernelConfig
from tunegemm.generate.cute_sm90.kernel_epilogue import Fusion
from tunegemm.generate.cute_sm90.kernel_layouts import START_BARRIER, Layouts
from tunegemm.generate.cute_sm90.kernel_load import Loads
from tunegemm.generate.cute_sm90.kernel_multiply import Multiplies
from tunegemm.generate.cute_sm90.kernel_store import Stores
from tunegemm.generate.cute_sm90.kernel_stream import Pieces
from tunegemm.generate.cute_sm90.kernel_sums import Sums
from tunegemm.generate.cute_sm90.kernel_walk import Walk

DTYPES = {
    "bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32, "tf32": cutlass.TFloat32,
    "fp8_e4m3": cutlass.Float8E4M3FN, "fp8_e5m2": cutlass.Float8E5M2, "int8": cutlass.Int8,
    "int32": cutlass.Int32,
}  # fmt: skip
WARPS = WARPGROUP_THREADS // 32


class Gemm(Layouts, Walk, Pieces, Loads, Multiplies, Sums, Fusion, Stores):
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
        block_across: Int32,
        block_along: Int32,
        clusters: Int32,
        split_k: Int32,
        second_kernel: Int32,
        l2_hint: Int32,
        partials_address: Int64,
        counters_address: Int64,
        places_address: Int64,
        stream,
    ):
        """Encode the TMA descriptors and launch.

        Strides count elements; `clusters` is the grid; `l2_hint` names the operand whose lines leave the L2
        first: 1 A, 2 B, 0 neither. With stream-K, `split_k` is the number of cluster tiles that are cut.
        Of gathered clusters, and ignored by others: `places` says for each which place in the walk is its
        first, 0 that of its index; tiles follow each other in blocks of `block_across` by `block_along` of a
        band (see `cluster_tile_of`).
        Where tiles have parts, `partials` holds fp32 sums (`Division` in the package says how many), which a
        second kernel adds where `second_kernel` is 1; where it is 0 they meet in pairs, counted by
        `counters`, zeros that the kernel leaves as zeros.
        """
        self.launch(
            a_address, b_address, d_address, m, n, k, batch, lda, ldb, ldd, a_batch_stride, b_batch_stride,
            d_batch_stride, raster_along_m, swizzle_size, block_across, block_along, clusters, split_k,
            second_kernel, l2_hint, partials_address, counters_address, places_address, (), stream,
        )  # fmt: skip

    @cute.jit
    def launch(
        self, a_address, b_address, d_address, m, n, k, batch, lda, ldb, ldd, a_batch_stride, b_batch_stride,
        d_batch_stride, raster_along_m, swizzle_size, block_across, block_along, clusters, split_k,
        second_kernel, l2_hint, partials_address, counters_address, places_address, words, stream,
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
        places = cute.make_ptr(Int32, places_address, cute.AddressSpace.gmem, assumed_align=4)

        walk = (
            work_m, work_n, batch, split_k, raster_along_m, swizzle_size, second_kernel, clusters,
            block_across, block_along,
        )  # fmt: skip
        last = self.last_begins(m, n, d_address, words)
        fused = (n, *words) if const_expr(self.epilogue) else ()

        self.kernel(
            tma_a, gA, tma_b, gB, tma_d, gD, matrix, tiled_mma, epilogue_mma, sA_layout, sB_layout,
            gated_ring, sD_layout, k_tiles, walk, last, l2_hint, partials, counters, places, fused,
        ).launch(
            grid=(config.cluster_m, config.cluster_n, clusters),
            block=(config.threads, 1, 1),
            cluster=(config.cluster_m, config.cluster_n, 1),
            smem=self.smem_bytes,
            stream=stream,
            # Without it ptxas ignores setmaxnreg (warning C7508).
            min_blocks_per_mp=config.occupancy,
            # With more than one the DSL would ask the driver, which may not be there, how much it is.
            preferred_smem_carveout=None if config.occupancy == 1 else 100,
        )  # fmt: skip
        if second_kernel != 0:
            self.launch_sum(mD, a_layout, b_layout, k_tiles, walk, last, partials, fused, stream)

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
        walk: tuple[Int32, ...],
        last: tuple[Int32, Int32],
        l2_hint: Int32,
        partials: cute.Pointer,
        counters: cute.Pointer,
        places: cute.Pointer,
        fused: tuple,
    ):
        """`walk`: cluster tiles along m and n, batch, split count (of stream-K: tiles that are cut), whether
        along m, width of a band, whether a second kernel adds the parts, clusters of the grid, tiles of a
        block across its band and along it. On the device also this cluster's place.

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
        work_m, work_n, batch, split_k, _, _, second_kernel, *_ = walk
        walk = (*walk, self.place_in_walk(places))
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
        block_across: Int32,
        block_along: Int32,
        clusters: Int32,
        split_k: Int32,
        second_kernel: Int32,
        l2_hint: Int32,
        partials_address: Int64,
        counters_address: Int64,
        places_address: Int64,
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
            d_batch_stride, raster_along_m, swizzle_size, block_across, block_along, clusters, split_k,
            second_kernel, l2_hint, partials_address, counters_address, places_address,
            words[: self.epilogue.words], stream,
        )  # fmt: skip
