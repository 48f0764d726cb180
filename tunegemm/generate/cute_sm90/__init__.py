"""Kernel family `cute_sm90`: persistent TMA + WGMMA kernels for Hopper, written in the CuTe DSL."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunegemm.compile.cute_object import compiler
from tunegemm.describe.clusters import places_of, usual_neighbours
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_launch import load_launcher
from tunegemm.generate.cute_sm90.config import KernelConfig
from tunegemm.generate.cute_sm90.rules import RULES, config_of
from tunegemm.generate.generator import TileGenerator
from tunegemm.generate.launching import Launcher, through_aligned_copies, tma_takes
from tunegemm.generate.tiles import balanced, divided, ordered_sum, streams, tile_count
from tunegemm.generate.workspace import Workspace


def workspace(problem: Problem, candidate: Candidate, device: Device) -> Workspace | None:
    """Sums of every k split of a tile; if the splits meet in pairs, also as many counters, by warpgroup."""
    division = Division.of(problem, candidate, device)
    return sums_of(config_of(problem, candidate), division.units, device.index, division.second_kernel)


def sums_of(config: KernelConfig, units: int, index: int, second_kernel: bool = False) -> Workspace | None:
    """The workspace of so many work units that store sums, in clusters, on the device with an index."""
    blocks = units * config.cluster_size
    counters = 0 if second_kernel else blocks * config.tile_warpgroups
    return Workspace(blocks * config.tile_m * config.tile_n * 4, counters * 4, index) if units else None


@dataclass(frozen=True)
class Division:
    """How a candidate's work is divided on a device. Numbers count clusters and their work units."""

    clusters: int
    """The grid."""
    split: int
    """k splits of every tile; for stream-K the number of tiles that it cuts."""
    units: int
    """Work units that store the sums of a k split in the workspace; 0 if no tile is split."""
    second_kernel: bool
    """Whether a second kernel adds the sums; otherwise they meet in pairs."""

    @classmethod
    def of(cls, problem: Problem, candidate: Candidate, device: Device) -> Division:
        """How a candidate's `ctas`, `split_k` and `reduction` divide it, as older records mean them.

        `ctas`: ``all`` fills the device; ``balanced`` takes the fewest clusters that need no further wave.
        Stream-K always fills the device, as long as each cluster gets a few k tiles.
        """
        size = candidate["cluster_m"] * candidate["cluster_n"]
        tiles, k_tiles = tile_count(problem, candidate) // size, -(-problem.k // candidate["tile_k"])
        resident, splits = device.resident_clusters(size), int(candidate.params.get("split_k", 1))
        clusters, split, units = divided(streams(candidate), tiles, k_tiles, splits, resident)
        if not streams(candidate) and candidate["ctas"] == "balanced":
            clusters = balanced(tiles * splits, resident)
        second = candidate.params.get("reduction", "pairs") == "second_kernel"
        return cls(clusters, split, units, second and units > 0)


@dataclass(frozen=True)
class Order:
    """Which cluster takes which tiles: a table of first work indices, and a block of tiles for a GPC.

    A GPC reads a line of L2 once for several of its clusters, unless it comes by a multicast. So the clusters
    of one have a rectangle of tiles for which that leaves least to read: a row of tiles where their clusters
    share B, a column where they share A, a square where there are no clusters.
    """

    address: int
    """The table's address in device memory; 0 if a cluster's place is its own index."""
    across: int
    """TileGenerator of a block across the swizzle; of a block of one line the swizzle size."""
    along: int
    """TileGenerator of a block along them."""

    @classmethod
    def of(
        cls, config: KernelConfig, device: Device, clusters: int, swizzle_size: int, along_m: bool
    ) -> Order:
        """The order for a grid of clusters; by index if the kernel or the device knows nothing of GPCs."""
        lines = cls(0, swizzle_size, 1)
        if not config.gpc_aware or clusters < 2:
            return lines
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():  # torch.compile may ask, whose tensors have no memory
            gpcs = device.gpcs_of_clusters(config.cluster_size, clusters)
            if gpcs is None:
                return lines
            address = table_of(places_of(gpcs), device.index).data_ptr()
        rows, columns = block_of_a_gpc(config, usual_neighbours(gpcs))
        across = min(columns if along_m else rows, swizzle_size)
        return cls(address, across, rows * columns // across)


def block_of_a_gpc(config: KernelConfig, neighbours: int) -> tuple[int, int]:
    """Rows and columns of the block of cluster tiles for which this many clusters read least, if they read
    lines together."""
    height, width = config.tile_m * config.cluster_m, config.tile_n * config.cluster_n

    def read(rows: int) -> int:
        columns = neighbours // rows
        a = height * rows * (columns if config.cluster_n > 1 else 1)
        return a + width * columns * (rows if config.cluster_m > 1 else 1)

    rows = min((rows for rows in range(1, neighbours + 1) if neighbours % rows == 0), key=read)
    return rows, neighbours // rows


@functools.cache
def table_of(places: tuple[int, ...], index: int) -> Any:
    """The places in device memory, for good: captured graphs hold their address."""
    import torch

    return torch.tensor(places, dtype=torch.int32, device=f"cuda:{index}")


def l2_hint(candidate: Candidate) -> int:
    """The kernel's number for the candidate's ``l2_hint``: 1 A, 2 B of the kernel. The hint names one of the
    problem's, or ``streamed``: that which the tiles of a group do not share.
    """
    if candidate.params.get("l2_hint") == "streamed":
        return 2 if candidate["raster_order"] == "along_n" else 1
    operand = ("none", "a_first", "b_first").index(candidate.params.get("l2_hint", "none"))
    return 3 - operand if operand and candidate["swap_ab"] else operand


def launcher(
    problem: Problem, candidate: Candidate, device: Device, artifact: Path, workspace: Workspace | None
) -> Launcher:
    division = Division.of(problem, candidate, device)
    along_m, swizzle_size = candidate["raster_order"] == "along_m", int(candidate["swizzle_size"])
    order = Order.of(config_of(problem, candidate), device, division.clusters, swizzle_size, along_m)
    schedule = (
        int(along_m), swizzle_size, order.across, order.along, division.clusters, division.split,
        int(division.second_kernel), l2_hint(candidate),
    )  # fmt: skip
    launch = load_launcher(problem, candidate, device, artifact, workspace, schedule, (order.address,))
    return launch if tma_takes(problem) else through_aligned_copies(problem, launch)


FAMILY = TileGenerator(
    parameters={
        "compile": (
            "schedule", "tile_scheduler", "tile_m", "tile_n", "tile_k", "stages", "cluster_m", "cluster_n",
            "epi_n", "swap_ab",
        ),
        "launch": (
            "raster_order", "swizzle_size", "cluster_order", "ctas", "split_k", "reduction", "l2_hint",
        ),
    },
    folder=Path(__file__).parent,
    config=KernelConfig,
    config_of=config_of,
    rules=RULES,
    reduction_class=ordered_sum,
    unlisted={"epi_n": (0,)},
    tma=True,
    edges_inside=True,
    fuses=True,
    compile=compiler(KernelConfig, "tunegemm.generate.cute_sm90.kernel.gemm", 8, addresses=3),
    workspace=workspace,
    launcher=launcher,
)  # fmt: skip
