"""Launches kernels of `tunegemm.compile.triton_object` through the CUDA driver, without Triton.

The arguments of a launch are packed once for each set of operands and never change, so that threads may share
them. A launch is then one call of the driver.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunegemm.compile.triton_object import Header, TensorMap, read_object
from tunegemm.describe.device import Device
from tunegemm.describe.driver import ensure_context, primary_context
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.launching import (
    AddressLaunch,
    AddressLauncher,
    Launcher,
    Reader,
    never_unloaded,
    operand_reader,
)
from tunegemm.generate.takes import UNIT_BYTES, not_aligned
from tunegemm.generate.tiles import persistent_grid, seen_by_kernel
from tunegemm.generate.workspace import Workspace

#: (address, extents, strides) of a tensor map. Extents and strides are in elements, outermost first; the last
#: stride is 1.
View = tuple[int, Sequence[int], Sequence[int]]

#: Returns a kernel's operand arguments by name. It takes the product that the kernel sees, the addresses of
#: A, B and D, their leading dimensions, and the strides between their batch entries.
Views = Callable[..., Mapping[str, int | View]]

_ALIGNMENT = 64  # of a CUtensorMap
_MAP_BYTES = 128
_FORMATS = {"i32": ("i", 4), "i64": ("q", 8), "pointer": ("Q", 8), "tensor_map": ("128s", _ALIGNMENT)}
MAX_KEPT = 1024
encoded_maps: dict[Any, bytes] = {}
loaded_kernels: dict[tuple[bytes, int], Kernel] = {}
_loading = threading.Lock()


def load(artifact: Path, index: int) -> Kernel:
    """The kernel of an object file, loaded on the GPU of that index.

    Equal objects share one module, which stays loaded, because captured graphs may use it at any later time.
    """
    content = artifact.read_bytes()
    key = hashlib.sha256(content).digest(), index
    with _loading:
        if key not in loaded_kernels:
            loaded_kernels[key] = load_content(content, index)
        return loaded_kernels[key]


class Kernel:
    """A loaded kernel."""

    def __init__(self, header: Header, function: Any, index: int) -> None:
        """index: of the device."""
        from cuda.bindings import driver

        self.header = header
        self._function = function
        self._index = index
        self._launch = driver.cuLaunchKernel
        self._success = driver.CUresult.CUDA_SUCCESS

    def launch(self, ctas: int, stream: int, arguments: Arguments) -> None:
        """Launch on a stream. Raises RuntimeError if the driver refuses."""
        header = self.header
        (result,) = self._launch(
            self._function, ctas, 1, 1, header.threads, 1, 1, header.smem_bytes, stream, arguments.address, 0
        )
        if result != self._success:
            if result.name != "CUDA_ERROR_INVALID_CONTEXT" or not ensure_context(self._index):
                raise RuntimeError(f"cuLaunchKernel: {result.name}")
            self.launch(ctas, stream, arguments)


class Arguments:
    """The parameters of one launch, packed for cuLaunchKernel. They never change."""

    def __init__(self, header: Header, values: Mapping[str, int | View]) -> None:
        """values: an integer or the view of a tensor map, by argument name."""
        flat: list[int | bytes] = []
        for argument in header.arguments:
            value = values[argument.name]
            if argument.tensor_map is None:
                assert isinstance(value, int)
                flat.append(value)
            else:
                assert not isinstance(value, int)
                _, extents, strides = value
                flat += [encode(argument.tensor_map, value), *extents, *strides]
        flat += [0, 0]  # the hidden pointers
        layout, offsets = layout_of(header.parameters)
        self._memory = ctypes.create_string_buffer(layout.size + _ALIGNMENT)
        start = -ctypes.addressof(self._memory) % _ALIGNMENT
        layout.pack_into(self._memory, start, *flat)
        base = ctypes.addressof(self._memory) + start
        self._pointers = (ctypes.c_void_p * len(offsets))(*[base + offset for offset in offsets])
        self.address = ctypes.addressof(self._pointers)
        """The address of the array of pointers to the parameters."""


class Kept(dict[Any, Arguments]):
    """A cache of arguments by addresses: a model's products come back with the same addresses.

    It is cleared as a whole when it is full, as happens if addresses never repeat.
    """

    def keep(self, key: Any, arguments: Arguments) -> Arguments:
        """Keep the arguments and return them."""
        if len(self) >= MAX_KEPT:
            self.clear()
        self[key] = arguments
        return arguments


def load_launcher(
    problem: Problem,
    candidate: Candidate,
    device: Device,
    artifact: Path,
    workspace: Workspace | None,
    *,
    ctas: int | None = None,
    views: Views | None = None,
    read: Reader | None = None,
    unit_bytes: tuple[int, int] = (UNIT_BYTES, UNIT_BYTES),
) -> Launcher:
    """A launcher of an object, for a grid of `ctas` blocks, by default the persistent one.

    views: returns the operands' arguments, by default tensor maps. read: returns the operands'
    places, by default such as TMA takes. unit_bytes: the alignment of A and B, and of D.
    """
    from torch._C import _cuda_getCurrentRawStream as current_stream  # 0.1 us, torch.cuda.current_stream 0.5

    index, seen = device.index, seen_by_kernel(problem, candidate)
    scalars, blocks = scalars_of(seen, candidate), ctas or persistent_grid(problem, candidate, device)
    kernel, swap = load(artifact, index), bool(candidate.params.get("swap_ab", False))
    views, (in_mask, out_mask) = views or matrix_views, (unit - 1 for unit in unit_bytes)

    def make(lda: int, ldb: int, ldd: int, a_step: int, b_step: int, d_step: int) -> AddressLaunch:
        strides = (ldb, lda, ldd, b_step, a_step, d_step) if swap else (lda, ldb, ldd, a_step, b_step, d_step)
        kept = Kept()

        def arguments(a: int, b: int, d: int, partials: int, counters: int) -> Arguments:
            given = {**scalars, **views(seen, a, b, d, *strides), "partials": partials, "counters": counters}
            return Arguments(kernel.header, given)

        def launch(a: int, b: int, d: int) -> None:
            if swap:
                a, b = b, a
            stream = current_stream(index)
            partials, counters, memory = (0, 0, None) if workspace is None else workspace.take(stream)
            key = (a, b, d, partials, counters)
            found = kept.get(key)
            if found is None:
                if (a | b) & in_mask or d & out_mask:
                    raise not_aligned(a=a, b=b, out=d)
                ensure_context(index)  # tensor maps need a context
                found = kept.keep(key, arguments(*key))
            kernel.launch(blocks, stream, found)
            del memory  # the launch is queued

        return launch

    return AddressLauncher(read or operand_reader(problem), make, keep=never_unloaded)


def scalars_of(seen: Problem, candidate: Candidate) -> dict[str, int]:
    """The numbers that kernels take, by argument name, for the product that a kernel sees."""
    split_k = int(candidate.params.get("split_k", 1))
    along_m, swizzle = int(candidate["raster_order"] == "along_m"), int(candidate["swizzle_size"])
    return {
        "m": seen.m, "n": seen.n, "k": seen.k, "batch": seen.batch, "split_k": split_k,
        "tiles_m": -(-seen.m // candidate["tile_m"]), "tiles_n": -(-seen.n // candidate["tile_n"]),
        "k_tiles": math.ceil(math.ceil(seen.k / candidate["tile_k"]) / split_k),
        "along_m": along_m, "raster_along_m": along_m, "swizzle": swizzle, "swizzle_size": swizzle,
    }  # fmt: skip


def matrix_views(seen: Problem, a: int, b: int, d: int, *strides: int) -> dict[str, int | View]:
    """The tensor maps of A, B and D for the product that a kernel sees, by argument name."""
    m, n, k, (lda, ldb, ldd, a_step, b_step, d_step) = seen.m, seen.n, seen.k, strides
    return {
        name: (address, (seen.batch, lines, extent), (step, leading, 1))
        for name, address, (lines, extent), leading, step in (
            ("a_desc", a, (m, k) if seen.a_major == "k" else (k, m), lda, a_step),
            ("b_desc", b, (k, n) if seen.b_major == "n" else (n, k), ldb, b_step),
            ("d_desc", d, (m, n) if seen.out_major == "n" else (n, m), ldd, d_step),
        )
    }


def encode(tensor_map: TensorMap, view: View) -> bytes:
    """The 128 bytes of a CUtensorMap. Raises RuntimeError if TMA cannot address the view."""
    from cuda.bindings import driver

    address, extents, strides = view
    key = tensor_map, *extents, *strides
    known = encoded_maps.get(key)
    if known is None:
        if len(encoded_maps) >= MAX_KEPT:
            encoded_maps.clear()
        encoded_maps[key] = known = _encode(tensor_map, address, extents, strides)
    encoded = driver.CUtensorMap()
    place = int(encoded.getPtr())
    # Encoding again costs the host many times as much as replacing the address.
    ctypes.memmove(place, known, _MAP_BYTES)
    call_driver("cuTensorMapReplaceAddress", encoded, address)
    return ctypes.string_at(place, _MAP_BYTES)


def _encode(tensor_map: TensorMap, address: int, extents: Sequence[int], strides: Sequence[int]) -> bytes:
    from cuda.bindings import driver

    element_bytes, rank = DTYPE_BYTES[tensor_map.element], len(tensor_map.box)
    element = {"bf16": "BFLOAT16", "fp16": "FLOAT16", "fp32": "FLOAT32"}[tensor_map.element]
    encoded = call_driver(
        "cuTensorMapEncodeTiled",
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{element}"),
        rank,
        address,
        [driver.cuuint64_t(extent) for extent in reversed(extents)],
        [driver.cuuint64_t(stride * element_bytes) for stride in reversed(strides[:-1])],
        [driver.cuuint32_t(extent) for extent in reversed(tensor_map.box)],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle(tensor_map.swizzle),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    content = bytearray(ctypes.string_at(int(encoded.getPtr()), _MAP_BYTES))
    span = sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True)) * element_bytes
    if span + 1 < 128 * 1024 and driver_version() <= 13010:
        # Drivers up to CUDA 13.1 set a bit with which TMA misreads small tensors; CUTLASS and Triton clear it
        # (bit 21 of the second word).
        content[10] &= ~(1 << 5)
    return bytes(content)


def load_content(content: bytes, index: int) -> Kernel:
    from cuda.bindings import driver

    header, cubin = read_object(content)
    with primary_context(index):
        function = call_driver(
            "cuModuleGetFunction", call_driver("cuModuleLoadData", cubin), header.entry.encode()
        )
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call_driver("cuFuncSetAttribute", function, attribute, header.smem_bytes)
    return Kernel(header, function, index)


@functools.cache
def layout_of(parameters: tuple[str, ...]) -> tuple[struct.Struct, tuple[int, ...]]:
    """The struct that packs parameters, and the offset of each."""
    parts, offsets, end = ["<"], [], 0
    for parameter in parameters:
        code, alignment = _FORMATS[parameter]
        padding = -end % alignment
        parts.append(f"{padding}x{code}")
        offsets.append(end + padding)
        end = offsets[-1] + struct.calcsize(f"<{code}")
    return struct.Struct("".join(parts)), tuple(offsets)


@functools.cache
def driver_version() -> int:
    return int(call_driver("cuDriverGetVersion"))


def call_driver(name: str, *arguments: Any) -> Any:
    """Call a function of the driver and return its result. Raises RuntimeError with the error's name."""
    from cuda.bindings import driver

    error, *results = getattr(driver, name)(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name}: {error.name}")
    return results[0] if results else None
