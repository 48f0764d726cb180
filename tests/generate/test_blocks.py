"""Kernels of block-scaled fp8: what they are compiled of, take and refuse. No GPU needed."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from tunegemm.describe.device import Device
from tunegemm.generate import blocks
from tunegemm.generate.blocks import BlockKernel, refusal, tiles_of
from tunegemm.generate.blocks.config import BlockConfig
from tunegemm.generate.cute_sm90.config import SMEM_LIMIT
from tunegemm.generate.families import kernel_source_hash
from tunegemm.generate.takes import NotTaken
from tunegemm.model.blocks import listed

FP8 = torch.float8_e4m3fn
CONFIGS = listed()
FEW = next(config for config in CONFIGS if config.few and config.out_dtype == "bf16")
#: A warpgroup has the rows of two WGMMAs.
MANY = next(config for config in CONFIGS if config.atoms_per_warpgroup > 1)


def test_a_kernel_is_named_by_all_that_it_is_compiled_of() -> None:
    keys = [blocks.FAMILY.key_of(config) for config in CONFIGS]
    assert len({tuple(sorted(key.items())) for key in keys}) == len(keys) > 0
    for config, key in zip(CONFIGS, keys, strict=True):
        assert BlockConfig.from_mapping(key) == config
        assert config.smem_bytes <= SMEM_LIMIT
        assert config.few or config.spans <= 2  # what `Consumer.of_columns` tells apart
    # The sources that they are made of are in it, too.
    assert keys[0]["source"] != kernel_source_hash("cute_sm90")
    names = {path.parts[-3] for path in blocks.FAMILY.sources}
    assert "cute_sm90" in names


def test_two_turns_need_an_even_number_of_stages() -> None:
    """A stage then belongs to the same turn in each round of the ring."""
    parameters = {
        "form": "many", "tile_m": 64, "tile_n": 64, "stages": 12, "cluster_m": 1, "cluster_n": 1, "epi_n": 32,
        "parts": 2, "turns": 2,
    }  # fmt: skip
    config = blocks.config_of(parameters)
    assert (config.consumers, config.tile_warpgroups, config.threads) == (2, 1, 384)
    with pytest.raises(ValueError, match="even number of stages"):
        blocks.config_of(parameters | {"stages": 11})
    for changes, says in (
        ({"stages": 2}, "as many stages"),
        ({"stages": 2, "parts": 1}, "or two"),
        ({"stages": 1, "parts": 1, "turns": 1}, "or two"),
        ({"tile_m": 192, "stages": 4}, "no register budgets for 6"),
        ({"turns": 1, "tile_m": 256, "parts": 2, "stages": 4}, "one block at a time"),
        ({"scale_k": 32, "turns": 1, "tile_m": 256, "stages": 4}, "one WGMMA's rows"),
        ({"scale_k": 32, "parts": 3}, "one WGMMA's rows"),
        ({"scale_k": 32, "stages": 2}, "or two"),
        ({"cluster_m": 2, "cluster_n": 2}, "a line of CTAs"),
        ({"tile_n": 176, "turns": 1, "tile_m": 128, "parts": 1, "stages": 4, "epi_n": 16}, "into 3 blocks"),
    ):
        with pytest.raises(ValueError, match=says):
            blocks.config_of(parameters | changes)
    assert all(each.stages % each.turns == 0 for each in CONFIGS)


TURNS = next(config for config in CONFIGS if config.turns > 1 and not config.few)
NARROWS = [config for config in CONFIGS if config.narrow]


@pytest.mark.slow
@pytest.mark.parametrize("config", [FEW, MANY, TURNS, *NARROWS], ids=lambda config: config.label)
def test_it_compiles_without_warnings(config: BlockConfig, tmp_path: Path) -> None:
    """Warning C7511: ptxas serialises WGMMAs."""
    if (missing := blocks.FAMILY.unavailable()) is not None:
        pytest.skip(missing)
    report = blocks.FAMILY.compile(blocks.FAMILY.key_of(config), tmp_path / "kernel.o")
    assert report.spill_bytes == 0 and report.warnings == ()
    assert report.smem_bytes == config.smem_bytes


def test_boxes_bring_all_rows_that_are_loaded() -> None:
    """Else a stage waits for bytes that nobody sends. Boxes lie behind one another, the largest first."""
    pytest.importorskip("cutlass")
    from tunegemm.generate.blocks.kernel_rows import count_of, is_short, sizes_of

    short = [config for config in CONFIGS if config.loads_short]
    assert {config.rows for config in short} > {64, 128}  # which are powers of two themselves
    for config in short:
        assert config.rows <= 256  # the most lines of a box
        for lines in range(1, config.rows + 1):
            if not is_short(config, lines):
                assert config.rows - lines < 8
                continue
            count = count_of(lines)
            boxes = [size for size in sizes_of(config) if count & size]
            assert lines <= count == sum(boxes) < min(lines + 8, config.rows)
            begins = [count // (2 * size) * (2 * size) for size in boxes]
            assert begins == [sum(boxes[:number]) for number in range(len(boxes))]


class Seen(list[Any]):
    """A kernel's function that keeps what it is launched with, by name."""

    def __call__(self, *given: Any) -> None:
        pytest.importorskip("cutlass")
        from tunegemm.generate.blocks.kernel_scales import Scales
        from tunegemm.generate.cute_sm90.kernel.gemm import Arguments

        count = len(Arguments._fields)
        assert len(given) == count + len(Scales._fields) + 1
        self.append(Arguments(*given[:count])._asdict() | Scales(*given[count:-1])._asdict())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return Seen()


