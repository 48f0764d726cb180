"""Tile rasterization of the CuTe families: which tile of an output follows which.

Tiles follow each other along the raster order's mode in groups `swizzle_size` tiles wide; the last group may
be narrower, so that every index is a tile. A group is traversed line by line or, for clusters of one GPC,
block by block: tiles that follow each other then make a rectangle, so many across the group and so many along
it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr


class Raster(NamedTuple):
    """The order of the tiles of one output."""

    length: Int32
    """Tiles along the raster order's mode."""
    width: Int32
    """Tiles along the other."""
    along_m: Int32
    """1 where the raster order's mode is m, else 0."""
    swizzle_size: Int32
    """Tiles across a group."""


class Block(NamedTuple):
    """Tiles that follow each other for the clusters of one GPC."""

    across: Int32
    along: Int32


@cute.jit
def raster_of(tiles_m, tiles_n, along_m, swizzle_size):
    """The order of the tiles of an output that has so many."""
    length = tiles_n
    width = tiles_m
    if along_m != 0:
        length = tiles_m
        width = tiles_n
    return Raster(length, width, along_m, swizzle_size)


@cute.jit
def tile_at(index, raster, block=None):
    """(tile along m, tile along n) for the index of one of the output's tiles."""
    length, width, along_m, swizzle_size = raster
    group = Int32(Uint32(index) // Uint32(length * swizzle_size))
    rest = index - group * length * swizzle_size
    first = group * swizzle_size
    columns = width - first
    if columns > swizzle_size:
        columns = swizzle_size
    step = Int32(0)
    if const_expr(block is not None):
        lines = Int32(Uint32(rest) // Uint32(columns * block.along)) * block.along
        rest -= lines * columns
        deep = cutlass.min(block.along, length - lines)
        before = Int32(Uint32(rest) // Uint32(block.across * deep)) * block.across
        rest -= before * deep
        first += before
        columns = cutlass.min(block.across, columns - before)
        step = lines
    line = Int32(Uint32(rest) // Uint32(columns))
    across = first + rest - line * columns
    step += line
    tile_m = across
    tile_n = step
    if along_m != 0:
        tile_m = step
        tile_n = across
    return tile_m, tile_n
