"""Whether a candidate can be compiled and launched; of its speed this says nothing.

A rule is a function of (problem, candidate, device) that returns None, or a sentence with the numbers
that forbid it. Each rule states one physical cause, once. Families list their rules; this module runs them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunegemm.describe.device import Architecture, Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate, SearchSpace, Value

Rule = Callable[[Problem, Candidate, Device], str | None]

RESERVED_SMEM_BYTES = 1024
"""Shared memory that a multiprocessor keeps for each resident block (CUDA C++ Programming Guide)."""


@dataclass(frozen=True)
class Verdict:
    """Feasible, or the first rule that forbids the candidate and why."""

    rule: str | None = None
    """Name of the rule that rejected it; None when feasible."""
    reason: str = ""
    """One sentence with the numbers, such as ``smem 245760 B > 232448 B on sm_90``."""

    @property
    def feasible(self) -> bool:
        return self.rule is None

    def __bool__(self) -> bool:
        return self.feasible

    @property
    def runs(self) -> bool:
        """Whether it can be launched: what rules named ``..._fits`` reject is slower or says the same."""
        return self.rule is None or self.rule.endswith("_fits")

    def __str__(self) -> str:
        return "feasible" if self.feasible else f"{self.rule}: {self.reason}"


FEASIBLE = Verdict()


def apply_rules(rules: Sequence[Rule], problem: Problem, candidate: Candidate, device: Device) -> Verdict:
    """The verdict of the first rule that objects. A rule's name is its function's name."""
    for rule in rules:
        if (reason := rule(problem, candidate, device)) is not None:
            return Verdict(rule.__name__, reason)
    return FEASIBLE


class Remembered:
    """Rules for one problem on one device, each asked once about equal parameters: for many candidates.

    What a rule reads of a candidate is seen when it is asked; a candidate that agrees in that has the same
    verdict. So a rule is stated once, for one candidate, and costs thousands of them next to nothing.
    Several threads may ask: what is added to a tree is whole.
    """

    def __init__(self, rules: Sequence[Rule], problem: Problem, device: Device) -> None:
        self._problem, self._device = problem, device
        self._rules = list(rules)
        #: For each rule, by the value of what it reads first, a tree of what it reads then, or the
        #: verdict; the verdict alone of a rule that reads nothing; None of one that was not asked.
        self._known: list[Any] = [None] * len(rules)

    def __call__(self, candidate: Candidate) -> bool:
        """Whether no rule objects."""
        params = candidate.params
        # One loop without calls: a product asks this a hundred thousand times.
        for number, known in enumerate(self._known):
            while known is not None and known is not True and known is not False:
                name = known["reads"]
                value = getattr(candidate, name) if name in _WHOLE else params.get(name, MISSING)
                known = known["then"].get(value)
            if known is None:
                known = self._ask(number, candidate)
            if not known:
                return False
        return True

    def _ask(self, number: int, candidate: Candidate) -> bool:
        """Whether a rule allows what it was not asked yet; the verdict is remembered."""
        reason, read = ask(self._rules[number], self._problem, candidate, self._device)
        verdict = reason is None
        if read is None:
            return verdict
        node: Any = verdict
        for name, value in reversed(read.items()):
            node = {"reads": name, "then": {value: node}}
        self._known[number] = _merged(self._known[number], node)
        return verdict


def ask(
    rule: Rule, problem: Problem, candidate: Candidate, device: Device
) -> tuple[str | None, dict[str, Any] | None]:
    """What a rule says of a candidate, and what it read of it, in that order: any candidate that agrees in
    that is told the same. None in its place of a rule that may have read anything.
    """
    traced = _Traced(candidate)
    try:
        return rule(problem, traced, device), traced.read  # type: ignore[arg-type]
    except _ReadsAll:
        return rule(problem, candidate, device), None


def _merged(tree: Any, other: Any) -> Any:
    """A tree of verdicts with another branch: a rule reads in one order, so that they part at a value."""
    if not isinstance(tree, dict):
        return other
    for value, node in other["then"].items():
        tree["then"][value] = _merged(tree["then"].get(value), node)
    return tree


#: Stands for a parameter that a candidate does not have.
MISSING = object()
#: Of a candidate what may be read as one.
_WHOLE = ("compile_params", "launch_params")


class _Traced:
    """A candidate, and its parameters, that remember what was read of them, in that order."""

    def __init__(self, candidate: Candidate) -> None:
        self.family = candidate.family
        self.read: dict[str, Any] = {}
        self._candidate = candidate

    @property
    def params(self) -> _Traced:
        return self

    def __getitem__(self, name: str) -> Value:
        value = self._candidate.params.get(name, MISSING)
        self.read.setdefault(name, value)
        if value is MISSING:
            raise KeyError(name)
        return value  # type: ignore[return-value]

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def with_launch(self, **launch_params: Value) -> _Changed:
        return _Changed(self, launch_params)

    def watched(self, make: Callable[[Candidate], Any]) -> Any:
        """A dataclass that is made of the candidate's parameters, by their names: what is read of it is
        remembered as read of the candidate, so that most rules read a few fields of a kernel's config.
        """
        made = make(self._candidate)
        plain: Any = type(made)
        kind = _watched_class(plain)
        watched = object.__new__(kind)
        values = {name: getattr(made, name) for name in kind.watched_fields}
        watched.__dict__.update(values, _read_by=self.get)
        return watched

    def __getattr__(self, name: str) -> Any:
        if name not in _WHOLE:
            raise _ReadsAll
        value = getattr(self._candidate, name)
        self.read.setdefault(name, value)
        return value


@functools.cache
def _watched_class(kind: Any) -> Any:
    """A dataclass that says of each field that is read, also by its own properties, that it is."""

    class Watched(kind):  # type: ignore[misc]
        watched_fields = frozenset(kind.__dataclass_fields__)

        def __getattribute__(self, name: str) -> Any:
            if name in kind.__dataclass_fields__:
                read_by = object.__getattribute__(self, "__dict__").get("_read_by")
                if read_by is not None:  # None of a copy, for which all were read
                    read_by(name)
            return object.__getattribute__(self, name)

    return Watched


class _Changed:
    """A traced candidate with some parameters replaced, which are not read of it."""

    def __init__(self, traced: _Traced, changed: Mapping[str, Value]) -> None:
        self.family = traced.family
        self._traced, self._changed = traced, changed

    @property
    def params(self) -> _Changed:
        return self

    def __getitem__(self, name: str) -> Value:
        return self._changed[name] if name in self._changed else self._traced[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._changed[name] if name in self._changed else self._traced.get(name, default)

    def __getattr__(self, name: str) -> Any:
        raise _ReadsAll


def architecture(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """WGMMA and setmaxnreg exist on compute capability 9.0 only (PTX ISA, sm_90a)."""
    if device.architecture.capability != (9, 0):
        return f"{device.architecture.compile_target} has no WGMMA; {candidate.family} needs sm_90a"
    return None


def half_operands(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Some families' kernels multiply 16-bit operands only."""
    if problem.in_dtype not in ("bf16", "fp16"):
        return f"{candidate.family} has kernels for bf16 and fp16, not for {problem.in_dtype} operands"
    return None


