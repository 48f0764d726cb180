"""What a recording counts, by small real programs on the CPU. CUDA graphs are in test_gpu_recording.py."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tunegemm
from tests.support.forks import Forks
from tests.support.processes import environment
from tests.support.serving import serve_with
from tunegemm.describe.problem import Problem
from tunegemm.describe.workload import Product, Workload, demands
from tunegemm.dispatch.forms import Activation
from tunegemm.errors import WorkloadError
from tunegemm.torch import recording as recording_of_torch
from tunegemm.torch.recording import Recording

BF16 = torch.bfloat16


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=BF16)


def one(recording: Recording) -> Product:
    (product,) = recording.products
    return product


def counted(recording: Recording) -> dict[str, int]:
    """Calls by shape and layout."""
    return {f"{p.kind.shape} {p.kind.a_major}{p.kind.b_major}": p.calls for p in recording.products}


class TestOperators:
    @pytest.mark.parametrize(
        ("call", "op", "bias", "batch"),
        [
            (lambda: torch.mm(bf16(8, 16), bf16(16, 24)), "mm", "none", 1),
            (lambda: bf16(8, 16) @ bf16(16, 24), "mm", "none", 1),
            (lambda: torch.mm(bf16(8, 16), bf16(16, 24), out=bf16(8, 24)), "mm", "none", 1),
            (lambda: torch.bmm(bf16(3, 8, 16), bf16(3, 16, 24)), "bmm", "none", 3),
            (lambda: bf16(3, 8, 16) @ bf16(3, 16, 24), "bmm", "none", 3),
            (lambda: torch.addmm(bf16(24), bf16(8, 16), bf16(16, 24)), "addmm", "vector", 1),
            (lambda: torch.addmm(bf16(8, 24), bf16(8, 16), bf16(16, 24)), "addmm", "matrix", 1),
            (lambda: torch.addmm(bf16(8, 24), bf16(8, 16), bf16(16, 24), beta=0), "addmm", "none", 1),
            (lambda: bf16(8, 24).addmm_(bf16(8, 16), bf16(16, 24)), "addmm", "matrix", 1),
            (lambda: torch.baddbmm(bf16(3, 8, 24), bf16(3, 8, 16), bf16(3, 16, 24)), "baddbmm", "matrix", 3),
        ],
    )  # fmt: skip
    def test_each_counts_once(self, call: Callable[[], torch.Tensor], op: str, bias: str, batch: int) -> None:
        with tunegemm.record() as recording:
            call()
            call()
        product = one(recording)
        kind = product.kind
        assert (kind.m, kind.n, kind.k, kind.batch) == (8, 24, 16, batch)
        assert (kind.op, kind.bias, kind.activation) == (op, bias, "none")
        assert (kind.in_dtype, kind.out_dtype) == ("bf16", "bf16")
        assert (kind.a_major, kind.b_major, kind.out_major) == ("k", "n", "n")
        assert (product.calls, product.timed, product.captured, product.replayed) == (2, 2, 0, 0)
        assert product.median_us is not None and product.median_us > 0

    @pytest.mark.parametrize("gradients", [False, True])
    def test_products_of_groups_count_once_as_what_they_look_up(self, gradients: bool) -> None:
        """By torch's operator and ours, with a bias, too; the gradient of weights has groups along k."""
        a = bf16(13, 64).requires_grad_(gradients)
        b, ends = bf16(3, 48, 64).mT, torch.tensor([4, 4, 13], dtype=torch.int32)
        b = b.contiguous() if gradients else b
        b.requires_grad_(gradients)
        with tunegemm.record() as recording:
            tunegemm.grouped_mm(a, b, offs=ends)
            tunegemm.grouped_mm(a, b, offs=ends, bias=bf16(3, 48))
            result = nn.functional.grouped_mm(a, b, offs=ends)
            if gradients:
                result.backward(torch.ones_like(result))
        wanted = Problem.of_groups(13, 48, 64, 3, b_major="n" if gradients else "k")
        found, refused = demands(recording.products)
        assert [(one.problem, one.calls) for one in found if one.problem.n == 48] == [(wanted, 3)]
        if gradients:
            assert [one.problem for one in found if one.problem.n == 64] == [Problem.of_groups(13, 64, 48, 3)]
            (why,) = refused
            assert why.startswith("grouped_mm 64x48x13 groups3: its groups lie along k")
        assert {one.kind.op for one in recording.products} == {"grouped_mm"}

    @pytest.mark.parametrize("activation", ["silu", "gelu"])
    def test_a_layer_of_experts_is_a_gated_product_and_another(self, activation: Activation) -> None:
        x, gate_up, down = bf16(5, 64), bf16(4, 96, 64), bf16(4, 64, 48)
        weights, chosen = torch.rand(5, 4, dtype=BF16).topk(2)
        expected = tunegemm.experts(x, gate_up, down, chosen, weights, activation=activation)
        with tunegemm.record() as recording:
            found = tunegemm.experts(x, gate_up, down, chosen, weights, activation=activation)
        assert torch.equal(found, expected)
        gate = {"silu": "swiglu", "gelu": "geglu"}[activation]
        problems = {one.problem: one.calls for one in demands(recording.products)[0]}
        assert problems == {
            Problem.of_groups(10, 96, 64, 4, gate=gate): 1, Problem.of_groups(10, 64, 48, 4): 1
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("call", "why"),
        [
            (lambda a, b, ends: torch._grouped_mm(a, b[..., :44], offs=ends), "this dtype or layout"),
            (lambda a, b, ends: torch._grouped_mm(a.float(), b.float(), offs=ends), "this dtype or layout"),
            (lambda a, b, ends: torch._grouped_mm(a.expand(3, 13, 64), b), "do not divide a's rows"),
            (lambda a, b, ends: torch._grouped_mm(a, b[:1], offs=ends[:1]), "groups=1: give 2 or more"),
        ],
        ids=["k", "fp32", "batch", "one"],
    )  # fmt: skip
    def test_groups_that_no_kernel_computes_say_why(self, call: Callable[..., object], why: str) -> None:
        ends = torch.tensor([4, 4, 13], dtype=torch.int32)
        with tunegemm.record() as recording:
            call(bf16(13, 64), bf16(3, 48, 64).mT, ends)
        ((refusal,),) = [demands(recording.products)[1]]
        assert why in refusal and one(recording).kind.op == "grouped_mm"

    def test_autocast_counts_what_runs(self) -> None:
        with tunegemm.record() as recording, torch.autocast("cpu", dtype=BF16):
            torch.randn(8, 16) @ torch.randn(16, 24)
        assert one(recording).kind.in_dtype == "bf16"

    def test_alignment_dtype_and_strides(self) -> None:
        with tunegemm.record() as recording:
            torch.mm(bf16(8, 17)[:, 1:], bf16(16, 24))
            torch.mm(torch.randn(8, 16), torch.randn(16, 24))
            torch.mm(bf16(16, 16)[:, ::2], bf16(8, 48)[:, ::2])
        low, full, strided = sorted(recording.products, key=lambda p: (p.kind.m, p.kind.in_dtype))
        assert (low.kind.alignment, full.kind.alignment, full.kind.in_dtype) == (2, 16, "fp32")
        assert (strided.kind.a_major, strided.kind.b_major) == ("", "")

    def test_empty_products_are_none(self) -> None:
        with tunegemm.record() as recording:
            torch.mm(bf16(0, 16), bf16(16, 24))
        assert recording.products == ()


