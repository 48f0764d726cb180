"""Dispatch without a GPU: plans, keys, fall-backs and warnings; the kernel is torch's own, on the CPU.

`Dispatcher(device_type="cpu")` serves CPU tensors, so that all of it but the CUDA launch runs for real.
The launches on a GPU are in test_gpu_dispatch.py.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from tunegemm import families
from tunegemm.device import Device, Fingerprint, find_device, kernel_source_hash
from tunegemm.dispatch import api
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.forms import MATMUL, form_of
from tunegemm.dispatch.launchers import TORCH, Prepared, is_torch
from tunegemm.dispatch.operands import Operands, Refusal, describe
from tunegemm.dispatch.planning import LOOK_SECONDS, tune_command
from tunegemm.dispatch.snapshot import Snapshot
from tunegemm.errors import ArtifactError, DatabaseError, DeviceError, TunegemmWarning
from tunegemm.families import Launcher
from tunegemm.families.launching import AddressLaunch, AddressLauncher, operand_reader
from tunegemm.outcome import Measurement
from tunegemm.problem import Problem
from tunegemm.space import Candidate

BF16 = torch.bfloat16
CANDIDATE = Candidate.make("cute_sm90", {"tile_m": 128})


@dataclass(frozen=True)
class Row:
    problem: Problem
    fingerprint: Fingerprint
    candidate: Candidate = CANDIDATE
    ratio: float = 1.1
    kernel_source: str = kernel_source_hash("cute_sm90")
    layer: str = ""


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


@pytest.fixture(scope="module")
def device() -> Device:
    return find_device("model:h200")


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def serve(device, kernel):
    """A dispatcher on CPU tensors whose database holds the given problems."""

    def make(*problems: Problem, prepared: Prepared | None = None) -> Dispatcher:
        rows = [Row(problem, device.fingerprint) for problem in problems]
        return Dispatcher(
            device_type="cpu",
            read=lambda: Snapshot(rows),
            find=lambda spec: device,
            prepare=lambda record, device: prepared or Prepared(kernel, tma=True),
        )

    return make


def operands(
    m: int = 32, n: int = 48, k: int = 64, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Small integers, so that every summation order gives the same result."""
    generator = torch.Generator().manual_seed(m * n * k)
    a = torch.randint(-3, 4, (m, k), generator=generator).to(dtype)
    return a, torch.randint(-3, 4, (n, k), generator=generator).to(dtype).t()


