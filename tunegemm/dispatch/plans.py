"""Plans: how they are made of a launcher, launched, and kept."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from tunegemm.choose.policies import FASTEST, Policy
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.forms import Form, Named
from tunegemm.dispatch.guards import REDUCTIONS, grad_enabled, reductions_allowed
from tunegemm.dispatch.launchers import Prepared
from tunegemm.dispatch.operands import ALIGNMENT, Refusal, seen_as
from tunegemm.generate.cublaslt import reduces_in_16_bits, splits_k
from tunegemm.generate.launching import AddressLaunch, AddressLauncher, Launcher, WordsOf, words_binder
from tunegemm.store.record import Record


@dataclass(frozen=True, slots=True)
class Plan:
    """How products of one key are launched."""

    launch: Launcher
    """Takes tensors in the shapes of `views`."""
    launch_at: AddressLaunch | None
    """Takes their addresses instead; None where the launcher wants tensors."""
    output: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    """Shape, strides and dtype of the result."""
    views: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """Shapes of a, b and the output as the kernel sees them."""
    spans: tuple[int, int, int]
    """Bytes spanned by a, b and the output."""
    address_bytes: int
    """What the address of a given output must be a multiple of."""
    device: torch.device
    guarded: bool
    """Whether the device may not be the current one, as on a host of several GPUs."""
    words: WordsOf | None = None
    """What `launch_at` takes for the operands of an epilogue; None where there are none, or that is."""
    operand_views: tuple[tuple[int, ...], ...] = ()
    """Shapes of an epilogue's tensors as the kernel sees them."""
    reduces: bool = False
    """Whether it is an algorithm of the library that torch's settings of reductions may forbid."""
    problem: Problem | None = field(default=None, compare=False)
    record: Record | None = field(default=None, compare=False)
    """What its kernel was recorded for, or predicted."""


@dataclass(frozen=True, slots=True)
class Recent:
    """A plan with a check of whether operands are what it was made for.

    The check compares types, dispatch keys (functorch, tracing, autocast, inference mode), dtypes, devices,
    shapes, strides and `requires_grad`.
    """

    check: Callable[..., bool]
    plan: Plan | None
    launch: AddressLaunch | None
    """The plan's `launch_at`; None where products are torch's."""
    torchs: Callable[..., Any] | None
    """Torch's one function of the call's tensors, where it has one: what computes products without a plan."""
    requires_grad: bool
    """Whether an operand requires grad: not for a launch alone in grad mode."""
    bumps_version: bool
    """Whether a given output counts its versions: it is not an inference tensor."""
    device_index: int
    """Which device must be the current one; -1 where there is but one."""


class Compiling(NamedTuple):
    """A kernel that a problem waits for."""

    kernel: str
    """Its name."""
    record: Record

    waiting: set[tuple[Any, ...]]
    """Keys of plans that fall back to torch until then."""
    launch: None = None
    """As in `Prepared`, which takes its place."""

    @property
    def ratio(self) -> float:
        """As in `Prepared`."""
        return self.record.ratio


class Composed:
    """In the place of a plan: no kernel computes the product as a whole, but a tuned one without the rest."""

    def __bool__(self) -> Literal[False]:
        return False


COMPOSED = Composed()


