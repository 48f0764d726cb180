"""Products of groups as torch takes or refuses them, and whether two calls of one mean the same.

PyTorch has no `OpInfo` of ``grouped_mm`` or ``_scaled_grouped_mm``. These are operands of the forms that its
tests of them have (test/test_matmul_cuda.py): every rank, layout and division, and what its checks refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.support.as_torch import BOUNDS, Outcome, difference, enabled, outcome_of
from tunegemm.errors import ProblemError

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
#: Ends of 4 groups of 16 rows.
DIVISIONS = {
    "even": [4, 8, 12, 16], "ragged": [1, 1, 9, 16], "first": [16, 16, 16, 16], "last": [0, 0, 0, 16],
    "rows behind": [2, 5, 5, 9], "nothing": [0, 0, 0, 0],
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One call."""

    name: str
    given: tuple[torch.Tensor, torch.Tensor]
    keywords: dict[str, Any] = field(default_factory=dict)
    rows: int | None = None
    """Rows of the result that have a meaning; None: all."""
    served: bool = False
    """Whether a kernel takes it."""
    torchs: dict[str, Any] = field(default_factory=dict)
    """Keywords of torch's call, where its kernel misreads those of the sample."""

    @property
    def is_whole(self) -> bool:
        """Whether all rows are in groups: else some rows of a gradient are memory as it was."""
        offs = self.keywords.get("offs")
        return offs is None or offs.ndim != 1 or int(offs[-1]) == self.given[0].shape[self.given[1].ndim == 2]


