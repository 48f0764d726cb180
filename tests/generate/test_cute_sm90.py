"""Examples of the Hopper family, and what only it has. No GPU needed."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tunegemm.compile.pool import CompilePool
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import cute_sm90, families
from tunegemm.generate.cute_sm90 import FAMILY, Division, Order, block_of_a_gpc, l2_hint
from tunegemm.generate.cute_sm90.rules import config_of
from tunegemm.model.feasible import possible_kernels
from tunegemm.testing import TOO_LARGE, Examples, Rejection, compile_all

SHAPE = "4096x4096x4096"
GOOD = {
    "schedule": "cooperative", "tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 4,
    "cluster_m": 1, "cluster_n": 1, "epi_n": 32, "swap_ab": False, "tile_scheduler": "static",
}  # fmt: skip
LAUNCH = {"raster_order": "along_m", "swizzle_size": 1, "ctas": "all", "split_k": 1, "reduction": "pairs"}
PROBLEMS = [
    Problem.parse(SHAPE),
    Problem.parse(SHAPE, layout="tt"),
    Problem.parse(SHAPE, dtype="fp16"),
    Problem.parse(SHAPE, out_dtype="fp32"),
    Problem.parse(SHAPE, dtype="fp16", out_dtype="fp32", layout="tt"),
    Problem.parse(SHAPE, layout="nn"),
    Problem.parse(SHAPE, layout="nt"),
    Problem.parse("16x4096x4096"),
    Problem.parse("16x4096x4096", out_dtype="fp32", layout="tt"),
    Problem.parse(SHAPE, dtype="fp8_e4m3"),
    Problem.parse("16x4096x4096", dtype="fp8_e5m2_e4m3", out_dtype="fp8_e4m3"),
    Problem.parse(SHAPE, dtype="fp8_e4m3", out_dtype="fp32", accumulation="two_level"),
    Problem.parse(SHAPE, dtype="int8"),
    Problem.parse(SHAPE, dtype="tf32"),
]
FP8 = PROBLEMS[9]
FP8_OUT = Problem.parse(SHAPE, dtype="fp8_e4m3", out_dtype="fp8_e4m3")
FP8_GATED = replace(FP8_OUT, epilogue="scale_tensor+swiglu")
TWO_LEVEL = Problem.parse(SHAPE, dtype="fp8_e4m3", accumulation="two_level")


def candidate(**changes: int | str) -> Candidate:
    return Candidate.make("cute_sm90", GOOD | changes)


#: Rule, problem, change with tile_k 128 and outcome.
OF_DTYPES = [
    ("operand_majors", Problem.parse(SHAPE, dtype="fp8_e4m3", layout="nn"), {}, "MLIRError"),
    ("operand_majors", Problem.parse(SHAPE, dtype="int8", layout="tt"), {}, "MLIRError"),
    ("operand_majors", Problem.parse(SHAPE, dtype="tf32", layout="tt"), {"tile_k": 32}, "MLIRError"),
    (
        "accumulators",
        PROBLEMS[6],
        {"schedule": "pingpong", "tile_n": 208, "epi_n": 16, "cluster_n": 2, "tile_k": 64, "stages": 5},
        "spills",
    ),
    ("accumulators", TWO_LEVEL, {"tile_n": 240, "epi_n": 16, "stages": 3}, "spills"),
    ("accumulators", TWO_LEVEL, {"tile_m": 192, "tile_n": 160, "stages": 3}, "spills"),
    ("accumulators", TWO_LEVEL, {"schedule": "pingpong", "tile_m": 64, "tile_n": 240, "epi_n": 16}, "spills"),
    (
        "accumulators",
        PROBLEMS[1],
        {
            "tile_scheduler": "stream_k", "schedule": "pingpong", "tile_n": 208, "tile_k": 64, "epi_n": 16,
            "cluster_n": 2,
        },
        "spills",
    ),
    ("ring_memory", FP8, {"stages": 8}, TOO_LARGE),
]  # fmt: skip
EXAMPLES = Examples(
    "cute_sm90",
    GOOD,
    LAUNCH,
    # The others are in them: of the two layouts, of fp16, of fp32 results; corners have two levels of sums.
    [PROBLEMS[0], *PROBLEMS[4:8], *PROBLEMS[9:11], *PROBLEMS[12:]],
    corners=[
        *(
            (PROBLEMS[0], corner)
            for corner in (
                {"tile_m": 256, "tile_n": 208, "epi_n": 16, "stages": 3},
                {"tile_m": 192, "tile_n": 192, "stages": 3},
                {"schedule": "pingpong", "tile_m": 128, "tile_n": 208, "epi_n": 16},
                {"schedule": "pingpong", "tile_m": 192, "tile_n": 128},
                {"tile_m": 192, "tile_n": 192, "stages": 3, "tile_scheduler": "stream_k", "cluster_m": 2},
                {"schedule": "pingpong", "tile_m": 192, "tile_n": 128, "tile_scheduler": "stream_k",
                 "cluster_m": 2},
            )
        ),
        *(
            (TWO_LEVEL, {"tile_k": 128, **corner})
            for corner in (
                {"tile_n": 224, "stages": 3},
                {"tile_m": 256, "tile_n": 112, "epi_n": 16, "stages": 3},
                {"tile_m": 192, "tile_n": 144, "epi_n": 16, "stages": 3},
                {"schedule": "pingpong", "tile_m": 64, "tile_n": 224},
            )
        ),
    ],
    rejected=[
        Rejection("mma_tile", {"tile_m": 96}, "MLIRError"),
        Rejection("mma_tile", {"tile_m": 320}, "Insufficient registers"),
        Rejection("mma_tile", {"tile_n": 20, "epi_n": 4}, "8 <= N <= 256"),
        Rejection("mma_tile", {"tile_n": 272, "epi_n": 16}, "8 <= N <= 256"),
        Rejection("accumulators", {"tile_m": 256, "tile_n": 224}, "spills"),
        Rejection("accumulators", {"schedule": "pingpong", "tile_n": 224}, "spills"),
        Rejection(
            "accumulators", {"schedule": "pingpong", "tile_m": 192, "tile_n": 144, "epi_n": 16}, "spills"
        ),
        Rejection("wgmma_operands", {"tile_m": 192, "tile_n": 208, "epi_n": 16, "stages": 3}, "C7602"),
        Rejection("ring_memory", {"stages": 8}, TOO_LARGE),
        Rejection("shared_memory", {"stages": 7}, TOO_LARGE),
        *(
            Rejection(rule, {"tile_k": 128} | change, outcome, problem)
            for rule, problem, change, outcome in OF_DTYPES
        ),
    ],
    objections=[
        ("ring_depth", PROBLEMS[0], {"stages": 1}),
        ("ring_rows", PROBLEMS[0], {"tile_k": 32}),
        ("ring_rows", FP8, {"tile_k": 64}),
        ("promotion", TWO_LEVEL, {"tile_k": 256, "stages": 2}),
        ("epilogue_tile", PROBLEMS[0], {"epi_n": 48}),
        ("epilogue_tile", PROBLEMS[0], {"epi_n": 16}),
        ("store_box", FP8_GATED, {"tile_k": 128, "tile_n": 48, "epi_n": 16}),
        ("store_box", FP8_GATED, {"tile_k": 128, "tile_n": 144, "epi_n": 48}),
        ("store_box", FP8_OUT, {"tile_k": 128, "tile_n": 48, "epi_n": 24}),
        ("cluster", PROBLEMS[0], {"cluster_m": 4, "cluster_n": 4}),
        ("cluster_extent", Problem.parse("64x4096x4096"), {"cluster_m": 2}),
        ("cluster_extent", Problem.parse("64x4096x4096"), {"cluster_n": 2, "swap_ab": True}),
        ("swapped_rows", PROBLEMS[0], {"swap_ab": True}),
        ("split_work", PROBLEMS[0], {"split_k": 2}),
        ("split_work", Problem.parse("64x64x512"), {"split_k": 4}),
        ("reduction_splits", Problem.parse("512x512x65536"), {"reduction": "second_kernel", "split_k": 1}),
        ("reduction_splits", PROBLEMS[0], {"reduction": "second_kernel"}),
        (
            "second_slices",
            Problem.parse("512x512x65536", epilogue="swiglu"),
            {"reduction": "second_kernel", "split_k": 8, "tile_n": 48, "epi_n": 16},
        ),
        ("stream_split", PROBLEMS[0], {"tile_scheduler": "stream_k", "split_k": 2}),
        ("stream_waves", Problem.parse("1536x2816x4096"), {"tile_scheduler": "stream_k"}),
        ("stream_waves", Problem.parse("128x128x256"), {"tile_scheduler": "stream_k"}),
    ],
    elsewhere=frozenset({"architecture", "fused_store", "fused_registers"}),  # describe/test_epilogue.py
)  # fmt: skip


@pytest.mark.slow
def test_register_budgets_fit_the_launch_allocation(h200: Device) -> None:
    """setmaxnreg hands out no more than the block was launched with: a larger sum would deadlock."""
    for kernel in possible_kernels(FAMILY, families.load_space("cute_sm90"), PROBLEMS[0], h200, None):
        if FAMILY.check(PROBLEMS[0], kernel, h200):
            config = config_of(PROBLEMS[0], kernel)
            load, mma = config.registers
            allocated = 65536 // config.threads // 8 * 8 * (config.consumers + 1)
            assert load % 8 == mma % 8 == 0
            assert load + config.consumers * mma <= allocated


@pytest.mark.slow
def test_every_dtype_has_a_space_of_its_own(h200: Device) -> None:
    """The list of tile_k serves all: each dtype has its two, and 16-bit operands those they always had."""
    space = families.load_space("cute_sm90")
    tiles: dict[str, set[object]] = {}
    for dtype in ("bf16", "fp8_e4m3", "int8", "tf32"):
        problem = Problem.parse(SHAPE, dtype=dtype)
        found = tiles[dtype] = set()
        for kernel in possible_kernels(FAMILY, space, problem, h200, None):
            if kernel["tile_k"] not in found and FAMILY.check(problem, kernel, h200):
                found.add(kernel["tile_k"])
    assert tiles == {"bf16": {64, 128}, "fp8_e4m3": {128, 256}, "int8": {128, 256}, "tf32": {32, 64}}


def test_balanced_grid_has_no_more_waves_and_fewer_clusters(h200: Device) -> None:
    for shape, tile, expected in [
        ("4096x4096x4096", {"tile_n": 256}, 128),
        ("8192x8192x8192", {"tile_n": 256}, 128),
        ("16384x16384x1024", {"tile_n": 256}, 131),
        ("4096x4096x4096", {"tile_n": 192}, 118),
        ("128x128x4096", {}, 1),
    ]:
        problem = Problem.parse(shape)
        launch = Candidate.make("cute_sm90", GOOD | tile, LAUNCH | {"ctas": "balanced"})
        assert Division.of(problem, launch, h200).clusters == expected
        everything = Division.of(problem, launch.with_launch(ctas="all"), h200).clusters
        tiles = math.ceil(problem.m / 128) * math.ceil(problem.n / int(launch["tile_n"]))
        assert everything == min(132, tiles)
        assert math.ceil(tiles / expected) == math.ceil(tiles / everything)


def test_stream_k_gives_every_cluster_as_many_k_tiles(h200: Device) -> None:
    """Cut are the tiles of the last wave; those of the wave before too, where the last is next to empty."""
    for shape, clusters, cut in [
        ("4096x4096x4096", 132, 100),  # 1024 tiles: 7 waves and 100
        ("1536x1536x8192", 132, 12),  # 144 tiles: a wave and 12, 11 k tiles for each cluster
        ("1408x1664x1024", 132, 143),  # 143 tiles: a wave and 11, of 16 k tiles each
        ("512x512x65536", 132, 16),  # 16 tiles, no wave
        ("128x128x4096", 16, 1),  # 64 k tiles: 4 for each of 16
    ]:
        problem = Problem.parse(shape)
        chosen = candidate(tile_scheduler="stream_k").with_launch(**LAUNCH)
        division = Division.of(problem, chosen, h200)
        assert (division.clusters, division.split, division.units) == (clusters, cut, cut + clusters), shape
        pairs, second = (
            FAMILY.workspace(problem, chosen.with_launch(reduction=reduction), h200)
            for reduction in ("pairs", "second_kernel")
        )
        assert pairs is not None and second is not None
        assert pairs.partial_bytes == second.partial_bytes == (cut + clusters) * 128 * 128 * 4
        assert (pairs.counter_bytes, second.counter_bytes) == ((cut + clusters) * 2 * 4, 0)


def test_an_object_holds_the_launch_function(pool: CompilePool, h200: Device) -> None:
    from tunegemm.generate.cute_launch import load_function

    (result,) = compile_all(pool, [(PROBLEMS[0], candidate())], h200)
    assert result.artifact is not None
    assert callable(load_function(Path(result.artifact.path)))


@pytest.mark.parametrize(
    ("problem", "units"),
    [
        (PROBLEMS[0], (8, 8)),
        (Problem.parse(SHAPE, out_dtype="fp32"), (8, 8)),
        (Problem(4096, 4096, 4096, epilogue="swiglu"), (8, 16)),
        (Problem.parse(SHAPE, dtype="fp8_e4m3", out_dtype="fp8_e4m3"), (8, 16)),
        (Problem(4096, 4096, 4096, out_major="m"), (8, 8)),
    ],
)
def test_the_last_tiles_begin_where_tma_may_store(problem: Problem, units: tuple[int, int]) -> None:
    """Columns of D at multiples of 16 bytes."""
    assert config_of(problem, candidate()).edge_units == units


@pytest.mark.parametrize("raster", ["along_m", "along_n"])
@pytest.mark.parametrize("swap_ab", [False, True])
def test_a_hint_names_the_kernels_operand(raster: str, swap_ab: bool) -> None:
    """1 is the kernel's A, the problem's B where operands are swapped. What streams is the kernel's."""
    launch = Candidate.make("cute_sm90", {"swap_ab": swap_ab}, {"raster_order": raster})
    numbers = {hint: l2_hint(launch.with_launch(l2_hint=hint)) for hint in ("none", "a_first", "b_first")}
    assert numbers == {"none": 0, "a_first": 2 if swap_ab else 1, "b_first": 1 if swap_ab else 2}
    assert l2_hint(launch.with_launch(l2_hint="streamed")) == (1 if raster == "along_m" else 2)


