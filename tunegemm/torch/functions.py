"""The functions that users call. Each has the meaning of torch's function with the same name; `gated_linear`
is a common step of a layer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch

from tunegemm.describe.epilogue import ACTIVATIONS, GATE_OF, GATED, Epilogue
from tunegemm.dispatch import api
from tunegemm.dispatch.forms import ADDMM, BMM, LINEAR, MATMUL, SCALED_MM, Activation, check_dtype, form_of
from tunegemm.dispatch.guards import any_autocast, are_functions_watched, function_modes, rank
from tunegemm.dispatch.library import addmm_steps, is_sum, scale_steps
from tunegemm.errors import ProblemError, unknown_argument
from tunegemm.generate.blocks import NARROW
from tunegemm.torch import blocks, ops

WITH_BIAS = form_of(LINEAR, "bias_n")
compiling_now = torch.compiler.is_compiling

#: The epilogue for the keyword arguments, by activation and by whether there is no bias and no residual.
_TEXTS = {
    (activation, no_bias, no_residual): "+".join(
        ["bias_n"] * (not no_bias)
        + ([] if activation is None else [activation])
        + ["residual"] * (not no_residual)
    )
    for activation in (None, *ACTIVATIONS)
    for no_bias in (True, False)
    for no_residual in (True, False)
}


class Extras(TypedDict, total=False):
    """The keywords of `matmul`, which describes them."""

    bias: torch.Tensor | None
    activation: Activation | None
    residual: torch.Tensor | None
    epilogue: Epilogue | str | None
    operands: Sequence[Any]
    out_dtype: torch.dtype | None


def matmul(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None, **extras: Unpack[Extras]
) -> torch.Tensor:
    """Multiply ``a @ b`` as ``torch.matmul`` does, with the tuned kernel if there is a record.

    The same kernel can add `bias` (one value per column), apply `activation` (relu, gelu, gelu_tanh or silu)
    and add `residual`, which has the result's shape. Or it runs the steps of an `epilogue`, from
    `tunegemm.Epilogue` or a function of your own, with its `operands`, tensors and numbers in order.
    `out_dtype` is the result's dtype if it is not the operands': fp32 for 16-bit operands, int32 for int8, or
    bf16, fp16 or fp32 for int8 with an epilogue that scales. If there is no kernel for all of it, torch's
    functions compute it step by step.

    Tuned kernels serve bf16 and fp16 on CUDA, and fp32 where ``torch.backends.cuda.matmul.fp32_precision`` is
    ``tf32``: (m, k) x (k, n), and whatever views turn into such a product or a batch of them (leading
    dimensions, vectors, one matrix for a batch). They also serve the gradients of 16-bit operands, and graphs
    of torch.compile and torch.export, which hold the operators `tunegemm::mm` and `tunegemm::fused`. Autocast
    casts as it does for torch. Everything else is `torch.matmul`: other dtypes, broadcasting between batches,
    gradients of a matrix that a batch shares, dispatch modes, views that the kernel cannot read, and
    deterministic mode. A problem without a record for this device warns once (`TunegemmWarning`) and names
    the command that tunes it. A record that another process publishes serves within seconds. With
    ``TUNEGEMM_MODE=off``, read on the first call, torch computes everything.

    The call runs on the current stream of the operands' device. During CUDA-graph capture it uses the kernels
    of shapes that were called before. Raises torch.matmul's errors, and ProblemError for an unknown
    epilogue or one that takes other operands.
    """
    try:
        if extras:
            return _matmul_and_more(a, b, out, **extras)
        if compiling_now():
            return ops.traced_matmul(a, b, out)
        return api.product(MATMUL, a, b, out)
    except TypeError:
        for name in extras:
            if name not in Extras.__annotations__:
                raise unknown_argument("matmul", name, ["out", *Extras.__annotations__]) from None
        raise


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``activation(x @ weight.T + bias) + residual``; means what ``torch.nn.functional.linear``
    means.

    `weight` is (n, k). Served as `matmul` is; each combination needs kernels tuned for it. activation: relu,
    gelu, gelu_tanh or silu.
    """
    if activation is None and residual is None:
        if compiling_now():
            return ops.traced_linear(x, weight, bias)
        if bias is None:
            return api.product(LINEAR, x, weight)
        return api.dispatcher.fused(WITH_BIAS, x, weight, (bias,))
    text = _text(activation, bias is None, residual is None)
    return _fused(LINEAR, text, x, weight, _present(bias, residual))


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: Activation = "silu"
) -> torch.Tensor:
    """Compute ``activation(x @ gate.T) * (x @ up.T)``, such as SwiGLU: half as many columns as `weight` has
    rows.

    `weight`, and `bias` if given, have the rows of gate and up interleaved, as `interleave` makes them.
    activation: silu, gelu, gelu_tanh or relu.
    """
    if not isinstance(activation, str) or activation not in GATE_OF:
        raise ProblemError(f"activation {activation!r} has no gated form; use one of {', '.join(GATE_OF)}")
    text = GATE_OF[activation] if bias is None else "bias_n+" + GATE_OF[activation]
    return _fused(LINEAR, text, x, weight, () if bias is None else (bias,))


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Interleave the rows of two weights (or biases) for `gated_linear`: gate[0], up[0], gate[1], ..."""
    shown = []
    for name, tensor in (("gate", gate), ("up", up)):
        if not isinstance(tensor, torch.Tensor) or not tensor.ndim:
            raise ProblemError(f"{name} {tensor!r:.40} has no rows; give a tensor of at least one dimension")
        shown.append(f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}")
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        raise ProblemError(f"{' and '.join(shown)}; give both with the same shape, dtype and device")
    return torch.stack((gate, up), 1).flatten(0, 1)


def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply two matrices, (m, k) x (k, n), as ``torch.mm`` does; served as `matmul` is."""
    try:
        fits = rank(a) == 2 and rank(b) == 2
    except TypeError:
        fits = False
    is_compiling = compiling_now()
    is_watched = not is_compiling and function_modes() and are_functions_watched()
    if is_watched or not fits:  # modes are to see this function, where `product` would show torch.matmul
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    if is_compiling:
        return ops.traced_matmul(a, b, out)
    return api.product(MATMUL, a, b, out)


