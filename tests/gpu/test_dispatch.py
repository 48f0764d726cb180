"""Dispatch on a real GPU: our kernels, tuned into a database and object store of the tests' own."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.host_time import best_us
from tests.support.kernels import tune_ours
from tests.support.numerics import difference
from tests.support.serving import forbid_torch
from tunegemm.describe.problem import LAYOUTS, Problem
from tunegemm.dispatch import api
from tunegemm.dispatch.api import refresh
from tunegemm.dispatch.guards import autocast
from tunegemm.errors import TunegemmWarning
from tunegemm.measure.operands import make_operands, reference, tolerance
from tunegemm.torch.functions import linear, matmul

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
#: tn and tt are served by every version of the generator; the others are tuned if it has them.
MAIN = Problem(512, 768, 1024)
ROW_MAJOR_B = Problem(512, 768, 1024, b_major="n")
TINY = Problem(128, 128, 64)
PROBLEMS = (
    MAIN,
    ROW_MAJOR_B,
    TINY,
    Problem(200, 264, 136),  # ragged in every tile
    Problem(1, 768, 1024),
    Problem(512, 768, 1024, in_dtype="fp16", out_dtype="fp16"),
    Problem(256, 384, 512, 3),
    Problem(256, 384, 512, a_major="m"),
    Problem(256, 384, 512, a_major="m", b_major="n"),
)


@pytest.fixture(scope="module")
def tuned() -> frozenset[Problem]:
    """Those whose record is one of our own kernels."""
    done = tune_ours(PROBLEMS, trials=6)
    assert {MAIN, ROW_MAJOR_B, TINY} <= done
    return done


@pytest.fixture
def only_ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test in which a product falls back to torch, or warns."""
    forbid_torch(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TunegemmWarning)
        yield


def close(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, problem: Problem = MAIN) -> None:
    assert result.dtype == a.dtype
    assert difference(result, reference(a, b)) <= tolerance(problem)


def operands(problem: Problem = MAIN, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = make_operands(problem, CUDA, seed)
    return made.a, made.b


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_tuned_problem_is_right(tuned, problem, only_ours):
    if problem not in tuned:
        pytest.skip(f"the generator has no kernel for {problem}")
    a, b = operands(problem)
    for _ in range(3):
        result = matmul(a, b)
        assert result.shape == torch.matmul(a, b).shape
        close(result, a, b, problem)


@pytest.mark.parametrize("problem", [MAIN, ROW_MAJOR_B], ids=str)
@pytest.mark.parametrize("pad", [0, 8, 24, 1024])
@pytest.mark.parametrize("offset", [0, 8, 64])
def test_padded_and_offset_views_are_served(tuned, only_ours, problem, pad, offset):
    a, b = operands(problem)
    a, b = (
        view(a, pad, offset),
        (view(b, pad, offset) if problem.b_major == "n" else view(b.t(), pad, offset).t()),
    )
    assert a.storage_offset() == offset
    close(matmul(a, b), a, b)


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
@pytest.mark.parametrize("pad, offset", [(1, 0), (4, 0), (0, 1), (0, 4), (3, 5)])
def test_misaligned_views_are_torchs_and_right(tuned, pad, offset):
    a, b = operands()
    for left, right in ((view(a, pad, offset), b), (a, view(b.t(), pad, offset).t())):
        close(matmul(left, right), left, right)


def view(tensor: torch.Tensor, pad: int, offset: int) -> torch.Tensor:
    """The same matrix in a larger allocation: `pad` elements between rows, `offset` before the first."""
    rows, columns = tensor.shape
    room = torch.full(
        (offset + rows * (columns + pad),), float("nan"), dtype=tensor.dtype, device=tensor.device
    )
    return room[offset:].view(rows, columns + pad)[:, :columns].copy_(tensor)


def test_out_is_written_in_place(tuned, only_ours):
    a, b = operands()
    room = torch.full((514, 776), float("nan"), dtype=a.dtype, device=CUDA)
    out = room[1:513, :768]
    assert matmul(a, b, out=out) is out
    close(out, a, b)
    assert room[0].isnan().all() and room[513].isnan().all() and room[1:513, 768:].isnan().all()


def test_out_that_shares_memory_with_an_operand_is_not_overwritten_by_a_kernel(tuned):
    problem = Problem(128, 128, 64)
    a, b = operands(problem)
    room = torch.zeros(128 * 128, dtype=a.dtype, device=CUDA)
    inside = room[: 128 * 64].view(128, 64).copy_(a)
    with contextlib.suppress(RuntimeError):  # torch refuses it
        matmul(inside, b, out=room.view(128, 128))
        close(room.view(128, 128), a, b, problem)


@pytest.mark.parametrize("lead", [(512,), (4, 128), (2, 4, 64)])
def test_linear_folds_leading_dimensions(tuned, monkeypatch, lead):
    a, b = operands()
    weight = torch.nn.Parameter(b.t().contiguous())
    x = a.view(*lead, 1024)
    with torch.no_grad():
        expected = torch.nn.functional.linear(x, weight)
        monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: pytest.fail("fell back to torch"))
        result = linear(x, weight)
    assert result.shape == expected.shape
    close(result.view(512, 768), a, b)


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
def test_gradients_of_products_without_records(tuned):
    """Tuned ones are in test_gpu_torch.py."""
    a, b = operands()
    a.requires_grad_()
    matmul(a, b).sum().backward()
    expected = b.float().sum(1).expand_as(a)
    assert (a.grad.float() - expected).norm() <= 1e-2 * expected.norm()


