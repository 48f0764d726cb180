"""Kernels of one A with up to three weights that lie apart: products side by side, or a gate and its up.

    D[:, columns of i] = A W_i^T + bias_i      D = act(A W_0^T + bias_0) * (A W_1^T + bias_1)

No search has them: db/joined.toml says what ships (`tunegemm.model.joined`). For a compile pool this module
is what `tunegemm.generate.families` is for others: `get` and `import_compiler`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tunegemm.compile.cute_object import compile_object, toolchain
from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import Device
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate.cute_launch import load_function
from tunegemm.generate.cute_sm90 import Order
from tunegemm.generate.cute_sm90.config import KernelConfig
from tunegemm.generate.families import import_compiler
from tunegemm.generate.generator import CUTE_DSL, TVM_FFI, Key
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.grouped.rules import config_from
from tunegemm.generate.sources import hash_of_code, kernel_sources
from tunegemm.generate.takes import MOST, MOST_STRIDE_BYTES, UNIT_BYTES, NotTaken, not_aligned

__all__ = [
    "MOST_WEIGHTS", "NAME", "JoinedKernel", "compile", "few", "get", "import_compiler", "kernel_key", "many",
    "refusal", "tiles_of", "unavailable",
]  # fmt: skip

NAME = "joined"
TARGET = "sm_90a"
MOST_WEIGHTS = 3
"""Most weights of a product. A gate has two."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_UNIT = 8
"""Elements of 16 bytes: what TMA and the stores take at a time."""
FORMS: Mapping[str, type[KernelConfig]] = {"few": GroupedConfig, "many": KernelConfig}
"""The forms of kernels and what their configs are: rows as the narrow mode, or as the wide one."""


def few(parameters: Mapping[str, Any], *, dtype: str = "bf16", gate: str = "") -> GroupedConfig:
    """The config of a kernel for few rows, which takes biases or none."""
    return config_from({"cluster_m": 1} | dict(parameters), dtype=dtype, gate=gate)


def many(
    parameters: Mapping[str, Any], *, dtype: str = "bf16", gate: str = "", bias: bool = False
) -> KernelConfig:
    """The config of a kernel for many rows; bias: whether it takes biases."""
    epilogue = "+".join(filter(None, ("bias_n" * bias, gate)))
    return KernelConfig(
        **{"schedule": "cooperative", "tile_k": 64, "gpc_aware": True, **parameters},
        in_dtype=dtype, out_dtype=dtype, a_major="k", b_major="k", out_major="n", epilogue=epilogue,
    )  # fmt: skip


def form_of(config: KernelConfig) -> str:
    """``few`` or ``many``."""
    return "few" if isinstance(config, GroupedConfig) else "many"


def kernel_key(config: KernelConfig) -> Key:
    """Everything the compiled object depends on: never extents or numbers of weights."""
    return {
        **{name: getattr(config, name) for name in config.__dataclass_fields__},
        "form": form_of(config),
        "family": NAME,
        "target": TARGET,
        **toolchain(),
        "source": hash_of_code(kernel_sources(Path(__file__).parent)),
    }


def get(name: str) -> ModuleType:
    """What a compile worker asks for the kernel of a key: this module."""
    return sys.modules[__name__]


def unavailable(*, launching: bool = False) -> str | None:
    """None when the packages are installed; else one line that names the missing one."""
    return next(filter(None, (package.missing() for package in (CUTE_DSL, TVM_FFI))), None)


def compile(key: Key, out: Path) -> Resources:
    """Compile the kernel of a key to the object `out`. Raises whatever the compiler raises."""
    form = str(key["form"])
    config = FORMS[form].from_mapping(key)

    def make() -> Any:
        return importlib.import_module(f"{__name__}.kernel.{form}").Gemm(config)

    return compile_object(make, 7, str(key["target"]), out, addresses=5)


