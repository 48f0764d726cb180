"""Attention masks that a graph computes from its extents alone, as models of transformers do under Dynamo.

Eager transformers passes no mask if the mask would be causal, so that torch's fastest attention runs. Traced
code cannot look at a mask: it computes the mask from `arange` and passes it, and attention with a mask is
slower. This module computes the mask once for each set of extents. If it is causal, attention runs without
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from tunegemm.dispatch.guards import capturing
from tunegemm.layers.graph import are_same, may_write, name_of, only_computes, storages_of, value

_attention: Any = functional.scaled_dot_product_attention
sdpa: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention
"""What `attend` calls."""
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
#: The names of functions and methods that may compute a mask: each depends on its arguments alone.
_COMPUTING = frozenset((
    "add", "sub", "mul", "floordiv", "mod", "neg", "diff", "cumsum", "lt", "le", "gt", "ge", "eq", "ne",
    "and_", "or_", "xor", "invert", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or",
    "bitwise_not", "where", "tril", "triu", "arange", "zeros", "ones", "full", "zeros_like", "ones_like",
    "full_like", "new_zeros", "new_ones", "new_full", "to", "bool", "int", "long", "float", "getitem", "view",
    "reshape", "unsqueeze", "squeeze", "expand", "transpose", "contiguous",
))  # fmt: skip
#: Sets of extents that one mask remembers. Steps of an engine keep bringing new ones.
_MOST = 4096


class Mask:
    """Computes a mask from extents; None if the mask is causal."""

    def __init__(self, program: GraphModule) -> None:
        self.program = program
        self.causal: dict[tuple[int, ...], bool] = {}
        self.__name__ = "tunegemm_mask"  # which torch.fx writes into code

    def __call__(self, *extents: int) -> torch.Tensor | None:
        causal = self.causal.get(extents)
        if causal:
            return None
        mask: torch.Tensor = self.program(*extents)
        if causal is None and not capturing(mask.device):
            try:
                causal = torch.equal(mask, mask.new_ones(mask.shape[-2:]).tril().expand_as(mask))
            except torch.OutOfMemoryError:  # looked at again by the next call
                return mask
            if len(self.causal) >= _MOST:
                self.causal.clear()
            self.causal[extents] = causal
        return None if causal else mask


def attend(query: Any, key: Any, value: Any, attn_mask: Any, **words: Any) -> torch.Tensor:
    """Torch's attention, causal if the mask is None."""
    return sdpa(query, key, value, attn_mask=attn_mask, is_causal=attn_mask is None, **words)


def drop(graph: Graph) -> int:
    """Replace masks that a graph computes from extents alone, in place. Returns how many calls of attention
    had such a mask."""
    count, masks = 0, dict.fromkeys(each for node in graph.nodes if (each := _mask_of(node)) is not None)
    for mask in masks:
        users = [*mask.users]
        result = _computed(mask) if all(_mask_of(user) is mask for user in users) else None
        if result is None or _is_written(graph, result[0]):
            continue
        nodes, extents = result
        with graph.inserting_before(users[0]):
            new = graph.call_function(Mask(_program(nodes, extents)), tuple(extents))
        for user in users:
            words = dict(zip(_NAMES, user.args, strict=False)) | user.kwargs
            words.pop("is_causal", None)
            with graph.inserting_before(user):
                call = graph.call_function(attend, (), words | {"attn_mask": new})
            call.meta = {**user.meta}
            user.replace_all_uses_with(call)
            graph.erase_node(user)
        for node in reversed(nodes):
            if not node.users:
                graph.erase_node(node)
        count += len(users)
    return count


def _mask_of(node: Node) -> Node | None:
    """The mask of a call of attention, of truth values for each query and key; None for anything else."""
    if node.target is not _attention:
        return None
    words: dict[str, Any] = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
    mask, query, key = (words.get(name) for name in ("attn_mask", "query", "key"))
    result, of_query, of_key = value(mask), value(query), value(key)
    if words.get("is_causal") or result is None or of_query is None or of_key is None:
        return None
    if result.dtype is not torch.bool or result.ndim < 2:
        return None
    length = of_query.shape[-2]
    is_square = are_same(result.shape[-2:], (length, length)) and are_same(of_key.shape[-2:-1], (length,))
    lead, of_result = of_query.shape[:-2], result.shape[:-2]  # torch refuses a mask of more batches
    fits = len(of_result) <= len(lead) and all(
        are_same((extent,), (1,)) or are_same((extent,), (own,))
        for extent, own in zip(reversed(of_result), reversed(lead), strict=False)
    )
    return mask if is_square and fits and isinstance(mask, Node) else None


def _computed(mask: Node) -> tuple[list[Node], list[Node]] | None:
    """The nodes that compute a mask, in the graph's order, and the extents they start from; None if they
    start from an input tensor of the graph."""
    nodes, extents, left = set[Node](), dict[Node, None](), [mask]
    while left:
        node = left.pop()
        if node in nodes or node in extents:
            continue
        if isinstance(node.meta.get("example_value"), int | torch.SymInt):
            extents[node] = None
            continue
        name = name_of(node).removeprefix("__").removesuffix("__")  # as Dynamo of torch 2.11 has `__lt__`
        is_method = node.op == "call_method"
        if name not in _COMPUTING or "out" in node.kwargs or not (is_method or only_computes(node.target)):
            return None
        nodes.add(node)
        left += node.all_input_nodes
    return [node for node in mask.graph.nodes if node in nodes], [*extents]


def _is_written(graph: Graph, nodes: Iterable[Node]) -> bool:
    """Whether anything in the graph may write to the results of these nodes."""
    places = {place for node in nodes for place in storages_of(node)}
    reads = (read for node in graph.nodes if may_write(node) for read in node.all_input_nodes)
    return any(places & storages_of(read) for read in reads)


def _program(nodes: Iterable[Node], extents: Iterable[Node]) -> GraphModule:
    """The same nodes as a function of the extents."""
    graph = Graph()
    copies = {node: graph.placeholder(f"extent_{number}") for number, node in enumerate(extents)}
    for node in nodes:
        last = copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(last)
    return GraphModule(torch.nn.Module(), graph)
