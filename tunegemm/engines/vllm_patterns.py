"""The pattern that the pass of `tunegemm.layers` matches in vLLM's graphs, in vLLM's spelling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from tunegemm.dispatch import extension
from tunegemm.engines import vllm_gates
from tunegemm.layers import fusion
from tunegemm.layers.graph import Layer, transposed_of, value
from tunegemm.layers.patterns import Match, half_gate

_MM = torch.ops.tunegemm.mm
_HOPPER = 9, 0


def fuse(module: torch.fx.GraphModule) -> int:
    """Put the operator for gates into a graph that Dynamo traced; returns the number of replacements."""
    count = fusion.fuse(module.graph, _operator_for, _PATTERNS).total()
    if count:
        module.recompile()
    return count


def _linear_of(node: Any) -> Layer | None:
    """The input and weight of a linear layer in vLLM's graph; None if the node is no such layer.

    The layer is a product by the function that replaces vLLM's `default_unquantized_gemm`.
    """
    if not isinstance(node, Node) or node.target not in (_MM, _MM.default):
        return None
    x, turned = node.args
    weight = transposed_of(turned)
    return (x, weight, None) if isinstance(x, Node) and weight is not None else None


#: vLLM's SiluAndMul slices the halves as torch's own code does.
_PATTERNS = (partial(half_gate, layer=_linear_of),)


def _operator_for(match: Match, facts: tuple[Any, ...]) -> Callable[..., torch.Tensor] | None:
    """The operator, if a gated kernel serves some numbers of rows of the product; else None."""
    columns, k, row_stride, dtype, device = facts
    if (
        match.words == ("silu", "gate first", False)
        and value(match.operands[0]).ndim == 2
        and dtype is torch.bfloat16
        and row_stride == k
        and (device.type != "cuda" or _is_hopper(device))
        and not extension.policy().is_batch_invariant
        and vllm_gates.ranges(columns, k)
    ):
        operator: Callable[..., torch.Tensor] = torch.ops.tunegemm.engine_gated.default
        return operator
    return None


def _is_hopper(device: torch.device) -> bool:
    """Whether the device can run both our kernel and vLLM's own."""
    return torch.cuda.get_device_capability(device) == _HOPPER and hasattr(torch.ops._C, "silu_and_mul")
