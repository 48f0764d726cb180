"""Quantises activations to fp8 with a scale for each 1x128, for `scaled_mm`, in one launch."""

from __future__ import annotations

from typing import Any

import torch

from tunegemm.dispatch import extension
from tunegemm.dispatch.guards import are_plain, are_torchs, check_tensors, has_gradient, is_transformed
from tunegemm.errors import ProblemError
from tunegemm.generate import quantize as kernels
from tunegemm.generate.quantize import BLOCK, EPSILON, LARGEST, QuantizeConfig
from tunegemm.generate.takes import TORCHS

_FP8 = torch.float8_e4m3fn
_GATES = (None, "swiglu")
_DTYPES = {getattr(torch, TORCHS[dtype]): dtype for dtype in kernels.DTYPES}
_MANTISSA = 0x7FFFFF

#: Values and scales.
Quantized = tuple[torch.Tensor, torch.Tensor]


def quantize(x: torch.Tensor, *, gate: str | None = None, power_of_two: bool = False) -> Quantized:
    """Quantise rows to float8_e4m3fn, with a scale for each 128 neighbouring values, for `scaled_mm`.

    x: (rows, k) of bf16, fp16 or fp32. gate: for ``swiglu``, x is (rows, 2 k), first the gate and then the
    values, and ``silu(gate) * values`` is quantised; silu and the product are rounded to the dtype of x, as
    in torch and the engines. power_of_two: round scales up to powers of two (E8M0 as fp32).

    Returns the values, (rows, k), and column-major fp32 scales, (rows, k / 128) rounded up; ``values *
    scales`` approximates x. A block's scale is ``max(amax, 1e-10) * fp32(1 / 448)``, and its values are ``x *
    (1 / scale)``, each step rounded to fp32. If a block contains NaN, its scale and values are NaN. If it
    contains an infinity, its scale is infinite, the infinity becomes NaN and the other values zero.

    On Hopper this is one launch if k is a multiple of 8 and rows begin at multiples of 16 bytes. Otherwise
    torch's operations compute the same bits. There is no gradient. Raises ProblemError for other shapes,
    dtypes and gates, and if x requires a gradient.
    """
    if not isinstance(x, torch.Tensor):
        check_tensors(x=x)
    if are_torchs(x) if torch.compiler.is_compiling() else is_transformed():
        return torch.ops.tunegemm.quantize(x, gate, power_of_two)
    return _quantized(x, gate, power_of_two)


def _quantized(x: torch.Tensor, gate: str | None, power_of_two: bool) -> Quantized:
    _check(x, gate)
    results: Any = None
    if are_plain(x):
        facts = gate is not None, bool(power_of_two)
        results = _family.launch(facts, (x,), _allocate, _choose, *facts)
    return by_torch(x, gate is not None, power_of_two) if results is None else results


def _check(x: torch.Tensor, gate: str | None) -> None:
    """Raises ProblemError for unsuitable input."""
    if gate not in _GATES:
        raise ProblemError(f"gate {gate!r:.40} is not known; use 'swiglu', or None for none")
    if x.dtype not in _DTYPES:
        raise ProblemError(f"x is {x.dtype}; give bfloat16, float16 or float32, such as x.bfloat16()")
    if x.ndim != 2:
        raise ProblemError(f"x is {tuple(x.shape)}; give rows: x.reshape(-1, x.shape[-1])")
    if x.shape[1] == 0 or (gate is not None and x.shape[1] % 2):
        wanted = "at least one column" if gate is None else "a gate beside as many values: an even number"
        raise ProblemError(f"x is {tuple(x.shape)}; give rows of {wanted}")
    if has_gradient(x):
        raise ProblemError("x requires a gradient, and quantize has none; give x.detach(), or use no_grad()")


def by_torch(x: torch.Tensor, gated: bool, power_of_two: bool) -> Quantized:
    """As the kernel, step by step, by torch's operations."""
    if gated:
        first, second = x.chunk(2, 1)
        x = torch.nn.functional.silu(first) * second
    k = x.shape[1]
    blocks = -(-k // BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * BLOCK - k)).unflatten(1, (blocks, BLOCK))
    # Not a division by 448, for which torch multiplies on a GPU and divides on a CPU.
    scales = padded.abs().amax(2).clamp(min=EPSILON) * (1 / LARGEST)
    if power_of_two:
        rounded = (scales.view(torch.int32) + _MANTISSA).bitwise_and(~_MANTISSA).view(torch.float32)
        scales = torch.where(scales < float("inf"), rounded, scales)
    values = (padded * scales.reciprocal().unsqueeze(2)).to(_FP8).flatten(1)[:, :k]
    values, scales = (x.clone(memory_format=torch.contiguous_format) for x in (values, scales.t()))
    return values, scales.t()


_family = extension.Family(kernels.FAMILY, "quantize", "torch's operations quantise")


def _allocate(x: torch.Tensor, gated: bool, power_of_two: bool) -> Quantized:
    allocate, rows, k = extension.allocation(), x.shape[0], x.shape[1] // (1 + gated)
    return allocate((rows, k), (k, 1), _FP8), allocate((rows, -(-k // BLOCK)), (1, rows), torch.float32)


def _choose(x: Any, values: Any, scales: Any, gated: bool, power_of_two: bool) -> Any:
    """See `Family.launch`."""
    if kernels.refusal(x, gated):
        return None
    return QuantizeConfig(_DTYPES[x.dtype], gated), lambda kernel: kernel.bound(
        x, values, scales, power_of_two=power_of_two
    )


def _fake(x: torch.Tensor, gate: str | None, power_of_two: bool) -> Quantized:
    _check(x, gate)
    rows, k = x.shape[0], x.shape[1] // (1 + (gate is not None))
    scales = x.new_empty((-(-k // BLOCK), rows), dtype=torch.float32).t()
    return x.new_empty((rows, k), dtype=_FP8), scales


def _above_autograd(keyset: Any, x: torch.Tensor, gate: str | None, power_of_two: bool) -> Quantized:
    _check(x, gate)
    operator = torch.ops.tunegemm.quantize.default
    return extension.without_derivative(operator, _quantized, keyset, x, gate, power_of_two)


def _vmap(
    info: Any, in_dims: Any, x: torch.Tensor, gate: str | None, power_of_two: bool
) -> tuple[Quantized, tuple[int, int]]:
    x = x.movedim(in_dims[0], 0)
    values, scales = torch.ops.tunegemm.quantize(x.flatten(0, 1), gate, power_of_two)
    return (values.unflatten(0, x.shape[:2]), scales.unflatten(0, x.shape[:2])), (0, 0)


extension.define(
    "quantize(Tensor x, str? gate, bool power_of_two) -> (Tensor, Tensor)",
    _quantized,
    _fake,
    (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
    _above_autograd,
)
torch.library.register_vmap("tunegemm::quantize", _vmap, lib=extension.library)
