"""Which candidates go on to the final race. Pure: no GPU, no database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM, is_torch
from tunegemm.measure.outcome import Measurement
from tunegemm.tuning.efforts import Effort, profile

Measured = Mapping[Candidate, Measurement]


_LAUNCHES_PER_FINALIST = 2


def finalists(
    screened: Measured, effort: Effort, at_cap: Mapping[Candidate, float] | None = None
) -> list[Candidate]:
    """Those of which most is expected, those that took the least time, the library's best, and torch.mm.

    at_cap: for a GPU at its power cap, what is expected there of each of our own candidates
    (`tunegemm.model.rank.steady_ratios`). The fastest by an interleaved screen need not be the fastest in
    use: all share the clocks that their mixture leaves, so that a candidate which draws less power gives what
    it gains to the others (docs/decisions/0012-steady-state-at-the-power-cap.md).

    By time, too, since for some shapes torch.mm has two speeds, some 10 % apart, and keeps one for most
    interleaves throughout: a candidate that met the slow one leads by ratio
    (H200, 2026-11-22).
    """
    numbers = profile(effort)
    places = numbers.interleaved if at_cap is None else numbers.steady
    own, library = _by_ratio(screened)
    if at_cap is None:
        expected, quickest = own, sorted(own, key=lambda m: m.median_us)
    else:
        expected, quickest = sorted(own, key=lambda m: -at_cap[m.candidate]), own
    chosen = [*_of_several_kernels(expected, places.own), *_of_several_kernels(quickest, places.quickest)]
    algorithms = [candidate for candidate in library if not is_torch(candidate)][: places.library]
    # torch.mm, too, where only families without it were asked for: it is the record when all of them lose.
    return [*dict.fromkeys([*chosen, *algorithms]), TORCH_MM] if screened else []


def _of_several_kernels(measurements: Iterable[Measurement], count: int) -> list[Candidate]:
    """The first candidates, but few launches of one kernel.

    They are often all in front together and would leave no room for others, which the screen's few rounds
    in other moments of clock and power may have put too low.
    """
    chosen: list[Candidate] = []
    launches: Counter[Candidate] = Counter()
    for candidate in (measurement.candidate for measurement in measurements):
        launches[candidate.kernel] += 1
        if len(chosen) < count and launches[candidate.kernel] <= _LAUNCHES_PER_FINALIST:
            chosen.append(candidate)
    return chosen


def _by_ratio(measured: Measured) -> tuple[list[Measurement], list[Candidate]]:
    """Our own measurements and the library's candidates, the fastest first."""
    fastest_first = sorted(measured.values(), key=lambda m: -m.ratio)
    own = [m for m in fastest_first if m.candidate.family != TORCH_MM.family]
    return own, [m.candidate for m in fastest_first if m.candidate.family == TORCH_MM.family]
