"""Other libraries that replace ATen's products while tunegemm stands before them: vLLM, FlagGems.

Theirs is what torch computes by then: it goes on, is counted, and may begin and end at any time.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import tunegemm
from tests.support.serving import BF16, operands, serve_with
from tunegemm.describe.problem import Problem

PRODUCTS = {
    "mm": lambda a, b: torch.mm(a, b),
    "bmm": lambda a, b: torch.bmm(a[None], b[None])[0],
    "addmm": lambda a, b: torch.addmm(torch.zeros(b.shape[1], dtype=a.dtype), a, b),
}


@contextmanager
def other_library(*names: str, override: bool = True) -> Iterator[None]:
    """Kernels in the place of ATen's on the CPU, whose results are recognised: they are 1000 more."""
    library = torch.library.Library("aten", "IMPL")

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.float().unsqueeze(-1) * b.float().unsqueeze(-3)).sum(-2).to(a.dtype) + 1000

    functions = {"mm": mm, "bmm": mm, "addmm": lambda c, a, b, *, beta=1, alpha=1: mm(a, b) + c}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every kernel that is replaced
        for name in names:
            library.impl(name, functions[name], "CPU", allow_override=override)
    try:
        yield
    finally:
        library._destroy()


def is_theirs(result: torch.Tensor) -> bool:
    return bool((result > 500).all())


@pytest.fixture
def ones() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, 8), torch.ones(8, 6)


@pytest.mark.parametrize("name", PRODUCTS)
def test_an_override_that_ends_while_products_are_recorded(name, ones):
    with other_library(name), tunegemm.record() as seen:
        assert is_theirs(PRODUCTS[name](*ones))
    with tunegemm.record() as later:
        with other_library(name):
            assert is_theirs(PRODUCTS[name](*ones))
        assert not is_theirs(PRODUCTS[name](*ones))
    override = other_library(name)
    override.__enter__()
    with tunegemm.record() as ended:
        override.__exit__(None, None, None)
        assert not is_theirs(PRODUCTS[name](*ones))
    assert [product.calls for each in (seen, later, ended) for product in each.products] == [1, 2, 1]


def test_one_that_refuses_to_override_others_begins_under_a_recording(ones):
    with tunegemm.record() as seen, other_library("mm", override=False):
        assert is_theirs(torch.mm(*ones))
    assert [product.calls for product in seen.products] == [1]
    assert not is_theirs(torch.mm(*ones))


def test_overrides_of_two_libraries_end_in_any_order(ones):
    first, second = other_library("mm"), other_library("mm")
    with tunegemm.record() as seen:
        first.__enter__()
        second.__enter__()
        assert is_theirs(torch.mm(*ones))
        first.__exit__(None, None, None)
        assert is_theirs(torch.mm(*ones))
        second.__exit__(None, None, None)
        assert not is_theirs(torch.mm(*ones))
    assert [product.calls for product in seen.products] == [3]


@pytest.mark.parametrize("begins_first", [True, False])
def test_enable_serves_what_is_recorded_and_falls_back_to_theirs(serve, kernel, monkeypatch, begins_first):
    served, missed = operands(), operands(16, 480, 64)
    serve_with(monkeypatch, serve(Problem(32, 48, 64)))
    override = other_library("mm", override=begins_first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what has no record
        if begins_first:
            override.__enter__()
        with tunegemm.enable():
            if not begins_first:
                override.__enter__()
            assert torch.equal(torch.mm(*served), torch.matmul(*(x.float() for x in served)).to(BF16))
            assert len(kernel.calls) == 1 and is_theirs(torch.mm(*missed))
            override.__exit__(None, None, None)
            assert not is_theirs(torch.mm(*missed))
            torch.mm(*served)
            assert len(kernel.calls) == 2
    assert not is_theirs(torch.mm(*missed)) and len(kernel.calls) == 2


def test_enable_leaves_products_of_other_devices_and_layouts_to_torch(serve, kernel, monkeypatch):
    a, b = operands()
    serve_with(monkeypatch, serve(Problem(32, 48, 64)))
    with tunegemm.enable():
        assert torch.mm(a.to("meta"), b.to("meta")).is_meta
        sparse = torch.mm(a.float().to_sparse(), b.float())
    assert torch.equal(sparse, a.float() @ b.float()) and not kernel.calls


def test_blocks_of_a_server_begin_and_end_while_other_threads_multiply(forks):
    """Torch frees a kernel that is taken away, whichever threads are in it: they crashed."""
    program = """
import threading, warnings
import torch, tunegemm
warnings.simplefilter("ignore")
torch.set_num_threads(1)
a, errors, done = torch.ones(8, 8), [], threading.Event()
def multiply():
    while not done.is_set():
        try:
            assert bool((torch.mm(a, a) == 8).all())
        except BaseException as error:
            errors.append(error)
threads = [threading.Thread(target=multiply) for _ in range(2)]
[thread.start() for thread in threads]
for number in range(800):
    with tunegemm.record() if number % 8 == 0 else tunegemm.enable():
        torch.mm(a, a)
done.set()
[thread.join() for thread in threads]
print(errors[:1])
"""
    run = forks.run(program, env=os.environ)
    assert (run.returncode, run.stdout, run.stderr) == (0, "[]\n", "")


def test_both_forget_nothing_at_the_end_of_a_process(forks):
    """Whichever library goes first when the interpreter ends."""
    program = (
        "import torch, tunegemm, warnings; warnings.simplefilter('ignore');"
        "other = torch.library.Library('aten', 'IMPL');"
        "recording = tunegemm.record().__enter__();"
        "other.impl('mm', lambda a, b: a @ b, 'Meta', allow_override=True);"
        "print(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).sum().item())"
    )
    run = forks.run(program, env=os.environ)
    assert (run.returncode, run.stdout, run.stderr) == (0, "8.0\n", "")
