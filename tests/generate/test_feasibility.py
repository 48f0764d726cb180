"""What rules are, and what they say before there is a candidate."""

from __future__ import annotations

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.feasibility import FEASIBLE, Verdict, apply_rules, parameters_read, refusal, rule

PROBLEM = Problem(8, 8, 8)


@rule("in_dtype")
def dtypes(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Planted."""
    return f"no {problem.in_dtype}" if problem.in_dtype == "int8" else None


@rule("stages", "m", "device")
def depth(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Two stages are for more than 8 rows."""
    return f"{problem.m} rows" if candidate["stages"] == 2 and problem.m <= 8 else None


@rule("split_k", runs=True)
def splits(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Planted."""
    return "2 splits" if candidate.params.get("split_k") == 2 else None


RULES = (dtypes, depth, splits)


def test_a_rule_says_what_it_is() -> None:
    assert (depth.name, depth.cause) == ("depth", "Two stages are for more than 8 rows.")
    assert depth.parameters == ("stages",) and depth.reads_extents and not splits.reads_extents
    assert parameters_read(RULES) == {"stages", "split_k"}


def test_the_first_objection_is_the_verdict_and_says_whether_it_runs(h200: Device) -> None:
    def check(stages: int, split_k: int) -> Verdict:
        candidate = Candidate.make("planted", {"stages": stages}, {"split_k": split_k})
        return apply_rules(RULES, PROBLEM, candidate, h200)

    assert check(3, 1) == FEASIBLE and check(3, 1).runs and check(3, 1)
    assert check(2, 2) == Verdict("depth", "8 rows") and not check(2, 2).runs
    assert check(3, 2) == Verdict("splits", "2 splits", runs=True) and not check(3, 2)


def test_what_depends_on_the_problem_alone_is_refused_without_a_candidate() -> None:
    assert refusal(RULES, "planted", PROBLEM) == ""
    assert refusal(RULES, "planted", Problem(8, 8, 8, in_dtype="int8", out_dtype="int32")) == "no int8"


def test_what_no_generator_can_ever_have_is_told_with_the_reason() -> None:
    bf16, int8 = Problem.parse("64x64x64", layout="nn"), Problem.parse("64x64x64", dtype="int8", layout="nn")
    assert families.refusal_by_all(bf16) == ""
    assert families.refusal_by_all(Problem.parse("64x64x64", dtype="int8")) == ""
    assert (
        families.refusal_by_all(int8) == "layout nn of int8: WGMMA reads all but 16-bit operands as tn only"
    )
    assert families.refusal_by_all(int8, ["gluon_wgmma"]).startswith("gluon_wgmma has kernels for bf16")
    assert families.refusal_by_all(int8, ["cublaslt"]) == "", "a library says itself what it has"
