"""PyTorch's TunableOp: a line for each GEMM.

Files of untuned GEMMs (``PYTORCH_TUNABLEOP_RECORD_UNTUNED=1``) and of results have lines that begin alike:
``GemmTunableOp_BFloat16_TN,tn_N_M_K_ld_LDA_LDB_LDC``. Letters and extents follow BLAS, which is column-major:
the first operand is the transpose of torch's second operand. Older versions wrote no leading dimensions. In
a log, a launcher may prefix such a line, and other lines may stand between.
"""

from __future__ import annotations

import re
from dataclasses import replace

from tunegemm.describe.problem import (
    ACCUMULATIONS,
    MAX_ALIGNMENT,
    Problem,
    default_out_dtype,
    in_dtype_of,
)
from tunegemm.describe.workload.formats import Entries, Format, aligned, check_addend, dtype_of
from tunegemm.errors import ProblemError
from tunegemm.untrusted import shown

#: How an entry of TunableOp's begins, wherever in its line.
_TUNABLE = re.compile(r"(?:Scaled)?Gemm[A-Za-z]*TunableOp_", re.ASCII)
#: What PyTorch's `Signature` functions write (ATen/cuda/tunable/TunableGemm.h).
_TUNABLE_OPERATOR = re.compile(
    r"(Gemm|GemmAndBias|GemmStridedBatched|ScaledGemm)TunableOp_(\S+)_[TN]{2}", re.ASCII
)
#: The same of the operands (ATen/cuda/tunable/GemmCommon.h); a bias is named by its dtype, or None.
_TUNABLE_EXTENTS = re.compile(
    r"([tn])([tn])_(\d{1,10})_(\d{1,10})_(\d{1,10})(?:_B_(\d{1,10}))?"
    r"(?:_ld_(\d{1,19})_(\d{1,19})_(\d{1,19}))?(?:_rw_([01])_bias_(\w{1,40}))?",
    re.ASCII,
)
#: Only fp8 dtypes have an underscore in their names.
_TUNABLE_DTYPE = re.compile(r"Float8_[^_]+|[^_]+", re.ASCII)


def _entries(text: str) -> Entries | None:
    lines = text.splitlines(keepends=True)
    rows = [
        (f"line {position}", row[entry.start() :])
        for position, row in enumerate(lines, 1)
        if (entry := _TUNABLE.search(row)) is not None and row[: entry.start()].count('"') == 0
    ]
    is_json = text.lstrip()[:1] in ("{", "[")
    # Results may have a head alone.
    return rows if rows or (not is_json and any(row.startswith("Validator,") for row in lines)) else None


def _problems(text: str) -> list[Problem]:
    """A GEMM's problem. For scaled ones TunableOp does not record the accumulation: both kinds count."""
    signature, _, rest = text.partition(",")
    operator = _TUNABLE_OPERATOR.fullmatch(signature)
    kind, names = operator.groups() if operator is not None else ("", "")
    dtypes = _TUNABLE_DTYPE.findall(names)
    if "_".join(dtypes) != names or len(dtypes) != (3 if kind == "ScaledGemm" else 1):
        raise ProblemError(f"operator {shown(signature)} has no kernels here")
    extents, *further = rest.split(",")
    ends_file = not further and extents == extents.rstrip()
    extents = extents.strip()
    match = _TUNABLE_EXTENTS.fullmatch(extents)
    if match is None:
        raise ProblemError(f"extents {shown(extents)} are not like tn_N_M_K_ld_LDA_LDB_LDC")
    b_letter, a_letter, *numbers, row_wise, bias = match.groups()
    # A cut in what follows these would not show: the last leading dimension is not read.
    if ends_file and (row_wise if kind == "ScaledGemm" else numbers[4]) is None:
        raise ProblemError(
            f"extents {shown(extents)} end the file, perhaps within a number; write it again, or end its line"
        )
    n, m, k, batch = (int(group or 1) for group in numbers[:4])
    leading = [int(group) for group in numbers[4:6]] if numbers[4] else []
    a_major, b_major = "k" if a_letter == "n" else "m", "k" if b_letter == "t" else "n"
    if kind == "ScaledGemm":
        in_dtype = in_dtype_of(*(dtype_of(name) for name in dtypes[:2]))
        # The output's dtype shows the kind of fp32 products.
        out_dtype = dtype_of(dtypes[2]).replace("tf32", "fp32")
        steps = ["scale_rowwise" if row_wise == "1" else "scale_tensor"]
        steps += ["bias_n"] * (bias not in (None, "None"))
    else:
        in_dtype, steps = dtype_of(dtypes[0]), ["bias_n"] * (kind == "GemmAndBias")
        try:
            out_dtype = default_out_dtype(in_dtype)
        except ProblemError as error:
            raise ProblemError(f"dtype {shown(dtypes[0])}: {error}") from None
    problem = Problem(m, n, k, batch, in_dtype, out_dtype, a_major, b_major, epilogue="+".join(steps))
    if bias not in (None, "None"):
        check_addend(problem, "bias", dtype_of(bias))
    if leading:
        b_leading, a_leading = leading
        lines = [a_leading] * ((m if a_major == "k" else k) > 1)
        lines += [b_leading] * ((n if b_major == "k" else k) > 1)
        problem = aligned(problem, lines, MAX_ALIGNMENT)
    if kind != "ScaledGemm":
        return [problem]
    return [replace(problem, accumulation=accumulation) for accumulation in ACCUMULATIONS]


FORMAT = Format("TunableOp's CSV", _entries, _problems)
