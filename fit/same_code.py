"""Finds kernels with the same machine code in two source trees, so that measurements of one hold for the
other.

    git worktree add /tmp/before COMMIT
    python -m fit.same_code /tmp/before            # every shipped kernel: twice a second of a core
    python -m fit.same_code /tmp/before --rekey    # and updates db/records
    python -m fit.same_code /tmp/before --kernels 'relu|amax' --sample 12
    python -m fit.same_code /tmp/before --rekey --judged 'residual'   # these, too, by a measurement

Either tree compiles a kernel from a problem and a candidate, and the cubins are compared byte by byte:
compilers give the same bytes for the same source. `--rekey` gives the records of equal kernels the hash of
today's sources; other records keep theirs: they are seeds until they are measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tunegemm.describe.problem import Problem
    from tunegemm.describe.space import Candidate

_EM_CUDA = 190
_DEVICE = "model:h200"
#: The program that runs the other half of this module with the other tree's modules.
_OBJECTS = "--objects-of"


@dataclass(frozen=True)
class Job:
    """A kernel, by something that has it."""

    name: str
    key: str
    """Of the kernel in this tree."""
    problem: Mapping[str, Any]
    family: str
    compile: Mapping[str, Any]
    launch: Mapping[str, Any]


def cubin_of(content: bytes) -> bytes:
    """The machine code for the GPU in a compiled object: an ELF file. Raises ValueError without one."""
    results = []
    at = content.find(b"\x7fELF")
    while at >= 0:
        if struct.unpack_from("<H", content, at + 18)[0] == _EM_CUDA:
            results.append(content[at : at + _elf_size(content, at)])
        at = content.find(b"\x7fELF", at + 1)
    if len(results) != 1:
        raise ValueError(f"{len(results)} cubins in an object, not one")
    return results[0]


def _elf_size(content: bytes, at: int) -> int:
    """The size of a 64-bit ELF file, up to the end of its last section, section table or segment table."""
    segments, sections = struct.unpack_from("<QQ", content, at + 32)
    segment_bytes, segment_count, section_bytes, section_count = struct.unpack_from("<HHHH", content, at + 54)
    ends = [segments + segment_bytes * segment_count, sections + section_bytes * section_count]
    for index in range(section_count):
        header = at + sections + index * section_bytes
        kind = struct.unpack_from("<I", content, header + 4)[0]
        offset, size = struct.unpack_from("<QQ", content, header + 24)
        if kind != 8:  # SHT_NOBITS has no bytes in the file
            ends.append(offset + size)
    return max(ends)


def shipped() -> list[Job]:
    """Every kernel of the shipped records and lists, once."""
    from tunegemm.describe.problem import Problem
    from tunegemm.describe.stored import document_of
    from tunegemm.generate import families
    from tunegemm.model import shortlist
    from tunegemm.store.shipped import read_shipped

    pairs = [
        (record.problem, record.candidate)
        for record in read_shipped()[0]
        if families.get(record.candidate.family).compiled
    ]
    plain = [Problem.parse("64x4096x4096", dtype=dtype) for dtype in shortlist.DTYPES]
    listed = [(problem, kernel) for problem in plain for kernel in shortlist.listed()]
    listed += [
        (problem, kernel) for problem, kernels in shortlist.ordered_lists().items() for kernel in kernels
    ]
    pairs += [(problem, shortlist.launched(problem, kernel)) for problem, kernel in listed]
    jobs = {}
    for problem, candidate in pairs:
        family = families.get(candidate.family)
        key = _key(problem, candidate)
        kind = " ".join(filter(None, (problem.in_dtype, problem.out_dtype, problem.layout, problem.epilogue)))
        name = f"{candidate.family} {family.label(candidate.kernel)} {kind}"
        kernel, launch = dict(candidate.compile_params), dict(candidate.launch_params)
        jobs[key] = Job(name, key, document_of(problem), candidate.family, kernel, launch)
    return list(jobs.values())


def _key(problem: Problem, candidate: Candidate) -> str:
    from tunegemm.describe.device import find_device
    from tunegemm.generate import families

    key = families.generator(candidate.family).kernel_key(problem, candidate, find_device(_DEVICE))
    return json.dumps(dict(key), sort_keys=True)


class Compiled(NamedTuple):
    """What a source tree makes of kernels."""

    codes: list[str]
    """The hash of each cubin, or the reason why there is none."""
    sources: dict[str, str]
    """By the name of a family the hash of its kernels' sources."""


