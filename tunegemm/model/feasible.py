"""Lists the kernels of a family that can be compiled for one kind of problem: the same dtypes, majors,
alignment and epilogue.

The largest space has half a million kernels, and asking each rule about each kernel would take half a minute.
A rule declares the few parameters that it reads, and candidates that agree in those share one verdict
(`CandidateTable`); this leaves some 20,000 kernels within seconds. A folder caches them, as indices into the
space's lists, under a file name that changes with the rules and the space.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, SearchSpace, Value
from tunegemm.errors import TunegemmError
from tunegemm.files import make_folder, replacing
from tunegemm.generate import families
from tunegemm.generate.family import Generator
from tunegemm.generate.feasibility import Remembered, Rule

#: Up to this many combinations of a rule's parameters are kept in a table. If there are more, sorting finds
#: the combinations that occur.
MOST_IN_TABLE = 1 << 22


@dataclass(frozen=True)
class CandidateTable:
    """Candidates as columns: each parameter has a list of values, and each candidate an index into it."""

    family: str
    compile_values: Mapping[str, Sequence[Value]]
    launch_values: Mapping[str, Sequence[Value]]
    """Values of the launch parameters; empty for kernels without a launch."""
    places: Mapping[str, np.ndarray]
    """The indices by parameter, compile-time and launch-time, with one entry for each candidate."""

    @classmethod
    def kernels(cls, family: str, values: Mapping[str, Sequence[Value]]) -> CandidateTable:
        """Every combination of the values, in the order of `SearchSpace.kernels`."""
        return cls(family, values, {}, _combinations(values))

    def with_launches(self, rows: np.ndarray, values: Mapping[str, Sequence[Value]]) -> CandidateTable:
        """Every combination of these launch values with the kernels of `rows`, kernel by kernel."""
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
        """A parameter's name and value for each row."""
        pairs = [(name, value) for value in values]
        return map(pairs.__getitem__, self.places[name][rows].tolist())

    def rejected(self, rules: Sequence[Rule], problem: Problem, device: Device) -> np.ndarray:
        """The index of the first rule that rejects each candidate, or the number of rules if none does.

        As in `apply_rules`, each rule sees only the candidates that the rules before it allow.
        """
        result = np.full(len(self), len(rules), dtype=np.int16)
        alive = np.arange(len(self))
        for number, rule in enumerate(rules):
            firsts, group = self.groups(rule, alive)
            objections = (rule(problem, candidate, device) for candidate in self.candidates(firsts))
            is_rejected = np.array([reason is not None for reason in objections], dtype=bool)[group]
            result[alive[is_rejected]] = number
            alive = alive[~is_rejected]
        return result

    def groups(self, rule: Rule, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Groups candidates that agree in the rule's parameters: each group's first row, each row's group."""
        names = [name for name in rule.parameters if name in self.places]
        sizes = [len(self.compile_values.get(name) or self.launch_values[name]) for name in names]
        code = np.zeros(len(rows), dtype=np.int64)
        for name, size in zip(names, sizes, strict=True):
            code = code * size + self.places[name][rows]
        if (combinations := math.prod(sizes)) > MOST_IN_TABLE:
            _, first, group = np.unique(code, return_index=True, return_inverse=True)
            return rows[first], group
        first = np.full(combinations, -1)
        first[code[::-1]] = rows[::-1]  # in reverse, so that a group's first row is written last
        occurs = first >= 0
        return first[occurs], (np.cumsum(occurs) - 1)[code]


def _combinations(values: Mapping[str, Sequence[Value]]) -> dict[str, np.ndarray]:
    """The indices of the values of each combination; the last parameter changes fastest."""
    sizes = [len(listed) for listed in values.values()]
    whole = np.indices(sizes, dtype=np.int16).reshape(len(sizes), -1)
    return dict(zip(values, whole, strict=True))


def kernel_facts(problem: Problem) -> tuple[str | int, ...]:
    """The properties of a problem that decide which kernels can be compiled for it."""
    return (
        problem.in_dtype, problem.out_dtype, problem.accumulation, problem.epilogue, problem.groups > 0,
        problem.a_major, problem.b_major, problem.out_major, problem.alignment,
    )  # fmt: skip


def possible_kernels(
    family: Generator, space: SearchSpace, problem: Problem, device: Device, folder: Path | None
) -> list[Candidate]:
    """All kernels that no rule rejects for every extent, in the space's order.

    folder: caches the kernels between processes; None for no cache. A folder that cannot be written is
    ignored.
    """
    path = None if folder is None else folder / f"{_name(family, space, problem, device)}.npy"
    if path is not None and (known := _read(path, space)) is not None:
        places = dict(zip(space.compile_values, known.T, strict=True))
        table = CandidateTable(space.family, space.compile_values, {}, places)
        return table.candidates(np.arange(len(known)))
    table = CandidateTable.kernels(family.name, space.compile_values)
    rules = [rule for rule in family.rules if not rule.reads_extents]
    rows = np.flatnonzero(table.rejected(rules, problem, device) == len(rules))
    if path is not None and all(len(values) <= 256 for values in space.compile_values.values()):
        _write(path, np.column_stack([column[rows] for column in table.places.values()]).astype(np.uint8))
    return table.candidates(rows)


def extent_check(family: Generator, problem: Problem, device: Device) -> Remembered:
    """A check whether candidates can have the problem's extents."""
    return Remembered([rule for rule in family.rules if rule.reads_extents], problem, device)


def kernel_check(family: Generator, problem: Problem, device: Device) -> Remembered:
    """A check by all other rules; its verdicts hold for all problems with the same `kernel_facts`."""
    return Remembered([rule for rule in family.rules if not rule.reads_extents], problem, device)


def _name(family: Generator, space: SearchSpace, problem: Problem, device: Device) -> str:
    function = problem.fused.function
    facts = (
        family.name, space.compile_values, kernel_facts(problem), function.source if function else "",
        device.architecture, device.sm_count, device.fingerprint.sm_budget,
    )  # fmt: skip
    digest = hashlib.sha256(repr(facts).encode())
    # Hash the rules and the code that they call: all modules beside the families and in the family's folder.
    here = Path(families.__file__).parent
    for path in sorted({*here.glob("*.py"), *family.space_file.parent.glob("*.toml"), *rule_sources(family)}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def rule_sources(family: Generator) -> set[Path]:
    return {path for folder in {source.parent for source in family.sources} for path in folder.glob("*.py")}


def _read(path: Path, space: SearchSpace) -> np.ndarray | None:
    """The indices in a file; None if the file is missing or its indices do not fit the space's lists."""
    try:
        places = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    sizes = np.array([len(values) for values in space.compile_values.values()])
    if places.dtype != np.uint8 or places.ndim != 2 or places.shape[1] != len(sizes):
        return None
    return places if (places < sizes).all() else None


def _write(path: Path, places: np.ndarray) -> None:
    with suppress(TunegemmError, OSError):
        make_folder(path.parent)
        with replacing(path) as new, new.open("wb") as file:
            np.save(file, places, allow_pickle=False)
