"""PyTorch's own samples of products, and whether two calls of one mean the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

import tunegemm
from tunegemm.describe.problem import Problem

#: The operators that tunegemm takes over, and those of torch that are built on them.
TAKEN = ("mm", "bmm", "addmm", "baddbmm", "matmul", "nn.functional.linear")
_ATTENTION = "nn.functional.scaled_dot_product_attention"
BUILT_ON = (
    "__rmatmul__", "addbmm", "addmv", "mv", "einsum", "linalg.multi_dot", "tensordot",
    "nn.functional.bilinear", "outer", "matrix_exp", "linalg.matrix_power", "cov", "corrcoef",
    _ATTENTION, "nn.functional.multi_head_attention_forward",
)  # fmt: skip

#: tunegemm's functions, by torch's names.
OURS: dict[str, Callable[..., Any]] = {
    "matmul": tunegemm.matmul,
    "nn.functional.linear": tunegemm.linear,
    "bmm": tunegemm.bmm,
    "addmm": tunegemm.addmm,
    "baddbmm": tunegemm.baddbmm,
}

#: Relative to the largest value: what 16 bits leave of sums in another order.
BOUNDS = {torch.float32: 5e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def operators(names: tuple[str, ...]) -> dict[str, list[Any]]:
    """PyTorch's `OpInfo`s of these names, but for one that is there for its size. Takes seconds to import."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    # It looks for a unittest, of which there is none, by reading the sources of all callers.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    found: dict[str, list[Any]] = {name: [] for name in names}
    for op in op_db:
        if op.name in found and op.variant_test_name != "triton_optimized":
            found[op.name].append(op)
    return found


class StandIn:
    """Computes any problem on CPU tensors, in fp64, which `enable` leaves to torch, and rounds once."""

    def __init__(self) -> None:
        self.calls: list[Problem] = []

    def of(self, problem: Problem) -> Callable[..., None]:
        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *operands: Any) -> None:
            self.calls.append(problem)
            value = torch.matmul(a.double(), b.double()).float()
            names = (each.name for each in problem.fused.operands)
            out.copy_(problem.fused.reference(value, dict(zip(names, operands, strict=True))))

        return launch


@dataclass
class Outcome:
    """What a call gave: tensors and their gradients, or the class of an exception."""

    error: type | None = None
    results: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)


def leaves_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested arguments, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves_of(each)
    elif isinstance(value, dict):
        yield from leaves_of(list(value.values()))


def fresh(value: Any, grad: bool) -> Any:
    """The same arguments with tensors of their own, as they lie, that require a gradient or not."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(grad and value.is_floating_point())
    if isinstance(value, (list, tuple)):
        return type(value)(fresh(each, grad) for each in value)
    if isinstance(value, dict):
        return {name: fresh(each, grad) for name, each in value.items()}
    return value


def outcome_of(call: Callable[..., Any], arguments: Any, keywords: Any, *, grad: bool = False) -> Outcome:
    """Calls it with arguments of its own, and differentiates what it gives."""
    arguments, keywords = fresh(arguments, grad), fresh(keywords, grad)
    # Not torch.manual_seed, which without a GPU formats a traceback for each kind of GPU that may come yet.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    try:
        results = list(leaves_of(call(*arguments, **keywords)))
        found = Outcome(results=[result.detach() for result in results])
        tops = [result for result in results if result.requires_grad]
        assert grad or not tops
        if tops:
            wanted = [leaf for leaf in leaves_of([arguments, keywords]) if leaf.requires_grad]
            upstream = [torch.linspace(-1, 1, top.numel(), device=top.device).view(top.shape) for top in tops]
            given = [each.to(top.dtype) for each, top in zip(upstream, tops, strict=True)]
            found.gradients = list(torch.autograd.grad(tops, wanted, given, allow_unused=True))
    except Exception as error:
        return Outcome(error=type(error))
    return found


def difference(theirs: Outcome, ours: Outcome, bound: float) -> str:
    """What tells two outcomes apart, torch's first; empty where nothing does."""
    if theirs.error is not None or ours.error is not None:
        return "" if theirs.error is ours.error else f"{theirs.error} is {ours.error}"
    pairs = [*itertools.zip_longest(theirs.results, ours.results)]
    for expected, result in pairs:
        if expected is None or result is None:
            return "another number of results"
        if expected.numel() and expected.stride() != result.stride():
            return f"strides {expected.stride()} are {result.stride()}"
    for expected, result in [*pairs, *itertools.zip_longest(theirs.gradients, ours.gradients)]:
        if (expected is None) != (result is None):
            return "a gradient there and none here, or the other way round"
        if expected is not None and (found := _values(expected, result, bound)):
            return found
    return ""


def _values(expected: torch.Tensor, result: torch.Tensor, bound: float) -> str:
    if (expected.dtype, expected.shape) != (result.dtype, result.shape):
        return f"{expected.dtype} {tuple(expected.shape)} is {result.dtype} {tuple(result.shape)}"
    left, right = expected.double(), result.double()
    finite = left.isfinite()
    if not torch.equal(finite, right.isfinite()) or not torch.equal(left.isnan(), right.isnan()):
        return "NaN or infinity elsewhere"
    if not finite.any():
        return ""
    error, size = (left - right)[finite].abs().max(), left[finite].abs().max().clamp(min=1)
    return f"values differ by {float(error / size):.3g}" if error > bound * size else ""


