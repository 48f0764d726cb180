"""The patterns that the pass looks for, each with its match, its replacement and its requirements.

To add one: write a function that returns a `Match` for a node, or None; add a site for it in `sites` (and for
Inductor a function in `graph_pass`); and put the pattern into `PATTERNS`, before patterns that match parts of
it. The pass itself refuses matches whose operands are written to in between, whose intermediates have other
users, that mix dtypes or devices, or that need gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from tunegemm.generate.joined import MOST_WEIGHTS
from tunegemm.layers import sites
from tunegemm.layers.graph import (
    Layer,
    activation_of,
    are_same,
    calls,
    is_matrix,
    layout_of,
    linear_of,
    may_write,
    passed_on,
    product_of,
    storage_of,
    takes_views,
    value,
)


@dataclass(frozen=True)
class Match:
    """Nodes that one call replaces."""

    kind: str
    """The pattern's name, for a count."""
    nodes: tuple[Node, ...]
    """All nodes that the call replaces; its result replaces that of the last one."""
    operands: tuple[Node, ...]
    """The call's operands: first the input, then weights, biases and a residual."""
    site: Callable[..., Any]
    """Makes the call from facts about the operands."""
    words: tuple[Any, ...]
    """The first arguments of `site`."""
    results: tuple[Node, ...] = ()
    """If the call has several results, the nodes that they replace, in order. The call then stands at the
    place of the first."""
    ends: tuple[Node, ...] = ()
    """The ends of groups of rows: the call's last argument."""

    def made(self, facts: tuple[Any, ...]) -> Any:
        """The call."""
        return self.site(*self.words, facts)

    @property
    def weights(self) -> int:
        """How many operands, from the second on, are weight matrices."""
        return {"gate": 2, "several": len(self.results), "product": 0}.get(self.kind, 1)


#: Recognises a node, such as the last one of a match.
Pattern: TypeAlias = Callable[[Node], Match | None]


def gate(node: Node) -> Match | None:
    """``act(linear(x, gate)) * linear(x, up)``, in either order, each with a bias or neither."""
    for activated, other in _both_ways(calls(node, "mul")):
        result, up = activation_of(activated), linear_of(other)
        if result is None or up is None or (first := linear_of(result[1])) is None:
            continue
        (x, weight, bias), (same, upper, upper_bias) = first, up
        if same is not x or (bias is None) != (upper_bias is None):
            continue
        if not _lie_alike(weight, upper) or value(weight).shape != value(upper).shape:
            continue
        biases = () if bias is None or upper_bias is None else (bias, upper_bias)
        return Match(
            "gate", (result[1], activated, other, node), (x, weight, upper, *biases), sites.gated,
            (result[0], sites.TWO_WEIGHTS, bool(biases)),
        )  # fmt: skip
    return None


def half_gate(node: Node, layer: Callable[[Node], Layer | None] = linear_of) -> Match | None:
    """As the pattern above, for the halves of one layer's result, or for alternating columns, however they
    are split.

    layer: returns a node's linear layer; the graphs of engines spell layers differently.
    """
    for activated, other in _both_ways(calls(node, "mul")):
        result, upper = activation_of(activated), part_of(other)
        gate = None if result is None else part_of(result[1])
        if result is None or gate is None or upper is None or gate.whole is not upper.whole:
            continue
        layout = _LAYOUTS.get((gate.part, upper.part))
        if layout is None or (linear := layer(gate.whole)) is None:
            continue
        x, weight, bias = linear
        between = dict.fromkeys((*gate.nodes, *upper.nodes))
        return Match(
            "half gate", (gate.whole, *between, activated, node),
            (x, weight) if bias is None else (x, weight, bias), sites.gated,
            (result[0], layout, bias is not None),
        )  # fmt: skip
    return None


def chain(node: Node) -> Match | None:
    """A layer with an activation, a residual, or both: ``residual + act(linear(x, weight, bias))``."""
    residual: Node | None = None
    found = _layer_behind(node)
    if (pair := calls(node, "add")) is not None:
        for left, right in _both_ways(pair):
            if isinstance(left, Node) and isinstance(right, Node) and len(right.users) == 1:
                residual, found = left, _layer_behind(right)
            if found is not None:
                break
        if residual is None or found is None or not _lies_as(residual, node):
            return None
        if not are_same(value(residual).shape, value(found[0][0]).shape):  # a residual of more dimensions
            return None
    if found is None:
        return None
    nodes, activation, (x, weight, bias) = found
    if residual is None and not activation:
        return None
    operands = [x, weight, *([] if bias is None else [bias]), *([] if residual is None else [residual])]
    words = activation, bias is not None, residual is not None
    return Match("chain", tuple(dict.fromkeys((*nodes, node))), tuple(operands), sites.chain, words)


