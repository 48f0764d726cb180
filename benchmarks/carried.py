"""Compiled kernels in a folder that travels: made where there is no GPU, loaded where there is one.

A list in the folder says which file is of which kernel, so that nobody asks for a compiler, or its version,
where kernels are timed. Extents are no part of a kernel: one object serves all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import CompilePool
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError
from tunegemm.generate import families

_LIST = "kernels.json"


class CarriedError(TunegemmError):
    """A folder of objects that has not what is asked of it."""


def kind(problem: Problem, candidate: Candidate) -> str:
    """What says which object a launch needs: the problem without its extents, and the kernel.

    Launch parameters are left out, but for those few that are compiled in.
    """
    without = replace(problem, m=8, n=4096, k=4096, batch=1, alignment=problem.alignment)
    order = (
        {"cluster_order": candidate.params["cluster_order"]} if "cluster_order" in candidate.params else {}
    )
    return f"{without} {problem.out_major} {candidate.kernel.to_json()} {json.dumps(order)}"


def compile_into(
    folder: Path, wanted: Iterable[tuple[Problem, Candidate]], device: Device, workers: int | None = None
) -> Mapping[str, str]:
    """Compile what the folder lacks, in parallel, and write its list. Gives the reasons of what failed."""
    pairs = {kind(problem, candidate): (problem, candidate) for problem, candidate in wanted}
    found, failed = _read(folder), {}
    missing = {name: pair for name, pair in pairs.items() if not (folder / found.get(name, "?")).exists()}
    with CompilePool(ArtifactStore(folder), workers=workers, timeout_s=120) as pool:
        futures = {}
        for name, (problem, candidate) in missing.items():
            key = families.generator(candidate.family).kernel_key(problem, candidate, device)
            futures[name] = pool.submit(candidate.family, key)
        for number, (name, future) in enumerate(futures.items(), start=1):
            result = future.result()
            if result.artifact is None:
                failed[name] = result.failure
            else:
                found[name] = str(result.artifact.path.relative_to(folder))
            if number % 20 == 0 or number == len(futures):
                print(f"{number} of {len(futures)} compiled, {len(failed)} failed", flush=True)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / _LIST).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return failed


def _read(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / _LIST).read_text()))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CarriedError(f"{folder / _LIST}: {error}; remove the folder and compile again") from None


class Carried:
    """The kernels of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _read(folder)

    def find(self, problem: Problem, candidate: Candidate) -> Path | None:
        """The object of a kernel; None for one that the folder has not."""
        name = self._files.get(kind(problem, candidate))
        return None if name is None else self.folder / name
