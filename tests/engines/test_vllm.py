"""Beside the real vLLM, as far as it imports without a GPU: what has to be a GPU's is a stand-in on the CPU.

vLLM knows no platform on such a host; its layers then take the same way as on CUDA, but for batch invariance
and fp8, for which the tests say that the platform is CUDA and Hopper.
"""

from __future__ import annotations

import pytest

from tests.engines.conftest import Run
from tests.engines.programs import HOPPER, LAYERS, LOADS, engine

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


@engine
def test_discovery_registration_and_the_cache_key(engine: str, run: Run) -> None:
    found = run(
        engine,
        LOADS
        + """
from importlib.metadata import entry_points
from vllm.model_executor.layers import utils
from vllm.model_executor.kernels import linear
from vllm.platforms import PlatformEnum

own, kernels = utils.default_unquantized_gemm, [*linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CUDA]]
blocks = [*linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]]
others = [*linear._POSSIBLE_INT8_KERNELS[PlatformEnum.CUDA]]
found["doors"] = [each.value for each in entry_points(group="vllm.general_plugins", name="tunegemm")]
load()
first = utils.default_unquantized_gemm
load()  # as vLLM says may happen
found["replaced once"] = utils.default_unquantized_gemm is first and first.tunegemm_own is own
found["layers get it"] = utils.dispatch_unquantized_gemm() is first
now = linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CUDA]
found["kernels"] = [now[0].__name__, now[1:] == kernels]
now = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]
ours = [each for each, own in zip(now, now[1:]) if "Tunegemm" in each.__name__ and issubclass(each, own)]
found["blocks"] = [len(ours), [each for each in now if each not in ours] == blocks]
found["others"] = linear._POSSIBLE_INT8_KERNELS[PlatformEnum.CUDA] == others
found["cuda"] = torch.cuda.is_initialized()
x, weight, bias = torch.randn(3, 8).bfloat16(), torch.randn(4, 8).bfloat16(), torch.randn(4).bfloat16()
found["as torch"] = torch.equal(first(None, x, weight, bias), torch.nn.functional.linear(x, weight, bias))

mine = config(additional_config={"mine": 1})
found["config"] = sorted(mine.additional_config)
before = config().compute_hash()
found["hash is steady"] = config().compute_hash() == before
from tests.support.engines import serve_on_cpu
from tunegemm.describe.problem import Problem
serve_on_cpu(Problem(32, 48, 64))
found["hash goes by records"] = config().compute_hash() != before
""",
    )
    output = found.pop("output")
    assert found == {
        "doors": ["tunegemm.engines.vllm:register"],
        "replaced once": True,
        "layers get it": True,
        "kernels": ["TunegemmFP8ScaledMMLinearKernel", True],
        "blocks": [4, True],
        "others": True,
        "cuda": False,
        "as torch": True,
        "config": ["mine", "tunegemm"],
        "hash is steady": True,
        "hash goes by records": True,
    }, output
    assert "unknown to tunegemm" not in output


_CHILD = """
def child(queue):
    import vllm.plugins
    vllm.plugins.load_general_plugins()
    from vllm.model_executor.layers import utils
    queue.put(hasattr(utils.default_unquantized_gemm, "tunegemm_own"))
"""


@engine
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_of_an_engine(engine: str, method: str, run: Run, tmp_path) -> None:
    (tmp_path / "child_of_tests.py").write_text(_CHILD)
    found = run(
        engine,
        f"""
import multiprocessing
import vllm.plugins
from child_of_tests import child
vllm.plugins.load_general_plugins()
context = multiprocessing.get_context({method!r})
queue = context.Queue()
process = context.Process(target=child, args=(queue,))
process.start()
found["served"] = queue.get(timeout=300)
process.join()
found["code"] = process.exitcode
""",
    )
    assert (found["served"], found["code"]) == (True, 0), found["output"]