class TestOurCalls:
    """Calls of ours are recorded as what they ask for, not as the functions of torch that compute them."""

    @pytest.fixture(autouse=True)
    def served(self, serve, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
        serve_with(monkeypatch, serve())

    def test_all_steps_are_one_product(self) -> None:
        x, weight, residual = bf16(8, 16), bf16(24, 16), bf16(8, 24)
        with tunegemm.record() as recording:
            for _ in range(3):
                result = tunegemm.linear(x, weight, bf16(24), "gelu", residual)
        product = one(recording)
        assert (product.kind.op, product.kind.epilogue) == ("linear", "bias_n+gelu+residual")
        assert (product.calls, product.timed, product.kind.bias) == (3, 3, "vector")
        assert result.shape == (8, 24)

    def test_under_autocast(self) -> None:
        x, weight = torch.randn(8, 16), torch.randn(24, 16)
        with tunegemm.record() as recording, torch.autocast("cpu", dtype=BF16):
            tunegemm.linear(x, weight, torch.randn(24), "relu")
        kind = one(recording).kind
        assert (kind.epilogue, kind.in_dtype, kind.out_dtype) == ("bias_n+relu", "bf16", "bf16")

    def test_gradients(self) -> None:
        x, weight = bf16(8, 16).requires_grad_(), bf16(24, 16).requires_grad_()
        with tunegemm.record() as recording:
            tunegemm.linear(x, weight, bf16(24)).sum().backward()
        kinds = {(product.kind.shape, product.kind.epilogue): product.calls for product in recording.products}
        assert kinds == {("8x24x16", "bias_n"): 1, ("8x16x24", ""): 1, ("24x16x8", ""): 1}

    def test_what_no_kernel_computes_counts_as_torchs_functions(self) -> None:
        with tunegemm.record() as recording, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tunegemm.linear(torch.randn(8, 16), torch.randn(24, 16), torch.randn(24), "relu")
        product = one(recording)
        assert (product.kind.op, product.kind.in_dtype) == ("addmm", "fp32")
        assert "fp32 operands have kernels where tf32 is allowed" in product.kind.refusal

    def test_a_call_that_fails_is_none(self) -> None:
        with tunegemm.record() as recording, pytest.raises(RuntimeError):
            tunegemm.linear(bf16(8, 16), bf16(24, 17), bf16(24), "relu")
        assert recording.products == ()


class TestTorchsAlone:
    """What nothing that is tuned is ever called for says why."""

    @pytest.mark.parametrize(
        ("call", "why"),
        [
            (lambda: bf16(8, 24).addmm_(bf16(8, 16), bf16(16, 24)), "in place"),
            (lambda: torch._addmm_activation(bf16(24), bf16(8, 16), bf16(16, 24)), "activation"),
            (lambda: torch.addmm(bf16(8, 1), bf16(8, 16), bf16(16, 24)), "broadcasts"),
            (
                lambda: torch.addmm(bf16(24, 8).t(), bf16(8, 16), bf16(16, 24)),
                "no lines of 16 bytes as D has",
            ),
            (lambda: torch.mm(torch.ones(8, 16), torch.ones(16, 24)), "where tf32 is allowed"),
            (lambda: torch.mm(bf16(8, 32)[:, ::2], bf16(16, 24)), "no mode is contiguous"),
        ],
    )
    def test_it_says_why(self, call: Callable[[], torch.Tensor], why: str) -> None:
        with tunegemm.record() as recording:
            call()
        assert why in one(recording).kind.refusal
        found, (line,) = demands(recording.products)
        assert found == [] and why in line


def test_products_of_fp32_are_other_ones_where_tf32_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal calls are described once: those of 16 bits whatever is allowed, those of fp32 for each."""
    allowed = [False]
    monkeypatch.setattr(recording_of_torch, "tf32_allowed", lambda: allowed[0])
    described: list[torch.dtype] = []
    kind = recording_of_torch.kind_of

    def seen(asked: Any, results: Any, a: torch.Tensor, *others: Any) -> Any:
        described.append(a.dtype)
        return kind(asked, results, a, *others)

    monkeypatch.setattr(recording_of_torch, "kind_of", seen)
    with tunegemm.record():
        for allowed[0] in (False, True, False):
            for dtype in (torch.float32, BF16):
                torch.mm(torch.ones(24, 72, dtype=dtype), torch.ones(72, 136, dtype=dtype))
    assert described == [torch.float32, BF16, torch.float32]


class TestCompiled:
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_forward_and_backward(self, backend: str) -> None:
        """Compiled before or inside the recording, code runs compiled, and what it calls is counted."""
        torch.compiler.reset()

        def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():  # what a fall-back to eager code would compute
                return (weight.t() @ x.t()).sum()
            return torch.relu(x @ weight).square().sum()

        compiled = torch.compile(loss, backend=backend)
        x, weight = torch.randn(40, 64, requires_grad=True), torch.randn(64, 48, requires_grad=True)
        with tunegemm.record() as recording:
            for _ in range(3):
                compiled(x, weight).backward()
        assert counted(recording) == {"40x48x64 kn": 3, "40x64x48 kk": 3, "64x48x40 mn": 3}
        compiled(x, weight)
        with tunegemm.record() as again:
            compiled(x, weight)
        assert counted(again) == {"40x48x64 kn": 1}


class TestScope:
    def test_nothing_is_wrapped_outside(self) -> None:
        a, b = bf16(8, 16), bf16(16, 24)
        with tunegemm.record() as recording:
            torch.mm(a, b)
        torch.mm(a, b)
        assert one(recording).calls == 1
        kernel = torch.library.get_kernel("aten::mm", "CPU")
        assert torch.equal(kernel.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), a, b), a @ b)

    def test_nested(self) -> None:
        a, b = bf16(8, 16), bf16(16, 24)
        with tunegemm.record() as outer:
            torch.mm(a, b)
            with tunegemm.record() as inner:
                torch.mm(a, b)
            torch.mm(a, b)
        assert (one(outer).calls, one(inner).calls) == (3, 1)
        assert one(inner).timed == 1

    def test_under_other_modes(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as flops, tunegemm.record() as recording:
            torch.mm(bf16(8, 16), bf16(16, 24))
        assert flops.get_total_flops() == 2 * 8 * 24 * 16
        assert one(recording).calls == 1
        with tunegemm.record() as recording, torch.inference_mode():
            torch.func.vmap(torch.mm)(bf16(3, 8, 16), bf16(3, 16, 24))
        assert one(recording).kind.op == "bmm"

    def test_fake_tensors_compute_nothing(self) -> None:
        from torch._subclasses import FakeTensorMode

        with tunegemm.record() as recording, FakeTensorMode():
            torch.mm(bf16(8, 16), bf16(16, 24))
        assert recording.products == ()

    def test_all_threads(self) -> None:
        a, b = bf16(8, 16), bf16(16, 24)

        with tunegemm.record() as recording, ThreadPoolExecutor(4) as threads:
            for _ in range(200):
                threads.submit(torch.mm, a, b)
        assert one(recording).calls == 200
        assert one(recording).timed < 200, "later calls are not timed"


class TestFile:
    def test_a_forked_child_leaves_the_file_alone(self, forks: Forks, tmp_path: Path) -> None:
        path = tmp_path / "shapes.json"
        code = (
            "import os, sys, torch, tunegemm\n"
            "with tunegemm.record('shapes.json'):\n"
            "    torch.mm(torch.ones(8, 16), torch.ones(16, 24))\n"
            "    if not os.fork():\n"
            "        torch.mm(torch.ones(2, 2), torch.ones(2, 2)); sys.exit()\n"
            "    os.wait()\n"
            "    assert not os.path.exists('shapes.json')\n"
        )
        run = forks.run(code, env=environment(), cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert [p["m"] for p in json.loads(path.read_text())["products"]] == [8]

    def test_after_an_exception(self, tmp_path: Path) -> None:
        path = tmp_path / "shapes.json"
        with pytest.raises(ZeroDivisionError), tunegemm.record(path):
            torch.mm(bf16(8, 16), bf16(16, 24))
            raise ZeroDivisionError
        workload, refused = Workload.from_document(json.loads(path.read_text()), str(path))
        assert refused == [] and [p.calls for p in workload.products] == [1]
        assert workload.torch == torch.__version__
        assert list(tmp_path.iterdir()) == [path]

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with (
            pytest.raises(WorkloadError, match="folder does not exist"),
            tunegemm.record(tmp_path / "no" / "x.json"),
        ):
            pass
        with pytest.raises(WorkloadError, match="Is a directory"), tunegemm.record(tmp_path):
            pytest.fail("it is known before the program runs")
        with tunegemm.record() as recording:  # nothing was left installed
            torch.mm(bf16(8, 16), bf16(16, 24))
        assert one(recording).calls == 1
