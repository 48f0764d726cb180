"""Makes packs: chooses the records that are worth it, and takes or compiles the kernel of each."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunegemm.compile.artifacts import Artifact, ArtifactStore, Key
from tunegemm.compile.cute_object import dsl_version
from tunegemm.compile.pool import CompilePool
from tunegemm.describe.device import (
    Device,
    Fingerprint,
    cuda_device_count,
    find_device,
    package_version,
)
from tunegemm.describe.problem import Problem
from tunegemm.errors import PackError, TunegemmError
from tunegemm.generate import along_k, blocks, families, grouped, joined, routing
from tunegemm.generate.cublaslt import is_torch
from tunegemm.generate.families import kernel_source_hash
from tunegemm.model import shortlist
from tunegemm.model.blocks import listed as listed_of_blocks
from tunegemm.model.grouped import configs, listed_along_k, maker_of
from tunegemm.model.grouped import listed as listed_of_groups
from tunegemm.model.joined import listed as listed_of_weights
from tunegemm.store import packs
from tunegemm.store.checks import device_of, record_objection
from tunegemm.store.layers import NARROWNESS
from tunegemm.store.record import Record
from tunegemm.store.shipped import read_shipped, write_records
from tunegemm.store.validity import Judgement, judge, judge_stored

#: Compilers of objects: fields of the fingerprint, and their packages.
_COMPILERS = {"cutlass_dsl": "nvidia-cutlass-dsl", "triton": "triton"}


@dataclass(frozen=True)
class Packed:
    """A pack that was written."""

    path: Path
    sha256: str
    records: int
    gpus: tuple[str, ...]
    objects: int
    compiled: int
    """Those of `objects` that were compiled for it: the store did not have them."""
    left_out: Mapping[str, int]
    """Why records are not in it, and how many."""


def pack(
    records: Iterable[Record], out: Path, *, compile_missing: bool = True, workers: int | None = None
) -> Packed:
    """Write the records that this machine's compilers and sources stand for, with their objects.

    A record that was measured with others is left out: the kernel that would be packed is not the one that
    was measured. Raises PackError when none is left, or an object is missing and may not be compiled.
    """
    left_out: Counter[str] = Counter()
    versions = {name: package_version(package) for name, package in _COMPILERS.items()}
    usable = []
    for record in _distinct(records):
        family = record.candidate.family
        judgement = judge(
            record.fingerprint,
            dataclasses.replace(
                record.fingerprint, cutlass_dsl=versions["cutlass_dsl"], triton=versions["triton"]
            ),
            family=family,
            source_there=record.kernel_source,
            source_here=kernel_source_hash(family),
        )
        if reason := (unfit(record) if judgement.usable else judgement.reason):
            left_out[reason] += 1
        else:
            usable.append(record)
    keys = {record: _key(record) for record in usable}
    found = provide(usable, compile_missing=compile_missing, workers=workers)
    left_out.update(
        f"{record.label}: {found.failures[record]}" for record in usable if record in found.failures
    )
    chosen = [record for record in usable if record not in found.failures]
    if not chosen:
        why = "; ".join(left_out) or "none was given"
        raise PackError(f"no record to pack ({why}); see `tunegemm db layers` and `tunegemm leaderboard`")
    with tempfile.TemporaryDirectory() as folder:
        objects = {_name(keys[record]): keys[record] for record in chosen if keys[record]}
        for name, key in objects.items():
            _copy(ArtifactStore(folder), key, found.artifacts[name])
        write_records(chosen, Path(folder, "records"))
        fingerprints = sorted({record.fingerprint for record in chosen}, key=lambda one: one.digest)
        digest = packs.write(
            Path(folder),
            out,
            toolchain=_toolchain(),
            fingerprints=[one.asdict() for one in fingerprints],
        )
    gpus = tuple(sorted({record.fingerprint.device_name for record in chosen}))
    return Packed(out, digest, len(chosen), gpus, len(objects), found.compiled, left_out)


def ship(folder: Path) -> tuple[int, Mapping[str, str]]:
    """Compile the kernels of all shipped records and of the lists into `folder`, replaced as a whole.

    Returns how many kernels it holds, and by problem or kernel why one is not among them.
    Kernels that the user's object store holds are not compiled again. Raises PackError where a record's
    sources or compilers are not those that are here: its kernel would not be the one that was measured.
    """
    records = [record for record in read_shipped()[0] if families.get(record.candidate.family).compiled]
    failures = {str(record.problem): reason for record in records if (reason := unfit(record))}
    usable = [record for record in records if str(record.problem) not in failures]
    outdated = [one for one in usable if one.kernel_source != kernel_source_hash(one.candidate.family)]
    if outdated:
        raise PackError(
            f"{len(outdated)} shipped records belong to other kernel sources, first {outdated[0].problem}; "
            "tune them again, or re-key them if their kernels are the same"
        )
    found = provide(usable)
    failures |= {str(record.problem): reason for record, reason in found.failures.items()}
    artifacts = dict(found.artifacts)
    shortlisted = _shortlisted()
    of_list = _provide(shortlisted)
    of_groups, of_weights, of_blocks = provide_grouped(), provide_joined(), provide_blocks()
    for listed in (of_list, of_groups, of_weights, of_blocks):
        failures |= listed.failures
        artifacts |= listed.artifacts
    keys = [key for record in usable if (key := _key(record))]
    listed_keys = (*shortlisted.values(), *_grouped().values(), *_joined().values(), *_blocks().values())
    keys += [key for _, key in listed_keys]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
        fresh = Path(scratch, "kernels")
        for key in {_name(key): key for key in keys}.values():
            if (artifact := artifacts.get(_name(key))) is not None:
                _copy(ArtifactStore(fresh), key, artifact)
        for path in fresh.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        packs.write_manifest(fresh, toolchain=_toolchain())
        if folder.exists():
            folder.rename(Path(scratch, "old"))
        fresh.rename(folder)
    return len(artifacts), failures


def _shortlisted() -> dict[str, tuple[str, Key]]:
    """By its name each kernel of the lists. Of Hopper GPUs any will do: they run the same objects."""
    device, found = find_device("model:h200"), {}
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
        found[f"{family.label(launch)} {problem}"] = launch.family, key
    return found


def _grouped(kind: str = "", every: bool = False) -> dict[str, tuple[str, Key]]:
    """By its name each kernel of grouped products, and around them, that ships; or of a kind, or `every` one
    of the table.
    """
    found = {
        f"grouped {config.label}": (maker_of(config).NAME, maker_of(config).kernel_key(config))
        for config in (configs(kind).values() if every else listed_of_groups(kind=kind))
    }
    if kind in ("", along_k.NAME):
        for config in listed_along_k(every=bool(kind)):
            found[f"along k {config.label}"] = along_k.NAME, along_k.kernel_key(config)
    for name, key in routing.kernels().items():
        if kind == routing.NAME or (not kind and name.split()[0] in routing.SERVED):
            found[name] = routing.NAME, key
    return found


def _joined() -> dict[str, tuple[str, Key]]:
    """By its name each kernel of several weights."""
    return {
        " ".join(filter(None, (joined.NAME, config.in_dtype, config.label, config.epilogue))): (
            joined.NAME, joined.kernel_key(config),
        )
        for config in listed_of_weights()
    }  # fmt: skip


def _blocks() -> dict[str, tuple[str, Key]]:
    """By its name each kernel of block-scaled products."""
    return {
        f"{blocks.NAME} {config.label} {config.out_dtype}": (blocks.NAME, blocks.kernel_key(config))
        for config in listed_of_blocks()
    }


def _toolchain() -> dict[str, str]:
    """The compilers that are here, as kernel keys name them."""
    return {name: package_version(package) for name, package in _COMPILERS.items()} | {
        "cutlass_dsl": dsl_version()
    }


@dataclass(frozen=True)
class Provided:
    """The objects of some records, or of other things that have kernels."""

    artifacts: Mapping[tuple[tuple[str, object], ...], Artifact]
    """By the items of their kernel keys."""
    failures: Mapping[Any, str]
    """Why a kernel could not be compiled, by what it is of."""
    compiled: int

    def of(self, key: Key) -> Artifact | None:
        """The object of a kernel key; None where it could not be compiled."""
        return self.artifacts.get(_name(key))


def provide_grouped(kind: str = "", *, every: bool = False) -> Provided:
    """The objects of grouped products' kernels that ship, or of a kind; ``routing``: of those around them;
    ``along_k``: of those for groups along k, served or not. every: those of a kind that no choice names, too.
    As `provide`.
    """
    return _provide(_grouped(kind, every), families_module=grouped.__name__)


def provide_joined() -> Provided:
    """The objects of the kernels of several weights (db/joined.toml). As `provide`."""
    return _provide(_joined(), families_module=joined.__name__)


def provide_blocks() -> Provided:
    """The objects of the kernels of block-scaled products (db/blocks.toml). As `provide`."""
    return _provide(_blocks(), families_module=blocks.__name__)


def provide(
    records: Iterable[Record], *, compile_missing: bool = True, workers: int | None = None
) -> Provided:
    """The objects of records, from the user's store, where those that are missing are compiled first.

    Raises PackError when one is missing and may not be compiled.
    """
    keys = {record: (record.candidate.family, key) for record in records if (key := _key(record))}
    return _provide(keys, lambda record: str(record.problem), compile_missing, workers)


def _provide(
    keys: Mapping[Any, tuple[str, Key]],
    named: Callable[[Any], str] = str,
    compile_missing: bool = True,
    workers: int | None = None,
    families_module: str = families.__name__,
) -> Provided:
    store = ArtifactStore()
    missing = {of: pair for of, pair in keys.items() if store.find(pair[1]) is None}
    failures: dict[Any, str] = {}
    compiled = 0
    if missing and not compile_missing:
        raise PackError(
            f"{len(missing)} of {len(keys)} kernels are missing in {store.root}, first that of "
            f"{named(next(iter(missing)))}; leave out --no-compile, or tune again"
        )
    if missing:
        with CompilePool(store, workers=workers, families_module=families_module) as pool:
            futures = {of: pool.submit(*pair) for of, pair in missing.items()}
            results = {of: future.result() for of, future in futures.items()}
            failures = {of: result.failure for of, result in results.items() if not result.artifact}
            compiled = pool.compiled
    found = {_name(key): store.find(key) for of, (_, key) in keys.items() if of not in failures}
    return Provided({name: one for name, one in found.items() if one is not None}, failures, compiled)


def cannot_launch(records: Iterable[Record]) -> dict[str, str]:
    """By family of the records, why its kernels cannot be launched by this installation."""
    names = {record.candidate.family for record in records if not is_torch(record.candidate)}
    reasons = {name: families.get(name).unavailable(launching=True) for name in sorted(names)}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def refused_here(records: Iterable[Record]) -> list[Judgement]:
    """Why records are of no use on this GPU; nothing without one."""
    if not cuda_device_count():
        return []
    here = find_device("cuda:0").fingerprint
    return [verdict for record in records if not (verdict := judge_stored(record, here)).usable]


def unfit(record: Record) -> str:
    """Why no kernel can be made of a record's candidate; empty where one can."""
    if is_torch(record.candidate):
        return ""
    try:
        _device(record.fingerprint)
    except PackError as error:
        return str(error)
    if wrong := record_objection(record):
        return wrong
    # Not what runs and is left out for its speed, either.
    verdict = families.get(record.candidate.family).check(
        record.problem, record.candidate, _device(record.fingerprint)
    )
    return "" if verdict else str(verdict)


