"""The kernel of groups along k: what it is compiled of, and that it compiles. No GPU needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunegemm.generate import along_k, families
from tunegemm.generate.cute_sm90.config import SMEM_LIMIT, KernelConfig
from tunegemm.generate.families import kernel_source_hash
from tunegemm.model.grouped import listed_along_k

CONFIGS = listed_along_k()


def test_a_kernel_is_named_by_all_that_it_is_compiled_of() -> None:
    keys = [along_k.FAMILY.key_of(config) for config in CONFIGS]
    assert len({tuple(sorted(key.items())) for key in keys}) == len(keys) > 0
    for config, key in zip(CONFIGS, keys, strict=True):
        assert KernelConfig.from_mapping(key) == config and key["family"] == along_k.FAMILY.name
        # cute_sm90's sources are in it, too: the kernel is made of its parts.
        assert key["source"] not in (kernel_source_hash("cute_sm90"), kernel_source_hash("grouped"))


def test_a_compile_worker_finds_kernels_without_a_search_by_their_names() -> None:
    for name in families.LISTED:
        assert families.compiler(name).name == name
    assert families.compiler("grouped") is families.get("grouped")


def test_a_stage_is_cleared_by_whole_pieces() -> None:
    """Lines of 128 bytes, 16 bytes a thread, each time all consumers of a tile."""
    for config in CONFIGS:
        assert (config.tile_k, config.in_dtype) == (64, "bf16") and config.smem_bytes <= SMEM_LIMIT
        for extent in (config.tile_m, config.tile_n):
            pieces = extent * config.tile_k * 2 // 16
            assert extent % 64 == 0 and pieces % (config.tile_warpgroups * 128) == 0, config.label


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
@pytest.mark.slow
def test_it_compiles_without_warnings(config: KernelConfig, tmp_path: Path) -> None:
    """Warning C7511: ptxas serialises WGMMAs."""
    if (missing := along_k.FAMILY.unavailable()) is not None:
        pytest.skip(missing)
    report = along_k.FAMILY.compile(along_k.FAMILY.key_of(config), tmp_path / "kernel.o")
    assert report.spill_bytes == 0 and report.warnings == ()
    assert report.smem_bytes <= SMEM_LIMIT
