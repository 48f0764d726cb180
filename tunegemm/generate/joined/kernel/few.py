"""The kernel for few rows: persistent, warp-specialized TMA + WGMMA; the weights' N is WGMMA's m.

D[:, columns of i] = A[m, k] B_i[n, k]^T + bias_i[n], for up to three weights; or, with a gate,
D = act(A B_0^T + bias_0) * (A B_1^T + bias_1).

Tiles, ring, main loop and the way out are those of `grouped`: a weight is what a group is there, but that all
of them have all rows. A tile is of one weight: TMA knows each by a descriptor of its own, with its own end.
A gate's two weights TMA reads as one tensor, whichever lies first in memory. Its sums then change places.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.utils import SmemAllocator

from tunegemm.generate.cute_sm90.config import WARPGROUP_THREADS
from tunegemm.generate.cute_sm90.kernel.layouts import load_box
from tunegemm.generate.cute_sm90.kernel.producer import EVICT_FIRST, EVICT_NORMAL
from tunegemm.generate.cute_sm90.kernel.ring import Ring
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.grouped.kernel import epilogue as grouped_epilogue
from tunegemm.generate.grouped.kernel import gemm as grouped_gemm
from tunegemm.generate.grouped.kernel import producer as grouped_producer
from tunegemm.generate.grouped.kernel.consumer import Consumer
from tunegemm.generate.grouped.kernel.producer import takes_width
from tunegemm.generate.joined.kernel.arguments import WEIGHTS, Arguments
from tunegemm.generate.kernel_rasterization import raster_of, tile_at
from tunegemm.generate.kernel_roles import (
    begin,
    part_ways,
    place_in_block,
    prefetch,
    staged_rows,
    tensor_in,
)


class TilesParams(NamedTuple):
    """What the launch decides. Tiles of weights are counted one weight after the other."""

    n: Int32
    """Rows of each weight."""
    n1: Int32
    n2: Int32
    second: Int32
    """The first tile of the second weight, and of the third."""
    third: Int32
    tiles_m: Int32
    """Tiles of all weights."""
    row_tiles: Int32
    rows: Int32
    """Of A and D."""
    swizzle_size: Int32
    blocks: Int32
    """The grid."""


class Place(NamedTuple):
    """Where a tile lies. All threads have the same."""

    column: Int32
    """Its first row of its weight."""
    row: Int32
    """Its first row in A and D."""
    rows: Int32
    """How many there are from there on, at most a tile's."""
    group: Int32
    """Its weight."""
    n: Int32
    """Rows of that."""
    begin: Int32
    """The first column of that in D."""


@dataclass(frozen=True)
class Tiles:
    """The tiles of one block: `first`, `next` while `has`, and the `place` of each."""

    config: GroupedConfig
    params: TilesParams
    block: Int32

    def first(self):
        return Int32(self.block)

    def has(self, index):
        return index < self.params.tiles_m * self.params.row_tiles

    def next(self, index, steps):
        return index + steps * self.params.blocks

    @cute.jit
    def place(self, index):
        """Where a tile lies."""
        config, params = self.config, self.params
        raster = raster_of(params.tiles_m, params.row_tiles, Int32(1), params.swizzle_size)
        tile, tile_row = tile_at(index, raster)
        weight = Int32(0)
        begin = Int32(0)
        n = Int32(params.n)
        first = Int32(0)
        if const_expr(not config.fused.gated):
            if tile >= params.second:
                weight = Int32(1)
                begin = Int32(params.n)
                n = Int32(params.n1)
                first = Int32(params.second)
            if tile >= params.third:
                weight = Int32(2)
                begin = params.n + params.n1
                n = Int32(params.n2)
                first = Int32(params.third)
        row = tile_row * config.tile_n
        rows = cutlass.min(params.rows - row, config.tile_n)
        return Place((tile - first) * config.tile_columns, row, rows, weight, n, begin)


