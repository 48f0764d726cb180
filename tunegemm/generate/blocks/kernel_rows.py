"""The producer warp of block-scaled products with fewer rows than a tile has.

TMA takes longer to fill a line that the matrix lacks with zeros than to load one. So it loads boxes of 128,
64, 32, 16 and 8 lines, which the number of rows names. Nobody stores the rows of what else lies in a stage.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from tunegemm.generate.blocks.config import BLOCK
from tunegemm.generate.cute_sm90.kernel.layouts import load_box
from tunegemm.generate.cute_sm90.kernel.producer import EVICT_FIRST, EVICT_NORMAL, Producer

#: Lines after which the swizzle repeats.
_LEAST = 8


def is_short(config, lines):
    """Whether boxes come in place of a tile. Those of one that lacks fewer lines would be a tile again."""
    return lines <= config.rows - _LEAST


def sizes_of(config):
    """Lines of the boxes, powers of two. `count_of` is the sum of some: of its binary digits."""
    return tuple(size for size in (128, 64, 32, 16, _LEAST) if size < config.rows)


def count_of(lines):
    """Lines that are loaded."""
    return (lines + (_LEAST - 1)) // _LEAST * _LEAST


def boxes_of(config, rows):
    """TMA loads of such boxes. rows: (M, K, 1) of the product."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, rows.element_type)
    shapes = [(size, config.tile_k) for size in sizes_of(config)]
    return tuple(load_box(rows, cute.tile_to_shape(atom, each, order=(0, 1)), each, 1) for each in shapes)


@dataclass(frozen=True)
class RowProducer(Producer):
    """One warp of a block that shares nothing with others."""

    boxes: Any = None
    """`boxes_of` the product's rows."""
    lines: Any = None
    """Their number."""

    @cute.jit
    def run(self, schedule, l2_hint):
        """See there."""
        if is_short(self.config, self.lines):
            self.run_short(schedule, l2_hint)
        else:
            Producer(self.config, self.a, self.b, self.sA, self.sB, self.ring).run(schedule, l2_hint)

    @cute.jit
    def run_short(self, schedule, l2_hint):
        """`run` where the only tile of rows lacks eight or more."""
        config, ring, few = self.config, self.ring, self.config.few
        sizes, count = sizes_of(config), count_of(self.lines)
        stage_bytes = (config.columns + count) * BLOCK
        rows_policy, weights_policy = Int64(EVICT_NORMAL), Int64(EVICT_NORMAL)
        if l2_hint == (2 if few else 1):
            rows_policy = Int64(EVICT_FIRST)
        if l2_hint == (1 if few else 2):
            weights_policy = Int64(EVICT_FIRST)
        weights, stages = (self.a, self.sA) if const_expr(few) else (self.b, self.sB)
        boxes = [self.box(index, count) for index in range(len(sizes))]
        state = ring.producer_start()
        unit = schedule.first()
        while schedule.has(unit):
            tile = schedule.tile(unit.index)
            first_k_tile = tile.split * schedule.params.k_tiles
            origin = schedule.origin(tile)
            column = origin.row if const_expr(few) else origin.column
            # ((ATOM_V, REST_V), STAGE) and ((ATOM_V, REST_V), RestK, L)
            target, source = self.partition(weights, stages, column, (config.columns, config.tile_k), 0, 1)
            for k_tile in cutlass.range(first_k_tile, first_k_tile + unit.k_tiles, unroll=1):
                ring.wait_empty(state)
                full = ring.full + state.stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, stage_bytes)
                cute.copy(
                    weights.atom, source[(None, k_tile, 0)], target[(None, state.stage)],
                    tma_bar_ptr=full, cache_policy=weights_policy,
                )  # fmt: skip
                for index in cutlass.range_constexpr(len(sizes)):
                    if count & sizes[index] != 0:
                        to, of_rows = boxes[index]
                        cute.copy(
                            self.boxes[index].atom, of_rows[(None, k_tile, 0)], to[(None, state.stage)],
                            tma_bar_ptr=full, cache_policy=rows_policy,
                        )  # fmt: skip
                state = ring.advance(state)
            unit = schedule.next(unit)

    @cute.jit
    def box(self, index: cutlass.Constexpr, count):
        """Where one of the boxes of so many lines goes to and comes from."""
        config, size = self.config, sizes_of(self.config)[index]
        first = count // (2 * size) * (2 * size)  # behind the larger ones
        source = cute.domain_offset((first, 0, 0), self.boxes[index].tensor)
        source = cute.local_tile(source, (size, config.tile_k), (0, None, None))  # (size, bK, RestK, L)
        apart = (BLOCK, 1, config.rows * BLOCK)
        stages = self.sB if const_expr(config.few) else self.sA
        target = cute.make_tensor(  # (size, bK, STAGE)
            stages.iterator + first * BLOCK,
            cute.make_layout((size, config.tile_k, config.stages), stride=apart),
        )
        return cpasync.tma_partition(
            self.boxes[index].atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2),
            cute.group_modes(source, 0, 2),
        )  # fmt: skip
