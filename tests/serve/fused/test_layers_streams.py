"""What a module adds to a child's result, added by the child's last layer, with kernels planted."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import tunegemm
from tests.support.fusing import FusedByAddress, Recorded, close, layer
from tests.support.layers import TOLERANCE, WIDTH, Attention, by_torch, fuse, fused, given, made
from tests.support.serving import BF16, serve_with
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError, TunegemmWarning
from tunegemm.serve import api
from tunegemm.serve.dispatcher import Dispatcher
from tunegemm.serve.launchers import Prepared
from tunegemm.serve.planning import Planner
from tunegemm.serve.torch.layers import shared
from tunegemm.serve.torch.layers.ends import end_of
from tunegemm.serve.torch.layers.steps import Passed, streams
from tunegemm.store.record import Record


class Child(nn.Module):
    """What is returned, and how, is up to subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Alone(Child):
    def forward(self, x: torch.Tensor, *, factor: float = 1.0, **more: Any) -> torch.Tensor:
        x = self.inner(x) * factor
        if more.get("again"):
            x = self.inner(x)
        x = self.out(x)
        return x  # noqa: RET504 - as libraries write it


class Pair(Child):
    def forward(self, x: torch.Tensor, **more: Any) -> tuple[Any, torch.Tensor]:
        hidden = self.inner(x).reshape(*x.shape)
        result = self.out(hidden)
        return None, result


class Direct(Child):
    def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        return self.out(functional.relu(self.inner(x)))


class Parent(nn.Module):
    """As transformers writes a decoder layer."""

    child_class: type[nn.Module] = Alone

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.child = nn.LayerNorm(WIDTH), self.child_class()

    def forward(self, x: torch.Tensor, scale: float | None = None, **more: Any) -> torch.Tensor:
        residual = x
        x = self.child(x=self.norm(x), **more)
        x = residual + x
        return x  # noqa: RET504 - as libraries write it


class PairParent(Parent):
    child_class = Pair

    def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:  # type: ignore[override]
        _, y = self.child(self.norm(x), **more)
        return y + x


class DirectParent(Parent):
    child_class = Direct


PARENTS = [Parent, PairParent, DirectParent]


def serves(kernel, model: nn.Module, plain: nn.Module, *x: Any, **words: Any) -> list[Any]:  # type: ignore[no-untyped-def]
    """The kernels that were launched, of a result that is torch's."""
    kernel.calls.clear()
    with torch.no_grad():
        close(model(*x, **words), plain(*x, **words), TOLERANCE)
    return kernel.calls


@pytest.mark.parametrize("cls", PARENTS)
def test_a_parents_sum(serve, kernel, cls):
    model, plain = made(cls), made(cls)
    expected = by_torch(plain, given())
    assert "child.out" in fused(fuse(model))
    assert torch.equal(by_torch(model, given()), expected), "without a kernel it is torch's to the bit"
    asked = serve()
    for words in ({}, {"again": True, "factor": 2.0} if cls is Parent else {}):
        serves(kernel, model, plain, given(), **words)
    assert {problem.epilogue for problem in asked.asked} >= {"bias_n+residual"}
    assert type(model).__name__ == cls.__name__ and isinstance(model, cls)
    for copied in (copy.deepcopy(model),):
        assert len(serves(kernel, copied, plain, given())) == 2
    tunegemm.unpatch(model)
    assert type(model) is cls and not any(name.startswith("_fused") for name in vars(model))
    assert torch.equal(by_torch(model, given()), expected)


