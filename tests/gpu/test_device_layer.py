"""The device layer on the GPU: a caller's workspace, streams, broadcast batches and views of every family."""

from __future__ import annotations

import itertools
from concurrent.futures import wait

import pytest
import torch

from tests.generate import test_cute_sm80, test_gluon_wgmma, test_triton_tma
from tests.support.hopper import hopper
from tests.support.kernels import Kernels
from tests.support.numerics import TOLERANCE, difference, poisoned, relative_error, untouched
from tests.support.serving import Row, forbid_torch
from tunegemm.choose.snapshot import Snapshot
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.describe.device import Device
from tunegemm.describe.problem import LAYOUTS, Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import Prepared
from tunegemm.dispatch.operation import Operation
from tunegemm.dispatch.planning import Planner
from tunegemm.errors import OperationError, ProblemError
from tunegemm.generate.cublaslt import FAMILY as CUBLASLT
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure import operands as data

pytestmark = pytest.mark.gpu

HOPPER = hopper({"cluster_n": 2})
PINGPONG = hopper({"schedule": "pingpong"})
SWAPPED = hopper({"tile_n": 32, "swap_ab": True})
AMPERE = test_cute_sm80.candidate().with_launch(**test_cute_sm80.LAUNCH)
TRITON = test_triton_tma.candidate().with_launch(**test_triton_tma.LAUNCH)
GLUON = test_gluon_wgmma.candidate().with_launch(**test_gluon_wgmma.LAUNCH)
FAMILIES = [HOPPER, PINGPONG, SWAPPED, AMPERE, TRITON, GLUON, TORCH_MM]

M, N, K, BATCH = 104, 400, 328, 3


@pytest.fixture(scope="module")
def store(kernels: Kernels) -> ArtifactStore:
    begun = []
    for candidate, layout, batch in itertools.product(FAMILIES, LAYOUTS, (1, BATCH)):
        operation = Operation(problem(layout, batch), candidate, kernels.device)
        if candidate is not TORCH_MM and operation.can_implement():
            begun.append(kernels.begin(operation.problem, candidate))
    wait(begun)
    return kernels.pool.store


def problem(layout: str = "tn", batch: int = 1) -> Problem:
    return Problem.parse(f"{M}x{N}x{K}x{batch}", layout=layout)


def label(candidate: Candidate) -> str:
    return f"{candidate.family}-{candidate.params.get('schedule', '')}-{candidate.params.get('swap_ab', '')}"


def memory(shape: tuple[int, ...], row_major: bool, gap: int = 0, offset: int = 0, middle: bool = False):
    """Random operands whose surroundings are NaN: lines with a gap, an offset, or a batch in the middle."""
    *lead, rows, columns = shape
    lines, extent = (rows, columns) if row_major else (columns, rows)
    order = (lines, *lead, extent + gap) if middle else (*lead, lines, extent + gap)
    size = int(torch.Size(order).numel())
    room = poisoned(offset + size)
    tensor = room[offset:].view(order)
    tensor = (tensor.transpose(0, 1) if middle else tensor)[..., :extent]
    tensor.copy_(torch.randn(tensor.shape, device="cuda"))
    return tensor if row_major else tensor.mT


def one_for_all(shape: tuple[int, ...], row_major: bool, **room: int) -> torch.Tensor:
    return memory(shape[1:], row_major, **room).expand(shape)


def window(shape: tuple[int, ...], row_major: bool) -> torch.Tensor:
    """Entries that begin 8 lines after each other."""
    batch, rows, columns = shape
    lines, extent = (rows, columns) if row_major else (columns, rows)
    long = memory((lines + 8 * batch, extent), True)
    tensor = long.as_strided((batch, lines, extent), (8 * extent, extent, 1))
    return tensor if row_major else tensor.mT


