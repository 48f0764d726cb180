"""Multiplies groups of fp8 rows with block scales, 1x128 of a and 128x128 of b, for `scaled_grouped_mm`.

Torch does not support such products. If no kernel can run, the product is computed in fp32, group by group.
"""

from __future__ import annotations

from typing import Any

import torch

from tunegemm.dispatch import extension
from tunegemm.dispatch.forms import check_dtype
from tunegemm.dispatch.guards import are_plain, check_devices, has_gradient, has_values, rank
from tunegemm.dispatch.library import in_fp32
from tunegemm.errors import ProblemError
from tunegemm.generate import block_groups
from tunegemm.generate.blocks import BLOCK
from tunegemm.groups import grouped
from tunegemm.groups.grouped import check_ends
from tunegemm.model.block_groups import choose, invariant

_FP8 = torch.float8_e4m3fn
_family = extension.Family(block_groups.FAMILY, "groups with block scales", "they are computed in fp32")


def are_of_blocks(a: Any, b: Any, scale_a: Any, scale_b: Any) -> bool:
    """Whether scales are block scales: row-wise scales have one dimension less, and torch's other scales of
    two dimensions are not fp32. Raises TypeError for an operand that is not a tensor."""
    ranks = rank(scale_a), rank(scale_b)
    return (rank(a), rank(b)) == (2, 3) and (
        ranks[1] == 3 or (ranks[0] == 2 and scale_a.dtype is torch.float32)
    )


def scaled_grouped_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    offs: torch.Tensor | None, out_dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    """`tunegemm.scaled_grouped_mm` for scales of blocks. Raises ProblemError for operands that do not fit."""
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
        check_ends(offs, a.shape[0])
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
