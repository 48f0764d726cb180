"""Policy `batch_invariant` on a GPU: rows of each batch have the bits of the largest one's, by any kernel.

Records are planted, so that neighbouring numbers of rows run by kernels as unlike as the class has; one of
them splits k, and its rows must be another kernel's. Kernels that ship are left out where they are not meant.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import tunegemm
from benchmarks.batch_invariance import EVERY, KINDS, SAMPLED, compare, larger
from tests.choose.test_neighbours import kernel
from tests.support.kernels import Kernels
from tests.support.serving import Row
from tunegemm.choose.policies import Policy
from tunegemm.choose.selection import select
from tunegemm.choose.snapshot import Snapshot
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch import api
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import find_object
from tunegemm.dispatch.planning import Planner
from tunegemm.errors import ArtifactError, TunegemmWarning
from tunegemm.generate import families
from tunegemm.generate.tiles import ORDERED
from tunegemm.groups import grouped
from tunegemm.measure.operands import make_operands
from tunegemm.model import shortlist
from tunegemm.store import packing
from tunegemm.store.provided import provide_grouped
from tunegemm.store.record import Record

pytestmark = pytest.mark.gpu

N, K = 1056, 4096
LARGEST = 4096
SPLIT_M = 200
POLICY = Policy("batch_invariant")
every_kind = pytest.mark.parametrize("kind", KINDS)


def planted(kind: str) -> dict[int, Candidate]:
    """Kernels by the number of rows that they are recorded for."""
    gated = KINDS[kind].get("epilogue", "") == "swiglu"
    changes: dict[str, Any] = {"tile_k": 128} if kind == "fp8" else {}
    found = {
        8: kernel(64, 32, **changes) if gated else kernel(128, 16, swap_ab=True, **changes),
        64: kernel(64, 64, **changes),
        SPLIT_M: kernel(64, 128, split_k=2, **changes),
        256: kernel(128, 128, cluster_m=2, **changes),
        1024: kernel(128, 192, schedule="cooperative", stages=3, raster_order="along_n", **changes),
        LARGEST: kernel(128, 160, stages=3, cluster_n=2, **changes),
    }
    if not gated:
        found[24] = kernel(64, 96, swap_ab=True, stages=3, **changes)
    return found


def problem_of(kind: str, m: int) -> Problem:
    return Problem.parse(f"{m}x{N}x{K}", **KINDS[kind])


@pytest.fixture(scope="module")
def rows(kernels: Kernels, device: Device) -> list[Record]:
    """Their records; the kernels are put into the user's store of these tests, where dispatch finds them."""
    wanted = [(problem_of(kind, m), candidate) for kind in KINDS for m, candidate in planted(kind).items()]
    kernels.begin_all(wanted)
    for problem, candidate in wanted:
        result = kernels.begin(problem, candidate).result()
        assert result.artifact is not None, (problem, candidate, result.failure)
        key = families.get("cute_sm90").kernel_key(problem, candidate, device)
        packing.copy(ArtifactStore(), key, result.artifact)
    return [Row(problem, device.fingerprint, candidate) for problem, candidate in wanted]


@contextmanager
def serving(rows: list[Record]) -> Iterator[None]:
    """All products of the process, by these records and by what ships for the policy."""
    before = api.serve_by(Dispatcher(Planner(read=lambda: Snapshot(rows), rivals=lambda problem: ())))
    with warnings.catch_warnings():
        warnings.simplefilter("error", TunegemmWarning)
        try:
            yield
        finally:
            api.serve_by(before)
            torch._dynamo.reset()