def matrix(rows: int, columns: int, dtype: torch.dtype = FP8) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype)


F32, BF16 = torch.float32, torch.bfloat16
A, WEIGHT, OUT = matrix(5, 400), matrix(200, 400), matrix(5, 200, BF16)
SCALE_A, SCALE_B = matrix(4, 5, F32).t(), matrix(2, 4, F32)


def test_a_launch_says_where_scales_lie_and_of_few_rows_weights_come_first(seen: Seen, h200: Device) -> None:
    for config in (FEW, MANY):
        words = {"swizzle_size": 2, "along_m": False, "l2_hint": 2, "device": h200}
        BlockKernel(config, seen).launch(A, WEIGHT, SCALE_A, SCALE_B, OUT, **words)
        given = seen.pop()
        few = config.few
        assert (given["m"], given["n"]) == ((200, 5) if few else (5, 200))
        addresses = WEIGHT.data_ptr(), A.data_ptr()
        assert (given["a_address"], given["b_address"]) == (addresses if few else addresses[::-1])
        assert [given[name] for name in ("lda", "ldb", "ldd", "k")] == [400, 400, 200, 400]
        assert [given[name] for name in ("rows_address", "row_stride", "rows_k_stride")] == [
            SCALE_A.data_ptr(), 1, 5,
        ]  # fmt: skip
        assert [given[name] for name in ("weights_address", "block_stride", "weights_k_stride")] == [
            SCALE_B.data_ptr(), 4, 1,
        ]  # fmt: skip
        assert given["clusters"] == tiles_of(config, 5, 200)
        assert [given[name] for name in ("swizzle_size", "raster_along_m", "split_k")] == [2, 0, 1]
        assert given["l2_hint"] == (1 if few else 2)


