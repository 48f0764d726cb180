"""Feasibility of the Gluon family from both sides, by the compiler's own report. No GPU needed.

`TUNEGEMM_TEST_SAMPLE=N` compiles N accepted candidates instead of the default.
"""

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import ArtifactError
from tunegemm.generate import families
from tunegemm.generate.artifacts import ArtifactStore
from tunegemm.generate.compile import CompilePool, CompileResult
from tunegemm.generate.gluon_wgmma import FAMILY, grid
from tunegemm.generate.gluon_wgmma.config import REGISTERS
from tunegemm.generate.gluon_wgmma.rules import RULES, config_of
from tunegemm.generate.triton_object import read_object

SAMPLE = int(os.environ.get("TUNEGEMM_TEST_SAMPLE", "12"))
SHAPE = "4096x4096x4096"
GOOD = {
    "schedule": "cooperative", "tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 4, "warps": 8,
    "instr_n": 256, "lhs_in_registers": False, "occupancy": 1, "swap_ab": False,
}  # fmt: skip
LAUNCH = {"raster_order": "along_m", "swizzle_size": 1, "ctas": "all"}
BLOCKING = {"schedule": "blocking", "stages": 1}
MULTISTAGE = {"schedule": "multistage", "stages": 2}
TWICE = {"occupancy": 2, "stages": 2}
PROBLEMS = [
    Problem.parse(SHAPE),
    Problem.parse(SHAPE, dtype="fp16", out_dtype="fp32", layout="tt"),
    Problem.parse(SHAPE, layout="nn"),
    Problem.parse(SHAPE, layout="nt", out_dtype="fp32"),
    Problem.parse("16x4096x4096", dtype="fp16"),
    Problem.parse("16x4096x4096", out_dtype="fp32", layout="tt"),
]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompilePool]:
    with CompilePool(ArtifactStore(tmp_path_factory.mktemp("objects"))) as pool:
        yield pool


@pytest.fixture(scope="module")
def h200() -> Device:
    return find_device("model:h200")


def candidate(**changes: int | str) -> Candidate:
    return Candidate.make("gluon_wgmma", GOOD | changes)


def compile_all(
    pool: CompilePool, h200: Device, pairs: list[tuple[Problem, Candidate]]
) -> list[CompileResult]:
    futures = [pool.submit("gluon_wgmma", FAMILY.kernel_key(problem, c, h200)) for problem, c in pairs]
    return [future.result() for future in futures]


def test_what_is_accepted_compiles_clean_and_to_the_byte(pool: CompilePool, h200: Device) -> None:
    kernels = list(families.load_space("gluon_wgmma").kernels())
    generator = random.Random(0)
    pairs = []
    for problem in PROBLEMS:
        drawn = generator.sample(kernels, len(kernels))
        accepted = (k for k in drawn if FAMILY.check(problem, k, h200))
        pairs += [(problem, next(accepted)) for _ in range(math.ceil(SAMPLE / len(PROBLEMS)))]
    # The corners of the register and shared-memory rules, where a spill or a byte too many shows first.
    corners: list[dict[str, Any]] = [
        {"tile_n": 256},
        {"schedule": "pingpong", "stages": 6},
        {"tile_m": 256, "tile_k": 128, "stages": 2, "lhs_in_registers": True},
        {"tile_m": 64, "tile_n": 256, "warps": 4, "instr_n": 128} | TWICE,
        {"instr_n": 64} | TWICE,
        {"tile_k": 128, "occupancy": 2, "lhs_in_registers": True} | BLOCKING,
        {"tile_m": 256, "tile_n": 64, "warps": 4, "occupancy": 2, "lhs_in_registers": True} | MULTISTAGE,
    ]
    pairs += [(PROBLEMS[i % 4], candidate(**corner)) for i, corner in enumerate(corners)]
    narrow = {"tile_m": 64, "tile_n": 8, "warps": 4, "tile_k": 16, "occupancy": 2} | MULTISTAGE
    pairs.append((PROBLEMS[0], candidate(**narrow)))  # whose B has its k contiguous
    for (problem, kernel), result in zip(pairs, compile_all(pool, h200, pairs), strict=True):
        verdict = FAMILY.check(problem, kernel, h200)
        assert verdict, (problem, kernel, verdict)
        assert result.failure == "", (problem, kernel)
        assert result.artifact is not None
        resources, config = result.artifact.resources, config_of(problem, kernel)
        assert resources.spill_bytes == 0 and resources.warnings == ()
        assert resources.smem_bytes == FAMILY.smem_bytes(problem, kernel), (problem, kernel)
        assert resources.registers * config.threads * config.occupancy <= REGISTERS
        header, _ = read_object(result.artifact.path.read_bytes())
        assert header.threads == config.threads