def _distinct(records: Iterable[Record]) -> list[Record]:
    """Per problem and fingerprint the record of the narrowest layer."""
    ordered = sorted(records, key=lambda one: NARROWNESS.get(one.layer, len(NARROWNESS) + 1))
    return list({(record.problem, record.fingerprint): record for record in ordered}.values())


def _key(record: Record) -> Key:
    """The kernel key of a record's object; empty where there is nothing to compile."""
    family = families.get(record.candidate.family)
    if not family.compiled:
        return {}
    return family.kernel_key(record.problem, record.candidate, _device(record.fingerprint))


def _device(fingerprint: Fingerprint) -> Device:
    """The device that was measured. Raises PackError for one of an architecture that is not known."""
    if (device := device_of(fingerprint)) is None:
        raise PackError(f"{fingerprint.device_name}: capability {fingerprint.capability!r} is not known here")
    return device


def _name(key: Key) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(key.items()))


def _copy(staged: ArtifactStore, key: Key, artifact: Artifact) -> None:
    """Into a pack: the same bytes for the same kernel, so without the time that its compilation took."""
    scratch = staged.scratch()
    scratch.write_bytes(artifact.path.read_bytes())
    staged.add(key, scratch, dataclasses.replace(artifact.resources, compile_seconds=0.0))


def main() -> int:
    """What `make kernels` runs: ``python -m tunegemm.store.packing FOLDER``."""
    if len(sys.argv) != 2:
        print("usage: python -m tunegemm.store.packing FOLDER", file=sys.stderr)
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
