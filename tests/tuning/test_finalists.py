"""Which candidates go on, by what was measured before."""

from __future__ import annotations

from tests.tuning.planted import launches
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Measurement
from tunegemm.tuning import finalists


def test_the_quickest_reach_the_final_race_whatever_torch_did() -> None:
    """256x4096x4096 on an H200: torch.mm took 17.4 us beside some candidates and 15.8 beside others."""
    screened = {TORCH_MM: Measurement(TORCH_MM, (17.4,) * 3, (17.4,) * 3, 1e-3, 0.0)}
    for number in range(30):
        ours, torchs = (16.5, 17.4) if number < 25 else (16.1, 15.8)
        for launch in launches(Candidate.make("cute_sm90", {"kernel": number})):
            screened[launch] = Measurement(launch, (ours,) * 3, (torchs,) * 3, 1e-3, 0.0)
    chosen = finalists.of_interleaved(screened)
    assert chosen[-1] == TORCH_MM and len(chosen) == 12 + 4 + 1
    beside_fast, beside_slow = ([c for c in chosen[:-1] if (c["kernel"] >= 25) == x] for x in (True, False))
    assert len(beside_slow) == 12 and len(beside_fast) == 4
    assert len({c.kernel for c in chosen}) == 6 + 2 + 1, "two launches of a kernel"


def test_nothing_measured_nothing_raced() -> None:
    assert finalists.of_interleaved({}) == finalists.for_qualifying({}) == finalists.of_qualified({}) == []
