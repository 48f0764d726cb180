"""Inductor's `pre_grad_custom_pass`, which puts tunegemm's calls into its graphs. Imports Inductor."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import tunegemm
from tunegemm.describe.epilogue import GATE_OF
from tunegemm.dispatch import extension
from tunegemm.dispatch.forms import LINEAR
from tunegemm.dispatch.guards import deterministic
from tunegemm.layers import sites
from tunegemm.layers.fusion import fuse
from tunegemm.layers.graph import value
from tunegemm.layers.patterns import Match
from tunegemm.torch import ops, takeover
from tunegemm.torch.lowering import lower, lower_to_function


class Fusion(CustomGraphPass):
    """Inductor's `pre_grad_custom_pass`."""

    def __init__(self, before: Any) -> None:
        """before: the pass, or passes, that the program had already set."""
        self.before = tuple(before) if isinstance(before, list | tuple) else (before,) * (before is not None)

    def __call__(self, graph: torch.fx.Graph) -> None:
        for each in self.before:
            each(graph)
        if takeover.active and not deterministic():
            teach_inductor()
            fuse(graph, function_of)

    def uuid(self) -> Any:
        """The key for Inductor's caches: cached code is used again only if the key is the same. Then the pass
        does not run, so the functions that this code calls are taught here, too."""
        others = []
        for each in self.before:
            uuid = getattr(each, "uuid", None)
            if uuid is None or (other := uuid()) is None:
                return None
            others.append(other)
        on = bool(takeover.active)
        if on:
            teach_inductor()
        return "tunegemm", tunegemm.__version__, on, extension.fingerprint() if on else "", *others


def teach_inductor() -> None:
    """Teach Inductor the functions that code of the pass calls."""
    lower()
    lower_to_function(torch.ops.tunegemm.gate.default, compute_gate, "tunegemm_gate")


def function_of(match: Match, facts: tuple[Any, ...]) -> Callable[..., torch.Tensor] | None:
    """The function that Inductor's graph calls for a match; None if its own operations are better."""
    if match.kind == "linear":
        return ops.traced_linear
    if match.kind == "chain":
        activation, has_bias, has_residual = match.words
        return None if has_residual else _activated(activation, has_bias)
    if match.kind == "gate" and len(match.operands) == 3 and pays(match, facts):
        return _gates(match.words[0])
    return None


def pays(match: Match, facts: tuple[Any, ...]) -> bool:
    """Whether a kernel of the gate serves as many rows as the graph was traced with."""
    n, k, _, dtype, device = facts
    rows = 1
    for extent in value(match.operands[0]).shape[:-1]:
        rows *= ops.hint(extent)
    gate, gpu = GATE_OF[match.words[0]], extension.gpu_of(device)
    result = sites.chosen(rows, (n, n), k, dtype, gpu, gate=gate)
    return result is not None and not config.cpp_wrapper


@cache
def _activated(activation: str, has_bias: bool) -> Callable[..., torch.Tensor]:
    text = f"bias_n+{activation}" if has_bias else activation

    def function(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        return ops.traced_fused(LINEAR, text, x, weight, bias, (), None, None, "fast")

    return function


@cache
def _gates(activation: str) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.ops.tunegemm.gate(x, gate, up, activation, ops.records())

    return function


def compute_gate(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, records: str = "", site: str = ""
) -> torch.Tensor:
    """``act(x @ gate.T) * (x @ up.T)``. site: as Inductor's code has it; the call decides by its operands."""
    facts = (*gate.shape, gate.stride(0), x.dtype, x.device)
    return sites.gated(activation, sites.TWO_WEIGHTS, False, facts)(x, gate, up)


extension.define(
    "gate(Tensor x, Tensor gate, Tensor up, str activation, str records='') -> Tensor",
    compute_gate,
    lambda x, gate, up, activation, records="": x.new_empty((*x.shape[:-1], gate.shape[0])),
)
