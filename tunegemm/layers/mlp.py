"""Computes the gate of an MLP by one kernel in an eager model.

It changes only modules whose class's forward, by its source, is exactly `self.down(self.act(self.gate(x)) *
self.up(x))`, or calls torch's activation in place of `self.act`, and whose children are plain linear layers
and an activation of torch's. Gate and up have a bias each, or neither has one. Such a module gets its own
`forward`. Its class, parameters and children stay the same. If a call meets anything else (hooks, another
child, gradients, autocast, modes), the class's forward runs.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Callable
from functools import cache, partial
from time import monotonic
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.modules import module as torch_module

from tunegemm.dispatch import api, guards
from tunegemm.dispatch.guards import (
    PLAIN,
    are_functions_watched,
    data_ptr,
    deterministic,
    dispatch_modes,
    function_modes,
    grad_enabled,
)
from tunegemm.layers import sites
from tunegemm.torch.linear import TunedLinear, is_replaced

_is_compiling = torch.compiler.is_compiling
_has_global_hooks: Any = torch_module._has_any_global_hook


#: Objects or namespaces, names in them, and what was found there.
Links: TypeAlias = tuple[tuple[Any, str, Any], ...]


class Places(NamedTuple):
    """The names of an MLP's children."""

    down: str
    act: str
    """Empty if the forward calls torch's function."""
    gate: str
    up: str
    function: str = ""
    """The name of that function, as the forward writes it; empty where a child is the activation."""

    def activation(self, module: nn.Module) -> tuple[str, Links]:
        """The name of the MLP's activation, empty if it is not known, and the links to its function."""
        if self.act:
            return _activation(module._modules.get(self.act))
        function, links = _global(type(module).forward, self.function)
        return _name_of(function), links


def places_of(cls: type) -> Places | None:
    """The names of the children, for a class whose forward is exactly a gated MLP; else None."""
    return _places_in(vars(cls).get("forward"))


@cache
def _places_in(forward: Any) -> Places | None:
    if not isinstance(forward, FunctionType) or (parts := _return_of(forward)) is None:
        return None
    own, x = map(re.escape, parts[:2])
    gate = rf"(?:{own}\.(?P<act>\w+)|(?P<function>[\w.]+))\({own}\.(?P<gate>\w+)\({x}\)\)"
    up = rf"{own}\.(?P<up>\w+)\({x}\)"
    for product in (rf"{gate} \* {up}", rf"{up} \* {gate}"):
        match = re.fullmatch(rf"{own}\.(?P<down>\w+)\({product}\)", ast.unparse(parts[2]))
        if match is not None:
            return Places(**match.groupdict(default=""))
    return None


def _global(forward: Any, path: str) -> tuple[Any, Links]:
    """The object that a function finds under a global's dotted name, or None, and the links to it."""
    place, links = forward.__globals__, []
    for name in path.split("."):
        found = place.get(name) if isinstance(place, dict) else getattr(place, name, None)
        links.append((place, name, found))
        place = found
    return place, tuple(links)


def _return_of(forward: FunctionType) -> tuple[str, str, ast.expr] | None:
    """The names of a method's two arguments and what it returns, if it does nothing else; else None."""
    if forward.__closure__ or hasattr(forward, "__wrapped__"):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None
    function = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(function, ast.FunctionDef) or function.decorator_list or not _is_of(tree, forward):
        return None
    arguments, result = function.args, _result_of(function.body)
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    others = arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults
    return None if result is None or len(names) != 2 or others else (names[0], names[1], result)


def _is_of(tree: ast.Module, forward: FunctionType) -> bool:
    """Whether a function was compiled from a source: files may change while a program runs."""
    own = forward.__code__
    # Python calls a function of a module by other code where the module's name is one that was imported.
    modules = [name for name in own.co_names if inspect.ismodule(forward.__globals__.get(name))]
    imports = ast.parse("\n".join(f"import {name}" for name in modules)).body
    for body in (tree.body, [*imports, *tree.body]):
        code = compile(ast.Module(body, []), "", "exec", dont_inherit=True)
        made = next((each for each in code.co_consts if inspect.iscode(each)), None)
        if made is not None and (made.co_code, made.co_names) == (own.co_code, own.co_names):
            return True
    return False


