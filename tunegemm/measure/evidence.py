"""How much a measurement proves, and the only comparison of results.

A ratio to torch.mm compares only with ratios of the same evidence: in a screen all candidates share clocks
that still move, in an interleaved race they share stable ones, in steady-state timing each has clocks of its
own. So a candidate is judged by its best evidence alone, and among candidates the better evidence
goes first, then the ratio.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import IntEnum
from typing import Protocol, TypeVar


class Evidence(IntEnum):
    """How much a measurement proves; more is better."""

    SCREEN = 0
    """A few interleaved rounds while searching."""
    RACE = 1
    """The many interleaved rounds of a final race."""
    STEADY = 2
    """A qualifying round in steady-state timing. No search has such now; databases hold some."""
    FINAL = 3
    """A final race in steady-state timing, or one that was won."""


#: Words for the method by which a measurement was taken, as they are stored, and what each proves.
SCREEN, RACE, QUALIFYING, FINAL, STEADY_FINAL = "screen", "race", "qualifying", "final", "steady_final"
_EVIDENCE = {
    SCREEN: Evidence.SCREEN,
    RACE: Evidence.RACE,
    QUALIFYING: Evidence.STEADY,
    FINAL: Evidence.FINAL,
    STEADY_FINAL: Evidence.FINAL,
}
METHODS = tuple(_EVIDENCE)

#: Methods of steady-state timing.
STEADY_METHODS = (QUALIFYING, STEADY_FINAL)


def evidence_of(method: str, *, confirmed: bool = False) -> Evidence:
    """What a measurement proves by the word for its method; a word that is not known proves least.

    confirmed: it won a final race, and is the record for that.
    """
    return Evidence.FINAL if confirmed else _EVIDENCE.get(method, Evidence.SCREEN)


class Result(Protocol):
    """What is compared: one measurement as it is stored. `tunegemm.store.Record` is one."""

    @property
    def candidate(self) -> Hashable:
        """What was measured."""

    @property
    def ratio(self) -> float:
        """Speed relative to torch.mm; above 1 is faster."""

    @property
    def evidence(self) -> Evidence:
        """How much it proves."""

    @property
    def is_foreign(self) -> bool:
        """Whether it was imported or merged: that never outranks what was measured here."""

    @property
    def is_outdated(self) -> bool:
        """Whether it is of other kernel sources than this program's, and not confirmed."""

    @property
    def is_torch(self) -> bool:
        """Whether the candidate is torch.mm itself."""


R = TypeVar("R", bound=Result)

#: The order of evidence: measured here, of this program's kernels, and how.
Standing = tuple[bool, bool, Evidence]


def standing(result: Result) -> Standing:
    """What a result proves, for comparison with others; ratios count between equals only."""
    return not result.is_foreign, not result.is_outdated, result.evidence


def rank(result: Result) -> tuple[Standing, float]:
    """For sorting results of several candidates: the better evidence first, then the ratio."""
    return standing(result), result.ratio


def best_of_each(results: Iterable[R]) -> list[R]:
    """The best evidence of each candidate: of the highest standing the latest. results: oldest first."""
    best: dict[Hashable, R] = {}
    for result in results:
        known = best.get(result.candidate)
        if known is None or standing(result) >= standing(known):
            best[result.candidate] = result
    return list(best.values())


def leaders(results: Iterable[R]) -> list[R]:
    """The best evidence of each candidate, the best candidate first. results: oldest first."""
    return sorted(best_of_each(results), key=rank, reverse=True)


def may_be_record(best: Result) -> bool:
    """Whether a candidate of this best evidence may be launched in place of torch.mm: not if it is slower."""
    return best.ratio >= 1 or best.is_torch


def choose(results: Iterable[R]) -> R | None:
    """The record among all results of a problem under one fingerprint, oldest first; None for torch.mm."""
    return next((best for best in leaders(results) if may_be_record(best)), None)
