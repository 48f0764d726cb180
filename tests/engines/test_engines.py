"""What serves in users' engines, without the engines: tests/engines has them."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
import types
from collections import Counter
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code

from tests.support.fusing import FP8, Recorded, close, serve_recorded
from tests.support.processes import ROOT, environment
from tests.support.serving import BF16, calls_of, operands
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import api, extension
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import Prepared
from tunegemm.dispatch.planning import Planner
from tunegemm.engines import common
from tunegemm.torch import blocks

DOORS = {"vllm.general_plugins": "vllm", "sglang.srt.plugins": "sglang"}
BIAS = torch.linspace(-2, 2, 48).to(BF16)


@pytest.fixture
def serve(monkeypatch, kernel):
    """Products of CPU tensors go by records of the given problems, or of every one."""

    def make(*problems: Problem) -> Dispatcher:
        prepare = lambda record, _: Prepared(kernel.of(record.problem), record=record)  # noqa: E731
        serve_recorded(monkeypatch, kernel, *problems, prepare=prepare)
        return api.dispatcher

    return make


@pytest.fixture
def own(monkeypatch):
    """An engine's own functions; the calls that they get."""
    calls: list[str] = []

    def linear(x, weight, bias):
        calls.append("linear")
        return torch.nn.functional.linear(x, weight, bias)

    def scaled_mm(a, b, scale_a, scale_b, bias, out_dtype):
        calls.append("scaled_mm")
        value = (a.float() * scale_a) @ (b.float() * scale_b.reshape(1, -1))
        return (value if bias is None else value + bias).to(out_dtype)

    monkeypatch.setitem(common.own, "linear", linear)
    monkeypatch.setitem(common.own, "scaled_mm", scaled_mm)
    yield calls
    torch._dynamo.reset()


class Weight(torch.nn.Parameter):
    """As vLLM's weights are: torch's functions mean what they always mean."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_whose_weight_is_an_engines_own_is_served(serve, kernel, compiled):
    serve()
    (a, b), call = operands(), common.linear
    run = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
    assert torch.equal(run(a, Weight(b.t(), requires_grad=False), None), a @ b)
    assert len(kernel.calls) == 1


def test_the_doors_lead_to_functions() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, module in DOORS.items():
        place, _, name = table[group]["tunegemm"].partition(":")
        assert place == f"tunegemm.engines.{module}"
        assert callable(getattr(import_module(place), name))


@pytest.mark.slow
def test_a_door_is_light_and_stays_shut_without_its_engine() -> None:
    """What an engine runs in each of its processes imports no engine, no compiler and no CUDA context."""
    code = f"""
import importlib, sys
doors = [importlib.import_module("tunegemm.engines." + name) for name in {[*DOORS.values()]}]
loaded = {{name.partition(".")[0] for name in sys.modules}}
assert not loaded & {{"vllm", "sglang", "transformers", "cutlass", "triton", "optuna", "sqlalchemy"}}, loaded
import torch
for door in doors:
    door.register(); door.register()
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("bias", [None, BIAS])
def test_linear_plans_by_the_rows_that_there_are(serve, kernel, own, bias) -> None:
    serve()
    weight = operands()[1].t()
    counter = CompileCounter()
    compiled = torch.compile(
        lambda x: torch.ops.tunegemm.engine_linear(x, weight, bias, "linear") + 1,
        backend=counter, fullgraph=True, dynamic=True,
    )  # fmt: skip
    with torch.inference_mode():
        for rows in (2, 7, 32):
            x = operands(rows)[0]
            assert torch.equal(compiled(x), torch.nn.functional.linear(x, weight, bias) + 1)
    assert [call[0] for call in kernel.calls] == [(2, 64), (7, 64), (32, 64)]
    assert counter.frame_count == 1 and own == []


