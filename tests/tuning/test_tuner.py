"""Tuning with all its parts but a GPU: kernels are compiled, times come from a recording.

The recording is written here; its numbers are made up. Compile workers are planted but for one test.
"""

from __future__ import annotations

import cProfile
import functools
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
import pytest

from fit.sweep_files import write_sweep
from tests.support.planted import tuning_families
from tests.tuning.planted import (
    DEVICE,
    PROBLEM,
    Timed,
    capped,
    interrupt_when,
    kernels,
    launches,
    measurement,
    planted_tuner,
    run_of,
)
from tunegemm.compile.artifacts import Key, digest
from tunegemm.compile.pool import CompileResult, Urgency
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DeviceError, ProblemError, SpaceError, StudyError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Failure, Measurement, Outcome
from tunegemm.measure.settings import SCREEN, RaceSettings
from tunegemm.measure.statistics import tie
from tunegemm.search import Portfolio
from tunegemm.search.efforts import Effort
from tunegemm.store import Database
from tunegemm.tuning import run as tuning_run
from tunegemm.tuning import tuner as tuning
from tunegemm.tuning.begin import start_search
from tunegemm.tuning.progress import Progress, Request, TuneResult
from tunegemm.tuning.tuner import Tuner, open_device, open_gpu

BROKEN = Problem.parse("512x512x1024")
"""Its sweep holds kernels that do not compile here."""
UNRECORDED = Problem.parse("64x64x64")


def sweep(widths: tuple[int, ...]) -> list[Outcome]:
    """Three launches of each kernel, none as fast as another; torch.mm takes 10 us."""
    own = [launch for kernel in kernels(*widths) for launch in launches(kernel)]
    outcomes: list[Outcome] = [measurement(launch, 9.0 + 0.25 * (7 * i % 11)) for i, launch in enumerate(own)]
    return [*outcomes, measurement(TORCH_MM, 10.0)]


GOOD = (16, 32, 64)
WRONG = launches(kernels(32)[0])[1]
FASTEST = launches(kernels(16)[0])[0]


