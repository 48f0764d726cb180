"""The matrices of a model's layers, and the config.json that says how large they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tunegemm.errors import BadValueError, WorkloadError
from tunegemm.untrusted import line, listed, whole

_MOST = 2**31 - 1


@dataclass(frozen=True)
class Linear:
    """One matrix of a model: ``y = x @ weight.T``."""

    path: str
    """Its module, as quantisation configs name it."""
    columns: int
    """Output features."""
    depth: int
    """Input features."""
    bias: bool = False
    split: Literal["columns", "depth", ""] = ""
    """What tensor parallelism divides; empty where each rank has all of it."""
    units: int = 1
    """Parts into which that can be divided at most: heads, or features."""
    shared: bool = False
    """Whether ranks beyond `units` have the same part: heads of keys and values."""

    def of_rank(self, ranks: int) -> tuple[int, int]:
        """Columns and depth of one rank's part. Raises WorkloadError where ranks cannot divide it."""
        if not self.split or ranks == 1:
            return self.columns, self.depth
        parts = min(ranks, self.units) if self.shared else ranks
        if self.units % parts or ranks % parts:
            what = "features" if self.units in (self.columns, self.depth) else "heads"
            raise WorkloadError(f"--tp {ranks}: {self.path} has {self.units} {what}; give a divisor of them")
        if self.split == "columns":
            return self.columns // parts, self.depth
        return self.columns, self.depth // parts


@dataclass(frozen=True)
class Layer:
    """Linear layers of the same input, which engines merge into one."""

    name: str
    parts: tuple[Linear, ...]
    is_one: bool = False
    """Whether the model itself has them as one matrix."""
    only_prefill: bool = False
    """Whether engines compute it in another way where they decode: absorbed into the attention."""
    experts: int = 0
    """How many there are of each matrix, whose products are grouped; 0 where every row has the same."""
    each: int = 1
    """Experts that compute a row."""
    gate: str = ""
    """What becomes of gate and up, as in an epilogue; empty where no kernel takes it along."""
    transposed: bool = False
    """Whether the columns of weights are contiguous."""
    left_out: str = ""
    """Why its products are not listed; it has no parts then."""


@dataclass(frozen=True)
class Config:
    """A config.json, and the numbers in it. Fields of several names are read by the first that is there."""

    values: Mapping[str, Any]
    where: str

    def get(self, *names: str) -> Any:
        """The first of these fields that is there; None where none is."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def number(self, *names: str, default: int | None = None) -> int:
        """Raises WorkloadError where it is neither there nor known from the others."""
        value = self.get(*names)
        if value is None:
            if default is None:
                owner = self.family or "each model"
                raise WorkloadError(
                    f"{self.where}: no {names[0]}, which {owner} has; give a full config.json"
                )
            return default
        try:
            return whole(value, names[0], 1, _MOST)
        except BadValueError as error:
            raise WorkloadError(f"{self.where}: {error}") from None

    def count(self, *names: str) -> int:
        """The same of what a model may have none of: 0 where it is absent, zero or false."""
        return self.number(*names) if self.get(*names) else 0

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self.get(*names)
        return default if value is None else bool(value)

    def each(self, name: str) -> list[Any]:
        """A list with a value for each block; empty without one. Raises WorkloadError for what is no list."""
        try:
            return list(listed(self.get(name) or [], name))
        except BadValueError as error:
            raise WorkloadError(f"{self.where}: {error}") from None

    def word(self, *names: str) -> str:
        """The text of the first of these fields that is there. Raises WorkloadError if it is not one line."""
        try:
            return line(self.get(*names) or "", names[0], 100)
        except BadValueError as error:
            raise WorkloadError(f"{self.where}: {error}") from None

    def with_values(self, **values: Any) -> Config:
        return Config({**self.values, **values}, self.where)

    @property
    def family(self) -> str:
        """Its ``model_type``."""
        return str(self.values.get("model_type") or "")
