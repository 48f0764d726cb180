"""What rules say of all candidates of a search space, by asking each rule once about what it reads.

Half a million kernels are in the largest space, and to ask each rule about each kernel takes half a minute.
A rule declares the few parameters that it reads: candidates that agree in those have one verdict.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate.feasibility import Rule

#: Combinations of what a rule reads that are kept in a table; of more only those that occur are sorted out.
MOST_IN_TABLE = 1 << 22


@dataclass(frozen=True)
class CandidateTable:
    """Candidates as columns: of each parameter a list of values, and for each candidate a place in it."""

    family: str
    compile_values: Mapping[str, Sequence[Value]]
    launch_values: Mapping[str, Sequence[Value]]
    """The launch parameters; empty for kernels without a launch."""
    places: Mapping[str, np.ndarray]
    """The places by parameter, compile-time and launch-time; one entry for each candidate."""

    @classmethod
    def kernels(cls, family: str, values: Mapping[str, Sequence[Value]]) -> CandidateTable:
        """Every combination of the values, in the order of `SearchSpace.kernels`."""
        return cls(family, values, {}, _combinations(values))

    def with_launches(self, rows: np.ndarray, values: Mapping[str, Sequence[Value]]) -> CandidateTable:
        """Every launch of these values of some of the kernels, one kernel's after the other's."""
        launches = _combinations(values)
        count = len(next(iter(launches.values()), np.zeros(1)))
        places = {name: np.repeat(column[rows], count) for name, column in self.places.items()}
        places |= {name: np.tile(column, len(rows)) for name, column in launches.items()}
        return CandidateTable(self.family, self.compile_values, values, places)

    def __len__(self) -> int:
        return len(next(iter(self.places.values())))

    def candidate(self, row: int) -> Candidate:
        """The candidate of a row."""
        return self.candidates(np.array([row]))[0]

    def candidates(self, rows: np.ndarray) -> list[Candidate]:
        """The candidates of rows."""
        compiled, launched = (
            zip(*[self._pairs(name, values[name], rows) for name in sorted(values)], strict=True)
            if values
            else itertools.repeat((), len(rows))
            for values in (self.compile_values, self.launch_values)
        )
        return list(map(Candidate, itertools.repeat(self.family), compiled, launched))

    def _pairs(self, name: str, values: Sequence[Value], rows: np.ndarray) -> Iterator[tuple[str, Value]]:
        """A parameter with its value, of each row."""
        pairs = [(name, value) for value in values]
        return map(pairs.__getitem__, self.places[name][rows].tolist())

    def rejected(self, rules: Sequence[Rule], problem: Problem, device: Device) -> np.ndarray:
        """The place of the first rule that rejects each candidate; the number of rules where none does.

        As with `apply_rules`, a rule is asked only about what those before it let pass.
        """
        found = np.full(len(self), len(rules), dtype=np.int16)
        alive = np.arange(len(self))
        for number, rule in enumerate(rules):
            firsts, group = self.groups(rule, alive)
            objections = (rule.objection(problem, one, device) for one in self.candidates(firsts))
            is_rejected = np.array([reason is not None for reason in objections], dtype=bool)[group]
            found[alive[is_rejected]] = number
            alive = alive[~is_rejected]
        return found

    def groups(self, rule: Rule, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Candidates that agree in what a rule reads: the first row of each group, and each row's group."""
        names = [name for name in rule.parameters if name in self.places]
        sizes = [len(self.compile_values.get(name) or self.launch_values[name]) for name in names]
        code = np.zeros(len(rows), dtype=np.int64)
        for name, size in zip(names, sizes, strict=True):
            code = code * size + self.places[name][rows]
        if (combinations := math.prod(sizes)) > MOST_IN_TABLE:
            _, first, group = np.unique(code, return_index=True, return_inverse=True)
            return rows[first], group
        first = np.full(combinations, -1)
        first[code[::-1]] = rows[::-1]  # the last that is written is the first row
        occurs = first >= 0
        return first[occurs], (np.cumsum(occurs) - 1)[code]


def _combinations(values: Mapping[str, Sequence[Value]]) -> dict[str, np.ndarray]:
    """The places of the values of each combination, the last value changing first."""
    sizes = [len(listed) for listed in values.values()]
    whole = np.indices(sizes, dtype=np.int16).reshape(len(sizes), -1)
    return dict(zip(values, whole, strict=True))