@engine
def test_layers_compiled_with_symbolic_rows(engine: str, run: Run, tmp_path) -> None:
    """vLLM's own layers, and its logits; one graph, in which each call takes the kernel of its rows."""
    found = run(
        engine,
        LOADS
        + LAYERS
        + f"""
load()
from torch._dynamo.testing import CompileCounterWithBackend
from tests.support.engines import serve_on_cpu
from tunegemm.describe.problem import Problem
with set_current_vllm_config(config()), torch.inference_mode():
    ranks({str(tmp_path / "ranks")!r})
    torch.set_default_dtype(torch.bfloat16)
    plain = filled(ReplicatedLinear(64, 48, bias=False, return_bias=False))
    biased = filled(ReplicatedLinear(64, 48, bias=True, return_bias=False))
    other = filled(ReplicatedLinear(64, 40, bias=False, return_bias=False))
    head = filled(ParallelLMHead(128, 64))
    kinds = (48, ""), (48, "bias_n"), (128, "")
    kernel = serve_on_cpu(*[
        Problem(m, n, 64, epilogue=text) for m in (2, 7, 32) for n, text in kinds
    ])
    linear = torch.nn.functional.linear
    def layers(x):
        return plain(x) + biased(x), other(x)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layers, backend=counter, fullgraph=True, dynamic=True)
    same = []
    for rows in (2, 7, 32):
        x = torch.randint(-2, 3, (rows, 64)).bfloat16()
        results = compiled(x)
        expected = linear(x, plain.weight) + linear(x, biased.weight, biased.bias), linear(x, other.weight)
        same += [torch.equal(*pair) for pair in zip(results, expected)]
    found["calls"] = sorted((call[0][0], call[1][1]) for call in kernel.calls)
    found["same"], found["graphs"] = all(same), counter.frame_count
    kernel.calls.clear()
    x = torch.randint(-2, 3, (7, 64)).bfloat16()
    logits = head.quant_method.apply(head, x)
    found["logits"] = [torch.equal(logits, linear(x, head.weight)), len(kernel.calls)]
    logits = head.quant_method.apply(head, x[:3])
    found["unknown rows"] = [torch.equal(logits, linear(x[:3], head.weight)), len(kernel.calls)]
torch.distributed.destroy_process_group()
""",
    )
    assert found["calls"] == [[rows, 48] for rows in (2, 2, 7, 7, 32, 32)], found["output"]
    assert found["same"] is True and found["graphs"] == 1
    assert found["logits"] == [True, 1] and found["unknown rows"] == [True, 1]


