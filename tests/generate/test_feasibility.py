"""What rules are, and what they say before there is a candidate."""

from __future__ import annotations

from typing import Any

import pytest

from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import SpaceError
from tunegemm.generate import families
from tunegemm.generate.feasibility import (
    FEASIBLE,
    Remembered,
    Verdict,
    apply_rules,
    architecture,
    exceeded_smem,
    exceeded_threads,
    half_operands,
    no_power_of_two,
    parameters_read,
    refusal,
    refusal_on,
    register_budget,
    rule,
    tma_alignment,
)
from tunegemm.model.feasible import CandidateTable

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


def test_a_rule_that_fails_is_named_with_its_candidate(h200: Device) -> None:
    """As of another package's family, or for a word in place of a number in a space."""
    word = Candidate.make("theirs", {"stages": 2, "tile_m": "64"})
    planted = rule("tile_m")(lambda problem, candidate, device: f"{candidate['tile_m'] // 2} rows")
    table = CandidateTable.kernels("theirs", {"stages": (2,), "tile_m": ("64",)})
    for check in (
        lambda: apply_rules([planted], PROBLEM, word, h200),
        lambda: Remembered([planted], PROBLEM, h200)(word),
        lambda: table.rejected([planted], PROBLEM, h200),
    ):
        with pytest.raises(
            SpaceError, match=r"^rule <lambda> of theirs stages=2 tile_m=64 fails \(TypeError: "
        ):
            check()


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


def test_limits_are_kept_to_their_borders(h200: Device) -> None:
    limits = h200.architecture
    assert (limits.threads_per_block, limits.threads_per_sm, limits.smem_bytes_per_block) == (
        1024,
        2048,
        232448,
    )
    threads = {
        (1024, 1): None, (1025, 1): "1025 threads > 1024 of a block", (1024, 2): None,
        (688, 3): "3 x 688 threads > 2048", (512, 4): None,
    }  # fmt: skip
    assert {given: exceeded_threads(given[0], limits, given[1]) for given in threads} == threads
    assert [register_budget(*given) for given in ((128, limits, 1), (384, limits, 1), (128, limits, 3))] == [
        255, 168, 168
    ]  # fmt: skip
    smem = {
        (232448, 1): None, (232449, 1): "smem 232449 B > 232448 B on sm_90a", (115712, 2): None,
        (115713, 2): "2 x (115713 + 1024) B smem > 233472 B of a multiprocessor of sm_90a",
    }  # fmt: skip
    assert {given: exceeded_smem(given[0], limits, given[1]) for given in smem} == smem


def test_powers_of_two_within_bounds() -> None:
    def found(value: int, least: int, most: int | None = None) -> str | None:
        return no_power_of_two(Candidate.make("planted", {"x": value}), "x", least, most)

    assert [value for value in range(70) if found(value, 4, 32) is None] == [4, 8, 16, 32]
    assert [value for value in range(70) if found(value, 4) is None] == [4, 8, 16, 32, 64]
    assert found(3, 4) == "x 3 is not a power of two from 4 on"
    assert found(64, 4, 32) == "x 64 is not a power of two from 4 to 32"


def test_tma_needs_lines_of_whole_units_of_each_operand(h200: Device) -> None:
    def found(text: str, **words: Any) -> str:
        said = tma_alignment(Problem.parse(text, **words), Candidate.make("planted", {}), h200)
        return (said or "").partition(" ")[0]

    assert found("3x8x8") == found("8x8x8", layout="nt") == found("3x4x8", out_dtype="fp32") == ""
    assert (found("3x8x4"), found("3x4x8")) == ("A", "D")
    assert (found("4x8x8", layout="nt"), found("8x4x8", layout="tt")) == ("A", "B")
    assert found("8x24x16", epilogue="swiglu") == "D" and found("8x32x16", epilogue="swiglu") == ""
    assert found("8x8x8", alignment=8) == "operands"


def test_a_family_without_kernels_for_a_device_says_so(h200: Device) -> None:
    rules = (half_operands, architecture)
    assert refusal_on(rules, "planted", h200) == ""
    assert refusal_on(rules, "planted", find_device("model:a100-sxm-80gb")) == (
        "sm_80 has no WGMMA; planted needs sm_90a"
    )


def test_verdicts_are_remembered_by_what_rules_read(h200: Device) -> None:
    seen: list[Candidate] = []

    @rule("stages", "m")
    def watched(problem: Problem, candidate: Candidate, device: Device) -> str | None:
        seen.append(candidate)
        return depth(problem, candidate, device)

    allows = Remembered((watched, splits), PROBLEM, h200)
    candidates = [
        Candidate.make("planted", {"stages": stages}, {"split_k": split})
        for stages in (2, 3) for split in (1, 2)
    ]  # fmt: skip
    for _ in range(2):
        assert list(map(allows, candidates)) == [False, False, True, False]
    assert [candidate["stages"] for candidate in seen] == [2, 3]
