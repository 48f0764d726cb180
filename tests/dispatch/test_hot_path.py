"""Dispatch without a GPU: what a call costs when its product is known, and that it is known for sure."""

from __future__ import annotations

import cProfile
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

import tunegemm
from tests.support.serving import (
    BF16,
    ByAddress,
    at,
    calls_of,
    deterministic,
    is_slow,
    operands,
    quietly,
    serve_with,
    uncached,
)
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.forms import MATMUL, form_of
from tunegemm.dispatch.launchers import TORCH, Prepared
from tunegemm.dispatch.planning import Planner
from tunegemm.errors import TunegemmWarning
from tunegemm.generate.launching import AddressLaunch, AddressLauncher, operand_reader
from tunegemm.torch import functions


def test_one_matrix_for_a_batch_is_a_stride_of_zero(serve):
    """The kernel gets the one matrix's address, on the first call and when the product is known."""
    problem = Problem(32, 48, 64, 3)
    kernel = ByAddress(problem)
    dispatcher = serve(problem, prepared=Prepared(kernel.launcher, tma=True))
    a, b = operands()
    many_a = torch.stack([a, a + 1, a - 1])
    many_b = torch.stack([b.t(), b.t() + 1, b.t() - 1]).mT
    padded = torch.cat([many_a, many_a], 1)[:, :32]  # rows have no single stride
    for left, right in ((a, many_b), (a[None], many_b), (many_a, b.expand(3, 64, 48)), (padded, b)):
        kernel.calls.clear()
        out = torch.zeros(3, 32, 48, dtype=BF16)
        for _ in range(2):
            assert torch.equal(quietly(dispatcher.matmul, left, right), torch.matmul(left, right))
            assert quietly(dispatcher.matmul, left, right, out=out) is out
            assert torch.equal(out, torch.matmul(left, right))
        assert {call[:2] for call in kernel.calls} == {(left.data_ptr(), right.data_ptr())}
        assert len(kernel.calls) == 4
    kernel.calls.clear()
    assert torch.equal(dispatcher.linear(padded, b.t()), torch.nn.functional.linear(padded, b.t()))
    assert len(kernel.calls) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_after_a_known_product(by_address):
    """At one with a strided layout torch's check of tensors ends the process."""
    _, dispatcher = by_address
    a, b = operands()
    nested = torch.nested.nested_tensor([a[:20], a[20:]])
    weight, bias = b.t().contiguous(), torch.ones(48, dtype=BF16)
    for _ in range(2):
        dispatcher.linear(a, weight)
        dispatcher.linear(a, weight, bias)
        for more in ((), (bias,)):
            ours, torchs = (
                call(nested, weight, *more) for call in (dispatcher.linear, torch.nn.functional.linear)
            )
            assert all(torch.equal(*pair) for pair in zip(ours.unbind(), torchs.unbind(), strict=True))


def launched_after(python: list[str]) -> int:
    """How many Python functions a call enters, itself aside, before the kernel's."""
    return next(i for i, name in enumerate(python) if name.startswith("tests.support.")) - 1


def test_a_first_call_crosses_few_files(by_address):
    """What a reader of it opens, from the call to the launch."""
    _, dispatcher = by_address
    profile = cProfile.Profile()
    profile.enable()
    dispatcher.matmul(*operands())
    profile.disable()
    codes = [entry.code for entry in profile.getstats() if not isinstance(entry.code, str)]
    package, files = Path(tunegemm.__file__).parent, {Path(code.co_filename) for code in codes}
    found = sorted(str(path.relative_to(package)) for path in files if package in path.parents)
    assert {"dispatch/planning.py", "choose/selection.py"} <= {*found} and len(found) <= 15, found