@engine
def test_fp8_layers(engine: str, run: Run) -> None:
    """By vLLM's own choice among its kernels; CUTLASS's product, which is a GPU's, is torch's on the CPU."""
    found = run(
        engine,
        LOADS
        + HOPPER
        + """
import os
import vllm._custom_ops as custom_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm import cutlass
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym, kFp8StaticChannelSym, kFp8StaticTensorSym,
)
from tests.support.engines import serve_on_cpu

on(vllm.platforms)
on(linear)
if hasattr(cutlass, "cutlass_fp8_supported"):
    cutlass.cutlass_fp8_supported = lambda: True
on(cutlass)
theirs = []
def cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype, bias=None):
    theirs.append(tuple(a.shape))
    value = (a.float() * scale_a) @ (b.float() * scale_b.reshape(1, -1))
    return (value if bias is None else value + bias).to(out_dtype)
custom_ops.cutlass_scaled_mm = cutlass_scaled_mm
load()

def kernel_for(activation, weight, shape=(48, 64)):
    words = dict(weight_quant_key=weight, activation_quant_key=activation, input_dtype=torch.bfloat16,
                 out_dtype=torch.bfloat16, weight_shape=shape)
    with set_current_vllm_config(config()):
        return linear.init_fp8_linear_kernel(**words)

def layer_of(kernel, rows, columns, scales):
    layer = torch.nn.Module()
    weight = torch.randint(-2, 3, (columns, 64)).to(torch.float8_e4m3fn).t()
    scale = torch.linspace(0.5, 1, scales).reshape(-1, 1) if scales > 1 else torch.tensor([0.5])
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    kernel.process_weights_after_loading(layer)
    return layer

def multiply(kernel, layer, rows, scales, bias=None):
    a = torch.randint(-2, 3, (rows, 64)).to(torch.float8_e4m3fn)
    scale = torch.linspace(0.5, 1, rows).reshape(-1, 1) if scales > 1 else torch.tensor([0.25])
    columns = kernel.logical_output_size
    return lambda: kernel.apply_scaled_mm(A=a, B=layer.weight, out_dtype=torch.bfloat16, As=scale,
                                          Bs=layer.weight_scale, bias=bias, output_shape=[rows, columns])

def served(activation, weight, scales_a, scales_b, columns=48, rows=16, bias=None):
    kernel = kernel_for(activation, weight, (columns, 64))
    layer = layer_of(kernel, rows, columns, scales_b)
    call = multiply(kernel, layer, rows, scales_a, bias)
    ours = serve_on_cpu()
    theirs.clear()
    result = call()
    by = "ours" if ours.calls and not theirs else "theirs" if theirs and not ours.calls else "both"
    before = common.own["vllm_fp8"]
    shown = [by, list(result.shape)]
    # the same by CUTLASS's: nothing recorded
    from tunegemm.describe.problem import Problem
    serve_on_cpu(Problem(1, 8, 8))
    theirs.clear()
    other = call()
    shown.append(bool(theirs) and torch.allclose(result.float(), other.float(), rtol=1e-2, atol=1e-2))
    return shown

import warnings
warnings.simplefilter("ignore")
from tunegemm.engines import common
token, channel, tensor = kFp8DynamicTokenSym, kFp8StaticChannelSym, kFp8StaticTensorSym
found["chosen"] = type(kernel_for(token, channel)).__name__
found["row-wise"] = served(token, channel, 2, 48)
found["one row"] = served(token, channel, 2, 48, rows=1)
found["with a bias"] = served(token, channel, 2, 48, bias=torch.linspace(-1, 1, 48).bfloat16())
found["per tensor"] = served(tensor, tensor, 1, 1)
found["rows by a tensor's"] = served(token, tensor, 2, 1)
found["a tensor's by channels"] = served(tensor, channel, 1, 48)
found["padded"] = served(token, tensor, 2, 1, columns=40)
os.environ["VLLM_DISABLED_KERNELS"] = "TunegemmFP8ScaledMMLinearKernel"
found["disabled"] = type(kernel_for(token, channel)).__name__
os.environ["VLLM_DISABLED_KERNELS"] = "CutlassFP8ScaledMMLinearKernel"
first = linear._POSSIBLE_FP8_KERNELS[vllm.platforms.PlatformEnum.CUDA][0]
found["without its own"] = first.is_supported(90)[0]
os.environ["VLLM_DISABLED_KERNELS"] = ""
found["supported"] = [first.is_supported(cc)[0] for cc in (80, 89, 90, 100)]
""",
    )
    output = found.pop("output")
    assert found == {
        "chosen": "TunegemmFP8ScaledMMLinearKernel",
        "row-wise": ["ours", [16, 48], True],
        "one row": ["ours", [1, 48], True],
        "with a bias": ["ours", [16, 48], True],
        "per tensor": ["ours", [16, 48], True],
        "rows by a tensor's": ["ours", [16, 48], True],
        "a tensor's by channels": ["theirs", [16, 48], True],
        "padded": ["theirs", [16, 40], True],
        "disabled": "CutlassFP8ScaledMMLinearKernel",
        "without its own": False,
        "supported": [False, False, True, False],
    }, output


