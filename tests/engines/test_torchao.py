"""Layers that the real torchao quantised, patched and under `enable`: its tensors call our kernels."""

from __future__ import annotations

import pytest

from tests.engines.conftest import Run

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

#: Of the CPU, so that no choice of its fp8 layers, which asks for a GPU's, is called: their tensors are made.
_LAYERS = """
import torch
import tunegemm
from torchao.float8.inference import Float8MMConfig
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, PerRow, PerTensor, quantize_
from torchao.quantization.quantize_.workflows.float8.float8_tensor import (
    Float8Tensor, QuantizeTensorToFloat8Kwargs,
)
from tests.support.engines import serve_on_cpu
from tunegemm.torch import takeover

kernel = serve_on_cpu()
takeover.DEVICE_KEYS = ("CPU",)

def layer():
    return torch.nn.Linear(128, 64, bias=False, dtype=torch.bfloat16)

def fp8(scales):
    made, more = layer(), {"granularity": scales, "mm_config": Float8MMConfig(use_fast_accum=True)}
    of_input = QuantizeTensorToFloat8Kwargs(**more)
    weight = Float8Tensor.from_hp(made.weight.data, act_quant_kwargs=of_input, **more)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    return made

def int8():
    made = torch.nn.Sequential(layer())
    quantize_(made, Int8DynamicActivationInt8WeightConfig())
    return made[0]

x = torch.randn(32, 128).bfloat16()
layers = {"fp8 rows": fp8(PerRow()), "fp8 tensor": fp8(PerTensor()), "int8": int8()}
for name, one in layers.items():
    model = torch.nn.Sequential(one)
    with torch.no_grad():
        expected = model(x)
        tunegemm.patch(model)
        kernel.calls.clear()
        same = torch.equal(model(x), expected)
        alone = len(kernel.calls)
        tunegemm.enable()
        result = model(x)
        tunegemm.disable()
    found[name] = [same, alone, len(kernel.calls), torch.allclose(result, expected, rtol=1e-2, atol=1e-2)]
"""


def test_layers_of_torchao_are_served_under_enable(run: Run) -> None:
    found = run("torchao==0.18.0", _LAYERS)
    output = found.pop("output")
    served = [True, 0, 1, True]
    assert found == {"fp8 rows": served, "fp8 tensor": served, "int8": served}, output