def _result_of(body: list[ast.stmt]) -> ast.expr | None:
    """The return value of a function that does nothing else, apart from a docstring and a name for it."""
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    match body:
        case [ast.Return(value=result)]:
            return result
        case [ast.Assign(targets=[ast.Name(id=name)], value=result), ast.Return(value=ast.Name(id=same))]:
            return result if name == same else None
    return None


def activation_of(module: Any) -> str:
    """The name of the activation that a call of a module computes; empty if its class is not known to compute
    one, or if a hook or an attribute changes what it computes.

    Torch's own classes count. So does any class whose forward, by its source, only calls one of torch's
    activation functions, by name or through an attribute. The activations of transformers do this.
    """
    return _activation(module)[0]


def _activation(module: Any) -> tuple[str, Links]:
    """The name of an activation's function, and the links from the module to it."""
    if not _is_bare(module):
        return "", ()
    cls = type(module)
    forward = vars(cls).get("forward")
    links: Links = (
        (module, "__class__", cls), (cls, "forward", forward), (cls, "__call__", cls.__call__)
    )  # fmt: skip
    if (function := _OWN.get((cls, forward))) is not None:
        name, option = cls.__name__.lower(), "approximate" if cls is nn.GELU else "inplace"
        said = vars(module).get(option)
        if getattr(functional, name) is not function:  # a tool has put its own there
            return "", ()
        if cls is nn.GELU:
            kind = {"none": "gelu", "tanh": "gelu_tanh"}.get(str(said), "")
        else:
            kind = "" if said else name
        return kind, (*links, (functional, name, function), (module, option, said))
    path, attribute = _called_by(forward, cls.__call__)
    if attribute:
        function = vars(module).get(attribute)
        return _name_of(function), (*links, (module, attribute, function))
    if not path:
        return "", ()
    function, to_function = _global(forward, path)
    return _name_of(function), (*links, *to_function)


# For Dynamo a constant at trace time: it cannot trace what reads a source.
activation_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _called_by(forward: Any, call: Any) -> tuple[str, str]:
    """The function to which a forward only passes its input: its name there, or the module's attribute that
    it is. Both are empty for any other forward, and for a class with a `__call__` of its own."""
    if not isinstance(forward, FunctionType) or call is not nn.Module.__call__:
        return "", ""
    match _return_of(forward):
        case (own, x, ast.Call(func=function, args=[ast.Name(id=argument)], keywords=[])) if argument == x:
            path = ast.unparse(function)
            if (match := re.fullmatch(rf"{re.escape(own)}\.(\w+)", path)) is not None:
                return "", match[1]
            return path, ""
    return "", ""


#: The functions of torch.nn.functional that torch's activations call.
_OWN = {(cls, cls.forward): getattr(functional, cls.__name__.lower()) for cls in (nn.SiLU, nn.ReLU, nn.GELU)}
_FUNCTIONS: dict[Any, str] = {
    (functional.silu,): "silu", (functional.relu,): "relu", (torch.relu,): "relu",
    (functional.gelu,): "gelu", (functional.gelu, ("approximate", "none")): "gelu",
    (functional.gelu, ("approximate", "tanh")): "gelu_tanh",
}  # fmt: skip


def _name_of(function: Any) -> str:
    """The name of one of torch's activation functions; empty for any other object."""
    words: dict[str, Any] = {}
    if isinstance(function, partial) and not function.args:
        function, words = function.func, function.keywords
    is_function = isinstance(function, FunctionType | BuiltinFunctionType)  # which have a hash
    return _FUNCTIONS.get((function, *words.items()), "") if is_function else ""


#: What a class may have to make copies with whatever it takes from the module.
_COPIES = ("__copy__", "__deepcopy__", "__getstate__")


def recognised(module: nn.Module) -> Places | None:
    """The children of a module whose forward `fuse` may replace; None for any other module."""
    places = places_of(cls := type(module))
    if places is None or "forward" in vars(module):
        return None
    if any(getattr(cls, name, None) is not getattr(nn.Module, name, None) for name in _COPIES):
        return None  # a copy might keep this module's forward
    children = module._modules
    layers = [children.get(name) for name in (places.gate, places.up, places.down)]
    if any(type(layer) not in (nn.Linear, TunedLinear) for layer in layers):
        return None
    return places if places.activation(module)[0] else None