def test_linear_falls_back_to_the_engines_own(serve, kernel, own) -> None:
    serve(Problem(32, 48, 64))
    weight, x = operands()[1].t(), operands(7)[0]
    served = torch.ops.tunegemm.engine_linear(operands(32)[0], weight, None, "linear")
    assert len(kernel.calls) == 1 and own == [] and served.shape == (32, 48)
    with pytest.warns(UserWarning):
        result = torch.ops.tunegemm.engine_linear(x.view(1, 7, 64), weight, BIAS, "linear")
    assert own == ["linear"] and len(kernel.calls) == 1
    assert torch.equal(result, torch.nn.functional.linear(x, weight, BIAS)[None])


def test_a_bias_is_added_behind_a_product_alone(serve, kernel, own) -> None:
    """A row's bits may not depend on which of its numbers of rows has a kernel with a bias: none has."""
    serve(Problem(32, 48, 64))
    x, weight = operands()[0], operands()[1].t()
    result = torch.ops.tunegemm.engine_linear(x, weight, BIAS, "linear")
    assert len(kernel.calls) == 1 and own == []
    assert torch.equal(result, torch.nn.functional.linear(x, weight) + BIAS)


def scaled(rows: int, *, by_row: bool) -> tuple[torch.Tensor, ...]:
    a, b = operands(rows)
    if by_row:
        scales = torch.linspace(0.5, 2, rows)[:, None], torch.linspace(0.25, 1, 48)[:, None]
    else:
        scales = torch.tensor([0.5]), torch.tensor(0.25)
    return a.to(FP8), b.t().to(FP8).t(), *scales


@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("by_row", [True, False])
def test_scaled_products_are_served(serve, kernel, own, by_row, bias) -> None:
    serve()
    compiled = torch.compile(
        lambda *four: torch.ops.tunegemm.engine_scaled_mm(*four, bias, BF16, "scaled_mm"),
        backend="aot_eager", fullgraph=True, dynamic=True,
    )  # fmt: skip
    for rows in (16, 32):
        four = scaled(rows, by_row=by_row)
        result = compiled(*four)
        expected = common.own["scaled_mm"](*four, bias, BF16)
        close(result, expected, 4e-3)
    assert len(kernel.calls) == 2 and own == ["scaled_mm"] * 2  # which the test called


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
@pytest.mark.parametrize("bias", [None, BIAS])
def test_compiled_code_calls_functions_and_not_operators(serve, kernel, own, bias) -> None:
    """With the number of rows open: one graph, whose code goes not through torch's dispatcher and back."""
    serve(
        Problem(32, 48, 64),
        Problem(32, 48, 64, epilogue="bias_n"),
        *(
            Problem(32, 48, 64, in_dtype="fp8_e4m3", out_dtype="bf16", epilogue=f"scale_rowwise{more}")
            for more in ("", "+bias_n")
        ),
    )
    common.lower()
    common.lower()
    weight = operands()[1].t()
    _, b, _, of_columns = scaled(32, by_row=True)

    def both(x: torch.Tensor, a: torch.Tensor, of_rows: torch.Tensor) -> torch.Tensor:
        plain = torch.ops.tunegemm.engine_linear(x[None], weight, bias, "linear")[0]
        return plain + torch.ops.tunegemm.engine_scaled_mm(a, b, of_rows, of_columns, bias, BF16, "scaled_mm")

    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for rows in (7, 32):
            x, (a, _, of_rows, _) = operands(rows)[0], scaled(rows, by_row=True)
            result, code = run_and_get_code(compiled, x, a, of_rows)
            assert rows != 7 or "extern_kernels.tunegemm_engine_linear(" in code[0]
            assert rows != 7 or "extern_kernels.tunegemm_engine_scaled_mm(" in code[0]
            calls = len(kernel.calls), len(own)
            close(result, both(x, a, of_rows), 4e-3)
            assert calls == ((0, 2) if rows == 7 else (2, 4))


