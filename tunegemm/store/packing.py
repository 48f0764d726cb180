"""Makes packs: chooses the valid records, then copies or compiles the kernel of each."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tunegemm.compile.artifacts import Artifact, ArtifactStore, Key
from tunegemm.compile.cute_object import dsl_version
from tunegemm.describe.device import cuda_device_count, find_device, package_version
from tunegemm.errors import PackError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import is_torch
from tunegemm.store import packs
from tunegemm.store.checks import device_of, record_objection
from tunegemm.store.layers import NARROWNESS
from tunegemm.store.provided import Provided, provide_grouped, provide_keys  # noqa: F401 - for programs
from tunegemm.store.record import Record
from tunegemm.store.shipped import write_records
from tunegemm.store.validity import Judgement, judge_stored


@dataclass(frozen=True)
class Packed:
    """A written pack."""

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
    """Write the records that match this machine's compilers and kernel sources, with their objects.

    Records from other compilers or sources are left out, because the packed kernel would not be the measured
    kernel. Raises PackError if none remains, or if an object is missing and may not be compiled.
    """
    left_out: Counter[str] = Counter()
    usable = []
    dsl, triton = package_version("nvidia-cutlass-dsl"), package_version("triton")
    for record in distinct(records):
        here = dataclasses.replace(record.fingerprint, cutlass_dsl=dsl, triton=triton)
        # As if it had no kernel yet, wherever it is from.
        judgement = judge_stored(dataclasses.replace(record, layer=""), here)
        if reason := (unfit(record) if judgement.usable else judgement.reason):
            left_out[reason] += 1
        else:
            usable.append(record)
    result = provide(usable, compile_missing=compile_missing, workers=workers)
    left_out.update(
        f"{record.label}: {result.failures[record]}" for record in usable if record in result.failures
    )
    chosen = [record for record in usable if record not in result.failures]
    if not chosen:
        why = "; ".join(left_out) or "the database has none"
        raise PackError(f"no record to pack: {why}; see `tunegemm db layers` and `tunegemm leaderboard`")
    with tempfile.TemporaryDirectory() as folder:
        for key, artifact in result.artifacts.items():
            copy(ArtifactStore(folder), dict(key), artifact)
        write_records(chosen, Path(folder, "records"))
        fingerprints = sorted(
            {record.fingerprint for record in chosen}, key=lambda fingerprint: fingerprint.digest
        )
        digest = packs.write(
            Path(folder),
            out,
            toolchain=toolchain(),
            fingerprints=[fingerprint.asdict() for fingerprint in fingerprints],
        )
    gpus = tuple(sorted({record.fingerprint.device_name for record in chosen}))
    return Packed(out, digest, len(chosen), gpus, len(result.artifacts), result.compiled, left_out)


def toolchain() -> dict[str, str]:
    """The compilers here, by their names in kernel keys."""
    return {"cutlass_dsl": dsl_version(), "triton": package_version("triton")}


def provide(
    records: Iterable[Record], *, compile_missing: bool = True, workers: int | None = None
) -> Provided:
    """The objects of records, from the user's store; missing objects are compiled first.

    Raises PackError if an object is missing and may not be compiled.
    """
    keys = {record: (record.candidate.family, key) for record in records if (key := _key(record))}
    return provide_keys(keys, compile_missing=compile_missing, workers=workers)


def cannot_launch(records: Iterable[Record]) -> dict[str, str]:
    """By family of the records, why its kernels cannot be launched by this installation."""
    names = {record.candidate.family for record in records if not is_torch(record.candidate)}
    reasons = {name: families.get(name).unavailable(launching=True) for name in sorted(names)}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def refused_here(records: Iterable[Record]) -> list[Judgement]:
    """Why records cannot be used on this GPU; empty without a GPU."""
    if not cuda_device_count():
        return []
    here = find_device("cuda:0").fingerprint
    return [verdict for record in records if not (verdict := judge_stored(record, here)).usable]


def unfit(record: Record) -> str:
    """Why a record's candidate cannot become a kernel; empty if it can."""
    if is_torch(record.candidate):
        return ""
    if (device := device_of(record.fingerprint)) is None:
        there = record.fingerprint
        return f"{there.device_name}: capability {there.capability!r} is not known here"
    if wrong := record_objection(record):
        return wrong
    # A kernel that runs but was excluded for its speed is not refused.
    verdict = families.get(record.candidate.family).check(record.problem, record.candidate, device)
    return "" if verdict else str(verdict)


def distinct(records: Iterable[Record]) -> list[Record]:
    """Per problem and fingerprint the record of the narrowest layer."""
    ordered = sorted(records, key=lambda record: NARROWNESS.get(record.layer, len(NARROWNESS) + 1))
    return list({(record.problem, record.fingerprint): record for record in ordered}.values())


def _key(record: Record) -> Key:
    """The kernel key of a record's object; empty if there is nothing to compile."""
    family = families.get(record.candidate.family)
    if not family.compiled:
        return {}
    device = device_of(record.fingerprint)
    assert device is not None  # `unfit` refuses other records
    return family.kernel_key(record.problem, record.candidate, device)


def copy(staged: ArtifactStore, key: Key, artifact: Artifact) -> None:
    """Into a pack: the same bytes for the same kernel, so without the time that its compilation took."""
    scratch = staged.scratch()
    scratch.write_bytes(artifact.path.read_bytes())
    staged.add(key, scratch, dataclasses.replace(artifact.resources, compile_seconds=0.0))
