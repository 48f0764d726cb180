"""What takes the place of a few calls in a module's forward: one kernel, or those calls as they were.

Each step is given the modules that forward names, as they are at that call: what a tool has put in their
place, or hooks on them, make it the calls as they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook

from tunegemm.describe.epilogue import GATED
from tunegemm.errors import TunegemmError
from tunegemm.serve import api
from tunegemm.serve.forms import BELOW_AUTOGRAD, form_of
from tunegemm.serve.torch.autograd import PLAIN
from tunegemm.serve.torch.layers.shared import PLAIN_FORMS, Shared
from tunegemm.serve.torch.several import traced_gated, traced_part

_is_compiling = torch.compiler.is_compiling
Activation = Callable[[torch.Tensor], torch.Tensor]

GATE_OF = {activation: gate for gate, activation in GATED.items()}


class Step:
    """One of them."""

    says = ""
    """What it does, for a report."""

    def __init__(self, shared: Shared, steps: str, activation: Activation | None = None) -> None:
        """steps: of the epilogue, after the bias; activation: as forward has it."""
        self.shared, self.activation = shared, activation
        has_bias = bool(shared.parameters("bias"))
        self.form = form_of(BELOW_AUTOGRAD, "+".join(["bias_n"] * has_bias + [steps]))
        self._known: tuple[Any, ...] = shared.layers
        if isinstance(activation, torch.nn.Module):
            self._known = (*self._known, activation)

    def may_run(self, x: Any, *modules: Any) -> bool:
        """Whether a kernel may be known, and `calls_as_known`."""
        return not self.shared.is_missed(self.form, x) and self.calls_as_known(*modules)

    def may_be_traced(self, x: torch.Tensor, *modules: Any) -> bool:
        """`may_run` while a graph is made; whether a kernel is known is seen when it is."""
        weight = self.shared.layers[0].weight
        return x.dtype == weight.dtype and self.calls_as_known(*modules) and self.shared.lies_together()

    def calls_as_known(self, *modules: Any) -> bool:
        """Whether forward calls the modules that it did, without hooks on them."""
        if modules != self._known or _has_any_global_hook():
            return False
        for module in modules:  # noqa: SIM110 - a generator would cost as much as all else here
            if has_hooks(module):
                return False
        return True


class _Sum(Step):
    """What is added to a layer's result, which dropout may stand before."""

    def __init__(self, shared: Shared, between: torch.nn.Module | None) -> None:
        super().__init__(shared, "residual")
        self._between: Any = between

    def does_nothing(self, between: Any) -> bool:
        """Whether what stands between is the dropout that did, and none now."""
        return between is self._between and not (between.training and between.p) and not has_hooks(between)


class Gated(Step):
    """``activation(gate(x)) * up(x)``."""

    def __init__(self, shared: Shared, activation: Activation, name: str) -> None:
        self.name = GATE_OF[name]
        super().__init__(shared, self.name, activation)
        if not shared.in_turns:
            self.form = PLAIN_FORMS[bool(shared.parameters("bias"))]
        self.says = f"one product with its gate, {name}"
        if not shared.in_turns:
            self.says = f"one product, the results as views; {name} and the product with it are torch's"

    def __call__(self, gate: Any, up: Any, x: Any, *given: Activation) -> torch.Tensor:
        """given: the activation, where it is a module of forward's."""
        shared = self.shared
        activation = given[0] if given else self.activation
        assert activation is not None
        if _is_compiling():
            if self.may_be_traced(x, gate, up, *given):
                if shared.in_turns:
                    return traced_gated(x, *shared.traced_parameters(), self.name)
                parameters = shared.traced_parameters()
                return activation(traced_part(x, *parameters, 0)) * traced_part(x, *parameters, 1)
        elif (
            shared.may_be_one(self.form, x) and self.calls_as_known(gate, up, *given) and not shared.trains(x)
        ):
            if not shared.in_turns:  # as for graphs that train
                parts = shared.parts(x)
                return activation(gate(x)) * up(x) if parts is None else activation(parts[0]) * parts[1]
            product = None if shared.is_missed(self.form, x) else shared.gated(self.form, x, self.name)
            if product is not None:
                return product
            if (whole := shared.by_torch(x)) is not None:
                return activation(whole[..., ::2]) * whole[..., 1::2]
        return activation(gate(x)) * up(x)


class Halved(Step):
    """``activation(gate) * up`` of the halves of one layer's result."""

    def __init__(self, shared: Shared, activation: Activation, name: str) -> None:
        self.name = GATE_OF[name]
        super().__init__(shared, self.name, activation)
        self.says = f"{name} of its first half, times the second, in the product's kernel"

    def __call__(self, layer: Any, x: Any, *given: Activation) -> torch.Tensor:
        activation = given[0] if given else self.activation
        assert activation is not None
        # A compiler fuses the two steps itself, behind one product.
        if not _is_compiling() and self.may_run(x, layer, *given) and not self.shared.trains(x):
            result = self.shared.gated(self.form, x, self.name)
            if result is not None:
                return result
        gate, up = layer(x).chunk(2, -1)
        return activation(gate) * up


