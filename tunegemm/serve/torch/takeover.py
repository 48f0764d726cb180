"""`enable`, which serves every product of a program, and `patch`, which serves those of a model's layers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import torch

from tunegemm.errors import ProblemError
from tunegemm.serve import api
from tunegemm.serve.forms import LINEAR, RECORDED, form_of
from tunegemm.serve.guards import tf32_allowed
from tunegemm.serve.library import OPERATORS, addmm_steps, scale_steps
from tunegemm.serve.torch.aten import Layer, replacements
from tunegemm.serve.torch.autograd import DTYPES
from tunegemm.serve.torch.fx import node_of

#: Of an operator's name, what makes the function in its kernel's place, and that kernel.
Counting = Callable[[str, Callable[[Any], Callable[..., Any]], Any], Callable[..., Any]]

#: Whose products are taken over.
DEVICE_KEYS = ("CUDA",)
_is_compiling = torch.compiler.is_compiling


class Takeover:
    """What `enable` returns: a context manager, at whose end torch has its products back."""

    def __enter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        """What it does now, and how it ends."""
        if self not in _active:
            return "<tunegemm.enable(): ended; torch computes its products>"
        return (
            "<tunegemm.enable(): torch's products of CUDA tensors run tuned kernels until tunegemm.disable()>"
        )

    def __exit__(self, *_: object) -> None:
        with _lock:
            if self in _active:
                _active.remove(self)
                if not _active:
                    replacements.remove("takeover")


_active: list[Takeover] = []
_lock = threading.RLock()


def enable() -> Takeover:
    """From now on ATen's products of CUDA tensors run the tuned kernel where one is recorded.

    Of the whole process: ``torch.mm``, ``matmul``, ``@``, ``bmm``, ``einsum``, ``addmm``, ``baddbmm``,
    ``nn.Linear``, ``torch._scaled_mm`` and ``_int_mm``, eager, under autograd (all three products) and
    autocast, in the output of torch.compile, and in CUDA graphs captured meanwhile. ``with
    tunegemm.enable():`` ends with its block, a call by itself with `disable`. Blocks may be nested.
    Meanwhile every product that falls back to torch costs a look-up more. Raises TunegemmError when this
    torch cannot replace its kernels.
    """
    return begin()


def begin(counting: Counting | None = None) -> Takeover:
    """As `enable`. counting: makes of an operator's function, where this is the first of nested blocks, one
    that counts its calls.
    """

    def wrap(name: str, kernel: Any) -> Callable[..., Any]:
        return _SERVED[name](kernel) if counting is None else counting(name, _SERVED[name], kernel)

    takeover = Takeover()
    with _lock:
        if not _active:
            replacements.put("takeover", Layer(tuple(_SERVED), DEVICE_KEYS, wrap))
        _active.append(takeover)
    return takeover


def disable() -> None:
    """Torch has its products back, however often `enable` was called. Nothing happens when it was not."""
    with _lock:
        _active.clear()
        replacements.remove("takeover")


def _plain(kernel: Any) -> Callable[..., Any]:
    """For ``mm(a, b)`` and ``bmm(a, b)``, and these with ``out``."""

    def serve(keyset: Any, a: torch.Tensor, b: torch.Tensor, *more: Any, **keywords: Any) -> Any:
        # Overloads with further arguments (`out_dtype`) are torch's, and dtypes that have no kernels.
        if _is_served_dtype(a) and not more and (not keywords or (len(keywords) == 1 and "out" in keywords)):
            if a.ndim == 3 and a.shape[0] == 1 and not keywords:  # as einsum writes a single product
                result = api.dispatcher.recorded(a[0], b[0])
                result = None if result is None else result[None]
            else:
                result = api.dispatcher.recorded(a, b, keywords.get("out"))
            if result is not None:
                return result
        return kernel.call_boxed(keyset, a, b, *more, **keywords)

    return serve


def _adding(kernel: Any) -> Callable[..., Any]:
    """For ``addmm(c, a, b, *, beta, alpha)`` and ``baddbmm``, and these with ``out``."""

    def serve(
        keyset: Any, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *more: Any, **keywords: Any
    ) -> Any:
        if not more and _is_served_dtype(a):  # with more there is an `out_dtype`
            text, tensors, numbers = addmm_steps(c, a, b, keywords.get("beta", 1), keywords.get("alpha", 1))
            form, out = form_of(RECORDED, text), keywords.get("out")
            result = api.dispatcher.fused(form, a, b, tensors, numbers, out)
            if result is not None:
                return result
        return kernel.call_boxed(keyset, c, a, b, *more, **keywords)

    return serve


def _scaling(kernel: Any) -> Callable[..., Any]:
    """For ``_scaled_mm``, and this with ``out``."""

    def serve(
        keyset: Any, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
        bias: torch.Tensor | None = None, scale_result: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None, use_fast_accum: bool = False, **keywords: Any,
    ) -> Any:  # fmt: skip
        text = scale_steps(a, b, scale_a, scale_b, bias is not None)
        if text and scale_result is None:
            form = form_of(RECORDED, text, out_dtype, "fast" if use_fast_accum else "two_level")
            tensors = (scale_a, scale_b) if bias is None else (scale_a, scale_b, bias)
            result = api.dispatcher.fused(form, a, b, tensors, (), keywords.get("out"))
            if result is not None:
                return result
        return kernel.call_boxed(
            keyset, a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum, **keywords
        )

    return serve


def _of_int8(kernel: Any) -> Callable[..., Any]:
    """For ``_int_mm``, and this with ``out``."""
    form = form_of(RECORDED, "", torch.int32)

    def serve(keyset: Any, a: torch.Tensor, b: torch.Tensor, **keywords: Any) -> Any:
        result = api.dispatcher.fused(form, a, b, (), (), keywords.get("out"))
        return kernel.call_boxed(keyset, a, b, **keywords) if result is None else result

    return serve


def _is_served_dtype(a: torch.Tensor) -> bool:
    # A program that is served as a whole is to hear of shapes to be tuned, not of every fp32 product.
    return a.dtype in DTYPES or (a.dtype is torch.float32 and tf32_allowed())


def _serving(name: str) -> Callable[[Any], Callable[..., Any]]:
    """What makes the function in the place of an operator's kernel, by what the operator computes."""
    operator = OPERATORS[name]
    if any("scale_tensor" in steps for steps in operator.absorbs):
        return _scaling
    if operator.absorbs:
        return _adding
    return _of_int8 if name == "_int_mm" else _plain


