"""The search of a problem is an Optuna study: what is in it, whoever suggests."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from tunegemm.describe.space import Candidate, SearchSpace
from tunegemm.errors import SpaceError
from tunegemm.generate.feasibility import FEASIBLE, Verdict
from tunegemm.search import Portfolio, Search
from tunegemm.search.delegate import Kernels, value_lists
from tunegemm.search.efforts import EFFORTS, Effort
from tunegemm.search.samplers import sampler_of
from tunegemm.search.study import (
    FEWEST_TRIALS,
    ProblemStudy,
    StudySpace,
    Told,
    finished_trials,
    importances,
    of_family,
)

LAUNCHES = {"raster_order": ("along_m", "along_n"), "swizzle_size": (1, 2, 4, 8)}
TILES = {"tile_m": (64, 128, 192, 256), "tile_n": tuple(range(32, 257, 32)), "stages": (2, 3, 4, 5, 6)}
LIBRARY = [Candidate.make("cublaslt", {"algorithm": number}) for number in range(3)]
SMEM = 160_000


def smem_bytes(params: Mapping[str, Any]) -> int:
    return 128 * (params["tile_m"] + params["tile_n"]) * params["stages"]


def verdict(point: Candidate) -> Verdict:
    need = smem_bytes(point.params)
    return FEASIBLE if need <= SMEM else Verdict("smem_capacity", f"smem {need} B > {SMEM} B")


def kernels(family: str) -> list[Candidate]:
    points = (dict(zip(TILES, values, strict=True)) for values in itertools.product(*TILES.values()))
    first = {name: values[0] for name, values in LAUNCHES.items()}
    return [Candidate.make(family, point, first) for point in points if smem_bytes(point) <= SMEM]


def landscape(params: Mapping[str, Any]) -> float:
    """Smooth, with one best point: 128x160, 4 stages, along_n at 4."""
    value = 1.3 - 0.1 * abs(params["tile_m"] - 128) / 64 - 0.03 * abs(params["tile_n"] - 160) / 32
    value -= 0.02 * abs(params["stages"] - 4) + 0.02 * (params["raster_order"] != "along_n")
    return value - 0.02 * abs(params["swizzle_size"].bit_length() - 3)


BEST = 1.3


def study_of_landscape(
    families: Sequence[str] = ("cute_sm90",),
    *,
    effort: Effort = "quick",
    trials: int | None = None,
    sampler: optuna.samplers.BaseSampler | None = None,
    library: Sequence[Candidate] = LIBRARY,
) -> ProblemStudy:
    """The model of it knows the best tile's rank to within a few places."""
    plan = EFFORTS[effort].plan
    searches = []
    for family in families:
        ranked = sorted(kernels(family), key=lambda c: landscape(c.params), reverse=True)
        ranked = ranked[5:20] + ranked[:5] + ranked[20:]
        searches.append(Search(ranked, LAUNCHES, plan, trials=trials))
    spaces = [SearchSpace(family, TILES, LAUNCHES) for family in families]
    return ProblemStudy(
        Portfolio(searches, plan), StudySpace(spaces, library),
        library=library, verdict=verdict, sampler=sampler, name="a problem",
    )  # fmt: skip


def run(study: ProblemStudy, broken: Iterable[int] = ()) -> optuna.Study:
    """To its end; tiles of some widths do not compile."""
    while batch := study.ask():
        for candidate in batch:
            if candidate.family == "cublaslt":
                study.tell(candidate, 1.0, Told(1.0, 10.0, "screen"))
            elif candidate["tile_n"] in broken:
                study.tell(candidate, None, Told(None, failure="compile: no such tile"))
            else:
                ratio = landscape(candidate.params) * (1.0 if candidate.family == "cute_sm90" else 0.9)
                study.tell(candidate, ratio, Told(ratio, 10 / ratio, "screen"))
    study.finish()
    return study.study


def quiet(name: str) -> optuna.samplers.BaseSampler:
    found = sampler_of(name, seed=1)
    assert found is not None
    return found


@pytest.mark.parametrize("effort", ["quick", "full", "exhaustive"])
def test_every_effort_finds_the_planted_best(effort: Effort) -> None:
    trials = {"quick": None, "full": 108, "exhaustive": None}[effort]
    assert run(study_of_landscape(effort=effort, trials=trials)).best_value == pytest.approx(BEST, abs=0.03)


