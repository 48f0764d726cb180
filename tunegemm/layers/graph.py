"""Facts about a graph of torch's operations, as Dynamo gives it to a backend, before AOTAutograd.

Its nodes hold the fake tensors that Dynamo computed with, so shapes, dtypes, gradients and views that share
memory are known. Extents may be symbolic; no function here adds a guard.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import takewhile
from typing import Any, TypeAlias

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional
from torch.utils._pytree import tree_leaves

#: The input and weight of a linear layer, and its bias if it has one.
Layer: TypeAlias = tuple[Node, ...]

#: The operations that patterns consist of, with the names of their operands.
_OPERANDS = {
    "mul": ("input", "other"), "add": ("input", "other"), "matmul": ("input", "other"),
    "mm": ("input", "mat2"), "bmm": ("input", "mat2"), "addmm": ("input", "mat1", "mat2"),
    "grouped_mm": ("input", "mat2", "offs"), "linear": ("input", "weight", "bias"),
    "einsum": ("equation", "input", "other"),
    "silu": ("input", "inplace"), "relu": ("input", "inplace"), "gelu": ("input",),
}  # fmt: skip
_SAME = {"multiply": "mul", "imul": "mul", "iadd": "add", "inner": "linear", "_grouped_mm": "grouped_mm"}
#: Values of keywords that change no result. The pass itself looks at what is written in place.
_NEUTRAL = {"alpha": (1,), "beta": (1,), "inplace": (False, True)}


def value(node: Any) -> Any:
    """The strided fake tensor that a node computes; None for other values, for tensor subclasses, and for
    what `mark_turned` marks."""
    if not isinstance(node, Node) or "is_turned" in node.meta:
        return None
    result = _value(node)
    return result if isinstance(result, FakeTensor) and result.layout is torch.strided else None


def _value(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def name_of(node: Node) -> str:
    """The name of the function, operator, method or property that a node calls; empty for other nodes."""
    if node.op == "call_method":
        return str(node.target)
    if node.target is getattr:  # as Dynamo has properties
        return str(node.args[1])
    return str(getattr(node.target, "__name__", "")).partition(".")[0]  # an operator's has its overload


def operation(node: Any) -> tuple[str, tuple[Any, ...]]:
    """The name and the operands of an operation of `_OPERANDS`, by whatever function, operator, method and
    keywords, also in place; an empty name for anything else."""
    name = name_of(node).removesuffix("_") if isinstance(node, Node) else ""
    names = _OPERANDS.get(name := _SAME.get(name, name), ())
    if not names or len(node.args) > len(names):
        return "", ()
    if node.op != "call_method" and not only_computes(node.target):
        return "", ()
    words = dict(zip(names, node.args, strict=False)) | node.kwargs
    operands = tuple(words.pop(each, None) for each in names if each not in _NEUTRAL)
    if name == "gelu" and words.pop("approximate", "none") == "tanh":
        name = "gelu_tanh"
    if not all(each is None or each in _NEUTRAL.get(word, ()) for word, each in words.items()):
        return "", ()
    return _of_equation(*operands) if name == "einsum" else (name, operands)


def _of_equation(equation: Any, *operands: Any) -> tuple[str, tuple[Any, ...]]:
    """The operation that an einsum such as ``...i,oi->...o`` computes, as above."""
    for name, weight in (("linear", r"(\w)\2"), ("matmul", r"\2(\w)")):
        found = re.fullmatch(rf"((?:\.\.\.)?\w*)(\w),{weight}->\1\3", str(equation).replace(" ", ""))
        if found and found[2] not in found[1] + found[3]:
            return name, (*operands, None) if name == "linear" else operands
    return "", ()


def linear_of(node: Any) -> Layer | None:
    """The operands of a linear layer, or of ``x @ weight.T``; None for anything else."""
    name, operands = operation(node)
    if name in ("matmul", "mm"):
        operands = operands[0], transposed_of(operands[1]), None
    elif name == "addmm":
        operands = operands[1], transposed_of(operands[2]), operands[0]
    elif name != "linear":
        return None
    operands = operands[:2] if operands[2] is None else operands
    if any((bias := value(each)) is None or bias.ndim != 1 for each in operands[2:]):
        return None  # a kernel adds one row; torch also adds a matrix
    return operands if all(isinstance(each, Node) for each in operands) else None


def transposed_of(node: Any) -> Node | None:
    """The matrix behind a transposed view, however the view is written; else None."""
    result = value(node)
    source: Any = node.args[0] if result is not None and node.args else None
    whole = value(source)
    is_view = whole is not None and whole.ndim == 2 and not may_write(node)
    return source if is_view and _are_one(whole.t(), result) else None


def passed_on(node: Node) -> Node | None:
    """The input of a node that returns it unchanged, as a dropout that is off does, or a cast to the same
    dtype; None for anything else."""
    if node.target is functional.dropout:
        bound = inspect.signature(functional.dropout).bind(*node.args, **node.kwargs).arguments
        return bound["input"] if bound.get("training", True) is False else None
    source: Any = node.args[0] if node.args else None
    given, result = value(source), value(node)
    is_same = given is not None and result is not None and _are_one(given, result)
    return source if is_same and not may_write(node) else None


def _are_one(*tensors: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of one storage in the same order."""
    facts = [(storage_of(x), x.dtype, x.storage_offset(), *layout_of(x)) for x in tensors]
    return are_same(*facts)


