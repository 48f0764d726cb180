"""torch.mm as a launcher: the baseline of every interleave, and a candidate of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunegemm.problem import Problem

if TYPE_CHECKING:
    import torch

    from tunegemm.families import Launcher


def torch_mm(problem: Problem) -> Launcher:
    """The call that a torch user would write for this problem, into a given output.

    Same dtype in and out: ``torch.mm(a, b, out=out)``. fp32 out: its `out_dtype` overload (torch >= 2.8,
    CUDA only), which lets cuBLAS write its accumulators. The other 16-bit dtype: torch has no single
    call, so a product and a conversion. With an epilogue: see `eager`.
    """
    if problem.epilogue:
        from tunegemm.families.cublaslt.eager import torch_fused

        return torch_fused(problem)
    import torch

    multiply = torch.mm if problem.batch == 1 else torch.bmm
    if problem.out_dtype == problem.in_dtype:

        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            multiply(a, b, out=out)

    elif problem.out_dtype == "fp32":

        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            multiply(a, b, out_dtype=torch.float32, out=out)

    else:

        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(multiply(a, b))

    return launch
