"""The one pass over a graph of torch's operations. It replaces each match of a pattern by tunegemm's call."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from tunegemm.dispatch import extension
from tunegemm.dispatch.autograd import DTYPES
from tunegemm.layers.graph import Order, are_same, is_matrix, mark_turned, read_results, transposed_of, value
from tunegemm.layers.patterns import PATTERNS, Match, Pattern

#: Makes the function that a match becomes; None where the graph's own operations are to stay.
Make = Callable[[Match, tuple[Any, ...]], Callable[..., Any] | None]


def fuse(graph: Graph, make: Make = Match.made, patterns: Sequence[Pattern] | None = None) -> Counter[str]:
    """Replace the matches in a graph, in place. Returns how often each pattern matched.

    make: makes the function to call with the operands, from a match and facts about its operands; by default
    its site, for graphs without a compiler. patterns: those to look for, in this order; by default all.
    """
    count: Counter[str] = Counter()
    mark_turned(graph)
    read_results(graph)
    for pattern in PATTERNS if patterns is None else patterns:
        order, gone = Order(graph), set[Node]()
        for node in [*graph.nodes]:
            match = None if node in gone else pattern(node)
            if match is None or gone.intersection(match.nodes) or (facts := _facts(match, order)) is None:
                continue
            if (function := make(match, facts)) is None:
                continue
            _replace(graph, match, function)
            gone.update(match.nodes)
            count[match.kind] += 1
    for node in reversed([*graph.nodes] if count else []):
        if not node.users and transposed_of(node) is not None:  # the transpose of a layer's weight
            graph.erase_node(node)
    return count


def _replace(graph: Graph, match: Match, function: Callable[..., Any]) -> None:
    replaced = match.results or match.nodes[-1:]
    with graph.inserting_before(replaced[0]):
        call = graph.call_function(function, (*match.operands, *match.ends))
        parts = [graph.call_function(operator.getitem, (call, place)) for place in range(len(match.results))]
    for part, node in zip(parts or [call], replaced, strict=True):
        part.meta = {**node.meta}
        node.replace_all_uses_with(part)
    for each in reversed(match.nodes):
        if not each.users:
            graph.erase_node(each)


def _facts(match: Match, order: Order) -> tuple[Any, ...] | None:
    """The common facts of the operands except their rows; None if the match may not be replaced."""
    inside = {*match.nodes}
    results = match.results or match.nodes[-1:]
    if any(user not in inside for node in match.nodes if node not in results for user in node.users):
        return None
    if len(inside) < len(match.nodes) or inside.intersection(match.operands):
        return None  # a layer that is used twice would be computed twice
    tensors = [node for node in match.nodes if isinstance(node.meta.get("example_value"), torch.Tensor)]
    computed = [value(node) for node in (*tensors, match.nodes[-1])]
    operands = [value(node) for node in match.operands]
    if any(each is None for each in (*computed, *operands)):
        return None
    x, weights = operands[0], operands[1 : 1 + match.weights]
    if (
        x.dtype not in DTYPES
        or x.device.type != extension.device_type()
        or any(each.dtype is not x.dtype or each.device != x.device for each in (*computed, *operands))
        or any(each.requires_grad for each in computed)
        or any(each.is_conj() or each.is_neg() for each in (*computed, *operands))
        or not all(map(order.ends_with, match.nodes))
        or x.ndim < 2
    ):
        return None
    if not weights:
        return x.dtype, x.device
    columns = [weight.shape[0] for weight in weights]  # no set: symbols have no hash
    if (
        not all(is_matrix(weight) for weight in weights)
        or not are_same(x.shape[-1:], weights[0].shape[1:])
        or any(each.stride(0) != 1 or each.shape[0] not in columns for each in operands if each.ndim == 1)
        or any(each.ndim == 0 for each in operands)
        or not order.may_move(match.nodes, match.operands)
        or (match.results and not all(order.bring(each, match.nodes[0]) for each in match.operands))
    ):
        return None
    (n, k), row_stride = weights[0].shape, weights[0].stride(0)
    return n, k, row_stride, x.dtype, x.device
