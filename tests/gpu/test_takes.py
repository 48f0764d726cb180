"""Operands at addresses that kernels do not take: refused or right, by whatever way they come, no fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tunegemm
from tests.gpu.test_grouped import error, expected, operands
from tunegemm.generate.takes import NotTaken
from tunegemm.groups import routing
from tunegemm.model.grouped import configs
from tunegemm.store.provided import provide_grouped

pytestmark = pytest.mark.gpu

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    for kind in ("bf16", "gated", "fp8", "routing"):
        assert not provide_grouped(kind).failures


def moved(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """The same values, so many bytes behind an aligned address, and NaN before and behind them."""
    memory = torch.full((tensor.nbytes + num_bytes + 64,), 0xFF, device="cuda", dtype=torch.uint8)
    view = memory[num_bytes : num_bytes + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    view.view(torch.uint8).copy_(tensor.contiguous().view(torch.uint8))
    return view


def check(call: Callable[[], torch.Tensor], reference: torch.Tensor) -> None:
    """Whether it is right or refused."""
    try:
        result = call()
    except (RuntimeError, ValueError) as refused:
        assert "CUDA error" not in str(refused), refused
    else:
        assert error(result, reference) < 6e-3
    torch.cuda.synchronize()


@pytest.mark.parametrize("num_bytes", [2, 8])
@pytest.mark.parametrize("sizes", [[1, 0, 0, 0], [4, 0, 4, 8], [75, 0, 75, 150]], ids=["few", "16", "300"])
def test_products_of_groups(sizes: list[int], num_bytes: int) -> None:
    a, weights, ends, _ = operands(sizes, 1024, 512)
    want = expected(sizes, a, weights)
    for x, w in ((moved(a, num_bytes), weights), (a, moved(weights, num_bytes))):
        check(lambda x=x, w=w: tunegemm.grouped_mm(x, w.mT, offs=ends), want)
        with tunegemm.enable():
            check(lambda x=x, w=w: torch.nn.functional.grouped_mm(x, w.mT, offs=ends), want)
    assert error(tunegemm.grouped_mm(a, weights.mT, offs=ends), want) < 6e-3  # the context is as it was


@pytest.mark.parametrize("num_bytes", [1, 8])
def test_scaled_products_of_groups(num_bytes: int) -> None:
    sizes = [75, 0, 75, 150]
    a, weights, ends, _ = operands(sizes, 1024, 512, dtype=FP8)
    want, ones = (
        expected(sizes, a, weights),
        (torch.ones(300, device="cuda"), torch.ones(4, 1024, device="cuda")),
    )
    words: dict[str, Any] = {"offs": ends, "out_dtype": BF16, "use_fast_accum": True}
    for x, w in ((moved(a, num_bytes), weights), (a, moved(weights, num_bytes))):
        check(lambda x=x, w=w: tunegemm.scaled_grouped_mm(x, w.mT, *ones, **words), want)


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("which", ["x", "gate_up", "down", "index", "weights"])
def test_layers_of_experts(which: str, tokens: int) -> None:
    torch.manual_seed(0)
    half: dict[str, Any] = {"device": "cuda", "dtype": BF16}
    given = {
        "x": torch.randn(tokens, 256, **half), "gate_up": torch.randn(8, 512, 256, **half) / 16,
        "down": torch.randn(8, 256, 256, **half) / 16,
    }  # fmt: skip
    chosen, index = torch.rand(tokens, 8, device="cuda").topk(2)
    given |= {"index": index.contiguous(), "weights": chosen.to(BF16)}
    want = tunegemm.experts(**given).float()
    check(lambda: tunegemm.experts(**given | {which: moved(given[which], given[which].element_size())}), want)


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("kind", ["bf16", "gated"])
def test_few_rows_refuse_each_operand(kind: str, which: int) -> None:
    of = routing.few(configs(kind)["co64x32"], 0)
    assert of is not None
    a, weights, ends, bias = operands([0, 1, 0, 1], 64, 512)
    out = torch.zeros(2, 64 // (1 + (kind == "gated")), device="cuda", dtype=BF16)
    launch = of(a, weights, out, ends, bias)
    given = [a, weights, ends, bias, out]
    launch(*given)
    # Of the others an address of whole elements will do: those are all that torch makes.
    for num_bytes in (2, 8) if which < 2 else ():
        others = [*given]
        others[which] = moved(given[which], num_bytes)
        with pytest.raises(NotTaken):
            launch(*others)
    others = [*given]
    others[which] = moved(given[which], 16 if which < 2 else given[which].element_size())
    launch(*others)
    torch.cuda.synchronize()
    assert torch.equal(others[4], out) and bool(out.any())
