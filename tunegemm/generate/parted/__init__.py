"""The grouped kernel for few rows, whose blocks share a tile by parts of k.

db/grouped.toml lists its products, which `tunegemm.generate.grouped.GroupedKernel` launches. No search
includes it.
"""

from __future__ import annotations

from pathlib import Path

from tunegemm.compile.cute_object import compiler, toolchain
from tunegemm.generate.generator import CUTE_DSL, TVM_FFI, Kernels
from tunegemm.generate.grouped import GroupedKernel
from tunegemm.generate.parted.config import PartedConfig

FAMILY = Kernels(
    name="parted",
    folder=Path(__file__).parent,
    compile=compiler(PartedConfig, "tunegemm.generate.parted.kernel", 3, addresses=3, words=0),
    toolchain=toolchain,
    packages=(CUTE_DSL, TVM_FFI),
)
kernel_key = FAMILY.key_of


#: What a kernel of this family is loaded as.
Kernel = GroupedKernel
