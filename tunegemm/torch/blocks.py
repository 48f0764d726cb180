"""Multiplies fp8 with block scales, 1x128 of A and 128x128 of B, for `scaled_mm` and torch's operators; and
with those of 1x32, or 1x32 of A and 32x32 of B, which torch refuses on a Hopper GPU.

The kernels are listed in db/blocks.toml and need no record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tunegemm.dispatch import extension
from tunegemm.dispatch.forms import check_dtype
from tunegemm.dispatch.guards import are_plain, are_torchs, check_devices, functorch_level, has_gradient
from tunegemm.dispatch.launchers import is_apart_from
from tunegemm.dispatch.library import block_scales, has_scales, in_fp32, takes_fp8
from tunegemm.errors import ProblemError
from tunegemm.generate import blocks
from tunegemm.generate.blocks import BLOCK, NARROW
from tunegemm.model.blocks import choose

_FP8, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_OUT_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
#: Scales in 16 bytes, torch's requirement.
_TORCHS_UNIT = 4


def blocks_of(extent: int, block: int = BLOCK) -> int:
    """The number of blocks that cover an extent; the last may be partial."""
    return -(-extent // block)


def scale_k_of(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> int:
    """How many values of k share a scale: 128 of blocks of 1x128 of a (M, K) and of 128x128 of b (K, N); 32
    of blocks of 1x32 of a, and of 1x32 (of a column) or 32x32 of b; else 0.

    Torch pads scale_b of 128x128 to a multiple of 4 rows; the padding is never read.
    """
    if not a.ndim == b.ndim == scale_b.ndim == 2:
        return 0
    (rows, k), n, (lines, across) = a.shape, b.shape[1], scale_b.shape
    # Comparisons not by `in`, by which Dynamo (torch 2.13) does not find a constant among symbolic extents.
    wide = blocks_of(k)
    if scale_a.shape == (rows, wide) and across == blocks_of(n) and (lines == wide or lines == padded(wide)):
        return BLOCK
    narrow = blocks_of(k, NARROW)
    fits = scale_a.shape == (rows, narrow) and lines == narrow
    return NARROW if fits and (across == n or across == blocks_of(n, NARROW)) else 0


def padded(lines: int) -> int:
    """The number of rows to which torch pads scales of 128x128."""
    return blocks_of(lines, _TORCHS_UNIT) * _TORCHS_UNIT


def are_of_one_block(text: str, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None) -> bool:
    """Whether scales of rows and columns, the epilogue `text`, are taken for those of one block of up to 32
    of k: they mean the same, and torch on a GPU refuses this product with scales of rows."""
    return (
        text.startswith("scale_rowwise")
        and a.is_cuda
        and a.dtype == b.dtype == _FP8
        and a.shape[1] == b.shape[0] <= NARROW
        and not (takes_fp8(a, b) and has_scales(text, a, out_dtype))
    )


def torch_takes(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> bool:
    """Whether torch on a Hopper GPU multiplies operands for which `scale_k_of` is 128. Both scales must be
    column-major, with columns that start at multiples of 16 bytes, and the number of rows must be a multiple
    of 4 (cuBLASLt 13.1).
    """
    rows, along = a.shape[0], blocks_of(a.shape[1])
    return (
        takes_fp8(a, b)
        and rows % _TORCHS_UNIT == 0
        and scale_a.stride() == (1, rows)
        and scale_b.stride() == (1, padded(along))
    )


def check_scales(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> int:
    """Returns `scale_k_of` fp8 matrices, 0 of others. Raises ProblemError if their fp32 scales fit no
    product, here or in torch.
    """
    if not (a.ndim == b.ndim == scale_a.ndim == scale_b.ndim == 2 and a.dtype == b.dtype == _FP8):
        return 0
    (rows, k), n = a.shape, b.shape[1]
    along = blocks_of(k)
    if scale_k := scale_k_of(a, b, scale_a, scale_b):
        for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
            if scale.dtype != torch.float32 and not (scale_k == NARROW and scale.dtype == _E8M0):
                raise ProblemError(f"{name} is {scale.dtype}; give float32 block scales: {name}.float()")
        return scale_k
    if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32 or b.shape[0] != k:
        return 0
    if scale_b.shape == (along, n) and scale_a.shape in ((rows, along), (blocks_of(rows), along)):
        return 0  # torch's: B by 1x128
    block, shapes = BLOCK, {"scale_a": (rows, along), "scale_b": (along, blocks_of(n))}
    narrow = blocks_of(k, NARROW)
    if narrow != along and narrow in (scale_a.shape[1], scale_b.shape[0]):
        across = blocks_of(n, NARROW)
        across = across if across in scale_b.shape else n
        block, shapes = NARROW, {"scale_a": (rows, narrow), "scale_b": (narrow, across)}
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        shape = shapes[name]
        if tuple(scale.shape) == shape:
            continue
        remedy = "transpose it" if tuple(scale.shape) == shape[::-1] else f"blocks of {block} have {shape}"
        rows_and_columns = f"rows and columns have {(rows, 1)} and {(1, n)}"
        raise ProblemError(
            f"{name} is {tuple(scale.shape)} for ({rows}, {k}) x ({k}, {n}); {remedy}, {rows_and_columns}"
        )
    return 0


def check_beside(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any) -> None:
    """Raises ProblemError if a bias is not one value for each column, or tensors are on several devices."""
    columns = b.shape[1]
    if bias is not None and (not isinstance(bias, torch.Tensor) or bias.numel() != columns):
        shown = tuple(bias.shape) if isinstance(bias, torch.Tensor) else f"{bias!r:.40}"
        raise ProblemError(f"bias is {shown}; give a tensor of one value for each column, ({columns},)")
    check_devices(a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
) -> torch.Tensor:
    """`tunegemm.scaled_mm` for scales other than those of whole operands or of rows and columns."""
    arguments = a, b, scale_a, scale_b
    if a.dtype == torch.int8:
        raise ProblemError(
            f"scale_a is {tuple(scale_a.shape)} {scale_a.dtype}, scale_b {tuple(scale_b.shape)} "
            f"{scale_b.dtype} for {tuple(a.shape)} x {tuple(b.shape)} of int8; give (m, k), (k, n) and "
            "float32 scales of one element, or (m, 1) and (1, n)"
        )
    is_traced = torch.compiler.is_compiling() or isinstance(a, FakeTensor)
    if not any(each is None for each in arguments) and are_torchs(*arguments):
        if _E8M0 in (scale_a.dtype, scale_b.dtype) and scale_k_of(*arguments) == BLOCK:
            arguments = a, b, in_fp32(scale_a), in_fp32(scale_b)
        if scale_k := check_scales(*arguments):
            check_dtype(out_dtype)
            by_kernel = bias is None and not is_traced
            result = product(*arguments, out_dtype, scale_k=scale_k) if by_kernel else None
            if result is not None:
                return extension.undifferentiable("tunegemm.scaled_mm", result, a, b)
            check_beside(*arguments, bias)
            if a.device.type == "cpu" or scale_k == NARROW or not torch_takes(*arguments):
                # Inductor (torch 2.13) would make C++ of `emulated` that leaves out partial blocks.
                by: Callable[..., torch.Tensor] = torch.ops.tunegemm.scaled_blocks if is_traced else emulated
                return by(*arguments, bias, out_dtype)
    return torch._scaled_mm(*arguments, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum)


def emulated(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None, out_dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    """The product in fp32 where torch does not support it: on a CPU, and without a kernel for operands that
    torch rejects. On a GPU it is of bf16 operands if both scales are E8M0: exact within bf16's range.
    """
    scale_k, n = scale_k_of(a, b, scale_a, scale_b), b.shape[1]
    out_dtype = a.dtype if out_dtype is None else out_dtype
    is_exact = a.is_cuda and scale_a.dtype == scale_b.dtype == _E8M0
    dtype = torch.bfloat16 if is_exact else torch.float32
    if scale_b.shape[1] != n:
        scale_b = scale_b.to(dtype).repeat_interleave(scale_k, 1)[:, :n]
    left = _scaled(a, scale_a, scale_k, dtype)
    right = _scaled(b.t(), scale_b.t(), scale_k, dtype).t()
    with torch._C._DisableAutocast():  # else the product would be one of 16-bit operands
        if is_exact and (out_dtype != dtype or bias is not None):
            result = torch.mm(left, right, out_dtype=torch.float32)
        else:
            result = left @ right
    if bias is not None:
        result = result + bias.flatten().float()
    return result.to(out_dtype)


def _scaled(values: torch.Tensor, scale: torch.Tensor, scale_k: int, dtype: torch.dtype) -> torch.Tensor:
    """fp8 (lines, K) times scales (lines, K / scale_k)."""
    k, scale = values.shape[1], scale.to(dtype)
    if k % scale_k or functorch_level() is not None:  # vmap may have several scales for the same values
        return values.to(dtype) * scale.repeat_interleave(scale_k, 1)[:, :k]
    return values.to(dtype).unflatten(1, (-1, scale_k)).mul_(scale[:, : k // scale_k, None]).flatten(1)


def _compute(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None, out_dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    given = a, b, scale_a, scale_b
    result = product(*given, out_dtype, scale_k=scale_k_of(*given)) if bias is None else None
    return emulated(*given, bias, out_dtype) if result is None else result


extension.define(
    "scaled_blocks(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType? out_dtype) "
    "-> Tensor",
    _compute,
    lambda a, b, scale_a, scale_b, bias, out_dtype: a.new_empty(
        (a.shape[0], b.shape[1]), dtype=a.dtype if out_dtype is None else out_dtype
    ),
    (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def below_autograd(name: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> torch.Tensor | None:
    """Compute an ATen operator's call by a kernel; None if torch must compute it."""
    value = block_scales(name, arguments)
    if value is None:
        return None
    a, b, scale_a, scale_b, out_dtype, is_narrow = value
    out = keywords.get("out")
    if not is_narrow:
        return product(*value[:5], out) if scale_k_of(*value[:4]) == BLOCK else None
    if not a.ndim == b.ndim == scale_a.ndim == scale_b.ndim == 2 or a.shape[1] != b.shape[0]:
        return None
    if not a.dtype == b.dtype == _FP8 or not {scale_a.dtype, scale_b.dtype} <= {torch.float32, _E8M0}:
        return None
    # Torch says no shape for scales of 1x32 that are not swizzled: b's may lie as b does, or as its columns.
    columns, along = b.shape[1], scale_a.shape[1]
    given = a, b, scale_a, scale_b.t() if scale_b.shape == (columns, along) else scale_b
    if columns == along or given[3].shape != (along, columns) or scale_k_of(*given) != NARROW:
        return None
    result = product(*given, out_dtype, out, scale_k=NARROW)
    return emulated(*given, None, out_dtype) if result is None and out is None else result


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None = None,
    *,
    scale_k: int = BLOCK,
) -> torch.Tensor | None:
    """Compute the product by a kernel; None if torch must compute it. scale_k: what `scale_k_of` gives."""
    if (
        a.dtype is not _FP8
        or b.dtype is not _FP8
        or (out_dtype if out is None else out.dtype) not in _OUT_DTYPES
        or not are_plain(a, b, scale_a, scale_b, out)
        or has_gradient(scale_a, scale_b)
    ):
        return None
    # Else torch refuses the dtype, or reads operands before it writes.
    if out is not None and not (
        out_dtype in (None, out.dtype) and is_apart_from(out, (a, b, scale_a, scale_b))
    ):
        return None
    if scale_k == NARROW:
        scale_a, scale_b = _readable(scale_a), _readable(scale_b.t()).t()
    elif scale_b.shape[0] != (along := blocks_of(a.shape[1])):
        scale_b = scale_b[:along]
    given = (a, b, scale_a, scale_b, *(() if out is None else (out,)))
    key = out_dtype, a.numel(), b.numel(), len(given)
    allocate = _allocate if out is None else lambda *_: ()
    results = _family.launch(key, given, allocate, _choose, out_dtype)
    return None if results is None else (*given, *results)[-1]


