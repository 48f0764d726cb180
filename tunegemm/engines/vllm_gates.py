"""vLLM: gate and up, and silu's gate of them, by one kernel. Written for 0.26 to 0.33.

vLLM has gate's rows and up's in one weight, multiplies by both at once, and takes the gate of the halves in a
kernel of its own. In the graph that its compiler gets the two become one operator, which goes by the real
number of rows: where no gated kernel pays it is the plain product and vLLM's kernel.

What has adapters, is quantised or has a bias is another graph, and stays as it is; so are products under
``VLLM_BATCH_INVARIANT``, and models that are not compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from tunegemm.dispatch import api, extension
from tunegemm.dispatch.forms import MATMUL, form_of
from tunegemm.engines import halves
from tunegemm.engines.common import plain, replace
from tunegemm.groups.routing import Gate, routing
from tunegemm.model.grouped import choose
from tunegemm.torch import ops
from tunegemm.torch.lowering import lower_to_function

#: In what vLLM's compile cache goes by, beside the records: its graphs have the operator.
FACT = "gates"

_MM = torch.ops.tunegemm.mm
_PLAIN = form_of(MATMUL, "")
_HOPPER = 9, 0
_SILU = Gate(slope=1.0, limit=float("inf"), offset=0.0, interleaved=False)

#: From and to how many rows the kernel of both is taken. Llama-3-8B in vLLM on an H200, two runs of
#: 2026-11-27 (`other_rows` of benchmarks/results/h200/vllm.json): with it decode had 1.084 times vLLM's speed
#: at 64 rows and prefill, of 512 and 8192, 1.017 to 1.032; without it 1.067 and 0.996 to 1.002. But at 1, 16
#: and 256 rows it had 1.045, 1.058 and 1.002, beside 1.079, 1.065 and 1.022. Where between these the ends are
#: is a guess.
SERVED = ((33, 128), (512, halves.MOST_ROWS))

#: Rows and columns of the weights that were multiplied by.
met: dict[torch.Size, None] = {}

_library = torch.library.Library("tunegemm", "FRAGMENT")
_library.define("engine_gated(Tensor x, Tensor weight) -> Tensor")


def _gated(x: torch.Tensor, weight: torch.Tensor, site: str = "") -> torch.Tensor:
    """``silu(gate) * up`` of the halves of ``x @ weight.T``. site: as for `Dispatcher.compiled`, but rows."""
    weight, rows, result = plain(weight), x.size(0), None
    met[weight.shape] = None
    if _is_served(rows):
        result = halves.gated(x, halves.one_group(weight), (), halves.GATE, in_turns=False)
    if result is None:
        both = x.new_empty((rows, weight.size(0)))
        place = (site, rows) if site else ""
        api.dispatcher.compiled(place, _PLAIN, x, weight.t(), (), (), both)
        result = _gate_of(both)
    return result


@cache
def _is_served(rows: int) -> bool:
    return any(least <= rows <= most for least, most in SERVED)


def _gate_of(both: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of a product, by a kernel of many blocks a row; by vLLM's until that is loaded, and
    on a CPU by torch. (vLLM's has one block a row: with it decode of one sequence was 1.044 of vLLM's speed,
    with Inductor's code of the gate 1.079.)
    """
    columns = both.size(1) // 2
    if not both.is_cuda:
        return torch.nn.functional.silu(both[:, :columns]) * both[:, columns:]
    result = routing.gate(both, _SILU)
    if result is None:
        result = both.new_empty((both.size(0), columns))
        torch.ops._C.silu_and_mul(result, both)
    return result


