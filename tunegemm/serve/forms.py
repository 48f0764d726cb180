"""What a call asks for besides a product: a `Form`, made once for all calls that ask alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from tunegemm.describe.epilogue import GATED, Epilogue, check_operands
from tunegemm.errors import ProblemError

#: Kinds of call: as of torch.matmul, of torch.nn.functional.linear, and one below autograd, transforms and
#: modes, which is given None where torch shall compute.
MATMUL, LINEAR, RECORDED = 0, 1, 4

_numbers = itertools.count(1)

#: The gated form of each activation.
GATE_OF = {activation: gate for gate, activation in GATED.items()}


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """The kind of a call and what becomes of its product. Made by `form_of`; told apart by identity."""

    kind: int
    epilogue: Epilogue
    text: str
    """The epilogue's."""
    out_dtype: torch.dtype | None
    """None: that of the first operand."""
    accumulation: str
    place: int = field(default_factory=lambda: next(_numbers) << 64)
    """Apart from every other form's, and above all bits of an identity."""

    def check(self, operands: Sequence[Any]) -> None:
        """Raises ProblemError unless these are what the epilogue takes, in number and kind."""
        check_operands(self.epilogue, operands)
        for operand, given in zip(self.epilogue.operands, operands, strict=True):
            if (operand.kind == "number") == isinstance(given, torch.Tensor):
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
        """Of the result for a first operand."""
        return a.dtype if self.out_dtype is None else self.out_dtype


@cache
def form_of(kind: int, text: str, out_dtype: torch.dtype | None = None, accumulation: str = "fast") -> Form:
    """The form. Raises ProblemError for an epilogue that is not known."""
    return Form(kind, Epilogue.parse(text), text, out_dtype, accumulation)
