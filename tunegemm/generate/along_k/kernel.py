"""The product of groups along k: persistent, warp-specialized TMA + WGMMA, each tile with as many k tiles as
its group has rows.

D[e, m, n] = sum of A[r, m] B[r, n] over the rows r of group e: offsets[e - 1] <= r < offsets[e]. Both
operands lie along what is not summed. Layouts, ring and epilogue are `cute_sm90`'s.

TMA loads a group's k tiles from its first row on. The last one may hold rows behind the group's end, of the
next group or of none, in both operands. Whatever these are, NaN even, they must not be added: the consumers
write zeros in their place, between TMA's arrival and the WGMMA. An empty group is stored as zeros.

Tiles differ in their k tiles, so that clusters draw them: the producer of a cluster's first CTA takes the
next number from a counter in device memory, and hands it to all warps of the cluster.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import SmemAllocator

from tunegemm.generate.cute_sm90.config import WARPGROUP_THREADS, KernelConfig
from tunegemm.generate.cute_sm90.kernel.epilogue import Epilogue
from tunegemm.generate.cute_sm90.kernel.fusion import Fusion
from tunegemm.generate.cute_sm90.kernel.layouts import (
    Dtypes,
    Layouts,
    TmaTensor,
    load_box,
    matrix_at,
)
from tunegemm.generate.cute_sm90.kernel.producer import EVICT_NORMAL
from tunegemm.generate.cute_sm90.kernel.ring import WARPS, Ring, RingState
from tunegemm.generate.cute_sm90.kernel.schedule import Origin
from tunegemm.generate.kernel_rasterization import raster_of, tile_at

SLOTS = 2
"""Numbers of tiles that may be on their way from who draws them to who multiplies them."""
CLEAR_BARRIER = 7  # of all consumers, which have cleared a stage
LINE_BYTES = 128
"""A row of a stage is lines of 64 elements: see `Consumer.clear`."""


class Arguments(NamedTuple):
    """What a launch is given, in this order, before the stream."""

    a_address: Int64
    """(rows, M)"""
    b_address: Int64
    """(rows, N)"""
    d_address: Int64
    """(E, M, N)"""
    m: Int32
    n: Int32
    rows: Int32
    """Of A and B: no group reaches beyond."""
    groups: Int32
    lda: Int64
    """Strides count elements."""
    ldb: Int64
    ldd: Int64
    unused_a: Int64
    unused_b: Int64
    group_stride: Int64
    swizzle_size: Int32
    """Tiles along n that share tiles of A."""
    clusters: Int32
    """The grid."""
    offsets_address: Int64
    """The groups' ends, int32."""
    counter_address: Int64
    """int32, zero before a launch and behind it."""


@cute.struct
class Draws:
    """How numbers of tiles are handed over: a ring, of which only the first CTA's empty barriers are used."""

    full: cute.struct.MemRange[Int64, SLOTS]
    empty: cute.struct.MemRange[Int64, SLOTS]
    index: cute.struct.MemRange[Int32, SLOTS]


class WalkParams(NamedTuple):
    """What the launch decides. Tiles are those of clusters."""

    rows: Int32
    groups: Int32
    tiles_m: Int32
    tiles_n: Int32
    swizzle_size: Int32
    clusters: Int32


class Unit(NamedTuple):
    """A tile of a group, of a cluster's CTAs together."""

    index: Int32
    """Its number, all of a group's in a row; there is no tile from `Walk.units` on."""
    group: Int32
    first_row: Int32
    """The group's."""
    rows: Int32
    """Of the group: none where it is empty."""
    k_tiles: Int32
    state: RingState
    """Where the next one's number will be."""


