"""Lists of shapes in files: our own, and those that other tools write.

- PyTorch's TunableOp writes a line per GEMM without tuning (``PYTORCH_TUNABLEOP_RECORD_UNTUNED=1``), and its
  results begin alike: ``GemmTunableOp_BFloat16_TN,tn_N_M_K_ld_LDA_LDB_LDC``. Its letters and extents are
  those of BLAS, column-major: its first operand is torch's second one, transposed. Older versions wrote no
  leading dimensions. In a log such a line may have a launcher's prefix, and others stand between.
- CUTLASS reads a JSON list of problems for nvMatmulHeuristics (``CUTLASS_LIBRARY_HEURISTICS_PROBLEMS_FILE``):
  m, n, k, layout of A, B and D, dtypes, and optionally batch_count, alignments in elements, alpha, beta,
  dtype_c and use_fast_acc.

Neither says how often a product is computed: each counts once. Which dtypes have kernels is for `Problem` to
say; here are only other tools' names for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunegemm.describe.epilogue import operand_dtype
from tunegemm.describe.problem import (
    ACCUMULATIONS,
    DTYPE_BYTES,
    LAYOUTS,
    MAX_ALIGNMENT,
    OUTPUT_DTYPES,
    Problem,
    default_out_dtype,
    in_dtype_of,
    normalize_dtype,
)
from tunegemm.describe.workload.demand import Demand, demands, total
from tunegemm.describe.workload.products import Workload
from tunegemm.errors import BadValueError, ProblemError, WorkloadError
from tunegemm.files import read_text
from tunegemm.untrusted import decoded, line, number, shown, whole

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
#: Names of dtypes with an underscore in them are those of fp8.
_TUNABLE_DTYPE = re.compile(r"Float8_[^_]+|[^_]+", re.ASCII)

#: How JSON of objects begins: a line of a log may begin with a bracket, too, and go on with a date.
_JSON = re.compile(r"\s*(\[\s*[{\]]|\{\s*[\"}]|[\[{]\s*\Z)")

#: Spellings of CUTLASS's that nobody else has, and the scalars of an entry that names none.
_CUTLASS_NAMES = {"f16": "fp16", "f32": "fp32", "s8": "int8", "s32": "int32"}
_CUTLASS_SCALARS = (("alpha", 1.0), ("beta", 0.0))


def read(path: Path) -> tuple[list[Demand], list[str]]:
    """What a file asks to be tuned, and a line for each entry that cannot be, with its place and reason.

    Raises WorkloadError for a file of another kind, and for one without any problem.
    """
    return read_all([path])


def read_all(paths: Sequence[Path]) -> tuple[list[Demand], list[str]]:
    """`read` of several files, such as one of each rank: demands of the same problem are added up.

    Raises WorkloadError where one is of another kind, and where there is no problem in any.
    """
    found: list[Demand] = []
    refused: list[str] = []
    for path in paths:
        of_file, lines = _read(path)
        found += of_file
        refused += [f"{path}: {reason}" for reason in lines] if len(paths) > 1 else lines
    if not found:
        first = f", the first because: {refused[0]}" if refused else ""
        where = ", ".join(map(str, paths))
        raise WorkloadError(f"{where}: no product in it can be tuned ({len(refused)} were left out{first})")
    return total(found), refused


def _read(path: Path) -> tuple[list[Demand], list[str]]:
    text = read_text(path, WorkloadError)
    # First, since a log may begin with a bracket, too.
    if rows := [
        (f"line {position}", row[entry.start() :].strip())
        for position, row in enumerate(text.splitlines(), 1)
        if (entry := _TUNABLE.search(row)) is not None and row[: entry.start()].count('"') == 0
    ]:
        return _collect(_tunable_op, rows)
    if _JSON.match(text):
        try:
            document = decoded(text)
        except BadValueError as error:
            raise WorkloadError(f"{path}: not JSON ({error}); write the file anew") from None
        if not isinstance(document, dict):
            return _collect(_cutlass, [(f"entry {i}", e) for i, e in enumerate(document, 1)])
        workload, unreadable = Workload.from_document(document, str(path))
        found, refused = demands(workload.products)
        return found, unreadable + refused
    if any(row.startswith("Validator,") for row in text.splitlines()):  # of results without any
        return [], []
    first = next((row.strip() for row in text.splitlines() if row.strip()), "")
    seen = f"it begins with {shown(first)}" if first else "it is empty"
    raise WorkloadError(
        f"{path}: no list of shapes, {seen}; known are the JSON of `tunegemm record`, TunableOp's CSV and "
        "CUTLASS's JSON list of problems"
    )


def _collect(
    understand: Callable[[Any], Iterable[Problem]], entries: Iterable[tuple[str, Any]]
) -> tuple[list[Demand], list[str]]:
    """Each entry's problems, and what `understand` raises of the others."""
    found: list[Demand] = []
    refused = []
    for place, entry in entries:
        try:
            found += [Demand(problem, 1) for problem in understand(entry)]
        except (BadValueError, ProblemError) as error:
            refused.append(f"{place}: {error}")
    return total(found), refused


