"""The kernel of block-scaled fp8: persistent, warp-specialized TMA + WGMMA, sums promoted at each block of k.

D[m, n] = sum over blocks b of sa[m, b] * sb[n / 128, b] * (A[m, b] B[n, b]^T)

Tiles, ring, k splits and the way out are those of `cute_sm90`. Other warps of the producer's warpgroup copy
each block's scales into the ring (`kernel_scales`). The tensor cores add up one block. fp32 registers add the
blocks, once the stage is given back (`kernel_many`, `kernel_few`): the other warpgroup multiplies meanwhile.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import SmemAllocator

from tunegemm.generate.blocks.config import BLOCK, BlockConfig
from tunegemm.generate.blocks.kernel_few import FewSums
from tunegemm.generate.blocks.kernel_many import ManySums
from tunegemm.generate.blocks.kernel_narrow import LineEnds, LineProducer, NarrowSums
from tunegemm.generate.blocks.kernel_rows import RowProducer, boxes_of
from tunegemm.generate.blocks.kernel_scales import SCALES_BARRIER, WORDS, Ends, Ring, ScaleProducer, Scales
from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, WARPGROUP_THREADS
from tunegemm.generate.cute_sm90.kernel import consumer, gemm, schedule
from tunegemm.generate.cute_sm90.kernel.epilogue import Epilogue
from tunegemm.generate.cute_sm90.kernel.fusion import Fusion
from tunegemm.generate.cute_sm90.kernel.layouts import Dtypes, Layouts, load_box, matrix_at
from tunegemm.generate.cute_sm90.kernel.producer import Producer
from tunegemm.generate.cute_sm90.kernel.schedule import NOWHERE, ScheduleParams, first_index
from tunegemm.generate.cute_sm90.kernel.split_k import SplitK, Workspace
from tunegemm.generate.kernel_rasterization import raster_of, tile_at
from tunegemm.generate.kernel_roles import begin, part_ways, place_in_block, prefetch, tensor_in

#: Between the two turns, for each warpgroup of a tile: sums are there, and they were taken.
THERE_BARRIER = SCALES_BARRIER + 1
TAKEN_BARRIER = THERE_BARRIER + 3


@dataclass(frozen=True)
class Schedule(schedule.Schedule):
    """Without a division where all tiles lie in one line: before the first load two take 0.15 us."""

    def begun_by(self, cluster):
        return replace(self, cluster=cluster, end=self.tiles() * self.params.split_k)

    @cute.jit
    def cluster_tile(self, tile):
        """(cluster tile along m, along n, batch entry, which is 0) for a tile's index."""
        params = self.params
        tile_m, tile_n = Int32(0), Int32(tile)
        if params.tiles_n == 1:
            tile_m, tile_n = Int32(tile), Int32(0)
        elif params.tiles_m > 1:
            raster = raster_of(params.tiles_m, params.tiles_n, params.raster_along_m, params.swizzle_size)
            tile_m, tile_n = tile_at(tile, raster)
        return tile_m, tile_n, Int32(0)


