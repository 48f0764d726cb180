"""A matrix product to be solved: D[m, n] = sum over k of A[m, k] * B[k, n], per batch entry."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tunegemm.describe.epilogue import GATED, Epilogue, Operand, operand_dtype
from tunegemm.describe.precision import fp32_precision, tf32_remedy
from tunegemm.errors import ProblemError, unknown_argument
from tunegemm.untrusted import shown

if TYPE_CHECKING:
    import torch

#: Bytes of one element, by the short name in shapes files, on the command line and in records. ``tf32`` is
#: fp32 in memory; tensor cores read 19 of its bits. ``fp8_e4m3_e5m2`` names A's type, then B's.
DTYPE_BYTES: dict[str, int] = {
    "bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_e4m3_e5m2": 1,
    "fp8_e5m2_e4m3": 1, "int8": 1, "int32": 4,
}  # fmt: skip

_FP8_OUTPUTS = ("bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")

#: Input dtypes that have kernels, and the output dtypes each may have, the default first.
OUTPUT_DTYPES: dict[str, tuple[str, ...]] = {
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "tf32": ("fp32", "bf16", "fp16"),
    "fp8_e4m3": _FP8_OUTPUTS,
    "fp8_e5m2": _FP8_OUTPUTS,
    "fp8_e4m3_e5m2": _FP8_OUTPUTS,
    "fp8_e5m2_e4m3": _FP8_OUTPUTS,
    "int8": ("int32",),
}

#: Further ones if the epilogue scales the product: unscaled, sums of int8 products exceed fp16.
SCALED_OUTPUT_DTYPES: dict[str, tuple[str, ...]] = {"int8": ("bf16", "fp16", "fp32")}

#: How sums over k are computed, the default first. Hopper's tensor cores add fp8 products with about 14
#: significant bits; ``two_level`` adds their sums over every 128 of k in fp32 registers.
ACCUMULATIONS = ("fast", "two_level")

_ALIASES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
    "tfloat32": "tf32", "float8_e4m3fn": "fp8_e4m3", "e4m3": "fp8_e4m3", "float8_e5m2": "fp8_e5m2",
    "e5m2": "fp8_e5m2",
}  # fmt: skip

#: Layout letters as in the CUTLASS profiler, A first: for A (m x k) `t` is row-major (k contiguous)
#: and `n` column-major (m contiguous); for B (k x n) `n` is column-major (k contiguous) and `t`
#: row-major (n contiguous). The values are the majors of A and B: their contiguous modes.
LAYOUTS: dict[str, tuple[str, str]] = {
    "tn": ("k", "k"),
    "tt": ("k", "n"),
    "nn": ("m", "k"),
    "nt": ("m", "n"),
}

#: A number has at most 30 digits: Python refuses to read numbers of thousands.
_SHAPE = re.compile(r"(\d{1,30})x(\d{1,30})x(\d{1,30})(?:x(\d{1,30}))?", re.ASCII)
_MAX_EXTENT = 2**31 - 1  # TMA coordinates are signed 32-bit

#: Numbers that may be 0, and the remedy for an invalid number.
_REMEDIES = {
    "alignment": "give a number of bytes, or 0 for packed operands",
    "groups": "give 2 or more, or 0 if all rows share one B",
}
#: Fields of a problem that are text.
_TEXTS = ("in_dtype", "out_dtype", "a_major", "b_major", "out_major", "epilogue", "accumulation")

#: Input dtypes of products whose rows are in groups, and the step that their epilogue must have. If that is
#: empty, the epilogue may be a gate, whose gate and up are the halves of B's columns.
_OF_GROUPS = {"bf16": "", "fp16": "", "fp8_e4m3": "scale_rowwise"}

#: The widest load of one thread, and TMA's requirement: a larger alignment changes no kernel.
MAX_ALIGNMENT = 16


def normalize_dtype(name: str | torch.dtype, offered: Iterable[str] = DTYPE_BYTES) -> str:
    """The short name, such as ``bf16``, for any usual spelling, including ``torch.bfloat16`` and the short
    name itself.

    Raises ProblemError for an unknown name. offered: the names that this error recommends.
    """
    short = str(name).lower().removeprefix("torch.")
    short = _ALIASES.get(short, short)
    if short not in DTYPE_BYTES:
        raise ProblemError(f"dtype {name!r} is not known; use one of {', '.join(offered)}")
    return short


def operand_dtypes(in_dtype: str) -> tuple[str, str]:
    """Element types of A and B: equal, except for mixed fp8."""
    if in_dtype.count("_") < 2:
        return in_dtype, in_dtype
    _, of_a, of_b = in_dtype.split("_")
    return f"fp8_{of_a}", f"fp8_{of_b}"


def in_dtype_of(a_dtype: str, b_dtype: str) -> str:
    """The input dtype for operands of these types. Raises ProblemError if they have no common product."""
    if a_dtype == b_dtype:
        return a_dtype
    if a_dtype.startswith("fp8_") and b_dtype.startswith("fp8_"):
        return f"{a_dtype}_{b_dtype.removeprefix('fp8_')}"
    raise ProblemError(f"operands of dtypes {a_dtype} and {b_dtype}; convert one of them")


def swapped_dtype(in_dtype: str) -> str:
    """The input dtype of the transposed product, whose A is B."""
    a_dtype, b_dtype = operand_dtypes(in_dtype)
    return in_dtype_of(b_dtype, a_dtype)


def default_out_dtype(in_dtype: str) -> str:
    """The default output dtype of a product. Raises ProblemError for dtypes without kernels."""
    if in_dtype in OUTPUT_DTYPES:
        return OUTPUT_DTYPES[in_dtype][0]
    hint = "; fp32 operands have kernels where tf32 is allowed: --dtype tf32" if in_dtype == "fp32" else ""
    raise ProblemError(
        f"input dtype {in_dtype!r} has no kernels{hint}; use one of {', '.join(OUTPUT_DTYPES)}"
    )


@dataclass(frozen=True, order=True)
class Problem:
    """One matrix product: everything that decides which kernel is fastest. Hashable; the key of a record."""

    m: int
    """Rows of A and D."""
    n: int
    """Columns of B and D."""
    k: int
    """Columns of A, rows of B: the reduced extent."""
    batch: int = 1
    """Number of independent products of the same shape."""
    in_dtype: str = "bf16"
    """Element type of A and B."""
    out_dtype: str = "bf16"
    """Element type of D. Sums are fp32, or int32 for int8."""
    a_major: str = "k"
    """Contiguous mode of A: ``k`` or ``m``."""
    b_major: str = "k"
    """Contiguous mode of B: ``k`` or ``n``."""
    out_major: str = "n"
    """Contiguous mode of D: ``n`` or ``m``."""
    alignment: int = 0
    """The largest power of two, up to 16 bytes, that divides the addresses of A and B and the strides of
    their leading dimensions and batch entries. 0, the default, becomes that of packed operands."""
    epilogue: str = ""
    """Steps that the kernel applies before it stores the product, as `describe.epilogue` writes them; empty
    without any."""
    accumulation: str = "fast"
    """How sums over k are computed: one of `ACCUMULATIONS`; ``two_level`` only for fp8."""
    groups: int = 0
    """Number of groups that divide the m rows, each with its own B (`tunegemm.grouped_mm`); 0 without groups.
    """

    if not TYPE_CHECKING:

        def __new__(cls, *values: object, **keywords: object) -> Problem:
            """Raises ArgumentError for a keyword that is no field, such as ``dtype``, with the nearest one,
            and ProblemError for text."""
            if values and isinstance(values[0], str):
                raise ProblemError(f"Problem takes numbers: Problem.parse({shown(values[0])}) reads text")
            for name in keywords:
                if name not in cls.__dataclass_fields__:
                    raise unknown_argument(cls.__name__, name, list(cls.__dataclass_fields__))
            return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch", "alignment", "groups"):
            number = getattr(self, name)
            try:
                whole = operator.index(number)
            except TypeError:
                whole = -1
            if not (name not in _REMEDIES) <= whole <= _MAX_EXTENT or (name, whole) == ("groups", 1):
                is_batched = type(self.batch) is not int or self.batch != 1
                extents = (self.m, self.n, self.k, *(self.batch,) * is_batched)
                value, *where = (shown(x) if isinstance(x, int) else f"{x!r:.40}" for x in (number, *extents))
                if name in _REMEDIES:
                    raise ProblemError(f"{name}={value}: {_REMEDIES[name]}")
                kind = "" if isinstance(number, int) else ", a whole number"
                raise ProblemError(
                    f"{name}={value} in {'x'.join(where)}: every extent must be from 1 to {_MAX_EXTENT}{kind}"
                )
            object.__setattr__(self, name, whole)  # a NumPy integer becomes Python's
        if isinstance(self.epilogue, Epilogue):
            object.__setattr__(self, "epilogue", str(self.epilogue))
        for name in _TEXTS:
            if not isinstance(text := getattr(self, name), str):
                raise ProblemError(f"{name}={text!r:.40}: give its name as a text")
        default_out_dtype(self.in_dtype)  # raises for dtypes without kernels
        allowed, scaled = OUTPUT_DTYPES[self.in_dtype], SCALED_OUTPUT_DTYPES.get(self.in_dtype, ())
        if self.out_dtype not in (allowed + scaled if self.fused.scales else allowed):
            more = f"; with scale_tensor or scale_rowwise {', '.join(scaled)}" if scaled else ""
            raise ProblemError(
                f"output dtype {self.out_dtype!r} for {self.in_dtype} inputs; use one of "
                f"{', '.join(allowed)}{more}"
            )
        if (self.a_major, self.b_major) not in LAYOUTS.values():
            raise ProblemError(f"majors {self.a_major!r}, {self.b_major!r}: A is 'k' or 'm', B is 'k' or 'n'")
        if self.out_major not in ("n", "m"):
            raise ProblemError(f"output major {self.out_major!r}: use 'n' or 'm'")
        if self.accumulation not in ACCUMULATIONS:
            raise ProblemError(
                f"accumulation {self.accumulation!r} is not known; use one of {', '.join(ACCUMULATIONS)}"
            )
        if self.accumulation != "fast" and not self.in_dtype.startswith("fp8"):
            raise ProblemError(f"accumulation {self.accumulation!r} needs fp8 operands, not {self.in_dtype}")
        if self.alignment == 0:
            object.__setattr__(self, "alignment", self.packed_alignment)
        alignments = self._alignments()
        if self.alignment not in alignments:
            raise ProblemError(
                f"alignment {self.alignment} of {self.in_dtype} operands; "
                f"use one of {', '.join(map(str, alignments))} bytes"
            )
        if self.epilogue and self.out_dtype == "int32":
            raise ProblemError(f"epilogue {self.epilogue} of an int32 product: epilogues compute in fp32")
        if self.groups:
            self._check_groups()
        if self.fused.gated and self.n % 2:
            raise ProblemError(
                f"n={self.n} with epilogue {self.epilogue}: gates need an even number of columns"
            )

    def _check_groups(self) -> None:
        """Raises ProblemError if no kernel of grouped products computes it."""
        if self.batch != 1:
            raise ProblemError(f"{self.groups} groups with a batch of {self.batch}: give only one of them")
        if self.in_dtype not in _OF_GROUPS:
            known = ", ".join(_OF_GROUPS)
            raise ProblemError(f"in_dtype {self.in_dtype!r} with {self.groups} groups: use one of {known}")
        step, scales = self.epilogue, _OF_GROUPS[self.in_dtype]
        if step != scales and (scales or step not in GATED):
            actual = f"epilogue {step!r}" if step else "no epilogue"
            remedy = scales or f"none, or one of {', '.join(GATED)}"
            raise ProblemError(
                f"{actual} of {self.in_dtype} with {self.groups} groups: use {remedy} (biases need no tuning)"
            )
        fixed = {
            "out_dtype": default_out_dtype(self.in_dtype), "a_major": "k", "out_major": "n",
            "alignment": MAX_ALIGNMENT, "accumulation": "fast",
        }  # fmt: skip
        if step:  # gate and up, and fp8, are read along k
            fixed["b_major"] = "k"
        for name, value in fixed.items():
            if (actual := getattr(self, name)) != value:
                raise ProblemError(
                    f"{name} {actual!r} with {self.groups} groups: use {value!r}, which is tuned"
                )

    @classmethod
    def of_groups(
        cls, m: int, n: int, k: int, groups: int, *, dtype: str = "bf16", gate: str = "", b_major: str = "k"
    ) -> Problem:
        """A product of m rows in groups; fp8 has scales. Raises ProblemError if no kernel takes them."""
        epilogue, out = gate or _OF_GROUPS.get(dtype, ""), default_out_dtype(dtype)
        return cls(m, n, k, 1, dtype, out, b_major=b_major, epilogue=epilogue, groups=groups)

    @classmethod
    def parse(
        cls,
        shape: str,
        *,
        dtype: str | torch.dtype = "bf16",
        out_dtype: str | torch.dtype | None = None,
        layout: str = "tn",
        alignment: int | None = None,
        epilogue: str = "",
        accumulation: str = "fast",
        groups: int = 0,
    ) -> Problem:
        """Read ``MxNxK`` or ``MxNxKxL`` and names of dtype and layout, as on the command line.

        alignment: by default that of packed operands; lines with gaps may have another. groups: how many
        groups the M rows are in, each with its own B; 0 and 1 are a plain product. The `epilogue` of groups
        may be a gate; without one, fp8 uses its scales.
        """
        match = _SHAPE.fullmatch(str(shape).strip().lower())  # the error shows any input
        if match is None:
            raise ProblemError(f"shape {shape!r:.60} is not MxNxK or MxNxKxL; for example 4096x4096x4096")
        if str(layout).lower() not in LAYOUTS:
            raise ProblemError(f"layout {layout!r} is not known; use one of {', '.join(LAYOUTS)}")
        m, n, k, batch = (int(group) if group else 1 for group in match.groups())
        in_dtype = normalize_dtype(dtype, OUTPUT_DTYPES)
        groups = 0 if groups == 1 else groups
        epilogue = str(epilogue) or (_OF_GROUPS.get(in_dtype, "") if groups else "")
        a_major, b_major = LAYOUTS[layout.lower()]
        problem = cls(
            m,
            n,
            k,
            batch,
            in_dtype,
            default_out_dtype(in_dtype) if out_dtype is None else normalize_dtype(out_dtype),
            a_major,
            b_major,
            epilogue=epilogue,
            accumulation=accumulation,
            groups=groups,
        )
        if alignment is None:
            return problem
        allowed = problem._alignments()
        if type(alignment) is not int or alignment not in allowed:
            words = ", ".join(map(str, allowed))
            raise ProblemError(f"alignment {alignment!r} of {problem.shape}: use one of {words} bytes")
        return replace(problem, alignment=alignment)

    @classmethod
    def from_tensors(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out_dtype: torch.dtype | None = None,
        epilogue: str = "",
        accumulation: str = "fast",
    ) -> Problem:
        """Read torch operands as ``torch.matmul(a, b)`` does: a is (m, k) or (l, m, k), b alike.

        fp32 operands are a tf32 problem if torch may multiply them that way
        (``torch.backends.cuda.matmul.fp32_precision``).

        Raises ProblemError for other ranks, extents that do not match, mixed dtypes other than fp8's, fp32
        without tf32, and an operand without a contiguous mode.
        """
        for operand in (a, b):
            if not hasattr(operand, "stride"):
                raise ProblemError(f"operand {operand!r:.40} is not a tensor; give two torch tensors")
        if a.ndim not in (2, 3) or a.ndim != b.ndim:
            raise ProblemError(f"operands of {a.ndim} and {b.ndim} dimensions; both need 2 or both 3")
        if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
            raise ProblemError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not multiply")
        in_dtype = in_dtype_of(*(normalize_dtype(str(operand.dtype)) for operand in (a, b)))
        if in_dtype == "fp32":
            if fp32_precision() != "tf32":
                raise ProblemError(f"fp32 operands have kernels where tf32 is allowed: {tf32_remedy()}")
            in_dtype = "tf32"
        a_major = contiguous_mode(a, row_mode="m", column_mode="k", prefer="k")
        b_major = contiguous_mode(b, row_mode="k", column_mode="n", prefer="k")
        return cls(
            a.shape[-2],
            b.shape[-1],
            a.shape[-1],
            a.shape[0] if a.ndim == 3 else 1,
            in_dtype,
            normalize_dtype(str(out_dtype)) if out_dtype is not None else default_out_dtype(in_dtype),
            a_major,
            b_major,
            alignment=alignment_of(a, b, a_major, b_major),
            epilogue=epilogue,
            accumulation=accumulation,
        )

    def backward(self) -> tuple[Problem, ...]:
        """The products for the gradients of A and B, with packed operands: grad x B^T and A^T x grad.

        Each gradient has the layout of its operand, as autograd computes it: the gradient of a column-major
        operand is computed transposed. For groups only the gradient of A is such a product; B's has groups
        along k.
        """
        if self.groups:
            if self.in_dtype != "bf16":
                raise ProblemError(
                    f"{self}: gradients of groups have kernels for bf16 only; leave the gradients out"
                )
            major = "n" if self.b_major == "k" else "k"
            return (Problem.of_groups(self.m, self.k, self.n, self.groups, b_major=major),)
        if self.out_dtype != self.in_dtype:
            raise ProblemError(f"{self}: there are no gradients if output and operands differ in dtype")
        a, b = (self.m, self.k, self.a_major == "k"), (self.k, self.n, self.b_major == "n")
        grad = (self.m, self.n, True)
        return self._product(grad, _transposed(b), a), self._product(_transposed(a), grad, b)

    def _product(self, a: _Matrix, b: _Matrix, like: _Matrix) -> Problem:
        if not (like[2] or 1 in like[:2]):
            a, b = _transposed(b), _transposed(a)
        (m, k, a_rows), (_, n, b_rows) = a, b
        a_major = "k" if a_rows or 1 in (m, k) else "m"
        b_major = "n" if b_rows and 1 not in (k, n) else "k"
        packed = Problem(m, n, k, self.batch, self.in_dtype, self.in_dtype, a_major, b_major)
        if self.alignment < self.packed_alignment:  # gaps, which gradients' operands have, too
            return replace(packed, alignment=min(packed.alignment, self.alignment))
        return packed

    @property
    def shape(self) -> str:
        """``MxNxK``, with ``xL`` when there is a batch."""
        return f"{self.m}x{self.n}x{self.k}" + (f"x{self.batch}" if self.batch != 1 else "")

    @property
    def gate(self) -> str:
        """The gated step of its epilogue; empty without one."""
        return next((step for step in self.fused.steps if step in GATED), "")

    @property
    def torch_call(self) -> str:
        """The torch function that serves as a record's baseline. For fp16 groups it runs once per group, and
        the time in which torch waits for the sizes of the groups is left out."""
        calls = {"bf16": "torch._grouped_mm", "fp16": "torch.mm", "fp8_e4m3": "torch._scaled_grouped_mm"}
        return calls[self.in_dtype] if self.groups else "torch.mm"

    @property
    def our_call(self) -> str:
        """tunegemm's function that a record serves; other functions that compute the same product use the
        record, too."""
        if not self.groups:
            return "matmul"
        scaled = "scaled_" if self.fused.scales else ""
        return "experts" if self.gate else f"{scaled}grouped_mm"

    @property
    def as_modelled(self) -> Problem:
        """The product as the model sees it. Groups become a batch of equal groups whose rows are B's columns,
        as the kernels see them; any other product is unchanged."""
        if not self.groups:
            return self
        rows, a_major = -(-self.m // self.groups), "k" if self.b_major == "k" else "m"
        return Problem(
            self.n, rows, self.k, self.groups, self.in_dtype, self.out_dtype, a_major, out_major="m"
        )

    @property
    def dtypes(self) -> str:
        """Dtypes of inputs, and of output and sums if not the default: ``fp8_e4m3>fp16 two_level``."""
        out = "" if self.out_dtype == default_out_dtype(self.in_dtype) else f">{self.out_dtype}"
        return self.in_dtype + out + ("" if self.accumulation == "fast" else f" {self.accumulation}")

    @property
    def layout(self) -> str:
        """The layout letters, such as ``tn``."""
        return next(name for name, majors in LAYOUTS.items() if majors == (self.a_major, self.b_major))

    @property
    def fused(self) -> Epilogue:
        """The epilogue as a value; false if there is none."""
        return Epilogue.parse(self.epilogue)

    @property
    def out_n(self) -> int:
        """Columns of D: n, or n / 2 if pairs of columns gate each other."""
        return self.n // 2 if self.fused.gated else self.n

    @property
    def packed_alignment(self) -> int:
        """The alignment of operands without gaps, whose leading dimensions are the extents."""
        steps = [MAX_ALIGNMENT]
        for leading, lines in (
            (self.k, self.m) if self.a_major == "k" else (self.m, self.k),
            (self.k, self.n) if self.b_major == "k" else (self.n, self.k),
        ):
            steps += [leading] * (lines > 1) + [leading * lines] * (max(self.batch, self.groups) > 1)
        return math.gcd(MAX_ALIGNMENT, *(step * DTYPE_BYTES[self.in_dtype] for step in steps))

    def _alignments(self) -> list[int]:
        smallest = DTYPE_BYTES[self.in_dtype].bit_length() - 1
        return [1 << bit for bit in range(smallest, MAX_ALIGNMENT.bit_length())]

    @property
    def relative_rate(self) -> float:
        """Tensor-core throughput relative to bf16's: all instructions read equally many bytes of k."""
        return DTYPE_BYTES["bf16"] / DTYPE_BYTES[self.in_dtype]

    @property
    def flops(self) -> int:
        """Multiplications and additions: 2 m n k per batch entry; for groups, in all."""
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def bytes(self) -> int:
        """Fewest bytes through device memory: each operand is read once, the output written once. Groups
        count the weights of one group, since one group may have all rows."""
        inputs = (self.m * self.k + self.k * self.n) * DTYPE_BYTES[self.in_dtype]
        out = self.m * self.out_n * DTYPE_BYTES[self.out_dtype]
        fused = sum(
            math.prod(self.operand_shape(operand)) * DTYPE_BYTES[operand_dtype(operand, self.out_dtype)]
            for operand in (self.fused.operands if self.fused.is_defined else ())
            if operand.kind == "matrix"
        )
        return (inputs + out) * self.batch + fused

    @property
    def memory_bytes(self) -> int:
        """Bytes of its operands and output; groups count all weights."""
        others = max(0, self.groups - 1) * self.k * self.n
        return self.bytes + others * DTYPE_BYTES[self.in_dtype]

    def operand_shape(self, operand: Operand) -> tuple[int, ...]:
        """Shape of an epilogue's operand; a number has none. C is added before columns gate each other. With
        groups each group has a row of column values."""
        if operand.kind in ("number", "scalar"):
            return ()
        if operand.kind == "n" and self.groups:
            return (self.groups, self.n)
        if operand.kind in ("n", "m"):
            return (self.n if operand.kind == "n" else self.m,)
        columns = self.n if operand.name == "c" else self.out_n
        return (self.m, columns) if self.batch == 1 else (self.batch, self.m, columns)

    @property
    def arithmetic_intensity(self) -> float:
        """FLOP per byte of device memory; below the device's ridge point the product is memory-bound."""
        return self.flops / self.bytes

    def __str__(self) -> str:
        words = [self.shape, self.dtypes, self.layout]
        words += ["out-m"] if self.out_major != "n" else []
        words += [f"align{self.alignment}"] if self.alignment < MAX_ALIGNMENT else []
        words += [f"groups{self.groups}"] if self.groups else []
        words += [self.epilogue] if self.epilogue else []
        return " ".join(words)