def quietly(call, *arguments, **keywords):
    """The result of a call that must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(*arguments, **keywords)


# Which products a kernel may compute


@pytest.mark.parametrize("a_major, b_major", list(itertools.product("km", "kn")))
@pytest.mark.parametrize("batch", [None, 3])
def test_describe_states_the_problem_of_packed_operands(a_major, b_major, batch):
    lead = () if batch is None else (batch,)
    a = (
        torch.empty(*lead, 16, 32, dtype=BF16)
        if a_major == "k"
        else torch.empty(*lead, 32, 16, dtype=BF16).mT
    )
    b = (
        torch.empty(*lead, 32, 24, dtype=BF16)
        if b_major == "n"
        else torch.empty(*lead, 24, 32, dtype=BF16).mT
    )
    found = describe(a, b)
    assert isinstance(found, Operands)
    assert found.problem == Problem(16, 24, 32, batch or 1, a_major=a_major, b_major=b_major)
    assert found.out_shape == (*lead, 16, 24)
    assert found.packed and not found.tma_refusal
    assert found.spans == tuple(extent * 2 * (batch or 1) for extent in (16 * 32, 32 * 24, 16 * 24))


@pytest.mark.parametrize("shape", [(2, 3, 64), (1, 7, 64), (2, 1, 3, 64)])
def test_leading_dimensions_fold_into_rows(shape):
    _, b = operands()
    found = describe(torch.empty(shape, dtype=BF16), b)
    assert isinstance(found, Operands)
    m = torch.Size(shape[:-1]).numel()
    assert found.views == ((m, 64), (64, 48), (m, 48))
    assert found.problem.m == m and found.out_shape == (*shape[:-1], 48)


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "views", "out_shape"),
    [((64,), (64, 48), ((1, 64), (64, 48)), (48,)),
     ((32, 64), (64,), ((32, 64), (64, 1)), (32,)),
     ((2, 32, 64), (64,), ((64, 64), (64, 1)), (2, 32)),
     ((64,), (1, 64, 48), ((1, 64), (64, 48)), (1, 48)),
     ((1, 32, 64), (1, 64, 48), ((32, 64), (64, 48)), (1, 32, 48)),
     ((5, 32, 64), (1, 64, 48), ((160, 64), (64, 48)), (5, 32, 48)),
     ((32, 64), (1, 1, 64, 48), ((32, 64), (64, 48)), (1, 1, 32, 48)),
     ((2, 3, 32, 64), (2, 3, 64, 48), ((6, 32, 64), (6, 64, 48)), (2, 3, 32, 48)),
     ((32, 64), (2, 64, 8), ((2, 32, 64), (2, 64, 8)), (2, 32, 8)),
     ((1, 32, 64), (2, 64, 8), ((2, 32, 64), (2, 64, 8)), (2, 32, 8)),
     ((1, 1, 32, 64), (2, 3, 64, 8), ((6, 32, 64), (6, 64, 8)), (2, 3, 32, 8)),
     ((64,), (2, 64, 8), ((2, 1, 64), (2, 64, 8)), (2, 8)),
     ((3, 32, 64), (1, 3, 64, 48), ((3, 32, 64), (3, 64, 48)), (1, 3, 32, 48))],
)  # fmt: skip
def test_views_make_products_of_matrices(serve, kernel, a_shape, b_shape, views, out_shape):
    a, b = torch.ones(a_shape, dtype=BF16), torch.ones(b_shape, dtype=BF16)
    found = describe(a, b)
    assert isinstance(found, Operands)
    assert found.views[:2] == views and found.out_shape == out_shape == torch.matmul(a, b).shape
    dispatcher, out = serve(found.problem, prepared=Prepared(kernel)), torch.zeros(out_shape, dtype=BF16)
    assert torch.equal(quietly(dispatcher.matmul, a, b), torch.matmul(a, b))
    assert torch.equal(quietly(dispatcher.matmul, a, b, out=out), torch.matmul(a, b))
    assert [call[:2] for call in kernel.calls] == [views] * 2


@pytest.mark.parametrize("pad", range(17))
def test_only_leading_strides_in_multiples_of_16_bytes_suit_tma(pad):
    _, b = operands()
    found = describe(torch.empty(32, 64 + pad, dtype=BF16)[:, :64], b)
    assert isinstance(found, Operands)
    assert bool(found.tma_refusal) == (pad % 8 != 0)
    assert found.packed == (pad == 0)
    assert found.problem == Problem(32, 48, 64, alignment=math.gcd(16, 2 * pad))


def test_views_that_tma_cannot_describe():
    a, b = operands()
    overlapping = torch.as_strided(a, (32, 64), (8, 1))
    assert "overlaps" in describe(overlapping, b).tma_refusal
    assert "overlaps" in describe(a[:1].expand(32, 64), b).tma_refusal
    assert (
        "unit stride"
        in describe(torch.empty(1024, dtype=BF16).as_strided((64, 1), (16, 5)), b[:1]).tma_refusal
    )
    batches = torch.empty(3, 16 * 64 + 4, dtype=BF16).as_strided((3, 16, 64), (16 * 64 + 4, 64, 1))
    assert "1028 x 2 B" in describe(batches, torch.empty(3, 64, 8, dtype=BF16)).tma_refusal


@pytest.mark.parametrize(
    "a_shape, b_shape",
    [((64,), (64,)), ((), (64, 48)), ((2, 32, 64), (3, 64, 8)), ((2, 1, 8, 64), (1, 2, 64, 8)),
     ((0, 64), (64, 48)), ((32, 0), (0, 48)), ((32, 64), (64, 0)), ((32, 64), (32, 48))],
)  # fmt: skip
def test_what_is_always_torchs(a_shape, b_shape):
    assert describe(torch.empty(a_shape, dtype=BF16), torch.empty(b_shape, dtype=BF16)) == Refusal("")


def test_operands_without_a_problem_say_why():
    a, b = operands()
    assert "kernels where tf32 is allowed" in describe(a.float(), b.float()).reason
    assert "float64" in describe(a.double(), b.double()).reason
    assert "contiguous" in describe(a[::2, ::2], b[::2]).reason
    swapped = torch.empty(2, 3, 4, 64, dtype=BF16).transpose(0, 1)
    assert "row stride" in describe(swapped, b).reason
    assert describe(a, b.to(torch.float16)) == Refusal("")


def test_rows_of_no_single_stride_are_a_batch_of_one_b():
    _, b = operands()
    for a in (torch.empty(4, 2, 64, dtype=BF16).transpose(0, 1), torch.empty(2, 6, 64, dtype=BF16)[:, :4]):
        found = describe(a, b)
        assert isinstance(found, Operands) and not found.tma_refusal and not found.packed
        assert found.problem == Problem(4, 48, 64, 2) and found.out_shape == (2, 4, 48)
        assert found.views == ((2, 4, 64), (2, 64, 48), (2, 4, 48))
        assert found.spans[1] == b.numel() * 2


def test_entries_may_share_memory_in_operands_but_not_in_the_output():
    a, b = torch.empty(3, 32, 64, dtype=BF16), torch.empty(64, 48, dtype=BF16)
    for left, right in (
        (a, b.expand(3, 64, 48)),
        (a[:1].expand(3, 32, 64), b.expand(3, 64, 48)),
        (a.view(-1).as_strided((3, 32, 64), (8 * 64, 64, 1)), torch.empty(3, 64, 48, dtype=BF16)),
    ):
        found = describe(left, right)
        assert isinstance(found, Operands) and not found.tma_refusal and not found.packed
        assert found.problem == Problem(32, 48, 64, 3, b_major="n")
    shared = torch.empty(32, 48, dtype=BF16).expand(3, 32, 48)
    assert describe(a, b.expand(3, 64, 48), shared) == Refusal("")


# Results: the same as torch, whoever computes


def grid():
    return itertools.product((1, 2, 8, 33), (1, 8, 24), (1, 8, 40))


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
def test_every_view_of_a_small_grid_equals_torch(serve, kernel):
    """Every major, with and without padding and offset, each problem recorded: torch.equal, hit or not."""
    problems = [
        Problem(m, n, k, a_major=a_major, b_major=b_major)
        for (m, n, k), a_major, b_major in itertools.product(grid(), "km", "kn")
    ]
    dispatcher = serve(*problems)
    total = 0
    for m, n, k in grid():
        for a_t, b_t, pad, offset in itertools.product((False, True), (False, True), (0, 1, 8), (0, 1, 8)):
            a, b = view(m, k, a_t, pad, offset), view(k, n, b_t, pad, offset)
            expected = torch.matmul(a, b)
            assert torch.equal(dispatcher.matmul(a, b), expected)
            assert torch.equal(dispatcher.linear(a, b.t()), expected)
            total += 2
    assert 0.1 * total < len(kernel.calls) < 0.9 * total  # the grid has both hits and refusals


def view(rows: int, columns: int, transposed: bool, pad: int, offset: int) -> torch.Tensor:
    if transposed:
        return view(columns, rows, False, pad, offset).t()
    values = (torch.arange(offset + rows * (columns + pad)) * 7 % 5 - 2).to(BF16)
    return values[offset:].view(rows, columns + pad)[:, :columns]


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
@pytest.mark.parametrize(
    "a_shape, b_shape",
    [((8,), (8,)), ((8,), (8, 16)), ((16, 8), (8,)), ((2, 1, 16, 8), (3, 8, 24)), ((1, 16, 8), (1, 8, 24)),
     ((3, 16, 8), (3, 8, 24)), ((2, 16, 8), (8, 24)), ((0, 8), (8, 24)), ((16, 0), (0, 24)),
     ((2, 0, 8), (8, 24))],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.complex64])
def test_ranks_dtypes_and_empty_extents_equal_torch(serve, a_shape, b_shape, dtype):
    dispatcher = serve(
        Problem(32, 24, 8), Problem(32, 24, 8, b_major="n"), Problem(16, 24, 8, 3, b_major="n")
    )
    a, b = torch.ones(a_shape, dtype=dtype), torch.ones(b_shape, dtype=dtype)
    result = dispatcher.matmul(a, b)
    expected = torch.matmul(a, b)
    assert result.shape == expected.shape and result.dtype == expected.dtype and torch.equal(result, expected)


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 1, 4)])
def test_linear_equals_torch(serve, kernel, lead):
    """With a bias: test_fused.py."""
    rows = torch.Size(lead).numel()
    dispatcher = serve(Problem(rows, 48, 64))
    x, weight = torch.ones(*lead, 64, dtype=BF16), operands()[1].t()
    expected = torch.nn.functional.linear(x, weight)
    for _ in range(2):
        assert torch.equal(quietly(dispatcher.linear, x, weight), expected)
    assert kernel.calls == [((rows, 64), (64, 48), (rows, 48))] * 2


def test_errors_are_torchs_own(serve):
    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    for bad in [(a, b.t()), (a, b.float()), (a, "b"), (None, b)]:
        with pytest.raises((RuntimeError, TypeError)) as expected:
            torch.matmul(*bad)
        with pytest.raises(type(expected.value)) as raised:
            dispatcher.matmul(*bad)
        assert str(raised.value) == str(expected.value)


# out=


def test_out_is_written_by_the_kernel_and_returned(serve, kernel):
    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    out = torch.full((32, 48), float("nan"), dtype=BF16)
    version = out._version
    assert quietly(dispatcher.matmul, a, b, out) is out
    assert torch.equal(out, torch.matmul(a, b)) and len(kernel.calls) == 1
    assert out._version > version  # autograd must notice that it was written


def test_padded_out_is_written_in_place(serve, kernel):
    a, b = operands()
    room = torch.zeros(32, 64, dtype=BF16)
    assert quietly(serve(Problem(32, 48, 64)).matmul, a, b, room[:, :48]) is not None
    assert len(kernel.calls) == 1
    assert torch.equal(room[:, :48], torch.matmul(a, b)) and not room[:, 48:].any()


def test_inference_tensors_as_out(serve, kernel):
    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    with torch.inference_mode():
        out = torch.zeros(32, 48, dtype=BF16)
        assert torch.equal(quietly(dispatcher.matmul, a, b, out), torch.matmul(a, b))
    assert len(kernel.calls) == 1
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):  # torch's own error
        dispatcher.matmul(a, b, out)
    assert len(kernel.calls) == 1


def test_column_major_out_is_another_problem(serve, kernel):
    a, b = operands()
    out = torch.zeros(48, 32, dtype=BF16).t()
    assert torch.equal(serve(Problem(32, 48, 64, out_major="m")).matmul(a, b, out), torch.matmul(a, b))
    assert len(kernel.calls) == 1


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
@pytest.mark.parametrize(
    "out",
    [lambda: torch.zeros(32 * 48 + 1, dtype=BF16)[1:].view(32, 48),
     lambda: torch.zeros(32, 49, dtype=BF16)[:, :48],
     lambda: torch.zeros(48, 32, dtype=BF16).t(),
     lambda: torch.zeros(32, 96, dtype=BF16)[:, ::2]],
)  # fmt: skip
def test_out_that_the_kernel_cannot_write_is_torchs(serve, kernel, out):
    a, b = operands()
    assert torch.equal(serve(Problem(32, 48, 64)).matmul(a, b, out()), torch.matmul(a, b))
    assert not kernel.calls


@pytest.mark.filterwarnings("ignore")
def test_wrong_out_gives_torchs_error_or_resize(serve, kernel):
    dispatcher = serve(Problem(32, 48, 64), Problem(32, 32, 32))
    a, b = operands()
    with pytest.raises(RuntimeError):
        dispatcher.matmul(a, b, torch.zeros(32, 48))  # another dtype
    assert dispatcher.matmul(a, b, torch.zeros(2, dtype=BF16)).shape == (
        32,
        48,
    )  # torch resizes, with a warning
    square, other = operands(32, 32, 32)
    for shared in (square, other.t()):  # what then happens is torch's affair: an error, on some devices
        with suppress(RuntimeError):
            dispatcher.matmul(square, other, shared)
    assert not kernel.calls
    assert dispatcher.matmul(square, other, torch.zeros_like(square)) is not None
    assert len(kernel.calls) == 1


# Modes in which torch.matmul means more than a launch


def test_grad_modes(serve, kernel):
    """Gradients are in test_torch.py."""
    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    weight = torch.nn.Parameter(b.t().contiguous())
    assert dispatcher.linear(a, weight).requires_grad
    with torch.no_grad():
        assert not dispatcher.linear(a, weight).requires_grad
    with torch.inference_mode():
        dispatcher.linear(a, weight)
    assert len(kernel.calls) == 3


def test_tracing_sees_torch_matmul(serve, kernel):
    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    quietly(dispatcher.matmul, a, b)
    assert len(kernel.calls) == 1

    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert dispatcher.matmul(mode.from_tensor(a), mode.from_tensor(b)).shape == (32, 48)
    graph = make_fx(lambda a, b: dispatcher.matmul(a, b))(a, b)
    assert any("mm" in str(node.target) for node in graph.graph.nodes)
    with FlopCounterMode(display=False) as counter:
        dispatcher.matmul(a, b)
    assert counter.get_total_flops() == Problem(32, 48, 64).flops
    traced = torch.jit.trace(dispatcher.matmul, (a, b), check_trace=False)
    assert torch.equal(traced(-a, b), torch.matmul(-a, b))
    assert len(kernel.calls) == 1


def test_deterministic_mode_is_torchs(serve, kernel):
    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    torch.use_deterministic_algorithms(True)
    try:
        quietly(dispatcher.matmul, a, b)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not kernel.calls


@pytest.mark.parametrize(
    "dtypes", list(itertools.product((torch.float32, torch.float16, BF16), repeat=2)), ids=str
)
def test_autocast_decides_the_dtype_as_it_does_for_torch(serve, kernel, dtypes):
    dispatcher = serve(Problem(32, 48, 64))
    a, b = (operand.to(dtype) for operand, dtype in zip(operands(), dtypes, strict=True))
    with torch.autocast("cpu", dtype=BF16):
        expected = torch.matmul(a, b)
        for _ in range(2):
            result = quietly(dispatcher.matmul, a, b)
            assert result.dtype == expected.dtype == BF16 and torch.equal(result, expected)
            assert torch.equal(quietly(dispatcher.linear, a, b.t()), expected)
    assert len(kernel.calls) == 4


def test_autocast_to_another_dtype_after_a_call_without(serve, kernel):
    """What was found without autocast must not be taken for the other dtype."""
    dispatcher = serve(Problem(32, 48, 64), Problem(32, 48, 64, in_dtype="fp16", out_dtype="fp16"))
    a, b = operands()
    for _ in range(2):
        for dtype in (BF16, torch.float16):
            for _ in range(2):
                assert quietly(dispatcher.matmul, a, b).dtype == BF16
                with torch.autocast("cpu", dtype=dtype):
                    assert quietly(dispatcher.matmul, a, b).dtype == dtype
                    out = torch.zeros(32, 48, dtype=BF16)
                    assert quietly(dispatcher.matmul, a, b, out) is out
    assert len(kernel.calls) == 24


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
def test_what_autocast_leaves_alone(serve, kernel):
    """fp64 is not cast."""
    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    with torch.autocast("cpu", dtype=BF16), torch.no_grad():
        assert dispatcher.matmul(a.double(), b.double()).dtype == torch.float64
        with pytest.raises(RuntimeError):
            dispatcher.matmul(a.double(), b.float())
    assert not kernel.calls


def test_torch_compile_graphs_hold_torch_matmul():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    a, b = operands()
    compiled = torch.compile(lambda a, b: api.linear(api.matmul(a, b), b), backend=backend, fullgraph=True)
    assert torch.equal(quietly(compiled, a, b), torch.nn.functional.linear(torch.matmul(a, b), b))
    targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert targets == [torch.matmul, torch._C._nn.linear]


def test_subclasses_and_sparse_tensors_are_torchs(serve, kernel):
    class Tagged(torch.Tensor):
        pass

    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    assert type(quietly(dispatcher.matmul, a.as_subclass(Tagged), b)) is Tagged
    sparse = a.float().to_sparse_csr()
    assert torch.equal(quietly(dispatcher.matmul, sparse, b.float()), torch.matmul(sparse, b.float()))
    assert not kernel.calls


# Misses


def test_a_miss_warns_once_and_names_the_command(serve, kernel):
    dispatcher = serve(Problem(32, 48, 128))
    a, b = operands()
    with pytest.warns(TunegemmWarning) as caught:
        for _ in range(3):
            assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
    assert len(caught) == 1 and not kernel.calls
    assert "tunegemm tune --shape 32x48x64 --dtype bf16 --layout tn" in str(caught[0].message)
    assert caught[0].filename == __file__
    padded = torch.zeros(32, 72, dtype=BF16)[:, :64]
    quietly(dispatcher.matmul, padded, b)  # another key of the same problem
    with pytest.warns(TunegemmWarning, match="--dtype fp16 --layout tt"):
        dispatcher.matmul(a.half(), b.half().contiguous())
    assert tune_command(Problem(1, 2, 3, 4)).startswith("tunegemm tune --shape 1x2x3x4 ")


def test_cpu_tensors_warn_once_with_the_command():
    dispatcher = Dispatcher(read=lambda: pytest.fail("the database must not be read for CPU tensors"))
    a, b = operands()
    with pytest.warns(TunegemmWarning) as caught:
        for _ in range(2):
            assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
    assert len(caught) == 1
    assert "on cpu" in str(caught[0].message) and "tunegemm tune --shape 32x48x64" in str(caught[0].message)


def test_unsupported_dtype_and_views_warn_once_each(serve, kernel):
    dispatcher = serve(Problem(32, 48, 64), Problem(16, 48, 64))
    a, b = operands()
    with pytest.warns(TunegemmWarning, match="fp32 operands have kernels where tf32"):
        dispatcher.matmul(a.float(), b.float())
    quietly(dispatcher.matmul, a.float()[:16], b.float())
    with pytest.warns(TunegemmWarning, match="32x48x64 bf16 tn align2 .* no record.* --alignment 2"):
        dispatcher.matmul(torch.zeros(32, 73, dtype=BF16)[:, :64], b)
    assert not kernel.calls


def test_misaligned_addresses_are_another_problem(serve, kernel):
    """A view at an odd offset has a record of its own alignment or none, and aligned ones keep theirs."""
    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    room = torch.zeros(32 * 64 + 8, dtype=BF16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for offset, hits in ((0, 1), (1, 1), (4, 1), (8, 2)):
            moved = room[offset : offset + 32 * 64].view(32, 64).copy_(a)
            assert torch.equal(dispatcher.matmul(moved, b), torch.matmul(a, b))
            assert len(kernel.calls) == hits
    said = [str(warning.message) for warning in caught]
    assert ["--alignment 2" in said[0], "--alignment 8" in said[1], len(said)] == [True, True, 2]


@pytest.mark.parametrize(("pad", "offset", "alignment"), [(1, 0, 2), (0, 1, 2), (2, 0, 4), (0, 4, 8)])
def test_a_record_of_their_alignment_serves_unaligned_operands(serve, kernel, pad, offset, alignment):
    dispatcher = serve(Problem(32, 48, 64, alignment=alignment), prepared=Prepared(kernel))
    a, b = operands()
    room = torch.zeros(offset + 32 * (64 + pad), dtype=BF16)
    moved = room[offset:].view(32, 64 + pad)[:, :64].copy_(a)
    assert torch.equal(quietly(dispatcher.matmul, moved, b), torch.matmul(a, b))
    out = torch.zeros(32 * 48 + 1, dtype=BF16)[1:].view(32, 48)
    assert torch.equal(quietly(dispatcher.matmul, moved, b, out=out), torch.matmul(a, b))
    assert torch.equal(quietly(dispatcher.linear, moved, b.t()), torch.matmul(a, b))
    assert len(kernel.calls) == 3


def test_an_output_without_unit_stride_is_torchs(serve, kernel):
    dispatcher = serve(Problem(32, 48, 64), prepared=Prepared(kernel))
    a, b = operands()
    out = torch.zeros(32, 96, dtype=BF16)[:, ::2]
    with pytest.warns(TunegemmWarning, match="no unit stride"):
        assert torch.equal(dispatcher.matmul(a, b, out=out), torch.matmul(a, b))
    assert not kernel.calls


def test_library_algorithms_get_aligned_addresses(serve, kernel):
    """Packed rows of 2002 bytes: the library was asked about operands that start at 16 bytes."""
    dispatcher = serve(Problem(32, 48, 1001, alignment=2), prepared=Prepared(kernel, packed=True))
    a, b = operands(k=1001)
    assert torch.equal(quietly(dispatcher.matmul, a, b), torch.matmul(a, b)) and len(kernel.calls) == 1
    moved = torch.zeros(32 * 1001 + 1, dtype=BF16)[1:].view(32, 1001).copy_(a)
    assert torch.equal(quietly(dispatcher.matmul, moved, b), torch.matmul(a, b)) and len(kernel.calls) == 1


def test_foreign_record_says_what_differs(device, kernel):
    foreign = replace(device.fingerprint, driver="1.2", sm_count=78, sm_budget=70)
    rows = [Row(Problem(32, 48, 64), foreign)]
    dispatcher = Dispatcher(
        device_type="cpu",
        read=lambda: Snapshot(rows),
        find=lambda _: device,
        prepare=lambda *_: Prepared(kernel),
    )
    with pytest.warns(TunegemmWarning, match=r"sm_count 78 \(here 132\), sm_budget 70 \(here 132\)"):
        dispatcher.matmul(*operands())
    assert not kernel.calls


def test_snapshot_finds_the_best_record_that_may_be_used(device):
    problem = Problem(32, 48, 64)
    other = replace(device.fingerprint, torch="0")
    slow, fast = (Row(problem, device.fingerprint, ratio=ratio) for ratio in (1.0, 1.2))
    snapshot = Snapshot([slow, fast, Row(problem, other, ratio=9.0)])
    assert snapshot.find(problem, device.fingerprint) is fast
    assert snapshot.judged(problem, device.fingerprint)[-1][1].ratio == 9.0, "fast, but of another torch"
    assert snapshot.find(Problem(1, 1, 1), device.fingerprint) is None


def test_the_better_grade_wins_then_the_narrower_layer(device):
    problem = Problem(32, 48, 64)
    here = replace(device.fingerprint, driver="580.20.1")
    patched = replace(here, driver="580.10.9")
    system, user, project = (
        Row(problem, here, layer=layer, ratio=ratio)
        for layer, ratio in (("system", 1.3), ("user", 1.2), ("project", 1.1))
    )
    in_doubt = Row(problem, patched, layer="project", ratio=1.4)
    assert Snapshot([project, system, user, in_doubt]).find(problem, here) is project
    assert Snapshot([system, user, in_doubt]).find(problem, here) is user
    assert Snapshot([system, in_doubt]).find(problem, here) is system
    assert Snapshot([in_doubt]).find(problem, here) is in_doubt, "used, though it wants verification"
    stale = replace(project, kernel_source="0" * 16)
    assert Snapshot([stale]).find(problem, here) is None
    assert "kernel sources of cute_sm90 changed" in Snapshot([stale]).why_not(problem, here)


def test_torch_as_the_recorded_winner_is_torch_without_a_warning(serve, kernel):
    assert is_torch(Candidate.make("cublaslt", {}, {"algorithm": "torch.mm"}))
    assert not is_torch(Candidate.make("cublaslt", {}, {"algorithm": "other"}))
    dispatcher = serve(Problem(32, 48, 64), prepared=TORCH)
    a, b = operands()
    assert torch.equal(quietly(dispatcher.matmul, a, b), torch.matmul(a, b))


def test_packed_only_launchers_get_packed_operands(serve, kernel):
    dispatcher = serve(Problem(32, 48, 64), prepared=Prepared(kernel, packed=True))
    a, b = operands()
    quietly(dispatcher.matmul, torch.zeros(32, 72, dtype=BF16)[:, :64], b)
    assert not kernel.calls
    quietly(dispatcher.matmul, a, b)
    assert len(kernel.calls) == 1


@pytest.mark.parametrize(
    "error", [ArtifactError("damaged\nobject"), ValueError("no such tile"), RuntimeError("CUDA")]
)
def test_a_kernel_that_cannot_be_prepared_is_a_miss(device, error):
    def prepare(record, device):
        raise error

    dispatcher = Dispatcher(
        device_type="cpu",
        read=lambda: Snapshot([Row(Problem(32, 48, 64), device.fingerprint)]),
        find=lambda _: device,
        prepare=prepare,
    )
    a, b = operands()
    with pytest.warns(TunegemmWarning, match=f"{str(error).splitlines()[0]}.*tunegemm tune"):
        assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))


def test_a_failing_launch_is_torchs_from_then_on(serve):
    calls = []

    def launch(a, b, out):
        calls.append(1)
        raise RuntimeError("refused")

    dispatcher = serve(Problem(32, 48, 64), prepared=Prepared(launch))
    a, b = operands()
    with pytest.warns(TunegemmWarning, match="refused"):
        for _ in range(3):
            assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
    assert len(calls) == 1


def test_unreadable_database_and_unknown_device_warn_once():
    def broken():
        raise DatabaseError("/nowhere/tunegemm.sqlite: no such database")

    def unknown(spec):
        raise DeviceError(f"{spec} is sm_75")

    device = find_device("model:h200")
    a, b = operands()
    dispatcher = Dispatcher(device_type="cpu", read=broken, find=lambda _: device)
    with pytest.warns(TunegemmWarning, match="no such database"):
        assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
    dispatcher = Dispatcher(device_type="cpu", read=broken, find=unknown)
    with pytest.warns(TunegemmWarning, match="sm_75") as caught:
        dispatcher.matmul(a, b)
        dispatcher.matmul(a[:16], b)
    assert len(caught) == 1


def test_refresh_reads_the_database_again(device, kernel):
    rows: list[Row] = []
    dispatcher = Dispatcher(
        device_type="cpu",
        read=lambda: Snapshot(rows),
        find=lambda _: device,
        prepare=lambda *_: Prepared(kernel),
    )
    a, b = operands()
    with pytest.warns(TunegemmWarning):
        dispatcher.matmul(a, b)
    rows.append(Row(Problem(32, 48, 64), device.fingerprint))
    quietly(dispatcher.matmul, a, b)
    assert not kernel.calls
    dispatcher.refresh()
    quietly(dispatcher.matmul, a, b)
    assert len(kernel.calls) == 1


def test_mode_off_reads_nothing(monkeypatch, kernel):
    monkeypatch.setenv("TUNEGEMM_MODE", "off")
    dispatcher = Dispatcher(
        device_type="cpu", read=lambda: pytest.fail("read"), find=lambda _: pytest.fail("asked")
    )
    a, b = operands()
    assert torch.equal(quietly(dispatcher.matmul, a, b), torch.matmul(a, b))
    monkeypatch.setenv("TUNEGEMM_MODE", "of")
    with pytest.warns(TunegemmWarning, match="'of'"):
        Dispatcher(read=lambda: Snapshot()).matmul(a, b)


def test_nothing_is_made_during_graph_capture(serve, kernel, monkeypatch):
    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    monkeypatch.setattr("tunegemm.dispatch.planning.capturing", lambda device: True)
    quietly(dispatcher.matmul, a, b)
    assert not kernel.calls
    monkeypatch.undo()
    quietly(dispatcher.matmul, a, b)  # the capture has left no verdict behind
    assert len(kernel.calls) == 1


# The real database and object store


def test_records_of_a_real_database_are_dispatched(monkeypatch, tmp_path, device, kernel):
    """Published through Database, read by the default reader from TUNEGEMM_DB; one problem is torch's."""
    from tunegemm.database import Database

    path = tmp_path / "tuning.sqlite"
    real = replace(device, spec="cuda:0")
    baseline = Candidate.make("cublaslt", {"algorithm": "torch.mm"})
    with Database.open(path) as database:
        for m, candidate in ((32, CANDIDATE), (16, baseline)):
            samples = (10.0, 11.0, 10.5)
            database.settle(Problem(m, 48, 64), real, Measurement(candidate, samples, samples, 1e-3, 0.003))
    monkeypatch.setenv("TUNEGEMM_DB", str(path))
    dispatcher = Dispatcher(
        device_type="cpu",
        find=lambda _: real,
        prepare=lambda record, _: TORCH if is_torch(record.candidate) else Prepared(kernel, tma=True),
    )
    a, b = operands()
    for m, hits in ((32, 1), (16, 1), (32, 2)):
        assert torch.equal(quietly(dispatcher.matmul, a[:m], b), torch.matmul(a[:m], b))
        assert len(kernel.calls) == hits
    with pytest.warns(TunegemmWarning, match="no record"):
        dispatcher.matmul(*operands(8, 480))


