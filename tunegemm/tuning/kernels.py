"""The generators' kernels on one device: which are feasible for a problem, and in which order to try them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from tunegemm.compile.artifacts import digest
from tunegemm.compile.pool import Ready, Shipped
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, SearchSpace, Value
from tunegemm.errors import DeviceError, SpaceError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.feasibility import Remembered, Verdict, parameters_read
from tunegemm.model import rank as model
from tunegemm.model.feasible import extent_check, kernel_check, kernel_facts, possible_kernels
from tunegemm.model.terms import Columns
from tunegemm.untrusted import named, shown

_log = logging.getLogger(__name__)

#: The only launch argument whose values are each compiled into a kernel.
_ORDER = "cluster_order"


#: How many rankings to keep over all families: those of this problem and the next.
_REMEMBERED = 16


@dataclass(frozen=True)
class Ranking:
    """One generator's feasible kernels for a problem."""

    launch_values: Mapping[str, tuple[Value, ...]]
    """Values of each launch-time parameter that some kernel can take."""
    predictions: list[model.Prediction]
    """One per kernel at its model-best launch, fastest first."""
    feasible: int
    """How many kernels are feasible, even if fewer were requested."""


class Kernels:
    """The families' kernels for a device. It caches the kernels that all problems of a kind share."""

    def __init__(
        self,
        device: Device,
        names: Sequence[str] | str | None = None,
        folder: Path | None = None,
        matching: str | None = None,
    ) -> None:
        """names: of the families to try, or a single name; by default all whose packages are installed.
        folder: keeps lists of kernels between processes; None for no folder. matching: a regular expression
        that must match the labels of generated kernels.

        Raises SpaceError if a family is unknown, DeviceError if a family cannot be used here.
        """
        self.device = device
        self.families = _usable(names, device)
        self.space: Callable[[str], SearchSpace] = cache(families.load_space)
        self._folder = folder
        self.matching = matching
        self._pattern = None if matching is None else re.compile(matching)
        self._possible: dict[tuple[str | int, ...], tuple[list[Candidate], Columns]] = {}
        #: Another thread requests the rankings of the next problem.
        self._latest = lru_cache(_REMEMBERED)(self._rank)
        #: For each kind and kernel: the name of its object, the shipped object, and whether one ships.
        self._objects: dict[
            tuple[str | int, ...], dict[tuple[object, ...], tuple[str, Shipped | None, bool]]
        ] = {}
        #: For each family and kind: the checks that do not depend on extents.
        self._fitting: dict[tuple[str | int, ...], Remembered] = {}
        self._compiled: dict[tuple[str | int, ...], tuple[Ready, list[Candidate], Columns]] = {}

    @property
    def generators(self) -> tuple[str, ...]:
        """The families whose kernels are compiled from a search space, the expected winner first."""
        return tuple(name for name in self.families if families.get(name).compiled)

    def _is_wanted(self, candidate: Candidate) -> bool:
        """Whether `matching` accepts the label of a candidate's kernel."""
        if self._pattern is None:
            return True
        return self._pattern.search(families.get(candidate.family).label(candidate.kernel)) is not None

    def is_feasible(self, problem: Problem, candidate: Candidate) -> bool:
        """Whether the candidate can compile and launch here."""
        return self.check(problem, candidate).feasible

    def check(self, problem: Problem, candidate: Candidate) -> Verdict:
        """Return whether the candidate can compile and launch here, or why not."""
        return families.get(candidate.family).check(problem, candidate, self.device)

    def usable(self, stored: Candidate) -> Candidate | None:
        """Return a generator's stored candidate, completed with parameters that its family got later; None if
        the family cannot read it, because the row is damaged or from another version.
        """
        if stored.family not in self.generators:
            return None
        candidate = families.completed(stored)
        is_sound = not families.wrong_parameter(candidate) and self._is_wanted(candidate)
        return candidate if is_sound else None

    def ranked(
        self,
        problem: Problem,
        name: str,
        *,
        swept: Collection[Candidate] | None = None,
        compiled: Ready | None = None,
        most: int | None = None,
    ) -> Ranking:
        """Return a generator's feasible kernels for the problem, in the model's order.

        swept: on a recorded device the candidates that have a time; others cannot be tried. compiled: the
        only kernels to take, None for all. most: see `model.rank_kernels`. The latest rankings are cached.
        """
        if swept is not None:
            return self._rank_swept(problem, name, swept, compiled)
        return self._latest(problem, name, compiled, most)

    def _rank(self, problem: Problem, name: str, compiled: Ready | None, most: int | None) -> Ranking:
        fits_extents = extent_check(families.generator(name), problem, self.device)
        kernels, columns = self._feasible(problem, name, fits_extents, compiled)
        values = self.space(name).launch_values
        # The depths of the ring and of the epilogue do not restrict the launch.
        shapes = {model.grid_shape(kernel): kernel for kernel in kernels}.values()
        limited = parameters_read(families.generator(name).rules)
        place = name, *_kind(problem)
        if place not in self._fitting:
            self._fitting[place] = kernel_check(families.generator(name), problem, self.device)
        fits_kind = self._fitting[place]

        def fits(launch: Candidate) -> bool:  # the extents reject most candidates
            return fits_extents(launch) and fits_kind(launch)

        taken = {
            parameter: tuple(
                value
                for value in listed
                if value == listed[0]
                or parameter not in limited
                or any(fits(shape.with_launch(**{parameter: value})) for shape in shapes)
            )
            for parameter, listed in values.items()
        }
        ranked = model.rank_kernels(
            problem, kernels, taken, self.device, feasible=fits, columns=columns, most=most
        )
        if compiled is not None:
            orders = (self._in_each_order(item.candidate) for item in ranked)
            found = [next(c for c in each if self.is_compiled(problem, c, compiled)) for each in orders]
            ranked = [replace(item, candidate=c) for item, c in zip(ranked, found, strict=True)]
        return Ranking(taken, ranked, len(kernels))

    def _rank_swept(
        self, problem: Problem, name: str, swept: Collection[Candidate], compiled: Ready | None
    ) -> Ranking:
        """Rank recorded launches: a recording has few of each kernel, and the model's best stands for it."""
        fits_extents = extent_check(families.generator(name), problem, self.device)
        wanted = {candidate.kernel for candidate in swept}
        kernels = set(self._feasible(problem, name, fits_extents, compiled, wanted)[0])
        launches = sorted((c for c in swept if c.kernel in kernels), key=Candidate.to_json)
        best: dict[Candidate, model.Prediction] = {}
        for prediction in model.rank(problem, launches, self.device):
            best.setdefault(prediction.candidate.kernel, prediction)
        return Ranking(self.space(name).launch_values, list(best.values()), len(best))

    def is_compiled(self, problem: Problem, launch: Candidate, compiled: Ready) -> bool:
        """Whether a launch's kernel has an object."""
        # Most of the thousands of lookups for a product repeat those for the product before.
        known = self._objects.setdefault(_kind(problem), {})
        kernel = launch.family, launch.compile_params, launch.params.get(_ORDER)
        result = known.get(kernel)
        if result is None or result[1] is not compiled.shipped:
            key = families.generator(launch.family).kernel_key(problem, launch, self.device)
            shipped = compiled.shipped
            result = known[kernel] = digest(key), shipped, shipped is not None and key in shipped
        return result[0] in compiled.own or result[2]

    def _in_each_order(self, launch: Candidate) -> list[Candidate]:
        """Yield the launch, then launches with the same parameters that are other kernels."""
        orders = self.space(launch.family).launch_values.get(_ORDER, ())
        mine = launch.params.get(_ORDER)
        return [launch, *(launch.with_launch(**{_ORDER: order}) for order in orders if order != mine)]

    def _feasible(
        self,
        problem: Problem,
        name: str,
        fits_extents: Callable[[Candidate], bool],
        compiled: Ready | None,
        wanted: Collection[Candidate] | None = None,
    ) -> tuple[list[Candidate], Columns]:
        """Return a generator's feasible kernels and the model's columns. wanted: leaves out all other
        kernels."""
        if families.refusal_by_all(problem, [name]):
            return [], Columns.of([])
        kernels, columns = self._possible_of(problem, name)
        if compiled is not None:
            kernels, columns = self._compiled_of(problem, name, compiled)
        rows = [
            row
            for row, kernel in enumerate(kernels)
            if (wanted is None or kernel in wanted) and fits_extents(kernel) and self._is_wanted(kernel)
        ]
        return _taken(kernels, columns, rows)

    def _possible_of(self, problem: Problem, name: str) -> tuple[list[Candidate], Columns]:
        kind = (name, *kernel_facts(problem))
        if kind not in self._possible:
            family, space = families.generator(name), self.space(name)
            kernels = possible_kernels(family, space, problem, self.device, self._folder)
            self._possible[kind] = kernels, Columns.of(kernels)
        return self._possible[kind]

    def _compiled_of(self, problem: Problem, name: str, compiled: Ready) -> tuple[list[Candidate], Columns]:
        """Return the kernels compiled in any order of clusters; a kernel's key does not depend on extents."""
        kind = (name, *kernel_facts(problem))
        known = self._compiled.get(kind)
        if known is None or known[0] != compiled:
            kernels, columns = self._possible_of(problem, name)
            # Computing the keys of 20,000 kernels takes seconds. An object's key has the parameters by name.
            keys = [key for key in compiled.each_key() if key.get("family") == name]
            named = [n for n in self.space(name).compile_values if all(n in key for key in keys)]
            had = {tuple(key[n] for n in named) for key in keys}
            rows = [
                row
                for row, kernel in enumerate(kernels)
                if tuple(kernel.params[n] for n in named) in had
                and any(self.is_compiled(problem, item, compiled) for item in self._in_each_order(kernel))
            ]
            known = self._compiled[kind] = (compiled, *_taken(kernels, columns, rows))
        return known[1:]


