"""What a call asks for besides a product: a `Form`, made once for all calls that ask alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any

import torch

from tunegemm.describe.epilogue import Epilogue, check_operands
from tunegemm.errors import ProblemError

#: How a product is called: by a function of ours, or below autograd, transforms and modes, where the caller
#: is given None if torch is to compute. They fit beside 2, which marks an output, into the low bits of an
#: aligned address. The second operand of LINEAR is (n, k); that of all others is (k, n).
MATMUL, LINEAR, BELOW_AUTOGRAD, BMM, ADDMM, SCALED_MM = 0, 1, 4, 8, 12, 5

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
