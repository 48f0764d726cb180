"""Beside the real SGLang, as far as it imports without a GPU: a GPU's part is a stand-in on the CPU."""

from __future__ import annotations

import pytest

from tests.engines.conftest import Run

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

ENGINE = "sglang-0.5.23"

_LOADS = """
import logging
import torch
import sglang.srt.plugins as plugins
from sglang.srt.layers.quantization import unquant

logging.basicConfig(level=logging.INFO)

def load():
    plugins._plugins_loaded = False
    plugins.load_plugins()

def layer(n=48, k=64):
    made = torch.nn.Module()
    made.weight = torch.nn.Parameter(torch.randint(-2, 3, (n, k)).bfloat16(), requires_grad=False)
    return made
"""


def test_discovery_and_hooks(run: Run) -> None:
    found = run(
        ENGINE,
        _LOADS
        + """
from importlib.metadata import entry_points
import sglang.kernels.ops.gemm as gemm
# In a list: SGLang replaces what a module has by a name, this one's names, too.
before = [unquant.UnquantizedLinearMethod.apply, gemm.fp8_scaled_mm]
found["doors"] = [each.value for each in entry_points(group="sglang.srt.plugins", name="tunegemm")]
load()
first = unquant.UnquantizedLinearMethod.apply
load()
found["once"] = unquant.UnquantizedLinearMethod.apply is first and first.__wrapped__ is before[0]
found["fp8"] = gemm.fp8_scaled_mm.__wrapped__ is before[1]
found["cuda"] = torch.cuda.is_initialized()
x, plain = torch.randint(-2, 3, (5, 64)).bfloat16(), layer()
method = unquant.UnquantizedLinearMethod()
found["as torch"] = torch.equal(method.apply(plain, x), torch.nn.functional.linear(x, plain.weight))
""",
    )
    output = str(found.pop("output"))
    assert found == {
        "doors": ["tunegemm.engines.sglang:register"],
        "once": True,
        "fp8": True,
        "cuda": False,
        "as torch": True,
    }, output
    assert "unknown to tunegemm" not in output and "Failed to apply hooks" not in output


def test_layers_with_symbolic_rows(run: Run) -> None:
    found = run(
        ENGINE,
        _LOADS
        + """
load()
from torch._dynamo.testing import CompileCounterWithBackend
from tests.support.engines import serve_on_cpu
from tunegemm.describe.problem import Problem
kernel = serve_on_cpu(*[Problem(m, 48, 64, epilogue=text) for m in (2, 7, 32) for text in ("", "bias_n")])
method, plain, other = unquant.UnquantizedLinearMethod(), layer(), layer(40)
unquant.get_bf16_gemm_backend()  # which an engine has chosen before it compiles
bias = torch.ones(48).bfloat16()
counter = CompileCounterWithBackend("inductor")
def layers(x):
    return method.apply(plain, x) + method.apply(plain, x, bias), method.apply(other, x)
compiled = torch.compile(layers, backend=counter, fullgraph=True, dynamic=True)
linear, same = torch.nn.functional.linear, []
with torch.inference_mode():
    for call in (compiled, layers):
        for rows in (2, 7, 32):
            x = torch.randint(-2, 3, (rows, 64)).bfloat16()
            expected = linear(x, plain.weight) + linear(x, plain.weight, bias), linear(x, other.weight)
            same += [torch.equal(*pair) for pair in zip(call(x), expected)]
found["calls"] = [call[0][0] for call in kernel.calls]
found["same"], found["graphs"] = all(same), counter.frame_count

kernel.calls.clear()
unquant._BF16_GEMM_BACKEND = unquant.Bf16GemmBackend.GEMV
method.apply(plain, x)
found["another backend"] = len(kernel.calls)
unquant._BF16_GEMM_BACKEND = unquant.Bf16GemmBackend.TORCH
unquant.is_batch_invariant_mode_enabled = lambda: True
method.apply(plain, x)
found["batch invariance"] = len(kernel.calls)
""",
    )
    assert found["calls"] == [2, 2, 7, 7, 32, 32] * 2, found["output"]
    assert found["same"] is True and found["graphs"] == 1
    assert found["another backend"] == found["batch invariance"] == 0