def read_results(graph: Graph) -> None:
    """Let what follows an operation in place read its result, which is the tensor that it wrote to."""
    before = set[Node]()
    for node in graph.nodes:
        before.add(node)
        written: Any = next(writes(node), None) if operation(node)[0] else None
        if value(written) is not None:
            written.replace_all_uses_with(node, lambda user: user not in before)


#: Names of what changes more of a tensor than its values.
_TURNED = frozenset((
    "as_strided_", "detach_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_",
    "transpose_", "unsqueeze_",
))  # fmt: skip


def mark_turned(graph: Graph) -> None:
    """Mark the nodes of tensors that a function of `_TURNED` changes later: they hold facts of afterwards."""
    turned = {
        id(_value(each))
        for node in graph.nodes
        if name_of(node) in _TURNED
        for each in (node, *node.all_input_nodes)
    }
    for node in graph.nodes:
        if id(_value(node)) in turned:
            node.meta["is_turned"] = True


_NEEDS_LAYOUT = frozenset((
    "as_strided", "set_", "data_ptr", "untyped_storage", "view_as_complex", "stride", "take_along_dim",
    "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter",
))  # fmt: skip
"""Names of what fails for rows with gaps, shows them, or returns such rows itself."""


def takes_views(node: Node) -> bool:
    """Whether the users of a layer's result compute the same if its rows have gaps.

    Views of the result must be made again for such rows, which fails only where torch itself fails. A result
    of the whole graph keeps its layout, and so does an argument of a function outside torch. Nothing may
    write to the result: with gaps, what was a view of it may be a copy.
    """
    result = value(node)
    if result is None or result.ndim < 2:
        return False
    try:
        with result.fake_mode:
            wide = result.new_empty((*result.shape[:-1], 2 * result.shape[-1]))[..., : result.shape[-1]]
            return _serve_users(node, wide, storage_of(result))
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return False


