"""Compiles the kernels that ship, into db/kernels: those of the shipped records, and those that lists in db/
name for products without a record. No GPU is needed.

    python -m fit.shipping db/kernels
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tunegemm.compile.artifacts import ArtifactStore, Key
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import PackError, TunegemmError
from tunegemm.generate import families
from tunegemm.generate.families import kernel_source_hash
from tunegemm.model import shortlist
from tunegemm.store import packs
from tunegemm.store.packing import copy, provide, toolchain, unfit
from tunegemm.store.provided import provide_blocks, provide_grouped, provide_joined, provide_keys
from tunegemm.store.shipped import read_shipped


def ship(folder: Path) -> tuple[int, Mapping[str, str]]:
    """Compile the kernels of all shipped records and of the lists into `folder`, replaced as a whole.

    Returns the number of kernels, and by problem or kernel why one is missing. Kernels in the user's object
    store are not compiled again. Raises PackError if a record's sources or compilers differ from those here:
    its kernel would not be the measured one.
    """
    records = [record for record in read_shipped()[0] if families.get(record.candidate.family).compiled]
    failures = {str(record.problem): reason for record in records if (reason := unfit(record))}
    usable = [record for record in records if str(record.problem) not in failures]
    outdated = [
        record for record in usable if record.kernel_source != kernel_source_hash(record.candidate.family)
    ]
    if outdated:
        raise PackError(
            f"{len(outdated)} shipped records belong to other kernel sources, such as {outdated[0].problem}; "
            "tune them again, or re-key them if their kernels are the same"
        )
    every = (
        provide(usable), provide_keys(_shortlisted()), provide_grouped(), provide_joined(), provide_blocks()
    )  # fmt: skip
    failures |= {str(getattr(of, "problem", of)): why for item in every for of, why in item.failures.items()}
    artifacts = {key: artifact for item in every for key, artifact in item.artifacts.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
        fresh = Path(scratch, "kernels")
        for key, artifact in artifacts.items():
            copy(ArtifactStore(fresh), dict(key), artifact)
        packs.own(fresh)
        packs.write_manifest(fresh, toolchain=toolchain())
        if folder.exists():
            folder.rename(Path(scratch, "old"))
        fresh.rename(folder)
    return len(artifacts), failures


def _shortlisted() -> dict[str, tuple[str, Key]]:
    """By its name each kernel of the lists. Of Hopper GPUs any will do: they run the same objects."""
    device, result = find_device("model:h200"), {}
    plain = (Problem.parse("64x4096x4096", dtype=dtype) for dtype in shortlist.DTYPES)
    kinds = (
        (problem, kernel) for problem, kernels in shortlist.ordered_lists().items() for kernel in kernels
    )
    pairs = itertools.chain(itertools.product(plain, shortlist.listed()), kinds)
    launches = ((problem, shortlist.launched(problem, kernel)) for problem, kernel in pairs)
    large = ((problem, launch) for problem, kernels in shortlist.large_lists().items() for launch in kernels)
    for problem, launch in itertools.chain(launches, large):
        family = families.generator(launch.family)
        key = family.kernel_key(problem, launch, device)
        result[f"{family.label(launch)} {problem}"] = launch.family, key
    return result


def main() -> int:
    """What `make kernels` runs: ``python -m fit.shipping FOLDER``."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python -m fit.shipping FOLDER", file=sys.stderr)
        return 2
    try:
        count, failures = ship(Path(sys.argv[1]))
    except TunegemmError as error:
        print(f"tunegemm: {error}", file=sys.stderr)
        return 1
    for problem, reason in failures.items():
        print(f"left out: {problem}: {reason}", file=sys.stderr)
    print(f"{sys.argv[1]}: {count} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