# Per rule: a change to GOOD that only this rule objects to, and what the compiler says of it. Where it says
# nothing, the object exceeds a limit of the hardware, which is asserted instead.
REJECTED: list[tuple[str, dict[str, Any], str]] = [
    ("tile_shape", {"tile_m": 32, "warps": 4} | BLOCKING, "divisible by 64"),
    ("tile_shape", {"tile_n": 96}, "power of 2"),
    ("tile_shape", {"tile_k": 8}, "RuntimeError: error"),
    ("warpgroups", {"tile_m": 64}, "must match"),
    ("instruction", {"instr_n": 96}, "aborted"),
    ("wgmma_operands", TWICE, "C7602"),
    ("wgmma_operands", {"tile_m": 64, "tile_n": 256, "warps": 4} | TWICE, "C7602"),
    ("accumulators", {"tile_n": 256, "warps": 4} | BLOCKING, "spills"),
    ("accumulators", {"schedule": "pingpong", "tile_m": 256, "stages": 2}, "spills"),
    ("accumulators", {"instr_n": 64, "lhs_in_registers": True} | TWICE, "spills"),
    ("accumulators", {"tile_m": 256, "tile_n": 64, "tile_k": 128, "warps": 4, "lhs_in_registers": True}
     | MULTISTAGE, "C7511"),
    ("shared_memory", {"stages": 8}, ""),
    ("shared_memory", {"occupancy": 2, "tile_k": 256} | BLOCKING, ""),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "change", "verdict"), REJECTED)
def test_what_is_rejected_fails(
    pool: CompilePool, h200: Device, rule: str, change: dict[str, Any], verdict: str
) -> None:
    problem, kernel = PROBLEMS[0], candidate(**change)
    assert FAMILY.check(problem, kernel, h200).rule == rule
    (result,) = compile_all(pool, h200, [(problem, kernel)])
    if verdict:
        assert verdict in result.failure
    else:
        assert result.artifact is not None
        blocks, smem_bytes = int(kernel["occupancy"]), result.artifact.resources.smem_bytes
        assert blocks * (smem_bytes + 1024) > h200.architecture.smem_bytes_per_sm


@pytest.mark.parametrize(
    ("rule", "problem", "change"),
    [
        ("tma_alignment", Problem.parse("4096x4096x1001"), {}),
        ("tma_alignment", Problem.parse("4096x1004x4096", layout="tt"), {}),
        ("ring", PROBLEMS[0], {"stages": 1}),
        ("ring", PROBLEMS[0], {"schedule": "blocking", "stages": 2}),
        ("ring", PROBLEMS[0], {"schedule": "pipelined", "stages": 3}),
        ("warpgroups", PROBLEMS[0], {"schedule": "pingpong", "warps": 4}),
        ("warpgroups", PROBLEMS[0], {"warps": 16}),
        ("warpgroups", PROBLEMS[0], {"tile_m": 64, "tile_n": 8} | BLOCKING),
        ("instruction_fits", PROBLEMS[0], {"instr_n": 128}),
        ("instruction_fits", PROBLEMS[0], {"instr_n": 32}),
        ("occupancy_fits", PROBLEMS[0], {"tile_k": 32} | BLOCKING),
        ("grid_fits", PROBLEMS[0], {"tile_m": 256, "ctas": "balanced"} | MULTISTAGE),
        ("swap_fits", PROBLEMS[0], {"swap_ab": True}),
    ],
)
def test_each_rule_names_its_numbers(
    h200: Device, rule: str, problem: Problem, change: dict[str, Any]
) -> None:
    launch = {name: value for name, value in change.items() if name in LAUNCH}
    chosen = candidate(**{n: v for n, v in change.items() if n not in LAUNCH}).with_launch(**launch)
    verdict = FAMILY.check(problem, chosen, h200)
    assert verdict.rule == rule
    assert any(character.isdigit() for character in verdict.reason)


def test_every_rule_can_object(h200: Device) -> None:
    """No dead rule: each rejects something in the cases above."""
    seen = {rule for rule, _, _ in REJECTED} | {"architecture", "half_operands", "tma_alignment", "ring"}
    seen |= {"instruction_fits", "occupancy_fits", "grid_fits", "swap_fits", "narrow_lines"}
    assert {rule.__name__ for rule in RULES} == seen
    assert FAMILY.check(PROBLEMS[0], candidate(), find_device("model:a100-sxm-80gb")).rule == "architecture"


