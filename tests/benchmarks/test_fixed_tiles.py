"""The Triton kernel that batch invariance is compared with: right, and free of M, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.support.processes import run_interpreted

#: fp16 in the place of bf16, which the interpreter does not multiply.
SCRIPT = """
import dataclasses
import pytest
import torch
from benchmarks import fixed_tiles
from benchmarks.batch_invariance import KINDS
from tunegemm.describe.problem import Problem
from tunegemm.measure.operands import check, expected, make_operands, tolerance

fixed_tiles.multiprocessors = lambda tensor: 3
for kind in KINDS.values():
    problem = Problem.parse("200x304x160", **({"dtype": "fp16"} | kind))
    made = make_operands(problem, torch.device("cpu"), 0)
    call, operands = fixed_tiles.of(problem), made.arguments[3:]
    whole = call(made.a, made.b, *operands)
    found = check(dataclasses.replace(made, out=whole), expected(problem, made))
    assert found.objection(tolerance(problem)) is None, (problem, found)
    few = [one[:130] if operand.kind == "m" else one
           for one, operand in zip(operands, problem.fused.operands, strict=True)]
    assert torch.equal(call(made.a[:130], made.b, *few), whole[:130]), problem
"""


@pytest.mark.slow
def test_products_of_every_kind() -> None:
    run_interpreted(SCRIPT)
