"""Products as problems to tune, each with its weight in the program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tunegemm.describe.problem import Problem
from tunegemm.describe.workload.products import Product
from tunegemm.errors import ProblemError

_SHARED = (
    "m", "n", "k", "batch", "in_dtype", "out_dtype", "a_major", "b_major", "out_major", "alignment",
)  # fmt: skip

#: Operators whose bias a tuned kernel adds; the others are torch's wherever they run.
_BIASED = ("addmm", "baddbmm")


@dataclass(frozen=True)
class Demand:
    """A problem, and how often a program wants it solved."""

    problem: Problem
    calls: int
    call_us: float | None = None
    """What torch took per call on the GPU that recorded it; None when that is not known."""
    extra_calls: int = 0
    """Those of `calls` that add a matrix or apply an activation, which the problem leaves out."""


def demands(products: Iterable[Product]) -> tuple[list[Demand], list[str]]:
    """The problems among the products, and a line for each product that is not a problem.

    One that adds a value to each column is a problem of its own, with the epilogue ``bias_n``; what other
    products add makes no other problem. A time on a CPU says nothing of a GPU.
    """
    found: dict[Problem, Demand] = {}
    refused = []
    for product in products:
        try:
            if not (product.kind.a_major and product.kind.b_major and product.kind.out_major):
                raise ProblemError("an operand has no contiguous mode, so that torch copies it first")
            is_biased = product.kind.bias == "vector" and product.kind.op in _BIASED
            problem = Problem(
                **{name: getattr(product.kind, name) for name in _SHARED},
                epilogue="bias_n" if is_biased else "",
            )
        except ProblemError as error:
            refused.append(f"{product.kind.op} {product.kind.shape}: {error}")
            continue
        before = found.get(problem, Demand(problem, 0))
        call_us = product.median_us if product.kind.device == "cuda" else None
        timed = [
            (calls, us)
            for calls, us in ((before.calls, before.call_us), (product.weight, call_us))
            if us is not None and calls
        ]
        has_extra = not is_biased and (product.kind.bias, product.kind.activation) != ("none", "none")
        found[problem] = replace(
            before,
            calls=before.calls + product.weight,
            call_us=sum(c * us for c, us in timed) / sum(c for c, _ in timed) if timed else None,
            extra_calls=before.extra_calls + has_extra * product.weight,
        )
    return [demand for demand in found.values() if demand.calls], refused