def filled(shape: tuple[int, ...], device: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small whole numbers and halves, which all dtypes hold."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-4, 5, shape, generator=generator) / 2).to(device).to(dtype)


def among_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The same in wider and longer memory whose other places are NaN, at addresses of 16 bytes."""
    shape = (*tensor.shape[:-2], tensor.shape[-2] + 16, tensor.shape[-1] + 32)
    memory = torch.full(shape, torch.nan, device=tensor.device).to(tensor.dtype)
    view = memory[..., 8:-8, 16:-16]
    view.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype).copy_(
        tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    )
    return view


def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The same values, so many elements behind an aligned address."""
    memory = torch.zeros(tensor.numel() + by, device=tensor.device).to(tensor.dtype)
    return memory[by:].view(tensor.shape).copy_(tensor)


def ends(division: list[int], device: str) -> torch.Tensor:
    return torch.tensor(division, device=device, dtype=torch.int32)


def samples(device: str, dtype: torch.dtype = BF16) -> Iterator[Sample]:
    """Calls of ``torch.nn.functional.grouped_mm``."""
    rows, n, k = 16, 48, 64
    a, w = filled((rows, k), device, dtype, 1), filled((4, n, k), device, dtype, 2)
    # On a GPU torch's kernel ends the context at groups along k that are not of whole units of 16 bytes.
    unit = 8 if device == "cuda" else 1
    x, y = (filled((rows * unit, each), device, dtype, seed) for each, seed in ((k, 3), (n, 4)))
    two_bytes = dtype.itemsize == 2
    for name, division in DIVISIONS.items():
        words = {"offs": ends(division, device)}
        for major, weights in (("k", w.mT), ("n", w.mT.contiguous())):
            served = two_bytes if major == "k" else dtype is BF16
            yield Sample(f"{name}, {major} contiguous", (a, weights), words, division[-1], served)
        along, words = (
            dtype is BF16 and name != "rows behind",
            {"offs": ends([e * unit for e in division], device)},
        )
        yield Sample(f"{name}, along k", (x.t(), y), words, None, along)
        yield Sample(f"{name}, along k, as rows", (x.t().contiguous(), y.t().contiguous().t()), words)
    yield from _laid_out(a, w, x, y)
    yield from _refused(a, w)


def _laid_out(a: Any, w: Any, x: Any, y: Any) -> Iterator[Sample]:
    words, served = {"offs": ends(DIVISIONS["ragged"], a.device.type)}, a.element_size() == 2
    yield Sample("among NaN", (among_nan(a), among_nan(w).mT), words, None, served)
    along = {"offs": words["offs"] * (x.shape[0] // a.shape[0])}
    yield Sample("along k, among NaN", (among_nan(x).t(), among_nan(y)), along, None, a.dtype is BF16)
    yield Sample("dtype named", (a, w.mT), {**words, "out_dtype": a.dtype}, None, served)
    yield Sample("batches", (a.expand(4, *a.shape).contiguous(), w.mT))
    yield Sample("groups of columns", (w, x.t()), along)  # of whole units, as those along k
    yield Sample("one group", (a, w[:1].mT), {"offs": words["offs"][3:]}, None, served)
    many = torch.arange(2000, device=a.device, dtype=torch.int32).div(125, rounding_mode="floor").int()
    wide = filled((2000, 16, a.shape[1]), a.device.type, a.dtype, 5)
    yield Sample("2,000 groups", (a, wide.mT), {"offs": many}, int(many[-1]), served)
    for rows in (0, 1):
        part = {"offs": words["offs"].clamp(max=rows)}
        yield Sample(f"{rows} rows", (a[:rows], w.mT), part, rows, served and rows > 0)
    strided = {"offs": words["offs"].repeat_interleave(2)[::2]}  # torch's kernel ignores the stride
    yield Sample("other lines of ends", (a, w.mT), strided, None, served, words)
    for by in (1, 4, 8):
        moved = served and by * a.element_size() % 16 == 0
        yield Sample(f"a {by} elements on", (shifted(a, by), w.mT), words, None, moved)
        yield Sample(f"weights {by} elements on", (a, shifted(w, by).mT), words, None, moved)
    yield Sample("one weight for all", (a, w[:1].expand(w.shape).mT), words)
    yield Sample("a negated", (torch._neg_view(a), w.mT), words)


def _refused(a: Any, w: Any) -> Iterator[Sample]:
    offs = ends(DIVISIONS["ragged"], a.device.type)
    for name, given, words in (
        ("int64", (a, w.mT), {"offs": offs.long()}),
        ("fewer ends", (a, w.mT), {"offs": offs[:3]}),
        ("ends of two dimensions", (a, w.mT), {"offs": offs[None]}),
        ("another k", (a[:, :32], w.mT), {"offs": offs}),
        ("another dtype of b", (a, w.mT.to(torch.float64)), {"offs": offs}),
        ("integers", (a.long(), w.mT.long()), {"offs": offs}),
        ("another dtype of the result", (a, w.mT), {"offs": offs, "out_dtype": torch.float64}),
        ("no ends", (a, w.mT), {}),
        ("ends of batches", (w, w.mT), {"offs": offs}),
        ("one row for all", (a[:1].expand(a.shape), w.mT), {"offs": offs}),
        ("odd lines", (a[:, :60].contiguous(), w[..., :60].contiguous().mT), {"offs": offs}),
        ("every other column", (a.repeat_interleave(2, 1)[:, ::2], w.mT), {"offs": offs}),
        ("a bias", (a, w.mT), {"offs": offs, "bias": a.new_ones(w.shape[1])}),
        ("one dimension", (a[0], w.mT), {"offs": offs}),
    ):
        yield Sample(name, given, words)


def scaled_samples(device: str) -> Iterator[Sample]:
    """Calls of ``torch._scaled_grouped_mm``."""
    a, w = filled((16, 64), device, FP8, 1), filled((4, 48, 64), device, FP8, 2)
    scale_a = torch.arange(1, 17, device=device).float() / 8
    scale_b = torch.arange(1, 193, device=device).float().view(4, 48) / 64
    words = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": BF16, "use_fast_accum": True}
    for name, division in DIVISIONS.items():
        offs = ends(division, device)
        yield Sample(name, (a, w.mT), {**words, "offs": offs}, division[-1], True)
    words["offs"] = ends(DIVISIONS["ragged"], device)
    yield Sample("among NaN", (among_nan(a), among_nan(w).mT), words, None, True)
    for by in (1, 8, 16):
        moved = shifted(a.view(torch.uint8), by).view(FP8)
        yield Sample(f"a {by} elements on", (moved, w.mT), words, None, by == 16)
    for name, given, other in (
        ("slow sums", (a, w.mT), {"use_fast_accum": False}),
        ("fp32", (a, w.mT), {"out_dtype": torch.float32}),
        ("scales of others", (a, w.mT), {"scale_a": scale_a[:15]}),
        ("scales of one", (a, w.mT), {"scale_b": scale_b[:1]}),
        ("scales in bf16", (a, w.mT), {"scale_a": scale_a.to(BF16)}),
        ("every other scale", (a, w.mT), {"scale_a": scale_a.repeat_interleave(2)[::2]}),
        ("n contiguous", (a, w.view(torch.uint8).mT.contiguous().view(FP8)), {}),
        ("e5m2", (a.view(torch.float8_e5m2), w.view(torch.float8_e5m2).mT), {}),
        ("bf16", (a.to(BF16), w.to(BF16).mT), {}),
        ("a bias", (a, w.mT), {"bias": torch.ones(48, device=device, dtype=BF16)}),
        ("int64", (a, w.mT), {"offs": words["offs"].long()}),
        ("no ends", (a, w.mT), {"offs": None}),
    ):
        yield Sample(name, given, words | other)


def trimmed(outcome: Outcome, rows: int | None) -> Outcome:
    """Without the rows that have no meaning, which are memory as it was."""
    return outcome if rows is None else replace(outcome, results=[each[:rows] for each in outcome.results])


def disagreements(
    kernel: Any, torchs: Callable[..., Any], ours: Callable[..., Any], sample: Sample, *, grad: bool = False
) -> list[str]:
    """What differs from torch's outcome, by torch's call under `enable` and by ours; each twice.

    kernel: its `calls` are true once a kernel was launched, and can be cleared. Ours may raise ProblemError
    in the place of torch's error, which says no more.
    """
    found = []
    words = sample.keywords | sample.torchs
    expected = trimmed(outcome_of(torchs, sample.given, words, grad=grad), sample.rows)
    bound = BOUNDS.get(expected.results[0].dtype, 0.0) if expected.results else 0.0
    for name, way in (("enabled", enabled(torchs)), ("ours", ours)):
        if name == "ours" and "bias" in sample.keywords:  # which torch's product of groups does not have
            continue
        for _ in range(2):
            kernel.calls.clear()
            result = trimmed(outcome_of(way, sample.given, sample.keywords, grad=grad), sample.rows)
            if name == "ours" and expected.error is not None and result.error is ProblemError:
                result = expected
            if wrong := difference(expected, result, bound):
                found.append(f"{sample.name}, {name}, grad {grad}: {wrong}")
            if sample.served and not kernel.calls:
                found.append(f"{sample.name}, {name}, grad {grad}: no kernel served")
    return found
