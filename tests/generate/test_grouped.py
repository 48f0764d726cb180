"""Examples of the family for rows in groups, and what only it has. No GPU needed."""

from __future__ import annotations

import pytest

from tunegemm.compile.pool import CompilePool
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families, grouped
from tunegemm.generate.grouped import FAMILY, config_of
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.sources import hash_of_code
from tunegemm.model.grouped import GroupedChoice, candidate_of, kinds, listed
from tunegemm.testing import TOO_LARGE, Examples, Rejection
from tunegemm.testing.suite import compile_all

SHAPE = "4096x2048x7168"
GOOD = {
    "schedule": "cooperative", "tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 6, "epi_n": 32,
    "narrow": 16, "cluster_m": 1,
}  # fmt: skip
SHARED = {"schedule": "pingpong", "tile_n": 192, "stages": 5, "cluster_m": 2}
LAUNCH = {"swizzle_size": 8, "l2_hint": "none"}
PROBLEMS = [Problem.parse(SHAPE, groups=32), Problem.parse("64x1536x2048", groups=128)]

EXAMPLES = Examples(
    "grouped",
    GOOD,
    LAUNCH,
    PROBLEMS,
    corners=[
        (PROBLEMS[0], {"tile_m": 256, "stages": 4}),
        (PROBLEMS[1], {"tile_m": 64, "tile_n": 32, "stages": 16, "narrow": 8}),
        (PROBLEMS[0], {"tile_n": 256, "stages": 4, "narrow": 64}),
        (PROBLEMS[0], SHARED),
    ],
    rejected=[Rejection("shared_memory", {"stages": 8}, TOO_LARGE)],
    objections=[
        ("aligned_lines", Problem.parse("4096x2044x7168", groups=32), {}),
        ("ring_rows", PROBLEMS[0], {"tile_k": 128}),
        ("ring_depth", PROBLEMS[0], {"stages": 1}),
        ("mma_tile", PROBLEMS[0], {"tile_m": 192}),
        ("mma_tile", PROBLEMS[0], {"tile_n": 512}),
        ("epilogue_tile", PROBLEMS[0], {"epi_n": 64}),
        ("epilogue_tile", Problem.of_groups(64, 1536, 2048, 8, gate="swiglu"), {"tile_n": 32, "narrow": 8}),
        ("aligned_lines", Problem.of_groups(64, 1528, 2048, 8, gate="swiglu"), {}),
        ("aligned_lines", Problem.of_groups(64, 1528, 2048, 8, dtype="fp8_e4m3"), {}),
        ("narrow_widths", PROBLEMS[0], {"narrow": 8}),
        ("narrow_widths", PROBLEMS[0], {"narrow": 12}),
        ("narrow_widths", PROBLEMS[0], {"narrow": 48}),
        ("narrow_widths", PROBLEMS[0], {"tile_n": 192, "stages": 5, "narrow": 8}),
        ("narrow_enough", PROBLEMS[0], {"narrow": 64}),
        ("cluster", PROBLEMS[0], {"cluster_m": 4}),
        ("cluster", PROBLEMS[1], {"tile_n": 64, "stages": 8, "narrow": 8, "cluster_m": 2}),
        ("cluster_extent", Problem.of_groups(4096, 128, 2048, 8), SHARED),
        ("cluster_tile", PROBLEMS[0], {"cluster_m": 2}),
        ("cluster_tile", PROBLEMS[0], SHARED | {"tile_n": 128}),
        ("accumulators", PROBLEMS[0], {"tile_m": 256, "tile_n": 256, "narrow": 64}),
        ("accumulators", PROBLEMS[0], {"schedule": "pingpong", "tile_n": 256, "narrow": 64}),
        ("ring_filled", PROBLEMS[0], {"stages": 4}),
    ],
    elsewhere=frozenset({"rows_in_groups", "architecture"}),
)


def test_rows_in_groups_are_for_this_family_alone(h200: Device) -> None:
    good, plain = EXAMPLES.candidate(), Problem.parse(SHAPE)
    assert FAMILY.check(PROBLEMS[0], good, h200)
    assert FAMILY.check(plain, good, h200).rule == "rows_in_groups"
    for name in families.SHIPPED:
        family = families.get(name)
        if family.compiled and name != "grouped":
            verdict = family.check(PROBLEMS[0], Candidate(name), h200)
            assert verdict.rule in ("rows_together", "epilogue"), (name, verdict)
    assert families.refusal_by_all(PROBLEMS[0]) == "" == families.refusal_by_all(plain)


def test_a_tuned_kernel_is_the_object_that_ships(h200: Device) -> None:
    """The key of a candidate is that of the config in db/grouped.toml: one object, one hash of sources."""
    for config in (config for kind in kinds() for config in listed(kind=kind)):
        if type(config) is not GroupedConfig:  # which no search knows
            continue
        gate = config.epilogue if config.fused.gated else ""
        b_major = "n" if config.a_major == "m" else "k"
        problem = Problem.of_groups(4096, 2048, 7168, 32, dtype=config.in_dtype, gate=gate, b_major=b_major)
        candidate = candidate_of(GroupedChoice(config, 8, 0))
        assert FAMILY.check(problem, candidate, h200).runs
        assert config_of(problem, candidate) == config
        assert FAMILY.kernel_key(problem, candidate, h200) == FAMILY.key_of(config)


def test_its_hash_is_of_the_parts_that_it_takes_from_cute_sm90() -> None:
    theirs = families.generator("cute_sm90").sources
    assert FAMILY.sources[-len(theirs) :] == theirs and len(FAMILY.sources) > len(theirs)
    assert families.kernel_source_hash("grouped") == hash_of_code(FAMILY.sources)


@pytest.mark.slow
def test_the_kernel_in_clusters_compiles_clean(pool: CompilePool, h200: Device) -> None:
    """No spills, and no WGMMAs that ptxas serialises (C7511)."""
    candidate = EXAMPLES.candidate(SHARED)
    assert FAMILY.check(PROBLEMS[0], candidate, h200)
    (result,) = compile_all(pool, [(PROBLEMS[0], candidate)], h200)
    assert result.artifact is not None, result.failure
    resources = result.artifact.resources
    assert (resources.spill_bytes, resources.warnings) == (0, ())


@pytest.mark.parametrize(("hint", "number"), [("none", 0), ("weights_first", 1)])
def test_launch_parameters_are_the_kernels_arguments(hint: str, number: int) -> None:
    candidate = EXAMPLES.candidate({"l2_hint": hint})
    assert grouped.launch_arguments(candidate) == (8, number)
    assert FAMILY.label(candidate) == f"co128x128x64 s6 e32 w16 w8{' hw' * number}"


def test_a_label_says_how_many_blocks_a_cluster_has_and_how_widths_follow_each_other() -> None:
    assert FAMILY.label(EXAMPLES.candidate({"cluster_m": 2})) == "co128x128x64 s6 e32 w16 c2"
    assert FAMILY.label(EXAMPLES.candidate({"tile_n": 192, "stages": 5})) == "co128x192x64 s5 e32 w16+"
