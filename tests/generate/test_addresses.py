"""Launches of objects by addresses, with stand-ins for the driver and for loaded kernels."""

from __future__ import annotations

import ctypes
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunegemm.compile.triton_object import Argument, Header, TensorMap
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import cute_launch, triton_launch
from tunegemm.generate.takes import NotTaken
from tunegemm.generate.workspace import Workspace

MAP = TensorMap("bf16", (1, 64, 64), 3)
TILE = {"tile_m": 64, "tile_n": 32, "tile_k": 64}


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)


def candidate(**changes: Any) -> Candidate:
    launch = {"raster_order": "along_m", "swizzle_size": 4, "split_k": 1, "ctas": "tiles"}
    of_launch = {name: changes.pop(name, value) for name, value in launch.items()}
    return Candidate.make("planted", TILE | changes, of_launch)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"tiles_m": 2, "tiles_n": 3, "k_tiles": 5, "along_m": 1, "swizzle": 4, "split_k": 1}),
        ({"split_k": 2}, {"k_tiles": 3, "split_k": 2}),
        ({"raster_order": "along_n"}, {"along_m": 0, "raster_along_m": 0}),
    ],
)
def test_numbers_that_kernels_take(changes: dict[str, Any], expected: dict[str, int]) -> None:
    found = triton_launch.scalars_of(Problem(65, 96, 257, 3), candidate(**changes))
    assert {name: found[name] for name in expected} == expected
    assert (found["m"], found["n"], found["k"], found["batch"]) == (65, 96, 257, 3)


@pytest.mark.parametrize(
    ("majors", "extents"),
    [(("k", "k", "n"), ((8, 32), (16, 32), (8, 16))), (("m", "n", "m"), ((32, 8), (32, 16), (16, 8)))],
)
def test_maps_of_operands_have_the_contiguous_extent_last(majors: tuple[str, str, str], extents: Any) -> None:
    seen = Problem(8, 16, 32, 3, a_major=majors[0], b_major=majors[1], out_major=majors[2])
    found = triton_launch.matrix_views(seen, 1, 2, 3, 40, 50, 60, 400, 500, 600)
    assert list(found.values()) == [
        (address, (3, *extent), (step, leading, 1))
        for address, extent, leading, step in zip(
            (1, 2, 3), extents, (40, 50, 60), (400, 500, 600), strict=True
        )
    ]


def test_parameters_lie_at_multiples_of_their_sizes() -> None:
    header = Header(
        "3", "f", 128, 0, (Argument("n", "i32"), Argument("x", "tensor_map", MAP), Argument("p", "i64"))
    )
    layout, offsets = triton_launch.layout_of(header.parameters)
    sizes = {"i32": 4, "i64": 8, "pointer": 8, "tensor_map": 128}
    end = 0
    for kind, offset in zip(header.parameters, offsets, strict=True):
        unit = 64 if kind == "tensor_map" else sizes[kind]
        assert offset % unit == 0 and end <= offset < end + unit
        end = offset + sizes[kind]
    assert layout.size == end


def test_arguments_are_packed_behind_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "encode", lambda tensor_map, view: b"\7" * 128)
    header = Header(
        "3", "f", 128, 0, (Argument("n", "i32"), Argument("x", "tensor_map", MAP), Argument("p", "i64"))
    )
    view = (1 << 40, (1, 640, 256), (640 * 256, 256, 1))
    arguments = triton_launch.Arguments(header, {"n": -3, "x": view, "p": 1 << 40})
    pointers = (ctypes.c_void_p * len(header.parameters)).from_address(arguments.address)
    formats = {"i32": "i", "i64": "q", "pointer": "Q", "tensor_map": "128s"}
    found = []
    for kind, pointer in zip(header.parameters, pointers, strict=True):
        assert pointer is not None and pointer % (64 if kind == "tensor_map" else 4) == 0
        code = formats[kind]
        found += struct.unpack(code, ctypes.string_at(pointer, struct.calcsize(code)))
    assert found == [-3, b"\7" * 128, 1, 640, 256, 640 * 256, 256, 1, 1 << 40, 0, 0]