def test_rows_decide_who_multiplies_with_block_scales(monkeypatch) -> None:
    """In one graph, whose code calls the function; the engine's own may take 16-bit rows."""
    seen: list[tuple[Any, ...]] = []

    def product(a, b, scale_a, scale_b, out_dtype):
        seen.append(("ours", *a.shape, a.dtype))
        return None if a.shape[0] == 3 else blocks.emulated(a, b, scale_a, scale_b, None, out_dtype)

    def theirs(a, weight, scale_a, scale):
        seen.append(("own", *a.shape, a.dtype))
        if scale.shape != (2, 3):
            return torch.zeros(a.shape[0], 200, dtype=BF16)
        left, scales = quantised(a) if a.dtype == BF16 else (a, scale_a)
        return blocks.emulated(left, weight.t(), scales, scale.t(), None, BF16)

    def quantised(x):
        return x.to(FP8), torch.full((x.shape[0], 3), 0.5)

    monkeypatch.setattr(blocks, "product", product)
    for name in ("of fp8", "of bf16"):
        monkeypatch.setitem(common.own, name, theirs)
    monkeypatch.setitem(common.quantisers, "of bf16", quantised)
    weight, scale = torch.randint(-2, 3, (200, 300)).to(FP8), torch.rand(2, 3)
    common.lower()
    for name, dtype in (("of fp8", FP8), ("of bf16", BF16)):
        torch._dynamo.reset()

        def multiply(a, scale_a, weight=weight, name=name):
            return torch.ops.tunegemm.engine_block_scaled_mm(a, weight, scale_a, scale, BF16, name)

        compiled = torch.compile(multiply, fullgraph=True, dynamic=True)
        with torch.inference_mode():
            for rows in (64, 3, 127, 128):
                a = torch.randint(-2, 3, (rows, 300)).to(dtype)
                scale_a = torch.rand(rows, 3) if dtype is FP8 else torch.empty(1)
                seen.clear()
                result, code = run_and_get_code(compiled, a, scale_a)
                assert rows != 64 or "extern_kernels.tunegemm_engine_block_scaled_mm(" in code[0]
                calls = [("ours", rows, 300, FP8)] * (rows < 128) + [("own", rows, 300, dtype)] * (
                    rows in (3, 128)
                )
                assert seen == calls
                assert torch.equal(result, theirs(a, weight, scale_a, scale))
    seen.clear()
    a, ones = torch.zeros(2, 300).to(FP8), torch.ones(2, 3)
    for other in (torch.ones(2, 3), torch.ones(4, 3)):  # the second is of other blocks
        torch.ops.tunegemm.engine_block_scaled_mm(a, weight, ones, other, BF16, "of fp8")
    assert [by for by, *_ in seen] == ["ours", "own"]


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
def test_a_known_fall_back_enters_few_functions(serve, kernel, own) -> None:
    """By how much an engine's own fp8 product costs more than without the plug-in."""
    serve(Problem(32, 48, 64))
    common.lower()
    four = scaled(16, by_row=True)
    functions = torch._inductor.select_algorithm.extern_kernels

    def call(**site: str) -> None:
        functions.tunegemm_engine_scaled_mm(*four, bias=None, out_dtype=BF16, name="scaled_mm", **site)

    with torch.inference_mode():
        for site, most in ({}, 8), ({"site": "of tests"}, 2):
            for _ in range(2):
                call(**site)
            python, c = calls_of(lambda site=site: call(**site))
            before = python[2 : python.index("tests.engines.test_engines.scaled_mm")]
            assert len(before) <= most and not {"acquire", "stride"} & set(c), before


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
@pytest.mark.parametrize("bias", [None, BIAS])
def test_compiled_code_knows_what_is_the_engines_by_the_number_of_rows(serve, kernel, own, bias) -> None:
    """Until records are looked at again, which may have a kernel; and only what was no accident of a call."""
    dispatcher = serve(*(Problem(32, 48, 64, epilogue=text) for text in ("", "bias_n")))
    common.lower()
    weight = operands()[1].t()
    _, b, _, of_columns = scaled(32, by_row=True)

    @partial(torch.compile, fullgraph=True)
    def compiled(x):
        of_rows = x[:, :1].float() / 4 + 2
        scaled_mm = torch.ops.tunegemm.engine_scaled_mm(
            x.to(FP8), b, of_rows, of_columns, bias, BF16, "scaled_mm"
        )
        return torch.ops.tunegemm.engine_linear(x, weight, bias, "linear"), scaled_mm

    def known() -> dict[int, int]:
        return Counter(key[1] for each in dispatcher.planner.state.launches.values() for key in each)

    with torch.inference_mode():
        for rows, served in ((7, 0), (32, 1), (7, 0), (9, 0)):
            own.clear()
            kernel.calls.clear()
            x = operands(rows)[0]
            torch._dynamo.mark_dynamic(x, 0)
            for result, other in zip(compiled(x), compiled(x), strict=True):
                assert torch.equal(result, other)
            assert len(kernel.calls) == 2 * served and own.count("linear") == 2 * (not served)
            assert own.count("scaled_mm") == 2
        assert known() == {7: 2, 9: 2, 32: 1}
        odd = torch.zeros(11 * 64 + 1, dtype=BF16)[1:].view(11, 64)  # no kernel reads at such an address
        torch._inductor.select_algorithm.extern_kernels.tunegemm_engine_linear(
            odd, weight, bias=bias, name="linear", site="a site"
        )
        assert known()[11] == 0
        dispatcher.planner.quick.until = 0.0
        compiled(x)
        assert dispatcher.planner.quick.until > 0
    dispatcher.planner.state.forget_checks()
    assert not known()


