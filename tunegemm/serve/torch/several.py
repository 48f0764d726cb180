"""Products of one input and several weights, in the graphs of torch.compile and torch.export.

`tunegemm::part` is the result of one of several linear layers that read one input, `tunegemm::gated` that of
a pair with its gate. When a graph is made they become `tunegemm::several`, one product of all weights, where
a kernel is recorded or predicted for it, or the rows are few, and else torch's operators, layer by layer.
Equal calls of `several` are one by `lowering`. Where gradients are wanted it is layer by layer
(docs/decisions/0028).

Where the weights lie is seen when the graph runs: a graph holds no address. What was put elsewhere meanwhile
is copied together, at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from tunegemm.describe.epilogue import GATED
from tunegemm.generate.cublaslt.eager import step_of
from tunegemm.serve.dispatcher import Dispatcher
from tunegemm.serve.forms import BELOW_AUTOGRAD, MATMUL, form_of
from tunegemm.serve.torch import ops
from tunegemm.serve.torch.together import (
    Tensors,
    is_gated,
    most_joined,
    operands_of,
)
from tunegemm.serve.unfused import unfused

_library = torch.library.Library("tunegemm", "FRAGMENT")


class _Right(NamedTuple):
    """What `ops.is_served` asks of an operand that does not exist while a graph is made."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    ndim: int = 2

    def stride(self) -> tuple[int, ...]:
        return self.strides


