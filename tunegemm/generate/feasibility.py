"""Decides whether a candidate can be compiled and launched; says nothing about its speed.

A `Rule` states one physical cause, once. It is a function of (problem, candidate, device) that returns None,
or a sentence with the numbers that forbid the candidate. It declares what it reads: candidates that agree in
that share one verdict, so one call decides for thousands of them. Families list their rules, the cheapest
first; this module applies them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from tunegemm.describe.architectures import Architecture
from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import SpaceError

Objection = Callable[[Problem, Candidate, Device], str | None]

EXTENTS = frozenset({"m", "n", "k", "batch"})
"""Fields of a problem that change from one product to the next; a kernel is compiled for all of them."""
RESERVED_SMEM_BYTES = 1024
"""Shared memory that a multiprocessor keeps for each resident block (CUDA C++ Programming Guide)."""

_OF_PROBLEM = frozenset(Problem.__dataclass_fields__)


@dataclass(frozen=True)
class Rule:
    """One limit on candidates. `rule` makes a Rule from a function, whose docstring states the cause."""

    name: str
    reads: frozenset[str]
    """What the rule reads: parameters of the candidate, fields of the problem, and ``device``."""
    objection: Objection
    """Returns one sentence with the numbers that forbid a candidate; None if the rule allows it."""
    runs: bool = False
    """Whether rejected candidates compile and launch all the same, but only repeat another candidate, compute
    nothing, or are worth less than another."""

    def __call__(self, problem: Problem, candidate: Candidate, device: Device) -> str | None:
        """The objection to a candidate; None if the rule allows it. Raises SpaceError if it fails."""
        try:
            return self.objection(problem, candidate, device)
        except Exception as error:  # another package's code, or a value that no kernel has
            why = f"{type(error).__name__}: {error}"
            raise SpaceError(
                f"rule {self.name} of {candidate} fails ({why}); mend the rule, or the candidate's parameters"
            ) from error

    @property
    def cause(self) -> str:
        """Why the rule exists: the docstring of its function."""
        return inspect.getdoc(self.objection) or ""

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the candidate's parameters that the rule reads, sorted; a family may lack some."""
        return tuple(sorted(self.reads - _OF_PROBLEM - {"device"}))

    @property
    def reads_extents(self) -> bool:
        """Whether the rule reads m, n, k or batch. If not, its verdict holds for all extents."""
        return not self.reads.isdisjoint(EXTENTS)


def rule(*reads: str, runs: bool = False) -> Callable[[Objection], Rule]:
    """A decorator that makes a `Rule` of a function and its name. reads, runs: see `Rule`."""

    def make(objection: Objection) -> Rule:
        return Rule(objection.__name__, frozenset(reads), objection, runs)

    return make


@dataclass(frozen=True)
class Verdict:
    """Feasible, or the first rule that forbids the candidate and its reason."""

    rule: str | None = None
    """Name of the rule that rejected the candidate; None if it is feasible."""
    reason: str = ""
    """One sentence with the numbers, such as ``smem 245760 B > 232448 B on sm_90``."""
    runs: bool = False
    """Whether the candidate compiles and launches: it is feasible, or the rule that forbids it has
    `Rule.runs`."""

    @property
    def feasible(self) -> bool:
        return self.rule is None

    def __bool__(self) -> bool:
        return self.feasible

    def __str__(self) -> str:
        return "feasible" if self.feasible else f"{self.rule}: {self.reason}"


FEASIBLE = Verdict(runs=True)


def apply_rules(rules: Iterable[Rule], problem: Problem, candidate: Candidate, device: Device) -> Verdict:
    """The verdict of the first rule that objects; `FEASIBLE` if no rule does."""
    for one in rules:
        if (reason := one(problem, candidate, device)) is not None:
            return Verdict(one.name, reason, one.runs)
    return FEASIBLE


class Remembered:
    """Rules for one problem on one device, with cached verdicts, to check many candidates.

    Each rule runs once for equal parameters. Threads may share it: at worst a rule runs twice.
    """

    def __init__(self, rules: Iterable[Rule], problem: Problem, device: Device) -> None:
        self._problem, self._device = problem, device
        #: Each rule, the parameters that it reads, and whether it allows the values seen so far.
        self._rules: list[tuple[Rule, tuple[str, ...], dict[tuple[Value | None, ...], bool]]] = [
            (one, one.parameters, {}) for one in rules
        ]

    def __call__(self, candidate: Candidate) -> bool:
        """Whether no rule objects."""
        get = candidate.params.get
        for one, names, known in self._rules:
            values = tuple([get(name) for name in names])
            allowed = known.get(values)
            if allowed is None:
                reason = one(self._problem, candidate, self._device)
                allowed = known[values] = reason is None
            if not allowed:
                return False
        return True


def refusal_on(rules: Iterable[Rule], family: str, device: Device) -> str:
    """Why a family has no kernel at all for a device; empty if it may have some."""
    of_device = [one for one in rules if one.reads == {"device"}]  # they read no problem
    return apply_rules(of_device, None, Candidate(family, ()), device).reason  # type: ignore[arg-type]