@pytest.mark.parametrize("rows", [1, 16])
def test_scales_of_two_kinds_are_the_engines_whatever_the_rows(serve, kernel, own, rows) -> None:
    """One scale for all rows, one for each column: of a single row it looks like scales of rows."""
    serve()
    a, b, _, scale_b = scaled(rows, by_row=True)
    torch.ops.tunegemm.engine_scaled_mm(a, b, torch.tensor([0.5]), scale_b, None, BF16, "scaled_mm")
    assert own == ["scaled_mm"] and not kernel.calls
    torch.ops.tunegemm.engine_scaled_mm(a, b, torch.ones(rows, 1), scale_b[:1], None, BF16, "scaled_mm")
    assert len(own) == (2 if rows > 1 else 1)


def test_a_switch_turns_an_engine_off(monkeypatch, caplog) -> None:
    parts = []
    log = logging.getLogger("tests.engines")

    def install() -> list[str]:
        parts.clear()
        common.install("vllm", log, {"layers": lambda: parts.append("layers")})
        return [*parts]

    assert install() == ["layers"]
    monkeypatch.setenv("TUNEGEMM_SGLANG", "0")
    assert install() == ["layers"]
    monkeypatch.setenv("TUNEGEMM_VLLM", "0")
    assert install() == []
    monkeypatch.setenv("TUNEGEMM_VLLM", "no")
    assert install() == ["layers"]
    assert caplog.messages == ["TUNEGEMM_VLLM='no' is not known and has no effect; use 0 or 1 or unset it"]


def test_what_an_engine_does_not_have_costs_one_part_and_one_line(monkeypatch, caplog) -> None:
    engine = types.ModuleType("engine_of_tests")
    engine.gemm = lambda layer, x, weight: None
    monkeypatch.setitem(sys.modules, "engine_of_tests", engine)
    done = []

    def crash() -> None:
        raise RuntimeError("two\nlines")

    common.install(
        "vllm",
        logging.getLogger("tests.engines"),
        {
            "gone": lambda: common.replace("engine_of_tests.gone", (), lambda own: own),
            "other": lambda: common.replace("engine_of_tests.gemm", ("layer", "x", "bias"), lambda own: own),
            "absent": lambda: common.replace("engine_that_is_not.there.gemm", (), lambda own: own),
            "broken": crash,
            "good": lambda: done.append(True),
        },
    )
    assert done == [True]
    (line,) = caplog.messages
    assert "\n" not in line and line.startswith("this version of vllm is unknown")
    for part in (
        "gone (there is no engine_of_tests.gone)",
        "other (engine_of_tests.gemm does not take layer, x, bias)",
        "absent (there is no engine_that_is_not.there.gemm)",
        "broken (two)",
    ):
        assert part in line


