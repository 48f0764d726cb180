"""Predictions of what a product that nobody tuned may take, by what was measured of others.

Boosted trees expect of each launch how many times as fast as torch it is. The best expected is taken where it
passes a margin, else torch. `plain` and `fused` say which launches are asked about, and by which features.
Trees and margins are in a file of db/ for each kind of GPU; one without such a file serves nothing by
prediction.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from tunegemm.choose.forest import Forest, read
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.cublaslt.choice import LibraryChoice, first_choice
from tunegemm.model.terms import Floats
from tunegemm.resources import data_path
from tunegemm.store.record import Record

#: Launches offered for a product, in case the best one cannot be loaded.
MOST_OPTIONS = 3
#: Above FROM_ROWS rows each doubling is cut into RANGES. If the best candidate misses its margin by SURELY
#: (in log) at both ends of a range, nothing inside it is served: 708 of 1,440 fp8 and SwiGLU products with
#: 257 to 16,384 rows lay in such ranges, and none of them passed its margin (H200's files, 2026-11-27).
#: Asking the trees takes milliseconds, and each step of a serving engine has another number of rows.
FROM_ROWS, RANGES, SURELY = 256, 8, 0.02
#: How many ends of ranges are remembered.
MOST_LEADS = 4096

Allows = Callable[[Problem, Candidate], str]
"""Why a candidate must not be used for a problem; empty when it may be."""


@dataclass(frozen=True)
class Predicted:
    """A shipped kernel for a problem that was not measured."""

    record: Record
    """The kernel as it would be launched; `ratio` is the lower bound."""
    label: str
    expected: float
    """Times as fast as torch."""
    bound: float
    """The expected ratio minus the margin of such products."""
    basis: str
    """The basis of the prediction, and how often it was wrong."""

    def __str__(self) -> str:
        return f"{self.expected:.3f} x torch expected, at least {self.bound:.3f}; {self.basis}"


@dataclass(frozen=True)
class Outlook:
    """What is to be expected of the shipped kernels for a problem."""

    options: tuple[Predicted, ...] = ()
    """What may be launched, the best first."""
    refusal: str = ""
    """Why there are none, in one clause."""
    decides: bool = True
    """Whether predictions are for such problems on such devices."""
    rows: tuple[int, int] | None = None
    """The numbers of rows at which the same is refused; None: not known of others."""


def ends(most: int) -> list[int]:
    """Where ranges of rows that are decided as one meet, up to so many rows."""
    found: list[int] = []
    while not found or found[-1] <= most:
        found.append(_end(len(found)))
    return found[:-1]


def _end(number: int) -> int:
    return round(FROM_ROWS * 2 ** (number / RANGES))


def anything(problem: Problem, candidate: Candidate) -> str:
    """Allows every candidate."""
    return ""


@dataclass(frozen=True)
class Fitted(ABC):
    """A model that was fitted to one kind of GPU, and its margins."""

    file: ClassVar[str]
    """What the names of its files begin with."""
    features: ClassVar[Sequence[str]]
    """The columns that its trees compare."""

    forest: Forest
    rows: tuple[int, ...]
    """Ends of the ranges of rows; beyond the last nothing is served."""
    extents: tuple[int, int]
    """Least and greatest N and K that were measured."""
    margins: Mapping[str, tuple[float | None, ...]]
    """How much of what is expected may be missing, in log, by `case` and range; None: nothing is served."""
    served: Mapping[str, Mapping[str, float]]
    """What the validation found, by case."""
    _leads: dict[tuple[Problem, Device], float] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    """What passes the margin, in log, where it was asked for a whole range of rows."""

    @classmethod
    def of(cls, gpu: str, folder: Path | None = None) -> Self | None:
        """The model of a kind of GPU, such as ``NVIDIA H200``; None where there is none.

        folder: where the files are; by default that of the package. Raises TunegemmError for a file that is
        damaged, of another version, or fitted to other kernels.
        """
        name = "-".join(gpu.removeprefix("NVIDIA").lower().split())
        path = (folder or data_path("db")) / f"{cls.file}-{name}.json"
        if not path.exists():
            return None
        forest, data = read(path, cls.features)
        common = {
            "forest": forest,
            "rows": tuple(data["rows"]),
            "extents": tuple(data["extents"]),
            "margins": {case: tuple(values) for case, values in data["margins"].items()},
            "served": data["served"],
        }
        return cls(**common, **cls._further(data, path))

    @classmethod
    def _further(cls, data: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """The fields that a class adds. Raises TunegemmError for a file that does not fit."""
        return {}

    @staticmethod
    @abstractmethod
    def covers(problem: Problem) -> bool:
        """Whether predictions are for such products at all."""

    @abstractmethod
    def case(self, problem: Problem, library: LibraryChoice | None) -> str:
        """Which margins hold. library: what torch's library chooses for the product alone; None: unknown."""

    @abstractmethod
    def expected(
        self, problem: Problem, device: Device, library: LibraryChoice | None
    ) -> tuple[Callable[[int], Candidate], Floats]:
        """The launches that are asked about, by their number, and the log of what is expected of each."""

    @abstractmethod
    def basis(self, case: str) -> str:
        """What a prediction goes by, for people."""

    def loss(self, number: int) -> float:
        """What sustained work takes from a lead in a range of rows, in log."""
        return 0.0

    def outlook(
        self,
        problem: Problem,
        device: Device,
        allows: Allows = anything,
        ask: Callable[[Problem, int], LibraryChoice | None] = first_choice,
    ) -> Outlook:
        """The launches that may be expected to be faster than torch.

        ask: for what torch's library chooses on a device; not asked where the device is not real.
        """
        if problem.m > self.rows[-1]:
            refusal = f"predictions are for up to {self.rows[-1]} rows"
            return Outlook(refusal=refusal, decides=False, rows=(self.rows[-1] + 1, sys.maxsize))
        if refusal := self.unmeasured(problem):
            return Outlook(refusal=refusal, decides=False, rows=(1, self.rows[-1]))
        number = self._number(problem)
        if self._margin(self.case(problem, None), number) is None:
            refusal = f"nothing is predicted of them at {problem.m} rows"
            rows = (self.rows[number - 1] + 1 if number else 1, self.rows[number])
            return Outlook(refusal=refusal, decides=False, rows=rows)
        if (between := self._between(problem.m)) is not None:
            leads = [self._lead(replace(problem, m=end), device, ask) for end in between]
            if max(leads) <= -SURELY:
                where = f"at {between[0]} to {between[1]} rows"
                return Outlook(
                    refusal=f"the best shipped kernel is predicted to gain too little {where}", rows=between
                )
        case, loss, margin, candidate_of, logs = self._asked(problem, device, ask)
        order = np.argsort(-logs, kind="stable").tolist()
        best = logs[order[0]] if order else -math.inf
        if best <= margin:
            return Outlook(
                refusal=f"{math.exp(best - loss):.3f} x torch is predicted of the best shipped kernel, "
                f"{math.exp(margin - loss):.3f} asked for"
            )
        options: list[Predicted] = []
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
                options.append(Predicted(record, label, expected, bound, self.basis(case)))
        return Outlook(tuple(options), "" if options else "; ".join(refusals))

    def unmeasured(self, problem: Problem) -> str:
        """Why nothing is known of products of such N and K, with any number of rows; empty where it is."""
        least, most = self.extents
        if least <= problem.n <= most and least <= problem.k <= most:
            return ""
        return f"predictions are for N and K from {least} to {most}"

    def _number(self, problem: Problem) -> int:
        """Of the range of rows that holds the problem's."""
        return next(number for number, high in enumerate(self.rows) if problem.m <= high)

    def _between(self, m: int) -> tuple[int, int] | None:
        """The ends of the range of rows that is decided as one, if m is in one."""
        step = math.floor(RANGES * math.log2(m / FROM_ROWS))
        low, high = _end(step), _end(step + 1)
        return (low, high) if FROM_ROWS <= low <= m <= high <= self.rows[-1] else None

    def _lead(
        self, problem: Problem, device: Device, ask: Callable[[Problem, int], LibraryChoice | None]
    ) -> float:
        """By how much the best that is expected passes the margin, in log."""
        key = problem, device
        if (known := self._leads.get(key)) is None:
            if len(self._leads) >= MOST_LEADS:
                self._leads.clear()
            _, _, margin, _, logs = self._asked(problem, device, ask)
            known = self._leads[key] = float(logs.max()) - margin if len(logs) else -math.inf
        return known

    def _asked(
        self, problem: Problem, device: Device, ask: Callable[[Problem, int], LibraryChoice | None]
    ) -> tuple[str, float, float, Callable[[int], Candidate], Floats]:
        """The case, the loss, what is to be passed, and what is `expected`."""
        library = ask(replace(problem, epilogue=""), device.index) if device.is_real else None
        case, number = self.case(problem, library), self._number(problem)
        loss = self.loss(number)
        return (
            case,
            loss,
            (self._margin(case, number) or 0.0) + loss,
            *self.expected(problem, device, library),
        )

    def _margin(self, case: str, number: int) -> float | None:
        return self.margins[case][number] if case in self.margins else None
