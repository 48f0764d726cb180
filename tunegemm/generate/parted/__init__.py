"""The grouped kernel for few rows, whose blocks share a tile by parts of k.

db/grouped.toml says what it serves, through `tunegemm.generate.grouped.GroupedKernel`. No search includes
it. A compile pool finds it by name through `tunegemm.generate.grouped`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunegemm.compile.cute_object import compile_object, toolchain
from tunegemm.compile.ptxas import Resources
from tunegemm.generate.generator import Key
from tunegemm.generate.grouped import GroupedKernel
from tunegemm.generate.parted.config import PartedConfig
from tunegemm.generate.sources import hash_of_code, kernel_sources

NAME = "parted"
TARGET = "sm_90a"


def kernel_key(config: PartedConfig) -> Key:
    """Everything the compiled object depends on: never extents or numbers of groups."""
    return {
        **{name: getattr(config, name) for name in config.__dataclass_fields__},
        "family": NAME,
        "target": TARGET,
        **toolchain(),
        "source": hash_of_code(kernel_sources(Path(__file__).parent)),
    }


def compile(key: Key, out: Path) -> Resources:
    """Compile the kernel of a key to the object `out`. Raises whatever the compiler raises."""
    config = PartedConfig.from_mapping(key)

    def make() -> Any:
        from tunegemm.generate.parted.kernel import Gemm

        return Gemm(config)

    return compile_object(make, 3, TARGET, out, addresses=3)


#: What a kernel of this family is loaded as.
Kernel = GroupedKernel
