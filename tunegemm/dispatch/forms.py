"""A form defines the computation of a call; `named` describes the product that it requests for its operands.

Dispatch looks up this description, and recordings store it for tuning. It depends only on shapes, strides,
dtypes and the alignment of addresses, so one answer holds for every later call with the same key.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from tunegemm.describe.epilogue import Epilogue, check_operands, operand_dtype
from tunegemm.describe.problem import DTYPE_BYTES, Problem, normalize_dtype, overlaps_itself
from tunegemm.errors import ProblemError
from tunegemm.generate.launching import words_reader

#: TMA requires base addresses and all strides except the contiguous one to be multiples of this many bytes
#: (CUDA driver API, cuTensorMapEncodeTiled: globalAddress and globalStrides).
ALIGNMENT = 16

#: How a product is called: by our own function, or below autograd, transforms and modes, where the caller
#: gets None if torch should compute it. They fit beside 2, which marks an output, into the low bits of an
#: aligned address. The second operand of LINEAR is (n, k); that of all others is (k, n).
MATMUL, LINEAR, BELOW_AUTOGRAD, BMM, ADDMM, SCALED_MM = 0, 1, 4, 8, 12, 5

#: Activations that a kernel can apply to its product.
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
#: The torch function for each activation.
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

#: A new result in another shape. It is no view, as torch's products return none: autograd restricts what may
#: be written to views, first of all to those made without gradients.
shaped: Callable[..., torch.Tensor] = torch.ops.aten._unsafe_view.default

_numbers = itertools.count(1)


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """How a product is called, and its epilogue. Made by `form_of`; compared by identity."""

    call: int
    """Such as `MATMUL`."""
    epilogue: Epilogue
    text: str
    """The epilogue's."""
    out_dtype: torch.dtype | None
    """None stands for the first operand's dtype."""
    accumulation: str
    is_plain: bool
    """Whether the product is stored unchanged, in the operands' dtype."""
    torchs: Callable[..., Any] | None
    """Torch's single function of the call's tensors that computes the whole form, if there is one. If the
    caller has torch's function and all its arguments, it returns None: for those below autograd, and for
    ADDMM, whose C is not among the tensors if it is not read."""
    tag: int
    """Identifies the form when joined with an address: a plain form's call, else a number above all bits of
    an address."""

    def check(self, operands: Sequence[Any]) -> None:
        """Raises ProblemError if the operands' number or kinds do not match the epilogue."""
        check_operands(self.epilogue, operands)
        for operand, value in zip(self.epilogue.operands, operands, strict=True):
            wants = Real if operand.kind == "number" else torch.Tensor
            if not isinstance(value, wants):
                kind = "a number" if operand.kind == "number" else "a tensor"
                raise ProblemError(
                    f"operand {operand.name} of epilogue {self.text} is {kind}, not {value!r:.40}"
                )

    def join(self, tensors: Sequence[Any], numbers: Sequence[float]) -> list[Any]:
        """The operands in the epilogue's order."""
        left, right = iter(tensors), iter(numbers)
        return [next(right if operand.kind == "number" else left) for operand in self.epilogue.operands]

    @property
    def writes(self) -> bool:
        """Whether the kernel also writes an operand."""
        return "amax" in self.epilogue.steps

    def out_dtype_of(self, a: torch.Tensor) -> torch.dtype:
        """The result's dtype for this first operand."""
        return a.dtype if self.out_dtype is None else self.out_dtype

    def name(self, a: torch.Tensor) -> str:
        """The name of the called function; empty below torch's own functions."""
        if self.call == LINEAR and self.epilogue.gated:
            return "gated_linear"
        return "baddbmm" if self.call == ADDMM and a.ndim == 3 else _NAMES[self.call]


@cache
def form_of(call: int, text: str, out_dtype: torch.dtype | None = None, accumulation: str = "fast") -> Form:
    """The form. Raises ProblemError if the epilogue or the output dtype is unknown."""
    check_dtype(out_dtype)
    is_plain = not text and out_dtype is None
    torchs: Callable[..., Any] | None = None
    if call in (BELOW_AUTOGRAD, ADDMM):
        torchs = _none
    elif out_dtype is None and (call, text) in _ONE_FUNCTION:
        torchs = _ONE_FUNCTION[call, text]
    tag = call if is_plain else next(_numbers) << 64
    return Form(call, Epilogue.parse(text), text, out_dtype, accumulation, is_plain, torchs, tag)


def check_dtype(out_dtype: Any) -> None:
    """Raises ProblemError for an output dtype that is none."""
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise ProblemError(
            f"out_dtype {out_dtype!r:.40} is not a torch.dtype; give one such as torch.float32"
        )


def _none(*_: Any, **__: Any) -> None:
    return None


