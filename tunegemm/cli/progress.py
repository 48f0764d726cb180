"""What one sees while a shape is tuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tunegemm.report.text import clean

if TYPE_CHECKING:
    from tunegemm.describe.problem import Problem
    from tunegemm.tuning.progress import Progress

#: Seconds without a line in a log, at most.
_QUIET_S = 30.0


def describe_failures(failures: Mapping[str, int]) -> str:
    """``failed 3 (compile 2, timeout 1)``; nothing when there are none."""
    counts = {stage: count for stage, count in failures.items() if count}
    if not counts:
        return ""
    return f"failed {sum(counts.values())} ({', '.join(f'{stage} {n}' for stage, n in counts.items())})"


def describe_best(progress: Progress) -> str:
    """``best pp128x192x64 at 205.3 us, 1.043 x torch.mm``; nothing before the first one."""
    if progress.best_us is None:
        return ""
    ratio = f", {progress.best_ratio:.3f} x torch.mm" if progress.best_ratio is not None else ""
    return f"best {progress.best_label} at {progress.best_us:.1f} us{ratio}"


def describe_counts(progress: Progress) -> str:
    """``feasible 812 · compiled 24 (+8) · library 9 · measured 120/400``, and the failures by stage.

    In brackets the kernels that this batch waits for; what is not known yet is left out.
    """
    waiting = f" (+{progress.to_compile})" if progress.to_compile else ""
    parts = [
        f"feasible {progress.feasible}" if progress.feasible else "",
        f"compiled {progress.compiled}{waiting}" if progress.compiled or waiting else "",
        f"library {progress.library}" if progress.library else "",
        # Where nothing can be timed, kernels are compiled only.
        f"measured {progress.measured}/{progress.planned}" if progress.measured or progress.library else "",
        describe_failures(progress.failures),
    ]
    return " · ".join(part for part in parts if part)


class ProgressView:
    """A live bar per problem on a terminal; elsewhere (a log, a pipe) one line per stage, or per 30 s of it.

    Use as a context manager and pass `update` as `on_progress`. Prints on the console given: stderr, so
    that stdout holds the result and nothing else.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = (
            Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None
        )
        self._running: dict[Problem, Progress] = {}
        self._told: dict[Problem, tuple[str, float]] = {}  # the stage and when, of each one's last line

    def __enter__(self) -> ProgressView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, progress: Progress) -> None:
        if self._live is not None:
            self._running[progress.problem] = progress
            self._live.update(Group(*map(self._render, self._running.values())))
            return
        stage, told_s = self._told.get(progress.problem, ("", 0.0))
        if progress.stage != stage or progress.elapsed_s - told_s >= _QUIET_S:
            line = [str(progress.problem), progress.stage, describe_counts(progress), describe_best(progress)]
            line.append(f"{progress.elapsed_s:.0f} s")
            self._console.print(clean(" · ".join(part for part in line if part)), soft_wrap=True)
            self._told[progress.problem] = progress.stage, progress.elapsed_s

    def end(self, problem: Problem) -> None:
        """The problem's bar goes."""
        self._running.pop(problem, None)
        self._told.pop(problem, None)
        if self._live is not None:
            self._live.update(Group(*map(self._render, self._running.values())))

    @contextmanager
    def ended(self, problem: Problem) -> Iterator[None]:
        """The problem's bar goes; within the context the others are away, for its result."""
        self.end(problem)
        if self._live is not None:
            self._live.stop()
        yield
        if self._live is not None:
            self._live.start()

    @staticmethod
    def _render(progress: Progress) -> Group:
        done = progress.compiled if progress.stage == "compile" else progress.measured
        done += sum(progress.failures.values())
        bar = ProgressBar(total=max(progress.planned, 1), completed=min(done, progress.planned), width=30)
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(clean(progress.problem), style="bold"),
            progress.stage,
            bar,
            Text(f"{progress.elapsed_s:.0f} s"),
        )
        return Group(
            head, Text(describe_counts(progress)), Text(clean(describe_best(progress)), style="green")
        )