def refusal(rules: Iterable[Rule], family: str, problem: Problem) -> str:
    """Why no kernel of a family can compute the problem on any device; empty if some kernel may."""
    of_problem = [one for one in rules if one.reads <= _OF_PROBLEM]  # they read no device
    return apply_rules(of_problem, problem, Candidate(family, ()), None).reason  # type: ignore[arg-type]


def parameters_read(rules: Iterable[Rule]) -> frozenset[str]:
    """The parameters that decide feasibility; the values of all others are equally feasible."""
    return frozenset(name for one in rules for name in one.parameters)


@rule("device")
def architecture(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """WGMMA and setmaxnreg exist on compute capability 9.0 only (PTX ISA, sm_90a)."""
    if not device.architecture.wgmma:
        return f"{device.architecture.compile_target} has no WGMMA; {candidate.family} needs sm_90a"
    return None


@rule("in_dtype")
def half_operands(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Some families only have kernels for 16-bit operands."""
    if problem.in_dtype not in ("bf16", "fp16"):
        return f"{candidate.family} has kernels for bf16 and fp16, not for {problem.in_dtype} operands"
    return None


@rule("epilogue")
def epilogue(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Some families have no kernels with an epilogue."""
    if problem.epilogue:
        return f"{candidate.family} stores products as they are, without {problem.epilogue}"
    return None


@rule("groups")
def rows_together(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Rows in groups, each with its own B, need a kernel that reads the ends of the groups."""
    if problem.groups:
        return f"{candidate.family} multiplies all rows by one B, not {problem.groups} groups by their own"
    return None


@rule("stages")
def ring_depth(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """The tensor cores use one stage, so a ring of one stage could load nothing meanwhile."""
    if candidate["stages"] < 2:
        return f"{candidate['stages']} stage < 2: the ring never runs ahead of the tensor cores"
    return None


def no_power_of_two(candidate: Candidate, name: str, least: int, most: int | None = None) -> str | None:
    """Why a parameter is not a power of two within these bounds; None if it is."""
    value = candidate[name]
    if value & (value - 1) or value < least or (most is not None and value > most):
        return f"{name} {value} is not a power of two from {least} {'on' if most is None else f'to {most}'}"
    return None


@rule("vector_bytes", "alignment")
def alignment(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A vector access faults at an address that is not a multiple of the vector's size."""
    if candidate["vector_bytes"] > problem.alignment:
        return f"vectors of {candidate['vector_bytes']} B > alignment {problem.alignment} B"
    return None


@rule("vector_bytes", "alignment", runs=True)
def vector_width(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Narrower vectors than the operands allow copy the same bytes with more instructions."""
    if candidate["vector_bytes"] < problem.alignment:
        return f"vectors of {candidate['vector_bytes']} B < alignment {problem.alignment} B"
    return None


def exceeded_threads(threads: int, limits: Architecture, blocks: int) -> str | None:
    """Why a block cannot have these threads, or a multiprocessor these blocks; None if they can."""
    if threads > limits.threads_per_block:
        return f"{threads} threads > {limits.threads_per_block} of a block"
    if threads * blocks > limits.threads_per_sm:
        return f"{blocks} x {threads} threads > {limits.threads_per_sm}"
    return None


def register_budget(threads: int, limits: Architecture, blocks: int) -> int:
    """Registers of a thread if `blocks` blocks share a multiprocessor."""
    return min(limits.registers_per_thread, limits.registers_per_sm // (threads * blocks) // 8 * 8)


def exceeded_wgmma(columns: int, registers: int, threads: object) -> str | None:
    """Why ptxas cannot place a WGMMA of 64 rows within the registers that threads are launched with, whatever
    setmaxnreg adds later (error C7602); None if it can. It asks for 26 beside the instruction's accumulators.
    """
    need = columns // 2 + 26
    if need > registers:
        return f"WGMMA 64x{columns} needs {need} registers > {registers} for {threads} threads"
    return None


def exceeded_smem(smem_bytes: int, limits: Architecture, blocks: int = 1) -> str | None:
    """Why a block cannot have this shared memory, or a multiprocessor these blocks; None if they can."""
    if smem_bytes > limits.smem_bytes_per_block:
        return f"smem {smem_bytes} B > {limits.smem_bytes_per_block} B on {limits.compile_target}"
    together = blocks * (smem_bytes + RESERVED_SMEM_BYTES)
    if together > limits.smem_bytes_per_sm:
        return (
            f"{blocks} x ({smem_bytes} + {RESERVED_SMEM_BYTES}) B smem > {limits.smem_bytes_per_sm} B of a "
            f"multiprocessor of {limits.compile_target}"
        )
    return None


@rule("m", "n", "k", "in_dtype", "out_dtype", "a_major", "b_major", "out_major", "alignment", "epilogue")
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
