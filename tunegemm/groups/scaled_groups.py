"""`scaled_grouped_mm`: `grouped_mm` for fp8, with scales of rows and columns, or of blocks: 1x128 of a and
128x128 of b.

Torch does not support block scales. If no kernel can run, such a product is computed in fp32, group by group.
"""

from __future__ import annotations

from typing import Any

import torch

from tunegemm.dispatch import extension
from tunegemm.dispatch.forms import check_dtype
from tunegemm.dispatch.guards import (
    are_plain,
    check_devices,
    deterministic,
    has_gradient,
    has_values,
    rank,
)
from tunegemm.dispatch.library import in_fp32
from tunegemm.errors import ProblemError
from tunegemm.generate import block_groups
from tunegemm.generate.blocks import BLOCK
from tunegemm.groups import grouped
from tunegemm.model.block_groups import choose, invariant

_FP8 = torch.float8_e4m3fn
_family = extension.Family(block_groups.FAMILY, "groups with block scales", "they are computed in fp32")


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
        of_blocks = are_of_blocks(a, b, scale_a, scale_b)
    except TypeError:
        return torch._scaled_grouped_mm(a, b, scale_a, scale_b, **words)
    if of_blocks:
        if bias is not None or scale_result is not None:
            raise ProblemError(
                "products with block scales support neither bias nor scale_result; apply them afterwards"
            )
        return by_blocks(a, b, scale_a, scale_b, offs, out_dtype)
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


# ---- block scales ----------------------------------------------------------------------------------


def are_of_blocks(a: Any, b: Any, scale_a: Any, scale_b: Any) -> bool:
    """Whether scales are block scales: row-wise scales have one dimension less, and torch's other scales of
    two dimensions are not fp32. Raises TypeError for an operand that is not a tensor."""
    ranks = rank(scale_a), rank(scale_b)
    return (rank(a), rank(b)) == (2, 3) and (
        ranks[1] == 3 or (ranks[0] == 2 and scale_a.dtype is torch.float32)
    )


def by_blocks(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    offs: torch.Tensor | None, out_dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    """`scaled_grouped_mm` for scales of blocks. Raises ProblemError for operands that do not fit."""
    check_dtype(out_dtype)
    scale_a, scale_b = in_fp32(scale_a), in_fp32(scale_b)
    check(a, b, scale_a, scale_b, offs)
    assert offs is not None
    tensors = a, b, scale_a, scale_b, offs
    if torch.compiler.is_compiling() or a.is_meta or not are_plain(*tensors) or has_gradient(a, b):
        result: torch.Tensor = torch.ops.tunegemm.scaled_grouped_blocks(a, b, scale_a, scale_b, offs)
    else:
        result = _compute(a, b, scale_a, scale_b, offs)
    return result if out_dtype is None else result.to(out_dtype)


def check(a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any) -> None:
    """Raises ProblemError if operands do not fit, with the remedy."""
    (rows, k), (groups, b_k, n) = a.shape, b.shape
    if not (a.dtype == b.dtype == _FP8):
        raise ProblemError(f"a is {a.dtype}, b {b.dtype}; products with block scales need {_FP8}")
    if k != b_k:
        raise ProblemError(f"a has k {k} and b {b_k}; give a (rows, k) and b (groups, k, n)")
    if not groups:
        raise ProblemError(
            f"b has shape {tuple(b.shape)}, without groups; give weights for at least one group"
        )
    is_tensor = isinstance(offs, torch.Tensor)
    if not is_tensor or offs.dtype != torch.int32 or offs.shape != (groups,):
        wrong = "missing" if offs is None else f"{offs!r:.40}"
        if is_tensor:
            wrong = f"{tuple(offs.shape)} {offs.dtype}"
        raise ProblemError(f"offs is {wrong}; give the end of each of {groups} groups as int32")
    along, across = -(-k // BLOCK), -(-n // BLOCK)
    for name, scale, shape in (
        ("scale_a", scale_a, (rows, along)), ("scale_b", scale_b, (groups, along, across)),
    ):  # fmt: skip
        if scale.dtype != torch.float32:
            raise ProblemError(f"{name} is {scale.dtype}; give float32 scales: {name}.float()")
        if tuple(scale.shape) != shape:
            remedy = f"blocks of {BLOCK} have {shape}, rows and columns have {(rows,)} and {(groups, n)}"
            if tuple(scale.shape) == (*shape[:-2], shape[-1], shape[-2]):
                remedy = f"transpose it: {name}.mT"
            raise ProblemError(
                f"{name} is {tuple(scale.shape)} for {tuple(a.shape)} x {tuple(b.shape)}; {remedy}"
            )
    check_devices(a=a, b=b, scale_a=scale_a, scale_b=scale_b, offs=offs)
    if any(each.requires_grad for each in (scale_a, scale_b)) and torch.is_grad_enabled():
        raise ProblemError("block scales have no gradient; detach() scale_a and scale_b")


def _compute(a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any) -> torch.Tensor:
    if grouped.groups.are_checked():
        grouped.check_ends(offs, a.shape[0])
    if a.shape[0]:
        tensors = a, b, scale_a, scale_b, offs.contiguous()
        results = _family.launch((a.numel(), b.numel()), tensors, _allocate, _choose)
        if results is not None:
            return results[0]
    policy = extension.policy()
    if policy.is_batch_invariant and a.device.type == extension.device_type():
        extension.warn(
            f"groups with block scales of {tuple(a.shape)} and {tuple(b.shape)} are computed in fp32: "
            f"{policy} does not hold",
            about=("order of groups", "block scales", tuple(b.shape)),
        )
    return emulated(a, b, scale_a, scale_b, offs)


def _allocate(a: Any, b: Any, *_: Any) -> tuple[torch.Tensor]:
    return (a.new_empty((a.shape[0], b.shape[2]), dtype=torch.bfloat16),)


def _choose(a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any, out: Any) -> Any:
    """See `Family.launch`."""
    operands = a, b.mT, scale_a, scale_b.mT, offs, out
    if block_groups.refusal(*operands):
        return None
    config = invariant() if extension.policy().is_batch_invariant else choose(a.shape[0], b.shape[0])
    return config, lambda kernel: kernel.bound(*operands, blocks=extension.device_of(a.device).sm_count)


def emulated(a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any) -> torch.Tensor:
    """The product in fp32, rounded to bf16. It waits for the groups' ends, so no graph can be captured."""
    if not has_values(offs):
        raise ProblemError(
            "groups with block scales have no kernel yet for operands like these; call scaled_grouped_mm "
            "once before you capture a graph"
        )
    (rows, k), n = a.shape, b.shape[2]
    result = a.new_zeros((rows, n), dtype=torch.bfloat16)
    left = a.float() * scale_a.repeat_interleave(BLOCK, 1)[:, :k]
    start = 0
    for group, end in enumerate(offs.clamp(0, rows).tolist()):  # as kernels do
        if start < end:
            across = scale_b[group].repeat_interleave(BLOCK, 0)[:k].repeat_interleave(BLOCK, 1)[:, :n]
            with torch._C._DisableAutocast():  # else the product would be one of 16-bit operands
                product = left[start:end] @ (b[group].float() * across)
            result[start:end] = product.to(result.dtype)
        start = end
    return result


extension.define(
    "scaled_grouped_blocks(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs) -> Tensor",
    _compute,
    lambda a, b, scale_a, scale_b, offs: a.new_empty((a.shape[0], b.shape[2]), dtype=torch.bfloat16),
    (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