def _readable(scale: torch.Tensor) -> torch.Tensor:
    """Scales (lines, K / 32) as kernels read them: E8M0 of lines that begin at units of 4 bytes, or fp32."""
    if scale.dtype is _E8M0 and (scale.stride(1) != 1 or (scale.stride(0) | scale.data_ptr()) % 4):
        return scale.float()
    return scale


_family = extension.Family(blocks.FAMILY, "block-scaled products", "torch computes them")


def _allocate(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any) -> tuple[torch.Tensor]:
    rows, columns = a.shape[0], b.shape[1]
    return (extension.allocation()((rows, columns), (columns, 1), out_dtype),)


def _choose(a: Any, b: Any, scale_a: Any, scale_b: Any, out: Any, _: Any) -> Any:
    """See `Family.launch`."""
    policy, weight, scales = extension.policy(), b.t(), (scale_a, scale_b.t())
    scale_k = scale_k_of(a, b, scale_a, scale_b)
    if policy.is_batch_invariant or blocks.refusal(a, weight, *scales, out, scale_k):
        return None
    choice = choose(
        a.shape[0], b.shape[1], a.shape[1],
        out_dtype=_OUT_DTYPES[out.dtype], scale_k=scale_k, gpu=extension.gpu_of(a.device),
        may_split=policy.prefer != "no_workspace",
        or_torch=scale_k == BLOCK and out.dtype is torch.bfloat16 and torch_takes(a, b, scale_a, scale_b),
    )  # fmt: skip
    if choice is None:
        return None
    return choice.config, lambda kernel: kernel.bound(
        a, weight, *scales, out, device=extension.device_of(a.device), **choice.words
    )