def test_runs_on_the_current_stream(tuned, only_ours):
    """The operand is filled late on a side stream: a launch elsewhere would read what was there before."""
    a, b = operands()
    late = torch.zeros_like(a)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(a)
        result = matmul(late, b)
    side.synchronize()
    close(result, a, b)


def test_graph_capture_replays_the_tuned_kernel(tuned, only_ours):
    a, b = operands()
    matmul(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = matmul(a, b)
    for seed in (1, 2):
        other, _ = operands(seed=seed)
        a.copy_(other)
        graph.replay()
        close(result, a, b)


def test_a_captured_kernel_outlives_the_reading_of_new_records(tuned, only_ours):
    """A kernel whose last reference went would be unloaded under the graph."""
    a, b = operands()
    matmul(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = matmul(a, b)
    refresh()
    gc.collect()
    result.zero_()
    graph.replay()
    close(result, a, b)


def test_first_call_inside_a_capture_is_torchs_and_breaks_nothing(tuned):
    a, b = operands()
    torch.matmul(a, b)
    refresh()
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("error", TunegemmWarning)
        with torch.cuda.graph(graph):
            result = matmul(a, b)
    graph.replay()
    close(result, a, b)
    assert not api.dispatcher.planner.state.plans
    matmul(a, b)
    assert all(plan is not None for plan in api.dispatcher.planner.state.plans.values())


def test_threads_on_streams_of_their_own(tuned, only_ours):
    refresh()
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                a, b = operands(seed=seed)
                for _ in range(20):
                    result = matmul(a, b)
                close(result, a, b)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def test_sixteen_threads_make_ten_thousand_calls_each(tuned, only_ours):
    """Half of them on the default stream, half on their own; every 500th result is compared bit by bit."""
    refresh()
    pairs = [(problem, *operands(problem)) for problem in (MAIN, ROW_MAJOR_B, TINY)]
    expected = [matmul(a, b) for _, a, b in pairs]
    for (problem, a, b), result in zip(pairs, expected, strict=True):
        close(result, a, b, problem)
    torch.cuda.synchronize()
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        stream = torch.cuda.Stream() if seed % 2 else torch.cuda.default_stream()
        try:
            with torch.cuda.stream(stream):
                for call in range(10_000):
                    which = (call + seed) % len(pairs)
                    _, a, b = pairs[which]
                    result = matmul(a, b)
                    if call % 500 == 0:
                        assert torch.equal(result, expected[which])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def test_two_streams_share_nothing(tuned, only_ours):
    """Split-K launches have a workspace per stream; both streams are kept busy at once."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    a, b = operands()
    expected = matmul(a, b)
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for stream, kept in zip(streams, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(matmul(a, b))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for kept in results for result in kept)


def test_autocast_uses_its_cache_of_weights(tuned, only_ours, monkeypatch):
    a, b = operands()
    layer = torch.nn.Linear(1024, 768, bias=False, device=CUDA)
    with torch.no_grad():
        layer.weight.copy_(b.t())
    x = a.float()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        expected = torch.nn.functional.linear(x, layer.weight)
        monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: pytest.fail("fell back to torch"))
        addresses = {autocast(layer.weight, torch.bfloat16).data_ptr() for _ in range(3)}
        results = [linear(x, layer.weight) for _ in range(3)]
    assert len(addresses) == 1, "the weight is cast once"
    for result in results:
        assert result.dtype == expected.dtype
        close(result, a, b)


_FORK = """
import os, sys, warnings
import torch, tunegemm, tunegemm.dispatch
from tunegemm.dispatch import api
warnings.simplefilter("error", tunegemm.errors.TunegemmWarning)
if sys.argv[1] == "cuda":
    a = torch.ones(128, 64, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):
        tunegemm.matmul(a, a[:128].t())
child = os.fork()
if child == 0:
    try:
        if sys.argv[1] != "cuda":
            a = torch.ones(128, 64, dtype=torch.bfloat16, device="cuda")
        result = tunegemm.matmul(a, a.t())
        hits = [plan for plan in api.dispatcher.planner.state.plans.values() if plan is not None]
        os._exit(0 if bool((result == 64).all()) and hits else 1)
    except RuntimeError as error:  # torch's own: "Cannot re-initialize CUDA in forked subprocess", or like it
        os._exit(3)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(4)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("parent", "status"), [("import", 0), ("cuda", 3)])
def test_fork(tuned, parent, status):
    """A child of a process that only imported tunegemm is served; once CUDA started, torch's error comes."""
    done = subprocess.run(
        [sys.executable, "-c", _FORK, parent], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr


_FRESH = """
import sys, time, torch
a = torch.rand(128, 64, dtype=torch.bfloat16, device="cuda")
b = torch.rand(128, 64, dtype=torch.bfloat16, device="cuda").t()
expected = a @ b
torch.cuda.synchronize()
start = time.process_time()
import tunegemm
result = tunegemm.matmul(a, b)
seconds = time.process_time() - start
from tunegemm.dispatch import api
assert [plan.launch_at is not None for plan in api.dispatcher.planner.state.plans.values()] == [True]
torch.testing.assert_close(result, expected)
assert not {"cutlass", "sqlalchemy", "alembic", "optuna", "pandas"} & set(sys.modules)
print(seconds)
"""


def test_a_fresh_process_launches_without_the_compiler_and_ends_quietly(tuned):
    """At its end the kernel is unloaded while CUDA shuts down. Bytecode is compiled within the bound."""
    done = subprocess.run([sys.executable, "-c", _FRESH], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) < 1.0


def test_a_foreign_process_publishes(tuned, monkeypatch):
    """A product that fell back to torch is served, without `refresh`, once another process has tuned it."""
    problem = Problem(96, 80, 64)
    a, b = operands(problem)
    monkeypatch.setattr("tunegemm.dispatch.planning.LOOK_SECONDS", 0.0)
    refresh()
    with pytest.warns(TunegemmWarning, match="no record"):
        matmul(a, b)
    program = (
        "from tests.support.kernels import tune_ours\n"
        "from tunegemm.describe.problem import Problem\n"
        "assert tune_ours([Problem(96, 80, 64)], trials=4)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, capture_output=True, cwd=root)
    close(matmul(a, b), a, b, problem)
    assert any(plan is not None for plan in api.dispatcher.planner.state.plans.values())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_operands_on_a_device_that_is_not_current(tuned):
    """The record's fingerprint names the product, so a second GPU of the same kind is served too."""
    a, b = (operand.to("cuda:1") for operand in operands())
    near, near_b = operands()
    with torch.cuda.device(0):
        for _ in range(3):
            result = matmul(a, b)
            assert result.device == a.device
            close(result, a, b)
            close(matmul(near, near_b), near, near_b)
    with torch.cuda.device(1):  # the short way, and not for the other device
        for _ in range(3):
            close(matmul(a, b), a, b)
            assert matmul(near, near_b).device == near.device


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_untuned_problems_are_torchs(tuned, layout):
    problem = Problem.parse("72x80x96", layout=layout)
    a, b = operands(problem)
    assert torch.equal(matmul(a, b), torch.matmul(a, b))


def test_host_time_of_a_call(tuned, only_ours, capsys):
    """Printed for the record; torch's own calls take turns with ours, since other work may share the host."""
    a, b = operands(TINY)
    weight = b.t().contiguous()
    out = torch.empty(128, 128, dtype=a.dtype, device=CUDA)
    calls = {
        "torch.mm": lambda: torch.mm(a, b),
        "torch.mm(out=)": lambda: torch.mm(a, b, out=out),
        "F.linear": lambda: torch.nn.functional.linear(a, weight),
        "tunegemm.matmul": lambda: matmul(a, b),
        "tunegemm.matmul(out=)": lambda: matmul(a, b, out=out),
        "tunegemm.linear": lambda: linear(a, weight),
    }
    best = best_us(calls)
    with capsys.disabled():
        print("\nhost time per call, us: " + ", ".join(f"{name} {us:.1f}" for name, us in best.items()))
    assert best["tunegemm.matmul"] < best["torch.mm"]
    assert best["tunegemm.matmul(out=)"] < best["torch.mm(out=)"]
    assert best["tunegemm.linear"] < best["F.linear"]
