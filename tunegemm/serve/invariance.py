"""Policy `batch_invariant`: a row has the same bits however many rows there are.

All kernels of one reduction class give the same bits (`generate.families.reduction_class`), so that each M
may take whichever of them is fastest there. A problem whose record is of another class takes a kernel of the
class that was recorded for another problem of its kind: of the same N and K first of all, else of any. A
kernel is compiled for no extents, so that what one M may take every M may; only speed differs, and the model
says which is best. So may a kernel that was recorded on another GPU of the same architecture.

The product alone and the product with its epilogue are of two kinds: they round in different places. Where
one M has a fused kernel every M has, and where none has all do without.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from tunegemm.describe.device import Device
from tunegemm.describe.problem import MAX_ALIGNMENT, Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import SpaceError
from tunegemm.generate import families, model
from tunegemm.serve.neighbours import Near, library_us
from tunegemm.serve.policies import Policy
from tunegemm.serve.snapshot import Snapshot
from tunegemm.store.record import Record

#: Kernels that the model compares for a problem: asking it takes some 0.1 ms each.
MOST_KERNELS = 48
#: A kernel that won at the same N and K and at most twice or half as many rows is preferred to one that the
#: model expects to be faster by less than this.
_OF_NEIGHBOURS = 1.15


def borrowed(snapshot: Snapshot, problem: Problem, device: Device, policy: Policy) -> tuple[Near, ...]:
    """The kernels of other problems that the policy admits for this one, the one first that the model expects
    to be fastest. Those that are not compiled here are for the caller to pass over."""
    found: dict[Candidate, tuple[float, Near]] = {}
    for record in _records(snapshot, problem, device):
        if len(found) >= MOST_KERNELS:
            break
        if policy.refusal(problem, record.candidate):
            continue
        if (offer := _offer(record, problem, device)) is not None:
            cost, near = offer
            known = found.get(near.record.candidate)
            if known is None or cost < known[0]:
                found[near.record.candidate] = offer
    return tuple(near for _, near in sorted(found.values(), key=lambda pair: pair[0]))


def _records(snapshot: Snapshot, problem: Problem, device: Device) -> Iterator[Record]:
    """Of the same N and K, then of all of the kind, the nearest first; then of aligned products without a
    batch, which run by the same objects."""
    extents = sorted(snapshot.extents(problem), key=lambda m: abs(math.log2(m / problem.m)))
    plain = replace(problem, batch=1, alignment=MAX_ALIGNMENT)
    for others in (
        (replace(problem, m=m) for m in extents),
        snapshot.around(problem, math.inf),
        snapshot.around(plain, math.inf) if plain != problem else (),
    ):
        for other in others:
            if (record := snapshot.find_kernel(other, device.fingerprint)) is not None:
                yield record


def _offer(record: Record, problem: Problem, device: Device) -> tuple[float, Near] | None:
    """The record's kernel for a problem, and what to compare it by, in the model's microseconds."""
    candidate, origin = record.candidate, record.problem
    try:
        if "l2_hint" in candidate.params:
            candidate = candidate.with_launch(l2_hint=model.l2_hint(problem, candidate))
        if not families.get(candidate.family).check(problem, candidate, device).runs:
            return None
        there = model.predict(origin, record.candidate, device)
        here = model.predict(problem, candidate, device)
    except (SpaceError, KeyError, TypeError):  # a stored candidate that is damaged or of another age
        return None
    torch = library_us(problem, device) / library_us(origin, device)
    ratio = record.ratio * torch * there.total_us / here.total_us
    found = replace(record, problem=problem, candidate=candidate, ratio=ratio)
    near = (origin.n, origin.k) == (problem.n, problem.k) and abs(math.log2(origin.m / problem.m)) <= 1
    cost = here.total_us / (_OF_NEIGHBOURS if near else 1.0)
    return cost, Near(found, record, (there.waves, here.waves), None)
