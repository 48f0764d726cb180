"""Gates that are trained, by their kernels on a GPU: against fp64, in graphs, from threads; in a model."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tunegemm
from tests.support.gates import ACTIVATIONS, SIZES, by_torch, check, check_odd_values, derived, matrix
from tests.support.kernels import watch_launches
from tests.support.numerics import difference
from tunegemm.choose.snapshot import Snapshot
from tunegemm.errors import TunegemmWarning
from tunegemm.serve.torch.layers import gates
from tunegemm.serve.torch.layers.gates import Gate

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
LARGE = [((2, 300), 8192), ((129,), 11008), ((1,), 28672)]
THREADS, CALLS = 8, 50


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the gates' kernels that were launched from now on. Products are torch's: one whose
    kernel is there from the second call on would change bits.
    """
    monkeypatch.setenv("TUNEGEMM_MODE", "exact")
    watch_launches(monkeypatch, lambda *_: None, read=Snapshot)
    names: list[str] = []
    original = gates.launch

    def note(name: str, *arguments: object) -> bool:
        done = original(name, *arguments)  # type: ignore[arg-type]
        names.extend([name] * done)
        return done

    monkeypatch.setattr(gates, "SERVED", True)
    monkeypatch.setattr(gates, "launch", note)
    return names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ACTIVATIONS)
def test_results_and_gradients_are_rounded_once(launched: list[str], gate: str, dtype: torch.dtype) -> None:
    sizes = SIZES + LARGE
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        for lead, columns in sizes:
            check(gate, dtype, lead, columns, "cuda")
    finally:
        torch.use_deterministic_algorithms(False)
    check_odd_values(gate, dtype, "cuda")
    assert launched == ["forward", "backward"] * (len(sizes) + 1)


def test_gradients_as_they_come(launched: list[str]) -> None:
    """Spread out, with rows apart, from an address of no vector."""
    whole = matrix((64,), 256, BF16, "cuda")
    expanded = torch.ones((), dtype=BF16, device="cuda").expand(64, 256)
    apart = matrix((64,), 256, BF16, "cuda", 1)[:, :256]
    odd = matrix((64,), 256, BF16, "cuda", 2).flatten()[1 : 1 + 64 * 256].view(64, 256)
    for grad in (expanded, apart, odd, apart.mT.contiguous().mT):
        ours, torchs = derived(Gate.apply, whole, "swiglu", grad), derived(by_torch, whole, "swiglu", grad)
        for mine, other in zip(ours, torchs, strict=True):
            torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)


def test_captured(launched: list[str]) -> None:
    whole, grad = (matrix((64,), n, BF16, "cuda").requires_grad_() for n in (512, 256))
    expected = derived(Gate.apply, whole, "swiglu", grad.detach())

    def capture() -> tuple[torch.Tensor, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = Gate.apply(whole, "swiglu")
            (of_whole,) = torch.autograd.grad(result, whole, grad.detach())
        graph.replay()
        return result, of_whole

    for ours, right in zip(capture(), expected, strict=True):
        assert torch.equal(ours, right)
    gates.loaded.clear()
    launched.clear()
    torchs = derived(by_torch, whole, "swiglu", grad.detach())
    for ours, right in zip(capture(), torchs, strict=True):
        torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)
    assert not launched, "nothing is loaded while a graph is captured"


