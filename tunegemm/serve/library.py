"""The products that torch's library has, as epilogues: one table for what serves, counts or replaces them.

`OPERATORS` names ATen's operators of products and what each computes along with the product. `absorbed` says
which steps of an epilogue one of these calls takes, `addmm_steps` and `scale_steps` which epilogue a call is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunegemm.serve.torch.autograd import PLAIN
from tunegemm.serve.torch.fx import num_elements, rank

_ADDS = (("alpha",), ("bias_n",), ("alpha", "bias_n"), ("beta_c",), ("alpha", "beta_c"))
_SCALES = (
    ("scale_tensor",), ("scale_rowwise",), ("scale_tensor", "bias_n"), ("scale_rowwise", "bias_n"),
)  # fmt: skip


#: Rows and columns of B that torch's fp8 product takes come in multiples of so many.
_FP8_UNIT = 16


@dataclass(frozen=True)
class Operator:
    """An operator of ATen that multiplies two matrices, or two batches of them."""

    first: int = 0
    """Where the product's first operand stands among the arguments; the second follows it."""
    absorbs: tuple[tuple[str, ...], ...] = ()
    """The steps that it may compute along with the product."""
    served: bool = True
    """Whether `tunegemm.enable` serves it. All of them are recorded."""
    activates: bool = False
    """Whether it applies an activation last."""


OPERATORS = {
    "mm": Operator(),
    "bmm": Operator(),
    "addmm": Operator(1, _ADDS),  # `linear` with a bias arrives here, too
    "baddbmm": Operator(1, _ADDS),
    "_scaled_mm": Operator(0, _SCALES),
    "_int_mm": Operator(),
    "addmm_": Operator(1, _ADDS, served=False),
    "baddbmm_": Operator(1, _ADDS, served=False),
    "_addmm_activation": Operator(1, _ADDS, served=False, activates=True),
}

_ABSORBED = frozenset(steps for operator in OPERATORS.values() for steps in operator.absorbs)


def absorbed(steps: Sequence[str]) -> tuple[str, ...]:
    """The leading steps of an epilogue that one call of the library takes; those of `amax` aside."""
    for count in (2, 1):
        if (leading := tuple(steps[:count])) in _ABSORBED:
            return leading
    return ()


def addmm_steps(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float
) -> tuple[str, tuple[torch.Tensor, ...], tuple[float, ...]]:
    """The epilogue of ``beta * c + alpha * a @ b`` and its operands, of which `is_sum` holds.

    Whether C has a shape that a kernel takes is for dispatch to say: torch has more, which it broadcasts.
    Raises TypeError for a C that is not a tensor and for what is not a number, RuntimeError for a C without
    strides.
    """
    first, scalars = ("", ()) if alpha == 1 else ("alpha+", (_float(alpha),))
    dimensions = rank(c)
    if beta == 0:
        return first[:-1], (), scalars
    if beta == 1:
        if dimensions == 1:
            return first + "bias_n", (c,), scalars
        # As Inductor expands a row, or a user gives one.
        if dimensions == a.ndim == 2 and (c.shape[0] == 1 != a.shape[0] or 0 == c.stride(0) < c.shape[0]):
            return first + "bias_n", (c[0],), scalars
    return first + "beta_c", (c,), (*scalars, _float(beta))


def is_sum(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, dimensions: int) -> bool:
    """Whether torch takes these operands of ``beta * c + a @ b``, as matrices (2) or batches (3), and what is
    asked is the sum alone.

    A C that beta 0 leaves unread is looked at by torch all the same: its dtype, its gradient, its class.
    Raises TypeError for what is not a tensor.
    """
    if not rank(a) == rank(b) == dimensions >= rank(c):
        return False
    left, right, extents = a.shape, b.shape, c.shape
    if left[-1] != right[-2] or (dimensions == 3 and left[0] != right[0]):
        return False
    place = dimensions
    for extent in reversed(extents):
        place -= 1
        if extent != 1 and extent != (right[-1] if place == dimensions - 1 else left[place]):
            return False
    return beta != 0 or (
        c.dtype == a.dtype
        and c.device == a.device
        and type(c) in PLAIN
        and not (c.requires_grad and torch.is_grad_enabled())
    )


def _float(number: float) -> float:
    if isinstance(number, str):  # of which float() would read some
        raise TypeError(f"{number!r} is not a number")
    return float(number)


def scale_steps(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: bool
) -> str:
    """The epilogue of ``torch._scaled_mm`` with these scales; empty for those that only torch has.

    Raises TypeError for what is not a tensor.
    """
    if rank(a) != 2 or rank(b) != 2:
        return ""
    if num_elements(scale_a) == 1 and num_elements(scale_b) == 1:
        return "scale_tensor+bias_n" if bias else "scale_tensor"
    if scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1]):
        return "scale_rowwise+bias_n" if bias else "scale_rowwise"
    return ""


def takes_fp8(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether torch multiplies these fp8 operands as they lie, on a GPU."""
    return (
        a.ndim == b.ndim == 2
        and a.dtype.itemsize == b.dtype.itemsize == 1
        and a.is_floating_point()
        and a.stride(1) == 1
        and b.stride(0) == 1
        and not (b.shape[0] % _FP8_UNIT or b.shape[1] % _FP8_UNIT)
        and not a.dtype == b.dtype == torch.float8_e5m2
    )


def added(name: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> tuple[str, str]:
    """What a call of an operator adds to the product, ``none``, ``vector`` (a value for each column) or
    ``matrix``, and the activation that it applies: ``none``, ``relu`` or ``gelu``.
    """
    operator = OPERATORS[name]
    if operator.absorbs == _SCALES:
        bias = arguments[4] if len(arguments) > 4 else keywords.get("bias")
        return "none" if bias is None else "vector", "none"
    activation = ("gelu" if keywords.get("use_gelu") else "relu") if operator.activates else "none"
    if not operator.absorbs or keywords.get("beta", 1) == 0:
        return "none", activation
    c, a, b = arguments[0], *arguments[operator.first : operator.first + 2]
    text, _, _ = addmm_steps(c, a, b, keywords.get("beta", 1), 1)
    return "vector" if text == "bias_n" else "matrix", activation
