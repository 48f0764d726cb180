"""vLLM's layers of experts, beside the real vLLM as far as it imports without a GPU."""

from __future__ import annotations

import pytest

from tests.engines.conftest import Run
from tests.engines.programs import HOPPER, LAYERS, LOADS, engine

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

_EXPERTS = """
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

triton = unquantized.UnquantizedMoeBackend.TRITON
"""


@engine
def test_the_class_is_the_first_where_it_is_asked_for(engine: str, run: Run) -> None:
    code = LOADS + """
load()
load()
""" + _EXPERTS + """
found["classes"] = [each.__name__ for each in unquantized.backend_to_kernel_cls(triton)]
other = unquantized.UnquantizedMoeBackend.BATCHED_TRITON
found["others"] = [each.__name__ for each in unquantized.backend_to_kernel_cls(other)]
"""  # fmt: skip
    for variables, classes in (
        ({}, ["TritonExperts"]),
        ({"TUNEGEMM_VLLM_EXPERTS": "1"}, ["TunegemmExperts", "TritonExperts"]),
        ({"TUNEGEMM_VLLM_EXPERTS": "1", "TUNEGEMM_VLLM": "0"}, ["TritonExperts"]),
    ):
        found = run(engine, code, **variables)
        assert found["classes"] == classes, found["output"]
        assert found["others"] == ["BatchedTritonExperts"]
        assert "tunegemm leaves" not in str(found["output"])


@engine
def test_layers_are_computed_where_they_are_served(engine: str, run: Run) -> None:
    """By vLLM's own choice of a class; Triton's product, which is a GPU's, is a stand-in that says so."""
    found = run(
        engine,
        LOADS
        + HOPPER
        + "load()\n"
        + _EXPERTS
        + """
import os
from types import SimpleNamespace
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.experts import triton_moe
from tests.groups.test_experts import by_loops, layer
from tests.support.engines import serve_on_cpu
from tests.support.grouped import Loops
from tunegemm.groups import grouped

for module in (vllm.platforms, modular_kernel, triton_moe, unquantized):
    on(module)
loops = Loops()
grouped.groups = grouped.Groups(loops.load)
serve_on_cpu()
theirs = []
TritonExperts.apply = lambda self, **given: theirs.append(sorted(given))

class Facts(SimpleNamespace):
    def __getattr__(self, name):
        return None  # what is not asked for

parallel = Facts(dp_size=1)
def moe(**more):
    words = dict(
        is_lora_enabled=False, moe_backend="auto", activation=MoEActivation.SILU, is_act_and_mul=True,
        moe_parallel_config=parallel, hidden_dim=64, num_experts=6,
    )
    return Facts(**words | more)
_, cls = unquantized.select_unquantized_moe_backend(moe())
found["class"] = cls.__name__
found["with LoRA"] = unquantized.select_unquantized_moe_backend(moe(is_lora_enabled=True))[1].__name__
os.environ["VLLM_BATCH_INVARIANT"] = "1"
found["invariant"] = unquantized.select_unquantized_moe_backend(moe())[1].__name__
os.environ["VLLM_BATCH_INVARIANT"] = "0"

given = layer(dtype=torch.bfloat16)
expected = by_loops(**given)
x, index, weights = given["x"], given["index"].int(), given["weights"].float()
own = object.__new__(cls)
own.quant_config, own.moe_config = FUSED_MOE_UNQUANTIZED_CONFIG, moe()
def call(experts, **more):
    output = torch.zeros_like(x)
    words = dict(
        output=output, hidden_states=x, w1=torch.nn.Parameter(given["gate_up"]), w2=given["down"],
        topk_weights=weights, topk_ids=index, activation=MoEActivation.SILU, global_num_experts=6,
        expert_map=None, a1q_scale=None, a2_scale=None, workspace13=x.new_empty(0),
        workspace2=x.new_empty(0), expert_tokens_meta=None, apply_router_weight_on_input=False)
    loops.calls.clear()
    theirs.clear()
    with torch.inference_mode():
        experts.apply(**words | more)
    return output, len(loops.calls), len(theirs)
output, ours, others = call(own)
found["served"] = [torch.allclose(output.float(), expected, rtol=5e-2, atol=3e-2), ours, others]
found["others"] = {}
for name, more in {
    "map": {"expert_map": torch.arange(6)},
    "on input": {"apply_router_weight_on_input": True},
    "scales": {"a1q_scale": torch.ones(1)},
    "gelu": {"activation": MoEActivation.GELU},
    "fp32": {"hidden_states": x.float()},
}.items():
    found["others"][name] = call(own, **more)[1:]
own._lora_context = object()
found["others"]["LoRA"] = call(own)[1:]
own._lora_context = None
own.activation_config = SimpleNamespace(clamp_limit=7.0)
found["others"]["limits"] = call(own)[1:]
own.activation_config = SimpleNamespace(clamp_limit=None)
found["served again"] = call(own)[1:]
loops.found = False
grouped.groups = grouped.Groups(loops.load)
found["others"]["no kernel yet"] = call(own)[1:]
""",
        TUNEGEMM_VLLM_EXPERTS="1",
    )
    output = found["output"]
    assert found["class"] == "TunegemmExperts", output
    assert found["with LoRA"] == "TunegemmExperts" and found["invariant"] == "TritonExperts", output
    assert found["served"] == [True, 2, 0], output
    names = ("map", "on input", "scales", "gelu", "fp32", "LoRA", "limits", "no kernel yet")
    assert found["served again"] == [2, 0], output
    assert found["others"] == {name: [0, 1] for name in names}, output


