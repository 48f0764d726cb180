"""What is asked of the kernels of a trained gate, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from tunegemm.describe.epilogue import GATED
from tunegemm.serve.torch.layers.gates import Gate

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "geglu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "reglu": torch.relu,
}
assert ACTIVATIONS.keys() == GATED.keys()

#: Rows and columns: vectors of a thread, ragged, more than a block, of one column, none.
SIZES = [((4, 3), 64), ((7,), 130), ((2, 3), 1100), ((3,), 1), ((5,), 7), ((0,), 32)]


def matrix(
    lead: tuple[int, ...], columns: int, dtype: torch.dtype, place: str, seed: int = 0
) -> torch.Tensor:
    """The results of gate and up."""
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*lead, 2 * columns, generator=generator)).to(place, dtype)


def by_torch(whole: torch.Tensor, gate: str) -> torch.Tensor:
    first, up = whole.chunk(2, -1)
    return ACTIVATIONS[gate](first) * up


def derived(
    call: Callable[[torch.Tensor, str], torch.Tensor], whole: torch.Tensor, gate: str, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the gradient of the matrix."""
    leaf = whole.detach().clone().requires_grad_()
    result = call(leaf, gate)
    result.backward(grad.to(result.dtype))
    assert leaf.grad is not None
    return result.detach(), leaf.grad


def check(gate: str, dtype: torch.dtype, lead: tuple[int, ...], columns: int, place: str) -> None:
    """Both results are rounded once, and so at most as far from fp64 as torch's."""
    whole = matrix(lead, columns, dtype, place)
    grad = matrix(lead, columns, dtype, place, seed=1)[..., :columns]  # rows that lie apart
    ours = derived(Gate.apply, whole, gate, grad)
    torchs = derived(by_torch, whole, gate, grad)
    exact = derived(by_torch, whole.double(), gate, grad)
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


def check_odd_values(gate: str, dtype: torch.dtype, place: str) -> None:
    """NaN, infinity and the largest numbers give what torch's operators give in fp32, rounded."""
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max, -100.0, -0.0, 1.5])
    first, up, grad = torch.meshgrid(odd, odd, odd, indexing="ij")
    if place == "cpu" and gate == "geglu":  # of what is so large torch gives NaN there (2.13)
        first = first.where(~(first.abs() > 1e30), -2.5)
    columns = first.numel()
    whole = torch.cat((first.flatten(), up.flatten())).to(place, dtype).view(1, 2 * columns)
    grad = grad.flatten().to(place, dtype).view(1, columns)
    ours = derived(Gate.apply, whole, gate, grad)
    for mine, exact in zip(ours, derived(by_torch, whole.float(), gate, grad), strict=True):
        right = exact.to(dtype)
        assert torch.equal(mine.isnan(), right.isnan())
        bounds = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
        assert torch.allclose(mine.float(), right.float(), equal_nan=True, **bounds)
