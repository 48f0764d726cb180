"""Kernels of gates on CPU tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tests.support.serving import Kernel, at
from tunegemm.generate.takes import NotTaken
from tunegemm.layers import gates


class Kernels(Kernel):
    """Remembers the launches of products, as `Kernel` does, and of gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: list[tuple[int, int, int]] = []

    def load(
        self, choice: Any, device: torch.device, *, n: int, k: int, rows: int, row_stride: int
    ) -> gates.Launch:
        def launch(gate: int, up: int, x: int, out: int, bias: int) -> None:
            if up <= gate:
                raise NotTaken("up lies before gate")
            self.gates.append((rows, n, k))
            a = at(x, (rows, k), (k, 1)).float()
            left, right = (a @ at(each, (n, k), (row_stride, 1)).float().t() for each in (gate, up))
            at(out, (rows, n), (n, 1)).copy_(functional.silu(left) * right)

        return launch
