"""The grouped kernel for few rows, whose blocks share a tile by parts of k.

db/grouped.toml lists its products, which `tunegemm.generate.grouped.GroupedKernel` launches. No search
includes it.
"""

from __future__ import annotations

from pathlib import Path

from tunegemm.compile.cute_object import compiler
from tunegemm.generate.generator import Kernels
from tunegemm.generate.grouped import GroupedKernel
from tunegemm.generate.parted.config import PartedConfig

FAMILY = Kernels(
    folder=Path(__file__).parent,
    compile=compiler(PartedConfig, "tunegemm.generate.parted.kernel", 3, addresses=3, words=0),
    kernel=GroupedKernel.load,
)
kernel_key = FAMILY.key_of
