"""vLLM's gates in one kernel with their product, beside the real vLLM as far as it imports without a GPU."""

from __future__ import annotations

import pytest

from tests.engines.conftest import Run
from tests.engines.programs import LAYERS, LOADS, RANKS, engine

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

_SERVED = """
from tests.support.engines import serve_on_cpu
from tests.support.gates import Kernels
from tunegemm.describe.problem import Problem
from tunegemm.layers import sites
from tunegemm.engines import vllm_gates
kernel, kernels = serve_on_cpu(Problem(100, 7168, 64), digest="of gates"), Kernels()
sites.load = kernels.load
"""

#: vLLM's own Llama of two layers, but for attention, which is a GPU's.
_LLAMA = """
import json
from pathlib import Path
from vllm.compilation import backends
from vllm.compilation.counter import compilation_counter
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, ModelConfig, PassConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.models import llama
from vllm.v1.worker import worker_base
vllm.platforms.current_platform.device_type = "cpu"
FixFunctionalizationPass.__call__ = lambda self, graph: None  # it asks for compiled operators

class Attention(torch.nn.Module):
    def __init__(self, *arguments, **words):
        super().__init__()

    def forward(self, q, k, v):
        return q

llama.Attention = Attention
facts = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 3584, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2,
    "vocab_size": 256, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}
Path("model").mkdir(exist_ok=True)
Path("model/config.json").write_text(json.dumps(facts))
words = "fuse", "enable", "eliminate"
no_passes = {name: False for name in PassConfig.__dataclass_fields__ if name.startswith(words)}
known = config(
    model_config=ModelConfig(model="model", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048),
    compilation_config=CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.NONE, backend="inductor",
        splitting_ops=[], compile_sizes=[], pass_config=no_passes,
    ),
)

class Worker:
    def init_device(self):
        pass

wrapper = worker_base.WorkerWrapperBase()
wrapper.vllm_config, wrapper.worker = known, Worker()
wrapper.init_device()
found["operators"] = []
own = backends.split_graph

def split_graph(module, *others):
    targets = [str(node.target) for node in module.graph.nodes]
    silus = sum("silu" in each for each in targets)
    found["operators"].append([targets.count("tunegemm.engine_gated.default"), silus])
    return own(module, *others)

backends.split_graph = split_graph
found["steps"] = []
with set_current_vllm_config(known), torch.inference_mode():
    ranks(Path("ranks").absolute())
    torch.set_default_dtype(torch.bfloat16)
    model = llama.LlamaForCausalLM(vllm_config=known)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(torch.randn(parameter.shape) / (1 if "norm" in name else 8))

    def step(rows):
        ids = torch.arange(rows) % 256
        with set_forward_context(None, known, num_tokens=rows):
            return model.compute_logits(model(ids, torch.arange(rows)))

    def unfused(rows):  # by modules, as they are without a compiler
        inner = model.model
        inner.do_not_compile = True
        try:
            return step(rows)
        finally:
            inner.do_not_compile = False

    for rows in (48, 100, 101, 7):
        kernels.gates.clear()
        kernel.calls.clear()
        result = step(rows)
        counts = len(kernels.gates), len(kernel.calls)
        expected = unfused(rows).float()
        error = float((result.float() - expected).norm() / expected.norm())
        found["steps"].append([rows, *counts, error < 2e-2])
found["compiled"] = compilation_counter.num_inductor_compiles
found["said"] = vllm_gates.said()
torch.distributed.destroy_process_group()
"""


@engine
def test_llamas_graph_has_the_operator_once_a_layer(engine: str, run: Run, tmp_path) -> None:
    """Unless it is turned off; another process takes what was compiled, if it is not there, too."""
    code = LOADS + LAYERS + "load()\n" + _SERVED + _LLAMA
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    said = "; with silu's gate bf16 7168x64 at 33 to 64, 1024 to 8192 rows"
    compiled = []
    for variables in ({}, {}, {"TUNEGEMM_VLLM_GATES": "0"}, {"TUNEGEMM_VLLM": "0"}):
        (tmp_path / "ranks").unlink(missing_ok=True)
        found = run(engine, code, **cache, **variables)
        output = found.pop("output")
        is_fused = not variables
        assert found["said"] == (said if is_fused else ""), output
        gated, plain = (2, 0) if is_fused else (0, 0), (0, 2 * ("TUNEGEMM_VLLM" not in variables))
        assert found["steps"] == [
            [48, *gated, True], [100, *plain, True], [101, 0, 0, True], [7, 0, 0, True]
        ], output  # fmt: skip
        assert found["operators"] in ([], [[2, 0]] if is_fused else [[0, 2]]), output
        compiled.append(found["compiled"])
        assert "unknown to tunegemm" not in output
    assert compiled == [1, 0, 1, 1]


