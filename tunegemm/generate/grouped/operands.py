"""Checks the operands of kernels for groups of rows, both when a kernel is chosen and at every launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunegemm.generate.takes import TORCHS, UNIT_BYTES, Place, first_objection

if TYPE_CHECKING:
    import torch


def objection(
    a: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None,
    scales: torch.Tensor | None, *, dtype: str, gated: bool, n_major: bool, few: bool = False,
) -> str:  # fmt: skip
    """Why no kernel takes these operands of `GroupedKernel.launch`, apart from addresses; empty if one does.

    dtype: that of a and the weights, as in configs. few: whether the operands are for the kernel for few
    rows, which takes any number of columns, but only whole units of k.
    """
    if (a.ndim, weights.ndim, offsets.ndim) != (2, 3, 1):
        return f"a has {a.ndim} dimensions, weights {weights.ndim}, offsets {offsets.ndim}, not 2, 3 and 1"
    (rows, k), (groups, n, _) = a.shape, weights.shape
    scaled, name = dtype.startswith("fp8"), TORCHS[dtype]
    if scaled != (scales is not None) or (scaled and bias is None):
        return f"{dtype} operands {'need' if scaled else 'have no'} scales"
    if gated and n_major:
        return "gate and up take turns in TMA's lines, which have k contiguous"
    columns = 1 + gated if few else 16 if gated else 8
    if n % columns or (few and k * a.element_size() % 16):
        return f"n {n} is not a multiple of {columns}, or k {k} not of whole units of 16 B"
    places = [
        Place("a", a, name, (rows, k), (0, 1)),
        Place("weights", weights, name, (groups, n, k), (0, 2, 1) if n_major else (0, 1, 2)),
        Place("offsets", offsets, "int32", (groups,), (0,), apart=False),
    ]
    if scales is not None:
        places.append(Place("scales", scales, "float32", (rows,), (0,), apart=False))
    if bias is not None:
        of_bias = "float32" if scaled else name
        places.append(Place("bias", bias, of_bias, (groups, n), (0, 1), unit_bytes=1, apart=False))
    return first_objection(places, a.device, rows=rows, k=k, groups=groups, n=n)


def output_objection(out: torch.Tensor, a: torch.Tensor, n: int, dtype: str, *, packed: bool = False) -> str:
    """Why no kernel writes this output of n columns; empty if one does. packed: whether rows have no gaps.

    The output may end with the last group, before a's last row, because kernels write only rows of groups.
    """
    if out.ndim != 2 or out.shape[0] > a.shape[0]:
        return f"out is {tuple(out.shape)} for {a.shape[0]} rows"
    place = Place("out", out, TORCHS[dtype], (out.shape[0], n), (0, 1), 1 if packed else UNIT_BYTES)
    if not (wrong := place.objection(a.device)) and packed and not out.is_contiguous():
        return f"out of strides {out.stride()} has gaps between its rows"
    return wrong