@pytest.mark.parametrize("content", [None, b"", b"no database" * 100])
def test_missing_and_corrupt_databases_warn_once(monkeypatch, tmp_path, device, content):
    path = tmp_path / "tuning.sqlite"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("TUNEGEMM_DB", str(path))
    dispatcher = Dispatcher(device_type="cpu", find=lambda _: device)
    a, b = operands()
    with pytest.warns(TunegemmWarning, match=r"tuning\.sqlite") as caught:
        assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
        assert torch.equal(dispatcher.matmul(a[:16], b), torch.matmul(a[:16], b))
    assert sum("tuning.sqlite" in str(w.message) for w in caught) == 1
    assert (path.read_bytes() if path.exists() else None) == content


def test_a_kernel_that_is_not_in_the_object_store_is_never_compiled(monkeypatch, tmp_path, device):
    """The shipped family and the default preparation, with an empty store."""
    monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    family = families.get("cute_sm90")
    problem = Problem(256, 256, 256)
    space = families.load_space("cute_sm90")
    kernel = next(k for k in space.kernels() if family.check(problem, k, device))
    candidate = next(space.launches(kernel))
    monkeypatch.setattr(type(family), "compile", lambda *_: pytest.fail("compiled"))
    rows = [Row(problem, device.fingerprint, candidate)]
    dispatcher = Dispatcher(device_type="cpu", read=lambda: Snapshot(rows), find=lambda _: device)
    a, b = operands(256, 256, 256)
    with pytest.warns(TunegemmWarning, match="not in the object store.*tunegemm tune --shape 256x256x256"):
        assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
    assert not (tmp_path / "cache").exists()


