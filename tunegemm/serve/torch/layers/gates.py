"""The gate of an MLP that is trained in eager code: ``activation(gate) * up``, a kernel forward and one back.

Torch runs two forward and three backward, or four where gate and up are halves of one matrix, and keeps the
activation's result, which is computed again here. Arithmetic is fp32, and each result is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch

from tunegemm.describe.epilogue import GATED
from tunegemm.generate import routing as kernels
from tunegemm.generate.cublaslt.eager import step_of
from tunegemm.serve import api, routing
from tunegemm.serve.grouped import are_plain
from tunegemm.serve.guards import any_autocast, grad_enabled, is_lazy, tracing
from tunegemm.serve.operands import ALIGNMENT
from tunegemm.serve.torch.autograd import DTYPES, PLAIN

#: Whether they serve, which is said where kernels are.
SERVED = set(kernels.TRAINED) <= set(kernels.SERVED)
#: Elements of the result from which on the kernels save more than a function of autograd's costs the host:
#: some 20 to 40 us, while of 4096 x 8192 they save some 100.
LEAST = 1 << 22
#: And of a layer's input, whose results may have so many.
LEAST_INPUT = LEAST >> 4
_MOST = 1 << 31


def may_train(x: Any) -> bool:
    """Whether gate and up of an input may be what `takes` takes."""
    return SERVED and grad_enabled() and type(x) in PLAIN and not tracing() and x.numel() >= LEAST_INPUT


def takes(*tensors: Any) -> bool:
    """Whether a gate is `Gate`'s: of gate and up, or of one tensor of which they are halves.

    Never by whether a kernel is compiled, nor by where a tensor lies: what is checkpointed is to be computed
    in one way each time, since torch compares what is kept.
    """
    first, count = tensors[0], len(tensors)
    if not SERVED or not are_plain(*tensors) or any_autocast():
        return False
    elements, planner = first.numel() * count // 2, api.dispatcher.planner
    return (
        LEAST <= elements < _MOST
        and first.shape[-1] * count % ALIGNMENT == 0  # bytes of gate, of 16 bits
        and first.dtype in DTYPES
        and first.device.type == planner.device_type
        and all(
            each.requires_grad
            and each.shape == first.shape
            and each.dtype is first.dtype
            and each.device == first.device
            and each.is_contiguous()
            and not is_lazy(each)
            for each in tensors
        )
        and not planner.is_off
        and not (first.is_cuda and routing.refusal(first.get_device()))
    )


class Gate(torch.autograd.Function):
    """``activation(gate) * up`` of what `takes` took."""

    @staticmethod
    def forward(ctx: Any, name: str, *tensors: torch.Tensor) -> torch.Tensor:
        """name: of the gate in epilogues, such as swiglu."""
        ctx.name = name
        ctx.save_for_backward(*tensors)
        gate, up = _pair(tensors)
        result = None
        if _are_aligned(tensors):
            result = routing.routing.multiply(gate, up, GATED[name])
        return _activated(name, gate) * up if result is None else result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors: tuple[torch.Tensor, ...] = ctx.saved_tensors
        # Who differentiates this, and who looks on, gets torch's operators.
        if not torch.is_grad_enabled() and are_plain(grad, *tensors) and not _is_mapped(grad):
            dense = [_dense(each) for each in tensors]
            found = [torch.empty_like(each) for each in dense]
            (gate, up), (of_gate, of_up) = _pair(dense), _pair(found)
            if routing.routing.derive(_dense(grad), gate, up, of_gate, of_up, GATED[ctx.name]):
                return None, *found
        of_both = _gradients(ctx.name, grad, *_pair(tensors))
        return None, *(of_both if len(tensors) == 2 else [torch.cat(of_both, -1)])


def _pair(tensors: Any) -> Any:
    return tensors if len(tensors) == 2 else tensors[0].chunk(2, -1)


def _are_aligned(tensors: Any) -> bool:
    return not any(each.data_ptr() % ALIGNMENT for each in tensors)


def _is_mapped(tensor: torch.Tensor) -> bool:
    """Whether it stands for many, of `is_grads_batched`."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """In order, from an address of vectors: hooks unpack as they like, and sums spread their gradient out."""
    tensor = tensor.resolve_neg().contiguous()
    return tensor if _are_aligned([tensor]) else tensor.clone()


def _activated(name: str, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = step_of(GATED[name], x.dtype)(x, {}, None)
    return result


def _gradients(
    name: str, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of gate and up by torch's operators, as torch has them; they may be differentiated."""
    through, aten = grad * up, torch.ops.aten
    if name == "swiglu" and torch.is_grad_enabled():  # torch's own operator has no derivative
        sigmoid = gate.sigmoid()
        of_gate = through * sigmoid * (1 + gate * (1 - sigmoid))
    elif name == "swiglu":
        of_gate = aten.silu_backward(through, gate)
    elif name == "reglu":
        of_gate = aten.threshold_backward(through, gate, 0)
    else:
        approximate = "tanh" if name == "geglu_tanh" else "none"
        of_gate = aten.gelu_backward(through, gate, approximate=approximate)
    return of_gate, grad * _activated(name, gate)
