"""The grouped kernel whose blocks draw their tiles from a counter; all else is `grouped`'s.

Tiles of one launch differ in what they cost: of a group with few rows they are as narrow as these, and only
read weights, of one with many rows they multiply. Blocks that take every so manieth tile end at different
times. Here each block's second warp, the *scheduler*, draws tiles: it takes the next number from a counter in
device memory, finds the tile of that number, and hands its place to the warps that load and multiply.

The scheduler sees all groups once, when the block starts, and keeps a table of them in shared memory: groups
of more rows than a tile has, the heavy ones, before the others. `order` says which tile a number stands for:
in order of groups, heavy groups first, or heavy and light tiles in turns, so that tiles bound by the tensor
cores and tiles bound by device memory run beside each other. A tile is one block's, whatever the order, so
that results have the same bits.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import SmemAllocator

from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, WARPGROUP_THREADS
from tunegemm.generate.cute_sm90.kernel.layouts import START_BARRIER, Layouts
from tunegemm.generate.cute_sm90.kernel.ring import WARPS, Ring, RingState
from tunegemm.generate.drawn.config import MOST_GROUPS, SLOTS
from tunegemm.generate.grouped.kernel.consumer import Consumer
from tunegemm.generate.grouped.kernel.epilogue import Epilogue
from tunegemm.generate.grouped.kernel.gemm import Gemm as StaticGemm
from tunegemm.generate.grouped.kernel.producer import Producer
from tunegemm.generate.grouped.kernel.walk import LANES, Place, Walk, WalkParams
from tunegemm.generate.kernel_rasterization import raster_of, tile_at

GROUPS, HEAVY_FIRST, IN_TURNS = range(3)
"""The orders of tiles."""


class Arguments(NamedTuple):
    """What a launch is given, in this order, before the stream: what `grouped` has, `order` and a counter."""

    weights_address: Int64
    rows_address: Int64
    out_address: Int64
    n: Int32
    rows: Int32
    k: Int32
    groups: Int32
    weights_stride: Int64
    rows_stride: Int64
    out_stride: Int64
    group_stride: Int64
    bias_stride: Int64
    up_stride: Int64
    swizzle_size: Int32
    blocks: Int32
    l2_hint: Any
    order: Int32
    """One of `GROUPS`, `HEAVY_FIRST` and `IN_TURNS`."""
    offsets_address: Int64
    bias_address: Int64
    scales_address: Int64
    counter_address: Int64
    """int32, zero before a launch and behind it."""


class Drawing(NamedTuple):
    """What reaches this kernel in place of `grouped`'s `l2_hint`."""

    l2_hint: Int32
    order: Int32
    counter_address: Int64


class Unit(NamedTuple):
    """A tile that was drawn; none where it has no rows."""

    place: Place
    state: RingState
    """Where the next one will be."""


@cute.struct
class Table:
    """The groups that have rows, in the order of their tiles, and the slots by which places are handed on."""

    full: cute.struct.MemRange[Int64, SLOTS]
    empty: cute.struct.MemRange[Int64, SLOTS]
    places: cute.struct.MemRange[Int32, 4 * SLOTS]
    starts: cute.struct.MemRange[Int32, MOST_GROUPS]
    """The number of each one's first tile."""
    groups: cute.struct.MemRange[Int32, MOST_GROUPS]


class DrawnLayouts(Layouts):
    """Layouts of a block that has a `Table` beside its rings."""

    def shared_storage(self, a_elements, b_elements):
        """`rest`: what a block of `grouped` has; `table`."""
        rest = super().shared_storage(a_elements, b_elements)

        class Storage:
            pass

        Storage.__annotations__ = {"rest": rest, "table": Table}
        return cute.struct(Storage)


@dataclass(frozen=True)
class Drawn:
    """The tiles of one block as those see them who load and multiply: stands for `grouped`'s `Walk`."""

    ring: Ring
    """Of the slots."""
    places: Any
    lane: Int32

    def first(self):
        """This block's first tile."""
        return self.read(RingState(Int32(0), Int32(0)))

    def has(self, unit):
        return unit.place.rows > 0

    def place(self, unit):
        """Where a tile lies that there is."""
        return unit.place

    @cute.jit
    def next(self, unit, steps: cutlass.Constexpr):
        """The tile that the block takes so many steps later, or the end."""
        for _ in cutlass.range_constexpr(steps):
            if unit.place.rows > 0:
                unit = self.read(unit.state)
        return unit

    @cute.jit
    def read(self, state):
        """The place in a slot, which is then free."""
        self.ring.wait_full(state)
        numbers = cute.make_tensor(self.places + 4 * state.stage, cute.make_layout(4))
        place = Place(*(cute.arch.make_warp_uniform(numbers[each]) for each in range(4)))
        if self.lane == 0:
            cute.arch.mbarrier_arrive(self.ring.empty + state.stage)
        return Unit(place, self.ring.advance(state))


