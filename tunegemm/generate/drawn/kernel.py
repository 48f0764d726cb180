"""The grouped kernel with blocks that draw their tiles from a counter; everything else is `grouped`'s code.

Tiles of one launch differ in cost: a group with few rows has narrow tiles that mostly read weights, and a
group with many rows has tiles that multiply. Blocks that take tiles at a fixed stride end at different times.
Here each block's second warp, the *scheduler*, draws tiles: it takes the next number from a counter in device
memory, finds the tile of that number as `grouped`'s `Walk` does, and passes its place to the warps that load
and multiply. One block computes a whole tile, so results have the same bits whichever block draws it.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.utils import SmemAllocator

from tunegemm.generate.cute_sm90.config import WARPGROUP_THREADS
from tunegemm.generate.cute_sm90.kernel.layouts import START_BARRIER
from tunegemm.generate.cute_sm90.kernel.ring import WARPS, Ring, RingState
from tunegemm.generate.grouped.kernel.consumer import Consumer
from tunegemm.generate.grouped.kernel.epilogue import Epilogue
from tunegemm.generate.grouped.kernel.gemm import Arguments
from tunegemm.generate.grouped.kernel.gemm import Gemm as StaticGemm
from tunegemm.generate.grouped.kernel.producer import Producer
from tunegemm.generate.grouped.kernel.walk import LANES, Place, Walk, WalkParams
from tunegemm.generate.kernel_roles import (
    LayoutsWith,
    begin,
    draw,
    int32_at,
    part_ways,
    place_in_block,
    prefetch,
    staged_rows,
    tensor_in,
)

#: The ring's barriers are there for the scheduler. It waits at a barrier of its own: synccheck takes waits
#: for one barrier in two places for threads that diverge.
DRAW_BARRIER = START_BARRIER + 1


class Drawing(NamedTuple):
    """What reaches this kernel in place of `grouped`'s `l2_hint`."""

    l2_hint: Int32
    counter_address: Int64
    """int32, zero before a launch and behind it."""


class Unit(NamedTuple):
    """A tile that was drawn; none where it has no rows."""

    place: Place
    state: RingState
    """Where the next one will be."""


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
        slot = cute.make_ptr(
            Int32, (self.places + 4 * state.stage).toint(), cute.AddressSpace.smem, assumed_align=16
        )
        numbers = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(cute.make_tensor(slot, cute.make_layout(4)), numbers)
        place = Place(*(cute.arch.make_warp_uniform(numbers[each]) for each in range(4)))
        if self.lane == 0:
            cute.arch.mbarrier_arrive(self.ring.empty + state.stage)
        return Unit(place, self.ring.advance(state))


@dataclass(frozen=True)
class Scheduler(Walk):
    """The warp that draws. `cluster` is the block."""

    counter: Any
    """Pointer to the counter."""
    ring: Ring
    places: Any

    @cute.jit
    def run(self):
        """Draw tiles until there are none, and hand on the place of each, then the end."""
        total = self.count()
        state = self.ring.producer_start()
        unit = self.first()
        while self.has(unit):
            self.hand_on(self.place(unit), state)
            state = self.ring.advance(state)
            # Drawn as late as possible: not before there is room for it.
            self.ring.wait_empty(state)
            _, _, base, before, until, start, end = unit
            unit = self.seek(self.draw(total), base, before, until, start, end)
        self.hand_on(Place(Int32(0), Int32(0), Int32(0), Int32(0)), state)

    @cute.jit
    def count(self):
        """The tiles of all groups."""
        base, total = Int32(0), Int32(0)
        while base < self.params.groups:
            until, _, _ = self.window(base, total)
            total = cute.arch.shuffle_sync(until, LANES - 1)
            base += LANES
        return total

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
        index = Int32(0)
        if self.lane == 0:
            # Each block that had a tile draws once in vain, the last of all draws among them.
            index = draw(self.counter, total, self.params.clusters)
        return cute.arch.make_warp_uniform(index)


class Gemm(StaticGemm):
    """The grouped product for one `DrawnConfig`."""

    def __init__(self, config):
        super().__init__(config)
        barriers = cute.struct.MemRange[Int64, config.slots]
        places = cute.struct.Align[cute.struct.MemRange[Int32, 4 * config.slots], 16]
        self.layouts = LayoutsWith(
            config, self.dtypes, {"full": barriers, "empty": barriers, "places": places}
        )

    @cute.jit
    def __call__(self, *arguments):
        """Encode the TMA descriptors and launch. arguments: those of `grouped`; the counter's address; the
        stream."""
        *given, counter_address, stream = arguments
        given = Arguments(*given)
        self.launch(given._replace(l2_hint=Drawing(given.l2_hint, counter_address)), stream)

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
        """As `grouped`'s, without clusters; the second warp is the scheduler."""
        config = self.config
        thread, warp_index, group = place_in_block()
        block, _, _ = cute.arch.block_idx()
        prefetch(warp_index, (weights, *rows))

        both = SmemAllocator().allocate(self.storage)
        storage, places = both.rest, both.places.data_ptr()
        ring = Ring(config, storage.full.data_ptr(), storage.empty.data_ptr())
        slots = Ring(replace(config, stages=config.slots), both.full.data_ptr(), both.empty.data_ptr())

        def make_slots():
            for slot in cutlass.range_constexpr(config.slots):
                cute.arch.mbarrier_init(slots.full + slot, 1)
                cute.arch.mbarrier_init(slots.empty + slot, 1 + config.consumers * WARPS)

        begin(thread, False, ring.make_barriers, make_slots)
        sA, sA_loaded = (tensor_in(storage.a, layout) for layout in layouts[:2])  # (bM, bK, STAGE)
        sB_widths = tuple(tensor_in(storage.b, layout) for layout in layouts[2])
        walk = Drawn(slots, places, thread % 32)

        def load():
            cute.arch.barrier_arrive(barrier_id=DRAW_BARRIER, number_of_threads=64)
            producer = Producer(config, weights, rows, sA_loaded, sB_widths, ring, Int32(0))
            producer.run(walk, k_tiles, drawing.l2_hint)

        def schedule():
            if warp_index == 1:
                cute.arch.barrier(barrier_id=DRAW_BARRIER, number_of_threads=64)
                counter = int32_at(drawing.counter_address)
                Scheduler(
                    config, params, offsets, thread % 32, Int32(block), Int32(0), counter, slots, places
                ).run()

        def multiply(staged):
            sD = cute.make_tensor(staged, staged_rows(config))
            consumer, own = group - 1, (thread - WARPGROUP_THREADS) % WARPGROUP_THREADS
            epilogue = Epilogue(config, self.dtypes.out, epilogue_mma, sD, *out, consumer, own)
            released = ring.for_consumer(thread % 32, (Int32(0), Int32(0)))
            Consumer(config, mmas, sA, sB_widths, released, epilogue, consumer).run(walk, k_tiles)

        part_ways(config, warp_index, group, storage, load, multiply, schedule)