@pytest.mark.parametrize(
    ("answers", "has_context", "calls", "raised"),
    [(["SUCCESS"], True, 1, ""), (["CUDA_ERROR_INVALID_CONTEXT", "SUCCESS"], True, 2, ""),
     (["CUDA_ERROR_INVALID_CONTEXT"], False, 1, "INVALID_CONTEXT"), (["CUDA_ERROR_NO"], True, 1, "ERROR_NO")],
)  # fmt: skip
def test_a_launch_makes_a_context_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, answers: list[str], has_context: bool, calls: int, raised: str
) -> None:
    results = {name: SimpleNamespace(name=name) for name in (*answers, "SUCCESS")}
    launched: list[tuple[Any, ...]] = []

    def launch(*given: Any) -> Any:
        launched.append(given)
        return (results[answers[len(launched) - 1]],)

    monkeypatch.setattr(triton_launch, "ensure_context", lambda index: has_context)
    driver = SimpleNamespace(cuLaunchKernel=launch, CUresult=SimpleNamespace(CUDA_SUCCESS=results["SUCCESS"]))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=SimpleNamespace(driver=driver)))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))  # type: ignore[arg-type]
    kernel = triton_launch.Kernel(Header("3", "f", 256, 99, ()), "function", 0)
    arguments: Any = SimpleNamespace(address=5)
    if raised:
        with pytest.raises(RuntimeError, match=f"cuLaunchKernel: .*{raised}"):
            kernel.launch(7, 70, arguments)
    else:
        kernel.launch(7, 70, arguments)
    assert launched == [("function", 7, 1, 1, 256, 1, 1, 99, 70, 5, 0)] * calls


class Loaded:
    """A kernel that remembers its launches."""

    def __init__(self) -> None:
        self.header, self.launched = None, list[tuple[int, int, Any]]()

    def launch(self, ctas: int, stream: int, arguments: Any) -> None:
        self.launched.append((ctas, stream, arguments))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("with_memory", [False, True])
def test_tritons_launches_keep_arguments_by_addresses(
    monkeypatch: pytest.MonkeyPatch, h200: Device, swap: bool, with_memory: bool
) -> None:
    kernel, contexts = Loaded(), []
    monkeypatch.setattr(triton_launch, "load", lambda artifact, index: kernel)
    monkeypatch.setattr(triton_launch, "ensure_context", contexts.append)
    monkeypatch.setattr(triton_launch, "Arguments", lambda header, given: given)
    workspace = Workspace(64, 8, 0)
    workspace.lend(4096)
    launcher: Any = triton_launch.load_launcher(
        Problem(64, 32, 64), candidate(swap_ab=swap), h200, Path(), workspace if with_memory else None
    )
    a, b, out = (torch.empty(64, 64).bfloat16() for _ in range(3))
    launch = launcher.of(a, b[:32].t(), out[:, :32])
    for _ in range(2):
        launch(16, 32, 64)
    (ctas, stream, first), (_, _, second) = kernel.launched
    assert first is second and contexts == [0] and (ctas, stream) == (2 if swap else 1, 70)
    assert first["a_desc"][0] == (32 if swap else 16) and first["b_desc"][0] == (16 if swap else 32)
    assert first["d_desc"][0] == 64
    assert (first["partials"], first["counters"]) == ((4096, 4160) if with_memory else (0, 0))
    for addresses in ((24, 32, 64), (16, 40, 64), (16, 32, 72)):
        with pytest.raises(NotTaken, match="at these addresses"):
            launch(*addresses)
    assert len(kernel.launched) == 2


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("with_memory", [False, True])
def test_cutes_launches_take_addresses_between_fixed_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, h200: Device, swap: bool, with_memory: bool
) -> None:
    launched: list[tuple[int, ...]] = []
    (tmp_path / "a.o").touch()
    monkeypatch.setattr(cute_launch, "load_function", lambda artifact: lambda *given: launched.append(given))
    workspace = Workspace(64, 8, 0)
    workspace.lend(4096)
    launcher = cute_launch.load_launcher(
        Problem(64, 32, 64), candidate(swap_ab=swap), h200, tmp_path / "a.o",
        workspace if with_memory else None, (8, 9), (5,), unit_bytes=(16, 4),
    )  # fmt: skip
    a, b, out = (torch.empty(64, pitch).bfloat16() for pitch in (72, 80, 96))
    launch = launcher.of(a[:, :64], b[:32, :64].t(), out[:, :32])
    launch(16, 32, 4, 77)
    strides = (80, 72, 96, 2048, 4096, 2048) if swap else (72, 80, 96, 4096, 2048, 2048)
    extents, operands = ((32, 64), (32, 16, 4)) if swap else ((64, 32), (16, 32, 4))
    memory = (4096, 4160) if with_memory else (0, 0)
    assert launched == [(*operands, *extents, 64, 1, *strides, 8, 9, *memory, 5, 77, 70)]
    for addresses in ((8, 32, 4), (16, 40, 4), (16, 32, 6)):
        with pytest.raises(NotTaken):
            launch(*addresses)
    assert len(launched) == 1