def test_a_known_product_is_one_check_one_allocation_and_one_launch(by_address):
    """Counts every function that a warm call enters: no key, SQL, environment, lock, or import."""
    kernel, dispatcher = by_address
    a, b = operands()
    weight, out, x = b.t().contiguous(), torch.zeros(32, 48, dtype=BF16), a.view(2, 16, 64)
    for call, most_python, most_c in (
        (lambda: dispatcher.matmul(a, b), 2, 11),
        (lambda: dispatcher.matmul(a, b, out), 4, 12),
        (lambda: dispatcher.linear(a, weight), 2, 11),
        (lambda: dispatcher.linear(x, weight), 2, 11),
    ):
        call()
        dispatcher.planner.lock, lock = None, dispatcher.planner.lock  # a warm call that takes the lock fails
        python, c = calls_of(call)
        dispatcher.planner.lock = lock
        assert launched_after(python) <= most_python
        before_launch = c[: c.index("append")]
        assert len(before_launch) <= most_c and "check" in before_launch
        assert not {"stride", "acquire", "execute", "open", "format"} & set(before_launch)
    assert len(kernel.calls) == 8


class Watching(TorchFunctionMode):
    """Doubles what torch's functions of products give, and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.__name__ not in ("mm", "matmul", "linear"):
            return result
        self.seen.append(function.__name__)
        return result * 2


def test_modes_of_functions_see_torchs_where_a_kernel_serves(monkeypatch, by_address):
    kernel, dispatcher = by_address
    serve_with(monkeypatch, dispatcher)
    a, b = operands()
    layer = torch.nn.Linear(64, 48, bias=False, dtype=BF16).requires_grad_(False)
    layer.weight.data.copy_(b.t())
    tunegemm.patch(layer)
    out = torch.empty(32, 48, dtype=BF16)
    calls = {
        "mm": lambda: tunegemm.mm(a, b),
        "matmul": lambda: tunegemm.matmul(a, b),
        "matmul ": lambda: tunegemm.matmul(a, b, out=out),
        "linear": lambda: layer(a),
    }
    expected = {name: call().clone() for name, call in calls.items()}
    for name, call in calls.items():
        launched = len(kernel.calls)
        with Watching() as mode:
            assert torch.equal(call(), expected[name] * 2), name
        assert mode.seen == [name.strip()] and len(kernel.calls) == launched
        assert torch.equal(call(), expected[name]) and len(kernel.calls) > launched, "it has gone"
        with torch.device("cpu"):
            launched = len(kernel.calls)
            assert torch.equal(call(), expected[name]) and len(kernel.calls) > launched, "it makes tensors"


def test_the_slow_path_is_a_key_and_a_launch(serve, kernel):
    """Of a product that is launched by tensors, as one of aligned copies is."""
    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    dispatcher.matmul(a, b)
    dispatcher.planner.lock = None
    python, c = calls_of(lambda: dispatcher.matmul(a, b))
    assert launched_after(python) <= 8 and is_slow(lambda: dispatcher.matmul(a, b))
    assert not {"getenv", "acquire", "__enter__", "execute", "open"} & set(c[: c.index("append")])


def variants(a: torch.Tensor, b: torch.Tensor):
    """Operands that differ from (a, b) in one thing each, b being the same object where it can."""
    yield "another m", a[:16], b
    yield "strides", torch.zeros(32, 72, dtype=BF16)[:, :64].copy_(a), b
    yield "address", torch.zeros(32 * 64 + 1, dtype=BF16)[1:].view(32, 64).copy_(a), b
    yield "dtype", a.float(), b.float()
    yield "rank", a[None], b
    yield "negated", torch._neg_view(a), b
    yield "itself", a, a.t()


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
def test_what_was_done_with_the_same_b_is_no_more_than_a_hint(by_address):
    """Calls alternate: the last plan of this very `b` must not be used for other operands."""
    _, dispatcher = by_address
    a, b = operands()
    for name, left, right in variants(a, b):
        for _ in range(3):
            assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
            assert torch.equal(dispatcher.matmul(left, right), torch.matmul(left, right)), name
    b.t_()  # the object is the same, and no longer what it was
    b.resize_(48, 64)
    with pytest.raises(RuntimeError):
        dispatcher.matmul(a, b)
    b.t_()
    assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
    square = torch.ones(64, 64, dtype=BF16)
    dispatcher = type(dispatcher)(Planner(device_type="cpu"))
    for _ in range(3):  # matmul and linear of the same objects
        assert torch.equal(dispatcher.matmul(a, square), torch.matmul(a, square))
        assert torch.equal(dispatcher.linear(a, square), torch.matmul(a, square.t()))


def test_views_that_are_made_for_the_call_are_known(serve):
    """What ATen passes for a weight is a new object each time, and Python's identities come back."""
    launchers = {n: ByAddress(Problem(32, n, 64)) for n in (16, 48, 80)}
    dispatcher = serve(
        *(each.problem for each in launchers.values()),
        prepare=lambda record, _: Prepared(launchers[record.problem.n].launcher, tma=True),
    )
    a, _ = operands()
    weights = [operands(32, n, 64)[1].t().contiguous() for n in (16, 48, 80, 48, 16)]
    for turn in range(3):
        for weight in weights:
            slow = is_slow(lambda weight=weight: dispatcher.below_autograd(a, weight.t()))
            assert turn == 0 or not slow
    assert [len(each.calls) for each in launchers.values()] == [6, 6, 3]


