"""The request, the progress and the result of a tuning."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Literal

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import is_torch
from tunegemm.measure.outcome import Measurement, Outcome
from tunegemm.measure.statistics import tie
from tunegemm.model import rank as model
from tunegemm.search.efforts import Effort

if TYPE_CHECKING:
    import optuna

#: The source of times: this GPU, a recording of another GPU, or only the model.
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
    """The problem that probably follows; its kernels are compiled meanwhile."""
    deadline: float = math.inf
    """When the budget ends that it shares with other requests, by the caller's time.monotonic()."""


@contextmanager
def bar(callback: Callable[[Progress], None] | None = None) -> Iterator[Callable[[Progress], None]]:
    """Show a tqdm bar over the candidates, a widget if a notebook has ipywidgets; also call `callback`."""
    from tqdm.auto import tqdm

    stage = ""
    with tqdm(unit="kernel", leave=False) as shown:

        def report(progress: Progress) -> None:
            nonlocal stage
            shown.total = max(progress.planned, 1)
            torchs = progress.problem.torch_call
            best = f"best {progress.best_ratio:.3f} x {torchs}" if progress.best_ratio is not None else ""
            shown.set_description(f"{progress.problem} {progress.stage}", refresh=False)
            shown.set_postfix_str(best, refresh=False)
            done = min(progress.measured + sum(progress.failures.values()), shown.total)
            shown.update(done - shown.n)  # tqdm redraws a few times a second
            if progress.stage != stage:
                stage = progress.stage
                shown.refresh()
            if callback is not None:
                callback(progress)

        yield report


@dataclass(frozen=True)
class Progress:
    """How far a tuning has come; `tune` passes it to its callback after each step."""

    problem: Problem
    stage: str
    """The current step: library, screen, vary, explore, probe, refine, final and done; or compile and done if
    nothing can be timed."""
    feasible: int
    """Kernels that passed feasibility."""
    compiled: int
    """Kernels that are ready to launch."""
    to_compile: int
    """Candidates of this batch whose kernels are not ready yet."""
    library: int
    """How many of the vendor library's algorithms were measured."""
    measured: int
    """Generated candidates that this call measured before its final race."""
    planned: int
    """Generated candidates that the effort allows, including those that fail."""
    failures: Mapping[str, int]
    """Failed candidates by stage."""
    best_label: str
    best_us: float | None
    best_ratio: float | None
    """Speed of the best candidate so far, relative to torch.mm."""
    elapsed_s: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent waiting, by phase: `tunegemm.tuning.run.Run.seconds`."""


#: Rows of a printed result.
_SHOWN = 8


@dataclass(frozen=True, repr=False)
class TuneResult:
    """The result of a tuning. It prints as a short table, winner first, also in a notebook."""

    problem: Problem
    device: Device
    source: Source
    best: Measurement | None
    """The winner of the final race. After an interrupted tuning, the record that it leaves."""
    outcomes: tuple[Outcome, ...]
    """Every outcome, the final race's last."""
    predictions: tuple[model.Prediction, ...]
    """The model's ranking, best first, if nothing was timed; empty otherwise."""
    labels: Mapping[str, str]
    """Candidate digest -> short name."""
    seconds: float
    compiled: int
    """Kernels that this call compiled, without those found in the object store."""
    interrupted: bool = False
    study: optuna.Study | None = field(default=None, compare=False, repr=False)
    """The search as an Optuna study, in memory; None if nothing was timed or another process tuned."""
    note: str = ""
    """One sentence for the user: missing steps, and how to continue."""
    stages: tuple[str, ...] = ()
    """The stage of each outcome: ``library``, ``screen``, ... and ``final``."""

    def rows(self) -> list[tuple[str, Measurement]]:
        """Each measured candidate by its label: the winner first, then the others of the final race, then
        those that were only screened, the fastest beside torch.mm first.

        The last measurement of each candidate counts; for the winner, the one that is reported.
        """
        latest: dict[Candidate, tuple[bool, Measurement]] = {}
        for outcome, stage in itertools.zip_longest(self.reported, self.stages):
            if isinstance(outcome, Measurement):
                latest[outcome.candidate] = stage == "final", outcome
        best = self.best.candidate if self.best is not None else None

        def place(row: tuple[bool, Measurement]) -> tuple[bool, bool, float]:
            was_raced, measurement = row
            return measurement.candidate != best, not was_raced, -measurement.ratio

        ordered = sorted(latest.values(), key=place)
        return [(self.label(measurement.candidate), measurement) for _, measurement in ordered]

    @property
    def reported(self) -> tuple[Outcome, ...]:
        """The outcomes. The winner is last, with the figures of the rounds that did not choose it."""
        best = self.best
        if best is None or not (best.samples_us and best.baseline_us):
            return self.outcomes
        return (*self.outcomes, best)

    def label(self, candidate: Candidate) -> str:
        """Its short name."""
        return self.labels.get(candidate.digest, str(candidate))

    def __repr__(self) -> str:
        if self.best is not None:
            ratio = f"{self.best.ratio:.3f} x {self.problem.torch_call}"
            result = f"{ratio} by {self.label(self.best.candidate)}"
        elif self.predictions:
            result = f"ranked by the model, {self.label(self.predictions[0].candidate)} first"
        else:
            result = "no result"
        return f"<TuneResult of {self._title()}: {result}>"

    def __str__(self) -> str:
        lines = [self._title()]
        cells = cells_of(self, _SHOWN)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            figures = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
            lines.append("  " + "  ".join([*figures, row[-1]]))
        if self.best is not None:
            lines.append(f"{self.best.candidate!r}")
        return "\n".join(lines + ([self.note] if self.note else []))

    def _repr_html_(self) -> str:
        """The table, for a notebook."""
        head, *body = cells_of(self, _SHOWN)
        cells = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>"]
        cells += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body]
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f"<table><caption>{escape(self._title())}</caption>{''.join(cells)}</table>{note}"

    def _title(self) -> str:
        return f"{self.problem} on {self.device.name}, {self.source}, {self.seconds:.1f} s"


def cells_of(result: TuneResult, most: int | None = None) -> list[tuple[str, ...]]:
    """A heading, and the first rows of a result as text: of what was timed, or of the model's ranking.

    A ratio with ``=`` ties with the first: they are closer than the noise.
    """
    if result.predictions:
        ranked = result.predictions[:most]
        return [("model us", "kernel"), *((f"{p.total_us:.2f}", result.label(p.candidate)) for p in ranked)]
    shown, torchs = result.rows()[:most], result.problem.torch_call
    # Races run at other clocks: as on a leaderboard, times are at the clock of the first row's race.
    torch_us = shown[0][1].baseline_median_us if shown else 0.0
    cells: list[tuple[str, ...]] = [(f"x {torchs}", "us", f"{torchs} us", "TFLOP/s", "kernel")]
    for place, (label, item) in enumerate(shown):
        ratio = 1.0 if is_torch(item.candidate) else item.ratio
        us = torch_us / ratio if place else item.median_us
        # The winner is the cheapest of those that tie, so that one of them may be faster in the rounds shown.
        is_tie = place > 0 and item.is_steady == shown[0][1].is_steady and tie(shown[0][1], item)
        figures = (
            f"{ratio:.3f}{'=' * is_tie}",
            f"{us:.2f}",
            f"{torch_us:.2f}",
            f"{result.problem.flops / us / 1e6:.1f}",
        )
        cells.append((*figures, label))
    return cells