def _serve_users(node: Node, value: Any, storage: int) -> bool:
    """storage: of the layer's result as it is in the graph."""
    for user in node.users:
        name = name_of(user)
        # A dropout that is off returns its input, which fake tensors do not show.
        if user.op == "output" or name in _NEEDS_LAYOUT or "dropout" in name:
            return False
        is_method = user.op == "call_method"
        if not is_method and not (user.op == "call_function" and only_computes(user.target)):
            return False
        if any(written is node or not isinstance(written, Node) for written in writes(user)):
            return False
        result: Any = _value(user)
        if storage not in storages_of(user):
            continue
        if not user.args or user.args[0] is not node:
            return False
        others, words = torch.fx.node.map_arg((user.args[1:], user.kwargs), _value)
        target: Any = user.target
        function: Any = getattr(value, name) if is_method else partial(target, value)
        made = function(*others, **words)
        are_tensors = isinstance(made, torch.Tensor) and isinstance(value, torch.Tensor)
        is_copy = are_tensors and storage_of(made) != storage_of(value)
        if is_copy and not are_same(layout_of(made), layout_of(result)):
            return False  # so would be what is computed from it
        if not _serve_users(user, made, storage):
            return False
    return True


def are_same(left: Iterable[Any], right: Iterable[Any]) -> bool:
    """Whether extents are equal for all values of their symbols."""
    left, right = tuple(left), tuple(right)
    return len(left) == len(right) and all(
        a is b or statically_known_true(a == b) for a, b in zip(left, right, strict=True)
    )


def layout_of(tensor: torch.Tensor) -> list[Any]:
    """The extents, and the strides of those that are not 1."""
    strides = [
        step for n, step in zip(tensor.shape, tensor.stride(), strict=True) if type(n) is not int or n > 1
    ]
    return [*tensor.shape, *strides]


def is_matrix(tensor: torch.Tensor) -> bool:
    """Whether a weight has contiguous rows and constant extents."""
    return (
        tensor.ndim == 2
        and all(type(extent) is int and extent > 0 for extent in (*tensor.shape, *tensor.stride()))
        and tensor.stride(1) == 1
    )


def storage_of(tensor: torch.Tensor) -> int:
    """An identity of the storage: fake tensors that are views of the same storage have the same."""
    return tensor.untyped_storage()._cdata


def storages_of(node: Node) -> set[int]:
    """The storages of all tensors that a node computes."""
    return {storage_of(each) for each in tree_leaves(_value(node)) if isinstance(each, torch.Tensor)}


class Order:
    """The order of a graph's nodes, and the writes between them."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = [*graph.nodes]
        self._place = {node: place for place, node in enumerate(self._nodes)}
        self._same: dict[int, int] = {}
        """The storages of dropouts' inputs, which may be those of their results, by these."""
        for node in self._nodes:
            if "dropout" in name_of(node):
                for place in self._memory(*node.all_input_nodes[:1]):
                    self._same |= dict.fromkeys(storages_of(node), place)
        self._inputs = self._memory(*(node for node in self._nodes if node.op in ("placeholder", "get_attr")))

    def _memory(self, *nodes: Node) -> set[int]:
        return {self._same.get(place, place) for node in nodes for place in storages_of(node)}

    def bring(self, node: Node, other: Node) -> bool:
        """Whether a node exists at the place of another, also by moving it there if it is a view or a cast.
        Nodes that the pass inserted exist there."""
        if self._place.get(node, -1) < self._place[other]:
            return True
        given = node.all_input_nodes
        is_cast = name_of(node) in ("to", "type_as", "float", "half", "bfloat16", "contiguous")
        is_view = any(storages_of(node) <= storages_of(each) for each in given)
        if may_write(node) or not (is_cast or is_view):
            return False
        if not self.may_move((node, other), given) or not all(self.bring(each, other) for each in given):
            return False
        other.prepend(node)
        self._place[node] = self._place[other] - 1
        return True

    def ends_with(self, node: Node) -> bool:
        """Whether a node's result may be a new tensor, because nobody reads what the node writes to, if it
        does, but through its result."""
        for written in filter(None, writes(node)):
            if (result := value(written)) is None or (places := self._memory(written)) & self._inputs:
                return False
            if not are_same((result.numel() * result.itemsize,), (result.untyped_storage().nbytes(),)):
                return False  # a new tensor has no gaps
            before = [*takewhile(lambda each: each is not node, node.graph.nodes)]
            read = {user for each in before if places & self._memory(each) for user in each.users}
            if not read <= {node, *before}:
                return False
        return True

    def may_move(self, nodes: Iterable[Node], operands: Iterable[Node]) -> bool:
        """Whether these nodes compute the same at the place of the last (or the first) of them: no node in
        between writes to an operand or changes torch's state."""
        own = {*nodes}
        places = [self._place[node] for node in own]
        read = self._memory(*operands) | self._inputs
        for node in self._nodes[min(places) : max(places)]:
            if node in own:
                continue
            for written in writes(node):
                # What the caller gave may share memory in ways that the graph does not show.
                if value(written) is None or self._memory(written) & read:
                    return False
        return True


