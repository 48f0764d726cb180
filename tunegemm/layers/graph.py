"""Facts about a graph of torch's operations, as Dynamo gives it to a backend, before AOTAutograd.

Its nodes hold the fake tensors that Dynamo computed with, so shapes, dtypes, gradients and views that share
memory are known. Extents may be symbolic; no function here adds a guard.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional
from torch.utils._pytree import tree_leaves

#: The input, weight and bias of a linear layer.
Layer: TypeAlias = tuple[Node, Node, Node | None]

#: torch's linear layer: (x, weight, bias), in either spelling.
LINEAR = frozenset((torch._C._nn.linear, functional.linear))
_SAME: dict[str, frozenset[Any]] = {
    "mul": frozenset((operator.mul, torch.mul, torch.multiply)),
    "add": frozenset((operator.add, torch.add)),
    "matmul": frozenset((operator.matmul, torch.matmul)),
    "mm": frozenset((torch.mm,)),
    "bmm": frozenset((torch.bmm,)),
}
#: Torch's activations; the last one is a method's name.
_ACTIVATIONS: dict[Any, str] = {
    functional.silu: "silu", functional.gelu: "gelu", torch._C._nn.gelu: "gelu",
    functional.relu: "relu", torch.relu: "relu", "relu": "relu",
}  # fmt: skip
_GROUPED: frozenset[Any] = frozenset((functional.grouped_mm, torch._grouped_mm))


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


def calls(node: Any, name: str) -> tuple[Any, Any] | None:
    """The two operands of a call to a function, operator or method that `_SAME` lists; else None."""
    if not isinstance(node, Node) or node.kwargs or len(node.args) != 2:
        return None
    is_method = node.op == "call_method" and node.target == name
    if not is_method and not (node.op == "call_function" and node.target in _SAME[name]):
        return None
    return node.args[0], node.args[1]


def linear_of(node: Any) -> Layer | None:
    """The input, weight and bias of a linear layer, or of ``x @ weight.T``; None for anything else."""
    if (pair := calls(node, "matmul") or calls(node, "mm")) is not None:
        given_x, turned = pair[0], transposed_of(pair[1])
        return (given_x, turned, None) if isinstance(given_x, Node) and turned is not None else None
    if not isinstance(node, Node) or node.op != "call_function" or node.target not in LINEAR:
        return None
    names = ("input", "weight", "bias")
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    x, weight, bias = (arguments.get(name) for name in names)
    if not isinstance(x, Node) or not isinstance(weight, Node) or not isinstance(bias, Node | None):
        return None
    return x, weight, bias


def product_of(node: Any) -> tuple[Node, ...] | None:
    """The operands of a product of matrices or batches, or of rows in groups and their ends; else None."""
    operands: tuple[Any, ...] | None = calls(node, "matmul") or calls(node, "mm") or calls(node, "bmm")
    if operands is None and isinstance(node, Node) and node.op == "call_function" and node.target in _GROUPED:
        arguments = dict(zip(("input", "mat2"), node.args, strict=False)) | node.kwargs
        if {name for name, each in arguments.items() if each is not None} == {"input", "mat2", "offs"}:
            operands = arguments["input"], arguments["mat2"], arguments["offs"]
    return operands if operands and all(isinstance(each, Node) for each in operands) else None


def transposed_of(node: Any) -> Node | None:
    """The matrix behind a transposed view, however the view is written; else None."""
    result = value(node)
    source = node.args[0] if result is not None and result.ndim == 2 and node.args else None
    whole = value(source)
    if whole is None or whole.ndim != 2 or whole.dtype.is_complex or storage_of(whole) != storage_of(result):
        return None
    turned = whole.t()
    same = are_same(turned.shape, result.shape) and are_same(turned.stride(), result.stride())
    is_at_its_place = same and result.storage_offset() == whole.storage_offset()
    return source if is_at_its_place and not may_write(node) else None


def activation_of(node: Any) -> tuple[str, Node] | None:
    """The name and the input of silu, gelu, gelu_tanh or relu; None for anything else, or in place."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method") or len(node.args) != 1:
        return None
    name, source = name_of_activation(node.target, node.kwargs), node.args[0]
    return (name, source) if name and isinstance(source, Node) else None


def name_of_activation(function: Any, keywords: Mapping[str, Any]) -> str:
    """The activation that a function, or a method by its name, computes with these keywords; empty for
    anything else, or in place."""
    words, name = dict(keywords), _ACTIVATIONS.get(function, "")
    if name == "gelu":
        name = {"none": "gelu", "tanh": "gelu_tanh"}.get(str(words.pop("approximate", "none")), "")
    return "" if words.pop("inplace", False) or words else name


def passed_on(node: Node) -> Node | None:
    """The input of a dropout that is off, which returns it unchanged; None for anything else."""
    if node.op != "call_function" or node.target is not functional.dropout:
        return None
    bound = inspect.signature(functional.dropout).bind(*node.args, **node.kwargs).arguments
    source = bound["input"]
    return source if bound.get("training", True) is False and isinstance(source, Node) else None


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
        if all(storage_of(each) != storage for each in tree_leaves(result) if isinstance(each, torch.Tensor)):
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


class Order:
    """The order of a graph's nodes, and the writes between them."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = [*graph.nodes]
        self._place = {node: place for place, node in enumerate(self._nodes)}
        results = {"placeholder", "get_attr"}
        self._inputs = {
            storage_of(result)
            for node in self._nodes
            if node.op in results or "dropout" in name_of(node)
            for each in (node, *node.all_input_nodes)
            if (result := value(each)) is not None
        }

    def all_before(self, operands: Iterable[Node], node: Node) -> bool:
        """Whether all operands exist at a node's place. Nodes that the pass inserted always do."""
        place = self._place[node]
        return all(self._place.get(operand, -1) < place for operand in operands)

    def may_move(self, nodes: Iterable[Node], operands: Iterable[Node]) -> bool:
        """Whether these nodes compute the same at the place of the last (or the first) of them: no node in
        between writes to an operand or changes torch's state."""
        own = {*nodes}
        places = [self._place[node] for node in own]
        read: set[int] = set()
        for operand in operands:
            result = value(operand)
            if result is None:
                return False
            read.add(storage_of(result))
        for node in self._nodes[min(places) : max(places)]:
            if node in own:
                continue
            for written in writes(node):
                result = value(written) if isinstance(written, Node) else None
                # What the caller gave, and a dropout, may share memory in ways that the graph does not show.
                if result is None or (place := storage_of(result)) in read or place in self._inputs:
                    return False
        return True


def writes(node: Node) -> Iterator[Any]:
    """The nodes that a node writes to; None for an unknown effect, such as changed state."""
    if node.op in ("placeholder", "get_attr", "output"):
        return
    if node.op == "call_method":
        name = str(node.target)
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
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


_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in (
        "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
        "ilshift", "irshift",
    )
)  # fmt: skip


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
    if name == "_log_api_usage_once":
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
