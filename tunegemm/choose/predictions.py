"""Predicts kernels for products that were never tuned, from measurements of other products.

Boosted trees predict each launch's ratio to torch. The best launch serves if its ratio passes a margin; else
torch computes the product. db/ has a file for each kind of GPU with three models, one per line: `plain` for
products of 16-bit operands and few rows, `wide` for those as wide as vocabularies, and `fused` for fused and
fp8 products. `fit.selector` and `fit.kinds` write the file; without one, a GPU serves nothing by prediction.
The kernel that torch launches is part of the prediction: the library's heuristic is called as torch calls it
(`cublaslt.choice`). docs/decisions/0020 and 0021 have the evidence.
"""

from __future__ import annotations

import hashlib
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tunegemm.choose.forest import Forest, read
from tunegemm.choose.invariance import best_ranked, features_of
from tunegemm.choose.neighbours import Allows, Offer, Offers, library_us
from tunegemm.choose.policies import FASTEST
from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, MAX_ALIGNMENT, Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import FileError, TunegemmError, TunegemmWarning, one_line
from tunegemm.generate import families
from tunegemm.generate.cublaslt import FAMILY as LIBRARY
from tunegemm.generate.cublaslt.choice import LibraryChoice, algorithm_to_add, first_choice
from tunegemm.model import shortlist
from tunegemm.model.features import NAMES, OF_GAIN, features_of_choices
from tunegemm.model.terms import Floats, elementwise_us
from tunegemm.resources import data_path
from tunegemm.store.record import Record

#: The models of a file, and the columns that their trees compare.
FEATURES = {"plain": NAMES, "wide": NAMES, "fused": OF_GAIN}
#: Plain products with more columns use the model `wide`.
WIDE = 28_672
#: Launches offered for a product, in case the best one cannot be loaded.
MOST_OPTIONS = 3
#: Above FROM_ROWS rows each doubling is cut into RANGES. If the best candidate misses its margin by SURELY
#: (in log) at both ends of a range, nothing inside it is served: 708 of 1,440 fp8 and SwiGLU products with
#: 257 to 16,384 rows lay in such ranges, and all of these missed their margins (H200's files, 2026-11-27).
#: Evaluating the trees takes milliseconds, and each step of a serving engine has another number of rows.
FROM_ROWS, RANGES, SURELY = 256, 8, 0.02
#: The most leads kept for ends of ranges.
MOST_LEADS = 4096

Asks = Callable[[Problem, int], LibraryChoice | None]
"""Returns the choice of torch's library for a problem on the device with an index; None if unknown."""


def ends(most: int) -> list[int]:
    """The ends, up to `most` rows, of the ranges of rows that are decided as one."""
    count = math.floor(RANGES * math.log2(max(1, most) / FROM_ROWS)) + 2
    return [end for end in map(_end, range(count)) if end <= most]


def _end(number: int) -> int:
    return round(FROM_ROWS * 2 ** (number / RANGES))