def test_the_tutorials_configurations_are_feasible(h200: Device) -> None:
    """What it lists at 8192x8192x16384 can run here, and keeps the occupancy it is listed with."""
    problem = Problem.parse("8192x8192x16384", dtype="fp16", layout="tt")
    for schedule, rows in {
        "blocking": [
            (128, 256, 256, 8, 1), (256, 128, 256, 8, 1), (64, 256, 128, 4, 2), (64, 128, 256, 4, 2),
            (128, 128, 128, 4, 2), (128, 128, 128, 8, 2),
        ],
        "pipelined": [
            (128, 256, 128, 8, 1), (256, 128, 128, 8, 1), (64, 256, 64, 4, 2), (64, 128, 128, 4, 2),
            (128, 128, 64, 4, 2), (128, 128, 64, 8, 2),
        ],
    }.items():  # fmt: skip
        for tile_m, tile_n, tile_k, warps, occupancy in rows:
            kernel = candidate(
                schedule=schedule, tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, warps=warps,
                stages=1 if schedule == "blocking" else 2, occupancy=occupancy,
            )  # fmt: skip
            assert FAMILY.check(problem, kernel, h200), (kernel, FAMILY.check(problem, kernel, h200))


def test_register_budgets_fit_the_launch_allocation(h200: Device) -> None:
    """setmaxnreg hands out no more than the blocks were launched with: a larger sum would deadlock."""
    for kernel in families.load_space("gluon_wgmma").kernels():
        config = config_of(PROBLEMS[0], kernel)
        if config.specialized:
            assert config.mma_registers % 8 == 0
            handed_out = 24 + config.groups * config.mma_registers
            assert handed_out <= config.launch_registers * (config.groups + 1)
            assert config.launch_registers * config.threads * config.occupancy <= REGISTERS


def test_grids(h200: Device) -> None:
    problem = Problem.parse(SHAPE)
    for change, ctas, expected in [
        ({"tile_n": 256}, "all", 132),
        ({"tile_n": 256}, "balanced", 128),
        ({"tile_m": 64, "warps": 4} | TWICE, "all", 264),
        ({"tile_m": 256} | MULTISTAGE, "all", 512),
    ]:
        launch = candidate(**change).with_launch(**LAUNCH | {"ctas": ctas})
        assert grid(problem, launch, h200) == expected
    small = candidate().with_launch(**LAUNCH)
    assert grid(Problem.parse("128x128x4096"), small, h200) == 1


def test_labels_are_short_and_distinct(h200: Device) -> None:
    space = families.load_space("gluon_wgmma")
    kernels = [k for k in space.kernels() if FAMILY.check(PROBLEMS[0], k, h200)]
    labels = {FAMILY.label(k) for k in kernels}
    assert 300 < len(labels) == len(kernels)
    assert max(map(len, labels)) < 32


def test_one_object_serves_every_shape(h200: Device) -> None:
    keys = {
        str(FAMILY.kernel_key(Problem.parse(shape), candidate(), h200))
        for shape in (SHAPE, "8x16x24", "128x128x128x7")
    }
    assert len(keys) == 1


def test_load_without_an_object_names_the_remedy(h200: Device) -> None:
    with pytest.raises(ArtifactError, match="run tunegemm tune"):
        FAMILY.load(PROBLEMS[0], candidate().with_launch(**LAUNCH), h200, None)


def test_an_object_takes_three_tensor_maps(pool: CompilePool, h200: Device) -> None:
    (result,) = compile_all(pool, h200, [(PROBLEMS[1], candidate())])
    assert result.artifact is not None
    header, cubin = read_object(Path(result.artifact.path).read_bytes())
    maps = {a.name: a.tensor_map for a in header.arguments if a.tensor_map is not None}
    # A is 128 x 64 with k contiguous; B 64 x 128 with n contiguous, in copies of one 128-byte swizzle line.
    assert {name: (m.element, m.box, m.swizzle) for name, m in maps.items()} == {
        "a_desc": ("fp16", (1, 128, 64), 3),
        "b_desc": ("fp16", (1, 64, 64), 3),
        "d_desc": ("fp32", (1, 64, 32), 3),
    }
    assert header.entry.encode() in cubin


def test_an_old_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FAMILY.unavailable() is None
    monkeypatch.setattr("tunegemm.generate.gluon_wgmma.package_version", lambda _: "3.5.1")
    assert "triton 3.5.1" in (FAMILY.unavailable() or "")
