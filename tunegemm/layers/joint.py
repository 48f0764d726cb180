"""Launches one kernel for several weights of the same input, which it reads in place
(`tunegemm.generate.joined`).

It computes products side by side, such as q, k and v; or a gate and its up, from two weights or one that
holds both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tunegemm.dispatch import extension
from tunegemm.dispatch.guards import current_device
from tunegemm.generate import joined
from tunegemm.generate.joined import JoinedKernel
from tunegemm.generate.takes import NotTaken
from tunegemm.model.joined import JoinedChoice, choose

#: Up to this many rows, products of several weights are one launch: for q, k and v of five models it was 1.18
#: to 2.8 times as fast as torch's three, at 1024 and 4096 rows 0.94 to 1.11 (results/h200/joined.json).
MOST_ROWS = 256
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
#: Weights whose launches one site keeps: some kB each.
_MOST_BOUND = 1024

#: Launches at addresses of the input and of the result.
Launch = Callable[[int, int], None]
#: Makes the launch for operands with this layout, with their weights in place; raises NotTaken.
Bind = Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor, Sequence[Any]], Launch]
#: The operands of a call as the kernel has them: its weights and biases.
Parts = Callable[..., tuple[Sequence[torch.Tensor], Sequence[Any]]]


def way_of(
    x: torch.Tensor, parts: Parts, operands: Sequence[Any], *, gate: str = ""
) -> tuple[Callable[..., Any] | None, bool]:
    """The function that computes calls like this one, with contiguous x, None if torch computes them; and
    whether a kernel is being compiled.

    The function takes (x, *operands), and returns None if the kernel does not take their addresses. parts:
    the weights and biases among the operands. gate: a gated step; the weights are then gate and up.
    """
    weights, biases = parts(*operands)
    ns, rows = [weight.shape[0] for weight in weights], x.numel() // x.shape[-1]
    if x.device.type != extension.device_type() or x.device in failed:
        return None, False
    choice = chosen(rows, ns, x.shape[-1], x.dtype, extension.gpu_of(x.device), gate=gate, bias=bool(biases))
    bind, waits = (None, False) if choice is None else load(choice, x.device)
    return None if bind is None else _way(bind, x, parts, ns[:1] if gate else ns), waits


def chosen(
    rows: int, ns: Sequence[int], k: int, dtype: torch.dtype, gpu: str, *, gate: str = "", bias: bool = False
) -> JoinedChoice | None:
    """The kernel that serves such a product; None if torch computes it."""
    if extension.is_off() or extension.policy().is_batch_invariant or (not gate and rows > MOST_ROWS):
        return None
    if dtype not in _DTYPES or k % 8 or any(n % 8 for n in ns):
        return None
    return choose(rows, ns, k, gate=gate, dtype=_DTYPES[dtype], bias=bias, gpu=gpu)


def _way(bind: Bind, x: torch.Tensor, parts: Parts, columns: Sequence[int]) -> Callable[..., Any]:
    """A call: allocates an output and runs the launch that is bound to these weights. columns: of each
    result.
    """
    allocate, device = extension.allocation(), x.device
    k, dtype, width = x.shape[-1], x.dtype, sum(columns)
    shape = (*x.shape[:-1], width)
    strides = x.new_empty(shape, device="meta").stride()
    index, is_guarded = device.index, device.type == "cuda" and device.index is not None
    is_split = len(columns) > 1
    known: dict[tuple[int, ...], Launch] = {}

    def way(x: torch.Tensor, *operands: Any) -> Any:
        if not x.is_contiguous() or (is_guarded and current_device() != index):
            return None
        key = tuple([each.data_ptr() for each in operands])
        launch = known.get(key)
        result: Any = allocate(shape, strides, dtype)
        try:
            if launch is None:
                weights, biases = parts(*operands)
                launch = bind(x.view(-1, k), weights, result.view(-1, width), biases)
                if len(known) >= _MOST_BOUND:
                    known.clear()
                known[key] = launch
            launch(x.data_ptr(), result.data_ptr())
        except NotTaken:
            return None
        except (RuntimeError, ValueError) as error:
            _family.failed(device, error)
            failed.add(device)
            extension.forget()
            return None
        return result.split(columns, -1) if is_split else result

    return way


#: Devices where a launch failed: torch computes these products there.
failed: set[torch.device] = set()


_family = extension.Family(joined, JoinedKernel.load, "several weights", "torch computes them")


def load(choice: JoinedChoice, device: torch.device) -> tuple[Bind | None, bool]:
    """The kernel of a choice, None if there is none; and whether it is being compiled."""
    kernel, waits = _family.kernel(choice.config, device)
    if kernel is None:
        return None, waits
    return partial(kernel.bound, device=extension.device_of(device), **choice.words), False
