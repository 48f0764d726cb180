"""From a call to a launch: a kernel that is known costs the host less than torch.mm does.

A *plan* is the prepared launch for one key of shapes, strides, dtypes, devices and, below 16, the bytes that
addresses are multiples of; None says that torch computes products of that key. Plans are made on the first
call of a key, under a lock, and are then read without one. Nothing is compiled or tuned here, and nothing is
read or loaded while the current stream records a CUDA graph: a product without a plan then falls back to
torch.

Building such a key costs more than all else that is left of a call. So a call first looks at what was done
last with the `b` at this address, mostly a weight: if one check in C says that the operands are as they were
then, that plan is right, whatever `b` is now. (Not with the same object: what ATen and Inductor's code pass
is a new view each time.) Code that was compiled for certain operands does without the check, too.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes

from tunegemm.dispatch.autograd import PLAIN
from tunegemm.dispatch.forms import ADDMM, BELOW_AUTOGRAD, BMM, LINEAR, MATMUL, SCALED_MM, Form, form_of
from tunegemm.dispatch.fx import data_ptr
from tunegemm.dispatch.guards import (
    are_functions_watched,
    current_device,
    deterministic,
    dispatch_modes,
    function_modes,
    grad_enabled,
    only_checks_operators,
    reductions_allowed,
)
from tunegemm.dispatch.operands import ALIGNMENT
from tunegemm.dispatch.planning import Planner
from tunegemm.dispatch.plans import Recent, are_apart, is_apart_from
from tunegemm.dispatch.slow_path import SlowPath, by_torch
from tunegemm.dispatch.states import own
from tunegemm.dispatch.unfused import one_function_into

#: The forms of products that are stored as they are, by their call.
_PLAIN_FORMS = {call: form_of(call, "") for call in (MATMUL, LINEAR, BELOW_AUTOGRAD, BMM, ADDMM, SCALED_MM)}


class Dispatcher:
    """The calls. The module `api` holds the one that `tunegemm.matmul` uses.

    It and its `SlowPath` call each other: a call that is not known goes there, and the products that such a
    call consists of, as of cast operands or of a backward pass, come back as calls of their own.

    `product`, `fused` and `compiled` each spell out what forbids a launch now (modes, deterministic
    algorithms, another current device) and what a launch is. That is said three times on purpose: as a
    function it would cost every call a Python call more. What is changed in one is changed in all.
    """

    def __init__(self, planner: Planner | None = None) -> None:
        self.planner = planner or Planner()
        self._slowly = SlowPath(self.planner, self.product, self.fused).compute
        self._empty = self.planner.allocate

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """See `tunegemm.matmul`."""
        return self.product(MATMUL, a, b, out)

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """See `tunegemm.linear`."""
        if bias is None:
            return self.product(LINEAR, x, weight)
        return self.fused(form_of(LINEAR, "bias_n"), x, weight, (bias,))

    def below_autograd(self, a: Any, b: Any, out: Any = None) -> Any:
        """The product ``a @ b`` by a recorded kernel, or None where torch is to compute it.

        For callers below autograd, transforms and modes. What the user did not write in so many words draws
        no warning of its strides: only a record that is missing does.
        """
        return self.product(BELOW_AUTOGRAD, a, b, out)

    def product(self, call: int, a: Any, b: Any, out: Any = None) -> Any:
        """What a call such as `MATMUL` makes of a and b."""
        try:
            b_address = data_ptr(b)
            # Torch's check of tensors ends the process at a nested one (2.13).
            is_odd = b_address & (ALIGNMENT - 1) or a.is_nested is True
        except (AttributeError, RuntimeError, TypeError):  # no tensor, or such as has no memory
            return self._slowly(_PLAIN_FORMS[call], a, b, (), (), out)
        if is_odd:
            return self._slowly(_PLAIN_FORMS[call], a, b, (), (), out)
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
            return self._slowly(_PLAIN_FORMS[call], a, b, (), (), out)
        plan, launch = recent.plan, recent.launch
        if plan is None or launch is None:  # torch's, in whatever mode
            if time.monotonic() < self.planner.next_look:
                if out is None and recent.torchs is not None:
                    return recent.torchs(a, b)
                return by_torch(_PLAIN_FORMS[call], a, b, (), (), out)
            return self._slowly(_PLAIN_FORMS[call], a, b, (), (), out)
        a_address = data_ptr(a)
        if a_address & (ALIGNMENT - 1):
            return self._slowly(_PLAIN_FORMS[call], a, b, (), (), out)
        if (
            dispatch_modes()
            or (function_modes() and are_functions_watched())
            or deterministic()
            or forward_ad._current_level >= 0
            or (recent.device_index >= 0 and recent.device_index != current_device())
        ):
            return self._slowly(_PLAIN_FORMS[call], a, b, (), (), out)
        try:
            if out is None:
                result = self._empty(*plan.output)
                launch(a_address, b_address, result.data_ptr())
                return result
            out_address = out.data_ptr()
            if are_apart(plan, a_address, b_address, out_address):
                if recent.bumps_version:
                    increment_version(out)
                launch(a_address, b_address, out_address)
                return out
        except (RuntimeError, ValueError):  # the slow path meets it again, and knows what to do
            pass
        return self._slowly(_PLAIN_FORMS[call], a, b, (), (), out)

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

        None where the form's call is BELOW_AUTOGRAD and torch is to compute it.
        """
        try:
            b_address = data_ptr(b)
            is_odd = b_address & (ALIGNMENT - 1) or a.is_nested is True
        except (AttributeError, RuntimeError, TypeError):
            return self._slowly(form, a, b, tensors, numbers, out)
        if is_odd:
            return self._slowly(form, a, b, tensors, numbers, out)
        slot = b_address | form.tag if out is None else b_address | 2 | form.tag
        everything = (a, b, *tensors) if out is None else (a, b, *tensors, out)
        recent = self.planner.states[own()].recent.get(slot)
        if recent is None or not recent.check(*everything):
            recent = self._earlier(slot, *everything)
        if recent is None or (recent.requires_grad and grad_enabled()):
            return self._slowly(form, a, b, tensors, numbers, out)
        plan, launch = recent.plan, recent.launch
        if plan is None or launch is None:  # torch's, in whatever mode
            if time.monotonic() < self.planner.next_look:
                if out is None and recent.torchs is not None:
                    return recent.torchs(a, b, *tensors)
                return by_torch(form, a, b, tensors, numbers, out)
            return self._slowly(form, a, b, tensors, numbers, out)
        a_address = data_ptr(a)
        if a_address & (ALIGNMENT - 1):
            return self._slowly(form, a, b, tensors, numbers, out)
        if (
            dispatch_modes()
            or (function_modes() and are_functions_watched())
            or deterministic()
            or forward_ad._current_level >= 0
            or (recent.device_index >= 0 and recent.device_index != current_device())
        ):
            return self._slowly(form, a, b, tensors, numbers, out)
        words = () if plan.words is None else plan.words(tensors, numbers)
        try:
            if words is None:
                pass
            elif out is None:
                result = self._empty(*plan.output)
                launch(a_address, b_address, result.data_ptr(), *words)
                return result
            elif are_apart(plan, a_address, b_address, out.data_ptr()) and is_apart_from(out, tensors):
                if recent.bumps_version:
                    increment_version(out)
                launch(a_address, b_address, out.data_ptr(), *words)
                return out
        except (RuntimeError, ValueError):  # the slow path meets it again, and knows what to do
            pass
        return self._slowly(form, a, b, tensors, numbers, out)

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
        """What a form makes of a product, for a compiler's code, which has made sure of all but addresses.

        site: the dtypes, extents, strides and devices of all operands in words, with the number of rows where
        that is not in them; empty where others may change.
        """
        recent = self.planner.states[own()].recent.get(site)
        if recent is None:
            pass
        elif recent.launch is None:
            if recent.torchs is not None and time.monotonic() < self.planner.next_look:
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
                except (RuntimeError, ValueError):  # the slow path meets it again, and knows what to do
                    pass
        if only_checks_operators():
            # Were this first call torch's, a CUDA graph of the next one would hold torch's product for good.
            with _disable_current_modes():
                return self.compiled(site, form, a, b, tensors, numbers, out)
        result = self.fused(form, a, b, tensors, numbers, out)
        state = self.planner.states[own()]
        recent = state.recent.get(b.data_ptr() | 2 | form.tag)
        # Where a setting of torch's may forbid the kernel, each call looks at it again.
        if not site or recent is None or a.dtype is torch.float32 or not recent.check(a, b, *tensors, out):
            return result
        if recent.plan is None:
            torchs = one_function_into(form)
            matrices = a.ndim == b.ndim == 2 and all(tensor.ndim == 1 for tensor in tensors)
            if torchs is not None and matrices and all(reductions_allowed(a.dtype)):
                state.recent[site] = replace(recent, torchs=torchs)
        elif not recent.plan.reduces:
            state.recent[site] = recent
        return result

    def known(self, form: Form, a: torch.Tensor, b: torch.Tensor, *tensors: torch.Tensor) -> Recent | None:
        """What a call of `fused` without `out` found, made just now; None where it depends on addresses."""
        recent = self.planner.states[own()].recent.get(b.data_ptr() | form.tag)
        return recent if recent is not None and recent.check(a, b, *tensors) else None

    def _earlier(self, slot: int, a: Any, b: Any, *others: Any) -> Recent | None:
        """What was done before the last time with this `b`, laid out so, for as many rows of `a`."""
        state = self.planner.states[own()]
        if type(a) not in PLAIN or type(b) not in PLAIN or b.layout is not torch.strided:
            return None
        recent = state.recent.get((slot, a.numel(), b.stride()))
        if recent is None or not recent.check(a, b, *others):
            return None
        state.recent[slot] = recent
        return recent
