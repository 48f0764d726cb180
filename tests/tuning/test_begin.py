"""Where a search begins: what is known here, what was best elsewhere; what of it cannot be used.

And what is planned ahead of its tuning, and what is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tuning.planted import (
    DEVICE,
    PROBLEM,
    capped,
    kernels,
    launches,
    measurement,
    planted_tuner,
    run_of,
)
from tunegemm.compile.artifacts import digest
from tunegemm.compile.pool import Ready, Urgency
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure import evidence
from tunegemm.measure.outcome import Failure, Stage
from tunegemm.store import Database
from tunegemm.store.shipped import read_shipped
from tunegemm.tuning import begin
from tunegemm.tuning.begin import known_failures, known_results, limit_uncompiled, seeds_of, start_search
from tunegemm.tuning.kernels import Kernels
from tunegemm.tuning.tuner import Tuner

PLAIN = launches(kernels(64)[0])[0]
FITS, TOO_LARGE = Problem(512, 6144, 4096), Problem(400_000, 400_000, 64)
ELSEWHERE = replace(DEVICE, fingerprint=replace(DEVICE.fingerprint, driver="570.1"))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database.open(tmp_path / "tuning.sqlite", create=True) as database:
        yield database


@pytest.fixture
def tuner(database: Database, tmp_path: Path) -> Iterator[Tuner]:
    with planted_tuner(DEVICE, database, cache=tmp_path, families=["cute_sm90"]) as tuner:
        yield tuner


def test_a_search_begins_with_what_is_known_of_the_product(database: Database, tuner: Tuner) -> None:
    """Of the plain product's record for one with an epilogue; and of records that are shipped."""
    database.confirm(PROBLEM, DEVICE, measurement(PLAIN, 9.0))
    database.confirm(replace(PROBLEM, epilogue="relu"), DEVICE, measurement(TORCH_MM, 9.0))
    fused = replace(PROBLEM, epilogue="silu")
    assert seeds_of(database, fused, DEVICE, tuner.kernels) == [PLAIN], "the library's are tried anyway"
    search = start_search(run_of(tuner, capped(), fused), tuner.kernels, [TORCH_MM])
    assert search.order.planned_screen()[0].kernel == PLAIN.kernel
    large = [r for r in read_shipped()[0] if str(r.problem) == "4096x14336x4096 bf16 tn"]
    (shipped,) = (r for r in large if r.fingerprint.device_name == DEVICE.name)
    for problem in (shipped.problem, replace(shipped.problem, epilogue="silu")):
        assert seeds_of(database, problem, DEVICE, tuner.kernels)[0] == families.completed(shipped.candidate)


def test_only_what_was_screened_here_is_known(database: Database, tuner: Tuner) -> None:
    """Ratios of steady-state rounds and of final races do not compare with a screen's."""
    screened, raced, qualified, elsewhere = launches(kernels(32)[0], 4)
    for candidate, device, word in (
        (screened, DEVICE, evidence.SCREEN), (screened, DEVICE, evidence.QUALIFYING),
        (raced, DEVICE, evidence.RACE), (qualified, DEVICE, evidence.QUALIFYING),
        (elsewhere, ELSEWHERE, evidence.SCREEN),
    ):  # fmt: skip
        us = 9.0 if word == evidence.SCREEN else 8.0
        database.publish(PROBLEM, device, measurement(candidate, us), method=word)
    database.publish(PROBLEM, DEVICE, Failure(PLAIN, "wrong", "relative error 0.7 > 0.01"))
    (known,) = known_results(database, PROBLEM, DEVICE, tuner.kernels, [])
    assert known.candidate == screened and known.ratio == pytest.approx(10 / 9.0)
    assert known_failures(run_of(tuner, capped()), tuner.kernels, []) == [PLAIN]


@pytest.mark.parametrize(
    ("stage", "reason", "is_banned"),
    [
        ("timeout", "no answer within 30 s", False),
        ("launch", "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of", False),
        ("launch", "CUDA error: out of memory", False),
        ("load", "cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY", False),
        ("launch", "CUBLAS_STATUS_ALLOC_FAILED", False),
        ("crash", "killed by signal 9", False),
        ("crash", "killed by signal 15: Terminated", False),
        ("crash", "ended with exit code 1: MemoryError", False),
        ("crash", "ended with exit code 1: OSError: [Errno 24] Too many open files: '/tmp/x'", False),
        ("crash", "ended with exit code 134: terminate called after throwing 'std::bad_alloc'", False),
        ("compile", "MemoryError: ", False),
        ("compile", "OSError: [Errno 12] Cannot allocate memory", False),
        ("compile", "the compiler aborted by SIGKILL", False),
        ("compile", "compile took longer than 60 s", False),
        ("compile", "the compile pool was closed", False),
        ("crash", "killed by signal 11", True),
        ("crash", "killed by signal 6: terminate called", True),
        ("compile", "the compiler aborted by SIGABRT", True),
        ("compile", "spills 64 B to local memory", True),
        ("launch", "too many resources requested for launch", True),
        ("launch", "out of resource: shared memory, Required: 262176, Hardware limit: 232448", True),
        ("crash", "CUDA error: an illegal memory access was encountered", True),
        ("wrong", "relative error 0.7 > 0.01", True),
    ],
)
def test_what_failed_for_want_of_memory_or_by_a_kill_is_tried_again(
    database: Database, tuner: Tuner, stage: Stage, reason: str, is_banned: bool
) -> None:
    database.publish(PROBLEM, DEVICE, Failure(PLAIN, stage, reason))
    assert (known_failures(run_of(tuner, capped()), tuner.kernels, []) == [PLAIN]) == is_banned