def writes(node: Node) -> Iterator[Any]:
    """The nodes that a node writes to; None for an unknown effect, such as changed state."""
    if node.op in ("placeholder", "get_attr", "output"):
        return
    if node.op == "call_method":
        name = str(node.target)
        is_special = name == "__setitem__" or getattr(operator, name, None) in _IN_PLACE
        if is_special or (name.endswith("_") and not name.endswith("__")):
            yield node.args[0]
    elif node.op != "call_function":
        yield None
    elif overloads := _overloads(node.target):
        if any(each._schema.is_mutable for each in overloads):
            yield None
    elif node.target is operator.setitem or node.target in _IN_PLACE:
        yield node.args[0]
    elif any(word in name_of(node) for word in _WRITERS) or not only_computes(node.target):
        yield None
    # Names of Python's operators, such as `and_`, end like those of torch's functions in place.
    elif (name := name_of(node)).endswith("_") and getattr(operator, name, None) is not node.target:
        yield node.args[0] if node.args else None
    if "out" in node.kwargs:
        yield node.kwargs["out"]
    if _is_in_place(node):
        yield node.args[0] if node.args else None


def may_write(node: Node) -> bool:
    """Whether a node may write to anything, or change torch's state."""
    return any(True for _ in writes(node))


#: In the names of functions that may write to weights or statistics they are given.
_WRITERS = ("embedding", "batch_norm", "instance_norm", "moving_avg")


_IN_PLACE = {getattr(operator, f"i{name.strip('_')}", None) for name in dir(operator)} - {None}


def _overloads(target: Any) -> list[Any]:
    """The overloads that a call of an operator may be of; empty for other functions."""
    if isinstance(target, torch._ops.OpOverloadPacket):  # as Dynamo has properties since torch 2.14
        return [getattr(target, name) for name in target._overload_names]
    return [target] if isinstance(target, torch._ops.OpOverload) else []


@cache
def only_computes(target: Callable[..., Any]) -> bool:
    """Whether a function computes from its operands alone: torch's functions do, and Python's operators;
    functions that change torch's state may not, and neither may any other function."""
    if overloads := _overloads(target):
        return all(each.namespace == "aten" and not each._schema.is_mutable for each in overloads)
    module = str(getattr(target, "__module__", None) or "")
    name = str(getattr(target, "__name__", ""))
    if module in ("_operator", "operator", "builtins", "math"):
        return name not in ("setattr", "delattr")
    if name in ("_log_api_usage_once", "_grouped_mm"):
        return True
    if module == "torch._C" or name.startswith(("_set_", "set_", "_enter", "_exit", "manual_seed")):
        return False
    is_builtin = inspect.isbuiltin(target) and not name.startswith("_")
    if is_builtin and target in (getattr(torch, name, None), getattr(torch._C._nn, name, None)):
        return True
    return module in ("torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "torch._C._fft")


def _is_in_place(node: Node) -> bool:
    """Whether a function was given ``inplace=True``."""
    if node.op != "call_function" or not inspect.isfunction(node.target):
        return bool(node.kwargs.get("inplace", False))
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):
        return True
    return bool(bound.get("inplace", False))
