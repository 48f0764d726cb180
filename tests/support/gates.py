"""Kernels of several weights on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from tests.support.serving import Kernel, at
from tunegemm.generate.joined import refusal
from tunegemm.generate.takes import NotTaken
from tunegemm.model.joined import JoinedChoice

_GATES = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "geglu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "reglu": functional.relu,
}


class Kernels(Kernel):
    """Remembers the launches of products, as `Kernel` does, of gates, and of weights side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: list[tuple[int, int, int]] = []
        self.several: list[tuple[int, ...]] = []
        self.loads = 0

    def load(self, choice: JoinedChoice, device: torch.device) -> tuple[Any, bool]:
        self.loads += 1
        gate = next((step for step in choice.config.fused.steps if step in _GATES), "")

        def bind(
            a: torch.Tensor, weights: Sequence[torch.Tensor], out: torch.Tensor, biases: Sequence[Any]
        ) -> Callable[[int, int], None]:
            if wrong := refusal(a, weights, out, biases, gated=bool(gate)):
                raise NotTaken(wrong)
            (rows, k), columns, dtype = a.shape, out.shape[1], a.dtype

            def launch(x: int, result: int) -> None:
                left = at(x, (rows, k), (k, 1), dtype).float()
                added = biases or [0.0] * len(weights)
                parts = [left @ w.float().t() + bias for w, bias in zip(weights, added, strict=True)]
                whole = _GATES[gate](parts[0]) * parts[1] if gate else torch.cat(parts, 1)
                at(result, (rows, columns), (columns, 1), dtype).copy_(whole)
                if gate:
                    self.gates.append((rows, columns, k))
                else:
                    self.several.append((rows, *(w.shape[0] for w in weights)))

            return launch

        return bind, False
