"""Tuning with all its parts but a GPU: kernels are really compiled, times come from a recording.

The recording is written here; its numbers are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.planted import tuning_families
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DeviceError, ProblemError, SpaceError
from tunegemm.generate import families
from tunegemm.generate.artifacts import ArtifactStore
from tunegemm.generate.compile import CompilePool
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure import SCREEN, Job, Policy
from tunegemm.measure.outcome import Failure, Measurement, Outcome
from tunegemm.measure.replay import write_sweep
from tunegemm.store import Database
from tunegemm.store.shipped import read_shipped
from tunegemm.tuning import tuner as tuning
from tunegemm.tuning.finalists import of_shared_clocks
from tunegemm.tuning.run import Progress, Run, TuneResult
from tunegemm.tuning.tuner import Tuner, open_device, open_gpu

PROBLEM = Problem.parse("512x512x512")
BROKEN = Problem.parse("512x512x1024")
"""Its sweep holds kernels that do not compile here."""
UNRECORDED = Problem.parse("64x64x64")
DEVICE = replace(find_device("model:h200"), spec="cuda:0")


def kernels(*widths: int) -> list[Candidate]:
    """One small, feasible kernel of the shipped space per tile width: cheap to compile."""
    family, found = families.get("cute_sm90"), {}
    for kernel in families.load_space("cute_sm90").kernels():
        width = kernel["tile_n"]
        if (
            width in widths
            and kernel["tile_m"] == 64
            and width not in found
            and family.check(PROBLEM, kernel, DEVICE)
        ):
            found[width] = kernel
    assert set(found) == set(widths)
    return list(found.values())


def launches(kernel: Candidate, count: int = 3) -> list[Candidate]:
    """A few launches of a kernel."""
    values = families.load_space("cute_sm90").launch_values
    first = {name: listed[0] for name, listed in values.items()}
    name, listed = max(values.items(), key=lambda item: len(item[1]))
    return [kernel.with_launch(**first | {name: value}) for value in listed[:count]]


def measurement(candidate: Candidate, us: float) -> Measurement:
    return Measurement(candidate, (us, us + 0.1, us), (10.0, 10.0, 10.0), 1e-3, 0.002)


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
    with Tuner(open_device("replay:h200"), cache=cache, workers=2) as tuner:
        yield tuner


@pytest.fixture(scope="module")
def told() -> list[Progress]:
    """What `exhaustive` told of its progress."""
    return []


@pytest.fixture(scope="module")
def exhaustive(cache: Path, told: list[Progress]) -> TuneResult:
    """Everything that is recorded of PROBLEM, tried."""
    with Tuner(open_device("replay:h200"), cache=cache, workers=2) as tuner:
        return tuner.tune(PROBLEM, effort="exhaustive", on_progress=told.append)


def candidates(result: TuneResult) -> list[Candidate]:
    return [outcome.candidate for outcome in result.outcomes]


class TestReplayed:
    def test_the_winner_is_the_fastest_recorded(self, exhaustive: TuneResult) -> None:
        assert exhaustive.source == "replayed"
        assert exhaustive.best is not None and exhaustive.best.candidate == FASTEST
        assert exhaustive.best.evidence["source"] == "replayed"
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
            with Tuner(open_device("replay:h200"), cache=cache, seed=5, workers=2) as tuner:
                runs.append(tuner.tune(PROBLEM, trials=6))
        assert candidates(runs[0]) == candidates(runs[1])
        assert runs[0].outcomes == runs[1].outcomes
        assert runs[0].best == runs[1].best
        own = {c for c in candidates(runs[0]) if c.family == "cute_sm90"}
        assert len(own) == 6, "the final race measures candidates again, and only those"

    def test_nothing_replayed_is_stored(self, cache: Path, tmp_path: Path) -> None:
        with (
            Database.open(tmp_path / "tuning.sqlite") as database,
            Tuner(open_device("replay:h200"), database, cache=cache, workers=2) as tuner,
        ):
            assert tuner.tune(PROBLEM, trials=2).best is not None
            tuner.tune(UNRECORDED, trials=1)
            assert database.problems() == []


class TestEndedEarly:
    @staticmethod
    def interrupt_when(condition: Callable[[Progress], bool]) -> Callable[[Progress], None]:
        def on_progress(progress: Progress) -> None:
            if condition(progress):
                raise KeyboardInterrupt

        return on_progress

    def test_ctrl_c_keeps_what_was_measured(self, tuner: Tuner) -> None:
        result = tuner.tune(
            PROBLEM,
            effort="exhaustive",
            on_progress=self.interrupt_when(lambda progress: progress.library + progress.measured == 3),
        )
        assert result.interrupted
        assert result.note == "interrupted after 3 measurements; run the same command again to go on"
        assert sum(isinstance(outcome, Measurement) for outcome in result.outcomes) == 3
        assert result.best is not None and result.best in result.outcomes
        assert tuner.tune(PROBLEM, trials=2).interrupted is False, "the tuner is still good"

    def test_ctrl_c_before_the_first_measurement(self, tuner: Tuner) -> None:
        result = tuner.tune(PROBLEM, on_progress=self.interrupt_when(lambda progress: True))
        assert result.interrupted and result.best is None and not result.outcomes

    def test_ctrl_c_while_only_compiling(self, tuner: Tuner) -> None:
        stop = self.interrupt_when(lambda progress: progress.stage == "compile")
        result = tuner.tune(UNRECORDED, on_progress=stop)
        assert result.interrupted and result.source == "modelled" and not result.predictions

    def test_no_time_at_all(self, tuner: Tuner) -> None:
        result = tuner.tune(PROBLEM, budget_seconds=0)
        assert result.best is None and not result.outcomes and not result.interrupted
        assert result.note == (
            "the budget of 0 s ended the search after 0 measurements; a larger one goes on"
        )


def test_compiled_only_tries_what_the_store_holds(
    cache: Path, tmp_path: Path, exhaustive: TuneResult
) -> None:
    device = open_device("replay:h200")
    with Tuner(device, cache=tmp_path, workers=2, compiled_only=True) as tuner:
        assert {c.family for c in candidates(tuner.tune(PROBLEM))} == {"cublaslt"}
    with Tuner(device, cache=cache, workers=2, compiled_only=True) as tuner:
        result = tuner.tune(PROBLEM)
    assert result.compiled == 0
    assert {c.family for c in candidates(result)} == {"cublaslt", "cute_sm90"}


class TestFamilies:
    @pytest.mark.parametrize("name", ["cute_sm90", "cublaslt"])  # those of the recording
    def test_only_the_families_asked_for_are_tried(self, cache: Path, name: str) -> None:
        with Tuner(open_device("replay:h200"), cache=cache, families=[name], workers=2) as tuner:
            result = tuner.tune(PROBLEM, trials=3)
        assert {candidate.family for candidate in candidates(result)} == {name}
        assert result.best is not None

    def test_an_unknown_family(self, cache: Path) -> None:
        with pytest.raises(SpaceError, match="kernel family 'cutlas' is not known"):
            Tuner(open_device("replay:h200"), cache=cache, families=["cutlas"])


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

    def test_too_few_trials(self, tuner: Tuner) -> None:
        for problem in (PROBLEM, UNRECORDED):
            with pytest.raises(SpaceError, match="trials = 0: at least 1 is needed"):
                tuner.tune(problem, trials=0)


def test_a_compile_that_fails_costs_its_candidates_only(cache: Path) -> None:
    with Tuner(open_device("replay:h200"), cache=cache) as tuner:
        tuner.pool.close()
        tuner.pool = CompilePool(
            ArtifactStore(cache), workers=2, families_module="tests.support.planted.tuning_families"
        )
        told: list[Progress] = []
        with tuner.pool:
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
    ],
)
def test_what_measures_never_advises_a_device_that_does_not(
    monkeypatch: pytest.MonkeyPatch, spec: str | None, named: str
) -> None:
    monkeypatch.setattr("tunegemm.tuning.tuner.cuda_device_count", lambda: 0)
    with pytest.raises(DeviceError, match=named) as caught:
        open_gpu(spec)
    assert "replay:" not in str(caught.value)


def test_the_function_without_a_tuner(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(cache))
    result = tuning.tune("512x512x512", device="replay:h200", trials=2)
    assert result.source == "replayed" and result.best is not None


def test_the_quickest_reach_the_final_race_whatever_torch_did(cache: Path) -> None:
    """256x4096x4096 on an H200: torch.mm took 17.4 us beside some candidates and 15.8 beside others."""
    kinds = [Candidate.make("cute_sm90", {"kernel": kernel}) for kernel in range(30)]
    with Tuner(DEVICE, cache=cache) as tuner:
        run = Run(tuner, PROBLEM, None)
        for kernel, kind in enumerate(kinds):
            ours, torchs = (16.5, 17.4) if kernel < 25 else (16.1, 15.8)
            for launch in launches(kind):
                run.screened[launch] = Measurement(launch, (ours,) * 3, (torchs,) * 3, 1e-3, 0.0)
        run.screened[TORCH_MM] = Measurement(TORCH_MM, (17.4,) * 3, (17.4,) * 3, 1e-3, 0.0)
        finalists = of_shared_clocks(run.screened)
    assert finalists[-1] == TORCH_MM and len(finalists) == 12 + 4 + 1
    beside_fast, beside_slow = (
        [c for c in finalists[:-1] if (c["kernel"] >= 25) == fast] for fast in (True, False)
    )
    assert len(beside_slow) == 12 and len(beside_fast) == 4
    assert len({c.kernel for c in finalists}) == 6 + 2 + 1, "two launches of a kernel"


def test_a_search_begins_with_what_is_known_of_the_product(cache: Path, tmp_path: Path) -> None:
    """Of the plain product's record for one with an epilogue; and of records that are shipped."""
    (plain,) = (launches(kernel)[0] for kernel in kernels(64))
    with (
        Database.open(tmp_path / "tuning.sqlite") as database,
        Tuner(DEVICE, database, cache=cache, families=["cute_sm90"]) as tuner,
    ):
        database.settle(PROBLEM, DEVICE, measurement(plain, 9.0))
        database.settle(replace(PROBLEM, epilogue="relu"), DEVICE, measurement(TORCH_MM, 9.0))
        fused = Run(tuner, replace(PROBLEM, epilogue="silu"), None)
        assert fused._seeds() == [plain], "the library's are tried anyway"
        assert fused.start_search(Capped(), "quick", None).planned_screen()[0].kernel == plain.kernel
        (shipped,) = (r for r in read_shipped()[0] if str(r.problem) == "4096x14336x4096 bf16 tn")
        for problem in (shipped.problem, replace(shipped.problem, epilogue="silu")):
            assert Run(tuner, problem, None)._seeds()[0] == families.completed(shipped.candidate)


