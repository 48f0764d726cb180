"""What the configs of all families share.

A config has all compile-time choices of a kernel: two problems with equal configs share one compiled object.
Its module derives the kernel's numbers once for feasibility, compilation and launch alike, and imports no
compiler, because feasibility and dispatch need the numbers without it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Self


class Mapped:
    """A frozen dataclass that can be made from a mapping."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Make one from any mapping that holds at least the fields without a default."""
        return cls(**{name: values[name] for name in _names(cls) if name in values})  # type: ignore[arg-type]


@functools.cache  # a search makes a config of each of 50,000 kernels
def _names(config: type[Mapped]) -> tuple[str, ...]:
    return tuple(config.__dataclass_fields__)  # type: ignore[attr-defined]
