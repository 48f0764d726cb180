"""Kernels that multiply one A by up to three separate weights: products side by side, or gate and up.

    D[:, columns of i] = A W_i^T + bias_i      D = act(A W_0^T + bias_0) * (A W_1^T + bias_1)

No search includes them; db/joined.toml lists those that ship (`tunegemm.model.joined`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunegemm.compile.cute_object import compiler
from tunegemm.describe.device import Device
from tunegemm.generate.cute_launch import LoadedKernel
from tunegemm.generate.cute_sm90 import Order
from tunegemm.generate.cute_sm90.config import KernelConfig
from tunegemm.generate.generator import Kernels, fields_of
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.grouped.rules import config_from
from tunegemm.generate.takes import (
    MOST,
    MOST_STRIDE_BYTES,
    TORCHS,
    UNIT_BYTES,
    NotTaken,
    Place,
    first_objection,
    not_aligned,
)

__all__ = ["FAMILY", "MOST_WEIGHTS", "JoinedKernel", "few", "many", "refusal", "tiles_of"]

MOST_WEIGHTS = 3
"""The most weights of a product. A gated product has two."""
_DTYPES = [TORCHS[dtype] for dtype in ("bf16", "fp16")]
_UNIT = 8
"""Elements in 16 bytes, the unit of TMA and of the stores."""
FORMS: Mapping[str, type[KernelConfig]] = {"few": GroupedConfig, "many": KernelConfig}
"""The config class of each form of kernel: `few` has rows as the narrow mode, `many` as the wide one."""
_COMPILERS = {
    form: compiler(config, f"tunegemm.generate.joined.kernel.{form}", 7, addresses=5, words=0)
    for form, config in FORMS.items()
}


def few(parameters: Mapping[str, Any], *, dtype: str = "bf16", gate: str = "") -> GroupedConfig:
    """The config of a kernel for few rows, which takes operands with or without biases."""
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


def tiles_of(config: KernelConfig, rows: int, ns: Sequence[int]) -> int:
    """Tiles of a product, counted in clusters. ns: rows of each weight; with a gate, of one weight."""
    if isinstance(config, GroupedConfig):
        return -(-rows // config.tile_n) * sum(-(-n // config.tile_columns) for n in ns)
    columns = config.tile_n // (1 + config.fused.gated) * config.cluster_n
    return -(-rows // (config.tile_m * config.cluster_m)) * sum(-(-n // columns) for n in ns)


class JoinedKernel(LoadedKernel[KernelConfig]):
    """A compiled kernel for several weights."""

    def launch(
        self, a: Any, weights: Sequence[Any], out: Any, biases: Sequence[Any] = (), **words: Any
    ) -> None:
        """One product on the current stream; see `bound`."""
        self.bound(a, weights, out, biases, **words)(a.data_ptr(), out.data_ptr())

    def bound(
        self, a: Any, weights: Sequence[Any], out: Any, biases: Sequence[Any] = (), *,
        device: Device, swizzle_size: int = 8, along_m: bool = True, l2_hint: int = 0,
    ) -> Callable[[int, int], None]:  # fmt: skip
        """The launch for addresses of a and out with these layouts; weights and biases must stay in place.

        a: (M, K). weights: one to three, each (N, K); with a gate two, gate and up, of equal N and stride.
        out: (M, sum of N), or (M, N) with a gate. biases: empty, or a vector or None for each weight.
        swizzle_size, along_m: the order of tiles; along_m has no effect for few rows.
        l2_hint: 1 to evict lines of a from L2 first, 2 to evict those of the weights first.

        Raises NotTaken if `refusal` objects or a weight has fewer rows than this kernel's tile has columns;
        a launch raises it for unaligned addresses. The first call for a number of tiles may ask the device
        which clusters share a GPC, so do not make it while a graph is captured.
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
        clusters = min(tiles, device.resident_clusters(config.cluster_size))
        order = Order.of(config, device, clusters, swizzle_size, along_m)
        rest = (
            rows, count[0], k, count[1],
            k if rows == 1 else a.stride(0), *strides, sum(count) if rows == 1 else out.stride(0), places[1],
            count[2], int(along_m), swizzle_size, order.across, order.along, clusters, l2_hint,
            places[2], *added, order.address,
        )  # fmt: skip
        function, index, first = self.function, a.device.index, places[0]

        def launch_at(a: int, out: int) -> None:
            if (a | out) & (UNIT_BYTES - 1):
                raise not_aligned(a=a, out=out)
            function(a, first, out, *rest, current_stream(index))

        return launch_at

    def _objection(self, a: Any, weights: Sequence[Any], biases: Sequence[Any]) -> str:
        """Why this kernel does not take operands that other kernels take; empty if it does."""
        config = self.config
        if str(a.dtype) != f"torch.{TORCHS[config.in_dtype]}":
            return f"operands of {a.dtype} for a kernel of {config.in_dtype}"
        if isinstance(config, GroupedConfig):
            return ""
        if any(bias is not None for bias in biases) and "bias_n" not in config.fused.steps:
            return f"biases for {config.label}, which adds none"
        short = [] if config.fused.gated else [w.shape[0] for w in weights[:-1] if w.shape[0] < config.tile_n]
        return f"a weight of {short[0]} rows, fewer than {config.tile_n}" if short else ""


