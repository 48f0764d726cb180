"""Small models, written in the ways that people write them, and what the pass finds in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.support.fusing import close
from tunegemm.layers import backend

BF16 = torch.bfloat16
WIDTH, INNER = 64, 96


class MLP(nn.Module):
    """As transformers writes it."""

    def __init__(self, act: nn.Module | None = None, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=bias)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=bias)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.act_fn = act or nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj  # noqa: RET504 - as it is written there


class Layer(nn.Module):
    """Attention, MLP and both residuals in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, width, bias=False) for width in (WIDTH, 32, 32))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.n1, self.n2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.n1(x)
        q, k, v = (f(h).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.n2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Own(nn.Module):
    """Three layers, and a function of them and of an input."""

    def __init__(self, function: Callable[..., torch.Tensor], bias: bool = False) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, INNER, bias=bias) for _ in range(2))
        self.c = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.both = nn.Linear(WIDTH, 2 * INNER, bias=bias)
        self.function = function

    def forward(self, x: torch.Tensor, *more: object) -> torch.Tensor:
        return self.function(self, x, *more)


def made(model: nn.Module, dtype: torch.dtype = BF16) -> nn.Module:
    """Random weights, the same for each call, one after the other in memory; evaluated."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.empty(sum(-(-each.numel() // 32) * 32 for each in model.parameters()), dtype=dtype)
    begin = 0
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            place = memory[begin : begin + parameter.numel()].view(parameter.shape)
            parameter.data = place.copy_(scale * torch.randn(parameter.shape, generator=generator))
            begin += -(-parameter.numel() // 32) * 32
    return model.to(dtype).eval()


def given(*lead: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*(lead or (2, 8)), WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def compiled(model: nn.Module, **words: Any) -> tuple[Callable[..., Any], Counter[str]]:
    """The model through the backend, and what the pass finds in its graphs as they come."""
    found: Counter[str] = Counter()

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.update(backend.prepare(graph))
        return graph.forward

    return torch.compile(model, backend=compiler, **words), found


def counts_of(model: nn.Module, *x: Any) -> Counter[str]:
    """What the pass finds in a model's graphs, whose results, of two calls, are the model's."""
    with torch.no_grad():
        expected = model(*x)
        run, found = compiled(model, dynamic=False)
        for _ in range(2):
            close(run(*x), expected)
    return found


def then(first: torch.Tensor, *writes: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """A tensor after statements that write to it, whose results nobody takes."""
    for write in writes:
        write(first)
    return first
