"""Products of groups mean what torch's mean, with kernels planted that compute on a CPU.

tests/gpu/test_groups_as_torch.py has real ones, and torch's product with scales, which a CPU has not.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import grouped_mm as torchs

import tunegemm
from tests.groups.test_along_k import Along
from tests.support.as_torch import enabled, outcome_of
from tests.support.grouped import Loops, groups_of
from tests.support.groups_as_torch import BF16, DIVISIONS, disagreements, ends, samples, scaled_samples
from tests.support.serving import deterministic
from tunegemm.groups import grouped
from tunegemm.model.grouped import AlongKChoice, choose, listed_along_k
from tunegemm.torch import takeover


class Both(Loops):
    """Kernels of groups of rows and of those along k."""

    def load(self, choice: Any, index: int) -> Any:
        if isinstance(choice, AlongKChoice):
            along = Along()
            along.calls = self.calls
            return along.load(choice, index)
        return super().load(choice, index)


@pytest.fixture
def kernel(loops: Loops, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loops]:
    """Serves whatever fits."""
    found = Both()
    along = AlongKChoice(listed_along_k()[0], 8)
    monkeypatch.setattr(takeover, "DEVICE_KEYS", ("CPU",))
    monkeypatch.setattr(grouped, "choose", partial(choose, ordered=True))
    monkeypatch.setattr(grouped, "choose_along_k", lambda *extents, gpu: along)
    monkeypatch.setattr(grouped, "groups", groups_of(found.load))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield found
    tunegemm.disable()


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_samples_mean_what_torchs_mean(kernel: Loops, dtype: torch.dtype) -> None:
    found: list[str] = []
    for sample in samples("cpu", dtype):
        found += disagreements(kernel, torchs, tunegemm.grouped_mm, sample)
    assert not found, "\n".join(found)


def test_gradients_mean_what_torchs_mean(kernel: Loops) -> None:
    found: list[str] = []
    for sample in samples("cpu"):
        if sample.is_whole:
            found += disagreements(kernel, torchs, tunegemm.grouped_mm, sample, grad=True)
    assert not found, "\n".join(found)


def test_products_with_scales(kernel: Loops) -> None:
    """Torch has none on a CPU: what a kernel takes is right by fp32's measure, all else is torch's error."""
    for sample in scaled_samples("cpu"):
        for way in (tunegemm.scaled_grouped_mm, enabled(torch._scaled_grouped_mm)):
            kernel.calls.clear()
            outcome = outcome_of(way, sample.given, sample.keywords)
            assert bool(kernel.calls) == sample.served, sample.name
            if not sample.served:
                assert outcome.error is not None, sample.name
                continue
            (a, b), words = sample.given, sample.keywords
            first = 0
            for group, end in enumerate(words["offs"].tolist()):
                part = a[first:end].float() @ b[group].float()
                expected = part * words["scale_a"][first:end, None] * words["scale_b"][group]
                torch.testing.assert_close(
                    outcome.results[0][first:end].float(), expected, rtol=8e-3, atol=1e-2
                )
                first = end


@pytest.mark.parametrize("ends_of", [[8, 4, 8, 16], [4, 4, 8, 30], [-4, 4, 8, 16], [2**31 - 1] * 4])
def test_ends_of_no_division_raise_nothing_that_torchs_do_not(kernel: Loops, ends_of: list[int]) -> None:
    sample = next(iter(samples("cpu")))
    words = {"offs": ends(ends_of, "cpu")}
    errors = {
        outcome_of(way, sample.given, words).error for way in (torchs, enabled(torchs), tunegemm.grouped_mm)
    }
    assert errors == {None}


SURROUNDINGS = {
    "autocast": lambda call: _under(torch.autocast("cpu", BF16), call),
    "deterministic": lambda call: _under(deterministic(), call),
    "inference mode": lambda call: _under(torch.inference_mode(), call),
    "vmap": lambda call: torch.vmap(lambda a: call(a))(torch.stack((A, A)))[1],
    "compiled": lambda call: torch.compile(call, backend="aot_eager", fullgraph=True)(A),
    "exported": lambda call: torch.export.export(Module(call), (A,)).module()(A),
    "jvp": lambda call: torch.func.jvp(call, (A,), (A,))[0],
}
A, B = (torch.randint(-2, 3, shape).to(BF16) for shape in ((16, 64), (4, 64, 48)))
OFFS = ends(DIVISIONS["ragged"], "cpu")


class Module(torch.nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, a: torch.Tensor) -> Any:
        return self.call(a)


def _under(context: Any, call: Any) -> Any:
    with context:
        return call(A)


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings_change_nothing(kernel: Loops, name: str) -> None:
    """A result, or torch's error."""
    outcomes = []
    for call in (torchs, tunegemm.grouped_mm):
        torch._dynamo.reset()
        outcomes.append(
            outcome_of(lambda call=call: SURROUNDINGS[name](lambda a: call(a, B, offs=OFFS)), (), {})
        )
    outcomes.append(
        outcome_of(enabled(lambda: SURROUNDINGS[name](lambda a: torchs(a, B, offs=OFFS))), (), {})
    )
    tunegemm.disable()
    expected, *others = outcomes
    for other in others:
        assert other.error is expected.error
        assert all(map(torch.equal, expected.results, other.results))


def test_threads_have_their_own_products(kernel: Loops) -> None:
    kernel.quiet = False
    begin = threading.Barrier(6)

    def work(number: int) -> bool:
        a = torch.full((16, 64), float(number), dtype=BF16)
        offs = ends([number, number, 8, 16], "cpu")
        expected = torchs(a, B, offs=offs)
        begin.wait()
        return all(torch.equal(tunegemm.grouped_mm(a, B, offs=offs), expected) for _ in range(40))

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6))) and kernel.calls
