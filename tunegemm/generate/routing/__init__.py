"""Triton kernels for the steps of an expert layer around its grouped products. No search includes them."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tunegemm.compile.ptxas import Resources
from tunegemm.compile.triton_object import build, toolchain
from tunegemm.generate.generator import CUDA_BINDINGS, TRITON, Kernels, Key
from tunegemm.generate.takes import MOST, UNIT_BYTES, NotTaken, not_aligned

#: The choices that a block of `route` handles, by the most choices in all: it compares each with all.
ROUTE_ROWS = {512: 1, 8192: 8}
MOST_CHOICES = max(ROUTE_ROWS)
#: The choices of a block of `tally` and `spread`, their bins, and the most choices that they take.
SPREAD_ROWS, BINS, MOST_SPREAD = 256, 512, 1 << 16
#: The columns of a block of `combine` and of `gate`, and the experts of a block of `route`.
COLUMNS, GATE_COLUMNS, EXPERTS = 512, 1024, 32
#: The columns of a block of `few`, the elements of k that it loads at a time, and the most groups.
FEW_LINES, FEW_LENGTH, FEW_GROUPS = 2, 1024, 256
#: The columns of a block of `few_up`, and the elements of k that it loads at a time.
UP_LINES, UP_LENGTH = 1, 1024


class Down(NamedTuple):
    """A kernel `few_down`."""

    together: int
    """Choices whose weights a block loads at once."""
    lines: int
    """Columns of a block."""
    length: int
    """Elements of k that it loads at a time."""
    warps: int


#: The kernels `few_down`, by the most choices of a token (docs/decisions/0037).
DOWNS = {5: Down(1, 1, 1024, 1), MOST: Down(8, 2, 128, 2)}
#: The most tokens of a layer that `few_up` and `few_down` compute, and the least experts per choice if there
#: are several tokens, which may choose the same experts and read their weights twice.
FEW_TOKENS, FEW_SHARE = 3, 8
#: Each kernel's pointers: what they point to, by default the kernel's dtype, and ``*`` where that begins at a
#: multiple of 16 bytes.
_POINTERS = {
    "route": {"index": "i32", "x": "i64*", "place": "i32", "ends": "i32", "rows": "i64*"},
    "tally": {"index": "i32", "counts": "i32*"},
    "spread": {"index": "i32", "x": "i64*", "counts": "i32*", "place": "i32", "ends": "i32", "rows": "i64*"},
    "combine": {"rows": "*", "place": "i32", "ends": "i32", "weights": "", "out": "*"},
    "gate": {"both": "*", "out": "*"},
    "few": {"rows": "*", "weights": "*", "ends": "i32", "bias": "", "out": ""},
    "few_up": {"index": "i32", "x": "*", "weights": "*", "bias": "", "out": ""},
    "few_down": {"index": "i32", "rows": "*", "weights": "*", "bias": "", "factors": "", "out": ""},
}
_ALIGNED = {
    kernel: [name for name, kind in pointers.items() if "*" in kind] for kernel, pointers in _POINTERS.items()
}


_DTYPES = ("bf16", "fp16")
_KERNELS: tuple[Mapping[str, Any], ...] = (
    *({"kernel": "route", "own_rows": rows} for rows in ROUTE_ROWS.values()),
    {"kernel": "tally"},
    {"kernel": "spread"},
    *({"kernel": "combine", "dtype": one, "weights": other} for one in _DTYPES for other in (one, "fp32")),
    *({"kernel": "gate", "dtype": one, "alternate": turns} for one in _DTYPES for turns in (False, True)),
    *({"kernel": "few", "dtype": "bf16", "gated": gated} for gated in (False, True)),
    {"kernel": "few", "dtype": "fp16", "gated": False},
    *({"kernel": "few_up", "dtype": one} for one in _DTYPES),
    *(
        {"kernel": "few_down", "dtype": one, "weights": other, "together": down.together}
        for one, down in product(_DTYPES, DOWNS.values())
        for other in (one, "fp32")
    ),
)
#: The compile-time choices of all kernels, by their names, whose first word is the function's.
_CHOICES = {" ".join(map(str, choices.values())): choices for choices in _KERNELS}


def kernels() -> dict[str, Key]:
    """The keys of all kernels by name."""
    return {name: FAMILY.key_of(name) for name in _CHOICES}


def _compile(key: Key, out: Path) -> Resources:
    from tunegemm.generate.routing import kernel as source

    name = str(key["kernel"])
    down = next((each for each in DOWNS.values() if each.together == key.get("together")), None)
    constants_of: dict[str, dict[str, Any]] = {
        "route": {"own_rows": key.get("own_rows"), "others": 256, "experts": EXPERTS, "words": 512},
        "tally": {"own_rows": SPREAD_ROWS, "bins": BINS},
        "spread": {"own_rows": SPREAD_ROWS, "bins": BINS, "others": 32, "words": 32, "together": 16},
        "combine": {"columns": COLUMNS, "together": 4},
        "gate": {"columns": GATE_COLUMNS, "alternate": key.get("alternate")},
        "few": {
            "lines": FEW_LINES, "length": FEW_LENGTH, "groups": FEW_GROUPS, "gated": key.get("gated"),
        },
        "few_up": {"lines": UP_LINES, "length": UP_LENGTH},
        "few_down": {} if down is None else down._asdict(),
    }  # fmt: skip
    constants = constants_of[name]
    default = {"combine": 2, "spread": 8, "few_up": 1}.get(name, 4)
    warps = constants.pop("warps", default)
    function = getattr(source, name)
    factors = "factors" if name == "few_down" else "weights"  # of a token's experts
    dtypes = {"": key.get("dtype"), factors: key.get("weights", key.get("dtype"))}
    types = {
        pointer: f"*{kind.rstrip('*') or dtypes.get(pointer, dtypes[''])}"
        for pointer, kind in _POINTERS[name].items()
    }
    arguments = {each: types.get(each, "i32") for each in function.arg_names if each not in constants}
    return build(function, arguments, constants, out, num_warps=warps, aligned=_ALIGNED[name])


def load(artifact: Path, index: int | None = None) -> Callable[..., Callable[..., None]]:
    """Load an object on the GPU with that index, by default the current one. Returns a function of the grid
    and of numbers by name, which returns the launch for tensors in order.

    Raises RuntimeError if the object cannot be loaded. The function raises NotTaken for numbers beyond the
    kernel's range, and the launch for addresses that it does not take.
    """
    import torch
    from torch._C import _cuda_getCurrentRawStream as current_stream
    from torch._C import _cuda_getDevice as current_device

    from tunegemm.generate import triton_launch

    index = current_device() if index is None else index
    kernel = triton_launch.load(artifact, index)
    pointers = [argument.name for argument in kernel.header.arguments if argument.type == "pointer"]
    is_wide = [name in _ALIGNED[kernel.header.entry] for name in pointers]

    # Shared by all grids and numbers, so that addresses that never repeat fill only one cache.
    kept = triton_launch.Kept()

    def bind(ctas: int, **numbers: int) -> Callable[..., None]:
        fixed = (ctas, *numbers.values())
        if not all(-MOST <= number < MOST for number in fixed):
            raise NotTaken(f"{kernel.header.entry} of {ctas} blocks does not hold one of {numbers}")

        def launch(*tensors: Any) -> None:
            addresses = [tensor.data_ptr() for tensor in tensors]
            key = (fixed, *addresses)
            found = kept.get(key)
            if found is None:
                units = [
                    UNIT_BYTES if wide else each.element_size()
                    for wide, each in zip(is_wide, tensors, strict=True)
                ]
                if any(address % unit for address, unit in zip(addresses, units, strict=True)):
                    raise not_aligned(**dict(zip(pointers, addresses, strict=True)))
                values = {**numbers, **dict(zip(pointers, addresses, strict=True))}
                found = kept.keep(key, triton_launch.Arguments(kernel.header, values))
            if current_device() == index:
                kernel.launch(ctas, current_stream(index), found)
            else:
                with torch.cuda.device(index):
                    kernel.launch(ctas, current_stream(index), found)

        return launch

    return bind


FAMILY = Kernels(
    folder=Path(__file__).parent,
    compile=_compile,
    kernel=lambda _, artifact: load(artifact),
    choices=_CHOICES.__getitem__,
    toolchain=toolchain,
    packages=(CUDA_BINDINGS,),
    compiler_packages=(TRITON,),
)


Numbers = tuple[int, dict[str, int]]
"""The number of blocks of a launch, and its kernel's arguments by name."""