@pytest.mark.parametrize(("raster", "order"), [("along_m", (1, 4)), ("along_n", (0, 4)), (None, ())])
def test_a_kernel_of_vectors_gets_its_order_and_grid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, h200: Device, raster: str | None, order: tuple[int, ...]
) -> None:
    launched: list[tuple[int, ...]] = []
    (tmp_path / "a.o").touch()
    monkeypatch.setattr(cute_launch, "load_function", lambda artifact: lambda *given: launched.append(given))
    launch = {"split_k": 3, "ctas": "tiles"} | ({"raster_order": raster, "swizzle_size": 4} if raster else {})
    chosen = Candidate.make("planted", TILE | {"vector_bytes": 8}, launch)
    launcher: Any = cute_launch.vector_launcher(Problem(64, 64, 64), chosen, h200, tmp_path / "a.o", None)
    a, b, out = (torch.empty(64, 64).bfloat16() for _ in range(3))
    launch = launcher.of(a, b.t(), out)
    launch(8, 16, 2)
    assert launched == [(8, 16, 2, 64, 64, 64, 1, *[64] * 3, *[4096] * 3, *order, 6, 3, 0, 0, 70)]
    for addresses in ((4, 16, 2), (8, 16, 1)):
        with pytest.raises(NotTaken):
            launch(*addresses)


class Driver:
    """The driver's functions of tensor maps: each is 128 bytes in memory of its own."""

    def __init__(self) -> None:
        self.encoded: list[tuple[Any, ...]] = []
        self.CUtensorMapDataType = SimpleNamespace(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16="BF16")
        self.CUtensorMapInterleave = SimpleNamespace(CU_TENSOR_MAP_INTERLEAVE_NONE=0)
        self.CUtensorMapL2promotion = SimpleNamespace(CU_TENSOR_MAP_L2_PROMOTION_L2_128B=0)
        self.CUtensorMapFloatOOBfill = SimpleNamespace(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE=0)
        self.CUtensorMapSwizzle = self.cuuint64_t = self.cuuint32_t = int

    class CUtensorMap:
        def __init__(self) -> None:
            self.memory = ctypes.create_string_buffer(b"\xff" * 128, 128)

        def getPtr(self) -> int:
            return ctypes.addressof(self.memory)

    def call(self, name: str, *given: Any) -> Any:
        if name == "cuTensorMapReplaceAddress":
            ctypes.memmove(given[0].getPtr(), given[1].to_bytes(8, "little"), 8)
            return None
        self.encoded.append(given)
        return self.CUtensorMap()


@pytest.mark.parametrize(
    ("rows", "apart", "version", "cleared"),
    [(1025, 64, 13010, False), (1024, 64, 13010, True), (1024, 64, 13020, False), (2, 65473, 13010, False)],
)
def test_a_map_is_encoded_once_and_small_ones_are_mended_for_old_drivers(
    monkeypatch: pytest.MonkeyPatch, rows: int, apart: int, version: int, cleared: bool
) -> None:
    """128 KiB from the first element to the last are no longer small."""
    driver = Driver()
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=SimpleNamespace(driver=driver)))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))  # type: ignore[arg-type]
    monkeypatch.setattr(triton_launch, "call_driver", driver.call)
    monkeypatch.setattr(triton_launch, "encoded_maps", {})
    monkeypatch.setattr(triton_launch, "driver_version", lambda: version)
    monkeypatch.setattr(triton_launch, "MAX_KEPT", 2)
    extents, strides = (1, rows, 64), (rows * apart, apart, 1)
    found = [triton_launch.encode(MAP, (address, extents, strides)) for address in (1 << 40, 1 << 41)]
    assert [int.from_bytes(each[:8], "little") for each in found] == [1 << 40, 1 << 41]
    assert found[0][8:] == found[1][8:] and len(driver.encoded) == 1
    assert found[0][10] == (0xFF - 32 if cleared else 0xFF)
    _, rank, address, reversed_extents, bytes_apart, box, *_ = driver.encoded[0]
    assert (rank, address, reversed_extents, box) == (3, 1 << 40, [64, rows, 1], [64, 64, 1])
    assert bytes_apart == [2 * apart, 2 * rows * apart]
    for extent in (2, 3, 3):
        triton_launch.encode(MAP, (0, (extent, rows, 64), strides))
    assert len(triton_launch.encoded_maps) <= 2 and len(driver.encoded) == 3


def test_equal_objects_are_loaded_once_for_each_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded: list[tuple[bytes, int]] = []
    monkeypatch.setattr(triton_launch, "loaded_kernels", {})
    monkeypatch.setattr(
        triton_launch, "load_content", lambda content, index: loaded.append((content, index)) or len(loaded)
    )
    for name, content in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        (tmp_path / name).write_bytes(content)
    found = [triton_launch.load(tmp_path / name, index) for name in "abc" for index in (0, 1)]
    assert found == [1, 2, 1, 2, 3, 4]