class Forward:
    """Replaces the forward of one MLP, as `module.forward`; `inspect` and torch.export see the class's."""

    def __init__(self, module: nn.Module, places: Places) -> None:
        self._module, self.places = module, places
        self._seen: _Seen | None = None

    @property
    def attributes(self) -> dict[str, Any]:
        """The module's attributes that are ours, by the names under which torch and Python look for them."""
        return {
            "forward": self, "_replicate_for_data_parallel": self.replicate, "__reduce_ex__": self.reduce,
            "__prepare_scriptable__": self.prepare,
        }  # fmt: skip

    @property
    def __wrapped__(self) -> Any:
        return type(self._module).forward.__get__(self._module)

    @property
    def __code__(self) -> Any:
        return self.__wrapped__.__code__

    def prepare(self) -> nn.Module:
        """The module for torch.jit.script, which compiles the source of its class's forward: as unpatched."""
        self.leave(self._module)
        return self._module

    def replicate(self) -> nn.Module:
        """The module's replica for torch.nn.DataParallel, with the class's forward: this one has the
        weights of another device."""
        replica: nn.Module = cast(Any, type(self._module))._replicate_for_data_parallel(self._module)
        self.leave(replica)
        return replica

    def reduce(self, protocol: Any) -> Any:
        """What copies the module: each copy gets its own forward, also a shallow one, whose children somebody
        may replace."""
        cls: Any = type(self._module)
        make, arguments, *parts = cls.__reduce_ex__(self._module, protocol)
        if not parts or not isinstance(parts[0], dict):  # the class has a state of its own
            return make, arguments, *parts
        state, ours = parts[0], self.attributes
        state = {name: value for name, value in state.items() if name not in ours or value != ours[name]}
        if vars(self._module).get("forward") is self:
            make, arguments = _made_again, (self.places, make, arguments)
        return make, arguments, state, *parts[1:]

    def leave(self, module: nn.Module) -> None:
        """Remove our attributes from the module or its replica; what somebody else has set stays."""
        for name, value in self.attributes.items():
            if vars(module).get(name) == value:
                del vars(module)[name]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        module = self._module
        if not _is_compiling() and len(arguments) == 1 and not keywords and type(arguments[0]) in PLAIN:
            down = module._modules.get(self.places.down)
            if down is not None and (gated := self._gated(arguments[0])) is not None:
                return down(gated)
        return type(module).forward(module, *arguments, **keywords)

    def _gated(self, x: torch.Tensor) -> torch.Tensor | None:
        """The gate by a kernel; None where the class's forward is to compute it."""
        own, places, seen, quick = self._module.__dict__, self.places, self._seen, api.quick
        children = own["_modules"]
        try:
            gate, up = children[places.gate], children[places.up]
            first, second = gate._parameters["weight"], up._parameters["weight"]
            entry = quick.get(data_ptr(first) + _OF_MLPS)
            if type(entry) is set and x.numel() in entry and monotonic() < quick.until:
                return None
            # A layer stands for its bias if that is in another place.
            added, upper_added = gate._parameters.get("bias", gate), up._parameters.get("bias", up)
        except (AttributeError, KeyError, RuntimeError, TypeError):  # somebody has replaced a layer
            return None
        if added is upper_added is None:
            operands: tuple[Any, ...] = (x, first, second)
        else:
            operands = (x, first, second, added, upper_added)
        for operand in operands:
            if (
                type(operand) not in PLAIN or operand.is_nested
            ):  # torch's check of one ends the process (2.13)
                return None
        # Spelled out: within a model, each further call of a function costs it some microseconds.
        if (
            seen is not None
            and seen.entry is entry
            and seen.gate is gate
            and seen.up is up
            and seen.act is children.get(places.act)
            and seen.operands == len(operands)
            and type(gate) is type(up) is TunedLinear
            and own.keys().isdisjoint(places)
            and not (
                torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
                or torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
                or deterministic() or dispatch_modes() or forward_ad._current_level >= 0
                or (function_modes() and are_functions_watched())
                or (seen.is_trained and grad_enabled())
            )
        ):  # fmt: skip
            for child in seen.bare:
                its = child.__dict__
                if (
                    "forward" in its or "weight" in its or "bias" in its
                    or its["_forward_hooks"] or its["_forward_pre_hooks"]
                    or its["_backward_hooks"] or its["_backward_pre_hooks"]
                ):  # fmt: skip
                    return None
            for place, name, found in seen.links:
                if (place.get(name) if type(place) is dict else getattr(place, name, None)) is not found:
                    break
            else:
                if seen.check(*operands) and (result := seen.way(*operands)) is not None:
                    return result
        return self._decided(gate, up, operands)

    def _decided(self, gate: Any, up: Any, operands: tuple[Any, ...]) -> torch.Tensor | None:
        """As `_gated`, for a module or a call that was not seen before."""
        (x, first, second, *biases), places = operands, self.places
        if _places_in(type(self._module).forward) != places:  # somebody has replaced it, or the class
            return None
        if not vars(self._module).keys().isdisjoint(places):  # an attribute hides a child
            return None
        if is_replaced() or not (type(gate) is type(up) is TunedLinear and _is_bare(gate) and _is_bare(up)):
            return None
        activation, links = places.activation(self._module)
        if (
            not activation
            or not all(_is_bias_of(first, bias) for bias in biases)
            or not (x.dtype is first.dtype is second.dtype)
            or not (x.device == first.device == second.device)
            or not (x.layout is first.layout is second.layout is torch.strided)
            or x.ndim < 2
            or first.shape != second.shape
            or first.stride() != second.stride()
            or first.stride(1) != 1
            or x.shape[-1] != first.shape[1]
            or guards.any_autocast()
            or (function_modes() and are_functions_watched())
            or not guards.is_ordinary(x, first, (second, *biases))
        ):
            return None
        facts = (*first.shape, first.stride(0), x.dtype, x.device)
        site = sites.gated(activation, sites.TWO_WEIGHTS, bool(biases), facts)
        result: torch.Tensor | None = site.kernel(*operands)
        known = site.find(x.shape)
        if known is not None and known.again == math.inf:
            entry: object = {x.numel()}
            if known.launch is not None:
                entry = object()
                cls, act = type(self._module), self._module._modules.get(places.act)
                links += (
                    (self._module, "__class__", cls), (cls, "forward", cls.forward),
                    (functional, "linear", functional.linear), (nn.Linear, "forward", nn.Linear.forward),
                )  # fmt: skip
                check, is_trained = guards.check_of(operands), any(each.requires_grad for each in operands)
                bare = (gate, up) if act is None else (gate, up, act)
                self._seen = _Seen(
                    entry, gate, up, act, bare, links, len(operands), check, known.launch, is_trained
                )
            planner = api.dispatcher.planner
            planner.states.put_quick(planner.state, data_ptr(first) + _OF_MLPS, entry)
        return result


