"""Kernels for block-scaled fp8, with fp32 scales of 1 x 128 blocks of A and of 128 x 128 blocks of weights.

    D[m, n] = sum over b of scale_a[m, b] * scale_b[n / 128, b] * (A[m, block b of k] B[n, block b of k]^T)

Other kernels have scales of 1 x 32 blocks of A, and of 1 x 32 or 32 x 32 blocks of weights, fp32 or E8M0.

No search includes them; db/blocks.toml lists those that ship (`tunegemm.model.blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from tunegemm.compile.cute_object import compiler
from tunegemm.describe.device import Device
from tunegemm.generate.blocks.config import BLOCK, GROUPS, NARROW, BlockConfig
from tunegemm.generate.cute_launch import LoadedKernel
from tunegemm.generate.cute_sm90 import Order, sums_of
from tunegemm.generate.generator import Kernels
from tunegemm.generate.takes import TORCHS, UNIT_BYTES, NotTaken, Place, first_objection, not_aligned
from tunegemm.generate.tiles import divided

__all__ = ["BLOCK", "FAMILY", "NARROW", "BlockKernel", "config_of", "refusal", "tiles_of"]

_OUT_DTYPES = [TORCHS[dtype] for dtype in ("bf16", "fp16", "fp32")]


def config_of(parameters: Mapping[str, Any], *, out_dtype: str = "bf16") -> BlockConfig:
    """The config of a kernel. parameters: its `form`, few or many, and the fields without a default, `turns`
    among them if it is not 1. Raises ValueError where the kernel would hang or compute something else.
    """
    fields = dict(parameters)
    few = fields.pop("form") == "few"
    config = BlockConfig(
        schedule="cooperative", tile_k=BLOCK, in_dtype="fp8_e4m3", out_dtype=out_dtype, a_major="k",
        b_major="k", out_major="m" if few else "n", accumulation="two_level", gpc_aware=False, **fields,
    )  # fmt: skip
    if config.stages % config.turns:
        raise ValueError(f"{config.label}: two turns need an even number of stages")
    if config.narrow and (config.atoms_per_warpgroup > 1 or GROUPS % config.parts):
        raise ValueError(f"{config.label}: with scales of 32 of k a warpgroup has one WGMMA's rows")
    if config.cluster_m > 1 and config.cluster_n > 1:
        raise ValueError(f"{config.label}: clusters are a line of CTAs")
    if config.parts > 1 and config.atoms_per_warpgroup > 1:
        raise ValueError(f"{config.label}: a warpgroup of two WGMMAs' rows has one block at a time")
    if config.spans > 2 and not config.few:
        raise ValueError(
            f"{config.label}: a tile's columns reach into {config.spans} blocks of scales, more than 2"
        )
    # With many rows a warpgroup waits for the next stage's scales before it gives one back.
    if config.stages // config.turns < (2 if config.narrow else max(config.parts, 1 if few else 2)):
        raise ValueError(f"{config.label}: each turn needs as many stages as it has blocks at a time, or two")
    producer, consumer = config.registers
    if producer + config.consumers * consumer > config.launch_registers * (config.consumers + 1):
        raise ValueError(f"{config.label}: no register budgets for {config.consumers} consumer warpgroups")
    return config


#: The largest row stride of A's scales: kernels have the distance in bytes within a tile as an int32.
MOST_APART = 1 << 20


def tiles_of(config: BlockConfig, rows: int, n: int) -> int:
    """Tiles of a product, counted in clusters."""
    across, along = (rows, n) if config.few else (n, rows)
    of_m = -(-along // (config.tile_m * config.cluster_m))
    return of_m * -(-across // (config.tile_n * config.cluster_n))


class BlockKernel(LoadedKernel[BlockConfig]):
    """A compiled kernel for block-scaled products."""

    def launch(self, *tensors: Any, **words: Any) -> None:
        """One product on the current stream; see `bound`."""
        self.bound(*tensors, **words)(*(each.data_ptr() for each in tensors))

    def bound(
        self, a: Any, weight: Any, scale_a: Any, scale_b: Any, out: Any, *,
        device: Device, split_k: int = 1, swizzle_size: int = 8, along_m: bool = True, l2_hint: int = 0,
    ) -> Callable[[int, int, int, int, int], None]:  # fmt: skip
        """The launch for addresses of tensors with these layouts, in this order.

        a: (M, K). weight: (N, K). scale_a: (M, K / 128), scale_b: (N / 128, K / 128), rounded up, of any
        strides; with scales of 32 of k (M, K / 32), and (N, K / 32) or (N / 32, K / 32). out: (M, N).
        split_k: parts of k that different blocks add up; stream-K ignores it. swizzle_size, along_m: the
        order of tiles. l2_hint: 1 to evict lines of a from L2 first, 2 to evict those of the weight first.

        Raises NotTaken if `refusal` objects; a launch raises it for unaligned addresses. The first call for a
        number of tiles may ask the device which clusters share a GPC, so do not make it while a graph is
        captured.
        """
        from torch._C import _cuda_getCurrentRawStream as current_stream

        config = self.config
        if wrong := refusal(a, weight, scale_a, scale_b, out, config.scale_k):
            raise NotTaken(wrong)
        if str(out.dtype) != f"torch.{TORCHS[config.out_dtype]}":
            raise NotTaken(f"an output of {out.dtype} for a kernel of {config.out_dtype}")
        rows, k = a.shape
        n, index = weight.shape[0], a.device.index
        lines = [
            k if rows == 1 else a.stride(0),
            k if n == 1 else weight.stride(0),
            n if rows == 1 else out.stride(0),
        ]
        extents = [rows, n]
        if config.few:
            lines[:2], extents, l2_hint = lines[1::-1], extents[::-1], (3 - l2_hint) % 3
        resident = device.resident_clusters(config.cluster_size)
        tiles = tiles_of(config, rows, n)
        clusters, split, units = divided(False, tiles, -(-k // BLOCK), split_k, resident)
        order = Order.of(config, device, clusters, swizzle_size, along_m)
        workspace = sums_of(config, units, device.index)
        fixed = (
            *extents, k, 1, *lines, *lines, int(along_m), swizzle_size, order.across, order.along, clusters,
            split, 0, l2_hint,
        )  # fmt: skip
        of_rows, of_weights = scale_a.stride(), scale_b.stride()
        if config.narrow:  # in bytes; and where other kernels have the batch, the rows that share a scale
            of_rows, of_weights = (_bytes_apart(each) for each in (scale_a, scale_b))
            fixed = (*fixed[:3], 1 if scale_b.shape[0] == n else NARROW, *fixed[4:])
        function, few, table = self.function, config.few, order.address

        def launch_at(a: int, weight: int, scale_a: int, scale_b: int, out: int) -> None:
            if (a | weight | out) & (UNIT_BYTES - 1) or (scale_a | scale_b) & 3:
                raise not_aligned(a=a, b=weight, out=out, scale_a=scale_a, scale_b=scale_b)
            if few:
                a, weight = weight, a
            stream = current_stream(index)
            words = scale_a, *of_rows, scale_b, *of_weights, stream
            if workspace is None:
                function(a, weight, out, *fixed, 0, 0, table, *words)
                return
            partials, counters, memory = workspace.take(stream)
            function(a, weight, out, *fixed, partials, counters, table, *words)
            del memory  # the launch is queued

        return launch_at


FAMILY = Kernels(
    folder=Path(__file__).parent,
    compile=compiler(BlockConfig, "tunegemm.generate.blocks.kernel", 8, addresses=3, words=6),
    kernel=BlockKernel.load,
)
kernel_key = FAMILY.key_of


def wrong_scales(
    device: Any, scale_a: Any, shape_a: tuple[int, ...], scale_b: Any, shape_b: tuple[int, ...],
    dtypes: Collection[str] = ("torch.float32",),
) -> str:  # fmt: skip
    """Why no kernel on a device takes these scales, which must have these shapes and one of the dtypes; empty
    if one does.
    """
    for name, scale, shape in (("scale_a", scale_a, shape_a), ("scale_b", scale_b, shape_b)):
        if str(scale.dtype) not in dtypes or tuple(scale.shape) != shape:
            return f"{name} is {tuple(scale.shape)} {scale.dtype}, not {shape} {' or '.join(dtypes)}"
        if scale.device != device:
            return f"{name} is on {scale.device}, not on {device}"
    if scale_a.shape[0] > 1 and (apart := scale_a.stride(0)) > MOST_APART:
        return f"rows of scale_a are {apart} elements apart, more than {MOST_APART}"
    return ""


def _too_far_apart(**scales: Any) -> str:
    """Why the strides of scales of 32 of k are not those that a kernel reads; empty if they are."""
    for name, scale in scales.items():
        line, group = _bytes_apart(scale)
        if line > 4 * MOST_APART or group > 64 * MOST_APART:
            return f"{name} of strides {scale.stride()}: too far apart"
        if scale.element_size() == 1 and (line % 4 or group != 1):
            return f"{name} of strides {scale.stride()}: lines of E8M0 are no units of 4 B"
    return ""


def _bytes_apart(scale: Any) -> tuple[int, int]:
    """From line to line, and from group to group; of one line, or of one group, as of packed ones."""
    size, (lines, groups), (line, group) = scale.element_size(), scale.shape, scale.stride()
    return (0 if lines == 1 else line * size), (size if groups == 1 else group * size)


def refusal(a: Any, weight: Any, scale_a: Any, scale_b: Any, out: Any, scale_k: int = BLOCK) -> str:
    """Why no kernel of scales of so many of k takes these tensors of `BlockKernel.bound`, in one line; empty
    if one does.
    """
    if any(each.ndim != 2 for each in (a, weight, scale_a, scale_b, out)):
        return "an operand that is not a matrix"
    (rows, k), n, out_dtype = a.shape, weight.shape[0], str(out.dtype).removeprefix("torch.")
    if out_dtype not in _OUT_DTYPES:
        return f"an output of {out.dtype}, not of {', '.join(_OUT_DTYPES)}"
    places = [
        Place("a", a, TORCHS["fp8_e4m3"], (rows, k), (0, 1), apart=rows > 1),
        Place("the weight", weight, TORCHS["fp8_e4m3"], (n, k), (0, 1), apart=n > 1),
        Place("the output", out, out_dtype, (rows, n), (0, 1), apart=rows > 1),
    ]
    across, along, dtypes = -(-n // BLOCK), -(-k // scale_k), ["torch.float32"]
    if scale_k == NARROW:
        across = n if scale_b.shape[0] == n else -(-n // NARROW)
        dtypes.append("torch.float8_e8m0fnu")
    return (
        first_objection(places, a.device, rows=rows, n=n, k=k)
        or wrong_scales(a.device, scale_a, (rows, along), scale_b, (across, along), dtypes)
        or (_too_far_apart(scale_a=scale_a, scale_b=scale_b) if scale_k == NARROW else "")
    )
