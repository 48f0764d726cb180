"""Examples of the Gluon family, and what only it has. No GPU needed."""

from pathlib import Path

import pytest

from tunegemm.compile.pool import CompilePool
from tunegemm.compile.triton_object import read_object
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.gluon_wgmma import FAMILY, grid
from tunegemm.generate.gluon_wgmma.config import REGISTERS
from tunegemm.generate.gluon_wgmma.rules import config_of
from tunegemm.testing import TOO_LARGE, Examples, Rejection, compile_all

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


def candidate(**changes: int | str) -> Candidate:
    return Candidate.make("gluon_wgmma", GOOD | changes)


EXAMPLES = Examples(
    "gluon_wgmma",
    GOOD,
    LAUNCH,
    PROBLEMS,
    corners=[
        *zip(
            (PROBLEMS * 2)[:7],
            (
                {"tile_n": 256},
                {"schedule": "pingpong", "stages": 6},
                {"tile_m": 256, "tile_k": 128, "stages": 2, "lhs_in_registers": True},
                {"tile_m": 64, "tile_n": 256, "warps": 4, "instr_n": 128} | TWICE,
                {"instr_n": 64} | TWICE,
                {"tile_k": 128, "occupancy": 2, "lhs_in_registers": True} | BLOCKING,
                {"tile_m": 256, "tile_n": 64, "warps": 4, "occupancy": 2, "lhs_in_registers": True}
                | MULTISTAGE,
            ),
            strict=True,
        ),
        # B's k is contiguous there.
        (PROBLEMS[0], {"tile_m": 64, "tile_n": 8, "warps": 4, "tile_k": 16, "occupancy": 2} | MULTISTAGE),
    ],
    rejected=[
        Rejection("tile_shape", {"tile_m": 32, "warps": 4} | BLOCKING, "divisible by 64"),
        Rejection("tile_shape", {"tile_n": 96}, "power of 2"),
        Rejection("tile_shape", {"tile_k": 8}, "RuntimeError: error"),
        Rejection("warpgroups", {"tile_m": 64}, "must match"),
        Rejection("instruction", {"instr_n": 96}, "aborted"),
        Rejection("wgmma_operands", TWICE, "C7602"),
        Rejection("wgmma_operands", {"tile_m": 64, "tile_n": 256, "warps": 4} | TWICE, "C7602"),
        Rejection("accumulators", {"tile_n": 256, "warps": 4} | BLOCKING, "spills"),
        Rejection("accumulators", {"schedule": "pingpong", "tile_m": 256, "stages": 2}, "spills"),
        Rejection("accumulators", {"instr_n": 64, "lhs_in_registers": True} | TWICE, "spills"),
        Rejection("accumulators",
                  {"tile_m": 256, "tile_n": 64, "tile_k": 128, "warps": 4, "lhs_in_registers": True}
                  | MULTISTAGE, "C7511"),
        Rejection("shared_memory", {"stages": 8}, TOO_LARGE),
        Rejection("shared_memory", {"occupancy": 2, "tile_k": 256} | BLOCKING, TOO_LARGE),
    ],
    objections=[
        ("half_operands", Problem.parse(SHAPE, dtype="int8"), {}),
        ("tma_alignment", Problem.parse("4096x4096x1001"), {}),
        ("tma_alignment", Problem.parse("4096x1004x4096", layout="tt"), {}),
        ("narrow_lines", Problem.parse(SHAPE, layout="tt"), {"tile_n": 8}),
        ("ring", PROBLEMS[0], {"stages": 1}),
        ("ring", PROBLEMS[0], {"schedule": "blocking", "stages": 2}),
        ("ring", PROBLEMS[0], {"schedule": "pipelined", "stages": 3}),
        ("warpgroups", PROBLEMS[0], {"schedule": "pingpong", "warps": 4}),
        ("warpgroups", PROBLEMS[0], {"warps": 16}),
        ("warpgroups", PROBLEMS[0], {"tile_m": 64, "tile_n": 8} | BLOCKING),
        ("instruction_width", PROBLEMS[0], {"instr_n": 128}),
        ("instruction_width", PROBLEMS[0], {"instr_n": 32}),
        ("resident_blocks", PROBLEMS[0], {"tile_k": 32} | BLOCKING),
        ("grid_choice", PROBLEMS[0], {"tile_m": 256, "ctas": "balanced"} | MULTISTAGE),
        ("swapped_rows", PROBLEMS[0], {"swap_ab": True}),
    ],
    elsewhere=frozenset({"architecture"}),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
def test_as_many_blocks_are_resident_as_their_occupancy_says(pool: CompilePool, h200: Device) -> None:
    pairs = [(problem, EXAMPLES.candidate(corner)) for problem, corner in EXAMPLES.corners[3:]]
    for (problem, kernel), result in zip(pairs, compile_all(pool, pairs, h200), strict=True):
        assert result.artifact is not None
        resources, config = result.artifact.resources, config_of(problem, kernel)
        assert resources.registers * config.threads * config.occupancy <= REGISTERS
        header, _ = read_object(Path(result.artifact.path).read_bytes())
        assert header.threads == config.threads


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


def test_an_object_takes_three_tensor_maps(pool: CompilePool, h200: Device) -> None:
    (result,) = compile_all(pool, [(PROBLEMS[1], candidate())], h200)
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
    monkeypatch.setattr("tunegemm.generate.generator.package_version", lambda _: "3.5.1")
    assert "triton 3.5.1" in (FAMILY.unavailable() or "")
