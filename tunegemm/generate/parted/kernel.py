"""The grouped kernel for few rows: a cluster's blocks share a tile by parts of k; all else is `grouped`'s.

Few rows have few tiles, and each only reads weights: as many multiprocessors read as there are tiles. Here
all blocks of a cluster multiply the same tile, each its part of k, whose sums one of them, the tile's
*owner*, adds up in the order of the parts, and stores. Blocks take turns at being the owner.

Sums go to the owner's shared memory by `st.async`, which its barrier counts. A block writes there again only
when it has got the owner's own sums of a later tile, which the owner sent after it had read these: each block
owns one of any `parts` tiles that follow each other. So nobody has to say that the memory is free.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.utils import SmemAllocator

from tunegemm.generate.cute_sm90.config import WARPGROUP_THREADS
from tunegemm.generate.cute_sm90.kernel.layouts import TmaTensor
from tunegemm.generate.cute_sm90.kernel.ring import Ring
from tunegemm.generate.grouped.kernel.consumer import Consumer
from tunegemm.generate.grouped.kernel.epilogue import Epilogue
from tunegemm.generate.grouped.kernel.gemm import Arguments
from tunegemm.generate.grouped.kernel.gemm import Gemm as WholeGemm
from tunegemm.generate.grouped.kernel.producer import Producer
from tunegemm.generate.grouped.kernel.walk import Walk, WalkParams
from tunegemm.generate.kernel_roles import (
    LayoutsWith,
    begin,
    place_in_block,
    prefetch,
    staged_rows,
    tensor_in,
)

VECTOR = 4
"""Sums that a thread sends at a time: 16 bytes."""


@dataclass(frozen=True)
class PartedEpilogue(Epilogue):
    """The way out of a block's sums: to the owner, or if it is the owner to the rows of the group.

    `turn` counts the cluster's tiles. A tile has one subtile.
    """

    rank: Int32
    """The block's in its cluster."""
    exchange: Any
    """Pointer to the other parts' sums: [part, all but one's own][vector][thread][4]."""
    arrived: Any
    """The barrier."""

    @cute.jit
    def store(self, sums, place, bias, turn):
        """Send this part's sums of a tile, or add up all parts' and store them. Returns the next turn."""
        config, parts = self.config, self.config.parts
        owner, owned = turn % parts, turn // parts
        # Of WGMMA's own registers ptxas wants that nothing else writes them (C7511).
        total = cute.make_rmem_tensor(config.accumulator_registers, Float32)
        if owner == self.rank:
            self.gather(sums, total, owned)
            Epilogue.store(self, total, place, bias, owned % 2)
        else:
            self.send(sums, owner)
        return turn + 1

    def vector_at(self, slot, vector):
        """A thread's four sums of a part."""
        vectors = self.config.accumulator_registers // VECTOR
        offset = ((slot * vectors + vector) * WARPGROUP_THREADS + self.thread) * VECTOR
        return cute.make_ptr(
            Float32, (self.exchange + offset).toint(), cute.AddressSpace.smem, assumed_align=16
        )

    @cute.jit
    def send(self, sums, owner):
        """This thread's sums."""
        slot = self.rank
        if self.rank > owner:
            slot -= 1
        bits = cute.recast_tensor(sums, Int32)
        for vector in cutlass.range_constexpr(self.config.accumulator_registers // VECTOR):
            values = tuple(bits[vector * VECTOR + each] for each in range(VECTOR))
            cute.arch.store_async_dsmem(self.vector_at(slot, vector), values, self.arrived, owner)

    @cute.jit
    def gather(self, sums, total, owned):
        """Add up the parts, in their order."""
        if self.thread == 0:
            others = (self.config.parts - 1) * self.config.accumulator_registers * WARPGROUP_THREADS * 4
            cute.arch.mbarrier_arrive_and_expect_tx(self.arrived, others)
        cute.arch.mbarrier_wait(self.arrived, owned % 2)
        for part in cutlass.range_constexpr(self.config.parts):
            slot = Int32(part)
            if slot > self.rank:
                slot -= 1
            for vector in cutlass.range_constexpr(self.config.accumulator_registers // VECTOR):
                values = cute.make_rmem_tensor(VECTOR, Float32)
                if self.rank == part:
                    for each in cutlass.range_constexpr(VECTOR):
                        values[each] = sums[vector * VECTOR + each]
                else:
                    there = cute.make_tensor(self.vector_at(slot, vector), cute.make_layout(VECTOR))
                    cute.autovec_copy(there, values)
                for each in cutlass.range_constexpr(VECTOR):
                    if const_expr(part == 0):
                        total[vector * VECTOR + each] = values[each]
                    else:
                        total[vector * VECTOR + each] = total[vector * VECTOR + each] + values[each]


class InClusters:
    """A kernel that is launched in clusters of so many blocks."""

    def __init__(self, kernel, blocks):
        self.kernel = kernel
        self.blocks = blocks

    def launch(self, **words):
        """As the kernel's."""
        return self.kernel.launch(**words | {"cluster": (self.blocks, 1, 1)})


class Gemm(WholeGemm):
    """The grouped product for one `PartedConfig`."""

    def __init__(self, config):
        super().__init__(config)
        count = (config.parts - 1) * config.accumulator_registers * WARPGROUP_THREADS
        sums = cute.struct.Align[cute.struct.MemRange[Float32, count], 16]
        arrived = cute.struct.MemRange[Int64, 2]  # a barrier
        self.layouts = LayoutsWith(config, self.dtypes, {"sums": sums, "arrived": arrived})

    @cute.jit
    def __call__(self, *arguments):
        """Encode the TMA descriptors and launch. arguments: those of `Arguments`; the stream."""
        given, parts = Arguments(*arguments[:-1]), self.config.parts
        blocks = cutlass.max(given.blocks // parts, 1) * parts
        self.launch(given._replace(blocks=blocks), arguments[-1])

    def kernel(self, *arguments):
        """What `launch` launches."""
        return InClusters(self.parts_kernel(*arguments), self.config.parts)

    @cute.kernel
    def parts_kernel(
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
        """As `grouped`'s; a cluster walks as a block does there."""
        config, parts = self.config, self.config.parts
        thread, warp_index, group = place_in_block()
        block, _, _ = cute.arch.block_idx()
        cluster, rank = block // parts, block % parts
        params = params._replace(clusters=params.clusters // parts)
        walk = Walk(config, params, offsets, thread % 32, cluster, Int32(0))
        # What a part has beyond K is loaded as zeros.
        own_tiles = cute.ceil_div(k_tiles, parts)
        first = rank * own_tiles * config.tile_k

        prefetch(warp_index, (weights, *rows))
        both = SmemAllocator().allocate(self.storage)
        storage, arrived = both.rest, both.arrived.data_ptr()
        ring = Ring(config, storage.full.data_ptr(), storage.empty.data_ptr())
        begin(thread, True, ring.make_barriers, lambda: cute.arch.mbarrier_init(arrived, 1))

        sA, sA_loaded = (tensor_in(storage.a, layout) for layout in layouts[:2])  # (bM, bK, STAGE)
        sB_widths = tuple(tensor_in(storage.b, layout) for layout in layouts[2])

        load_registers, mma_registers = config.registers
        if group == 0:
            cute.arch.setmaxregister_decrease(load_registers)
            if warp_index == 0:
                # Its own barriers are there; others' it does not use.
                cute.arch.sync_warp()
                place = (0, first, 0, 0, 0) if const_expr(config.fused.gated) else (0, first, 0)
                own_weights = TmaTensor(weights.atom, cute.domain_offset(place, weights.tensor))
                own_rows = tuple(
                    TmaTensor(each.atom, cute.domain_offset((0, first), each.tensor)) for each in rows
                )
                producer = Producer(config, own_weights, own_rows, sA_loaded, sB_widths, ring, Int32(0))
                producer.run(walk, own_tiles, l2_hint)
            cute.arch.cluster_wait()
        else:
            cute.arch.setmaxregister_increase(mma_registers)
            cute.arch.cluster_wait()
            sD = storage.d.get_tensor(staged_rows(config))
            own = thread - WARPGROUP_THREADS
            epilogue = PartedEpilogue(
                config, self.dtypes.out, epilogue_mma, sD, *out, Int32(0), own, rank, both.sums.data_ptr(),
                arrived,
            )  # fmt: skip
            released = ring.for_consumer(thread % 32, (Int32(0), Int32(0)))
            Consumer(config, mmas, sA, sB_widths, released, epilogue, Int32(0)).run(walk, own_tiles)
