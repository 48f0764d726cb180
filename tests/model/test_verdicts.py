"""What rules say of whole spaces at once: the same as of each candidate by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.model.test_feasible import GENERATORS, small
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.feasibility import apply_rules, rule
from tunegemm.model.verdicts import CandidateTable

PROBLEMS = [Problem.parse("512x6144x4096"), Problem.parse("16x520x264x3", dtype="fp16", epilogue="relu")]


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_each_candidate_is_rejected_by_the_rule_that_rejects_it_alone(
    h200: Device, name: str, problem: Problem
) -> None:
    space, rules = small(name), families.get(name).rules
    names = [rule.name for rule in rules]
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


def test_a_rule_is_asked_once_about_what_it_reads(h200: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    @rule("a", "b", "split_k", "m")
    def crossed(_: Problem, candidate: Candidate, __: Device) -> str | None:
        asked.append((candidate["a"], candidate["b"]))
        return "too many" if candidate["a"] + candidate["b"] > 4 else None

    @rule("a")
    def after(_: Problem, candidate: Candidate, __: Device) -> str | None:
        assert candidate["a"] + candidate["b"] <= 4, "asked only what those before it let pass"
        return "2" if candidate["a"] == 2 else None

    values = {"a": (1, 2, 3), "b": (1, 2, 3), "c": tuple(range(50))}
    kernels = CandidateTable.kernels("planted", values)
    for most in (1 << 22, 1):  # a table of all combinations, and those that occur
        monkeypatch.setattr("tunegemm.model.verdicts.MOST_IN_TABLE", most)
        asked.clear()
        found = kernels.rejected([crossed, after], PROBLEMS[0], h200)
        assert len(asked) == len(set(asked)) == 9
        params = [kernels.candidate(row).params for row in range(len(kernels))]
        assert found.tolist() == [0 if p["a"] + p["b"] > 4 else 1 if p["a"] == 2 else 2 for p in params]
