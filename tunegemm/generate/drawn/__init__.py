"""The grouped kernel whose blocks draw their tiles from a counter.

db/grouped.toml says what it serves. No search includes it. A compile pool finds it by name through
`tunegemm.generate.grouped`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tunegemm.compile.cute_object import compile_object, toolchain
from tunegemm.compile.ptxas import Resources
from tunegemm.generate.drawn.config import DrawnConfig
from tunegemm.generate.generator import Key
from tunegemm.generate.grouped import GroupedKernel
from tunegemm.generate.sources import hash_of_code, kernel_sources
from tunegemm.generate.workspace import Workspace

NAME = "drawn"
TARGET = "sm_90a"


def kernel_key(config: DrawnConfig) -> Key:
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
    config = DrawnConfig.from_mapping(key)

    def make() -> Any:
        from tunegemm.generate.drawn.kernel import Gemm

        return Gemm(config)

    return compile_object(make, 3, TARGET, out, addresses=4)


@cache
def _counter(index: int) -> Workspace:
    """The memory of a launch's counter of tiles that were drawn."""
    return Workspace(0, 4, index)


class DrawnKernel(GroupedKernel):
    """A compiled kernel, ready to be launched on the device that was the current one when it was loaded."""

    def of(self, a: Any, *operands: Any, **words: Any) -> Callable[..., None]:
        """As `GroupedKernel.of`."""
        counter, function = _counter(a.device.index), self.function

        def draw(*given: Any) -> None:
            stream = given[-1]
            _, address, memory = counter.take(stream)
            function(*given[:-1], address, stream)
            del memory  # the launch is queued

        return GroupedKernel(self.config, draw).of(a, *operands, **words)


#: What a kernel of this family is loaded as.
Kernel = DrawnKernel