@dataclass(frozen=True)
class Scheduler(Walk):
    """The warp that draws. `cluster` is the block."""

    order: Int32
    counter: Any
    """Pointer to the counter."""
    ring: Ring
    places: Any
    starts: Any
    members: Any
    """Pointers into the `Table`."""

    @cute.jit
    def run(self):
        """Draw tiles until there are none, and hand on the place of each, then the end."""
        count, heavy, total = self.list_groups()
        index = self.cluster
        state = self.ring.producer_start()
        while index < total:
            self.hand_on(self.locate(index, count, heavy, total), state)
            state = self.ring.advance(state)
            # Drawn as late as possible: not before there is room for it.
            self.ring.wait_empty(state)
            index = self.draw(total)
        self.hand_on(Place(Int32(0), Int32(0), Int32(0), Int32(0)), state)

    @cute.jit
    def bounds(self, group):
        """The first row of a group and the row behind its last, whatever offsets say inside; 0 for none."""
        offsets = cute.make_tensor(self.offsets, cute.make_layout(2**31 - 1))
        start, end = Int32(0), Int32(0)
        if group < self.params.groups:
            end = offsets[group]
            if group > 0:
                start = offsets[group - 1]
        start = cutlass.min(cutlass.max(start, 0), self.params.rows)
        end = cutlass.min(cutlass.max(end, 0), self.params.rows)
        return start, end

    @cute.jit
    def list_groups(self):
        """Fill the table. Returns how many groups have rows, how many tiles the heavy ones have, and all."""
        starts = cute.make_tensor(self.starts, cute.make_layout(MOST_GROUPS))
        members = cute.make_tensor(self.members, cute.make_layout(MOST_GROUPS))
        count, heavy, total = Int32(0), Int32(0), Int32(0)
        for lists_light in cutlass.range_constexpr(2):
            base, until_group = Int32(0), self.params.groups
            if lists_light == 0 and self.order == GROUPS:
                until_group = Int32(0)
            while base < until_group:
                group = base + self.lane
                start, end = self.bounds(group)
                rows = cutlass.max(end - start, 0)
                is_light = Int32(1)
                if rows > self.config.tile_n and self.order != GROUPS:
                    is_light = Int32(0)
                tiles = Int32(0)
                if is_light == lists_light:
                    tiles = self.row_tiles(rows) * self.params.tiles_m
                until = tiles
                for step in cutlass.range_constexpr(5):
                    lower = cute.arch.shuffle_sync_up(until, 1 << step)
                    if self.lane >= 1 << step:
                        until += lower
                have = cute.arch.vote_ballot_sync(tiles > 0)
                if tiles > 0:
                    below = (Int32(1) << self.lane) - 1
                    entry = count + cute.arch.popc(have & below)
                    starts[entry] = total + until - tiles
                    members[entry] = group
                total += cute.arch.shuffle_sync(until, LANES - 1)
                count += cute.arch.popc(have)
                base += LANES
            if lists_light == 0:
                heavy = total
        cute.arch.sync_warp()
        return count, heavy, total

    @cute.jit
    def locate(self, index, count, heavy, total):
        """Where the tile of a number lies that there is."""
        light = total - heavy
        pairs = cutlass.min(heavy, light)
        if self.order == IN_TURNS:
            if index < 2 * pairs:
                half = index // 2
                if index % 2 == 1:
                    half += heavy
                index = half
            elif heavy > light:
                index -= light
        starts = cute.make_tensor(self.starts, cute.make_layout(MOST_GROUPS))
        members = cute.make_tensor(self.members, cute.make_layout(MOST_GROUPS))
        entry, base = Int32(-1), Int32(0)
        while base < count:
            is_before = Int32(0)
            if base + self.lane < count:
                if starts[base + self.lane] <= index:
                    is_before = Int32(1)
            entry += cute.arch.popc(cute.arch.vote_ballot_sync(is_before == 1))
            base += LANES
        group = cute.arch.make_warp_uniform(members[entry])
        number = cute.arch.make_warp_uniform(index - starts[entry])
        start, end = self.bounds(group)
        raster = raster_of(
            self.params.tiles_m, self.row_tiles(end - start), Int32(1), self.params.swizzle_size
        )
        tile_m, tile_row = tile_at(number, raster)
        row = start + tile_row * self.config.tile_n
        rows = cutlass.min(end - row, self.config.tile_n)
        return Place(tile_m * self.config.tile_columns, row, rows, group)

    @cute.jit
    def hand_on(self, place, state):
        """Write a place into a free slot."""
        if self.lane == 0:
            numbers = cute.make_tensor(self.places + 4 * state.stage, cute.make_layout(4))
            for each in cutlass.range_constexpr(4):
                numbers[each] = place[each]
            cute.arch.mbarrier_arrive(self.ring.full + state.stage)

    @cute.jit
    def draw(self, total):
        """Take a number."""
        index, counter = Int32(0), cute.make_tensor(self.counter, cute.make_layout(1))
        if self.lane == 0:
            drawn = cute.arch.atomic_add(self.counter, Int32(1), sem="relaxed", scope="gpu")
            # Each block that had a tile draws once in vain: this is the last draw of all.
            if drawn == total - 1:
                counter[0] = Int32(0)
            index = drawn + self.params.clusters
        return cute.arch.make_warp_uniform(index)