#: What is added to a gate's address in `api.quick`.
_OF_MLPS = 2


class _Seen(NamedTuple):
    """The latest call of a module whose gate a kernel computed."""

    entry: object
    """In `api.quick`, as long as this holds: a table of all models must not keep layers alive."""
    gate: Any
    up: Any
    act: Any
    """None for a function."""
    bare: tuple[Any, ...]
    """Those whose hooks and attributes would change the result (`_is_bare`)."""
    links: Links
    """Whatever else makes the module's forward what it is."""
    operands: int
    """How many."""
    check: Callable[..., bool]
    way: sites.Way
    is_trained: bool
    """Whether an operand requires a gradient."""


def _is_bias_of(weight: torch.Tensor, bias: Any) -> bool:
    """Whether a kernel can add an object to the columns of the weight's product."""
    return (
        type(bias) in PLAIN
        and (bias.dtype, bias.device) == (weight.dtype, weight.device)
        and bias.layout is torch.strided
        and bias.shape == weight.shape[:1]
        and bias.stride() == (1,)
    )


_HIDING = ("forward", "weight", "bias")


def _is_bare(module: Any) -> bool:
    """Whether a call of a module runs only its class's forward, of its parameters: no hooks, own or global,
    and no attribute that hides either."""
    return (
        isinstance(module, nn.Module)
        and module.__dict__.keys().isdisjoint(_HIDING)
        and not (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or _has_global_hooks()
        )
    )


def _with(module: nn.Module, places: Places) -> nn.Module:
    vars(module).update(Forward(module, places).attributes)
    return module


def _made_again(places: Places, make: Any, arguments: Any) -> nn.Module:
    return _with(make(*arguments), places)


def fuse(model: nn.Module) -> None:
    """Replace the forward of the MLPs that are recognised."""
    for module in model.modules():
        if (places := recognised(module)) is not None:
            _with(module, places)


def unfuse(model: nn.Module) -> None:
    """Restore the forwards that `fuse` replaced."""
    for module in model.modules():
        own = getattr(vars(module).get("__reduce_ex__"), "__self__", None)
        if isinstance(own, Forward):
            own.leave(module)
