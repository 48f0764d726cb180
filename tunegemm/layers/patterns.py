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

from tunegemm.dispatch.forms import ACTIVATIONS
from tunegemm.generate.joined import MOST_WEIGHTS
from tunegemm.layers import sites
from tunegemm.layers.graph import (
    Layer,
    are_same,
    is_matrix,
    layout_of,
    linear_of,
    may_write,
    operation,
    passed_on,
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
    for activated, other in _both_ways(node, "mul"):
        first, second = _layer_behind(activated), _layer_behind(other)
        if first is None or second is None or not first[1] or second[1]:
            continue
        (x, weight, *bias), (same, upper, *upper_bias) = first[2], second[2]
        if same is not x or len(bias) != len(upper_bias) or not _lie_alike(weight, upper):
            continue
        if value(weight).shape != value(upper).shape:
            continue
        operands = (x, weight, upper, *bias, *upper_bias)
        words = first[1], sites.TWO_WEIGHTS, bool(bias)
        return Match("gate", (*first[0], *second[0], node), operands, sites.gated, words)
    return None


def half_gate(node: Node, layer: Callable[[Node], Layer | None] = linear_of) -> Match | None:
    """As the pattern above, for the halves of one layer's result, or for alternating columns, however they
    are split.

    layer: returns a node's linear layer; the graphs of engines spell layers differently.
    """
    for activated, other in _both_ways(node, "mul"):
        (source, *nodes), activation = _activated_behind(activated)
        gate, upper = part_of(source), part_of(other)
        if not activation or gate is None or upper is None or gate.whole is not upper.whole:
            continue
        layout = _LAYOUTS.get((gate.part, upper.part))
        if layout is None or (linear := layer(gate.whole)) is None:
            continue
        between = dict.fromkeys((*gate.nodes, *upper.nodes))
        words = activation, layout, len(linear) > 2
        return Match("half gate", (gate.whole, *between, *nodes, node), linear, sites.gated, words)
    return None


def chain(node: Node) -> Match | None:
    """A layer with an activation, a residual, or both: ``residual + act(linear(x, weight, bias))``."""
    for *residual, last in ((node,), *_both_ways(node, "add")):
        if (found := _layer_behind(last)) is None or not (found[1] or residual):
            continue
        nodes, activation, layer = found
        are_alike = all(_lies_as(each, node) for each in (nodes[0], *residual))
        if not are_alike or (residual and len(last.users) > 1):
            continue
        words = activation, len(layer) > 2, bool(residual)
        every = tuple(dict.fromkeys((*nodes, node)))
        return Match("chain", every, (*layer, *residual), sites.chain, words)
    return None


def _layer_behind(node: Any) -> tuple[list[Node], str, Layer] | None:
    """A linear layer, the name of its activation, and all nodes from the layer to this one, which may also
    return their inputs unchanged; None if there is no layer."""
    nodes, activation = _activated_behind(node)
    layer = linear_of(nodes[0])
    return None if layer is None else (nodes, activation, layer)


def _activated_behind(node: Any) -> tuple[list[Any], str]:
    """As above, for what is no layer: the first node, whatever it computes, is the activation's input."""
    nodes, activation = [node], ""
    while isinstance(nodes[0], Node):
        name, operands = operation(nodes[0])
        if name in ACTIVATIONS and not activation:
            activation, source = name, operands[0]
        elif (source := passed_on(nodes[0])) is None:
            break
        nodes.insert(0, source)
    return nodes, activation


def several(node: Node) -> Match | None:
    """Two or three linear layers of one input, such as q, k and v, if this node is the first of them."""
    if (layer := linear_of(node)) is None:
        return None
    x, first, *_ = layer
    alike: dict[Node, Layer] = {}
    for user in x.users:
        other = linear_of(user)
        if other and other[0] is x and len(other) == len(layer) and _lie_alike(first, other[1]):
            alike[user] = other
    nodes = (*alike,)
    if not 2 <= len(nodes) <= MOST_WEIGHTS or nodes[0] is not node or not all(map(takes_views, nodes)):
        return None
    _, weights, *biases = zip(*alike.values(), strict=True)
    operands = (x, *weights, *(bias for each in biases for bias in each))
    columns = tuple(value(weight).shape[0] for weight in weights)
    return Match("several", nodes, operands, sites.several, (bool(biases), columns), nodes)


def linear(node: Node) -> Match | None:
    """A single linear layer."""
    if (layer := linear_of(node)) is None:
        return None
    return Match("linear", (node,), layer, sites.chain, ("", len(layer) > 2, False))


def product(node: Node) -> Match | None:
    """A product outside linear layers: of two matrices or batches of them, or of rows in groups."""
    name, operands = operation(node)
    if name not in ("matmul", "mm", "bmm", "grouped_mm") or not isinstance(operands[-1], Node):
        return None
    left, right = map(value, operands[:2])
    if left is None or right is None or not are_same(left.shape[-1:], right.shape[-2:-1]):
        return None  # which an einsum may repeat
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


def _both_ways(node: Node, name: str) -> list[tuple[Any, ...]]:
    """The operands of an operation, in either order, if it has this name."""
    found, operands = operation(node)
    return [operands, operands[::-1]] if found == name else []


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
