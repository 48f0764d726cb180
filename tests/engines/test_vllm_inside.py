"""Inside the real vLLM: layers with adapters, shards of ranks, graphs that are captured, and its core."""

from __future__ import annotations

import pytest

from tests.engines.conftest import Run
from tests.engines.programs import LAYERS, LIVE, LOADS, RANKS, engine

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


@engine
def test_the_layer_below_an_adapter_is_served(engine: str, run: Run, tmp_path) -> None:
    """vLLM's own LoRA layer, with its product of adapters on a CPU: that of the base weight is ours."""
    found = run(
        engine,
        LOADS
        + LAYERS
        + f"""
import vllm.utils.torch_utils
vllm.utils.torch_utils.PIN_MEMORY = False  # which a GPU's driver does
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LoRAMapping, ReplicatedLinearWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
load()
from tests.support.engines import serve_on_cpu
from tunegemm.describe.problem import Problem
with set_current_vllm_config(config()), torch.inference_mode():
    ranks({str(tmp_path / "ranks")!r})
    torch.set_default_dtype(torch.bfloat16)
    base = filled(ReplicatedLinear(64, 48, bias=False, return_bias=False))
    layer, adapters = ReplicatedLinearWithLoRA(base), PunicaWrapperCPU(64, 16, "cpu")
    layer.set_mapping(adapters)
    layer.create_lora_weights(2, LoRAConfig(max_loras=2, max_lora_rank=8, lora_dtype=torch.bfloat16))
    a, b = torch.randint(-1, 2, (8, 64)).bfloat16(), torch.randint(-1, 2, (48, 8)).bfloat16()
    layer.set_lora(0, a, b)
    linear, x = torch.nn.functional.linear, torch.randint(-2, 3, (16, 64)).bfloat16()
    for name, number in (("with", 1), ("without", 0)):
        mapping = LoRAMapping((number,) * 16, (number,) * 16, is_prefill=False)
        adapters.update_metadata(mapping, [1, None], 2, 128)
        kernel = serve_on_cpu(Problem(16, 48, 64))
        result = layer(x)
        expected = linear(x, base.weight).float() + number * linear(linear(x, a), b).float()
        found[name] = [len(kernel.calls), torch.equal(result, expected.bfloat16())]
torch.distributed.destroy_process_group()
""",
    )
    output = found.pop("output")
    assert found == {"with": [1, True], "without": [1, True]}, output


_RANK = """
import torch
import torch.distributed

def rank(number, path, queue):
    import vllm.plugins
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    vllm.plugins.load_general_plugins()
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from tests.support.engines import serve_on_cpu
    from tunegemm.describe.problem import Problem
    torch.manual_seed(0)
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(2, number, f"file://{path}", number, backend="gloo")
        initialize_model_parallel(2, 1)
        torch.set_default_dtype(torch.bfloat16)
        up = ColumnParallelLinear(64, 96, bias=False, return_bias=False)
        down = RowParallelLinear(96, 64, bias=True, return_bias=False)
        weights = [torch.randint(-1, 2, shape).bfloat16() for shape in ((96, 64), (64, 96), (64,))]
        for parameter, layer, weight in zip((up.weight, down.weight, down.bias), (up, down, down), weights):
            layer.weight_loader(parameter, weight)
        kernel = serve_on_cpu(*(Problem(16, *sides, epilogue=text) for sides in ((48, 64), (64, 48))
                                for text in ("", "bias_n")))
        x = torch.randint(-1, 2, (16, 64)).bfloat16()
        result = down(up(x)).float()
        linear = torch.nn.functional.linear
        expected = linear(linear(x, weights[0]).float(), *(each.float() for each in weights[1:]))
        error = float((result - expected).abs().max() / expected.abs().max())
        queue.put([number, [[*call[0], call[1][1]] for call in kernel.calls], error < 1e-2])
    torch.distributed.destroy_process_group()
"""


@engine
def test_shards_of_two_ranks_are_served(engine: str, run: Run, tmp_path) -> None:
    """Each rank's part of a layer is a weight like any other; what they add up is vLLM's."""
    (tmp_path / "rank_of_tests.py").write_text(_RANK)
    found = run(engine, RANKS)
    assert found["ranks"] == [[n, [[16, 64, 48], [16, 48, 64]], True] for n in range(2)], found["output"]


