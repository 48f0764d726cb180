"""Near hits: when a shape that was never tuned may run a kernel recorded for nearby shapes.

The question is never which kernel is good, but whether it surely does not lose to torch. Near a problem there
are two sources: the recorded ratios to torch.mm, and the model, whose microseconds rank and extrapolate. A
recorded kernel serves another problem if both agree:

1. *Neighbours.* The records that may be used here and differ in m alone: the nearest below and the nearest
   above, if the two are within a factor of 8 of each other; else the one that is within a factor of 2.
2. *The margin* is 2 %, and 1 % more for each doubling of m between the two neighbours, or for each half of a
   doubling between the problem and a single neighbour.
3. *The recorded ratios.* One of our kernels won at every neighbour, by at least the margin. If torch.mm or an
   algorithm of its library won, torch computes the product.
4. *The model* extrapolates the times of a neighbour's kernel and of torch to this problem. It takes torch at
   its best: as the fastest tile of its library, even if the library did not choose it at the neighbour. The
   expected ratio, at most the least of the recorded ratios, must pass the margin, too.
5. *The tiles.* The kernel has at most a tenth more tiles along m than at its neighbour. Its rows beyond the
   edge are at most the largest of 16, m / 32 and their number at its neighbour. A second tile reads the
   weights again: at 28672x4096 a kernel with tiles of 16 was 1.10 of torch up to m = 16 and 0.67 at 17. And
   TMA fills rows beyond the edge slowly: at 4096x4096 a kernel with tiles of 64 took 12.4 us for m = 120 to
   128 and 20.9 us for m = 65 (H200, 2026-11-21). Families whose last tile begins inside have no such rows if
   a tile fits at all (`edges_inside`); the exception is epilogues that read a matrix, which may be D.

A single row (m = 1) runs only kernels recorded for it, and is not a neighbour: libraries multiply matrix and
vector with other kernels. Launch parameters that depend on m are derived again (`l2_hint`) or counted at load
(`ctas`); the family's rules must accept the rest. Among several kernels, the one with the greatest expected
gain is chosen; among equals, the one whose waves change least. docs/decisions/0006 has the evidence.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tunegemm.choose.policies import FASTEST
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import SpaceError
from tunegemm.generate import families
from tunegemm.model import rank as model
from tunegemm.model.terms import Columns, terms

if TYPE_CHECKING:
    from tunegemm.choose.snapshot import Snapshot
    from tunegemm.store.record import Record

#: Least gain over torch for neighbours with the same n and k, and the addition for each doubling between
#: them. Two sessions on one H200 disagree in the ratio of one kernel by 0.2 to 0.3 % (medians of 9 and 39
#: kernels); 1 of the 9 and 7 of the 39 differ by over 2 % (2026-11-21, db/records of that evening and of that
#: noon, and benchmarks/results/h200/peers.json; tests/choose/test_neighbours.py).
MARGIN, MARGIN_PER_DOUBLING = 0.02, 0.01
#: The most doublings of m between two neighbours, and between the problem and a single neighbour.
MAX_GAP, MAX_REACH = 3.0, 1.0
#: The most tiles along m, relative to those at the neighbour.
MOST_TILES = 1.1
#: Rows of a kernel's last tile that may lie beyond the edge even if the neighbour has fewer.
MOST_ROWS_BEYOND = 16


def _library_tiles(m: tuple[int, ...], n: tuple[int, ...], swap_ab: bool) -> list[Candidate]:
    return [
        Candidate.make(
            "library",
            {"tile_m": tile_m, "tile_n": tile_n, "tile_k": 64, "stages": 6, "swap_ab": swap_ab,
             "cluster_m": 2 if tile_m < 128 else 1, "cluster_n": 1,
             "schedule": "pingpong" if tile_m * tile_n <= 128 * 192 else "cooperative"},
            {"raster_order": "along_m", "swizzle_size": 8},
        )
        for tile_m, tile_n in itertools.product(m, n)
        if tile_m * tile_n <= 128 * 256
    ]  # fmt: skip


#: cuBLAS's tiles for 16-bit operands, as its algorithms name them; for few rows also transposed.
_TILES = _library_tiles((64, 128, 256), (64, 96, 128, 160, 192, 256), False)
_TILES_OF_FEW_ROWS = [*_TILES, *_library_tiles((64, 128), (8, 16, 32, 64, 96, 128), True)]
_FEW_ROWS = 128


Allows = Callable[[Problem, Candidate], str]
"""Returns why a candidate must not be used for a problem; empty if it may be."""


@dataclass(frozen=True)
class Offer:
    """A kernel for a problem on which it was not measured."""

    record: Record
    """The kernel as it would be launched here; its `ratio` is expected, not measured."""
    basis: str
    """What the offer is based on; of a prediction, also how often such predictions were wrong."""
    origin: Record | None = None
    """A record of the kernel for another problem; None if it is predicted or ships for a class of kernels."""
    expected: float | None = None
    """The expected ratio to torch of a prediction; None of a kernel that no model predicts."""
    bound: float = 0.0
    """The expected ratio of a prediction minus the margin of such products."""

    def __str__(self) -> str:
        if self.expected is None:
            return self.basis
        return f"{self.expected:.3f} x torch expected, at least {self.bound:.3f}; {self.basis}"


@dataclass(frozen=True)
class Offers:
    """The kernels that may serve a problem without a record, or why there are none."""

    options: tuple[Offer, ...] = ()
    """The kernels that may be launched, the best first."""
    refusal: str = ""
    """Why there are none, in one clause."""
    rows: tuple[int, int] | None = None
    """The numbers of rows that are refused for the same reason; None if this is known for no other number."""
    neighbours: tuple[Record, ...] = ()
    """The neighbouring records that were considered."""


def neighbourhood(
    snapshot: Snapshot,
    problem: Problem,
    device: Device,
    allows: Allows = FASTEST.refusal,
) -> Offers:
    """The kernels that recorded neighbours offer for a problem, by the rules of this module.

    allows: returns why a candidate must not be used here; empty if it may be.
    """
    if problem.m == 1:
        return Offers(refusal="a single row runs only kernels recorded for one row")
    neighbours, rows = _brackets(snapshot, problem, device)
    if not neighbours:
        return Offers(refusal="no recorded shape is near enough", rows=rows)
    margin = _margin(problem, neighbours)
    for neighbour in neighbours:
        if "tile_m" not in neighbour.candidate.params:
            return Offers((), f"a library's kernel won at {neighbour.problem.shape}", rows, neighbours)
        if neighbour.ratio < 1 + margin:
            refusal = f"{neighbour.ratio:.3f} x torch at {neighbour.problem.shape}, {1 + margin:.2f} required"
            # The margin of a single neighbour grows with the distance.
            return Offers((), refusal, rows if len(neighbours) == 2 else None, neighbours)
    least = min(neighbour.ratio for neighbour in neighbours)
    offers: list[tuple[int, Offer]] = []
    refusals = []
    for neighbour in neighbours:
        found = _offer(neighbour, problem, device, allows, least, margin)
        if isinstance(found, str):
            refusals.append(f"kernel of {neighbour.problem.shape}: {found}")
        else:
            offers.append(found)
    offers.sort(key=lambda found: (-round(found[1].record.ratio, 2), found[0]))
    options = tuple(offer for _, offer in offers)
    return Offers(options, "" if options else "; ".join(refusals), None, neighbours)


def _brackets(
    snapshot: Snapshot, problem: Problem, device: Device
) -> tuple[tuple[Record, ...], tuple[int, int]]:
    """The nearest records in reach below and above in m, and the range of rows that has the same ones."""
    m = problem.m
    records = [
        record for record in snapshot.usable(problem, device.fingerprint) if record.problem.m not in (1, m)
    ]
    place = bisect.bisect(records, m, key=lambda record: record.problem.m)
    sides = tuple(records[max(place - 1, 0) : place + 1])
    least = records[place - 1].problem.m + 1 if place else 2
    most = records[place].problem.m - 1 if place < len(records) else sys.maxsize
    if len(sides) == 2 and _doublings(*(side.problem.m for side in sides)) <= MAX_GAP:
        return sides, (least, most)
    for side in sides:  # two reaches do not meet: MAX_GAP is more than both
        there = side.problem.m
        if _doublings(there, m) <= MAX_REACH:
            return (side,), (least, min(most, 2 * there)) if there < m else (max(least, -(-there // 2)), most)
    if place:
        least = 2 * records[place - 1].problem.m + 1
    if place < len(records):
        most = (records[place].problem.m - 1) // 2
    return (), (least, most)


def _margin(problem: Problem, neighbours: Sequence[Record]) -> float:
    if len(neighbours) == 2:
        return MARGIN + MARGIN_PER_DOUBLING * _doublings(neighbours[0].problem.m, neighbours[1].problem.m)
    return MARGIN + 2 * MARGIN_PER_DOUBLING * _doublings(neighbours[0].problem.m, problem.m)


def _doublings(extent: int, other: int) -> float:
    return abs(math.log2(extent / other))


def tiles_differ(problem: Problem, neighbour: Problem, candidate: Candidate) -> str:
    """Why the tiles along m differ from those at the neighbour; empty if they are alike."""
    swapped = candidate.params.get("swap_ab", False)
    tile = int(candidate["tile_n" if swapped else "tile_m"])
    here, there = -(-problem.m // tile), -(-neighbour.m // tile)
    if here > there * MOST_TILES:
        return f"{here} tiles of {tile} rows here, {there} there"
    beyond, known = here * tile - problem.m, there * tile - neighbour.m
    matrices = any(operand.kind == "matrix" for operand in problem.fused.operands)
    inside = families.get(candidate.family).edges_inside and problem.m >= tile and not matrices
    if not inside and beyond > max(MOST_ROWS_BEYOND, known, problem.m // 32):
        return f"{beyond} rows of its tiles lie beyond the edge, {known} there"
    return ""


def _offer(
    neighbour: Record, problem: Problem, device: Device, allows: Allows, least: float, margin: float
) -> tuple[int, Offer] | str:
    """The neighbour's kernel for the problem, after the change in waves of its busiest block; or why not, in
    one clause.
    """
    candidate = neighbour.candidate
    try:
        if "l2_hint" in candidate.params:
            candidate = candidate.with_launch(l2_hint=model.l2_hint(problem, candidate))
        if not (verdict := families.get(candidate.family).check(problem, candidate, device)):
            return str(verdict)
        if differ := tiles_differ(problem, neighbour.problem, candidate):
            return differ
        there = model.predict(neighbour.problem, neighbour.candidate, device)
        here = model.predict(problem, candidate, device)
    except (SpaceError, KeyError, TypeError) as error:  # a stored candidate: damaged or of another version
        return str(error)
    torch = library_us(problem, device) / library_us(neighbour.problem, device)
    expected = min(neighbour.ratio * torch * there.total_us / here.total_us, least)
    required = f"{expected:.3f} x torch expected, {1 + margin:.2f} required"
    if (reason := allows(problem, candidate)) or expected < 1 + margin:
        return reason or required
    basis = (
        f"from {neighbour.problem.shape} ({neighbour.ratio:.3f} x torch there, {there.waves} waves; "
        f"{here.waves} here): {required}"
    )
    result = replace(neighbour, problem=problem, candidate=candidate, ratio=expected)
    return abs(here.waves - there.waves), Offer(result, basis, neighbour)


@functools.lru_cache(maxsize=4096)
def library_us(problem: Problem, device: Device) -> float:
    """The model's time in microseconds for the best tile that the library has: torch at its best."""
    return float(terms(problem, _tile_columns(problem.m <= _FEW_ROWS), device).total_us.min())


@functools.cache
def _tile_columns(few_rows: bool) -> Columns:
    return Columns.of(_TILES_OF_FEW_ROWS if few_rows else _TILES)