def strange_operands(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Operands of every rank that do and do not fit each other."""
    shapes = [
        (), (4,), (1,), (4, 4), (1, 4), (4, 1), (4, 3), (3, 4), (0, 4), (4, 0), (1, 4, 4), (2, 4, 4),
        (3, 4, 4), (2, 4, 3), (8, 4), (0, 4, 4), (1, 2, 4, 4),
    ]  # fmt: skip
    found = {}
    for shape in shapes:
        count = torch.Size(shape).numel()
        values = torch.arange(count, device=device).remainder(5).view(shape) - 2
        found["x".join(map(str, shape)) or "scalar"] = values.to(dtype)
    row = found["4"]
    for rows in (0, 1, 3, 4):
        found[f"row of {rows}"] = row.expand(rows, 4)
    found["negated"] = torch._neg_view(found["4x4"])
    found["transposed"] = found["4x4"].t()
    found["strided"] = torch.arange(32, device=device).remainder(3).view(4, 8).to(dtype)[:, ::2]
    found["other dtype"] = found["4x4"].float() if dtype != torch.float32 else found["4x4"].half()
    found["other dtype's row"] = found["other dtype"][0]
    found["integers"] = found["4x4"].to(torch.int64)
    return found


def enabled(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call and its backward pass under `tunegemm.enable`."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        tunegemm.enable()
        return call(*arguments, **keywords)

    return run


class Comparison:
    """Counts cases and those that were served, and collects what differs.

    kernel: whose `calls` can be cleared, and are true once a kernel was launched.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.cases = self.served = 0
        self.differs: list[str] = []

    def run(self, name: str, call: Callable[..., Any], *given: Any, expected: Outcome, grad: bool) -> None:
        """Twice, as what is done with a `b` again is another way through dispatch."""
        self.kernel.calls.clear()
        for _ in range(2):
            result = outcome_of(call, *given, grad=grad)
            tunegemm.disable()
            bound = BOUNDS[expected.results[0].dtype] if expected.results else 0.0
            if found := difference(expected, result, bound):
                self.differs.append(f"{name}: {found}")
        self.cases += 1
        self.served += bool(self.kernel.calls)


def compare(
    kernel: Any, device: str, op: Any, dtype: torch.dtype, most: int | None = None, cast: bool = False
) -> Comparison:
    """Samples of an operator, by torch, under `enable`, and by our function of that name.

    most: how many, about, by default all. cast: under autocast to bf16.

    Values of samples reach 9, and attention takes the exponential of its first product: there the rounding of
    operands to tf32 or bf16 alone changes results by more than `BOUNDS`. So its queries are divided by 9.
    """
    found = Comparison(kernel)
    samples = list(op.sample_inputs(device, dtype, requires_grad=False))
    samples += [each.sample_input for each in op.error_inputs(device)] if op.error_inputs_func else []
    step = max(1, len(samples) // most) | 1 if most else 1  # odd: options come in twos, and each is to be met
    for number, sample in enumerate(samples[::step]):
        first = sample.input / 9 if op.name == _ATTENTION else sample.input
        given = (first, *sample.args), sample.kwargs
        for grad in (False, True):
            if grad and dtype not in op.supported_backward_dtypes(device):
                continue
            with torch.autocast(device, torch.bfloat16, enabled=cast):
                expected = outcome_of(op.op, *given, grad=grad)
                name = f"sample {number * step}, grad {grad}"
                found.run(f"{name}, enabled", enabled(op.op), *given, expected=expected, grad=grad)
                if op.name in OURS:
                    found.run(f"{name}, ours", OURS[op.name], *given, expected=expected, grad=grad)
    return found


def check(found: Comparison, share: float) -> None:
    assert not found.differs, "\n".join(found.differs)
    assert found.served >= share * found.cases, f"{found.served} of {found.cases} served"


def agree(kernel: Any, call: Callable[..., Any], ours: Any, *given: Any, **keywords: Any) -> bool:
    """Whether it was served; fails where the outcome is another than torch's."""
    expected = outcome_of(call, given, keywords)
    bound = BOUNDS.get(expected.results[0].dtype, 0.0) if expected.results else 0.0
    was_served = False
    for way in (enabled(call), *([ours] if ours else [])):
        kernel.calls.clear()
        result = outcome_of(way, given, keywords)
        tunegemm.disable()
        found = difference(expected, result, bound)
        shown = [(tuple(each.shape), each.stride(), each.dtype) for each in given]
        assert not found, f"{way} of {shown}, {keywords}: {found}"
        was_served |= bool(kernel.calls)
    return was_served


PAIRS = {
    "mm": (torch.mm, None),
    "bmm": (torch.bmm, tunegemm.bmm),
    "matmul": (torch.matmul, tunegemm.matmul),
    "linear": (functional.linear, tunegemm.linear),
}


SECOND = ("4x4", "4", "1x4", "4x3", "0x4", "1x4x4", "2x4x4", "2x4x3", "other dtype", "negated", "1x2x4x4")
