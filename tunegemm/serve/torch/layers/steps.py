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
from tunegemm.serve.torch.layers.halves import refusal
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

    def marks(self) -> list[tuple[int, int, int]]:
        """Ids of who asks, as in `State.torchs`: where all are there, of more elements than the last number,
        the step is but the calls."""
        return [(id(self.form), id(self.shared), 0)]

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
    """What is added to a layer's result, which dropout or torch.nn.Identity may stand before."""

    def __init__(self, shared: Shared, between: torch.nn.Module | None) -> None:
        super().__init__(shared, "residual")
        self._between: Any = between
        self._drops = isinstance(between, torch.nn.Dropout)

    def does_nothing(self, between: Any) -> bool:
        """Whether what stands between is the module that did, and no dropout now."""
        if between is not self._between or has_hooks(between):
            return False
        return not (self._drops and between.training and between.p)


class Gated(Step):
    """``activation(gate(x)) * up(x)``."""

    def __init__(self, shared: Shared, activation: Activation, name: str) -> None:
        self.name = GATE_OF[name]
        super().__init__(shared, self.name, activation)
        self._plain = PLAIN_FORMS[bool(shared.parameters("bias"))]
        self.says = f"one product with its gate, {name}"
        if shared.is_taken_apart and refusal(shared.layers[0].weight.dtype, sum(shared.rows), self.name):
            self.says = f"one product, the results as views; {name} and the product with it are torch's"

    def marks(self) -> list[tuple[int, int, int]]:
        shared = self.shared
        forms = [self.form, self._plain] if shared.is_taken_apart else [self.form]
        return [(id(form), id(shared), shared.most_joined) for form in forms]

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
        else:
            has_none = shared.is_missed(self.form, x)
            # One product may take the place of two, too, where none has its gate.
            is_one = not has_none or shared.is_few(x)
            if not is_one and shared.is_taken_apart:
                is_one = not shared.is_missed(self._plain, x)
            if is_one and self.calls_as_known(gate, up, *given):
                result = self._joined(x, activation, has_none)
                if result is not None:
                    return result
        return activation(gate(x)) * up(x)

    def _joined(self, x: Any, activation: Activation, has_none: bool) -> torch.Tensor | None:
        """By one product; None where there is none.

        has_none: whether there is no kernel with the gate, as far as is known.
        """
        shared = self.shared
        if not (has_none and shared.is_taken_apart):
            if (taken := shared.taken(x)) is None:
                return None
            result = None if has_none else shared.gated(self.form, taken, self.name)
            if result is not None:
                return result
            if not shared.is_taken_apart:
                is_one = taken.numel() <= shared.most_joined and not shared.has_kernels(taken)
                whole = shared.by_torch(taken) if is_one else None
                return None if whole is None else activation(whole[..., ::2]) * whole[..., 1::2]
        parts = shared.parts(x)  # as where they were to be trained, or have biases
        return None if parts is None else activation(parts[0]) * parts[1]


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
        if not _is_compiling() and self.may_run(x, layer, *given):
            taken = self.shared.taken(x)
            result = None if taken is None else self.shared.gated(self.form, taken, self.name)
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
        elif self.may_run(x, layer, *given):
            taken = self.shared.taken(x)
            result = None if taken is None else self.shared.product(self.form, taken)
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
        elif (
            isinstance(stream, torch.Tensor)
            and self.shared.may_add(self.form, x, stream)
            and self.calls_as_known(layer)
        ):
            taken = self.shared.taken(x, stream)
            result = None if taken is None else self.shared.sum(self.form, taken, stream, self.form, x)
            if result is not None:
                return result
        result = layer(x)
        return (result if between is None else between(result)) + stream


class _Streams(threading.local):
    """Of each thread what the step of a parent wants of its child's layer."""

    wanted: tuple[Passed, torch.Tensor, list[torch.Tensor]] | None = None
    """The step, the stream, and where the layer puts the sum if it computes it."""


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

    def marks(self) -> list[tuple[int, int, int]]:
        return [(id(self), id(self.shared), 0)]

    def __call__(
        self, child: Any, between: Any, stream: Any, more: Any, /, *arguments: Any, **keywords: Any
    ) -> Any:
        """more: further keywords, or None. Returns what the child does, with the sum in its place."""
        if more:
            keywords |= more
        index = self.index
        shared = self.shared
        if _is_compiling() or not shared.may_add(self, stream, stream) or not self._may_pass(child, between):
            result = child(*arguments, **keywords)
        else:
            before = streams.wanted
            sums: list[torch.Tensor] = []
            streams.wanted = self, stream, sums
            try:
                result = child(*arguments, **keywords)
            finally:
                streams.wanted = before
            if sums:
                if (result if index is None else result[index]) is not sums[0]:
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
        if wanted is None or wanted[0].shared.layers[0] is not layer:
            return None
        streams.wanted = None
        step, stream, sums = wanted
        shared: Shared = layer._fused_with
        form, result = _RESIDUAL[layer._parameters.get("bias") is not None], None
        if not shared.is_missed(form, x) and (taken := shared.taken(x, stream)) is not None:
            result = shared.sum(form, taken, stream, step, stream)
        if result is not None:
            sums.append(result)
        elif type(x) in PLAIN and shared.is_packed and shared.is_missed(form, x):
            shared.remember_missed(step, stream)  # not to be passed for a while
        return result


#: Without a bias and with one.
_RESIDUAL = (form_of(BELOW_AUTOGRAD, "residual"), form_of(BELOW_AUTOGRAD, "bias_n+residual"))


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether somebody is called with what the module is called with, or gives, or instead of it."""
    own = module.__dict__  # as attributes these would cost twice as much
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own  # as accelerate has its hooks
    )