class Capped:
    """Made-up times of a chip at its power cap: the narrowest kernel leads at shared clocks, alone the widest
    in wide bands. Keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, list[Candidate]]] = []

    def discover(self, problem: Problem) -> list[Candidate]:
        return [TORCH_MM]

    def measure(self, problem: Problem, jobs: Sequence[Job], policy: Policy) -> Iterator[Outcome]:
        self.asked.append((policy.turn_ms, [job.candidate for job in jobs]))
        for job in jobs:
            us, turns = 10.0, {"turn_ms": policy.turn_ms}
            if job.candidate != TORCH_MM:
                wide, band = job.candidate["tile_n"] / 64, job.candidate["swizzle_size"] / 100
                us = 9.5 - wide - band if policy.turn_ms else 8.5 + wide
            evidence = {"sm_clock_mhz": 1500, "throttle_reasons": ("sw_power_cap",)} | turns
            yield Measurement(job.candidate, (us,) * 3, (10.0,) * 3, 1e-3, 0.001, evidence)


def test_at_the_power_cap_the_best_alone_wins(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [launches(kernel)[0] for kernel in kernels(*GOOD)]
    measurer, ahead = Capped(), list[Candidate]()
    with (
        Database.open(tmp_path / "tuning.sqlite") as database,
        Tuner(DEVICE, database, cache=cache, workers=2) as tuner,
    ):
        run = Run(tuner, PROBLEM, None)
        list(run.evaluate(measurer, [*own, TORCH_MM], SCREEN))
        assert run.is_throttled
        assert of_shared_clocks(run.screened)[0]["tile_n"] == 16
        monkeypatch.setattr(run, "compile_ahead", ahead.extend)
        finalists = run.heat(measurer)
        result = run.settle(run.race(measurer, finalists, tuner.final))
        record = database.best(PROBLEM, DEVICE.fingerprint)
        entries = database.entries(PROBLEM)
        again = Run(tuner, PROBLEM, None)
        known = dict(again._known())
    _, first, second, final = measurer.asked
    assert [turn_ms > 0 for turn_ms, _ in measurer.asked] == [False, True, True, True]
    assert set(first[1]) == {*own, TORCH_MM}
    leaders = {own[-1].kernel, own[-2].kernel}
    assert not set(second[1]) & set(first[1])
    by_order = {order: [c for c in second[1] if c["cluster_order"] == order] for order in ("index", "gpc")}
    assert {c.kernel for c in by_order["index"]} == leaders
    assert {c.kernel for c in by_order["gpc"]} == {c.kernel for c in own}
    assert {c.kernel for c in ahead if c["cluster_order"] == "gpc"} == {c.kernel for c in own}
    assert TORCH_MM in final[1] and finalists[0]["tile_n"] == 64
    assert result.best is not None and record is not None and record.candidate == result.best.candidate
    assert record.candidate["tile_n"] == 64 and record.candidate["swizzle_size"] == 16
    assert {entry.policy for entry in entries} == {"screen", "heat", "alone"}
    # A search that goes on compares what was timed alike.
    assert {c: known[c] for c in own} == {c: pytest.approx(10 / (8.5 + c["tile_n"] / 64)) for c in own}


def test_a_whole_tuning_at_the_power_cap(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurer, told = Capped(), list[Progress]()
    monkeypatch.setattr(Tuner, "measurer_for", lambda *_: measurer)
    only = ["cute_sm90", "cublaslt"]
    with (
        Database.open(tmp_path / "tuning.sqlite") as database,
        Tuner(DEVICE, database, cache=cache, workers=2, families=only) as tuner,
    ):
        result = tuner.tune(PROBLEM, trials=12, budget_seconds=3600.0, on_progress=told.append)
        again = tuner.tune(PROBLEM, trials=12, budget_seconds=0.0)
        record = database.best(PROBLEM, DEVICE.fingerprint)
    stages = list(dict.fromkeys(progress.stage for progress in told))
    assert stages[0] == "library" and stages[-3:] == ["heat", "final", "done"]
    assert result.best is not None and result.best.evidence["turn_ms"] > 0
    alone = [o for o in result.outcomes if isinstance(o, Measurement) and o.evidence["turn_ms"]]
    assert result.best.ratio == max(o.ratio for o in alone)
    assert told[-1].best_ratio == result.best.ratio
    # Without a budget nothing is searched, and few are raced; what the race finds is the record all the same.
    assert "the budget of 0 s ended the search" in again.note
    assert record is not None and again.best is not None and record.candidate == again.best.candidate
    assert len([o for o in again.outcomes if isinstance(o, Measurement)]) <= 5


def test_without_time_for_heats_few_are_raced(cache: Path) -> None:
    own = [launch for kernel in kernels(*GOOD) for launch in launches(kernel)]
    measurer = Capped()
    with Tuner(DEVICE, cache=cache, workers=2) as tuner:
        run = Run(tuner, PROBLEM, None)
        list(run.evaluate(measurer, [*own, TORCH_MM], SCREEN))
        finalists = run.qualify(measurer, left_s=5.0)
        assert len(measurer.asked) == 1, "no heats"
        assert len(finalists) <= 5 and finalists[-1] == TORCH_MM
        assert len({c.kernel for c in finalists}) == len(finalists), "of each kernel its best launch"
        assert run.qualify(measurer, left_s=60.0) and len(measurer.asked) == 3


def test_no_heats_on_a_chip_that_holds_its_clocks(cache: Path) -> None:
    with Tuner(DEVICE, cache=cache) as tuner:
        run = Run(tuner, PROBLEM, None)
        assert not run.is_throttled
        run._record(replace(measurement(FASTEST, 9.0), evidence={"throttle_reasons": ()}))
        assert not run.is_throttled


def test_a_short_screen_that_saw_no_cap_does_not_hide_it(cache: Path) -> None:
    with Tuner(DEVICE, cache=cache) as tuner:
        run = Run(tuner, PROBLEM, None)
        run._record(replace(measurement(TORCH_MM, 10.0), evidence={"throttle_reasons": ("sw_power_cap",)}))
        run._record(replace(measurement(FASTEST, 9.0), evidence={"throttle_reasons": ()}))
        assert run.is_throttled


@pytest.mark.parametrize("noise", [0.06, 0.04])
def test_a_race_on_a_busy_gpu_settles_nothing(tmp_path: Path, noise: float) -> None:
    """Of made-up times: torch.mm disagrees with itself, timed twice in one race."""
    raced = [replace(one, noise=noise) for one in (measurement(FASTEST, 9.0), measurement(TORCH_MM, 10.0))]
    with (
        Database.open(tmp_path / "tuning.sqlite") as database,
        Tuner(DEVICE, database, cache=tmp_path) as tuner,
    ):
        result = Run(tuner, PROBLEM, None).settle(raced)
        known = database.best(PROBLEM, DEVICE.fingerprint)
    assert result.best is not None and result.best.candidate == FASTEST
    assert (known is not None and known.confirmed) == (noise < 0.05)
    assert ("no record is settled" in result.note) == (noise > 0.05)


@pytest.mark.parametrize(
    ("screen", "race", "noise", "settled"),
    [
        # Medians of torch.mm in us and SM clocks in MHz, as measured on H200s on 2026-11-21. Beside another
        # process: 8448x9216x2048 with a winner at 3.2, 8448x9216x256 at 1.7.
        ([(395.8, 1980), (1655.2, 1980)], (1235.4, 1980), 0.0027, False),
        ([(75.4, 1980)], (103.7, 1980), 0.031, False),
        # Alone, with a clock that the race lowered: 2304x5120x5120, 8448x9216x256; and 256x4096x4096.
        ([(157.7, 1980), (193.2, 1500)], (200.7, 1455), 0.0008, True),
        ([(75.5, 1980)], (96.9, 1470), 0.0024, True),
        ([(15.72, 1980), (17.43, 1965)], (17.25, 1965), 0.0006, True),
        # Alone, too, on 2026-11-22: the clock of the first interleave was read as it fell. 8448x9216x2048.
        ([(405.9, 1410)], (495.9, 1440), 0.0007, True),
        # Where NVML tells no clock, nothing is said.
        ([(395.8, None)], (1235.4, 1980), 0.0027, True),
    ],
)
def test_a_baseline_that_is_slow_throughout_settles_nothing(
    tmp_path: Path,
    screen: list[tuple[float, int | None]],
    race: tuple[float, int | None],
    noise: float,
    settled: bool,
) -> None:
    def measured(candidate: Candidate, baseline: tuple[float, int | None], ratio: float) -> Measurement:
        us, clock = baseline
        evidence = {"sm_clock_mhz": clock}
        return Measurement(candidate, (us / ratio,) * 3, (us,) * 3, 1e-3, noise, evidence)

    with (
        Database.open(tmp_path / "tuning.sqlite") as database,
        Tuner(DEVICE, database, cache=tmp_path) as tuner,
    ):
        run = Run(tuner, PROBLEM, None)
        for baseline in screen:
            run._record(measured(FASTEST, baseline, 1.0))
        run.stage = "final"
        raced = [run._record(measured(FASTEST, race, 1.1)), run._record(measured(TORCH_MM, race, 1.0))]
        result = run.settle(raced)
        known = database.best(PROBLEM, DEVICE.fingerprint)
    assert (known is not None and known.confirmed) == settled
    assert ("torch.mm takes" in result.note) == (not settled)
