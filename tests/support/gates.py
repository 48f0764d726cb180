"""What is asked of the kernels of a trained gate, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from tunegemm.describe.epilogue import GATED
from tunegemm.serve.torch.layers.trained import launch

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "geglu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "reglu": torch.relu,
}
assert ACTIVATIONS.keys() == GATED.keys()

#: Vectors of a thread, more than a block, none.
SIZES = [(4, 3, 64), (6, 16), (2, 3, 1104), (0, 32)]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, place: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator)).to(place, dtype)


def by_kernels(
    gate: torch.Tensor, up: torch.Tensor, name: str, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The result, and the gradients of both, in memory that holds NaN."""
    result, of_gate, of_up = (torch.full_like(gate, torch.nan) for _ in range(3))
    assert launch("forward", name, gate, up, result)
    assert launch("backward", name, grad, gate, up, of_gate, of_up)
    return result, of_gate, of_up


def by_torch(gate: torch.Tensor, up: torch.Tensor, name: str, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [each.detach().clone().requires_grad_() for each in (gate, up)]
    result = ACTIVATIONS[name](leaves[0]) * leaves[1]
    return result.detach(), *torch.autograd.grad(result, leaves, grad.to(result.dtype))


def check(name: str, dtype: torch.dtype, shape: tuple[int, ...], place: str) -> None:
    """All are rounded once, and so at most as far from fp64 as torch's."""
    gate, up, grad = (drawn(shape, dtype, place, seed) for seed in range(3))
    ours, torchs = by_kernels(gate, up, name, grad), by_torch(gate, up, name, grad)
    exact = by_torch(gate.double(), up.double(), name, grad)
    rounds = place != "cpu" or dtype is not torch.bfloat16  # which Triton's interpreter cuts off
    unit = torch.finfo(dtype).eps * (0.51 if rounds else 1.02)
    for mine, other, right in zip(ours, torchs, exact, strict=True):
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
    gate, up, grad = (each.flatten().to(place, dtype) for each in (gate, up, grad))
    exact = by_torch(gate.float(), up.float(), name, grad)
    for mine, wide in zip(by_kernels(gate, up, name, grad), exact, strict=True):
        right = wide.to(dtype)
        assert torch.equal(mine.isnan(), right.isnan())
        bounds = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
        assert torch.allclose(mine.float(), right.float(), equal_nan=True, **bounds)
