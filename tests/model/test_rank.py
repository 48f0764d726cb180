"""The model ranks: its terms move the right way, and good tiles of a rival come early."""

import json
import math
import re
import statistics
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunegemm.describe.architectures import PARTS
from tunegemm.describe.device import Device, Fingerprint, device_from_part
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import SpaceError
from tunegemm.generate.cute_sm90 import FAMILY
from tunegemm.model import rank as model

ROOT = Path(__file__).parents[2]
ANCHORS = Path(__file__).parents[1] / "data" / "anchors_h200.toml"
LAUNCHES = {
    "raster_order": ("along_m", "along_n"),
    "swizzle_size": (1, 2, 4, 8, 16),
    "ctas": ("all", "balanced"),
}
# Tiles that compile without a spill, of which the rival's list was drawn.
TILES = {
    "pingpong": {
        64: (32, 64, 96, 128, 192, 256),
        128: (32, 64, 96, 128, 160, 176, 192, 208),
        192: (64, 96, 128),
    },
    "cooperative": {
        64: (16, 32, 64, 96, 128, 192, 256),
        128: (16, 32, 64, 96, 128, 160, 176, 192, 224, 256),
        192: (64, 128, 160, 192, 256),
        256: (16, 32, 64, 96, 128, 160, 192, 208),
    },
}


@pytest.fixture(scope="module")
def h200() -> Device:
    return device_from_part(
        "model:h200", PARTS["h200"], Fingerprint("NVIDIA H200", 132, "9.0", "", 132, "", "", "", "", "")
    )


