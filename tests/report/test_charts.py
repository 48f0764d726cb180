"""The figures of the page: that they show what they should, and are the same every time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from xml.etree import ElementTree

import matplotlib.style
import pytest

from tests.support.recorded import SHAPES
from tunegemm.measure.replay import open_replay
from tunegemm.report.charts import inline_convergence, inline_roofline
from tunegemm.report.contents import Contents, from_recording
from tunegemm.report.leaderboard import VENDOR_FAMILY


@pytest.fixture(scope="module")
def contents() -> Contents:
    return from_recording(open_replay("h200"), shapes=SHAPES)


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (inline_roofline, ["989.4 TFLOP/s, tensor cores"]),
        (lambda contents: inline_convergence(contents.details[0]), ["best so far", SHAPES[1]]),
    ],
    ids=["roofline", "convergence"],
)
def test_a_figure(draw: Callable[[Contents], str], expected: list[str], contents: Contents) -> None:
    figure = draw(contents)
    with matplotlib.style.context("ggplot"):  # a style that the process has set, as Optuna's plots do
        assert figure == draw(contents)
    words = " ".join(ElementTree.fromstring(figure).itertext())
    for said in expected:
        assert said in words


@pytest.mark.parametrize("most", [2, 1])
def test_more_marks_than_can_be_named_are_dots_without_torchs(
    contents: Contents, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("tunegemm.report.charts.NAMED_MARKS", most)
    figure = ElementTree.fromstring(inline_roofline(contents))
    assert ("torch.mm" in figure.itertext()) == (most == len(SHAPES))
    tips = [tip.partition(" ")[0] for each in figure.iter() if (tip := each.get("data-tip"))]
    assert sorted(tips) == (sorted(SHAPES) if most == len(SHAPES) else [])


def test_a_search_has_a_dot_for_each_trial_and_a_square_for_each_of_the_vendors_algorithms(
    contents: Contents,
) -> None:
    details = contents.details[0]
    vendors = sum(trial.candidate.family == VENDOR_FAMILY for trial in details.tried)
    figure = ElementTree.fromstring(inline_convergence(details))
    drawn = Counter(value for each in figure.iter() for name, value in each.items() if name.endswith("href"))
    assert 0 < vendors < len(details.tried) and vendors + 1 in drawn.values(), "and one in the legend"
    dots = [each.get("d", "").count("M") for each in figure.iter()]
    assert max(dots) == len(details.tried) - vendors
