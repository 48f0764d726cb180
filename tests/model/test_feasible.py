"""Rules that are asked once, and kernels that are kept between processes: both say what the rules say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, SearchSpace
from tunegemm.errors import TunegemmError
from tunegemm.generate import families
from tunegemm.generate.feasibility import Remembered, Rule, apply_rules, rule
from tunegemm.model import feasible
from tunegemm.model.feasible import CandidateTable, extent_check, possible_kernels

GENERATORS = [name for name in families.NAMES if families.get(name).compiled]
PROBLEM = Problem.parse("512x512x512")


def small(name: str) -> SearchSpace:
    """A family's space with few tiles."""
    space = families.load_space(name)
    tiles = {"tile_m": (64, 128), "tile_n": (32, 64)}
    listed = space.compile_values
    kept = {n: tuple(v for v in tiles[n] if v in listed[n]) or listed[n][:2] for n in tiles}
    return replace(space, compile_values=dict(space.compile_values) | kept)


EXTENT = st.sampled_from([1, 3, 8, 16, 63, 64, 100, 128, 129, 512, 1000, 4096, 16384])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Of every dtype, layout, alignment and epilogue that a problem can have."""
    while True:
        shape = "x".join(str(draw(EXTENT)) for _ in range(3)) + draw(st.sampled_from(["", "x3"]))
        try:
            return Problem.parse(
                shape,
                dtype=draw(st.sampled_from(["bf16", "fp16", "fp8_e4m3", "int8", "fp32"])),
                layout=draw(st.sampled_from(["tn", "nn", "nt", "tt"])),
                alignment=draw(st.sampled_from([2, 8, 16])),
                epilogue=draw(st.sampled_from(["", "relu", "bias_n+gelu_tanh", "swiglu"])),
            )
        except TunegemmError:
            continue


def sample(space: SearchSpace, count: int, seed: int) -> list[Candidate]:
    """Kernels and launches of the space, whatever its rules say of them."""
    draw, found = random.Random(seed), []
    for number in range(count):
        kernel = Candidate.make(
            space.family, {name: draw.choice(values) for name, values in space.compile_values.items()}
        )
        launch = {name: draw.choice(values) for name, values in space.launch_values.items()}
        found.append(kernel.with_launch(**launch) if number % 2 else kernel)
    return found


@pytest.mark.parametrize("name", GENERATORS)
@settings(max_examples=25, deadline=None)
@given(problem=problems(), seed=st.integers(0, 2**16))
def test_what_is_remembered_is_what_the_rules_say(name: str, problem: Problem, seed: int) -> None:
    """Of all of a family's rules, and of each alone: those behind one that objects are seldom asked."""
    family, device = families.get(name), find_device("model:h200")
    candidates = sample(families.load_space(name), 60, seed)
    # Some differ in one parameter only, which may be one that a rule reads late.
    whole = [c for c in candidates if c.launch_params]
    candidates += [one.kernel.with_launch(**dict(whole[0].launch_params)) for one in whole]
    remembered = Remembered(family.rules, problem, device)
    expected = [bool(family.check(problem, c, device)) for c in candidates]
    assert [remembered(c) for c in candidates] == expected
    assert [remembered(c) for c in candidates] == expected, "when all is known"
    extents = [rule for rule in family.rules if rule.reads_extents]
    fits = extent_check(family, problem, device)
    feasible = [c for c in candidates if family.check(problem, c, device)]
    assert all(fits(c) for c in feasible)
    for candidate in (c for c in candidates if plain(extents, problem, c, device) is not None):
        assert fits(candidate) == plain(extents, problem, candidate, device)


def plain(rules: Sequence[Rule], problem: Problem, candidate: Candidate, device: Device) -> bool | None:
    """What rules say without a memory; None where one cannot be asked of what another one forbids."""
    try:
        return bool(apply_rules(rules, problem, candidate, device))
    except (ValueError, ZeroDivisionError, KeyError):
        return None


def kernel(**params: int | str) -> Candidate:
    return Candidate.make("planted", params)


def test_each_rule_is_asked_once_about_what_it_reads(h200: Device) -> None:
    asked = []

    @rule("a", "b")
    def crossed(_: Problem, candidate: Candidate, __: Device) -> str | None:
        asked.append((candidate["a"], candidate.params.get("b")))
        return "too many" if candidate.params.get("b", 0) + candidate["a"] > 4 else None

    remembered = Remembered([crossed], PROBLEM, h200)
    grid = [kernel(a=a, b=b, c=c) for a in (1, 2, 3) for b in (1, 2, 3) for c in range(5)]
    expected = [c["a"] + c["b"] <= 4 for c in grid]
    assert [remembered(c) for c in grid] == expected
    assert len(asked) == len(set(asked)) == 9
    assert [remembered(c) for c in reversed(grid)] == expected[::-1] and len(asked) == 9
    assert remembered(kernel(a=2)) and not remembered(kernel(a=5)), "without b it is another one"


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("problem", [PROBLEM, replace(PROBLEM, m=8, epilogue="silu")], ids=str)
def test_kernels_of_the_file_are_those_of_the_rules(
    tmp_path: Path, h200: Device, name: str, problem: Problem
) -> None:
    family, space = families.get(name), small(name)
    if name == "grouped" and not problem.epilogue:
        problem = Problem.parse(problem.shape, groups=4)
    rules = [rule for rule in family.rules if not rule.reads_extents]
    expected = [k for k in space.kernels() if apply_rules(rules, problem, k, h200)]
    assert bool(expected) == (name in ("cute_sm90", "skinny") or problem.epilogue in ("", "grouped"))
    assert possible_kernels(family, space, problem, h200, None) == expected
    assert possible_kernels(family, space, problem, h200, tmp_path) == expected
    (path,) = tmp_path.iterdir()
    before = path.stat().st_mtime_ns
    assert possible_kernels(family, space, problem, h200, tmp_path) == expected, "as it was read"
    assert path.stat().st_mtime_ns == before