class Activated(Step):
    """``activation(layer(x))``."""

    def __init__(self, shared: Shared, activation: Activation, name: str) -> None:
        super().__init__(shared, name, activation)
        self.name: Any = name
        self.says = f"{name} in the product's kernel"

    def __call__(self, layer: Any, x: Any, *given: Activation) -> torch.Tensor:
        activation = given[0] if given else self.activation
        assert activation is not None
        if _is_compiling():
            if self.may_be_traced(x, layer, *given):
                return api.linear(x, layer.weight, layer.bias, self.name)
        elif self.may_run(x, layer, *given) and not self.shared.trains(x):
            result = self.shared.product(self.form, x)
            if result is not None:
                return result
        return activation(layer(x))


class Added(_Sum):
    """``layer(x) + stream``."""

    says = "what is added to it in the product's kernel"

    def __call__(self, layer: Any, x: Any, stream: Any, between: Any = None) -> torch.Tensor:
        if between is not None and not self.does_nothing(between):
            pass
        elif _is_compiling():
            if isinstance(stream, torch.Tensor) and self.may_be_traced(x, layer):
                shape = (*x.shape[:-1], layer.out_features)
                if stream.dtype == x.dtype and tuple(stream.shape) == shape:
                    return api.linear(x, layer.weight, layer.bias, None, stream)
        elif self.may_run(x, layer) and isinstance(stream, torch.Tensor):
            shared = self.shared
            if not shared.trains(x, stream):
                result = shared.product(self.form, x, stream)
                if result is not None:
                    return result
        result = layer(x)
        return (result if between is None else between(result)) + stream


class _Wanted:
    """What the step of a parent wants of a child's layer."""

    __slots__ = ("layer", "step", "stream", "taken")

    def __init__(self, step: Passed, stream: torch.Tensor) -> None:
        self.layer, self.step, self.stream = step.shared.layers[0], step, stream
        self.taken: torch.Tensor | None = None
        """The sum, where the layer computed it."""


class _Streams(threading.local):
    """Of each thread what is wanted now."""

    wanted: _Wanted | None = None


streams = _Streams()


class Passed(_Sum):
    """``child(...) + stream``, of a child whose forward ends with a layer: the layer is passed the stream."""

    says = "what the module above it adds in the product's kernel"

    def __init__(
        self, shared: Shared, child: Any, index: int | None, between: torch.nn.Module | None
    ) -> None:
        """index: where the layer's result is in the tuple that the child returns; None: it is all."""
        super().__init__(shared, between)
        self.index, self.type = index, type(child)
        self._known = (child, *shared.layers)
        self._place = next(name for name, one in child._modules.items() if one is shared.layers[0])

    def __call__(
        self, child: Any, between: Any, stream: Any, more: Any, /, *arguments: Any, **keywords: Any
    ) -> Any:
        """more: further keywords, or None. Returns what the child does, with the sum in its place."""
        if more:
            keywords |= more
        index = self.index
        if _is_compiling() or self.shared.is_missed(self, stream) or not self._may_pass(child, between):
            result = child(*arguments, **keywords)
        else:
            wanted, before = _Wanted(self, stream), streams.wanted
            streams.wanted = wanted
            try:
                result = child(*arguments, **keywords)
            finally:
                streams.wanted = before
            if wanted.taken is not None:
                if (result if index is None else result[index]) is not wanted.taken:
                    raise TunegemmError(
                        f"{type(child).__name__} gave something else than its {self._place} did, to which "
                        "the residual was added; tunegemm.unpatch the model"
                    )
                return result
        value = result if index is None else result[index]
        value = (value if between is None else between(value)) + stream
        return value if index is None else (*result[:index], value, *result[index + 1 :])

    def _may_pass(self, child: Any, between: Any) -> bool:
        return (
            type(child) is self.type
            and (between is None or self.does_nothing(between))
            and child._compiled_call_impl is None
            and self.calls_as_known(child, child._modules.get(self._place))
        )

    @staticmethod
    def sum(layer: Any, x: Any) -> torch.Tensor | None:
        """The sum of a layer's result and what its module's parent wants to add; None where it wants nothing,
        or no kernel computes that."""
        wanted = streams.wanted
        if wanted is None or wanted.layer is not layer:
            return None
        streams.wanted = None
        shared: Shared = layer._fused_with
        form = _RESIDUAL[layer.bias is not None]
        if not shared.is_missed(form, x) and not shared.trains(x, wanted.stream):
            wanted.taken = shared.product(form, x, wanted.stream)
        if wanted.taken is None and type(x) in PLAIN and shared.is_packed and shared.is_missed(form, x):
            shared.remember_missed(wanted.step, wanted.stream)  # not to be passed for a while
        return wanted.taken


#: Without a bias and with one.
_RESIDUAL = (form_of(BELOW_AUTOGRAD, "residual"), form_of(BELOW_AUTOGRAD, "bias_n+residual"))


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether somebody is called with what the module is called with, or gives, or instead of it."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # as accelerate has its hooks
    )
