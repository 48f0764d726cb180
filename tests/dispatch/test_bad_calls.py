"""Calls with what is not a product: torch's own error where torch has the call, else a ProblemError."""

from __future__ import annotations

import inspect
import pydoc
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import tunegemm
from tests.support.fusing import serve_recorded
from tests.support.serving import BF16, Kernel, operands, serve_with
from tunegemm.choose.policies import Policy, parse_policy
from tunegemm.describe.device import find_device
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.errors import ArgumentError, TunegemmError
from tunegemm.generate.families import completed
from tunegemm.measure.outcome import Failure, Measurement
from tunegemm.store.exchange import dump, sound
from tunegemm.torch.functions import Extras


class Own(torch.Tensor):
    """A subclass with nothing of its own."""


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count).remainder(5).view(shape).to(dtype)


def values() -> dict[str, Any]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ones(8, 8, dtype=BF16)
    square = tensor(8, 8)
    return {
        "None": None, "number": 5, "text": "x", "list": [[1.0]], "square": square, "scalar": tensor(),
        "vector": tensor(8), "odd": tensor(8, 6), "batch": tensor(2, 8, 8), "batches": tensor(2, 2, 8, 8),
        "no rows": tensor(0, 8), "no columns": tensor(8, 0), "integers": tensor(8, 8, dtype=torch.int64),
        "bool": tensor(8, 8, dtype=torch.bool), "complex": tensor(8, 8, dtype=torch.complex64),
        "fp64": tensor(8, 8, dtype=torch.float64), "fp32": tensor(8, 8, dtype=torch.float32),
        "int8": tensor(8, 8, dtype=torch.int8), "fp8": tensor(16, 16, dtype=torch.float8_e4m3fn),
        "grad": tensor(8, 8).requires_grad_(), "meta": square.to("meta"), "sparse": square.to_sparse(),
        "subclass": square.as_subclass(Own), "NaN": square * float("nan"), "negated": torch._neg_view(square),
        "expanded": tensor(8).expand(8, 8), "strided": tensor(8, 16)[:, ::2], "transposed": square.t(),
        "parameter": torch.nn.Parameter(square), "fake": fake,
    }  # fmt: skip


VALUES = values()


@pytest.fixture(autouse=True)
def _serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels for every problem of CPU tensors."""
    serve_recorded(monkeypatch, Kernel())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(call: Callable[[], Any]) -> object:
    try:
        result = call()
    except (RuntimeError, TypeError, IndexError, ValueError, TunegemmError) as error:
        return type(error)
    return tuple(result.shape), result.dtype


def agree(name: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
    mine, torchs = outcome(ours), outcome(theirs)
    assert mine == torchs, name


@pytest.mark.parametrize("first", VALUES)
def test_two_operands_of_any_kind_are_what_torch_makes_of_them(first):
    a = VALUES[first]
    for second, b in VALUES.items():
        name = f"{first}, {second}"
        agree(name, partial(tunegemm.matmul, a, b), partial(torch.matmul, a, b))
        agree(name, partial(tunegemm.linear, a, b), partial(functional.linear, a, b))
        agree(name, partial(tunegemm.bmm, a, b), partial(torch.bmm, a, b))


SCALARS = [(1, 1), (0, 1), (2, 0.5), (None, 1), ("2", 1), (float("nan"), 1), (1, [])]


@pytest.mark.parametrize("scalars", SCALARS)
def test_three_operands_of_any_kind_are_what_torch_makes_of_them(scalars):
    more = dict(zip(("beta", "alpha"), scalars, strict=True))
    for name in VALUES.keys() - {
        "meta",
        "sparse",
        "fake",
    }:  # torch disagrees with itself
        for place in range(3):
            for ours, theirs, usual in (
                (tunegemm.addmm, torch.addmm, "square"),
                (tunegemm.baddbmm, torch.baddbmm, "batch"),
            ):
                given = [VALUES[name if i == place else usual] for i in range(3)]
                where = f"{ours.__name__}, {name} at {place}, {more}"
                agree(where, partial(ours, *given, **more), partial(theirs, *given, **more))


def test_calls_that_torch_has_not_refuse_by_name():
    """A result, or an error on purpose; never one of Python's own, such as AttributeError."""
    choose, names = random.Random(7).choice, [*VALUES, *["square"] * 20]
    for _ in range(600):
        a, b, c, d = (VALUES[choose(names)] for _ in range(4))
        out_dtype = choose([None, None, torch.float32, torch.int32, "float32", 5, []])
        activation = choose([None, "relu", "bias_n", "swiglu", "", 5, []])
        epilogue = choose(["relu", "bias_n", "beta_c", 5, [], "custom:x@0123456789abcdef"])
        given = choose([(), (c,), (c, d), (2.0, c), ("2", c), 5, "x", [c]])
        for call in (
            partial(tunegemm.linear, a, b, c, activation, d),
            partial(tunegemm.matmul, a, b, bias=c, activation=activation, out_dtype=out_dtype),
            partial(tunegemm.matmul, a, b, epilogue=epilogue, operands=given, out_dtype=out_dtype),
            partial(tunegemm.gated_linear, a, b, c, activation),
            partial(tunegemm.scaled_mm, a, b, c, d, out_dtype=out_dtype),
            partial(tunegemm.interleave, a, b),
        ):
            outcome(call)


