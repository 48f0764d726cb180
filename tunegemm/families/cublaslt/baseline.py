"""torch's own product as a launcher: the baseline of every interleave, and a candidate of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tunegemm.problem import Problem

if TYPE_CHECKING:
    import torch

    from tunegemm.families import Launcher

#: Extents that torch's 8-bit products take: multiples of these; and `_int_mm` more rows than 16.
_FP8_UNIT = 16
_INT8_UNIT = 8
_INT8_LEAST_ROWS = 17


def torch_mm(problem: Problem) -> Launcher:
    """The call that a torch user would write for this problem, into a given output.

    16-bit operands: ``torch.mm(a, b, out=out)``. fp32 out: its `out_dtype` overload (torch >= 2.8,
    CUDA only), which lets cuBLAS write its accumulators. The other 16-bit dtype: torch has no single
    call, so a product and a conversion. tf32: the same with tf32 allowed.

    fp8: ``torch._scaled_mm`` with scales of 1; int8: ``torch._int_mm``; on padded copies where they refuse
    the extents. Two e5m2 operands, or any that are not k-major, cuBLAS does not multiply: as bf16. With an
    epilogue: see `eager`.
    """
    if problem.epilogue:
        from tunegemm.families.cublaslt.eager import torch_fused

        return torch_fused(problem)
    if problem.in_dtype == "tf32":
        return _with_tf32(_plain(problem))
    if problem.in_dtype.startswith("fp8"):
        return _scaled_mm(problem)
    if problem.in_dtype == "int8":
        return _each_entry(problem, _padded(problem, _INT8_UNIT, _int_mm))
    return _plain(problem)


def _plain(problem: Problem) -> Launcher:
    import torch

    multiply = torch.mm if problem.batch == 1 else torch.bmm
    own_dtype = "fp32" if problem.in_dtype == "tf32" else problem.in_dtype
    if problem.out_dtype == own_dtype:

        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            multiply(a, b, out=out)

    elif problem.out_dtype == "fp32":

        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            multiply(a, b, out_dtype=torch.float32, out=out)

    else:

        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(multiply(a, b))

    return launch


def _with_tf32(launch: Launcher) -> Launcher:
    from torch.backends.cuda import matmul

    def allowed(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        before = matmul.fp32_precision
        matmul.fp32_precision = "tf32"
        try:
            launch(a, b, out)
        finally:
            matmul.fp32_precision = before

    return allowed


def _scaled_mm(problem: Problem) -> Launcher:
    import torch

    ones: dict[torch.device, torch.Tensor] = {}

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        if a.device not in ones:
            ones[a.device] = torch.ones((), dtype=torch.float32, device=a.device)
        one = ones[a.device]
        fast = problem.accumulation == "fast"
        torch._scaled_mm(a, b, one, one, out_dtype=out.dtype, use_fast_accum=fast, out=out)

    def as_bf16(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.mm(a.bfloat16(), b.bfloat16()))

    library = problem.in_dtype != "fp8_e5m2" and (problem.a_major, problem.b_major) == ("k", "k")
    return _each_entry(problem, _padded(problem, _FP8_UNIT, multiply) if library else as_bf16)


def _int_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    torch._int_mm(a, b, out=out)


def _each_entry(problem: Problem, launch: Launcher) -> Launcher:
    """For a product that torch has without a batch only."""
    if problem.batch == 1:
        return launch

    def entries(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        for entry in zip(a, b, out, strict=True):
            launch(*entry)

    return entries


def _padded(problem: Problem, unit: int, launch: Callable[..., None]) -> Launcher:
    """On copies with zeros around them, where torch refuses the extents as they are or the output's major."""
    rows = max(problem.m, _INT8_LEAST_ROWS) if unit == _INT8_UNIT else problem.m
    m = -(-rows // unit) * unit if rows != problem.m else rows
    n, k = (-(-extent // unit) * unit for extent in (problem.n, problem.k))
    if (
        (m, n, k) == (problem.m, problem.n, problem.k)
        and problem.out_major == "n"
        and problem.alignment == 16
    ):
        return launch

    def launch_padded(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        wide_a = a.new_zeros((m, k))
        wide_b = b.new_zeros((n, k)).t()
        wide_a[: problem.m, : problem.k].copy_(a)
        wide_b[: problem.k, : problem.n].copy_(b)
        wide_out = out.new_empty((m, n))
        launch(wide_a, wide_b, wide_out)
        out.copy_(wide_out[: problem.m, : problem.n])

    return launch_padded
