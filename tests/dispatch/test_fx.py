"""torch.fx traces functions that call tunegemm: each call is a node, as of torch's own functions."""

from __future__ import annotations

import pickle

import pytest
import torch

import tunegemm
from tests.support.fusing import FP8
from tests.support.serving import BF16, operands

ONE = torch.ones(())
CALLS = {
    "matmul": lambda a, b: tunegemm.matmul(a, b),
    "matmul, bias": lambda a, b: tunegemm.matmul(a, b, bias=torch.ones(48, dtype=BF16), activation="relu"),
    "matmul, epilogue": lambda a, b: tunegemm.matmul(a, b, epilogue="alpha", operands=(2.0,)),
    "matmul, fp32": lambda a, b: tunegemm.matmul(a, b, out_dtype=torch.float32),
    "linear": lambda a, b: tunegemm.linear(a, b.t()),
    "linear, bias, gelu": lambda a, b: tunegemm.linear(a, b.t(), torch.ones(48, dtype=BF16), "gelu"),
    "gated_linear": lambda a, b: tunegemm.gated_linear(a, b.t()),
    "addmm": lambda a, b: tunegemm.addmm(torch.ones(48, dtype=BF16), a, b),
    "addmm of a traced C": lambda a, b: tunegemm.addmm(a[:, :48], torch.ones(32, 64, dtype=BF16), b, beta=2),
    "mm, out": lambda a, b: tunegemm.mm(a, b, out=torch.empty(32, 48, dtype=BF16)),
    "bmm": lambda a, b: tunegemm.bmm(a[None], b[None]),
    "baddbmm": lambda a, b: tunegemm.baddbmm(torch.ones(1, 32, 48, dtype=BF16), a[None], b[None], beta=2),
    "scaled_mm": lambda a, b: tunegemm.scaled_mm(a.to(FP8), b.to(FP8), ONE, ONE, out_dtype=BF16),
}


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_a_node(name):
    a, b = operands()
    traced = torch.fx.symbolic_trace(CALLS[name])
    target = getattr(tunegemm, name.split(",")[0].split()[0])
    (node,) = [node for node in traced.graph.nodes if node.target is target]
    assert not node.users.keys() - {traced.graph.output_node()}
    used = {other for node in traced.graph.nodes for other in node.all_input_nodes}
    assert {node for node in traced.graph.nodes if node.op.startswith("call")} <= used, "nothing is left over"
    expected = CALLS[name](a, b)
    for module in (traced, pickle.loads(pickle.dumps(traced))):
        assert torch.equal(module(a, b), expected)


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
def test_a_traced_product_is_written_into_its_output():
    a, b = operands()
    out = torch.zeros(32, 48, dtype=BF16)
    traced = torch.fx.symbolic_trace(lambda a, b, out: tunegemm.mm(a, b, out=out))
    assert traced(a, b, out) is out and torch.equal(out, a @ b)


def test_a_module_with_patched_layers_is_traced():
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
    assert tunegemm.linear in {node.target for node in graph.nodes}
