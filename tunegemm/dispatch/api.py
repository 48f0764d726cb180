"""`matmul` and `linear`, as users call them."""

from __future__ import annotations

import torch

from tunegemm.dispatch.dispatcher import Dispatcher

_dispatcher = Dispatcher()
_product = _dispatcher.product


def matmul(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The product ``a @ b``, with the meaning of ``torch.matmul``, by the tuned kernel where one is recorded.

    Tuned kernels serve (m, k) x (k, n), (..., m, k) x (k, n) and (l, m, k) x (l, k, n) of bf16 and fp16
    on CUDA. Everything else is `torch.matmul`: other ranks and dtypes, broadcasting, operands that
    require grad while grad mode is on, traced and fake tensors, views that the kernel cannot read, and
    deterministic mode. A problem without a record for this device warns once (`TunegemmWarning`) and
    names the command that tunes it. ``TUNEGEMM_MODE=off``, read on the first call, leaves all to torch.

    Runs on the current stream of the operands' device, and within CUDA-graph capture for shapes that
    were called before it. Raises what torch.matmul raises.
    """
    if torch.compiler.is_compiling():
        return torch.matmul(a, b) if out is None else torch.matmul(a, b, out=out)
    return _product(False, a, b, out)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, with the meaning of ``torch.nn.functional.linear``.

    `weight` is (n, k). Served as `matmul` is; with a bias torch computes it, whose library adds the bias
    in the same kernel.
    """
    if torch.compiler.is_compiling():
        return torch.nn.functional.linear(x, weight, bias)
    return _product(True, x, weight) if bias is None else torch.nn.functional.linear(x, weight, bias)


def refresh() -> None:
    """Forget what was read: the next call reads the database again. For a process that tuned meanwhile."""
    _dispatcher.refresh()
