"""What is asked of a tuning, what it says while it runs, and what it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.generate import model
from tunegemm.measure.outcome import Measurement, Outcome
from tunegemm.tuning.efforts import Effort

if TYPE_CHECKING:
    import optuna

#: Where times come from: this GPU, a recording of another, or nothing but the model.
Source = Literal["measured", "replayed", "modelled"]


@dataclass(frozen=True)
class Request:
    """A problem to tune, and how much to try."""

    problem: Problem
    effort: Effort = "quick"
    trials: int | None = None
    """Most candidates to measure; None for the effort's own number."""
    budget_seconds: float | None = None
    """Most time; None for no limit."""
    following: Problem | None = None
    """What is likely to be asked for next: its kernels are compiled meanwhile."""


@dataclass(frozen=True)
class Progress:
    """How far a tuning is; passed to `on_progress` whenever something happened."""

    problem: Problem
    stage: str
    """What is being done: library, screen, vary, explore, probe, refine, final
    and done; or compile and done, where nothing can be timed."""
    feasible: int
    """Kernels that passed feasibility."""
    compiled: int
    """Kernels that are ready to launch."""
    to_compile: int
    """Candidates of this batch whose kernels are not ready yet."""
    library: int
    """Algorithms of the vendor's library that were measured."""
    measured: int
    """Candidates of the generators that were measured by this call before its final race."""
    planned: int
    """Candidates of the generators that the effort allows; those that fail count, too."""
    failures: Mapping[str, int]
    """Failed candidates by stage."""
    best_label: str
    best_us: float | None
    best_ratio: float | None
    """Speed of the best so far relative to torch.mm."""
    elapsed_s: float


@dataclass(frozen=True)
class TuneResult:
    """What a tuning found."""

    problem: Problem
    device: Device
    source: Source
    best: Measurement | None
    """The winner of the final race. Of a tuning that was cut short, the record that it leaves."""
    outcomes: tuple[Outcome, ...]
    """Every outcome, the final race's last."""
    predictions: tuple[model.Prediction, ...]
    """The model's ranking, best first, where nothing was timed; empty otherwise."""
    labels: Mapping[str, str]
    """Candidate digest -> short name."""
    seconds: float
    compiled: int
    """Kernels compiled by this call; those found in the object store are not counted."""
    interrupted: bool = False
    study: optuna.Study | None = field(default=None, compare=False, repr=False)
    """The search as an Optuna study, in memory; None where nothing was timed, or another process tuned."""
    note: str = ""
    """One sentence for the user: what was not done, and how to go on."""