def test_values_of_public_classes():
    assert tunegemm.Problem(np.int64(64), 64, 64) == tunegemm.Problem(64, 64, 64)
    assert type(tunegemm.Problem(np.int64(64), 64, 64).m) is int
    assert Policy(max_sms=np.int64(5)) == Policy(max_sms=5)
    steps = tunegemm.Epilogue.parse("relu")
    assert tunegemm.Problem(8, 8, 8, epilogue=steps).epilogue == "relu"  # type: ignore[arg-type]
    for call, said in (
        (lambda: tunegemm.Problem(8.0, 8, 8), "m=8.0 "),
        (lambda: tunegemm.Problem(10**5000, 8, 8), "over 19 digits"),
        (lambda: tunegemm.Problem(8, 8, 8, alignment="16"), "alignment='16'"),
        (lambda: tunegemm.Problem(8, 8, 8, epilogue=None), "epilogue=None"),
        (lambda: tunegemm.Problem(8, 8, 8, in_dtype=[]), r"in_dtype=\[\]"),
        (lambda: tunegemm.Problem.parse("8x8x8", alignment="16"), "alignment '16'"),
        (lambda: tunegemm.Problem.from_tensors(1, 2), "operand 1 is not a tensor"),
        (lambda: tunegemm.Epilogue.parse(None), "epilogue None is not a text"),
        (lambda: tunegemm.Candidate.make("cute_sm90", None), "None"),
        (lambda: tunegemm.Operation("8x8x8", None), "problem '8x8x8' is not a tunegemm.Problem"),
        (lambda: tunegemm.record(5), "path 5 is not a file name"),
        (lambda: tunegemm.record("a\0b"), "is not a file name"),
        (lambda: tunegemm.policy([]), r"policy \[\] is not known"),
        (lambda: tunegemm.policy(max_sms=float("nan")), "max_sms nan"),
        (
            lambda: tunegemm.explain(torch.ones(2, 2)),
            r"has one operand of the product; give both, explain\(a, b\)",
        ),
        (lambda: tunegemm.explain(None), "problem None: give a Problem"),
        (lambda: tunegemm.explain(1, 2), "takes two tensors, or a Problem or extents"),
        (lambda: tunegemm.Problem(8, 8, 8, np.float32(1.5)), "batch="),
        (lambda: tunegemm.Problem.parse("8x8x8", out_dtype=np.ones(2)), "is not known; use one of"),
        (lambda: tunegemm.Candidate.from_json(None), "not a stored candidate: null"),
        (lambda: tunegemm.policy(np.ones(2)), "is not known; use one of fastest"),
        (lambda: tunegemm.tune("8x8x8", device=5), "device 5: give a tunegemm.Device, or text"),
        (lambda: tunegemm.tune("8x8x8", device="model:h200", effort=np.ones(2)), "effort .* is not known"),
        (lambda: tunegemm.tune("8x8x8", device="model:h200", database="t.sqlite"), "give a Database"),
        (lambda: tunegemm.tune("8x8x8", device="cuda:" + "9" * 5000), "use cuda:N with a number"),
        (lambda: tunegemm.tune("8x8x8", device="cuda:\N{SUPERSCRIPT TWO}"), "use cuda:N with a number"),
        (lambda: parse_policy("fastest,max_sms=\N{SUPERSCRIPT TWO}"), "is not max_sms=NUMBER"),
        (lambda: parse_policy("fastest,max_sms=" + "9" * 5000), "is not max_sms=NUMBER"),
    ):
        with pytest.raises(TunegemmError, match=said):
            call()


@pytest.mark.parametrize(
    "place", [":memory:", "file:t.sqlite?mode=memory", "sqlite://", "sqlite:///:memory:"]
)
def test_a_database_in_memory_is_refused(place, tmp_path, monkeypatch):
    """And is no file of that name."""
    monkeypatch.chdir(tmp_path)
    for read_only in (False, True):
        with pytest.raises(TunegemmError, match="give a path"):
            tunegemm.Database.open(place, read_only=read_only)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", [5, b"x", [], "a\0b", "\ud800"])
def test_a_place_that_no_file_has(place):
    for call in (tunegemm.Database.open, partial(tunegemm.Database.open, read_only=True), tunegemm.record):
        with pytest.raises(TunegemmError, match=r"give (the full path|one such as)"):
            call(place)


def test_arguments_of_a_database_of_other_types(tmp_path):
    problem, fingerprint = tunegemm.Problem(8, 8, 8), find_device("model:h200").fingerprint
    with tunegemm.Database.open(tmp_path / "t.sqlite", create=True) as database:
        for call, said in (
            (lambda: database.best(5, fingerprint), "problem 5: its type is int; give a Problem"),
            (lambda: database.history("8x8x8"), "give a Problem"),
            (lambda: database.failures(problem, None), "fingerprint null: .* give a Fingerprint"),
            (lambda: database.publish(problem, None, None), "give a .*Measurement"),
            (lambda: database.confirm(problem, None, 1.5), "give a Measurement"),
        ):
            with pytest.raises(TunegemmError, match=said):
                call()


