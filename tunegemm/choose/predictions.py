"""What is predicted of a problem on a device: by `Selector` of plain products, by `Logits` of those as wide
as vocabularies, by `fused.Gains` of others.

Plain products are those of 16-bit operands (`shortlist.covers`) of few rows, by the listed kernels. What
torch launches is part of what is expected: the library's heuristic is asked as torch asks it
(`cublaslt.choice`). Trees and margins are in db/selector-GPU.json and db/logits-GPU.json, made by
`fit.selector`. docs/decisions/0020 has the evidence.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from tunegemm.choose.fitted import Allows, Fitted, Outlook, anything
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import FileError, TunegemmError, TunegemmWarning, one_line
from tunegemm.generate.cublaslt.choice import LibraryChoice
from tunegemm.model import shortlist
from tunegemm.model.features import NAMES, features
from tunegemm.model.terms import Floats


@dataclass(frozen=True)
class Selector(Fitted):
    """The model of plain products. Its cases are whether torch's kernel is known."""

    file: ClassVar = "selector"
    features: ClassVar = NAMES

    kernels: tuple[int, ...]
    """Places in the list, of those that may serve."""
    sustained_loss: tuple[float, ...]
    """What sustained work takes from a lead, in log, by range of rows."""
    fitted_to: Mapping[str, Any]

    @classmethod
    def _further(cls, data: Mapping[str, Any], path: Path) -> dict[str, Any]:
        if data["list"] != digest_of_list():
            raise TunegemmError(
                f"{path} was fitted to another db/selector.toml; run `python -m fit.selector`"
            )
        return {
            "kernels": tuple(data["kernels"]),
            "sustained_loss": tuple(data["sustained_loss"]),
            "fitted_to": data["fitted_to"],
        }

    @staticmethod
    def covers(problem: Problem) -> bool:
        return shortlist.covers(problem)

    def case(self, problem: Problem, library: LibraryChoice | None) -> str:
        return "unknown" if library is None else "known"

    def loss(self, number: int) -> float:
        return self.sustained_loss[number]

    def expected(
        self, problem: Problem, device: Device, library: LibraryChoice | None
    ) -> tuple[Callable[[int], Candidate], Floats]:
        modelled = replace(device, spec="model")  # as at the fit: each chip counts its own clusters
        found = shortlist.choices(problem, modelled, self.kernels)
        logs = self.forest(features(problem, found, modelled, library))
        return lambda number: found.candidate(problem, number), logs

    def basis(self, case: str) -> str:
        validated = self.served[case]
        return (
            f"predicted from {self.fitted_to['products']:g} products measured on this kind of GPU"
            + ("" if case == "known" else ", torch's kernel not known")
            + f"; of {validated['products']:g} left out in turn {validated['under_099']:g} lost over 1 %"
        )


@dataclass(frozen=True)
class Logits(Selector):
    """The model of plain products that are wider than those of `Selector`."""

    file: ClassVar = "logits"
    #: Wider ones have this model.
    BEYOND: ClassVar = 28_672

    measured: tuple[tuple[int, int], tuple[int, int]]
    """N and K, from and to."""

    @classmethod
    def _further(cls, data: Mapping[str, Any], path: Path) -> dict[str, Any]:
        return super()._further(data, path) | {"measured": tuple(map(tuple, data["measured"]))}

    def unmeasured(self, problem: Problem) -> str:
        (least_n, most_n), (least_k, most_k) = self.measured
        if least_n <= problem.n <= most_n and least_k <= problem.k <= most_k:
            return ""
        return f"predictions of so wide products are for N to {most_n} and K from {least_k} to {most_k}"


def digest_of_list() -> str:
    """A digest of the listed kernels in their order: places in the file mean them."""
    # Spelt out here, and not as a candidate prints itself, which may change: fitted files hold the digest.
    listed = "\n".join(
        f"Candidate(family={one.family!r}, compile_params={one.compile_params!r}, "
        f"launch_params={one.launch_params!r})"
        for one in shortlist.listed()
    )
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def outlook(problem: Problem, device: Device, allows: Allows = anything) -> Outlook:
    """What the device's model says of a problem. A file that is of no use is one warning."""
    model = _model_for(problem)
    if not model.covers(problem):
        return Outlook(decides=False, rows=(1, sys.maxsize))
    fitted = load(model, device.name)
    if isinstance(fitted, str):
        return Outlook(refusal=fitted, decides=False, rows=(1, sys.maxsize))
    fingerprint = device.fingerprint
    if fingerprint.mig or fingerprint.sm_budget < fingerprint.sm_count:
        return Outlook(refusal="predictions are for whole GPUs", decides=False, rows=(1, sys.maxsize))
    return fitted.outlook(problem, device, allows)


def _model_for(problem: Problem) -> type[Fitted]:
    if not problem.epilogue:
        return Logits if problem.n > Logits.BEYOND else Selector
    from tunegemm.choose.fused import Gains  # a plain product does without what it imports

    return Gains


@cache
def load(model: type[Fitted], gpu: str) -> Fitted | str:
    """The model of a kind of GPU, or why there is none."""
    try:
        fitted = model.of(gpu)
    except (FileError, OSError) as error:  # the miss says so, and so does the layer of shipped records
        return f"nothing is predicted: {one_line(error)}"
    except Exception as error:  # a truncated list, for one
        warnings.warn(f"{one_line(error)}; nothing is predicted until then", TunegemmWarning, stacklevel=2)
        return one_line(error)
    return fitted or f"nothing is predicted for {gpu}, which was not measured"