def test_problems_of_a_kind_share_a_file_and_others_do_not(
    tmp_path: Path, h200: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, space = families.get("triton_tma"), small("triton_tma")
    found = possible_kernels(family, space, PROBLEM, h200, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(CandidateTable, "kernels", None)  # whoever computes anew fails
        assert possible_kernels(family, space, replace(PROBLEM, m=8192, k=64), h200, tmp_path) == found
        for other in (
            replace(PROBLEM, in_dtype="fp16", out_dtype="fp16"), replace(PROBLEM, alignment=8),
            replace(PROBLEM, epilogue="silu"), replace(PROBLEM, out_major="m"),
        ):  # fmt: skip
            with pytest.raises(TypeError):
                possible_kernels(family, space, other, h200, tmp_path)
        narrower = replace(space, compile_values=dict(space.compile_values) | {"tile_n": (64,)})
        with pytest.raises(TypeError):
            possible_kernels(family, narrower, PROBLEM, h200, tmp_path)
        # Of rules that changed.
        patch.setattr(feasible, "rule_sources", lambda _: {Path(__file__)})
        with pytest.raises(TypeError):
            possible_kernels(family, space, PROBLEM, h200, tmp_path)


def damages(places: np.ndarray) -> dict[str, np.ndarray | bytes]:
    beyond = places.copy()
    beyond[-1, -1] = 200
    return {
        "empty": b"", "text": b"not an array at all", "another dtype": places.astype(np.int64),
        "a column less": places[:, 1:], "one dimension": places.reshape(-1), "beyond the lists": beyond,
        "objects": np.array([{"a": 1}], dtype=object),
    }  # fmt: skip


@pytest.mark.parametrize("what", [*damages(np.zeros((1, 2), dtype=np.uint8)), "truncated"])
def test_a_damaged_or_foreign_file_is_computed_anew(tmp_path: Path, h200: Device, what: str) -> None:
    family, space = families.get("triton_tma"), small("triton_tma")
    expected = possible_kernels(family, space, PROBLEM, h200, tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    if what == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif isinstance(damage := damages(np.load(path))[what], bytes):
        path.write_bytes(damage)
    else:
        np.save(path, damage, allow_pickle=True)
    assert path.read_bytes() != whole
    assert possible_kernels(family, space, PROBLEM, h200, tmp_path) == expected
    assert path.read_bytes() == whole, "mended"


def test_a_folder_that_cannot_be_written_is_let_be(tmp_path: Path, h200: Device) -> None:
    family, space = families.get("triton_tma"), small("triton_tma")
    expected = possible_kernels(family, space, PROBLEM, h200, None)
    (tmp_path / "file").write_text("no folder")
    assert possible_kernels(family, space, PROBLEM, h200, tmp_path / "file") == expected
    assert possible_kernels(family, space, PROBLEM, h200, tmp_path / "file" / "below") == expected
    assert (tmp_path / "file").read_text() == "no folder"


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
        monkeypatch.setattr("tunegemm.model.feasible.MOST_IN_TABLE", most)
        asked.clear()
        found = kernels.rejected([crossed, after], PROBLEMS[0], h200)
        assert len(asked) == len(set(asked)) == 9
        params = [kernels.candidate(row).params for row in range(len(kernels))]
        assert found.tolist() == [0 if p["a"] + p["b"] > 4 else 1 if p["a"] == 2 else 2 for p in params]


@pytest.mark.parametrize(("count", "files"), [(256, 1), (257, 0)])
def test_lists_as_long_as_a_byte_has_values_are_kept(tmp_path: Path, count: int, files: int) -> None:
    space = small("cute_sm90")
    values = {name: listed[:1] for name, listed in space.compile_values.items()}
    space = replace(space, compile_values=values | {"tile_n": tuple(range(8, 8 * count + 1, 8))})
    family, device = families.generator("cute_sm90"), find_device("model:h200")
    found = possible_kernels(family, space, PROBLEM, device, tmp_path)
    assert found and len(list(tmp_path.glob("*.npy"))) == files
    assert possible_kernels(family, space, PROBLEM, device, tmp_path) == found


def test_kernels_of_groups_are_others_whatever_their_number() -> None:
    plain, two, seven = (
        feasible.kernel_facts(Problem.parse("512x768x1024", groups=count)) for count in (0, 2, 7)
    )
    assert plain != two == seven
