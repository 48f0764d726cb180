"""What is compiled before it is asked for, so that no core waits: for a problem whose search begins, and for
the one that follows while the GPU measures.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from tunegemm.compile.artifacts import Key
from tunegemm.compile.pool import CompilePool, Ready, Urgency
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.search import Portfolio, Search
from tunegemm.search.efforts import Effort, profile
from tunegemm.tuning.begin import ranked_families
from tunegemm.tuning.kernels import Kernels

#: Kernels by the name of their family and their key.
Named = list[tuple[str, Key]]


class Ahead:
    """Plans searches, of one problem and of the next, as far as they depend on nothing that is measured."""

    def __init__(
        self, kernels: Kernels, pool: CompilePool, *, compiled_only: bool = False, is_known: bool = True
    ) -> None:
        """compiled_only: only what has an object is tried. is_known: whether it is known what a search asks
        for first; of a sampler of somebody else it is not.
        """
        self._kernels, self.pool = kernels, pool
        self._compiled_only, self._is_known = compiled_only, is_known
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._planned: dict[Problem, Future[Named]] = {}
        self._ready: dict[Problem, Ready] = {}

    def close(self) -> None:
        """End its thread."""
        self._thread.shutdown(cancel_futures=True)

    def is_planned(self, problem: Problem) -> bool:
        """Whether a problem was planned while the one before was measured."""
        return problem in self._planned

    def plan(self, problem: Problem, effort: Effort, limit: int | None) -> None:
        """Begin to compile for the problem that follows, in a thread: what its search asks for first."""
        self._planned[problem] = self._thread.submit(self.ranked_by, problem, effort, limit, Urgency.NEXT)

    def start(self, problem: Problem, effort: Effort, limit: int | None) -> None:
        """Begin to compile for the problem whose search begins: as it was planned, or is planned now."""
        planned = self._planned.pop(problem, None)
        if planned is None or planned.exception() is not None:
            self.ranked_by(problem, effort, limit, Urgency.NOW)
        else:
            self._submit(planned.result(), Urgency.IDLE)

    def wait(self) -> None:
        """Until all that was to be planned is."""
        self._thread.submit(bool).result()

    def ready(self, problem: Problem, effort: Effort) -> Ready | None:
        """Which kernels a quick search on a GPU prefers: the same before and after it began to compile. None
        for any.
        """
        if profile(effort).compiling is None or not self._kernels.device.is_real:
            return None
        return self._ready.setdefault(problem, self.pool.ready())

    def compiled(self) -> Ready | None:
        """Which kernels alone may be tried; None for all."""
        return self.pool.ready() if self._compiled_only else None

    def forget(self, problem: Problem) -> None:
        """The problem is tuned."""
        self._ready.pop(problem, None)

    def ranked_by(self, problem: Problem, effort: Effort, limit: int | None, urgency: Urgency) -> Named:
        """Submits what searches ask for first, as far as that does not depend on the database; and, for when
        cores have nothing else to do, the kernels that it returns: what a quick one may ask for later.
        """
        kernels = self._kernels
        if not self._is_known or kernels.device.lacks_memory(problem) is not None:
            return []
        ready = self.ready(problem, effort)
        searches: list[Search] = []
        later: Named = []
        for _, _, ranked in ranked_families(kernels, problem, effort, compiled=self.compiled(), ready=ready):
            if ready is not None and not searches:
                later = self._named(
                    problem, (c for c in ranked if not kernels.is_compiled(problem, c, ready))
                )
            searches.append(Search(ranked, {}, profile(effort).plan, trials=limit))
        first = Portfolio(searches, profile(effort).plan).planned_screen()
        self._submit(self._named(problem, first), urgency)
        self._submit(later, Urgency.IDLE)
        return later

    def _named(self, problem: Problem, candidates: Iterable[Candidate]) -> Named:
        device = self._kernels.device
        return [(c.family, families.generator(c.family).kernel_key(problem, c, device)) for c in candidates]

    def _submit(self, named: Named, urgency: Urgency) -> None:
        for family, key in named:
            self.pool.submit(family, key, urgency=urgency)
