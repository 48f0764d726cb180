"""A kernel of grouped products for CPU tensors, and the types of real ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tunegemm.describe.epilogue import Epilogue
from tunegemm.groups.grouped import Groups

#: By the names that kernels' configs have.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}
BF16 = torch.bfloat16
#: Of `operands`.
GROUPS, N, K = 4, 48, 64
SIZES = (3, 0, 9, 1)


def groups_of(load: Callable[..., Any]) -> Groups:
    """Products of groups by kernels that a function loads, of a choice and a device."""
    found = Groups()
    found.load = load  # type: ignore[method-assign]
    return found


class Loops:
    """A kernel: rows of groups one after the other, in fp32. Rows behind the last group become NaN."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.loads = 0
        self.found = True
        self.quiet = False
        """Computes nothing, so that torch is asked for nothing."""
        self.error: Exception | None = None

    def load(self, choice: Any, device: Any) -> Callable[..., None] | None:
        self.loads += 1
        if self.error is not None:
            raise self.error
        return partial(self.of, choice.config.fused) if self.found else None

    def of(
        self, fused: Epilogue, a: Any, weights: Any, out: Any, offs: Any, bias: Any, scales: Any, *,
        interleaved: bool,
    ) -> Callable[..., None]:  # fmt: skip
        """As `GroupedKernel.of`."""
        assert 1 in weights.stride()[1:] and (bias is None or bias.ndim == 2)
        assert (scales is not None) == fused.scales
        return partial(self, fused, interleaved)

    @torch.no_grad()  # as kernels, of which autograd sees nothing
    def __call__(self, fused: Epilogue, interleaved: bool, a: Any, b: Any, offs: Any, *others: Any) -> None:
        *beside, out = others
        bias, scales = (*beside, None, None)[:2]
        weights = b.mT
        assert offs.is_contiguous()
        if bias is not None:
            bias = bias.expand(weights.shape[:2])
        self.calls.append((a.shape[0], *weights.shape, *fused.steps))
        if self.quiet:
            return
        first = 0
        for group, end in enumerate(offs.tolist()):
            if end > first:
                rows = a[first:end].float() @ weights[group].float().t()
                if fused.scales:
                    rows = rows * scales[first:end, None] * bias[group]
                elif bias is not None:
                    rows = rows + bias[group].float()
                if fused.gated:
                    halves = (rows[:, 0::2], rows[:, 1::2]) if interleaved else rows.chunk(2, dim=1)
                    rows = fused.gate(*halves)
                out[first:end] = rows
            first = max(first, end)
        out[first:] = torch.nan  # memory as it was


def operands(rows: int = sum(SIZES)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b and offs of a product of groups, which has so many rows."""
    torch.manual_seed(0)
    a, weights = torch.randn(rows, K, dtype=BF16), torch.randn(GROUPS, N, K, dtype=BF16)
    return a, weights.mT, torch.tensor(SIZES).cumsum(0).to(torch.int32)
