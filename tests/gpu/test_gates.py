"""Gates that are trained, by their kernels on a GPU: against fp64, in graphs, from threads; in a model."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tunegemm
from tests.support.gates import (
    ACTIVATIONS,
    SIZES,
    by_kernels,
    by_torch,
    check,
    check_odd_values,
    derived,
    made,
    serve_gates,
)
from tests.support.kernels import watch_launches
from tests.support.numerics import difference
from tunegemm.choose.snapshot import Snapshot
from tunegemm.errors import TunegemmWarning
from tunegemm.generate import routing as kernels
from tunegemm.serve import routing

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
LARGE = [((2, 300), 8192), ((129,), 11008), ((1,), 28672)]
THREADS, CALLS = 8, 50
STEP = ["multiply", "derive"]


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch, objects: Path) -> Iterator[list[str]]:
    """The names of the gates' kernels that were launched from now on. Products are torch's: one whose
    kernel is there from the second call on would change bits.
    """
    monkeypatch.setenv("TUNEGEMM_MODE", "exact")
    watch_launches(monkeypatch, lambda *_: None, read=Snapshot)
    names: list[str] = []

    def load(name: str, index: int) -> routing.Bind:
        path = objects / name
        if not path.exists():  # here and now: a pool would begin processes for two kernels
            kernels.compile(kernels.kernels()[name], path)
        bind = kernels.load(path, index)

        def noting(ctas: int, **numbers: int) -> routing.Launch:
            launch = bind(ctas, **numbers)

            def noted(*tensors: torch.Tensor) -> None:
                launch(*tensors)
                names.append(name.split()[0])

            return noted

        return noting

    serve_gates(monkeypatch, load)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)  # of products without a kernel
        yield names
    assert routing.routing.served == kernels.ALL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ACTIVATIONS)
def test_results_and_gradients_are_rounded_once(launched: list[str], gate: str, dtype: torch.dtype) -> None:
    sizes = SIZES + LARGE
    for lead, columns in sizes:
        for count in (1, 2):
            check(gate, dtype, lead, columns, "cuda", count)
    check_odd_values(gate, dtype, "cuda")
    assert launched == STEP * (2 * len(sizes) + 1)


def test_gradients_as_they_come(launched: list[str]) -> None:
    """Spread out, with rows apart, from an address of no vector."""
    given = made((64,), 256, BF16, "cuda")
    expanded = torch.ones((), dtype=BF16, device="cuda").expand(64, 256)
    (apart,) = made((64,), 256, BF16, "cuda", 1, 1)
    odd = apart.flatten()[1 : 1 + 64 * 256].view(64, 256)
    for grad in (expanded, apart[:, :256], odd, odd.mT.contiguous().mT):
        ours, torchs = (derived(call, given, "swiglu", grad) for call in (by_kernels, by_torch))
        for mine, other in zip(ours, torchs, strict=True):
            torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)


def test_captured(launched: list[str]) -> None:
    given = [each.requires_grad_() for each in made((64,), 512, BF16, "cuda")]
    (grad,) = made((64,), 256, BF16, "cuda", 1, 1)
    expected = derived(by_kernels, given, "swiglu", grad)

    def capture() -> list[torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = by_kernels("swiglu", *given)
            found = torch.autograd.grad(result, given, grad)
        graph.replay()
        return [result, *found]

    for ours, right in zip(capture(), expected, strict=True):
        assert torch.equal(ours, right)
    routing.routing.plans.clear()
    launched.clear()
    torchs = derived(by_torch, given, "swiglu", grad)
    for ours, right in zip(capture(), torchs, strict=True):
        torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)
    assert not launched, "nothing is loaded while a graph is captured"


def test_another_gpu_than_the_current_one(launched: list[str]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU is here")
    check("swiglu", BF16, (64,), 256, "cuda:1", 2)
    assert launched == STEP


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
    """Of different dtypes and sizes, so that some load while others launch."""
    names = list(ACTIVATIONS)
    cases = [
        (made((65 + i,), 96 + 16 * i, (BF16, torch.float16)[i % 2], "cuda", 1 + i % 2, i), names[i % 4])
        for i in range(THREADS)
    ]
    grads = [torch.ones(65 + i, 96 + 16 * i, device="cuda") for i in range(THREADS)]
    expected = [
        derived(by_kernels, given, name, grad) for (given, name), grad in zip(cases, grads, strict=True)
    ]
    wrong = torch.zeros(THREADS, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    routing.routing.plans.clear()

    def work(index: int) -> None:
        given, name = cases[index]
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(CALLS):
                found = derived(by_kernels, given, name, grads[index])
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
    assert launched == STEP
    ours = _step(model)
    assert all(torch.equal(*pair) for pair in zip(_step(model), ours, strict=True))
    again = _step(model, lambda x: checkpoint(model, x, use_reentrant=False))
    assert all(torch.equal(*pair) for pair in zip(again, ours, strict=True))
    _assert_as_exact(_step(model, lambda x: checkpoint(model, x, use_reentrant=True)), torchs, right)
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


def test_gradients_of_gradients() -> None:
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


def test_compiled(launched: list[str]) -> None:
    plain, model, exact = _models()
    torchs, right = _step(plain), _step(exact)
    _assert_as_exact(_step(model, torch.compile(model, fullgraph=True)), torchs, right)
    assert not launched, "Inductor fuses the gate itself"


def test_threads_train_one_model() -> None:
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
