"""A Triton product whose bits do not depend on the batch: one tile for every M, k in one piece.

The method is that of the package batch_invariant_ops (Thinking Machines), and so are the tiles for bf16 and
fp16: a persistent kernel of 8 warps with 3 stages, whose operands come by pointers. The package does not
support fp8; the fp8 tiles here have as many bytes along k. The kernel applies a bias and scales of rows and
columns to the sums; torch's operations apply all other steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import triton
import triton.language as tl

from tunegemm.describe.problem import Problem
from tunegemm.generate.cublaslt.eager import step_of
from tunegemm.measure.operands import torch_dtype

#: Tile m, n and k.
TILES = {"bf16": (128, 128, 64), "fp16": (128, 256, 64), "fp8_e4m3": (128, 128, 128)}
GROUP, STAGES, WARPS = 8, 3, 8
#: Steps of an epilogue that the kernel applies.
INSIDE = ("bias_n", "scale_rowwise")


@triton.jit
def _origin(tile, tiles_m, tiles_n, group: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column of a tile, in tiles: groups of so many rows of tiles, column by column."""
    of_group = group * tiles_n
    top = tile // of_group * group
    height = tl.minimum(tiles_m - top, group)
    return top + tile % of_group % height, tile % of_group // height


@triton.jit(do_not_specialize=["m"])
def kernel(  # type: ignore[no-untyped-def]
    a, b, out, first, second, m, n, k, line_a, line_b, line_out, step: tl.constexpr, tile_m: tl.constexpr,
    tile_n: tl.constexpr, tile_k: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """a: rows of k; b: columns of k; out: rows of n; first, second: operands of the step, or anything."""
    tiles_m, tiles_n = tl.cdiv(m, tile_m), tl.cdiv(n, tile_n)
    along = tl.arange(0, tile_k)
    # Stores count their tiles by themselves: else loads of the next tile wait for them.
    stored = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        row, column = _origin(tile, tiles_m, tiles_n, group)
        rows = row * tile_m + tl.arange(0, tile_m)
        columns = column * tile_n + tl.arange(0, tile_n)
        rows = tl.where(rows < m, rows, 0)
        columns = tl.where(columns < n, columns, 0)
        sums = tl.zeros((tile_m, tile_n), dtype=tl.float32)
        for part in range(tl.cdiv(k, tile_k)):
            at = part * tile_k + along
            inside = along < k - part * tile_k
            x = tl.load(a + rows[:, None] * line_a + at[None, :], mask=inside[None, :], other=0.0)
            w = tl.load(b + columns[None, :] * line_b + at[:, None], mask=inside[:, None], other=0.0)
            sums = tl.dot(x, w, sums)
        stored += tl.num_programs(0)
        row, column = _origin(stored, tiles_m, tiles_n, group)
        rows = row * tile_m + tl.arange(0, tile_m)
        columns = column * tile_n + tl.arange(0, tile_n)
        if step == "bias_n":
            sums += tl.load(first + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
        if step == "scale_rowwise":
            sums *= tl.load(first + rows, mask=rows < m, other=0.0)[:, None]
            sums *= tl.load(second + columns, mask=columns < n, other=0.0)[None, :]
        there = (rows < m)[:, None] & (columns < n)[None, :]
        tl.store(out + rows[:, None] * line_out + columns[None, :], sums.to(out.dtype.element_ty), mask=there)


def of(problem: Problem) -> Callable[..., torch.Tensor]:
    """The call of (a, b, *operands) for such problems of layout tn, at any M."""
    steps = list(problem.fused.steps)
    inside = steps.pop(0) if steps and steps[0] in INSIDE else ""
    names = [operand.name for operand in problem.fused.operands]
    dtype = torch_dtype(problem.out_dtype)
    rest = [step_of(name, dtype) for name in steps]
    tile_m, tile_n, tile_k = TILES[problem.in_dtype]

    def call(a: torch.Tensor, b: torch.Tensor, *operands: Any) -> torch.Tensor:
        (m, k), n = a.shape, b.shape[1]
        out = torch.empty((m, n), dtype=dtype, device=a.device)
        first, second = (*operands, a, a)[:2]
        tiles = triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n)
        # Offsets are of 32 bits.
        assert max(a.numel(), b.numel(), out.numel()) < 2**31 and a.stride(1) == b.stride(0) == 1
        kernel[(min(multiprocessors(a), tiles),)](
            a, b, out, first, second, m, n, k, a.stride(0), b.stride(1), n, inside, tile_m, tile_n, tile_k,
            GROUP, num_stages=STAGES, num_warps=WARPS,
        )  # fmt: skip
        values = dict(zip(names, operands, strict=True))
        return reduce(lambda value, step: step(value, values, None), rest, out)

    return call


def multiprocessors(tensor: torch.Tensor) -> int:
    """Of the tensor's device."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