@pytest.fixture(scope="module", autouse=True)
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`replay:h200` is the recording that is written here."""
    root = tmp_path_factory.mktemp("db")
    broken = (16, tuning_families.RAISES, tuning_families.ABORTS)
    for problem, outcomes in (
        (PROBLEM, [*sweep(GOOD), Failure(WRONG, "wrong", "relative error 0.7 > 0.01")]),
        (BROKEN, sweep(broken)),
    ):
        write_sweep(
            root / "sweeps", "h200", DEVICE, problem, outcomes,
            recorded_at=datetime(2026, 1, 2, tzinfo=UTC), command="none: made up",
        )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tunegemm.measure.replay.data_path", lambda *parts: root.joinpath(*parts[1:]))
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels of all tests here: each is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tuner(cache: Path) -> Iterator[Tuner]:
    with planted_tuner(open_device("replay:h200"), cache=cache) as tuner:
        yield tuner


@pytest.fixture(scope="module")
def told() -> list[Progress]:
    """What `exhaustive` told of its progress."""
    return []


@pytest.fixture(scope="module")
def exhaustive(cache: Path, told: list[Progress]) -> TuneResult:
    """Everything that is recorded of PROBLEM, tried."""
    with planted_tuner(open_device("replay:h200"), cache=cache) as tuner:
        result = tuner.tune(PROBLEM, effort="exhaustive", on_progress=told.append)
        assert tuner.tune(PROBLEM, trials=1).compiled == 0, "it counts its own"
        return result


def candidates(result: TuneResult) -> list[Candidate]:
    return [outcome.candidate for outcome in result.outcomes]


class TestReplayed:
    def test_the_winner_is_the_fastest_recorded(self, exhaustive: TuneResult) -> None:
        assert exhaustive.source == "replayed"
        assert exhaustive.best is not None and exhaustive.best.candidate == FASTEST
        assert exhaustive.best.telemetry["source"] == "replayed"
        assert exhaustive.labels[FASTEST.digest] == families.get("cute_sm90").label(FASTEST)
        assert not exhaustive.interrupted and not exhaustive.note

    def test_every_recorded_candidate_was_tried_and_kernels_were_compiled(
        self, exhaustive: TuneResult, cache: Path
    ) -> None:
        assert set(candidates(exhaustive)) == {outcome.candidate for outcome in sweep(GOOD)}
        assert exhaustive.compiled == len(GOOD)
        assert len(list(cache.rglob("*.o"))) >= len(GOOD)

    def test_a_recorded_failure_is_a_failure(self, exhaustive: TuneResult) -> None:
        (failure,) = [outcome for outcome in exhaustive.outcomes if isinstance(outcome, Failure)]
        assert (failure.candidate, failure.stage) == (WRONG, "wrong")

    def test_progress(self, exhaustive: TuneResult, told: list[Progress]) -> None:
        stages = list(dict.fromkeys(progress.stage for progress in told))
        assert stages == ["library", "screen", "refine", "final", "done"]
        assert all(progress.measured <= progress.planned for progress in told)
        assert all(one.measured <= after.measured for one, after in pairwise(told))
        done = told[-1]
        assert (done.library, done.measured) == (1, 3 * len(GOOD) - 1)
        assert done.failures == {"wrong": 1}
        assert (done.compiled, done.to_compile, done.feasible) == (len(GOOD), 0, len(GOOD))
        assert exhaustive.best is not None and done.best_ratio == exhaustive.best.ratio

    def test_the_same_seed_gives_the_same_trials(self, cache: Path) -> None:
        runs = []
        for _ in range(2):
            with planted_tuner(open_device("replay:h200"), cache=cache, seed=5) as tuner:
                runs.append(tuner.tune(PROBLEM, trials=6))
        assert candidates(runs[0]) == candidates(runs[1])
        assert runs[0].outcomes == runs[1].outcomes
        assert runs[0].best == runs[1].best
        own = {c for c in candidates(runs[0]) if c.family == "cute_sm90"}
        assert len(own) == 6, "the final race measures candidates again, and only those"

    @pytest.mark.parametrize("effort", ["quick", "full"])
    def test_it_crosses_few_files_of_the_rooms_that_decide(self, tuner: Tuner, effort: Effort) -> None:
        """What a reader of `Tuner.tune` opens of search, tuning and measure, value classes among them: 20
        before 28 November 2026.
        """
        profile = cProfile.Profile()
        profile.enable()
        tuner.tune(PROBLEM, effort=effort)
        profile.disable()
        codes = [entry.code for entry in profile.getstats() if not isinstance(entry.code, str)]
        found = {Path(code.co_filename) for code in codes}
        rooms = [("tunegemm", room) for room in ("search", "tuning", "measure")]
        crossed = {path.stem for path in found if path.parts[-3:-1] in rooms}
        assert {"tuner", "study", "replay"} <= crossed, crossed
        assert len(crossed) <= 12, sorted(crossed)

    def test_nothing_replayed_is_stored(self, cache: Path, tmp_path: Path) -> None:
        with (
            Database.open(tmp_path / "tuning.sqlite", create=True) as database,
            planted_tuner(open_device("replay:h200"), database, cache=cache) as tuner,
        ):
            assert tuner.tune(PROBLEM, trials=2).best is not None
            tuner.tune(UNRECORDED, trials=1)
            assert database.problems() == []


class TestEndedEarly:
    def test_ctrl_c_keeps_what_was_measured(self, tuner: Tuner) -> None:
        result = tuner.tune(
            PROBLEM,
            effort="exhaustive",
            on_progress=interrupt_when(lambda progress: progress.library + progress.measured == 3),
        )
        assert result.interrupted
        assert result.note == "interrupted after 3 measurements; run the same command again to go on"
        assert sum(isinstance(outcome, Measurement) for outcome in result.outcomes) == 3
        assert result.best is not None and result.best in result.outcomes
        assert tuner.tune(PROBLEM, trials=2).interrupted is False, "the tuner is still good"

    def test_ctrl_c_before_the_first_measurement(self, tuner: Tuner) -> None:
        result = tuner.tune(PROBLEM, on_progress=interrupt_when(lambda progress: True))
        assert result.interrupted and result.best is None and not result.outcomes

    def test_ctrl_c_while_only_compiling(self, tuner: Tuner) -> None:
        stop = interrupt_when(lambda progress: progress.stage == "compile")
        result = tuner.tune(UNRECORDED, on_progress=stop)
        assert result.interrupted and result.source == "modelled" and not result.predictions

    def test_no_time_at_all(self, tuner: Tuner) -> None:
        result = tuner.tune(PROBLEM, budget_seconds=0)
        assert result.best is None and not result.outcomes and not result.interrupted
        assert result.note == (
            "the budget of 0 s ended the search after 0 measurements; a larger one goes on"
        )


class TestStudy:
    """The search of a tuning is an Optuna study."""

    def test_a_finished_tunings_study_holds_every_outcome(self, tuner: Tuner) -> None:
        result = tuner.tune(PROBLEM, effort="exhaustive")
        assert result.study is not None
        trials = result.study.get_trials(deepcopy=False)
        assert [t.user_attrs["candidate"] for t in trials if t.user_attrs["stage"] == "final"] != []
        told = Counter(t.user_attrs["candidate"] for t in trials)
        assert told == Counter(outcome.candidate.to_json() for outcome in result.outcomes)
        by_state = Counter(trial.state.name for trial in trials)
        failed = sum(isinstance(outcome, Failure) for outcome in result.outcomes)
        assert by_state == {"COMPLETE": len(trials) - failed, "FAIL": failed}
        measured = {
            (o.candidate.to_json(), o.median_us) for o in result.outcomes if isinstance(o, Measurement)
        }
        found = {
            (t.user_attrs["candidate"], t.user_attrs["microseconds"])
            for t in trials
            if t.state.name == "COMPLETE"
        }
        assert found == measured
        assert result.study.user_attrs["problem"] == str(PROBLEM)

    def test_another_sampler_prunes_by_the_families_rules(self, cache: Path, tmp_path: Path) -> None:
        path = tmp_path / "study.log"
        device = open_device("replay:h200")
        with planted_tuner(
            device, cache=cache, sampler="random", study=path, families=["cute_sm90"]
        ) as tuner:
            result = tuner.tune(PROBLEM, trials=6)
        assert result.best is not None and result.study is not None
        pruned = [t for t in result.study.trials if t.state.name == "PRUNED"]
        assert pruned and all(t.user_attrs["rule"] and t.user_attrs["reason"] for t in pruned)
        compiled = {outcome.candidate.to_json() for outcome in result.outcomes}
        assert not compiled & {t.user_attrs["candidate"] for t in pruned}
        own = {c for c in compiled if '"cute_sm90"' in c}
        assert 0 < len(own) <= 6
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
        (kept,) = optuna.get_all_study_summaries(storage)
        assert kept.n_trials == len(result.study.trials)

    def test_what_is_no_sampler_or_no_study_is_refused_first(self, cache: Path, tmp_path: Path) -> None:
        device = open_device("replay:h200")
        with pytest.raises(SpaceError, match="'luck': use roofline, tpe"):
            planted_tuner(device, cache=cache, sampler="luck")
        (tmp_path / "folder").mkdir()
        with pytest.raises(StudyError, match="a folder"):
            planted_tuner(device, cache=cache, study=tmp_path / "folder")


def test_compiled_only_tries_what_the_store_holds(
    cache: Path, tmp_path: Path, exhaustive: TuneResult
) -> None:
    device = open_device("replay:h200")
    with planted_tuner(device, cache=tmp_path, compiled_only=True) as tuner:
        assert {c.family for c in candidates(tuner.tune(PROBLEM, trials=3))} == {"cublaslt"}
    with planted_tuner(device, cache=cache, compiled_only=True) as tuner:
        result = tuner.tune(PROBLEM, trials=3)
    assert result.compiled == 0
    assert {c.family for c in candidates(result)} == {"cublaslt", "cute_sm90"}


class TestFamilies:
    @pytest.mark.parametrize("name", ["cute_sm90", "cublaslt"])  # those of the recording
    def test_only_the_families_asked_for_are_tried(self, cache: Path, name: str) -> None:
        with planted_tuner(open_device("replay:h200"), cache=cache, families=[name]) as tuner:
            result = tuner.tune(PROBLEM, trials=3)
        # torch.mm is in every final race: when all others lose to it, it is what is found.
        assert {c.family for c in candidates(result)} == {name, TORCH_MM.family}
        assert result.best is not None

    def test_a_family_without_recorded_times_is_ranked_and_said_so(self, cache: Path) -> None:
        device = open_device("replay:h200")
        with planted_tuner(device, cache=cache, families=["triton_tma"]) as tuner:
            result = tuner.tune(PROBLEM, trials=2)
        assert result.source == "modelled" and len(result.predictions) == 2
        assert "has no times of triton_tma on replay:h200: ranked by the model" in result.note
        with planted_tuner(device, cache=cache, families=["triton_tma", "cublaslt"]) as tuner:
            result = tuner.tune(PROBLEM, trials=2)
        assert {c.family for c in candidates(result)} == {"cublaslt"}
        assert result.note.endswith("has no times of triton_tma on replay:h200")

    def test_only_kernels_whose_label_matches_are_tried(self, cache: Path) -> None:
        device, only = open_device("replay:h200"), ["cute_sm90"]
        with planted_tuner(device, cache=cache, families=only, matching="^co") as t:
            tried = [c for c in candidates(t.tune(PROBLEM, trials=3)) if c.family == "cute_sm90"]
        assert tried and {c["schedule"] for c in tried} == {"cooperative"}
        with planted_tuner(device, cache=cache, families=only, matching="^zz") as t:
            assert "has a label that '^zz' matches" in t.tune(PROBLEM, trials=3).note


class TestModelled:
    def test_a_shape_that_was_not_recorded_is_ranked_by_the_model(self, tuner: Tuner) -> None:
        told: list[Progress] = []
        result = tuner.tune(UNRECORDED, trials=2, on_progress=told.append)
        assert result.source == "modelled"
        assert result.best is None and not result.outcomes
        assert "64x64x64 bf16 tn has no times on replay:h200: ranked by the model" in result.note
        assert len(result.predictions) == 2, "as many as trials were asked for"
        times = [prediction.total_us for prediction in result.predictions]
        assert times == sorted(times)
        assert all(prediction.candidate.digest in result.labels for prediction in result.predictions)
        assert [told[0].stage, told[-1].stage] == ["compile", "done"]
        assert (told[-1].compiled, told[-1].measured, told[-1].planned) == (2, 0, 2)

    def test_too_large_for_the_device(self, tuner: Tuner) -> None:
        for of_tuner in (tuner.tune, lambda problem: tuner.race(problem, [])):
            with pytest.raises(
                ProblemError, match=r"operands and output of 240 GB > 1\d\d(\.\d)? GB of NVIDIA H200"
            ):
                of_tuner(Problem(200000, 200000, 200000))


class TestRefusedNumbers:
    @pytest.mark.parametrize("trials", [0, -1, 2.5, float("nan"), True, "8", -(10**50)])
    def test_trials(self, tuner: Tuner, trials: Any) -> None:
        for problem in (PROBLEM, UNRECORDED):
            with pytest.raises(SpaceError, match=r"^trials = .*: give a whole number from 1 to \d+$"):
                tuner.tune(problem, trials=trials)

    def test_trials_of_5000_digits(self, tuner: Tuner) -> None:
        with pytest.raises(SpaceError, match="a number of over 19 digits"):
            tuner.tune(PROBLEM, trials=-(10**5000))

    @pytest.mark.parametrize("budget", [-1, -1e-9, float("nan"), "60", True, 1j])
    def test_budgets(self, tuner: Tuner, budget: Any) -> None:
        for tune in (tuner.tune, tuning.tune):
            with pytest.raises(
                SpaceError, match=r"^budget_seconds = .*: give a number of seconds from 0, or None$"
            ):
                tune(PROBLEM, budget_seconds=budget)

    def test_a_callback_that_is_no_function(self) -> None:
        with pytest.raises(SpaceError, match=r"^callback 'print': give a function of a Progress$"):
            tuning.tune(PROBLEM, callback="print")  # type: ignore[arg-type]

    @pytest.mark.parametrize("seed", [-1, 2**32, 0.5, float("nan"), None, False])
    def test_seeds(self, tmp_path: Path, seed: Any) -> None:
        with pytest.raises(SpaceError, match=r"^seed = .*: give a whole number from 0 to 4294967295$"):
            Tuner(DEVICE, cache=tmp_path, seed=seed)

    def test_a_budget_that_is_larger_than_any_time(self, tuner: Tuner) -> None:
        assert tuner.tune(PROBLEM, trials=1, budget_seconds=10**400).best is not None


def test_a_compile_that_fails_costs_its_candidates_only(cache: Path) -> None:
    told: list[Progress] = []
    with planted_tuner(open_device("replay:h200"), cache=cache, workers=2) as tuner:
        result = tuner.tune(BROKEN, effort="exhaustive", on_progress=told.append)
    failures = [outcome for outcome in result.outcomes if isinstance(outcome, Failure)]
    assert {failure.stage for failure in failures} == {"compile"}
    reasons = {failure.candidate["tile_n"]: failure.reason for failure in failures}
    assert reasons == {
        tuning_families.RAISES: "ValueError: a tile that the compiler refuses",
        tuning_families.ABORTS: "the compiler aborted by SIGABRT",
    }
    assert result.best is not None and result.best.candidate["tile_n"] == 16
    assert told[-1].failures == {"compile": len(failures)}
    assert told[-1].to_compile == 0


def test_a_race_whose_kernel_does_not_compile_has_no_winner(cache: Path) -> None:
    """That torch.mm is the fastest is not known then, and would be the record on a GPU."""
    broken = launches(kernels(tuning_families.RAISES)[0])[0]
    with planted_tuner(open_device("replay:h200"), cache=cache) as tuner:
        result = tuner.race(BROKEN, [broken])
        assert result.best is None and "see the failures" in result.note
        assert tuner.race(BROKEN, []).best is not None, "torch.mm alone"


class TestDevices:
    def test_without_a_gpu_the_recorded_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tuning, "cuda_device_count", lambda: 0)
        device = open_device()
        assert device.spec == "replay:h200"
        assert not device.is_real
        assert device.fingerprint == DEVICE.fingerprint

    def test_by_name(self) -> None:
        assert open_device("model:h200").spec == "model:h200"
        with pytest.raises(DeviceError, match="'replay:h300': no such recording; recorded: h200"):
            open_device("replay:h300")


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (None, "'cuda:0': no CUDA device here, and this measures"),
        ("cuda:0", "'cuda:0': no CUDA device here, and this measures"),
        ("model:h200", "'model:h200' measures nothing"),
        ("h200", "'h200' measures nothing"),
    ],
)
def test_what_measures_never_advises_a_device_that_does_not(
    monkeypatch: pytest.MonkeyPatch, spec: str | None, named: str
) -> None:
    monkeypatch.setattr("tunegemm.tuning.tuner.cuda_device_count", lambda: 0)
    with pytest.raises(DeviceError, match=named) as caught:
        open_gpu(spec)
    assert "replay:" not in str(caught.value)


def test_what_measures_takes_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "cuda_device_count", lambda: 1)
    monkeypatch.setattr(tuning, "find_device", lambda spec: spec)
    assert (open_gpu(), open_gpu("cuda:1")) == ("cuda:0", "cuda:1")


@pytest.mark.slow
def test_the_function_without_a_tuner_really_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(tmp_path))
    result = tuning.tune("512x512x512", device="replay:h200", trials=1)
    assert result.source == "replayed" and result.best is not None
    assert result.compiled == 1 and list(tmp_path.rglob("*.o"))


def test_a_whole_tuning_at_the_power_cap(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Progress] = []
    monkeypatch.setattr(Tuner, "measurer_for", lambda *_: measurer)
    only = ["cute_sm90", "cublaslt"]
    with (
        Database.open(tmp_path / "tuning.sqlite", create=True) as database,
        planted_tuner(DEVICE, database, cache=cache, families=only) as tuner,
    ):
        measurer = capped()
        result = tuner.tune(PROBLEM, trials=12, budget_seconds=3600.0, on_progress=told.append)
        again = tuner.tune(PROBLEM, trials=12, budget_seconds=0.0)
        record = database.best(PROBLEM, DEVICE.fingerprint)
    stages = list(dict.fromkeys(progress.stage for progress in told))
    assert stages[0] == "library" and stages[-2:] == ["final", "done"]
    assert result.best is not None and result.best.is_steady
    steady = [o for o in result.outcomes if isinstance(o, Measurement) and o.is_steady]
    assert tie(result.best, max(steady, key=lambda o: o.ratio)), "launches of one kernel are alike"
    assert told[-1].best_ratio == result.best.ratio
    # Without a budget nothing is searched, and few are raced; what the race finds is the record all the same.
    assert "the budget of 0 s ended the search" in again.note
    assert record is not None and again.best is not None and record.candidate == again.best.candidate
    assert len([o for o in again.outcomes if isinstance(o, Measurement)]) <= 7


def test_the_library_is_measured_while_kernels_are_ranked(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and once; not of a product whose kernels were ranked meanwhile."""
    measurer, ranked = Timed(lambda *_: 9.0), threading.Event()
    monkeypatch.setattr(Tuner, "measurer_for", lambda *_: measurer)
    monkeypatch.setattr(
        measurer, "measure", functools.partial(lambda old, *a: ranked.wait(60) and old(*a), measurer.measure)
    )
    only, other = ["cute_sm90", "cublaslt"], Problem.parse("512x512x1024")
    with (
        Database.open(tmp_path / "tuning.sqlite", create=True) as database,
        planted_tuner(DEVICE, database, cache=cache, families=only) as tuner,
    ):
        rank = tuner.kernels.ranked

        def told(*arguments: Any, **options: Any) -> Any:
            ranked.set()
            return rank(*arguments, **options)

        monkeypatch.setattr(tuner.kernels, "ranked", told)
        requests = [Request(PROBLEM, "quick", 4, None, other), Request(other, "quick", 4, None, None)]
        first, second = tuner.tune_all(requests)
        own = [set(candidates(result)) for result in (first, second)]
        asked, measurer.asked[:] = list(measurer.asked), []
        tuner.tune(PROBLEM, trials=8)
    screens = [batch for steady_ms, batch in asked if not steady_ms]
    assert screens[0] == [TORCH_MM] and own[0] >= {TORCH_MM}
    assert sum(TORCH_MM in batch for batch in screens) == 2, "once of each product"
    assert [TORCH_MM] not in screens[1:], "with others of the second"
    assert not any(TORCH_MM in batch for steady_ms, batch in measurer.asked if not steady_ms), "known"