def test_a_function_is_replaced_once(monkeypatch) -> None:
    engine = types.ModuleType("engine_of_tests")
    engine.gemm = theirs = lambda layer, x: x
    monkeypatch.setitem(sys.modules, "engine_of_tests", engine)
    for _ in range(2):
        common.replace("engine_of_tests.gemm", ("layer",), lambda own: lambda layer, x: own(layer, x) + 1)
    assert engine.gemm(None, 1) == 2 and engine.gemm.tunegemm_own is theirs


def test_ranks_compare_what_they_serve_by(serve) -> None:
    serve(Problem(32, 48, 64))
    mine = extension.fingerprint(anywhere=True)
    assert common.compared(mine) == ""
    for other in ("0123456789abcdef", None):
        line = common.compared(other)
        assert mine in line and "\n" not in line and (other or "none") in line
    serve(Problem(64, 48, 64))
    assert common.compared(mine)


def test_times_of_files_are_a_hosts_own() -> None:
    def planner(time: int) -> Planner:
        known = Recorded(Problem(32, 48, 64))
        known.digest, known.modified = "the same", time
        return Planner(device_type="cpu", read=lambda: known, modified=lambda: time)

    first, second = planner(1), planner(2)
    assert first.fingerprint() != second.fingerprint()
    assert first.fingerprint(anywhere=True) == second.fingerprint(anywhere=True)


class Layer(torch.nn.Module):
    """A layer as engines have them: a weight, and a method that says how it is multiplied."""

    def __init__(self, weight: torch.Tensor, **more: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method = object()
        for name, value in more.items():
            setattr(self, name, value)


class VocabParallelEmbedding(Layer):
    pass


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
def test_the_line_says_what_is_served_and_what_is_not(serve) -> None:
    serve(
        Problem(64, 48, 64),
        Problem(16, 96, 64, in_dtype="fp8_e4m3", out_dtype="bf16", epilogue="scale_rowwise"),
    )
    by_row = Layer(torch.zeros(96, 64).to(FP8).t(), weight_scale=torch.ones(96, 1), orig_dtype=BF16)
    model = torch.nn.Sequential(
        Layer(torch.zeros(48, 64, dtype=BF16)), Layer(torch.zeros(48, 64, dtype=BF16)), by_row,
        Layer(torch.zeros(40, 64, dtype=BF16)), Layer(torch.zeros(8, 8, dtype=torch.int32)),
        VocabParallelEmbedding(torch.zeros(512, 64, dtype=BF16)), torch.nn.LayerNorm(64),
        Layer(torch.zeros(()), w13_weight=torch.nn.Parameter(torch.zeros(4, 96, 32, dtype=BF16))),
        Layer(torch.zeros(256, 128).to(FP8), weight_block_size=[128, 128], tunegemm_in_blocks=True),
        Layer(torch.zeros(384, 128).to(FP8), weight_block_size=[128, 128]),
    )  # fmt: skip
    assert common.served(model, 300) == (
        "kernels for 1 at 1, 2 at 16, 2 at 64, 0 at 256 rows of 7 kinds of weights, by cute_sm90, blocks; at "
        "none of these bf16 40x64, object (8, 8), bf16 96x32 of 4 experts, fp8_e4m3 384x128 in blocks"
    )


@pytest.mark.parametrize("kinds", [common.MOST_NAMED, common.MOST_NAMED + 1])
def test_so_many_weights_without_kernels_are_named(serve, kinds: int) -> None:
    serve(Problem(64, 48, 64))
    lacking = [Layer(torch.zeros(8 * number, 8, dtype=BF16)) for number in range(kinds, 0, -1)]
    line = common.served(torch.nn.Sequential(Layer(torch.zeros(48, 64, dtype=BF16)), *lacking), 64)
    assert line.startswith(f"kernels for 0 at 1, 0 at 16, 1 at 64 rows of {kinds + 1} kinds of weights")
    named = line.partition("at none of these ")[2]
    assert named.count("bf16") == common.MOST_NAMED
    assert named.endswith("x8" if kinds == common.MOST_NAMED else "x8 and 1 more")