class Gemm(StaticGemm):
    """The grouped product for one `DrawnConfig`."""

    def __init__(self, config):
        super().__init__(config)
        self.layouts = DrawnLayouts(config, self.dtypes)

    @cute.jit
    def __call__(self, *arguments):
        """Encode the TMA descriptors and launch. arguments: those of `Arguments`; the stream."""
        given = Arguments(*arguments[:-1])
        drawing = Drawing(given.l2_hint, given.order, given.counter_address)
        self.launch(given._replace(l2_hint=drawing), arguments[-1])

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
        drawing: Drawing,
    ):
        """As `grouped`'s, without clusters; the producer's warpgroup has the scheduler, too."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        if warp_index == 0:
            cpasync.prefetch_descriptor(weights.atom)
            for index in cutlass.range_constexpr(len(config.widths)):
                cpasync.prefetch_descriptor(rows[index].atom)

        both = SmemAllocator().allocate(self.storage)
        storage, table = both.rest, both.table
        ring = Ring(config, storage.full.data_ptr(), storage.empty.data_ptr())
        slots = Ring(replace(config, stages=SLOTS), table.full.data_ptr(), table.empty.data_ptr())
        places = table.places.data_ptr()
        if thread == 0:
            ring.make_barriers()
            for slot in cutlass.range_constexpr(SLOTS):
                cute.arch.mbarrier_init(slots.full + slot, 1)
                cute.arch.mbarrier_init(slots.empty + slot, 1 + config.consumers * WARPS)
        cute.arch.mbarrier_init_fence()

        sA = storage.a.get_tensor(layouts[0].outer, swizzle=layouts[0].inner)  # (bM, bK, STAGE)
        sA_loaded = storage.a.get_tensor(layouts[1].outer, swizzle=layouts[1].inner)
        sB_widths = tuple(storage.b.get_tensor(layout.outer, swizzle=layout.inner) for layout in layouts[2])

        load_registers, mma_registers = config.registers
        started = 64 + config.consumers * WARPGROUP_THREADS
        walk = Drawn(slots, places, thread % 32)
        if group == 0:
            cute.arch.setmaxregister_decrease(load_registers)
            if warp_index == 0:
                cute.arch.sync_warp()
                cute.arch.barrier_arrive(barrier_id=START_BARRIER, number_of_threads=started)
                producer = Producer(config, weights, rows, sA_loaded, sB_widths, ring, Int32(0))
                producer.run(walk, k_tiles, drawing.l2_hint)
            if warp_index == 1:
                cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=started)
                counter = cute.make_ptr(
                    Int32, drawing.counter_address, cute.AddressSpace.gmem, assumed_align=4
                )
                Scheduler(
                    config, params, offsets, thread % 32, Int32(block), Int32(0), drawing.order, counter,
                    slots, places, table.starts.data_ptr(), table.groups.data_ptr(),
                ).run()  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(mma_registers)
            cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=started)
            buffers = config.consumers * config.epilogue_buffers
            rows_apart, buffer = config.pitch * config.epi_n, config.pitch * config.staged_rows
            staging = cute.make_layout(  # (epiM, epiN, BUFFER)
                (MMA_ATOM_M, config.epi_n, buffers), stride=(1, config.pitch, buffer)
            )
            if cutlass.const_expr(config.fused.gated):
                staging = cute.make_layout(
                    ((8, 2, MMA_ATOM_M // 16), config.epi_n, buffers),
                    stride=((1, rows_apart, 8), config.pitch, buffer),
                )
            sD = storage.d.get_tensor(staging)
            consumer, own = group - 1, (thread - WARPGROUP_THREADS) % WARPGROUP_THREADS
            epilogue = Epilogue(config, self.dtypes.out, epilogue_mma, sD, *out, consumer, own)
            released = ring.for_consumer(thread % 32, (Int32(0), Int32(0)))
            Consumer(config, mmas, sA, sB_widths, released, epilogue, consumer).run(walk, k_tiles)
