"""How much a measurement proves, and the only comparison of results.

A ratio to torch.mm compares only with ratios of the same evidence. In a screen all candidates share clocks
that still change, in an interleaved race they share stable clocks, and in steady-state timing each has its
own clocks. So only a candidate's best evidence counts, and candidates compare by evidence first, then by
ratio.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import IntEnum
from typing import Protocol, TypeVar


class Evidence(IntEnum):
    """How much a measurement proves; higher is better."""

    SCREEN = 0
    """A few interleaved rounds while searching."""
    RACE = 1
    """The many interleaved rounds of a final race."""
    STEADY = 2
    """A qualifying round in steady-state timing. Searches no longer run these; databases hold some."""
    FINAL = 3
    """A final race in steady-state timing, or any final race that the candidate won."""


#: The stored word of each measuring method, and the evidence that it gives.
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
    """Return the evidence of a measurement by the word for its method; an unknown word gives the least.

    confirmed: whether it won a final race and so became the record.
    """
    return Evidence.FINAL if confirmed else _EVIDENCE.get(method, Evidence.SCREEN)


class Result(Protocol):
    """One stored measurement to compare, such as a `tunegemm.store.Record`."""

    @property
    def candidate(self) -> Hashable:
        """The measured candidate."""

    @property
    def ratio(self) -> float:
        """Speed relative to torch.mm; above 1 is faster."""

    @property
    def evidence(self) -> Evidence:
        """How much it proves."""

    @property
    def is_foreign(self) -> bool:
        """Whether it was imported or merged; then it never outranks local measurements."""

    @property
    def is_outdated(self) -> bool:
        """Whether its kernel sources differ from this program's, and it is not confirmed."""

    @property
    def is_torch(self) -> bool:
        """Whether the candidate is torch.mm itself."""


R = TypeVar("R", bound=Result)

#: The order of evidence: measured here, by this program's kernels, by which method.
Standing = tuple[bool, bool, Evidence]


def standing(result: Result) -> Standing:
    """Return the rank of a result's evidence; ratios compare only at equal rank."""
    return not result.is_foreign, not result.is_outdated, result.evidence


def rank(result: Result) -> tuple[Standing, float]:
    """Return the sort key of results of several candidates: evidence first, then the ratio."""
    return standing(result), result.ratio


def best_of_each(results: Iterable[R]) -> list[R]:
    """Return each candidate's latest result of its highest standing. results: oldest first."""
    best: dict[Hashable, R] = {}
    for result in results:
        known = best.get(result.candidate)
        if known is None or standing(result) >= standing(known):
            best[result.candidate] = result
    return list(best.values())


def leaders(results: Iterable[R]) -> list[R]:
    """Return the best result of each candidate, the best candidate first. results: oldest first."""
    return sorted(best_of_each(results), key=rank, reverse=True)


def may_be_record(best: Result) -> bool:
    """Whether a candidate with this best result may replace torch.mm: not if it is slower."""
    return best.ratio >= 1 or best.is_torch


def choose(results: Iterable[R]) -> R | None:
    """Return the record among a problem's results under one fingerprint, oldest first; None for torch.mm."""
    return next((best for best in leaders(results) if may_be_record(best)), None)