@pytest.mark.parametrize(
    ("tile", "neighbours", "block"),
    [
        ({"cluster_m": 2, "cluster_n": 1}, 8, (1, 8)),  # clusters share B: a GPC's read the same rows of A
        ({"cluster_m": 1, "cluster_n": 2}, 8, (8, 1)),
        ({"cluster_m": 1, "cluster_n": 1, "tile_m": 128, "tile_n": 176}, 16, (4, 4)),
        ({"cluster_m": 1, "cluster_n": 1, "tile_m": 64, "tile_n": 256}, 16, (8, 2)),
        ({"cluster_m": 1, "cluster_n": 1}, 1, (1, 1)),
    ],
)
def test_a_gpc_has_the_block_for_which_it_reads_least(
    tile: dict[str, int], neighbours: int, block: tuple[int, int]
) -> None:
    assert block_of_a_gpc(config_of(PROBLEMS[0], candidate(**tile)), neighbours) == block


@pytest.mark.parametrize(
    ("cluster", "launch", "clusters", "order"),
    [
        ((2, 1), ("along_m", 16, "gpc"), 66, Order(7, 8, 1)),
        ((2, 1), ("along_m", 4, "gpc"), 66, Order(7, 4, 2)),
        ((2, 1), ("along_n", 4, "gpc"), 2, Order(7, 1, 8)),
        ((1, 1), ("along_m", 8, "gpc"), 66, Order(7, 2, 4)),
        ((2, 1), ("along_m", 4, "index"), 66, Order(0, 4, 1)),
        ((2, 1), ("along_m", 4, "gpc"), 1, Order(0, 4, 1)),
    ],
)
def test_clusters_of_a_gpc_have_a_block_of_the_swizzle(
    monkeypatch: pytest.MonkeyPatch,
    h200: Device,
    cluster: tuple[int, int],
    launch: tuple[str, int, str],
    clusters: int,
    order: Order,
) -> None:
    asked: list[tuple[int, int]] = []

    def gpcs(_: Device, size: int, clusters: int) -> list[int]:
        asked.append((size, clusters))
        return [*range(8)] * 8

    monkeypatch.setattr(Device, "gpcs_of_clusters", gpcs)
    monkeypatch.setattr(cute_sm90, "table_of", lambda places, index: SimpleNamespace(data_ptr=lambda: 7))
    raster_order, swizzle_size, cluster_order = launch
    chosen = candidate(cluster_m=cluster[0], cluster_n=cluster[1], tile_n=256)
    config = config_of(PROBLEMS[0], chosen.with_launch(cluster_order=cluster_order))
    assert Order.of(config, h200, clusters, swizzle_size, raster_order == "along_m") == order
    assert asked == ([(math.prod(cluster), clusters)] if order.address else [])


