"""The classes of layers and modules that are computed otherwise. Their objects stay what they were."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from time import monotonic
from typing import Any

import torch
from torch.nn import functional as F

from tunegemm.serve import api
from tunegemm.serve.guards import capturing, grad_enabled
from tunegemm.serve.torch.autograd import PLAIN
from tunegemm.serve.torch.layers.halves import refusal
from tunegemm.serve.torch.layers.recognise import Match, compiled, matches, replace, traced
from tunegemm.serve.torch.layers.shared import Shared, remember_left
from tunegemm.serve.torch.layers.steps import (
    GATE_OF,
    Activated,
    Added,
    Gated,
    Halved,
    Passed,
    Step,
    has_hooks,
    streams,
)
from tunegemm.serve.torch.linear import TunedLinear, eagerly

_is_compiling = torch.compiler.is_compiling
#: Methods that are looked at: in `_ff_block` torch.nn.TransformerEncoderLayer has its MLP.
_METHODS = ("forward", "_ff_block")
#: How what is kept in the dictionary of a module's object begins.
_PREFIX = "_fused_"
#: What methods read of a module's attributes when they were traced.
_READS = f"{_PREFIX}reads"


class SharedLinear(TunedLinear):
    """A layer that is computed with others, or with what follows it; its weight lies with theirs."""

    stands_for = torch.nn.Linear
    _fused_with: Shared

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self._fused_with.pack()  # which does nothing before all layers have been moved
        return result

    def _load_from_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        super()._load_from_state_dict(*arguments, **keywords)
        if not self._fused_with.is_in_place():  # they were assigned, not copied
            self._fused_with.pack()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars and self._fused_with.is_in_place():
            for name in self._parameters:
                if (saved := destination.get(prefix + name)) is not None:
                    destination[prefix + name] = _by_storage(saved)

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Any:
        # `fully_shard` asks each module for its own, to put shards in their place. It refuses weights with
        # gaps, and memory that another holds would not be freed.
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.distributed.fsdp."):
            self._fused_with.unpack()
        return super().named_parameters(*arguments, **keywords)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._fused_with.pack()


class AskingLinear(SharedLinear):
    """One whose own call may find its result computed, or is to add something to it."""

    stands_for = torch.nn.Linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        shared = self.__dict__.get("_fused_with")
        part = None
        if shared is None:  # it was unpatched, and somebody has kept this method, as accelerate's hooks do
            return F.linear(input, self.weight, self.bias)
        if _is_compiling():
            part = shared.traced_part(self, input) if shared.is_taken_apart else None
            return api.linear(input, self.weight, self.bias) if part is None else part
        if grad_enabled() and type(input) in PLAIN and input.requires_grad:
            pass  # it is trained by itself (docs/decisions/0028)
        elif shared.is_taken_apart:
            part = shared.part(self, input)
        elif streams.wanted is not None:
            part = Passed.sum(self, input)
        return eagerly(self, input) if part is None else part


# As of `TunedLinear`: what torch.jit.script compiles.
AskingLinear.forward.__wrapped__ = torch.nn.Linear.forward  # type: ignore[attr-defined]


def _by_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own, as safetensors wants it; a copy of rows that lie apart."""
    return torch.utils.dlpack.from_dlpack(tensor) if tensor.is_contiguous() else tensor.contiguous()


def share(layers: Sequence[torch.nn.Linear], *, in_turns: bool = False) -> Shared | str:
    """Puts the weights of layers, which are `TunedLinear`, into one storage; or why they cannot be."""
    shared = layers[0].__dict__.get("_fused_with")
    if shared is not None and list(map(id, shared.layers)) == list(map(id, layers)):
        return shared  # of a copy
    if len(set(map(id, layers))) < len(layers):
        return "a layer is called twice"
    for layer in layers:
        if type(layer) is not TunedLinear:
            return f"a layer is a {type(layer).__name__}"
        if has_hooks(layer):
            return "a layer has hooks"
    shared = Shared(layers, in_turns=in_turns)
    if reason := shared.pack():
        return reason
    for layer in layers:
        layer.__class__ = AskingLinear if shared.is_taken_apart else SharedLinear
        layer.__dict__["_fused_with"] = shared
    return shared


def fuse_methods(module: torch.nn.Module) -> list[tuple[Match, Step | str]]:
    """Replaces what one kernel may do of a module's methods; the findings, each with its step or a reason."""
    cls: Any = type(module)
    methods: list[str] = []
    found: list[tuple[Match, Step | str]] = []
    for method in _METHODS:
        is_own = hasattr(cls, method) and method not in module.__dict__  # where somebody has put another
        known = traced(module, method) if is_own else None
        if known is None:
            continue
        graph, reads = known
        steps: list[Step] = []
        for match in matches(module, graph):
            step = _step(module, match)
            found.append((match, step))
            if not isinstance(step, str):
                place = f"{_PREFIX}{method}_{len(steps)}"
                replace(graph, match, place)
                module.__dict__[place] = step
                steps.append(step)
        if steps:
            module.__dict__[_PREFIX + method] = compiled(graph, method)
            module.__dict__[f"{_PREFIX}{method}_marks"] = [mark for step in steps for mark in step.marks()]
            module.__dict__[_READS] = module.__dict__.get(_READS, frozenset()) | reads
            methods.append(method)
    if methods:
        module.__class__ = class_of(cls, tuple(methods))
    return found


