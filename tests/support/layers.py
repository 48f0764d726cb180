"""Small models with what layers of transformers consist of, and what is done with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from tunegemm.errors import TunegemmWarning

BF16 = torch.bfloat16
WIDTH, INNER, ROWS = 64, 96, 16


class Attention(nn.Module):
    """Attention as most model libraries write it."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, width, bias) for width in (WIDTH, 32, 32))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lead = x.shape[:-1]
        q, k, v = (layer(x).view(*lead, -1, 16).transpose(-3, -2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(mixed.transpose(-3, -2).reshape(*lead, -1))


class Gates(nn.Module):
    """torchtune's way to write Llama's MLP."""

    def __init__(self, activation: Callable[..., torch.Tensor] | None = None, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER, bias), nn.Linear(WIDTH, INNER, bias)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)
        self.activation = activation or nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.activation(self.w1(x))
        if self.w3 is not None:
            h = h * self.w3(x)
        return self.w2(h)


class Plain(nn.Module):
    """An MLP with a bias, and a stream to which its result is added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x)), approximate="tanh"))


class Model(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.plain = Attention(), Gates(), Plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return self.plain(x + self.mlp(x))


def made(
    make: Callable[[], nn.Module] = Model, *, train: bool = False, dtype: torch.dtype = BF16
) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype).train(train)


def given(*lead: int) -> torch.Tensor:
    return torch.randn(*(lead or (2, ROWS // 2)), WIDTH, generator=torch.Generator().manual_seed(1)).to(BF16)


def by_torch(model: nn.Module, *x: torch.Tensor) -> torch.Tensor:
    """What a model gives where nothing is planted: kernels are CUDA's."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        return model(*x)


TOLERANCE = 3e-2