#: dtypes of operands and output, and what a tile of that has to be otherwise.
_STORED: list[tuple[str, str, dict[str, int | str]]] = [
    ("bf16", "bf16", {}),
    ("fp16", "fp32", {}),
    ("fp8_e4m3", "fp8_e4m3", {"tile_k": 128}),
    ("fp8_e4m3", "fp8_e5m2", {"tile_k": 128}),
    ("int8", "int32", {"tile_k": 128}),
]


@pytest.mark.parametrize(("in_dtype", "out_dtype", "change"), _STORED)
def test_every_box_that_is_stored_is_one_of_tmas(
    h200: Device, in_dtype: str, out_dtype: str, change: dict[str, int | str]
) -> None:
    """Lines of the staged box, and the columns at which boxes begin, are multiples of 16 bytes."""
    element_bytes = {"bf16": 2, "fp32": 4, "int32": 4}.get(out_dtype, 1)
    epilogues = ["", "bias_n", "swiglu", "reglu+residual"] if out_dtype != "int32" else [""]
    feasible = refused = 0
    for tile_n, epi_n, swap_ab, epilogue, out_major, second in itertools.product(
        range(16, 257, 16), (8, 16, 24, 32, 48, 64, 96), (False, True), epilogues, "nm", (False, True)
    ):
        problem = Problem(
            4096, 4096, 65536, in_dtype=in_dtype, out_dtype=out_dtype, out_major=out_major, epilogue=epilogue
        )
        parts: dict[str, int | str] = {"reduction": "second_kernel", "split_k": 2} if second else {}
        chosen = Candidate.make(
            "cute_sm90",
            GOOD | {"stages": 2, "tile_n": tile_n, "epi_n": epi_n, "swap_ab": swap_ab} | change,
            LAUNCH | parts,
        )
        verdict = FAMILY.check(problem, chosen, h200)
        if tile_n % epi_n or (epilogue and swap_ab and problem.fused.gated):
            assert not verdict.runs, (problem, chosen)
            continue
        # A subtile's columns of D: its own, or one of two of the product's, of which 16 take the whole tile.
        gated = problem.fused.gated
        columns = (tile_n if epi_n == 16 else epi_n) // 2 if gated else epi_n
        columns_are_contiguous = (out_major == "n") != swap_ab
        line_bytes = (columns if columns_are_contiguous else 64) * element_bytes
        if line_bytes % 16:
            assert not verdict.runs, (problem, chosen)
            refused += verdict.rule == "store_box"
        elif verdict.runs:
            config = config_of(problem, chosen)
            assert config.out_epi_n == columns
            rows_at, columns_at = (unit * element_bytes for unit in config.edge_units)
            innermost = columns_at // (2 if gated else 1) if columns_are_contiguous else rows_at
            assert innermost % 16 == 0, "where the last tile begins"
            feasible += 1
    assert feasible > 50 and (refused > 10 or element_bytes > 1), (feasible, refused)


@pytest.mark.parametrize(
    ("split_k", "reduction", "units", "second"),
    [
        (1, "pairs", 0, False),
        (1, "second_kernel", 0, False),
        (4, "pairs", 64, False),
        (4, "second_kernel", 64, True),
    ],
)
def test_only_splits_have_work_units_and_a_second_kernel(
    h200: Device, split_k: int, reduction: str, units: int, second: bool
) -> None:
    chosen = candidate().with_launch(**LAUNCH | {"split_k": split_k, "reduction": reduction})
    division = Division.of(Problem.parse("512x512x65536"), chosen, h200)
    assert (division.units, division.second_kernel) == (units, second)