#: Rows, columns, and whether rows are contiguous.
_Matrix = tuple[int, int, bool]


def _transposed(matrix: _Matrix) -> _Matrix:
    rows, columns, row_major = matrix
    return columns, rows, not row_major


def _steps(tensor: torch.Tensor, leading: int) -> list[int]:
    """Bytes between rows (or columns) and between batch entries; an extent of 1 is never stepped over."""
    dims = [leading] if tensor.ndim == 2 else [leading, 0]
    return [tensor.stride(dim) * tensor.element_size() for dim in dims if tensor.shape[dim] > 1]


def alignment_of(a: torch.Tensor, b: torch.Tensor, a_major: str, b_major: str) -> int:
    """Bytes, at most 16, that divide the operands' addresses and the steps between lines and batches."""
    steps = _steps(a, -2 if a_major == "k" else -1) + _steps(b, -1 if b_major == "k" else -2)
    return math.gcd(MAX_ALIGNMENT, a.data_ptr(), b.data_ptr(), *steps)


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share an address (expanded or sliding-window views)."""
    reach = 1
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent > 1:
            if stride < reach:
                return True
            reach = stride * extent
    return False


def contiguous_mode(tensor: torch.Tensor, *, row_mode: str, column_mode: str, prefer: str) -> str:
    """The contiguous one of the last two modes; `prefer` if both are, because one has an extent of 1."""
    rows, columns = tensor.shape[-2:]
    row_stride, column_stride = tensor.stride()[-2:]
    candidates = []
    if column_stride == 1 or columns == 1:
        candidates.append(column_mode)
    if row_stride == 1 or rows == 1:
        candidates.append(row_mode)
    if not candidates:
        raise ProblemError(
            f"strides {tuple(tensor.stride())} of a {tuple(tensor.shape)} operand: "
            "no mode is contiguous; call .contiguous() first"
        )
    return prefer if prefer in candidates else candidates[0]