class State:
    """What is read from disk and made of it under one policy; replaced as a whole by `Planner.refresh`."""

    def __init__(
        self, policy: Policy = FASTEST, snapshot: Snapshot | None = None, modified: Hashable = None
    ) -> None:
        self.policy = policy
        self.plans: dict[tuple[Any, ...], Plan | Composed | None] = {}
        self.recent: dict[Hashable, Recent] = {}
        """Calls without a key, by hints; `Recent.check` decides. First the address of `b` and the form's tag;
        then that, the elements of `a` and the strides of `b`: a weight's products alternate where batch sizes
        do, and those of its input's gradient are between them; then the key of the plan, which layers share.
        By the sites of compiled code, too, which need no check: there `torchs` takes ``out``."""
        self.launches: dict[Any, dict[Hashable, Any]] = {}
        """What rooms above keep, by their `extension.LaunchCache`."""
        self.snapshot = snapshot
        self.modified = modified
        self.prepared: dict[tuple[Problem, int], Prepared | Compiling | None] = {}
        self.misses: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        """Ranges of rows at which nothing serves a weight, by `weight_of` and device; the same lists by what
        a call is but for its rows."""

    def make_room(self, most: int) -> None:
        """Forgets the older half of the plans, and of what they are made of, if there are so many."""
        for kept in (self.plans, self.prepared, self.misses):
            if len(kept) >= most:
                for key in list(itertools.islice(kept, len(kept) // 2 + 1)):
                    del kept[key]
                self.forget_checks()

    def wait_for(self, kernel: str, failed: Plan) -> None:
        """A launch failed whose kernel is compiled now: plans of the same kernel are torch's until then."""
        index = failed.device.index or 0
        for key, plan in list(self.plans.items()):
            if isinstance(plan, Plan) and plan.device == failed.device and _share_a_kernel(plan, failed):
                assert plan.problem is not None and plan.record is not None
                self.plans[key] = None
                self.wait(plan.problem, index, kernel, plan.record).add(key)
        self.forget_checks()

    def wait(self, problem: Problem, index: int, kernel: str, record: Record) -> set[tuple[Any, ...]]:
        """The keys of plans that wait for a kernel that is being compiled for a problem."""
        known = self.prepared.get((problem, index))
        waiting = known.waiting if isinstance(known, Compiling) else set()
        self.prepared[problem, index] = Compiling(kernel, record, waiting)
        return waiting

    def forget_missing(self, kernel: str) -> None:
        """Plans that fell back for want of a kernel are made again."""
        for place, one in list(self.prepared.items()):
            if isinstance(one, Compiling) and one.kernel == kernel:
                del self.prepared[place]
                for key in one.waiting:
                    if not self.plans.get(key, key):
                        del self.plans[key]
        self.forget_checks()

    def forget(self, problem: Problem) -> None:
        """Plans of a problem are made again; those that fell back to torch, too: they name no problem."""
        self.misses.clear()
        self.prepared = {place: one for place, one in self.prepared.items() if place[0] != problem}
        self.plans = {key: plan for key, plan in self.plans.items() if plan and plan.problem != problem}
        self.forget_checks()

    def forget_checks(self) -> None:
        """Every call makes a key again."""
        self.recent.clear()
        for cache, known in self.launches.items():
            if cache.of_products:
                known.clear()


def refusal_of(prepared: Prepared, asked: Named, a: torch.Tensor, b: torch.Tensor) -> Refusal | None:
    """Why a launcher does not take these operands, if so."""
    operands = asked.operands
    if prepared.tma and operands.tma_refusal:
        return Refusal(operands.tma_refusal)
    if prepared.packed and not operands.packed:
        return Refusal("")
    if (a.data_ptr() | b.data_ptr()) % prepared.address_bytes:
        return Refusal("")
    if reduces(prepared) and not _may_reduce(operands.problem, prepared, a.dtype):
        return Refusal("")
    return None


def reduces(prepared: Prepared) -> bool:
    """Whether it is an algorithm of the library that splits k."""
    return prepared.record is not None and splits_k(prepared.record.candidate)


def _may_reduce(problem: Problem, prepared: Prepared, dtype: torch.dtype) -> bool:
    """Whether torch's settings let its library add up what its splits of k give, as this algorithm does."""
    in_16_bits, splits = reductions_allowed(dtype)
    assert prepared.record is not None
    return splits and (in_16_bits or not reduces_in_16_bits(problem, prepared.record.candidate))


def make_plan(
    prepared: Prepared,
    asked: Named,
    form: Form,
    a: torch.Tensor,
    b: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[float],
    out: torch.Tensor | None,
) -> Plan:
    """The plan of a launcher that takes these operands (`refusal_of`); b is (k, n).

    Raises what the launcher raises of strides.
    """
    operands, shapes = asked.operands, asked.shapes
    problem, launch, views = operands.problem, prepared.launch, operands.views
    assert launch is not None
    launch_at, words = None, None
    example = a.new_empty(operands.out_shape, dtype=form.out_dtype_of(a)) if out is None else out
    if isinstance(launch, AddressLauncher) and not example.data_ptr() % ALIGNMENT:
        a_shape, b_shape, out_shape = views
        launch_at = launch.of(seen_as(a, a_shape), seen_as(b, b_shape), example.view(out_shape))
        if problem.fused.words:
            seen = [tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=True)]
            words = words_binder(problem, form.join(seen, numbers))
    if (a.numel(), b.numel()) != (math.prod(views[0]), math.prod(views[1])):  # one matrix for a batch
        launch, views = expanding(launch, views), (tuple(a.shape), tuple(b.shape), views[2])
    return Plan(
        launch,
        launch_at,
        (operands.out_shape, tuple(example.stride()), example.dtype),
        views,
        operands.spans,
        prepared.address_bytes,
        a.device,
        a.device.type == "cuda" and torch.cuda.device_count() > 1,
        words,
        shapes,
        reduces(prepared) and a.dtype in REDUCTIONS,
        problem,
        prepared.record,
    )


def _share_a_kernel(plan: Plan, other: Plan) -> bool:
    """Or differ in dtypes and majors alone."""
    if plan.record is None or other.record is None:
        return False
    return plan.record.candidate.kernel == other.record.candidate.kernel


def launch_plan(
    plan: Plan,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    form: Form,
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[float],
) -> None:
    """Launches a kernel on the operands; its device is the current one meanwhile."""
    if plan.guarded and torch.cuda.current_device() != plan.device.index:
        with torch.cuda.device(plan.device):
            launch_plan(plan, a, b, out, form, tensors, numbers)
        return
    if plan.launch_at is not None:
        words = () if plan.words is None else plan.words(tensors, numbers)
        if words is None:  # pragma: no cover - the key tells alignments apart
            raise ValueError("an operand of the epilogue is not aligned")
        plan.launch_at(a.data_ptr(), b.data_ptr(), out.data_ptr(), *words)
        return
    a_shape, b_shape, out_shape = plan.views
    operands: Sequence[Any] = ()
    if plan.operand_views or numbers:
        seen = [tensor.view(shape) for tensor, shape in zip(tensors, plan.operand_views, strict=True)]
        operands = form.join(seen, numbers)
    plan.launch(a.view(a_shape), b.view(b_shape), out.view(out_shape), *operands)


def expanding(launch: Launcher, views: tuple[tuple[int, ...], ...]) -> Launcher:
    """A launcher of operands one of which is a single matrix."""
    a_shape, b_shape, _ = views

    def launch_on_views(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *operands: Any) -> None:
        launch(seen_as(a, a_shape), seen_as(b, b_shape), out, *operands)

    return launch_on_views


def is_writable(plan: Plan, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether a kernel may write into `out`: allowed by autograd, aligned, apart from the operands."""
    return (
        not (grad_enabled() and out.requires_grad)
        and not (out.is_inference() and not torch.is_inference_mode_enabled())  # torch forbids it
        and are_apart(plan, a.data_ptr(), b.data_ptr(), out.data_ptr())
    )


def are_apart(plan: Plan, a: int, b: int, out: int) -> bool:
    """Whether an output at an address is aligned, and shares no memory with the operands."""
    a_span, b_span, span = plan.spans
    return (
        not out % plan.address_bytes
        and (out >= a + a_span or a >= out + span)
        and (out >= b + b_span or b >= out + span)
    )


def is_apart_from(out: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether an output's storage shares no memory with those of an epilogue's tensors. Two storages may:
    memory that came by DLPack or a buffer has a new one each time.
    """
    storage = out.untyped_storage()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    for tensor in tensors:
        other = tensor.untyped_storage()
        address = other.data_ptr()
        if address < end and start < address + other.nbytes():
            return False
    return True
