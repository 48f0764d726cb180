"""Launchers of torch's products, for every dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tunegemm.describe.precision import computing_fp32_in
from tunegemm.describe.problem import Problem
from tunegemm.generate.launching import Launcher

if TYPE_CHECKING:
    import torch

#: torch's 8-bit products need extents that are multiples of these, and `_int_mm` at least this many rows.
_FP8_UNIT = 16
_INT8_UNIT = 8
INT8_LEAST_ROWS = 17


def plain_product(problem: Problem) -> Launcher:
    """The call that a torch user would write, with an output, for a problem without an epilogue.

    For 16-bit operands it is ``torch.mm(a, b, out=out)``. For an fp32 output it is the `out_dtype` overload
    (torch >= 2.8, CUDA only), with which cuBLAS writes its accumulators. For the other 16-bit dtype torch has
    no single call, so a conversion follows the product. tf32 is the same with tf32 allowed.

    fp8 uses ``torch._scaled_mm`` with scales of 1, and int8 ``torch._int_mm``; if they refuse the extents,
    they get padded copies. cuBLAS cannot multiply two e5m2 operands, nor fp8 operands that are not k-major:
    these are converted to the output's dtype first.
    """
    if problem.in_dtype == "tf32":
        return with_tf32(_plain(problem))
    if problem.in_dtype.startswith("fp8"):
        return fp8_product(problem)
    if problem.in_dtype == "int8":
        return _each_entry(problem, _padded(problem, _INT8_UNIT, _int_mm))
    return _plain(problem)


def has_own_dtype(problem: Problem) -> bool:
    """Whether torch gives the product the output's dtype by itself."""
    return problem.out_dtype == ("fp32" if problem.in_dtype == "tf32" else problem.in_dtype)


def multiply_of(problem: Problem) -> Callable[..., Any]:
    """torch.mm, or torch.bmm with a batch; with fp32 results where only the output is fp32."""
    import torch

    multiply = torch.mm if problem.batch == 1 else torch.bmm
    if problem.out_dtype == "fp32" and not has_own_dtype(problem):
        return partial(multiply, out_dtype=torch.float32)
    return multiply


def _plain(problem: Problem) -> Launcher:
    multiply, writes = multiply_of(problem), problem.out_dtype == "fp32" or has_own_dtype(problem)

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        if writes:
            multiply(a, b, out=out)
        else:
            out.copy_(multiply(a, b))

    return launch


def with_tf32(launch: Callable[..., None]) -> Launcher:
    """A launcher whose fp32 products torch may compute in tf32, even if the program does not allow it."""

    def allowed(*operands: Any) -> None:
        with computing_fp32_in("tf32"):
            launch(*operands)

    return allowed


def library_multiplies_fp8(problem: Problem) -> bool:
    """Whether cuBLAS multiplies the problem's fp8 types and majors."""
    return problem.in_dtype != "fp8_e5m2" and (problem.a_major, problem.b_major) == ("k", "k")


def fp8_product(problem: Problem) -> Launcher:
    """The product of fp8 operands, without scales."""
    import torch

    ones: dict[torch.device, torch.Tensor] = {}
    fast = problem.accumulation == "fast"

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        if a.device not in ones:
            ones[a.device] = torch.ones((), dtype=torch.float32, device=a.device)
        one = ones[a.device]
        torch._scaled_mm(a, b, one, one, out_dtype=out.dtype, use_fast_accum=fast, out=out)

    def upcast(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        wide = out.dtype if out.dtype.itemsize > 1 else torch.bfloat16  # either holds every fp8 number
        out.copy_(torch.mm(a.to(wide), b.to(wide)))

    library = library_multiplies_fp8(problem)
    return _each_entry(problem, _padded(problem, _FP8_UNIT, multiply) if library else upcast)


def _int_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    torch._int_mm(a, b, out=out)


def _each_entry(problem: Problem, launch: Launcher) -> Launcher:
    """Launches each batch entry on its own, because torch has this product without a batch only."""
    if problem.batch == 1:
        return launch

    def entries(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        for entry in zip(a, b, out, strict=True):
            launch(*entry)

    return entries


def fits_library(problem: Problem, unit: int = _FP8_UNIT) -> bool:
    """Whether torch's 8-bit products take the operands and the output without copies."""
    return (
        _padded_extents(problem, unit) == (problem.m, problem.n, problem.k)
        and problem.out_major == "n"
        and problem.alignment == 16
    )


def _padded_extents(problem: Problem, unit: int) -> tuple[int, int, int]:
    n, k = (-(-extent // unit) * unit for extent in (problem.n, problem.k))
    m = problem.m
    if unit == _INT8_UNIT and m < INT8_LEAST_ROWS:
        m = -(-INT8_LEAST_ROWS // unit) * unit
    return m, n, k


def _padded(problem: Problem, unit: int, launch: Callable[..., None]) -> Launcher:
    """Launches on copies padded with zeros, if torch refuses the extents or the output's major."""
    if fits_library(problem, unit):
        return launch
    m, n, k = _padded_extents(problem, unit)

    def launch_padded(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        wide_a = a.new_zeros((m, k))
        wide_b = b.new_zeros((n, k)).t()
        wide_a[: problem.m, : problem.k].copy_(a)
        wide_b[: problem.k, : problem.n].copy_(b)
        wide_out = out.new_empty((m, n))
        launch(wide_a, wide_b, wide_out)
        out.copy_(wide_out[: problem.m, : problem.n])

    return launch_padded