def epilogue(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Some families' kernels take no epilogue."""
    if problem.epilogue:
        return f"{candidate.family} stores products as they are, without {problem.epilogue}"
    return None


def ring_depth(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """One stage is being multiplied: with 1 nothing could be loaded meanwhile."""
    if candidate["stages"] < 2:
        return f"{candidate['stages']} stage < 2: the ring never runs ahead of the tensor cores"
    return None


def no_power_of_two(candidate: Candidate, name: str, least: int, most: int | None = None) -> str | None:
    """Why a parameter is not a power of two within these; None where it is."""
    value = candidate[name]
    if value & (value - 1) or value < least or (most is not None and value > most):
        return f"{name} {value} is not a power of two from {least} {'on' if most is None else f'to {most}'}"
    return None


def alignment(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """An access of so many bytes faults at an address that is not a multiple of them."""
    if candidate["vector_bytes"] > problem.alignment:
        return f"vectors of {candidate['vector_bytes']} B > alignment {problem.alignment} B"
    return None


def vector_fits(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Narrower vectors than the operands allow copy the same bytes with more instructions."""
    if candidate["vector_bytes"] < problem.alignment:
        return f"vectors of {candidate['vector_bytes']} B < alignment {problem.alignment} B"
    return None


def exceeded_smem(smem_bytes: int, limits: Architecture, blocks: int = 1) -> str | None:
    """Why a block cannot have so much shared memory, or a multiprocessor so many; None where they can."""
    if smem_bytes > limits.smem_bytes_per_block:
        return f"smem {smem_bytes} B > {limits.smem_bytes_per_block} B on {limits.compile_target}"
    together = blocks * (smem_bytes + RESERVED_SMEM_BYTES)
    if together > limits.smem_bytes_per_sm:
        return (
            f"{blocks} x ({smem_bytes} + {RESERVED_SMEM_BYTES}) B smem > {limits.smem_bytes_per_sm} B of a "
            f"multiprocessor of {limits.compile_target}"
        )
    return None


def tma_alignment(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """TMA needs 16-byte strides: the contiguous extent of each operand, in bytes, is a multiple of 16.

    CUDA driver API, cuTensorMapEncodeTiled: `globalStrides` must be multiples of 16. This looks at
    packed operands; a view with its own leading dimension is checked where its strides are known.
    """
    in_bytes, out_bytes = DTYPE_BYTES[problem.in_dtype], DTYPE_BYTES[problem.out_dtype]
    for operand, mode, element_bytes in (
        ("A", problem.a_major, in_bytes),
        ("B", problem.b_major, in_bytes),
        ("D", problem.out_major, out_bytes),
    ):
        columns = problem.out_n if operand == "D" else problem.n
        extent = {"m": problem.m, "n": columns, "k": problem.k}[mode]
        if extent * element_bytes % 16:
            row_bytes = extent * element_bytes
            return (
                f"{operand} rows of {extent} x {element_bytes} B = {row_bytes} B, "
                "not a multiple of the 16 B that TMA needs"
            )
    if problem.alignment < 16:
        return f"operands aligned to {problem.alignment} B, less than the 16 B that TMA needs"
    return None


def refusal(rules: Sequence[Rule], family: str, problem: Problem) -> str:
    """Why no kernel of a family can have the problem, on any device; empty where that depends on either."""
    nothing = _Partial(family, {})
    for rule in rules:
        with contextlib.suppress(_ReadsAll):
            if (reason := rule(problem, nothing, nothing)) is not None:  # type: ignore[arg-type]
                return reason
    return ""


def plausible_kernels(
    space: SearchSpace, rules: Sequence[Rule], problem: Problem, device: Device
) -> Iterator[Candidate]:
    """The kernels of a space, in its order, without what a rule rejects by a few of their parameters alone.

    A million kernels are in the lists of `cute_sm90`, and a rule that reads nothing but `tile_k` rejects
    half of them for one problem. Which parameters a rule reads is seen when it looks at the first kernel; it
    is then asked about each combination of their values, once. What reads all, such as a kernel's
    configuration, is left to `apply_rules`.
    """
    family, kernels = space.family, space.compile_values
    names = list(kernels)
    first = {name: values[0] for name, values in kernels.items()}
    dead: list[tuple[tuple[int, ...], set[tuple[Value, ...]]]] = []
    for rule in rules:
        reads = _Partial(family, first)
        try:
            rule(problem, reads, device)  # type: ignore[arg-type]
        except _ReadsAll:
            continue
        read = [name for name in names if name in reads.read]
        rejected = set()
        for values in itertools.product(*(kernels[name] for name in read)):
            with contextlib.suppress(_ReadsAll):
                part = _Partial(family, dict(zip(read, values, strict=True)))
                if rule(problem, part, device) is not None:  # type: ignore[arg-type]
                    rejected.add(values)
        if rejected:
            dead.append((tuple(names.index(name) for name in read), rejected))
    alive = [list(values) for values in kernels.values()]
    for places, rejected in [one for one in dead if len(one[0]) == 1]:
        alive[places[0]] = [value for value in alive[places[0]] if (value,) not in rejected]
    pairs = [one for one in dead if len(one[0]) != 1]
    in_order = sorted(range(len(names)), key=names.__getitem__)
    for values in itertools.product(*alive):
        if any(tuple([values[place] for place in places]) in rejected for places, rejected in pairs):
            continue
        yield Candidate(family, tuple([(names[place], values[place]) for place in in_order]))


class _ReadsAll(Exception):
    """A rule asks for more than a few parameters by name."""


class _Partial:
    """Some parameters of a kernel, which remembers those that were read."""

    def __init__(self, family: str, values: Mapping[str, Value]) -> None:
        self.family, self.read = family, set[str]()
        self._values = values

    def __getitem__(self, name: str) -> Value:
        self.read.add(name)
        if name not in self._values:
            raise _ReadsAll
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        raise _ReadsAll