def route_numbers(*, tokens: int, chosen: int, count: int, own_rows: int, **rest: int) -> Numbers:
    """Those of `route`. rest: step, units and x_units, as the kernel takes them."""
    total = tokens * chosen
    blocks = math.ceil(total / own_rows) + math.ceil(count / EXPERTS)
    return blocks, {"total": total, "chosen": chosen, "count": count, **rest}


def spread_numbers(*, tokens: int, chosen: int, **rest: int) -> Numbers:
    """Those of `spread`. `tally` has as many blocks, and some of the arguments. rest: as of `route`, and
    count.
    """
    total = tokens * chosen
    return math.ceil(total / SPREAD_ROWS), {"total": total, "chosen": chosen, **rest}


def most_counts(total: int) -> int:
    """How many counts `tally` writes of so many choices."""
    return math.ceil(total / SPREAD_ROWS) * BINS


def combine_numbers(*, tokens: int, units: int, **rest: int) -> Numbers:
    """Those of `combine`. rest: step, count, chosen and weights_stride, as the kernel takes them."""
    blocks = math.ceil(units * 8 / COLUMNS)
    return tokens * blocks, {"units": units, "blocks": blocks, **rest}


def gate_numbers(*, rows: int, units: int, slope: float, limit: float, offset: float) -> Numbers:
    """Those of `gate`."""
    blocks = math.ceil(units * 8 / GATE_COLUMNS)
    return rows * blocks, {"units": units, "blocks": blocks, **_bits(slope, limit, offset)}