@dataclass(frozen=True)
class Consumer(ManySums, FewSums, NarrowSums, consumer.Consumer):
    """One warpgroup: the main loop, and what follows it for each work unit."""

    sScales: Any = None
    """(SCALE, STAGE)"""
    thread: Any = None
    """The thread's index in the warpgroup."""
    adding: Any = None
    """The tiled MMA that adds to what another, `tiled_mma`, begins."""
    turn: Any = None
    """Which blocks of k are this warpgroup's."""
    exchange: Any = None
    """(4, CHUNK): where this thread's sums go from one turn to the other; None of one turn."""

    @cute.jit
    def run(self, schedule, lane):
        """Multiply, promote, store, work unit after work unit."""
        config, tiled_mma = self.config, self.tiled_mma
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        self.adding.set(warpgroup.Field.ACCUMULATE, True)
        slice_mma = tiled_mma.get_slice(self.group * WARPGROUP_THREADS)
        tCrA = tiled_mma.make_fragment_A(slice_mma.partition_A(self.sA))  # (MMA, MMA_M, MMA_K, STAGE)
        tCrB = tiled_mma.make_fragment_B(slice_mma.partition_B(self.sB))  # (MMA, MMA_N, MMA_K, STAGE)
        fragments = tCrA, tCrB
        sums = cute.make_rmem_tensor(config.accumulator_registers, Float32)
        parts = [  # (MMA, 1, 1) each: of one block, or group of 32 of k, and one WGMMA's rows
            cute.make_rmem_tensor(((2, 2, config.tile_n // 8), 1, 1), Float32) for _ in range(config.parts)
        ]
        ring, phases = self.ring, Int32(0)
        state = ring.consumer_start()
        unit = schedule.first()
        first = unit.index
        while schedule.has(unit):
            tile = schedule.tile(unit.index)
            origin = schedule.origin(tile)
            sums.fill(0.0)
            count, end = unit.k_tiles, state
            if const_expr(config.turns > 1):
                before, end = ring.before_turn(state, self.turn), ring.skip(state, unit.k_tiles)
                state = ring.skip(state, before)
                count = (unit.k_tiles - before + 1) // 2
            if const_expr(config.turns == 1):
                state = self.sum(sums, parts, fragments, ring, state, count, origin)
            else:
                if count > 0:  # of a single block a turn has none
                    self.sum(sums, parts, fragments, ring, state, count, origin)
            if const_expr(config.turns > 1):
                state = end
                self.meet_turns(sums, unit.index != first)

            if const_expr(config.turns == 1):
                phases = self.store(sums, schedule, unit, origin, phases)
            else:
                if self.turn == 0:
                    phases = self.store(sums, schedule, unit, origin, phases)
            unit = schedule.next(unit)
            if const_expr(config.turns > 1):
                if self.turn == 0 and schedule.has(unit):
                    self.arrive(TAKEN_BARRIER)
        if const_expr(config.turns == 1):
            self.epilogue.finish(lane)
        else:
            if self.turn == 0:
                self.epilogue.finish(lane)

    @cute.jit
    def store(self, sums, schedule, unit, origin, phases):
        """Add up k splits, and store where this warpgroup then has the total. Returns the next `phases`."""
        holds_sum = cutlass.Boolean(True)
        if schedule.is_split(unit):
            holds_sum = self.split_k.add(sums, schedule, unit)
        if holds_sum:
            self.put_in_order(sums)
            phases = self.epilogue.store(sums, origin, phases)
        return phases

    def place_of(self, value):
        """Where one of a WGMMA's values is added up: in its neighbour's place.

        Split sums are stored by four, so ptxas gives even places even registers, as WGMMA gives even values.
        An FFMA that reads two registers of one bank holds up the other warpgroup's WGMMAs.
        """
        return value ^ 1

    def put_in_order(self, sums):
        """Undo `place_of` before sums are stored, which only renames registers."""
        for even in range(0, self.config.accumulator_registers, 2):
            sums[even], sums[even + 1] = sums[even + 1], sums[even]

    @cute.jit
    def meet_turns(self, sums, again):
        """The first turn adds the other's sums to its own. again: whether they met before."""
        chunks = self.config.accumulator_registers // 4
        own = cute.make_tensor(sums.iterator, cute.make_layout((4, chunks)))  # (4, CHUNK)
        if self.turn == 0:
            self.sync(THERE_BARRIER)
            for chunk in cutlass.range_constexpr(chunks):
                loaded = cute.make_rmem_tensor(4, Float32)
                cute.autovec_copy(self.exchange[(None, chunk)], loaded)
                for value in cutlass.range_constexpr(4):
                    own[value, chunk] = own[value, chunk] + loaded[value]
        else:
            if again:
                self.sync(TAKEN_BARRIER)
            for chunk in cutlass.range_constexpr(chunks):
                cute.autovec_copy(own[(None, chunk)], self.exchange[(None, chunk)])
            self.arrive(THERE_BARRIER)

    def sync(self, barrier):
        """Wait for another warpgroup."""
        cute.arch.barrier(barrier_id=barrier + self.group, number_of_threads=2 * WARPGROUP_THREADS)

    def arrive(self, barrier):
        """Let the other turn go on."""
        cute.arch.barrier_arrive(barrier_id=barrier + self.group, number_of_threads=2 * WARPGROUP_THREADS)

    @cute.jit
    def sum(self, sums, parts, fragments, ring, state, k_tiles, origin):
        """Add up a tile's blocks of k, at least one. Returns where the ring then is."""
        config = self.config
        if const_expr(config.narrow):
            state = self.sum_groups(sums, parts, fragments, ring, state, k_tiles)
        elif const_expr(config.few and config.parts == 2):
            state = self.sum_few_alternately(sums, parts, fragments, ring, state, k_tiles, origin)
        elif const_expr(config.few):
            state = self.sum_few(sums, parts[0], fragments, ring, state, k_tiles, origin)
        elif const_expr(config.parts == 2):
            state = self.sum_many_alternately(sums, parts, fragments, ring, state, k_tiles, origin)
        else:
            state = self.sum_many(sums, parts[0], fragments, ring, state, k_tiles, origin)
        return state

    def fragments_of(self, fragments, stage):
        """A and B in one stage: (MMA, MMA_M, MMA_K), (MMA, MMA_N, MMA_K).

        One warpgroup adds up a block before it begins the next, so it asks for the next one's fragments
        before: the compiler computes WGMMA's descriptors where they are asked for.
        """
        tCrA, tCrB = fragments
        return tCrA[(None, None, None, stage)], tCrB[(None, None, None, stage)]

    @cute.jit
    def multiply(self, part, fragments, atom: cutlass.Constexpr):
        """Begin the WGMMAs of one block of k and one WGMMA's rows. fragments: `fragments_of` its stage."""
        tCrA, tCrB = fragments
        warpgroup.fence()
        for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            a = cute.append_ones(tCrA[(None, atom, block)])  # (MMA, 1)
            mma = self.tiled_mma if block == 0 else self.adding
            cute.gemm(mma, part, a, tCrB[(None, None, block)], part)
        warpgroup.commit_group()

    def first_of(self, atom: cutlass.Constexpr):
        """Where one WGMMA's rows of this warpgroup begin in the tile."""
        warpgroups = self.config.tile_warpgroups
        first = atom * warpgroups * MMA_ATOM_M
        if const_expr(warpgroups > 1):
            first = first + self.group * MMA_ATOM_M
        return first


class Gemm:
    """The product for one `BlockConfig`."""

    def __init__(self, config: BlockConfig):
        self.config = config
        self.dtypes = Dtypes.of(config)
        self.layouts = Layouts(config, self.dtypes)
        self.smem_bytes = 0

    # ---- host side: runs on the CPU at every launch -------------------------------------------------

    @cute.jit
    def __call__(self, *arguments):
        """Encode the TMA descriptors and launch.

        arguments: those of `cute_sm90`, `Scales`, the stream. Of few rows A is the weights, and m their N.
        With scales of 32 of k `batch` is the number of the weights' rows that share a scale.
        """
        count = len(gemm.Arguments._fields)
        scales = Scales(*arguments[count : count + WORDS])
        self.launch(gemm.Arguments(*arguments[:count]), scales, arguments[-1])

    @cute.jit
    def launch(self, given, scales, stream):
        """See `__call__`."""
        config, dtypes, layouts = self.config, self.dtypes, self.layouts
        m, n, k = given.m, given.n, given.k
        mA = matrix_at(given.a_address, dtypes.a, (m, k, 1), True, given.lda, given.lda)  # (M, K, 1)
        mB = matrix_at(given.b_address, dtypes.b, (n, k, 1), True, given.ldb, given.ldb)  # (N, K, 1)
        n_major = config.out_major == "n"
        mD = matrix_at(given.d_address, dtypes.out, (m, n, 1), n_major, given.ldd, given.ldd)  # (M, N, 1)
        mma, adding = (layouts.tiled_mma(config.tile_warpgroups, config.tile_n) for _ in range(2))
        sA_layout = layouts.ring_a(mA, config.stages)  # (bM, bK, STAGE)
        sB_layout = layouts.ring_b(mB, config.stages)  # (bN, bK, STAGE)
        a = load_box(mA, layouts.ring_a(mA), (config.tile_m, config.tile_k), config.cluster_n)
        b = load_box(mB, layouts.ring_b(mB), (config.tile_n, config.tile_k), config.cluster_m)
        boxes = None
        if const_expr(config.loads_short):
            boxes = boxes_of(config, mB if const_expr(config.few) else mA)
        # The same atom, as wide as what is converted at a time.
        epilogue_mma = layouts.tiled_mma(1, config.converted_columns)
        # (epiM, epiN, BUFFER)
        sD_layout = layouts.staging(mD, config.out_epi_n, config.tile_warpgroups * config.epilogue_buffers)
        d = layouts.staged_box(cpasync.CopyBulkTensorTileS2GOp(), mD, config.out_epi_n)
        self.storage = layouts.shared_storage(cute.cosize(sA_layout), cute.cosize(sB_layout))
        self.smem_bytes = self.storage.size_in_bytes() + config.scale_bytes + 4 * config.turn_elements

        # Tiles along the rows may overlap, so that the last ones end with them; along the columns they begin
        # where blocks of scales do.
        rows = n if const_expr(config.few) else m
        unit = config.edge_units[1 if config.few else 0]
        last = cute.ceil_div(cutlass.max(rows - config.rows, 0), unit) * unit
        last_row, last_column = last, Int32(NOWHERE)
        if const_expr(config.few):
            last_row, last_column = last_column, last_row
        k_tiles = cute.ceil_div(k, config.tile_k)
        of_unit = cute.ceil_div(k_tiles, given.split_k)
        params = ScheduleParams(
            of_unit,
            cute.ceil_div(m, config.tile_m * config.cluster_m),
            cute.ceil_div(n, config.tile_n * config.cluster_n),
            Int32(1), given.split_k, given.raster_along_m, given.swizzle_size, Int32(0),
            given.clusters, given.block_across, given.block_along, last_row, last_column,
        )  # fmt: skip
        columns = m if const_expr(config.few) else n
        ends = Ends(rows, cute.ceil_div(columns, BLOCK), k_tiles)
        if const_expr(config.narrow):
            ends = LineEnds(rows, columns, cute.ceil_div(k, config.scale_k), given.batch)
        workspace = Workspace(
            cute.make_ptr(dtypes.acc, given.partials_address, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_ptr(Int32, given.counters_address, cute.AddressSpace.gmem, assumed_align=4),
        )
        first_tiles = cute.make_ptr(Int32, given.first_tiles_address, cute.AddressSpace.gmem, assumed_align=4)
        self.kernel(
            (a, b, d), boxes, (mma, adding, epilogue_mma), (sA_layout, sB_layout, sD_layout), params,
            given.l2_hint, workspace, first_tiles, scales, ends,
        ).launch(
            grid=(config.cluster_m, config.cluster_n, given.clusters),
            block=(config.threads, 1, 1),
            cluster=(config.cluster_m, config.cluster_n, 1),
            smem=self.smem_bytes,
            stream=stream,
            # Without it ptxas ignores setmaxnreg (warning C7508).
            min_blocks_per_mp=1,
        )  # fmt: skip

    # ---- device side --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        tensors: tuple,
        boxes: Any,
        mmas: tuple,
        layouts: tuple,
        params: ScheduleParams,
        l2_hint: Int32,
        workspace: Workspace,
        first_tiles: cute.Pointer,
        scales: Scales,
        ends: Ends | LineEnds,
    ):
        """tensors: A, B, D. boxes: those of fewer rows than a tile's, or None."""
        config = self.config
        a, b, d = tensors
        thread, warp_index, group = place_in_block()
        schedule = Schedule(config, params).begun_by(first_index(config, first_tiles))

        prefetch(warp_index, tensors)
        allocator = SmemAllocator()
        storage = allocator.allocate(self.storage)
        scales_address = allocator.allocate_array(Float32, config.stages * config.stage_scales)
        turns_address = None
        if const_expr(config.turns > 1):
            turns_address = allocator.allocate_array(Float32, config.turn_elements)
        ring = Ring(config, storage.full.data_ptr(), storage.empty.data_ptr())
        begin(thread, config.cluster_size > 1, ring.make_barriers)

        sA = tensor_in(storage.a, layouts[0])  # (bM, bK, STAGE)
        sB = tensor_in(storage.b, layouts[1])  # (bN, bK, STAGE)
        sD = tensor_in(storage.d, layouts[2])  # (epiM, epiN, BUFFER)
        sScales = cute.make_tensor(  # (SCALE, STAGE)
            scales_address, cute.make_layout((config.stage_scales, config.stages))
        )
        copying = 32 + 32 * config.scale_warps * config.turns

        def load():
            if const_expr(config.cluster_size == 1):
                cute.arch.barrier_arrive(barrier_id=SCALES_BARRIER, number_of_threads=copying)
            producer = Producer(config, a, b, sA, sB, ring)
            if const_expr(config.loads_short):
                producer = RowProducer(config, a, b, sA, sB, ring, boxes, ends.rows)
            producer.run(schedule, l2_hint)

        def copy_scales():
            if warp_index >= 1 and warp_index <= config.scale_warps * config.turns:
                if const_expr(config.cluster_size == 1):
                    cute.arch.barrier(barrier_id=SCALES_BARRIER, number_of_threads=copying)
                turn, part = warp_index - 1, Int32(0)
                if const_expr(config.turns == 1):
                    turn, part = Int32(0), warp_index - 1
                own = thread % 32, turn, part
                copier = LineProducer if const_expr(config.narrow) else ScaleProducer
                copier(config, scales, ends, sScales, ring, *own).run(schedule)

        def multiply(_):
            loaded, met = storage.loaded.data_ptr(), storage.met.data_ptr()
            consumer_thread, consumer_group = thread - WARPGROUP_THREADS, group - 1
            cta_m, cta_n, _ = cute.arch.block_idx()
            own, lane = consumer_thread % WARPGROUP_THREADS, consumer_thread % 32
            turn, exchange = None, None
            if const_expr(config.turns > 1):
                turn = consumer_group // config.tile_warpgroups
                consumer_group = consumer_group % config.tile_warpgroups
                exchange = self.exchange_of(turns_address, consumer_group, own)
            fusion = Fusion.of(config, self.dtypes, d.tensor, (), own)
            epilogue = Epilogue(
                config, self.dtypes, d, None, mmas[2], sD, loaded, fusion, consumer_group, own
            )
            split_k = SplitK(config, workspace, met, (cta_m, cta_n), consumer_group, own)
            Consumer(
                config, self.dtypes.acc, mmas[0], sA, sB, ring, epilogue, split_k, consumer_group, sScales,
                own, mmas[1], turn, exchange,
            ).run(schedule, lane)  # fmt: skip

        part_ways(config, warp_index, group, storage, load, multiply, copy_scales)

    def exchange_of(self, address, group, thread):
        """(4, CHUNK): a thread's sums, chunks as far apart as a warpgroup's accesses are long."""
        values = self.config.accumulator_registers
        own = address + group * (values * WARPGROUP_THREADS) + thread * 4
        return cute.make_tensor(own, cute.make_layout((4, values // 4), stride=(1, 4 * WARPGROUP_THREADS)))
