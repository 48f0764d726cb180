"""Kernels around the products of a layer of experts: tokens to rows in groups, a gate, and rows to tokens.

Each step returns None if torch should do it: on other devices and dtypes, for more choices than `route`
compares, and until its kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tunegemm.dispatch import extension
from tunegemm.dispatch.autograd import DTYPES
from tunegemm.dispatch.forms import ALIGNMENT
from tunegemm.errors import TunegemmError
from tunegemm.generate import routing as kernels
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.grouped.operands import objection, output_objection
from tunegemm.generate.takes import UNIT_BYTES, NotTaken, Place, first_objection

#: Binds a kernel to its number of blocks and its numeric arguments, and returns the launch, which takes
#: tensors: `tunegemm.generate.routing.load`.
Bind = Callable[..., "Launch"]
Launch = Callable[..., None]


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


class Routing(extension.Family):
    """Runs the steps with kernels. The process's instance is `routing`."""

    def __init__(self, load: Callable[[str, int], Bind | None] | None = None) -> None:
        """load: returns the kernel with a name on the device with an index; None until it is compiled."""
        super().__init__(
            kernels.FAMILY, "steps around products of groups", "tunegemm.experts falls back to torch for them"
        )
        self._load = load or load_compiled
        self.has_failed = False
        """Whether a launch failed; then no kernel serves any more."""

    def route(self, x: Any, index: Any, count: int) -> Routed | None:
        """Sort x's rows by the experts that `index` (tokens, chosen) names; there are `count` experts.

        Numbers below 0, or not below `count`, name no expert here: their rows lie after the last group.
        """
        launches = self._launches(
            ("route", count, index.numel(), x.data_ptr() % ALIGNMENT == 0), plan_route, (x, index), count
        )
        if launches is None:
            return None
        total = index.shape[0] * index.shape[1]
        rows = x.new_empty((total, x.shape[1]))
        place, ends = (x.new_empty(size, dtype=torch.int32) for size in (total, count))
        before: tuple[Any, ...] = ()
        if len(launches) > 1:
            before = (place.new_empty(kernels.most_counts(total)),)
            if not self._done(launches[0], (index, *before)):
                return None
        done = self._done(launches[-1], (index, x, *before, place, ends, rows))
        return Routed(rows, place, ends) if done else None

    def combine(self, rows: Any, place: Any, ends: Any, weights: Any) -> torch.Tensor | None:
        """Weight and add up each token's rows, which `place` names; rows of no group add nothing.

        place: (tokens * chosen), int32 or int64. weights: (tokens, chosen).
        """
        launches = self._launches(
            ("combine", rows.numel(), weights.numel(), rows.data_ptr() % ALIGNMENT == 0),
            plan_combine, (rows, place, ends, weights),
        )  # fmt: skip
        if launches is None:
            return None
        out = rows.new_empty((weights.shape[0], rows.shape[1]))
        return out if self._done(launches[0], (rows, place, ends, weights, out)) else None

    def gate(self, both: Any, gate: Gate) -> torch.Tensor | None:
        """Apply a gate to rows of gate and up."""
        launches = self._launches(
            ("gate", gate, both.numel(), both.data_ptr() % ALIGNMENT == 0), plan_gate, (both,), gate
        )
        if launches is None:
            return None
        out = both.new_empty((both.shape[0], both.shape[1] // 2))
        return out if self._done(launches[0], (both, out)) else None

    def layer(
        self, x: Any, gate_up: Any, down: Any, index: Any, weights: Any, biases: Sequence[Any], gate: Gate
    ) -> torch.Tensor | None:
        """Compute a layer of few tokens by two launches, which find each choice's expert themselves.

        biases: those of gate_up and down, or None.
        """
        if index.shape[0] > kernels.FEW_TOKENS:  # before a look-up of six tensors, at each call
            return None
        operands = x, gate_up, down, index, weights, *[each for each in biases if each is not None]
        addresses = x.data_ptr() | gate_up.data_ptr() | down.data_ptr()
        key = "few_up", gate, *[each is None for each in biases], addresses % ALIGNMENT == 0
        launches = self._launches(key, plan_layer, operands, biases, gate)
        if launches is None:
            return None
        rows = x.new_empty((index.numel(), down.shape[2]))
        out = x.new_empty((x.shape[0], down.shape[1]))
        of_up, of_down = (x if each is None else each for each in biases)
        done = self._done(launches[0], (index, x, gate_up, of_up, rows))
        return out if done and self._done(launches[1], (index, rows, down, of_down, weights, out)) else None

    def _launches(
        self, key: tuple[Any, ...], plan: Callable[..., Sequence[Planned]], tensors: Any, *more: Any
    ) -> tuple[Launch, ...] | None:
        """The launches for a key and a layout; `plan` chooses the kernels for the operands."""
        known = self.launches.find(key, *tensors)
        if known is None:

            def choose() -> Any:
                planned = plan(*tensors, *more)
                if not planned or self.has_failed:
                    return None
                return [each.name for each in planned], lambda binds: tuple(
                    bind(each.ctas, **each.numbers) for bind, each in zip(binds, planned, strict=True)
                )

            known = self.decide(key, tensors, choose)
        return None if known is None else known.launch

    def load(self, config: Sequence[str], device: torch.device) -> Sequence[Bind] | None:
        """The kernels with these names; None until all are compiled."""
        binds = [self._load(name, device.index or 0) for name in config]
        found = [bind for bind in binds if bind is not None]
        return found if len(found) == len(binds) else None

    def missing(self, device: torch.device, error: Exception) -> None:
        if not isinstance(error, TunegemmError):  # else the products' kernels are missing too, and warn of it
            super().missing(device, error)

    def _done(self, launch: Launch, tensors: tuple[Any, ...]) -> bool:
        try:
            launch(*tensors)
        except NotTaken:
            return False
        except (RuntimeError, ValueError) as error:
            self.failed(tensors[0].device, error)
            self.has_failed = True
            self.launches.clear()
            return False
        return True


class Planned(NamedTuple):
    """A kernel and the arguments of its launches."""

    name: str
    ctas: int
    numbers: dict[str, int]


def plan_route(x: Any, index: Any, count: int) -> Sequence[Planned]:
    (tokens, chosen), total = index.shape, index.numel()
    size, hidden = x.element_size(), x.shape[1]
    if not (
        x.dtype in DTYPES
        and index.device == x.device
        and 0 < total <= (kernels.MOST_SPREAD if count + 2 <= kernels.BINS else kernels.MOST_CHOICES)
        and count
        and index.is_contiguous()
        and x.stride(1) == 1
        and not any(lines * size % UNIT_BYTES for lines in (hidden, x.stride(0)))
        and x.data_ptr() % ALIGNMENT == 0
    ):
        return ()
    units, x_units = (lines * size // UNIT_BYTES for lines in (hidden, x.stride(0)))
    arguments = {
        "step": index.element_size() // 4, "tokens": tokens, "chosen": chosen, "count": count,
        "units": units, "x_units": x_units,
    }  # fmt: skip
    if total > kernels.MOST_CHOICES:
        blocks, numbers = kernels.spread_numbers(**arguments)
        of_tally = {name: numbers[name] for name in ("step", "total", "count")}
        return Planned("tally", blocks, of_tally), Planned("spread", blocks, numbers)
    own_rows = next(rows for most, rows in kernels.ROUTE_ROWS.items() if total <= most)
    return (Planned(f"route {own_rows}", *kernels.route_numbers(**arguments, own_rows=own_rows)),)


def plan_combine(rows: Any, place: Any, ends: Any, weights: Any) -> Sequence[Planned]:
    dtype = DTYPES.get(rows.dtype)
    of_weights = "fp32" if weights.dtype is torch.float32 else DTYPES.get(weights.dtype)
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
        return ()
    blocks, numbers = kernels.combine_numbers(
        step=place.element_size() // 4, tokens=weights.shape[0], chosen=weights.shape[1],
        count=ends.shape[0], units=rows.shape[1] * rows.element_size() // UNIT_BYTES,
        weights_stride=weights.stride(0),
    )  # fmt: skip
    return (Planned(f"combine {dtype} {of_weights}", blocks, numbers),)


def plan_gate(both: Any, gate: Gate) -> Sequence[Planned]:
    dtype, (rows, columns) = DTYPES.get(both.dtype), both.shape
    inner = columns // 2
    if (
        dtype is None
        or not both.is_contiguous()
        or not both.numel()
        or inner * both.element_size() % UNIT_BYTES
        or both.data_ptr() % ALIGNMENT
    ):
        return ()
    blocks, numbers = kernels.gate_numbers(
        rows=rows, units=inner * both.element_size() // UNIT_BYTES, slope=gate.slope,
        limit=gate.limit, offset=gate.offset,
    )  # fmt: skip
    return (Planned(f"gate {dtype} {gate.interleaved}", blocks, numbers),)


def plan_layer(*operands: Any) -> Sequence[Planned]:
    x, gate_up, down, index, weights, *_, biases, gate = operands
    dtype, (tokens, chosen), count = DTYPES.get(x.dtype), index.shape, gate_up.shape[0]
    of_weights = "fp32" if weights.dtype is torch.float32 else DTYPES.get(weights.dtype)
    hidden, inner = down.shape[1:]
    if not (
        dtype is not None
        and of_weights in ("fp32", dtype)
        and 0 < tokens <= (kernels.FEW_TOKENS if index.numel() * kernels.FEW_SHARE <= count else 1)
        and 0 not in (chosen, hidden, inner)
        and index.device == weights.device == x.device
        and index.is_contiguous()
        and weights.stride(1) == 1
        and not any(each * x.element_size() % UNIT_BYTES for each in (hidden, inner))
        and extension.policy().max_sms is None  # they fill the GPU
    ):
        return ()
    name = str(x.dtype).removeprefix("torch.")
    places = [
        Place("x", x, name, (tokens, hidden), (0, 1)),
        Place("gate_up", gate_up, name, (count, 2 * inner, hidden), (0, 1, 2)),
        Place("down", down, name, (count, hidden, inner), (0, 1, 2)),
    ]
    for bias, width in zip(biases, (2 * inner, hidden), strict=True):
        if bias is not None:
            places.append(Place("bias", bias, name, (count, width), (0, 1), unit_bytes=1, apart=False))
    if first_objection(places, x.device) or any(each.tensor.data_ptr() % ALIGNMENT for each in places[:3]):
        return ()
    size = x.element_size()
    common = {"step": index.element_size() // 4, "chosen": chosen, "count": count}
    strides = [each * size // UNIT_BYTES for each in (x.stride(0), *gate_up.stride()[:2], *down.stride()[:2])]
    of_up, of_down = (None if bias is None else bias.stride(0) for bias in biases)
    slope, limit, offset, interleaved = gate
    first = kernels.few_up_numbers(
        **common, total=tokens * chosen, n=inner, units=hidden * size // UNIT_BYTES,
        strides=(strides[0], strides[1], strides[2]), bias_stride=of_up, interleaved=interleaved,
        slope=slope, limit=limit, offset=offset,
    )  # fmt: skip
    kernel = next(each for most, each in kernels.DOWNS.items() if chosen <= most)
    last = kernels.few_down_numbers(
        **common, tokens=tokens, n=hidden, units=inner * size // UNIT_BYTES, strides=(strides[3], strides[4]),
        bias_stride=of_down, factors_stride=weights.stride(0), lines=kernel.lines,
    )  # fmt: skip
    down_name = f"few_down {dtype} {of_weights} {kernel.together}"
    return Planned(f"few_up {dtype}", *first), Planned(down_name, *last)


def load_compiled(name: str, index: int) -> Bind | None:
    """The kernel; None until it is compiled. Raises ArtifactError if it will never exist."""
    return extension.loaded(kernels.FAMILY, name, torch.device("cuda", index))


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
        return launch if bias is not None else lambda a, weights, ends, out: launch(a, weights, ends, a, out)

    return of


#: Serves the process.
routing = Routing()
