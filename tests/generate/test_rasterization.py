"""Every family goes through the tiles of an output in the same order, which visits each tile once.

The languages of the kernels differ, and each has the formula of its own; the CuTe families share theirs. Here
their sources run as Python on integers, where `//` of what is not negative is the same.
"""

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tunegemm.generate import kernel_rasterization
from tunegemm.generate.gluon_wgmma import kernel as gluon
from tunegemm.generate.triton_tma import kernel as triton

SHAPES = [(1, 1), (1, 7), (7, 1), (3, 5), (8, 8), (16, 9), (9, 16)]
LANGUAGE = types.SimpleNamespace(
    minimum=min, min=min, where=lambda condition, one, other: one if condition else other
)
Tile = tuple[int, int]


def source_of(function: Any) -> types.FunctionType:
    source: types.FunctionType = getattr(function, "__wrapped__", None) or function.fn
    return source


#: As they are written, before any test compiles them: the DSL then puts its own code in the place of theirs.
WRITTEN = {
    function: source_of(function).__code__
    for function in (
        kernel_rasterization.raster_of, kernel_rasterization.tile_at, triton.tile_of, gluon.tile_of,
    )
}  # fmt: skip


def as_python(function: Any) -> Callable[..., Any]:
    """The function as it is written, of plain integers."""
    names = {"tl": LANGUAGE, "gl": LANGUAGE, "cutlass": LANGUAGE, "Int32": int, "Uint32": int}
    known = vars(kernel_rasterization) | names | {"const_expr": bool}
    return types.FunctionType(WRITTEN[function], known, argdefs=source_of(function).__defaults__)


def expected(tiles_m: int, tiles_n: int, along_m: int, swizzle_size: int) -> Iterator[Tile]:
    length, width = (tiles_m, tiles_n) if along_m else (tiles_n, tiles_m)
    for first in range(0, width, swizzle_size):
        for step in range(length):
            for across in range(first, min(first + swizzle_size, width)):
                yield (step, across) if along_m else (across, step)


def of_cute(count: int, *launch: int, block: Tile | None = None) -> list[Tile]:
    raster = as_python(kernel_rasterization.raster_of)(*launch)
    chosen = None if block is None else kernel_rasterization.Block(*block)
    return [as_python(kernel_rasterization.tile_at)(index, raster, chosen) for index in range(count)]


@pytest.mark.parametrize("swizzle_size", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("along_m", [0, 1])
@pytest.mark.parametrize(("tiles_m", "tiles_n"), SHAPES)
def test_all_families_agree(tiles_m: int, tiles_n: int, along_m: int, swizzle_size: int) -> None:
    launch, count = (tiles_m, tiles_n, along_m, swizzle_size), tiles_m * tiles_n
    order = list(expected(*launch))
    assert of_cute(count, *launch) == order
    assert [as_python(triton.tile_of)(index, *launch) for index in range(count)] == order
    of_gluon = as_python(gluon.tile_of)
    given = (1, tiles_m, tiles_n, 2, along_m, swizzle_size)
    tiles = [(*order[index % count], index // count) for index in range(2 * count)]
    assert [of_gluon(index, given) for index in range(2 * count)] == tiles


@pytest.mark.parametrize("block", [(1, 1), (8, 1), (2, 2), (3, 4), (1, 16)])
@pytest.mark.parametrize("along_m", [0, 1])
@pytest.mark.parametrize(("tiles_m", "tiles_n"), SHAPES)
def test_blocks_are_rectangles_and_visit_each_tile_once(
    tiles_m: int, tiles_n: int, along_m: int, block: Tile
) -> None:
    swizzle_size, count = 8, tiles_m * tiles_n
    tiles = of_cute(count, tiles_m, tiles_n, along_m, swizzle_size, block=block)
    assert sorted(tiles) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]
    # The first block, as far as it fits.
    length, width = (tiles_m, tiles_n) if along_m else (tiles_n, tiles_m)
    across, along = min(block[0], swizzle_size, width), min(block[1], length)
    steps = {(m, n) if along_m else (n, m) for m, n in tiles[: across * along]}
    assert steps == {(step, column) for step in range(along) for column in range(across)}
