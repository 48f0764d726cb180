"""The Hopper kernel: persistent, warp-specialized TMA + WGMMA, cooperative or pingpong.

One producer warpgroup (one warp of it issues TMA loads) feeds a ring of A and B tiles in shared memory;
consumer warpgroups multiply them by WGMMA and store through shared memory by TMA. Barriers: those of the ring
(`ring`), and with pingpong order[w], a named barrier: warpgroup w may issue its main loop.

With split-K, a tile's k range is cut into equal splits, each a work unit of its own; with stream-K so that
every cluster has as much to do (`schedule`). `split_k` says how their sums become one.

An epilogue (`describe.epilogue`) works on a warpgroup's accumulators, fp32 and in registers, one subtile at a
time between the main loop and the staging buffers. A tile's values of its vectors are read once, before; its
matrices come by TMA or are read where they are used. With split-K it runs once, on the total.

Extents, strides, raster order, swizzle size, split count and grid are arguments of the launch.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import SmemAllocator

from tunegemm.generate.cute_sm90.config import WARPGROUP_THREADS, KernelConfig
from tunegemm.generate.cute_sm90.kernel.consumer import Consumer
from tunegemm.generate.cute_sm90.kernel.epilogue import Epilogue
from tunegemm.generate.cute_sm90.kernel.fusion import Fusion, words_of
from tunegemm.generate.cute_sm90.kernel.layouts import (
    START_BARRIER,
    Dtypes,
    Layouts,
    Mmas,
    SmemLayouts,
    TmaTensor,
    load_box,
    matrix_at,
)
from tunegemm.generate.cute_sm90.kernel.producer import Producer
from tunegemm.generate.cute_sm90.kernel.ring import Ring
from tunegemm.generate.cute_sm90.kernel.schedule import Schedule, ScheduleParams, first_index, last_origin
from tunegemm.generate.cute_sm90.kernel.second_kernel import SecondKernel
from tunegemm.generate.cute_sm90.kernel.split_k import SplitK, Workspace


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
    raster_along_m: Int32
    swizzle_size: Int32
    block_across: Int32
    """With GPC-aware rasterization, and ignored without: see `kernel_rasterization.Block`."""
    block_along: Int32
    clusters: Int32
    """The grid."""
    split_k: Int32
    """k splits of every tile; with stream-K the number of cluster tiles that are cut."""
    second_kernel: Int32
    """1: a second kernel adds up the k splits; 0: they meet in pairs."""
    l2_hint: Int32
    """The operand whose lines leave the L2 first: 1 A, 2 B, 0 neither."""
    partials_address: Int64
    """Where tiles have k splits: room for the sums of their work units (`Division` in the package)."""
    counters_address: Int64
    """Where they meet in pairs: zeros, which the kernel leaves as zeros."""
    first_tiles_address: Int64
    """With GPC-aware rasterization a table of each cluster's first work index; 0: it is its own index."""


