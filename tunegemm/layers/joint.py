"""Launches one kernel for several weights of the same input, which it reads in place
(`tunegemm.generate.joined`).

It computes products side by side, such as q, k and v; or a gate and its up, from two weights or one that
holds both.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch

from tunegemm.dispatch import extension
from tunegemm.dispatch.guards import capturing, current_device
from tunegemm.errors import TunegemmError, one_line
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


class Keep(Enum):
    """How long a decision about a call holds."""

    NOT = enum.auto()
    WAITS = enum.auto()
    """For seconds: a kernel is being compiled."""
    LONG = enum.auto()


def way_of(
    x: torch.Tensor, parts: Parts, operands: Sequence[Any], *, gate: str = ""
) -> tuple[Callable[..., Any] | None, Keep]:
    """The function that computes calls like this one, with contiguous x, and how long it may be used. None if
    torch computes them.

    The function takes (x, *operands), and returns None if the kernel does not take their addresses. parts:
    the weights and biases among the operands. gate: a gated step; the weights are then gate and up.
    """
    weights, biases = parts(*operands)
    ns, rows = [weight.shape[0] for weight in weights], x.numel() // x.shape[-1]
    if not extension.may_load(x.device):
        return None, Keep.NOT
    if x.device.type != extension.device_type() or x.device in failed:
        return None, Keep.LONG
    choice = chosen(rows, ns, x.shape[-1], x.dtype, extension.gpu_of(x.device), gate=gate, bias=bool(biases))
    if choice is None:
        return None, Keep.LONG
    try:
        bind = load(choice, x.device)
    except (TunegemmError, OSError, RuntimeError) as error:
        _warn(f"kernels of several weights cannot run on {x.device}: {one_line(error)}")
        return None, Keep.LONG
    if bind is None:
        return None, Keep.WAITS
    return _way(bind, x, parts, ns[:1] if gate else ns), Keep.LONG


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
    index = device.index if device.type == "cuda" else -1
    is_split = len(columns) > 1
    known: dict[tuple[int, ...], Launch] = {}

    def way(x: torch.Tensor, *operands: Any) -> Any:
        if not x.is_contiguous() or (index is not None and index >= 0 and current_device() != index):
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
            if capturing(device):
                raise
            failed.add(device)
            _warn(f"a kernel of several weights failed to launch on {device} ({one_line(error)})")
            extension.forget()
            return None
        return result.split(columns, -1) if is_split else result

    return way


#: Devices where a launch failed: torch computes these products there.
failed: set[torch.device] = set()


def _load(choice: JoinedChoice, device: torch.device) -> Bind | None:
    """None until it is compiled. Raises TunegemmError, OSError or RuntimeError if that fails."""
    kernel = extension.loaded(joined, JoinedKernel.load, choice.config, device)
    if kernel is None:
        return None
    return partial(kernel.bound, device=extension.device_of(device), **choice.words)


#: Of a choice on a device.
load: Callable[[JoinedChoice, torch.device], Bind | None] = _load


def _warn(text: str) -> None:
    extension.warn(f"{text}; torch computes them")
