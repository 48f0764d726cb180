"""Kernels that quantise, bit by bit beside torch's operations, with other values beside every operand."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

import tunegemm
from tunegemm.generate import quantize as kernels
from tunegemm.generate.quantize import BLOCK, CONFIGS, QuantizeConfig, Quantizer
from tunegemm.groups import quantize
from tunegemm.store import packs
from tunegemm.store.provided import Provided, provide_keys

pytestmark = pytest.mark.gpu

WHERE = "cuda"
FP8 = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POISON = 448.0
#: Rows and k: edges of a thread's rows and values, of a warp's blocks and of CTAs.
SHAPES = ((1, 8), (1, 7168), (2, 128), (3, 136), (4, 256), (5, 400), (64, 264), (129, 1040), (300, 2112))


@cache
def compiled() -> Provided:
    provided = provide_keys({each: ("quantize", kernels.FAMILY.key_of(each)) for each in CONFIGS})
    assert not provided.failures
    return provided


@cache
def kernel_of(config: QuantizeConfig) -> Quantizer:
    """A kernel, compiled where it does not ship."""
    key = kernels.FAMILY.key_of(config)
    artifact = packs.find(key) or compiled().of(key)
    assert artifact is not None and artifact.resources.spill_bytes == 0
    return Quantizer.load(config, artifact.path)


@pytest.fixture(autouse=True)
def all_loaded() -> None:
    """Else the first call would compile them in the background."""
    for config in CONFIGS:
        kernel_of(config)


def drawn(kind: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """usual: of one magnitude; hostile: of every magnitude, denormal and zero; special: NaN and infinities,
    too."""
    found = torch.randn(rows, columns, device=WHERE)
    if kind != "usual":
        found *= (
            10.0
            ** torch.randint(-44, 39, (rows, -(-columns // 8)), device=WHERE)
            .double()
            .repeat_interleave(8, 1)[:, :columns]
        )
        found = found.masked_fill(
            torch.rand(rows, -(-columns // 64), device=WHERE).repeat_interleave(64, 1)[:, :columns] < 0.3, 0.0
        )
    found = found.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    if kind == "special":
        for value in (float("nan"), float("inf"), -float("inf")):
            found.masked_fill_(torch.rand(rows, columns, device=WHERE) < 0.002, value)
    return found


def beside_nan(values: torch.Tensor) -> torch.Tensor:
    """The matrix in memory that is NaN all around, before and behind each line."""
    rows, columns = values.shape
    memory = torch.full((rows + 4, columns + 64), float("nan"), device=WHERE, dtype=values.dtype)
    return memory[2:-2, 32:-32].copy_(values)


def same(found: Any, wanted: Any) -> str:
    """How values and scales differ from others in any bit; empty if they do not. All NaN count as one."""
    for name, one, other in zip(("values", "scales"), found, wanted, strict=True):
        one, other = one.contiguous(), other.contiguous()
        width = torch.uint8 if name == "values" else torch.int32
        is_other = (one.view(width) != other.view(width)) & ~(one.float().isnan() & other.float().isnan())
        if bool(is_other.any()):
            place = tuple(is_other.nonzero()[0].tolist())
            return f"{int(is_other.sum())} {name}, first {place}: {one[place]}, not {other[place]}"
    return ""


def check(config: QuantizeConfig, rows: int, k: int, kind: str, *, power_of_two: bool) -> None:
    """Launch, and compare every bit and all that lies around the outputs."""
    x = beside_nan(drawn(kind, rows, k * (1 + config.gated), DTYPES[config.dtype]))
    blocks = -(-k // BLOCK)
    memory = torch.full((rows + 4, k + 32), POISON, device=WHERE).to(FP8)
    of_scales = torch.full((blocks + 2, rows + 7), POISON, device=WHERE)
    values, scales = memory[2:-2, 16:-16], of_scales[1:-1, 3:-4].t()
    launch = kernel_of(config).bound(x, values, scales, power_of_two=power_of_two)
    launch(x.data_ptr(), values.data_ptr(), scales.data_ptr())
    what = config, (rows, k), kind, power_of_two
    wanted = quantize.by_torch(x, config.gated, power_of_two)
    assert not (wrong := same((values, scales), wanted)), (what, wrong)
    values.copy_(torch.full((rows, k), POISON, device=WHERE).to(FP8))
    scales.fill_(POISON)
    assert bool((memory.float() == POISON).all()) and bool((of_scales == POISON).all()), what


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_every_bit_is_that_of_torchs_operations(config: QuantizeConfig) -> None:
    torch.manual_seed(0)
    powers = itertools.cycle((False, True, True, False))
    for shape in SHAPES:
        for kind in ("usual", "hostile", "special"):
            check(config, *shape, kind, power_of_two=next(powers))


def test_every_value_of_16_bits_is_quantised_as_torch_does() -> None:
    """Alone in its block, and as a gate of ones."""
    for dtype in (torch.bfloat16, torch.float16):
        bits = torch.arange(-(2**15), 2**15, device=WHERE).to(torch.int16).view(dtype)
        alone = torch.zeros(2**16, 16, device=WHERE, dtype=dtype)
        alone[:, 3] = bits
        gates = torch.ones(2**10, 128, device=WHERE, dtype=dtype)
        gates[:, :64] = bits.view(2**10, 64)
        config = QuantizeConfig("bf16" if dtype is torch.bfloat16 else "fp16")
        for x, gated in ((alone, False), (gates, True)):
            launch_config = QuantizeConfig(config.dtype, gated)
            k = x.shape[1] // (1 + gated)
            values = torch.empty(x.shape[0], k, device=WHERE, dtype=FP8)
            scales = torch.empty(1, x.shape[0], device=WHERE).t()
            launch = kernel_of(launch_config).bound(x, values, scales)
            launch(x.data_ptr(), values.data_ptr(), scales.data_ptr())
            assert not (wrong := same((values, scales), quantize.by_torch(x, gated, False))), (dtype, wrong)


@pytest.mark.parametrize("gate", [None, "swiglu"])
def test_every_number_of_rows_is_right(gate: str | None) -> None:
    torch.manual_seed(1)
    for rows in range(1, 301):
        x = drawn("usual", rows, 272, torch.bfloat16)
        found = tunegemm.quantize(x, gate=gate)
        assert found[1].stride() == (1, rows)
        assert not same(found, quantize.by_torch(x, gate is not None, False)), rows


@pytest.mark.parametrize("gate", [None, "swiglu"])
def test_one_launch_serves_the_public_door(monkeypatch: pytest.MonkeyPatch, gate: str | None) -> None:
    """On any stream, in a graph, and as an operator; what kernels refuse are torch's operations."""
    torch.manual_seed(2)
    by_torch = quantize.by_torch
    wide = drawn("usual", 70, 8192, torch.bfloat16)
    refused = [wide[:, :200], wide[:, 1:257], wide.t()[:, :64]]
    for x in refused:
        assert not same(tunegemm.quantize(x, gate=gate), by_torch(x, gate is not None, False))
    x = wide[3:67, 512:4608]
    monkeypatch.delattr(quantize, "by_torch")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = tunegemm.quantize(x, gate=gate)
    torch.cuda.current_stream().wait_stream(stream)
    assert not same(found, by_torch(x, gate is not None, False))
    assert not same(torch.ops.tunegemm.quantize(x, gate, True), by_torch(x, gate is not None, True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tunegemm.quantize(x, gate=gate)
    for _ in range(2):
        x.copy_(drawn("usual", x.shape[0], x.shape[1], torch.bfloat16))
        graph.replay()
        assert not same(found, by_torch(x, gate is not None, False))


def test_a_product_of_what_was_quantised_is_near_that_of_the_activations() -> None:
    torch.manual_seed(3)
    x, weight = (torch.randn(rows, 1536, device=WHERE).bfloat16() for rows in (48, 256))
    values, scales = tunegemm.quantize(x)
    of_weight, across = weight.to(FP8), torch.ones(12, 2, device=WHERE)
    found = tunegemm.scaled_mm(values, of_weight.t(), scales, across, out_dtype=torch.bfloat16)
    wanted = x.double() @ of_weight.double().t()
    assert float((found.double() - wanted).norm() / wanted.norm()) < 0.03
