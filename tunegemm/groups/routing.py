"""Kernels around the products of a layer of experts: tokens to rows in groups, a gate, and rows to tokens.

Each step returns None if torch should do it: on other devices and dtypes, for more choices than `route`
compares, and until its kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch

from tunegemm.describe.device import find_device
from tunegemm.dispatch import extension
from tunegemm.dispatch.extension import LaunchCache, compiled
from tunegemm.dispatch.forms import ALIGNMENT
from tunegemm.dispatch.guards import capturing, is_lazy
from tunegemm.errors import ArtifactError, TunegemmError, one_line
from tunegemm.generate import routing as kernels
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.grouped.operands import objection, output_objection
from tunegemm.generate.takes import UNIT_BYTES, NotTaken

#: Binds a kernel to its number of blocks and its numeric arguments, and returns the launch, which takes
#: tensors: `tunegemm.generate.routing.load`.
Bind = Callable[..., "Launch"]
Launch = Callable[..., None]

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Routed(NamedTuple):
    """Tokens as rows in groups."""

    rows: torch.Tensor
    place: torch.Tensor
    """int32: the row of each choice of each token."""
    ends: torch.Tensor


class Gate(NamedTuple):
    """``(up + offset) * gate * sigmoid(slope * gate)``, with gate limited above and up limited on both sides.

    This is gpt-oss's gate. `experts` takes it as a function of rows of gate and up.
    """

    slope: float = 1.702
    limit: float = 7.0
    offset: float = 1.0
    interleaved: bool = True
    """Whether gate and up alternate in a row; else they are its halves."""

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = (both[:, ::2], both[:, 1::2]) if self.interleaved else both.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + self.offset) * (gate * torch.sigmoid(gate * self.slope))


#: silu's gate, for gate and up as halves.
SILU = Gate(slope=1.0, limit=float("inf"), offset=0.0, interleaved=False)


class Routing:
    """Runs the steps with kernels. The process's instance is `routing`."""

    def __init__(
        self,
        load: Callable[[str, int], Bind | None] | None = None,
        served: Collection[str] = kernels.ALL,
    ) -> None:
        """load: returns the kernel with a name on the device with an index; None until it is compiled."""
        self._load = load or load_compiled
        self.served = served
        """The first words of the names of kernels that may serve; empty after a failed launch."""
        self.launches = LaunchCache()
        self._loaded = LaunchCache()

    def route(self, x: Any, index: Any, count: int) -> Routed | None:
        """Sort x's rows by the experts that `index` (tokens, chosen) names; there are `count` experts.

        Numbers below 0, or not below `count`, name no expert here: their rows lie after the last group.
        """
        launch = self._launch(
            ("route", count, index.numel(), x.data_ptr() % ALIGNMENT == 0), plan_route, (x, index), count
        )
        if launch is None:
            return None
        total = index.shape[0] * index.shape[1]
        rows = x.new_empty((total, x.shape[1]))
        place, ends = (x.new_empty(size, dtype=torch.int32) for size in (total, count))
        result = index, x, place, ends, rows
        return Routed(rows, place, ends) if self._done(launch, result) else None

    def combine(self, rows: Any, place: Any, ends: Any, weights: Any) -> torch.Tensor | None:
        """Weight and add up each token's rows, which `place` names; rows of no group add nothing.

        place: (tokens * chosen), int32 or int64. weights: (tokens, chosen).
        """
        launch = self._launch(
            ("combine", rows.numel(), weights.numel(), rows.data_ptr() % ALIGNMENT == 0),
            plan_combine, (rows, place, ends, weights),
        )  # fmt: skip
        if launch is None:
            return None
        out = rows.new_empty((weights.shape[0], rows.shape[1]))
        return out if self._done(launch, (rows, place, ends, weights, out)) else None

    def gate(self, both: Any, gate: Gate) -> torch.Tensor | None:
        """Apply a gate to rows of gate and up."""
        launch = self._launch(
            ("gate", gate, both.numel(), both.data_ptr() % ALIGNMENT == 0), plan_gate, (both,), gate
        )
        if launch is None:
            return None
        out = both.new_empty((both.shape[0], both.shape[1] // 2))
        return out if self._done(launch, (both, out)) else None

    def _launch(
        self, key: tuple[Any, ...], plan: Callable[..., Planned | None], tensors: Any, *numbers: Any
    ) -> Launch | None:
        """The launch for a key and a layout; `plan` chooses the kernel for the operands."""
        known = self.launches.find(key, *tensors)
        if known is None:
            device = tensors[0].device
            if key[0] not in self.served or device.type != extension.device_type() or extension.is_off():
                return None
            if not extension.may_load(device):
                return None
            planned = None if any(map(is_lazy, tensors)) else plan(*tensors, *numbers)
            launch, waits = self._launch_for(planned, device.index or 0)
            known = self.launches.keep(key, launch, *tensors, waits=waits)
        result: Launch | None = known.launch
        return result

    def _launch_for(self, planned: Planned | None, index: int) -> tuple[Launch | None, bool]:
        """The launch, or None if torch should compute the step; and whether a kernel is being compiled."""
        if planned is None:
            return None, False
        names = ("tally", "spread") if planned.name == "spread" else (planned.name,)
        if any(name.split()[0] not in self.served for name in names):
            return None, False
        try:
            results = [self._loaded.once((name, index), partial(self._load, name, index)) for name in names]
        except TunegemmError:  # the products' kernels are missing too, and warn of it
            return None, False
        except (OSError, RuntimeError) as error:
            _warn(error)
            return None, False
        if None in results:
            return None, True
        try:
            launch = results[-1](planned.ctas, **planned.numbers)
            if planned.name == "spread":
                few = {name: planned.numbers[name] for name in ("step", "total", "count")}
                launch = _in_two(results[0](planned.ctas, **few), launch, planned.ctas)
        except NotTaken:
            return None, False
        return launch, False

    def _done(self, launch: Launch, tensors: tuple[Any, ...]) -> bool:
        try:
            launch(*tensors)
        except NotTaken:
            return False
        except (RuntimeError, ValueError) as error:
            if capturing(tensors[0].device):
                raise
            _warn(error)
            self.served = ()
            self.launches.clear()
            return False
        return True


def _in_two(tally: Launch, spread: Launch, ctas: int) -> Launch:
    """`route`'s launch for many choices: the first kernel writes counts into temporary memory."""

    def launch(index: Any, x: Any, place: Any, ends: Any, rows: Any) -> None:
        counts = place.new_empty(ctas * kernels.BINS)
        tally(index, counts)
        spread(index, x, counts, place, ends, rows)

    return launch


class Planned(NamedTuple):
    """A kernel and the arguments of its launches."""

    name: str
    ctas: int
    numbers: dict[str, int]


def plan_route(x: Any, index: Any, count: int) -> Planned | None:
    (tokens, chosen), total = index.shape, index.numel()
    size, hidden = x.element_size(), x.shape[1]
    if not (
        x.dtype in _DTYPES
        and index.device == x.device
        and 0 < total <= (kernels.MOST_SPREAD if count + 2 <= kernels.BINS else kernels.MOST_CHOICES)
        and count
        and index.is_contiguous()
        and x.stride(1) == 1
        and not any(lines * size % UNIT_BYTES for lines in (hidden, x.stride(0)))
        and x.data_ptr() % ALIGNMENT == 0
    ):
        return None
    units, x_units = (lines * size // UNIT_BYTES for lines in (hidden, x.stride(0)))
    arguments = {
        "step": index.element_size() // 4, "tokens": tokens, "chosen": chosen, "count": count,
        "units": units, "x_units": x_units,
    }  # fmt: skip
    if total > kernels.MOST_CHOICES:
        return Planned("spread", *kernels.spread_numbers(**arguments))
    own_rows = next(rows for most, rows in kernels.ROUTE_ROWS.items() if total <= most)
    return Planned(f"route {own_rows}", *kernels.route_numbers(**arguments, own_rows=own_rows))


def plan_combine(rows: Any, place: Any, ends: Any, weights: Any) -> Planned | None:
    dtype = _DTYPES.get(rows.dtype)
    of_weights = "fp32" if weights.dtype is torch.float32 else _DTYPES.get(weights.dtype)
    if not (
        dtype is not None
        and of_weights in ("fp32", dtype)
        and rows.is_contiguous()
        and place.is_contiguous()
        and place.dtype in (torch.int32, torch.int64)
        and ends.is_contiguous()
        and ends.dtype is torch.int32
        and rows.device == place.device == ends.device == weights.device
        and weights.stride(1) == 1
        and 0 not in (*weights.shape, *ends.shape)
        and rows.shape[1] * rows.element_size() % UNIT_BYTES == 0
        and rows.data_ptr() % ALIGNMENT == 0
    ):
        return None
    blocks, numbers = kernels.combine_numbers(
        step=place.element_size() // 4, tokens=weights.shape[0], chosen=weights.shape[1],
        count=ends.shape[0], units=rows.shape[1] * rows.element_size() // UNIT_BYTES,
        weights_stride=weights.stride(0),
    )  # fmt: skip
    return Planned(f"combine {dtype} {of_weights}", blocks, numbers)


def plan_gate(both: Any, gate: Gate) -> Planned | None:
    dtype, (rows, columns) = _DTYPES.get(both.dtype), both.shape
    inner = columns // 2
    if (
        dtype is None
        or not both.is_contiguous()
        or not both.numel()
        or inner * both.element_size() % UNIT_BYTES
        or both.data_ptr() % ALIGNMENT
        or is_lazy(both)
    ):
        return None
    blocks, numbers = kernels.gate_numbers(
        rows=rows, units=inner * both.element_size() // UNIT_BYTES, slope=gate.slope,
        limit=gate.limit, offset=gate.offset,
    )  # fmt: skip
    return Planned(f"gate {dtype} {gate.interleaved}", blocks, numbers)


def load_compiled(name: str, index: int) -> Bind | None:
    """The kernel; None until it is compiled. Raises ArtifactError if it will never exist."""
    device = find_device(f"cuda:{index}")
    if (reason := kernels.FAMILY.cannot_launch(device)) is not None:
        raise ArtifactError(reason)
    artifact = compiled(kernels.FAMILY.name, kernels.kernels()[name])
    return None if artifact is None else kernels.load(artifact.path, index)


def few(
    config: GroupedConfig, index: int, load: Callable[[str, int], Bind | None] = load_compiled
) -> Callable[..., Launch] | None:
    """`GroupedKernel.of` for the kernel for few rows; None until it is compiled.

    Raises ArtifactError if the kernel will never exist.
    """
    gated = config.fused.gated
    bind = load(f"few {config.in_dtype} {gated}", index)
    if bind is None:
        return None

    def of(
        a: Any, weights: Any, out: Any, ends: Any, bias: Any, scales: Any = None, *, interleaved: bool = False
    ) -> Launch:
        kind: dict[str, Any] = {"dtype": config.in_dtype, "gated": gated, "n_major": False, "few": True}
        columns = weights.shape[1] // (1 + gated)
        wrong = objection(a, weights, ends, bias, scales, **kind)
        if wrong := wrong or output_objection(out, a, columns, config.out_dtype, packed=True):
            raise NotTaken(wrong)
        lengths = a.shape[1], a.stride(0), weights.stride(0), weights.stride(1)
        units, *strides = (each * a.element_size() // UNIT_BYTES for each in lengths)
        ctas, numbers = kernels.few_numbers(
            rows=a.shape[0], count=weights.shape[0], n=columns, units=units,
            strides=(strides[0], strides[1], strides[2]),
            bias_stride=None if bias is None else bias.stride(0), gated=gated, interleaved=interleaved,
        )  # fmt: skip
        launch = bind(ctas, **numbers)
        return lambda a, weights, out, ends, bias, scales: launch(
            a, weights, ends, a if bias is None else bias, out
        )

    return of


def _warn(error: Exception) -> None:
    extension.warn(
        f"kernels around products of groups cannot run ({one_line(error)}); tunegemm.experts falls back to "
        "torch for their steps"
    )


#: Serves the process.
routing = Routing()
