"""Lists of shapes in files: our own, and those that other tools write.

- PyTorch's TunableOp writes a line per GEMM without tuning (``PYTORCH_TUNABLEOP_RECORD_UNTUNED=1``), and its
  results begin alike: ``GemmTunableOp_BFloat16_TN,tn_N_M_K_ld_LDA_LDB_LDC``. Its letters and extents are
  those of BLAS, column-major: its first operand is torch's second one, transposed.
- CUTLASS reads a JSON list of problems for nvMatmulHeuristics (``CUTLASS_LIBRARY_HEURISTICS_PROBLEMS_FILE``):
  m, n, k, layout of A, B and D, dtypes, and optionally batch_count, alignments in elements, beta.

Neither says how often a product is computed: each counts once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunegemm.describe.problem import DTYPE_BYTES, LAYOUTS, MAX_ALIGNMENT, Problem
from tunegemm.describe.workload.demand import Demand, demands
from tunegemm.describe.workload.products import Workload
from tunegemm.errors import BadValueError, ProblemError, WorkloadError
from tunegemm.files import read_text
from tunegemm.untrusted import decoded, line, number, shown, whole

_TUNABLE_OPS = ("GemmTunableOp", "GemmAndBiasTunableOp", "GemmStridedBatchedTunableOp")
_TUNABLE_DTYPES = {"BFloat16": "bf16", "Half": "fp16"}
#: What PyTorch's `Signature` functions write (ATen/cuda/tunable/GemmCommon.h).
_TUNABLE_EXTENTS = re.compile(
    r"([tn])([tn])_(\d{1,10})_(\d{1,10})_(\d{1,10})(?:_B_(\d{1,10}))?_ld_(\d{1,19})_(\d{1,19})_(\d{1,19})",
    re.ASCII,
)

_CUTLASS_DTYPES = {"bf16": "bf16", "f16": "fp16", "f32": "fp32"}


def read(path: Path) -> tuple[list[Demand], list[str]]:
    """What a file asks to be tuned, and a line for each entry that cannot be, with its place and reason.

    Raises WorkloadError for a file of another kind, and for one without any problem.
    """
    text = read_text(path, WorkloadError)
    if text.lstrip()[:1] in ("{", "["):
        try:
            document = decoded(text)
        except BadValueError as error:
            raise WorkloadError(f"{path}: not JSON ({error}); write the file anew") from None
        if isinstance(document, dict):
            workload, unreadable = Workload.from_document(document, str(path))
            found, refused = demands(workload.products)
            refused = unreadable + refused
        else:
            found, refused = _collect(_cutlass, [(f"entry {i}", e) for i, e in enumerate(document, 1)])
    elif any(row.startswith((*_TUNABLE_OPS, "ScaledGemm", "Validator")) for row in text.splitlines()):
        rows = [(f"line {position}", row.strip()) for position, row in enumerate(text.splitlines(), 1)]
        # A file of results begins with what it holds for.
        found, refused = _collect(
            _tunable_op, [(at, row) for at, row in rows if row and not row.startswith("Validator,")]
        )
    else:
        raise WorkloadError(
            f"{path}: no list of shapes; known are the JSON of `tunegemm record`, TunableOp's CSV and "
            "CUTLASS's JSON list of problems"
        )
    if not found:
        first = f", the first because: {refused[0]}" if refused else ""
        raise WorkloadError(f"{path}: no product in it can be tuned ({len(refused)} were left out{first})")
    return found, refused


def _collect(
    understand: Callable[[Any], tuple[Problem, bool]], entries: Iterable[tuple[str, Any]]
) -> tuple[list[Demand], list[str]]:
    """Each entry's problem, once. `understand` also says whether a bias or C is added; else ValueError."""
    found: dict[Problem, Demand] = {}
    refused = []
    for place, entry in entries:
        try:
            problem, has_extra = understand(entry)
        except (BadValueError, ProblemError) as error:
            refused.append(f"{place}: {error}")
            continue
        before = found.get(problem, Demand(problem, 0))
        found[problem] = replace(before, calls=before.calls + 1, extra_calls=before.extra_calls + has_extra)
    return list(found.values()), refused


