"""From a call to a launch: a kernel that is known costs the host less than torch.mm does.

A *plan* is the prepared launch for one key of shapes, strides, dtypes, devices and, below 16, the bytes that
addresses are multiples of; None says that torch computes products of that key. Plans are made on the first
call of a key, under a lock, and are then read without one. Nothing is compiled or tuned here, and nothing is
read or loaded while the current stream records a CUDA graph: a product without a plan is then torch's.

Building such a key costs more than all else that is left of a call. So a call first looks at what was done
last with the `b` at this address, mostly a weight: if one check in C says that the operands are as they were
then, that plan is right, whatever `b` is now. (Not with the same object: what ATen and Inductor's code pass
is a new view each time.) Code that was compiled for operands of one kind does without the check, too.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from tunegemm.database.layers import modified
from tunegemm.device import Device, find_device, package_version
from tunegemm.dispatch.autograd import (
    DTYPES,
    PLAIN,
    add_differentiably,
    is_simple,
    multiply_differentiably,
)
from tunegemm.dispatch.forms import LINEAR, MATMUL, RECORDED, Form, form_of
from tunegemm.dispatch.guards import (
    TORCHS,
    TensorGuards,
    allocation,
    any_autocast,
    autocast,
    capturing,
    cast_by_autocast,
    check_of,
    current_device,
    deterministic,
    dispatch_modes,
    functorch_level,
    grad_enabled,
    is_ordinary,
    is_quiet,
    tf32_allowed,
    tracing,
)
from tunegemm.dispatch.launchers import Prepared, prepare
from tunegemm.dispatch.modes import Mode, begin_recording, read_mode, read_policy
from tunegemm.dispatch.online import OnlineTuning
from tunegemm.dispatch.operands import ALIGNMENT, Operands, Refusal, describe, seen_as
from tunegemm.dispatch.plans import (
    Plan,
    Recent,
    State,
    are_apart,
    expanding,
    is_apart_from,
    is_writable,
    launch_plan,
    views_of_operands,
)
from tunegemm.dispatch.policies import Policy
from tunegemm.dispatch.selection import Rival, read_rivals, select
from tunegemm.dispatch.snapshot import Record, Snapshot, read_snapshot
from tunegemm.dispatch.unfused import absorbs, taken_operands, unfused
from tunegemm.dispatch.worth import least_ratio
from tunegemm.errors import (
    DatabaseError,
    DeviceError,
    TunegemmError,
    TunegemmWarning,
    WorkloadError,
)
from tunegemm.families.cublaslt import is_torch
from tunegemm.families.launching import AddressLauncher, words_binder
from tunegemm.problem import MAX_ALIGNMENT, Problem, default_out_dtype

#: Keys kept before all plans are dropped: a bound for programs whose shapes never repeat.
MAX_PLANS = 65536
#: Seconds between looks at whether another process has published records.
LOOK_SECONDS = 5.0

#: The forms of products that are stored as they are, by their kind; and how warnings call each kind.
_PLAIN_FORMS = {kind: form_of(kind, "") for kind in (MATMUL, LINEAR, RECORDED)}
_RECORDED_BIASED = form_of(RECORDED, "bias_n")
_NAMES = {MATMUL: "matmul", LINEAR: "linear", RECORDED: ""}


class Dispatcher:
    """Plans and their making. The module `api` holds the one that `tunegemm.matmul` uses."""

    def __init__(
        self,
        *,
        device_type: str = "cuda",
        read: Callable[[], Snapshot] = read_snapshot,
        find: Callable[[str], Device] = find_device,
        prepare: Callable[[Record, Device], Prepared] = prepare,
        modified: Callable[[], Hashable] = modified,
        rivals: Callable[[Problem], Sequence[Rival]] = read_rivals,
        online: OnlineTuning | None = None,
    ) -> None:
        """The arguments say where records, devices and launchers come from, what changes with records, and
        who tunes online.
        """
        self._device_type = device_type
        self._read = read
        self._find = find
        self._prepare = prepare
        self._modified = modified
        self._lock = threading.RLock()
        self._rivals = rivals
        self._online = online or OnlineTuning()
        self._state = State()
        self._others: dict[Policy, State] = {}
        """Of policies that were left: plans are kept for when one comes back."""
        self._mode: Mode | None = None
        self._next_look = 0.0
        self._empty: Any = allocation(device_type)
        _dispatchers.add(self)

    def refresh(self) -> None:
        """Forget all plans; the database is read again on the next call."""
        with self._lock:
            self._others.clear()
            self._state = State(self._state.policy)

    @property
    def policy(self) -> Policy:
        """By which products are served now."""
        if self._mode is None:
            self._begin()
        return self._state.policy

    def use(self, policy: Policy) -> Policy:
        """Serve by this policy from now on; the one before is returned. A policy has plans of its own."""
        if self._mode is None:
            self._begin()
        with self._lock:
            before = self._state
            if policy != before.policy:
                self._others[before.policy] = before
                known = self._others.pop(policy, None)
                self._state = State(policy, before.snapshot, before.modified) if known is None else known
            return before.policy

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """See `tunegemm.matmul`."""
        return self.product(MATMUL, a, b, out)

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """See `tunegemm.linear`."""
        if bias is None:
            return self.product(LINEAR, x, weight)
        return self.fused(form_of(LINEAR, "bias_n"), x, weight, (bias,))

    def recorded(self, a: Any, b: Any, out: Any = None) -> Any:
        """The product ``a @ b`` by a recorded kernel, or None where torch shall compute it.

        For callers below autograd, transforms and modes. What the user did not write in so many words draws
        no warning of its strides: only a record that is missing does.
        """
        return self.product(RECORDED, a, b, out)

    def product(self, kind: int, a: Any, b: Any, out: Any = None) -> Any:
        """Of any kind of call."""
        try:
            a_address, b_address = a.data_ptr(), b.data_ptr()
        except (AttributeError, RuntimeError, TypeError):  # no tensors, or such as have no memory
            return self._general(kind, a, b, out)
        if (a_address | b_address) & (ALIGNMENT - 1):
            return self._general(kind, a, b, out)
        if out is None:
            place = b_address | kind
            recent = self._state.recent.get(place)
            known = recent is not None and recent.check(a, b)
        else:
            place = b_address | 2 | kind
            recent = self._state.recent.get(place)
            known = recent is not None and recent.check(a, b, out)
        if not known:
            recent = self._earlier(place, a, b) if out is None else self._earlier(place, a, b, out)
        if (
            recent is None
            or (recent.trains and grad_enabled())
            or dispatch_modes()
            or deterministic()
            or forward_ad._current_level >= 0
            or (recent.index >= 0 and recent.index != current_device())
        ):
            return self._general(kind, a, b, out)
        plan, at = recent.plan, recent.at
        if plan is None or at is None:
            if time.monotonic() < self._next_look:
                return _torch_product(kind, a, b, out)
            return self._general(kind, a, b, out)
        try:
            if out is None:
                result = self._empty(plan.out_shape, plan.out_strides, plan.out_dtype)
                at(a_address, b_address, result.data_ptr())
                return result
            out_address = out.data_ptr()
            if are_apart(plan, a_address, b_address, out_address):
                if recent.counts:
                    increment_version(out)
                at(a_address, b_address, out_address)
                return out
        except (RuntimeError, ValueError):  # the general way meets it again, and knows what to do
            pass
        return self._general(kind, a, b, out)

    def fused(
        self,
        form: Form,
        a: Any,
        b: Any,
        tensors: Sequence[Any],
        numbers: Sequence[float] = (),
        out: Any = None,
    ) -> Any:
        """What a form makes of a product; tensors and numbers: what its epilogue takes, each in its order.

        None where the form is of the kind RECORDED and torch shall compute it.
        """
        try:
            a_address, b_address = a.data_ptr(), b.data_ptr()
        except (AttributeError, RuntimeError, TypeError):
            return self._generally_fused(form, a, b, tensors, numbers, out)
        if (a_address | b_address) & (ALIGNMENT - 1):
            return self._generally_fused(form, a, b, tensors, numbers, out)
        place = b_address | form.place if out is None else b_address | 2 | form.place
        everything = (a, b, *tensors) if out is None else (a, b, *tensors, out)
        recent = self._state.recent.get(place)
        if recent is None or not recent.check(*everything):
            recent = self._earlier(place, *everything)
        if (
            recent is None
            or (recent.trains and grad_enabled())
            or dispatch_modes()
            or deterministic()
            or forward_ad._current_level >= 0
            or (recent.index >= 0 and recent.index != current_device())
        ):
            return self._generally_fused(form, a, b, tensors, numbers, out)
        plan, at = recent.plan, recent.at
        if plan is None or at is None:
            if time.monotonic() < self._next_look:
                return _torchs(form, a, b, tensors, numbers, out)
            return self._generally_fused(form, a, b, tensors, numbers, out)
        words = () if plan.words is None else plan.words(tensors, numbers)
        try:
            if words is None:
                pass
            elif out is None:
                result = self._empty(plan.out_shape, plan.out_strides, plan.out_dtype)
                at(a_address, b_address, result.data_ptr(), *words)
                return result
            elif are_apart(plan, a_address, b_address, out.data_ptr()) and is_apart_from(out, tensors):
                if recent.counts:
                    increment_version(out)
                at(a_address, b_address, out.data_ptr(), *words)
                return out
        except (RuntimeError, ValueError):  # the general way meets it again, and knows what to do
            pass
        return self._generally_fused(form, a, b, tensors, numbers, out)

    def compiled(
        self,
        site: str,
        form: Form,
        a: torch.Tensor,
        b: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[float],
        out: torch.Tensor,
    ) -> torch.Tensor:
        """What a form makes of a product, for the code of a compiler, which has made sure of all but addresses.

        site: the kinds, extents, strides and devices of all operands in words; empty where they may change.
        """
        plan = self._state.sites.get(site)
        if plan is not None and plan.at is not None:
            a_address, b_address, out_address = a.data_ptr(), b.data_ptr(), out.data_ptr()
            words = () if plan.words is None else plan.words(tensors, numbers)
            if not (
                words is None
                or (a_address | b_address | out_address) & (ALIGNMENT - 1)
                or dispatch_modes()
                or deterministic()
                or (plan.guarded and plan.device.index != current_device())
            ):
                try:
                    plan.at(a_address, b_address, out_address, *words)
                    return out
                except (RuntimeError, ValueError):  # the general way meets it again, and knows what to do
                    pass
        if form.text or form.out_dtype is not None:
            result = self.fused(form, a, b, tensors, numbers, out)
        else:
            result = self.product(form.kind, a, b, out)
        state, kind = self._state, form.place if form.text or form.out_dtype is not None else form.kind
        recent = state.recent.get(b.data_ptr() | 2 | kind)
        if site and recent is not None and recent.plan is not None and recent.check(a, b, *tensors, out):
            state.sites[site] = recent.plan
        return result

    def _earlier(self, place: int, a: Any, *others: Any) -> Recent | None:
        """What was done before the last time with this `b`, for as many rows of `a`."""
        state = self._state
        if type(a) not in PLAIN:
            return None
        recent = state.earlier.get((place, a.numel()))
        if recent is None or not recent.check(a, *others):
            return None
        state.recent[place] = recent
        return recent

    def _general(self, kind: int, a: Any, b: Any, out: Any) -> Any:
        """The same of any operands."""
        if kind == RECORDED:
            if type(a) not in PLAIN or type(b) not in PLAIN or deterministic():
                return None
        elif (
            out is None  # torch.matmul(out=) is not cast
            and any_autocast()
            and type(a) in PLAIN
            and type(b) in PLAIN
            and (cast := cast_by_autocast(a, b)) is not None
        ):
            if cast is TORCHS:
                return _torch_product(kind, a, b, out)
            return self.product(kind, autocast(a, cast), autocast(b, cast))
        elif not is_ordinary(a, b):
            if out is None and self._is_differentiable(a, b) and (kind == MATMUL or b.ndim == 2):
                return multiply_differentiably(self.recorded, a, b.t() if kind == LINEAR else b)
            return _torch_product(kind, a, b, out)
        if out is not None and type(out) not in PLAIN:
            return _torch_product(kind, a, b, out)
        key: tuple[Any, ...]
        tensors = (a, b) if out is None else (a, b, out)
        try:
            key = (a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, a.device, b.device, kind)
            low = (a.data_ptr() | b.data_ptr()) % ALIGNMENT
            if out is not None:
                key += (out.shape, out.stride(), out.dtype, out.device)
        except RuntimeError:  # sparse and nested tensors have no strides
            return _torch_product(kind, a, b, out)
        if low:
            key += (low & -low,)
        if a.dtype is torch.float32:
            key += (tf32_allowed(),)
        state = self._state
        plan = state.plans.get(key)
        if plan is None:

            def make(state: State) -> Plan | None:
                if kind == LINEAR and b.ndim != 2:
                    return None
                return self._make_plan(state, _PLAIN_FORMS[kind], a, b, (), (), out)

            state, plan = self._plan(state, key, a.device, make)
            if plan is None:
                if not low and key in state.plans:
                    self._remember(state, key, None, kind, *tensors, has_out=out is not None)
                return _torch_product(kind, a, b, out)
        result = out
        if result is None:
            result = a.new_empty(plan.out_shape)
        elif not is_writable(plan, a, b, result):
            return _torch_product(kind, a, b, out)
        elif not result.is_inference():  # inference tensors count no versions
            increment_version(result)
        try:
            launch_plan(plan, a, b.t() if kind == LINEAR else b, result)
        except (RuntimeError, ValueError) as error:
            self._drop(state, key, plan, a, b, error)
            return _torch_product(kind, a, b, out)
        if plan.at is not None and not low:
            self._remember(state, key, plan, kind, *tensors, has_out=out is not None)
        return result

    def _generally_fused(
        self, form: Form, a: Any, b: Any, tensors: Sequence[Any], numbers: Sequence[float], out: Any
    ) -> Any:
        """What `fused` does, of any operands."""
        kind = form.kind
        if kind == RECORDED:
            if any(type(tensor) not in PLAIN for tensor in (a, b, *tensors)) or deterministic():
                return None
        elif (
            out is None
            and any_autocast()
            and all(type(tensor) in PLAIN for tensor in (a, b, *tensors))
            and a.dtype.itemsize > 1  # products of scaled operands are not cast
            and (cast := cast_by_autocast(a, b, *tensors[: len(tensors) - form.writes])) is not None
        ):
            return self._cast_and_fused(form, a, b, tensors, numbers, cast)
        elif not is_ordinary(a, b) or not all(map(is_quiet, tensors)):
            plain = all(type(tensor) in PLAIN for tensor in tensors)
            if out is None and plain and self._is_differentiable(a, b) and (kind == MATMUL or b.ndim == 2):
                return self._differentiably(form, a, b, tensors, numbers)
            return _torchs(form, a, b, tensors, numbers, out)
        if out is not None and type(out) not in PLAIN:
            return _torchs(form, a, b, tensors, numbers, out)
        everything = (a, b, *tensors) if out is None else (a, b, *tensors, out)
        try:
            low = (a.data_ptr() | b.data_ptr()) % ALIGNMENT
            below = 0
            for tensor in tensors:
                below |= tensor.data_ptr() % MAX_ALIGNMENT
            key = (
                form,
                low & -low,
                below & -below,
                a.dtype is torch.float32 and tf32_allowed(),
                *((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in everything),
            )
        except RuntimeError:  # sparse and nested tensors have no strides
            return _torchs(form, a, b, tensors, numbers, out)
        state = self._state
        plan = state.plans.get(key)
        if plan is None:

            def make(state: State) -> Plan | None:
                if kind == LINEAR and b.ndim != 2:
                    return None
                found = self._make_plan(state, form, a, b, tensors, numbers, out)
                composed = found is None and kind != RECORDED and not absorbs(form)
                if composed and self._has_tuned_product(state, form, a, b):
                    state.of_tuned_products.add(key)
                return found

            state, plan = self._plan(state, key, a.device, make)
        if plan is None:
            if key in state.of_tuned_products:
                return unfused(form, a, b, tensors, numbers, out, multiply=partial(self.product, kind))
            if not (low or below) and key in state.plans:
                self._remember(state, key, None, kind, *everything, form=form, has_out=out is not None)
            return _torchs(form, a, b, tensors, numbers, out)
        result = out
        if result is None:
            result = a.new_empty(plan.out_shape, dtype=plan.out_dtype)
        elif not (is_writable(plan, a, b, result) and is_apart_from(result, tensors)):
            return _torchs(form, a, b, tensors, numbers, out)
        elif not result.is_inference():
            increment_version(result)
        try:
            launch_plan(plan, a, b.t() if kind == LINEAR else b, result, form, tensors, numbers)
        except (RuntimeError, ValueError) as error:
            self._drop(state, key, plan, a, b, error)
            return _torchs(form, a, b, tensors, numbers, out)
        if form.writes:
            if not tensors[-1].is_inference():
                increment_version(tensors[-1])
        elif plan.at is not None and not low:
            self._remember(state, key, plan, kind, *everything, form=form, has_out=out is not None)
        return result

    def _cast_and_fused(
        self, form: Form, a: Any, b: Any, tensors: Sequence[Any], numbers: Sequence[float], cast: Any
    ) -> Any:
        """What torch's own calls would make of it: autocast casts what goes into the product's call, bias and C,
        too; what is added afterwards keeps its dtype, which may be the wider one and then is the result's.
        """
        if cast is TORCHS or form.out_dtype not in (None, cast):
            return _torchs(form, a, b, tensors, numbers, None)
        names = [operand.name for operand in form.epilogue.operands if operand.kind != "number"]
        # A user's function gives the product's dtype, whatever its operands have.
        taken = taken_operands(form, a, b) if form.epilogue.function is None else names
        a, b = autocast(a, cast), autocast(b, cast)
        seen = [
            autocast(tensor, cast) if name in taken else tensor
            for name, tensor in zip(names, tensors, strict=True)
        ]
        wide = [
            name for name, tensor in zip(names, seen, strict=True)
            if tensor.dtype is not cast and name != "amax"
        ]  # fmt: skip
        if not wide:
            return self.fused(form, a, b, seen, numbers)
        if wide == ["residual"] and form.epilogue.steps[-1] == "residual":
            text = form.text.removesuffix("residual").removesuffix("+")
            before = form_of(form.kind, text, form.out_dtype, form.accumulation)
            return self.fused(before, a, b, seen[:-1], numbers) + seen[-1]
        return _torchs(form, a, b, seen, numbers, None)

    def _differentiably(
        self, form: Form, a: Any, b: Any, tensors: Sequence[Any], numbers: Sequence[float]
    ) -> Any:
        """By products that are dispatched, and so are those of the backward pass, and torch's operations."""
        right = b.t() if form.kind == LINEAR else b

        def multiply(*_: Any) -> Any:
            return multiply_differentiably(self.recorded, a, right)

        def biased(_a: Any, _b: Any, bias: Any) -> Any:
            if functorch_level() is not None or forward_ad._current_level >= 0 or bias.ndim != 1:
                return multiply() + bias
            return add_differentiably(self._biased, self.recorded, a, right, bias)

        return unfused(form, a, b, tensors, numbers, multiply=multiply, biased=biased)

    def _biased(self, a: Any, b: Any, bias: Any) -> Any:
        """``a @ b + bias``, below autograd."""
        result = self.fused(_RECORDED_BIASED, a, b, (bias,))
        if result is not None:
            return result
        return torch.nn.functional.linear(a, b.t(), bias) if b.ndim == 2 else torch.matmul(a, b) + bias

    def _remember(
        self,
        state: State,
        key: tuple[Any, ...],
        plan: Plan | None,
        kind: int,
        a: Any,
        b: Any,
        *others: Any,
        form: Form | None = None,
        has_out: bool = False,
    ) -> None:
        """Let the next call with this `b` find the plan without a key."""
        if TensorGuards is None or self._empty is None:
            return
        tensors = (a, b, *others)
        recent = state.checked.get(key)
        if recent is None or not recent.check(*tensors):  # made in another mode, such as inference mode
            recent = state.checked[key] = Recent(
                check_of(tensors),
                plan,
                plan.at if plan is not None else None,
                kind != RECORDED and any(tensor.requires_grad for tensor in tensors),
                has_out and not tensors[-1].is_inference(),
                (plan.device.index or 0) if plan is not None and plan.guarded else -1,
            )
        if len(state.earlier) >= MAX_PLANS:
            state.recent.clear()
            state.earlier.clear()
        place = b.data_ptr() | (kind if form is None else form.place) | (2 if has_out else 0)
        state.recent[place] = state.earlier[place, a.numel()] = recent

    def _is_differentiable(self, a: Any, b: Any) -> bool:
        """Whether `is_ordinary` said no because of gradients, tangents or transforms alone."""
        return (
            type(a) in PLAIN
            and type(b) in PLAIN
            and a.dtype == b.dtype
            and a.dtype in DTYPES
            and a.device.type == b.device.type == self._device_type
            and is_simple(a, b)
            and not deterministic()
            and not dispatch_modes()
            and not tracing()
            and not (a.is_neg() or b.is_neg())
        )

    # Everything below runs on the first call of a key only.

    def _plan(
        self,
        state: State,
        key: tuple[Any, ...],
        device: torch.device,
        make: Callable[[State], Plan | None],
    ) -> tuple[State, Plan | None]:
        """Makes and keeps the plan of a key; keeps nothing while a CUDA graph is being recorded.

        Where the key is known to be torch's, this is but a look at the clock, and now and then at files.
        """
        if self._mode is None:
            self._begin()
        known = key in state.plans
        if self._mode in ("off", "record") or (known and time.monotonic() < self._next_look):
            return state, None
        if torch.cuda._is_in_bad_fork() or capturing(device):
            return state, None
        with self._lock:
            state = self._look() if known else self._state
            if key in state.plans:
                return state, state.plans[key]
            with torch.inference_mode(False), torch.no_grad():
                plan = make(state)
            if len(state.plans) >= MAX_PLANS:
                state.plans.clear()
                state.of_tuned_products.clear()
                state.forget_checks()
            state.plans[key] = plan
            untuned, state.untuned = state.untuned, None
        if untuned is None or self._mode != "online" or not self._tune_online(state, key, *untuned):
            return state, plan
        return self._plan(state, key, device, make)

    def _tune_online(self, state: State, key: tuple[Any, ...], problem: Problem, device: Device) -> bool:
        """Whether the key's plan is to be made anew. Other threads go on meanwhile, with this key, too."""
        tuned = self._online.attempt(problem, device)
        if self._online.warning:
            self._warn(state, self._online.warning)
        if tuned:
            with self._lock:
                state.snapshot = self._snapshot(state, "matmul")
                state.prepared = {place: one for place, one in state.prepared.items() if place[0] != problem}
                state.plans.pop(key, None)
                state.forget_checks()
        return tuned

    def _look(self) -> State:
        """The state, without its misses if records were published since they were read.

        Plans of tuned kernels and near hits stay, also for a thread that captures a graph meanwhile; a better
        record of theirs waits for `refresh`.
        """
        if time.monotonic() < self._next_look:
            return self._state
        self._next_look = time.monotonic() + LOOK_SECONDS
        old = self._state
        if old.snapshot is not None and self._modified() != old.modified:
            new = State(old.policy)
            new.plans = {key: plan for key, plan in old.plans.items() if plan is not None}
            new.prepared = {key: found for key, found in old.prepared.items() if found and found.launch}
            new.devices, new.warned = old.devices, old.warned
            self._state = new
        return self._state

    def _make_plan(
        self,
        state: State,
        form: Form,
        a: torch.Tensor,
        b: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[float],
        out: torch.Tensor | None,
    ) -> Plan | None:
        name = _NAMES[form.kind]
        if any(tensor.device != a.device for tensor in (b, *tensors)):
            return None
        if out is not None and out.device != a.device:
            return None
        if form.kind == LINEAR:
            b = b.t()
        operands = _described(form, a, b, out)
        if isinstance(operands, Refusal):
            if operands.reason and name:
                self._warn(state, f"{operands.reason}; tunegemm.{name} leaves it to torch")
            return None
        problem = operands.problem
        shapes = views_of_operands(problem, form, tensors, a.ndim > len(operands.views[0]))
        if shapes is None:
            return None
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
            if name:
                self._warn(state, f"{problem}: {operands.tma_refusal}; tunegemm.{name} leaves it to torch")
            return None
        if prepared.packed and not operands.packed:
            return None
        if (a.data_ptr() | b.data_ptr()) % prepared.address_bytes:
            return None
        at, words, launch, views = None, None, prepared.launch, operands.views
        example = a.new_empty(operands.out_shape, dtype=form.out_dtype_of(a)) if out is None else out
        if isinstance(prepared.launch, AddressLauncher) and not example.data_ptr() % ALIGNMENT:
            a_shape, b_shape, out_shape = views
            try:
                at = prepared.launch.of(seen_as(a, a_shape), seen_as(b, b_shape), example.view(out_shape))
                if problem.fused.words:
                    seen = [tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=True)]
                    words = words_binder(problem, form.join(seen, numbers))
            except ValueError as error:
                self._warn(state, f"{problem}: {_one_line(error)}; {_who(name)} leaves it to torch")
                return None
        if (a.numel(), b.numel()) != (math.prod(views[0]), math.prod(views[1])):  # one matrix for a batch
            launch, views = expanding(launch, views), (tuple(a.shape), tuple(b.shape), views[2])
        return Plan(
            launch,
            at,
            operands.out_shape,
            tuple(example.stride()),
            example.dtype,
            views,
            operands.spans,
            prepared.address_bytes,
            a.device,
            self._device_type == "cuda" and torch.cuda.device_count() > 1,
            words,
            shapes,
        )

    def _has_tuned_product(self, state: State, form: Form, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether a kernel of ours computes the product alone, where nothing is recorded of all together."""
        index = a.device.index or 0
        known, right = state.devices.get(index), b.t() if form.kind == LINEAR else b
        whole, operands = _described(form, a, right, None), describe(a, right)
        if isinstance(whole, Refusal) or isinstance(operands, Refusal) or known is None:
            return False
        if form.out_dtype not in (None, a.dtype) or state.snapshot is None:
            return False
        if state.prepared.get((whole.problem, index)) is not None:  # torch won there
            return False
        found = select(
            state.snapshot, operands.problem, known, near=self._mode != "exact", policy=state.policy
        )
        return bool(found.options) and not is_torch(found.options[0].candidate)

    def serves(
        self, form: Form, a: torch.Tensor, b: torch.Tensor, index: int, *, any_m: bool = False
    ) -> bool:
        """Whether a kernel is recorded for what `fused` would be asked, by shapes, strides and dtypes alone,
        and is worth it (`worth`).

        For code that is compiled: a and b may be tensors without memory. any_m: whether a record of another m
        is enough. Warns where there is none.
        """
        if self._mode is None:
            self._begin()
        if self._mode in ("off", "record") or deterministic():
            return False
        with self._lock, torch.inference_mode(False), torch.no_grad():
            operands = _described(form, a, b, None)
            if isinstance(operands, Refusal):
                return False
            state, name = self._state, _NAMES[form.kind]
            if state.snapshot is None:
                state.snapshot = self._snapshot(state, name)
            if any_m and self._mode != "exact" and state.snapshot.extents(operands.problem):
                return True
            device = torch.device(self._device_type, index)
            prepared = self._prepared(state, operands.problem, device, name)
            state.untuned = None
            known = state.devices.get(index)
        if prepared is None or prepared.launch is None or known is None:
            return False
        return prepared.ratio >= least_ratio(operands.problem, known)

    def fingerprint(self) -> str:
        """Some letters that change with what `serves` goes by."""
        if self._mode is None:
            self._begin()
        with self._lock:
            state = self._state
            if state.snapshot is None:
                state.snapshot = self._snapshot(state, "")
            facts = (package_version("tunegemm"), self._mode, state.policy, state.modified, state.snapshot.digest)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def _prepared(self, state: State, problem: Problem, device: torch.device, name: str) -> Prepared | None:
        """The launcher of the problem's record, or None after a warning that says why there is none."""
        index = device.index or 0
        if (problem, index) not in state.prepared:
            state.prepared[problem, index] = self._search(state, problem, index, name)
        return state.prepared[problem, index]

    def _search(self, state: State, problem: Problem, index: int, name: str) -> Prepared | None:
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
                    return replace(self._prepare(record, state.policy.device(known)), ratio=record.ratio)
            except (TunegemmError, ValueError, RuntimeError) as error:
                why = _one_line(error)
        # In mode online the product is tuned next, or a warning says why it could not be.
        if selection.options or (selection.advises_tuning and self._mode != "online"):
            self._warn(
                state,
                f"{problem} on {known.name}: {why}; {_who(name)} leaves it to torch. "
                f"Tune it with: {tune_command(problem)}",
            )
        return None

    def _device(self, state: State, index: int, name: str) -> Device | None:
        if index not in state.devices:
            try:
                state.devices[index] = self._find(f"{self._device_type}:{index}")
            except DeviceError as error:
                state.devices[index] = None
                self._warn(state, f"{_one_line(error)}; {_who(name)} leaves its products to torch")
        return state.devices[index]

    def _snapshot(self, state: State, name: str) -> Snapshot:
        state.modified = self._modified()
        self._next_look = time.monotonic() + LOOK_SECONDS
        try:
            snapshot = self._read()
        except DatabaseError as error:
            self._warn(state, f"{_one_line(error)}; {_who(name)} leaves every product to torch")
            return Snapshot()
        for warning in snapshot.warnings:
            self._warn(state, f"{warning}; {_who(name)} does without its records")
        return snapshot

    def _drop(self, state: State, key: tuple[Any, ...], plan: Plan, a: Any, b: Any, error: Exception) -> None:
        """A launch failed: products of this key are torch's from now on."""
        if capturing(plan.device):
            raise error
        with self._lock:
            state.plans[key] = None
            state.forget_checks()
        self._warn(
            state,
            f"the tuned kernel for {tuple(a.shape)} x {tuple(b.shape)} failed to launch "
            f"({_one_line(error)}); left to torch",
        )

    def _begin(self) -> None:
        """Read mode and policy: on the first product, or when a policy is chosen before it."""

        def warn(message: str) -> None:
            self._warn(self._state, message)

        with self._lock:
            if self._mode is None:
                self._mode = read_mode(warn)
                self.use(read_policy(warn))
                if self._mode == "record":
                    try:
                        begin_recording()
                    except WorkloadError as error:
                        warn(f"TUNEGEMM_MODE=record counts nothing: {error}")

    def _warn(self, state: State, message: str) -> None:
        if message not in state.warned:
            state.warned.add(message)
            warnings.warn(message, TunegemmWarning, stacklevel=_callers_level())


def tune_command(problem: Problem) -> str:
    """What tunes the problem: a command line; for a user's epilogue a call, as only its program knows it."""
    options = {
        "shape": problem.shape,
        "dtype": problem.in_dtype,
        "out-dtype": "" if problem.out_dtype == default_out_dtype(problem.in_dtype) else problem.out_dtype,
        "layout": problem.layout,
        "alignment": "" if problem.alignment == problem.packed_alignment else str(problem.alignment),
        "epilogue": problem.epilogue,
        "accumulation": "" if problem.accumulation == "fast" else problem.accumulation,
    }
    if problem.fused.function is not None:
        _, *named = [
            f'{name.replace("-", "_")}={int(value) if name == "alignment" else repr(value)}'
            for name, value in options.items() if value
        ]  # fmt: skip
        return f"tunegemm.tune(Problem.parse({problem.shape!r}, {', '.join(named)}))"
    return "tunegemm tune " + " ".join(f"--{name} {value}" for name, value in options.items() if value)


def _described(form: Form, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Operands | Refusal:
    """What the form asks for of ``a @ b``."""
    if not form.text and form.out_dtype is None:
        return describe(a, b, out)
    return describe(
        a, b, out, out_dtype=form.out_dtype_of(a), epilogue=form.text, accumulation=form.accumulation
    )


def _torchs(form: Form, a: Any, b: Any, tensors: Sequence[Any], numbers: Sequence[float], out: Any) -> Any:
    return None if form.kind == RECORDED else unfused(form, a, b, tensors, numbers, out)


def _torch_product(kind: int, a: Any, b: Any, out: Any) -> Any:
    if kind == RECORDED:
        return None
    return torch.nn.functional.linear(a, b) if kind == LINEAR else _torch_matmul(a, b, out)


def _torch_matmul(a: Any, b: Any, out: Any) -> Any:
    return torch.matmul(a, b) if out is None else torch.matmul(a, b, out=out)


def _who(name: str) -> str:
    return f"tunegemm.{name}" if name else "tunegemm"


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _callers_level() -> int:
    """The `stacklevel` at which warnings.warn, called by our caller, names the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tunegemm.dispatch"):
        level, frame = level + 1, frame.f_back
    return level


_dispatchers: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


def _after_fork() -> None:
    """A child starts anew: locks may have been held by threads it does not have, plans hold the parent's
    CUDA context. If the parent used CUDA, the child cannot, and gets torch's own error for CUDA tensors."""
    for dispatcher in _dispatchers:
        dispatcher._lock = threading.RLock()
        dispatcher._state, dispatcher._others = State(dispatcher._state.policy), {}


os.register_at_fork(after_in_child=_after_fork)