def test_fp8_products(run: Run) -> None:
    """Where SGLang's own is a GPU's, it is torch's on the CPU."""
    found = run(
        ENGINE,
        _LOADS
        + """
import sglang.kernels.ops.gemm as gemm
theirs = []
def product(a, b, scales_a, scales_b, out_dtype, bias=None):
    theirs.append(tuple(a.shape))
    value = (a.float() * scales_a) @ (b.float() * scales_b.reshape(1, -1))
    return (value if bias is None else value + bias).to(out_dtype)
gemm._FP8_SCALED_MM = product
load()
from tests.support.engines import serve_on_cpu
from tunegemm.describe.problem import Problem
def multiply(scales_a):
    a = torch.ones(16, 64).to(torch.float8_e4m3fn)
    b = torch.ones(48, 64).to(torch.float8_e4m3fn).t()
    return gemm.fp8_scaled_mm(a, b, scales_a, torch.full((48, 1), 0.5), torch.bfloat16, bias=None)
ours = serve_on_cpu()
found["row-wise"] = [float(multiply(torch.full((16, 1), 2.0))[0, 0]), len(ours.calls), len(theirs)]
found["one scale"] = [float(multiply(torch.tensor([2.0]))[0, 0]), len(ours.calls), len(theirs)]
serve_on_cpu(Problem(1, 8, 8))
import warnings
warnings.simplefilter("ignore")
found["no record"] = [float(multiply(torch.full((16, 1), 2.0))[0, 0]), len(theirs)]
""",
    )
    output = found.pop("output")
    assert found == {"row-wise": [64.0, 1, 0], "one scale": [64.0, 1, 1], "no record": [64.0, 2]}, output


def test_products_with_block_scales(run: Run) -> None:
    """By the layer's own way through SGLang, whose two products are torch's here, and ours, too."""
    found = run(
        ENGINE,
        _LOADS
        + """
import sglang.kernels.ops.gemm.fp8_kernel as kernels
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.quantization import fp8_utils
from tunegemm.torch import blocks
calls = []
def said(name, a, b, scale_a, scale_b):
    calls.append(name)
    return blocks.emulated(a, b, scale_a, scale_b, None, torch.bfloat16)
def theirs(name):
    def product(A, B, As, Bs, block_size, output_dtype=torch.float16):
        return said(name, A, B.t(), As, Bs.t()).to(output_dtype)
    return product
kernels.w8a8_block_fp8_matmul_deepgemm = fp8_utils.w8a8_block_fp8_matmul_deepgemm = theirs("deepgemm")
kernels.w8a8_block_fp8_matmul_triton = fp8_utils.w8a8_block_fp8_matmul_triton = theirs("triton")
def quantise(x, group, **_):
    scale = x.float().unflatten(1, (-1, group)).abs().amax(2).clamp(min=1e-10) / 448
    return (x.float() / scale.repeat_interleave(group, 1)).to(torch.float8_e4m3fn), scale.t().contiguous().t()
fp8_utils.sglang_per_token_group_quant_fp8 = fp8_utils.per_token_group_quant_fp8 = quantise
load()
from tunegemm.torch import ops
ops.DEVICE_TYPE = "cpu"
blocks.product = lambda a, b, scale_a, scale_b, out_dtype: said("ours", a, b, scale_a, scale_b)
torch.manual_seed(0)
weight, scale = (torch.randn(256, 384) * 40).to(torch.float8_e4m3fn), torch.rand(2, 3) + 0.5
wide = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
def by(linear, rows, block=[128, 128], dtype=torch.bfloat16):
    calls.clear()
    x = torch.randn(rows, 384, dtype=dtype)
    result = linear(x, weight, block, scale)
    off = (result.float() - x.float() @ wide.t()).norm() / (x.float() @ wide.t()).norm()
    return [*calls, float(off) < 0.06, result.dtype == dtype]
def any_blocks(*operands):  # SGLang's check of a GPU
    return True
fp8_utils._deepgemm_block_fp8_supported = any_blocks
deepgemm = fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback
triton = fp8_utils.triton_w8a8_block_fp8_linear
found["few"] = by(deepgemm, 5), by(triton, 5)
found["many"] = by(deepgemm, 1000), by(triton, 1000)
found["fp16"] = by(triton, 5, dtype=torch.float16)
import sglang.srt.batch_invariant_ops as invariant
found["compiled"] = by(torch.compile(lambda *given: deepgemm(*given), backend="eager"), 5)
""",
    )
    output = found.pop("output")
    right = [True, True]
    assert found == {
        "few": [["ours", *right]] * 2,
        "many": [["deepgemm", *right], ["triton", *right]],
        "fp16": ["triton", *right],
        "compiled": ["ours", *right],
    }, output


