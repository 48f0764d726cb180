"""The grouped kernel whose blocks draw their tiles from a counter.

db/grouped.toml says what it serves. No search includes it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunegemm.compile.cute_object import compiler
from tunegemm.generate.drawn.config import DrawnConfig
from tunegemm.generate.generator import Kernels
from tunegemm.generate.grouped import GroupedKernel
from tunegemm.generate.workspace import tile_counter


class DrawnKernel(GroupedKernel):
    """A compiled kernel, ready to be launched on the device that was the current one when it was loaded."""

    def of(self, a: Any, *operands: Any, **words: Any) -> Callable[..., None]:
        """As `GroupedKernel.of`."""
        counter, function = tile_counter(a.device.index), self.function

        def draw(*given: Any) -> None:
            stream = given[-1]
            _, address, memory = counter.take(stream)
            function(*given[:-1], address, stream)
            del memory  # the launch is queued

        return GroupedKernel(self.config, draw).of(a, *operands, **words)


FAMILY = Kernels(
    folder=Path(__file__).parent,
    compile=compiler(DrawnConfig, "tunegemm.generate.drawn.kernel", 3, addresses=4, words=0),
    kernel=DrawnKernel.load,
)
kernel_key = FAMILY.key_of
