"""The pass in Inductor, while `enable` is on: tunegemm's products, with Inductor's pointwise code around
them.

Inductor runs it over Dynamo's graph before it differentiates. The pass takes gates, layers with an
activation, and linear layers. Sums stay in the graph, where Inductor fuses them with the next operations.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

import tunegemm
from tunegemm.describe.epilogue import GATE_OF
from tunegemm.dispatch import extension
from tunegemm.dispatch.forms import LINEAR
from tunegemm.dispatch.guards import only_checks_operators
from tunegemm.torch import ops, takeover
from tunegemm.torch.lowering import lower_to_function

if TYPE_CHECKING:
    from tunegemm.layers.patterns import Match

_CONFIG = "torch._inductor.config"
_library: Any = torch.library.Library("tunegemm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("gate(Tensor x, Tensor gate, Tensor up, str activation, str records='') -> Tensor")


class Fusion:
    """Inductor's `pre_grad_custom_pass`."""

    def __init__(self, before: Any) -> None:
        """before: the pass, or passes, that the program had already set."""
        self.before = tuple(before) if isinstance(before, list | tuple) else (before,) * (before is not None)

    def __call__(self, graph: torch.fx.Graph) -> None:
        for each in self.before:
            each(graph)
        if takeover.active:
            from tunegemm.layers.fusion import fuse

            fuse(graph, _function_of)

    def uuid(self) -> Any:
        """The key for Inductor's caches: cached code is used again only if the key is the same."""
        others = []
        for each in self.before:
            uuid = getattr(each, "uuid", None)
            if uuid is None or (other := uuid()) is None:
                return None
            others.append(other)
        on = bool(takeover.active)
        return (
            "tunegemm",
            tunegemm.__version__,
            on,
            extension.fingerprint() if on else "",
            *others,
        )


def install() -> None:
    """Set the pass now, or when the program imports Inductor, which takes seconds."""
    if _CONFIG in sys.modules:
        _set(sys.modules[_CONFIG])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _set(config: Any) -> None:
    before = getattr(config, "pre_grad_custom_pass", None)
    if not isinstance(before, Fusion):
        config.pre_grad_custom_pass = _known_to_inductor()(before)


@cache
def _known_to_inductor() -> Any:
    """The class, derived from Inductor's own: Inductor asks only such passes for a `uuid`, without which it
    caches nothing."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    def __reduce__(self: Fusion) -> tuple[Any, ...]:  # of a class that no module has by its name
        return _unpickled, (self.before,)

    words = {"__module__": __name__, "__reduce__": __reduce__}
    return type("Fusion", (Fusion, CustomGraphPass), words)


def _unpickled(before: Any) -> Any:
    return _known_to_inductor()(before)


class _AfterImport:
    """Finds the module as Python would, and sets the pass when its import is done."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _CONFIG:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def load_and_set(module: ModuleType) -> None:
                load(module)
                _set(sys.modules[_CONFIG])

            loader.exec_module = load_and_set
        return spec


def _function_of(match: Match, facts: tuple[Any, ...]) -> Callable[..., torch.Tensor] | None:
    """The function that Inductor's graph calls for a match; None if its own operations are better."""
    if match.kind == "linear":
        return _linear
    if match.kind == "chain":
        activation, has_bias, has_residual = match.words
        return None if has_residual else _activated(activation, has_bias)
    if match.kind == "gate" and len(match.operands) == 3 and _pays(match, facts):
        lower()
        return _gates(match.words[0])
    return None


def _pays(match: Match, facts: tuple[Any, ...]) -> bool:
    """Whether a kernel of the gate serves as many rows as the graph was traced with."""
    from tunegemm.layers import joint
    from tunegemm.layers.graph import value

    n, k, _, dtype, device = facts
    rows = 1
    for extent in value(match.operands[0]).shape[:-1]:
        rows *= ops.hint(extent)
    config = sys.modules.get(_CONFIG)
    gate, gpu = GATE_OF[match.words[0]], extension.gpu_of(device)
    result = joint.chosen(rows, (n, n), k, dtype, gpu, gate=gate)
    return result is not None and not getattr(config, "cpp_wrapper", False)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return ops.traced_linear(x, weight, bias)


@cache
def _activated(activation: str, has_bias: bool) -> Callable[..., torch.Tensor]:
    text = f"bias_n+{activation}" if has_bias else activation

    def function(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        return ops.traced_fused(LINEAR, text, x, weight, bias, (), None, None, "fast")

    return function


@cache
def _gates(activation: str) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.tunegemm.gate(x, gate, up, activation, ops.records())
        return result

    return function


def _gate(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, records: str = "", site: str = ""
) -> torch.Tensor:
    """``act(x @ gate.T) * (x @ up.T)``. site: as Inductor's code has it; the call decides by its operands."""
    from tunegemm.layers import sites

    if only_checks_operators():
        # If torch computed this first call, a CUDA graph of the next call would keep torch's products.
        with _disable_current_modes():
            return _gate(x, gate, up, activation, records, site)
    facts = (*gate.shape, gate.stride(0), x.dtype, x.device)
    result: torch.Tensor = sites.gated(activation, sites.TWO_WEIGHTS, False, facts)(x, gate, up)
    return result


_library.impl("gate", _gate, "CompositeExplicitAutograd")
torch.library.register_fake(
    "tunegemm::gate",
    lambda x, gate, up, activation, records="": x.new_empty((*x.shape[:-1], gate.shape[0])),
    lib=_library,
)


def lower() -> None:
    """Make Inductor's code call the function directly, not through torch's dispatcher."""
    lower_to_function(
        torch.ops.tunegemm.gate.default, _gate, "tunegemm_gate",
        lambda x, gate, up: [*x.get_size()[:-1], gate.get_size()[0]],
    )  # fmt: skip


def enable() -> takeover.Takeover:
    """Call `takeover.enable`, and run the pass on everything that Inductor compiles meanwhile."""
    install()
    return takeover.enable()


enable.__doc__ = takeover.enable.__doc__
