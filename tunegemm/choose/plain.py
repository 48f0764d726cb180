"""What a product that nobody tuned may take from the list of shipped kernels, by what was measured of others.

For plain 16-bit products (`shortlist.covers`) of few rows. Boosted trees expect of each launch how
many times as fast as torch.mm it is; the best expected is taken where it passes a margin, else torch. What
torch launches is part of it: the library's heuristic is asked as torch asks it (`cublaslt.choice`). Trees and
margins are in db/selector-GPU.json, made by `benchmarks.selector_fit`; a GPU without such a file serves
nothing by prediction. docs/decisions/0020 has the evidence.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tunegemm.choose.forest import Forest, read
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import FileError, TunegemmError, TunegemmWarning, one_line
from tunegemm.generate import families
from tunegemm.generate.cublaslt.choice import LibraryChoice, first_choice
from tunegemm.model import shortlist
from tunegemm.model.features import NAMES, features
from tunegemm.resources import data_path
from tunegemm.store.record import Record

#: Launches that are offered of a product, for where the best one cannot be loaded.
MOST_OPTIONS = 3

Allows = Callable[[Problem, Candidate], str]
"""Why a candidate must not be used for a problem; empty when it may be."""


@dataclass(frozen=True)
class Predicted:
    """A kernel of the list for a problem that was not measured."""

    record: Record
    """The kernel as it would be launched; `ratio` is the lower bound."""
    label: str
    expected: float
    """Times as fast as torch.mm."""
    bound: float
    """The same, less the margin of such products."""
    basis: str
    """What it goes by, and how often that was wrong."""

    def __str__(self) -> str:
        return f"{self.expected:.3f} x torch expected, at least {self.bound:.3f}; {self.basis}"


@dataclass(frozen=True)
class Outlook:
    """What is to be expected of the listed kernels for a problem."""

    options: tuple[Predicted, ...] = ()
    """That may be launched, the best first."""
    refusal: str = ""
    """Why there are none, in one clause."""
    decides: bool = True
    """Whether predictions are for such problems on such devices."""


def _anything(problem: Problem, candidate: Candidate) -> str:
    return ""


@dataclass(frozen=True)
class Selector:
    """A fitted model and its margins."""

    gpu: str
    kernels: tuple[int, ...]
    """Places in the list, of those that may serve."""
    forest: Forest
    rows: tuple[int, ...]
    """Ends of the ranges of rows; beyond the last nothing is served."""
    extents: tuple[int, int]
    """Least and greatest N and K that were measured."""
    sustained_loss: tuple[float, ...]
    """What sustained work takes from a lead, in log, by range of rows."""
    margins: Mapping[str, tuple[float, ...]]
    """How much of what is expected may be missing, in log, by range; with torch's kernel known and not."""
    fitted_to: Mapping[str, Any]
    served: Mapping[str, Mapping[str, float]]
    """What the validation found, by whether torch's kernel is known."""

    def outlook(
        self,
        problem: Problem,
        device: Device,
        allows: Allows = _anything,
        ask: Callable[[Problem, int], LibraryChoice | None] = first_choice,
    ) -> Outlook:
        """The launches that may be expected to be faster than torch.

        ask: for what torch's library chooses on a device; not asked where the device is not real.
        """
        if problem.m > self.rows[-1]:
            return Outlook(refusal=f"predictions are for up to {self.rows[-1]} rows", decides=False)
        least, most = self.extents
        if not (least <= problem.n <= most and least <= problem.k <= most):
            return Outlook(refusal=f"predictions are for N and K from {least} to {most}", decides=False)
        modelled = replace(device, spec="model")  # as at the fit: each chip counts its resident clusters anew
        found = shortlist.choices(problem, modelled, self.kernels)
        library = ask(problem, device.index) if device.is_real else None
        logs = self.forest(features(problem, found, modelled, library))
        number = next(number for number, high in enumerate(self.rows) if problem.m <= high)
        known = "unknown" if library is None else "known"
        loss = self.sustained_loss[number]
        margin = self.margins[known][number] + loss
        order = np.argsort(-logs, kind="stable").tolist()
        best = logs[order[0]] if order else -math.inf
        if best <= margin:
            return Outlook(
                refusal=f"{math.exp(best - loss):.3f} x torch is predicted of the best listed kernel, "
                f"{math.exp(margin - loss):.3f} asked for"
            )
        options: list[Predicted] = []
        refusals: list[str] = []
        for row in order:
            if logs[row] <= margin or len(options) == MOST_OPTIONS:
                break
            candidate = found.candidate(problem, row)
            family = families.get(candidate.family)
            label = family.label(candidate)
            if reason := allows(problem, candidate):
                refusals.append(f"{label}: {reason}")
            elif not (verdict := family.check(problem, candidate, device)).runs:
                refusals.append(f"{label}: {verdict}")
            else:
                bound = math.exp(logs[row] - margin)
                record = Record(problem, candidate, device.fingerprint, label, ratio=bound)
                expected = math.exp(logs[row] - loss)
                options.append(Predicted(record, label, expected, bound, self._basis(known)))
        return Outlook(tuple(options), "" if options else "; ".join(refusals))

    def _basis(self, known: str) -> str:
        validated = self.served[known]
        return (
            f"predicted from {self.fitted_to['products']:g} products measured on this kind of GPU"
            + ("" if known == "known" else ", torch's kernel not known")
            + f"; of {validated['products']:g} left out in turn {validated['under_099']:g} lost over 1 %"
        )