def coarse(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("shared", [1, 32])
def test_scales_of_32_of_k_are_bytes_apart(seen: Seen, h200: Device, shared: int) -> None:
    """1 byte from one to the next says that they are E8M0."""
    across = -(-200 // shared)
    of_bf16 = [config for config in NARROWS if config.out_dtype == "bf16"]
    for config in (of_bf16[0], of_bf16[-1]):
        for scale_a, scale_b, strides in (
            (matrix(13, 5, F32).t(), matrix(across, 13, F32), (4, 20, 52, 4)),
            (coarse(5, 16)[:, :13], coarse(across, 20)[:, :13], (16, 1, 20, 1)),
            (matrix(5, 13, F32), coarse(across, 16)[:, :13], (52, 4, 16, 1)),
            (matrix(5, 1, F32).expand(5, 13), coarse(across, 16)[:, :13], (4, 0, 16, 1)),
        ):
            BlockKernel(config, seen).launch(A, WEIGHT, scale_a, scale_b, OUT, device=h200)
            given = seen.pop()
            names = "row_stride", "rows_k_stride", "block_stride", "weights_k_stride"
            assert tuple(given[name] for name in names) == strides
            assert given["batch"] == shared and given["lda"] == given["ldb"] == 400


def test_a_launch_refuses_addresses_and_outputs_of_other_kernels(seen: Seen, h200: Device) -> None:
    launch = BlockKernel(FEW, seen).bound(A, WEIGHT, SCALE_A, SCALE_B, OUT, device=h200)
    launch(16, 32, 4, 8, 48)
    assert len(seen) == 1
    for addresses in ((8, 32, 4, 8, 48), (16, 40, 4, 8, 48), (16, 32, 4, 8, 50), (16, 32, 2, 8, 48)):
        with pytest.raises(NotTaken, match=r"clone\(\)"):
            launch(*addresses)
    with pytest.raises(NotTaken, match=r"torch.float16 for a kernel of bf16"):
        BlockKernel(FEW, seen).bound(A, WEIGHT, SCALE_A, SCALE_B, OUT.half(), device=h200)
    assert len(seen) == 1


#: Allocated, but never touched.
F32_FAR = torch.empty(5 * 2**20, dtype=F32)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"scale_a": matrix(5, 4, F32), "scale_b": matrix(4, 2, F32).t()}, ""),
        ({"scale_a": matrix(8, 10, F32)[::2, ::2].t(), "scale_b": matrix(2, 9, F32)[:, :4]}, ""),
        ({"a": matrix(5, 416)[:, :400], "out": matrix(5, 208, F32)[:, :200]}, ""),
        ({"a": A[None]}, "not a matrix"),
        ({"a": matrix(0, 400)}, "rows is 0"),
        ({"a": A.view(torch.float8_e5m2)}, "a is (5, 400) torch.float8_e5m2"),
        ({"weight": matrix(200, 384)}, "the weight is (200, 384)"),
        ({"weight": matrix(400, 200).t()}, "the weight of strides (1, 200)"),
        ({"a": matrix(5, 408)[:, :400]}, "lines 408 B apart"),
        ({"out": matrix(5, 200, torch.float64)}, "an output of torch.float64"),
        ({"out": matrix(5, 204, BF16)[:, :200]}, "lines 408 B apart"),
        ({"scale_a": matrix(5, 3, F32)}, "scale_a is (5, 3)"),
        ({"scale_a": SCALE_A.double()}, "scale_a is (5, 4) torch.float64"),
        ({"scale_b": SCALE_B.t()}, "scale_b is (4, 2)"),
        ({"scale_b": SCALE_B.to("meta")}, "scale_b is on meta"),
        ({"scale_a": F32_FAR.as_strided((5, 4), (2**20, 1))}, ""),
        ({"scale_a": F32_FAR.as_strided((5, 4), (2**20 + 1, 1))}, "rows of scale_a are 1048577 elements"),
    ],
)  # fmt: skip
def test_what_no_kernel_takes_is_refused(changes: dict[str, Any], reason: str) -> None:
    given = {"a": A, "weight": WEIGHT, "scale_a": SCALE_A, "scale_b": SCALE_B, "out": OUT} | changes
    found = refusal(**given)
    assert found == "" if not reason else reason in found, found


