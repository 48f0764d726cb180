"""The one description of a call: what dispatch looks up, and what recordings write down to be tuned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tunegemm.generate.launching import words_reader
from tunegemm.serve.forms import Form
from tunegemm.serve.operands import Operands, Refusal, describe
from tunegemm.serve.plans import views_of_operands


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
    shapes = views_of_operands(problem, form, tensors, operands.out_shape, folded)
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
    """The same, whatever the tensors of the epilogue are."""
    if not form.text and form.out_dtype is None:
        return describe(a, b, out)
    return describe(
        a, b, out, out_dtype=form.out_dtype_of(a), epilogue=form.text, accumulation=form.accumulation
    )
