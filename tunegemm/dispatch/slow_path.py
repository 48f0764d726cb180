"""Products of any operands: what the entries of `dispatcher` do not know to be known.

The first call of every key comes here, and so do operands that need more than a launch: gradients, autocast,
unusual addresses, subclasses. A key holds all that a plan depends on; see `plans`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from tunegemm.describe.problem import MAX_ALIGNMENT
from tunegemm.dispatch import guards
from tunegemm.dispatch.autograd import (
    DTYPES,
    PLAIN,
    add_differentiably,
    is_simple,
    multiply_differentiably,
)
from tunegemm.dispatch.forms import ADDMM, BELOW_AUTOGRAD, LINEAR, Form, form_of
from tunegemm.dispatch.fx import refuse_proxies
from tunegemm.dispatch.guards import TORCHS, autocast, cast_by_autocast, deterministic
from tunegemm.dispatch.operands import ALIGNMENT
from tunegemm.dispatch.planning import MAX_PLANS, Planner
from tunegemm.dispatch.plans import (
    COMPOSED,
    Plan,
    Recent,
    State,
    is_apart_from,
    is_writable,
    launch_plan,
)
from tunegemm.dispatch.states import own
from tunegemm.dispatch.unfused import added, one_function, taken_operands, torchs, unfused
from tunegemm.errors import ProblemError

_BIASED_BELOW_AUTOGRAD = form_of(BELOW_AUTOGRAD, "bias_n")


class SlowPath:
    """Computes what a form makes of a product, by a planner's plans or by torch."""

    def __init__(self, planner: Planner, product: Callable[..., Any], fused: Callable[..., Any]) -> None:
        """product, fused: those of the `Dispatcher` that calls this, for the products that a call consists
        of, which may be known to it."""
        self._planner = planner
        self._product = product
        self._below_autograd = partial(product, BELOW_AUTOGRAD)
        self._fused = fused

    def compute(
        self, form: Form, a: Any, b: Any, tensors: Sequence[Any], numbers: Sequence[float], out: Any
    ) -> Any:
        """What `Dispatcher.fused` returns, whatever the operands are."""
        planner, call = self._planner, form.call
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
            return by_torch(form, a, b, tensors, numbers, out)  # which is what such a mode is to see
        elif (
            out is None  # torch.matmul(out=) is not cast
            and guards.any_autocast()
            and (form.is_plain or a.dtype.itemsize > 1)  # products of scaled operands are not cast
            and (cast := cast_by_autocast(a, b, *_cast_along(form, tensors))) is not None
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
            state, plan = planner.plan(key, form, a, b, tensors, numbers, out)
        if not isinstance(plan, Plan):
            if plan is COMPOSED:
                multiply = partial(self._product, call)
                adds = state.policy.is_batch_invariant  # torch's own call with a bias would multiply, too
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
        elif not result.is_inference():  # inference tensors count no versions
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
        """What torch's own calls would make of it: autocast casts what goes into the product's call, bias
        and C, too; what is added afterwards keeps its dtype, which may be wider and then is the result's.
        """
        if cast is TORCHS:
            return by_torch(form, a, b, tensors, numbers, None)
        if form.out_dtype is not None:  # the caller's word on the result, and so on what is added to it
            return self._fused(form, autocast(a, cast), autocast(b, cast), tensors, numbers)
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
            return self._fused(form, a, b, seen, numbers)
        if wide == ["residual"] and form.epilogue.steps[-1] == "residual":
            text = form.text.removesuffix("residual").removesuffix("+")
            before = form_of(form.call, text, form.out_dtype, form.accumulation)
            return self._fused(before, a, b, seen[:-1], numbers) + seen[-1]
        return by_torch(form, a, b, seen, numbers, None)

    def _differentiably(
        self, form: Form, a: Any, b: Any, tensors: Sequence[Any], numbers: Sequence[float]
    ) -> Any:
        """By products that are dispatched, and so are those of the backward pass, and torch's operations."""
        linear, product = form.call == LINEAR, self._below_autograd

        def multiply(*_: Any) -> Any:
            return multiply_differentiably(product, a, b, linear)

        def biased(_a: Any, _b: Any, bias: Any) -> Any:
            right = b.t() if linear else b
            if bias.shape != right.shape[-1:]:  # which torch broadcasts
                return added(a, right, bias)
            return add_differentiably(self._add, product, a, b, bias, linear)

        if form.is_plain:
            return multiply()
        return unfused(form, a, b, tensors, numbers, multiply=multiply, biased=biased)

    def _add(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor | None = self._fused(_BIASED_BELOW_AUTOGRAD, a, b, (bias,))
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
        if not self._can_check(tensors[0]):
            return
        recent = state.recent.get(key)
        if recent is None or not recent.check(*tensors):  # made in another mode, such as inference mode
            allowed = guards.reductions_allowed(tensors[0].dtype)
            reduces = not all(allowed) if plan is None else plan.reduces
            recent = state.recent[key] = Recent(
                guards.check_of(tensors, reductions=reduces),
                plan,
                plan.launch_at if plan is not None else None,
                one_function(form),
                form.call != BELOW_AUTOGRAD and any(tensor.requires_grad for tensor in tensors),
                out is not None and not out.is_inference(),
                (plan.device.index or 0) if plan is not None and plan.guarded else -1,
            )
        self._keep(state, tensors[1].data_ptr() | form.tag | (0 if out is None else 2), tensors, recent)

    def _can_check(self, a: torch.Tensor) -> bool:
        """Whether torch has its check of tensors, and calls with this one may be known by it."""
        return not (guards.TensorGuards is None or self._planner.allocate is None or a.is_meta)

    def _keep(self, state: State, slot: int, tensors: tuple[torch.Tensor, ...], recent: Recent) -> None:
        if len(state.recent) >= 3 * MAX_PLANS:  # by three hints each
            state.forget_checks()
        a, b = tensors[:2]
        state.recent[slot] = state.recent[slot, a.numel(), b.stride()] = recent

    def _is_differentiable(self, form: Form, a: Any, b: Any, tensors: Sequence[Any]) -> bool:
        """Whether `is_ordinary` said no because of gradients alone."""
        names = (operand.name for operand in form.epilogue.operands if operand.kind != "number")
        taken = () if form.is_plain else taken_operands(form, a, b)
        return (
            a.dtype == b.dtype
            and a.dtype in DTYPES
            and a.device.type == b.device.type == self._planner.device_type
            and is_simple(a, b)
            and not guards.is_transformed()
            and (form.call != ADDMM or form.text in ("", "bias_n"))  # of others torch has one derivative
            and (form.call != LINEAR or b.ndim == 2)
            and all(each.dtype is a.dtype for name, each in zip(names, tensors, strict=True) if name in taken)
            and not deterministic()
            and not guards.dispatch_modes()
            and not guards.tracing()
            and not (guards.is_lazy(a) or guards.is_lazy(b))
        )


def _check_tensors(form: Form, operands: tuple[Any, ...]) -> None:
    """Raises TypeError for a proxy of torch.fx, and ProblemError for what is not a tensor, of which torch's
    own function, where one means the whole form, says as much."""
    refuse_proxies(operands)
    if not form.is_plain and (form.call, form.text) != (LINEAR, "bias_n"):
        for operand in operands:
            if not isinstance(operand, torch.Tensor):
                raise ProblemError(f"operand {operand!r:.40} is not a tensor; give torch tensors")


def by_torch(form: Form, a: Any, b: Any, tensors: Sequence[Any], numbers: Sequence[float], out: Any) -> Any:
    """What torch's functions make of it; None for BELOW_AUTOGRAD and ADDMM, whose callers have them."""
    return torchs(form)(a, b, tensors, numbers, out)


def _cast_along(form: Form, tensors: Sequence[Any]) -> Sequence[Any]:
    """The epilogue's tensors whose dtype is autocast's to say."""
    return () if form.out_dtype is not None else tensors[: len(tensors) - form.writes]