@pytest.mark.parametrize(
    "name", [pytest.param("tpe", marks=pytest.mark.slow), "random", "optuna.samplers:NSGAIISampler"]
)
def test_other_samplers_of_optunas_find_it_too(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = run(study_of_landscape(trials=150, sampler=quiet(name)))
    assert study.best_value == pytest.approx(BEST, abs=0.05)


class Watched(optuna.samplers.RandomSampler):
    """Keeps the study that it suggests for."""

    def sample_independent(self, study: optuna.Study, *given: Any) -> Any:
        self.study = study
        return super().sample_independent(study, *given)


def test_a_sampler_learns_the_value_of_each_candidate_once_at_its_own_point() -> None:
    """Though it suggested another point in its place, infeasible or tried before."""
    sampler, lists = Watched(seed=0), TILES | LAUNCHES
    study = run(study_of_landscape(trials=60, sampler=sampler))
    learned: list[tuple[dict[str, Any], float | None]] = []
    for trial in sampler.study.get_trials(states=[TrialState.COMPLETE]):
        point = {name: lists[name][at] if isinstance(at, int) else at for name, at in trial.params.items()}
        if smem_bytes(point) <= SMEM:
            learned.append((point, trial.value))
    tried = [trial.params for trial in of_family(study, "cute_sm90").trials]
    assert len(tried) == 60
    expected = [({name: point[name] for name in learned[0][0]}, landscape(point)) for point in tried]
    counts = Counter(map(str, learned))
    assert {counts[str(one)] for one in expected} == {1}


def test_the_library_comes_first_and_is_no_trial_of_the_search() -> None:
    study = study_of_landscape(trials=20)
    first = study.ask(len(LIBRARY) + 2)
    assert first[: len(LIBRARY)] == LIBRARY and study.stage == "screen"
    known = study_of_landscape(trials=20)
    known.tell(LIBRARY[1], 1.0)
    assert known.ask(3)[:2] == [LIBRARY[0], LIBRARY[2]], "what has a result is not asked for"
    assert Counter(trial.params["family"] for trial in run(study_of_landscape(trials=20)).trials) == {
        "cublaslt": len(LIBRARY), "cute_sm90": 20,
    }  # fmt: skip


def test_a_sampler_is_asked_for_no_more_than_the_library_leaves() -> None:
    """It waits for a value at the point that it suggested, and at the candidate's own if that is another."""
    sampler = Watched(seed=0)
    study = study_of_landscape(sampler=sampler, trials=1)
    stages = []
    while study.ask(1):
        stages.append(study.stage)
    assert stages == ["library"] * len(LIBRARY) + ["explore"] and study.stage == "done"
    sampler = Watched(seed=0)
    asked = study_of_landscape(sampler=sampler).ask(len(LIBRARY) + 1)
    assert asked[:-1] == LIBRARY and asked[-1].family == "cute_sm90"
    assert len(sampler.study.get_trials(states=[TrialState.RUNNING])) in (1, 2)


def test_a_result_that_the_study_did_not_ask_for_is_a_trial() -> None:
    study, (first, second, *_) = study_of_landscape(), kernels("cute_sm90")
    study.tell(first, 1.1, Told(1.1, 9.0, "screen"))
    study.tell(second, None, Told(None, failure="compile: no such tile"))
    found = [(trial.state, trial.value) for trial in study.study.trials]
    assert found == [(TrialState.COMPLETE, 1.1), (TrialState.FAIL, None)]


def test_all_that_was_tried_is_a_trial_with_what_is_known_of_it() -> None:
    study = run(study_of_landscape(("cute_sm90", "triton_tma")), broken=(64,))
    assert {trial.params["family"] for trial in study.trials} == {"cute_sm90", "triton_tma", "cublaslt"}
    by_state = {state: [t for t in study.trials if t.state == state] for state in TrialState}
    assert not by_state[TrialState.RUNNING] and not by_state[TrialState.WAITING]
    assert len([t for t in study.trials if t.params["family"] == "cute_sm90"]) == 32
    for trial in by_state[TrialState.COMPLETE]:
        attributes = trial.user_attrs
        assert attributes["family"] == trial.params["family"] and attributes["evidence"] == "screen"
        assert attributes["microseconds"] == pytest.approx(10 / trial.value)
        candidate = Candidate.from_json(attributes["candidate"])
        if candidate.family != "cublaslt":
            assert dict(candidate.params) == {n: v for n, v in trial.params.items() if n != "family"}
    assert {t.user_attrs["failure"] for t in by_state[TrialState.FAIL]} <= {"compile: no such tile"}
    stages = {trial.user_attrs["stage"] for trial in study.trials}
    assert stages == {"library", "screen", "vary", "probe", "refine"}


def test_infeasible_points_are_pruned_with_the_rule_and_its_numbers() -> None:
    study = run(study_of_landscape(trials=40, sampler=quiet("random")))
    pruned = [trial for trial in study.trials if trial.state == TrialState.PRUNED]
    assert pruned
    for trial in pruned:
        need = smem_bytes(trial.params)
        assert trial.user_attrs["rule"] == "smem_capacity"
        assert trial.user_attrs["reason"] == f"smem {need} B > {SMEM} B" and need > SMEM
    counted = [t for t in study.trials if t.state == TrialState.COMPLETE and t.params["family"] != "cublaslt"]
    assert len(counted) == 40, "what is pruned counts for nothing"


class Largest(optuna.samplers.BaseSampler):  # type: ignore[misc]
    """Suggests one point for ever, which has no room in shared memory."""

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        return distribution.high if hasattr(distribution, "high") else distribution.choices[-1]


def test_a_sampler_of_infeasible_points_ends_and_its_study_has_the_rule() -> None:
    study = study_of_landscape(sampler=Largest())
    run(study)
    tried = [t for t in study.study.trials if t.state == TrialState.COMPLETE]
    assert len(tried) <= 4 + len(LIBRARY)
    assert "last 100 suggestions lead to no new candidate" in study.order.note
    assert study.order.note.endswith(f"after {len(tried) - len(LIBRARY)} trials; another --sampler continues")
    pruned = [t for t in study.study.trials if t.state == TrialState.PRUNED]
    assert {t.user_attrs["rule"] for t in pruned} == {"smem_capacity"}


class FirstBest(Largest):
    """Its first point is feasible."""

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        if trial.number:
            return super().sample_independent(study, trial, name, distribution)
        return distribution.low if hasattr(distribution, "low") else distribution.choices[0]


def test_a_search_that_ends_for_want_of_suggestions_says_so_though_some_were_feasible() -> None:
    study = study_of_landscape(sampler=FirstBest(), trials=90)
    run(study)
    assert re.search(r"so the search ended after \d trials; another --sampler continues", study.order.note)


def test_a_sampler_learns_what_was_known_before() -> None:
    sampler, (first, second, *rest) = Watched(seed=0), kernels("cute_sm90")
    plan, known = EFFORTS["quick"].plan, [(first, 1.25), (second, None)]
    study = ProblemStudy(
        Portfolio([Search([first, second, *rest], LAUNCHES, plan, known=known)], plan),
        StudySpace([SearchSpace("cute_sm90", TILES, LAUNCHES)], []),
        library=[], verdict=verdict, sampler=sampler, name="a problem",
    )  # fmt: skip
    assert study.ask(1) not in ([first], [second])
    learned = sampler.study.get_trials(states=[TrialState.COMPLETE])
    assert [trial.value for trial in learned] == [1.25]


class Broken(Largest):
    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        raise RuntimeError("no idea")


@pytest.mark.parametrize("hook", ["before_trial", "after_trial", "infer_relative_search_space"])
def test_a_sampler_that_raises_in_any_of_its_parts_is_named(hook: str) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("a fault\nof mine")

    theirs = type("Theirs", (optuna.samplers.RandomSampler,), {hook: fail})
    with pytest.raises(SpaceError, match=r"^the sampler Theirs failed: .*a fault.*; use another sampler$"):
        run(study_of_landscape(sampler=theirs()))


def test_a_sampler_is_asked_with_one_thread_of_torchs_and_leaves_all() -> None:
    """Of the small matrices of a Gaussian process more threads take several times the processor time."""
    import torch

    seen: list[int] = []

    class Noting(Largest):
        def sample_independent(self, *_: Any) -> Any:
            seen.append(torch.get_num_threads())
            raise RuntimeError("no idea")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(SpaceError, match="the sampler Noting failed"):
            run(study_of_landscape(sampler=Noting()))
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_two_families_are_one_study_for_any_sampler() -> None:
    study = run(study_of_landscape(("cute_sm90", "triton_tma"), trials=60, sampler=quiet("tpe")))
    families = [t.params["family"] for t in study.trials if t.params["family"] != "cublaslt"]
    assert set(families) == {"cute_sm90", "triton_tma"}
    assert study.best_trial.params["family"] == "cute_sm90"


def test_what_is_told_anew_stays_one_trial() -> None:
    study = study_of_landscape()
    batch = study.ask()
    for candidate in batch:
        study.tell(candidate, 1.0)
    for candidate in batch:
        study.tell(candidate, 1.1)
    assert len(study.study.trials) == len(batch)
    sampler = Watched(seed=0)
    study = study_of_landscape(sampler=sampler, library=())
    for candidate in study.ask(4):
        for value in (1.0, 1.1):
            study.tell(candidate, value)
    study.ask(1)
    finished = sampler.study.get_trials(states=[TrialState.COMPLETE])
    assert [trial.value for trial in finished] == [1.1] * 4


def test_charts_and_importances_of_optunas_run_on_it() -> None:
    import matplotlib

    matplotlib.use("Agg")
    study = run(study_of_landscape(trials=36), broken=(64,))
    own = of_family(study, "cute_sm90")
    with warnings.catch_warnings(), matplotlib.rc_context():  # Optuna's plots set a style and leave it
        warnings.simplefilter("ignore")
        for chart in ("plot_optimization_history", "plot_slice", "plot_timeline"):
            getattr(optuna.visualization.matplotlib, chart)(study)
        optuna.visualization.matplotlib.plot_parallel_coordinate(own)
    shares = importances(study)["cute_sm90"]
    assert set(shares) == {*TILES, *LAUNCHES} and sum(shares.values()) == pytest.approx(1.0)


def test_importances_find_what_was_made_to_matter() -> None:
    found = importances(
        finished_trials((c, 1 + c["tile_m"] / 100 + c["stages"] / 1e4) for c in kernels("cute_sm90"))
    )
    shares = found["cute_sm90"]
    assert next(iter(shares)) == "tile_m" and shares["tile_m"] > 0.6
    assert set(shares) == set(TILES), "launches never varied, so they cannot matter"


def test_importances_of_fewer_trials_than_they_need_tell_nothing() -> None:
    trials = finished_trials((c, c["tile_m"] + c["stages"]) for c in kernels("cute_sm90"))
    assert importances(trials[: FEWEST_TRIALS - 1]) == {}
    assert list(importances(trials[:FEWEST_TRIALS])) == ["cute_sm90"]


def test_a_sampler_gets_the_seed_if_it_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {quiet("optuna.samplers:RandomSampler")._rng.rng.random() for _ in range(2)}  # type: ignore[attr-defined]
    assert len(drawn) == 1
    monkeypatch.setattr(optuna.samplers, "Largest", Largest, raising=False)
    assert isinstance(quiet("optuna.samplers:Largest"), Largest)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("luck", "roofline, tpe, gp, random, cmaes or package.module:Class"),
        ("no.such.module:Sampler", "importing no.such.module fails"),
        ("optuna.samplers:NoSampler", "optuna.samplers has no NoSampler"),
        ("optuna.pruners:MedianPruner", "MedianPruner is not a sampler"),
        ("collections:OrderedDict", "OrderedDict is not a sampler"),
        ("optuna.samplers:GridSampler", "create it in Python: tunegemm.tune"),
        ("optuna.samplers:BaseSampler", "cannot be created"),
        ("optuna.samplers:", "package.module:Class"),
        (":RandomSampler", "package.module:Class"),
        ("optuna.samplers:Random Sampler", "package.module:Class"),
        ("", "package.module:Class"),
        (7, "an instance of Optuna's"),
        (optuna.samplers.TPESampler, "an instance of Optuna's"),
    ],
)
def test_what_is_no_sampler_is_refused(name: Any, says: str) -> None:
    with pytest.raises(SpaceError, match=says.replace(".", r"\.")):
        sampler_of(name, seed=0)