# The hot path


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


def at(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The bf16 tensor at an address."""
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * (2 * reach)).from_address(address)
    return torch.frombuffer(memory, dtype=BF16).as_strided(shape, strides)


@pytest.fixture
def by_address(serve):
    """A kernel of addresses and a dispatcher that serves it for 32x48x64."""
    kernel = ByAddress(Problem(32, 48, 64))
    return kernel, serve(kernel.problem, prepared=Prepared(kernel.launcher, tma=True))


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


def calls_of(call) -> tuple[list[str], list[str]]:
    """The Python and the C functions that a call enters."""
    python, c = [], []

    def profile(frame, event, argument):
        if event == "call":
            python.append(frame.f_code.co_name)
        elif event == "c_call":
            c.append(argument.__name__)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return python, c


def test_a_known_product_is_one_check_one_allocation_and_one_launch(by_address):
    """Counts every function that a warm call enters: no key, SQL, environment, lock, or import."""
    kernel, dispatcher = by_address
    a, b = operands()
    weight, out, x = b.t().contiguous(), torch.zeros(32, 48, dtype=BF16), a.view(2, 16, 64)
    for call, name, most in (
        (lambda: dispatcher.matmul(a, b), "matmul", 9),
        (lambda: dispatcher.matmul(a, b, out), "matmul", 10),
        (lambda: dispatcher.linear(a, weight), "linear", 9),
        (lambda: dispatcher.linear(x, weight), "linear", 9),
    ):
        call()
        dispatcher._lock, lock = None, dispatcher._lock  # a warm call that takes the lock fails
        python, c = calls_of(call)
        dispatcher._lock = lock
        python = python[1 : python.index("launch")]
        assert python[:2] == [name, "product"] and set(python[2:]) <= {"are_apart", "increment_version"}
        before_launch = c[: c.index("append")]
        assert len(before_launch) <= most and "check" in before_launch
        assert not {"stride", "acquire", "execute", "open", "format"} & set(before_launch)
    assert len(kernel.calls) == 8


def test_the_general_way_is_a_key_and_a_launch(serve, kernel):
    """Of a product that is launched by tensors, as one of aligned copies is."""
    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    dispatcher.matmul(a, b)
    dispatcher._lock = None
    python, c = calls_of(lambda: dispatcher.matmul(a, b))
    assert python[1 : python.index("__call__")] == [
        "matmul", "product", "_earlier", "_general", "is_ordinary", "launch_plan", "_launch_here",
    ]  # fmt: skip
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
    dispatcher = type(dispatcher)(device_type="cpu")
    for _ in range(3):  # matmul and linear of the same objects
        assert torch.equal(dispatcher.matmul(a, square), torch.matmul(a, square))
        assert torch.equal(dispatcher.linear(a, square), torch.matmul(a, square.t()))


def test_a_known_product_minds_the_modes(by_address):
    """The modes of the general way, met by a product that the short way knows."""
    kernel, dispatcher = by_address
    a, b = operands()
    weight = torch.nn.Parameter(b.t().contiguous())
    with torch.no_grad():
        for _ in range(2):
            quietly(dispatcher.linear, a, weight)
    assert len(kernel.calls) == 2
    assert dispatcher.linear(a, weight).requires_grad  # grad mode is on
    a_leaf = a.clone().requires_grad_()
    quietly(dispatcher.matmul, a, b)
    quietly(dispatcher.matmul, a, b)
    assert dispatcher.matmul(a_leaf, b).requires_grad
    assert len(kernel.calls) == 6
    test_tracing_sees_torch_matmul(lambda _: dispatcher, Counted(kernel, 6))
    kernel.calls.clear()
    test_deterministic_mode_is_torchs(lambda _: dispatcher, kernel)
    assert not kernel.calls
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, a)
        result = torch.autograd.forward_ad.unpack_dual(dispatcher.matmul(dual, b))
        assert torch.equal(result.tangent, torch.matmul(a, b))
    assert len(kernel.calls) == 2


class Counted:
    """A kernel as another test sees it: without its first calls."""

    def __init__(self, kernel: ByAddress, before: int) -> None:
        self._kernel, self._before = kernel, before

    @property
    def calls(self) -> list[tuple[int, ...]]:
        return self._kernel.calls[self._before :]


def test_views_that_are_made_for_the_call_are_known(serve):
    """What ATen passes for a weight is a new object each time, and Python's identities come back."""
    launchers = {n: ByAddress(Problem(32, n, 64)) for n in (16, 48, 80)}
    dispatcher = serve(*(each.problem for each in launchers.values()))
    dispatcher._prepare = lambda record, _: Prepared(launchers[record.problem.n].launcher, tma=True)
    a, _ = operands()
    weights = [operands(32, n, 64)[1].t().contiguous() for n in (16, 48, 80, 48, 16)]
    for turn in range(3):
        for weight in weights:
            python, _ = calls_of(lambda weight=weight: dispatcher.recorded(a, weight.t()))
            assert turn == 0 or "_general" not in python
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
    python = python[python.index("compiled") + 1 : python.index("launch")]
    assert not python and "check" not in c[: c.index("append")] and len(kernel.calls) == 2
    dispatcher.compiled("", plain, a, b, (), (), out)
    assert list(dispatcher._state.sites) == ["32x48x64"], "symbolic extents are looked at each time"
    torch.use_deterministic_algorithms(True)
    try:
        call()
    finally:
        torch.use_deterministic_algorithms(False)
    odd = torch.zeros(32 * 64 + 1, dtype=BF16)[1:].view(32, 64).copy_(a)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        call(odd)
    assert len(kernel.calls) == 3
    dispatcher.refresh()
    assert not dispatcher._state.sites
    call()
    assert len(kernel.calls) == 4


def test_modes_that_take_turns_are_both_served_the_short_way(by_address):
    kernel, dispatcher = by_address
    a, b = operands()
    expected = torch.matmul(a, b)
    for _ in range(3):
        with torch.inference_mode():
            results = [quietly(dispatcher.matmul, a, b) for _ in range(3)]
            python, _ = calls_of(lambda: dispatcher.matmul(a, b))
            assert results[0].is_inference() and "_general" not in python
        results += [quietly(dispatcher.matmul, a, b) for _ in range(3)]
        python, _ = calls_of(lambda: dispatcher.matmul(a, b))
        assert not results[-1].is_inference() and "_general" not in python
        assert all(torch.equal(result, expected) for result in results)
    assert len(kernel.calls) == 24


def test_a_product_left_to_torch_makes_no_key_either(serve, kernel):
    """Where torch is the recorded winner, or there is no record, a call adds little to torch's own."""
    dispatcher = serve(Problem(32, 48, 64), prepared=TORCH)
    a, b = operands()
    quietly(dispatcher.matmul, a, b)
    for call in (lambda: dispatcher.matmul(a, b), lambda: dispatcher.linear(a, b.t())):
        call()
    python, _ = calls_of(lambda: dispatcher.matmul(a, b))
    assert python[1:] == ["matmul", "product", "_torch_product", "_torch_matmul"]
    assert dispatcher.matmul(a.clone().requires_grad_(), b).requires_grad


def test_rows_that_take_turns_are_both_served_the_short_way(serve):
    """A weight meets a prompt and a decoding step in turns."""
    launchers = {m: ByAddress(Problem(m, 48, 64)) for m in (16, 32)}
    dispatcher = serve(*(each.problem for each in launchers.values()))
    dispatcher._prepare = lambda record, _: Prepared(launchers[record.problem.m].launcher, tma=True)
    a, b = operands()
    for turn in range(4):
        for rows in (a, a[:16]):
            python, _ = calls_of(lambda rows=rows: dispatcher.matmul(rows, b))
            assert torch.equal(dispatcher.matmul(rows, b), torch.matmul(rows, b))
            assert turn == 0 or "_general" not in python
    assert [len(each.calls) for each in launchers.values()] == [8, 8]


def test_outputs_of_known_products(by_address):
    """The short way asks of `out` what the general way asks."""
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
    dispatcher._lock = None  # the next one finds the plan without a key
    assert "_general" not in calls_of(lambda: dispatcher.matmul(a, a))[0]
    other = a.clone()
    assert torch.equal(quietly(dispatcher.matmul, other, a), torch.matmul(other, a))
    assert torch.equal(quietly(dispatcher.matmul, a, a), torch.matmul(a, a))


def test_without_torchs_guards_every_call_goes_the_general_way(by_address, monkeypatch):
    kernel, dispatcher = by_address
    monkeypatch.setattr("tunegemm.dispatch.dispatcher.TensorGuards", None)
    a, b = operands()
    for _ in range(3):
        assert torch.equal(quietly(dispatcher.matmul, a, b), torch.matmul(a, b))
    assert len(kernel.calls) == 3 and not dispatcher._state.recent


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


# Records of other processes, and forks


def test_records_published_meanwhile_are_found_by_products_left_to_torch(device, monkeypatch):
    """A look at files every few seconds at most, and only when torch would compute the product."""
    monkeypatch.setenv("TUNEGEMM_MODE", "exact")
    known, later = ByAddress(Problem(32, 48, 64)), Kernel()
    rows, looks, now = [Row(known.problem, device.fingerprint)], [], [0.0]
    monkeypatch.setattr("tunegemm.dispatch.planning.time.monotonic", lambda: now[0])

    def modified():
        looks.append(now[0])
        return len(rows)

    dispatcher = Dispatcher(
        device_type="cpu",
        read=lambda: Snapshot(rows),
        find=lambda _: device,
        prepare=lambda record, _: Prepared(known.launcher if record.problem == known.problem else later),
        modified=modified,
    )
    a, b = operands()
    quietly(dispatcher.matmul, a, b)
    with pytest.warns(TunegemmWarning, match="no record"):
        dispatcher.matmul(a[:16], b)
    rows.append(Row(Problem(16, 48, 64), device.fingerprint))
    quietly(dispatcher.matmul, a[:16], b)
    assert not later.calls and looks == [0.0], "too early to look again"
    now[0] = LOOK_SECONDS + 1
    for _ in range(3):
        quietly(dispatcher.matmul, a, b)
    assert looks == [0.0], "a known product never looks"
    plans = dict(dispatcher._state.plans)
    assert torch.equal(quietly(dispatcher.matmul, a[:16], b), torch.matmul(a[:16], b))
    assert len(later.calls) == 1 and len(looks) == 3
    kept = {key: plan for key, plan in plans.items() if plan is not None}
    assert kept.items() <= dispatcher._state.plans.items(), "plans of tuned kernels stay"


def test_nothing_is_looked_for_during_graph_capture(device, monkeypatch):
    looks, now = [], [0.0]
    monkeypatch.setattr("tunegemm.dispatch.planning.time.monotonic", lambda: now[0])
    dispatcher = Dispatcher(
        device_type="cpu",
        read=Snapshot,
        find=lambda _: device,
        modified=lambda: looks.append(now[0]),
    )
    a, b = operands()
    with pytest.warns(TunegemmWarning, match="no record"):
        dispatcher.matmul(a, b)
    monkeypatch.setattr("tunegemm.dispatch.planning.capturing", lambda device: True)
    now[0] = LOOK_SECONDS + 1
    quietly(dispatcher.matmul, a, b)
    assert looks == [0.0]


def test_what_is_looked_at_changes_when_another_process_publishes(monkeypatch, tmp_path, device):
    from tunegemm.database import Database
    from tunegemm.database.layers import modified

    path = tmp_path / "tuning.sqlite"
    monkeypatch.setenv("TUNEGEMM_DB", str(path))
    before = modified()
    real = replace(device, spec="cuda:0")
    seen = [before]
    with Database.open(path) as database:
        for m in (16, 32):
            measured = Measurement(CANDIDATE, (1.0, 1.1, 1.2), (1.0, 1.1, 1.2), 1e-3, 0.003)
            database.settle(Problem(m, 48, 64), real, measured)
            seen.append(modified())
        with Database.open(path, read_only=True) as reader:
            reader.lookup()
        assert modified() == seen[-1], "reading changes nothing"
    assert len(set(seen)) == 3
    monkeypatch.setenv("TUNEGEMM_DB", "postgresql://nowhere/tunegemm")
    assert len(modified()) == 2


def test_a_forked_child_starts_anew(by_address):
    """The parent's lock is held by a thread that the child does not have."""
    kernel, dispatcher = by_address
    a, b = operands()
    expected = quietly(dispatcher.matmul, a, b)
    held, done = threading.Event(), threading.Event()

    def hold():
        with dispatcher._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits for the lock
        same = torch.equal(dispatcher.matmul(a, b), expected) and len(kernel.calls) == 2
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


def test_hot_path_imports_neither_search_nor_sqlalchemy():
    code = (
        "import sys, tunegemm.dispatch\n"
        "heavy = {'optuna', 'sqlalchemy', 'pandas', 'cutlass', 'tunegemm.search', "
        "'tunegemm.database.store'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "[]"


def test_threads_agree_and_prepare_once(device, kernel):
    prepared = []

    def prepare(record, device):
        prepared.append(record)
        return Prepared(kernel, tma=True)

    dispatcher = Dispatcher(
        device_type="cpu",
        read=lambda: Snapshot([Row(Problem(32, 48, 64), device.fingerprint)]),
        find=lambda _: device,
        prepare=prepare,
    )
    a, b = operands()
    expected = torch.matmul(a, b)
    wrong = []

    def work():
        for _ in range(50):
            if not torch.equal(dispatcher.matmul(a, b), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(prepared) == 1 and len(kernel.calls) == 400


def test_plans_are_bounded(serve, kernel, monkeypatch):
    monkeypatch.setattr("tunegemm.dispatch.planning.MAX_PLANS", 4)
    dispatcher = serve(*(Problem(m, 48, 64) for m in range(1, 9)))
    a, b = operands()
    for m in range(1, 9):
        quietly(dispatcher.matmul, a[:m], b)
    assert len(kernel.calls) == 8 and len(dispatcher._state.plans) <= 4