@pytest.mark.parametrize(
    ("scale_a", "scale_b", "reason"),
    [
        (matrix(5, 13, F32), matrix(200, 13, F32), ""),
        (matrix(13, 5, F32).t(), coarse(7, 16)[:, :13], ""),
        (SCALE_A, SCALE_B, "scale_a is (5, 4) torch.float32, not (5, 13)"),
        (matrix(5, 13, F32), SCALE_B, "scale_b is (2, 4) torch.float32, not (7, 13)"),
        (matrix(5, 13, BF16), matrix(7, 13, F32), "scale_a is (5, 13) torch.bfloat16"),
        (matrix(5, 13, F32), matrix(7, 13, F32).to("meta"), "scale_b is on meta"),
        (coarse(5, 13), matrix(7, 13, F32), "scale_a of strides (13, 1): lines of E8M0"),
        (coarse(16, 5).t()[:, :13], matrix(7, 13, F32), "scale_a of strides (1, 5): lines of E8M0"),
        (coarse(5, 32)[:, ::2][:, :13], matrix(7, 13, F32), "scale_a of strides (32, 2): lines of E8M0"),
        (F32_FAR.as_strided((5, 13), (2**20, 1)), matrix(7, 13, F32), ""),
        (F32_FAR.as_strided((5, 13), (2**20 + 1, 1)), matrix(7, 13, F32), "rows of scale_a are 1048577"),
        (matrix(5, 13, F32), F32_FAR.as_strided((5, 13), (2**20, 1)), "(5, 13) torch.float32, not (7, 13)"),
    ],
)  # fmt: skip
def test_scales_of_32_of_k_that_no_kernel_takes_are_refused(scale_a: Any, scale_b: Any, reason: str) -> None:
    found = refusal(A, WEIGHT, scale_a, scale_b, OUT, 32)
    assert found == "" if not reason else reason in found, found


@pytest.mark.parametrize(("rows", "n", "fits"), [(1, 1, True), (2, 1, False), (1, 2, False)])
def test_of_one_line_a_stride_may_be_anything(rows: int, n: int, fits: bool) -> None:
    a, weight = (matrix(8, 128).as_strided((lines, 128), (16, 1)) for lines in (rows, n))
    out = matrix(8, 128, BF16).as_strided((rows, n), (8, 1))
    scales = matrix(rows, 1, F32), matrix(1, 1, F32)
    assert (refusal(a, weight, *scales, out) == "") == fits
    if fits:
        assert refusal(a, weight, *scales, matrix(8, 8, BF16).as_strided((1, 1), (0, 1))) == ""


@pytest.mark.parametrize(("rows", "n"), [(1, 1), (1, 200), (5, 1)])
def test_of_one_line_a_launch_says_the_packed_stride(seen: Seen, h200: Device, rows: int, n: int) -> None:
    a, weight, out = matrix(8, 448)[:rows, :400], matrix(200, 416)[:n, :400], matrix(8, 208, BF16)[:rows, :n]
    scales = matrix(rows, 4, F32), matrix(-(-n // 128), 4, F32)
    strides = [400 if rows == 1 else 448, 400 if n == 1 else 416]
    for config in (FEW, MANY):
        BlockKernel(config, seen).launch(a, weight, *scales, out, device=h200)
        given = seen.pop()
        assert [given["lda"], given["ldb"]] == (strides[::-1] if config.few else strides)
        assert given["ldd"] == (n if rows == 1 else 208)


def test_products_of_scales_that_may_multiply_at_once_are_in_the_range_of_fp32() -> None:
    """Zeros, infinities and NaN are multiplied one after the other."""
    pytest.importorskip("cutlass")
    from tunegemm.generate.blocks.kernel_many import LARGEST, SMALLEST, extremes

    def at_once(rows: list[float], weights: list[float]) -> bool:
        (least, most), (least_weight, most_weight) = (
            extremes([struct.unpack("<I", struct.pack("<f", each))[0] for each in those])
            for those in (rows, weights)
        )
        return bool(least + least_weight >= SMALLEST and most + most_weight <= LARGEST)

    chance, counts = random.Random(5), {True: 0, False: 0}
    for _ in range(4000):
        rows, weights = (
            [chance.choice((-1, 1)) * 2.0 ** chance.uniform(-120, 120) for _ in range(count)]
            for count in (2, 1)
        )
        products = [abs(row * weight) for row in rows for weight in weights]
        found = at_once(rows, weights)
        counts[found] += 1
        if found:
            assert min(products) > 2.0**-101 and max(products) < 2.0**101
        else:
            assert min(products) < 2.0**-99 or max(products) > 2.0**99
    assert min(counts.values()) > 400
    assert at_once([1.0, 2.0**-60], [2.0**-40]) and not at_once([1.0, 2.0**-61], [2.0**-41])
    assert not any(at_once([1.0, each], [1.0]) for each in (0.0, math.inf, -math.inf, math.nan, 2.0**-130))