@dataclass(frozen=True)
class Producer(grouped_producer.Producer):
    """One warp. `weights`: a tensor for each, (N, K, 1); with a gate one, (8, K, 2, N / 8, 1)."""

    @cute.jit
    def run(self, tiles, k_tiles, l2_hint):
        """Fill the ring, tile after tile."""
        widths = self.config.widths
        policy = Int64(EVICT_NORMAL)
        if l2_hint == 2:
            policy = Int64(EVICT_FIRST)
        state = self.ring.producer_start()
        index = tiles.first()
        while tiles.has(index):
            place = tiles.place(index)
            of_one = place._replace(group=Int32(0))  # of its weight's tensor
            for weight in cutlass.range_constexpr(len(self.weights)):
                producer = replace(self, weights=self.weights[weight])
                for width in cutlass.range_constexpr(len(widths)):
                    if cutlass.and_(place.group == weight, takes_rows(widths, width, place.rows)):
                        state = grouped_producer.Producer.fill(
                            producer, of_one, width, state, k_tiles, policy
                        )
            index = tiles.next(index, 1)


def takes_rows(widths, index, rows):
    """As `takes_width`, of one width, too."""
    return rows > 0 if len(widths) == 1 else takes_width(widths, index, rows)


@dataclass(frozen=True)
class Epilogue(grouped_epilogue.Epilogue):
    """One consumer warpgroup's way out; of a product of one weight once it is `at` a tile."""

    biases: tuple = ()
    """Addresses of the weights' biases; 0 without."""

    @cute.jit
    def at(self, place):
        """The way out of a tile: that of a product of its weight alone, whose D is columns of D."""
        bias = Int64(self.biases[0])
        for weight in cutlass.range_constexpr(1, WEIGHTS):
            if place.group == weight:
                bias = Int64(self.biases[weight])
        d = self.d + Int64(place.begin) * (self.out.width // 8)
        return replace(self, n=place.n, d=d, bias=bias)

    def bias_of(self, place):
        """The way out of a tile, and what is added there."""
        way_out = self.at(place)
        return way_out, way_out.added(place)

    def added(self, place):
        return grouped_epilogue.Epilogue.bias_of(self, place)

    def store(self, sums, place, bias, turn):
        """bias: `bias_of`."""
        way_out, added = bias
        return grouped_epilogue.Epilogue.store(way_out, sums, place, added, turn)


@dataclass(frozen=True)
class GatedEpilogue(Epilogue):
    """Where one weight gates the other."""

    swapped: Int32 = 0
    """1 where the gate's sums lie behind those of up."""

    @cute.jit
    def added(self, place):
        """What is added to this thread's column of gate and of up, for each part of a tile."""
        atoms, bytes_each = self.config.atoms_per_warpgroup, self.out.width // 8
        values = cute.make_rmem_tensor(2 * atoms, Float32)
        values.fill(0.0)
        for half in cutlass.range_constexpr(2 * atoms):
            column = self.column_of(place, half // 2) + self.thread // 32 * 8 + self.thread % 32 // 4
            if cutlass.and_(self.biases[half % 2] != 0, column < self.n):
                address = self.biases[half % 2] + Int64(column) * bytes_each
                pointer = cute.make_ptr(self.out, address, cute.AddressSpace.gmem, assumed_align=bytes_each)
                values[half] = cute.make_tensor(pointer, cute.make_layout(1))[0].to(Float32)
        return values

    @cute.jit
    def store(self, sums, place, bias, turn):
        """As there. The two values of a gate, 8 rows apart, change places where up lies first in memory."""
        for block in cutlass.range_constexpr(self.config.accumulator_registers // 4):
            for pair in cutlass.range_constexpr(2):
                first, second = sums[4 * block + pair], sums[4 * block + 2 + pair]
                sums[4 * block + pair] = second if self.swapped == 1 else first
                sums[4 * block + 2 + pair] = first if self.swapped == 1 else second
        return Epilogue.store(self, sums, place, bias, turn)


class Gemm(grouped_gemm.Gemm):
    """The product for one `GroupedConfig`, whose epilogue is empty or a gate."""

    # ---- host side: runs on the CPU at every launch -------------------------------------------------

    @cute.jit
    def __call__(self, *arguments):
        """Encode the TMA descriptors and launch, as `grouped` would for the first weight as the only group;
        for a gate for that of the two which lies first. arguments: those of `Arguments`; the stream.
        """
        given = Arguments(*arguments[:-1])
        first, apart, swapped = Int64(given.b_address), Int64(0), Int32(0)
        n = given.n
        if const_expr(self.config.fused.gated):
            apart = given.b1_address - given.b_address
            if apart < 0:
                first = Int64(given.b1_address)
                apart = given.b_address - given.b1_address
                swapped = Int32(1)
        else:
            n = cutlass.max(n, 8)
        group = grouped_gemm.Arguments(
            first, given.a_address, given.d_address, n, given.m, given.k, 1, given.ldb, given.lda, given.ldd,
            given.ldb, Int64(0), apart // (self.dtypes.a.width // 8), given.swizzle_size, given.clusters,
            (given, swapped), Int64(0), Int64(0), Int64(0),
        )  # fmt: skip
        self.launch(group, arguments[-1])

    def kernel(self, weights, rows, mmas, epilogue_mma, layouts, params, offsets, out, k_tiles, joined):
        """What `launch` launches. joined: what is there in place of `grouped`'s `l2_hint`."""
        config, (given, swapped) = self.config, joined
        second = cute.ceil_div(given.n, config.tile_columns)
        third, total, every = second, second, (weights,)
        if not config.fused.gated:
            third = second + cute.ceil_div(given.n1, config.tile_columns)
            total = third + cute.ceil_div(given.n2, config.tile_columns)
            _, *others = given.weights(
                self.dtypes.a, [cutlass.max(n, 8) for n in given.rows]
            )  # (N, K, 1) each
            box = config.tile_m, config.tile_k
            every = (weights, *(load_box(mA, self.layouts.ring_a(mA), box, 1) for mA in others))
        params = TilesParams(
            given.n, given.n1, given.n2, second, third, total, cute.ceil_div(given.m, config.tile_n),
            given.m, given.swizzle_size, given.clusters,
        )  # fmt: skip
        out = (given.d_address, given.ldd, given.biases, swapped)
        return self.joined_kernel(
            every, rows, mmas, epilogue_mma, layouts, params, out, k_tiles, given.l2_hint
        )

    # ---- device side --------------------------------------------------------------------------------

    @cute.kernel
    def joined_kernel(
        self,
        weights: tuple,
        rows: tuple,
        mmas: tuple,
        epilogue_mma: cute.TiledMma,
        layouts: tuple,
        params: TilesParams,
        out: tuple,
        k_tiles: Int32,
        l2_hint: Int32,
    ):
        """`weights`, `rows`: what TMA loads, the rows for each of the config's widths."""
        config = self.config
        thread, warp_index, group = place_in_block()
        block, _, _ = cute.arch.block_idx()
        tiles = Tiles(config, params, Int32(block))
        prefetch(warp_index, (*weights, *rows))

        storage = SmemAllocator().allocate(self.storage)
        ring = Ring(config, storage.full.data_ptr(), storage.empty.data_ptr())
        begin(thread, False, ring.make_barriers)
        sA, sA_loaded = (tensor_in(storage.a, layout) for layout in layouts[:2])  # (bM, bK, STAGE)
        sB_widths = tuple(tensor_in(storage.b, layout) for layout in layouts[2])

        def load():
            producer = Producer(config, weights, rows, sA_loaded, sB_widths, ring, Int32(0))
            producer.run(tiles, k_tiles, l2_hint)

        def multiply(staged):
            sD = cute.make_tensor(staged, staged_rows(config))
            consumer, own = group - 1, (thread - WARPGROUP_THREADS) % WARPGROUP_THREADS
            d, ldd, biases, swapped = out
            way_out, more = Epilogue, ()
            if const_expr(config.fused.gated):
                way_out, more = GatedEpilogue, (swapped,)
            epilogue = way_out(
                config, self.dtypes.out, epilogue_mma, sD, params.n, d, ldd, biases[0], Int64(0), Int32(0),
                Int64(0), consumer, own, biases, *more,
            )  # fmt: skip
            released = ring.for_consumer(thread % 32, (Int32(0), Int32(0)))
            Consumer(config, mmas, sA, sB_widths, released, epilogue, consumer).run(tiles, k_tiles)

        part_ways(config, warp_index, group, storage, load, multiply)
