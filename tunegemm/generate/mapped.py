"""What the configs of all families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self


class Mapped:
    """A frozen dataclass that can be made from a mapping."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From any mapping that holds at least the fields."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})  # type: ignore[arg-type]