def test_where_the_sum_has_no_kernel_the_layer_is_served(serve, kernel):
    model, plain = made(DirectParent), made(DirectParent)
    fuse(model)
    serve(Problem(16, WIDTH, WIDTH, epilogue="bias_n"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        assert len(serves(kernel, model, plain, given())) == 2, "each layer, with its bias"


def test_what_has_no_kernel_is_not_passed_until_the_next_look(serve, kernel):
    class Watched(Direct):
        def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
            if x.shape[0]:  # which cannot be traced
                seen.append(streams.wanted is not None)
            return self.out(functional.relu(self.inner(x)))

    class WatchedParent(Parent):
        child_class = Watched

    seen: list[bool] = []
    model, plain = made(WatchedParent), made(WatchedParent)
    assert "child.out" in fused(fuse(model))
    serve(Problem(1, 8, 8))
    seen.clear()  # of calls without data
    by_torch(model, given())
    by_torch(model, given())
    assert seen == [True, False]
    api.dispatcher.planner.next_look = 0.0
    by_torch(model, given())
    assert seen.pop(), "there might be a record now"
    serve()
    assert len(serves(kernel, model, plain, given())) == 2 and seen[-2], "there is"


@pytest.mark.parametrize("is_served", [False, True])
def test_nothing_of_a_model_that_is_gone_is_kept(serve, is_served):
    serve(*(() if is_served else (Problem(1, 8, 8),)))
    model = made(lambda: nn.Sequential(DirectParent(), Attention()))
    fuse(model)
    for _ in range(3):
        by_torch(model, given())
    kept = [weakref.ref(each) for each in model.modules()]
    del model
    gc.collect()
    assert not [each() for each in kept if each() is not None]


def _left(model: nn.Module, why: str) -> None:
    if why == "hook on the child":
        model.child.register_forward_hook(lambda module, given, result: result * 2)
    elif why == "hook on the layer":
        model.child.out.register_forward_hook(lambda module, given, result: result * 2)
    elif why == "global hook":
        pass
    elif why == "another layer":
        model.child.out = nn.Sequential(model.child.out, nn.ReLU())
    elif why == "another child":
        model.child = nn.Sequential(nn.Identity())
        model.child.forward = lambda x, **more: x * 3
    elif why == "its forward":
        model.child.forward = lambda x, **more: functional.relu(x)
    elif why == "its class":
        model.child.__class__ = type("Other", (Direct,), {"forward": lambda self, x: -self.out(x)})


@pytest.mark.parametrize(
    "why",
    ["hook on the child", "hook on the layer", "global hook", "another layer", "another child", "its forward",
     "its class"],
)  # fmt: skip
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_looks_on_or_takes_a_place_is_obeyed(serve, kernel, why, when):
    model, plain = made(DirectParent), made(DirectParent)
    handle = None
    for step in ("before", "fuse", "after"):
        if step == when:
            _left(model, why)
        elif step == "fuse":
            fuse(model)
    _left(plain, why)
    serve()
    try:
        if why == "global hook":
            handle = nn.modules.module.register_module_forward_hook(
                lambda module, given, result: result * 2 if isinstance(module, nn.Linear) else None
            )
        serves(kernel, model, plain, given())
    finally:
        if handle is not None:
            handle.remove()


def test_what_is_between_is_not_passed():
    class Dropped(Parent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x + functional.dropout(self.child(x), 0.5, self.training)

    class Used(Parent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            y = self.child(x)
            return x + y + y.mean()

    class Changed(Parent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            y = self.child(x)
            x.mul_(2)
            return x + y

    class Later(Parent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            y = self.child(x)
            return self.norm(x) + y

    for cls in (Dropped, Used, Changed, Later):
        assert "child.out" not in fused(fuse(made(cls))), cls.__name__


class Dropping(Parent):
    """With dropout before both of its sums."""

    child_class = Direct

    def __init__(self) -> None:
        super().__init__()
        self.last, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = x + self.dropout(self.child(self.norm(x)))
        return self.dropout(self.last(x)) + x


def test_dropout_that_does_nothing_stands_in_no_sums_way(serve, kernel):
    model, plain = made(Dropping), made(Dropping)
    expected = by_torch(plain, given())
    assert {"child.out", "last"} <= set(fused(fuse(model)))
    assert torch.equal(by_torch(model, given()), expected)
    asked = serve()
    serves(kernel, model, plain, given())
    serves(kernel, copy.deepcopy(model), plain, given())
    assert [problem.epilogue for problem in asked.asked].count("bias_n+residual") == 1
    with torch.no_grad():
        close(torch.compile(model, backend="aot_eager")(given()), plain(given()), TOLERANCE)
    for each in (model, plain):
        each.train()
        torch.manual_seed(2)
        each.seen = by_torch(each, given())
    close(model.seen, plain.seen, TOLERANCE)
    for each in (model.eval(), plain.eval()):
        each.dropout.register_forward_hook(lambda module, given, result: result * 2)
    serves(kernel, model, plain, given())
    for each in (model, plain):
        each.dropout = nn.ReLU()
    serves(kernel, model, plain, given())
    tunegemm.unpatch(model)
    assert torch.equal(by_torch(model, given()), by_torch(plain, given()))


class Scaled(Dropping):
    """As torchtune writes a layer whose results nothing scales."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Identity()  # type: ignore[assignment]


class Ends(nn.Module):
    def __init__(self, out: nn.Module) -> None:
        super().__init__()
        self.out = out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)


class Rows(nn.Module):
    """Sums of 32 x 48: of its own layer, or of a child's."""

    def __init__(self, *, is_own: bool) -> None:
        super().__init__()
        linear = nn.Linear(64, 48, bias=False)
        self.last = linear if is_own else Ends(linear)

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        return self.last(x) + stream


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("family", ["cute_sm90", "cublaslt"])
def test_the_librarys_sums_of_few_rows_are_for_graphs(monkeypatch, family, is_own):
    """In eager code it would cost the host more than torch's product and sum."""
    kernel = FusedByAddress(Problem(32, 48, 64, epilogue="residual"))
    candidate = Candidate.make(family, {"algorithm": "cublaslt"})

    class Of(Recorded):
        def find(self, *asked: Any) -> Record | None:  # type: ignore[override]
            record = super().find(*asked)
            return record and replace(record, candidate=candidate)

    planner = Planner(
        device_type="cpu",
        read=lambda: Of(kernel.problem),
        find=lambda _: find_device("model:h200"),
        prepare=lambda *_: Prepared(kernel.launcher, tma=True),
    )
    serve_with(monkeypatch, Dispatcher(planner))
    x, weight, _, stream = layer()
    model = Rows(is_own=is_own).to(BF16).eval()
    fuse(model)
    expected = functional.linear(x, next(model.parameters())) + stream
    assert weight.shape == next(model.parameters()).shape
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        results = [model(x, stream) for _ in range(2)]
        planner.next_look = 0.0
        results.append(model(x, stream))
        is_library = family == "cublaslt"
        assert len(kernel.words) == (1 if is_library else 3), "the first call finds what is launched"
        assert all(torch.equal(result, expected) for result in results) or not is_library
        monkeypatch.setattr(shared, "capturing", lambda device: True)
        close(model(x, stream), expected)
        assert len(kernel.words) == (2 if is_library else 4)


def test_an_identity_stands_in_no_sums_way(serve, kernel):
    model, plain = made(Scaled), made(Scaled)
    assert {"child.out", "last"} <= set(fused(fuse(model)))
    assert torch.equal(by_torch(model, given()), by_torch(plain, given()))
    asked = serve()
    for train in (True, False):
        serves(kernel, model.train(train), plain.train(train), given())
        assert any("residual" in problem.epilogue for problem in asked.asked)
    for each in (model, plain):
        each.dropout.register_forward_hook(lambda module, given, result: result * 2)
    serves(kernel, model, plain, given())


def test_ends_that_are_something_else():
    class Early(Child):
        def forward(self, x):  # type: ignore[no-untyped-def]
            if x.shape[0] > 4:
                return x
            return self.out(x)

    class Twice(Child):
        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.out(self.out(x))

    class More(Child):
        def forward(self, x):  # type: ignore[no-untyped-def]
            x = self.out(x)
            x.relu_()
            return x

    class Within(Child):
        def forward(self, x):  # type: ignore[no-untyped-def]
            with torch.autocast("cpu"):
                x = self.out(x)
            return x  # noqa: RET504 - not within

    class Generator(Child):
        def forward(self, x):  # type: ignore[no-untyped-def]
            yield x
            return self.out(x)

    def doubled(function):  # type: ignore[no-untyped-def]
        def wrapper(self, x):  # type: ignore[no-untyped-def]
            return function(self, x) * 2

        return wrapper

    class Decorated(Child):
        @doubled
        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.out(x)

    for cls in (Early, Twice, More, Within, Generator, Decorated):
        model = made(cls)
        tunegemm.patch(model)
        assert end_of(model) is None, cls.__name__


@pytest.mark.parametrize("kind", ["broadcast", "float32", "number"])
def test_other_streams_are_added_by_torch(serve, kernel, kind):
    class Given(Parent):
        child_class = Direct

        def forward(self, x: torch.Tensor, stream: Any) -> torch.Tensor:  # type: ignore[override]
            return self.child(x) + stream

    model, plain = made(Given), made(Given)
    assert "child.out" in fused(fuse(model))
    serve()
    stream = {"broadcast": given()[:1, :1], "float32": given().float(), "number": 1.5}[kind]
    serves(kernel, model, plain, given(), stream)


def test_threads_each_add_their_own(serve, kernel):
    model, plain = made(DirectParent), made(DirectParent)
    fuse(model)
    serve()
    wrong: list[BaseException] = []

    def run(seed: int) -> None:
        x = given() * seed
        try:
            with torch.no_grad():
                for _ in range(20):
                    close(model(x), plain(x), TOLERANCE)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(1, 5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_gradients_are_torchs(serve):
    model, plain = made(PairParent, train=True), made(PairParent, train=True)
    fuse(model)
    serve()
    for each in (model, plain):
        x = given().requires_grad_()
        each(x).square().mean().backward()
        each.seen = x.grad
    close(model.seen, plain.seen, TOLERANCE)
    close(model.child.out.weight.grad, plain.child.out.weight.grad, TOLERANCE)


def test_a_child_that_gives_something_else_is_an_error(serve, monkeypatch):
    """Which cannot be as long as its source is what it runs."""
    model = made(DirectParent)
    fuse(model)
    serve()
    step = next(value for value in vars(model).values() if isinstance(value, Passed))
    monkeypatch.setattr(step.type, "forward", lambda self, x: self.out(x) * 2)
    with torch.no_grad(), pytest.raises(TunegemmError, match="unpatch the model"):
        model(given())


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_and_exported(serve, backend):
    for cls in PARENTS:
        model, plain = made(cls), made(cls)
        fuse(model)
        serve()
        with torch.no_grad():
            close(torch.compile(model, backend=backend)(given()), plain(given()), TOLERANCE)
            close(torch.export.export(model, (given(),)).module()(given()), plain(given()), TOLERANCE)


def test_attention_within_a_model_of_other_modules(serve, kernel):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.attention(x)

    model = made(lambda: nn.Sequential(Layer(), Layer()))
    plain = copy.deepcopy(model)
    assert [line for line in fused(fuse(model)) if line.endswith(".o")] == ["0.attention.o", "1.attention.o"]
    serve()
    assert len(serves(kernel, model, plain, given())) == 4
