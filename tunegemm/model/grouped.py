"""Chooses the kernel of a grouped product from the table db/grouped.toml, which was measured against torch.

The choice depends only on facts that the host knows: the GPU, the numbers of groups and rows, N and K. It
never depends on the division of the rows. All functions here raise BadValueError if the table is damaged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate import along_k, drawn, grouped, parted
from tunegemm.generate.cute_sm90.config import KernelConfig
from tunegemm.generate.drawn.config import DrawnConfig
from tunegemm.generate.generator import Kernels, fields_of
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.grouped.rules import config_from
from tunegemm.generate.parted.config import PartedConfig
from tunegemm.model.tables import reader_of

_FACTS = ("groups", "n", "k", "rows", "rows_per_group")
_LAUNCH = {"swizzle_size": 8, "l2_hint": 0}
"""Launch parameters and their default values."""
_FEW_K = 8
"""The kernel for few rows needs k to be a multiple of this."""
FP8 = "fp8_e4m3"
"""The dtype of fp8 products, which have scales of rows and columns and a bf16 output."""


@dataclass(frozen=True)
class GroupedChoice:
    """A kernel and its launch parameters."""

    config: GroupedConfig
    swizzle_size: int
    l2_hint: int
    is_few: bool = False
    """Whether the kernel for few rows, `few` of `tunegemm.generate.routing`, replaces this kernel."""

    @property
    def label(self) -> str:
        """A short name of the kernel."""
        return f"few {self.config.in_dtype}" if self.is_few else self.config.label


def maker_of(config: GroupedConfig) -> Kernels:
    """The family that compiles and loads a kernel."""
    return {DrawnConfig: drawn.FAMILY, PartedConfig: parted.FAMILY}.get(type(config), grouped.FAMILY)


@dataclass(frozen=True)
class AlongKChoice:
    """A kernel for groups along k, and its launch parameter."""

    config: KernelConfig
    swizzle_size: int


def choose_along_k(
    groups: int, n: int, k: int, rows: int, path: Path | None = None, *, gpu: str = ""
) -> AlongKChoice | None:
    """The kernel for groups x N x K from rows x N and rows x K; None unless torch is known to be slower.

    gpu: as in `choose`.
    """
    table = _table(path)
    facts = dict(zip(_FACTS, (groups, n, k, rows, rows / groups), strict=True))
    rule = next((rule for rule in table.along_k_rules if rule.gpu in gpu and rule.holds(facts)), None)
    if rule is None or not rule.kernel:
        return None
    return AlongKChoice(table.along_k[rule.kernel], rule.launch["swizzle_size"])


def listed_along_k(path: Path | None = None) -> tuple[KernelConfig, ...]:
    """The kernels for groups along k, which ship compiled."""
    return tuple(_table(path).along_k.values())


def choose(
    groups: int, n: int, k: int, rows: int, path: Path | None = None, *,
    gpu: str = "", dtype: str = "bf16", gate: str = "", major: str = "k", ordered: bool = False,
) -> GroupedChoice | None:  # fmt: skip
    """The kernel for A (rows x K) and B (groups x N x K); None unless torch's own is known to be slower.

    gpu: its name, such as NVIDIA H200; some rules hold only for GPUs whose names contain a certain word.
    gate: a gated step of `tunegemm.describe.epilogue`, such as swiglu; N counts the rows of gate and up. A
    gated kernel saves torch a second kernel, which would read and write the product; so it is chosen even
    where torch computes the plain product faster.
    major: k or n, the contiguous mode of B.
    ordered: choose a kernel that adds up k in the order that all kernels but `few` share, for any number of
    rows; never torch's.
    """
    table = _table(path)
    asked = _Kind(dtype, gate, major)
    if (kind := next((name for name, each in table.kinds.items() if each == asked), None)) is None:
        return None
    facts = dict(zip(_FACTS, (groups, n, k, rows, rows / groups), strict=True))
    possible = [
        rule for rule in table.rules
        if rule.is_for(kind, gpu)
        and not (ordered and isinstance(table.configs.get((kind, rule.kernel)), PartedConfig))
    ]  # fmt: skip
    held = (rule for rule in possible if rule.holds(facts))
    rule = next((rule for rule in held if rule.kernel or not (gate or ordered)), None)
    if rule is None and ordered:  # larger groups than were timed: take the rule of the largest
        others = [rule for rule in possible if rule.kernel]
        rule = max(others, key=_Rule.most_per_group, default=None)
    if rule is None or not rule.kernel:
        return None
    config = table.configs[kind, rule.kernel]
    return GroupedChoice(config, **rule.launch, is_few=rule.is_few and not ordered and k % _FEW_K == 0)


def chosen(problem: Problem, gpu: str, *, ordered: bool = False) -> GroupedChoice | None:
    """The result of `choose` for a grouped problem; gpu: the GPU's name."""
    return choose(
        problem.groups, problem.n, problem.k, problem.m,
        gpu=gpu, dtype=problem.in_dtype, gate=problem.gate, major=problem.b_major, ordered=ordered,
    )  # fmt: skip


def shipped_kernel(problem: Problem, gpu: str) -> Candidate | None:
    """The `chosen` kernel as a candidate of the search space; None if torch's kernel is chosen.

    The search space has neither drawn tiles nor parts of k. The candidate has the same tile as a kernel with
    drawn tiles; the `ordered` choice replaces a kernel with parts of k.
    """
    choice = chosen(problem, gpu)
    if choice is not None and isinstance(choice.config, PartedConfig):
        choice = chosen(problem, gpu, ordered=True)
    return None if choice is None else candidate_of(choice)


