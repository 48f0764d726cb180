"""What is asked of the kernels of a trained gate, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch.nn import functional

from tunegemm.describe.epilogue import GATED
from tunegemm.generate import routing as kernels
from tunegemm.serve import routing
from tunegemm.serve.routing import Routing
from tunegemm.serve.torch.layers import gates
from tunegemm.serve.torch.layers.gates import Gate

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "geglu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "reglu": torch.relu,
}
assert ACTIVATIONS.keys() == GATED.keys()

#: Rows and columns: vectors of a thread, ragged, more than a block, of one column.
SIZES = [((4, 3), 64), ((7,), 136), ((2, 3), 1104), ((3,), 8), ((), 1032)]
Tensors = Sequence[torch.Tensor]


def serve_gates(
    monkeypatch: pytest.MonkeyPatch, load: Callable[..., object] | None = None, least: int = 1
) -> Routing:
    """Kernels of gates serve from so many elements on, by what `load` gives."""
    found = Routing(load, kernels.ALL)  # type: ignore[arg-type]
    monkeypatch.setattr(routing, "routing", found)
    monkeypatch.setattr(gates, "SERVED", True)
    monkeypatch.setattr(gates, "LEAST", least)
    monkeypatch.setattr(gates, "LEAST_INPUT", least)
    return found


def made(
    lead: tuple[int, ...], columns: int, dtype: torch.dtype, place: str, count: int = 2, seed: int = 0
) -> list[torch.Tensor]:
    """The results of gate and up, or of one layer, of which they are halves."""
    generator = torch.Generator().manual_seed(seed)
    whole = (3 * torch.randn(*lead, 2 * columns, generator=generator)).to(place, dtype)
    return [whole] if count == 1 else [each.contiguous() for each in whole.chunk(2, -1)]


def by_torch(name: str, *given: torch.Tensor) -> torch.Tensor:
    gate, up = given if len(given) == 2 else given[0].chunk(2, -1)
    return ACTIVATIONS[name](gate) * up


def by_kernels(name: str, *given: torch.Tensor) -> torch.Tensor:
    assert gates.takes(*given)
    result: torch.Tensor = Gate.apply(name, *given)
    return result


def derived(
    call: Callable[..., torch.Tensor], given: Tensors, name: str, grad: torch.Tensor
) -> list[torch.Tensor]:
    """The result, and the gradients of gate and up."""
    leaves = [each.detach().clone().requires_grad_() for each in given]
    result = call(name, *leaves)
    result.backward(grad.to(result.dtype))
    found = [result.detach()]
    for leaf in leaves:
        assert leaf.grad is not None
        found.append(leaf.grad)
    return found


def check(name: str, dtype: torch.dtype, lead: tuple[int, ...], columns: int, place: str, count: int) -> None:
    """Each result is rounded once, and so at most as far from fp64 as torch's."""
    given = made(lead, columns, dtype, place, count)
    grad = made(lead, columns, dtype, place, seed=1, count=1)[0][..., :columns]  # rows that lie apart
    ours = derived(by_kernels, given, name, grad)
    torchs = derived(by_torch, given, name, grad)
    exact = derived(by_torch, [each.double() for each in given], name, grad)
    rounds = place != "cpu" or dtype is not torch.bfloat16  # which Triton's interpreter cuts off
    unit = torch.finfo(dtype).eps * (0.51 if rounds else 1.02)
    for mine, other, right in zip(ours, torchs, exact, strict=True):
        assert mine.shape == other.shape and mine.dtype == dtype and mine.is_contiguous()
        if mine.numel() > 100:  # of few the worse may be nearer
            error, torch_error = ((each.double() - right).norm() for each in (mine, other))
            assert error <= (1.001 if rounds else 3) * torch_error
        # What is lost where the activation is near 0, or its slope; the smallest numbers of fp16.
        near = 1e-5 if dtype is torch.bfloat16 else torch.finfo(dtype).smallest_normal
        assert bool(((mine.double() - right).abs() <= unit * right.abs() + near).all())


def check_odd_values(name: str, dtype: torch.dtype, place: str) -> None:
    """NaN, infinity and the largest numbers give what torch's operators give in fp32, rounded."""
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max, -100.0, -0.0, 1.5, 0.25])
    gate, up, grad = torch.meshgrid(odd, odd, odd, indexing="ij")
    if place == "cpu" and name == "geglu":  # of what is so large torch gives NaN there (2.13)
        gate = gate.where(~(gate.abs() > 1e30), -2.5)
    given = [each.flatten().to(place, dtype) for each in (gate, up)]
    grad = grad.flatten().to(place, dtype)
    ours = derived(by_kernels, given, name, grad)
    for mine, exact in zip(
        ours, derived(by_torch, [each.float() for each in given], name, grad), strict=True
    ):
        right = exact.to(dtype)
        assert torch.equal(mine.isnan(), right.isnan())
        bounds = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
        assert torch.allclose(mine.float(), right.float(), equal_nan=True, **bounds)