@pytest.fixture
def served(rows: list[Record], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By these records alone."""
    monkeypatch.setattr(shortlist, "ordered_kernels", lambda problem: ())
    with serving(rows):
        yield


@every_kind
def test_rows_of_every_batch_have_the_same_bits(served: None, kind: str) -> None:
    tried = [*EVERY, *larger(largest=LARGEST)]
    found, said, _ = compare(problem_of(kind, LARGEST), tried, [m for m in SAMPLED if m <= LARGEST])
    assert found == {"eager": [], "graph": [], "compiled": []} and said == []


@every_kind
def test_kernels_that_ship_have_the_bits_of_recorded_ones(
    rows: list[Record], device: Device, kind: str
) -> None:
    """The largest batch is a record's; what ships is expected to be faster at most other numbers of rows."""
    problem = problem_of(kind, LARGEST)
    listed = shortlist.launched(problem, shortlist.ordered_kernels(problem)[0])
    try:
        find_object(Record(problem, listed, device.fingerprint), device)
    except ArtifactError as error:
        pytest.skip(f"{error}; run `make kernels`")
    options = [select(Snapshot(rows), problem_of(kind, m), device, policy=POLICY).options for m in SAMPLED]
    own = {row.candidate.kernel for row in rows}
    assert any(found[0].candidate.kernel not in own for found in options), "or nothing is compared"
    with serving(rows):
        found, said, _ = compare(problem, SAMPLED, ())
    assert found["eager"] == [] and said == []


@every_kind
def test_they_are_rows_of_unlike_kernels(served: None, rows: list[Record], device: Device, kind: str) -> None:
    """Or the test above compares a kernel with itself."""

    def options(m: int) -> tuple[Record, ...]:
        return select(Snapshot(rows), problem_of(kind, m), device, policy=POLICY).options

    assert len({options(m)[0].candidate.kernel for m in (*planted(kind), 1, 300, 2000)}) >= 4
    assert all(families.reduction_class(one.problem, one.candidate) == ORDERED for one in options(SPLIT_M))


def test_the_fastest_kernels_give_other_bits(served: None) -> None:
    """What the policy is for: here those that split k."""
    made = make_operands(problem_of("bf16", LARGEST), torch.device("cuda"), 0)
    few = tunegemm.matmul(made.a[:SPLIT_M], made.b)
    assert not torch.equal(few, tunegemm.matmul(made.a, made.b)[:SPLIT_M])


def test_a_product_that_is_first_seen_in_a_graph_is_a_warning(served: None) -> None:
    a = torch.randn(77, K, device="cuda").bfloat16()
    b = torch.randn(N, K, device="cuda").bfloat16().t()
    torch.mm(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        tunegemm.policy("batch_invariant"),
        pytest.warns(TunegemmWarning, match="captured before"),
        torch.cuda.graph(graph),
    ):
        tunegemm.matmul(a, b)


def test_calls_of_torch_are_served_alike(served: None) -> None:
    """By `enable` and by `patch`."""
    layer = torch.nn.Linear(K, N, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(LARGEST, K, device="cuda").bfloat16()
    extents = [m for m in SAMPLED if m <= LARGEST]
    with tunegemm.policy("batch_invariant"), torch.no_grad():
        whole = tunegemm.matmul(x, layer.weight.t())
        tunegemm.enable()
        try:
            enabled = [m for m in extents if not torch.equal(layer(x[:m]), whole[:m])]
        finally:
            tunegemm.disable()
        tunegemm.patch(layer)
        patched = [m for m in extents if not torch.equal(layer(x[:m]), whole[:m])]
    assert enabled == patched == []


@pytest.mark.parametrize("gate", ["", "swiglu"])
@pytest.mark.parametrize(("n", "k"), [(1024, 4096), (14336, 1088)])
def test_a_row_of_a_group_has_its_bits_among_any_others(gate: str, n: int, k: int) -> None:
    """Alone, where a kernel with another order of sums serves otherwise, and among more than any race had."""
    for kind in ("bf16", "gated"):
        assert not provide_grouped(kind).failures
    torch.manual_seed(0)
    weights = torch.randn(4, n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    a = torch.randn(20000, k, device="cuda", dtype=torch.bfloat16)
    rows = []
    with tunegemm.policy("batch_invariant"):
        for count in (1, 2, 16, 64, 300, 1200, 4096, 20000):
            ends = torch.tensor([(count + 1) // 2, count, count, count], device="cuda", dtype=torch.int32)
            result = grouped.groups(a[:count], weights.mT, ends, None, gate)
            assert result is not None, count
            rows.append(result[0].clone())
    assert all(torch.equal(row, rows[0]) for row in rows)


def test_a_layer_of_experts_has_a_tokens_bits_among_any_others() -> None:
    for kind in ("bf16", "gated", "routing"):
        assert not provide_grouped(kind).failures
    torch.manual_seed(0)
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, up = torch.randn(9000, 512, **half), torch.randn(8, 1024, 512, **half) / 22
    down = torch.randn(8, 512, 512, **half) / 22
    weights, index = torch.rand(9000, 8, device="cuda").topk(2)
    with tunegemm.policy("batch_invariant"):
        rows = [
            tunegemm.experts(x[:count], up, down, index[:count].contiguous(), weights[:count].contiguous())[0]
            for count in (1, 2, 100, 5000, 9000)
        ]
    assert all(torch.equal(row, rows[0]) for row in rows)
