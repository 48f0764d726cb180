"""The matrices of a model's layers, and the config.json that holds their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tunegemm.errors import BadValueError, WorkloadError
from tunegemm.untrusted import line, listed, whole


@dataclass(frozen=True)
class Linear:
    """One matrix of a model: ``y = x @ weight.T``."""

    path: str
    """Its module path, as quantisation configs name it."""
    columns: int
    """Output features."""
    depth: int
    """Input features."""
    bias: bool = False
    split: Literal["columns", "depth", ""] = ""
    """The extent that tensor parallelism divides; empty if each rank has the whole matrix."""
    units: int = 1
    """The most parts that it can be divided into: heads, or features."""
    shared: bool = False
    """Whether ranks beyond `units` have the same part: heads of keys and values."""

    def of_rank(self, ranks: int) -> tuple[int, int]:
        """Columns and depth of one rank's part. Raises WorkloadError if the ranks cannot divide it."""
        if not self.split or ranks == 1:
            return self.columns, self.depth
        parts = min(ranks, self.units) if self.shared else ranks
        if self.units % parts or ranks % parts:
            unit = "features" if self.units in (self.columns, self.depth) else "heads"
            raise WorkloadError(f"--tp {ranks}: {self.path} has {self.units} {unit}; give a divisor of them")
        if self.split == "columns":
            return self.columns // parts, self.depth
        return self.columns, self.depth // parts


@dataclass(frozen=True)
class Layer:
    """Linear layers with the same input, which engines merge into one."""

    name: str
    parts: tuple[Linear, ...]
    is_one: bool = False
    """Whether the model itself stores them as one matrix."""
    only_prefill: bool = False
    """Whether engines compute it differently when they decode: absorbed into the attention."""
    experts: int = 0
    """Number of experts, each with its own matrix, whose products are grouped; 0 if all rows use the same."""
    each: int = 1
    """How many experts compute each row."""
    gate: str = ""
    """The gate's epilogue step; empty if no kernel includes the gate."""
    transposed: bool = False
    """Whether the columns of weights are contiguous."""
    left_out: str = ""
    """Why its products are not listed; such a layer has no parts."""


@dataclass(frozen=True)
class Config:
    """A config.json and its numbers. If a field has several names, the first that is present counts."""

    values: Mapping[str, Any]
    where: str

    def get(self, *names: str) -> Any:
        """The first of these fields that is present; None if none is."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def number(self, *names: str, default: int | None = None) -> int:
        """A required number. Raises WorkloadError if it is absent and does not follow from others."""
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is None:
            if default is None:
                owner = self.family or "each model"
                raise WorkloadError(
                    f"{self.where}: no {names[0]}, which {owner} has; give a full config.json"
                )
            return default
        try:
            return whole(self.values[name], name, 1)
        except BadValueError as error:
            raise WorkloadError(f"{self.where}: {error}") from None

    def count(self, *names: str) -> int:
        """The number of something optional: 0 if the field is absent, zero or false."""
        return self.number(*names) if self.get(*names) else 0

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self.get(*names)
        return default if value is None else bool(value)

    def each(self, name: str) -> list[Any]:
        """A list with a value for each block; empty if absent. Raises WorkloadError unless it is a list."""
        try:
            return list(listed(self.get(name) or [], name))
        except BadValueError as error:
            raise WorkloadError(f"{self.where}: {error}") from None

    def word(self, *names: str) -> str:
        """The text of the first of these fields that is present. Raises WorkloadError if it is not a line."""
        try:
            return line(self.get(*names) or "", names[0], 100)
        except BadValueError as error:
            raise WorkloadError(f"{self.where}: {error}") from None

    @property
    def family(self) -> str:
        """Its ``model_type``."""
        return str(self.values.get("model_type") or "")