def _choices(config: KernelConfig) -> dict[str, Any]:
    return {**fields_of(config), "form": "few" if isinstance(config, GroupedConfig) else "many"}


FAMILY = Kernels(
    folder=Path(__file__).parent,
    compile=lambda key, out: _COMPILERS[str(key["form"])](key, out),
    kernel=JoinedKernel.load,
    choices=_choices,
)
kernel_key = FAMILY.key_of


def refusal(
    a: Any, weights: Sequence[Any], out: Any, biases: Sequence[Any] = (), *, gated: bool = False
) -> str:
    """Why no kernel here takes these tensors of `JoinedKernel.bound`, in one line; empty if one does."""
    if not (len(weights) == 2 if gated else 1 <= len(weights) <= MOST_WEIGHTS):
        return f"{len(weights)} weights; a gate has 2, other products have 1 to {MOST_WEIGHTS}"
    if biases and len(biases) != len(weights):
        return f"{len(biases)} biases for {len(weights)} weights"
    if any(each.ndim != 2 for each in (a, *weights, out)):
        return "an operand that is not a matrix"
    dtype = str(a.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        return f"operands of {a.dtype}, not of {' or '.join(_DTYPES)}"
    rows, k = a.shape
    ns = [weights[0].shape[0]] * 2 if gated else [weight.shape[0] for weight in weights]
    columns = ns[0] if gated else sum(ns)
    if not rows or any(not n or n % _UNIT for n in (k, *ns)) or max(rows, columns * 2, k) >= MOST:
        return f"{rows} rows, K {k}, N {', '.join(map(str, ns))}: K and each N are multiples of {_UNIT}"
    matrices = [("a", a, (rows, k))]
    matrices += [("a weight", weight, (n, k)) for weight, n in zip(weights, ns, strict=True)]
    matrices.append(("the output", out, (rows, columns)))
    places = [
        # The stride of one line has no meaning.
        Place(name, matrix, dtype, shape, (0, 1), UNIT_BYTES if shape[0] > 1 else 1, apart=shape[0] > 1)
        for name, matrix, shape in matrices
    ]
    places += [
        Place("a bias", bias, dtype, (n,), (0,), apart=False)
        for n, bias in zip(ns, biases, strict=False)
        if bias is not None
    ]
    if wrong := first_objection(places, a.device):
        return wrong
    for name, matrix, _ in matrices:
        if matrix.data_ptr() % UNIT_BYTES:
            return f"{name} begins at {matrix.data_ptr():#x}, not at a multiple of {UNIT_BYTES} bytes"
    if gated:
        gate, up = weights
        apart = abs(gate.data_ptr() - up.data_ptr())
        if apart >= MOST_STRIDE_BYTES or gate.stride(0) != up.stride(0) or gate.data_ptr() == up.data_ptr():
            return f"gate and up {apart} bytes apart, of row strides {gate.stride(0)} and {up.stride(0)}"
    return ""
