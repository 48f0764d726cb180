"""Layers that are trained in eager code: the gates' kernels against fp64, steps, graphs and threads."""

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
from tests.support.gates import ACTIVATIONS, SIZES, by_kernels, check, check_odd_values, drawn
from tests.support.kernels import watch_launches
from tests.support.numerics import difference
from tunegemm.choose.snapshot import Snapshot
from tunegemm.errors import TunegemmWarning
from tunegemm.serve import planning
from tunegemm.serve.torch.layers import trained

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
LARGE = [(2, 300, 8192), (129, 11008), (1, 28672)]
THREADS, CALLS = 8, 50
#: What runs in a step of a model: the attention's product, and the gate's kernels.
STEP = ["joined", "forward", "backward"]


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that ran from now on, and "joined". Products are torch's."""
    monkeypatch.setenv("TUNEGEMM_MODE", "exact")
    watch_launches(monkeypatch, lambda *_: None, read=Snapshot)
    warnings.simplefilter("ignore", TunegemmWarning)  # of products without a kernel
    names: list[str] = []
    launch, joined = trained.launch, trained.TrainedLayers.forward

    def note(name: str, *arguments: object) -> bool:
        done = launch(name, *arguments)  # type: ignore[arg-type]
        names.extend([name] * done)
        return done

    def note_joined(*arguments: object) -> object:
        names.append("joined")
        return joined(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "LOOK_SECONDS", 3600.0)  # after which a step is layer by layer
    monkeypatch.setattr(trained, "served", True)
    monkeypatch.setattr(trained, "least", 0)
    monkeypatch.setattr(trained, "launch", note)
    monkeypatch.setattr(trained.TrainedLayers, "forward", staticmethod(note_joined))
    return names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ACTIVATIONS)
def test_results_and_gradients_are_rounded_once(gate: str, dtype: torch.dtype) -> None:
    for shape in SIZES + LARGE:
        check(gate, dtype, shape, "cuda")
    check_odd_values(gate, dtype, "cuda")


def _given(rows: int, columns: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """Gate, up, and a gradient."""
    return [drawn((rows, columns), dtype, "cuda", seed) for seed in range(3)]


def test_threads_on_streams_of_their_own() -> None:
    """Of different dtypes and sizes, so that some compile while others launch."""
    names = list(ACTIVATIONS)
    cases = [
        (_given(65 + index, 96 + 16 * index, (BF16, torch.float16)[index % 2]), names[index % 4])
        for index in range(THREADS)
    ]
    expected = [by_kernels(gate, up, name, grad) for (gate, up, grad), name in cases]
    wrong = torch.zeros(THREADS, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    trained.loaded.clear()

    def work(index: int) -> None:
        (gate, up, grad), name = cases[index]
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(CALLS):
                for ours, right in zip(by_kernels(gate, up, name, grad), expected[index], strict=True):
                    wrong[index] += (ours != right).any()
            torch.cuda.current_stream().synchronize()

    _in_threads(work)
    assert wrong.tolist() == [0] * THREADS


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


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(512, 1408, bias=False) for _ in range(2))
        self.down = nn.Linear(1408, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(512, width, bias=False) for width in (512, 128, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return x + q * torch.cat((k, v, k, v), -1)


def _models(ran: list[str]) -> list[nn.Module]:
    """torch's; ours, whose products are torch's, as is known after a first step; the same in fp32."""
    torch.manual_seed(0)
    plain = nn.Sequential(_Mixed(), _MLP()).to("cuda", BF16).train()
    model, exact = copy.deepcopy(plain), copy.deepcopy(plain).float()
    tunegemm.patch(model, fuse=True)
    _step(model)
    ran.clear()
    return [plain, model, exact]


def _step(model: nn.Module, call: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor]:
    x = drawn((2, 300, 512), BF16, "cuda", 1).to(next(model.parameters()).dtype).requires_grad_()
    model.zero_grad()
    result = model(x) if call is None else call(x)
    upstream = torch.linspace(-1, 1, result.numel(), device="cuda").to(BF16).view(result.shape)
    result.backward(upstream.to(result.dtype))
    grads = [x.grad, *(one.grad for one in model.parameters())]
    return [result.detach(), *(one.clone() for one in grads if one is not None)]


def test_a_training_step(ran: list[str]) -> None:
    plain, model, exact = _models(ran)
    torchs, right = _step(plain), _step(exact)

    def saved_on_the_host(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    ways = {
        "eager": model,
        "checkpoint": lambda x: checkpoint(model, x, use_reentrant=False),
        "reentrant": lambda x: checkpoint(model, x, use_reentrant=True),
        "on the host": saved_on_the_host,
        "compiled": torch.compile(model, fullgraph=True),
    }
    for name, call in ways.items():
        ran.clear()
        for mine, other, best in zip(_step(model, call), torchs, right, strict=True):
            assert mine.shape == other.shape and mine.dtype == other.dtype
            assert difference(mine, best) <= 1.1 * difference(other, best), name
        again = STEP[:2] if name == "checkpoint" else []
        assert ran == ([] if name == "compiled" else again + STEP), name


def test_captured(ran: list[str]) -> None:
    _, model, _ = _models(ran)
    x = drawn((600, 512), BF16, "cuda", 1).view(2, 300, 512).requires_grad_()
    leaves = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).float().square().sum(), leaves)
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        found = torch.autograd.grad(model(x).float().square().sum(), leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    ran.clear()
    for is_loaded in (True, False):
        if not is_loaded:
            trained.loaded.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = torch.autograd.grad(model(x).float().square().sum(), leaves)
        graph.replay()
        for ours, right in zip(found, expected, strict=True):
            assert difference(ours, right) <= (0 if is_loaded else 2e-2)
    assert ran == [*STEP, "joined"], "nothing is loaded while a graph is captured"


def test_gradients_of_gradients(ran: list[str]) -> None:
    found = []
    for each in _models(ran):
        each.zero_grad()
        x = drawn((2, 300, 512), BF16, "cuda", 1).to(next(each.parameters()).dtype).requires_grad_()
        (of_x,) = torch.autograd.grad(each(x).float().square().sum(), x, create_graph=True)
        of_x.float().square().sum().backward()
        grads = [of_x.detach(), x.grad, *(one.grad for one in each.parameters())]
        found.append([one for one in grads if one is not None])
    for other, mine, right in zip(*found, strict=True):
        assert difference(mine, right) <= 1.5 * difference(other, right)
    assert ran.count("forward") == 1


def test_threads_train_one_model(ran: list[str]) -> None:
    _, model, _ = _models(ran)
    inputs = [drawn((2, 300, 512), BF16, "cuda", index) for index in range(THREADS)]

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
        torch.cuda.synchronize()

    _in_threads(work)
    for ours, right in zip(found, expected, strict=True):
        assert ours is not None and torch.equal(ours, right)
