"""Records as Inductor's lookup table (`torch._inductor.config.lookup_table`), as far as that goes.

The table names Inductor's own choices: ATen's product, and its Triton templates with their parameters. It has
no words for a compiled object. So a record whose winner is torch.mm is told exactly; one of `triton_tma` by
the template nearest to it, with its tile, stages, warps and bands, beside ATen's, between which Inductor then
decides by its own measurement; CuTe, Gluon and cuBLASLt algorithms not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tunegemm.database.record import Record
from tunegemm.families.cublaslt import is_torch
from tunegemm.problem import Problem

Table = dict[str, list[dict[str, Any]]]

#: Families whose kernels Inductor has a template like.
_TEMPLATES = {"triton_tma": "triton::mm_persistent_tma"}
#: Operands of `aten::mm`, which has neither fp8 nor int8, and for which tf32 is a setting.
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


def lookup_table(records: Iterable[Record]) -> tuple[Table, list[str]]:
    """The table, and one line for each record that it cannot hold.

    Where records of several fingerprints share a device's name, the last one measured speaks.
    """
    table: Table = {}
    left_out = []
    for record in sorted(records, key=lambda record: record.measured_at):
        key = _key(record.problem, record.fingerprint.device_name)
        reason = _refusal(record)
        if reason:
            left_out.append(f"{record.problem} on {record.fingerprint.device_name}: {reason}")
            table.pop(key, None)
        else:
            table[key] = _choices(record)
    return table, left_out


def _refusal(record: Record) -> str:
    problem, candidate = record.problem, record.candidate
    params = candidate.params
    if problem.in_dtype not in _DTYPES:
        return f"Inductor's products of {problem.in_dtype} are other operators"
    if problem.out_dtype != problem.in_dtype or problem.out_major != "n":
        return "Inductor asks for outputs of the operands' dtype, row by row"
    if problem.epilogue:
        return "Inductor fuses what follows a product by itself"
    if problem.alignment != problem.packed_alignment:
        return "Inductor's key says nothing of gaps and addresses"
    if is_torch(candidate):
        return ""
    if candidate.family not in _TEMPLATES:
        return f"{record.label or candidate} is none of Inductor's kernels"
    missing = [
        words
        for words, absent in (
            ("batches", problem.batch > 1),
            ("swap_ab", params.get("swap_ab")),
            ("split-K", params.get("split_k", 1) != 1),
            ("warp specialization", params.get("schedule") == "warp_specialized"),
        )
        if absent
    ]
    return f"Inductor's TMA template has no {' and no '.join(missing)}" if missing else ""


def _choices(record: Record) -> list[dict[str, Any]]:
    problem, candidate = record.problem, record.candidate
    aten = {"template_id": "aten::mm" if problem.batch == 1 else "aten::bmm"}
    template = _TEMPLATES.get(record.candidate.family)
    if template is None:
        return [aten]
    # The template's bands are of rows; ours that are of columns have no width there and become one band.
    bands = (
        candidate["swizzle_size"]
        if candidate["raster_order"] == "along_n"
        else math.ceil(problem.m / candidate["tile_m"])
    )
    parameters = {
        "BLOCK_M": candidate["tile_m"],
        "BLOCK_N": candidate["tile_n"],
        "BLOCK_K": candidate["tile_k"],
        "GROUP_M": bands,
        "num_stages": candidate["stages"],
        "num_warps": candidate["warps"],
        "EVEN_K": problem.k % candidate["tile_k"] == 0,
    }
    return [{"template_id": template, **parameters}, aten]


def _key(problem: Problem, device_name: str) -> str:
    """As `torch._inductor.lookup_table` writes it: device, operands, operator."""
    m, n, k = problem.m, problem.n, problem.k
    lead = [problem.batch] if problem.batch > 1 else []
    dtype = _DTYPES.get(problem.in_dtype, "")
    a = f"({dtype}, {[*lead, m, k]}, {_strides(lead, m, k, problem.a_major == 'k')})"
    b = f"({dtype}, {[*lead, k, n]}, {_strides(lead, k, n, problem.b_major == 'n')})"
    return f"{device_name}+({a}, {b})+{'bmm' if lead else 'mm'}"


def _strides(lead: list[int], rows: int, columns: int, row_major: bool) -> list[int]:
    batch = [rows * columns] if lead else []
    return [*batch, columns, 1] if row_major else [*batch, 1, rows]
