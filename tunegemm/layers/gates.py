"""The gate of two products by one kernel, `grouped`'s with all rows in one group.

The kernel reads gate's rows and up's where they lie: its descriptor has a mode of two between them, whose
stride is their distance. So one weight serves that holds both, one after the other or alternating, and two
weights do that nobody moved, if up's lies behind gate's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from tunegemm.describe.device import find_device
from tunegemm.errors import ArtifactError, TunegemmError, one_line
from tunegemm.generate import grouped as kernels
from tunegemm.generate.grouped import GroupedKernel
from tunegemm.generate.takes import NotTaken
from tunegemm.model.grouped import GroupedChoice, choose
from tunegemm.serve import api
from tunegemm.serve.guards import capturing, current_device
from tunegemm.serve.objects import compiled

#: The gate that these kernels have.
GATE = "swiglu"
#: Where an H100 and an H200 have shown them faster than torch's product, or two, and steps, in one run each
#: (2026-11-27): numbers of rows from and to, and of rows of weights, gate's and up's together. At 128 rows
#: they took 1.01 to 1.17 times as long with 7168 rows of weights, and with 51200 as long as two products.
MOST_ROWS = 8192
SERVED = (
    (1, 64, 7168, 51200),
    (65, 255, 14336, 28672),
    (225, 256, 7168, 14335),
    (256, 1023, 14336, 51200),
    (1024, MOST_ROWS, 7168, 51200),
)

#: Takes addresses of gate, up, the rows, the result and a bias (0 for none).
Launch = Callable[[int, int, int, int, int], None]
#: The launch of a choice for extents and strides; None until its kernel is compiled: see `_load`.
Load = Callable[..., Launch | None]

_kernels: dict[tuple[Any, int], GroupedKernel] = {}
_ends: dict[torch.device, torch.Tensor] = {}


@cache
def is_served(rows: int, columns: int) -> bool:
    """Whether they were seen to be faster at so many rows, and rows of both weights together."""
    return any(least <= rows <= most and few <= columns <= many for least, most, few, many in SERVED)


def may_serve(gate: str, rows: int, n: int, k: int) -> bool:
    """Whether a kernel may serve the gate of two products of (rows, k) and (n, k)."""
    planner = api.dispatcher.planner
    return (
        gate == GATE
        and not (planner.is_off or planner.policy.is_batch_invariant)
        and not (n % 8 or k % 8)
        and is_served(rows, 2 * n)
        and choose(1, 2 * n, k, rows, gate=gate) is not None
    )


def of_two(
    gate: str, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, biases: Sequence[torch.Tensor]
) -> tuple[Callable[..., Any] | None, bool]:
    """What computes ``act(x @ first.T) * (x @ second.T)`` of contiguous x from now on, None where torch does;
    and whether that may be kept. It takes (x, first, second), and returns None for addresses that the kernel
    does not take."""
    if biases or first.stride() != second.stride():
        return None, True
    launch, is_known = _launch_for(gate, x, first.shape[0], first.stride(0))
    if launch is None:
        return None, is_known
    return partial(_launched, launch, x.shape, first.shape[0], x.device), is_known


def of_one(
    gate: str, layout: str, x: torch.Tensor, weight: torch.Tensor, bias: Sequence[torch.Tensor]
) -> tuple[Callable[..., Any] | None, bool]:
    """The same of one weight that holds gate and up by `layout`: gate first, up first, or alternate."""
    n, row = weight.shape[0] // 2, weight.stride(0)
    if layout == "up first":
        return None, True
    is_alternate = layout == "alternate"
    launch, is_known = _launch_for(gate, x, n, row * (1 + is_alternate))
    if launch is None:
        return None, is_known
    apart = (row if is_alternate else n * row) * weight.element_size()
    return partial(_launched_on_one, launch, x.shape, n, x.device, apart), is_known


def _launched(
    launch: Launch, shape: torch.Size, n: int, device: torch.device,
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, bias: int = 0,
) -> torch.Tensor | None:  # fmt: skip
    return _at(launch, shape, n, device, x, first.data_ptr(), second.data_ptr(), bias)


def _launched_on_one(
    launch: Launch, shape: torch.Size, n: int, device: torch.device, apart: int,
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
) -> torch.Tensor | None:  # fmt: skip
    address = weight.data_ptr()
    there = 0 if bias is None else bias.data_ptr()
    return _at(launch, shape, n, device, x, address, address + apart, there)


def _at(
    launch: Launch, shape: torch.Size, n: int, device: torch.device, x: torch.Tensor, gate: int, up: int,
    bias: int,
) -> torch.Tensor | None:  # fmt: skip
    if not x.is_contiguous() or (device.type == "cuda" and current_device() != device.index):
        return None
    result = x.new_empty((*shape[:-1], n))
    try:
        launch(gate, up, x.data_ptr(), result.data_ptr(), bias)
    except NotTaken:  # such as up's weight before gate's
        return None
    except (RuntimeError, ValueError) as error:
        planner = api.dispatcher.planner
        planner.notices.warn(f"the kernel of a gate failed to launch ({one_line(error)}); torch computes it")
        planner.state.forget_checks()
        _failed.add(device)
        return None
    return result


#: Devices where a launch failed: torch computes their gates.
_failed: set[torch.device] = set()


def _launch_for(gate: str, x: torch.Tensor, n: int, row_stride: int) -> tuple[Launch | None, bool]:
    planner = api.dispatcher.planner
    k, rows = x.shape[-1], x.numel() // x.shape[-1]
    if capturing(x.device) or torch.cuda._is_in_bad_fork():
        return None, False
    if (
        x.device.type != planner.device_type
        or x.device in _failed
        or x.dtype is not torch.bfloat16
        or row_stride % 8
        or not may_serve(gate, rows, n, k)
    ):
        return None, True
    choice = choose(1, 2 * n, k, rows, gpu=_name_of(x.device), gate=gate)
    if choice is None:
        return None, True
    try:
        return load(choice, x.device, n=n, k=k, rows=rows, row_stride=row_stride), True
    except (TunegemmError, OSError, RuntimeError) as error:
        planner.notices.warn(
            f"kernels of gates cannot run on {x.device}: {one_line(error)}; torch computes them"
        )
        return None, True


@cache
def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _load(
    choice: GroupedChoice, device: torch.device, *, n: int, k: int, rows: int, row_stride: int
) -> Launch | None:
    """Raises TunegemmError, OSError or RuntimeError where there will be no kernel."""
    index = device.index or 0
    policy = api.dispatcher.planner.policy
    whole = policy.device(find_device(f"cuda:{index}"))
    if whole.architecture.compile_target != kernels.TARGET:
        raise ArtifactError(f"{whole.name} is no Hopper GPU")
    if (missing := kernels.unavailable(launching=True)) is not None:
        raise ArtifactError(missing)
    kernel = _kernels.get((choice.config, index))
    if kernel is None:
        artifact = compiled(kernels.NAME, kernels.kernel_key(choice.config))
        if artifact is None:
            return None
        with torch.cuda.device(index):
            kernel = _kernels[choice.config, index] = GroupedKernel.load(choice.config, artifact.path)
    return kernel.gate_apart(
        n, k, rows, row_stride, _end_at(device, rows), index=index, blocks=whole.sm_count,
        swizzle_size=choice.swizzle_size, l2_hint=choice.l2_hint,
    )  # fmt: skip


load: Load = _load


def _end_at(device: torch.device, rows: int) -> torch.Tensor:
    """Where one group of so many rows ends: a view of all numbers, which stay, since graphs read them."""
    if device not in _ends:
        # From the host, for which it waits: any stream may read them from then on.
        _ends[device] = torch.arange(MOST_ROWS + 1, dtype=torch.int32, device="cpu").to(device)
    return _ends[device][rows : rows + 1]