class Gemm:
    """D[m, n] = A[m, k] B[n, k]^T for one `KernelConfig`."""

    def __init__(self, config: KernelConfig):
        self.config = config
        self.dtypes = Dtypes.of(config)
        self.layouts = Layouts(config, self.dtypes)
        self.second_kernel = SecondKernel(config, self.dtypes)
        self.smem_bytes = 0

    # ---- host side: runs on the CPU at every launch -------------------------------------------------

    @cute.jit
    def __call__(self, *arguments):
        """Encode the TMA descriptors and launch.

        arguments: those of `Arguments`; where the epilogue has operands, 64-bit words that say what they are;
        the stream. A number is its fp32 bits; a scalar or a vector its address; a matrix its address, leading
        dimension and batch stride. Words beyond those of the epilogue's operands are ignored.
        """
        count = len(Arguments._fields)
        words = arguments[count : count + self.config.fused.words]
        self.launch(Arguments(*arguments[:count]), words, arguments[-1])

    @cute.jit
    def launch(self, given, words, stream):
        """See `__call__`."""
        config, dtypes, layouts = self.config, self.dtypes, self.layouts
        m, n, k, batch = given.m, given.n, given.k, given.batch
        mA = matrix_at(  # (M, K, L)
            given.a_address, dtypes.a, (m, k, batch), config.a_major == "k", given.lda, given.a_batch_stride
        )
        mB = matrix_at(  # (N, K, L)
            given.b_address, dtypes.b, (n, k, batch), config.b_major == "k", given.ldb, given.b_batch_stride
        )
        out_n = n
        if const_expr(config.fused.gated):
            out_n = n // 2
        out_shape, n_major = (m, out_n, batch), config.out_major == "n"
        mD = matrix_at(  # (M, N, L)
            given.d_address, dtypes.out, out_shape, n_major, given.ldd, given.d_batch_stride
        )

        mma = layouts.tiled_mma(config.tile_warpgroups, config.tile_n)
        sA_layout = layouts.ring_a(mA, config.stages)  # (bM, bK, STAGE)
        sB_layout = layouts.ring_b(mB, config.stages)  # (bN, bK, STAGE)
        # Layouts of one stage are made anew: slicing a swizzled ring aborts the compiler where a stage is no
        # multiple of 1024 elements, as of tf32 at tile_n 48 (nvidia-cutlass-dsl 4.8.1).
        stage_a, stage_b = layouts.ring_a(mA), layouts.ring_b(mB)
        box_b = (config.tile_n, config.tile_k)
        b_loaded = None
        if const_expr(config.gates_halves):
            mB, stage_b, b_loaded, box_b = layouts.gated_halves(mB, given.ldb)
        a = load_box(mA, stage_a, (config.tile_m, config.tile_k), config.cluster_n)
        b = load_box(mB, stage_b, box_b, config.cluster_m)
        epilogue_mma, sD_layout, d, c = None, None, TmaTensor(None, mD), None
        if const_expr(config.epi_n > 0):
            # The same atom, as wide as what is converted at a time: which thread holds which element of that.
            epilogue_mma = layouts.tiled_mma(1, config.converted_columns)
            # (epiM, epiN, BUFFER)
            sD_layout = layouts.staging(mD, config.out_epi_n, config.consumers * config.epilogue_buffers)
            d = layouts.staged_box(cpasync.CopyBulkTensorTileS2GOp(), mD, config.out_epi_n)
            if const_expr(config.staged_matrix is not None):
                address, leading, step = words_of(config.fused, config.staged_matrix, words)
                mC = matrix_at(address, dtypes.out, out_shape, n_major, leading, step)  # (M, N, L)
                c = layouts.staged_box(cpasync.CopyBulkTensorTileG2SOp(), mC, config.out_epi_n)
        self.storage = layouts.shared_storage(cute.cosize(sA_layout), cute.cosize(sB_layout))
        self.smem_bytes = self.storage.size_in_bytes()

        params = self.schedule_params(given, words)
        workspace = Workspace(
            cute.make_ptr(dtypes.acc, given.partials_address, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_ptr(Int32, given.counters_address, cute.AddressSpace.gmem, assumed_align=4),
        )
        first_tiles = cute.make_ptr(Int32, given.first_tiles_address, cute.AddressSpace.gmem, assumed_align=4)
        fused = (n, *words) if const_expr(config.fused) else ()

        self.kernel(
            (a, b, d, c), Mmas(mma, epilogue_mma), SmemLayouts(sA_layout, sB_layout, b_loaded, sD_layout),
            params, given.l2_hint, workspace, first_tiles, fused,
        ).launch(
            grid=(config.cluster_m, config.cluster_n, given.clusters),
            block=(config.threads, 1, 1),
            cluster=(config.cluster_m, config.cluster_n, 1),
            smem=self.smem_bytes,
            stream=stream,
            # Without it ptxas ignores setmaxnreg (warning C7508).
            min_blocks_per_mp=1,
        )  # fmt: skip
        if given.second_kernel != 0:
            self.second_kernel.launch(mD, params, workspace.partials, fused, stream)

    @cute.jit
    def schedule_params(self, given, words):
        """The numbers of a launch. Work is counted in clusters."""
        config, fused = self.config, self.config.fused
        k_tiles = cute.ceil_div(given.k, config.tile_k)
        if const_expr(config.tile_scheduler != "stream_k"):
            k_tiles = cute.ceil_div(k_tiles, given.split_k)
        matrices = [operand for operand in fused.operands if operand.kind == "matrix"]
        reads_d = [words_of(fused, matrix, words)[0] == given.d_address for matrix in matrices]
        last_row, last_column = last_origin(config, given.m, given.n, reads_d)
        return ScheduleParams(
            k_tiles,
            cute.ceil_div(given.m, config.tile_m * config.cluster_m),
            cute.ceil_div(given.n, config.tile_n * config.cluster_n),
            given.batch, given.split_k, given.raster_along_m, given.swizzle_size, given.second_kernel,
            given.clusters, given.block_across, given.block_along, last_row, last_column,
        )  # fmt: skip

    # ---- device side --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        tensors: tuple[TmaTensor, TmaTensor, TmaTensor, TmaTensor | None],
        mmas: Mmas,
        layouts: SmemLayouts,
        params: ScheduleParams,
        l2_hint: Int32,
        workspace: Workspace,
        first_tiles: cute.Pointer,
        fused: tuple,
    ):
        """`tensors`: A, B, D, and the epilogue's matrix that TMA loads, if it has one.

        `fused`, where there is an epilogue: columns of the product, of which D has half where they gate each
        other, and the words of its operands. Without one it is empty.
        """
        config = self.config
        a, b, d, c = tensors
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        schedule = Schedule(config, params).begun_by(first_index(config, first_tiles))

        if warp_index == 0:
            for tensor in cutlass.range_constexpr(len(tensors)):
                if const_expr(tensors[tensor] is not None and tensors[tensor].atom is not None):
                    cpasync.prefetch_descriptor(tensors[tensor].atom)
        if params.second_kernel != 0:
            cute.arch.griddepcontrol_launch_dependents()

        storage = SmemAllocator().allocate(self.storage)
        ring = Ring(config, storage.full.data_ptr(), storage.empty.data_ptr())
        if thread == 0:
            ring.make_barriers()
            if const_expr(config.staged_matrix is not None):
                for buffer in cutlass.range_constexpr(config.consumers * config.epilogue_buffers):
                    cute.arch.mbarrier_init(storage.loaded.data_ptr() + buffer, 1)
        cute.arch.mbarrier_init_fence()
        # Nobody waits here: the producer goes on to its first loads, the others to where they need a barrier.
        if const_expr(config.cluster_size > 1):
            cute.arch.cluster_arrive_relaxed()

        sA = storage.a.get_tensor(layouts.a.outer, swizzle=layouts.a.inner)  # (bM, bK, STAGE)
        sB = storage.b.get_tensor(layouts.b.outer, swizzle=layouts.b.inner)  # (bN, bK, STAGE)
        sD = None
        if const_expr(config.epi_n > 0):
            sD = storage.d.get_tensor(layouts.d.outer, swizzle=layouts.d.inner)  # (epiM, epiN, BUFFER)

        load_registers, mma_registers = config.registers
        started = 32 + config.consumers * WARPGROUP_THREADS
        if group == 0:
            cute.arch.setmaxregister_decrease(load_registers)
            if const_expr(config.cluster_size > 1):
                if warp_index != 0:
                    cute.arch.cluster_wait()
            if warp_index == 0:
                if const_expr(config.cluster_size == 1):
                    cute.arch.sync_warp()
                    cute.arch.barrier_arrive(barrier_id=START_BARRIER, number_of_threads=started)
                sB_loaded = sB
                if const_expr(config.gates_halves):
                    # (bN / 2, bK, 2, STAGE)
                    sB_loaded = storage.b.get_tensor(layouts.b_loaded.outer, swizzle=layouts.b_loaded.inner)
                Producer(config, a, b, sA, sB_loaded, ring).run(schedule, l2_hint)
        else:
            cute.arch.setmaxregister_increase(mma_registers)
            if const_expr(config.cluster_size > 1):
                cute.arch.cluster_wait()
            else:
                cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=started)
            loaded, met = storage.loaded.data_ptr(), storage.met.data_ptr()
            thread, group = thread - WARPGROUP_THREADS, group - 1  # of the consumers
            cta_m, cta_n, _ = cute.arch.block_idx()
            own, lane = thread % WARPGROUP_THREADS, thread % 32
            fusion = Fusion.of(config, self.dtypes, d.tensor, fused, own)
            epilogue = Epilogue(config, self.dtypes, d, c, mmas.epilogue, sD, loaded, fusion, group, own)
            split_k = SplitK(config, workspace, met, (cta_m, cta_n), group, own)
            consumer = Consumer(config, self.dtypes.acc, mmas.tile, sA, sB, ring, epilogue, split_k, group)
            consumer.run(schedule, lane, (cta_m, cta_n))