def _layer_behind(node: Node) -> tuple[list[Node], str, Layer] | None:
    """A linear layer, the name of its activation, and all nodes from the layer to this one, which may also be
    disabled dropouts; None if there is no layer."""
    nodes = [node]
    while (source := passed_on(nodes[0])) is not None:
        nodes.insert(0, source)
    activation = ""
    if (result := activation_of(nodes[0])) is not None:
        activation = result[0]
        nodes.insert(0, result[1])
    layer = linear_of(nodes[0])
    return None if layer is None else (nodes, activation, layer)


def several(node: Node) -> Match | None:
    """Two or three linear layers of one input, such as q, k and v, if this node is the first of them."""
    if (layer := linear_of(node)) is None:
        return None
    x, first, bias = layer
    results: list[tuple[Node, Node, Node | None]] = []
    for user in x.users:
        if (other := linear_of(user)) is not None and other[0] is x and _lie_alike(first, other[1]):
            results.append((user, other[1], other[2]))
    if not 2 <= len(results) <= MOST_WEIGHTS or results[0][0] is not node:
        return None
    nodes, weights, biases = zip(*results, strict=True)
    if any((each is None) != (bias is None) for each in biases) or not all(map(takes_views, nodes)):
        return None
    columns = tuple(value(weight).shape[0] for weight in weights)
    operands = (x, *weights, *(biases if bias is not None else ()))
    return Match("several", nodes, operands, sites.several, (bias is not None, columns), nodes)


def linear(node: Node) -> Match | None:
    """A single linear layer."""
    if (layer := linear_of(node)) is None:
        return None
    x, weight, bias = layer
    operands = (x, weight) if bias is None else (x, weight, bias)
    return Match("linear", (node,), operands, sites.chain, ("", bias is not None, False))


def product(node: Node) -> Match | None:
    """A product outside linear layers: of two matrices or batches of them, or of rows in groups."""
    operands = product_of(node)
    if operands is None or any(each is None or each.ndim < 2 for each in map(value, operands[:2])):
        return None
    call: Callable[..., Any] = sites.grouped if len(operands) == 3 else sites.product
    return Match("product", (node,), operands[:2], lambda facts: call, (), ends=operands[2:])


#: In the order in which they are looked for.
PATTERNS: tuple[Pattern, ...] = (gate, half_gate, chain, several, linear, product)

_LAYOUTS = {
    ("first", "second"): "gate first",
    ("second", "first"): "up first",
    ("even", "odd"): "alternate",
}


@dataclass(frozen=True)
class _Part:
    whole: Node
    part: str
    nodes: tuple[Node, ...]
    """The nodes that split it."""


def part_of(node: Any) -> _Part | None:
    """The columns of a node's result that another node selects, by whatever views: a half, or every other
    column."""
    if (part := value(node)) is None:
        return None
    nodes: tuple[Node, ...] = ()
    while node.args and isinstance(node.args[0], Node) and not may_write(node):
        nodes, node = (node, *nodes), node.args[0]
        whole = value(node)  # None for the parts that `chunk` returns
        if whole is not None and storage_of(whole) != storage_of(part):
            return None
        if whole is not None and (name := _columns_of(part, whole)) is not None:
            return _Part(node, name, nodes)
    return None


def _columns_of(part: torch.Tensor, whole: torch.Tensor) -> str | None:
    """Which columns of a tensor a tensor in the same memory has."""
    columns = whole.shape[-1] if whole.ndim else 1
    if (
        type(columns) is not int
        or columns % 2
        or part.dtype != whole.dtype
        or not are_same(part.shape, (*whole.shape[:-1], columns // 2))
        or not are_same(part.stride()[:-1], whole.stride()[:-1])
        or whole.stride(-1) != 1
    ):
        return None
    offset: Any = part.storage_offset() - whole.storage_offset()
    names = {(0, 1): "first", (columns // 2, 1): "second", (0, 2): "even", (1, 2): "odd"}
    return names.get((offset, part.stride(-1))) if type(offset) is int else None


def _both_ways(pair: tuple[Any, Any] | None) -> list[tuple[Any, Any]]:
    return [] if pair is None else [pair, pair[::-1]]


def _lie_alike(first: Node, second: Node) -> bool:
    """Whether two weights have the same layout and dtype; their numbers of rows may differ."""
    left, right = value(first), value(second)
    if left is None or right is None or not (is_matrix(left) and is_matrix(right)):
        return False
    return (left.shape[1], left.stride(), left.dtype) == (right.shape[1], right.stride(), right.dtype)


def _lies_as(node: Node, other: Node) -> bool:
    """Whether two results have the same shape and strides. Otherwise the strides of their sum may depend on
    which of them is the first."""
    left, right = value(node), value(other)
    return left is not None and right is not None and are_same(layout_of(left), layout_of(right))