def tile(
    tile_m: int, tile_n: int, schedule: str = "pingpong", cluster: tuple[int, int] = (1, 1), **more
) -> Candidate:
    stages = min(12, (232448 - 1024 - 16384) // ((tile_m + tile_n) * 128))
    params = {
        "schedule": schedule, "tile_m": tile_m, "tile_n": tile_n, "tile_k": 64, "stages": stages,
        "cluster_m": cluster[0], "cluster_n": cluster[1], "epi_n": 32,
    }  # fmt: skip
    launch = {name: more.pop(name) for name in LAUNCHES if name in more}
    return Candidate.make("cute_sm90", params | more, launch)


def all_tiles() -> list[Candidate]:
    return [
        tile(tile_m, tile_n, schedule, cluster)
        for schedule, tiles in TILES.items()
        for tile_m, columns in tiles.items()
        for tile_n in columns
        for cluster in ((1, 1), (2, 1), (1, 2))
    ]


def test_recall_of_a_rivals_best_tiles(h200: Device) -> None:
    """The best measured tiles of 15 shapes are among the model's first 16 of 141, and 3 of 4 in its first 8.

    In-sample: the constants were chosen on these shapes. A change that loses a tile should say why. The
    rival's times are interleaved: all tiles shared one clock, so that cycles decided.
    """
    candidates = all_tiles()
    assert len(candidates) == 141
    places = []
    for entry in tomllib.loads(ANCHORS.read_text())["shapes"]:
        ranking = model.rank_kernels(Problem.parse(entry["shape"]), candidates, LAUNCHES, h200)
        names = ("schedule", "tile_m", "tile_n", "cluster_m", "cluster_n")
        by_cycles = sorted(ranking, key=lambda p: p.total_us)
        order = [[p.candidate[name] for name in names] for p in by_cycles]
        places += [order.index(best[:5]) + 1 for best in entry["best"]]
    assert len(places) == 52
    assert sum(place <= 32 for place in places) == len(places)
    assert sum(place <= 16 for place in places) / len(places) > 0.95
    assert sum(place <= 8 for place in places) / len(places) > 0.75


SWIZZLED = {"raster_order": "along_m", "ctas": "all"}


@pytest.mark.parametrize(
    ("shape", "term", "better", "worse"),
    [
        ("4096x2112x7168", "total_us", tile(128, 176), tile(128, 192)),  # as many waves, of smaller tiles
        ("8192x8192x8192", "compute_us", tile(256, 128, "cooperative"), tile(256, 64, "cooperative")),
        ("8448x9216x256", "epilogue_us", tile(128, 128), tile(128, 128, "cooperative")),
        ("256x4096x4096", "l2_us", tile(128, 64, cluster=(2, 1)), tile(128, 64)),
        ("4096x4096x4096", "total_us", tile(64, 128, stages=8), tile(64, 128, stages=2)),
        ("16384x16384x8192", "dram_us",
         tile(128, 128, swizzle_size=8, **SWIZZLED), tile(128, 128, swizzle_size=1, **SWIZZLED)),
    ],
    ids=["tail", "instruction", "pingpong", "multicast", "ring", "swizzle"],
)  # fmt: skip
def test_terms_move_the_right_way(
    h200: Device, shape: str, term: str, better: Candidate, worse: Candidate
) -> None:
    fewer, more = (model.predict(Problem.parse(shape), one, h200) for one in (better, worse))
    assert getattr(fewer, term) < getattr(more, term) and fewer.total_us < more.total_us


def test_dram_is_never_below_the_problems_bytes(h200: Device) -> None:
    for shape in ("8192x8192x8192", "16x8192x3584", "4096x128x65536x3"):
        problem = Problem.parse(shape)
        floor_us = problem.bytes / (h200.bandwidth_gbps * 1e3)
        assert all(p.dram_us >= floor_us for p in model.rank(problem, all_tiles(), h200))


def test_balanced_grids_keep_their_waves(h200: Device) -> None:
    problem = Problem.parse("8192x8192x8192")
    everything = model.predict(problem, tile(128, 256, "cooperative", ctas="all"), h200)
    balanced = model.predict(problem, tile(128, 256, "cooperative", ctas="balanced"), h200)
    assert (everything.ctas, balanced.ctas) == (132, 128)
    assert everything.waves == balanced.waves == 16
    assert not model.is_redundant_launch(problem, balanced.candidate, h200)
    one_wave = tile(128, 192, "cooperative", ctas="balanced")
    assert model.is_redundant_launch(Problem.parse("512x6144x4096"), one_wave, h200)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_best_launch_has_as_many_splits_as_are_feasible(h200: Device, most: int) -> None:
    """The order of tiles is always feasible, and nobody is asked about it."""
    problem, asked = Problem.parse("64x2048x32768"), list[Candidate]()
    values: dict[str, tuple[Value, ...]] = {
        "raster_order": ("along_m", "along_n"), "swizzle_size": (1, 8), "split_k": (1, 2, 4, 8),
        "reduction": ("pairs", "second_kernel"),
    }  # fmt: skip

    def feasible(launch: Candidate) -> bool:
        asked.append(launch)
        return int(launch["split_k"]) <= most

    (found,) = model.rank_kernels(problem, [tile(64, 128)], values, h200, feasible)
    assert found.candidate["split_k"] == most
    assert {(one["raster_order"], one["swizzle_size"]) for one in asked} == {("along_m", 1)}


def test_prints_on_one_line_and_says_it_is_a_model(h200: Device) -> None:
    line = str(model.predict(Problem.parse("4096x4096x4096"), tile(128, 128), h200))
    assert "\n" not in line and "by model" in line and "8 waves" in line


def test_a_library_algorithm_has_no_prediction(h200: Device) -> None:
    with pytest.raises(SpaceError, match=r"cublaslt.*no tile_m"):
        model.predict(Problem.parse("64x64x64"), Candidate.make("cublaslt", {"algo": 3}), h200)


def test_ranks_thousands_in_a_second(h200: Device) -> None:
    candidates = [
        tile(tile_m, tile_n, schedule, (cluster_m, cluster_n), stages=stages)
        for schedule in ("pingpong", "cooperative")
        for tile_m in (64, 128, 192, 256)
        for tile_n in range(16, 257, 16)
        for cluster_m, cluster_n in ((1, 1), (2, 1), (1, 2), (2, 2))
        for stages in range(2, 12)
    ]
    assert len(candidates) == 5120
    problem = Problem.parse("4096x4096x4096")
    seconds = []
    for _ in range(3):  # the least, of this thread: a busy machine once took 1.05 s for what else takes 0.15
        began = time.thread_time()
        model.rank_kernels(problem, candidates, LAUNCHES, h200)
        seconds.append(time.thread_time() - began)
    assert min(seconds) < 1.0


def test_cutting_k_pays_where_waves_are_badly_filled(h200: Device) -> None:
    """Stream-K for a wave and a little, a second kernel for many parts, neither where tiles fill waves."""
    launches = LAUNCHES | {"split_k": (1, 2, 4, 8), "reduction": ("pairs", "second_kernel")}

    def best(shape: str) -> Candidate:
        problem = Problem.parse(shape)
        kernels = [tile(128, 128, tile_scheduler=scheduler) for scheduler in ("static", "stream_k")]
        kernels = [kernel for kernel in kernels if FAMILY.check(problem, kernel, h200)]
        return model.rank_kernels(
            problem, kernels, launches, h200, lambda launch: bool(FAMILY.check(problem, launch, h200))
        )[0].candidate

    assert best("1536x1536x8192")["tile_scheduler"] == "stream_k"  # 144 tiles
    assert best("512x512x65536")["reduction"] == "second_kernel"  # 16 tiles
    whole = best("1536x2816x4096")  # 132 tiles x 2
    assert (whole["tile_scheduler"], whole["split_k"]) == ("static", 1)


def test_what_a_kernel_is_alone_is_told_better_than_by_its_ratio_at_shared_clocks(h200: Device) -> None:
    """On the kernels of products at the power cap of an H200 that were timed both ways."""
    path = ROOT / "benchmarks" / "results" / "h200" / "turns-2026-11-22.json"
    products: dict[tuple[Problem, str], list[tuple[Candidate, float, float]]] = {}
    for row in json.loads(path.read_text())["rows"]:
        if row["m"] > 256 and (kernel := of_label(row["label"])) is not None:
            problem = Problem.parse(f"{row['m']}x{row['n']}x{row['k']}")
            products.setdefault((problem, row["layout"]), []).append(
                (kernel, row["ratio"], row["ratio_shared"])
            )
    assert len(products) >= 20

    def left(ratios: Callable[[Problem, dict[Candidate, float]], dict[Candidate, float]]) -> float:
        """Root mean square of what remains, in log, of products' own means."""
        rest = []
        for (problem, _), rows in products.items():
            told = ratios(problem, {kernel: shared for kernel, _, shared in rows})
            logs = [math.log(alone / told[kernel]) for kernel, alone, _ in rows]
            rest += [value - statistics.mean(logs) for value in logs]
        return math.sqrt(statistics.mean(value**2 for value in rest))

    of_model = left(lambda problem, shared: model.steady_ratios(problem, shared, h200))
    assert of_model < 0.023 < 0.058 < left(lambda _, shared: shared)


def of_label(label: str) -> Candidate | None:
    """The kernel of a label, as `tunegemm show` prints it; None of a library's algorithm."""
    named = re.match(
        r"(co|pp)(\d+)x(\d+)x(\d+)(S?) s(\d+) c(\d)x(\d) e(\d+) (sk )?(rm|rn) w(\d+) (gpc )?(\w+)", label
    )
    if named is None:
        return None
    schedule, tile_m, tile_n, tile_k, swap, stages, cluster_m, cluster_n, epi_n, stream = named.groups()[:10]
    numbers = {
        "tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k, "stages": stages, "cluster_m": cluster_m,
        "cluster_n": cluster_n, "epi_n": epi_n,
    }  # fmt: skip
    words = {
        "schedule": {"co": "cooperative", "pp": "pingpong"}[schedule],
        "swap_ab": swap == "S",
        "tile_scheduler": "stream_k" if stream else "static",
    }
    launch = {
        "raster_order": {"rm": "along_m", "rn": "along_n"}[named[11]], "swizzle_size": int(named[12]),
        "cluster_order": "gpc" if named[13] else "index", "ctas": named[14],
    }  # fmt: skip
    return Candidate.make("cute_sm90", {**words, **{n: int(v) for n, v in numbers.items()}}, launch)


GPC_AWARE = LAUNCHES | {"cluster_order": ("index", "gpc")}


def test_at_the_power_cap_l2_lets_go_of_what_a_group_of_tiles_does_not_share(h200: Device) -> None:
    """Where the group's part of the other operand fits L2, and no cluster is far behind the others."""
    launches = GPC_AWARE | {"l2_hint": ("none", "a_first", "b_first", "streamed")}

    def ranked(shape: str, *kernels: Candidate) -> list[Candidate]:
        problem = Problem.parse(shape)
        found = model.rank_kernels(problem, kernels or all_tiles(), launches, h200)
        assert found == [model.predict(problem, p.candidate, h200) for p in found]
        return [p.candidate for p in found]

    (wide,) = ranked("4096x14336x4096", large := tile(256, 160, cluster_n=2))
    assert (wide["raster_order"], wide["l2_hint"]) == ("along_n", "streamed")
    (tall,) = ranked("8192x3584x3584", square := tile(128, 256, cluster_m=2))
    assert (tall["raster_order"], tall["l2_hint"]) == ("along_m", "streamed")
    streams = Candidate.make(large.family, dict(large.compile_params) | {"tile_scheduler": "stream_k"})
    for shape, kernel in (
        ("8192x8192x8192", square), ("4096x14336x4096", streams), ("4096x14336x4096", tile(64, 96))
    ):  # fmt: skip
        assert [launch["l2_hint"] for launch in ranked(shape, kernel)] == ["none"], (shape, kernel)


def test_of_many_kernels_the_first_of_either_ranking_are_kept(h200: Device) -> None:
    problem = Problem.parse("4096x4096x4096")
    everything = model.rank_kernels(problem, all_tiles(), LAUNCHES, h200)
    some = model.rank_kernels(problem, all_tiles(), LAUNCHES, h200, most=12)
    by_cycles = sorted(everything, key=lambda p: p.total_us)
    assert 12 <= len(some) <= 24 and some[:12] == everything[:12]
    assert {p.candidate for p in by_cycles[:12]} <= {p.candidate for p in some}
    assert some == [p for p in everything if p in some], "in the order of all"


EXTENTS = st.sampled_from([1, 16, 24, 64, 96, 256, 1000, 2048, 4096, 8192, 24576])


@settings(max_examples=60, deadline=None)
@given(st.data(), EXTENTS, EXTENTS, EXTENTS, st.sampled_from(["bf16", "fp8_e4m3", "fp16"]))
def test_terms_of_many_are_those_of_each(h200: Device, data: st.DataObject, m, n, k, dtype) -> None:
    """One call with arrays, and one for each candidate: bit for bit."""
    problem = Problem.parse(f"{m}x{n}x{k}", dtype=dtype)
    extra = st.fixed_dictionaries(
        {},
        optional={
            "swap_ab": st.booleans(), "tile_scheduler": st.sampled_from(["static", "stream_k"]),
            "epi_n": st.sampled_from([16, 32, 64]), "stages": st.integers(2, 12),
        },
    )  # fmt: skip
    launch = st.fixed_dictionaries(
        {name: st.sampled_from(values) for name, values in LAUNCHES.items()},
        optional={
            "split_k": st.sampled_from([1, 2, 8]), "reduction": st.sampled_from(["pairs", "second_kernel"])
        },
    )  # fmt: skip
    some = []
    for kernel in data.draw(st.lists(st.sampled_from(all_tiles()), min_size=1, max_size=8)):
        params = dict(kernel.compile_params) | data.draw(extra)
        some.append(Candidate.make(kernel.family, params, data.draw(launch)))
    together = model.predictions(problem, some, h200)
    assert together == [model.predict(problem, candidate, h200) for candidate in some]
    for prediction in together:
        floats = [v for v in vars(prediction).values() if isinstance(v, float)]
        assert all(math.isfinite(v) and v >= 0 for v in floats), prediction


def test_few_rows_or_columns_have_no_other_ratio_in_steady_state(h200: Device) -> None:
    kernel = tile(128, 128)
    for shape, is_same in (("256x4096x4096", True), ("4096x256x4096", True), ("257x4096x4096", False)):
        found = model.steady_ratios(Problem.parse(shape), {kernel: 1.25}, h200)
        assert (found == {kernel: 1.25}) == is_same, shape
    bound = {shape: model.is_memory_bound(Problem.parse(shape)) for shape in ("64x512x512", "512x64x512")}
    assert all(bound.values()) and not model.is_memory_bound(Problem.parse("65x512x512"))