def test_compiled_code_is_not_asked_again_what_it_promises(by_address):
    """One look-up and one launch for operands that compiled code has made sure of; modes are minded."""
    kernel, dispatcher = by_address
    a, b = operands()
    expected, out = torch.matmul(a, b), torch.zeros(32, 48, dtype=BF16)
    plain = form_of(MATMUL, "")

    def call(left=a, site="32x48x64"):
        out.zero_()
        assert dispatcher.compiled(site, plain, left, b.t().t(), (), (), out) is out
        assert torch.equal(out, expected)

    call()
    python, c = calls_of(call)
    first = python.index("tunegemm.dispatch.dispatcher.compiled")
    assert python[first + 1].startswith("tests.support.")
    assert "check" not in c[: c.index("append")] and len(kernel.calls) == 2
    dispatcher.compiled("", plain, a, b, (), (), out)
    assert [key for key in dispatcher.planner.state.recent if isinstance(key, str)] == ["32x48x64"], (
        "extents that may change are looked at each time"
    )
    with deterministic():
        call()
    odd = torch.zeros(32 * 64 + 1, dtype=BF16)[1:].view(32, 64).copy_(a)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        call(odd)
    assert len(kernel.calls) == 3
    dispatcher.planner.refresh()
    assert not dispatcher.planner.state.recent
    call()
    assert len(kernel.calls) == 4


