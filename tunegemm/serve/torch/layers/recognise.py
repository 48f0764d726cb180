"""What a module's forward does with its linear layers: by tracing it, or by watching it.

Where a part of forward is to be replaced, `torch.fx` traces it, with all children as they are, so that only
what does the same for every input is replaced. Forwards that it cannot trace, as those of most attention
modules, are watched: run once on a tensor without memory, with children that note what they are given. That
is no proof, and needs none: layers that share an input are given it at each call (`shared.Shared.part`).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.nn import functional

from tunegemm.serve.torch.layers.ends import End, end_of
from tunegemm.serve.torch.layers.looking import looking_at, noting_reads
from tunegemm.serve.torch.linear import TunedLinear

#: By the names that epilogues have for them.
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}
_DEVICES = ("cpu", "cuda")
_TIMES = (operator.mul, torch.mul, "mul")
_PLUS = (operator.add, torch.add, "add")
#: In a traced call the keyword of what is given as ``**kwargs``.
_STAR = "**"


@dataclass(frozen=True)
class Match:
    """Calls of a traced forward that one kernel may do."""

    kind: str
    """gated, halved (gated by the halves of one result), activated, added, or passed: added to what a child
    gives, whose last result is a layer's."""
    node: fx.Node
    """Whose value that is."""
    layers: tuple[fx.Node, ...]
    activation: fx.Node | None = None
    name: str = ""
    """The activation's."""
    side: int | None = None
    """Which argument of the node is what is added."""
    between: fx.Node | None = None
    """Dropout of what it is added to, or torch.nn.Identity."""
    end: End | None = None
    """How a child ends, whose call is what `layers` has."""
    child: str = ""
    """Its name."""
    cuts: tuple[fx.Node, ...] = ()
    """What takes the halves of a result apart."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the layers, within the module."""
        if self.end is not None:
            return (f"{self.child}.{self.end.layer}",)
        return tuple(str(layer.target) for layer in self.layers)

    def function(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The activation where it is no module."""
        node = self.activation
        if node is None or node.op == "call_module":
            return None
        if node.op == "call_method":
            return operator.methodcaller(str(node.target), *node.args[1:], **node.kwargs)
        assert callable(node.target)
        return partial(node.target, *node.args[1:], **node.kwargs) if _extras(node) else node.target


class _Value(fx.Proxy):
    """A value while forward is traced. ``x += y`` writes into what others may hold: it is not ``x + y``."""

    def _refuse(self, other: Any) -> Any:
        raise fx.proxy.TraceError("forward writes into a tensor")

    __iadd__ = __isub__ = __imul__ = __imatmul__ = __itruediv__ = __ifloordiv__ = _refuse
    __imod__ = __ipow__ = __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _refuse


class _Tracer(fx.Tracer):
    """Raises where forward changes what holds for a part of it: the graph would not say so."""

    def __init__(self, cls: Any, method: str) -> None:
        super().__init__()
        self._cls, self.traced_func_name = cls, method
        self._modes = _modes()

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        own = _own_method(self._cls, self.traced_func_name)
        return super().create_args_for_root(own, is_module, concrete_args)

    def keys(self, obj: fx.Proxy) -> Any:
        """What ``**kwargs`` is made of, as if it was one argument: see `_with_stars`."""
        return [_STAR] if str(obj.node.target).startswith("**") else super().keys(obj)

    def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_node(self, *arguments: Any, **keywords: Any) -> fx.Node:
        if _modes() != self._modes:
            raise fx.proxy.TraceError("forward switches gradients or autocast")
        node = super().create_node(*arguments, **keywords)
        if _writes(node):
            raise fx.proxy.TraceError("forward writes into a tensor")
        return node


def _writes(node: fx.Node) -> bool:
    """Whether a call changes a tensor that somebody else may read: what is replaced is computed later."""
    if node.op not in ("call_function", "call_method"):
        return False
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return True
    given = node.args[0] if node.args else None
    is_own = isinstance(given, fx.Node) and given.op == "call_module" and len(given.users) == 1
    return "out" in node.kwargs or (bool(node.kwargs.get("inplace")) and not is_own)


def _own_method(cls: Any, name: str) -> Any:
    """The method as it is written, where the class wraps those of its subclasses: it will wrap ours as well.

    As transformers does (5.23), for gradient checkpointing.
    """
    method = getattr(cls, name)
    if not hasattr(method, "__wrapped__"):
        return method

    def probe(self: Any) -> None: ...

    wrapped = getattr(type(cls.__name__, (cls,), {name: probe, "__module__": cls.__module__}), name)
    again = getattr(wrapped, "__wrapped__", None) is probe
    return method.__wrapped__ if again and wrapped.__code__ is method.__code__ else method


def _modes() -> tuple[bool, ...]:
    casts = (torch.is_autocast_enabled(device) for device in _DEVICES)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts


@contextmanager
def _casting(enabled: bool) -> Iterator[None]:
    """Autocast, where what switches it off can be seen."""
    before = [torch.is_autocast_enabled(device) for device in _DEVICES]
    for device in _DEVICES:
        torch.set_autocast_enabled(device, enabled)
    try:
        yield
    finally:
        for device, was in zip(_DEVICES, before, strict=True):
            torch.set_autocast_enabled(device, was)


def traced(module: torch.nn.Module, method: str) -> tuple[fx.Graph, frozenset[str]] | None:
    """The method's graph, and the attributes of the module that were read for it, and hold in it as they
    were; None where it depends on more than its arguments, children and these, or changes any.
    """
    graphs = []
    cls, training = type(module), module.training
    with noting_reads(module) as names:
        for mode in (training, not training):
            with looking_at(module) as look:
                look.set("training", mode)
                try:
                    with torch.set_grad_enabled(mode), _casting(mode):
                        graphs.append(_Tracer(cls, method).trace(module))
                except Exception:  # whatever somebody's code does with what is no tensor
                    return None
                if look.has_changed:
                    return None
    if str(graphs[0]) != str(graphs[1]) or not _with_stars(graphs[0]):
        return None
    return graphs[0], frozenset(names)


def _with_stars(graph: fx.Graph) -> bool:
    """Calls of children with ``**kwargs`` become calls of `call`; whether that is all it was used for."""
    for node in list(graph.nodes):
        node.type = None  # as somebody wrote it, which generated code need not know
        if _STAR not in node.kwargs:
            continue
        taken = node.kwargs[_STAR]
        if node.op != "call_module":
            return False
        with graph.inserting_before(node):
            child = graph.create_node("get_attr", node.target)
            keywords = {name: value for name, value in node.kwargs.items() if name != _STAR}
            made = graph.call_function(call, (child, taken.args[0], *node.args), keywords)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        if not taken.users:
            graph.erase_node(taken)
    return not any(node.args[1:] == (_STAR,) for node in graph.nodes)


def call(module: Any, more: Any, /, *arguments: Any, **keywords: Any) -> Any:
    """A call of a child with what its parent was given as ``**kwargs``."""
    return module(*arguments, **keywords, **more)


def matches(module: torch.nn.Module, graph: fx.Graph) -> list[Match]:
    """What one kernel may do of it; no call twice."""
    found: list[Match] = []
    taken: set[fx.Node] = set()

    def take(match: Match) -> None:
        found.append(match)
        taken.update((match.node, *match.layers))
        if match.activation is not None:
            taken.add(match.activation)

    for node in graph.nodes:
        if node.target in _TIMES and not _extras(node, 2):
            for act, up in (node.args, node.args[::-1]):
                gate = _activated(module, act)
                if gate is not None and _is_layer(module, up) and up.args == gate.args and up is not gate:
                    if name := activation_name(module, act):
                        take(Match("gated", node, (gate, up), act, name))
                    break
                if (cuts := _halves(module, graph, node, act, up)) and (name := activation_name(module, act)):
                    take(Match("halved", node, cuts[:1], act, name, cuts=cuts[1:]))
                    break
    for node in graph.nodes:
        layer = _activated(module, node)
        if layer is not None and not {node, layer} & taken and (name := activation_name(module, node)):
            take(Match("activated", node, (layer,), node, name))
    for node in graph.nodes:
        if node.target in _PLUS and not _extras(node, 2):
            for side in (1, 0):
                (layer, between), stream = _undropped(module, node.args[1 - side]), node.args[side]
                is_new = isinstance(stream, fx.Node) and stream is not layer and layer not in taken
                if is_new and _is_layer(module, layer):
                    take(Match("added", node, (layer,), side=side, between=between))
                    break
                if is_new and (match := _passed(module, graph, node, side)):
                    take(match)
                    break
    return found


def _halves(
    module: torch.nn.Module, graph: fx.Graph, node: fx.Node, act: Any, up: Any
) -> tuple[fx.Node, ...]:
    """The layer of whose result an activation takes the first half and `up` is the second, and what cuts it
    so, by the values that this gives; empty where it is something else.

    node: the product of the activation and `up`.
    """
    if not (isinstance(act, fx.Node) and isinstance(up, fx.Node)) or len(act.all_input_nodes) != 1:
        return ()
    gate, between, todo = act.all_input_nodes[0], {act, node}, [act.all_input_nodes[0], up]
    while todo:
        each = todo.pop()
        if each not in between and each.op != "call_module":
            between.add(each)
            todo += each.all_input_nodes
    cuts = [each for each in graph.nodes if each in between and each not in (act, node)]
    layers = {each for cut in cuts for each in cut.all_input_nodes} - between
    if len(layers) != 1 or act.args[:1] != (gate,) or act not in node.args:
        return ()
    (layer,) = layers
    is_ours = all(set(each.users) <= between for each in (layer, act, *cuts))
    if not is_ours or not _is_called(module, layer):
        return ()
    width: int = module.get_submodule(str(layer.target)).out_features  # type: ignore[assignment]
    whole = torch.arange(6.0 * width, device="cpu").view(2, 3, width)
    values: dict[fx.Node, Any] = {layer: whole}
    try:
        for cut in cuts:
            arguments: list[Any]
            arguments, keywords = map_arg((list(cut.args), cut.kwargs), values.__getitem__)
            function: Any = cut.target
            if cut.op == "call_method":
                function, *arguments = getattr(arguments[0], str(cut.target)), *arguments[1:]
            values[cut] = function(*arguments, **keywords)
        halves = values[gate], values[up]
        is_so = all(map(torch.equal, halves, whole.split(width // 2, -1)))
    except Exception:  # whatever somebody's code does with it
        return ()
    return (layer, *cuts) if is_so and width % 2 == 0 else ()


def _passed(module: torch.nn.Module, graph: fx.Graph, node: fx.Node, side: int) -> Match | None:
    """A sum whose one side is what a child's last layer gives, and is next to the child's call."""
    (value, between), stream = _undropped(module, node.args[1 - side]), node.args[side]
    if not isinstance(value, fx.Node) or len(value.users) != 1:
        return None
    called: Any = value
    index: Any = None
    if value.target is operator.getitem:
        called, index = value.args
    place = _called_child(called)
    end = end_of(module.get_submodule(place)) if place else None
    if end is None or end.place != index:
        return None
    order = list(graph.nodes)
    first, last = order.index(called), order.index(node)
    is_next = all(
        each is between or (each.target is operator.getitem and each.args[0] is called)
        for each in order[first + 1 : last]
    )
    if order.index(stream) > first or not is_next:
        return None
    return Match("passed", node, (called,), side=side, between=between, end=end, child=place)


def _undropped(module: torch.nn.Module, node: Any) -> tuple[Any, fx.Node | None]:
    """What dropout or an identity is given, and its node; the node itself and None where it is neither, used
    once."""
    is_call = isinstance(node, fx.Node) and node.op == "call_module"
    if not is_call or len(node.users) != 1 or _extras(node):
        return node, None
    is_nothing = type(module.get_submodule(str(node.target))) in (torch.nn.Dropout, torch.nn.Identity)
    return (node.args[0], node) if is_nothing else (node, None)


def _called_child(node: Any) -> str:
    """The name of the child that a node calls; empty for other nodes."""
    if isinstance(node, fx.Node) and node.op == "call_module":
        return str(node.target)
    is_call = isinstance(node, fx.Node) and node.target is call
    return str(node.args[0].target) if is_call else ""


def _extras(node: fx.Node, most: int = 1) -> bool:
    return len(node.args) != most or bool(node.kwargs)


def _is_called(module: torch.nn.Module, node: Any) -> bool:
    """Whether this is the result of a patched layer."""
    return (
        isinstance(node, fx.Node)
        and node.op == "call_module"
        and isinstance(module.get_submodule(str(node.target)), TunedLinear)
        and not _extras(node)
        and isinstance(node.args[0], fx.Node)
    )


def _is_layer(module: torch.nn.Module, node: Any) -> bool:
    """Whether this is the result of a patched layer, used once."""
    return _is_called(module, node) and len(node.users) == 1


def _activated(module: torch.nn.Module, node: Any) -> fx.Node | None:
    """The layer whose result alone this is made of, used once."""
    if (
        not isinstance(node, fx.Node)
        or not node.args
        or node.op not in ("call_module", "call_function", "call_method")
    ):
        return None
    if len(node.users) != 1 or len(node.all_input_nodes) != 1 or not _is_layer(module, node.args[0]):
        return None
    return node.all_input_nodes[0]


def activation_name(module: torch.nn.Module, node: fx.Node) -> str:
    """Which of the epilogues' activations this computes, by what it gives; empty where none."""
    if node.op == "call_module":
        child = module.get_submodule(str(node.target))
        if any(True for _ in child.parameters()) or any(True for _ in child.buffers()) or _extras(node):
            return ""
        function: Callable[[torch.Tensor], Any] = child.forward
    else:
        made = Match("", node, (), node).function()
        assert made is not None
        function = made
    x = torch.linspace(-9, 9, 181, dtype=torch.float64, device="cpu")
    large = torch.logspace(1, 30, 88, dtype=torch.float64, device="cpu")  # where some are cut off
    x = torch.cat((x, large, -large))
    try:
        with torch.no_grad():
            given = [function(x.clone()) for _ in range(2)]
        for name, known in _ACTIVATIONS.items():
            if all(torch.allclose(value, known(x), rtol=1e-6, atol=1e-7) for value in given):
                return name
    except Exception:  # whatever somebody's code does with it
        pass
    return ""


def replace(graph: fx.Graph, match: Match, place: str) -> None:
    """Lets the graph call what the module has at a place instead: with the modules, the input, the stream."""
    if match.end is not None:
        _replace_passed(graph, match, place)
        return
    old = [
        match.node,
        *([match.activation] if match.activation not in (None, match.node) else []),
        *([match.between] if match.between is not None else []),
        *match.cuts,
        *match.layers,
    ]
    with graph.inserting_before(match.node):
        # As attributes, so that what a tool has put into a module's place is seen.
        layers = [graph.create_node("get_attr", layer.target) for layer in match.layers]
        arguments: list[fx.Node] = [*layers, match.layers[0].args[0]]  # type: ignore[list-item]
        if match.activation is not None and match.activation.op == "call_module":
            arguments.append(graph.create_node("get_attr", match.activation.target))
        if match.side is not None:
            arguments.append(match.node.args[match.side])  # type: ignore[arg-type]
        if match.between is not None:
            arguments.append(graph.create_node("get_attr", match.between.target))
        made = graph.create_node("call_module", place, tuple(arguments))
    match.node.replace_all_uses_with(made)
    for node in sorted(old, key=list(graph.nodes).index, reverse=True):
        graph.erase_node(node)


def _replace_passed(graph: fx.Graph, match: Match, place: str) -> None:
    (called,), side = match.layers, match.side
    assert side is not None
    summed, stream = match.node.args[1 - side], match.node.args[side]
    if match.between is not None:
        summed = match.between.args[0]
    with graph.inserting_before(called):
        if called.op == "call_module":
            child, more, arguments = graph.create_node("get_attr", called.target), None, called.args
        else:
            child, more, *arguments = called.args  # type: ignore[assignment]
        between = None if match.between is None else graph.create_node("get_attr", match.between.target)
        taken = (child, between, stream, more, *arguments)
        made = graph.create_node("call_module", place, taken, dict(called.kwargs))
    called.replace_all_uses_with(made)
    summed = made if summed is called else summed
    match.node.replace_all_uses_with(summed)  # type: ignore[arg-type]
    for node in (match.node, match.between, called):
        if node is not None:
            graph.erase_node(node)


def compiled(graph: fx.Graph, name: str) -> Callable[..., Any]:
    """The graph as a function of the module and the method's arguments."""
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(code.src, scope)
    function: Callable[..., Any] = scope["forward"]
    function.__name__ = name
    return function


class _Watched(torch.nn.Module):
    """Stands for a child while a forward is watched; its attributes are the child's."""

    def __init__(self, child: torch.nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_child"], self.__dict__["_call"] = child, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_child"], name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.__dict__["_call"](*arguments, **keywords)


def of_one_input(module: torch.nn.Module, names: Sequence[str]) -> list[list[str]]:
    """Children, linear layers, that forward calls on one tensor, as far as it can be watched; in its order.

    Those whose results must lie by themselves, for a view that a part of a larger result has not, are none.
    """
    best: list[list[str]] = []
    for inputs in (1, 2, 9):  # of torchtune's attention the second is the source of keys and values
        with torch.inference_mode(False):  # whose tensors count no versions
            apart, joined = (_watch(module, names, inputs, are_parts) for are_parts in (False, True))
        groups = [group for group in apart if group in joined]
        if sum(map(len, groups)) > sum(map(len, best)):
            best = groups
    return best


def _watch(module: torch.nn.Module, names: Sequence[str], inputs: int, are_parts: bool) -> list[list[str]]:
    """inputs: how many arguments are the input; are_parts: whether results are parts of larger ones."""
    calls: list[tuple[str, torch.Tensor, int]] = []
    first = module._modules[names[0]]
    assert isinstance(first, torch.nn.Linear)
    x = torch.empty(2, 3, first.in_features, dtype=torch.bfloat16, device="meta")

    def layer(name: str, given: torch.Tensor) -> torch.Tensor:
        calls.append((name, given, given._version))
        width: Any = getattr(originals[name], "out_features", 0)
        return given.new_empty(*given.shape[:-1], 3 * width if are_parts else width)[..., :width]

    def other(given: Any = None, *_: Any, **__: Any) -> Any:
        return given

    originals = dict(module._modules)
    arguments: list[Any] = []
    keywords: dict[str, Any] = {}
    for parameter in inspect.signature(module.forward).parameters.values():
        is_needed = parameter.default is parameter.empty
        if parameter.kind is parameter.KEYWORD_ONLY and is_needed:
            keywords[parameter.name] = None
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            is_input = not arguments or (len(arguments) < inputs and (is_needed or parameter.default is None))
            if not (is_input or is_needed):
                break
            arguments.append(x if is_input else None)
    with looking_at(module):
        try:
            for name, child in originals.items():
                if child is not None:
                    call = partial(layer, name) if name in names else other
                    module._modules[name] = _Watched(child, call)
            with torch.no_grad():
                module.forward(*arguments, **keywords)
        except Exception:  # mostly of what it was not given
            pass
        finally:
            module._modules.clear()
            module._modules.update(originals)
    groups: list[list[str]] = []
    for name, given, version in calls:
        if sum(name == other for other, _, _ in calls) == 1:
            for group in groups:
                _, shared, seen = next(call for call in calls if call[0] == group[0])
                if shared is given and seen == version:
                    group.append(name)
                    break
            else:
                groups.append([name])
    return [group for group in groups if len(group) > 1]
