"""Small kernels in both languages of Triton, for the tests of their objects."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def copy_tile(source, target, scale, steps, extra, rows: tl.constexpr, columns: tl.constexpr):
    """target = scale * source, tile by tile; a row of `extra` is added."""
    for step in range(steps):
        tile = source.load([0, tl.program_id(0) * rows, step * columns]).reshape(rows, columns)
        tile = tile * scale + tl.load(extra + step)
        target.store(
            [0, tl.program_id(0) * rows, step * columns], tile.to(target.dtype).reshape(1, rows, columns)
        )


@gluon.jit
def scale_row(source, target, count, block: gl.constexpr, layout: gl.constexpr):
    """target = 2 * source."""
    place = gl.program_id(0) * block + gl.arange(0, block, layout)
    gl.store(target + place, 2 * gl.load(source + place, mask=place < count), mask=place < count)