def test_a_sampler_names_the_package_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "cmaes" else object())
    with pytest.raises(SpaceError, match=r"sampler cmaes needs cmaes: pip install 'tunegemm\[samplers\]'"):
        sampler_of("cmaes", seed=0)
    assert isinstance(sampler_of("gp", seed=0), optuna.samplers.GPSampler)


def test_a_quick_search_loads_no_torch() -> None:
    """What it hands over to needs torch, which takes two seconds."""
    code = (
        "import sys; from tests.search.test_study import *; run(study_of_landscape());"
        "assert 'torch' not in sys.modules and 'scipy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=__file__.rpartition("/tests/")[0])


def test_numbers_are_near_by_their_places_and_words_only_if_equal() -> None:
    """A ranked list in which "c" comes before "b": both are equally far from "a"."""
    ranked = [
        Candidate.make("f", {"word": word, "size": size}, {"order": "x"})
        for word in "acb" for size in (1, 2, 100)
    ]  # fmt: skip
    searches = [Search(ranked, {"order": ("x", "y", "z")}, EFFORTS["quick"].plan)]
    near = list(Kernels(searches, value_lists(searches)).near("f", {"word": 0, "size": 0, "order": 2}))
    assert [f"{one['word']}{one['size']}" for one in near[-len(ranked) :]] == [
        "a1", "a2", "a100", "c1", "b1", "c2", "b2", "c100", "b100",
    ]  # fmt: skip
    assert [f"{one['word']}{one['size']}{one['order']}" for one in near[:7]] == [
        "a1z", "a2z", "a1x", "a1y", "a100z", "c1z", "b1z",
    ]  # fmt: skip
