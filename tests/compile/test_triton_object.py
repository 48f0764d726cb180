"""Objects of Triton's kernels: compiled offline, written, read back, packed for a launch."""

import ctypes
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.planted.triton_kernels import copy_tile, scale_row
from tunegemm.compile import triton_object
from tunegemm.compile.ptxas import Resources
from tunegemm.compile.triton_object import FORMAT, Header, build, first_error, parameters_of, read_object
from tunegemm.errors import ArtifactError
from tunegemm.generate import triton_launch

TILE = {"rows": 64, "columns": 128}
ARGUMENTS = {
    "source": "tensordesc<bf16[1, 64, 128]>",
    "target": "tensordesc<fp32[1, 64, 128]>",
    "scale": "i32",
    "steps": "i32",
    "extra": "*fp32",
}


def built(folder: Path) -> tuple[Resources, Header, bytes]:
    out = folder / "copy.o"
    resources = build(copy_tile, ARGUMENTS, TILE, out, num_warps=4, aligned=["extra"])
    return resources, *read_object(out.read_bytes())


def test_an_object_says_all_that_a_launch_needs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    resources, header, cubin = built(tmp_path)
    assert cubin.startswith(b"\x7fELF") and header.entry.encode() in cubin
    assert header.threads == 128
    assert header.smem_bytes == resources.smem_bytes > 64 * 128 * 2
    assert resources.registers > 8 and resources.spill_bytes == 0
    source, target, *rest = header.arguments
    assert source.tensor_map and target.tensor_map
    assert (source.tensor_map.element, source.tensor_map.box) == ("bf16", (1, 64, 64))  # 128 B each
    assert (target.tensor_map.element, target.tensor_map.box) == ("fp32", (1, 64, 32))
    assert [(a.name, a.type) for a in rest] == [("scale", "i32"), ("steps", "i32"), ("extra", "pointer")]
    assert capfd.readouterr() == ("", "")