def define(serving: Callable[[], Dispatcher]) -> None:
    """Registers the operators, whose products are computed by what `serving` returns at each call."""
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    layers = "Tensor x, Tensor[] weights, Tensor[] biases"
    _library.define(f"several({layers}, str epilogue, *, str records='') -> Tensor", tags=tags)
    _library.define(f"part({layers}, int index, *, str records='') -> Tensor", tags=tags)
    _library.define(f"gated({layers}, str gate, *, str records='') -> Tensor", tags=tags)

    def compute(
        x: torch.Tensor, weights: Tensors, biases: Tensors, epilogue: str, *, records: str = ""
    ) -> torch.Tensor:
        right, bias = operands_of(weights, biases, epilogue)
        result = None
        if x.device.type == ops.DEVICE_TYPE:
            result = serving().fused(form_of(BELOW_AUTOGRAD, epilogue), x, right, bias)
        if result is None:
            result = unfused(form_of(MATMUL, epilogue), x, right, bias, ())
        return result

    def fake(
        x: torch.Tensor, weights: Tensors, biases: Tensors, epilogue: str, *, records: str = ""
    ) -> torch.Tensor:
        ops.teach_inductor(serving)
        columns = sum(weight.shape[0] for weight in weights)
        return x.new_empty((*x.shape[:-1], columns // 2 if is_gated(epilogue) else columns))

    def right_of(x: torch.Tensor, weights: Tensors) -> Any:
        """All weights as far as they are known; None where an operator of ours may not read them."""
        first = weights[0]
        if torch._C._functorch.peek_interpreter_stack() is not None or x.dtype is not first.dtype:
            return None
        rows, columns = sum(weight.shape[0] for weight in weights), first.shape[1]
        return _Right((columns, rows), (1, columns), first.dtype, first.device)

    def is_served(x: torch.Tensor, weights: Tensors, epilogue: str) -> bool:
        right = right_of(x, weights)
        return right is not None and ops.is_served(serving(), form_of(MATMUL, epilogue), x, right)

    def is_joined(x: torch.Tensor, weights: Tensors) -> bool:
        """Whether one product of torch's takes the layers' place, as in eager code: see `most_joined`."""
        right, planner = right_of(x, weights), serving().planner
        if right is None or not ops.may_be_served(x, right):
            return False
        if planner.is_off or planner.state.policy.is_batch_invariant:
            return False
        size = x.numel()  # for symbolic rows any number is taken: what is lost for many is little
        return (
            not isinstance(size, int)
            or size <= most_joined([each.shape[0] for each in weights]) * right.shape[0]
        )

    def whole_of(x: torch.Tensor, weights: Tensors, biases: Tensors, epilogue: str) -> torch.Tensor:
        return torch.ops.tunegemm.several(x, weights, biases, epilogue, records=ops.CALLS)

    def part(
        x: torch.Tensor, weights: Tensors, biases: Tensors, index: int, *, records: str = ""
    ) -> torch.Tensor:
        weight, bias = weights[index], biases[index] if biases else None
        # An exported graph runs as it is: no compiler joins its equal calls into one.
        if torch.compiler.is_exporting():
            return ops.traced_linear(x, weight, bias)
        epilogue = "bias_n" if biases else ""
        if _trains(x, *weights, *biases) or not (is_served(x, weights, epilogue) or is_joined(x, weights)):
            return ops.traced_linear(x, weight, bias)
        whole = whole_of(x, weights, biases, epilogue)
        start = sum(weight.shape[0] for weight in weights[:index])
        return whole[..., start : start + weight.shape[0]]

    def gated(
        x: torch.Tensor, weights: Tensors, biases: Tensors, gate: str, *, records: str = ""
    ) -> torch.Tensor:
        epilogue = f"bias_n+{gate}" if biases else gate
        if not _trains(x, *weights, *biases) and is_served(x, weights, epilogue):
            return whole_of(x, weights, biases, epilogue)
        results = [ops.traced_linear(x, weight, bias) for weight, bias in _pairs(weights, biases)]
        return _activated(gate, results[0]) * results[1]

    def vmap(
        info: Any, in_dims: Any, x: torch.Tensor, weights: Tensors, biases: Tensors, which: Any, *,
        records: str = "",
    ) -> tuple[torch.Tensor, int | None]:  # fmt: skip
        places = _pairs(in_dims[1], in_dims[2])
        results = [
            _mapped(x, weight, bias, in_dims[0], *dims)
            for (weight, bias), dims in zip(_pairs(weights, biases), places, strict=True)
        ]
        if not isinstance(which, str):
            return results[which]
        (gate, first), (up, second) = results
        return _activated(which, gate) * up, first if second is None else second

    _library.impl("several", compute, "CompositeExplicitAutograd")
    torch.library.register_fake("tunegemm::several", fake, lib=_library)
    _library.impl("part", part, "CompositeImplicitAutograd")
    _library.impl("gated", gated, "CompositeImplicitAutograd")
    for name in ("part", "gated"):
        torch.library.register_vmap(f"tunegemm::{name}", vmap, lib=_library)


def _trains(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _pairs(weights: Sequence[Any], biases: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(weights, biases or [None] * len(weights), strict=True)


def _mapped(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *dims: int | None
) -> tuple[torch.Tensor, int | None]:
    """torch's linear layer where `torch.vmap` maps over these dimensions; the result's is the first.

    By hand: `torch.vmap` within an operator's rule fails under torch.compile (torch 2.13).
    """
    at_x, at_weight, at_bias = dims
    x = x if at_x is None else x.movedim(at_x, 0)
    if at_weight is None:
        result = functional.linear(x, weight)
    else:
        result = torch.einsum(
            f"{'' if at_x is None else 'z'}...k,znk->z...n", x, weight.movedim(at_weight, 0)
        )
    is_mapped = at_x is not None or at_weight is not None
    if bias is not None and at_bias is not None:
        result = result if is_mapped else result[None]
        bias = bias.movedim(at_bias, 0)
        bias, is_mapped = bias.view(-1, *[1] * (result.ndim - 2), bias.shape[-1]), True
    return result if bias is None else result + bias, 0 if is_mapped else None


def _activated(gate: str, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = step_of(GATED[gate], x.dtype)(x, {}, None)
    return result


def traced_part(x: torch.Tensor, weights: Tensors, biases: Tensors, index: int) -> torch.Tensor:
    """The result of one layer of several, while a graph is made."""
    return torch.ops.tunegemm.part(x, weights, biases, index, records=ops.records())


def traced_gated(x: torch.Tensor, weights: Tensors, biases: Tensors, gate: str) -> torch.Tensor:
    """``activation(gate(x)) * up(x)`` of the two layers, while a graph is made."""
    return torch.ops.tunegemm.gated(x, weights, biases, gate, records=ops.records())