def _tunable_op(text: str) -> tuple[Problem, bool]:
    signature, _, rest = text.partition(",")
    extents = rest.split(",")[0]
    parts = signature.split("_")
    if parts[0] not in _TUNABLE_OPS or len(parts) != 3:
        raise ProblemError(f"operator {shown(signature)} has no kernels here")
    if parts[1] not in _TUNABLE_DTYPES:
        raise ProblemError(f"dtype {shown(parts[1])} has no kernels; bf16 and fp16 have")
    match = _TUNABLE_EXTENTS.fullmatch(extents)
    if match is None:
        raise ProblemError(f"extents {shown(extents)} are not like tn_N_M_K_ld_LDA_LDB_LDC")
    b_letter, a_letter = match.group(1, 2)
    n, m, k, batch, b_leading, a_leading, _ = (int(group or 1) for group in match.groups()[2:])
    dtype = _TUNABLE_DTYPES[parts[1]]
    a_major, b_major = "k" if a_letter == "n" else "m", "k" if b_letter == "t" else "n"
    problem = Problem(m, n, k, batch, dtype, dtype, a_major, b_major)
    steps = [a_leading] * ((m if a_major == "k" else k) > 1) + [b_leading] * (
        (n if b_major == "k" else k) > 1
    )
    alignment = math.gcd(MAX_ALIGNMENT, *(step * DTYPE_BYTES[dtype] for step in steps))
    return replace(problem, alignment=alignment), parts[0] == "GemmAndBiasTunableOp"


def _cutlass(entry: Any) -> tuple[Problem, bool]:
    if not isinstance(entry, dict):
        raise ProblemError(f"{shown(entry)} is not an object with m, n, k, layout and dtypes")
    if missing := [
        key for key in ("m", "n", "k", "layout", "dtype_a", "dtype_b", "dtype_d") if key not in entry
    ]:
        raise ProblemError(f"{', '.join(missing)} missing")
    if entry.get("operation", "gemm") != "gemm":
        raise ProblemError(f"operation {shown(entry['operation'])} has no kernels; gemm has")
    m, n, k = (whole(entry[name], name, 1) for name in "mnk")
    batch = whole(entry.get("batch_count", 1), "batch_count", 1)
    layout = line(entry["layout"], "layout", 64).lower()
    if len(layout) != 3 or layout[:2] not in LAYOUTS or layout[2] not in "nt":
        raise ProblemError(f"layout {layout!r} is not three letters, of n and t, for A, B and D")
    a, b, d = (line(entry[name], name, 64).lower() for name in ("dtype_a", "dtype_b", "dtype_d"))
    accumulator = line(entry.get("dtype_acc", "f32"), "dtype_acc", 64).lower()
    if a != b or a not in _CUTLASS_DTYPES or d not in _CUTLASS_DTYPES or accumulator != "f32":
        raise ProblemError(f"dtypes {a} x {b} -> {d}, accumulated in {accumulator}, have no kernels")
    dtype = _CUTLASS_DTYPES[a]
    # In CUTLASS t is row-major and n column-major, of each operand by itself.
    a_major, b_major = LAYOUTS[layout[:2]]
    out_major = "n" if layout[2] == "t" else "m"
    problem = Problem(m, n, k, batch, dtype, _CUTLASS_DTYPES[d], a_major, b_major, out_major)
    given = [whole(entry.get(name, MAX_ALIGNMENT), name, 1) for name in ("alignment_a", "alignment_b")]
    alignment = math.gcd(problem.alignment, *(elements * DTYPE_BYTES[dtype] for elements in given))
    beta = entry.get("beta")
    return replace(problem, alignment=alignment), beta is not None and number(
        beta, "beta", -1e300, 1e300
    ) != 0
