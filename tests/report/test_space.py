"""What `tunegemm space` counts, against counting one by one."""

import random
from collections import Counter

import pytest

from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, SearchSpace
from tunegemm.errors import SpaceError
from tunegemm.generate import families
from tunegemm.generate.feasibility import parameters_read
from tunegemm.report.space import Space, take_census
from tunegemm.testing.suite import drawn

PROBLEMS = [Problem.parse("512x6144x4096"), Problem.parse("16x4096x4096"), Problem.parse("1000x520x264x3")]


@pytest.mark.parametrize("name", families.NAMES)
def test_only_launch_parameters_that_rules_read_decide(name: str) -> None:
    family, space, device = families.get(name), families.load_space(name), find_device("model:h200")
    kernels = list(drawn(name, 1000))
    read = parameters_read(family.rules if family.compiled else ())
    generator = random.Random(0)
    for problem in PROBLEMS:
        for kernel in generator.sample(kernels, min(len(kernels), 300)):
            launch = {name: generator.choice(values) for name, values in space.launch_values.items()}
            first = {name: values[0] for name, values in space.launch_values.items()}
            reduced = first | {n: launch[n] for n in read & launch.keys()}
            verdicts = [
                family.check(problem, kernel.with_launch(**values), device) for values in (launch, reduced)
            ]
            assert verdicts[0].rule == verdicts[1].rule, (problem, kernel, launch)


def test_counts_equal_those_of_checking_every_candidate() -> None:
    whole = families.load_space("cute_sm90")
    few = {
        "tile_m": (64, 192),
        "tile_n": (32, 208, 256),
        "tile_k": (64, 256),
        "stages": (4, 12),
        "epi_n": (32,),
        "cluster_m": (1, 4),
        "cluster_n": (1,),
    }
    walk = {
        "swizzle_size": (1, 4),
        "raster_order": ("along_m",),
        "split_k": (1, 3),
        "l2_hint": whole.launch_values["l2_hint"][:2],
    }
    space = SearchSpace(whole.family, dict(whole.compile_values) | few, dict(whole.launch_values) | walk)
    problem, device = PROBLEMS[1], find_device("model:h200")
    family = families.get("cute_sm90")
    found = take_census(space, problem, device)
    verdicts = [
        family.check(problem, launch, device)
        for kernel in space.kernels()
        for launch in space.launches(kernel)
    ]
    assert found.feasible == sum(map(bool, verdicts)) > 0
    assert found.feasible + sum(found.rejected.values()) == found.size == len(verdicts)
    each, first = range(0, len(verdicts), space.launch_size), []  # of a kernel first, then of its launches
    for at, kernel in zip(each, space.kernels(), strict=True):
        alone = family.check(problem, kernel, device)
        first += verdicts[at : at + space.launch_size] if alone else [alone] * space.launch_size
    assert found.rejected == Counter(verdict.rule for verdict in first if not verdict)
    assert list(found.rejected.values()) == sorted(found.rejected.values(), reverse=True)
    reasons: dict[str | None, str] = {}
    for verdict in first:
        if not verdict:
            reasons.setdefault(verdict.rule, verdict.reason)
    assert found.examples == reasons
    assert found.feasible_kernels == sum(any(verdicts[at : at + space.launch_size]) for at in each)


def test_a_product_is_named_as_for_tune() -> None:
    space = Space.of("skinny", (8, 4096, 4096), "model:h200")
    assert space.problem == Problem.parse("8x4096x4096")
    with pytest.raises(
        SpaceError, match=r"KeyError: 'vector_bytes'\); mend the rule, or the candidate's param"
    ):
        space.check(Candidate("skinny"))


def test_a_library_names_its_own_kernels() -> None:
    found = take_census(families.load_space("cublaslt"), PROBLEMS[0], find_device("model:h200"))
    assert (found.kernels, found.feasible_kernels, found.size) == (2, 1, 6)
    assert (found.feasible, found.rejected) == (3, {"named_algorithm": 3})


@pytest.mark.parametrize("name", families.NAMES)
def test_what_a_rule_without_extents_rejects_is_rejected_for_all_extents(name: str) -> None:
    family, device = families.get(name), find_device("model:h200")
    rules = family.rules if family.compiled else ()
    by_extents = {rule.name for rule in rules if rule.reads_extents}
    first, *others = [Problem.parse(shape) for shape in ("4096x4096x4096", "16x4096x512", "1000x520x264x3")]
    for kernel in drawn(name, 600):
        rule = family.check(first, kernel, device).rule
        if rule is not None and rule not in by_extents:
            assert not any(family.check(problem, kernel, device) for problem in others), (kernel, rule)
