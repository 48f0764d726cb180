"""Problems as they are stored: groups are the batch and the first step of the epilogue, as in 0.1."""

import pytest

from tunegemm import Problem
from tunegemm.describe.stored import FIELDS, cells_of, document_of, problem_of
from tunegemm.errors import ProblemError


@pytest.mark.parametrize(
    ("problem", "batch", "epilogue"),
    [
        (Problem.parse("64x128x64x3", epilogue="bias_n+relu"), 3, "bias_n+relu"),
        (Problem.of_groups(64, 128, 64, 4), 4, "grouped"),
        (Problem.of_groups(64, 128, 64, 4, gate="swiglu"), 4, "grouped+swiglu"),
        (Problem.of_groups(64, 128, 64, 4, dtype="fp8_e4m3"), 4, "grouped+scale_rowwise"),
    ],
)
def test_groups_are_a_batch_and_a_step(problem: Problem, batch: int, epilogue: str) -> None:
    stored = document_of(problem)
    assert (stored["batch"], stored["epilogue"]) == (batch, epilogue)
    assert list(stored) == list(FIELDS) and len(FIELDS) == 12, "records are found by these"
    assert problem_of(*cells_of(problem)) == problem


@pytest.mark.parametrize(
    ("batch", "epilogue"),
    [(4, "grouped+"), (4, "groupedswiglu"), (4, "grouped+swiglu+swiglu"), (1, "grouped"), (4, None)],
)
def test_what_is_none_is_refused(batch: int, epilogue: str) -> None:
    cells = (64, 64, 64, batch, "bf16", "bf16", "k", "k", "n", 16, epilogue, "fast")
    with pytest.raises(ProblemError):
        problem_of(*cells)
