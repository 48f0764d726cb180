"""Dispatch calls to launches: a known kernel costs the host less time than torch.mm.

A *plan* is the prepared launch for one key of shapes, strides, dtypes, devices and, below 16, the bytes that
addresses are multiples of; None says that torch computes products of that key. Plans are made on the first
call of a key, under a lock, and are then read without one. Nothing is compiled or tuned here, and nothing is
read or loaded while the current stream records a CUDA graph: a product without a plan then falls back to
torch.

Building such a key costs more than the rest of a call. So a call first looks up the last plan for the `b` at
this address, usually a weight. If one check in C confirms that the operands match those of that call, the
plan is right, whatever `b` is now. (The look-up is not by object: ATen and Inductor's code pass a new view
each time.) Code compiled for fixed operands skips even the check.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn.functional import linear
from torch.utils._python_dispatch import _disable_current_modes

from tunegemm.describe.problem import MAX_ALIGNMENT
from tunegemm.dispatch import guards
from tunegemm.dispatch.autograd import DTYPES, differentiably, is_simple
from tunegemm.dispatch.forms import (
    ADDMM,
    ALIGNMENT,
    BELOW_AUTOGRAD,
    BMM,
    LINEAR,
    MATMUL,
    SCALED_MM,
    Call,
    Form,
    form_of,
)
from tunegemm.dispatch.guards import (
    PLAIN,
    are_functions_watched,
    autocast,
    current_device,
    data_ptr,
    deterministic,
    dispatch_modes,
    function_modes,
    grad_enabled,
)
from tunegemm.dispatch.launchers import Plan, are_apart, is_apart_from, is_writable, launch_plan
from tunegemm.dispatch.planning import MAX_PLANS, Planner
from tunegemm.dispatch.states import Composed, Recent, State, own
from tunegemm.dispatch.unfused import INTO, added, by_torch, taken_operands, unfused
from tunegemm.errors import ProblemError

#: The forms without an epilogue, by their call.
_PLAIN_FORMS = {call: form_of(call, "") for call in (MATMUL, LINEAR, BELOW_AUTOGRAD, BMM, ADDMM, SCALED_MM)}
_BIASED_BELOW_AUTOGRAD = form_of(BELOW_AUTOGRAD, "bias_n")


class Dispatcher:
    """The calls. The module `api` holds the one that `tunegemm.matmul` uses.

    An unknown call goes to `compute`, and so do operands that need more than a launch: gradients, autocast,
    unusual addresses, subclasses. The products inside such a call come back as separate calls, which may be
    known.

    `product`, `fused` and `compiled` each spell out what forbids a launch now (modes, deterministic
    algorithms, another current device) and the launch itself. The repetition is deliberate: a shared
    function would cost every call one more Python call. Change all three together.
    """

    def __init__(self, planner: Planner | None = None) -> None:
        self.planner = planner or Planner()
        self._empty = self.planner.allocate
        self.below_autograd = partial(self.product, BELOW_AUTOGRAD)
        """The product of a and b, into `out` if given, by a recorded kernel; None if torch should compute it.

        For callers below autograd, transforms and modes. The user did not write these calls, so their strides
        cause no warning: only a missing record does.
        """

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """See `tunegemm.matmul`."""
        return self.product(MATMUL, a, b, out)

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """See `tunegemm.linear`."""
        if bias is None:
            return self.product(LINEAR, x, weight)
        return self.fused(form_of(LINEAR, "bias_n"), x, weight, (bias,))

    def product(self, call: int, a: Any, b: Any, out: Any = None) -> Any:
        """The result of a call such as `MATMUL` for a and b."""
        try:
            b_address = data_ptr(b)
            # Torch's check of tensors ends the process at a nested one (2.13).
            is_odd = b_address & (ALIGNMENT - 1) or a.is_nested is True
        except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one without memory
            is_odd = True
        if is_odd:
            return self.compute(_PLAIN_FORMS[call], a, b, (), (), out)
        if out is None:
            slot = b_address | call
            recent = self.planner.states[own()].recent.get(slot)
            known = recent is not None and recent.check(a, b)
        else:
            slot = b_address | 2 | call
            recent = self.planner.states[own()].recent.get(slot)
            known = recent is not None and recent.check(a, b, out)
        if not known:
            recent = self._earlier(slot, a, b) if out is None else self._earlier(slot, a, b, out)
        if recent is None or (recent.requires_grad and grad_enabled()):
            return self.compute(_PLAIN_FORMS[call], a, b, (), (), out)
        plan, launch = recent.plan, recent.launch
        if plan is None or launch is None:  # torch computes it in every mode
            if time.monotonic() < self.planner.quick.until:
                if out is None and recent.torchs is not None:
                    return recent.torchs(a, b)
                return by_torch(_PLAIN_FORMS[call], a, b, (), (), out)
        elif not (
            (a_address := data_ptr(a)) & (ALIGNMENT - 1)
            or dispatch_modes()
            or (function_modes() and are_functions_watched())
            or deterministic()
            or forward_ad._current_level >= 0
            or (recent.device_index >= 0 and recent.device_index != current_device())
        ):
            try:
                if out is None:
                    result = self._empty(*plan.output)
                    launch(a_address, b_address, result.data_ptr())
                    return result
                if are_apart(plan, a_address, b_address, out_address := out.data_ptr()):
                    if recent.bumps_version:
                        increment_version(out)
                    launch(a_address, b_address, out_address)
                    return out
            except (RuntimeError, ValueError):  # the slow path raises it again and handles it
                pass
        return self.compute(_PLAIN_FORMS[call], a, b, (), (), out)

    def fused(
        self,
        form: Form,
        a: Any,
        b: Any,
        tensors: Sequence[Any],
        numbers: Sequence[float] = (),
        out: Any = None,
    ) -> Any:
        """The result of a form; tensors and numbers: the epilogue's operands, each in its order.

        None if the form's call is BELOW_AUTOGRAD and torch should compute it.
        """
        try:
            b_address = data_ptr(b)
            is_odd = b_address & (ALIGNMENT - 1) or a.is_nested is True
        except (AttributeError, RuntimeError, TypeError):
            is_odd = True
        if is_odd:
            return self.compute(form, a, b, tensors, numbers, out)
        slot = b_address | form.tag if out is None else b_address | 2 | form.tag
        everything = (a, b, *tensors) if out is None else (a, b, *tensors, out)
        recent = self.planner.states[own()].recent.get(slot)
        if recent is None or not recent.check(*everything):
            recent = self._earlier(slot, *everything)
        if recent is None or (recent.requires_grad and grad_enabled()):
            return self.compute(form, a, b, tensors, numbers, out)
        plan, launch = recent.plan, recent.launch
        if plan is None or launch is None:  # torch computes it in every mode
            if time.monotonic() < self.planner.quick.until:
                if out is None and recent.torchs is not None:
                    return recent.torchs(a, b, *tensors)
                return by_torch(form, a, b, tensors, numbers, out)
        elif not (
            (a_address := data_ptr(a)) & (ALIGNMENT - 1)
            or dispatch_modes()
            or (function_modes() and are_functions_watched())
            or deterministic()
            or forward_ad._current_level >= 0
            or (recent.device_index >= 0 and recent.device_index != current_device())
            or (words := () if plan.words is None else plan.words(tensors, numbers)) is None
        ):
            try:
                if out is None:
                    result = self._empty(*plan.output)
                    launch(a_address, b_address, result.data_ptr(), *words)
                    return result
                if are_apart(plan, a_address, b_address, out.data_ptr()) and is_apart_from(out, tensors):
                    if recent.bumps_version:
                        increment_version(out)
                    launch(a_address, b_address, out.data_ptr(), *words)
                    return out
            except (RuntimeError, ValueError):  # the slow path raises it again and handles it
                pass
        return self.compute(form, a, b, tensors, numbers, out)

    def compiled(
        self,
        site: Hashable,
        form: Form,
        a: torch.Tensor,
        b: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[float],
        out: torch.Tensor,
    ) -> torch.Tensor:
        """The result of a form, for compiled code that has already checked everything except addresses.

        site: text with the dtypes, extents, strides and devices of all operands, plus the number of rows if
        that is not among them; empty if any of the others may change.
        """
        recent = self.planner.states[own()].recent.get(site)
        if recent is None:
            pass
        elif recent.launch is None:
            if recent.torchs is not None and time.monotonic() < self.planner.quick.until:
                return recent.torchs(a, b, *tensors, out=out)
        elif (plan := recent.plan) is not None:
            a_address, b_address, out_address = a.data_ptr(), b.data_ptr(), out.data_ptr()
            words = () if plan.words is None else plan.words(tensors, numbers)
            if not (
                words is None
                or (a_address | b_address | out_address) & (ALIGNMENT - 1)
                or dispatch_modes()
                or deterministic()
                or (recent.device_index >= 0 and recent.device_index != current_device())
            ):
                try:
                    recent.launch(a_address, b_address, out_address, *words)
                    return out
                except (RuntimeError, ValueError):  # the slow path raises it again and handles it
                    pass
        if guards.only_checks_operators():
            # If torch computed this first call, a CUDA graph of the next one would keep torch's product.
            with _disable_current_modes():
                return self.compiled(site, form, a, b, tensors, numbers, out)
        result = self.fused(form, a, b, tensors, numbers, out)
        state = self.planner.states[own()]
        recent = state.recent.get(b.data_ptr() | 2 | form.tag)
        # If a torch setting may forbid the kernel, each call checks that setting again.
        if not site or recent is None or a.dtype is torch.float32 or not recent.check(a, b, *tensors, out):
            return result
        if recent.plan is None:
            is_matmul = form.call == MATMUL and form.out_dtype is None
            torchs = INTO.get(form.text) if is_matmul else None
            matrices = a.ndim == b.ndim == 2 and all(tensor.ndim == 1 for tensor in tensors)
            if torchs is not None and matrices and all(guards.reductions_allowed(a.dtype)):
                state.recent[site] = replace(recent, torchs=torchs)
        elif not recent.plan.reduces:
            state.recent[site] = recent
        return result

    def known(self, form: Form, a: torch.Tensor, b: torch.Tensor, *tensors: torch.Tensor) -> Recent | None:
        """The `Recent` of a call of `fused` without `out`, made just now; None if it depends on addresses."""
        recent = self.planner.states[own()].recent.get(b.data_ptr() | form.tag)
        return recent if recent is not None and recent.check(a, b, *tensors) else None

    def _earlier(self, slot: int, a: Any, b: Any, *others: Any) -> Recent | None:
        """The `Recent` of an earlier call with this `b`, the same strides and as many elements of `a`."""
        state = self.planner.states[own()]
        if type(a) not in PLAIN or type(b) not in PLAIN or b.layout is not torch.strided:
            return None
        recent = state.recent.get((slot, a.numel(), b.stride()))
        if recent is None or not recent.check(a, b, *others):
            return None
        state.recent[slot] = recent
        return recent

    def compute(
        self, form: Form, a: Any, b: Any, tensors: Sequence[Any], numbers: Sequence[float], out: Any
    ) -> Any:
        """The result of `fused` for any operands. The first call of every key comes here; a key
        holds all that a plan depends on."""
        planner, call = self.planner, form.call
        if planner.is_off and planner.observe is None:
            return by_torch(form, a, b, tensors, numbers, out)
        are_plain = type(a) in PLAIN and type(b) in PLAIN
        for tensor in tensors:
            are_plain = are_plain and type(tensor) in PLAIN
        if call == BELOW_AUTOGRAD:
            if not are_plain or deterministic() or any(map(guards.is_lazy, (a, b, *tensors))):
                return None
        elif not are_plain:
            _check_tensors(form, (a, b, *tensors))
            return by_torch(form, a, b, tensors, numbers, out)
        elif guards.function_modes() and guards.are_functions_watched() and planner.observe is None:
            return by_torch(form, a, b, tensors, numbers, out)  # such a mode must see torch's functions
        elif (
            out is None  # torch.matmul(out=) is not cast
            and guards.any_autocast()
            and (form.is_plain or a.dtype.itemsize > 1)  # products of scaled operands are not cast
            and (cast := guards.cast_by_autocast(a, b, *_cast_along(form, tensors))) is not None
        ):
            return self._cast(form, a, b, tensors, numbers, cast)
        elif not guards.is_ordinary(a, b, tensors):
            if out is None and self._is_differentiable(form, a, b, tensors):
                return self._differentiably(form, a, b, tensors, numbers)
            return by_torch(form, a, b, tensors, numbers, out)
        if out is not None and (type(out) not in PLAIN or guards.is_lazy(out)):
            return by_torch(form, a, b, tensors, numbers, out)
        if planner.observe is not None:
            if call == BELOW_AUTOGRAD:
                return None
            computed = partial(by_torch, form, a, b, tensors, numbers, out)
            return planner.observe(form, a, b, tensors, out, computed)
        others = tensors if out is None else (*tensors, out)
        try:
            low = (a.data_ptr() | b.data_ptr()) % ALIGNMENT
            below = 0
            for tensor in tensors:
                below |= tensor.data_ptr() % MAX_ALIGNMENT
            key: tuple[Any, ...] = (
                form, low & -low, below & -below, a.dtype is torch.float32 and guards.tf32_allowed(),
                guards.REDUCTIONS.get(a.dtype, bool)(),
                a.shape, a.stride(), a.dtype, a.device, b.shape, b.stride(), b.dtype, b.device,
            )  # fmt: skip
            for tensor in others:
                key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        except RuntimeError:  # sparse and nested tensors have no strides
            return by_torch(form, a, b, tensors, numbers, out)
        state = planner.states[own()]
        plan = state.plans.get(key)
        if not plan:
            state, plan = planner.plan(key, Call(form, a, b, tensors, numbers, out))
        if not isinstance(plan, Plan):
            if isinstance(plan, Composed):
                multiply = partial(self.product, call)
                adds = state.policy.is_batch_invariant  # torch's own call with a bias would also multiply
                biased = (lambda x, y, bias: multiply(x, y) + bias) if adds else None
                return unfused(form, a, b, tensors, numbers, out, multiply=multiply, biased=biased)
            if not (low or below) and key in state.plans:
                self._remember(state, key, None, form, (a, b, *others), out)
            return by_torch(form, a, b, tensors, numbers, out)
        result = out
        if result is None:
            shape, _, dtype = plan.output
            result = a.new_empty(shape, dtype=dtype)
        elif not (is_writable(plan, a, b, result) and is_apart_from(result, tensors)):
            return by_torch(form, a, b, tensors, numbers, out)
        elif not result.is_inference():  # inference tensors have no version counter
            increment_version(result)
        try:
            launch_plan(plan, a, b.t() if call == LINEAR else b, result, form, tensors, numbers)
        except Exception as error:
            planner.drop(state, key, plan, a, b, error)
            return by_torch(form, a, b, tensors, numbers, out)
        if form.writes:
            if not tensors[-1].is_inference():
                increment_version(tensors[-1])
        elif plan.launch_at is not None and not low:
            self._remember(state, key, plan, form, (a, b, *others), out)
        return result

    def _cast(
        self, form: Form, a: Any, b: Any, tensors: Sequence[Any], numbers: Sequence[float], cast: Any
    ) -> Any:
        """The operands as torch's own calls would cast them: autocast casts the operands of the product's
        call, with bias and C. Later terms keep their dtype, which the result takes if it is wider.
        """
        if cast is guards.TORCHS:
            return by_torch(form, a, b, tensors, numbers, None)
        if form.out_dtype is not None:  # the caller defines the dtype of the result, and so of added terms
            return self.fused(form, autocast(a, cast), autocast(b, cast), tensors, numbers)
        names = [operand.name for operand in form.epilogue.operands if operand.kind != "number"]
        # A user's function returns the product's dtype, whatever its operands have.
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
            before = form_of(form.call, text, form.out_dtype, form.accumulation)
            return self.fused(before, a, b, seen[:-1], numbers) + seen[-1]
        return by_torch(form, a, b, seen, numbers, None)

    def _differentiably(
        self, form: Form, a: Any, b: Any, tensors: Sequence[Any], numbers: Sequence[float]
    ) -> Any:
        """Compute with torch's operations and dispatched products, also in the backward pass."""
        linear, product = form.call == LINEAR, self.below_autograd

        def multiply(*_: Any) -> Any:
            return differentiably(product, a, b, linear)

        def biased(_a: Any, _b: Any, bias: Any) -> Any:
            right = b.t() if linear else b
            if bias.shape != right.shape[-1:]:  # which torch broadcasts
                return added(a, right, bias)
            return differentiably(product, a, b, linear, bias, self._add)

        if form.is_plain:
            return multiply()
        return unfused(form, a, b, tensors, numbers, multiply=multiply, biased=biased)

    def _add(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor | None = self.fused(_BIASED_BELOW_AUTOGRAD, a, b, (bias,))
        return added(a, b, bias) if result is None else result

    def _remember(
        self,
        state: State,
        key: tuple[Any, ...],
        plan: Plan | None,
        form: Form,
        tensors: tuple[Any, ...],
        out: Any,
    ) -> None:
        """Let the next call with this `b` find the plan without a key. tensors: all of them, `out` last."""
        if tensors[0].is_meta:
            return
        recent = state.recent.get(key)
        if recent is None or not recent.check(*tensors):  # built in another mode, such as inference mode
            allowed = guards.reductions_allowed(tensors[0].dtype)
            reduces = not all(allowed) if plan is None else plan.reduces
            recent = state.recent[key] = Recent(
                guards.check_of(tensors, reductions=reduces),
                plan,
                plan.launch_at if plan is not None else None,
                form.torchs,
                form.call != BELOW_AUTOGRAD and any(tensor.requires_grad for tensor in tensors),
                out is not None and not out.is_inference(),
                (plan.device.index or 0) if plan is not None and plan.guarded else -1,
            )
        if len(state.recent) >= 3 * MAX_PLANS:  # by three hints each
            state.forget_checks()
        a, b = tensors[:2]
        slot = b.data_ptr() | form.tag | (0 if out is None else 2)
        state.recent[slot] = state.recent[slot, a.numel(), b.stride()] = recent
        is_layer = form.torchs is linear and out is None
        if plan is None and is_layer and a.dtype.itemsize == 2 and a.is_contiguous():
            self.planner.states.put_quick(state, b.data_ptr() + (len(tensors) > 2), {a.numel()})

    def _is_differentiable(self, form: Form, a: Any, b: Any, tensors: Sequence[Any]) -> bool:
        """Whether `is_ordinary` is False only because of gradients."""
        names = (operand.name for operand in form.epilogue.operands if operand.kind != "number")
        taken = () if form.is_plain else taken_operands(form, a, b)
        return (
            a.dtype == b.dtype
            and a.dtype in DTYPES
            and a.device.type == b.device.type == self.planner.device_type
            and is_simple(a, b)
            and guards.are_plain()
            and (form.call != ADDMM or form.text in ("", "bias_n"))  # the others need torch's derivative
            and (form.call != LINEAR or b.ndim == 2)
            and all(each.dtype is a.dtype for name, each in zip(names, tensors, strict=True) if name in taken)
            and not (guards.is_lazy(a) or guards.is_lazy(b))
        )


def _check_tensors(form: Form, operands: tuple[Any, ...]) -> None:
    """Raises ProblemError for an operand that is not a tensor, unless torch's own function computes the whole
    form and raises its own error."""
    if not form.is_plain and (form.call, form.text) != (LINEAR, "bias_n"):
        for operand in operands:
            if not isinstance(operand, torch.Tensor):
                raise ProblemError(f"operand {operand!r:.40} is not a tensor; give torch tensors")


def _cast_along(form: Form, tensors: Sequence[Any]) -> Sequence[Any]:
    """The epilogue's tensors that autocast casts."""
    return () if form.out_dtype is not None else tensors[: len(tensors) - form.writes]