def compiled(tree: Path, jobs: Sequence[Job], workers: int) -> Compiled:
    """By a source tree's own modules."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "jobs.json"), Path(folder, "answers.json")
        asked.write_text(json.dumps([asdict(job) for job in jobs]))
        path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # it may provide packages
        subprocess.run(
            [sys.executable, "-P", __file__, _OBJECTS, str(asked), str(answered), str(workers)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), *path])}, cwd=folder, check=True,
        )  # fmt: skip
        return Compiled(**json.loads(answered.read_text()))


def _compile_here(asked: Path, answered: Path, workers: int) -> None:
    """The other half: runs with the modules of the tree on the path."""
    from tunegemm.describe.device import find_device
    from tunegemm.describe.problem import Problem
    from tunegemm.describe.space import Candidate
    from tunegemm.generate import families

    # In trees of before 2026-11-26 they were elsewhere.
    ArtifactStore = _from("ArtifactStore", "tunegemm.compile.artifacts", "tunegemm.generate.artifacts")
    CompilePool = _from("CompilePool", "tunegemm.compile.pool", "tunegemm.generate.compile")
    family: Any  # and there was one protocol of families
    try:
        from tunegemm.describe.stored import problem_of
    except ImportError:  # the fields of a problem were those that are stored, until 2026-11-28
        problem_of = Problem
    device, answers = find_device(_DEVICE), []
    jobs = [Job(**job) for job in json.loads(asked.read_text())]
    with (
        tempfile.TemporaryDirectory() as folder,
        CompilePool(ArtifactStore(Path(folder)), workers=workers) as pool,
    ):
        futures = []
        for job in jobs:
            candidate = Candidate.make(job.family, job.compile, job.launch)
            family = families.get(job.family)
            key = family.kernel_key(problem_of(*job.problem.values()), candidate, device)
            futures.append(pool.submit(job.family, key))
        for future in futures:
            result = future.result()
            if result.artifact is None:
                answers.append(f"does not compile: {result.failure}")
            else:
                answers.append(hashlib.sha256(cubin_of(Path(result.artifact.path).read_bytes())).hexdigest())
    names = sorted({job.family for job in jobs})
    sources = {name: families.kernel_source_hash(name) for name in names}
    answered.write_text(json.dumps({"codes": answers, "sources": sources}))


def _from(name: str, *modules: str) -> Any:
    """The name from the first of the modules that exists. Raises ImportError if none has it."""
    for module in modules:
        with suppress(ModuleNotFoundError):
            return getattr(importlib.import_module(module), name)
    raise ImportError(f"{name} is in none of {', '.join(modules)}")


def rekey(same: Mapping[str, bool], sources: Mapping[str, str], folder: Path) -> tuple[int, int]:
    """Give a folder's records with equal kernels the hash of today's sources. Returns how many changed, and
    how many did not.

    same: by the key of a job. sources: by family, of the compared tree: the comparison does not cover records
    of other sources.
    """
    from tunegemm.generate.families import kernel_source_hash
    from tunegemm.store.shipped import read_shipped, write_records

    changed = left = 0
    records = []
    for record in read_shipped(folder)[0]:
        today = kernel_source_hash(record.candidate.family)
        if record.kernel_source == today:
            records.append(record)
            continue
        holds = record.kernel_source == sources.get(record.candidate.family)
        holds = holds and same.get(_key(record.problem, record.candidate), False)
        changed, left = changed + holds, left + (not holds)
        records.append(replace(record, kernel_source=today) if holds else record)
    write_records(records, folder)
    return changed, left


def _lines(jobs: Sequence[Job], before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    for job, item, other in zip(jobs, before, after, strict=True):
        if item != other:
            said = [text for text in (item, other) if text.startswith("does not")]
            yield f"differs: {job.name}" + (f" ({'; '.join(said)})" if said else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fit.same_code", description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path, help="the folder of the other source tree")
    parser.add_argument("--kernels", default="", help="a regular expression for names of kernels")
    parser.add_argument("--sample", type=int, default=0, help="so many of them, drawn by chance; 0: all")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument(
        "--rekey", action="store_true", help="write the hash of today's sources into db/records"
    )
    parser.add_argument(
        "--judged", metavar="REGEX", help="names of kernels that differ, and were measured to be as fast"
    )
    value = parser.parse_args(arguments)
    if not (value.before / "tunegemm").is_dir():
        parser.error(
            f"{value.before} has no folder tunegemm; give a source tree, as `git worktree add` makes"
        )
    jobs = [job for job in shipped() if re.search(value.kernels, job.name)]
    if value.sample:
        jobs = random.Random(0).sample(jobs, min(value.sample, len(jobs)))
    here = Path(__file__).resolve().parents[1]
    before, after = (compiled(tree.resolve(), jobs, value.workers) for tree in (value.before, here))
    lines = list(_lines(jobs, before.codes, after.codes))
    print(*lines, f"{len(jobs) - len(lines)} of {len(jobs)} kernels are the same to the byte", sep="\n")
    if value.rekey:
        same = {
            job.key: item == other or bool(value.judged and re.search(value.judged, job.name))
            for job, item, other in zip(jobs, before.codes, after.codes, strict=True)
        }
        changed, left = rekey(same, before.sources, here / "db" / "records")
        print(f"{changed} records now have today's sources, {left} do not: measure those again")
    return 1 if lines else 0


if __name__ == "__main__":
    if sys.argv[1:2] == [_OBJECTS]:
        _compile_here(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
