"""From a call to a launch: one dictionary look-up per product once its plan is known.

A *plan* is the prepared launch for one key of shapes, strides, dtypes, devices and, below 16, the bytes that
addresses are multiples of; None says that torch computes products of that key. Plans are made on the first
call of a key, under a lock, and are then read without one. Nothing is compiled or tuned here, and nothing is
read or loaded while the current stream records a CUDA graph: a product without a plan is then torch's.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from tunegemm.device import Device, find_device
from tunegemm.dispatch.launchers import Prepared, prepare
from tunegemm.dispatch.modes import Mode, begin_recording, read_mode, read_policy
from tunegemm.dispatch.online import OnlineTuning
from tunegemm.dispatch.operands import ALIGNMENT, Refusal, describe
from tunegemm.dispatch.policies import FASTEST, Policy
from tunegemm.dispatch.selection import Rival, read_rivals, select
from tunegemm.dispatch.snapshot import Record, Snapshot, read_snapshot
from tunegemm.errors import DatabaseError, DeviceError, TunegemmError, TunegemmWarning, WorkloadError
from tunegemm.families import Launcher
from tunegemm.problem import Problem

# Subclasses (fake tensors, DTensor, quantized and user-made ones) give torch.matmul their own meaning.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))

# Bound once: each is a call of 25-90 ns, where `torch.x.y` would cost as much again in look-ups.
_grad_enabled = torch.is_grad_enabled
_deterministic = torch._C._get_deterministic_algorithms
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state
_any_autocast = torch._C._is_any_autocast_enabled

#: Keys kept before all plans are dropped: a bound for programs whose shapes never repeat.
MAX_PLANS = 65536

_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Plan:
    """How products of one key are launched."""

    launch: Launcher
    out_shape: tuple[int, ...]
    rows: tuple[int, int] | None
    """(m, k) when the first operand is viewed as a matrix before the launch."""
    matrix: tuple[int, int]
    """(m, n): the output as the kernel sees it, when `rows` is given."""
    spans: tuple[int, int, int]
    """Bytes spanned by a, b and the output."""
    address_bytes: int
    """What the address of a given output must be a multiple of."""
    device: torch.device
    guarded: bool
    """Whether the device may not be the current one, as on a host of several GPUs."""


class _State:
    """What is read from disk and made of it under one policy; replaced as a whole by `Dispatcher.refresh`."""

    def __init__(self, policy: Policy = FASTEST, snapshot: Snapshot | None = None) -> None:
        self.policy = policy
        self.plans: dict[tuple[Any, ...], Plan | None] = {}
        self.snapshot = snapshot
        self.devices: dict[int, Device | None] = {}
        self.prepared: dict[tuple[Problem, int], Prepared | None] = {}
        self.warned: set[str] = set()
        self.untuned: tuple[Problem, Device] | None = None
        """What the plan that is being made would gain from tuning online."""


class Dispatcher:
    """Plans and their making. The module `api` holds the one that `tunegemm.matmul` uses."""

    def __init__(
        self,
        *,
        device_type: str = "cuda",
        read: Callable[[], Snapshot] = read_snapshot,
        find: Callable[[str], Device] = find_device,
        prepare: Callable[[Record, Device], Prepared] = prepare,
        rivals: Callable[[Problem], Sequence[Rival]] = read_rivals,
        online: OnlineTuning | None = None,
    ) -> None:
        """The arguments say where records, devices and launchers come from, and who tunes online."""
        self._device_type = device_type
        self._read = read
        self._find = find
        self._prepare = prepare
        self._lock = threading.RLock()
        self._rivals = rivals
        self._online = online or OnlineTuning()
        self._state = _State()
        self._others: dict[Policy, _State] = {}
        """Of policies that were left: plans are kept for when one comes back."""
        self._mode: Mode | None = None

    def refresh(self) -> None:
        """Forget all plans; the database is read again on the next call."""
        with self._lock:
            self._others.clear()
            self._state = _State(self._state.policy)

    @property
    def policy(self) -> Policy:
        """By which products are served now."""
        return self._state.policy

    def use(self, policy: Policy) -> Policy:
        """Serve by this policy from now on; the one before is returned. A policy has plans of its own."""
        with self._lock:
            before = self._state
            if policy != before.policy:
                self._others[before.policy] = before
                known = self._others.pop(policy, None)
                self._state = _State(policy, before.snapshot) if known is None else known
            return before.policy

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """See `tunegemm.matmul`."""
        if _ordinary(a, b):
            state = self._state
            key: tuple[Any, ...]
            try:
                key = (a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, a.device, b.device)
                if out is not None:
                    if type(out) not in _PLAIN:
                        return torch.matmul(a, b, out=out)
                    key += (out.shape, out.stride(), out.dtype, out.device)
                if low := (a.data_ptr() | b.data_ptr()) % ALIGNMENT:
                    key += (low & -low,)
            except RuntimeError:  # sparse and nested tensors have no strides
                return _torch_matmul(a, b, out)
            plan = state.plans.get(key, _MISSING)
            if plan is _MISSING:
                plan = self._plan(state, key, a, b, out, "matmul")
            if plan is not None:
                if out is None:
                    result = a.new_empty(plan.out_shape)
                elif _writable(plan, a, b, out):
                    if not out.is_inference():  # inference tensors count no versions
                        torch.autograd.graph.increment_version(out)
                    result = out
                else:
                    return _torch_matmul(a, b, out)
                try:
                    _launch(plan, a, b, result)
                    return result
                except (RuntimeError, ValueError) as error:
                    self._drop(state, key, plan, error)
        return _torch_matmul(a, b, out)

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """See `tunegemm.linear`."""
        if bias is None and _ordinary(x, weight):
            state = self._state
            key: tuple[Any, ...]
            try:
                key = (
                    x.shape,
                    weight.shape,
                    x.stride(),
                    weight.stride(),
                    x.dtype,
                    weight.dtype,
                    x.device,
                    weight.device,
                    "linear",
                )
                if low := (x.data_ptr() | weight.data_ptr()) % ALIGNMENT:
                    key += (low & -low,)
            except RuntimeError:  # sparse and nested tensors have no strides
                return torch.nn.functional.linear(x, weight)
            plan = state.plans.get(key, _MISSING)
            if plan is _MISSING:
                plan = self._plan(state, key, x, weight.t(), None, "linear") if weight.ndim == 2 else None
            if plan is not None:
                result = x.new_empty(plan.out_shape)
                try:
                    _launch(plan, x, weight.t(), result)
                    return result
                except (RuntimeError, ValueError) as error:
                    self._drop(state, key, plan, error)
        return torch.nn.functional.linear(x, weight, bias)

    # Everything below runs on the first call of a key only.

    def _plan(
        self,
        state: _State,
        key: tuple[Any, ...],
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        name: str,
    ) -> Plan | None:
        """Makes and keeps the plan of a key; keeps nothing while a CUDA graph is being recorded."""
        if self._mode is None:
            self._begin()
            state = self._state
        mode = self._mode
        if mode in ("off", "record") or _capturing(a.device):
            return None
        with self._lock:
            if key in state.plans:
                return state.plans[key]
            with torch.inference_mode(False), torch.no_grad():
                plan = self._make_plan(state, a, b, out, name)
            if len(state.plans) >= MAX_PLANS:
                state.plans.clear()
            state.plans[key] = plan
            untuned, state.untuned = state.untuned, None
        if untuned is None or mode != "online":
            return plan
        # Outside the lock: other threads go on meanwhile, with this key, too.
        tuned = self._online.attempt(*untuned)
        if self._online.warning:
            self._warn(state, self._online.warning)
        if not tuned:
            return plan
        with self._lock:
            state.snapshot = self._snapshot(state, name)
            state.prepared.clear()
            state.plans.clear()
        return self._plan(state, key, a, b, out, name)

    def _make_plan(
        self, state: _State, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, name: str
    ) -> Plan | None:
        if a.device != b.device or (out is not None and out.device != a.device):
            return None
        operands = describe(a, b, out)
        if isinstance(operands, Refusal):
            if operands.reason:
                self._warn(state, f"{operands.reason}; tunegemm.{name} leaves it to torch")
            return None
        problem = operands.problem
        if a.device.type != self._device_type:
            self._warn(
                state,
                f"{problem} on {a.device.type}: tunegemm.{name} leaves it to torch. "
                f"On a CUDA device, tune it with: {tune_command(problem)}",
            )
            return None
        prepared = self._prepared(state, problem, a.device, name)
        if prepared is None or prepared.launch is None:
            return None
        if prepared.tma and operands.tma_refusal:
            self._warn(state, f"{problem}: {operands.tma_refusal}; tunegemm.{name} leaves it to torch")
            return None
        if prepared.packed and not operands.packed:
            return None
        if (a.data_ptr() | b.data_ptr()) % prepared.address_bytes:
            return None
        return Plan(
            prepared.launch,
            operands.out_shape,
            operands.rows,
            (problem.m, problem.n),
            operands.spans,
            prepared.address_bytes,
            a.device,
            self._device_type == "cuda" and torch.cuda.device_count() > 1,
        )

    def _prepared(self, state: _State, problem: Problem, device: torch.device, name: str) -> Prepared | None:
        """The launcher of the problem's record, or None after a warning that says why there is none."""
        index = device.index or 0
        if (problem, index) not in state.prepared:
            state.prepared[problem, index] = self._search(state, problem, index, name)
        return state.prepared[problem, index]

    def _search(self, state: _State, problem: Problem, index: int, name: str) -> Prepared | None:
        known = self._device(state, index, name)
        if known is None:
            return None
        if state.snapshot is None:
            state.snapshot = self._snapshot(state, name)
        selection = select(
            state.snapshot,
            problem,
            known,
            near=self._mode != "exact",
            policy=state.policy,
            rivals=self._rivals,
        )
        if selection.outcome != "hit":
            state.untuned = problem, known
        why = selection.why
        for record in selection.options:
            try:
                with torch.cuda.device(index) if self._device_type == "cuda" else nullcontext():
                    return self._prepare(record, state.policy.device(known))
            except (TunegemmError, ValueError, RuntimeError) as error:
                why = _one_line(error)
        if selection.options or selection.advises_tuning:
            self._warn(
                state,
                f"{problem} on {known.name}: {why}; tunegemm.{name} leaves it to torch. "
                f"Tune it with: {tune_command(problem)}",
            )
        return None

    def _device(self, state: _State, index: int, name: str) -> Device | None:
        if index not in state.devices:
            try:
                state.devices[index] = self._find(f"{self._device_type}:{index}")
            except DeviceError as error:
                state.devices[index] = None
                self._warn(state, f"{_one_line(error)}; tunegemm.{name} leaves its products to torch")
        return state.devices[index]

    def _snapshot(self, state: _State, name: str) -> Snapshot:
        try:
            snapshot = self._read()
        except DatabaseError as error:
            self._warn(state, f"{_one_line(error)}; tunegemm.{name} leaves every product to torch")
            return Snapshot()
        for warning in snapshot.warnings:
            self._warn(state, f"{warning}; tunegemm.{name} does without its records")
        return snapshot

    def _drop(self, state: _State, key: tuple[Any, ...], plan: Plan, error: Exception) -> None:
        """A launch failed: products of this key are torch's from now on."""
        if _capturing(plan.device):
            raise error
        with self._lock:
            state.plans[key] = None
        self._warn(
            state,
            f"the tuned kernel for {key[0]} x {key[1]} failed to launch ({_one_line(error)}); left to torch",
        )

    def _begin(self) -> None:
        """Read mode and policy on the first product."""

        def warn(message: str) -> None:
            self._warn(self._state, message)

        with self._lock:
            if self._mode is None:
                if self._state.policy == FASTEST:  # nobody chose another one meanwhile
                    self.use(read_policy(warn))
                self._mode = read_mode(warn)
                if self._mode == "record":
                    try:
                        begin_recording()
                    except WorkloadError as error:
                        warn(f"TUNEGEMM_MODE=record counts nothing: {error}")

    def _warn(self, state: _State, message: str) -> None:
        if message not in state.warned:
            state.warned.add(message)
            warnings.warn(message, TunegemmWarning, stacklevel=_callers_level())