#: Torch functions by call and epilogue.
_ONE_FUNCTION: dict[tuple[int, str], Callable[..., Any]] = {
    (MATMUL, ""): torch.matmul, (LINEAR, ""): functional.linear, (BMM, ""): torch.bmm,
    (SCALED_MM, ""): torch.matmul, (LINEAR, "bias_n"): functional.linear,
}  # fmt: skip


PLAIN = form_of(MATMUL, "")


class Call(NamedTuple):
    """A call of `Dispatcher.fused`."""

    form: Form
    a: torch.Tensor
    b: torch.Tensor
    tensors: Sequence[torch.Tensor]
    numbers: Sequence[float]
    out: torch.Tensor | None


def named(
    form: Form, a: torch.Tensor, b: torch.Tensor, tensors: Sequence[torch.Tensor], out: torch.Tensor | None
) -> Operands | Refusal:
    """Describe the form's product ``a @ b``; b is (k, n) for every call.

    tensors: the epilogue's, in its order. Torch computes refused products, whatever the database holds.
    """
    operands = describe(a, b, out, form)
    if isinstance(operands, Refusal):
        return operands
    folded = a.ndim > len(operands.views[0])
    shapes = _views_of_operands(operands.problem, form, tensors, operands.out_shape, folded)
    if shapes is None:
        return Refusal("")
    words_refusal, fused = "", operands.problem.fused
    if fused.words:
        seen = [tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=True)]
        numbers = [0.0] * (len(fused.operands) - len(seen))
        try:
            words_reader(operands.problem)(form.join(seen, numbers))
        except ValueError as error:
            words_refusal = str(error)
    return replace(operands, shapes=shapes, words_refusal=words_refusal)


def _views_of_operands(
    problem: Problem,
    form: Form,
    tensors: Sequence[torch.Tensor],
    out_shape: tuple[int, ...],
    folded: bool,
) -> tuple[tuple[int, ...], ...] | None:
    """The shapes in which a kernel sees an epilogue's tensors; None if it cannot take them.

    out_shape: of the result and of matrices. folded: whether leading dimensions are rows of the kernel's
    product: a value for each row of torch's product is then not a vector.
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
        except (ProblemError, RuntimeError):  # an unnamed dtype, or strides that allow no such view
            return None
        shapes.append(shape)
    return tuple(shapes)


@dataclass(frozen=True)
class Operands:
    """A product that a kernel may compute."""

    problem: Problem
    out_shape: tuple[int, ...]
    """Shape of torch.matmul's result."""
    views: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """The shapes in which a kernel sees a, b and the output: matrices, or batches of equally many matrices.
    """
    tma_refusal: str
    """Why TMA cannot read or write these views; empty when it can (base addresses aside)."""
    packed: bool
    """Whether every operand is dense: no gap between rows or batch entries."""
    spans: tuple[int, int, int]
    """Bytes from the first to past the last element of a, b and the output."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes in which a kernel sees the epilogue's tensors, as `named` finds them."""
    words_refusal: str = ""
    """Why our own kernels cannot read these tensors; empty if they can."""


@dataclass(frozen=True)
class Refusal:
    """A product that torch computes, whatever the database holds."""

    reason: str
    """One line; empty if torch is simply the right choice (broadcasting, empty extents, errors)."""


