"""Checks everything that tunegemm needs: packages, GPU, kernel families, database, cache, settings."""

from __future__ import annotations

import difflib
import os
import platform
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tunegemm
from tunegemm import extras
from tunegemm.describe.device import cuda_device_count, find_device, package_version
from tunegemm.errors import ArtifactError, DatabaseError, DeviceError, ExtraError
from tunegemm.report.text import counted

if TYPE_CHECKING:
    from tunegemm.store.packs import Pack

#: `note` is worth knowing but harmless; `fail` keeps tunegemm from working.
Status = Literal["ok", "note", "fail"]

_REQUIRED = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi")
_OPTIONAL = ("nvidia-ml-py",)
#: A host that only serves does not need these.
_TUNING = extras.EXTRAS["tune"]
#: Damaged rows to name one by one; the others are only counted.
_NAMED = 5


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    status: Status
    detail: str
    """The finding."""
    remedy: str = ""
    """The remedy; empty if none is needed."""


def examine(database: str | None = None) -> list[Check]:
    """Every check, in the order of their dependencies. Changes nothing, but unpacks TUNEGEMM_PACK."""
    return [
        Check("tunegemm", "ok", f"{tunegemm.__version__} on Python {platform.python_version()}"),
        _packages(),
        *devices(),
        *families_here(),
        _linker(),
        _database(database),
        *_shipped(),
        *_packs(),
        _cache(),
        _environment(),
    ]


def _packages() -> Check:
    versions = {name: package_version(name) for name in _REQUIRED + _TUNING + _OPTIONAL}
    result = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    kinds: list[tuple[Status, tuple[str, ...], str]] = [
        ("fail", _REQUIRED, ""), ("note", _TUNING, "'tunegemm[tune]', to tune here"), ("note", _OPTIONAL, "")
    ]  # fmt: skip
    for status, names, extra in kinds:
        if missing := [name for name in names if not versions[name]]:
            detail = f"missing: {', '.join(missing)}; found: {result}"
            return Check("packages", status, detail, f"pip install {extra or ' '.join(missing)}")
    return Check("packages", "ok", result)


def devices() -> list[Check]:
    count = cuda_device_count()
    if not count:
        import torch

        why = "torch is a CPU build" if torch.version.cuda is None else "torch finds no CUDA device"
        remedy = "tune on a machine with one; here `tunegemm tune` searches a recorded H200"
        return [Check("GPU", "note", f"none: {why}", remedy)]
    checks = []
    for index in range(count):
        name = f"GPU cuda:{index}"
        try:
            device = find_device(f"cuda:{index}")
        except DeviceError as error:
            fault, _, remedy = str(error).partition("; ")
            checks.append(Check(name, "fail", fault, remedy))
            continue
        limits = device.architecture
        facts = (
            f"{device.name}, {limits.short_name} ({', '.join((limits.name, *limits.instructions))}), "
            f"{device.sm_count} SMs, {limits.smem_bytes_per_block // 1024} KiB of shared memory a block, "
            f"{device.memory_bytes / 1e9:.0f} GB"
        )
        driver = f"driver {device.fingerprint.driver or 'unknown'}, CUDA {device.fingerprint.cuda}"
        peak = "" if device.is_known_part else "; peaks are computed from its clocks"
        if not device.peak_tflops:
            peak = "; its peaks are unknown, so there is no roofline"
        checks.append(Check(name, "ok", f"{facts}, {driver}{peak}"))
    return checks


def families_here() -> list[Check]:
    from tunegemm.generate import families

    known = {name: families.get(name) for name in families.NAMES}
    reasons = {name: family.unavailable() for name, family in known.items()}
    lacks = {name: lack_of(name) for name in known}
    # One working family is enough for tuning; without any, tuning fails.
    status: Status = "note" if None in reasons.values() else "fail"
    checks = []
    for name, reason in reasons.items():
        if reason is None and lacks[name]:
            checks.append(Check(f"family {name}", "note", f"no kernels for the GPUs here: {lacks[name]}"))
        elif reason is None:
            checks.append(Check(f"family {name}", "ok", "available"))
        elif known[name].unavailable(launching=True) is None:
            detail = f"launches kernels from packs but cannot compile: {reason}"
            checks.append(Check(f"family {name}", status, detail, "see the packages above"))
        else:
            checks.append(Check(f"family {name}", status, reason, "see the packages above"))
    broken = [line.rpartition("; ") for line in families.unusable()]
    return [*checks, *(Check("families", "note", detail, remedy) for detail, _, remedy in broken)]