def tune_command(problem: Problem) -> str:
    """The command line that tunes the problem."""
    alignment = "" if problem.alignment == problem.packed_alignment else f" --alignment {problem.alignment}"
    words = f"--shape {problem.shape} --dtype {problem.in_dtype} --layout {problem.layout}"
    epilogue = f" --epilogue '{problem.epilogue}'" if problem.epilogue else ""
    return f"tunegemm tune {words}{alignment}{epilogue}"


def _ordinary(a: Any, b: Any) -> bool:
    """Whether a launch means here what torch.matmul means.

    It does not under autograd (there is no backward yet), forward-mode AD, functorch transforms,
    dispatch modes (fake tensors, FLOP counters), tracing, an autocast to another dtype, or when
    deterministic algorithms are asked for.
    """
    return (
        type(a) in _PLAIN
        and type(b) in _PLAIN
        and not (_grad_enabled() and (a.requires_grad or b.requires_grad))
        and not _deterministic()
        and not _dispatch_modes()
        and _functorch_level() is None
        and _tracing_state() is None
        and forward_ad._current_level < 0
        and not (_any_autocast() and _cast_by_autocast(a))
    )


def _cast_by_autocast(a: torch.Tensor) -> bool:
    kind = a.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != a.dtype


def _launch(plan: Plan, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    if plan.rows is not None:
        a, out = a.view(plan.rows), out.view(plan.matrix)
    if plan.guarded and torch.cuda.current_device() != plan.device.index:
        with torch.cuda.device(plan.device):
            plan.launch(a, b, out)
    else:
        plan.launch(a, b, out)


def _writable(plan: Plan, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether a kernel may write into `out`: allowed by autograd, aligned, apart from the operands."""
    start = out.data_ptr()
    a_start, b_start = a.data_ptr(), b.data_ptr()
    a_span, b_span, span = plan.spans
    return (
        not start % plan.address_bytes
        and not (_grad_enabled() and out.requires_grad)
        and not (out.is_inference() and not torch.is_inference_mode_enabled())  # torch forbids it
        and (start >= a_start + a_span or a_start >= start + span)
        and (start >= b_start + b_span or b_start >= start + span)
    )


def _torch_matmul(a: Any, b: Any, out: Any) -> Any:
    return torch.matmul(a, b) if out is None else torch.matmul(a, b, out=out)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _callers_level() -> int:
    """The `stacklevel` at which warnings.warn, called by our caller, names the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tunegemm.dispatch"):
        level, frame = level + 1, frame.f_back
    return level
