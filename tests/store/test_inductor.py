"""Records as Inductor's lookup table, read by the Inductor that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.virtualized import V

from tests.store.test_database import DEVICE, KERNEL, measurement
from tunegemm.describe.problem import LAYOUTS, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.store import Database
from tunegemm.store.inductor import lookup_table

LookupTableChoices = pytest.importorskip(
    "torch._inductor.lookup_table", reason="this torch's Inductor has no lookup table"
).LookupTableChoices

TRITON = Candidate.make(
    "triton_tma",
    {"schedule": "flattened", "tile_m": 128, "tile_n": 256, "tile_k": 64, "stages": 3, "warps": 8,
     "epi_n": 64, "swap_ab": False},
    {"raster_order": "along_n", "swizzle_size": 8, "ctas": "all", "split_k": 1},
)  # fmt: skip


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database.open(tmp_path / "tuning.sqlite") as database:
        yield database


def table_of(database: Database, problem: Problem, candidate: Candidate) -> tuple[dict[str, Any], list[str]]:
    database.settle(problem, DEVICE, measurement(1.1, candidate), label=candidate.family)
    return lookup_table(database.records())


def test_the_candidate_of_these_tests_is_one_of_the_family() -> None:
    parameters = families.get("triton_tma").parameters
    assert {*TRITON.params} == {*parameters["compile"], *parameters["launch"]}


class Looking(LookupTableChoices):
    """Inductor's own reader, on a machine without the GPU whose name the keys begin with."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table
        self.found: list[dict[str, Any]] = []

    def _get_lookup_table(self) -> dict[str, Any]:
        return self.table

    @staticmethod
    def _get_device_key(device: torch.device) -> str:
        return DEVICE.name

    def lookup_template_configs(self, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        found = super().lookup_template_configs(*arguments, **keywords)
        self.found.append(found)
        return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_inductor_finds_torchs_product_under_our_key(database: Database, layout: str, batch: int) -> None:
    problem = Problem.parse(f"32x48x64x{batch}", layout=layout)
    table, left_out = table_of(database, problem, TORCH_MM)
    assert not left_out
    looking = Looking(table)

    def operand(rows: int, columns: int, row_major: bool) -> torch.Tensor:
        lead = [batch] if batch > 1 else []
        shape = [*lead, rows, columns] if row_major else [*lead, columns, rows]
        made = torch.ones(shape, dtype=torch.bfloat16)
        return made if row_major else made.mT

    a = operand(32, 64, problem.a_major == "k")
    b = operand(64, 48, problem.b_major == "n")
    product = torch.mm if batch == 1 else torch.bmm
    torch._dynamo.reset()
    with (
        V.set_choices_handler(looking),
        torch._inductor.config.patch(max_autotune=True, fx_graph_cache=False),
    ):
        compiled = torch.compile(product, fullgraph=True)
        assert torch.equal(compiled(a, b), product(a, b))
    assert looking.found == [{"aten::mm" if batch == 1 else "aten::bmm": [{}]}]


@pytest.mark.parametrize(
    ("problem", "candidate", "named"),
    [
        (Problem.parse("64x48x32"), KERNEL, "none of Inductor's kernels"),
        (Problem.parse("64x48x32"), Candidate.make("cublaslt", {"algorithm": "64_66"}), "none of Inductor's"),
        (Problem.parse("64x48x32"), TRITON, "none of Inductor's kernels"),
        (replace(Problem.parse("64x48x32"), alignment=2), TORCH_MM, "gaps and addresses"),
        (Problem.parse("64x48x32", out_dtype="fp32"), TORCH_MM, "outputs of the operands' dtype"),
        (Problem.parse("64x48x32", dtype="tf32"), TORCH_MM, "products of tf32"),
        (Problem.parse("64x48x32", dtype="int8"), TORCH_MM, "products of int8"),
        (Problem.parse("64x48x32", dtype="fp8_e4m3", out_dtype="fp8_e4m3"), TORCH_MM, "of fp8_e4m3"),
        (Problem.parse("64x48x32", epilogue="relu"), TORCH_MM, "fuses what follows"),
    ],
)  # fmt: skip
def test_what_the_table_cannot_hold_is_named(
    database: Database, problem: Problem, candidate: Candidate, named: str
) -> None:
    table, (line,) = table_of(database, problem, candidate)
    assert table == {} and named in line and str(problem) in line
