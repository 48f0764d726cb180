"""Which kernel of block-scaled fp8 is chosen, and in how many k splits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tunegemm.errors import BadValueError
from tunegemm.generate.blocks import tiles_of
from tunegemm.model.blocks import candidates, choose, listed, splits_of

ROOT = Path(__file__).parents[2]
GPUS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
SMS = 132
LAUNCH = 2500  # nanoseconds


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
def test_every_number_of_rows_has_a_kernel(gpu: str, out_dtype: str) -> None:
    for rows in (*range(1, 301), 512, 2048, 8192, 2**20):
        for n, k in ((8, 16), (2112, 7168), (36864, 7168), (7168, 2048)):
            choice = choose(rows, n, k, out_dtype=out_dtype, gpu=gpu)
            assert choice is not None and choice.config.out_dtype == out_dtype
            assert choice.split_k in splits_of(choice.config, rows, n, k)


@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
def test_scales_of_32_of_k_have_kernels_of_their_own_up_to_2048_rows(out_dtype: str) -> None:
    for rows in (*range(1, 301), 2048):
        for n, k in ((8, 16), (2112, 7168), (7168, 2048)):
            choice = choose(rows, n, k, out_dtype=out_dtype, scale_k=32)
            assert choice is not None and choice.config.narrow and choice.config.out_dtype == out_dtype
    assert choose(2049, 7168, 2048, scale_k=32) is None  # torch, by bf16 copies
    assert not any(each.config.narrow for each in candidates())


@pytest.mark.parametrize("gpu", GPUS)
def test_few_tiles_of_a_long_k_are_split_and_many_are_not(gpu: str) -> None:
    few = choose(1, 512, 16384, gpu=gpu)
    many = choose(1, 65536, 7168, gpu=gpu)
    assert few is not None and few.split_k > 1
    assert many is not None and many.split_k == 1
    # A split has some blocks of k, and a wave of tiles is not split.
    for each in candidates():
        assert splits_of(each.config, 1, 512, 512) == [1]
        for rows, n in ((1, 512), (300, 7168)):
            tiles = tiles_of(each.config, rows, n) * each.config.cluster_size
            assert splits_of(each.config, rows, n, 16384)[-1] * tiles <= max(2 * SMS, tiles)


@pytest.mark.parametrize(("n", "split"), [(512, 1), (4096, 1), (65536, 1), (4096, 4), (4096, 7)])
def test_an_estimate_is_waves_of_blocks_one_after_the_other(n: int, split: int) -> None:
    """Of a kernel whose multiplications take long, and of one that waits for an H200's memory alone."""
    first, count = candidates()[0], 7168 // 128
    work = tiles_of(first.config, 8, n) * first.config.cluster_size * split
    per_split, (waves, rest) = -(-count // split), divmod(work, SMS)
    slow = replace(first, block_ns=1e6, tile_ns=50.0, split_ns=30.0)
    expected = LAUNCH + -(-work // SMS) * (per_split * 1e6 + 50) + 30 * math.ceil(math.log2(split))
    assert slow.estimate(8, n, 7168, split, GPUS[0]) == pytest.approx(expected, rel=1e-12)
    quick = replace(first, block_ns=0.0, tile_ns=0.0, split_ns=0.0)
    weights = 128 * first.config.columns
    stages = weights + 128 * first.config.rows
    memory, of_sm, of_l2 = 3900, 66, 11500  # bytes per nanosecond
    blocks = [
        times * max(weights * active / memory, weights / of_sm, stages * active / of_l2)
        for times, active in ((waves, SMS), (1, rest)) if active
    ]  # fmt: skip
    assert quick.estimate(8, n, 7168, split, GPUS[0]) == pytest.approx(
        LAUNCH + per_split * sum(blocks), rel=1e-12
    )


def test_estimates_are_of_the_size_of_measured_times() -> None:
    """In microseconds, not in thousands of them: of the rows that are published for an H200."""
    rows = json.loads((ROOT / "benchmarks/results/h200/blocks.json").read_text())["rows"]
    by_name = {each.name: each for each in candidates()}
    logs = []
    for row in rows:
        name, _, split = str(row["chosen"]).rpartition(" k")
        if name in by_name and row.get("us", {}).get("kernel"):
            estimated = by_name[name].estimate(row["m"], row["n"], row["k"], int(split), GPUS[0]) * 1e-3
            logs.append(math.log(estimated / row["us"]["kernel"]))
    assert len(logs) > 50
    assert abs(sum(logs) / len(logs)) < 0.1 and max(map(abs, logs)) < 0.5


def test_one_more_row_is_estimated_to_cost_little() -> None:
    """By the estimate that chooses."""
    by_name = {each.name: each for each in candidates()}
    cliffs = set()
    for n, k in ((7168, 2048), (4096, 7168), (24576, 1536)):
        before = 0.0
        for rows in range(1, 301):
            choice = choose(rows, n, k, gpu=GPUS[0])
            assert choice is not None
            now = by_name[choice.name].estimate(rows, n, k, choice.split_k, GPUS[0])
            if before and now >= 1.35 * before:
                cliffs.add((rows, n, k))
            before = now
    assert not cliffs


def test_a_damaged_table_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "blocks.toml"
    path.write_text("dtypes = 1\n")
    with pytest.raises(BadValueError, match="reinstall the package"):
        listed(path)


def test_torch_computes_what_it_is_estimated_to_compute_faster() -> None:
    """By the times of benchmarks/results/h200/blocks.json, no layer of which decides about itself alone."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200" / "blocks.json").read_text())["rows"]
    losses, of_bounds = [], []
    for row in rows:
        own, torchs = row["us"].get("kernel"), row["us"].get("torch")
        if row["m"] <= 64 or None in (own, torchs):
            continue
        by_torch = choose(row["m"], row["n"], row["k"], gpu=GPUS[0], or_torch=True) is None
        losses.append(math.log((torchs if by_torch else own) / min(own, torchs)))
        bounded = row["m"] > 256 or row["m"] * row["n"] > 1 << 20
        of_bounds.append(math.log((torchs if bounded else own) / min(own, torchs)))
    assert len(losses) >= 60 and sum(losses) < len(losses) * math.log(1.012) < sum(of_bounds)


@pytest.mark.parametrize("gpu", GPUS)
def test_torch_has_no_product_of_few_rows(gpu: str) -> None:
    for rows in (1, 16, 64):
        for n, k in ((2112, 7168), (36864, 7168), (4096, 1536)):
            assert choose(rows, n, k, gpu=gpu, or_torch=True) == choose(rows, n, k, gpu=gpu)
    assert choose(2048, 7168, 16384, gpu=gpu, or_torch=True) is None
    assert choose(2048, 7168, 16384, gpu=gpu) is not None


def test_rows_that_a_tile_lacks_cost_time_in_a_cluster_alone() -> None:
    """TMA fills them with zeros, more slowly than it loads; a CTA that shares nothing loads what there is."""
    pair = next(each for each in candidates() if each.name == "many192x128c12p1")
    full, lacking = (pair.estimate(rows, 4096, 7168, 1, GPUS[0]) for rows in (128, 33))
    assert 1.2 * full < lacking < 1.9 * full
    alone = [each for each in candidates() if each.config.rows > 32 and each.config.cluster_size == 1]
    for each in alone:
        rows = each.config.rows
        full, lacking = (each.estimate(few, 4096, 7168, 1, GPUS[0]) for few in (rows, rows // 2 + 1))
        assert 0.9 * full < lacking <= full, each.name
    assert len(alone) > 10