def _tunable_op(text: str) -> list[Problem]:
    """A GEMM's problem. Of a scaled one TunableOp does not say how its sums are kept: it may be either."""
    signature, _, rest = text.partition(",")
    operator = _TUNABLE_OPERATOR.fullmatch(signature)
    kind, names = operator.groups() if operator is not None else ("", "")
    dtypes = _TUNABLE_DTYPE.findall(names)
    if "_".join(dtypes) != names or len(dtypes) != (3 if kind == "ScaledGemm" else 1):
        raise ProblemError(f"operator {shown(signature)} has no kernels here")
    extents = rest.split(",")[0].strip()
    match = _TUNABLE_EXTENTS.fullmatch(extents)
    if match is None:
        raise ProblemError(f"extents {shown(extents)} are not like tn_N_M_K_ld_LDA_LDB_LDC")
    b_letter, a_letter, *numbers, row_wise, bias = match.groups()
    n, m, k, batch = (int(group or 1) for group in numbers[:4])
    leading = [int(group) for group in numbers[4:6]] if numbers[4] else []
    a_major, b_major = "k" if a_letter == "n" else "m", "k" if b_letter == "t" else "n"
    if kind == "ScaledGemm":
        in_dtype = in_dtype_of(*(_dtype(name) for name in dtypes[:2]))
        out_dtype = _dtype(dtypes[2]).replace("tf32", "fp32")  # of the output it says what fp32 products are
        steps = ["scale_rowwise" if row_wise == "1" else "scale_tensor"]
        steps += ["bias_n"] * (bias not in (None, "None"))
    else:
        in_dtype = _dtype(dtypes[0])
        out_dtype, steps = _known(in_dtype, dtypes[0]), ["bias_n"] * (kind == "GemmAndBias")
    problem = Problem(
        m, n, k, batch, in_dtype, out_dtype, a_major, b_major, epilogue="+".join(steps)
    )  # fmt: skip
    if bias not in (None, "None"):
        _check_addend(problem, "bias", _dtype(bias))
    if leading:
        b_leading, a_leading = leading
        lines = [a_leading] * ((m if a_major == "k" else k) > 1)
        lines += [b_leading] * ((n if b_major == "k" else k) > 1)
        problem = _aligned(problem, lines, MAX_ALIGNMENT)
    if kind != "ScaledGemm":
        return [problem]
    return [replace(problem, accumulation=accumulation) for accumulation in ACCUMULATIONS]


def _dtype(name: str) -> str:
    """Our name of a dtype. Raises ProblemError for one that has none."""
    name = name.lower()
    return normalize_dtype(_CUTLASS_NAMES.get(name, name), OUTPUT_DTYPES)


def _known(in_dtype: str, name: str) -> str:
    """The usual output dtype of operands that have kernels; a ProblemError shows the name that they had."""
    try:
        return default_out_dtype(in_dtype)
    except ProblemError as error:
        raise ProblemError(f"dtype {shown(name)}: {error}") from None


def _check_addend(problem: Problem, name: str, dtype: str) -> None:
    operand = next(one for one in problem.fused.operands if one.name == name)
    if (wanted := operand_dtype(operand, problem.out_dtype)) != dtype:
        raise ProblemError(
            f"a {name} of {dtype} beside an output of {problem.out_dtype}: kernels add {wanted}"
        )


def _aligned(problem: Problem, steps: Iterable[int], most: int) -> Problem:
    """The problem with lines of operands so many elements apart, and addresses of at most such alignment."""
    size = DTYPE_BYTES[problem.in_dtype]
    return replace(problem, alignment=math.gcd(MAX_ALIGNMENT, most, *(step * size for step in steps)))


def _cutlass(entry: Any) -> list[Problem]:
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
    accumulator = entry.get("dtype_acc")
    sums = "" if accumulator is None else line(accumulator, "dtype_acc", 64).lower()
    is_fast = entry.get("use_fast_acc", True)
    if not isinstance(is_fast, bool):
        raise ProblemError(f"use_fast_acc {shown(is_fast)} is neither true nor false")
    alpha, beta = (number(entry.get(name, usual), name, -1e300, 1e300) for name, usual in _CUTLASS_SCALARS)
    # In CUTLASS t is row-major and n column-major, of each operand by itself.
    a_major, b_major = LAYOUTS[layout[:2]]
    try:
        in_dtype = in_dtype_of(_dtype(a), _dtype(b))
        if sums and _dtype(sums) != ("int32" if in_dtype == "int8" else "fp32"):
            raise ProblemError(f"kernels keep sums of {in_dtype} products otherwise")
        problem = Problem(
            m, n, k, batch, in_dtype, _dtype(d), a_major, b_major,
            out_major="n" if layout[2] == "t" else "m",
            epilogue="+".join(["alpha"] * (alpha != 1) + ["beta_c"] * (beta != 0)),
            accumulation="fast" if is_fast or not in_dtype.startswith("fp8") else "two_level",
        )  # fmt: skip
    except ProblemError as error:
        raise ProblemError(f"dtypes {a} x {b} -> {d}, accumulated in {sums or 'f32'}: {error}") from None
    if beta != 0 and (c := entry.get("dtype_c")) is not None:
        _check_addend(problem, "c", _dtype(line(c, "dtype_c", 64)))
    given = [whole(entry.get(name, MAX_ALIGNMENT), name, 1) for name in ("alignment_a", "alignment_b")]
    return [_aligned(problem, given, problem.alignment)]