def _taken(
    kernels: Sequence[Candidate], columns: Columns, rows: Sequence[int]
) -> tuple[list[Candidate], Columns]:
    """Some of the kernels, by their indices. Numpy reads the indices once, not once for each column."""
    return [kernels[row] for row in rows], columns.take(np.array(rows, dtype=np.int64))


def _kind(problem: Problem) -> tuple[str | int, ...]:
    """Return the facts of a problem that its kernels depend on, with the source of its epilogue, perhaps a
    user's."""
    function = problem.fused.function
    return *kernel_facts(problem), function.source if function else ""


def _usable(names: Sequence[str] | str | None, device: Device) -> tuple[str, ...]:
    """Return the requested families, or all that can work here, with a warning about others. Raises
    DeviceError if a requested family cannot, SpaceError if none is requested.
    """
    if names is not None and not (isinstance(names, Iterable) and (names := named(names))):
        raise SpaceError(
            f"families {shown(names)}: give names of {', '.join(families.NAMES)}, or None for all"
        )
    usable, missing = [], dict[str, list[str]]()
    for name in names or families.of_device(device):
        if names and (lack := families.refusal_here(name, device)):
            others = ", ".join(families.of_device(device))
            raise DeviceError(f"family {name!r} has no kernels for {device.name}: {lack}; use {others}")
        # The library's family always has torch.mm; asking for more would import torch, which takes a second.
        reason = None if name == TORCH_MM.family else families.get(name).unavailable()
        if reason is None:
            usable.append(name)
        elif names:
            raise DeviceError(f"family {name!r} cannot be used: {reason}")
        else:
            missing.setdefault(reason, []).append(name)
    for reason, left_out in missing.items():
        _log.warning("not tried: %s; %s", ", ".join(left_out), reason)
    return tuple(usable)
