"""Records as Inductor's lookup table (`torch._inductor.config.lookup_table`), as far as that goes.

The table names Inductor's own choices: ATen's product, and its Triton templates with their parameters. It has
no words for a compiled object. So a record whose winner is torch.mm is told, and keeps max-autotune from
choosing what is slower; all others are named and left out. Inductor's own TMA template is not our kernel, and
torch 2.11 cannot build it from tile, stages and warps alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tunegemm.describe.problem import Problem
from tunegemm.generate.cublaslt import is_torch
from tunegemm.store.record import Record

Table = dict[str, list[dict[str, Any]]]

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
    if problem.in_dtype not in _DTYPES:
        return f"Inductor's products of {problem.in_dtype} are other operators"
    if problem.out_dtype != problem.in_dtype or problem.out_major != "n":
        return "Inductor asks for outputs of the operands' dtype, row by row"
    if problem.epilogue:
        return "Inductor fuses what follows a product by itself"
    if problem.alignment != problem.packed_alignment:
        return "Inductor's key says nothing of gaps and addresses"
    return "" if is_torch(candidate) else f"{record.label or candidate} is none of Inductor's kernels"


def _choices(record: Record) -> list[dict[str, Any]]:
    return [{"template_id": "aten::mm" if record.problem.batch == 1 else "aten::bmm"}]


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
