"""Recording on a GPU: times between events, other streams, CUDA graphs by their replays."""

from __future__ import annotations

import pytest
import torch

import tunegemm
from tunegemm.describe.problem import Problem
from tunegemm.describe.workload import demands

pytestmark = pytest.mark.gpu


def operands(m: int = 4096, n: int = 4096, k: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in ((m, k), (k, n)))
    return a, b


def test_times_are_those_of_the_gpu() -> None:
    a, b = operands()
    torch.mm(a, b)
    with tunegemm.record() as recording:
        for _ in range(50):
            torch.mm(a, b)
    (product,) = recording.products
    assert product.kind.device == "cuda" and product.calls == 50 and product.timed == 32
    # Its floor on any GPU of 3 PFLOP/s and less is 46 us; a wall clock around the launch would say less.
    assert product.median_us is not None and 40 < product.median_us < 5000


def test_backward_runs_in_other_threads() -> None:
    a, b = (operand.requires_grad_() for operand in operands(256, 512, 128))
    with tunegemm.record() as recording:
        torch.mm(a, b).square().sum().backward()
    assert sum(product.calls for product in recording.products) == 3


def test_a_captured_product_counts_by_its_replays() -> None:
    a, b = operands(256, 512, 128)
    torch.mm(a, b)
    torch.cuda.synchronize()
    with tunegemm.record() as recording:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mm(torch.mm(a, b), b.t())
        captured = recording.products
        for _ in range(7):
            graph.replay()
    assert [(p.calls, p.captured, p.weight) for p in captured] == [(0, 1, 1), (0, 1, 1)]
    assert [(p.calls, p.replayed, p.timed) for p in recording.products] == [(7, 7, 0), (7, 7, 0)]
    with tunegemm.record() as later:
        graph.replay()
    assert [p.calls for p in later.products] == [1, 1], "what it computes is known from before"


def test_a_layer_of_experts_counts_in_calls_compiled_code_and_graphs() -> None:
    x, gate_up, down = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((32, 256), (8, 512, 256), (8, 256, 256))
    )
    weights, chosen = torch.rand(32, 8, dtype=torch.bfloat16, device="cuda").topk(2)

    def layer() -> torch.Tensor:
        return tunegemm.experts(x, gate_up, down, chosen, weights)

    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager")
    layer(), compiled()
    with tunegemm.record() as recording:
        layer(), compiled()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer()
        graph.replay()
    found, refused = demands(recording.products)
    wanted = Problem.of_groups(64, 512, 256, 8, gate="swiglu"), Problem.of_groups(64, 256, 256, 8)
    assert {one.problem: one.calls for one in found} == dict.fromkeys(wanted, 3), refused


def test_replays_of_an_older_graph_are_told() -> None:
    a, b = operands(256, 512, 128)
    torch.mm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(a, b)
    with tunegemm.record() as recording:
        graph.replay()
    assert recording.products == () and recording.workload().unknown_replays == 1


def test_compiled_with_cuda_graphs() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda a, b: torch.relu(a @ b), mode="reduce-overhead")
    a, b = operands(256, 512, 128)
    with tunegemm.record() as recording, torch.no_grad():
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(a, b)
        torch.cuda.synchronize()
    (product,) = recording.products
    assert product.calls == 6 and product.replayed > 0


def test_compiled_and_a_graph_of_it() -> None:
    """Compiled code without CUDA graphs of its own, then captured by hand, as servers do."""
    torch.compiler.reset()
    compiled = torch.compile(lambda a, b: torch.relu(a @ b), fullgraph=True)
    a, b = operands(256, 512, 128)
    with tunegemm.record() as recording, torch.no_grad():
        for _ in range(3):
            compiled(a, b)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compiled(a, b)
        for _ in range(4):
            graph.replay()
    (product,) = recording.products
    assert (product.calls, product.captured, product.replayed) == (7, 1, 4)


def test_autotuning_counts_nothing() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda a, b: torch.relu(a @ b), mode="max-autotune-no-cudagraphs")
    a, b = operands(256, 512, 128)
    with tunegemm.record() as recording, torch.no_grad():
        for _ in range(3):
            compiled(a, b)
    # None at all where a Triton template won: that is no product of ATen's.
    assert sum(product.calls for product in recording.products) in (0, 3)


def test_another_stream() -> None:
    a, b = operands(1024, 1024, 1024)
    torch.cuda.synchronize()
    with tunegemm.record() as recording, torch.cuda.stream(torch.cuda.Stream()):
        torch.mm(a, b)
    (product,) = recording.products
    assert product.median_us is not None and product.median_us > 1