def lack_of(family: str) -> str:
    """Why a family has no kernel for any GPU here; empty if it has, or without a GPU."""
    from tunegemm.generate import families

    lacks = []
    for index in range(cuda_device_count()):
        with suppress(DeviceError):  # already reported
            lacks.append(families.refusal_here(family, find_device(f"cuda:{index}")))
    return lacks[0] if lacks and all(lacks) else ""


def _shipped() -> list[Check]:
    """How many of the shipped records and their kernels serve each kind of GPU here; without a GPU, the
    recorded one.
    """
    from tunegemm.store import packs
    from tunegemm.store.shipped import read_shipped
    from tunegemm.store.validity import judge_stored
    from tunegemm.tuning.tuner import open_device

    records, warnings = read_shipped()
    shipped = packs.shipped()
    kernels = 0 if shipped is None else sum(1 for _ in shipped.each_key())
    checks, seen = [], set()
    for index in range(max(1, cuda_device_count())):
        try:
            device = find_device(f"cuda:{index}") if cuda_device_count() else open_device()
        except DeviceError:  # already reported
            continue
        if device.name in seen:
            continue
        seen.add(device.name)
        usable = sum(judge_stored(record, device.fingerprint).usable for record in records)
        detail = f"{usable:,} of {counted(len(records), 'record')} serve an {device.name}"
        status: Status = "note"
        remedy = "`tunegemm tune` finds kernels for it"
        if usable and kernels:
            status, remedy = "ok", ""
            detail += f"; {counted(kernels, 'compiled kernel')}"
        elif usable:
            detail += "; their compiled kernels are missing, so each compiles at first use"
            remedy = "install a wheel that `make wheel` built, or run `make kernels`"
        checks.append(Check("shipped records", status, detail, remedy))
    return [*checks, *(Check("shipped records", "note", line, "reinstall tunegemm") for line in warnings)]


def _linker() -> Check:
    from tunegemm.compile.cute_object import find_linker

    if (linker := find_linker()) is None:
        detail = "none: a process's first launch of a CuTe kernel compiled here will import the CuTe DSL"
        return Check("linker", "note", detail, "install binutils, then tune again or pack elsewhere")
    return Check("linker", "ok", linker)


def described(pack: Pack) -> tuple[str, list[str]]:
    """The contents of a pack, and a line for each part that does not work here."""
    from tunegemm.store import packing

    records = pack.records
    gpus = ", ".join(sorted({record.fingerprint.device_name for record in records})) or "no GPU"
    troubles = [f"{name}: {why}" for name, why in packing.cannot_launch(records).items()]
    if refused := packing.refused_here(records):
        troubles.append(f"{len(refused)} unusable on this GPU: {refused[0].reason}")
    return f"{counted(len(records), 'record')} of {gpus}, {counted(pack.objects(), 'kernel')}", troubles


def _packs() -> list[Check]:
    from tunegemm.compile.artifacts import ArtifactStore
    from tunegemm.store import packs

    warnings: list[str] = []
    checks, remedy = [], "load another pack, or unload it"
    for pack in packs.loaded(warnings):
        contents, troubles = described(pack)
        detail = f"{pack.folder}: {contents}, made by tunegemm {pack.version}"
        try:
            ArtifactStore(pack.folder).check()
        except ArtifactError as error:
            troubles.append(str(error))
        if troubles:
            checks.append(Check("pack", "note", "; ".join([detail, *troubles]), remedy))
        else:
            checks.append(Check("pack", "ok", detail))
    named = os.environ.get("TUNEGEMM_PACK") or "/"  # a pack that the user names must work
    for line in warnings:
        if line.startswith(f"{named}:"):
            checks.append(Check("pack", "fail", line, "correct or unset TUNEGEMM_PACK"))
        else:
            checks.append(Check("pack", "note", line, remedy))
    return checks


