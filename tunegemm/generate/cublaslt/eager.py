"""Products and epilogues as a torch user would write them: the baseline of every interleave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tunegemm.describe.epilogue import GATED
from tunegemm.describe.problem import Problem
from tunegemm.generate.cublaslt.products import (
    fits_library,
    fp8_product,
    has_own_dtype,
    library_multiplies_fp8,
    multiply_of,
    plain_product,
    with_tf32,
)
from tunegemm.generate.launching import Launcher
from tunegemm.generate.takes import TORCHS

#: Computes one step from the value so far and the operands by name. Writes the output, if it is not None.
Step = Callable[[Any, dict[str, Any], Any], Any]


def torch_mm(problem: Problem) -> Launcher:
    """The launcher of one call of torch. An epilogue is eager torch, one kernel after another, and the last
    kernel writes the output. For rows in groups the launcher is a `GroupedProduct`.
    """
    if problem.groups:
        return GroupedProduct(problem)
    if not problem.epilogue:
        return plain_product(problem)
    compute = composed(problem)
    writes_amax = "amax" in problem.fused.steps

    def launch(a: Any, b: Any, out: Any, *operands: Any) -> None:
        compute(a, b, *operands, out=out)
        if writes_amax:
            shown = out.float() if out.dtype.itemsize == 1 else out  # torch has no abs of fp8
            operands[-1].copy_(shown.abs().amax())

    return with_tf32(launch) if problem.in_dtype == "tf32" else launch


#: The attribute of a tensor of groups' ends that may hold the number of rows of each group.
SIZES = "sizes"


class GroupedProduct:
    """torch's product of rows in groups, called with (a, b, out, ends of groups, scales).

    torch's function takes no output, so `result` holds the latest one, and timing includes no copy. A gate
    adds two kernels, as in a model.

    For fp16, torch waits until the host knows how many rows each group has. Here the host may know already
    (`SIZES`), so timing shows less than a call takes.
    """

    def __init__(self, problem: Problem) -> None:
        self.result: Any = None
        self._problem = problem

    def __call__(self, a: Any, b: Any, out: Any, offsets: Any, *scales: Any) -> None:
        import torch

        dtype, steps = self._problem.in_dtype, self._problem.fused.steps
        if dtype == "fp16":
            sizes = vars(offsets)[SIZES]
            product = out.new_empty((sum(sizes), b.shape[2]))
            of_groups = zip(a[: sum(sizes)].split(sizes), product.split(sizes), b, strict=True)
            for rows, part, weights in of_groups:
                if len(rows):
                    torch.mm(rows, weights, out=part)
        elif scales:
            scale_a, scale_b = scales
            product = torch._scaled_grouped_mm(
                a, b, scale_a, scale_b, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        else:
            product = torch._grouped_mm(a, b, offs=offsets)
        if self._problem.fused.gated:
            gate, up = product.chunk(2, dim=-1)
            product = torch.mul(_activate(GATED[steps[0]], gate, None), up)
        self.result = product


def composed(problem: Problem) -> Callable[..., Any]:
    """A function of (a, b, operands ..., out=None) that returns D, without its amax.

    If dtypes allow, ``torch.addmm`` (`baddbmm` with a batch) applies alpha, C and a column bias, and
    ``torch._scaled_mm`` the scales of fp8 operands. All other steps follow the product, also the scales of
    ``torch._int_mm``. Each operation of a user's function is a kernel of its own.
    """
    import torch

    fused = problem.fused
    names = [operand.name for operand in fused.operands]
    steps = [step for step in fused.steps if step != "amax"]
    multiply, added = _product(problem, steps)
    rest = [step_of(step, _working_dtype(problem)) for step in steps if step not in added]
    if fused.function is not None:
        own = _working_dtype(problem)
        rest = [lambda x, given, out: _into(out, fused.reference(x, given).to(own))]
    if rest and problem.out_dtype.startswith("fp8"):
        rest.append(lambda x, given, out: _into(out, x.to(getattr(torch, TORCHS[problem.out_dtype]))))

    def compute(a: Any, b: Any, *operands: Any, out: Any = None) -> Any:
        given = dict(zip(names, operands, strict=True))
        value = multiply(a, b, given, None if rest else out)
        for index, step in enumerate(rest):
            value = step(value, given, out if index == len(rest) - 1 else None)
        return value

    return compute


def _into(out: Any, value: Any) -> Any:
    return value if out is None else out.copy_(value)


def _product(problem: Problem, steps: list[str]) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The call that multiplies, and the steps that it includes."""
    import torch

    if problem.in_dtype.startswith("fp8"):
        return _fp8_product(problem, steps)
    if problem.in_dtype == "int8":
        exact = plain_product(replace(problem, out_dtype="int32", out_major="n", epilogue=""))
        return _returning(exact, torch.int32), ()
    many = problem.batch > 1
    same = has_own_dtype(problem)
    if "beta_c" in steps and same and not {"scale_tensor", "scale_rowwise"} & set(steps):
        add = torch.baddbmm if many else torch.addmm

        def with_c(a: Any, b: Any, given: dict[str, Any], out: Any) -> Any:
            return add(given["c"], a, b, beta=given["beta"], alpha=given.get("alpha", 1.0), out=out)

        return with_c, ("alpha", "beta_c")
    if "bias_n" in steps and same and not many and steps[0] == "bias_n":

        def with_bias(a: Any, b: Any, given: dict[str, Any], out: Any) -> Any:
            return torch.addmm(given["bias"], a, b, out=out)

        return with_bias, ("bias_n",)
    mm = multiply_of(problem)
    return lambda a, b, given, out: mm(a, b) if out is None else mm(a, b, out=out), ()


