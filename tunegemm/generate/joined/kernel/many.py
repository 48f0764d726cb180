"""The kernel for many rows: persistent, warp-specialized TMA + WGMMA, the rows as WGMMA's m.

D[:, columns of i] = A[m, k] B_i[n, k]^T + bias_i[n], for up to three weights; or, with a gate,
D = act(A B_0^T + bias_0) * (A B_1^T + bias_1).

The kernel is that of `cute_sm90` but for three things: which tile is which (`Schedule`), from where the
producer loads B (`Producer`), and whose bias a tile adds (`Fusion`). A tile is of one weight, whose last one
ends with it. With a gate half of a B tile is the one weight's and half the other's.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import SmemAllocator

from tunegemm.generate.cute_sm90.config import WARPGROUP_THREADS
from tunegemm.generate.cute_sm90.kernel import fusion, producer, schedule
from tunegemm.generate.cute_sm90.kernel.consumer import Consumer
from tunegemm.generate.cute_sm90.kernel.epilogue import Epilogue
from tunegemm.generate.cute_sm90.kernel.layouts import Mmas, load_box, matrix_at
from tunegemm.generate.cute_sm90.kernel.producer import EVICT_FIRST, EVICT_NORMAL
from tunegemm.generate.cute_sm90.kernel.ring import Ring
from tunegemm.generate.cute_sm90.kernel.schedule import (
    NOWHERE,
    Origin,
    ScheduleParams,
    TileCoord,
    first_index,
)
from tunegemm.generate.cute_sm90.kernel.split_k import SplitK, Workspace
from tunegemm.generate.joined.kernel.arguments import WEIGHTS, Arguments
from tunegemm.generate.kernel_roles import (
    Product,
    await_empty,
    begin,
    int32_at,
    load_k_tiles,
    multicast_masks,
    part_ways,
    place_in_block,
    prefetch,
    tensor_in,
)


class Parts(NamedTuple):
    """Where each weight's tiles and columns begin. Columns are the product's: of a gate twice those of D."""

    second: Int32
    """The first cluster tile along n of the second weight, and of the third."""
    third: Int32
    begin1: Int32
    """The first column of the second weight, and of the third."""
    begin2: Int32
    last: Int32
    """Where each weight's last tile begins, counted from the weight's own first column."""
    last1: Int32
    last2: Int32


@cute.jit
def chosen(weight, values):
    """The value of a weight, of one for each."""
    value = values[0]
    if weight == 1:
        value = values[1]
    if weight == 2:
        value = values[2]
    return value


@dataclass(frozen=True)
class Schedule(schedule.Schedule):
    """Tiles of all weights, those of one behind those of the other. `TileCoord.batch` is a tile's weight, and
    its n is counted in that.
    """

    parts: Any = None

    def begun_by(self, cluster):
        return replace(self, cluster=cluster, end=self.tiles())

    def is_split(self, unit):
        return False

    @cute.jit
    def tile(self, index):
        """This CTA's tile of a work unit."""
        config, parts = self.config, self.parts
        cta_m, cta_n, _ = cute.arch.block_idx()
        tile_m, tile_n, _ = self.cluster_tile(Int32(index))
        weight = Int32(0)
        first = Int32(0)
        if const_expr(not config.fused.gated):
            if tile_n >= parts.second:
                weight = Int32(1)
                first = Int32(parts.second)
            if tile_n >= parts.third:
                weight = Int32(2)
                first = Int32(parts.third)
        own = (tile_n - first) * config.cluster_n + cta_n
        return TileCoord(tile_m * config.cluster_m + cta_m, own, weight, Int32(0))

    @cute.jit
    def column(self, tile):
        """Where a CTA's tile begins, counted from its weight's first column."""
        parts = self.parts
        last = chosen(tile.batch, (parts.last, parts.last1, parts.last2))
        return cutlass.min(tile.n * self.config.tile_n, last)

    @cute.jit
    def origin(self, tile):
        """Where a CTA's tile begins in the product."""
        begin = chosen(tile.batch, (Int32(0), self.parts.begin1, self.parts.begin2))
        row = cutlass.min(tile.m * self.config.tile_m, self.params.last_row)
        return Origin(row, begin + self.column(tile), Int32(0))