_SERVED = {name: _serving(name) for name, operator in OPERATORS.items() if operator.served}


class TunedLinear(torch.nn.Linear):
    """`torch.nn.Linear` by `tunegemm.linear`: what `patch` makes of one. Has nothing of its own to store."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if _is_compiling():
            return api.linear(input, self.weight, self.bias)
        weight: torch.Tensor | None
        bias: torch.Tensor | None
        try:  # as attributes of the module the two cost the host a third of the call
            weight, bias = self._parameters["weight"], self._parameters["bias"]
        except KeyError:  # they are something else's to give, such as a parametrization's
            weight, bias = self.weight, self.bias
        try:
            if bias is None:
                return api.product(LINEAR, input, weight)
            return api.dispatcher.fused(api.WITH_BIAS, input, weight, (bias,))
        except TypeError:
            return node_of(api.linear, (input, weight, bias))


def patch(model: torch.nn.Module) -> int:
    """Lets a model's linear layers call `tunegemm.linear`; the number of layers that now do and did not.

    Of `torch.nn.Linear` itself; subclasses keep their own ways. Only the class of a layer changes, to a
    subclass of `torch.nn.Linear`: parameters, their sharing, hooks, `state_dict`, copying and pickling stay
    as they are. Patch before torch.compile: torch 2.11 does not notice that the class changed, and what it
    compiled before stays torch's.
    """
    return _reclass(model, torch.nn.Linear, TunedLinear)


def unpatch(model: torch.nn.Module) -> int:
    """Undoes `patch`; the number of layers that are torch's again."""
    return _reclass(model, TunedLinear, torch.nn.Linear)


def _reclass(model: torch.nn.Module, before: type, after: type) -> int:
    if not isinstance(model, torch.nn.Module):
        raise ProblemError(
            f"model {model!r:.40} is not a torch.nn.Module; give the model whose layers are meant"
        )
    layers = [module for module in model.modules() if type(module) is before]
    for layer in layers:
        layer.__class__ = after
    return len(layers)
