"""What the pass of `tunegemm.layers` is to find in vLLM's graphs, and in vLLM's spelling."""

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
from tunegemm.layers.patterns import Match, Pattern, half_gate

_MM = torch.ops.tunegemm.mm
_HOPPER = 9, 0


def fuse(module: torch.fx.GraphModule) -> int:
    """Puts gates' operator into a graph that Dynamo traced; returns how often."""
    count = fusion.fuse(module.graph, _operator_for, _PATTERNS).total()
    if count:
        module.recompile()
    return count


def _linear_of(node: Any) -> Layer | None:
    """The input and weight of a linear layer as vLLM's graph has it: a product by what vLLM calls in place of
    its `default_unquantized_gemm`."""
    if not isinstance(node, Node) or node.target not in (_MM, _MM.default):
        return None
    x, turned = node.args
    weight = transposed_of(turned)
    return (x, weight, None) if isinstance(x, Node) and weight is not None else None


#: vLLM's SiluAndMul takes the halves as torch's own code does.
_PATTERNS = (Pattern("half gate", partial(half_gate, layer=_linear_of)),)


def _operator_for(match: Match, facts: tuple[Any, ...]) -> Callable[..., torch.Tensor] | None:
    """The operator, where a gated kernel serves some numbers of rows of a product."""
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
    """Whether both ways can be gone there, vLLM's own kernel being one."""
    return torch.cuda.get_device_capability(device) == _HOPPER and hasattr(torch.ops._C, "silu_and_mul")
