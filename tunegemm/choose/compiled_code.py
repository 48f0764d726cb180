"""Whether a kernel takes the place of torch's own product in code that a compiler writes.

Eager code launches torch's kernels one by one, which is what recorded ratios compare with. A compiler does
better: what follows a product becomes one kernel, which mostly does the work of its neighbours, too. So there
a kernel must be faster than torch's product alone, without what follows, as the model estimates it.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from tunegemm.choose.operators import absorbed
from tunegemm.describe.device import Device
from tunegemm.describe.epilogue import GATED
from tunegemm.describe.problem import DTYPE_BYTES, Problem

#: Least gain over what the compiler would do: sessions of one H200 disagree by 0.2 to 0.3 % in the ratio of
#: one kernel (see `neighbours`).
LEAST_GAIN = 0.01


def least_ratio(problem: Problem, device: Device) -> float:
    """How many times as fast as eager torch a kernel must be recorded to be."""
    kernels = kernels_after(problem)
    if not kernels:
        return 1 + LEAST_GAIN
    # The model, and numpy with it: a first call of eager code does without.
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
    # The library's product of int8 operands takes nothing along.
    taken = () if problem.in_dtype == "int8" else absorbed(fused.steps)
    rest = fused.steps[len(taken) :]
    return len(rest) + sum(step in GATED for step in rest)  # a gate is an activation and a product
