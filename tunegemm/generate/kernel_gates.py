"""Triton kernels of a gate that is trained: elementwise, forward and backward.

Both read the results of gate and up where one product left them: as the halves of each row of one matrix,
(rows, 2 n). Backward both gradients are written so, which is what the product's own gradients read.
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
def forward(whole, out, n, name: tl.constexpr, size: tl.constexpr):
    """``out = activation(gate) * up``: a block of `size` columns of a row."""
    blocks = (n + size - 1) // size
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * size + tl.arange(0, size)
    inside = columns < n
    gate = tl.load(whole + row * 2 * n + columns, mask=inside).to(tl.float32)
    up = tl.load(whole + row * 2 * n + n + columns, mask=inside).to(tl.float32)
    value, _ = activated(gate, name)
    tl.store(out + row * n + columns, (value * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward(grad, whole, out, n, name: tl.constexpr, size: tl.constexpr):
    """The gradients of gate and up, from that of `forward`'s result."""
    blocks = (n + size - 1) // size
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * size + tl.arange(0, size)
    inside = columns < n
    of_result = tl.load(grad + row * n + columns, mask=inside).to(tl.float32)
    gate = tl.load(whole + row * 2 * n + columns, mask=inside).to(tl.float32)
    up = tl.load(whole + row * 2 * n + n + columns, mask=inside).to(tl.float32)
    value, slope = activated(gate, name)
    of_gate = of_result * up
    if name == "relu":
        of_gate = tl.where(gate <= 0.0, 0.0, of_gate)  # of infinity, too
    else:
        of_gate = of_gate * slope
    tl.store(out + row * 2 * n + columns, of_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + row * 2 * n + n + columns, (of_result * value).to(out.dtype.element_ty), mask=inside)