@engine
def test_a_whole_layer_of_vllms(engine: str, run: Run, tmp_path) -> None:
    """vLLM's own layer takes our class, and its modular kernel calls it; the start's line asks of it."""
    found = run(
        engine,
        LOADS
        + HOPPER
        + LAYERS
        + "load()\n"
        + _EXPERTS
        + f"""
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.experts import triton_moe
from benchmarks import vllm_experts
from tests.groups.test_experts import EXPERTS, HIDDEN, INNER, by_loops, layer
from tests.support.engines import serve_on_cpu
from tests.support.grouped import Loops
from tunegemm.groups import grouped
from tunegemm.engines import common
from tunegemm.engines.vllm_experts import asker

for module in (vllm.platforms, modular_kernel, triton_moe, unquantized):
    on(module)
loops = Loops()
grouped.groups = grouped.Groups(loops.load)
serve_on_cpu()

torch.accelerator.empty_cache = lambda: None  # of a GPU
given = layer(dtype=torch.bfloat16)
sizes = EXPERTS, given["index"].shape[1], HIDDEN, INNER
theirs, ours = vllm_experts.kernels_of(*sizes, "cpu")
route = given["weights"].float(), given["index"].int()
with torch.inference_mode():
    result = vllm_experts.apply(ours, given["x"], given["gate_up"], given["down"], route)
found["served"] = [torch.allclose(result.float(), by_loops(**given), rtol=5e-2, atol=3e-2), len(loops.calls)]

with set_current_vllm_config(config()):
    ranks({str(tmp_path / "ranks")!r})
    for name, more in {{"silu": {{}}, "gelu": {{"activation": "gelu"}}}}.items():
        layer_of = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
        model = layer_of(8, 2, 4096, 14336, params_dtype=torch.bfloat16, prefix=name, **more)
        found[name] = common.served(model, 64, asker)
torch.distributed.destroy_process_group()
""",
        TUNEGEMM_VLLM_EXPERTS="1",
    )
    output = found.pop("output")
    assert found == {
        "served": [True, 2],
        "silu": "kernels for 1 at 1, 1 at 16, 1 at 64 rows of 1 kinds of weights, by grouped",
        "gelu": "kernels for 0 at 1, 0 at 16, 0 at 64 rows of 1 kinds of weights; at none of these bf16 "
        "28672x4096 of 8 experts",
    }, output