def _in_threads(work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_threads_on_streams_of_their_own(launched: list[str]) -> None:
    """Of different dtypes and sizes, so that some compile while others launch."""
    names = list(ACTIVATIONS)
    cases = [
        (
            matrix((65 + index,), 96 + 16 * index, (BF16, torch.float16)[index % 2], "cuda", index),
            names[index % 4],
        )
        for index in range(THREADS)
    ]
    expected = [derived(Gate.apply, whole, gate, whole.chunk(2, -1)[0]) for whole, gate in cases]
    wrong = torch.zeros(THREADS, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    gates.loaded.clear()

    def work(index: int) -> None:
        whole, gate = cases[index]
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(CALLS):
                found = derived(Gate.apply, whole, gate, whole.chunk(2, -1)[0])
                for ours, right in zip(found, expected[index], strict=True):
                    wrong[index] += (ours != right).any()
            torch.cuda.current_stream().synchronize()

    _in_threads(work)
    assert wrong.tolist() == [0] * THREADS and len(launched) == 2 * THREADS * (CALLS + 1)


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(512, 1408, bias=False) for _ in range(2))
        self.down = nn.Linear(1408, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def _models() -> tuple[nn.Module, nn.Module, nn.Module]:
    """torch's, ours, and the same in fp32."""
    torch.manual_seed(0)
    plain = _MLP().to("cuda", BF16).train()
    model, exact = copy.deepcopy(plain), copy.deepcopy(plain).float()
    tunegemm.patch(model, fuse=True)
    warnings.simplefilter("ignore", TunegemmWarning)  # of products without a kernel
    return plain, model, exact


def _step(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor] | None = None) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(2, 300, 512, device="cuda", generator=generator).to(BF16)
    x = x.to(next(model.parameters()).dtype).requires_grad_()
    model.zero_grad()
    result = model(x) if call is None else call(x)
    upstream = torch.linspace(-1, 1, result.numel(), device="cuda").to(BF16).view(result.shape)
    result.backward(upstream.to(result.dtype))
    assert x.grad is not None
    return [
        result.detach(),
        x.grad,
        *(one.grad.clone() for one in model.parameters() if one.grad is not None),
    ]


def _assert_as_exact(ours: list[torch.Tensor], torchs: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    for mine, other, right in zip(ours, torchs, exact, strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype
        assert difference(mine, right) <= 1.1 * difference(other, right)


def test_a_training_step(launched: list[str]) -> None:
    plain, model, exact = _models()
    torchs, right = _step(plain), _step(exact)
    _assert_as_exact(_step(model), torchs, right)
    assert launched == ["forward", "backward"]
    ours = _step(model)
    assert all(torch.equal(*pair) for pair in zip(_step(model), ours, strict=True))
    for reentrant in (False, True):
        again = _step(model, lambda x, way=reentrant: checkpoint(model, x, use_reentrant=way))
        assert all(torch.equal(*pair) for pair in zip(again, ours, strict=True))
    with torch.autograd.graph.save_on_cpu():
        again = _step(model)
    assert all(torch.equal(*pair) for pair in zip(again, ours, strict=True))


def test_a_training_step_takes_no_more_memory() -> None:
    plain, model, _ = _models()
    peaks = []
    for each in (plain, model):
        _step(each)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _step(each)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.01 * peaks[0]


def test_gradients_of_gradients(launched: list[str]) -> None:
    found = []
    for each in _models():
        x = torch.linspace(-1, 1, 40 * 512, device="cuda").view(40, 512)
        x = x.to(next(each.parameters()).dtype).requires_grad_()
        (of_x,) = torch.autograd.grad(each(x).float().square().sum(), x, create_graph=True)
        of_x.float().square().sum().backward()
        assert x.grad is not None
        found.append(
            [of_x.detach(), x.grad, *(one.grad for one in each.parameters() if one.grad is not None)]
        )
    torchs, ours, exact = found
    for mine, other, right in zip(ours, torchs, exact, strict=True):
        assert difference(mine, right) <= 1.5 * difference(other, right)


def test_compiled() -> None:
    plain, model, exact = _models()
    torchs, right = _step(plain), _step(exact)
    _assert_as_exact(_step(model, torch.compile(model, fullgraph=True)), torchs, right)


def test_threads_train_one_model(launched: list[str]) -> None:
    _, model, _ = _models()
    inputs = [torch.randn(64 + index, 512, device="cuda").to(BF16) for index in range(THREADS)]

    def of_x(x: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(leaf).square().sum(), leaf)
        return grad

    expected = [of_x(x) for x in inputs]
    found: list[torch.Tensor | None] = [None] * THREADS
    torch.cuda.synchronize()

    def work(index: int) -> None:
        for _ in range(CALLS):
            found[index] = of_x(inputs[index])

    _in_threads(work)
    for ours, right in zip(found, expected, strict=True):
        assert ours is not None and torch.equal(ours, right)
