"""The kernels of a family that can be compiled for problems of one kind: of the same dtypes, majors,
alignment and epilogue.

Of half a million kernels in a search space some 20,000 are left, and to look at all takes seconds. What is
left is kept in a folder, as places in the space's lists, under a name that changes with rules and space.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import numpy as np

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, SearchSpace
from tunegemm.errors import TunegemmError
from tunegemm.files import make_folder, replacing
from tunegemm.generate import families
from tunegemm.generate.family import Generator
from tunegemm.generate.feasibility import Remembered
from tunegemm.model.verdicts import CandidateTable


def kernel_facts(problem: Problem) -> tuple[str | int, ...]:
    """What of a problem decides which kernels can be compiled for it."""
    dtypes = (problem.in_dtype, problem.out_dtype, problem.accumulation, problem.epilogue)
    return (*dtypes, problem.a_major, problem.b_major, problem.out_major, problem.alignment)


def possible_kernels(
    family: Generator, space: SearchSpace, problem: Problem, device: Device, folder: Path | None
) -> list[Candidate]:
    """All that no rule rejects for every extent, in the space's order.

    folder: where they are kept between processes; None for nowhere. One that cannot be written is ignored.
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
    """Whether a candidate can have the problem's extents."""
    return Remembered([rule for rule in family.rules if rule.reads_extents], problem, device)


def kernel_check(family: Generator, problem: Problem, device: Device) -> Remembered:
    """What all other rules say of a candidate: the same for all problems of the same `kernel_facts`."""
    return Remembered([rule for rule in family.rules if not rule.reads_extents], problem, device)


def _name(family: Generator, space: SearchSpace, problem: Problem, device: Device) -> str:
    function = problem.fused.function
    facts = (
        family.name, space.compile_values, kernel_facts(problem), function.source if function else "",
        device.architecture, device.sm_count, device.fingerprint.sm_budget,
    )  # fmt: skip
    digest = hashlib.sha256(repr(facts).encode())
    # Rules, and what they compute with: all beside the families and in the family's folder, in bytes.
    here = Path(families.__file__).parent
    for path in sorted({*here.glob("*.py"), *family.space_file.parent.glob("*.toml"), *rule_sources(family)}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def rule_sources(family: Generator) -> set[Path]:
    return {path for folder in {source.parent for source in family.sources} for path in folder.glob("*.py")}


def _read(path: Path, space: SearchSpace) -> np.ndarray | None:
    """The places of a file; None where there is no such file, or its places are not in the lists."""
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
