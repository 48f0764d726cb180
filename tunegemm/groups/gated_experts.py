"""`experts`: computes a whole layer of gated experts, by two grouped products and the steps around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from tunegemm.describe.epilogue import GATE_OF, GATED
from tunegemm.dispatch import extension
from tunegemm.dispatch.forms import ACTIVATIONS, Activation
from tunegemm.dispatch.guards import (
    any_autocast,
    are_plain,
    capturing,
    check_devices,
    check_tensors,
    has_gradient,
    has_values,
    is_transformed,
)
from tunegemm.errors import ProblemError
from tunegemm.generate.blocks import BLOCK
from tunegemm.generate.routing import MOST_CHOICES
from tunegemm.groups import grouped, routing
from tunegemm.groups.grouped import grouped_mm
from tunegemm.groups.quantize import quantize
from tunegemm.groups.recorded_groups import GroupedCall
from tunegemm.groups.routing import SILU, Gate
from tunegemm.groups.scaled_groups import by_blocks

FP8 = torch.float8_e4m3fn
_FLOATS = torch.bfloat16, torch.float16, torch.float32
#: silu's gate, for gate and up as halves and interleaved.
_SILUS = SILU, SILU._replace(interleaved=True)


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: Activation | Callable[[torch.Tensor], torch.Tensor] = "silu",
    interleaved: bool = False,
    elsewhere: bool = False,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a layer of gated experts: the weighted sum of each token's chosen experts.

    Row t of the result is the sum over j of ``weights[t, j] * expert(index[t, j], x[t])``, where expert e is
    ``(activation(gate) * up) @ down[e].T`` and gate and up are the halves of ``x[t] @ gate_up[e].T``.
    `grouped_mm` serves both products; without gradients the first product's kernel also applies silu's gate.

    x: (tokens, hidden). gate_up: (experts, 2 inner, hidden). down: (experts, hidden, inner). index: (tokens,
    chosen), int64 or int32, the experts of each token. weights: (tokens, chosen), their weights; if torch
    computes the sum without gradients, it first rounds them to the experts' dtype. gate_up_bias, down_bias:
    (experts, 2 inner) and (experts, hidden). Pass weights with the other layout, such as gpt-oss's, as views,
    ``.mT``. activation: silu, gelu, gelu_tanh, relu, or a function that turns gate_up's product (rows, 2
    inner) into (rows, inner), such as a `Gate`, which has a kernel. interleaved: whether rows of gate and up
    alternate, as `interleave` arranges them. elsewhere: whether `index` may hold numbers below 0, or above
    the last expert; these name experts of other processes and add nothing here. gate_up_scale, down_scale:
    for float8_e4m3fn weights, the fp32 scales of 128x128 blocks, (experts, 2 inner / 128, hidden / 128) and
    (experts, hidden / 128, inner / 128), rounded up. With scales, `quantize` quantises the rows before both
    products, a bias is not allowed, and each product is rounded to bf16. Our kernels need such weights to be
    contiguous in the last dimension.

    Supports gradients, except with such scales. The call does not wait for the device, so a CUDA graph stays
    valid for other choices of the router. In compiled and exported code the call is one operator,
    `tunegemm::experts`, unless `activation` is a function other than a `Gate`. Raises a ProblemError that
    names the operand if shapes or dtypes do not fit; on a CPU, or with ``TUNEGEMM_CHECK_GROUPS=1``, also if
    an expert number is invalid.
    """
    arguments = x, gate_up, down, index, weights, gate_up_bias, down_bias
    scales, interleaved, elsewhere = (gate_up_scale, down_scale), bool(interleaved), bool(elsewhere)
    try:
        _check(*arguments, *scales, activation)
    except (AttributeError, ProblemError):  # to ask before would take half a microsecond of each call
        check_tensors(x=x, gate_up=gate_up, down=down, index=index, weights=weights)
        raise
    if torch.compiler.is_compiling():
        kind: Any = (activation, None) if isinstance(activation, str) else None
        if type(activation) is Gate:
            kind = "", [float(each) for each in activation]
        if kind is not None:
            settings = *kind, interleaved, elsewhere
            return torch.ops.tunegemm.experts(*arguments, *scales, *settings)
    try:
        return _layer(*arguments, *scales, activation, interleaved, elsewhere)
    except (ProblemError, RuntimeError) as error:
        is_of_product = isinstance(error.__cause__ or error, RuntimeError) and isinstance(activation, str)
        if is_of_product and gate_up_scale is None:  # it speaks of the product's operands
            for name, weight in (("gate_up", gate_up), ("down", down)):
                if wrong := grouped.wrong_layout(name, weight):
                    raise ProblemError(wrong) from error
        raise