_library.impl("engine_gated", _gated, "CompositeExplicitAutograd")
torch.library.register_fake(
    "tunegemm::engine_gated",
    lambda x, weight: x.new_empty((x.shape[0], weight.shape[0] // 2)),
    lib=_library,
)


def said() -> str:
    """At which numbers of rows gates are made with their product, of the weights that were multiplied by."""
    found = []
    for shape in met:
        ranges = ", ".join(f"{least} to {most}" for least, most in _ranges(*shape))
        found.append(f"{'x'.join(map(str, shape))} at {ranges} rows")
    return f"; with silu's gate bf16 {', '.join(found)}" if found else ""


def lower() -> None:
    """See `engines.lower`."""
    lower_to_function(
        torch.ops.tunegemm.engine_gated.default, _gated, "tunegemm_engine_gated",
        lambda x, weight: [x.get_size()[0], weight.get_size()[0] // 2],
    )  # fmt: skip


def serve_gates(before: Callable[[Any, torch.fx.GraphModule], None]) -> None:
    """Has Inductor's code call the operator's function, and each graph changed before vLLM compiles it.

    before: of vLLM's configuration and the graph: `fuse`, where the configuration has `FACT`. Imports that
    compiler: for a process that computes. Raises Misfit for a version that is not known.
    """
    lower()

    def make(own: Any) -> Any:
        def __call__(self: Any, graph: torch.fx.GraphModule, *others: Any, **words: Any) -> Any:
            before(self.vllm_config, graph)
            return own(self, graph, *others, **words)

        return __call__

    replace("vllm.compilation.backends.VllmBackend.__call__", ("self", "graph"), make)


def fuse(module: torch.fx.GraphModule) -> int:
    """Puts the operator into a graph that Dynamo traced; returns how often."""
    count, graph = 0, module.graph
    for product in [node for node in graph.nodes if node.target in (_MM, _MM.default)]:
        steps = _steps(product)
        if not steps or not _may_pay(product):
            continue
        x, turned = _operands(product)
        with graph.inserting_before(steps[0]):
            gated = graph.call_function(torch.ops.tunegemm.engine_gated.default, (x, turned.args[0]))
        gated.meta = {**steps[0].meta}
        steps[0].replace_all_uses_with(gated)
        for node in (*steps, product, turned):
            if not node.users:
                graph.erase_node(node)
        count += 1
    if count:
        module.recompile()
    return count


def _operands(product: Node) -> tuple[Any, Any]:
    """A product's operands, of which the second is a transposed weight."""
    x, turned = product.args
    return x, turned


def _steps(product: Node) -> tuple[Node, ...]:
    """What makes silu's gate of the halves of a product with a transposed weight, last things first; none
    where something else is made of it."""
    if not _is(_operands(product)[1], "t") or len(product.users) != 2:
        return ()
    half = product.meta["example_value"].shape[-1] // 2
    gate, up = (
        next((user for user in product.users if _is(user, operator.getitem, product, (..., index))), None)
        for index in (slice(None, half), slice(half, None))
    )
    silu, result = _only_user(gate), _only_user(up)
    if gate is None or up is None or silu is None or result is None:
        return ()
    multiplies = _is(result, operator.mul, silu, up) or _is(result, operator.mul, up, silu)
    if not (multiplies and _is(silu, torch.nn.functional.silu, gate) and _only_user(silu) is result):
        return ()
    return result, silu, gate, up


def _is(node: Any, target: object, *arguments: object) -> bool:
    """Whether a node calls this; with these arguments and no others, where any are given."""
    return (
        isinstance(node, Node)
        and node.target == target
        and not node.kwargs
        and (not arguments or node.args == arguments)
    )


def _only_user(node: Node | None) -> Node | None:
    users = [] if node is None else [*node.users]
    return users[0] if len(users) == 1 else None


def _may_pay(product: Node) -> bool:
    """Whether a gated kernel serves some numbers of rows of a product."""
    x, turned = _operands(product)
    x, weight = (node.meta["example_value"] for node in (x, turned.args[0]))
    return (
        x.ndim == weight.ndim == 2
        and x.dtype is weight.dtype is torch.bfloat16
        and weight.is_contiguous()
        and weight.device.type == ops.DEVICE_TYPE
        and (weight.device.type != "cuda" or _is_hopper(weight.device))
        and not extension.policy().is_batch_invariant
        and bool(_ranges(*weight.shape))
    )


def _is_hopper(device: torch.device) -> bool:
    """Whether both ways can be gone there, vLLM's own kernel being one."""
    return torch.cuda.get_device_capability(device) == _HOPPER and hasattr(torch.ops._C, "silu_and_mul")


def _ranges(columns: int, k: int) -> list[tuple[int, int]]:
    """From and to how many rows the kernel of both may serve the product with a weight (columns, k)."""
    found: list[tuple[int, int]] = []
    for least, most, few, many in sorted(halves.SERVED):
        if columns % 16 or not few <= columns <= many:
            continue
        for first, last in ((max(least, first), min(most, last)) for first, last in SERVED):
            if first > last or choose(1, columns, k, last, gate=halves.GATE) is None:
                continue
            if found and first <= found[-1][1] + 1:
                first, last = found[-1][0], max(last, found.pop()[1])
            found.append((first, last))
    return found
