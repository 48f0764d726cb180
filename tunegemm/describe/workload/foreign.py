"""Lists of shapes in files: our own, and PyTorch's.

TunableOp writes a line per GEMM without tuning (``PYTORCH_TUNABLEOP_RECORD_UNTUNED=1``), its results begin
alike: ``GemmTunableOp_BFloat16_TN,tn_N_M_K_ld_LDA_LDB_LDC``. Its letters and extents are those of BLAS,
column-major: its first operand is torch's second one, transposed. It does not say how often a product is
computed: each line counts once.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

from tunegemm.describe.problem import DTYPE_BYTES, MAX_ALIGNMENT, Problem
from tunegemm.describe.workload.demand import Demand, demands
from tunegemm.describe.workload.products import Workload
from tunegemm.errors import BadValueError, ProblemError, WorkloadError
from tunegemm.files import read_text
from tunegemm.untrusted import decoded, shown

_TUNABLE_OPS = ("GemmTunableOp", "GemmAndBiasTunableOp", "GemmStridedBatchedTunableOp")
_TUNABLE_DTYPES = {"BFloat16": "bf16", "Half": "fp16"}
#: What PyTorch's `Signature` functions write (ATen/cuda/tunable/GemmCommon.h).
_TUNABLE_EXTENTS = re.compile(
    r"([tn])([tn])_(\d{1,10})_(\d{1,10})_(\d{1,10})(?:_B_(\d{1,10}))?_ld_(\d{1,19})_(\d{1,19})_(\d{1,19})",
    re.ASCII,
)


def read(path: Path) -> tuple[list[Demand], list[str]]:
    """What a file asks to be tuned, and a line for each entry that cannot be, with its place and reason.

    Raises WorkloadError for a file that is none of the known ones, and for one without any problem.
    """
    text = read_text(path, WorkloadError)
    if text.lstrip().startswith("{"):
        try:
            document = decoded(text)
        except BadValueError as error:
            raise WorkloadError(f"{path}: not JSON ({error}); write the file anew") from None
        found, refused = demands(Workload.from_document(document, str(path)).products)
    elif any(row.startswith((*_TUNABLE_OPS, "ScaledGemm", "Validator")) for row in text.splitlines()):
        found, refused = _of_tunable_op(text)
    else:
        raise WorkloadError(
            f"{path}: no list of shapes; known are the JSON of `tunegemm record` and TunableOp's CSV"
        )
    if not found:
        first = f", the first because: {refused[0]}" if refused else ""
        raise WorkloadError(f"{path}: no product in it can be tuned ({len(refused)} were left out{first})")
    return found, refused


def _of_tunable_op(text: str) -> tuple[list[Demand], list[str]]:
    """Each problem once, with the number of its lines."""
    found: dict[Problem, Demand] = {}
    refused = []
    for position, row in enumerate(map(str.strip, text.splitlines()), 1):
        if not row or row.startswith("Validator,"):  # what a file of results holds for
            continue
        try:
            problem, has_bias = _tunable_op(row)
        except ProblemError as error:
            refused.append(f"line {position}: {error}")
            continue
        before = found.get(problem, Demand(problem, 0))
        found[problem] = replace(before, calls=before.calls + 1, extra_calls=before.extra_calls + has_bias)
    return list(found.values()), refused


def _tunable_op(text: str) -> tuple[Problem, bool]:
    """The problem of a line, and whether a bias is added."""
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
