"""torch.fx traces patched layers; other calls become torch's functions, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tunegemm
from tests.support.serving import BF16, operands
from tunegemm.errors import ProblemError

CALLS = {
    "matmul": lambda a, b: tunegemm.matmul(a, b),
    "linear": lambda a, b: tunegemm.linear(a, b.t(), torch.ones(48, dtype=BF16)),
    "addmm": lambda a, b: tunegemm.addmm(torch.ones(48, dtype=BF16), a, b),
    "mm": lambda a, b: tunegemm.mm(a, b, out=torch.empty(32, 48, dtype=BF16)),
    "bmm": lambda a, b: tunegemm.bmm(a[None], b[None]),
    "baddbmm": lambda a, b: tunegemm.baddbmm(torch.ones(1, 32, 48, dtype=BF16), a[None], b[None], beta=2),
}


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_traced_call_is_a_call_of_torchs_function(name: str) -> None:
    a, b = operands()
    traced = torch.fx.symbolic_trace(CALLS[name])
    assert name in {getattr(node.target, "__name__", "") for node in traced.graph.nodes}
    assert torch.equal(traced(a, b), CALLS[name](a, b))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "an activation": lambda x: tunegemm.linear(x, torch.ones(48, 64, dtype=BF16), activation="gelu"),
    "a gate": lambda x: tunegemm.gated_linear(x, torch.ones(48, 64, dtype=BF16)),
    "an epilogue": lambda x: tunegemm.matmul(x, torch.ones(64, 48, dtype=BF16), epilogue="relu"),
    "quantize": tunegemm.quantize,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_torch_has_no_function_for_is_not_traced(name: str) -> None:
    with pytest.raises(ProblemError, match=r"is not a tensor|is a Proxy; give a tensor"):
        torch.fx.symbolic_trace(REFUSED[name])


def test_a_module_with_patched_layers_is_traced() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, dtype=BF16), torch.nn.ReLU())
    tunegemm.patch(model)
    traced = torch.fx.symbolic_trace(model)
    x = operands()[0]
    assert torch.equal(traced(x), model(x)) and len(traced.state_dict()) == 2
    # Tools that rewrite graphs, such as FX quantisation, look for the module, as of torch's own layer.
    assert [(node.op, node.target) for node in traced.graph.nodes][1] == ("call_module", "0")

    model[0].register_forward_hook(lambda layer, given, result: result * 2)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x)), "a hook runs once"

    class Inside(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return False

    model[0]._forward_hooks.clear()
    graph = Inside().trace(model)
    assert torch.nn.functional.linear in {node.target for node in graph.nodes}