def tiles_of(config: KernelConfig, rows: int, ns: Sequence[int]) -> int:
    """Tiles of a product, counted in clusters. ns: rows of each weight, of a gate those of one."""
    if isinstance(config, GroupedConfig):
        return -(-rows // config.tile_n) * sum(-(-n // config.tile_columns) for n in ns)
    columns = config.tile_n // (1 + config.fused.gated) * config.cluster_n
    return -(-rows // (config.tile_m * config.cluster_m)) * sum(-(-n // columns) for n in ns)


@dataclass(frozen=True)
class JoinedKernel:
    """A compiled kernel, ready to be launched on the device that was the current one when it was loaded."""

    config: KernelConfig
    function: Callable[..., None]

    @classmethod
    def load(cls, config: KernelConfig, artifact: Path) -> JoinedKernel:
        """Raises RuntimeError for what cannot be loaded here."""
        return cls(config, load_function(artifact))

    def launch(
        self, a: Any, weights: Sequence[Any], out: Any, biases: Sequence[Any] = (), **words: Any
    ) -> None:
        """One product on the current stream; see `bound`."""
        self.bound(a, weights, out, biases, **words)(a.data_ptr(), out.data_ptr())

    def bound(
        self, a: Any, weights: Sequence[Any], out: Any, biases: Sequence[Any] = (), *,
        device: Device, swizzle_size: int = 8, along_m: bool = True, l2_hint: int = 0,
    ) -> Callable[[int, int], None]:  # fmt: skip
        """The launch at addresses of a and out that are laid out as these; weights and biases are to stay.

        a: (M, K). weights: one to three, each (N, K); with a gate two, gate and up, of one N and stride.
        out: (M, sum of N), or (M, N) of a gate. biases: empty, or a vector or None for each weight.
        swizzle_size, along_m: which tiles follow each other; of few rows along_m says nothing.
        l2_hint: 1 where lines of a leave the L2 first, 2 where those of the weights do.

        Raises NotTaken, here for what `refusal` says and for weights with fewer rows than a tile of this
        kernel has columns, at a launch for addresses. The first time for a number of tiles it may ask the
        device which clusters share a GPC: not while a graph is captured.
        """
        from torch._C import _cuda_getCurrentRawStream as current_stream

        config, gated = self.config, self.config.fused.gated
        if wrong := refusal(a, weights, out, biases, gated=gated) or self._objection(a, weights, biases):
            raise NotTaken(wrong)
        absent = MOST_WEIGHTS - len(weights)
        rows, k = a.shape
        ns = [weight.shape[0] for weight in weights]
        count = [ns[0], 0, 0] if gated else [*ns, *[0] * absent]
        strides = [weight.stride(0) for weight in weights] + [weights[0].stride(0)] * absent
        places = [weight.data_ptr() for weight in weights] + [weights[0].data_ptr()] * absent
        added = [0 if bias is None else bias.data_ptr() for bias in biases]
        added += [0] * (MOST_WEIGHTS - len(added))
        tiles = tiles_of(config, rows, ns[:1] if gated else ns)
        across, along, table = 1, 1, 0
        clusters = min(tiles, device.sm_count)
        if not isinstance(config, GroupedConfig):
            clusters = min(tiles, device.resident_clusters(config.cluster_size))
            if config.gpc_aware:
                order = _order(config, device, clusters, swizzle_size, along_m)
                across, along, table = order.across, order.along, order.address
        rest = (
            rows, count[0], k, count[1],
            k if rows == 1 else a.stride(0), *strides, sum(count) if rows == 1 else out.stride(0), places[1],
            count[2], int(along_m), swizzle_size, across, along, clusters, l2_hint,
            places[2], *added, table,
        )  # fmt: skip
        function, index, first = self.function, a.device.index, places[0]

        def launch_at(a: int, out: int) -> None:
            if (a | out) & (UNIT_BYTES - 1):
                raise not_aligned(a=a, out=out)
            function(a, first, out, *rest, current_stream(index))

        return launch_at

    def _objection(self, a: Any, weights: Sequence[Any], biases: Sequence[Any]) -> str:
        """What this kernel does not take, though others do; empty if it does."""
        config = self.config
        if str(a.dtype) != f"torch.{_DTYPES[config.in_dtype]}":
            return f"operands of {a.dtype} for a kernel of {config.in_dtype}"
        if isinstance(config, GroupedConfig):
            return ""
        if any(bias is not None for bias in biases) and "bias_n" not in config.fused.steps:
            return f"biases for {config.label}, which adds none"
        short = [] if config.fused.gated else [w.shape[0] for w in weights[:-1] if w.shape[0] < config.tile_n]
        return f"a weight of {short[0]} rows, fewer than {config.tile_n}" if short else ""


def _order(config: KernelConfig, device: Device, clusters: int, swizzle_size: int, along_m: bool) -> Order:
    """Which cluster takes which tiles, as `cute_sm90` has it for clusters of a GPC."""
    shape = {name: getattr(config, name) for name in ("tile_m", "tile_n", "cluster_m", "cluster_n")}
    raster = "along_m" if along_m else "along_n"
    launch: dict[str, Value] = {"raster_order": raster, "swizzle_size": swizzle_size, "cluster_order": "gpc"}
    return Order.of(Candidate.make("cute_sm90", shape, launch), device, clusters)


def refusal(
    a: Any, weights: Sequence[Any], out: Any, biases: Sequence[Any] = (), *, gated: bool = False
) -> str | None:
    """Why no kernel here takes these tensors, in one line; None where one does. Operands are as in
    `JoinedKernel.bound`.
    """
    if not (len(weights) == 2 if gated else 1 <= len(weights) <= MOST_WEIGHTS):
        return f"{len(weights)} weights; a gate has 2, other products have 1 to {MOST_WEIGHTS}"
    if biases and len(biases) != len(weights):
        return f"{len(biases)} biases for {len(weights)} weights"
    given = [a, *weights, out, *(bias for bias in biases if bias is not None)]
    if str(a.dtype) not in ("torch.bfloat16", "torch.float16") or {each.dtype for each in given} != {a.dtype}:
        return f"dtypes {', '.join(str(each.dtype) for each in given)}: not all bf16, or all fp16"
    if len({each.device for each in given}) > 1:
        return f"operands on {', '.join(sorted({str(each.device) for each in given}))}"
    if any(each.ndim != 2 for each in (a, *weights, out)):
        return "an operand that is not a matrix"
    rows, k = a.shape
    ns = [weight.shape[0] for weight in weights]
    if any(weight.shape[1] != k for weight in weights) or (gated and ns[0] != ns[1]):
        return f"weights of {', '.join('x'.join(map(str, weight.shape)) for weight in weights)} for K {k}"
    columns = ns[0] if gated else sum(ns)
    if tuple(out.shape) != (rows, columns):
        return f"an output of {tuple(out.shape)}, not {(rows, columns)}"
    if not rows or any(not n or n % _UNIT for n in (k, *ns)) or max(rows, columns * 2, k) >= MOST:
        return f"{rows} rows, K {k}, N {', '.join(map(str, ns))}: K and each N are multiples of {_UNIT}"
    for name, matrix in (("a", a), *(("a weight", weight) for weight in weights), ("the output", out)):
        if reason := _misaligned(matrix):
            return f"{name} {reason}"
    for n, bias in zip(ns, biases, strict=False):
        if bias is not None and (tuple(bias.shape) != (n,) or (n > 1 and bias.stride(0) != 1)):
            return f"a bias of {tuple(bias.shape)}, strides {bias.stride()}, for N {n}"
    if gated:
        gate, up = weights
        apart = abs(gate.data_ptr() - up.data_ptr())
        if apart >= MOST_STRIDE_BYTES or gate.stride(0) != up.stride(0) or gate.data_ptr() == up.data_ptr():
            return f"gate and up {apart} bytes apart, of row strides {gate.stride(0)} and {up.stride(0)}"
    return None


def _misaligned(matrix: Any) -> str:
    """What of a matrix TMA cannot read or write; empty where it can."""
    if matrix.data_ptr() % UNIT_BYTES:
        return f"begins at {matrix.data_ptr():#x}, not at a multiple of 16 bytes"
    if matrix.stride(1) != 1:
        return f"has strides {matrix.stride()}: its columns are not contiguous"
    stride = matrix.stride(0)
    if matrix.shape[0] > 1 and (stride % _UNIT or not matrix.shape[1] <= stride < MOST_STRIDE_BYTES // 2):
        return f"has a row stride of {stride}, not a multiple of {_UNIT} from {matrix.shape[1]} on"
    return ""
