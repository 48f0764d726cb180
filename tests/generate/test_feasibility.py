"""What a space holds for one problem: kernels that rules reject by a few parameters are never made."""

from __future__ import annotations

import pytest

from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, SearchSpace
from tunegemm.generate import families
from tunegemm.generate.feasibility import plausible_kernels


@pytest.mark.parametrize("name", ["triton_tma", "gluon_wgmma"])
@pytest.mark.parametrize("problem", [Problem(4096, 4096, 4096), Problem(32, 4096, 4096, out_dtype="fp32")])
def test_plausible_kernels_hold_every_feasible_one(name: str, problem: Problem) -> None:
    family, space, device = families.get(name), families.load_space(name), find_device("model:h200")
    rules = [rule for rule in family.rules if rule.__name__ not in family.extent_rules]
    plausible = list(plausible_kernels(space, rules, problem, device))
    feasible = [kernel for kernel in space.kernels() if family.check(problem, kernel, device)]
    assert feasible and len(plausible) < 0.6 * len(list(space.kernels()))
    assert [kernel for kernel in plausible if family.check(problem, kernel, device)] == feasible


def test_what_no_generator_can_ever_have_is_told_with_the_reason() -> None:
    bf16, int8 = Problem.parse("64x64x64", layout="nn"), Problem.parse("64x64x64", dtype="int8", layout="nn")
    assert families.refusal_by_all(bf16) == ""
    assert families.refusal_by_all(Problem.parse("64x64x64", dtype="int8")) == ""
    assert (
        families.refusal_by_all(int8) == "layout nn of int8: WGMMA reads all but 16-bit operands as tn only"
    )
    assert families.refusal_by_all(int8, ["gluon_wgmma"]).startswith("gluon_wgmma has kernels for bf16")
    assert families.refusal_by_all(int8, ["cublaslt"]) == "", "a library says itself what it has"


def test_a_rule_that_reads_more_for_some_values_is_asked_about_whole_kernels() -> None:
    space = SearchSpace("planted", {"a": (1, 2, 3), "b": (1, 2)}, {})

    def crossed(_: Problem, candidate: Candidate, __: Device) -> str | None:
        if candidate["a"] == 3:
            return "3"
        return "2 and 2" if candidate["a"] == 2 and candidate["b"] == 2 else None

    found = plausible_kernels(space, [crossed], Problem(8, 8, 8), find_device("model:h200"))
    assert [(kernel["a"], kernel["b"]) for kernel in found] == [(1, 1), (1, 2), (2, 1), (2, 2)]
