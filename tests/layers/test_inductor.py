"""The pass in what Inductor compiles while `enable` is on."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn import functional

import tunegemm
from tests.support.forks import Forks
from tests.support.fusing import close
from tests.support.gates import Kernels
from tests.support.layers import MLP, Layer, Own, given, made
from tests.support.processes import environment
from tests.support.serving import deterministic
from tunegemm.dispatch import extension
from tunegemm.layers import graph_pass
from tunegemm.layers.graph_pass import Fusion
from tunegemm.layers.patterns import Match

pytestmark = pytest.mark.usefixtures("planner")


def test_a_gate_is_one_call_while_it_is_on(kernels: Kernels) -> None:
    model, x = made(MLP()), given()
    with torch.no_grad():
        expected = model(x)
        with tunegemm.enable():
            run = torch.compile(model, dynamic=False)
            close(run(x), expected)
            close(run(x), expected)
            assert len(kernels.gates) == 2
        torch._dynamo.reset()
        close(torch.compile(model, dynamic=False)(x), expected)
    assert len(kernels.gates) == 2, "off, it is torch's code"


def test_deterministic_algorithms_are_torchs(kernels: Kernels) -> None:
    model, x = made(MLP()), given()
    with torch.no_grad(), tunegemm.enable(), deterministic():
        close(torch.compile(model, dynamic=False)(x), model(x))
    assert not kernels.gates


def test_rows_without_a_common_stride_are_torchs() -> None:
    """A traced view of them raises another error than an eager one."""
    model, x = made(Own(lambda m, x: functional.relu(m.a(x)), bias=True)), given(8, 2).transpose(0, 1)
    with torch.no_grad(), tunegemm.enable():
        close(torch.compile(model, dynamic=False)(x), model(x))


def test_what_is_trained_is_torchs(kernels: Kernels) -> None:
    model, x = made(MLP()), given()
    with tunegemm.enable():
        torch.compile(model)(x).float().sum().backward()
    assert not kernels.gates and model.gate_proj.weight.grad is not None


def test_a_pass_of_the_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(config, "pre_grad_custom_pass", seen.append)
    with torch.no_grad(), tunegemm.enable():
        assert isinstance(config.pre_grad_custom_pass, Fusion)
        assert config.pre_grad_custom_pass.uuid() is None, "of the program's pass no cache may speak"
        with torch._functorch.config.patch(enable_autograd_cache=False):
            torch.compile(made(MLP()), dynamic=False)(given())
    assert len(seen) == 1


def test_what_caches_go_by_changes_with_records_and_with_enable() -> None:
    fusion = Fusion(None)
    off = fusion.uuid()
    with tunegemm.enable():
        on = fusion.uuid()
    assert off != on and fusion.uuid() == off


def test_caches_may_pickle_it() -> None:
    with tunegemm.enable():
        found = config.pre_grad_custom_pass
        assert isinstance(found, CustomGraphPass) and found.uuid() is not None
        assert pickle.loads(pickle.dumps(found)).uuid() == found.uuid()


@pytest.mark.parametrize("pays", [True, False])
def test_which_matches_inductor_calls_by_a_function(monkeypatch: pytest.MonkeyPatch, pays: bool) -> None:
    monkeypatch.setattr(graph_pass, "pays", lambda *_: pays)

    def served(kind: str, operands: int, *words: Any) -> bool:
        match = Match(kind, (), (None,) * operands, print, words)  # type: ignore[arg-type]
        return graph_pass.function_of(match, ()) is not None

    assert served("linear", 2)
    assert [served("chain", 2, "silu", False, residual) for residual in (False, True)] == [True, False]
    assert [served("gate", operands, "silu") for operands in (2, 3, 5)] == [False, pays, False]
    assert not served("several", 3, "silu")


@pytest.mark.parametrize(
    ("served", "wrapper", "pays"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_a_gate_pays_for_as_many_rows_as_were_traced(
    monkeypatch: pytest.MonkeyPatch, served: bool, wrapper: bool, pays: bool
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(graph_pass, "value", lambda node: torch.empty(2, 3, 64))
    monkeypatch.setattr(extension, "gpu_of", lambda device: "a GPU")
    monkeypatch.setattr(
        graph_pass.sites, "chosen", lambda *given, **words: asked.append((*given, words)) or (served or None)
    )
    match = Match("gate", (), (None,) * 3, print, ("silu",))  # type: ignore[arg-type]
    with config.patch(cpp_wrapper=wrapper):
        assert graph_pass.pays(match, (96, 64, 64, torch.bfloat16, torch.device("cpu"))) == pays
    assert asked == [(6, (96, 96), 64, torch.bfloat16, "a GPU", {"gate": "swiglu"})]


@pytest.mark.slow
def test_code_that_another_process_compiled_runs(tmp_path: Path) -> None:
    """Torch 2.13 looks for cached code before it runs the pass, which then does not run at all."""
    program = (
        "import torch, tunegemm\n"
        "from tests.support.layers import MLP, given, made\n"
        "from tunegemm.dispatch import api, extension\n"
        "from tunegemm.layers import graph_pass\n"
        "extension.device_type, graph_pass.pays = lambda: 'cpu', lambda *_: True\n"
        "api.dispatcher.planner.fingerprint = lambda **_: 'the records'\n"
        "model, x = made(MLP()), given()\n"
        "with torch.no_grad(), tunegemm.enable():\n"
        "    result = torch.compile(model, dynamic=False)(x)\n"
        "torch.testing.assert_close(result, model(x), rtol=2e-2, atol=2e-2)\n"
        "print(torch._dynamo.utils.counters['aot_autograd']['autograd_cache_hit'])\n"
    )
    command, variables = [sys.executable, "-c", program], environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    runs = [subprocess.run(command, capture_output=True, text=True, env=variables) for _ in range(2)]
    assert [each.stdout.split() for each in runs] == [["0"], ["1"]], runs[1].stderr


@pytest.mark.slow
def test_inductor_is_not_imported_for_it(forks: Forks) -> None:
    program = (
        "import sys, torch, tunegemm\n"
        "with tunegemm.enable():\n"
        "    assert 'torch._inductor.config' not in sys.modules\n"
        "    import torch._inductor.config as config\n"
        "    print(type(config.pre_grad_custom_pass).__name__)\n"
    )
    done = forks.run(program, env=os.environ)
    assert done.stdout.split() == ["Fusion"], done.stderr


def test_a_layer_is_right_for_any_number_of_rows(kernels: Kernels) -> None:
    model = made(Layer())
    with torch.no_grad(), tunegemm.enable():
        run = torch.compile(model, dynamic=True)
        for rows in (3, 9, 40):
            x = given(1, rows)
            close(run(x), model(x))
    assert kernels.gates and kernels.calls