def _working_dtype(problem: Problem) -> Any:
    """The output's dtype, or bf16 for an fp8 output: torch converts to fp8, but does not compute in it."""
    import torch

    return {"fp16": torch.float16, "fp32": torch.float32}.get(problem.out_dtype, torch.bfloat16)


def _fp8_product(problem: Problem, steps: list[str]) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """``torch._scaled_mm``, with the scales if it takes them: those of rows and columns only for bf16."""
    import torch

    own = _working_dtype(problem)
    first = steps[0] if steps else ""
    scaled = first == "scale_tensor" or (first == "scale_rowwise" and own == torch.bfloat16)
    if scaled and problem.batch == 1 and library_multiplies_fp8(problem) and fits_library(problem):

        def with_scales(a: Any, b: Any, given: dict[str, Any], out: Any) -> Any:
            scale_a, scale_b = given["scale_a"], given["scale_b"]
            if first == "scale_rowwise":
                scale_a, scale_b = scale_a[:, None], scale_b[None, :]
            fast = problem.accumulation == "fast"
            if first == "scale_rowwise" and out is not None and out.dtype != own:  # it writes bf16 only
                return out.copy_(torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=own, use_fast_accum=fast))
            dtype = own if out is None else out.dtype
            return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast, out=out)

        return with_scales, (first,)
    return _returning(fp8_product(problem), own), ()


def _returning(launch: Launcher, dtype: Any) -> Callable[..., Any]:
    """A launcher as a function that returns the product, which it allocates if it gets no output."""

    def product(a: Any, b: Any, given: dict[str, Any], out: Any) -> Any:
        value = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype) if out is None else out
        launch(a, b, value)
        return value

    return product


def step_of(name: str, dtype: Any) -> Step:
    """A step, except amax, as an operation of torch. dtype: that of the product."""
    import torch

    def column(vector: Any) -> Any:
        return vector[:, None]

    def scale(x: Any, factor: Any, out: Any) -> Any:
        # An fp32 factor makes the result fp32, but the next steps need the output's dtype.
        return (x * factor).to(dtype) if out is None else torch.mul(x, factor, out=out)

    def add_weighted(x: Any, given: dict[str, Any], out: Any) -> Any:
        if given["beta"] == 0:  # like torch.addmm, does not read C, which may hold NaN
            return _into(out, x)
        return torch.add(x, given["c"], alpha=given["beta"], out=out)

    steps: dict[str, Step] = {
        "alpha": lambda x, given, out: torch.mul(x, given["alpha"], out=out),
        "scale_tensor": lambda x, given, out: scale(x, given["scale_a"] * given["scale_b"], out),
        "scale_rowwise": lambda x, given, out: scale(x * column(given["scale_a"]), given["scale_b"], out),
        "beta_c": add_weighted,
        "bias_n": lambda x, given, out: torch.add(x, given["bias"], out=out),
        "bias_m": lambda x, given, out: torch.add(x, column(given["bias"]), out=out),
        "residual": lambda x, given, out: torch.add(x, given["residual"], out=out),
    }
    if name in steps:
        return steps[name]
    if name in GATED:
        activation = GATED[name]
        return lambda x, _, out: torch.mul(_activate(activation, x[..., ::2], None), x[..., 1::2], out=out)
    return lambda x, given, out: _activate(name, x, out)


def _activate(name: str, x: Any, out: Any) -> Any:
    """An activation as an operation of torch."""
    import torch

    operation, words = getattr(torch.ops.aten, name.removesuffix("_tanh")), {}
    if name.startswith("gelu"):
        words["approximate"] = "tanh" if name == "gelu_tanh" else "none"
        if out is not None and not out.is_contiguous():
            return out.copy_(operation(x, **words))  # gelu.out needs a contiguous output (torch 2.13, CPU)
    return operation(x, **words) if out is None else operation.out(x, **words, out=out)