def candidate_of(choice: GroupedChoice) -> Candidate:
    """A choice as a candidate of the search space."""
    from tunegemm.generate.grouped import FAMILY, L2_HINTS

    parameters = {name: getattr(choice.config, name) for name in FAMILY.parameters["compile"]}
    parameters["tile_k"] //= 1 + (choice.config.in_dtype == FP8)
    launch: dict[str, Value] = {"swizzle_size": choice.swizzle_size, "l2_hint": L2_HINTS[choice.l2_hint]}
    return Candidate.make("grouped", parameters, launch)


def listed(path: Path | None = None, kind: str = "") -> tuple[GroupedConfig, ...]:
    """The kernels that choices name, which ship compiled; with `kind`, of that kind alone."""
    table = _table(path)
    results = [
        (name, rule.kernel)
        for name in table.kinds
        if kind in ("", name)
        for rule in table.rules
        if rule.kernel and rule.is_for(name, rule.gpu)
    ]
    return tuple(table.configs[pair] for pair in dict.fromkeys(results))


def configs(kind: str, path: Path | None = None) -> dict[str, GroupedConfig]:
    """The kernels of a kind by their names in the table."""
    return {name: config for (of, name), config in _table(path).configs.items() if of == kind}


def kinds(path: Path | None = None) -> tuple[str, ...]:
    """The names of all kinds of product."""
    return tuple(_table(path).kinds)


class _Kind(NamedTuple):
    dtype: str = "bf16"
    gate: str = ""
    major: str = "k"

    def config_of(self, parameters: Mapping[str, Any]) -> GroupedConfig:
        """The config of a kernel of this kind; `parts` splits k, `drawn` draws tiles dynamically."""
        rest = dict(parameters)
        parts, draws = rest.pop("parts", 1), rest.pop("drawn", False)
        config = config_from(rest, dtype=self.dtype, gate=self.gate, major=self.major)
        fields = fields_of(config)
        if parts > 1:
            return PartedConfig(**fields, parts=parts)
        return DrawnConfig(**fields | {"tile_scheduler": "dynamic"}) if draws else config


@dataclass(frozen=True)
class _Rule:
    bounds: tuple[tuple[str, float, float], ...]
    """Facts with their lower and upper bounds, both inclusive."""
    kinds: tuple[str, ...]
    """The kinds that the rule is for; empty for all."""
    gpu: str
    """A word that the GPU's name must contain."""
    kernel: str
    """The kernel's name; empty for torch's."""
    launch: Mapping[str, int]
    is_few: bool

    def is_for(self, kind: str, gpu: str) -> bool:
        return (not self.kinds or kind in self.kinds) and self.gpu in gpu

    def most_per_group(self) -> float:
        """The upper bound on rows per group; 0 if the rule has none."""
        return max((high for fact, _, high in self.bounds if fact == "rows_per_group"), default=0)

    def holds(self, facts: Mapping[str, float]) -> bool:
        return all(low <= facts[name] <= high for name, low, high in self.bounds)


class _Table(NamedTuple):
    kinds: Mapping[str, _Kind]
    configs: Mapping[tuple[str, str], GroupedConfig]
    """Configs by the names of kind and kernel, of those kinds whose rows a kernel can store."""
    rules: tuple[_Rule, ...]
    along_k: Mapping[str, KernelConfig]
    along_k_rules: tuple[_Rule, ...]


@reader_of("grouped.toml")
def _table(table: dict[str, Any]) -> _Table:
    kernels = _kernels(table["kernels"])
    for name, parts in table.get("parts", {}).items():
        kernels[name]["parts"] = parts
    kinds = {name: _Kind(**words) for name, words in table["kinds"].items()}
    arguments = {
        (kind, name): parameters | table.get(kind, {}).get(name, {})
        for kind in kinds
        for name, parameters in kernels.items()
    }
    for name in table.get("drawn", {}).get("kernels", ()):
        kernels[f"drawn-{name}"] = kernels[name]
        arguments |= {(kind, f"drawn-{name}"): arguments[kind, name] | {"drawn": True} for kind in kinds}
    every = {(kind, name): kinds[kind].config_of(words) for (kind, name), words in arguments.items()}
    # Even tiles whose step does not divide them would be wider than their main loops.
    whole = (pair for pair, config in every.items() if config.stores_all and not config.tile_n % config.step)
    configs = {pair: every[pair] for pair in whole}
    rules = tuple(_rule(words, kernels, kinds) for words in table["choices"])
    along = table.get("along_k", {})
    along_kernels = _kernels(along.get("kernels", {}))
    along_configs = {name: along_k.config_from(parameters) for name, parameters in along_kernels.items()}
    along_rules = tuple(_rule(words, along_kernels, ()) for words in along.get("choices", ()))
    return _Table(kinds, configs, rules, along_configs, along_rules)


def _kernels(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The parameters of each kernel, by its name."""
    names = table.pop("parameters", ())
    return {name: dict(zip(names, values, strict=True)) for name, values in table.items()}


def _rule(words: Mapping[str, Any], kernels: Collection[str], kinds: Collection[str]) -> _Rule:
    rest = dict(words)
    kernel, of, gpu = rest.pop("kernel"), rest.pop("kinds", []), str(rest.pop("gpu", ""))
    launch = {name: rest.pop(name, value) for name, value in _LAUNCH.items()}
    is_few = bool(rest.pop("few", False))
    for names, known in ((rest, _FACTS), (of, kinds), ([kernel] if kernel else [], kernels)):
        if unknown := sorted(set(names) - set(known)):
            raise ValueError(f"{unknown[0]} is not among {', '.join(known)}")
    bounds = tuple((name, float(low), float(high)) for name, (low, high) in rest.items())
    return _Rule(bounds, tuple(of), gpu, kernel, launch, is_few)
