"""The grouped kernel whose blocks draw their tiles: in what order, the rows of each group say on the device.

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
from tunegemm.generate.drawn.config import MOST_GROUPS, DrawnConfig
from tunegemm.generate.generator import Key
from tunegemm.generate.grouped import GroupedKernel
from tunegemm.generate.sources import hash_of_code, kernel_sources
from tunegemm.generate.takes import NotTaken
from tunegemm.generate.workspace import Workspace

NAME = "drawn"
TARGET = "sm_90a"
#: Orders of tiles, as the kernel numbers them.
ORDERS = ("groups", "heavy_first", "in_turns")
_NUMBERS = 16
"""Arguments of a launch of `GroupedKernel` before the addresses behind its numbers."""


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

    return compile_object(make, 4, TARGET, out, addresses=4)


@cache
def _counter(index: int) -> Workspace:
    """The memory of a launch's counter of tiles that were drawn."""
    return Workspace(0, 4, index)


class DrawnKernel(GroupedKernel):
    """A compiled kernel, ready to be launched on the device that was the current one when it was loaded."""

    def launch(
        self, a: Any, weights: Any, out: Any, offsets: Any, bias: Any = None, *,
        scales: Any = None, **words: Any,
    ) -> None:  # fmt: skip
        """As `GroupedKernel.launch`. order: a number of `ORDERS`."""
        self.of(a, weights, out, offsets, bias, scales, **words)(a, weights, out, offsets, bias, scales)

    def of(self, a: Any, weights: Any, *operands: Any, order: int = 2, **words: Any) -> Callable[..., None]:
        """As `GroupedKernel.of`; raises NotTaken for more groups than its table has room for, too."""
        if weights.shape[0] > MOST_GROUPS:
            raise NotTaken(f"{weights.shape[0]} groups are more than the {MOST_GROUPS} of a block's table")
        counter, function = _counter(a.device.index), self.function

        def draw(*given: Any) -> None:
            stream = given[-1]
            _, address, memory = counter.take(stream)
            function(*given[:_NUMBERS], order, *given[_NUMBERS:-1], address, stream)
            del memory  # the launch is queued

        return GroupedKernel(self.config, draw).of(a, weights, *operands, **words)


#: What a kernel of this family is loaded as.
Kernel = DrawnKernel
