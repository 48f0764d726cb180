"""The kernels of a family that can be compiled for problems of one kind: of the same dtypes, majors,
alignment and epilogue.

Of a million kernels in a search space some 20,000 are left, and to look at all takes seconds. What is left is
kept in a folder, as places in the space's lists, under a name that changes with the rules and the space.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, SearchSpace
from tunegemm.errors import TunegemmError
from tunegemm.files import make_folder, replacing
from tunegemm.generate.families import Family
from tunegemm.generate.feasibility import Remembered, Rule, plausible_kernels


def kernel_facts(problem: Problem) -> tuple[str | int, ...]:
    """What of a problem decides which kernels can be compiled for it."""
    dtypes = (problem.in_dtype, problem.out_dtype, problem.accumulation, problem.epilogue)
    return (*dtypes, problem.a_major, problem.b_major, problem.out_major, problem.alignment)


def possible_kernels(
    family: Family, space: SearchSpace, problem: Problem, device: Device, folder: Path | None
) -> list[Candidate]:
    """All that no rule rejects for every extent, in the space's order.

    folder: where they are kept between processes; None for nowhere. One that cannot be written is ignored.
    """
    path = None if folder is None else folder / f"{_name(family, space, problem, device)}.npy"
    if path is not None and (known := _read(path, space)) is not None:
        return known
    rules = _kernel_rules(family)
    found = [
        kernel
        for kernel in plausible_kernels(space, rules, problem, device)
        if all(rule(problem, kernel, device) is None for rule in rules)
    ]
    if path is not None:
        _write(path, space, found)
    return found


def extent_check(family: Family, problem: Problem, device: Device) -> Remembered:
    """Whether a candidate can have the problem's extents."""
    return Remembered([r for r in family.rules if r.__name__ in family.extent_rules], problem, device)


def kernel_check(family: Family, problem: Problem, device: Device) -> Remembered:
    """What all other rules say of a candidate: the same for all problems of a kind."""
    return Remembered(_kernel_rules(family), problem, device)


def _kernel_rules(family: Family) -> list[Rule]:
    return [rule for rule in family.rules if rule.__name__ not in family.extent_rules]


def _name(family: Family, space: SearchSpace, problem: Problem, device: Device) -> str:
    function = problem.fused.function
    facts = (
        family.name, space.compile_values, kernel_facts(problem), function.source if function else "",
        device.architecture, device.sm_count, device.fingerprint.sm_budget,
    )  # fmt: skip
    digest = hashlib.sha256(repr(facts).encode())
    # Rules, and what they compute with: all of this folder and of the family's, in bytes.
    here = Path(__file__).parent
    for path in sorted({*here.glob("*.py"), *family.space_file.parent.glob("*.toml"), *_sources(family)}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _sources(family: Family) -> set[Path]:
    return {path for folder in {source.parent for source in family.sources} for path in folder.glob("*.py")}


def _read(path: Path, space: SearchSpace) -> list[Candidate] | None:
    """The kernels of a file; None where there is no such file, or its places are not in the lists."""
    lists = [list(values) for values in space.compile_values.values()]
    try:
        places = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    sizes = np.array([len(values) for values in lists])
    if places.dtype != np.uint8 or places.ndim != 2 or places.shape[1] != len(lists):
        return None
    if not (places < sizes).all():
        return None
    names = list(space.compile_values)
    in_order = sorted(range(len(names)), key=names.__getitem__)
    pairs = [[(names[i], value) for value in lists[i]] for i in in_order]
    columns = [places[:, i].tolist() for i in in_order]
    chosen = [map(pair.__getitem__, column) for pair, column in zip(pairs, columns, strict=True)]
    return list(map(Candidate, itertools.repeat(space.family), zip(*chosen, strict=True)))


def _write(path: Path, space: SearchSpace, kernels: Sequence[Candidate]) -> None:
    if any(len(values) > 256 for values in space.compile_values.values()):
        return
    place = {name: {v: i for i, v in enumerate(values)} for name, values in space.compile_values.items()}
    rows = [[place[name][kernel.params[name]] for name in place] for kernel in kernels]
    array = np.array(rows, dtype=np.uint8).reshape(len(rows), len(place))
    with suppress(TunegemmError, OSError):
        make_folder(path.parent)
        with replacing(path) as new, new.open("wb") as file:
            np.save(file, array, allow_pickle=False)