def _database(location: str | None) -> Check:
    try:
        with extras.named():
            from tunegemm.store import Database
            from tunegemm.store.connection import check_writable, display, resolve
            from tunegemm.store.damage import damaged_rows
            from tunegemm.store.layers import absent
    except ExtraError as error:
        return Check("database", "note", f"not checked: {error}", "ignore this unless you tune here")
    try:
        if location is None and (missing := [line for line in absent() if line.startswith("TUNEGEMM_DB")]):
            detail, _, remedy = missing[0].partition("; correct")
            return Check("database", "fail", detail, f"correct{remedy}")
        place = resolve(location)
        if isinstance(place, Path) and not os.path.lexists(place):
            if refusal := _refusal_to_write(place.parent):
                raise DatabaseError(f"{place}: {refusal}")
            detail, remedy = f"{place} does not exist yet", "`tunegemm tune` on a GPU creates it"
            return Check("database", "note", detail, remedy)
        with Database.open(location, read_only=True) as database:
            records, damaged = len(database.records()), damaged_rows(database)
        if isinstance(place, Path):
            check_writable(place)
    except DatabaseError as error:
        return Check("database", "fail", str(error), "choose another with --db or TUNEGEMM_DB")
    detail = f"{display(place)}: {counted(records, 'tuned problem')}"
    if damaged:
        named = "; ".join(damaged[:_NAMED] + [f"and {len(damaged) - _NAMED} more"] * (len(damaged) > _NAMED))
        remedy = "they are skipped; tune their shapes again, or restore the file from a copy"
        return Check("database", "note", f"{detail}, {counted(len(damaged), 'damaged row')}: {named}", remedy)
    return Check("database", "ok", detail)


def _cache() -> Check:
    from tunegemm.compile.artifacts import ArtifactStore

    store = ArtifactStore()
    folder = store.root
    if refusal := _refusal_to_write(folder):
        remedy = "make it writable, or set TUNEGEMM_CACHE_DIR to another folder"
        return Check("kernel cache", "fail", f"{folder}: {refusal}", remedy)
    try:
        store.check()
        stored = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    except ArtifactError as error:
        remedy = "or set TUNEGEMM_CACHE_DIR to another folder; its kernels are rejected now"
        return Check("kernel cache", "fail", str(error), remedy)
    except OSError as error:
        return Check("kernel cache", "fail", f"{error.filename}: {error.strerror}", "delete the folder")
    detail = f"{folder}: {counted(len(stored), 'file')}, {sum(stored) / 1e6:.1f} MB"
    return Check("kernel cache", "ok", detail)


def _refusal_to_write(folder: Path) -> str:
    """Why files cannot be created in a folder or its nearest parent; empty if they can."""
    place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"tunegemm")
            file.flush()  # a full disk accepts files, but no content
    except OSError as error:
        return f"{place} is not writable: {error.strerror}"
    return ""


#: Variables that users set; `record` and `run` hand the last two to child processes.
VARIABLES = (
    "TUNEGEMM_CACHE_DIR", "TUNEGEMM_CHECK_GROUPS", "TUNEGEMM_COMPILE", "TUNEGEMM_DB", "TUNEGEMM_ENABLE",
    "TUNEGEMM_MODE", "TUNEGEMM_ONLINE_BUDGET", "TUNEGEMM_PACK", "TUNEGEMM_POLICY", "TUNEGEMM_SGLANG",
    "TUNEGEMM_TEST_SAMPLE", "TUNEGEMM_VLLM", "TUNEGEMM_VLLM_GATES",
    "TUNEGEMM_ENABLE_PARTS", "TUNEGEMM_RECORD_PARTS",
)  # fmt: skip


def _environment() -> Check:
    from tunegemm.choose import policies
    from tunegemm.search.efforts import online_budget

    warnings: list[str] = []
    mode, policy = policies.read_mode(warnings.append), policies.read_policy(warnings.append)
    for name in policies.SWITCHES:
        policies.read_switch(name, warnings.append)
    policies.read_sample(warnings.append)
    if problem := online_budget()[1]:
        warnings.append(problem)
    for name in sorted(os.environ):
        if name.startswith("TUNEGEMM_") and name not in VARIABLES:
            words = [known.removeprefix("TUNEGEMM_") for known in VARIABLES]
            near = difflib.get_close_matches(name.removeprefix("TUNEGEMM_"), words, 1)
            known = f"known variables are {', '.join(VARIABLES[:-2])}"
            warnings.append(f"{name} is not known; {f'did you mean TUNEGEMM_{near[0]}?' if near else known}")
    if warnings:
        return Check("dispatch", "note", "; ".join(warnings), "correct or unset what it names")
    return Check("dispatch", "ok", f"mode {mode}, policy {policy}")