#: What of vLLM's kernels and of ours is a GPU's computes on the CPU. `choose` tells which of vLLM's exist.
_IN_BLOCKS = """
import json
import os
from pathlib import Path
from vllm.config import CompilationConfig, ModelConfig
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm import cutlass, deep_gemm, flashinfer, triton
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils import fp8_utils
from tunegemm.engines import common
from tunegemm.torch import blocks

for module in (vllm.platforms, linear, deep_gemm, flashinfer, triton):
    on(module)
Path("model").mkdir(exist_ok=True)
facts = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "vocab_size": 256,
    "intermediate_size": 384, "num_attention_heads": 4, "num_hidden_layers": 1, "torch_dtype": "bfloat16",
}
Path("model/config.json").write_text(json.dumps(facts))
known = config(
    model_config=ModelConfig(model="model", skip_tokenizer_init=True, dtype="bfloat16"),
    compilation_config=CompilationConfig(custom_ops=["none"]),
)
calls = []

def said(by, of, a, b, scale_a, scale_b):
    calls.append([by, a.shape[0]])
    assert a.dtype == b.dtype == torch.float8_e4m3fn and scale_a.dtype == torch.float32
    left = a.float() * scale_a.repeat_interleave(128, 1)[:, : a.shape[1]]
    k, n = b.shape
    each = 128 if scale_b.shape[1] == -(-n // 128) else 64  # columns that share a scale
    scale = scale_b.repeat_interleave(128, 0)[:k].repeat_interleave(each, 1)[:, :n]
    return (left @ (b.float() * scale)).bfloat16()

def quantised(x, group_size, column_major_scales, use_ue8m0):
    parts = x.float().unflatten(1, (-1, group_size))
    scales = parts.abs().amax(2).clamp(min=1e-10) / 448
    given = scales.t().contiguous().t() if column_major_scales else scales
    return (parts / scales[:, :, None]).flatten(1).to(torch.float8_e4m3fn), given

def by_flashinfer(input, weight, weight_scale, out_dtype=None):
    a, scale = quantised(input, 128, False, False)
    return said("flashinfer", input, a, weight.t(), scale, weight_scale.t())

def by_deep_gemm(left, right, out, **words):
    out.copy_(said("deep_gemm", None, left[0], right[0].t(), left[1], right[1].t()))

blocks.product = lambda a, b, scale_a, scale_b, out_dtype: said("ours", None, a, b, scale_a, scale_b)
fp8_utils.per_token_group_quant_fp8 = flashinfer.per_token_group_quant_fp8 = quantised
fp8_utils.w8a8_triton_block_scaled_mm = (
    lambda a, weight, scale_a, scale, *_: said("triton", None, a, weight.t(), scale_a, scale.t())
)
flashinfer.flashinfer_fp8_blockscale_gemm = by_flashinfer
deep_gemm.fp8_gemm_nt = flashinfer.fp8_gemm_nt = by_deep_gemm
deep_gemm.deepgemm_post_process_fp8_weight_block = lambda wq, ws, **_: (wq, ws)
cutlass.CUTLASS_BLOCK_FP8_SUPPORTED = False

def choose(*names):
    deep_gemm.is_deep_gemm_supported = lambda: "deep_gemm" in names
    deep_gemm.should_use_deepgemm_for_fp8_linear = lambda *_: "deep_gemm" in names
    supported = lambda: "flashinfer" in names
    flashinfer.is_flashinfer_fp8_blockscale_gemm_supported = supported

def layer_of(rows, k, blocks=(128, 128), dtype=torch.bfloat16):
    torch.set_default_dtype(dtype)
    quantisation = Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[*blocks]
    )
    layer = ReplicatedLinear(k, rows, bias=False, return_bias=False, quant_config=quantisation)
    layer.weight.data.copy_(torch.randn(rows, k).to(torch.float8_e4m3fn))
    layer.weight_scale_inv.data.copy_(torch.rand(layer.weight_scale_inv.shape) + 0.5)
    layer.quant_method.process_weights_after_loading(layer)
    return layer

def by(layer, x):
    own = type(layer.quant_method.fp8_linear)
    calls.clear()
    result = layer(x)
    return own.__name__.startswith("Tunegemm"), [name for name, _ in calls]
"""