@engine
def test_adapters_and_quantised_layers_are_left_alone(engine: str, run: Run, tmp_path) -> None:
    """vLLM's own MLP with its LoRA layer, whose product of adapters is a CPU's, and with another method."""
    found = run(
        engine,
        LOADS
        + LAYERS
        + """
import vllm.utils.torch_utils
vllm.utils.torch_utils.PIN_MEMORY = False  # which a GPU's driver does
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LoRAMapping, MergedColumnParallelLinearWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.models.llama import LlamaMLP
load()
"""
        + _SERVED
        + f"""
counts = []
def backend(module, inputs):
    counts.append(vllm_gates.fuse(module))
    return module

class Scaled(LinearMethodBase):
    def create_weights(self, *arguments, **words):
        pass

    def apply(self, layer, x, bias=None):
        weight = layer.weight.to(torch.float8_e4m3fn).to(x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

with set_current_vllm_config(config()), torch.inference_mode():
    ranks({str(tmp_path / "ranks")!r})
    torch.set_default_dtype(torch.bfloat16)
    x = torch.randint(-2, 3, (48, 64)).bfloat16()
    for name in ("plain", "LoRA", "quantised"):
        mlp = LlamaMLP(64, 3584, "silu", prefix="layers.0.mlp")
        filled(mlp)
        if name == "LoRA":
            layer = MergedColumnParallelLinearWithLoRA(mlp.gate_up_proj)
            adapters = PunicaWrapperCPU(64, 48, "cpu")
            layer.set_mapping(adapters)
            of_adapters = LoRAConfig(max_loras=2, max_lora_rank=8, lora_dtype=torch.bfloat16)
            layer.create_lora_weights(2, of_adapters)
            a, b = (
                [torch.randint(-1, 2, shape).bfloat16() for _ in range(2)] for shape in ((8, 64), (3584, 8))
            )
            layer.set_lora(0, a, b)
            mapping = LoRAMapping((1,) * 48, (1,) * 48, is_prefill=False)
            adapters.update_metadata(mapping, [1, None], 2, 128)
            mlp.gate_up_proj = layer
        if name == "quantised":
            mlp.gate_up_proj.quant_method = Scaled()
        counts.clear()
        kernels.gates.clear()
        torch._dynamo.reset()
        expected = mlp(x).float()
        result = torch.compile(mlp, backend=backend)(x).float()
        error = float((result - expected).norm() / expected.norm())
        found[name] = [sum(counts), len(counts) > 0, len(kernels.gates), error < 1e-2]
torch.distributed.destroy_process_group()
""",
    )
    output = found.pop("output")
    assert found == {
        "plain": [1, True, 1, True],
        "LoRA": [0, True, 0, True],
        "quantised": [0, True, 0, True],
    }, output


_RANK = """
import torch
import torch.distributed

def rank(number, path, queue):
    import vllm.plugins
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    vllm.plugins.load_general_plugins()
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models.llama import LlamaMLP
    from tests.support.engines import serve_on_cpu
    from tests.support.gates import Kernels
    from tunegemm.describe.problem import Problem
    from tunegemm.layers import sites
    from tunegemm.engines import vllm_gates
    serve_on_cpu(Problem(100, 7168, 64))
    kernels, counts = Kernels(), []
    sites.load = kernels.load
    torch.manual_seed(0)

    def backend(module, inputs):
        counts.append(vllm_gates.fuse(module))
        return module

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(2, number, f"file://{path}", number, backend="gloo")
        initialize_model_parallel(2, 1)
        torch.set_default_dtype(torch.bfloat16)
        mlp = LlamaMLP(64, 7168, "silu", prefix="layers.0.mlp")
        gate, up, down = (torch.randn(shape) / 8 for shape in ((7168, 64), (7168, 64), (64, 7168)))
        for shard, weight in enumerate((gate, up)):
            mlp.gate_up_proj.weight_loader(mlp.gate_up_proj.weight, weight, shard)
        mlp.down_proj.weight_loader(mlp.down_proj.weight, down)
        x = torch.randn(48, 64)
        result = torch.compile(mlp, backend=backend)(x).float()
        linear = torch.nn.functional.linear
        gate, up = (linear(x.float(), each.float()) for each in (gate, up))
        expected = linear(torch.nn.functional.silu(gate) * up, down.float())
        error = float((result - expected).norm() / expected.norm())
        queue.put([number, sum(counts), kernels.gates, error < 1e-2])
    torch.distributed.destroy_process_group()
"""


@engine
def test_shards_of_two_ranks(engine: str, run: Run, tmp_path) -> None:
    """Each rank has its part of gate's rows above its part of up's."""
    (tmp_path / "rank_of_tests.py").write_text(_RANK)
    found = run(engine, RANKS)
    call = [48, 3584, 64]
    assert found["ranks"] == [[n, 1, [call], True] for n in range(2)], found["output"]
