"""ptxas keeps WGMMA's descriptors in uniform registers only where it sees that a warp's threads stay
together.

Else a WARPSYNC is before each WGMMA: kernels took up to a fifth longer, with the same registers and spills.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fit.same_code import cubin_of
from tunegemm.describe.device import Device
from tunegemm.generate import blocks, cute_sm90
from tunegemm.generate.generator import Key
from tunegemm.model import shortlist
from tunegemm.model.blocks import listed

NAMES = ("a tile of 96 columns with block scales", "a residual")


def key_of(name: str, device: Device) -> Key:
    if name == "a residual":
        problem, kernels = next(
            each for each in shortlist.ordered_lists().items() if each[0].epilogue == "residual"
        )
        return cute_sm90.FAMILY.kernel_key(problem, shortlist.launched(problem, kernels[0]), device)
    chosen = next(config for config in listed() if (config.rows, config.columns) == (128, 96))
    return blocks.FAMILY.key_of(chosen)


@pytest.mark.parametrize("name", NAMES)
def test_the_main_loop_is_uniform(name: str, h200: Device, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    if (missing := blocks.FAMILY.unavailable()) is not None:
        pytest.skip(missing)
    family = cute_sm90.FAMILY if name == "a residual" else blocks.FAMILY
    family.compile(key_of(name, h200), tmp_path / "kernel.o")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(cubin_of((tmp_path / "kernel.o").read_bytes()))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    code = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "GMMA" in code and "WARPSYNC" not in code
