"""The gate of an MLP that is trained: ``activation(gate) * up``, of the halves of each row of one matrix.

Torch runs two elementwise kernels forward, three backward, and one to put the gradients of both beside each
other. Here it is one and one (`tunegemm.generate.kernel_gates`), and nothing but the matrix is kept: the
activation is computed again. Each result is rounded once, where torch rounds what it is made of, too.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch

from tunegemm.describe.epilogue import GATED
from tunegemm.errors import TunegemmWarning
from tunegemm.generate.cublaslt.eager import step_of
from tunegemm.serve.guards import capturing, current_device, dispatch_modes, is_lazy, is_transformed
from tunegemm.serve.torch.autograd import DTYPES, PLAIN

#: Whether the kernels are served: not before a GPU has shown them right.
SERVED = False
DEVICE_TYPE = "cuda"

#: Columns of a block; of 4 warps, whose threads so read and write 16 bytes at once.
_MOST_COLUMNS = 1024
#: What was launched before, as Triton gave it: it costs the host a third of what looking for it there does.
loaded: dict[tuple[Any, ...], Any] = {}
_compiling = threading.Lock()


class Gate(torch.autograd.Function):
    """``activation(gate) * up`` of a matrix (..., 2 n) that `takes`."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, gate: str) -> torch.Tensor:
        """gate: its name in epilogues, such as swiglu."""
        ctx.gate = gate
        ctx.save_for_backward(whole)
        result = whole.new_empty((*whole.shape[:-1], whole.shape[-1] // 2))
        if not launch("forward", gate, whole, whole, result):
            first, up = whole.chunk(2, -1)
            torch.mul(_activated(gate, first), up, out=result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (whole,) = ctx.saved_tensors
        if _is_plain(grad) and _is_plain(whole) and not torch.is_grad_enabled():
            whole, grad = _dense(whole), _dense(grad)
            result = torch.empty_like(whole)
            if launch("backward", ctx.gate, whole, grad, whole, result):
                return result, None
        return _gradients(ctx.gate, grad, whole), None


def takes(whole: torch.Tensor) -> bool:
    """Whether there is a kernel for a matrix."""
    return (
        SERVED
        and whole.device.type == DEVICE_TYPE
        and whole.dtype in DTYPES
        and type(whole) in PLAIN
        and whole.is_contiguous()
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether memory has the values, and nobody looks on who wants torch's operators, such as vmap."""
    return (
        type(tensor) in PLAIN
        and not (dispatch_modes() or is_transformed() or is_lazy(tensor))
        and not torch._C._functorch.is_legacy_batchedtensor(tensor)  # of is_grads_batched
    )


def launch(name: str, gate: str, whole: torch.Tensor, *operands: torch.Tensor) -> bool:
    """Whether a kernel was launched; it is not where Triton cannot compile it, or not now."""
    if not SERVED or whole.device.type != DEVICE_TYPE:
        return False
    columns = whole.shape[-1] // 2
    rows = whole.numel() // max(1, whole.shape[-1])
    if not rows * columns:
        return True
    key = name, gate, whole.dtype, columns, whole.device
    kernel = loaded.get(key)
    if kernel is None and capturing(whole.device):
        return False  # loading a kernel waits for the device
    size = min(_MOST_COLUMNS, 1 << (columns - 1).bit_length())
    grid, arguments = (rows * -(-columns // size), 1, 1), (*operands, columns, GATED[gate], size)
    if whole.device.index in (None, current_device()):
        return _launched(key, kernel, grid, arguments)
    with torch.cuda.device_of(whole):
        return _launched(key, kernel, grid, arguments)


def _launched(key: tuple[Any, ...], kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> bool:
    try:
        if kernel is not None:
            kernel[grid](*arguments)
            return True
        with _compiling:  # Triton's own cache is not made for threads
            from tunegemm.generate import kernel_gates

            loaded[key] = getattr(kernel_gates, key[0])[grid](*arguments, num_warps=4)
    except Exception as error:  # whatever a compiler raises, such as where there is none for C
        _give_up(error)
        return False
    return True


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """In order, from an address of vectors: hooks unpack as they like, and sums spread their gradient out."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _give_up(error: Exception) -> None:
    global SERVED
    SERVED = False
    line = next(iter(str(error).splitlines()), type(error).__name__)
    warnings.warn(
        f"gates of layers that are trained are torch's: Triton cannot compile for them ({line})",
        TunegemmWarning,
        stacklevel=2,
    )


def _activated(gate: str, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = step_of(GATED[gate], x.dtype)(x, {}, None)
    return result


def _gradients(gate: str, grad: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The gradients of both halves by torch's operators, as torch has them; they may be differentiated."""
    first, up = whole.chunk(2, -1)
    through, aten = grad * up, torch.ops.aten
    if gate == "swiglu" and torch.is_grad_enabled():  # torch's own operator has no derivative
        sigmoid = first.sigmoid()
        of_first = through * sigmoid * (1 + first * (1 - sigmoid))
    elif gate == "swiglu":
        of_first = aten.silu_backward(through, first)
    elif gate == "reglu":
        of_first = aten.threshold_backward(through, first, 0)
    else:
        approximate = "tanh" if gate == "geglu_tanh" else "none"
        of_first = aten.gelu_backward(through, first, approximate=approximate)
    return torch.cat((of_first, grad * _activated(gate, first)), -1)
