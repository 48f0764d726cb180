"""The grouped kernel: persistent, warp-specialized TMA + WGMMA; the device alone knows where groups end.

D[r, n] = A[r, k] B[g, n, k]^T + bias[g, n] for each row r of group g: offsets[g - 1] <= r < offsets[g].

One producer warp feeds a ring of tiles of the weights B and of the rows A; consumer warpgroups multiply them.
The weights' N is WGMMA's m (see `config`). A tile of rows may reach into the next group's: these are loaded
and multiplied, but not stored. With a gate the weights hold rows of gate and up (`config`), and a column of D
is the gate of two of the product. Extents, strides and grid are arguments of the launch.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import LayoutEnum, SmemAllocator

from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, WARPGROUP_THREADS
from tunegemm.generate.cute_sm90.kernel.layouts import (
    START_BARRIER,
    Dtypes,
    Layouts,
    load_box,
    matrix_at,
)
from tunegemm.generate.cute_sm90.kernel.ring import Ring
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.grouped.kernel.consumer import Consumer
from tunegemm.generate.grouped.kernel.epilogue import Epilogue
from tunegemm.generate.grouped.kernel.producer import Producer
from tunegemm.generate.grouped.kernel.walk import Walk, WalkParams


class Arguments(NamedTuple):
    """What a launch is given, in this order, before the stream."""

    weights_address: Int64
    """B, (E, N, K); with a gate (E, 2 N, K)"""
    rows_address: Int64
    """A, (rows, K)"""
    out_address: Int64
    """D, (rows, N)"""
    n: Int32
    """Columns of D: with a gate, of each of gate and up."""
    rows: Int32
    k: Int32
    groups: Int32
    weights_stride: Int64
    """Strides count elements: from one row (n-major: column) of a matrix to the next, from one group to the
    next.
    """
    rows_stride: Int64
    out_stride: Int64
    group_stride: Int64
    bias_stride: Int64
    up_stride: Int64
    """From a row of a gate to that of its up; 0 without a gate."""
    swizzle_size: Int32
    """Tiles of rows that share tiles of weights, see `walk`."""
    blocks: Int32
    """The grid."""
    l2_hint: Int32
    """1: lines of the weights leave the L2 first."""
    offsets_address: Int64
    """The groups' ends, int32."""
    bias_address: Int64
    """(E, N), as B's rows; or scales in its place, fp32; 0 without either."""
    scales_address: Int64
    """Of A's rows, fp32; 0 without."""