def outlook(problem: Problem, device: Device, allows: Allows = _anything) -> Outlook:
    """What the device's selector says of a problem. A file that is of no use is one warning."""
    if not shortlist.covers(problem):
        return Outlook(decides=False)
    selector = selector_here(device.name)
    if isinstance(selector, str):
        return Outlook(refusal=selector, decides=False)
    fingerprint = device.fingerprint
    if fingerprint.mig or fingerprint.sm_budget < fingerprint.sm_count:
        return Outlook(refusal="predictions are for whole GPUs", decides=False)
    return selector.outlook(problem, device, allows)


@cache
def selector_here(gpu: str) -> Selector | str:
    """The selector of a kind of GPU, or why there is none."""
    try:
        selector = selector_of(gpu)
    except (FileError, OSError) as error:  # the miss says so, and so does the layer of shipped records
        return f"nothing is predicted: {one_line(error)}"
    except Exception as error:  # a truncated list, for one
        warnings.warn(f"{one_line(error)}; nothing is predicted until then", TunegemmWarning, stacklevel=2)
        return one_line(error)
    return selector or f"nothing is predicted for {gpu}, which was not measured"


def selector_of(gpu: str, folder: Path | None = None) -> Selector | None:
    """The selector of a kind of GPU, such as ``NVIDIA H200``; None where there is none.

    folder: where the files are; by default that of the package. Raises TunegemmError for a file that is
    damaged, of another version, or fitted to another list of kernels.
    """
    path = file_of("selector", gpu, folder)
    if not path.exists():
        return None
    data = read(path, NAMES)
    if data["list"] != digest_of_list():
        raise TunegemmError(
            f"{path} was fitted to another db/selector.toml; run `python -m benchmarks.selector_fit`"
        )
    return Selector(
        data["gpu"],
        tuple(data["kernels"]),
        Forest.of(data, len(NAMES)),
        tuple(data["rows"]),
        tuple(data["extents"]),
        tuple(data["sustained_loss"]),
        {name: tuple(values) for name, values in data["margins"].items()},
        data["fitted_to"],
        data["served"],
    )


def file_of(what: str, gpu: str, folder: Path | None = None) -> Path:
    """Where a fitted model of a kind of GPU is, such as db/selector-h200.json."""
    name = "-".join(gpu.removeprefix("NVIDIA").lower().split())
    return (folder or data_path("db")) / f"{what}-{name}.json"


def digest_of_list() -> str:
    """A digest of the listed kernels in their order: places in the file mean them."""
    # Spelt out here, and not as a candidate prints itself, which may change: fitted files hold the digest.
    listed = "\n".join(
        f"Candidate(family={one.family!r}, compile_params={one.compile_params!r}, "
        f"launch_params={one.launch_params!r})"
        for one in shortlist.listed()
    )
    return hashlib.sha256(listed.encode()).hexdigest()[:16]
