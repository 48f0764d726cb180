"""Multiplies fp8 with block scales, 1x128 of A and 128x128 of B, for `scaled_mm` and torch's operators.

The kernels are listed in db/blocks.toml and need no record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tunegemm.dispatch import extension
from tunegemm.dispatch.autograd import PLAIN
from tunegemm.dispatch.forms import check_dtype
from tunegemm.dispatch.launchers import is_apart_from
from tunegemm.dispatch.library import block_scales, in_fp32, takes_fp8
from tunegemm.errors import ProblemError
from tunegemm.generate import blocks
from tunegemm.generate.blocks import BLOCK
from tunegemm.groups.grouped import are_plain, check_devices, has_gradient
from tunegemm.model.blocks import choose

_FP8 = torch.float8_e4m3fn
_OUT_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
#: Scales in 16 bytes, torch's requirement.
_TORCHS_UNIT = 4


def blocks_of(extent: int) -> int:
    """The number of blocks that cover an extent; the last may be partial."""
    return -(-extent // BLOCK)


def are_of_blocks(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> bool:
    """Whether the scales cover blocks of 1x128 of a (M, K) and of 128x128 of b (K, N). Torch pads the second
    to a multiple of 4 rows; the padding is never read."""
    if not a.ndim == b.ndim == 2:
        return False
    (rows, k), n = a.shape, b.shape[1]
    along = blocks_of(k)
    return (
        scale_a.shape == (rows, along)
        and scale_b.ndim == 2
        and scale_b.shape[1] == blocks_of(n)
        # Not `in`, by which Dynamo (torch 2.13) does not find a constant among symbolic extents.
        and (scale_b.shape[0] == along or scale_b.shape[0] == -(-along // _TORCHS_UNIT) * _TORCHS_UNIT)
    )


def torch_takes(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> bool:
    """Whether torch on a Hopper GPU multiplies operands for which `are_of_blocks` holds. Both scales must be
    column-major, with columns that start at multiples of 16 bytes, and the number of rows must be a multiple
    of 4 (cuBLASLt 13.1).
    """
    rows, along = a.shape[0], blocks_of(a.shape[1])
    return (
        takes_fp8(a, b)
        and rows % _TORCHS_UNIT == 0
        and scale_a.stride() == (1, rows)
        and scale_b.stride() == (1, -(-along // _TORCHS_UNIT) * _TORCHS_UNIT)
    )


def check_scales(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> None:
    """Raises ProblemError if the fp32 scales of fp8 matrices fit no product, here or in torch."""
    if not (a.ndim == b.ndim == scale_a.ndim == scale_b.ndim == 2 and a.dtype == b.dtype == _FP8):
        return
    (rows, k), n = a.shape, b.shape[1]
    along = blocks_of(k)
    if are_of_blocks(a, b, scale_a, scale_b):
        for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
            if scale.dtype != torch.float32:
                raise ProblemError(f"{name} is {scale.dtype}; give float32 block scales: {name}.float()")
        return
    if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32 or b.shape[0] != k:
        return
    if scale_b.shape == (along, n) and scale_a.shape in ((rows, along), (blocks_of(rows), along)):
        return  # torch's: B by 1x128
    wanted = {"scale_a": (rows, along), "scale_b": (along, blocks_of(n))}
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        shape = wanted[name]
        if tuple(scale.shape) == shape:
            continue
        remedy = "transpose it" if tuple(scale.shape) == shape[::-1] else f"blocks of {BLOCK} have {shape}"
        rows_and_columns = f"rows and columns have {(rows, 1)} and {(1, n)}"
        raise ProblemError(
            f"{name} is {tuple(scale.shape)} for ({rows}, {k}) x ({k}, {n}); {remedy}, {rows_and_columns}"
        )


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
            f"scale_a is {tuple(scale_a.shape)}, scale_b {tuple(scale_b.shape)} for {tuple(a.shape)} x "
            f"{tuple(b.shape)} of int8; give (m, k), (k, n) and scales of one element, or (m, 1) and (1, n)"
        )
    is_traced = torch.compiler.is_compiling() or isinstance(a, FakeTensor)
    if torch.compiler.is_exporting() or all(
        type(each) in PLAIN or isinstance(each, FakeTensor) for each in arguments
    ):
        if torch.float8_e8m0fnu in (scale_a.dtype, scale_b.dtype) and are_of_blocks(*arguments):
            arguments = a, b, in_fp32(scale_a), in_fp32(scale_b)
        check_scales(*arguments)
        if a.dtype == b.dtype == _FP8 and are_of_blocks(*arguments):
            check_dtype(out_dtype)
            result = product(*arguments, out_dtype) if bias is None and not is_traced else None
            if result is not None:
                served: torch.Tensor = extension.undifferentiable("tunegemm.scaled_mm", result, a, b)
                return served
            check_beside(*arguments, bias)
            if a.device.type == "cpu" or not torch_takes(*arguments):
                # Inductor (torch 2.13) would make C++ of `emulated` that leaves out partial blocks.
                by: Callable[..., torch.Tensor] = torch.ops.tunegemm.scaled_blocks if is_traced else emulated
                return by(*arguments, bias, out_dtype)
    return torch._scaled_mm(*arguments, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum)


def emulated(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None, out_dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    """The product in fp32 where torch does not support it: on a CPU, and without a kernel for operands that
    torch rejects."""
    (_, k), n = a.shape, b.shape[1]
    left = a.float() * scale_a.repeat_interleave(BLOCK, 1)[:, :k]
    across = scale_b.repeat_interleave(BLOCK, 0)[:k].repeat_interleave(BLOCK, 1)[:, :n]
    with torch._C._DisableAutocast():  # else the product would be one of 16-bit operands
        result = left @ (b.float() * across)
    if bias is not None:
        result = result + bias.flatten().float()
    return result.to(a.dtype if out_dtype is None else out_dtype)


def _compute(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None, out_dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    result = product(a, b, scale_a, scale_b, out_dtype) if bias is None else None
    return emulated(a, b, scale_a, scale_b, bias, out_dtype) if result is None else result


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
    if value is None or not are_of_blocks(*value[:4]):
        return None
    return product(*value, keywords.get("out"))


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Compute the product by a kernel; None if torch must compute it. `are_of_blocks` must hold."""
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
    along = blocks_of(a.shape[1])
    if scale_b.shape[0] != along:
        scale_b = scale_b[:along]
    given = (a, b, scale_a, scale_b, *(() if out is None else (out,)))
    key = out_dtype, a.numel(), b.numel(), len(given)
    allocate = _allocate if out is None else lambda *_: ()
    results = _family.launch(key, given, allocate, _choose, out_dtype)
    return None if results is None else (*given, *results)[-1]


_family = extension.Family(blocks.FAMILY, "block-scaled products", "torch computes them")


def _allocate(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any) -> tuple[torch.Tensor]:
    rows, columns = a.shape[0], b.shape[1]
    return (extension.allocation()((rows, columns), (columns, 1), out_dtype),)


def _choose(a: Any, b: Any, scale_a: Any, scale_b: Any, out: Any, _: Any) -> Any:
    """See `Family.launch`."""
    policy, weight, scales = extension.policy(), b.t(), (scale_a, scale_b.t())
    if policy.is_batch_invariant or blocks.refusal(a, weight, *scales, out):
        return None
    choice = choose(
        a.shape[0], b.shape[1], a.shape[1],
        out_dtype=_OUT_DTYPES[out.dtype], gpu=extension.gpu_of(a.device),
        may_split=policy.prefer != "no_workspace",
        or_torch=out.dtype is torch.bfloat16 and torch_takes(a, b, scale_a, scale_b),
    )  # fmt: skip
    if choice is None:
        return None
    return choice.config, lambda kernel: kernel.bound(
        a, weight, *scales, out, device=extension.device_of(a.device), **choice.words
    )
