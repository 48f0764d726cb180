"""Grouped kernels that draw their tiles, and those of parts of k: what they are compiled of, and that they
compile. No GPU needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunegemm.generate import along_k, block_groups, blocks, drawn, grouped, joined, parted, quantize
from tunegemm.generate.cute_sm90.config import SMEM_LIMIT
from tunegemm.generate.drawn.config import DrawnConfig
from tunegemm.generate.families import kernel_source_hash
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.parted.config import PartedConfig
from tunegemm.model.grouped import configs, listed, maker_of

#: Those that ship.
SHIPPED = [config for config in listed() if isinstance(config, DrawnConfig | PartedConfig)]


def test_kernels_that_ship_keep_their_names() -> None:
    source = kernel_source_hash("grouped")
    for config in configs("bf16").values():
        key = maker_of(config).key_of(config)
        assert type(config).from_mapping(key) == config
        assert (key["source"] == source) == (type(config) is GroupedConfig), "only these are of its sources"


@pytest.mark.parametrize("config", SHIPPED, ids=lambda config: config.label)
@pytest.mark.slow
def test_it_compiles_without_warnings(config: DrawnConfig | PartedConfig, tmp_path: Path) -> None:
    """Warning C7511: ptxas serialises WGMMAs. What feasibility counts is what the kernel has."""
    if (missing := grouped.FAMILY.unavailable()) is not None:
        pytest.skip(missing)
    maker = maker_of(config)
    report = maker.compile(maker.key_of(config), tmp_path / "kernel.o")
    assert report.spill_bytes == 0 and report.warnings == ()
    assert report.smem_bytes <= SMEM_LIMIT
    assert 0 <= report.smem_bytes - config.smem_bytes - config.extra_bytes <= 2048, "alignment"


def test_a_part_of_k_has_one_subtile_to_store() -> None:
    """Its epilogue has two staging buffers, which a block's own tiles take in turns."""
    found = [config for kind in ("bf16", "gated", "fp8") for config in configs(kind).values()]
    for config in found:
        if isinstance(config, PartedConfig):
            assert config.subtiles == 1 and config.consumers == 1 and config.cluster_size == 1
            assert config.accumulator_registers % 4 == 0 and config.parts in (2, 4, 8)


@pytest.mark.parametrize("module", [along_k, block_groups, blocks, drawn, grouped, joined, parted, quantize])
def test_programs_load_objects_by_the_key_of_a_modules_kernel(module: Any) -> None:
    """Programs outside find an object by it, as `packing.provide_grouped` has them."""
    assert module.kernel_key == module.FAMILY.key_of
