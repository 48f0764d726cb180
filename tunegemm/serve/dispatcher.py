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

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes

from tunegemm.describe.problem import MAX_ALIGNMENT
from tunegemm.serve.forms import LINEAR, MATMUL, RECORDED, Form, form_of
from tunegemm.serve.guards import (
    TORCHS,
    TensorGuards,
    any_autocast,
    autocast,
    cast_by_autocast,
    check_of,
    current_device,
    deterministic,
    dispatch_modes,
    functorch_level,
    grad_enabled,
    is_ordinary,
    is_quiet,
    only_checks_operators,
    tf32_allowed,
    tracing,
)
from tunegemm.serve.operands import ALIGNMENT
from tunegemm.serve.planning import MAX_PLANS, Planner
from tunegemm.serve.plans import Plan, Recent, State, are_apart, is_apart_from, is_writable, launch_plan
from tunegemm.serve.torch.autograd import (
    DTYPES,
    PLAIN,
    add_differentiably,
    is_simple,
    multiply_differentiably,
)
from tunegemm.serve.unfused import absorbs, taken_operands, unfused

#: The forms of products that are stored as they are, by their kind.
_PLAIN_FORMS = {kind: form_of(kind, "") for kind in (MATMUL, LINEAR, RECORDED)}
_RECORDED_BIASED = form_of(RECORDED, "bias_n")


class Dispatcher(Planner):
    """The calls. The module `api` holds the one that `tunegemm.matmul` uses."""

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
        """What a form makes of a product, for a compiler's code, which has made sure of all but addresses.

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
        if only_checks_operators():
            # Were this first call torch's, a CUDA graph of the next one would hold torch's product for good.
            with _disable_current_modes():
                return self.compiled(site, form, a, b, tensors, numbers, out)
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
        """What torch's own calls would make of it: autocast casts what goes into the product's call, bias
        and C, too; what is added afterwards keeps its dtype, which may be wider and then is the result's.
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


def _torchs(form: Form, a: Any, b: Any, tensors: Sequence[Any], numbers: Sequence[float], out: Any) -> Any:
    return None if form.kind == RECORDED else unfused(form, a, b, tensors, numbers, out)


def _torch_product(kind: int, a: Any, b: Any, out: Any) -> Any:
    if kind == RECORDED:
        return None
    return torch.nn.functional.linear(a, b) if kind == LINEAR else _torch_matmul(a, b, out)


def _torch_matmul(a: Any, b: Any, out: Any) -> Any:
    return torch.matmul(a, b) if out is None else torch.matmul(a, b, out=out)