def _step(module: torch.nn.Module, match: Match) -> Step | str:
    """What computes it, or why nothing does."""
    layers: Any = [module.get_submodule(name) for name in match.names]
    activation: Any = match.function()
    if match.activation is not None and activation is None:
        activation = module.get_submodule(str(match.activation.target))
        if has_hooks(activation):
            return "the activation has hooks"
    # Layers that are trained are computed by torch, one by one; what lies with gaps is slow for it.
    trains = module.training and any(p.requires_grad for layer in layers for p in layer.parameters())
    in_turns = match.kind == "gated" and not trains and all(layer.bias is None for layer in layers)
    wrong = ""
    if match.kind == "halved":
        wrong = refusal(layers[0].weight.dtype, layers[0].out_features, GATE_OF[match.name])
    shared = wrong or share(layers, in_turns=in_turns)
    if isinstance(shared, str) and in_turns:
        shared = share(layers)  # of weights that cannot be moved, as they lie
    if isinstance(shared, str):
        return shared
    between = None if match.between is None else module.get_submodule(str(match.between.target))
    if match.end is not None:
        layers[0].__class__ = AskingLinear
        return Passed(shared, module.get_submodule(match.child), match.end.place, between)
    if match.kind == "gated":
        return Gated(shared, activation, match.name)
    if match.kind == "halved":
        return Halved(shared, activation, match.name)
    return Added(shared, between) if match.kind == "added" else Activated(shared, activation, match.name)


def forget(module: torch.nn.Module) -> None:
    """What is kept in a module's object for all this goes; its class is the caller's to change."""
    shared = module.__dict__.pop("_fused_with", None)
    if shared is not None:
        shared.unpack()
    for name in [name for name in module.__dict__ if name.startswith(_PREFIX)]:
        del module.__dict__[name]


@cache
def class_of(cls: Any, methods: tuple[str, ...]) -> Any:
    """The class that stands for a module's own, with these methods by functions of its object."""
    content: dict[str, Any] = {method: _calling(getattr(cls, method), method) for method in methods}

    def reduce(self: Any, protocol: Any) -> Any:
        # Functions and steps are not of a copy, which makes its own.
        state = {name: value for name, value in self.__getstate__().items() if not name.startswith(_PREFIX)}
        return _blank, (cls, methods), state

    def set_state(self: Any, state: Any) -> None:
        self.__class__ = cls
        self.__setstate__(state)
        fuse_methods(self)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        is_followed = name not in self.__dict__.get(_READS, ()) or _is_followed(self, name, value)
        cls.__setattr__(self, name, value)
        if not is_followed:
            _give_back(self)

    def delete(self: Any, name: str) -> None:
        cls.__delattr__(self, name)
        if name in self.__dict__.get(_READS, ()):
            _give_back(self)

    content |= {"__reduce_ex__": reduce, "__setstate__": set_state, "stands_for": cls}
    content |= {"__setattr__": set_attribute, "__delattr__": delete}
    content |= {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), content)  # by whose name others find the layers of a model


def _is_followed(module: Any, name: str, value: Any) -> bool:
    """Whether what has the value in the place of the attribute's is seen at each call."""
    own = module.__dict__
    for kind, place in (
        (torch.nn.Module, "_modules"),
        (torch.nn.Parameter, "_parameters"),
        (torch.Tensor, "_buffers"),
    ):
        if name in own[place]:
            return isinstance(value, kind) and own[place][name] is not None
    return name in own and own[name] is value


def _give_back(module: Any) -> None:
    """A method is as it was written from now on, since what it read is another."""
    for method in _METHODS:
        module.__dict__.pop(_PREFIX + method, None)


def _blank(cls: Any, methods: tuple[str, ...]) -> Any:
    kind = class_of(cls, methods)
    return kind.__new__(kind)


def _calling(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    place, marks = _PREFIX + name, f"{_PREFIX}{name}_marks"

    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        own = self.__dict__
        if (function := own.get(place)) is None:  # it was unpatched, and somebody has kept this method
            return original(self, *arguments, **keywords)
        x: Any = arguments[0] if arguments else None
        if _is_compiling() or type(x) not in PLAIN:
            return function(self, *arguments, **keywords)
        if grad_enabled() and x.requires_grad:  # all steps would be torch's (docs/decisions/0028)
            return original(self, *arguments, **keywords)
        planner, who, size = api.dispatcher.planner, id(function), x.numel()
        known = planner.state.torchs
        # Where torch is known to compute all that the steps might, the host is spared to ask each.
        if (
            (who, size) in known
            and monotonic() < planner.next_look
            and ((who, -size) not in known or not capturing(x.device))
        ):
            return original(self, *arguments, **keywords)
        before = len(known)
        result = function(self, *arguments, **keywords)
        if len(known) != before:
            remember_left(own[marks], who, x)
        return result

    method.__wrapped__ = original  # type: ignore[attr-defined] # which says what it takes
    return method
