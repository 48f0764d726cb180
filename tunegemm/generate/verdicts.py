"""What rules say of all candidates of a search space, by asking each rule once about what it reads.

Half a million kernels are in the largest space, and to ask each rule about each kernel takes half a minute.
A rule reads a few parameters: whole columns of candidates that agree in those have one verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate.feasibility import MISSING, Rule, ask


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
        compiled = {name: self._value(name, row) for name in self.compile_values}
        return Candidate.make(
            self.family, compiled, {name: self._value(name, row) for name in self.launch_values}
        )

    def rejected(self, rules: Sequence[Rule], problem: Problem, device: Device) -> np.ndarray:
        """The place of the first rule that rejects each candidate; the number of rules where none does.

        As with `apply_rules`, a rule is asked only about what those before it let pass.
        """
        found = np.full(len(self), len(rules), dtype=np.int16)
        alive = np.arange(len(self))
        for number, rule in enumerate(rules):
            for rows, is_rejected in self._groups(rule, problem, device, alive):
                if is_rejected:
                    found[rows] = number
            alive = alive[found[alive] == len(rules)]
        return found

    def _groups(
        self, rule: Rule, problem: Problem, device: Device, rows: np.ndarray
    ) -> Iterator[tuple[np.ndarray, bool]]:
        """The rows in groups of one verdict."""
        waiting = [rows]
        while waiting:
            if not len(rows := waiting.pop()):
                continue
            reason, read = ask(rule, problem, self.candidate(int(rows[0])), device)
            if read is None or not self.places.keys() >= {n for n, v in read.items() if v is not MISSING}:
                yield rows[:1], reason is not None  # what it reads is no column: one by one
                waiting.append(rows[1:])
                continue
            for name in read:
                if (column := self.places.get(name)) is None:
                    continue  # all lack it
                place = column[rows]
                # What differs in the value read first may be asked for other things next.
                counts = np.bincount(place)
                if counts[place[0]] < len(rows):
                    others = (value for value in counts.nonzero()[0] if value != place[0])
                    waiting += [rows[place == value] for value in others]
                    rows = rows[place == place[0]]
            yield rows, reason is not None

    def _value(self, name: str, row: int) -> Value:
        values = self.compile_values.get(name) or self.launch_values[name]
        return values[int(self.places[name][row])]


def _combinations(values: Mapping[str, Sequence[Value]]) -> dict[str, np.ndarray]:
    """The places of the values of each combination, the last value changing first."""
    sizes = [len(listed) for listed in values.values()]
    whole = np.indices(sizes, dtype=np.int16).reshape(len(sizes), -1)
    return dict(zip(values, whole, strict=True))
