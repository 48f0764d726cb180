"""Dispatch on CPU tensors: kernels that compute with torch, records that name them, operands.

`Planner(device_type="cpu")` plans for CPU tensors, so that all of it but the CUDA launch runs for real.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import tunegemm
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Fingerprint, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch import api, dispatcher, extension
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.forms import BELOW_AUTOGRAD, Form
from tunegemm.dispatch.launchers import Prepared
from tunegemm.dispatch.planning import Planner
from tunegemm.generate.families import kernel_source_hash
from tunegemm.generate.launching import AddressLaunch, AddressLauncher, Launcher, operand_reader
from tunegemm.store.record import Record
from tunegemm.torch import ops, takeover

BF16 = torch.bfloat16
CANDIDATE = Candidate.make("cute_sm90", {"tile_m": 128})
H200 = find_device("model:h200")


def Row(
    problem: Problem,
    fingerprint: Fingerprint,
    candidate: Candidate = CANDIDATE,
    ratio: float = 1.1,
    kernel_source: str = kernel_source_hash("cute_sm90"),
    layer: str = "",
) -> Record:
    return Record(problem, candidate, fingerprint, ratio=ratio, kernel_source=kernel_source, layer=layer)


def dispatcher_of(
    records: Sequence[Record] | Snapshot | None = None, prepared: Prepared | None = None, **parts: Any
) -> Dispatcher:
    """Serves CPU tensors as an H200's are served; parts: of its planner, in place of the usual ones.

    records: what is found whenever records are read; None: those of the databases.
    """
    usual: dict[str, Any] = {"find": lambda _: H200}
    if records is not None:
        usual["read"] = lambda: records if isinstance(records, Snapshot) else Snapshot(records)
    if prepared is not None:
        usual["prepare"] = lambda *_: prepared
    return Dispatcher(Planner(device_type="cpu", **(usual | parts)))


def serve_with(monkeypatch: pytest.MonkeyPatch, served: Dispatcher, place: str = "cpu") -> None:
    """Every call of the package on tensors of a type of device goes to this dispatcher."""
    before = api.dispatcher
    monkeypatch.setattr(api, "dispatcher", before)  # which undoes `serve_by`
    monkeypatch.setattr(api, "product", before.product)
    monkeypatch.setattr(api, "quick", before.planner.quick)
    api.serve_by(served)
    monkeypatch.setattr(ops, "DEVICE_TYPE", place)
    monkeypatch.setattr(takeover, "DEVICE_KEYS", (place.upper(),))


def forbid_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that falls back to torch fails the test."""

    def refuse(form: Form, *_: object) -> None:
        if form.call != BELOW_AUTOGRAD:
            pytest.fail("fell back to torch")

    monkeypatch.setattr(dispatcher, "by_torch", refuse)


def with_other_device_current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Device 1 is current, as families see it. Returns a list that ends with the current device."""
    current = [1]

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen.index or 0)
        yield
        current.pop()

    monkeypatch.setattr(extension, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    return current


class Bound:
    """A kernel of fp8 with block scales whose launches call a function of the operands' addresses."""

    def __init__(self, launch: Callable[..., object]) -> None:
        self.launch = launch

    def bound(self, *tensors: torch.Tensor, **words: object) -> Callable[..., object]:
        return lambda *addresses: self.launch(*addresses)


def fails(*addresses: int) -> None:
    """A launch that fails."""
    raise RuntimeError("CUDA error: 700")


@contextmanager
def serving_by(monkeypatch: pytest.MonkeyPatch, kernel: object) -> Iterator[None]:
    """CPUs are served as an H200 is, and its kernel is this one."""
    planted = {
        "device_type": lambda: "cpu",
        "gpu_of": lambda _: "NVIDIA H200",
        "device_of": lambda _: H200,
        "loaded": lambda *_: kernel,
        "allocation": lambda: lambda *layout: torch.empty_strided(*layout[:2], dtype=layout[2]),
    }
    try:
        with monkeypatch.context() as during:
            for name, value in planted.items():
                during.setattr(extension, name, value)
            tunegemm.refresh()
            yield
    finally:
        tunegemm.refresh()


class Kernel:
    """Computes with torch on the CPU what a kernel would on the GPU, and remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], ...]] = []

    def of(self, problem: Problem) -> Launcher:
        """Its launcher for a problem with an epilogue."""
        return partial(self, problem=problem)

    def __call__(self, a, b, out, *operands, problem: Problem | None = None) -> None:
        self.calls.append((tuple(a.shape), tuple(b.shape), tuple(out.shape)))
        with torch.no_grad():
            value = torch.matmul(a.float(), b.float())
            if problem is not None and problem.epilogue:
                named = {
                    each.name: given for each, given in zip(problem.fused.operands, operands, strict=True)
                }
                value = problem.fused.reference(value, named)
                if "amax" in named:
                    named["amax"].copy_(torch.maximum(named["amax"], value.abs().max()))
            out.copy_(value)


def operands(
    m: int = 32, n: int = 48, k: int = 64, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Small integers, so that every summation order gives the same result."""
    generator = torch.Generator().manual_seed(m * n * k)
    a = torch.randint(-3, 4, (m, k), generator=generator).to(dtype)
    return a, torch.randint(-3, 4, (n, k), generator=generator).to(dtype).t()


def batch(count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """`operands` times 1 to `count`."""
    a, b = operands()
    scale = torch.arange(1, count + 1).to(BF16).view(count, 1, 1)
    return a * scale, b.contiguous() * scale


@contextmanager
def deterministic() -> Iterator[None]:
    """torch promises deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def uncached() -> Iterator[None]:
    """What torch.compile has kept on disk, which knows no records, is not taken."""
    import torch._functorch.config
    import torch._inductor.config

    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def quietly(call, *arguments, **keywords):
    """The result of a call that must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(*arguments, **keywords)


class ByAddress:
    """A kernel of addresses on the CPU, behind the families' own launcher; remembers its calls."""

    def __init__(self, problem: Problem) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.problem = problem
        self.launcher = AddressLauncher(operand_reader(problem, 16, 16), self.make)

    def make(self, lda: int, ldb: int, ldd: int, *steps: int) -> AddressLaunch:
        m, n, k, batch = self.problem.m, self.problem.n, self.problem.k, self.problem.batch

        def launch(a: int, b: int, d: int) -> None:
            self.calls.append((a, b, d))
            left = at(a, (batch, m, k), (steps[0], lda, 1))
            right = at(b, (batch, k, n), (steps[1], 1, ldb))
            at(d, (batch, m, n), (steps[2], ldd, 1)).copy_(left.float() @ right.float())

        return launch


def at(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype = BF16
) -> torch.Tensor:
    """The tensor of two-byte elements at an address."""
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * (2 * reach)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def calls_of(call) -> tuple[list[str], list[str]]:
    """The Python functions, by module and name, and the C functions that a call enters."""
    python, c = [], []

    def profile(frame, event, argument):
        if event == "call":
            python.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")
        elif event == "c_call":
            c.append(argument.__name__)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return python, c


def is_slow(call) -> bool:
    """Whether a call finds no plan without a key."""
    return any(name.endswith("dispatcher.compute") for name in calls_of(call)[0])