def test_a_worker_says_what_is_served(run: Run) -> None:
    """Once its model is loaded, which is a stand-in here: the first rank's says it."""
    found = run(
        ENGINE,
        _LOADS
        + """
import sglang.srt.managers.scheduler  # whose processes compute
from types import SimpleNamespace
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_parallel
class ParallelLMHead(torch.nn.Module):
    pass
def load_model(self):
    served, other, logits = layer(), layer(40), layer(512)
    logits.__class__ = ParallelLMHead
    for each in (served, other, logits):
        each.quant_method = unquant.UnquantizedLinearMethod()
    experts = torch.nn.Module()
    experts.w13_weight, experts.quant_method = torch.nn.Parameter(torch.zeros(4, 96, 64).bfloat16()), object()
    self.model = torch.nn.ModuleList([served, other, logits, experts])
ModelRunner.load_model = load_model
load()
from tests.support.engines import serve_on_cpu
from tunegemm.describe.problem import Problem
serve_on_cpu(Problem(64, 48, 64))
runner = object.__new__(ModelRunner)
runner.server_args = SimpleNamespace(chunked_prefill_size=256)
for rank in (0, 1):
    with get_parallel().override(tp_rank=rank):
        runner.load_model()
runner.server_args = None
runner.load_model()
found["loaded"] = len(runner.model)
""",
    )
    output = str(found["output"])
    (line,) = [line for line in output.splitlines() if "in SGLang 0.5.23: " in line]
    assert (
        "kernels for 0 at 1, 0 at 16, 1 at 64, 0 at 256 rows of 3 kinds of weights, by cute_sm90; at none of "
        "these bf16 40x64, bf16 96x64 of 4 experts, logits by its own; policy fastest, records "
    ) in line
    assert found["loaded"] == 4 and output.count("tunegemm: AttributeError") == 1, output


@pytest.mark.parametrize("variables", [{"TUNEGEMM_SGLANG": "0"}, {"TUNEGEMM_MODE": "off"}])
def test_a_switch_turns_it_off(run: Run, variables: dict[str, str]) -> None:
    found = run(
        ENGINE,
        _LOADS
        + """
before = [unquant.UnquantizedLinearMethod.apply]
load()
found["own"] = unquant.UnquantizedLinearMethod.apply is before[0]
""",
        **variables,
    )
    assert found["own"] is True and "tunegemm 0." not in str(found["output"]), found["output"]


def test_another_version_keeps_its_own(run: Run) -> None:
    found = run(
        ENGINE,
        _LOADS
        + """
del unquant.get_bf16_gemm_backend
import sglang.kernels.ops.gemm as gemm
before = [unquant.UnquantizedLinearMethod.apply]
load()
found["layers"] = unquant.UnquantizedLinearMethod.apply is not before[0]
found["fp8"] = hasattr(gemm.fp8_scaled_mm, "__wrapped__")
""",
    )
    output = str(found["output"])
    assert (found["layers"], found["fp8"]) == (False, True), output
    (line,) = [line for line in output.splitlines() if "this version of sglang is unknown" in line]
    assert "bf16 and fp16 layers (there is no sglang.srt.layers.quantization.unquant.get_bf16" in line


def test_ranks_compare_with_the_process_that_started_them(run: Run) -> None:
    found = run(ENGINE, _LOADS + "load()", _TUNEGEMM_SGLANG_RECORDS="0123456789abcdef")
    lines = [line for line in str(found["output"]).splitlines() if "0123456789abcdef" in line]
    assert len(lines) == 1 and "ranks may run different kernels" in lines[0], found["output"]