def test_a_database_takes_only_what_it_can_give_back(tmp_path):
    """What `publish` lets in, an export writes and an import takes."""
    problem, device = tunegemm.Problem(64, 64, 64), replace(find_device("model:h200"), spec="cuda:0")
    tile, launch = {"tile_m": 128, "tile_n": 256, "epi_n": 32}, {"raster_order": "along_m"}
    kernel = completed(tunegemm.Candidate.make("cute_sm90", tile, launch))
    good = Measurement(kernel, (5.0,) * 4, (6.0,) * 4, 0.0, 0.0)
    with tunegemm.Database.open(tmp_path / "t.sqlite", create=True) as database:
        for outcome, options, said in (
            (replace(good, samples_us=(1e-9,) * 4), {}, "positive times, from 0.001"),
            (replace(good, samples_us=(1e308,) * 4), {}, "positive times"),
            (replace(good, samples_us=("a",) * 4), {}, "positive times"),
            (replace(good, noise=None), {}, "not finite"),
            (replace(good, telemetry=[1]), {}, "telemetry a list: .* give a Mapping"),
            (replace(good, candidate=None), {}, "give a Candidate"),
            (good, {"method": "zz"}, "method 'zz' is not known; use one of screen"),
            (good, {"method": []}, "method a list is not known"),
            (good, {"label": 5}, "label 5: .* give a str"),
            (good, {"resources": 5}, "give a Resources"),
            (Failure(kernel, "lost", "x"), {}, "stage 'lost': use one of"),
        ):
            with pytest.raises(TunegemmError, match=said):
                database.publish(problem, device, outcome, **options)
        database.publish(
            problem,
            device,
            replace(good, telemetry={"x": "a\n\ud800", 1: object()}),
            label="\ud800\x1b" * 200,
        )
        database.publish(problem, device, Failure(kernel, "crash", "a\0b\n\ud800"))
        skipped = []
        rows = [row for row in sound(dump(database), skipped) if row["kind"] != "choice"]
        assert len(rows) == 2, skipped
        assert skipped == []
    for values in ({"a": [1]}, {"a": 1.5}, {"a": None}, {5: 5}):
        with pytest.raises(TunegemmError, match="a parameter is a whole number, a text or a boolean"):
            tunegemm.Candidate.make("cute_sm90", values)
    with pytest.raises(TunegemmError, match="not a stored candidate"):
        tunegemm.Candidate.from_json("[" * 100_000)


def test_a_message_is_one_line_whatever_it_names():
    for value in ("x" * 10_000, torch.ones(2, 2), "two\nlines"):
        for call in (tunegemm.Problem.parse, tunegemm.Epilogue.parse, tunegemm.policy, tunegemm.tune):
            with pytest.raises(TunegemmError) as caught:
                call(value)
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_meta_tensors_are_torchs_under_every_dispatcher(monkeypatch):
    """What is remembered of them must not ask a device that autocast does not know."""
    serve_with(monkeypatch, Dispatcher())
    meta = VALUES["meta"]
    for _ in range(2):
        assert tunegemm.matmul(meta, meta).shape == (8, 8)


def test_matmul_shows_its_keywords() -> None:
    """To `help()` and to editors, though the function itself takes them as a dictionary."""
    parameters = inspect.signature(tunegemm.matmul).parameters
    assert list(parameters) == [
        "a", "b", "out", "bias", "activation", "residual", "epilogue", "operands", "out_dtype",
    ]  # fmt: skip
    names = list(parameters)[2:]
    assert {parameters[name].kind for name in names} == {inspect.Parameter.KEYWORD_ONLY}
    assert names[1:] == list(Extras.__annotations__), "as type checkers see them"
    assert [parameters[name].default for name in names] == [None] * 5 + [(), None]
    assert parameters["activation"].annotation == "Activation | None"
    assert "activation: 'Activation | None' = None" in pydoc.plain(pydoc.render_doc(tunegemm.matmul))


@pytest.mark.parametrize(("name", "near"), [("activaton", "activation"), ("biass", "bias"), ("outs", "out")])
def test_a_misspelt_keyword_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ArgumentError, match=rf"matmul\(\) has no argument '{name}'; did you mean {near}\?"):
        tunegemm.matmul(*operands(), **{name: None})


def test_what_is_no_tensor_and_not_traced_is_the_calls_own_error() -> None:
    with pytest.raises(TypeError, match="must be Tensor"):
        tunegemm.linear(tensor(8, 8), "x")  # type: ignore[arg-type]


def test_a_fused_gradient_minds_the_bias():
    """Of another dtype than the product: torch's error, not a sum of the two."""
    x, weight = tensor(8, 8).requires_grad_(), tensor(8, 8)
    for bias in (tensor(8, dtype=torch.float64), tensor(8, 8, dtype=torch.int8)):
        given = x, weight, bias
        agree(f"{bias.dtype}", partial(tunegemm.linear, *given), partial(functional.linear, *given))