def bmm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply each entry of a batch, (l, m, k) x (l, k, n), as ``torch.bmm`` does; served as `matmul` is."""
    try:
        fits = rank(a) == 3 and rank(b) == 3 and a.shape[0] == b.shape[0]
    except TypeError:
        fits = False
    if not fits:
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    if compiling_now():
        return ops.traced_matmul(a, b, out)
    return api.product(BMM, a, b, out)


def addmm(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Compute ``beta * c + alpha * a @ b`` as ``torch.addmm`` does; `c` is a matrix, or one row for all.

    Served as `matmul` is. The problems' epilogues are ``bias_n`` for a row and ``beta_c`` for a matrix,
    preceded by ``alpha+`` unless alpha is 1. If beta is 0 there is no epilogue, because C is
    not read.
    """
    try:
        fits = is_sum(c, a, b, beta, 2)
        text, tensors, numbers = addmm_steps(c, a, b, beta, alpha) if fits else ("", (), ())
    except (TypeError, RuntimeError):
        fits = False
    result = _fused(ADDMM, text, a, b, tensors, numbers) if fits else None
    return torch.addmm(c, a, b, beta=beta, alpha=alpha) if result is None else result


def baddbmm(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Compute `addmm` for each entry of a batch, as ``torch.baddbmm`` does."""
    try:
        fits = is_sum(c, a, b, beta, 3)
        text, tensors, numbers = addmm_steps(c, a, b, beta, alpha) if fits else ("", (), ())
    except (TypeError, RuntimeError):
        fits = False
    result = _fused(ADDMM, text, a, b, tensors, numbers) if fits else None
    return torch.baddbmm(c, a, b, beta=beta, alpha=alpha) if result is None else result


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Compute ``(a * scale_a) @ (b * scale_b) + bias`` of fp8 operands, as ``torch._scaled_mm`` does, or of
    int8.

    Scales are fp32: one element each; or (m, 1) and (1, n), for rows of a and columns of b; or (m, k / 128)
    and (k / 128, n / 128), rounded up and with any strides, for 1x128 blocks of a and 128x128 blocks of b; or
    (m, k / 32), and (k / 32, n) or (k / 32, n / 32), for 1x32 blocks of a, and 1x32 or 32x32 blocks of b.
    Each call converts float8_e8m0fnu scales to fp32, but those of 32 of k whose lines begin at multiples of
    4 B. torch computes products with other scales. out_dtype: by default the dtype of a; bf16 for int8.
    use_fast_accum: sums may keep only the 14 bits or so of the tensor cores; otherwise, and always with block
    scales, each block of k is added up in fp32. Sums of int8 products are exact.

    Served as `matmul` is; the problems' epilogues are ``scale_tensor`` and ``scale_rowwise``, and
    ``+bias_n``. Kernels for block scales need no record; on Hopper they serve float8_e4m3fn with bf16, fp16
    or fp32 results, without a bias. With one, torch computes the product. Torch has no such product on a CPU;
    there sums are in fp32. Raises ProblemError for block scales of a wrong shape or dtype.
    """
    try:
        text = scale_steps(a, b, scale_a, scale_b, bias is not None)
    except TypeError:
        words: Any = {"bias": bias, "out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
        return torch._scaled_mm(a, b, scale_a, scale_b, **words)
    if a.dtype == torch.int8:
        out_dtype, use_fast_accum = out_dtype or torch.bfloat16, True
    if not text or (a.shape[1] <= NARROW and blocks.are_of_one_block(text, a, b, out_dtype)):
        return blocks.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)
    tensors = (scale_a, scale_b) if bias is None else (scale_a, scale_b, bias)
    accumulation = "fast" if use_fast_accum else "two_level"
    return _fused(SCALED_MM, text, a, b, tensors, (), None, out_dtype, accumulation)


def _matmul_and_more(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
    epilogue: Epilogue | str | None = None,
    operands: Sequence[Any] = (),
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if epilogue is None:
        if operands:
            raise ProblemError("operands without an epilogue; give the epilogue that uses them")
        text = _text(activation, bias is None, residual is None)
        if not text and isinstance(a, torch.Tensor) and out_dtype == a.dtype:
            out_dtype = out_dtype if any_autocast() else None
        return _fused(MATMUL, text, a, b, _present(bias, residual), (), out, out_dtype)
    if bias is not None or activation is not None or residual is not None:
        raise ProblemError(
            f"epilogue {epilogue} with bias, activation or residual; make them steps of the epilogue"
        )
    check_dtype(out_dtype)
    if isinstance(operands, str) or not isinstance(operands, Sequence):
        raise ProblemError(f"operands {operands!r:.40} are not a sequence; give a tuple of them")
    if not compiling_now():
        form_of(MATMUL, str(epilogue), out_dtype).check(operands)
    tensors = tuple(each for each in operands if isinstance(each, torch.Tensor))
    numbers = tuple(float(each) for each in operands if not isinstance(each, torch.Tensor))
    return _fused(MATMUL, str(epilogue), a, b, tensors, numbers, out, out_dtype)


def _signature() -> inspect.Signature:
    """The signature of `matmul`, each keyword by its name.

    As parameters of the function they would cost each call 50 ns: Python gives each of them its default.
    """
    a, b, out, *extras = inspect.signature(_matmul_and_more).parameters.values()
    out = out.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=None)
    return inspect.Signature([a, b, out, *extras], return_annotation="torch.Tensor")


matmul.__signature__ = _signature()  # type: ignore[attr-defined]


def _text(activation: str | None, no_bias: bool, no_residual: bool) -> str:
    """The epilogue of keywords. Not cached by a decorator, which torch.compile would warn of."""
    try:
        return _TEXTS[activation, no_bias, no_residual]
    except (KeyError, TypeError):  # unknown, or not even hashable
        is_gate = isinstance(activation, str) and activation in GATED
        remedy = "gated_linear applies it" if is_gate else f"use one of {', '.join(ACTIVATIONS)}"
        raise ProblemError(f"activation {activation!r} is not known; {remedy}") from None


def _present(bias: Any, residual: Any) -> tuple[Any, ...]:
    if residual is None:
        return () if bias is None else (bias,)
    return (residual,) if bias is None else (bias, residual)


def _fused(
    call: int,
    text: str,
    a: torch.Tensor,
    b: torch.Tensor,
    tensors: tuple[Any, ...],
    numbers: tuple[float, ...] = (),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulation: str = "fast",
) -> torch.Tensor:
    if compiling_now():
        if not text and out_dtype is None:
            return ops.traced_matmul(a, b, out)
        return ops.traced_fused(call, text, a, b, tensors, numbers, out, out_dtype, accumulation)
    try:
        form = form_of(call, text, out_dtype, accumulation)
    except TypeError:  # not even hashable
        check_dtype(out_dtype)
        raise
    return api.dispatcher.fused(form, a, b, tensors, numbers, out)
