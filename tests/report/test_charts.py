"""The figures of the page: that they show what they should, and are the same every time."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

import matplotlib.style
import pytest

from tests.support.recorded import SHAPES
from tunegemm.measure.replay import open_replay
from tunegemm.report.charts import inline_convergence, inline_roofline
from tunegemm.report.contents import Contents, from_recording


@pytest.fixture(scope="module")
def contents() -> Contents:
    return from_recording(open_replay("h200"), shapes=SHAPES)


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (inline_roofline, ["989.4 TFLOP/s, tensor cores", *SHAPES]),
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
