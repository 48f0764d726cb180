"""The operator of vLLM's gates by kernels that ship, in Inductor's code and in CUDA graphs, without vLLM."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.support.numerics import difference
from tunegemm.engines import vllm_gates

pytestmark = pytest.mark.gpu

WIDTH = 4096


def given(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize("columns", [7168, 28672])
def test_one_code_for_all_rows_and_graphs_of_it(columns: int) -> None:
    vllm_gates.lower()
    torch._dynamo.reset()
    weight = given(columns, 1) / WIDTH**0.5
    layer = torch.compile(lambda x: torch.ops.tunegemm.engine_gated(x, weight) + 1, fullgraph=True)

    def check(result: torch.Tensor, x: torch.Tensor) -> None:
        gate, up = functional.linear(x.float(), weight.float()).chunk(2, -1)
        assert difference(result, functional.silu(gate) * up + 1) < 8e-3

    with torch.inference_mode():
        for rows in (48, 1024, 1, 64, 16, 33, 100, 129, 256, 700, 8192):  # 1, 16 and 100 are two kernels
            x = given(rows, rows)
            torch._dynamo.mark_dynamic(x, 0)
            check(layer(x), x)  # as vLLM warms up
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = layer(x)
            x.copy_(given(rows, rows + 1))
            graph.replay()
            check(result, x)
