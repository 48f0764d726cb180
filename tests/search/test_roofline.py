"""The project's sampler is one of Optuna's: its own conformance suite says so."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import optuna
import pytest
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.testing import pytest_samplers as suite

from tests.search.test_study import landscape, study_of_landscape
from tunegemm.search import RooflineSampler

#: One of each kind.
PAIRS = (
    (FloatDistribution(-1.0, 1.0), IntDistribution(3, 9, step=2)),
    (IntDistribution(3, 10), FloatDistribution(1e-7, 1.0, log=True)),
    (FloatDistribution(-10, 10, step=0.5), IntDistribution(1, 100, log=True)),
)


class Ours:
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        """Alone it is what it hands over to; here TPE, whose asks take no time."""
        return lambda: RooflineSampler(beyond=TPESampler(n_startup_trials=1, seed=0))


class TestBasic(Ours, suite.BasicSamplerTestCase):
    pass


class TestRelative(Ours, suite.RelativeSamplerTestCase):
    pass


class TestMultiObjective(Ours, suite.MultiObjectiveSamplerTestCase):
    pass


@pytest.mark.slow
class TestWithTheGaussianProcess(suite.RelativeSamplerTestCase):
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        pytest.importorskip("scipy", reason="Optuna's Gaussian process needs SciPy: pip install scipy")
        return lambda: RooflineSampler(seed=0)

    @pytest.mark.parametrize(("x_distribution", "y_distribution"), PAIRS)
    def test_sample_relative_numerical(
        self,
        sampler: Callable[[], BaseSampler],
        x_distribution: BaseDistribution,
        y_distribution: BaseDistribution,
    ) -> None:
        """Each kind once, as beside words: of the 36 pairs that TestRelative tries one takes ten seconds."""
        super().test_sample_relative_numerical(sampler, x_distribution, y_distribution)


def test_in_a_plain_loop_it_asks_for_the_same_as_in_a_tuning() -> None:
    """Whoever holds the study may let Optuna drive it."""
    driven, asked = study_of_landscape(library=()), study_of_landscape(library=())

    def objective(trial: optuna.Trial) -> float:
        family = trial.suggest_categorical("family", trial.study.sampler.space.families)
        names = trial.study.sampler.space.names(family)
        lists = trial.study.sampler.space.lists
        return landscape({name: trial.suggest_categorical(name, lists[name]) for name in names})

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
