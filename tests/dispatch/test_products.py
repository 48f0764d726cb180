"""Dispatch without a GPU: which products a kernel may compute, and that results are torch's in every mode."""

from __future__ import annotations

import itertools
import math
from contextlib import suppress

import pytest
import torch

from tests.support.serving import BF16, ByAddress, deterministic, operands, quietly
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.forms import Operands, Refusal, describe
from tunegemm.dispatch.launchers import Prepared
from tunegemm.torch import functions

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


@pytest.mark.parametrize(
    ("shape", "strides", "refused"),
    [((32, 48), (50, 1), False), ((32, 48), (1, 40), False), ((32, 48), (100, 2), True),
     ((32, 1), (3, 5), False), ((1, 48), (100, 2), True), ((1, 1), (3, 5), False)],
)  # fmt: skip
def test_an_output_needs_a_unit_stride_unless_it_has_one_element_in_that_direction(shape, strides, refused):
    m, n = shape
    out = torch.empty(4096, dtype=BF16).as_strided(shape, strides)
    found = describe(torch.empty(m, 64, dtype=BF16), torch.empty(64, n, dtype=BF16), out)
    assert isinstance(found, Refusal) == refused
    if isinstance(found, Refusal):
        assert found.reason.startswith("output with strides") and "no unit stride" in found.reason
    else:
        assert found.problem.out_major == ("m" if strides == (1, 40) else "n")
        assert found.spans[2] == 2 * (1 + (m - 1) * strides[0] + (n - 1) * strides[1])


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


def test_padded_out_is_written_in_place(serve, kernel):
    a, b = operands()
    room = torch.zeros(32, 64, dtype=BF16)
    assert quietly(serve(Problem(32, 48, 64)).matmul, a, b, room[:, :48]) is not None
    assert len(kernel.calls) == 1
    assert torch.equal(room[:, :48], torch.matmul(a, b)) and not room[:, 48:].any()


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


# Modes in which torch.matmul means more than a launch


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
    with deterministic():
        quietly(dispatcher.matmul, a, b)
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
    """fp64 is not cast, and a device without autocast has none."""
    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    with torch.autocast("cpu", dtype=BF16), torch.no_grad():
        assert dispatcher.matmul(a.double(), b.double()).dtype == torch.float64
        with pytest.raises(RuntimeError):
            dispatcher.matmul(a.double(), b.float())
        assert dispatcher.linear(a.to("meta"), b.t().to("meta")).shape == (32, 48), "torch asks for no meta"
    assert functions.matmul(a.to("meta"), b.to("meta"), out_dtype=BF16).shape == (32, 48)
    assert not kernel.calls


class Counted:
    """A kernel as another test sees it: without its first calls."""

    def __init__(self, kernel: ByAddress, before: int) -> None:
        self._kernel, self._before = kernel, before

    @property
    def calls(self) -> list[tuple[int, ...]]:
        return self._kernel.calls[self._before :]


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
    assert not kernel.calls


def test_torch_compile_graphs_hold_torch_matmul():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    a, b = operands()
    compiled = torch.compile(
        lambda a, b: functions.linear(functions.matmul(a, b), b), backend=backend, fullgraph=True
    )
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


def test_out_is_written_by_the_kernel_and_returned(serve, kernel):
    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    out = torch.full((32, 48), float("nan"), dtype=BF16)
    version = out._version
    assert quietly(dispatcher.matmul, a, b, out) is out
    assert torch.equal(out, torch.matmul(a, b)) and len(kernel.calls) == 1
    assert out._version > version  # autograd must notice that it was written


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
    for shared in (square, other.t()):  # torch decides what then happens: an error, on some devices
        with suppress(RuntimeError):
            dispatcher.matmul(square, other, shared)
    assert not kernel.calls
    assert dispatcher.matmul(square, other, torch.zeros_like(square)) is not None
    assert len(kernel.calls) == 1


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