@dataclass(frozen=True)
class Fitted:
    """A model fitted to one kind of GPU, and its margins by case (`case_of`).

    The case of a plain product is whether torch's kernel is known; that of others is dtype and epilogue.
    """

    forest: Forest
    rows: tuple[int, ...]
    """Ends of the ranges of rows; nothing is served beyond the last one."""
    extents: tuple[tuple[int, int], tuple[int, int]]
    """The least and the greatest measured N, and the same for K."""
    margins: Mapping[str, Sequence[float | None]]
    """The margin for errors of the prediction, in log, by `case` and range; None: nothing is served."""
    served: Mapping[str, Mapping[str, float]]
    """The results of the validation, by case."""
    fitted_to: Mapping[str, Any]
    sustained_loss: tuple[float, ...]
    """How much of a lead sustained work costs, in log, by range of rows."""
    kernels: tuple[int, ...]
    """For plain products: the positions, in the list of kernels, of those that may serve."""
    _leads: dict[tuple[Problem, Device], float] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    """The lead over the margin, in log, at ends of ranges of rows (`lead_of`)."""

    @classmethod
    def of(cls, name: str, gpu: str, folder: Path | None = None) -> Fitted | None:
        """Read a model of `FEATURES` for a kind of GPU, such as ``NVIDIA H200``; None if there is no file.

        folder: the file's folder; by default the package's. Raises TunegemmError if the file is damaged, of
        another version, or fitted to other kernels.
        """
        path = file_of(gpu, folder)
        if not path.exists():
            return None
        forest, data = read(path, FEATURES[name], name)
        if data["list"] not in ("", digest_of_list()):
            raise TunegemmError(
                f"{path} was fitted to another db/selector.toml; run `python -m fit.selector`"
            )
        (least_n, most_n), (least_k, most_k) = data["extents"]
        return cls(
            forest, tuple(data["rows"]), ((least_n, most_n), (least_k, most_k)), data["margins"],
            data["served"], data["fitted_to"], tuple(data["sustained_loss"]), tuple(data["kernels"]),
        )  # fmt: skip

    def outlook(
        self, problem: Problem, device: Device, allows: Allows = FASTEST.refusal, ask: Asks = first_choice
    ) -> Offers:
        """The launches that are expected to be faster than torch.

        ask: returns the choice of torch's library on a device; not called if the device is not real.
        """
        last = self.rows[-1]
        if problem.m > last:
            refusal = f"predictions are for up to {last} rows"
            return Offers(refusal=refusal, rows=(last + 1, sys.maxsize))
        (least_n, most_n), (least_k, most_k) = self.extents
        if not (least_n <= problem.n <= most_n and least_k <= problem.k <= most_k):
            refusal = f"predictions are for N from {least_n} to {most_n} and K from {least_k} to {most_k}"
            return Offers(refusal=refusal, rows=(1, last))
        number = self._number(problem)
        if self._margin(case_of(problem, None), number) is None:
            refusal = f"there are no predictions for them at {problem.m} rows"
            rows = (self.rows[number - 1] + 1 if number else 1, self.rows[number])
            return Offers(refusal=refusal, rows=rows)
        if (between := self.range_of(problem.m)) is not None:
            leads = [self.lead_of(replace(problem, m=end), device, ask) for end in between]
            if max(leads) <= -SURELY:
                where = f"at {between[0]} to {between[1]} rows"
                return Offers(
                    refusal=f"the best shipped kernel is predicted to gain too little {where}", rows=between
                )
        case, loss, margin, candidate_of, logs = self.asked_of(problem, device, ask)
        order = np.argsort(-logs, kind="stable").tolist()
        best = logs[order[0]] if order else -math.inf
        if best <= margin:
            return Offers(
                refusal=f"the best shipped kernel is predicted at {math.exp(best - loss):.3f} x torch, "
                f"{math.exp(margin - loss):.3f} required"
            )
        options: list[Offer] = []
        refusals: list[str] = []
        for row in order:
            if logs[row] <= margin or len(options) == MOST_OPTIONS:
                break
            candidate = candidate_of(row)
            family = families.get(candidate.family)
            label = family.label(candidate)
            if reason := allows(problem, candidate):
                refusals.append(f"{label}: {reason}")
            elif not (verdict := family.check(problem, candidate, device)).runs:
                refusals.append(f"{label}: {verdict}")
            else:
                bound, expected = math.exp(logs[row] - margin), math.exp(logs[row] - loss)
                record = Record(problem, candidate, device.fingerprint, label, ratio=bound)
                options.append(Offer(record, self._basis(case), None, expected, bound))
        return Offers(tuple(options), "" if options else "; ".join(refusals))

    def expected(
        self, problem: Problem, device: Device, library: LibraryChoice | None
    ) -> tuple[Callable[[int], Candidate], Floats]:
        """The launches that the trees evaluate, by their number, and the log of each expected ratio.

        library: the choice of torch's library for the product alone; None if unknown.
        """
        if problem.epilogue:
            ranked = best_ranked(problem, device)
            logs = self.forest(features_of(problem, ranked, device, library))
            return lambda number: ranked[number].candidate, logs
        modelled = replace(device, spec="model")  # as in the fit: each chip counts its own clusters
        result = shortlist.choices(problem, modelled, self.kernels)
        logs = self.forest(features_of_choices(problem, result, modelled, library))
        return lambda number: result.candidate(problem, number), logs

    def _basis(self, case: str) -> str:
        validated = self.served[case]
        return (
            f"predicted from {self.fitted_to['products']:g} products measured on this kind of GPU"
            + (", torch's kernel unknown" if case == "unknown" else "")
            + f"; {validated['under_099']:g} of {validated['products']:g} products lost over 1 % in "
            "cross-validation"
        )

    def _number(self, problem: Problem) -> int:
        """The number of the range that contains the problem's rows."""
        return next(number for number, high in enumerate(self.rows) if problem.m <= high)

    def range_of(self, m: int) -> tuple[int, int] | None:
        """The ends of the range that contains m and is decided as one; None if there is no such range."""
        step = math.floor(RANGES * math.log2(m / FROM_ROWS))
        low, high = _end(step), _end(step + 1)
        return (low, high) if FROM_ROWS <= low <= m <= high <= self.rows[-1] else None

    def lead_of(self, problem: Problem, device: Device, ask: Asks) -> float:
        """By how much the best expected ratio passes the margin, in log."""
        key = problem, device
        if (known := self._leads.get(key)) is None:
            if len(self._leads) >= MOST_LEADS:
                self._leads.clear()
            _, _, margin, _, logs = self.asked_of(problem, device, ask)
            known = self._leads[key] = float(logs.max()) - margin if len(logs) else -math.inf
        return known

    def asked_of(
        self, problem: Problem, device: Device, ask: Asks
    ) -> tuple[str, float, float, Callable[[int], Candidate], Floats]:
        """The case, the loss in sustained work, the threshold to pass, and the result of `expected`."""
        library = ask(replace(problem, epilogue=""), device.index) if device.is_real else None
        case, number = case_of(problem, library), self._number(problem)
        loss = self.sustained_loss[number]
        return (
            case,
            loss,
            (self._margin(case, number) or 0.0) + loss,
            *self.expected(problem, device, library),
        )

    def _margin(self, case: str, number: int) -> float | None:
        return self.margins[case][number] if case in self.margins else None