def test_objects_are_reproducible(tmp_path: Path) -> None:
    """The store names an object by its key: equal keys must not differ by the folder or the time."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert built(tmp_path / "a")[1:] == built(tmp_path / "b")[1:]


def test_gluon_kernels_are_objects_too(tmp_path: Path) -> None:
    from triton.experimental.gluon import language as gl

    arguments = {"source": "*bf16", "target": "*bf16", "count": "i32"}
    constants = {"block": 512, "layout": gl.BlockedLayout([4], [32], [4], [0])}
    resources = build(scale_row, arguments, constants, tmp_path / "g.o", num_warps=4, aligned=["source"])
    header, _ = read_object((tmp_path / "g.o").read_bytes())
    assert header.parameters == ("pointer", "pointer", "i32", "pointer", "pointer")
    assert resources.smem_bytes == 0


def test_the_compilers_complaint_becomes_the_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="power of 2"):
        build(copy_tile, ARGUMENTS, {"rows": 48, "columns": 128}, tmp_path / "o", num_warps=4)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"{}\n", b'{"format": 0, "arguments": []}\n'])
def test_foreign_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ArtifactError, match="tune again"):
        read_object(content)


def test_arguments_lie_where_the_kernel_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, header, _ = built(tmp_path)
    encoded = iter([b"\1" * 128, b"\2" * 128])
    monkeypatch.setattr(triton_launch, "encode", lambda tensor_map, view: next(encoded))
    view = (1 << 40, (1, 640, 256), (640 * 256, 256, 1))
    values: dict[str, Any] = {"source": view, "target": view, "scale": 3, "steps": -2, "extra": 1 << 63}
    arguments = triton_launch.Arguments(header, values)
    pointers = (ctypes.c_void_p * len(header.parameters)).from_address(arguments.address)
    sizes = {"tensor_map": "128s", "i32": "i", "i64": "q", "pointer": "Q"}
    found = []
    for kind, pointer in zip(header.parameters, pointers, strict=True):
        assert pointer is not None
        assert pointer % {"tensor_map": 64, "i32": 4}.get(kind, 8) == 0
        (value,) = struct.unpack(sizes[kind], ctypes.string_at(pointer, struct.calcsize(sizes[kind])))
        found.append(value)
    shape = [1, 640, 256, 640 * 256, 256, 1]
    assert found == [b"\1" * 128, *shape, b"\2" * 128, *shape, 3, -2, 1 << 63, 0, 0]


def test_kept_arguments_are_bounded(tmp_path: Path) -> None:
    kept = triton_launch.Kept()
    arguments: Any = object()
    for key in range(3000):
        assert kept.keep(key, arguments) is arguments
    assert 0 < len(kept) <= 1024 and 2999 in kept


def test_the_format_is_part_of_the_file(tmp_path: Path) -> None:
    built(tmp_path)
    assert (tmp_path / "copy.o").read_bytes().startswith(b'{"arguments": ')
    assert f'"format": {FORMAT}'.encode() in (tmp_path / "copy.o").read_bytes().partition(b"\n")[0]


@pytest.mark.parametrize(
    ("scratch", "ctas", "fits"),
    [((0, 0), 1, True), ((8, 0), 1, False), ((0, 8), 1, False), ((0, 0), 2, False)],
)
def test_what_launches_do_not_have_fails_the_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scratch: tuple[int, int], ctas: int, fits: bool
) -> None:
    import triton

    ptx = ".visible .entry f(.param .u32 a, .param .u64 .ptr .global b, .param .u64 .ptr c) {"
    facts = SimpleNamespace(
        global_scratch_size=scratch[0], profile_scratch_size=scratch[1], num_ctas=ctas, tensordesc_meta=None,
        name="f", num_warps=4, shared=64,
    )  # fmt: skip

    def compile_it(*_: Any, **__: Any) -> Any:
        print("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 90 registers")
        return SimpleNamespace(asm={"ptx": ptx, "cubin": b"cubin"}, metadata=facts)

    monkeypatch.setattr(triton, "compile", compile_it)
    out = tmp_path / "a.o"
    if not fits:
        with pytest.raises(
            RuntimeError, match=f"needs {sum(scratch)} B of scratch memory and clusters of {ctas}"
        ):
            build(copy_tile, {"a": "i32"}, TILE, out, num_warps=4)
        return
    assert build(copy_tile, {"a": "i32"}, TILE, out, num_warps=4).registers == 90
    header, cubin = read_object(out.read_bytes())
    assert (header.entry, header.threads, header.smem_bytes, cubin) == ("f", 128, 64, b"cubin")
    with pytest.raises(RuntimeError, match=r"passes \('i32', 'pointer', 'pointer'\), expected \('i64',"):
        build(copy_tile, {"a": "i64"}, TILE, out, num_warps=4)


def test_types_of_parameters_are_read_from_the_ptx() -> None:
    ptx = """.visible .entry f(
      .param .align 64 .b8 a[128], .param .align 8 .b8 b[64], .param .u32 c, .param .u64 d,
      .param .u64 .ptr .global .align 16 e, .param .f32 g
    )"""
    assert parameters_of(ptx) == ("tensor_map", "bytes", "i32", "i64", "pointer", ".f32")
    assert parameters_of("nothing") == ()


def test_the_first_complaint_is_ptxass() -> None:
    log = "a.py:3: error: first\nno terror\nptxas fatal : second\n"
    assert first_error(log) == "ptxas fatal : second"
    assert first_error(log.replace("fatal", "word")) == "error: first"
    assert first_error("terrors\n") == ""


@pytest.mark.parametrize(("spills", "limits"), [(0, [None]), (8, [None, 168])])
def test_a_kernel_that_spills_is_built_again_with_a_limit(
    monkeypatch: pytest.MonkeyPatch, spills: int, limits: list[int | None]
) -> None:
    seen: list[int | None] = []

    def planted(name: str, *, max_registers: int | None = None) -> Resources:
        seen.append(max_registers)
        return Resources(128, spills if max_registers is None else 0, 0)

    monkeypatch.setattr(triton_object, "build", planted)
    assert triton_object.build_without_spills(168, "a").spill_bytes == 0 and seen == limits
