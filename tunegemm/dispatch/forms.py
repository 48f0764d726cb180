"""A form says what is computed of a product by a call; `named` says what it asks for of given operands.

That is the one description of a call: what dispatch looks up, and what recordings write down to be tuned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from tunegemm.describe.epilogue import Epilogue, check_operands, operand_dtype
from tunegemm.describe.problem import Problem, normalize_dtype
from tunegemm.dispatch.operands import Operands, Refusal, describe
from tunegemm.errors import ProblemError
from tunegemm.generate.launching import words_reader

#: How a product is called: by a function of ours, or below autograd, transforms and modes, where the caller
#: is given None if torch is to compute. They fit beside 2, which marks an output, into the low bits of an
#: aligned address. The second operand of LINEAR is (n, k); that of all others is (k, n).
MATMUL, LINEAR, BELOW_AUTOGRAD, BMM, ADDMM, SCALED_MM = 0, 1, 4, 8, 12, 5

#: What may follow a product in its kernel.
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
#: Torch's function of each.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}

#: How warnings name each call; ATen's own functions, which BELOW_AUTOGRAD serves, have no name here.
_NAMES = {
    MATMUL: "matmul", LINEAR: "linear", BELOW_AUTOGRAD: "", BMM: "bmm", ADDMM: "addmm",
    SCALED_MM: "scaled_mm",
}  # fmt: skip

_numbers = itertools.count(1)


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """How a product is called and what becomes of it. Made by `form_of`; told apart by identity."""

    call: int
    """Such as `MATMUL`."""
    epilogue: Epilogue
    text: str
    """The epilogue's."""
    out_dtype: torch.dtype | None
    """None: that of the first operand."""
    accumulation: str
    is_plain: bool
    """Whether the product is stored as it is, in the operands' dtype."""
    tag: int
    """Tells forms apart where it is joined with an address: the call of a plain one, else a number above all
    bits of an address."""

    def check(self, operands: Sequence[Any]) -> None:
        """Raises ProblemError unless these are what the epilogue takes, in number and kind."""
        check_operands(self.epilogue, operands)
        for operand, given in zip(self.epilogue.operands, operands, strict=True):
            wants = Real if operand.kind == "number" else torch.Tensor
            if not isinstance(given, wants):
                kind = "a number" if operand.kind == "number" else "a tensor"
                raise ProblemError(
                    f"operand {operand.name} of epilogue {self.text} is {kind}, not {given!r:.40}"
                )

    def join(self, tensors: Sequence[Any], numbers: Sequence[float]) -> list[Any]:
        """The operands in the epilogue's order again."""
        left, right = iter(tensors), iter(numbers)
        return [next(right if operand.kind == "number" else left) for operand in self.epilogue.operands]

    @property
    def writes(self) -> bool:
        """Whether an operand is written, too."""
        return "amax" in self.epilogue.steps

    def out_dtype_of(self, a: torch.Tensor) -> torch.dtype:
        """The result's, for a first operand."""
        return a.dtype if self.out_dtype is None else self.out_dtype

    def name(self, a: torch.Tensor) -> str:
        """The function that was called; empty below torch's own functions."""
        if self.call == LINEAR and self.epilogue.gated:
            return "gated_linear"
        return "baddbmm" if self.call == ADDMM and a.ndim == 3 else _NAMES[self.call]


@cache
def form_of(call: int, text: str, out_dtype: torch.dtype | None = None, accumulation: str = "fast") -> Form:
    """The form. Raises ProblemError for an epilogue or an output dtype that is not known."""
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise ProblemError(f"out_dtype {out_dtype!r} is not a torch.dtype; give one such as torch.float32")
    is_plain = not text and out_dtype is None
    tag = call if is_plain else next(_numbers) << 64
    return Form(call, Epilogue.parse(text), text, out_dtype, accumulation, is_plain, tag)


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
