"""What a call of the graph checks each time, and which functions only compute."""

from __future__ import annotations

import builtins
import math
import operator
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from tunegemm.dispatch import extension
from tunegemm.layers import graph, inductor, sites


def plan_of(launched: list[Any], words: Any = None, *, guarded: bool = False, reduces: bool = False) -> Any:
    def launch(*given: int) -> None:
        launched.append(given)

    return SimpleNamespace(
        launch_at=launch, words=words, output=((2, 8), (8, 1), torch.bfloat16), guarded=guarded,
        device=SimpleNamespace(index=1), reduces=reduces,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype)

    monkeypatch.setattr(extension, "allocation", lambda: allocate)


ROOM = torch.zeros(64, dtype=torch.bfloat16)
X, W = ROOM[:16].view(2, 8), torch.zeros(8, 8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("words", "has_residual", "x", "weight", "residual", "current", "is_launched"),
    [
        (None, False, X, W, X, 1, True), (None, False, ROOM[1:17].view(2, 8), W, X, 1, False),
        (None, False, X, torch.zeros(65, dtype=torch.bfloat16)[1:].view(8, 8), X, 1, False),
        (None, False, ROOM[:16].view(8, 2).t(), W, X, 1, False), (None, False, X, W, X, 0, False),
        ((7, 9), False, X, W, X, 1, True), ((), False, X, W, X.t(), 1, True),
        ("none", False, X, W, X, 1, False),
        ((7,), True, X, W, X, 1, True), ((7,), True, X, W, ROOM[:16].view(8, 2).t(), 1, False),
    ],
)  # fmt: skip
def test_a_launch_checks_the_addresses_and_the_device_of_each_call(
    monkeypatch: pytest.MonkeyPatch,
    words: Any, has_residual: bool, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor,
    current: int, is_launched: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(sites, "current_device", lambda: current)
    launched: list[Any] = []
    words_of = None if words is None else lambda tensors, numbers: None if words == "none" else words
    way = sites.launched(plan_of(launched, words_of, guarded=True), (2, 8), (8, 1), has_residual)
    result = way(x, weight, residual)
    assert (result is not None) == is_launched
    if is_launched:
        assert launched == [(x.data_ptr(), weight.data_ptr(), result.data_ptr(), *(words or ()))]
    else:
        assert launched == []


def test_a_launch_that_fails_is_torchs_but_in_a_capture_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[bool] = []

    def fail(*_: int) -> None:
        raise RuntimeError("no")

    plan = plan_of([])
    plan.launch_at = fail
    monkeypatch.setattr(extension, "forget", lambda: forgotten.append(True))
    way = sites.launched(plan, (2, 8), (8, 1), False)
    assert way(X, W) is None and forgotten == [True]
    monkeypatch.setattr(sites, "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="no"):
        way(X, W)


def test_a_launch_that_splits_k_follows_torchs_setting() -> None:
    settings = torch.backends.cuda.matmul
    before, launched = settings.allow_bf16_reduced_precision_reduction, []
    ways = [sites.launched(plan_of(launched, reduces=each), (2, 8), (8, 1), False) for each in (False, True)]
    assert all(way(X, W) is not None for way in ways)
    try:
        settings.allow_bf16_reduced_precision_reduction = not before
        assert [way(X, W) is not None for way in ways] == [True, False] and len(launched) == 3
    finally:
        settings.allow_bf16_reduced_precision_reduction = before
    assert all(way(X, W) is not None for way in ways)


@pytest.mark.parametrize(
    ("off", "invariant", "rows", "ns", "k", "dtype", "gate", "served"),
    [
        (False, False, 2048, (8, 16), 64, torch.bfloat16, "", True),
        (True, False, 8, (8, 16), 64, torch.bfloat16, "", False),
        (False, True, 8, (8, 16), 64, torch.bfloat16, "", False),
        (False, False, 2049, (8, 16), 64, torch.bfloat16, "", False),
        (False, False, 2048, (8192, 8192), 64, torch.bfloat16, "", True),
        (False, False, 2048, (8192, 8200), 64, torch.bfloat16, "", False),
        (False, False, 2049, (8192, 8192), 64, torch.bfloat16, "swiglu", True),
        (False, False, 8, (8, 12), 64, torch.bfloat16, "", False),
        (False, False, 8, (8, 16), 68, torch.bfloat16, "", False),
        (False, False, 8, (8, 16), 64, torch.float32, "", False),
        (False, False, 8, (8, 16), 64, torch.float16, "", True),
    ],
)  # fmt: skip
def test_which_products_of_several_weights_have_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
    off: bool, invariant: bool, rows: int, ns: tuple[int, ...], k: int,
    dtype: torch.dtype, gate: str, served: bool,
) -> None:  # fmt: skip
    asked: list[Any] = []
    monkeypatch.setattr(extension, "is_off", lambda: off)
    monkeypatch.setattr(extension, "policy", lambda: SimpleNamespace(is_batch_invariant=invariant))
    monkeypatch.setattr(sites, "choose", lambda *given, **words: asked.append((given, words)) or "a kernel")
    assert sites.chosen(rows, ns, k, dtype, "a GPU", gate=gate, bias=True) == ("a kernel" if served else None)
    name = "fp16" if dtype is torch.float16 else "bf16"
    assert asked == [((rows, ns, k), {"gate": gate, "dtype": name, "bias": True, "gpu": "a GPU"})] * served


@pytest.mark.parametrize(
    ("target", "computes"),
    [
        (operator.add, True), (math.sqrt, True), (builtins.getattr, True), (builtins.setattr, False),
        (builtins.delattr, False), (torch.add, True), (torch.matmul, True), (functional.silu, True),
        (functional.linear, True), (torch.functional.einsum, True), (torch.fft.fft, True),
        (torch.manual_seed, False), (torch.set_num_threads, False), (torch.set_default_dtype, False),
        (torch._C._set_grad_enabled, False), (torch._C._log_api_usage_once, True), (print, True),
        (torch.save, False), (torch.nn.init.zeros_, False), (pytest.importorskip, False),
    ],
)  # fmt: skip
def test_functions_that_only_compute(target: Any, computes: bool) -> None:
    assert graph.only_computes(target) == computes


def test_the_pass_waits_for_inductor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[bool] = []
    monkeypatch.setattr(inductor, "set_pass", lambda: done.append(True))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, inductor.CONFIG, raising=False)
    others = len(sys.meta_path)
    for _ in range(2):
        inductor.install()
        assert len(sys.meta_path) == others + 1 and getattr(sys.meta_path[0], "name", "") == inductor.CONFIG
    assert done == []
    monkeypatch.setitem(sys.modules, inductor.CONFIG, SimpleNamespace())  # type: ignore[arg-type]
    inductor.install()
    assert done == [True] and len(sys.meta_path) == others + 1