VIEWS = {
    "packed": (memory, memory, {}),
    "leading": (memory, memory, {"gap": 24}),
    "offset": (memory, memory, {"gap": 8, "offset": 72}),
    "middle": (memory, memory, {"gap": 8, "middle": True}),
    "one b": (memory, one_for_all, {}),
    "one a": (one_for_all, memory, {"gap": 16, "offset": 8}),
    "one of both": (one_for_all, one_for_all, {}),
    "window": (window, window, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("candidate", FAMILIES, ids=label)
@pytest.mark.parametrize("views", VIEWS)
def test_views_and_broadcast_batches_are_right(
    device: Device, store: ArtifactStore, candidate: Candidate, layout: str, views: str
) -> None:
    """A family takes a view and is right, or refuses it with a reason."""
    make_a, make_b, room = VIEWS[views]
    operation = Operation(problem(layout, BATCH), candidate, device, store=store)
    if not (verdict := operation.can_implement()):
        assert verdict.reason
        pytest.skip(f"{verdict}")
    a_rows, b_rows = operation.problem.a_major == "k", operation.problem.b_major == "n"
    a, b = make_a((BATCH, M, K), a_rows, **room), make_b((BATCH, K, N), b_rows, **room)
    whole = poisoned(BATCH, M + 3, N + 8)
    out = whole[:, :M, :N]
    operation.initialize()
    for _ in range(2):
        out.fill_(torch.nan)
        operation.run(a, b, out)
        assert relative_error(out, a, b) < TOLERANCE["bf16"]
    assert untouched(whole, out), "wrote outside its output"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("candidate", FAMILIES, ids=label)
def test_views_of_one_product_are_right(
    device: Device, store: ArtifactStore, candidate: Candidate, layout: str
) -> None:
    operation = Operation(problem(layout), candidate, device, store=store)
    if not (verdict := operation.can_implement()):
        pytest.skip(f"{verdict}")
    a_rows, b_rows = operation.problem.a_major == "k", operation.problem.b_major == "n"
    operation.initialize()
    for gap, offset in ((0, 0), (0, 8), (40, 0), (8, 200)):
        a, b = memory((M, K), a_rows, gap, offset), memory((K, N), b_rows, gap, offset)
        out = memory((M, N), True, gap, offset)
        operation.run(a, b, out)
        assert relative_error(out, a, b) < TOLERANCE["bf16"], (gap, offset)


def test_a_broadcast_matrix_operand_of_the_epilogue(device: Device, store: ArtifactStore) -> None:
    fused = Problem(M, N, K, BATCH, epilogue="bias_n+relu+residual")
    operation = Operation(fused, PINGPONG, device, store=store)
    operation.initialize()
    a, b = memory((BATCH, M, K), True), one_for_all((BATCH, K, N), False)
    bias, residual = torch.randn(N, device="cuda").bfloat16(), one_for_all((BATCH, M, N), True)
    out = poisoned(BATCH, M, N)
    operation.run(a, b, out, bias, residual)
    expected = torch.relu(a.float() @ b.float() + bias.float()) + residual.float()
    assert difference(out, expected) < TOLERANCE["bf16"]
    with pytest.raises(ProblemError, match="takes 2 operands"):
        operation.run(a, b, out, bias)


@pytest.mark.filterwarnings("error::tunegemm.errors.TunegemmWarning")
def test_dispatch_serves_one_matrix_for_a_batch(
    device: Device, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a record of our own kernel, on the first call and when the product is known."""
    forbid_torch(monkeypatch)
    for layout, candidate in itertools.product(LAYOUTS, (HOPPER, PINGPONG, SWAPPED)):
        operation = Operation(problem(layout, BATCH), candidate, device, store=store)
        operation.initialize()
        served = Prepared(operation.run, tma=True)
        row = Row(operation.problem, device.fingerprint, candidate)
        dispatcher = Dispatcher(
            Planner(
                read=lambda row=row: Snapshot([row]), prepare=lambda record, device, served=served: served
            )
        )
        a_rows, b_rows = operation.problem.a_major == "k", operation.problem.b_major == "n"
        one_a, one_b = memory((M, K), a_rows), memory((K, N), b_rows)
        many_a, many_b = memory((BATCH, M, K), a_rows), memory((BATCH, K, N), b_rows)
        for a, b in ((one_a, many_b), (many_a, one_b.expand_as(many_b)), (one_a.expand_as(many_a), many_b)):
            for _ in range(3):
                assert relative_error(dispatcher.matmul(a, b), a, b) < TOLERANCE["bf16"]


SPLIT = [
    HOPPER.with_launch(split_k=3),
    SWAPPED.with_launch(split_k=2),
    AMPERE.with_launch(split_k=3),
    TRITON.with_launch(split_k=3),
]


@pytest.fixture
def long() -> Problem:
    return Problem.parse("128x512x8192")


def operands_of(problem: Problem, seed: int) -> data.Operands:
    return data.make_operands(problem, torch.device("cuda", 0), seed)


@pytest.mark.parametrize("candidate", SPLIT, ids=label)
class TestCallersWorkspace:
    def test_it_is_used_and_no_other_memory(
        self, device: Device, store: ArtifactStore, candidate: Candidate, long: Problem
    ) -> None:
        operation = Operation(long, candidate, device, store=store)
        need = operation.workspace_bytes
        assert need > 0
        room = torch.full((need + 4096,), 0xAB, dtype=torch.uint8, device="cuda")  # counters are not zeros
        made = operands_of(long, 1)
        operation.initialize(room)
        results = [torch.full_like(made.out, torch.nan) for _ in range(20)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for out in results:
            operation.run(made.a, made.b, out)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() == before
        assert relative_error(results[0], made.a, made.b) < TOLERANCE["bf16"]
        assert all(torch.equal(results[0], result) for result in results)
        assert bool((room[need:] == 0xAB).all()), "wrote behind its workspace"
        assert not bool((room[:need] == 0xAB).all()), "its workspace was not used"

    def test_two_streams_with_a_workspace_each(
        self, device: Device, store: ArtifactStore, candidate: Candidate, long: Problem
    ) -> None:
        streams = [torch.cuda.Stream() for _ in range(2)]
        operations, sets, expected = [], [], []
        for seed, stream in enumerate(streams):
            operation = Operation(long, candidate, device, store=store)
            workspace = torch.empty(operation.workspace_bytes, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            operation.initialize(workspace, stream=stream)
            made = operands_of(long, seed)
            operations.append(operation)
            sets.append([made, [torch.full_like(made.out, torch.nan) for _ in range(30)]])
            expected.append(data.reference(made.a, made.b))
        torch.cuda.synchronize()
        for turn in range(30):
            for operation, stream, (made, outs) in zip(operations, streams, sets, strict=True):
                given = stream if turn % 2 else stream.cuda_stream
                operation.run(made.a, made.b, outs[turn], stream=given)
        torch.cuda.synchronize()
        for (_, outs), reference in zip(sets, expected, strict=True):
            assert difference(outs[0], reference) < TOLERANCE["bf16"]
            assert all(torch.equal(outs[0], out) for out in outs)

    def test_without_one_each_stream_has_its_own(
        self, device: Device, store: ArtifactStore, candidate: Candidate, long: Problem
    ) -> None:
        operation = Operation(long, candidate, device, store=store)
        operation.initialize()
        made = operands_of(long, 3)
        streams = [torch.cuda.Stream() for _ in range(2)]
        outs = [torch.full_like(made.out, torch.nan) for _ in range(40)]
        torch.cuda.synchronize()
        for turn, out in enumerate(outs):
            operation.run(made.a, made.b, out, stream=streams[turn % 2])
        torch.cuda.synchronize()
        assert relative_error(outs[0], made.a, made.b) < TOLERANCE["bf16"]
        assert all(torch.equal(outs[0], out) for out in outs)

    def test_in_a_graph(
        self, device: Device, store: ArtifactStore, candidate: Candidate, long: Problem
    ) -> None:
        operation = Operation(long, candidate, device, store=store)
        room = torch.full((operation.workspace_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
        operation.initialize(room)
        made = operands_of(long, 4)
        operation.run(made.a, made.b, made.out)
        first = made.out.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            operation.run(made.a, made.b, made.out)
        for _ in range(5):
            made.out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(made.out, first)
        other = torch.full_like(room, 0xCD)
        operation.initialize(other)
        operation.run(made.a, made.b, made.out)
        assert torch.equal(made.out, first) and not bool((other == 0xCD).all())
        assert relative_error(first, made.a, made.b) < TOLERANCE["bf16"]

    def test_what_does_not_do_is_refused(
        self, device: Device, store: ArtifactStore, candidate: Candidate, long: Problem
    ) -> None:
        operation = Operation(long, candidate, device, store=store)
        need = operation.workspace_bytes
        room = torch.empty(2 * need, dtype=torch.uint8, device="cuda")
        for workspace, reason in (
            (room[: need - 1], f"workspace of {need - 1} B; .* needs {need} B"),
            (room[8 : need + 8], "not a multiple of 256 B"),
            (room[::2], "contiguous"),
            (room.cpu(), "workspace on cpu"),
        ):
            with pytest.raises(OperationError, match=reason):
                operation.initialize(workspace)
        with pytest.raises(OperationError, match="not initialized"):
            operation.run(room, room, room)


def test_the_librarys_algorithms_take_a_callers_workspace(device: Device) -> None:
    wanted = Problem.parse("64x64x65536")
    found = [c for c in CUBLASLT.discover(wanted, device) if c.params.get("workspace_bytes")]
    if not found:
        pytest.skip("the library names no algorithm with a workspace")
    operation = Operation(wanted, found[0], device)
    assert operation.workspace_bytes == found[0]["workspace_bytes"]
    room = torch.full((operation.workspace_bytes,), 0xAB, dtype=torch.uint8, device="cuda")
    operation.initialize(room)
    made = operands_of(wanted, 0)
    operation.run(made.a, made.b, made.out)
    assert relative_error(made.out, made.a, made.b) < TOLERANCE["bf16"]
    assert not bool((room == 0xAB).all()), "its workspace was not used"
    with pytest.raises(OperationError, match=r"needs \d+ B"):
        operation.initialize(room[:256])


def test_operands_of_another_problem_are_refused(device: Device, store: ArtifactStore) -> None:
    operation = Operation(problem(batch=BATCH), HOPPER, device, store=store)
    operation.initialize()
    a, b, out = memory((BATCH, M, K), True), memory((BATCH, K, N), False), memory((BATCH, M, N), True)
    for given, reason in (
        ((a[:2], b, out), r"a is \(2, 104, 328\)"),
        ((a[0], b, out), r"a is \(104, 328\)"),
        ((a, b.half(), out), "b is .* torch.float16"),
        ((a, b.contiguous(), out), "b has strides .* contiguous along k"),
        ((a, b, out.cpu()), "out is .* on cpu"),
        ((a, b, out[:1].expand_as(out)), "overlaps itself"),
    ):
        with pytest.raises(ProblemError, match=reason):
            operation.run(*given)
    operation.run(a, b, out)
    assert relative_error(out, a, b) < TOLERANCE["bf16"]
