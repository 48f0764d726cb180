"""CUTLASS's JSON list of problems for nvMatmulHeuristics (``CUTLASS_LIBRARY_HEURISTICS_PROBLEMS_FILE``).

Each has m, n, k, layout of A, B and D, dtypes, and optionally batch_count, alignments in elements, alpha,
beta, dtype_c and use_fast_acc.
"""

from __future__ import annotations

from typing import Any

from tunegemm.describe.problem import LAYOUTS, MAX_ALIGNMENT, Problem, in_dtype_of
from tunegemm.describe.workload.formats import Entries, Format, aligned, check_addend, dtype_of, is_json
from tunegemm.errors import ProblemError
from tunegemm.untrusted import decoded, line, number, shown, whole

#: The default scalars of an entry.
_SCALARS = (("alpha", 1.0), ("beta", 0.0))


def _entries(text: str) -> Entries | None:
    if text.lstrip()[:1] != "[" or not is_json(text):
        return None
    return [(f"entry {position}", entry) for position, entry in enumerate(decoded(text), 1)]


def _problems(entry: Any) -> list[Problem]:
    if not isinstance(entry, dict):
        raise ProblemError(f"{shown(entry)} is not an object with m, n, k, layout and dtypes")
    if missing := [
        key for key in ("m", "n", "k", "layout", "dtype_a", "dtype_b", "dtype_d") if key not in entry
    ]:
        raise ProblemError(f"{', '.join(missing)} missing")
    if entry.get("operation", "gemm") != "gemm":
        raise ProblemError(f"operation {shown(entry['operation'])} has no kernels; use gemm")
    m, n, k = (whole(entry[name], name, 1) for name in "mnk")
    batch = whole(entry.get("batch_count", 1), "batch_count", 1)
    layout = line(entry["layout"], "layout", 64).lower()
    if len(layout) != 3 or layout[:2] not in LAYOUTS or layout[2] not in "nt":
        raise ProblemError(f"layout {layout!r} is not three letters, of n and t, for A, B and D")
    a, b, d = (line(entry[name], name, 64).lower() for name in ("dtype_a", "dtype_b", "dtype_d"))
    accumulator = entry.get("dtype_acc")
    sums = "" if accumulator is None else line(accumulator, "dtype_acc", 64).lower()
    is_fast = entry.get("use_fast_acc", True)
    if not isinstance(is_fast, bool):
        raise ProblemError(f"use_fast_acc {shown(is_fast)} is neither true nor false")
    alpha, beta = (number(entry.get(name, usual), name, -1e300, 1e300) for name, usual in _SCALARS)
    # In CUTLASS t is row-major and n column-major, for each operand.
    a_major, b_major = LAYOUTS[layout[:2]]
    try:
        in_dtype = in_dtype_of(dtype_of(a), dtype_of(b))
        if sums and dtype_of(sums) != ("int32" if in_dtype == "int8" else "fp32"):
            raise ProblemError(f"kernels sum {in_dtype} products in another dtype")
        problem = Problem(
            m, n, k, batch, in_dtype, dtype_of(d), a_major, b_major,
            out_major="n" if layout[2] == "t" else "m",
            epilogue="+".join(["alpha"] * (alpha != 1) + ["beta_c"] * (beta != 0)),
            accumulation="fast" if is_fast or not in_dtype.startswith("fp8") else "two_level",
        )  # fmt: skip
    except ProblemError as error:
        raise ProblemError(f"dtypes {a} x {b} -> {d}, accumulated in {sums or 'f32'}: {error}") from None
    if beta != 0 and (c := entry.get("dtype_c")) is not None:
        check_addend(problem, "c", dtype_of(line(c, "dtype_c", 64)))
    results = [whole(entry.get(name, MAX_ALIGNMENT), name, 1) for name in ("alignment_a", "alignment_b")]
    return [aligned(problem, results, problem.alignment)]


FORMAT = Format("CUTLASS's JSON list of problems", _entries, _problems)