def is_ordered() -> bool:
    """Whether a token's result may not depend on how many tokens there are."""
    return extension.policy().is_batch_invariant


def _of_nothing(x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    """The result if no expert is chosen: zeros, with zero gradients for every operand that has one.

    In training, a rank that received no tokens must still produce these gradients.
    """
    result = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for each in (x, *others):
        if each is not None and each.is_floating_point() and each.dtype is not FP8:
            result = result + each[:0].sum().to(x.dtype)
    return result


def _layer(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    activation: Any,
    interleaved: bool,
    elsewhere: bool,
) -> torch.Tensor:
    """Compute `experts` for valid operands."""
    if not index.numel():
        for weight, bias in ((gate_up, gate_up_bias), (down, down_bias)):
            if bias is not None and (wrong := grouped.wrong_bias(x, weight.mT, bias)):
                raise ProblemError(wrong)
        return _of_nothing(x, gate_up, down, index, weights, gate_up_bias, down_bias)
    operands = x, gate_up, down, index, weights, gate_up_bias, down_bias, gate_up_scale, down_scale
    compiling = torch.compiler.is_compiling()
    # Without gradients, modes and transforms: checked once, not at each product.
    plain = not compiling and are_plain(*operands) and not has_gradient(*operands)
    if elsewhere and torch.is_grad_enabled() and type(activation) is not Gate and callable(activation):
        plain = False  # rows of other processes would reach the gradients of the function's parameters
    traced = compiling or (not plain and is_fake(x))  # fake: of the operator below, if it needs a gradient
    count, (tokens, chosen) = gate_up.shape[0], index.shape
    # On a CPU, reading values costs no wait.
    if not traced and not elsewhere and (index.device.type == "cpu" or grouped.groups.are_checked()):
        check_index(index, count)
    around = routing.routing if plain else None
    gate = _SILUS[interleaved] if activation == "silu" else activation
    if around is not None and gate_up_scale is None and type(gate) is Gate and not is_ordered():
        biases = gate_up_bias, down_bias
        if (whole := around.layer(x, gate_up, down, index, weights, biases, gate)) is not None:
            return whole
    routed = around.route(x, index, count) if around else None
    nobodys = None
    if routed is not None:
        rows, order, ends = routed
    else:
        check_devices(x=x, gate_up=gate_up, down=down, index=index, weights=weights)
        if elsewhere:  # so that numbers below 0 sort with the other ones outside this process
            index = index.masked_fill(index < 0, count)
        ids, order = index.reshape(-1).sort()
        # Each group's end: the number of rows whose expert is at most the group's.
        ends = torch.searchsorted(ids, _numbers(count, ids, plain), right=True, out_int32=True)
        rows = x.view(-1).expand(chosen, -1).contiguous() if tokens == 1 else x[order // chosen]
        # Marks rows after the last group, whose results are uninitialized memory.
        nobodys = (ids >= count)[:, None] if elsewhere else None
        if nobodys is not None and rows.requires_grad:  # gradients are uninitialized there
            rows = rows.masked_fill(nobodys, 0)
    both = rows, ends, gate_up, down
    if gate_up_scale is not None:
        of_rows = _by_blocks(*both, gate_up_scale, down_scale, activation, interleaved, around)
    else:
        biases = gate_up_bias, down_bias
        of_rows = _by_rows(*both, *biases, activation, interleaved, around, nobodys, plain, traced)
    # If `route` is not served and choices are few, torch's way back takes fewer operators than computing
    # positions.
    if around is not None and (routed is not None or order.shape[0] > MOST_CHOICES or is_ordered()):
        place = _inverse(order, plain) if routed is None else routed.place
        combined = None if of_rows.requires_grad else around.combine(of_rows, place, ends, weights)
        if combined is not None:
            return combined if combined.dtype is x.dtype else combined.to(x.dtype)
        if routed is not None:  # the `combine` kernel is not available
            check_devices(x=x, weights=weights)
            order = _inverse(place.long(), plain)
            nobodys = (torch.arange(order.shape[0], device=x.device) >= ends[-1])[:, None]
    if nobodys is not None:
        of_rows = of_rows.masked_fill(nobodys, 0)
    if elsewhere:  # whatever the weights are, as in `combine`
        weights = weights.masked_fill((index < 0) | (index >= count), 0)
    return _combined(of_rows, order, weights, plain).to(x.dtype)


def _by_rows(
    rows: Any, ends: Any, gate_up: Any, down: Any, gate_up_bias: Any, down_bias: Any, activation: Any,
    interleaved: bool, around: Any, nobodys: Any, plain: bool, traced: bool,
) -> torch.Tensor:  # fmt: skip
    """Both products and the gate between them, of weights with the dtype of the rows."""
    # Do not repeat the checks if no kernel computes a product.
    multiply, otherwise = (
        (grouped.groups.below_autograd, grouped.by_torch)
        if plain
        else (grouped.groups, grouped.traced if traced else grouped_mm)
    )
    inner = None
    if isinstance(activation, str):
        of_gate = rows, gate_up.mT, ends, gate_up_bias, GATE_OF[activation], interleaved
        inner = multiply(*of_gate)
        if inner is None and plain:
            inner = _recorded(*of_gate)
    if inner is None:
        both = multiply(rows, gate_up.mT, ends, gate_up_bias) if plain else None
        if both is None:
            both = otherwise(rows, gate_up.mT, offs=ends, bias=gate_up_bias)
        inner = _gate(both, activation, interleaved, around, nobodys)
        _check_inner(inner, both, activation, (both.dtype,))
        if plain and has_gradient(inner):  # the function has parameters
            plain, otherwise = False, grouped_mm
        if nobodys is not None and inner.requires_grad:  # its gradient is uninitialized there
            inner = inner.masked_fill(nobodys, 0)
    of_rows = multiply(inner, down.mT, ends, down_bias) if plain else None
    if of_rows is None:
        of_rows = otherwise(inner, down.mT, offs=ends, bias=down_bias)
    return of_rows


def _by_blocks(
    rows: Any, ends: Any, gate_up: Any, down: Any, gate_up_scale: Any, down_scale: Any, activation: Any,
    interleaved: bool, around: Any,
) -> torch.Tensor:  # fmt: skip
    """As `_by_rows`, of fp8 weights with block scales: rows are quantised before each product."""
    values, scales = quantize(rows)
    both = by_blocks(values, gate_up.mT, scales, gate_up_scale.mT, ends, None)
    if activation == "silu" and not interleaved:
        values, scales = quantize(both, gate="swiglu")
    else:
        inner = _gate(both, activation, interleaved, around)
        _check_inner(inner, both, activation, _FLOATS)
        if has_gradient(inner):
            raise ProblemError("activation returned a gradient; block scales have no gradient: detach() it")
        values, scales = quantize(inner)
    return by_blocks(values, down.mT, scales, down_scale.mT, ends, None)


#: Multiples of a step, by device, step and count: ends of groups, and positions of rows. Never freed, because
#: captured graphs read them.
kept: dict[tuple[torch.device, int, int], torch.Tensor] = {}
#: The least and the greatest count of numbers that a call keeps.
_LEAST_KEPT, _MOST_KEPT = 4096, 1 << 20


def _numbers(count: int, like: torch.Tensor, plain: bool, step: int = 1) -> torch.Tensor:
    """0, step, 2 step, ...: `count` numbers with the dtype and device of `like`.

    plain: whether to keep them for all layers and calls.
    """
    if plain and count <= _MOST_KEPT and like.dtype is torch.int64:
        size = max(_LEAST_KEPT, 1 << (count - 1).bit_length())
        result = kept.get(key := (like.device, step, size))
        if result is None and not capturing(like.device):
            # The copy from the host is synchronous, so any stream may read the tensor afterwards.
            result = torch.arange(0, size * step, step, dtype=torch.int64, device="cpu").to(like.device)
            kept[key] = result
        if result is not None:
            return result[:count]
    return torch.arange(0, count * step, step, device=like.device, dtype=like.dtype)


def _gate(
    both: torch.Tensor, activation: Any, interleaved: bool, around: Any = None, nobodys: Any = None
) -> torch.Tensor:
    """Apply the gate to rows of gate and up, with a kernel of `around` if it has one."""
    gate = _SILUS[interleaved] if activation == "silu" else activation
    if around is not None and type(gate) is Gate:
        inner: torch.Tensor | None = around.gate(both, gate)
        if inner is not None:
            return inner
    if nobodys is not None:
        both = both.masked_fill(nobodys, 0)
    if callable(activation):
        return activation(both)
    gate, up = (both[:, 0::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def _recorded(a: Any, b: Any, offs: Any, bias: Any, gate: str, interleaved: bool) -> torch.Tensor | None:
    """Compute the gated product with torch, and record it; None if nothing is being recorded."""
    if (observe := extension.observer()) is None:
        return None
    call = GroupedCall("experts", a, b, offs, bias, gate=gate)
    return observe(call, lambda: _gate(grouped_mm(a, b, offs=offs, bias=bias), GATED[gate], interleaved))


def _inverse(order: torch.Tensor, plain: bool) -> torch.Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, _numbers(order.shape[0], order, plain))


def _combined(result: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, plain: bool) -> torch.Tensor:
    """Weight rows in the experts' order and add them up for each token, in fp32."""
    if torch.compiler.is_compiling() or is_transformed() or has_gradient(result, weights):
        # The gradient of `index_put_` is a lookup; the gradient of a lookup would have to add rows up.
        of_tokens = torch.empty_like(result).index_put_((order,), result).view(*weights.shape, -1)
        # Of weights in another order, torch (2.13) traces a gradient that cannot be viewed.
        return (of_tokens * weights.contiguous().unsqueeze(-1)).sum(dim=1)
    tokens, chosen = weights.shape
    weights = weights.to(result.dtype).reshape(-1)
    if tokens == 1 and not is_ordered() and not any_autocast():  # which casts it on a GPU
        return torch.mv(result.mT, weights[order])[None]
    first = _numbers(tokens, order, plain, chosen)
    # Mode 0 is a sum. torch.nn.functional's version creates `first` again at each call.
    return torch.embedding_bag(result, _inverse(order, plain), first, False, 0, False, weights)[0]


def _check(
    x: Any, gate_up: Any, down: Any, index: Any, weights: Any, gate_up_bias: Any, down_bias: Any,
    gate_up_scale: Any, down_scale: Any, activation: Any,
) -> None:  # fmt: skip
    """Check that the operands form a layer. Raises ProblemError if they do not."""
    if not (activation in ACTIVATIONS if isinstance(activation, str) else callable(activation)):
        raise ProblemError(
            f"activation {activation!r} has no gated form; use {', '.join(ACTIVATIONS)}, or a function"
        )
    if not (x.ndim == 2 and gate_up.ndim == down.ndim == 3) or (
        gate_up.shape[2] != x.shape[1]
        or gate_up.shape[1] % 2
        or down.shape != (gate_up.shape[0], x.shape[1], gate_up.shape[1] // 2)
    ):
        raise ProblemError(
            f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)}; give (tokens, "
            "hidden), (experts, 2 inner, hidden) and (experts, hidden, inner)"
        )
    if not gate_up.numel():
        raise ProblemError(f"gate_up {tuple(gate_up.shape)} is empty; give at least one of each extent")
    if gate_up_scale is not None or down_scale is not None:
        _check_blocks(x, gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale)
    elif FP8 in (gate_up.dtype, down.dtype):
        raise ProblemError(
            f"gate_up is {gate_up.dtype}, down {down.dtype}; give the scales of their blocks as "
            "gate_up_scale and down_scale"
        )
    elif x.dtype is not gate_up.dtype or down.dtype is not gate_up.dtype:
        raise ProblemError(
            f"x is {x.dtype}, gate_up {gate_up.dtype}, down {down.dtype}; give all the same dtype"
        )
    if x.dtype not in _FLOATS:
        raise ProblemError(f"x is {x.dtype}; give bfloat16, float16 or float32, such as x.bfloat16()")
    if index.ndim != 2 or index.shape != weights.shape or index.shape[0] != x.shape[0]:
        raise ProblemError(
            f"index {tuple(index.shape)} and weights {tuple(weights.shape)} of {x.shape[0]} tokens; "
            "give both as (tokens, experts of each)"
        )
    if index.dtype not in (torch.int64, torch.int32):
        raise ProblemError(f"index is {index.dtype}; give numbers of experts: index.to(torch.int64)")
    if not weights.is_floating_point():
        raise ProblemError(f"weights are {weights.dtype}; give floats: weights.to(x.dtype)")


def _check_blocks(
    x: Any, gate_up: Any, down: Any, gate_up_bias: Any, down_bias: Any, gate_up_scale: Any, down_scale: Any
) -> None:
    """Check weights with block scales. Raises ProblemError if there is no such layer."""
    if gate_up_bias is not None or down_bias is not None:
        raise ProblemError("experts with block scales have no bias; leave out gate_up_bias and down_bias")
    for name, weight, scale in (("gate_up", gate_up, gate_up_scale), ("down", down, down_scale)):
        shape = (weight.shape[0], *(-(-each // BLOCK) for each in weight.shape[1:]))
        if weight.dtype is not FP8:
            raise ProblemError(f"{name} is {weight.dtype}; block scales are of {FP8} weights")
        is_tensor = isinstance(scale, torch.Tensor)
        if not is_tensor or scale.dtype != torch.float32 or tuple(scale.shape) != shape:
            wrong = "missing" if scale is None else f"{scale!r:.40}"
            if is_tensor:
                wrong = f"{tuple(scale.shape)} {scale.dtype}"
            raise ProblemError(f"{name}_scale is {wrong}; give {shape} torch.float32")
    if has_gradient(x, gate_up, down, gate_up_scale, down_scale):
        raise ProblemError(
            "experts with block scales have no gradient; detach() the operands, or use no_grad()"
        )


def _check_inner(inner: Any, both: torch.Tensor, activation: Any, dtypes: Sequence[torch.dtype]) -> None:
    """Check what a function made of the first product. Raises ProblemError."""
    if isinstance(activation, str) or type(activation) is Gate:
        return
    shape, is_tensor = (both.shape[0], both.shape[1] // 2), isinstance(inner, torch.Tensor)
    if not is_tensor or inner.dtype not in dtypes or tuple(inner.shape) != shape:
        shown = f"{tuple(inner.shape)} {inner.dtype}" if is_tensor else f"{inner!r:.60}"
        raise ProblemError(f"activation returned {shown}; return {shape} of {' or '.join(map(str, dtypes))}")


def check_index(index: torch.Tensor, count: int) -> None:
    """Check expert numbers. Waits for the device. Raises ProblemError if a number names no expert."""
    if not index.numel() or not has_values(index):
        return
    least, most = (int(each) for each in index.aminmax())
    if least < 0 or most >= count:
        raise ProblemError(
            f"index names expert {least if least < 0 else most} of {count}; give numbers from 0 on; for "
            "experts of other processes pass elsewhere=True, too"
        )


# ---- the layer as an operator -----------------------------------------------------------------------


def _compute(*arguments: Any) -> torch.Tensor:
    """Compute the operator `tunegemm::experts`. Its gate has the fields of a `Gate`, as numbers."""
    *operands, activation, gate, interleaved, elsewhere = arguments
    if gate is not None:
        slope, limit, offset, turns = gate
        activation = Gate(slope, limit, offset, bool(turns))
    given: Any = (*operands, activation, interleaved, elsewhere)
    return _layer(*given)


def _above_autograd(keyset: Any, *arguments: Any) -> torch.Tensor:
    """Compute it below autograd, or by operators with derivatives if it needs a gradient."""
    if is_transformed() or has_gradient(*arguments[:_TENSORS]):
        return _compute(*arguments)
    operator = torch.ops.tunegemm.experts.default
    return extension.without_derivative(operator, _compute, keyset, *arguments)


#: How many of the operator's arguments are tensors.
_TENSORS = 9
extension.define(
    "experts(Tensor x, Tensor gate_up, Tensor down, Tensor index, Tensor weights, Tensor? gate_up_bias,"
    " Tensor? down_bias, Tensor? gate_up_scale, Tensor? down_scale, str activation, float[]? gate,"
    " bool interleaved, bool elsewhere) -> Tensor",
    _compute,
    lambda x, *_: x.new_empty(x.shape),
    grouped.TAGS,
    _above_autograd,
)