@engine
def test_graphs_hold_kernels_since_vllm_warms_up_before_each_capture(engine: str, run: Run) -> None:
    """vLLM's own capture, which a CUDA graph and its stream are left out of; what was not warmed up is not
    planned within it."""
    found = run(
        engine,
        LOADS
        + """
import contextlib
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers import utils
from vllm.v1.worker.gpu import cudagraph_utils as graphs
load()
from tests.support.engines import serve_on_cpu
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import planning
kernel, state = serve_on_cpu(*(Problem(m, 48, 64) for m in (16, 32, 64))), {"captured": False}

@contextlib.contextmanager
def captured(*arguments, **words):
    state["captured"] = True
    yield
    state["captured"] = False

torch.cuda.graph, torch.cuda.CUDAGraph = captured, object
planning.capturing = lambda device: state["captured"]
graphs.graph_capture = graphs.capture_pool = lambda *_, **__: contextlib.nullcontext()
graphs.is_global_first_rank = lambda: False
manager = object.__new__(graphs.CudaGraphManager)
vars(manager).update(
    device=None, pool=None, vllm_config=None, graphs={}, use_breakable_cg=False, ubatch_runner=None,
    _max_full_descs_to_capture=None, _capture_mem_samples=None, _capture_stream=lambda description: None,
)
full = CUDAGraphMode.FULL
manager._capture_descs = {full: [graphs.BatchExecutionDescriptor(full, n, n) for n in (64, 16)]}
weight = torch.nn.Parameter(torch.randint(-2, 3, (48, 64)).bfloat16(), requires_grad=False)
found["steps"] = []

def multiply(rows):
    x, before = torch.randint(-2, 3, (rows, 64)).bfloat16(), len(kernel.calls)
    result = utils.default_unquantized_gemm(None, x, weight)
    same = torch.equal(result, torch.nn.functional.linear(x, weight))
    found["steps"].append([rows, state["captured"], len(kernel.calls) - before, same])

with torch.inference_mode():
    manager.capture(lambda description, warmup: lambda mode: multiply(description.num_tokens))
    with captured():
        multiply(32)
    multiply(32)
found["graphs"] = len(manager.graphs)
""",
    )
    output = found.pop("output")
    steps = [[rows, within, 1, True] for rows in (64, 16) for within in (False, True)]
    assert found == {"steps": [*steps, [32, True, 0, True], [32, False, 1, True]], "graphs": 2}, output


_CACHED = """
from vllm.compilation.counter import compilation_counter
from vllm.compilation.decorators import support_torch_compile
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, PassConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import utils
from vllm.v1.worker import worker_base
vllm.platforms.current_platform.device_type = "cpu"
FixFunctionalizationPass.__call__ = lambda self, graph: None  # it asks for compiled operators
load()
from tests.support.engines import serve_on_cpu
from tunegemm.describe.problem import Problem

@support_torch_compile(dynamic_arg_dims={"x": 0})
class Model(torch.nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        weight = (torch.arange(64 * 64).reshape(64, 64) % 5 - 2).bfloat16()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return utils.default_unquantized_gemm(self, x, self.weight)

class Worker:
    def init_device(self):
        pass

kernel = serve_on_cpu(*(Problem(m, 64, 64) for m in ROWS), digest=f"of {ROWS}")
words = "fuse", "enable", "eliminate"
no_passes = {name: False for name in PassConfig.__dataclass_fields__ if name.startswith(words)}
known = config(compilation_config=CompilationConfig(
    mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.NONE, backend="inductor",
    splitting_ops=[], compile_sizes=[], pass_config=no_passes,
))
wrapper = worker_base.WorkerWrapperBase()
wrapper.vllm_config, wrapper.worker = known, Worker()
wrapper.init_device()
found["same"] = True
with set_current_vllm_config(known), torch.inference_mode():
    model = Model(vllm_config=known)
    for rows in (16, 32, 7):
        x = (torch.arange(rows * 64).reshape(rows, 64) % 3 - 1).bfloat16()
        with set_forward_context(None, known, num_tokens=rows):
            found["same"] &= torch.equal(model(x), torch.nn.functional.linear(x, model.weight))
found["calls"] = [call[0][0] for call in kernel.calls]
found["compiled"] = compilation_counter.num_inductor_compiles
"""


@engine
def test_ranks_share_the_folder_of_compiled_code(engine: str, run: Run, tmp_path) -> None:
    """vLLM's own compiler and its cache: who has the same records takes what another process compiled, which
    calls our function there, too; who has others compiles for itself."""
    started = []
    for rows in ((16, 32), (16, 32), (16,)):
        found = run(engine, f"ROWS = {rows}\n" + LOADS + _CACHED, VLLM_CACHE_ROOT=str(tmp_path / "cache"))
        output = found.pop("output")
        assert found["same"] is True and found["calls"] == list(rows), output
        started.append(found["compiled"])
    assert started == [1, 0, 1]


@engine
def test_the_benchmark_times_the_steps_of_a_core(engine: str, run: Run) -> None:
    """vLLM's whole engine but for what computes: steps are as large as the benchmark says, and end."""
    found = run(
        engine,
        LIVE
        + """
llm = start(vllm_engine.Setting("bf16", served=False, layers=2))
for phase, sequences in (("decode", 1), ("decode", 256), ("prefill", 1), ("prefill", 64), ("prefill", 256)):
    Worker.steps.clear()
    rate = vllm_engine.sample(llm, phase, sequences, 0.0)
    found[f"{phase} {sequences}"] = [rate > 0, *filter(None, Worker.steps)]
generated = llm.generate(vllm_engine.prompts_of(2, 16, 0), vllm_engine.sampling(3), use_tqdm=False)
found["then generates"] = [list(each.outputs[0].token_ids) for each in generated]
""",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
    )
    output = found.pop("output")
    assert found == {
        "decode 1": [True, 16] + [1] * 64,
        "decode 256": [True, 16 * 256] + [256] * 64,
        "prefill 1": [True, 512],
        "prefill 64": [True] + [8192] * 4,
        "prefill 256": [True] + [8192] * 5,  # one is on its way while the fourth's tokens are taken
        "then generates": [[7, 7, 7]] * 2,
    }, output
