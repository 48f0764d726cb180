"""The display while a shape is tuned."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
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
#: Shorter phases are not named.
_SHORT_S = 0.05


def describe_best(progress: Progress) -> str:
    """``best pp128x192x64 at 205.3 us, 1.043 x torch.mm``; empty before the first result."""
    if progress.best_us is None:
        return ""
    ratio = ""
    if progress.best_ratio is not None:
        ratio = f", {progress.best_ratio:.3f} x {progress.problem.torch_call}"
    return f"best {progress.best_label} at {progress.best_us:.1f} us{ratio}"


def describe_seconds(progress: Progress) -> str:
    """``15 s``; at the end also the waiting times: ``15 s (start 3.2, races 4.1, compiling 5.0)``."""
    phases = [f"{name} {spent:.1f}" for name, spent in progress.seconds.items() if spent >= _SHORT_S]
    waited = f" ({', '.join(phases)})" if phases and progress.stage == "done" else ""
    return f"{progress.elapsed_s:.0f} s{waited}"


def describe_counts(progress: Progress) -> str:
    """``feasible 812 · compiled 24 (+8) · library 9 · measured 120/400 · failed 3 (compile 2, timeout 1)``.

    In brackets the kernels that this batch waits for; unknown counts are left out.
    """
    failed = ", ".join(f"{stage} {count}" for stage, count in progress.failures.items() if count)
    waiting = f" (+{progress.to_compile})" if progress.to_compile else ""
    parts = [
        f"feasible {progress.feasible}" if progress.feasible else "",
        f"compiled {progress.compiled}{waiting}" if progress.compiled or waiting else "",
        f"library {progress.library}" if progress.library else "",
        # If nothing can be timed, kernels are only compiled; for the library alone, nothing is planned.
        f"measured {progress.measured}/{progress.planned}"
        if progress.planned and (progress.measured or progress.library)
        else "",
        f"failed {sum(progress.failures.values())} ({failed})" if failed else "",
    ]
    return " · ".join(part for part in parts if part)


class ProgressView:
    """A live bar per problem on a terminal; elsewhere (a log, a pipe) one line per stage, or per 30 s of it.

    Use as a context manager and pass `update` as `on_progress`. Prints on the given console, which is stderr,
    so that stdout holds only the result.
    """

    def __init__(self, console: Console, *, total: int = 1, budget_s: float | None = None) -> None:
        """total: number of problems. budget_s: time limit of each, to show the remaining time."""
        self._console = console
        self._total, self._budget_s, self._ended = total, budget_s, 0
        self._running: dict[Problem, tuple[Progress, float]] = {}  # the last of each, and when it came
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._render_all)
            if console.is_terminal
            else None
        )
        self._last_line: dict[Problem, tuple[str, float]] = {}  # stage and time of each problem's last line

    def __enter__(self) -> ProgressView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, progress: Progress) -> None:
        if self._live is not None:
            self._running[progress.problem] = progress, time.monotonic()
            return
        stage, line_s = self._last_line.get(progress.problem, ("", 0.0))
        if progress.stage != stage or progress.elapsed_s - line_s >= _QUIET_S:
            line = [f"{self.place()}{progress.problem}", progress.stage, describe_counts(progress)]
            line += [describe_best(progress), describe_seconds(progress)]
            self._console.print(clean(" · ".join(part for part in line if part)), soft_wrap=True)
            self._last_line[progress.problem] = progress.stage, progress.elapsed_s

    def end(self, problem: Problem) -> None:
        """Removes the problem's bar."""
        self._running.pop(problem, None)
        self._last_line.pop(problem, None)
        self._ended += 1

    @contextmanager
    def ended(self, problem: Problem) -> Iterator[None]:
        """Removes the problem's bar; within the context the other bars are hidden, to print its result."""
        self.end(problem)
        if self._live is not None:
            self._live.stop()
        yield
        if self._live is not None:
            self._live.start()

    def place(self) -> str:
        """``[2/5] ``, of several problems."""
        return f"[{min(self._ended + 1, self._total)}/{self._total}] " if self._total > 1 else ""

    def clock(self, progress: Progress, elapsed_s: float) -> str:
        """The seconds so far, an estimate of the remaining ones, and the rest of the budget."""
        parts = [f"{elapsed_s:.0f} s"]
        left = progress.planned - _done(progress)
        if progress.measured and left > 0:
            parts.append(f"about {left * progress.elapsed_s / _done(progress):.0f} s to go")
        if self._budget_s is not None:
            rest_s = self._budget_s - elapsed_s
            parts.append(
                f"{rest_s:.0f} s of the budget left" if rest_s > 0 else "the budget is spent: ending"
            )
        return ", ".join(parts)

    def _render_all(self) -> Group:
        """Runs at every refresh, so that clocks advance between events."""
        now = time.monotonic()
        return Group(*(self.rendered(item, now - since) for item, since in list(self._running.values())))

    def rendered(self, progress: Progress, since_s: float) -> Group:
        done = progress.compiled if progress.stage == "compile" else _done(progress)
        bar = ProgressBar(total=max(progress.planned, 1), completed=min(done, progress.planned), width=20)
        head = Table.grid(padding=(0, 2))
        head.add_row(Text(f"{self.place()}{clean(progress.problem)}", style="bold"), progress.stage, bar)
        clock = self.clock(progress, progress.elapsed_s + since_s)
        return Group(
            head,
            Text(" · ".join(filter(None, (describe_counts(progress), clock)))),
            Text(clean(describe_best(progress)), style="green"),
        )


def _done(progress: Progress) -> int:
    """Candidates that were tried."""
    return progress.measured + sum(progress.failures.values())