@pytest.mark.parametrize("bias", [False, True])
def test_compiled_code_for_any_rows_finds_what_it_did_by_their_number(monkeypatch, serve, bias):
    """As steps of serving engines have them: no check of operands, whether a kernel serves or torch does, and
    one layer's weight stands for all alike."""
    launchers = {m: ByAddress(Problem(m, 48, 64)) for m in (16, 32)}
    dispatcher = serve(
        *([] if bias else [each.problem for each in launchers.values()]),
        prepare=lambda record, _: Prepared(launchers[record.problem.m].launcher, tma=True),
    )
    serve_with(monkeypatch, dispatcher)
    planner = dispatcher.planner
    monkeypatch.setattr(planner, "serves", lambda *_, **__: True)
    a, b = operands()
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 48, bias, dtype=BF16) for _ in range(2))
    for layer in layers.requires_grad_(False):
        layer.weight.copy_(b.t())

    @partial(torch.compile, dynamic=True, fullgraph=True)
    def compiled(x):
        return [functions.linear(x + 1, layer.weight, layer.bias) for layer in layers]

    with (
        warnings.catch_warnings(),
        uncached(),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore", TunegemmWarning)
        for m in (32, 16, 7, 32, 16, 7):
            for layer, result in zip(layers, compiled(a[:m]), strict=True):
                assert torch.equal(result, layer(a[:m] + 1)), m
        for m in (16, 7, 32):
            python, c = calls_of(lambda m=m: compiled(a[:m]))
            ours = [name for name in python if name.startswith("tunegemm.")]
            served = m != 7 and not bias
            assert ours.count("tunegemm.dispatch.dispatcher.compiled") == 2
            assert len(ours) <= 2 * (3 + bias), ours
            assert served or c.count("addmm" if bias else "mm") == 2
        sites = [
            recent
            for key, recent in planner.state.recent.items()
            if isinstance(key, tuple) and isinstance(key[0], str)
        ]
        assert len([site for site in sites if site.plan]) == (0 if bias else 2)
        assert len([site for site in sites if not site.plan]) == (3 if bias else 1)
        planner.quick.until = 0.0
        compiled(a[:7])
        assert planner.quick.until > 0, "records that are published later are not found"
    planner.state.forget_checks()
    assert not planner.state.recent


def test_modes_that_take_turns_are_both_served_the_short_way(by_address):
    kernel, dispatcher = by_address
    a, b = operands()
    expected = torch.matmul(a, b)
    for _ in range(3):
        with torch.inference_mode():
            results = [quietly(dispatcher.matmul, a, b) for _ in range(3)]
            assert results[0].is_inference() and not is_slow(lambda: dispatcher.matmul(a, b))
        results += [quietly(dispatcher.matmul, a, b) for _ in range(3)]
        assert not results[-1].is_inference() and not is_slow(lambda: dispatcher.matmul(a, b))
        assert all(torch.equal(result, expected) for result in results)
    assert len(kernel.calls) == 24


def test_a_product_that_falls_back_to_torch_makes_no_key_either(serve, kernel):
    """Where torch is the recorded winner, or there is no record, a call adds little to torch's own."""
    dispatcher = serve(Problem(32, 48, 64), prepared=TORCH)
    a, b = operands()
    quietly(dispatcher.matmul, a, b)
    for call in (lambda: dispatcher.matmul(a, b), lambda: dispatcher.linear(a, b.t())):
        call()
    python, _ = calls_of(lambda: dispatcher.matmul(a, b))
    assert len(python) <= 5 and "tunegemm.dispatch.dispatcher.compute" not in python
    assert dispatcher.matmul(a.clone().requires_grad_(), b).requires_grad


def test_rows_that_take_turns_are_both_served_the_short_way(serve):
    """A weight meets a prompt and a decoding step in turns."""
    launchers = {m: ByAddress(Problem(m, 48, 64)) for m in (16, 32)}
    dispatcher = serve(
        *(each.problem for each in launchers.values()),
        prepare=lambda record, _: Prepared(launchers[record.problem.m].launcher, tma=True),
    )
    a, b = operands()
    for turn in range(4):
        for rows in (a, a[:16]):
            slow = is_slow(lambda rows=rows: dispatcher.matmul(rows, b))
            assert torch.equal(dispatcher.matmul(rows, b), torch.matmul(rows, b))
            assert turn == 0 or not slow
    assert [len(each.calls) for each in launchers.values()] == [8, 8]


def test_outputs_of_known_products(by_address):
    """The short way asks of `out` what the slow path asks."""
    kernel, dispatcher = by_address
    a, b = operands()
    expected = torch.matmul(a, b)
    room = torch.zeros(4096, dtype=BF16)
    out = torch.zeros(32, 48, dtype=BF16)
    for _ in range(3):
        version = out._version
        assert quietly(dispatcher.matmul, a, b, out) is out and out._version == version + 1
        assert torch.equal(out, expected)
    assert len(kernel.calls) == 3
    odd = room[1:][: 32 * 48].view(32, 48)
    assert torch.equal(dispatcher.matmul(a, b, odd), expected)
    trained = torch.zeros(32, 48, dtype=BF16, requires_grad=True)
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        dispatcher.matmul(a, b, trained)
    shared = room[: 32 * 64].view(32, 64).copy_(a)
    quietly(dispatcher.matmul, shared, b, out)
    assert len(kernel.calls) == 4
    with suppress(RuntimeError):
        dispatcher.matmul(shared, b, room[: 32 * 48].view(32, 48))
    with torch.inference_mode():
        inference = torch.zeros(32, 48, dtype=BF16)
        for _ in range(3):
            assert torch.equal(quietly(dispatcher.matmul, a, b, inference), expected)
    assert len(kernel.calls) == 7
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        dispatcher.matmul(a, b, inference)
    assert len(kernel.calls) == 7


def test_a_product_with_itself_is_served(serve):
    def make(lda: int, ldb: int, ldd: int, *_: int) -> AddressLaunch:
        return lambda a, b, d: at(d, (64, 64), (ldd, 1)).copy_(
            at(a, (64, 64), (lda, 1)).float() @ at(b, (64, 64), (ldb, 1)).float()
        )

    problem = Problem(64, 64, 64, b_major="n")
    launcher = AddressLauncher(operand_reader(problem, 16, 16), make)
    dispatcher = serve(problem, prepared=Prepared(launcher, tma=True))
    a = torch.randint(-3, 4, (64, 64)).to(BF16)
    for _ in range(3):
        assert torch.equal(quietly(dispatcher.matmul, a, a), torch.matmul(a, a))
    dispatcher.planner.lock = None  # the next one finds the plan without a key
    assert not is_slow(lambda: dispatcher.matmul(a, a))
    other = a.clone()
    assert torch.equal(quietly(dispatcher.matmul, other, a), torch.matmul(other, a))
    assert torch.equal(quietly(dispatcher.matmul, a, a), torch.matmul(a, a))


def test_a_known_product_that_fails_to_launch_is_torchs(by_address):
    kernel, dispatcher = by_address
    a, b = operands()
    for _ in range(2):
        quietly(dispatcher.matmul, a, b)
    kernel.calls = None  # append fails: an AttributeError is nobody's to catch
    with pytest.raises(AttributeError):
        dispatcher.matmul(a, b)

    class Refusing(list):
        def append(self, item):
            raise RuntimeError("refused")

    kernel.calls = Refusing()
    with pytest.warns(TunegemmWarning, match="refused"):
        assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
    assert torch.equal(quietly(dispatcher.matmul, a, b), torch.matmul(a, b))


@pytest.mark.slow
def test_hot_path_imports_neither_search_nor_sqlalchemy(forks):
    code = (
        "import sys, tunegemm.dispatch\n"
        "heavy = {'optuna', 'sqlalchemy', 'pandas', 'cutlass', 'tunegemm.search', "
        "'tunegemm.store.database'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = forks.run(code, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.stdout.strip() == "[]", done.stderr


def test_threads_agree_and_prepare_once(serve, kernel):
    prepared = []

    def prepare(record, device):
        prepared.append(record)
        return Prepared(kernel, tma=True)

    dispatcher, (a, b) = serve(Problem(32, 48, 64), prepare=prepare), operands()
    expected = torch.matmul(a, b)

    def work(_):
        return all(torch.equal(dispatcher.matmul(a, b), expected) for _ in range(50))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))
    assert len(prepared) == 1 and len(kernel.calls) == 400


def test_plans_are_bounded(serve, kernel, monkeypatch):
    monkeypatch.setattr("tunegemm.dispatch.planning.MAX_PLANS", 4)
    monkeypatch.setattr("tunegemm.dispatch.dispatcher.MAX_PLANS", 4)
    dispatcher = serve(*(Problem(m, 48, 64) for m in range(1, 9)))
    a, b = operands()
    for m in range(1, 9):
        quietly(dispatcher.matmul, a[:m], b)
    assert len(kernel.calls) == 8 and len(dispatcher.planner.state.plans) <= 4