def few_numbers(
    *, rows: int, n: int, strides: tuple[int, int, int], bias_stride: int | None, gated: bool,
    interleaved: bool, **rest: int,
) -> Numbers:  # fmt: skip
    """Those of `few`. n: columns of the result. strides: of rows, groups and lines. bias_stride: None for no
    bias. rest: count and units, as the kernel takes them.
    """
    numbers = {
        "total": rows, "n": n, "row_units": strides[0], "group_units": strides[1], "line_units": strides[2],
        "turns": 1 + (gated and interleaved), "apart": 0 if not gated else 1 if interleaved else n,
    }  # fmt: skip
    return rows * math.ceil(n / FEW_LINES), numbers | _bias(bias_stride) | rest


def few_up_numbers(
    *, total: int, n: int, strides: tuple[int, int, int], bias_stride: int | None, interleaved: bool,
    slope: float, limit: float, offset: float, **rest: int,
) -> Numbers:  # fmt: skip
    """Those of `few_up`. n, strides, bias_stride: as `few_numbers` has them. rest: step, chosen, count and
    units, as the kernel takes them.
    """
    numbers = {
        "total": total, "n": n, "x_units": strides[0], "group_units": strides[1], "line_units": strides[2],
        "turns": 1 + interleaved, "apart": 1 if interleaved else n,
    }  # fmt: skip
    numbers |= _bias(bias_stride) | _bits(slope, limit, offset)
    return total * math.ceil(n / UP_LINES), numbers | rest


def few_down_numbers(
    *, tokens: int, n: int, strides: tuple[int, int], bias_stride: int | None, lines: int, **rest: int
) -> Numbers:
    """Those of `few_down`. strides: of groups and lines. lines: columns of a block. rest: step, chosen,
    count, units and factors_stride, as the kernel takes them.
    """
    numbers = {"tokens": tokens, "n": n, "group_units": strides[0], "line_units": strides[1]}
    return tokens * math.ceil(n / lines), numbers | _bias(bias_stride) | rest


def _bias(stride: int | None) -> dict[str, int]:
    """The numbers of a bias; None for none."""
    return {"has_bias": int(stride is not None), "bias_stride": stride or 0}


def _bits(slope: float, limit: float, offset: float) -> dict[str, int]:
    """The numbers of a gate as the bits of fp32."""
    numbers = {"slope": slope, "limit": limit, "offset": offset}
    return {name: struct.unpack("i", struct.pack("f", value))[0] for name, value in numbers.items()}