def describe(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, form: Form = PLAIN
) -> Operands | Refusal:
    """The form's product ``a @ b``, with b as (k, n) for every call, whatever the epilogue's tensors are.

    Handles all views that form a product of two matrices, of two equal batches, or of one matrix and a batch,
    where the matrix is a batch of stride 0. Never raises: a call that torch would reject is a Refusal, too.
    torch.matmul takes no 8-bit operands on a GPU: they need an `out_dtype`.
    """
    out_dtype = None if form.is_plain else form.out_dtype_of(a)
    if out is not None and out.dtype != form.out_dtype_of(a):
        return Refusal("")
    if a.dtype != b.dtype and (a.dtype.itemsize > 1 or out_dtype is None):
        return Refusal("")
    choices, out_shape = _matrices(tuple(a.shape), tuple(b.shape))
    if choices and b.ndim > 1 and form.epilogue.gated:
        out_shape = (*out_shape[:-1], out_shape[-1] // 2)
    if not choices or (out is not None and tuple(out.shape) != out_shape):
        return Refusal("")
    for a_shape, b_shape in choices:
        try:
            matrix, other = seen_as(a, a_shape), seen_as(b, b_shape)
            if out is not None:
                out.view(*a_shape[:-1], out_shape[-1] if b.ndim > 1 else 1)
            break
        except (RuntimeError, ValueError):  # no common stride of the leading dimensions; ValueError: traced
            continue
    else:
        rows = f"operand with strides {a.stride()} has no single row stride"
        return Refusal(rows if b.ndim == 2 and out is None else "")
    try:
        problem = Problem.from_tensors(
            matrix, other, out_dtype=out_dtype, epilogue=form.text, accumulation=form.accumulation
        )
    except ProblemError as error:
        return Refusal(str(error))
    if DTYPE_BYTES[problem.in_dtype] == 1 and out_dtype is None:
        return Refusal(f"{problem.in_dtype} operands: torch.matmul does not support them on a GPU")
    return _described(problem, matrix, other, out, out_shape)


def seen_as(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of a tensor in a shape; a matrix repeats in the shape of a batch.

    Raises RuntimeError if there is no such view.
    """
    if tensor.numel() == math.prod(shape):
        return tensor.view(shape)
    return tensor.view(shape[1:]).expand(shape)


def _matrices(
    a: tuple[int, ...], b: tuple[int, ...]
) -> tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], tuple[int, ...]]:
    """The shapes of views of these operands, both of 2 or both of 3 dimensions, and the result's shape.

    The best comes first: one product rather than a batch. None if no view forms such a product, for empty
    extents, and for a dot product, which no matrix kernel computes.
    """
    if 0 in a or 0 in b or not a or not b or len(a) == len(b) == 1:
        return [], ()
    left, right = (1, *a) if len(a) == 1 else a, (*b, 1) if len(b) == 1 else b
    (*a_lead, m, k), (*b_lead, b_k, n) = left, right
    if k != b_k:
        return [], ()
    rank = max(len(a_lead), len(b_lead))
    a_lead, b_lead = [1] * (rank - len(a_lead)) + a_lead, [1] * (rank - len(b_lead)) + b_lead
    out = (*map(max, a_lead, b_lead), *(m,) * (len(a) > 1), *(n,) * (len(b) > 1))
    batch, of_b = math.prod(a_lead), math.prod(b_lead)
    entries = max(batch, of_b)
    choices: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    if of_b == 1:
        choices.append(((batch * m, k), (k, n)))
    if entries > 1 and (batch == 1 or of_b == 1 or a_lead == b_lead):
        choices.append(((entries, m, k), (entries, k, n)))
    return choices, out


def _described(
    problem: Problem, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, out_shape: tuple[int, ...]
) -> Operands | Refusal:
    d_shape = (*a.shape[:-1], problem.out_n)
    if out is None:
        d_strides = tuple(itertools.accumulate(reversed(d_shape[1:]), operator.mul, initial=1))[::-1]
    else:
        if out.is_conj() or out.is_neg():
            return Refusal("")
        d_strides = tuple(out.view(d_shape).stride())
        if d_strides[-1] != 1 and d_strides[-2] == 1:
            problem = replace(problem, out_major="m")
    item, out_item = a.element_size(), DTYPE_BYTES[problem.out_dtype]
    views = (
        ("a", tuple(a.shape), tuple(a.stride()), -1 if problem.a_major == "k" else -2, item),
        ("b", tuple(b.shape), tuple(b.stride()), -2 if problem.b_major == "k" else -1, item),
        ("out", d_shape, d_strides, -1 if problem.out_major == "n" else -2, out_item),
    )
    refusals = [_tma_refusal(*view) for view in views]
    if out is not None and overlaps_itself(d_shape, d_strides):
        return Refusal("")
    _, shape, strides, major, _ = views[2]
    if strides[major] != 1 and shape[major] > 1:
        return Refusal(f"output with strides {strides} has no unit stride")
    a_span, b_span, d_span = (_span(shape, strides) * size for _, shape, strides, _, size in views)
    return Operands(
        problem,
        out_shape,
        (tuple(a.shape), tuple(b.shape), d_shape),
        next((refusal for refusal in refusals if refusal), ""),
        all(_is_packed(shape, strides, major) for _, shape, strides, major, _ in views),
        (a_span, b_span, d_span),
    )


def _tma_refusal(name: str, shape: Sequence[int], strides: Sequence[int], major: int, item: int) -> str:
    """Why a tensor map cannot describe the view; `major` is the index of its contiguous mode.

    A mode of extent 1 is never traversed: launchers give it a stride that TMA accepts. Batch entries may
    share memory: a stride of 0 is a multiple of 16 bytes, too.
    """
    where = f"operand {name} of shape {tuple(shape)} and strides {tuple(strides)}"
    if strides[major] != 1:
        return f"{where} has no unit stride"
    for dim, stride in enumerate(strides):
        if dim != len(strides) + major and shape[dim] > 1 and stride * item % ALIGNMENT:
            return (
                f"{where}: stride {stride} x {item} B is not a multiple of the {ALIGNMENT} B that TMA needs"
            )
    if overlaps_itself(shape[-2:], strides[-2:]):
        return f"{where} overlaps itself"
    return ""


def _is_packed(shape: Sequence[int], strides: Sequence[int], major: int) -> bool:
    order = [major, -3 - major] + ([-3] if len(shape) == 3 else [])
    expected = 1
    for dim in order:
        if strides[dim] != expected:
            return False
        expected *= shape[dim]
    return True


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