@dataclass(frozen=True)
class Walk:
    """The tiles of one cluster: `first`, `next` while `has`, and the `origin` of each. For whole warps."""

    config: KernelConfig
    params: WalkParams
    offsets: Any
    """Pointer to the groups' ends."""
    counter: Any
    """Pointer to the counter."""
    draws: Any
    """The ring of drawn numbers and a pointer to these."""
    cta: tuple
    """This CTA's place in its cluster, and the cluster's."""
    lane: Int32
    draws_own: bool = False
    """Whether this is a producer's, which draws if it is that of the cluster's first CTA."""

    @cute.jit
    def make_barriers(self):
        """One thread: initialize those of the hand-over."""
        size = self.config.cluster_size
        for slot in cutlass.range_constexpr(SLOTS):
            cute.arch.mbarrier_init(self.draws[0].full + slot, 1)
            readers = size * self.config.consumers * WARPS + size - 1
            cute.arch.mbarrier_init(self.draws[0].empty + slot, readers)

    def units(self):
        return self.params.tiles_m * self.params.tiles_n * self.params.groups

    def has(self, unit):
        return unit.index < self.units()

    def first(self):
        return self.at(Int32(self.cta[2]), RingState(Int32(0), Int32(0)))

    @cute.jit
    def next(self, unit):
        """The tile that follows one which there is."""
        index, state = Int32(0), unit.state
        if const_expr(self.draws_own):
            if self.leads():
                index = self.draw(state)
            else:
                index = self.read(state)
        else:
            index = self.read(state)
        return self.at(index, self.draws[0].advance(state))

    def leads(self):
        """Whether this is the cluster's first CTA."""
        return self.cta[0] + self.cta[1] == 0

    @cute.jit
    def draw(self, state):
        """Take a number, and hand it to all CTAs of the cluster."""
        ring, numbers = self.draws
        ring.wait_empty(RingState(state.stage, state.phase ^ 1))
        index, counter = Int32(0), cute.make_tensor(self.counter, cute.make_layout(1))
        if self.lane == 0:
            drawn = cute.arch.atomic_add(self.counter, Int32(1), sem="relaxed", scope="gpu")
            # Each cluster that had a tile draws once in vain: this is the last draw of all.
            if drawn == self.units() - 1:
                counter[0] = Int32(0)
            index = drawn + self.params.clusters
            full = ring.full + state.stage
            for rank in cutlass.range_constexpr(self.config.cluster_size):
                cute.arch.mbarrier_arrive_and_expect_tx(full, 4, rank)
                cute.arch.store_async_dsmem(numbers + state.stage, index, full, rank)
        return cute.arch.make_warp_uniform(index)

    @cute.jit
    def read(self, state):
        """A number that was drawn."""
        ring, numbers = self.draws
        ring.wait_full(state)
        numbers = cute.make_tensor(numbers, cute.make_layout(SLOTS))
        index = cute.arch.make_warp_uniform(numbers[state.stage])
        if self.lane == 0:
            cute.arch.mbarrier_arrive(ring.empty + state.stage, Int32(0))
        return index

    @cute.jit
    def finish(self, unit):
        """The producer behind the last tile: a CTA must outlive what others send to its barriers."""
        if self.leads():
            state = unit.state
            for _ in cutlass.range_constexpr(SLOTS):
                self.draws[0].wait_empty(RingState(state.stage, state.phase ^ 1))
                state = self.draws[0].advance(state)

    @cute.jit
    def at(self, index, state):
        """The tile of a number. Whatever offsets say, no row lies outside."""
        params = self.params
        group, first, end = Int32(0), Int32(0), Int32(0)
        if index < self.units():
            group = Int32(Uint32(index) // Uint32(params.tiles_m * params.tiles_n))
            offsets = cute.make_tensor(self.offsets, cute.make_layout(2**31 - 1))
            end = offsets[group]
            if group > 0:
                first = offsets[group - 1]
        first = cutlass.min(cutlass.max(first, 0), params.rows)
        end = cutlass.min(cutlass.max(end, 0), params.rows)
        rows = cute.arch.make_warp_uniform(cutlass.max(end - first, 0))
        k_tiles = Int32(Uint32(rows + self.config.tile_k - 1) // Uint32(self.config.tile_k))
        return Unit(index, group, cute.arch.make_warp_uniform(first), rows, k_tiles, state)

    @cute.jit
    def origin(self, unit):
        """Where this CTA's tile begins in its group's matrix."""
        config, params = self.config, self.params
        raster = raster_of(params.tiles_m, params.tiles_n, Int32(1), params.swizzle_size)
        tile_m, tile_n = tile_at(unit.index - unit.group * params.tiles_m * params.tiles_n, raster)
        row = (tile_m * config.cluster_m + self.cta[0]) * config.tile_m
        column = (tile_n * config.cluster_n + self.cta[1]) * config.tile_n
        return Origin(row, column, unit.group)


@dataclass(frozen=True)
class Producer:
    """One warp. Loads of A and B tiles, multicast in a cluster, from global memory into the ring."""

    config: KernelConfig
    a: TmaTensor
    """(M, ROW, 1)"""
    b: TmaTensor
    """(N, ROW, 1)"""
    sA: cute.Tensor
    """(bM, bK, STAGE)"""
    sB: cute.Tensor
    """(bN, bK, STAGE)"""
    ring: Ring

    @cute.jit
    def run(self, walk):
        """Fill the ring, tile after tile."""
        config, ring = self.config, self.ring
        cta_m, cta_n, _ = walk.cta
        ctas = cute.make_layout((config.cluster_m, config.cluster_n))
        a_mask, b_mask = None, None
        if const_expr(config.cluster_n > 1):
            a_mask = cute.make_layout_image_mask(ctas, (cta_m, cta_n), mode=1)
        if const_expr(config.cluster_m > 1):
            b_mask = cute.make_layout_image_mask(ctas, (cta_m, cta_n), mode=0)
        policy = Int64(EVICT_NORMAL)
        state = ring.producer_start()
        unit = walk.first()
        cute.arch.cluster_wait()
        while walk.has(unit):
            origin = walk.origin(unit)
            tAsA, tAgA = self.partition(
                self.a, self.sA, (origin.row, unit.first_row, 0), config.tile_m, cta_n, config.cluster_n
            )
            tBsB, tBgB = self.partition(
                self.b, self.sB, (origin.column, unit.first_row, 0), config.tile_n, cta_m, config.cluster_m
            )
            for k_tile in cutlass.range(unit.k_tiles, unroll=1):
                ring.wait_empty(state)
                ring.expect_bytes(state)
                full = ring.full + state.stage
                cute.copy(
                    self.a.atom, tAgA[(None, k_tile)], tAsA[(None, state.stage)], tma_bar_ptr=full,
                    mcast_mask=a_mask, cache_policy=policy,
                )  # fmt: skip
                cute.copy(
                    self.b.atom, tBgB[(None, k_tile)], tBsB[(None, state.stage)], tma_bar_ptr=full,
                    mcast_mask=b_mask, cache_policy=policy,
                )  # fmt: skip
                state = ring.advance(state)
            unit = walk.next(unit)
        walk.finish(unit)
        # A CTA must outlive the arrivals that its cluster's consumers send to its barriers.
        for _ in cutlass.range(config.stages, unroll=1):
            ring.wait_empty(state)
            state = ring.advance(state)

    @cute.jit
    def partition(
        self, operand, ring_tensor, origin, extent: cutlass.Constexpr, rank, ways: cutlass.Constexpr
    ):
        """A CTA's shares of the ring's stages and of an operand's tiles from `origin` on, by k tiles."""
        inside = cute.domain_offset(origin, operand.tensor)
        tile = cute.local_tile(inside, (extent, self.config.tile_k), (0, None, 0))  # (extent, bK, RestK)
        return cpasync.tma_partition(
            operand.atom, rank, cute.make_layout(ways), cute.group_modes(ring_tensor, 0, 2),
            cute.group_modes(tile, 0, 2),
        )  # fmt: skip


@dataclass(frozen=True)
class Consumer:
    """One warpgroup: the main loop, and what follows it for each tile."""

    config: KernelConfig
    mma: cute.TiledMma
    sA: cute.Tensor
    """(bM, bK, STAGE)"""
    sB: cute.Tensor
    """(bN, bK, STAGE)"""
    starts: tuple
    """Addresses of both rings."""
    ring: Ring
    epilogue: Epilogue
    group: Int32
    """Which of the consumer warpgroups this is."""

    @cute.jit
    def run(self, walk, lane):
        """Multiply, convert, store, tile after tile."""
        config, ring, mma = self.config, self.ring, self.mma
        # WGMMA operands are descriptors; the slice of a warpgroup's first thread stands for all of it.
        slice_mma = mma.get_slice(self.group * WARPGROUP_THREADS)
        tCrA = mma.make_fragment_A(slice_mma.partition_A(self.sA))  # (MMA, MMA_M, MMA_K, STAGE)
        tCrB = mma.make_fragment_B(slice_mma.partition_B(self.sB))  # (MMA, MMA_N, MMA_K, STAGE)
        sums = cute.make_rmem_tensor(  # (MMA, MMA_M, MMA_N)
            slice_mma.partition_shape_C((config.tile_m, config.tile_n)), Float32
        )
        mma.set(warpgroup.Field.ACCUMULATE, True)
        phases = Int32(0)
        state = ring.consumer_start()
        unit = walk.first()
        while walk.has(unit):
            sums.fill(0.0)
            previous = state.stage
            for k_tile in cutlass.range(unit.k_tiles, unroll=1):
                ring.wait_full(state)
                left = unit.rows - k_tile * config.tile_k
                if left < config.tile_k:
                    self.clear(state.stage, left)
                warpgroup.fence()
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    index = (None, None, block, state.stage)
                    cute.gemm(mma, sums, tCrA[index], tCrB[index], sums)
                warpgroup.commit_group()
                # One group stays in flight, so that the tensor cores have work while a stage is awaited.
                warpgroup.wait_group(1)
                if k_tile > 0:
                    ring.release(previous)
                previous = state.stage
                state = ring.advance(state)
            # What the next tile's offsets take, and its coordinates, runs under the last WGMMAs.
            following = walk.next(unit)
            origin = walk.origin(unit)
            warpgroup.wait_group(0)
            if unit.k_tiles > 0:
                ring.release(previous)
            phases = self.epilogue.store(sums, origin, phases)
            unit = following
        self.epilogue.finish(lane)

    @cute.jit
    def clear(self, stage, rows):
        """Zeros in place of all but the first so many rows of a stage, in both rings, before WGMMAs read it.

        A stage is lines of 128 bytes: all rows' of the first 64 columns, then those of the next. The swizzle
        permutes 16 bytes within a line, so that a whole line is where it would be without.
        """
        config = self.config
        pieces = LINE_BYTES // 16
        own = self.epilogue.thread + self.group * WARPGROUP_THREADS
        threads = config.consumers * WARPGROUP_THREADS
        zeros = cute.make_rmem_tensor(4, Int32)
        zeros.fill(0)
        for operand in cutlass.range_constexpr(2):
            extent = (config.tile_m, config.tile_n)[operand]
            stage_bytes = extent * config.tile_k * 2
            start = self.starts[operand].toint() + stage * stage_bytes
            for step in cutlass.range_constexpr(stage_bytes // 16 // threads):
                line = own // pieces + step * threads // pieces
                if line % config.tile_k >= rows:
                    address = start + line * LINE_BYTES + own % pieces * 16
                    piece = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
                    cute.autovec_copy(zeros, cute.make_tensor(piece, cute.make_layout(4)))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=CLEAR_BARRIER, number_of_threads=threads)


class Gemm:
    """The product for one `KernelConfig`: its A m-major, B and D n-major, cooperative, in clusters of CTAs.

    (A CTA alone would hand numbers to itself as to another, which memcheck reports.)
    """

    def __init__(self, config: KernelConfig):
        self.config = config
        self.dtypes = Dtypes.of(config)
        self.layouts = Layouts(config, self.dtypes)
        self.smem_bytes = 0

    @cute.jit
    def __call__(self, *arguments):
        """Encode the TMA descriptors and launch. arguments: those of `Arguments`; the stream."""
        self.launch(Arguments(*arguments[:-1]), arguments[-1])

    @cute.jit
    def launch(self, given, stream):
        """See `__call__`."""
        config, dtypes, layouts = self.config, self.dtypes, self.layouts
        mA = matrix_at(given.a_address, dtypes.a, (given.m, given.rows, 1), False, given.lda, given.lda)
        mB = matrix_at(given.b_address, dtypes.b, (given.n, given.rows, 1), False, given.ldb, given.ldb)
        mD = matrix_at(  # (M, N, GROUP)
            given.d_address, dtypes.out, (given.m, given.n, given.groups), True, given.ldd,
            given.group_stride,
        )  # fmt: skip
        sA_layout = layouts.ring_a(mA, config.stages)  # (bM, bK, STAGE)
        sB_layout = layouts.ring_b(mB, config.stages)  # (bN, bK, STAGE)
        a = load_box(mA, layouts.ring_a(mA), (config.tile_m, config.tile_k), config.cluster_n)
        b = load_box(mB, layouts.ring_b(mB), (config.tile_n, config.tile_k), config.cluster_m)
        sD_layout = layouts.staging(mD, config.out_epi_n, config.consumers * config.epilogue_buffers)
        d = layouts.staged_box(cpasync.CopyBulkTensorTileS2GOp(), mD, config.out_epi_n)
        self.storage = layouts.shared_storage(cute.cosize(sA_layout), cute.cosize(sB_layout))
        self.smem_bytes = self.storage.size_in_bytes() + Draws.size_in_bytes()
        params = WalkParams(
            given.rows, given.groups, cute.ceil_div(given.m, config.tile_m * config.cluster_m),
            cute.ceil_div(given.n, config.tile_n * config.cluster_n), given.swizzle_size, given.clusters,
        )  # fmt: skip
        offsets, counter = (
            cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
            for address in (given.offsets_address, given.counter_address)
        )
        mma = layouts.tiled_mma(config.tile_warpgroups, config.tile_n)
        epilogue_mma = layouts.tiled_mma(1, config.converted_columns)
        self.kernel(
            (a, b, d), (mma, epilogue_mma), (sA_layout, sB_layout, sD_layout), params, (offsets, counter)
        ).launch(
            grid=(config.cluster_m, config.cluster_n, given.clusters),
            block=(config.threads, 1, 1),
            cluster=(config.cluster_m, config.cluster_n, 1),
            smem=self.smem_bytes,
            stream=stream,
            # Without it ptxas ignores setmaxnreg (warning C7508).
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, tensors: tuple, mmas: tuple, layouts: tuple, params: WalkParams, pointers: tuple):
        """`tensors`: A, B and D; `mmas`: those of a tile, and of what the epilogue converts at a time;
        `pointers`: to the groups' ends and the counter.
        """
        config = self.config
        a, b, d = tensors
        thread, _, _ = cute.arch.thread_idx()
        cta = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        if warp_index == 0:
            for tensor in cutlass.range_constexpr(len(tensors)):
                cpasync.prefetch_descriptor(tensors[tensor].atom)

        allocator = SmemAllocator()
        storage = allocator.allocate(self.storage)
        memory = allocator.allocate(Draws)
        handed = Ring(replace(config, stages=SLOTS), memory.full.data_ptr(), memory.empty.data_ptr())
        draws = handed, memory.index.data_ptr()
        walk = Walk(config, params, *pointers, draws, cta, thread % 32, False)
        ring = Ring(config, storage.full.data_ptr(), storage.empty.data_ptr())
        if thread == 0:
            ring.make_barriers()
            walk.make_barriers()
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        sA = storage.a.get_tensor(layouts[0].outer, swizzle=layouts[0].inner)  # (bM, bK, STAGE)
        sB = storage.b.get_tensor(layouts[1].outer, swizzle=layouts[1].inner)  # (bN, bK, STAGE)
        sD = storage.d.get_tensor(layouts[2].outer, swizzle=layouts[2].inner)  # (epiM, epiN, BUFFER)

        load_registers, mma_registers = config.registers
        if group == 0:
            cute.arch.setmaxregister_decrease(load_registers)
            if warp_index != 0:
                cute.arch.cluster_wait()
            if warp_index == 0:
                drawing = Walk(config, params, *pointers, draws, cta, thread % 32, True)
                Producer(config, a, b, sA, sB, ring).run(drawing)
        else:
            cute.arch.setmaxregister_increase(mma_registers)
            cute.arch.cluster_wait()
            consumer, own = group - 1, (thread - WARPGROUP_THREADS) % WARPGROUP_THREADS
            fusion = Fusion.of(config, self.dtypes, d.tensor, (), own)
            loaded = storage.loaded.data_ptr()
            epilogue = Epilogue(config, self.dtypes, d, None, mmas[1], sD, loaded, fusion, consumer, own)
            starts = storage.a.data_ptr(), storage.b.data_ptr()
            released = ring.for_consumer(thread % 32, (cta[0], cta[1]))
            Consumer(config, mmas[0], sA, sB, starts, released, epilogue, consumer).run(walk, thread % 32)