@engine
def test_layers_with_block_scales(engine: str, run: Run, tmp_path) -> None:
    """vLLM's own layers and its choice among its kernels; one graph, in which rows decide who multiplies."""
    found = run(
        engine,
        LOADS
        + HOPPER
        + LAYERS
        + _IN_BLOCKS
        + f"""
load()
from torch._dynamo.testing import CompileCounterWithBackend
with set_current_vllm_config(known), torch.inference_mode():
    ranks({str(tmp_path / "ranks")!r})
    torch.manual_seed(0)
    common.lower()
    for names in ((), ("deep_gemm",), ("deep_gemm", "flashinfer")):
        choose(*names)
        layer = layer_of(320, 256)
        kernel = type(layer.quant_method.fp8_linear)
        scales = layer.weight_scale_inv.repeat_interleave(128, 0)[:320].repeat_interleave(128, 1)
        exact = layer.weight.float() * scales
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("inductor")
        compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
        compiled(torch.randn(9, 256).bfloat16())
        calls.clear()
        errors, graphs = [], counter.frame_count
        for rows in (31, 2, 64, 127, 128, 300):
            x = torch.randn(rows, 256).bfloat16()
            expected = torch.nn.functional.linear(x.float(), exact)
            errors.append(float((compiled(x).float() - expected).norm() / expected.norm()))
        inherits = kernel.__mro__[2].__name__
        found[inherits] = [kernel.__name__, calls[:], max(errors) < 4e-2, counter.frame_count - graphs]
    found["line"] = common.served(torch.nn.Sequential(layer), 256)
    x = torch.randn(64, 256).bfloat16()
    choose()
    found["other blocks"] = by(layer_of(256, 256, (64, 128)), x[:, :])
    found["fp16"] = by(layer_of(256, 256, dtype=torch.float16), x.half())
    os.environ["VLLM_DISABLED_KERNELS"] = "TunegemmFp8BlockScaledMMKernel"
    found["disabled"] = by(layer_of(256, 256), x)
    os.environ["VLLM_DISABLED_KERNELS"] = ""
    blocks.product = lambda *operands: None
    found["no kernel"] = by(layer_of(256, 256), x)
    from tunegemm.dispatch import api
    api.policy("batch_invariant")
    found["invariant"] = by(layer_of(256, 256), x)
torch.distributed.destroy_process_group()
""",
    )
    output = found.pop("output")
    kernel, line = "TunegemmFp8BlockScaledMMKernel", str(found.pop("line"))
    ours, rows = [["ours", n] for n in (31, 2, 64, 127)], (128, 300)
    assert found == {
        "TritonFp8BlockScaledMMKernel": [kernel, ours + [["triton", n] for n in rows], True, 0],
        "DeepGemmFp8BlockScaledMMKernel": [kernel, ours + [["deep_gemm", n] for n in rows], True, 0],
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": [
            kernel, ours + [["deep_gemm", n] for n in rows], True, 0
        ],
        "other blocks": [False, ["triton"]],
        "fp16": [False, ["triton"]],
        "disabled": [False, ["triton"]],
        "no kernel": [True, ["triton"]],
        "invariant": [False, ["triton"]],
    }, output  # fmt: skip
    assert line == "kernels for 1 at 1, 1 at 16, 1 at 64, 0 at 256 rows of 1 kinds of weights, by blocks"


@engine
def test_batch_invariance(engine: str, run: Run) -> None:
    found = run(
        engine,
        LOADS
        + HOPPER
        + """
from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding
from tunegemm.dispatch import api
theirs = []
def own(input, weight, bias=None):  # vLLM's is Triton's, on a GPU
    theirs.append(input.shape[0])
    return torch.nn.functional.linear(input, weight, bias)
linear.linear_batch_invariant = vocab_parallel_embedding.linear_batch_invariant = own
on(linear)
on(vocab_parallel_embedding)
load()
found["policy"] = str(api.dispatcher.planner.policy)
x, weight = torch.ones(7, 64).bfloat16(), torch.ones(48, 64).bfloat16()
layer = torch.nn.Module()
layer.weight = torch.nn.Parameter(weight, requires_grad=False)
for method in (linear.UnquantizedLinearMethod, vocab_parallel_embedding.UnquantizedEmbeddingMethod):
    method().apply(layer, x)
found["on the CPU"] = [*theirs]
seen = []
class Watched:
    planner = api.dispatcher.planner
    def below_autograd(self, a, b):
        seen.append([*a.shape, *b.shape])
        return a @ b
api.dispatcher = Watched()
from tunegemm.torch import ops
ops.DEVICE_TYPE = "cpu"
theirs.clear()
for method in (linear.UnquantizedLinearMethod, vocab_parallel_embedding.UnquantizedEmbeddingMethod):
    method().apply(layer, x)
found["served"], found["theirs"] = seen, theirs
""",
        VLLM_BATCH_INVARIANT="1",
    )
    output = found.pop("output")
    assert found == {
        "policy": "batch_invariant",
        "on the CPU": [7, 7],
        "served": [[7, 64, 64, 48]] * 2,
        "theirs": [],
    }, output


