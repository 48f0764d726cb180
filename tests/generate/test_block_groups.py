"""Kernels of groups with block scales: what they are compiled of, and what they refuse. No GPU needed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tunegemm.generate import block_groups
from tunegemm.generate.block_groups import BlockGroupKernel, refusal
from tunegemm.generate.block_groups.config import BlockGroupConfig
from tunegemm.generate.cute_sm90.config import SMEM_LIMIT
from tunegemm.generate.takes import NotTaken
from tunegemm.model.block_groups import listed

FP8, F32, BF16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
CONFIGS = listed()


@pytest.mark.parametrize(
    "config", [CONFIGS[0], pytest.param(CONFIGS[-1], marks=pytest.mark.slow)], ids=lambda each: each.label
)
def test_it_compiles_without_warnings(config: BlockGroupConfig, tmp_path: Path) -> None:
    if (missing := block_groups.FAMILY.unavailable()) is not None:
        pytest.skip(missing)
    report = block_groups.FAMILY.compile(block_groups.FAMILY.key_of(config), tmp_path / "kernel.o")
    assert report.spill_bytes == 0 and report.warnings == ()
    assert config.smem_bytes <= report.smem_bytes <= SMEM_LIMIT


@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: each.label)
def test_warpgroups_and_subtiles_divide_a_tile(config: BlockGroupConfig) -> None:
    values = config.tile_m * config.tile_n
    assert config.few != config.many and (config.columns, config.rows) == (config.tile_m, config.tile_n)
    rows, columns = (config.rows, config.columns) if config.many else (config.columns, config.rows)
    assert (config.wgmma_rows, config.wgmma_columns) == (rows, columns)
    assert config.tile_warpgroups * config.atoms_per_warpgroup * 64 == rows
    assert config.accumulator_registers * config.tile_warpgroups * 128 == values
    width = config.epi_n if config.many else 64
    assert config.subtiles * config.tile_warpgroups * config.staged_rows * width == values
    assert config.pitch == width + 8 and config.subtile_bytes == 2 * config.pitch * config.staged_rows


def test_labels_tell_kernels_apart() -> None:
    assert [each.label for each in CONFIGS] == [
        "64x16x128 s12 e16 p2", "128x16x128 s11 e16 p2", "128x32x128 s10 e32 p2",
        "128x128x128 s5 e64 p2 c2 many", "192x128x128 s4 e64 p1 many",
    ]  # fmt: skip
    wide = dataclasses.replace(CONFIGS[-1], tile_n=256)
    assert (wide.tile_warpgroups, wide.atoms_per_warpgroup) == (2, 2)


def operands(**changes: Any) -> list[Any]:
    made = {
        "a": torch.empty(9, 400, dtype=FP8), "weights": torch.empty(3, 264, 400, dtype=FP8),
        "scale_a": torch.empty(4, 9, dtype=F32).t(), "scale_b": torch.empty(3, 3, 4, dtype=F32),
        "offsets": torch.zeros(3, dtype=torch.int32), "out": torch.empty(9, 264, dtype=BF16),
    }  # fmt: skip
    return list((made | changes).values())


def test_a_launch_says_where_scales_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from tunegemm.generate.block_groups.kernel import Scales
    from tunegemm.generate.grouped.kernel.gemm import Arguments

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    seen: list[Any] = []
    tensors = operands()
    BlockGroupKernel(CONFIGS[0], lambda *given: seen.append(given)).launch(*tensors, blocks=132)
    (given,), count = seen, len(Arguments._fields)
    named = Arguments(*given[:count])._asdict() | Scales(*given[count:-1])._asdict()
    a, weights, scale_a, scale_b, offsets, out = (each.data_ptr() for each in tensors)
    assert given[-1] == 7 and (named["n"], named["rows"], named["k"], named["groups"]) == (264, 9, 400, 3)
    assert (named["rows_address"], named["weights_address"]) == (scale_a, scale_b)
    assert (named["row_stride"], named["rows_k_stride"]) == (1, 9)
    assert (named["group_stride"], named["block_stride"], named["weights_k_stride"]) == (12, 4, 1)
    assert given[:3] == (weights, a, out) and named["offsets_address"] == offsets
    assert named["bias_address"] == named["up_stride"] == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights": torch.empty(3, 268, 400, dtype=FP8)}, "n 268 is not a multiple of 8"),
        ({"a": torch.empty(9, 400, dtype=BF16)}, "a is"),
        ({"scale_a": torch.empty(9, 3, dtype=F32)}, "scale_a is"),
        ({"scale_b": torch.empty(3, 3, 4, dtype=BF16)}, "scale_b is"),
        ({"offsets": torch.zeros(3, dtype=torch.int64)}, "offsets is"),
        ({"out": torch.empty(10, 264, dtype=BF16)}, "out is"),
        ({"out": torch.empty(9, 264, dtype=F32)}, "out is"),
        (
            {"scale_a": torch.empty(9 * 2**20, dtype=F32).as_strided((9, 4), (2**20 + 1, 1))},
            "rows of scale_a",
        ),
    ],
)
def test_what_no_kernel_takes_is_refused(changes: dict[str, Any], said: str) -> None:
    assert refusal(*operands()) == ""
    assert said in refusal(*operands(**changes))
    with pytest.raises(NotTaken, match=said.split()[0]):
        BlockGroupKernel(CONFIGS[0], None).bound(*operands(**changes), blocks=132)


def test_a_launch_refuses_addresses_between_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    seen: list[Any] = []
    launch = BlockGroupKernel(CONFIGS[0], lambda *given: seen.append(given)).bound(*operands(), blocks=132)
    good = (16, 32, 4, 8, 12, 48)
    launch(*good)
    for place, unit in enumerate((16, 16, 4, 4, 4, 16)):
        for off in (unit // 2, unit - 1):
            with pytest.raises(NotTaken, match="at these addresses"):
                launch(*(address + off * (number == place) for number, address in enumerate(good)))
    assert len(seen) == 1
