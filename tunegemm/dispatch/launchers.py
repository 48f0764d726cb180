"""Makes launchers from records, and from launchers the *plan* of a key: the prepared launch of its products.

Kernels come from the object store; nothing is compiled here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch.forms import ALIGNMENT, Call, Form, Operands, Refusal, seen_as
from tunegemm.dispatch.guards import REDUCTIONS, grad_enabled, reductions_allowed
from tunegemm.errors import ArtifactError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import is_torch, reduces_in_16_bits, splits_k
from tunegemm.generate.launching import (
    AddressLaunch,
    AddressLauncher,
    Launcher,
    WordsOf,
    tma_takes,
    words_binder,
)
from tunegemm.store import packs
from tunegemm.store.checks import record_objection
from tunegemm.store.record import Record


@dataclass(frozen=True)
class Prepared:
    """A launcher for one problem on one device, and its requirements on operands."""

    launch: Launcher | None = None
    """None if torch itself is the recorded winner."""
    tma: bool = False
    """Whether it reads through TMA: needs 16-byte addresses and strides."""
    packed: bool = False
    """Needs dense operands: a library's algorithm was chosen and timed for these leading dimensions."""
    record: Record | None = None
    """The record it was prepared from; None in `TORCH`."""
    compiling: str = ""
    """The name of the record's kernel while it is being compiled; there is no launcher until then."""
    waiting: set[tuple[Any, ...]] = field(default_factory=set, compare=False)
    """Keys of plans that fall back until it is compiled."""

    @property
    def address_bytes(self) -> int:
        """The alignment that addresses need, besides the problem's alignment of a and b."""
        return ALIGNMENT if self.tma or self.packed else 1


TORCH = Prepared()

_MAX_SERVED = 1024
#: The most recently served launchers. They are reused when records are read again.
_served: dict[tuple[Problem, Candidate, str, int, Path | None], Launcher] = {}
#: Launchers that cannot keep their own kernel loaded.
_kept: list[Launcher] = []


def prepare(record: Record, device: Device) -> Prepared:
    """The launcher of a record.

    Raises TunegemmError, ValueError or RuntimeError if the kernel cannot run here: its family's packages
    are missing, its object is not in the store or was changed, or it fails to load.
    """
    problem, candidate = record.problem, record.candidate
    if is_torch(candidate):
        return TORCH
    family, path = families.get(candidate.family), find_object(record, device)
    key = (problem, candidate, device.spec, device.sm_count, path)
    if (launch := _served.get(key)) is None:
        if len(_served) >= _MAX_SERVED:
            _served.clear()
        launch = _served[key] = family.load(problem, candidate, device, path)
        # Captured graphs run the kernel, and the compiler's runtime unloads it with its last reference.
        (getattr(launch, "keep", None) or partial(_kept.append, launch))()
    # If TMA does not take a problem's operands, the family copies them.
    return Prepared(launch, tma=family.tma and tma_takes(problem), packed=not family.compiled)


def find_object(record: Record, device: Device) -> Path | None:
    """The compiled object with the record's kernel; None for a library's kernel, which needs none.

    Raises ArtifactError if the kernel cannot run here.
    """
    problem, candidate = record.problem, record.candidate
    family = families.get(candidate.family)
    if (missing := family.unavailable(launching=True)) is not None:
        raise ArtifactError(missing)
    if wrong := record_objection(record, device):
        raise ArtifactError(f"its record cannot run here: {wrong}")
    if not family.compiled:
        return None
    artifact = packs.find(family.kernel_key(problem, candidate, device))
    if artifact is None:
        raise ArtifactError("its compiled kernel is not in the object store")
    return artifact.path


