"""The project's sampler is one of Optuna's: its own conformance suite says so."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import optuna
import pytest
from optuna.samplers import BaseSampler
from optuna.testing import pytest_samplers as suite

from tests.search.test_study import LAUNCHES, TILES, landscape, study_of_landscape
from tunegemm.search.search import FAMILY
from tunegemm.search.study import RooflineSampler


class Ours:
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        """Alone it is what it hands over to."""
        return lambda: RooflineSampler(seed=0)


class TestBasic(Ours, suite.BasicSamplerTestCase):
    pass


class TestRelative(Ours, suite.RelativeSamplerTestCase):
    pass


class TestMultiObjective(Ours, suite.MultiObjectiveSamplerTestCase):
    pass


def test_in_a_plain_loop_it_asks_for_the_same_as_in_a_tuning() -> None:
    """Whoever holds the study may let Optuna drive it."""
    driven, asked = study_of_landscape(library=()), study_of_landscape(library=())

    def objective(trial: optuna.Trial) -> float:
        trial.suggest_categorical(FAMILY, ("cublaslt", "cute_sm90"))
        lists = TILES | LAUNCHES
        return landscape({name: trial.suggest_categorical(name, lists[name]) for name in lists})

    driven.study.optimize(objective, n_trials=20)
    while len(asked.study.trials) < 20 and (batch := asked.ask(24)):
        for candidate in batch:
            asked.tell(candidate, landscape(candidate.params))
    assert [t.params for t in driven.study.trials] == [t.params for t in asked.study.trials[:20]]


def test_a_study_can_be_pickled_after_its_search() -> None:
    study = study_of_landscape(library=())
    for candidate in study.ask(8):
        study.tell(candidate, landscape(candidate.params))
    study.finish()
    again = pickle.loads(pickle.dumps(study.study))
    assert [trial.params for trial in again.trials] == [trial.params for trial in study.study.trials]
    assert isinstance(again.sampler, RooflineSampler)
