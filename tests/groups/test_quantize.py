"""`quantize` where no GPU is: its formula, and what it refuses. tests/gpu compares kernels with it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tunegemm
from tests.support.serving import Bound, fails, serving_by, with_other_device_current
from tests.torch.test_blocks import operands
from tunegemm.dispatch import extension
from tunegemm.errors import ProblemError

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
NAN, INF = float("nan"), float("inf")


def fp32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "k"), [(1, 128), (5, 8), (3, 129), (7, 400)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_block_has_one_scale(dtype: torch.dtype, rows: int, k: int, power_of_two: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(rows, k + 3) * 10.0 ** torch.randint(-3, 4, (rows, 1))).to(dtype)[:, 1 : 1 + k]
    values, scales = tunegemm.quantize(x, power_of_two=power_of_two)
    blocks = -(-k // 128)
    assert values.dtype == FP8 and values.shape == (rows, k) and values.is_contiguous()
    assert scales.dtype == torch.float32 and scales.shape == (rows, blocks) and scales.stride() == (1, rows)
    for row, block in ((row, block) for row in range(rows) for block in range(blocks)):
        own = slice(block * 128, (block + 1) * 128)
        numbers = x[row, own].double()
        scale = fp32(float(numbers.abs().max()) * fp32(1 / 448))
        if power_of_two:
            scale = 2.0 ** math.ceil(math.log2(scale))
        assert float(scales[row, block]) == scale
        wanted = (numbers * fp32(1 / scale)).float().to(FP8)
        assert torch.equal(values[row, own].float(), wanted.float())
        assert power_of_two or float(values[row, own].float().abs().max()) == 448


def test_the_gate_rounds_as_torch_does() -> None:
    torch.manual_seed(1)
    for dtype in (BF16, torch.float32):
        x = torch.randn(6, 2 * 200).to(dtype)
        gate, up = x.chunk(2, 1)
        wanted = tunegemm.quantize(torch.nn.functional.silu(gate) * up)
        found = tunegemm.quantize(x, gate="swiglu")
        assert torch.equal(found[0].float(), wanted[0].float()) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("power_of_two", [False, True])
def test_special_values_are_well_defined(power_of_two: bool) -> None:
    x = torch.ones(6, 256)
    x[0] = 0.0
    x[1] = 1e-42
    x[2, 5] = NAN
    x[3, 5] = -INF
    x[4] = torch.finfo(torch.float32).max
    values, scales = tunegemm.quantize(x, power_of_two=power_of_two)
    least = scales[0, 0]
    assert 0 < float(least) <= 1e-10 / 448 * 2 and bool((scales[:2] == least).all())
    assert bool((values[:2].float() == 0).all())
    plain = values[5, 0].float()
    assert bool(scales[2, 0].isnan()) and bool(values[2, :128].float().isnan().all())
    assert float(scales[3, 0]) == INF
    assert bool(values[3, 5].float().isnan()) and bool((values[3, 6:128].float() == 0).all())
    assert bool((values[2:4, 128:].float() == plain).all())  # the next block
    assert bool(values[4].float().isfinite().all()) and bool(scales[4].isfinite().all())


def test_the_result_is_what_scaled_mm_takes() -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(5, 400).to(BF16), torch.randn(300, 400).to(FP8)
    across = torch.rand(4, 3) + 0.5
    values, scales = tunegemm.quantize(x)
    found = tunegemm.scaled_mm(values, weight.t(), scales, across, out_dtype=torch.float32)
    expanded = across.repeat_interleave(128, 0)[:400].repeat_interleave(128, 1)[:, :300]
    wanted = x.float() @ (weight.float().t() * expanded)
    assert float((found - wanted).norm() / wanted.norm()) < 0.04


def test_a_compiled_graph_holds_it_whole() -> None:
    x = torch.randn(5, 400).to(BF16)
    torch.library.opcheck(torch.ops.tunegemm.quantize.default, (x, "swiglu", True))

    def layer(x: torch.Tensor) -> Any:
        return tunegemm.quantize(x * 2, gate="swiglu")

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(x), layer(x), strict=True):
        assert torch.equal(found.float(), wanted.float()) and found.stride() == wanted.stride()


def test_compiled_rows_of_distributed_tensors_are_quantised(one_rank: None) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    x = torch.randn(5, 400)
    spread = distribute_tensor(x, init_device_mesh("cpu", (1,)), [Shard(0)])
    found = torch.compile(tunegemm.quantize, backend="aot_eager", fullgraph=True)(spread)
    for ours, wanted in zip(found, tunegemm.quantize(x), strict=True):
        assert torch.equal(ours.full_tensor().float(), wanted.float())


X = torch.randn(4, 256)


@pytest.mark.parametrize(
    ("x", "words", "says"),
    [
        (X.double(), {}, r"x is torch.float64; give bfloat16, float16 or float32"),
        (X[None], {}, r"x is \(1, 4, 256\); give rows: x.reshape\(-1, x.shape\[-1\]\)"),
        (X[:, :0], {}, r"x is \(4, 0\); give rows of at least one column"),
        (X[:, :255], {"gate": "swiglu"}, r"x is \(4, 255\); give rows of a gate beside .* even number"),
        (X, {"gate": "silu"}, r"gate 'silu' is not known; use 'swiglu'"),
        (X.clone().requires_grad_(), {}, r"x requires a gradient.*x.detach\(\).*no_grad\(\)"),
    ],
)
def test_what_is_not_quantised_is_refused_in_one_line(x: Any, words: Any, says: str) -> None:
    with pytest.raises(ProblemError, match=says):
        tunegemm.quantize(x, **words)
    if x.requires_grad:
        with torch.no_grad():
            tunegemm.quantize(x)
        with pytest.raises(ProblemError, match=says):
            torch.ops.tunegemm.quantize(x, None, False)
        with pytest.raises(ProblemError, match=says):
            torch.func.grad(lambda x: tunegemm.quantize(x)[1].sum())(x.detach())


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises((TypeError, ProblemError), match="x is a list; give a tensor"):
        tunegemm.quantize([1.0, 2.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 200), (1, 1)])
def test_small_results_have_the_strides_that_kernels_give(shape: tuple[int, int]) -> None:
    values, scales = tunegemm.quantize(torch.ones(shape))
    planned = torch.ops.tunegemm.quantize(torch.ones(shape, device="meta"), None, False)
    assert (values.stride(), scales.stride()) == tuple(each.stride() for each in planned)


SCALED = operands(3, 136, 256)
ROWS = torch.randn(3, 256).bfloat16()
#: Calls of kernels that launch by addresses, and what is said of one that fails.
LAUNCHES: dict[str, tuple[Callable[[], Any], str]] = {
    "quantize": (lambda: tunegemm.quantize(ROWS), "operations quantise"),
    "scaled_mm": (lambda: (tunegemm.scaled_mm(*SCALED, out_dtype=BF16),), "torch computes"),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_another_device_than_the_current_one_is_made_current(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, launched = with_other_device_current(monkeypatch), []
    kernel = Bound(lambda *addresses: launched.append((current[-1], addresses[0])))
    with serving_by(monkeypatch, kernel):
        LAUNCHES[name][0]()
    first = ROWS if name == "quantize" else SCALED[0]
    assert launched == [(0, first.data_ptr())] and current == [1]


IN_GROUPS = {
    "a": SCALED[0], "b": SCALED[1].t()[None].mT, "scale_a": SCALED[2], "scale_b": SCALED[3][None],
    "offs": torch.tensor([3], dtype=torch.int32),
}  # fmt: skip


@pytest.mark.parametrize("lazy", [torch._neg_view, lambda x: torch._efficientzerotensor(x.shape)])
@pytest.mark.parametrize(
    "call",
    [
        lambda lazy: tunegemm.scaled_mm(*SCALED[:2], lazy(SCALED[2]), SCALED[3], out_dtype=BF16),
        lambda lazy: tunegemm.scaled_mm(*SCALED[:3], lazy(SCALED[3]), out_dtype=BF16),
        lambda lazy: tunegemm.scaled_grouped_mm(**IN_GROUPS | {"scale_a": lazy(SCALED[2])}),
        lambda lazy: tunegemm.scaled_grouped_mm(**IN_GROUPS | {"scale_b": lazy(SCALED[3])[None]}),
        lambda lazy: tunegemm.quantize(lazy(ROWS))[0],
    ],
)
def test_kernels_read_no_memory_that_lacks_the_values(
    call: Any, lazy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view with the negative bit has them with the other sign, and zeros may have no memory at all."""
    wanted = call(lambda x: lazy(x) + 0)
    launched: list[Any] = []
    with serving_by(monkeypatch, Bound(lambda *addresses: launched.append(addresses))):
        call(torch.clone)
        assert launched
        launched.clear()
        found = call(lazy)
    assert not launched and torch.equal(found.float(), wanted.float())


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_failed_launch_is_torchs_but_in_a_capture_raises(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph may not keep another way than the one that its program measured."""
    call, said = LAUNCHES[name]
    wanted, kernel = call(), Bound(lambda *addresses: None)
    with serving_by(monkeypatch, kernel):
        call()
        kernel.launch = fails
        with monkeypatch.context() as during:
            during.setattr(extension, "capturing", lambda _: True)
            with pytest.raises(RuntimeError, match="700"):
                call()
        with pytest.warns(tunegemm.TunegemmWarning, match=rf"failed to launch.*700.*{said}"):
            results = call()
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(results, wanted, strict=True))
