"""Which candidates go on to qualifying rounds and to the final race. Pure: no GPU, no database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tunegemm.describe.space import Candidate
from tunegemm.generate import model
from tunegemm.generate.cublaslt import TORCH_MM, is_torch
from tunegemm.measure.outcome import Measurement

#: Own candidates that enter the final race, by ratio and by time, beside the best library algorithms.
_FINALISTS = 12
_QUICKEST = 4
_LIBRARY_FINALISTS = 6
_LAUNCHES_PER_FINALIST = 2
#: Kernels in the first qualifying round by what is expected of them in steady state, beside the `_QUICKEST`;
#: and the library's algorithms at least so fast, in interleaved timing, as the fastest of all.
_QUALIFYING = 14
_QUALIFYING_LIBRARY_RATIO = 0.85
#: Own candidates and the library's that go on from the qualifying rounds to the final race.
_QUALIFIED, _QUALIFIED_LIBRARY = 8, 2
#: Candidates that are raced where there is no time for qualifying rounds.
_UNQUALIFIED = 4

Measured = Mapping[Candidate, Measurement]


def of_interleaved(screened: Measured) -> list[Candidate]:
    """For the final race: the fastest, those that took the least time, and the library's best.

    Time, too, since for some shapes torch.mm has two speeds, some 10 % apart, and keeps one for most
    interleaves throughout: a candidate that met the slow one leads by ratio
    (H200, benchmarks/results/h200/torch-modes-2026-11-22.json).
    """
    own, library = _by_ratio(screened)
    quickest = sorted(own, key=lambda m: m.median_us)
    chosen = of_several_kernels(own, _FINALISTS) + of_several_kernels(quickest, _QUICKEST)
    return list(dict.fromkeys([*chosen, *library[:_LIBRARY_FINALISTS], *filter(is_torch, library)]))


def for_qualifying(screened: Measured) -> list[Candidate]:
    """At the power cap: own kernels of which most is expected in steady state, the fastest in interleaved
    timing, and the library's algorithms.
    """
    own, library = _by_ratio(screened)
    expected = sorted(own, key=lambda m: -model.steady_ratio(m.candidate, m.ratio))
    chosen = of_several_kernels(expected, _QUALIFYING, each=1) + of_several_kernels(own, _QUICKEST, each=1)
    enough = _QUALIFYING_LIBRARY_RATIO * max((m.ratio for m in screened.values()), default=0.0)
    near = [c for c in library if screened[c].ratio >= enough or is_torch(c)]
    return list(dict.fromkeys(chosen + near))


def without_qualifying(screened: Measured) -> list[Candidate]:
    """At the power cap, without time for qualifying rounds: few of those that would run in them."""
    contenders = for_qualifying(screened)
    return contenders[:_UNQUALIFIED] + [c for c in contenders[_UNQUALIFIED:] if is_torch(c)]


def leaders_of(qualified: Measured, count: int) -> list[Candidate]:
    """The best launch of each of the best own kernels."""
    return of_several_kernels(_by_ratio(qualified)[0], count, each=1)


def of_qualified(qualified: Measured) -> list[Candidate]:
    """For the final race: the fastest in steady state, the library's first ones, and torch.mm."""
    own, library = _by_ratio(qualified)
    chosen = of_several_kernels(own, _QUALIFIED) + library[:_QUALIFIED_LIBRARY]
    return list(dict.fromkeys([*chosen, *filter(is_torch, library)]))


def of_several_kernels(
    measurements: Iterable[Measurement], count: int, each: int = _LAUNCHES_PER_FINALIST
) -> list[Candidate]:
    """The first candidates, but few launches of one kernel.

    They are often all in front together and would leave no room for others, which the screen's few rounds
    in other moments of clock and power may have put too low.
    """
    chosen: list[Candidate] = []
    launches: Counter[Candidate] = Counter()
    for candidate in (measurement.candidate for measurement in measurements):
        launches[candidate.kernel] += 1
        if len(chosen) < count and launches[candidate.kernel] <= each:
            chosen.append(candidate)
    return chosen


def _by_ratio(measured: Measured) -> tuple[list[Measurement], list[Candidate]]:
    """Our own measurements and the library's candidates, the fastest first."""
    fastest_first = sorted(measured.values(), key=lambda m: -m.ratio)
    own = [m for m in fastest_first if m.candidate.family != TORCH_MM.family]
    return own, [m.candidate for m in fastest_first if m.candidate.family == TORCH_MM.family]