def test_nothing_is_compiled_for_a_kernel_whose_like_is_there(tmp_path: Path) -> None:
    """At 4096x4096x4096 the fastest shape was not measured: it was to be compiled with another epilogue, and
    the search did not wait for that.
    """
    problem, kernels = Problem.parse("4096x4096x4096"), Kernels(DEVICE, ["cute_sm90"], tmp_path)
    ranking = kernels.ranked(problem, "cute_sm90", most=64)
    best = ranking.predictions[0]
    names = ("schedule", "tile_m", "tile_n", "cluster_m", "cluster_n", "swap_ab")

    def alike(one: Candidate) -> bool:
        return all(one[name] == best.candidate[name] for name in names)

    like = [p for p in ranking.predictions if alike(p.candidate)]
    assert like[0] is best and len(like) > 2
    close = next(p for p in like[1:] if max(p.total_us / best.total_us, p.steady_us / best.steady_us) < 1.01)
    far = max(like, key=lambda p: p.total_us)
    assert far.total_us > 1.01 * best.total_us
    for there, is_skipped in ((close, True), (far, False)):
        key = families.get("cute_sm90").kernel_key(problem, there.candidate, DEVICE)
        ready = Ready(frozenset({digest(key)}))
        ranked = limit_uncompiled(kernels, problem, ranking, ready, is_first=True)
        assert there.candidate in ranked and (best.candidate not in ranked) == is_skipped
        assert 8 <= len(ranked) < 32


DAMAGED = {
    "unknown family": Candidate.make("cutlas", {"tile_m": 64}),
    "a further parameter": Candidate(
        PLAIN.family, (*PLAIN.compile_params, ("wings", 2)), PLAIN.launch_params
    ),
    "text for a number": PLAIN.kernel.with_launch(**dict(PLAIN.launch_params) | {"swizzle_size": "many"}),
    "a word of no kernel": PLAIN.kernel.with_launch(**dict(PLAIN.launch_params) | {"raster_order": "spiral"}),
    "negative": Candidate.make(PLAIN.family, dict(PLAIN.compile_params) | {"tile_n": -64}),
    "empty": Candidate.make(PLAIN.family, {}),
    "library": Candidate.make("cublaslt", {"algorithm": "cublaslt"}),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_candidate_costs_itself_only(database: Database, tuner: Tuner, what: str) -> None:
    """Stored here, elsewhere, and of a related problem: the search begins without it."""
    related = replace(PROBLEM, epilogue="silu")
    for problem, device in ((PROBLEM, DEVICE), (PROBLEM, ELSEWHERE), (related, DEVICE)):
        database.publish(problem, device, measurement(DAMAGED[what], 5.0))
    trials = run_of(tuner, capped())
    search = start_search(trials, tuner.kernels, [TORCH_MM], limit=4)
    asked = search.ask(8)
    assert asked and DAMAGED[what] not in asked
    assert DAMAGED[what] not in trials.screened


def test_an_incomplete_seed_is_completed(database: Database, tuner: Tuner) -> None:
    """A record of before a launch parameter existed: the parameter is at its first value, as kernels were."""
    *older, (name, _) = PLAIN.launch_params
    database.confirm(
        PROBLEM, ELSEWHERE, measurement(Candidate(PLAIN.family, PLAIN.compile_params, tuple(older)), 9.0)
    )
    (seed,) = seeds_of(database, PROBLEM, DEVICE, tuner.kernels)
    assert seed == PLAIN and seed[name] == tuner.kernels.space(seed.family).launch_values[name][0]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("problem", [FITS, TOO_LARGE], ids=str)
def test_only_what_is_known_and_fits_is_planned(
    monkeypatch: pytest.MonkeyPatch, problem: Problem, is_known: bool
) -> None:
    asked: list[Problem] = []

    def ranked(kernels: Any, problem: Problem, *_: Any, **__: Any) -> list[Any]:
        asked.append(problem)
        return []

    monkeypatch.setattr(begin, "ranked_families", ranked)
    kernels: Any = SimpleNamespace(device=find_device("model:h200"))
    pool: Any = SimpleNamespace()
    planning = begin.Ahead(kernels, pool, is_known=is_known)
    assert planning.ranked_by(problem, "quick", None, Urgency.NOW) == []
    assert asked == [FITS] * (is_known and problem is FITS)
    planning.close()


def test_each_search_knows_its_familys_results_and_nothing_known_is_asked_for(
    database: Database, tmp_path: Path
) -> None:
    with planted_tuner(DEVICE, database, cache=tmp_path, families=["cute_sm90", "gluon_wgmma"]) as tuner:
        ranked = tuner.kernels.ranked(PROBLEM, "gluon_wgmma").predictions[0]
        known = {PLAIN, ranked.candidate, TORCH_MM}
        for candidate in known:
            database.publish(PROBLEM, DEVICE, measurement(candidate, 9.0), method=evidence.SCREEN)
        study = start_search(run_of(tuner, capped()), tuner.kernels, [TORCH_MM])
        first, second = study.order.searches  # type: ignore[union-attr]
        assert set(first.results) == {PLAIN} and set(second.results) == {ranked.candidate}
        assert not known & {*study.ask()}
        assert {trial.user_attrs.get("candidate") for trial in study.study.trials} >= {
            candidate.to_json() for candidate in known
        }
