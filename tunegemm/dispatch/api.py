"""What users call: `matmul`, `linear`, `bmm`, `addmm`; each means what torch's function of that name does."""

from __future__ import annotations

import torch

from tunegemm.dispatch import ops
from tunegemm.dispatch.dispatcher import LINEAR, MATMUL, Dispatcher
from tunegemm.dispatch.policies import Policy, Preference

_dispatcher = Dispatcher()
ops.define(lambda: _dispatcher)
_product = _dispatcher.product


def matmul(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The product ``a @ b``, with the meaning of ``torch.matmul``, by the tuned kernel where one is recorded.

    Tuned kernels serve bf16 and fp16 on CUDA: (m, k) x (k, n), and what views make such a product or a batch
    of them, as leading dimensions, vectors and one matrix for a batch are. So they do for the gradients,
    which are products, too, and in graphs of torch.compile and torch.export, which hold the operator
    `tunegemm::mm`. Autocast casts as it does for torch. Everything else is `torch.matmul`: other dtypes,
    broadcasting between batches, gradients of a matrix that a batch shares, dispatch modes, views that the
    kernel cannot read, and deterministic mode. A problem without a record for this device warns once
    (`TunegemmWarning`) and names the command that tunes it; a record that another process publishes is found
    within seconds. ``TUNEGEMM_MODE=off``, read on the first call, leaves all to torch.

    Runs on the current stream of the operands' device, and within CUDA-graph capture for shapes that
    were called before it. Raises what torch.matmul raises.
    """
    if torch.compiler.is_compiling():
        return ops.traced_matmul(a, b, out)
    return _product(MATMUL, a, b, out)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, with the meaning of ``torch.nn.functional.linear``.

    `weight` is (n, k). Served as `matmul` is; with a bias torch computes it, whose library adds the bias
    in the same kernel.
    """
    if torch.compiler.is_compiling():
        return ops.traced_linear(x, weight, bias)
    return _product(LINEAR, x, weight) if bias is None else torch.nn.functional.linear(x, weight, bias)


def bmm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """One product per entry of a batch, (l, m, k) x (l, k, n): ``torch.bmm``, served as `matmul` is."""
    if a.ndim == 3 and b.ndim == 3 and a.shape[0] == b.shape[0]:
        return matmul(a, b, out=out)
    return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)


def addmm(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """``beta * c + alpha * a @ b``, with the meaning of ``torch.addmm``.

    Without anything to add (``beta=0, alpha=1``) it is served as `matmul` is; else torch computes it, whose
    library adds `c` in the same kernel.
    """
    if beta == 0 and alpha == 1 and a.ndim == 2 and b.ndim == 2 and c.dtype == a.dtype:
        return matmul(a, b)
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)


def refresh() -> None:
    """Forget what was read: the next call reads the database again.

    For products that run by a record and have a better one by now; those that are left to torch look for
    records by themselves, every few seconds.
    """
    _dispatcher.refresh()


class policy:
    """Serve by this policy from now on, ``tunegemm.policy("deterministic")``; in a ``with``, until its end.

    It holds for all threads. `prefer`: ``fastest``, ``deterministic`` (no result depends on scheduling),
    ``no_workspace`` (no memory beyond operands and output) or ``min_energy`` (least measured energy).
    `max_sms`: how many multiprocessors a launch may fill, for communication beside it. What a policy
    excludes is served by the next best measured candidate, else by torch. Raises PolicyError for an unknown
    one.
    """

    def __init__(self, prefer: Preference = "fastest", *, max_sms: int | None = None) -> None:
        self._before = _dispatcher.use(Policy(prefer, max_sms))

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        _dispatcher.use(self._before)
