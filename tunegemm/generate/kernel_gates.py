"""Triton kernels of a gate that is trained: elementwise, forward and backward.

Arithmetic is fp32, and each result is rounded once. No function of Triton's library is called, so that its
interpreter runs them in a process that has Triton imported already.
"""

import triton
import triton.language as tl


@triton.jit
def activated(x, name: tl.constexpr):
    """The activation of fp32 values, and its derivative; as torch has them, at infinities, too."""
    if name == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        value = x * sigmoid
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif name == "gelu":
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * below
        slope = below + x * (tl.exp(-0.5 * x * x) * 0.3989422804014327)
    elif name == "gelu_tanh":
        # 1 + tanh(y) is 2 sigmoid(2 y), which loses no digits.
        sigmoid = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        value = x * sigmoid
        inner = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        slope = sigmoid + x * (sigmoid * (1.0 - sigmoid)) * inner
    else:
        value = tl.where(x <= 0.0, 0.0, x)  # NaN stays
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    return value, slope


@triton.jit
def forward(gate, up, out, count, name: tl.constexpr, size: tl.constexpr):
    """``out = activation(gate) * up``: a block of `size` of count elements."""
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = at < count
    value, _ = activated(tl.load(gate + at, mask=inside).to(tl.float32), name)
    result = value * tl.load(up + at, mask=inside).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward(grad, gate, up, of_gate, of_up, count, name: tl.constexpr, size: tl.constexpr):
    """The gradients of gate and up, from that of `forward`'s result."""
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = at < count
    of_result = tl.load(grad + at, mask=inside).to(tl.float32)
    x = tl.load(gate + at, mask=inside).to(tl.float32)
    value, slope = activated(x, name)
    through = of_result * tl.load(up + at, mask=inside).to(tl.float32)
    if name == "relu":
        through = tl.where(x <= 0.0, 0.0, through)  # of infinity, too
    else:
        through = through * slope
    tl.store(of_gate + at, through.to(of_gate.dtype.element_ty), mask=inside)
    tl.store(of_up + at, (of_result * value).to(of_up.dtype.element_ty), mask=inside)
