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
from tunegemm.generate.cute_sm90.kernel import producer
from tunegemm.generate.cute_sm90.kernel.epilogue import Epilogue
from tunegemm.generate.cute_sm90.kernel.fusion import Fusion
from tunegemm.generate.cute_sm90.kernel.layouts import TmaTensor, load_box, matrix_at
from tunegemm.generate.cute_sm90.kernel.producer import EVICT_NORMAL
from tunegemm.generate.cute_sm90.kernel.ring import WARPS, Ring, RingState
from tunegemm.generate.cute_sm90.kernel.schedule import Origin
from tunegemm.generate.kernel_rasterization import raster_of, tile_at
from tunegemm.generate.kernel_roles import (
    Product,
    await_empty,
    begin,
    draw,
    int32_at,
    load_k_tiles,
    multicast_masks,
    part_ways,
    place_in_block,
    prefetch,
    tensor_in,
)

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
        index = Int32(0)
        if self.lane == 0:
            # Each cluster that had a tile draws once in vain, the last of all draws among them.
            index = draw(self.counter, self.units(), self.params.clusters)
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
class Producer(producer.Producer):
    """One warp. `a`: (M, ROW, 1), `b`: (N, ROW, 1)."""

    @cute.jit
    def run(self, walk):
        """Fill the ring, tile after tile."""
        config, ring = self.config, self.ring
        cta_m, cta_n, _ = walk.cta
        a_mask, b_mask = multicast_masks(config, cta_m, cta_n)
        policy = Int64(EVICT_NORMAL)
        state = ring.producer_start()
        unit = walk.first()
        cute.arch.cluster_wait()
        while walk.has(unit):
            origin = walk.origin(unit)
            a, b = (
                TmaTensor(each.atom, cute.domain_offset((0, unit.first_row, 0), each.tensor))
                for each in (self.a, self.b)
            )
            a_box, b_box = (config.tile_m, config.tile_k), (config.tile_n, config.tile_k)
            a_tiles = self.partition(a, self.sA, origin.row, a_box, cta_n, config.cluster_n)
            b_tiles = self.partition(b, self.sB, origin.column, b_box, cta_m, config.cluster_m)
            loads = (a.atom, *a_tiles, a_mask, policy), (b.atom, *b_tiles, b_mask, policy)
            state = load_k_tiles(ring, loads, state, unit.k_tiles)
            unit = walk.next(unit)
        walk.finish(unit)
        await_empty(ring, state)


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


class Gemm(Product):
    """The product for one `KernelConfig`: its A m-major, B and D n-major, cooperative, in clusters of CTAs.

    (A CTA alone would hand numbers to itself as to another, which memcheck reports.)
    """

    arguments = Arguments

    @cute.jit
    def launch(self, given, stream):
        """Encode the TMA descriptors and launch."""
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
        pointers = int32_at(given.offsets_address), int32_at(given.counter_address)
        mma = layouts.tiled_mma(config.tile_warpgroups, config.tile_n)
        epilogue_mma = layouts.tiled_mma(1, config.converted_columns)
        shared = sA_layout, sB_layout, sD_layout
        kernel = self.kernel((a, b, d), (mma, epilogue_mma), shared, params, pointers)
        self.start(kernel, given.clusters, stream)

    @cute.kernel
    def kernel(self, tensors: tuple, mmas: tuple, layouts: tuple, params: WalkParams, pointers: tuple):
        """`tensors`: A, B and D; `mmas`: those of a tile, and of what the epilogue converts at a time;
        `pointers`: to the groups' ends and the counter.
        """
        config = self.config
        a, b, d = tensors
        thread, warp_index, group = place_in_block()
        cta = cute.arch.block_idx()
        prefetch(warp_index, tensors)

        allocator = SmemAllocator()
        storage = allocator.allocate(self.storage)
        memory = allocator.allocate(Draws)
        handed = Ring(replace(config, stages=SLOTS), memory.full.data_ptr(), memory.empty.data_ptr())
        draws = handed, memory.index.data_ptr()
        walk = Walk(config, params, *pointers, draws, cta, thread % 32, False)
        ring = Ring(config, storage.full.data_ptr(), storage.empty.data_ptr())
        begin(thread, True, ring.make_barriers, walk.make_barriers)
        sA = tensor_in(storage.a, layouts[0])  # (bM, bK, STAGE)
        sB = tensor_in(storage.b, layouts[1])  # (bN, bK, STAGE)
        sD = tensor_in(storage.d, layouts[2])  # (epiM, epiN, BUFFER)

        def load():
            Producer(config, a, b, sA, sB, ring).run(replace(walk, draws_own=True))

        def multiply(_):
            consumer, own = group - 1, (thread - WARPGROUP_THREADS) % WARPGROUP_THREADS
            fusion = Fusion.of(config, self.dtypes, d.tensor, (), own)
            loaded = storage.loaded.data_ptr()
            epilogue = Epilogue(config, self.dtypes, d, None, mmas[1], sD, loaded, fusion, consumer, own)
            starts = storage.a.data_ptr(), storage.b.data_ptr()
            released = ring.for_consumer(thread % 32, (cta[0], cta[1]))
            Consumer(config, mmas[0], sA, sB, starts, released, epilogue, consumer).run(walk, thread % 32)

        part_ways(config, warp_index, group, storage, load, multiply)