@engine
def test_switches_and_other_versions(engine: str, run: Run) -> None:
    looks = (
        LOADS
        + """
from vllm.model_executor.layers import utils
from vllm.model_executor.kernels import linear
from vllm.platforms import PlatformEnum
{before}
load()
found["layers"] = hasattr(getattr(utils, "default_unquantized_gemm", None), "tunegemm_own")
found["fp8"] = linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CUDA][0].__name__.startswith("Tunegemm")
found["config"] = "tunegemm" in config().additional_config
"""
    )
    nothing = {"layers": False, "fp8": False, "config": False}
    for variables in ({"TUNEGEMM_VLLM": "0"}, {"TUNEGEMM_MODE": "off"}, {"VLLM_PLUGINS": "another"}):
        found = run(engine, looks.format(before=""), **variables)
        assert found.pop("output").count("unknown to tunegemm") == 0
        assert found == nothing, variables
    found = run(engine, looks.format(before="del utils.default_unquantized_gemm"))
    output = found.pop("output")
    assert found == {"layers": False, "fp8": True, "config": True}
    (line,) = [line for line in output.splitlines() if "unknown to tunegemm" in line]
    assert "bf16 and fp16 layers (there is no vllm.model_executor.layers.utils.default_unq" in line


@engine
def test_a_worker_says_what_is_served_and_where_ranks_differ(engine: str, run: Run) -> None:
    found = run(
        engine,
        LOADS
        + """
import logging
from vllm.v1.worker import worker_base
logging.basicConfig(level=logging.INFO)  # which the engine's start sets up
calls = []
class Worker:
    def init_device(self):
        calls.append("device")
    def initialize_from_config(self, config):
        calls.append("caches")
    def get_model(self):
        layer = torch.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
        layer.quant_method = object()
        return torch.nn.Sequential(layer)
load()
from tests.support.engines import serve_on_cpu
from tunegemm.describe.problem import Problem
serve_on_cpu(Problem(64, 48, 64))
def start(rank):
    wrapper = worker_base.WorkerWrapperBase(rank, rank) if rank else worker_base.WorkerWrapperBase()
    wrapper.vllm_config, wrapper.worker = known, Worker()
    wrapper.init_device()
    wrapper.initialize_from_config([None, None])
known = config()
start(0)
start(1)
print("SECOND")
serve_on_cpu(Problem(32, 48, 64))
start(1)
import torch._inductor.select_algorithm as inductor
found["inductor knows us"] = hasattr(inductor.extern_kernels, "tunegemm_product")
found["calls"] = calls
""",
    )
    output = str(found["output"])
    assert found["inductor knows us"] is True and found["calls"] == ["device", "caches"] * 3, output
    said = [line for line in output.splitlines() if "rows of 1 kinds of weights" in line]
    assert len(said) == 1 and "in vLLM 0." in said[0] and "0 at 16, 1 at 64, 0 at 256" in said[0], output
    assert "kinds of weights, by cute_sm90; policy" in said[0], output
    assert "policy fastest, records " in said[0], output
    differing = [line for line in output.splitlines() if "differ from those of the process" in line]
    assert len(differing) == 1, output
