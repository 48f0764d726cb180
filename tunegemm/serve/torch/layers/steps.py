"""What takes the place of a few calls in a module's forward: one kernel, or those calls as they were.

Each step is given the modules that forward names, as they are at that call: what a tool has put in their
place, or hooks on them, make it the calls as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook

from tunegemm.describe.epilogue import GATED
from tunegemm.serve.forms import BELOW_AUTOGRAD, form_of
from tunegemm.serve.torch.layers.shared import PLAIN_FORMS, Shared

Activation = Callable[[torch.Tensor], torch.Tensor]

_GATE_OF = {activation: gate for gate, activation in GATED.items()}


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
        """Whether a kernel may be known, and forward calls the modules that it did, without hooks on them."""
        if self.shared.is_missed(self.form, x) or modules != self._known or _has_any_global_hook():
            return False
        for module in modules:  # noqa: SIM110 - a generator would cost as much as all else here
            if has_hooks(module):
                return False
        return True


class Gated(Step):
    """``activation(gate(x)) * up(x)``."""

    def __init__(self, shared: Shared, activation: Activation, name: str) -> None:
        super().__init__(shared, _GATE_OF[name], activation)
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
        if self.may_run(x, gate, up, *given):
            if not shared.in_turns:  # as for training: the activation's own gradient is torch's
                parts = shared.parts(x)
                if parts is not None:
                    return activation(parts[0]) * parts[1]
            elif not shared.trains(x):
                result = shared.product(self.form, x)
                if result is not None:
                    return result
        return activation(gate(x)) * up(x)


class Activated(Step):
    """``activation(layer(x))``."""

    def __init__(self, shared: Shared, activation: Activation, name: str) -> None:
        super().__init__(shared, name, activation)
        self.says = f"{name} in the product's kernel"

    def __call__(self, layer: Any, x: Any, *given: Activation) -> torch.Tensor:
        activation = given[0] if given else self.activation
        assert activation is not None
        if self.may_run(x, layer, *given) and not self.shared.trains(x):
            result = _anew(self.shared).product(self.form, x)
            if result is not None:
                return result
        return activation(layer(x))


class Added(Step):
    """``layer(x) + stream``."""

    says = "what is added to it in the product's kernel"

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared, "residual")

    def __call__(self, layer: Any, x: Any, stream: Any) -> torch.Tensor:
        if self.may_run(x, layer) and isinstance(stream, torch.Tensor):
            shared = self.shared
            if not shared.trains(x, stream):
                result = _anew(shared).product(self.form, x, stream)
                if result is not None:
                    return result
        return layer(x) + stream


def _anew(shared: Shared) -> Shared:
    """Of one layer: its weight may have moved, which costs nothing to follow."""
    if not shared.is_in_place():
        shared.pack()
    return shared


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether somebody is called with what the module is called with, or gives, or instead of it."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # as accelerate has its hooks
    )
