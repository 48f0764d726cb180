"""`scaled_grouped_mm`: `grouped_mm` for fp8, with scales of rows and columns, or of blocks."""

from __future__ import annotations

from typing import Any

import torch

from tunegemm.dispatch import extension
from tunegemm.dispatch.guards import are_plain, check_devices, deterministic
from tunegemm.errors import ProblemError
from tunegemm.groups import block_groups, grouped


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Multiply groups of fp8 rows, as ``torch._scaled_grouped_mm`` does.

    For a (rows, k) and b (groups, k, n), k contiguous in both, row r of the result is ``(a[r].float() @
    b[g].float()) * scale_a[r] * scale_b[g]``, where g is the group of row r, as for `grouped_mm`. scale_a:
    fp32 (rows). scale_b: fp32 (groups, n).

    Block scales, which torch does not support, are fp32 at any strides: scale_a (rows, k / 128) for 1x128
    blocks of a, and scale_b (groups, k / 128, n / 128) for 128x128 blocks of b, rounded up. Each call
    converts float8_e8m0fnu scales. The result is bf16; another `out_dtype` is converted from bf16. Our
    kernels need n to be a multiple of 8, and lines along k at multiples of 16 bytes. For other operands and
    devices torch computes the product in fp32, and waits for `offs`. Raises ProblemError if operands do not
    fit.

    With row and column scales, our kernels serve float8_e4m3fn on Hopper with ``use_fast_accum=True`` and
    bf16 as `out_dtype`; they accumulate in the tensor cores. Torch computes everything else with your
    arguments. torch.compile traces torch's operator, which `enable` serves at run time. Raises torch's
    errors.
    """
    words: dict[str, Any] = {
        "offs": offs, "bias": bias, "scale_result": scale_result, "out_dtype": out_dtype,
        "use_fast_accum": use_fast_accum,
    }  # fmt: skip
    try:
        of_blocks = block_groups.are_of_blocks(a, b, scale_a, scale_b)
    except TypeError:
        return torch._scaled_grouped_mm(a, b, scale_a, scale_b, **words)
    if of_blocks:
        if bias is not None or scale_result is not None:
            raise ProblemError(
                "products with block scales support neither bias nor scale_result; apply them afterwards"
            )
        return block_groups.scaled_grouped_mm(a, b, scale_a, scale_b, offs, out_dtype)
    if not torch.compiler.is_compiling() and are_plain(a, b, scale_a, scale_b, offs):
        served = below_autograd(a, b, scale_a, scale_b, **words)
        if served is not None:
            return extension.undifferentiable("tunegemm.scaled_grouped_mm", served, a, b)
        # Torch reads memory that is not there, and its kernel ignores the stride of offs.
        check_devices(a=a, b=b, scale_a=scale_a, scale_b=scale_b, offs=offs)
        words["offs"] = None if offs is None else offs.contiguous()
    return torch._scaled_grouped_mm(a, b, scale_a, scale_b, **words)


def below_autograd(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: Any = None,
    scale_result: Any = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor | None:
    """Compute the product with a kernel; None if torch should compute it."""
    if (
        offs is None
        or bias is not None
        or scale_result is not None
        or out_dtype is not torch.bfloat16
        or not use_fast_accum
        or deterministic()
        or any(scale.requires_grad for scale in (scale_a, scale_b))
    ):
        return None
    return grouped.groups.below_autograd(a, b, offs, scale_b, scales=scale_a)


extension.take_over("_scaled_grouped_mm", below_autograd)
