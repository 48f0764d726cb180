"""vLLM: computes gate, up and silu's gate of both with one kernel. Written for 0.26 to 0.33.

vLLM stores the rows of gate and up in one weight, multiplies by both at once, and applies the gate to the
halves in a separate kernel. The pass of `tunegemm.layers` replaces both by one operator in the graph for
vLLM's compiler. Depending on the number of rows, the operator launches one kernel, or the plain product and
then a kernel for the gate.

Layers with adapters, quantization or a bias have another graph, which stays unchanged; so do products under
``VLLM_BATCH_INVARIANT``, and models that are not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.fx import Node

from tunegemm.dispatch import api, extension
from tunegemm.dispatch.forms import PLAIN
from tunegemm.dispatch.guards import deterministic
from tunegemm.engines.common import plain
from tunegemm.groups.routing import SILU, routing
from tunegemm.layers import fusion, sites
from tunegemm.layers.graph import Layer, transposed_of, value
from tunegemm.layers.patterns import Match, half_gate
from tunegemm.torch.lowering import lower_to_function

_MM = torch.ops.tunegemm.mm

#: The shapes of the weights that products have used so far.
met: dict[torch.Size, None] = {}


def _gated(x: torch.Tensor, weight: torch.Tensor, site: str = "") -> torch.Tensor:
    """Compute ``silu(gate) * up`` from the halves of ``x @ weight.T``.

    site: as for `Dispatcher.compiled`, but without the rows.
    """
    weight, rows, result = plain(weight), x.size(0), None
    met[weight.shape] = None
    if is_served(rows, *weight.shape) and not deterministic():
        facts = (*weight.shape, weight.stride(0), weight.dtype, weight.device)
        result = sites.gated("silu", "gate first", False, facts).kernel(x, weight)
    if result is None:
        both = x.new_empty((rows, weight.size(0)))
        place = (site, rows) if site else ""
        api.dispatcher.compiled(place, PLAIN, x, weight.t(), (), (), both)
        result = _gate_of(both)
    return result


@cache
def is_served(rows: int, columns: int, k: int) -> bool:
    return any(least <= rows <= most for least, most in ranges(columns, k))


def ranges(columns: int, k: int) -> tuple[tuple[int, int], ...]:
    """The ranges of rows in which one kernel computes gate, up and silu's gate (`tunegemm.generate.joined`)
    from a weight (columns, k).

    As products alone, on an H200, the kernel was 0.95 to 1.38 times as fast as torch's product and a kernel
    for the gate: six weights at 192 to 8192 rows, of which those below 1.00 are not served. At 96 rows it was
    0.91 to 1.12 times as fast, and plain products of up to 128 rows have kernels of their own. No file keeps
    these runs. In vLLM, with Llama-3-8B on an H200, decode gains with it at 64 and 256 rows (vllm.json); it
    lost at 1 and 16 with a kernel of before (commit 7b264c5d). The ends of the ranges between are guesses.
    """
    if columns % 16 or k % 8 or not 7168 <= columns <= 51200:
        return ()
    return (33, 64), (129 if columns >= 14336 else 1024, 8192)


def _gate_of(both: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) * up`` from a product, with a kernel that uses many blocks per row.

    Until the kernel is loaded, vLLM's serves; on a CPU, torch does. vLLM's kernel uses one block per row:
    with it, decode of one sequence ran at 1.044 times vLLM's speed; with Inductor's code for the gate, at
    1.079.
    """
    columns = both.size(1) // 2
    if not both.is_cuda:
        return torch.nn.functional.silu(both[:, :columns]) * both[:, columns:]
    result = routing.gate(both, SILU)
    if result is None:
        result = both.new_empty((both.size(0), columns))
        torch.ops._C.silu_and_mul(result, both)
    return result


extension.define(
    "engine_gated(Tensor x, Tensor weight) -> Tensor",
    _gated,
    lambda x, weight: x.new_empty((x.shape[0], weight.shape[0] // 2)),
)


def said() -> str:
    """Text for the startup line: the weights and numbers of rows with gates fused into the product."""
    results = []
    for shape in met:
        where = ", ".join(f"{least} to {most}" for least, most in ranges(*shape))
        results.append(f"{'x'.join(map(str, shape))} at {where} rows")
    return f"; with silu's gate bf16 {', '.join(results)}" if results else ""


def lower() -> None:
    """See `engines.common.lower`."""
    lower_to_function(torch.ops.tunegemm.engine_gated.default, _gated, "tunegemm_engine_gated")


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
    return (x, weight) if isinstance(x, Node) and weight is not None else None


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
        and (device.type != "cuda" or (extension.is_hopper(device) and hasattr(torch.ops._C, "silu_and_mul")))
        and not extension.policy().is_batch_invariant
        and ranges(columns, k)
    ):
        return torch.ops.tunegemm.engine_gated.default
    return None
