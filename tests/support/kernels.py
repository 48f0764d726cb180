"""Kernels for GPU tests: compiled and loaded, tuned into the tests' database, watched as they are served."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import compile_workers
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import CompilePool, CompileResult
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.launching import Launcher
from tunegemm.store import packing, packs


@dataclass(frozen=True)
class Kernels:
    """The fixture `kernels`: candidates compiled into a store of the tests, for the GPU here."""

    pool: CompilePool
    device: Device

    def begin(self, problem: Problem, candidate: Candidate) -> Future[CompileResult]:
        """Compiled once, however often it is asked for."""
        key = families.get(candidate.family).kernel_key(problem, candidate, self.device)
        return self.pool.submit(candidate.family, key)

    def begin_all(self, wanted: Iterable[tuple[Problem, Candidate]]) -> None:
        """A module's kernels compile on all cores meanwhile: each test waits for its own, so they are wanted
        in the order of the tests.
        """
        for problem, candidate in wanted:
            self.begin(problem, candidate)

    def compiled(self, problem: Problem, candidate: Candidate) -> Path:
        """The object of a kernel that compiles."""
        result = self.begin(problem, candidate).result()
        assert result.artifact is not None, (problem, candidate, result.failure)
        return result.artifact.path

    def load(self, problem: Problem, candidate: Candidate) -> Launcher:
        """A launcher of a kernel that compiles."""
        path = self.compiled(problem, candidate)
        return families.get(candidate.family).load(problem, candidate, self.device, path)


def take_shipped(store: ArtifactStore) -> None:
    """Kernels that ship are in the store from now on, by the names that the compilers here give them."""
    if (pack := packs.shipped()) is None:
        return
    here, keys = packing.toolchain(), [*pack.each_key()]
    random.shuffle(keys)  # processes that begin together take other ones first
    for key in keys:
        own = {**key, **{name: here[name] for name in here if name in key}}
        if pack.suits(own) and store.find(own) is None and (artifact := pack.find(key)) is not None:
            packing.copy(store, own, artifact)


def selected(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """The values of these parameters in each test of the module that has all of them and will run."""
    items = (item for item in request.session.items if item.path == request.path)
    cases = [
        item.callspec.params
        for item in items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    return [tuple(case[name] for name in names) for case in cases if case.keys() >= set(names)]


def tune_ours(problems: Iterable[Problem], trials: int) -> frozenset[Problem]:
    """Tunes into the tests' database, without the library, so that no tie goes to it; what it tuned."""
    from benchmarks.dispatch import record_own
    from tunegemm.dispatch.api import refresh
    from tunegemm.store import Database
    from tunegemm.tuning.tuner import Tuner

    device, wanted = find_device("cuda:0"), [*problems]
    with (
        Database.open() as database,
        Tuner(device, database, families=["cute_sm90"], workers=compile_workers()) as tuner,
    ):
        done = frozenset(
            one
            for one, following in itertools.zip_longest(wanted, wanted[1:])
            if record_own(database, tuner, one, trials, following)
        )
    refresh()
    return done


def watch_launches(monkeypatch: pytest.MonkeyPatch, note: Callable[..., None], **others: Any) -> None:
    """From now on, `note` gets the problem of each kernel that is served, and what it is launched with.

    Compiled code is served by every record, too, whether it gains enough or not: products of tests are small.
    others: of the `Planner`, such as what it reads records by.
    """
    from tunegemm.dispatch import api, planning
    from tunegemm.dispatch.dispatcher import Dispatcher
    from tunegemm.dispatch.launchers import Prepared, prepare
    from tunegemm.dispatch.planning import Planner

    def watched(record: Any, device: Device) -> Prepared:
        prepared = prepare(record, device)
        launch = prepared.launch
        if launch is None:
            return prepared

        def noted(*arguments: Any) -> None:
            note(record.problem, *arguments)
            launch(*arguments)

        return replace(prepared, launch=noted)

    monkeypatch.setattr(planning, "least_ratio", lambda problem, device: 0.0)
    served = Dispatcher(Planner(prepare=watched, **others))
    monkeypatch.setattr(api, "dispatcher", served)
    monkeypatch.setattr(api, "product", served.product)
    monkeypatch.setattr(api, "quick", served.planner.quick)
