"""What became of each layer of a model, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Line:
    """Of one layer, or of some that became one step."""

    name: str
    """Within the model; of several layers those of one module are in braces."""
    state: Literal["fused", "served", "left"]
    """served: by `tunegemm.linear`, and no more; left: as it was, or its product without what was asked."""
    why: str

    def __str__(self) -> str:
        return f"{self.state:6}  {self.name}: {self.why}"


@dataclass(frozen=True)
class Report:
    """What `patch` did, a line for each layer."""

    patched: int
    """Linear layers that now call `tunegemm.linear` and did not."""
    lines: tuple[Line, ...]

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))

    def of(self, state: str) -> list[Line]:
        """The lines of a state: fused, served or left."""
        return [line for line in self.lines if line.state == state]
