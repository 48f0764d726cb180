"""Layers of one input that are trained in eager code, where torch computes all their products.

A node of autograd's in Python costs the host 10 us and more, so each of these does a lot: gate and up with
their products, q, k and v as one product. Of the gate torch runs two elementwise kernels forward and three
backward, and keeps the activation's result; here it is one and one (`tunegemm.generate.kernel_gates`), and
the activation is computed again. Each result is rounded once, where torch rounds what it is made of, too.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from tunegemm.describe.epilogue import GATED
from tunegemm.errors import TunegemmWarning
from tunegemm.generate.cublaslt.eager import step_of
from tunegemm.serve.guards import (
    capturing,
    current_device,
    dispatch_modes,
    grad_enabled,
    is_lazy,
    is_transformed,
)
from tunegemm.serve.torch.autograd import PLAIN
from tunegemm.serve.torch.together import beside

#: Whether these are served; not where Triton cannot compile.
served = True
#: From how many rows times weights on: 4096 rows of q, k and v of a 1B model, which are 2.6e10, and all that
#: was larger gained (docs/decisions/0028). A step of less waits for the host.
least = 1 << 34

#: Elements of a block, of 8 warps, whose threads so read and write 16 bytes at once.
_BLOCK = 2048
#: How many elements a gate has is a multiple of this, which Triton makes vectors of.
MULTIPLE = 16
#: What was launched before, as Triton gave it: it costs the host a third of what looking for it there does.
loaded: dict[tuple[Any, ...], Any] = {}
_compiling = threading.Lock()


class TrainedGate(torch.autograd.Function):
    """``activation(x @ gate.T) * (x @ up.T)``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
        """name: as in epilogues, such as swiglu."""
        flat = x.flatten(0, -2)
        first, second = torch.mm(flat, gate.t()), torch.mm(flat, up.t())
        result = torch.empty_like(first)
        if not launch("forward", name, first, second, result):
            result = _gate(name, first, second)
        ctx.name = name
        ctx.save_for_backward(x, gate, up, first, second)
        return result.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, up, first, second = ctx.saved_tensors
        if _is_ordinary(grad, first, second):
            grad, first, second = map(_dense, (grad, first, second))
            of_first, of_second = torch.empty_like(first), torch.empty_like(second)
            if launch("backward", ctx.name, grad, first, second, of_first, of_second):
                flat, of_x = x.flatten(0, -2), None
                if ctx.needs_input_grad[0]:
                    of_x = torch.mm(of_first, gate).addmm_(of_second, up).view(x.shape)
                return of_x, torch.mm(of_first.t(), flat), torch.mm(of_second.t(), flat), None
        return *_by_torch(partial(_layers, ctx.name), (x, gate, up), (grad,)), None


class TrainedLayers(torch.autograd.Function):
    """The results of linear layers by one product; backward is one for the input, and one for all weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, whole: torch.Tensor, *weights: torch.Tensor) -> Any:
        """whole: all weights after one another, in one storage with them."""
        ctx.whole, ctx.rows = whole, [weight.shape[0] for weight in weights]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        # Not views as autograd means it: what is written into one is not in the others.
        return tuple(torch.unsafe_split_with_sizes(linear(x, whole), ctx.rows, -1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found = [grad for grad in grads if grad is not None]
        if not found:
            return (None,) * len(ctx.needs_input_grad)
        x, *weights = ctx.saved_tensors
        if not _is_ordinary(*found):
            of_x, *of_weights = _by_torch(_each, (x, *weights), grads)
            return of_x, None, *of_weights
        grad, of_x = beside(grads, ctx.rows).flatten(0, -2), None
        if ctx.needs_input_grad[0]:
            of_x = torch.mm(grad, ctx.whole).view(x.shape)
        of_all = torch.unsafe_split_with_sizes(torch.mm(grad.t(), x.flatten(0, -2)), ctx.rows)
        of_each = [None if one is None else part for one, part in zip(grads, of_all, strict=True)]
        return of_x, None, *of_each


def _each(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(linear(x, weight) for weight in weights)


def _is_ordinary(*tensors: torch.Tensor) -> bool:
    """Whether memory has the values, and nobody looks on who wants torch's operators, or differentiates."""
    return not (grad_enabled() or dispatch_modes() or is_transformed()) and all(
        type(tensor) in PLAIN
        and not is_lazy(tensor)
        and not torch._C._functorch.is_legacy_batchedtensor(tensor)  # of is_grads_batched
        for tensor in tensors
    )


def _by_torch(
    compute: Callable[..., Any], inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients by torch, which may be differentiated."""
    is_differentiated = grad_enabled()
    with torch.enable_grad():
        # Not the inputs, whose hooks are called with what this returns.
        aliases = [each.view_as(each) if each.requires_grad else each for each in inputs]
        results = compute(*aliases)
        results = results if isinstance(results, tuple) else (results,)
        pairs = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
        wanted = [each for each in aliases if each.requires_grad]
        found = iter(
            torch.autograd.grad(
                [result for result, _ in pairs], wanted, [grad for _, grad in pairs],
                create_graph=is_differentiated, allow_unused=True,
            )
        )  # fmt: skip
    return tuple(next(found) if each.requires_grad else None for each in aliases)


def _layers(name: str, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _gate(name, linear(x, gate), linear(x, up))


def _gate(name: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    activated: torch.Tensor = step_of(GATED[name], first.dtype)(first, {}, None)
    return activated * second


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """In order, from an address of vectors: hooks unpack as they like, and sums spread their gradient out."""
    if tensor.is_contiguous() and not tensor.data_ptr() % 16:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def launch(kernel: str, name: str, *tensors: torch.Tensor) -> bool:
    """Whether a kernel was launched; it is not where Triton cannot compile it, or not now.

    tensors: of as many elements each, a `MULTIPLE`.
    """
    first, count = tensors[0], tensors[0].numel()
    if not served:
        return False
    if not count:
        return True
    key = kernel, name, first.dtype, first.device, count >> 31
    found = loaded.get(key)
    if found is None and capturing(first.device):
        return False  # loading a kernel waits for the device
    grid, arguments = (-(-count // _BLOCK), 1, 1), (*tensors, count, GATED[name], _BLOCK)
    if first.device.index in (None, current_device()):
        return _launched(key, found, grid, arguments)
    with torch.cuda.device_of(first):
        return _launched(key, found, grid, arguments)


def _launched(key: tuple[Any, ...], found: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> bool:
    try:
        if found is not None:
            found[grid](*arguments)
            return True
        with _compiling:  # Triton's own cache is not made for threads
            from tunegemm.generate import kernel_gates

            loaded[key] = getattr(kernel_gates, key[0])[grid](*arguments, num_warps=8)
    except Exception as error:  # whatever a compiler raises, such as where there is none for C
        _give_up(error)
        return False
    return True


def _give_up(error: Exception) -> None:
    global served
    served = False
    line = next(iter(str(error).splitlines()), type(error).__name__)
    warnings.warn(
        f"gates of layers that are trained are torch's: Triton cannot compile for them ({line})",
        TunegemmWarning,
        stacklevel=2,
    )
