"""ATen's operators that multiply matrices, and the steps that torch's library computes with each product.

One table for the code that serves, counts or replaces these operators, and for what a kernel has to beat. In
eager code it has to beat torch's kernels, launched one by one; recorded ratios compare with these. A compiler
does better: it fuses the steps after a product into one kernel, which mostly does the work of its neighbours,
too. So in compiled code a kernel must be faster than torch's product alone, without the steps that follow, as
the model estimates it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tunegemm.describe.device import Device
from tunegemm.describe.epilogue import GATED
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.workload.products import OWN_ACTIVATION

#: Least gain over the compiler's code: sessions on one H200 disagree by 0.2 to 0.3 % in the ratio of one
#: kernel (see `neighbours`).
LEAST_GAIN = 0.01

_ADDS = (("alpha",), ("bias_n",), ("alpha", "bias_n"), ("beta_c",), ("alpha", "beta_c"))
SCALES = (
    ("scale_tensor",), ("scale_rowwise",), ("scale_tensor", "bias_n"), ("scale_rowwise", "bias_n"),
)  # fmt: skip


_IN_PLACE = "in place, which tunegemm.enable does not serve"


@dataclass(frozen=True)
class Operator:
    """An ATen operator that multiplies two matrices, or two batches of matrices."""

    first: int = 0
    """The position of the product's first operand among the arguments; the second follows it."""
    absorbs: tuple[tuple[str, ...], ...] = ()
    """The steps that it can compute along with the product."""
    refusal: str = ""
    """Why `tunegemm.enable` does not serve the operator; empty if it does. `tunegemm.record` records the
    operator in both cases."""


OPERATORS = {
    "mm": Operator(),
    "bmm": Operator(),
    "addmm": Operator(1, _ADDS),  # `linear` with a bias arrives here, too
    "baddbmm": Operator(1, _ADDS),
    "_scaled_mm": Operator(0, SCALES),
    "_scaled_mm_v2": Operator(0, SCALES),  # torch.nn.functional.scaled_mm; since torch 2.10
    "_int_mm": Operator(),
    "addmm_": Operator(1, _ADDS, _IN_PLACE),
    "baddbmm_": Operator(1, _ADDS, _IN_PLACE),
    "_addmm_activation": Operator(1, _ADDS, OWN_ACTIVATION),
}

_ABSORBED = frozenset(steps for operator in OPERATORS.values() for steps in operator.absorbs)


def absorbed(steps: Sequence[str]) -> tuple[str, ...]:
    """The leading steps of an epilogue that one call of the library computes, apart from those of `amax`."""
    for count in (2, 1):
        if (leading := tuple(steps[:count])) in _ABSORBED:
            return leading
    return ()


def least_ratio(problem: Problem, device: Device) -> float:
    """The least recorded ratio to eager torch with which a kernel may serve in compiled code."""
    kernels = kernels_after(problem)
    if not kernels:
        return 1 + LEAST_GAIN
    # Import the model, and numpy, only here: a first call of eager code does not need them.
    from tunegemm.choose.neighbours import library_us
    from tunegemm.model.terms import elementwise_us

    out_dtype = "int32" if problem.in_dtype == "int8" else problem.out_dtype
    plain = replace(problem, epilogue="", accumulation="fast", out_dtype=out_dtype)
    matrix_bytes = plain.m * plain.n * plain.batch * DTYPE_BYTES[plain.out_dtype]
    after_us = kernels * elementwise_us(2 * matrix_bytes, device)
    return (1 + LEAST_GAIN) * (1 + after_us / library_us(plain, device))


def kernels_after(problem: Problem) -> int:
    """The elementwise kernels that eager torch runs after the library's product."""
    fused = problem.fused
    if fused.function is not None:
        nodes = ast.walk(ast.parse(fused.function.source))
        return sum(isinstance(node, ast.BinOp | ast.UnaryOp | ast.Call) for node in nodes)
    # The library's product of int8 operands computes no steps along with it.
    taken = () if problem.in_dtype == "int8" else absorbed(fused.steps)
    rest = fused.steps[len(taken) :]
    return len(rest) + sum(step in GATED for step in rest)  # a gate is an activation and a product
