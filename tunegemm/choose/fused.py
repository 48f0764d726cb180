"""What fp8 and fused products that nobody tuned may take from the kernels that ship for such products.

The kernels are those of policy `batch_invariant`, in the order that `invariance` expects of them. Boosted
trees expect of the first few how many times as fast they are as torch's operations, one after the other; the
best is taken where that passes a margin, else torch. Trees and margins are in db/kinds-GPU.json, made by
`benchmarks.kind_fit` from what `benchmarks.kind_choices` measured. docs/decisions/0021 has the evidence.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tunegemm.choose.compiled_code import kernels_after
from tunegemm.choose.forest import Forest, read
from tunegemm.choose.invariance import Ranked, columns_in_16_bit, in_16_bit, ranked
from tunegemm.choose.plain import MOST_OPTIONS, Allows, Outlook, Predicted, file_of
from tunegemm.describe.device import Device
from tunegemm.describe.epilogue import GATED
from tunegemm.describe.problem import DTYPE_BYTES, MAX_ALIGNMENT, Problem
from tunegemm.errors import FileError, TunegemmWarning, one_line
from tunegemm.generate import families
from tunegemm.generate.cublaslt.choice import LibraryChoice, first_choice
from tunegemm.model import shortlist
from tunegemm.model.features import OF_GAIN, gain_features
from tunegemm.model.terms import Floats, elementwise_us, terms
from tunegemm.store.record import Record

#: Launches that the trees are asked about: those that are expected to be nearest to the best.
ASKED = 4


@dataclass(frozen=True)
class Gains:
    """Fitted trees and their margins."""

    forest: Forest
    rows: tuple[int, ...]
    """Ends of the ranges of rows; beyond the last nothing is served."""
    margins: Mapping[str, tuple[float | None, ...]]
    """How much of what is expected may be missing, in log, by the `name_of` a problem and by range; None
    where nothing is served."""
    extents: tuple[int, int]
    """Least and greatest N and K that were measured."""
    served: Mapping[str, Mapping[str, float]]
    """What the validation found, by such a name."""

    def outlook(
        self,
        problem: Problem,
        device: Device,
        allows: Allows,
        ask: Callable[[Problem, int], LibraryChoice | None] = first_choice,
    ) -> Outlook:
        """The launches that may be expected to be faster than torch."""
        name = name_of(problem)
        margins = self.margins.get(name)
        if margins is None or problem.m > self.rows[-1]:
            return Outlook(
                refusal=f"nothing is predicted for such products of {problem.m} rows", decides=False
            )
        margin = margins[next(number for number, high in enumerate(self.rows) if problem.m <= high)]
        least, most = self.extents
        if margin is None or not (least <= problem.n <= most and least <= problem.k <= most):
            return Outlook(refusal="nothing is predicted for such products of these extents", decides=False)
        found = best_ranked(problem, device)
        library = ask(replace(problem, epilogue=""), device.index) if device.is_real else None
        logs = self.forest(features_of(problem, found, device, library))
        order = np.argsort(-logs, kind="stable").tolist()
        if not order or logs[order[0]] <= margin:
            best = math.exp(logs[order[0]]) if order else 0.0
            return Outlook(
                refusal=f"{best:.3f} x torch is predicted of the best shipped kernel, "
                f"{math.exp(margin):.3f} asked for"
            )
        options: list[Predicted] = []
        refusals: list[str] = []
        validated = self.served[name]
        basis = (
            f"predicted from {validated['products']:g} such products measured on this kind of GPU; of them, "
            f"left out in turn, {validated['under_099']:g} lost over 1 %"
        )
        for row in order[:MOST_OPTIONS]:
            candidate = found[row].candidate
            family = families.get(candidate.family)
            if logs[row] <= margin:
                break
            if reason := allows(problem, candidate):
                refusals.append(f"{family.label(candidate)}: {reason}")
                continue
            bound, label = math.exp(logs[row] - margin), family.label(candidate)
            record = Record(problem, candidate, device.fingerprint, label, ratio=bound)
            options.append(Predicted(record, label, math.exp(logs[row]), bound, basis))
        return Outlook(tuple(options), "" if options else "; ".join(refusals))


def name_of(problem: Problem) -> str:
    """Such as ``bf16 swiglu``: what the files call such products."""
    return f"{problem.in_dtype} {problem.epilogue}"


def best_ranked(problem: Problem, device: Device) -> list[Ranked]:
    """The shipped kernels that are expected to be nearest to the best, and run."""
    order = sorted(ranked(problem, shortlist.ordered_kernels(problem), device), key=lambda one: -one.expected)
    found: list[Ranked] = []
    for one in order:
        if len(found) == ASKED:
            break
        if families.get(one.candidate.family).check(problem, one.candidate, device).runs:
            found.append(one)
    return found


def features_of(
    problem: Problem, found: Sequence[Ranked], device: Device, library: LibraryChoice | None
) -> Floats:
    """A row of `OF_GAIN` for each launch. library: what torch's library chooses for the product alone."""
    seen, modelled = in_16_bit(problem), replace(device, spec="model")
    columns = columns_in_16_bit(problem, [one.candidate for one in found])
    costs = terms(seen, columns, modelled)
    matrix_bytes = problem.m * problem.n * DTYPE_BYTES[problem.out_dtype]
    after_us = kernels_after(problem) * elementwise_us(2 * matrix_bytes, modelled)
    return gain_features(
        seen, columns, costs, [one.candidate.family for one in found], modelled, library,
        behind=np.array([one.expected for one in found]),
        one_byte=DTYPE_BYTES[problem.in_dtype] == 1,
        gated=any(step in GATED for step in problem.fused.steps),
        after=after_us / costs.total_us,
    )  # fmt: skip


def outlook(problem: Problem, device: Device, allows: Allows) -> Outlook:
    """What the device's file says of a problem. A file that is of no use is one warning."""
    is_plain = problem.batch == 1 and problem.alignment == MAX_ALIGNMENT
    if not (problem.epilogue and is_plain and shortlist.ordered_kernels(problem)):
        return Outlook(decides=False)
    fingerprint = device.fingerprint
    gains = gains_here(device.name)
    if gains is None or fingerprint.mig or fingerprint.sm_budget < fingerprint.sm_count:
        return Outlook(decides=False)
    return gains.outlook(problem, device, allows)


@cache
def gains_here(gpu: str) -> Gains | None:
    """The gains of a kind of GPU; None where it was not measured, or after one warning."""
    try:
        return gains_of(gpu)
    except (FileError, OSError):  # the layer of shipped records says so
        return None
    except Exception as error:  # a truncated list, for one
        warnings.warn(f"{one_line(error)}; nothing is predicted until then", TunegemmWarning, stacklevel=2)
        return None


def gains_of(gpu: str, folder: Path | None = None) -> Gains | None:
    """The gains of a kind of GPU, such as ``NVIDIA H200``; None where it was not measured.

    folder: where the files are; by default that of the package. Raises TunegemmError for a damaged one.
    """
    path = file_of("kinds", gpu, folder)
    if not path.exists():
        return None
    data: dict[str, Any] = read(path, OF_GAIN)
    return Gains(
        Forest.of(data, len(OF_GAIN)),
        tuple(data["rows"]),
        {name: tuple(values) for name, values in data["margins"].items()},
        tuple(data["extents"]),
        data["served"],
    )
