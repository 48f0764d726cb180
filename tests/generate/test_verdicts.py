"""What rules say of whole spaces at once: the same as of each candidate by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.generate.test_possible import GENERATORS, small
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.feasibility import apply_rules
from tunegemm.generate.verdicts import CandidateTable

PROBLEMS = [Problem.parse("512x6144x4096"), Problem.parse("16x520x264x3", dtype="fp16", epilogue="relu")]


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_each_candidate_is_rejected_by_the_rule_that_rejects_it_alone(
    h200: Device, name: str, problem: Problem
) -> None:
    space, rules = small(name), families.get(name).rules
    names = [rule.__name__ for rule in rules]
    kernels = CandidateTable.kernels(name, space.compile_values)
    assert [kernels.candidate(row) for row in range(3)] == list(space.kernels())[:3]
    found = kernels.rejected(rules, problem, h200)
    passed = np.flatnonzero(found == len(rules))
    launched = kernels.with_launches(passed[:40], space.launch_values)
    assert len(launched) == len(passed[:40]) * space.launch_size
    draw = random.Random(0)
    for grid, verdicts in ((kernels, found), (launched, launched.rejected(rules, problem, h200))):
        for row in draw.sample(range(len(grid)), min(len(grid), 400)):
            verdict = apply_rules(rules, problem, grid.candidate(row), h200)
            assert verdict.rule == (None if verdicts[row] == len(rules) else names[verdicts[row]])


def test_a_rule_is_asked_once_about_what_it_reads(h200: Device) -> None:
    asked: list[object] = []

    def crossed(_: Problem, candidate: Candidate, __: Device) -> str | None:
        asked.append(candidate["a"])
        if candidate["a"] == 3:  # of others it reads more
            return "3"
        return "too many" if candidate["a"] + candidate["b"] > 4 else None

    def untraceable(_: Problem, candidate: Candidate, __: Device) -> str | None:
        return "odd" if int(candidate.digest, 16) % 2 else None

    values = {"a": (1, 2, 3), "b": (1, 2, 3), "c": tuple(range(50))}
    grid = CandidateTable.kernels("planted", values)
    found = grid.rejected([crossed], PROBLEMS[0], h200)
    assert sorted(asked) == [1] * 3 + [2] * 3 + [3]
    alone = [crossed(PROBLEMS[0], grid.candidate(row), h200) is None for row in range(len(grid))]
    assert (found == 1).tolist() == alone
    few = CandidateTable.kernels("planted", {"a": (1, 2, 3), "b": (1, 2)})
    each = [untraceable(PROBLEMS[0], few.candidate(row), h200) is None for row in range(len(few))]
    assert (few.rejected([untraceable], PROBLEMS[0], h200) == 1).tolist() == each