@dataclass(frozen=True)
class Producer(producer.Producer):
    """One warp. `b`: a tensor for each weight, (N, K, 1). With a gate sB is (bN / 2, bK, 2, STAGE)."""

    @cute.jit
    def run(self, schedule, l2_hint):
        """Fill the ring, work unit after work unit."""
        config, ring = self.config, self.ring
        cta_m, cta_n, _ = cute.arch.block_idx()
        a_mask, b_mask = multicast_masks(config, cta_m, cta_n)
        a_policy = Int64(EVICT_NORMAL)
        b_policy = Int64(EVICT_NORMAL)
        if l2_hint == 1:
            a_policy = Int64(EVICT_FIRST)
        if l2_hint == 2:
            b_policy = Int64(EVICT_FIRST)

        state = ring.producer_start()
        unit = schedule.first()
        # The divisions of a tile's coordinates run while others are waited for, as in `cute_sm90`.
        tile = schedule.tile(unit.index)
        if const_expr(config.cluster_size > 1):
            cute.arch.cluster_wait()
        while schedule.has(unit):
            origin = schedule.origin(tile)
            a_box = (config.tile_m, config.tile_k)
            a = self.a.atom, *self.partition(self.a, self.sA, origin.row, a_box, cta_n, config.cluster_n)
            a = (*a, a_mask, a_policy)
            column = schedule.column(tile)
            if const_expr(config.fused.gated):
                halves = [
                    self.part(half, self.sB[(None, None, half, None)], column // 2, config.tile_n // 2, cta_m)
                    for half in range(2)
                ]
                loads = (a, *((*half, b_mask, b_policy) for half in halves))
                state = load_k_tiles(ring, loads, state, unit.k_tiles)
            else:
                for weight in cutlass.range_constexpr(WEIGHTS):
                    if tile.batch == weight:
                        b = self.part(weight, self.sB, column, config.tile_n, cta_m)
                        state = load_k_tiles(ring, (a, (*b, b_mask, b_policy)), state, unit.k_tiles)
            unit = schedule.next(unit)
            tile = schedule.tile(unit.index)

        if const_expr(config.cluster_size > 1):
            await_empty(ring, state)

    def part(self, weight, ring_tensor, column, columns, cta_m):
        """What loads a CTA's share of a weight's tile: the atom, the ring's stages and the k tiles."""
        config, b = self.config, self.b[weight]
        box = columns, config.tile_k
        return b.atom, *self.partition(b, ring_tensor, column, box, cta_m, config.cluster_m)


@dataclass(frozen=True)
class Fusion(fusion.Fusion):
    """An epilogue whose vector, if it has one, is each weight's own.

    `words`: the product's columns, an address for each weight, 0 for none, and the `Parts`.
    """

    @cute.jit
    def hold_vectors(
        self, origin, atoms: cutlass.Constexpr, rows_apart: cutlass.Constexpr, columns: cutlass.Constexpr
    ):  # fmt: skip
        """As there: of columns that gate each other those of the one weight, then of the other, in turns."""
        if const_expr(not self.vectors):
            return ()
        biases, parts = self.words[1 : 1 + WEIGHTS], self.words[-1]
        values = cute.make_rmem_tensor(-(-columns // 32), Float32)
        values.fill(0.0)
        address = Int64(biases[0])
        begin = Int32(0)
        end = Int32(self.words[0])
        if const_expr(not self.config.fused.gated):
            end = Int32(parts.begin1)
            if origin.column >= parts.begin1:
                address = Int64(biases[1])
                begin = Int32(parts.begin1)
                end = Int32(parts.begin2)
            if origin.column >= parts.begin2:
                address = Int64(biases[2])
                begin = Int32(parts.begin2)
                end = Int32(self.words[0])
        for value in cutlass.range_constexpr(-(-columns // 32)):
            column = cutlass.min(origin.column + value * 32 + self.thread % 32, end - 1) - begin
            if const_expr(self.config.fused.gated):
                address = biases[1] if column % 2 == 1 else biases[0]
                column = column // 2
            if address != 0:
                dtype, bytes_each = self.dtypes.operand, self.dtypes.operand.width // 8
                pointer = cute.make_ptr(
                    dtype, address + Int64(column) * bytes_each, cute.AddressSpace.gmem,
                    assumed_align=bytes_each,
                )  # fmt: skip
                values[value] = cute.make_tensor(pointer, cute.make_layout(1))[0].to(Float32)
        return (values,)


class Gemm(Product):
    """The product for one `KernelConfig`, whose epilogue is bias_n, a gate, both or empty."""

    arguments = Arguments

    # ---- host side: runs on the CPU at every launch -------------------------------------------------

    @cute.jit
    def launch(self, given, stream):
        """Encode the TMA descriptors and launch."""
        config, dtypes, layouts = self.config, self.dtypes, self.layouts
        rows = [cutlass.max(n, 8) for n in given.rows]
        out_n = given.n + given.n1 + given.n2
        if const_expr(config.fused.gated):
            rows = [given.n, given.n, given.n]
            out_n = given.n
        mA = matrix_at(
            given.a_address, dtypes.a, (given.m, given.k, 1), True, given.lda, given.lda
        )  # (M, K, 1)
        mBs = given.weights(dtypes.b, rows)  # (N, K, 1) each
        mD = matrix_at(
            given.d_address, dtypes.out, (given.m, out_n, 1), True, given.ldd, given.ldd
        )  # (M, N, 1)
        sA_layout = layouts.ring_a(mA, config.stages)  # (bM, bK, STAGE)
        sB_layout = layouts.ring_b(mBs[0], config.stages)  # (bN, bK, STAGE)
        b_loaded, columns = sB_layout, config.tile_n
        if const_expr(config.fused.gated):
            _, _, b_loaded, _ = layouts.gated_halves(mBs[0], given.ldb)  # (bN / 2, bK, 2, STAGE)
            columns = config.tile_n // 2
        a = load_box(mA, layouts.ring_a(mA), (config.tile_m, config.tile_k), config.cluster_n)
        stage_b = layouts._ring(mBs[0], dtypes.b, columns)
        weights = mBs[:2] if const_expr(config.fused.gated) else mBs
        b = tuple(load_box(mB, stage_b, (columns, config.tile_k), config.cluster_m) for mB in weights)
        # (epiM, epiN, BUFFER)
        sD_layout = layouts.staging(mD, config.out_epi_n, config.consumers * config.epilogue_buffers)
        d = layouts.staged_box(cpasync.CopyBulkTensorTileS2GOp(), mD, config.out_epi_n)
        self.storage = layouts.shared_storage(cute.cosize(sA_layout), cute.cosize(sB_layout))
        self.smem_bytes = self.storage.size_in_bytes()

        n, params, parts = self.schedule_params(given)
        first_tiles = int32_at(given.first_tiles_address)
        mma = layouts.tiled_mma(config.tile_warpgroups, config.tile_n)
        epilogue_mma = layouts.tiled_mma(1, config.converted_columns)
        kernel = self.kernel(
            (a, b, d), Mmas(mma, epilogue_mma), (sA_layout, sB_layout, b_loaded, sD_layout), params, parts,
            given.l2_hint, first_tiles, (n, *given.biases),
        )  # fmt: skip
        self.start(kernel, given.clusters, stream)

    @cute.jit
    def schedule_params(self, given):
        """(columns of the product, the numbers of a launch, those of the weights)."""
        config = self.config
        unit = config.tile_n * config.cluster_n
        rows = given.rows
        if const_expr(config.fused.gated):
            rows = 2 * given.n, Int32(0), Int32(0)
        second = cute.ceil_div(rows[0], unit)
        third = second + cute.ceil_div(rows[1], unit)
        tiles_n = third + cute.ceil_div(rows[2], unit)
        # All multiples of 8 columns of D, as a tile's columns are: a last tile begins at such.
        last = [cutlass.max(n - config.tile_n, 0) for n in rows]
        unit_m, _ = config.edge_units
        last_row = cute.ceil_div(cutlass.max(given.m - config.tile_m, 0), unit_m) * unit_m
        params = ScheduleParams(
            cute.ceil_div(given.k, config.tile_k), cute.ceil_div(given.m, config.tile_m * config.cluster_m),
            tiles_n, Int32(1), Int32(1), given.raster_along_m, given.swizzle_size, Int32(0), given.clusters,
            given.block_across, given.block_along, last_row, Int32(NOWHERE),
        )  # fmt: skip
        parts = Parts(second, third, rows[0], rows[0] + rows[1], *last)
        return rows[0] + rows[1] + rows[2], params, parts

    # ---- device side --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        tensors: tuple,
        mmas: Mmas,
        layouts: tuple,
        params: ScheduleParams,
        parts: Parts,
        l2_hint: Int32,
        first_tiles: cute.Pointer,
        fused: tuple,
    ):
        """`tensors`: A, those of B, D. `fused`: columns of the product, addresses of biases."""
        config = self.config
        a, b, d = tensors
        thread, warp_index, group = place_in_block()
        schedule = Schedule(config, params, parts=parts).begun_by(first_index(config, first_tiles))
        prefetch(warp_index, (a, d, *b))

        storage = SmemAllocator().allocate(self.storage)
        ring = Ring(config, storage.full.data_ptr(), storage.empty.data_ptr())
        begin(thread, config.cluster_size > 1, ring.make_barriers)
        sA = tensor_in(storage.a, layouts[0])  # (bM, bK, STAGE)
        sB, sB_loaded = (tensor_in(storage.b, layout) for layout in layouts[1:3])  # (bN, bK, STAGE)
        sD = tensor_in(storage.d, layouts[3])  # (epiM, epiN, BUFFER)

        def load():
            Producer(config, a, b, sA, sB_loaded, ring).run(schedule, l2_hint)

        def multiply(_):
            loaded, met = storage.loaded.data_ptr(), storage.met.data_ptr()
            of_consumers, consumer = thread - WARPGROUP_THREADS, group - 1
            cta_m, cta_n, _ = cute.arch.block_idx()
            own, lane = of_consumers % WARPGROUP_THREADS, of_consumers % 32
            fusion = Fusion.of(config, self.dtypes, d.tensor, (*fused, parts), own)
            epilogue = Epilogue(
                config, self.dtypes, d, None, mmas.epilogue, sD, loaded, fusion, consumer, own
            )
            split_k = SplitK(config, Workspace(first_tiles, first_tiles), met, (cta_m, cta_n), consumer, own)
            Consumer(config, self.dtypes.acc, mmas.tile, sA, sB, ring, epilogue, split_k, consumer).run(
                schedule, lane, (cta_m, cta_n)
            )

        part_ways(config, warp_index, group, storage, load, multiply)