def file_of(gpu: str, folder: Path | None = None) -> Path:
    """The path of the file for a kind of GPU. folder: by default the package's."""
    name = "-".join(gpu.removeprefix("NVIDIA").lower().split())
    return (folder or data_path("db")) / f"predictions-{name}.jsonl"


def case_of(problem: Problem, library: LibraryChoice | None) -> str:
    """The case, which chooses the margins.

    library: the choice of torch's library for the product alone; None if unknown.
    """
    if problem.epilogue:
        return name_of(problem)
    return "unknown" if library is None else "known"


def name_of(problem: Problem) -> str:
    """The files' name for such products, such as ``bf16 swiglu``. fp16 counts as bf16, which is as fast."""
    return f"{'bf16' if problem.in_dtype == 'fp16' else problem.in_dtype} {problem.epilogue}"


def covers(problem: Problem) -> bool:
    """Whether predictions cover such products at all."""
    if not problem.epilogue:
        return shortlist.covers(problem)
    is_one = problem.batch == 1 and not problem.groups and problem.alignment == MAX_ALIGNMENT
    return is_one and bool(shortlist.ordered_kernels(problem))


def digest_of_list() -> str:
    """A digest of the listed kernels in their order: the file refers to them by position."""
    # Spelled out here rather than by a candidate's repr, which may change: fitted files hold the digest.
    listed = "\n".join(
        f"Candidate(family={candidate.family!r}, compile_params={candidate.compile_params!r}, "
        f"launch_params={candidate.launch_params!r})"
        for candidate in shortlist.listed()
    )
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def outlook(problem: Problem, device: Device, allows: Allows = FASTEST.refusal) -> Offers:
    """The predictions of the device's model for a problem. An unusable file causes one warning."""
    if not covers(problem):
        return Offers(rows=(1, sys.maxsize))
    name = "fused" if problem.epilogue else "wide" if problem.n > WIDE else "plain"
    fitted = load(name, device.name)
    if isinstance(fitted, str):
        return Offers(refusal=fitted, rows=(1, sys.maxsize))
    fingerprint = device.fingerprint
    if fingerprint.mig or fingerprint.sm_budget < fingerprint.sm_count:
        return Offers(refusal="predictions are for whole GPUs", rows=(1, sys.maxsize))
    return fitted.outlook(problem, device, allows)


@cache
def load(name: str, gpu: str) -> Fitted | str:
    """The model with a name for a kind of GPU, or why there is none."""
    try:
        fitted = Fitted.of(name, gpu)
    except (FileError, OSError) as error:  # the miss reports it, and so does the layer of shipped records
        return f"no predictions: {one_line(error)}"
    except Exception as error:  # such as a truncated list
        warnings.warn(
            f"{one_line(error)}; there are no predictions until then", TunegemmWarning, stacklevel=2
        )
        return one_line(error)
    return fitted or f"there are no predictions for {gpu}, which was not measured"


def by_the_library(
    problem: Problem, device: Device, product: Sequence[Record], allows: Allows = FASTEST.refusal
) -> Offers:
    """The library's algorithm for a product with a residual, passed as its C, or a bias and an activation.

    torch computes ``x @ w.t() + residual`` with two kernels, and writes and reads the product between them.
    cublasLtMatmul can read C from another place than it writes D, but torch has no call for that. An
    algorithm that reads C fast adds the residual to its sums, which saves one kernel; so does one that
    computes the activation.

    product: the records that serve the product alone, or with its bias, after which torch would compute the
    last step.
    """
    candidate = algorithm_to_add(problem, device.index) if device.is_real else None
    if candidate is None:
        return Offers(refusal="the library has no algorithm for its last step")
    if (reason := allows(problem, candidate)) or not (verdict := LIBRARY.check(problem, candidate, device)):
        return Offers(refusal=f"the library's sum with its last step: {reason or verdict}")
    modelled = replace(device, spec="model")
    alone_us = library_us(replace(problem, epilogue=""), modelled)
    matrix_bytes = problem.m * problem.n * DTYPE_BYTES[problem.out_dtype]
    after_us = elementwise_us((3 if "residual" in problem.fused.steps else 2) * matrix_bytes, modelled)
    saved_us = elementwise_us(2 * matrix_bytes, modelled)
    faster = max((record.ratio for record in product), default=1.0)
    torchs_us = alone_us + after_us
    if alone_us / faster + after_us < torchs_us - saved_us:
        return Offers(refusal="a faster product leaves the library's sum with its last step behind")
    ratio = torchs_us / (torchs_us - saved_us)
    record = Record(problem, candidate, device.fingerprint, LIBRARY.label(candidate), ratio=ratio)
    basis = "an algorithm of torch's library that also computes the last step: one kernel fewer"
    return Offers((Offer(record, basis, None, ratio, 1.0),))
