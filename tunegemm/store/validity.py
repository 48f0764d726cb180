"""What a stored record is worth here: to be launched, launched and measured again, or only to seed a search.

`judge_stored` compares fingerprints and hashes of kernel sources; dispatch, tuning and `tunegemm verify` all
ask it, so that none of them has rules of its own. No SQLAlchemy is loaded here.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import IntEnum

from tunegemm.describe.device import Fingerprint
from tunegemm.generate.families import kernel_source_hash
from tunegemm.store.record import Record


class Grade(IntEnum):
    """The permitted uses of a record; higher is better."""

    FOREIGN = 0
    """Measured on another architecture: of no use here."""
    SEED = 1
    """Its candidates are where a search begins; its times are not believed."""
    VERIFY = 2
    """Launched; its stored top five want to be raced again (`tunegemm verify`)."""
    SAME = 3
    """Launched: nothing that could move its times has changed."""


@dataclass(frozen=True, order=True)
class Judgement:
    """A grade and its reason."""

    grade: Grade
    reason: str = ""
    """One clause, such as ``driver 580.82.07 (here 580.159.04)``; empty for SAME."""

    @property
    def usable(self) -> bool:
        """Whether dispatch may launch the record."""
        return self.grade >= Grade.VERIFY


#: Packages that determine a family's kernels, by the start of its name. torch provides all baselines.
_COMPILERS = {"cute_": ("cutlass_dsl",), "triton": ("triton",), "gluon_": ("triton",), "cublaslt": ()}
_EVERY_COMPILER = ("cutlass_dsl", "triton")


def judge_stored(stored: Record, here: Fingerprint) -> Judgement:
    """The grade of a record or row on a device of fingerprint `here`, with this program's kernel sources.

    A driver's first number is its branch, and within one it changes by patches; of packages and of CUDA
    the first two numbers are the minor version. The software that counts is the family's own.

    A record that ships or is a pack's brings its compiled kernel, which is compiled here where it cannot run.
    It serves under any known software: only its times, and how far it is ahead of torch, want to be measured
    again. A pack's kernels of Triton are launched without Triton, so that it does not matter which one is
    here, if any; the CuTe DSL loads its own, and has to be here.
    """
    there, family = stored.fingerprint, stored.candidate.family
    source = kernel_source_hash(family)
    if stored.layer == "pack":
        there = dataclasses.replace(there, triton=here.triton)
    differs = {name for name, old in vars(there).items() if old != getattr(here, name)}
    device: list[str] = [name for name in ("device_name", "mig", "sm_count", "sm_budget") if name in differs]
    if "capability" in differs:
        return Judgement(Grade.FOREIGN, _changes(there, here, ["capability", *device]))
    if device:
        return Judgement(Grade.SEED, _changes(there, here, device))
    if stored.kernel_source != source:
        return Judgement(Grade.SEED, f"kernel sources of {family} changed since")
    compilers = next(
        (names for start, names in _COMPILERS.items() if family.startswith(start)), _EVERY_COMPILER
    )
    software = ["driver", "cuda", "torch", *compilers]
    changed = [name for name in software if name in differs]
    small = {name for name in changed if is_patch(name, getattr(there, name), getattr(here, name))}
    if stored.layer in ("pack", "system") and source:  # a library's kernel has none
        known = {name for name in changed if getattr(there, name) and getattr(here, name)}
        small |= {"torch", "cuda"} | known
    large = [name for name in changed if name not in small]
    if large:
        return Judgement(Grade.SEED, _changes(there, here, large))
    if changed:
        return Judgement(Grade.VERIFY, _changes(there, here, changed))
    return Judgement(Grade.SAME)


def _changes(there: Fingerprint, here: Fingerprint, names: list[str]) -> str:
    facts = ((name, getattr(there, name), getattr(here, name)) for name in names)
    return ", ".join(f"{name} {old or 'none'} (here {new or 'none'})" for name, old, new in facts)


def is_patch(name: str, there: str, here: str) -> bool:
    """Whether two versions differ only after the numbers that signal new behaviour."""
    significant = 1 if name == "driver" else 2
    old, new = (re.findall(r"\d+", version.partition("+")[0])[:significant] for version in (there, here))
    return len(old) == significant and old == new