class Gemm:
    """The grouped product for one `GroupedConfig`."""

    def __init__(self, config: GroupedConfig):
        self.config = config
        self.dtypes = Dtypes.of(config)
        self.layouts = Layouts(config, self.dtypes)
        self.smem_bytes = 0

    # ---- host side: runs on the CPU at every launch -------------------------------------------------

    @cute.jit
    def __call__(self, *arguments):
        """Encode the TMA descriptors and launch. arguments: those of `Arguments`; the stream."""
        self.launch(Arguments(*arguments[:-1]), arguments[-1])

    @cute.jit
    def launch(self, given, stream):
        """See `__call__`."""
        config, dtypes, layouts = self.config, self.dtypes, self.layouts
        mA = matrix_at(  # (N, K, GROUP)
            given.weights_address, dtypes.a, (given.n, given.k, given.groups), config.a_major == "k",
            given.weights_stride, given.group_stride,
        )  # fmt: skip
        sA_layout = layouts.ring_a(mA, config.stages)  # (bM, bK, STAGE)
        sA_loaded = sA_layout
        if const_expr(config.fused.gated):
            gated, stage, sA_loaded, box = self.gated_weights(mA, given.weights_stride, given.up_stride)
            weights = load_box(gated, stage, box, 1)
        else:
            weights = load_box(mA, layouts.ring_a(mA), (config.tile_m, config.tile_k), 1)
        rows_stride = cute.assume(given.rows_stride, divby=128 // dtypes.b.width)
        mB = cute.make_tensor(  # (ROW, K)
            cute.make_ptr(dtypes.b, given.rows_address, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout((given.rows, given.k), stride=(rows_stride, 1)),
        )
        sB_layout = layouts.ring_b(mB, config.stages)  # (bN, bK, STAGE)
        sB_widths = tuple(  # (width, bK, STAGE)
            self.first_rows(layouts._ring(mB, dtypes.b, width)) for width in config.widths
        )
        rows = tuple(
            load_box(mB, layouts._ring(mB, dtypes.b, width), (width, config.tile_k), config.cluster_m)
            for width in config.widths
        )
        mmas = tuple(layouts.tiled_mma(config.tile_warpgroups, width) for width in config.widths)
        epilogue_mma = layouts.tiled_mma(1, config.epi_n)
        self.storage = layouts.shared_storage(cute.cosize(sA_layout), cute.cosize(sB_layout))
        self.smem_bytes = self.storage.size_in_bytes()
        clusters, cluster = given.blocks, None
        if const_expr(config.cluster_size > 1):
            clusters = cutlass.max(given.blocks // config.cluster_size, 1)
            cluster = (config.cluster_m, config.cluster_n, 1)
        params = WalkParams(
            given.groups, given.rows, cute.ceil_div(given.n, config.tile_columns * config.cluster_m),
            given.swizzle_size, clusters,
        )  # fmt: skip
        offsets = cute.make_ptr(Int32, given.offsets_address, cute.AddressSpace.gmem, assumed_align=4)
        alternates = Int32(0)
        if given.up_stride < given.weights_stride:
            alternates = Int32(1)
        out = (
            given.n, given.out_address, given.out_stride, given.bias_address, given.bias_stride, alternates,
            given.scales_address,
        )  # fmt: skip

        self.kernel(
            weights, rows, mmas, epilogue_mma, (sA_layout, sA_loaded, sB_widths), params, offsets, out,
            cute.ceil_div(given.k, config.tile_k), given.l2_hint,
        ).launch(
            grid=(clusters * config.cluster_size, 1, 1),
            block=(config.threads, 1, 1),
            cluster=cluster,
            smem=self.smem_bytes,
            stream=stream,
            # Without it ptxas ignores setmaxnreg (warning C7508).
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.jit
    def first_rows(self, stage):
        """The ring's layout of the first rows of each stage, from that of one: of (width, bK)."""
        config = self.config
        stages = cute.make_layout(config.stages, stride=config.tile_n * config.tile_k)
        return cute.make_composed_layout(stage.inner, 0, cute.append(stage.outer, stages))

    @cute.jit
    def gated_weights(self, mA, row_stride, up_stride):
        """The weights as blocks of 8 rows, of gate and of up, so that one box of them is a tile in which such
        blocks alternate: (8, K, 2, N / 8, GROUP), the layouts (8, bK, 2, bM / 16) of a stage and with STAGE
        of the ring, the box.
        """
        config, dtype = self.config, self.dtypes.a
        n, k, groups = mA.shape
        divisor = 128 // dtype.width
        row = cute.assume(row_stride, divby=divisor)
        up = cute.assume(up_stride, divby=divisor)
        blocks = cute.make_layout((8, k, 2, n // 8, groups), stride=(row, 1, up, 8 * row, mA.stride[2]))
        atom = warpgroup.make_smem_layout_atom(
            sm90.get_smem_layout_atom(LayoutEnum.from_tensor(mA), dtype, config.tile_k), dtype
        )
        box = (8, config.tile_k, 2, config.tile_m // 16)
        stage = cute.tile_to_shape(atom, box, order=(0, 3, 1, 2))
        ring = cute.tile_to_shape(atom, (*box, config.stages), order=(0, 3, 1, 2, 4))
        return cute.make_tensor(mA.iterator, blocks), stage, ring, box

    # ---- device side --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        weights: tuple,
        rows: tuple,
        mmas: tuple,
        epilogue_mma: cute.TiledMma,
        layouts: tuple,
        params: WalkParams,
        offsets: cute.Pointer,
        out: tuple,
        k_tiles: Int32,
        l2_hint: Int32,
    ):
        """`weights`, `rows`: what TMA loads, the rows for each of the config's widths."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        cluster, rank = Int32(block), Int32(0)
        if const_expr(config.cluster_size > 1):
            cluster, rank = block // config.cluster_size, block % config.cluster_size
        walk = Walk(config, params, offsets, thread % 32, cluster, rank)

        if warp_index == 0:
            cpasync.prefetch_descriptor(weights.atom)
            for index in cutlass.range_constexpr(len(config.widths)):
                cpasync.prefetch_descriptor(rows[index].atom)

        storage = SmemAllocator().allocate(self.storage)
        ring = Ring(config, storage.full.data_ptr(), storage.empty.data_ptr())
        if thread == 0:
            ring.make_barriers()
        cute.arch.mbarrier_init_fence()
        # Nobody waits here, as in `cute_sm90`.
        if const_expr(config.cluster_size > 1):
            cute.arch.cluster_arrive_relaxed()

        sA = storage.a.get_tensor(layouts[0].outer, swizzle=layouts[0].inner)  # (bM, bK, STAGE)
        sA_loaded = storage.a.get_tensor(layouts[1].outer, swizzle=layouts[1].inner)
        sB_widths = tuple(storage.b.get_tensor(layout.outer, swizzle=layout.inner) for layout in layouts[2])

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
                producer = Producer(config, weights, rows, sA_loaded, sB_widths, ring, rank)
                producer.run(walk, k_tiles, l2_hint)
        else:
            cute.arch.setmaxregister_increase(mma_registers)
            if const_expr(config.cluster_size > 1):
                cute.arch.cluster_wait()
            else:
                cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=started)
            buffers = config.consumers * config.epilogue_buffers
            rows_apart, buffer = config.pitch * config.epi_n, config.pitch * config.staged_rows
            staging = cute.make_layout(  # (epiM, epiN, BUFFER)
                (MMA_ATOM_M, config.epi_n, buffers), stride=(1, config.pitch, buffer)
            )
            if const_expr(config.fused.gated):
                staging = cute.make_layout(
                    ((8, 2, MMA_ATOM_M // 16), config.epi_n, buffers),
                    stride=((1, rows_apart, 8), config.pitch, buffer),
                )
            sD = storage.d.get_tensor(staging)
            consumer, own = group - 1, (thread - WARPGROUP_THREADS) % WARPGROUP_THREADS
            epilogue = Epilogue(config, self.dtypes.out, epilogue_mma, sD, *out, consumer, own)
            released = ring.for_consumer(thread % 32, (rank, Int32(0)))
            Consumer(config, mmas, sA, sB_widths, released, epilogue, consumer).run(walk, k_tiles)
