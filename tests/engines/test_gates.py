"""What becomes of gate and up in graphs that Dynamo traced, without vLLM: tests/engines has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

import tunegemm
from tests.support.fusing import close
from tests.support.gates import Kernels
from tests.support.serving import BF16
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import api, extension
from tunegemm.engines import common, vllm_gates
from tunegemm.layers import sites
from tunegemm.torch import ops

COLUMNS, WIDTH = 7168, 64
HALF = COLUMNS // 2

pytestmark = pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")


@pytest.fixture(autouse=True)
def served(serve: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gates by the kernel of several weights, and the plain product of 100 rows by one of a record."""
    monkeypatch.setattr(ops, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(vllm_gates, "met", {})
    api.serve_by(serve(Problem(100, COLUMNS, WIDTH)))
    kernels = Kernels()
    monkeypatch.setattr(sites, "load", kernels.load)
    torch._dynamo.reset()
    with torch.inference_mode():
        yield kernels


def gated(both: torch.Tensor) -> torch.Tensor:
    """As vLLM's SiluAndMul has it."""
    half = both.shape[-1] // 2
    return functional.silu(both[..., :half]) * both[..., half:]


def given(rows: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """As vLLM's compiler is given activations."""
    x = (torch.arange(rows * WIDTH).reshape(rows, WIDTH) % 7 - 3).to(dtype)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def weight_of(columns: int = COLUMNS, dtype: torch.dtype = BF16) -> torch.Tensor:
    return ((torch.arange(columns * WIDTH).reshape(columns, WIDTH) % 5 - 2) / 32).to(dtype)


def compiled(
    layer: Callable[..., Any], compile_by: Callable[..., Any] | None = None
) -> tuple[Callable[..., Any], list[int]]:
    """The layer as vLLM's compiler has it, by any number of rows; and how often it got the operator."""
    counts: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        counts.append(vllm_gates.fuse(module))
        return module if compile_by is None else compile_by(module, inputs)

    return torch.compile(layer, backend=backend, fullgraph=True), counts


def mlp(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return gated(tunegemm.linear(x, weight)) + 1


def test_one_graph_takes_for_each_number_of_rows_what_serves_it(served: Any, kernel: Any) -> None:
    layer, counts = compiled(mlp)
    weight = weight_of()
    for rows, by in ((48, (1, 0)), (100, (0, 1)), (101, (0, 0)), (33, (1, 0)), (32, (0, 0)), (48, (1, 0))):
        served.gates.clear()
        kernel.calls.clear()
        x = given(rows)
        result, plainly = layer(x, weight), gated(functional.linear(x, weight)) + 1
        assert (len(served.gates), len(kernel.calls)) == by, rows
        close(result, plainly, 1e-2)
        assert torch.equal(result, plainly) or by != (0, 0), "to the bit"
    assert counts == [1]
    assert vllm_gates.said() == ("; with silu's gate bf16 7168x64 at 33 to 64, 1024 to 8192 rows")


def test_factors_of_another_order_and_several_layers(served: Any) -> None:
    def layers(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in weights:
            both = tunegemm.linear(x, weight)
            x = x + (both[..., HALF:] * functional.silu(both[..., :HALF]))[:, :WIDTH]
        return x

    layer, counts = compiled(layers)
    x, weights = given(48), [weight_of(), weight_of() / 2]
    close(layer(x, weights), layers(x, weights), 1e-2)
    assert counts == [2] and len(served.gates) == 2


def _adapted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    both = tunegemm.linear(x, weight)
    both.add_(1)  # as adapters do
    return gated(both)


def _scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As a layer of fp8 is in vLLM's graph."""
    one = torch.ones(())
    a, b = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).t()
    return gated(torch.ops.tunegemm.engine_scaled_mm(a, b, one, one, None, BF16, "of a test"))


def _split(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A layer that makes something of silu of the gate's half, of that half, and of up's."""

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        both = tunegemm.linear(x, weight)
        gate, up = both[..., :HALF], both[..., HALF:]
        return make(functional.silu(gate), gate, up)

    return layer


silu = functional.silu
STAYS: dict[str, Callable[..., torch.Tensor]] = {
    "a bias": lambda x, w: gated(tunegemm.linear(x, w, w[:, 0].contiguous())),
    "adapters": _adapted,
    "a sum in between": lambda x, w: gated(tunegemm.linear(x, w) + 1),
    "both read again": lambda x, w: (lambda both: gated(both) * both.sum())(tunegemm.linear(x, w)),
    "gate read again": _split(lambda silu, gate, up: silu * up + gate),
    "up read again": _split(lambda silu, gate, up: silu * up + up),
    "silu read again": _split(lambda silu, gate, up: silu * up + silu),
    "a sum": _split(lambda silu, gate, up: silu + up),
    "a square": _split(lambda silu, gate, up: silu * silu * up),
    "gelu": _split(lambda _, gate, up: functional.gelu(gate) * up),
    "up first": _split(lambda _, gate, up: gate * silu(up)),
    "alternate": lambda x, w: (lambda y: silu(y[..., ::2]) * y[..., 1::2])(tunegemm.linear(x, w)),
    "no transposed weight": lambda x, w: gated(tunegemm.mm(x, w.reshape(WIDTH, COLUMNS))),
    "fp8": _scaled,
    "batch invariance": lambda x, w: gated(torch.ops.tunegemm.engine_linear(x, w, None, "of a test")),
    "torch's layer": lambda x, w: gated(functional.linear(x, w)),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_is_another_graph_stays_as_it_is(name: str, served: Any, monkeypatch: Any) -> None:
    owns = {"fp8": lambda a, b, *_: a.to(BF16) @ b.to(BF16), "batch invariance": functional.linear}
    monkeypatch.setitem(common.own, "of a test", owns.get(name))
    layer = STAYS[name]
    call, counts = compiled(layer)
    x, weight = given(48), weight_of()
    close(call(x, weight), layer(x, weight), 1e-2)
    assert counts == [0] and not served.gates


@pytest.mark.parametrize(
    ("columns", "dtype"), [(7152, BF16), (7168 + 8, BF16), (51216, BF16), (COLUMNS, torch.float16)]
)
def test_what_no_kernel_takes_stays_as_it_is(columns: int, dtype: torch.dtype) -> None:
    call, counts = compiled(mlp)
    x, weight = given(48, dtype), weight_of(columns, dtype)
    close(call(x, weight), mlp(x, weight), 1e-2)
    assert counts == [0]


def test_other_devices_and_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = given(48), weight_of()
    with tunegemm.policy("batch_invariant"):
        call, counts = compiled(mlp)
        call(x, weight)
    torch._dynamo.reset()
    monkeypatch.setattr(ops, "DEVICE_TYPE", "cuda")
    other, of_other = compiled(mlp)
    other(x, weight)
    assert counts == of_other == [0]


def test_nothing_new_is_made_within_a_capture(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is there since the run before; what is not is the plain product."""
    within = {"capture": True}
    monkeypatch.setattr(extension, "capturing", lambda device: within["capture"])
    layer, _ = compiled(mlp)
    x, weight = given(48), weight_of()
    plainly = gated(functional.linear(x, weight)) + 1
    assert torch.equal(layer(x, weight), plainly) and not served.gates
    within["capture"] = False
    layer(x, weight)
    within["capture"] = True
    close(layer(x, weight), plainly, 1e-2)
    assert len(served.gates) == 2 and served.loads == 1


def test_a_kernel_that_fails_costs_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(sites, "load", lambda *_: (lambda *_: fail, False))
    layer, _ = compiled(mlp)
    x, weight = given(48), weight_of()
    assert torch.equal(layer(x, weight), gated(functional.linear(x, weight)) + 1)


@pytest.mark.timeout(300)
def test_inductors_code_calls_the_function(served: Any, kernel: Any) -> None:
    vllm_gates.lower()
    layer, counts = compiled(mlp, compile_fx)
    weight = weight_of()
    _, code = run_and_get_code(layer, given(48), weight)
    assert "extern_kernels.tunegemm_engine_gated(" in code[0] and "any rows" in code[0]
    for rows, by in ((48, (1, 0)), (100, (0, 1)), (100, (0, 1)), (101, (0, 0))):
        served.gates.clear()
        kernel.calls.clear()
        x = given(rows)
        close(layer(x, weight), gated(functional.linear(x, weight)) + 1, 1e-2)
        assert (len(served.gates), len(kernel.calls)) == by, rows
    assert counts == [1]


def test_ranges_are_served_to_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def served(columns: int) -> list[int]:
        rows = (1, 32, 33, 64, 65, 128, 129, 511, 512, 1023, 1024, 8192, 8193)
        return [each for each in rows if vllm_gates.is_served(each, columns, 64)]

    assert served(7152) == served(51216) == []
    assert served(7168) == served(14320) == [33, 64, 1024, 8192]
    assert served(14336) == served(28672) == served(51200) == [33, 64, 129, 511, 512, 1023, 1024, 8192]
    assert vllm_gates.ranges(14336, 4096) == ((33, 64), (129, 8192))
    assert vllm_gates.ranges(7168, 4096) == ((33, 64), (1024, 8192))
    assert vllm_gates.ranges(7168, 4100) == vllm_gates.ranges(14336 + 8, 4096) == ()
    monkeypatch.setattr(vllm_gates, "met", {})
    assert vllm_gates.said() == ""
    vllm_gates.met.update(dict.fromkeys([torch.Size((7168, 64)), torch.Size((51200, 128))]))
    assert vllm_gates.said() == (
        "; with silu's gate bf16 7168x64 at 33 to 64, 1024 to 8192 rows, "
        "51200x128 at 33 to 64, 129 to 8192 rows"
    )


def test_what_fits_none_is_the_plain_product_and_its_gate_to_the_bit() -> None:
    layer, _ = compiled(mlp)
    x, weight = given(101), weight_of()
    assert torch.equal(layer(x, weight), gated(functional.linear(x, weight)) + 1)
