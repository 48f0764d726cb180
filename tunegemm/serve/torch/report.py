"""What became of each linear layer of a patched model, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from tunegemm.serve.torch.linear import is_tuned


@dataclass(frozen=True)
class Line:
    """One layer of the model."""

    name: str
    """Its name within the model; empty for the model itself."""
    state: Literal["served", "left"]
    """served: it calls `tunegemm.linear`; left: `patch` did not change it."""
    why: str

    def __str__(self) -> str:
        return f"{self.state:6}  {self.name}: {self.why}"


@dataclass(frozen=True)
class Report:
    """What `patch` did, a line for each layer."""

    patched: int
    """Linear layers that call `tunegemm.linear` now and did not before."""
    lines: tuple[Line, ...]

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))

    def of(self, state: str) -> list[Line]:
        """The lines of one state: served or left."""
        return [line for line in self.lines if line.state == state]


def lines_of(model: torch.nn.Module) -> Iterator[Line]:
    """A line for each linear layer of a patched model."""
    for name, module in model.named_modules():
        if is_tuned(type(module)):
            yield Line(name, "served", "calls tunegemm.linear")
        elif isinstance(module, torch.nn.MultiheadAttention):
            yield Line(name, "left", "torch computes its projections in one product where it can")
        elif isinstance(module, torch.nn.Linear):
            yield Line(name, "left", f"{type(module).__name__} is a subclass with a forward of its own")