def test_a_foreign_samplers_search_measures_the_library_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurer = Timed(lambda *_: 9.0)
    monkeypatch.setattr(Tuner, "measurer_for", lambda *_: measurer)
    only = ["cute_sm90", "cublaslt"]
    with planted_tuner(DEVICE, cache=cache, families=only, sampler="random") as tuner:
        tuner.tune(PROBLEM, trials=4)
    screens = [batch for steady_ms, batch in measurer.asked if not steady_ms]
    assert sum(TORCH_MM in batch for batch in screens) == 1


def test_a_quick_search_measures_32_of_the_first_family_and_two_of_each_other(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are far behind here. The final race measures some of them again, and no more of them."""
    monkeypatch.setattr(tuning_run, "SKIPPED_SHARE", 0)  # nothing is given up for being compiled late

    def time_us(candidate: Candidate, _: RaceSettings) -> float:
        return 9.0 + candidate["tile_n"] / 100 if candidate.family == "cute_sm90" else 20.0

    measurer = Timed(time_us)
    monkeypatch.setattr(Tuner, "measurer_for", lambda *_: measurer)
    told: list[Progress] = []
    with planted_tuner(DEVICE, cache=cache) as tuner:
        generators = tuner.kernels.generators
        result = tuner.tune(PROBLEM, on_progress=told.append)
    screened = {c for steady_ms, asked in measurer.asked if not steady_ms for c in asked}
    of_family = {name: sum(c.family == name for c in screened) for name in generators}
    assert of_family.pop("cute_sm90") == 32
    assert all(count <= 2 for count in of_family.values())
    assert told[-1].measured <= told[-1].planned == 32 + 2 * sum(map(bool, of_family.values()))
    (last, *_) = [asked for steady_ms, asked in measurer.asked if steady_ms]
    assert set(last) <= screened and set(candidates(result)) == screened
    # A dozen tiles, and half as many variants of the best of them: the rest are launches of these.
    assert len({c.kernel for c in screened if c.family == "cute_sm90"}) <= 14 + 6


@pytest.mark.parametrize(
    ("shape", "effort", "is_steady"),
    [
        ("64x512x512", "quick", False),
        ("512x64x512", "quick", False),
        ("72x512x512", "quick", True),
        ("64x512x512", "full", False),
    ],
)
def test_a_race_of_a_memory_bound_product_is_interleaved_at_the_cap(
    cache: Path, monkeypatch: pytest.MonkeyPatch, shape: str, effort: Effort, is_steady: bool
) -> None:
    measurer = capped()
    monkeypatch.setattr(Tuner, "measurer_for", lambda *_: measurer)
    with planted_tuner(DEVICE, cache=cache, families=["cute_sm90"]) as tuner:
        result = tuner.tune(Problem.parse(shape), effort=effort, trials=12)
    assert result.best is not None and result.best.is_steady == is_steady
    (*screens, (steady_ms, finalists)) = measurer.asked
    assert (steady_ms > 0) == is_steady and not any(steady for steady, _ in screens)
    widths = [candidate["tile_n"] for candidate in finalists if candidate != TORCH_MM]
    assert result.best.candidate["tile_n"] == (max if is_steady else min)(widths)


def test_what_is_compiled_is_measured_while_the_rest_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler waits for the first measurement here: whoever compiles all first would wait for ever."""
    awaited = tmp_path / "measured"
    monkeypatch.setenv("PLANTED_WAITS", f"64:{awaited}")

    def time_us(candidate: Candidate, _: RaceSettings) -> float:
        awaited.touch()
        return 9.0

    slow, ready = (launches(kernel)[0] for kernel in kernels(64, 32))
    with planted_tuner(DEVICE, cache=tmp_path / "cache") as tuner:
        family = families.get(ready.family)
        tuner.pool.submit(ready.family, family.kernel_key(PROBLEM, ready, DEVICE)).result()
        trials = run_of(tuner, measurer := Timed(time_us))
        outcomes = list(trials.evaluate([slow, ready, TORCH_MM], SCREEN, stage="screen"))
    assert [asked for _, asked in measurer.asked] == [[ready, TORCH_MM], [slow]]
    assert [outcome.candidate for outcome in outcomes] == [ready, TORCH_MM, slow]
    assert all(isinstance(outcome, Measurement) for outcome in outcomes)


def test_in_a_hurry_the_last_few_of_a_batch_are_measured_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And given up in the end. The compiler of one waits here until the others are measured."""
    compiles = tmp_path / "compiles"
    monkeypatch.setenv("PLANTED_WAITS", f"64:{compiles}")
    slow, *others = (launches(kernel)[0] for kernel in kernels(64, 32, 128, 160, 192))
    with planted_tuner(DEVICE, cache=tmp_path / "cache", workers=2) as tuner:
        trials = run_of(tuner, measurer := Timed(lambda *_: 9.0))

        def measured(*batch: Candidate) -> set[Candidate]:
            return {one.candidate for one in trials.evaluate(batch, SCREEN, stage="screen", skip_slow=True)}

        assert measured(slow, *others[:3]) == set(others[:3])
        assert trials.skipped() == [] and measured(others[3]) == {others[3]}, "given up"
        assert measured(slow, *others[:3]) == set(others[:3])
        compiles.touch()
        tuner.pool.submit(slow.family, families.get(slow.family).kernel_key(PROBLEM, slow, DEVICE)).result()
        assert measured(others[3]) == {slow, others[3]}
    assert all(sum(asked.count(one) for _, asked in measurer.asked) == 2 for one in others)


def test_what_is_known_to_be_good_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = tmp_path / "compiles"
    monkeypatch.setenv("PLANTED_WAITS", f"64:{compiles}")
    slow, *others = (launches(kernel)[0] for kernel in kernels(64, 32, 128, 160))
    with planted_tuner(DEVICE, cache=tmp_path / "cache", workers=2) as tuner:
        trials = run_of(tuner, Timed(lambda *_: 9.0))
        trials.known_good = frozenset([slow])
        threading.Timer(0.5, compiles.touch).start()
        outcomes = trials.evaluate([slow, *others], SCREEN, stage="screen", skip_slow=True)
        measured = {outcome.candidate for outcome in outcomes}
        assert slow in measured and measured | {*trials.skipped()} == {slow, *others}


class TestFollowing:
    """Kernels of the next problem are compiled while one is measured."""

    NEXT = Problem.parse("512x512x512", dtype="fp16")
    """None of its kernels is one of PROBLEM's."""

    def tuned(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch, effort: Effort, **options: Any
    ) -> tuple[list[str], list[str]]:
        """Kernels of NEXT that were asked of the pool: ahead of its tuning, and in it."""
        slow = {"triton_tma": 30.0}  # so that the family is given up after its first round
        measurer = Timed(lambda candidate, _: slow.get(candidate.family, 9.0))
        monkeypatch.setattr(Tuner, "measurer_for", lambda *_: measurer)
        ahead: list[str] = []
        asked: list[str] = []
        with planted_tuner(DEVICE, cache=cache, **options) as tuner:
            submit = tuner.pool.submit

            def noted(family: str, key: Key, *, urgency: Urgency = Urgency.NOW) -> Future[CompileResult]:
                is_ahead = threading.current_thread().name.startswith("ahead")
                assert begun or not is_ahead, "both are Python, and would take turns"
                if urgency is Urgency.IDLE:
                    assert effort == "quick", "another one may ask for thousands"
                elif is_ahead or is_next:
                    assert (urgency is Urgency.NEXT) == is_ahead
                    (ahead if is_ahead else asked).append(digest(key))
                return submit(family, key, urgency=urgency)

            def requests() -> Iterator[Request]:
                nonlocal is_next
                yield Request(PROBLEM, effort, trials=12, following=self.NEXT)
                tuner.ahead.wait()  # what is asked ahead is asked by now
                is_next = True
                yield Request(self.NEXT, effort, trials=12)

            def begin(*arguments: Any, **options: Any) -> Portfolio:
                begun.append(start_search(*arguments, **options))
                return begun[-1]

            is_next, begun = False, list[Portfolio]()
            monkeypatch.setattr(tuner.pool, "submit", noted)
            monkeypatch.setattr(tuning, "start_search", begin)
            first, second = tuner.tune_all(requests())
        assert first.best is not None and second.best is not None
        return ahead, asked

    @pytest.mark.parametrize("effort", ["quick", "full"])
    def test_what_it_will_ask_for_and_no_more(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effort: Effort
    ) -> None:
        ahead, asked = self.tuned(tmp_path, monkeypatch, effort, families=["cute_sm90", "triton_tma"])
        assert len(ahead) == len(set(ahead)) and len(ahead) >= 4
        assert set(ahead) <= set(asked)

    def test_nothing_where_nothing_may_be_compiled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = ["cute_sm90", "cublaslt"]
        ahead, _ = self.tuned(tmp_path, monkeypatch, "quick", families=library, compiled_only=True)
        assert ahead == []

    def test_one_that_cannot_be_tuned_harms_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Tuner, "measurer_for", lambda *_: Timed(lambda *_: 9.0))
        with planted_tuner(DEVICE, cache=tmp_path, families=["cute_sm90"]) as tuner:
            for following in (Problem(200000, 200000, 200000), Problem.parse("64x64x63")):
                (result,) = tuner.tune_all([Request(PROBLEM, trials=2, following=following)])
                assert result.best is not None
