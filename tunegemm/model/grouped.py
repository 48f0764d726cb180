"""Which kernel serves a product of groups of rows: the table db/grouped.toml, measured beside torch's own.

Only what the host knows decides: the numbers of groups and rows, N and K, never how the rows are divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tunegemm.errors import BadValueError
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.resources import data_path

_FACTS = ("groups", "n", "k", "rows", "rows_per_group")
_VARIANTS = ("gated", "n_major")
"""Tables of what is other in kernels of such products."""
_LAUNCH = {"swizzle_size": 8, "l2_hint": 0}
"""Parameters of a launch, and their values where a choice does not say."""


@dataclass(frozen=True)
class GroupedChoice:
    """A kernel and how it is launched."""

    config: GroupedConfig
    swizzle_size: int
    l2_hint: int


@dataclass(frozen=True)
class _Rule:
    bounds: tuple[tuple[str, float, float], ...]
    """Facts, and what they are from and to, both inside."""
    major: str
    """The major of B that it is for; empty: any."""
    choice: GroupedChoice | None
    variants: Mapping[str, GroupedConfig]
    """The kernel of each of `_VARIANTS`; empty without a choice."""

    def holds(self, facts: Mapping[str, float], major: str) -> bool:
        return self.major in ("", major) and all(
            low <= facts[name] <= high for name, low, high in self.bounds
        )

    def of(self, gate: str = "", major: str = "k") -> GroupedChoice | None:
        """The choice for a gate and a major of B."""
        if self.choice is None or (gate and major == "n") or self.major not in ("", major):
            return None
        config = self.choice.config
        if gate or major == "n":
            config = self.variants["gated" if gate else "n_major"]
        config = replace(config, epilogue=gate, a_major="m" if major == "n" else "k")
        return replace(self.choice, config=config)


def choose(
    groups: int, n: int, k: int, rows: int, path: Path | None = None, *,
    gate: str = "", major: str = "k", every: bool = False,
) -> GroupedChoice | None:  # fmt: skip
    """The kernel for A of rows x K and B of groups x N x K; None where torch's own is not known to be slower.

    gate: a gated step of `tunegemm.describe.epilogue`, such as swiglu; N counts rows of gate and up. Such a
    kernel saves torch one that reads and writes the product: it is named where that of the product is not.
    major: k or n, whichever lies contiguous in B; gated products are of k.
    every: of kinds that are not served, too.

    Raises BadValueError for a damaged table.
    """
    table = _table(path)
    if not every and _Kind(gate, major) not in table.kinds.values():
        return None
    facts = dict(zip(_FACTS, (groups, n, k, rows, rows / groups), strict=True))
    held = (rule.of(gate, major) for rule in table.rules if rule.holds(facts, major))
    if gate:
        return next(filter(None, held), None)
    return next(held, None)


def listed(path: Path | None = None, kind: str = "") -> tuple[GroupedConfig, ...]:
    """All kernels of what is served, which ship compiled; or of a kind by its name, served or not.

    Raises BadValueError for a damaged table.
    """
    table = _table(path)
    asked = [each for name, each in table.kinds.items() if name == kind or (not kind and each.served)]
    found = [rule.of(each.gate, each.major) for each in asked for rule in table.rules]
    return tuple(dict.fromkeys(choice.config for choice in found if choice is not None))


def kinds(path: Path | None = None) -> tuple[str, ...]:
    """The names of all kinds of product, served or not. Raises BadValueError for a damaged table."""
    return tuple(_table(path).kinds)


class _Kind(NamedTuple):
    gate: str = ""
    major: str = "k"
    served: bool = True


class _Table(NamedTuple):
    kinds: Mapping[str, _Kind]
    rules: tuple[_Rule, ...]


@cache
def _table(path: Path | None) -> _Table:
    import tomllib  # with the first such product: other programs do without

    path = path or data_path("db", "grouped.toml")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        names = table["kernels"].pop("parameters")
        kernels = {
            name: _config(dict(zip(names, values, strict=True))) for name, values in table["kernels"].items()
        }
        variants = {
            name: {v: replace(config, **table.get(v, {}).get(name, {})) for v in _VARIANTS}
            for name, config in kernels.items()
        }
        served = {name: _Kind(**words) for name, words in table["kinds"].items()}
        return _Table(served, tuple(_rule(words, kernels, variants) for words in table["choices"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadValueError(f"{path}: {type(error).__name__}: {error}; install the package anew") from None


def _config(parameters: Mapping[str, Any]) -> GroupedConfig:
    fixed: dict[str, Any] = {
        "cluster_m": 1, "cluster_n": 1, "in_dtype": "bf16", "out_dtype": "bf16",
        "a_major": "k", "b_major": "k", "out_major": "m",
    }  # fmt: skip
    return GroupedConfig(**fixed | dict(parameters))


def _rule(
    words: Mapping[str, Any],
    kernels: Mapping[str, GroupedConfig],
    variants: Mapping[str, Mapping[str, GroupedConfig]],
) -> _Rule:
    rest = dict(words)
    kernel, major = rest.pop("kernel"), rest.pop("major", "")
    launch = {name: rest.pop(name, value) for name, value in _LAUNCH.items()}
    if major not in ("", "k", "n"):
        raise ValueError(f"major {major!r} is neither k nor n")
    if unknown := sorted(rest.keys() - set(_FACTS)):
        raise ValueError(f"{unknown[0]} is none of {', '.join(_FACTS)}")
    bounds = tuple((name, float(low), float(high)) for name, (low, high) in rest.items())
    choice = GroupedChoice(kernels[kernel], **launch) if kernel else None
    return _Rule(bounds, major, choice, variants[kernel] if kernel else {})
