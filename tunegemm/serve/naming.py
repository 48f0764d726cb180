"""The one description of a call: what dispatch looks up, and what recordings write down to be tuned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tunegemm.describe.epilogue import operand_dtype
from tunegemm.describe.problem import Problem, normalize_dtype
from tunegemm.errors import ProblemError
from tunegemm.generate.launching import words_reader
from tunegemm.serve.forms import Form
from tunegemm.serve.operands import Operands, Refusal, describe


class Named(NamedTuple):
    """A call that a kernel may compute."""

    operands: Operands
    """The product, its problem among it."""
    shapes: tuple[tuple[int, ...], ...]
    """In which a kernel sees the tensors of the epilogue."""
    words_refusal: str
    """Why our own kernels cannot read these; empty where they can."""


def named(
    form: Form, a: torch.Tensor, b: torch.Tensor, tensors: Sequence[torch.Tensor], out: torch.Tensor | None
) -> Named | Refusal:
    """What a form asks for of ``a @ b``, where b is (k, n) however it is called.

    tensors: of the epilogue, in its order. What is refused is torch's, whatever the database says.
    """
    operands = described(form, a, b, out)
    if isinstance(operands, Refusal):
        return operands
    problem = operands.problem
    folded = a.ndim > len(operands.views[0])
    shapes = _views_of_operands(problem, form, tensors, operands.out_shape, folded)
    if shapes is None:
        return Refusal("")
    return Named(operands, shapes, _words_refusal(operands, form, tensors, shapes))


def _words_refusal(
    operands: Operands, form: Form, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]
) -> str:
    problem = operands.problem
    if not problem.fused.words:
        return ""
    seen = [tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=True)]
    numbers = [0.0] * (len(problem.fused.operands) - len(seen))
    try:
        words_reader(problem)(form.join(seen, numbers))
    except ValueError as error:
        return str(error)
    return ""


def described(form: Form, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Operands | Refusal:
    """What a form asks for of ``a @ b``, whatever the tensors of its epilogue are."""
    if not form.text and form.out_dtype is None:
        return describe(a, b, out)
    return describe(
        a, b, out, out_dtype=form.out_dtype_of(a), epilogue=form.text, accumulation=form.accumulation
    )


def _views_of_operands(
    problem: Problem,
    form: Form,
    tensors: Sequence[torch.Tensor],
    out_shape: tuple[int, ...],
    folded: bool,
) -> tuple[tuple[int, ...], ...] | None:
    """Shapes in which a kernel sees an epilogue's tensors; None where they are not what it takes.

    out_shape: of the result, which matrices have. folded: whether leading dimensions are rows of the kernel's
    product: what is one for each row of torch's is then no vector.
    """
    if not form.epilogue.is_defined:
        return None
    shapes = []
    takes = [operand for operand in form.epilogue.operands if operand.kind != "number"]
    if len(takes) != len(tensors):
        return None
    for operand, tensor in zip(takes, tensors, strict=True):
        shape = problem.operand_shape(operand)
        if operand.kind == "scalar":
            fits = tensor.numel() == 1
        elif operand.kind == "matrix":
            fits = tensor.ndim > 1 and tuple(tensor.shape) == out_shape and 0 not in tensor.stride()
        elif operand.name in ("scale_a", "scale_b"):  # (m, 1) and (1, n), as torch has them
            fits = tensor.ndim == 2
        else:
            fits = tensor.ndim == 1 and not (operand.kind == "m" and folded)
        if not fits or tensor.numel() != math.prod(shape):
            return None
        try:
            if normalize_dtype(str(tensor.dtype)) != operand_dtype(operand, problem.out_dtype):
                return None
            if len(shape) == 1 and shape[0] > 1 and tensor.view(shape).stride(0) != 1:
                return None
            tensor.view(shape)
        except (ProblemError, RuntimeError):  # a dtype without a name here, or strides without such a view
            return None
        shapes.append(shape)
    return tuple(shapes)
