"""Products as problems to tune, each with its weight in the program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tunegemm.describe.problem import Problem
from tunegemm.describe.stored import FIELDS
from tunegemm.describe.workload.products import Kind, Product
from tunegemm.errors import ProblemError


@dataclass(frozen=True)
class Demand:
    """A problem, and how often a program computes it."""

    problem: Problem
    calls: int
    call_us: float | None = None
    """Torch's time per call on the GPU that recorded it; None if unknown."""

    def __add__(self, other: Demand) -> Demand:
        """More calls of the same problem. The time is averaged over the calls that have one."""
        timed = [
            (item.calls, item.call_us) for item in (self, other) if item.call_us is not None and item.calls
        ]
        calls = sum(count for count, _ in timed)
        call_us = sum(count * us for count, us in timed) / calls if timed else None
        return replace(self, calls=self.calls + other.calls, call_us=call_us)


def total(parts: Iterable[Demand]) -> list[Demand]:
    """Each problem once, in the order of first appearance."""
    result: dict[Problem, Demand] = {}
    for part in parts:
        before = result.get(part.problem)
        result[part.problem] = part if before is None else before + part
    return list(result.values())


def demands(products: Iterable[Product]) -> tuple[list[Demand], list[str]]:
    """The problems among the products, and a line for each product that no kernel can serve.

    A problem is what dispatch looks up when it meets that call. Times on a CPU are ignored.
    """
    result, refused = [], []
    for product in products:
        kind = product.kind
        try:
            problem = _problem(kind)
        except ProblemError as error:
            refused.append(f"{kind.op} {kind.shape}: {error}")
            continue
        call_us = product.median_us if kind.device == "cuda" else None
        result.append(Demand(problem, product.weight, call_us))
    return [demand for demand in total(result) if demand.calls], refused


def _problem(kind: Kind) -> Problem:
    if kind.refusal:
        raise ProblemError(kind.refusal)
    if not (kind.a_major and kind.b_major and kind.out_major):
        raise ProblemError("an operand has no contiguous mode, so torch copies it first")
    problem = Problem(**{name: getattr(kind, name) for name in (*FIELDS, "groups")})
    if not problem.fused.is_defined:
        raise ProblemError(f"epilogue {kind.epilogue} is a function of its program: call tunegemm.tune there")
    return problem