@dataclass(frozen=True, slots=True)
class Plan:
    """How products of one key are launched."""

    launch: Launcher
    """Takes tensors in the shapes of `views`."""
    launch_at: AddressLaunch | None
    """Takes their addresses instead; None if the launcher needs tensors."""
    output: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    """Shape, strides and dtype of the result."""
    views: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """Shapes of a, b and the output as the kernel sees them."""
    spans: tuple[int, int, int]
    """Bytes spanned by a, b and the output."""
    address_bytes: int
    """The alignment that the address of the caller's output needs."""
    device: torch.device
    guarded: bool
    """Whether the device may not be the current one, as on a host of several GPUs."""
    words: WordsOf | None = None
    """Reads epilogue operands for `launch_at`; None if one of them is missing."""
    operand_views: tuple[tuple[int, ...], ...] = ()
    """Shapes of an epilogue's tensors as the kernel sees them."""
    reduces: bool = False
    """Whether it is a library algorithm that torch's reduction settings may forbid."""
    problem: Problem | None = field(default=None, compare=False)
    record: Record | None = field(default=None, compare=False)
    """The problem its kernel was recorded or predicted for."""


def refusal_of(prepared: Prepared, operands: Operands, a: torch.Tensor, b: torch.Tensor) -> Refusal | None:
    """Why a launcher does not take these operands; None if it does."""
    if prepared.tma and operands.tma_refusal:
        return Refusal(operands.tma_refusal)
    if prepared.packed and not operands.packed:
        return Refusal("")
    if (a.data_ptr() | b.data_ptr()) % prepared.address_bytes:
        return Refusal("")
    if reduces(prepared):
        assert prepared.record is not None
        in_16_bits, splits = reductions_allowed(a.dtype)
        sums = reduces_in_16_bits(operands.problem, prepared.record.candidate)
        if not splits or (sums and not in_16_bits):  # the partial results of split k
            return Refusal("")
    return None


def reduces(prepared: Prepared) -> bool:
    """Whether it is a library algorithm that splits k."""
    record = prepared.record
    return record is not None and record.candidate.family == "cublaslt" and splits_k(record.candidate)


def make_plan(prepared: Prepared, operands: Operands, call: Call) -> Plan:
    """The plan of a launcher that takes these operands (`refusal_of`); b is (k, n).

    Raises the launcher's errors for unsuitable strides.
    """
    form, a, b, tensors, numbers, out = call
    problem, launch, views = operands.problem, prepared.launch, operands.views
    assert launch is not None
    launch_at, words = None, None
    example = a.new_empty(operands.out_shape, dtype=form.out_dtype_of(a)) if out is None else out
    if isinstance(launch, AddressLauncher) and not example.data_ptr() % ALIGNMENT:
        a_shape, b_shape, out_shape = views
        launch_at = launch.of(seen_as(a, a_shape), seen_as(b, b_shape), example.view(out_shape))
        if problem.fused.words:
            seen = [tensor.view(shape) for tensor, shape in zip(tensors, operands.shapes, strict=True)]
            words = words_binder(problem, form.join(seen, numbers))
    if (a.numel(), b.numel()) != (math.prod(views[0]), math.prod(views[1])):  # one matrix serves a batch
        launch, views = partial(_expanded, launch, views), (tuple(a.shape), tuple(b.shape), views[2])
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
        operands.shapes,
        reduces(prepared) and a.dtype in REDUCTIONS,
        problem,
        prepared.record,
    )


def launch_plan(
    plan: Plan,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    form: Form,
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[float],
) -> None:
    """Launch a kernel on the operands, with its device as the current one."""
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


def _expanded(launch: Launcher, views: Any, a: Any, b: Any, out: Any, *operands: Any) -> None:
    """Launch with a single matrix expanded to a batch."""
    launch(seen_as(a, views[0]), seen_as(b, views[1]), out, *operands)


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
    """Whether an output's storage shares no memory with those of an epilogue's tensors. Two storages may
    share memory: DLPack and buffers create a new storage each time.
    """
    storage = out.untyped_storage()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    for tensor in tensors:
        other = tensor.untyped_storage()
        address = other.data_ptr()
        if address < end and start < address + other.nbytes():
            return False
    return True
