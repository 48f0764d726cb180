"""Serves every product of a program, for `enable`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch

import tunegemm.groups.scaled_groups  # noqa: F401 - puts products of groups into the registry
from tunegemm.choose.operators import OPERATORS
from tunegemm.dispatch import api, extension
from tunegemm.dispatch.autograd import DTYPES
from tunegemm.dispatch.forms import BELOW_AUTOGRAD, form_of
from tunegemm.dispatch.guards import tf32_allowed
from tunegemm.dispatch.library import addmm_steps, call_of, is_sum
from tunegemm.generate.cublaslt.products import INT8_LEAST_ROWS
from tunegemm.torch import blocks
from tunegemm.torch.aten import replacements

#: The dispatch keys whose products are taken over.
DEVICE_KEYS = ("CUDA",)


class Takeover:
    """What `enable` returns: a context manager. When it ends, torch computes its products again."""

    def __enter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        """Its current state, and how to end it."""
        if self not in active:
            return "<tunegemm.enable(): ended; torch computes its products>"
        return (
            "<tunegemm.enable(): torch's products of CUDA tensors run tuned kernels until tunegemm.disable()>"
        )

    def __exit__(self, *_: object) -> None:
        with _lock:
            if self in active:
                active.remove(self)
                if not active:
                    replacements.remove("takeover")


active: list[Takeover] = []
_lock = threading.RLock()


def begin(counting: Callable[..., Callable[..., Any]] | None = None) -> Takeover:
    """Do the work of `enable`, but for Inductor's pass.

    counting: makes functions that count an operator's calls, if this is the outermost block, as
    `enabled.Counts.counting` does.
    """
    served = _SERVED | extension.operators

    def wrap(name: str, kernel: Any) -> Callable[..., Any]:
        if counting is None or name not in OPERATORS:  # products of groups have no `Problem` to count by
            return served[name](kernel)
        return counting(name, served[name], kernel)

    takeover = Takeover()
    with _lock:
        if not active:
            replacements.put("takeover", tuple(served), DEVICE_KEYS, wrap)
        active.append(takeover)
    return takeover


def disable() -> None:
    """End `enable`, even if it was called several times."""
    with _lock:
        active.clear()
        replacements.remove("takeover")


# Torch computes the calls that a function lets through, and rejects bad operands itself.


def plain_products(kernel: Callable[..., Any], dimensions: int) -> Callable[..., Any]:
    """For ``mm(a, b)`` and ``bmm(a, b)``, and these with ``out``."""

    def serve(keyset: Any, a: torch.Tensor, b: torch.Tensor, *more: Any, **keywords: Any) -> Any:
        # Torch computes overloads with further arguments (`out_dtype`) and dtypes without kernels.
        if (
            _is_served_dtype(a)
            and not more
            and a.ndim == b.ndim == dimensions
            and (dimensions == 2 or a.shape[0] == b.shape[0])
            and (not keywords or (len(keywords) == 1 and "out" in keywords))
        ):
            if dimensions == 3 and a.shape[0] == 1 and not keywords:  # as einsum writes a single product
                result = api.dispatcher.below_autograd(a[0], b[0])
                result = None if result is None else result[None]
            else:
                result = api.dispatcher.below_autograd(a, b, keywords.get("out"))
            if result is not None:
                return result
        return kernel(keyset, a, b, *more, **keywords)

    return serve


def sums(kernel: Callable[..., Any], dimensions: int) -> Callable[..., Any]:
    """For ``addmm(c, a, b, *, beta, alpha)`` and ``baddbmm``, and these with ``out``."""

    def serve(
        keyset: Any, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *more: Any, **keywords: Any
    ) -> Any:
        beta, alpha = keywords.get("beta", 1), keywords.get("alpha", 1)
        if not more and _is_served_dtype(a) and is_sum(c, a, b, beta, dimensions):  # more: an `out_dtype`
            try:
                text, tensors, numbers = addmm_steps(c, a, b, beta, alpha)
            except TypeError:  # of a complex number
                return kernel(keyset, c, a, b, **keywords)
            form, out = form_of(BELOW_AUTOGRAD, text), keywords.get("out")
            result = api.dispatcher.fused(form, a, b, tensors, numbers, out)
            if result is not None:
                return result
        return kernel(keyset, c, a, b, *more, **keywords)

    return serve


def _scaling(kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
    """For ``_scaled_mm``, and ``_scaled_mm_v2``, which torch.nn.functional.scaled_mm calls; with ``out``."""

    def serve(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
        call, refusal = call_of(name, arguments, keywords)
        if not refusal:
            result = api.dispatcher.fused(*call)
        else:
            result = blocks.below_autograd(name, arguments, keywords)
        return kernel(keyset, *arguments, **keywords) if result is None else result

    return serve


def int8_products(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """For ``_int_mm``, and this with ``out``."""
    form = form_of(BELOW_AUTOGRAD, "", torch.int32)

    def serve(keyset: Any, a: torch.Tensor, b: torch.Tensor, **keywords: Any) -> Any:
        result = None
        if a.dtype == b.dtype == torch.int8 and a.ndim == b.ndim == 2 and has_int8_extents(a, b):
            result = api.dispatcher.fused(form, a, b, (), (), keywords.get("out"))
        return kernel(keyset, a, b, **keywords) if result is None else result

    return serve


def has_int8_extents(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether torch multiplies such matrices on a GPU; other devices accept all."""
    return not a.is_cuda or (a.shape[0] >= INT8_LEAST_ROWS and not (a.shape[1] % 8 or b.shape[1] % 8))


def _is_served_dtype(a: torch.Tensor) -> bool:
    # A program that is served as a whole should report shapes to tune, not every fp32 product.
    return a.dtype in DTYPES or (a.dtype is torch.float32 and tf32_allowed())


def _serving(name: str) -> Callable[[Any], Callable[..., Any]]:
    """The maker of the function that replaces an operator's kernel, by the operator's meaning."""
    operator, dimensions = OPERATORS[name], 3 if name.endswith("bmm") else 2
    if any("scale_tensor" in steps for steps in operator.absorbs):
        return partial(_scaling, name=name)
    if operator.absorbs:
        return partial(sums, dimensions=dimensions)
    return int8_products if name == "_int_mm" else partial(plain_products, dimensions=dimensions)


#: The products of two matrices. Rooms with other products add theirs to `extension.operators`.
_SERVED = {name: _serving(name) for name, operator in OPERATORS.items() if not operator.refusal}
