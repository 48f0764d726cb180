"""How a CuTe kernel becomes an object, with stand-ins for the compiler and for the DSL's files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tunegemm.compile import cute_object
from tunegemm.compile.ptxas import Resources
from tunegemm.describe.epilogue import MAX_WORDS

REPORT = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 90 registers\n"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the compiler was given; it reports as ptxas does."""
    given: list[tuple[Any, ...]] = []

    def compile_it(kernel: Any, *arguments: Any, options: str) -> Any:
        given.append((kernel, *arguments, options))
        print(REPORT)
        return SimpleNamespace(
            export_to_c=lambda object_file_path, function_name: given.append((function_name,))
        )

    cute = ModuleType("cutlass.cute")
    cute.compile, cute.runtime = compile_it, SimpleNamespace(make_fake_stream=lambda: "stream")  # type: ignore[attr-defined]
    cutlass = ModuleType("cutlass")
    cutlass.cute, cutlass.Int32, cutlass.Int64 = cute, lambda x: (32, x), lambda x: (64, x)  # type: ignore[attr-defined]
    dsl = ModuleType("cutlass.base_dsl")
    dsl.dsl = SimpleNamespace()  # type: ignore[attr-defined]
    for name, module in {"cutlass": cutlass, "cutlass.cute": cute, "cutlass.base_dsl": dsl}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cute_object, "link", lambda out: given.append((out,)))
    return given


KERNEL = SimpleNamespace(smem_bytes=77)


def compile_planted(
    monkeypatch: pytest.MonkeyPatch, out: Path, *, epilogue: str, fused_words: int, words: int | None
) -> Resources:
    """A kernel of five launch parameters and three addresses."""
    monkeypatch.setitem(sys.modules, "planted_kernel", SimpleNamespace(Gemm=lambda config: KERNEL))  # type: ignore[arg-type]
    chosen = SimpleNamespace(fused=SimpleNamespace(words=fused_words))
    config = SimpleNamespace(from_mapping=lambda key: chosen)
    compile_kernel = cute_object.compiler(config, "planted_kernel", 5, addresses=3, words=words)
    return compile_kernel({"target": "sm_90a", "epilogue": epilogue}, out)


@pytest.mark.parametrize(
    ("epilogue", "fused_words", "words", "passed"),
    [("relu", 2, None, MAX_WORDS), ("relu", 0, None, 0), ("", 2, None, 0), ("relu", 2, 0, 0), ("", 0, 3, 3)],
)
def test_a_kernel_has_as_many_words_as_its_epilogue(
    compiled: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, epilogue: str,
    fused_words: int, words: int | None, passed: int,
) -> None:  # fmt: skip
    compile_planted(monkeypatch, tmp_path / "a.o", epilogue=epilogue, fused_words=fused_words, words=words)
    (_, *arguments, _, _), *_ = compiled
    assert len(arguments) == 3 + 4 + 6 + 5 + 3 + passed


def test_the_compiler_gets_an_argument_for_each_of_the_kernels(
    compiled: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = compile_planted(monkeypatch, tmp_path / "a.o", epilogue="", fused_words=0, words=4)
    assert (found.registers, found.spill_bytes, found.smem_bytes) == (90, 0, 77)
    (first, *arguments, stream, options), name, linked = compiled
    assert first is KERNEL and stream == "stream" and "--gpu-arch=sm_90a" in options
    bits = [bit for bit, _ in arguments]
    assert bits == [64] * 3 + [32] * 4 + [64] * 6 + [32] * 5 + [64] * (3 + 4)
    assert [value for _, value in arguments] == [0] * 3 + [1] * 4 + [16] * 6 + [1] * 5 + [16] * 7
    assert name == (cute_object.FUNCTION_NAME,) and linked == (tmp_path / "a.o",)
    assert isinstance(found, Resources) and found.compile_seconds < 60


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the DSL lies, with builds for CUDA 12 and 13."""
    root = tmp_path / "nvidia_cutlass_dsl"
    for build in ("cu12", "cu13"):
        (root / build / "lib").mkdir(parents=True)
        (root / build / "lib" / cute_object.RUNTIME).touch()
    origin = root / "python_packages" / "cutlass" / "__init__.py"
    monkeypatch.setattr(cute_object, "find_spec", lambda name: SimpleNamespace(origin=str(origin)))
    cute_object.dsl_build.cache_clear()
    yield root
    cute_object.dsl_build.cache_clear()


@pytest.mark.parametrize(
    ("driver", "build"), [(13, "cu13"), (14, "cu13"), (12, "cu12"), (11, None), (0, "cu13")]
)
def test_the_build_is_the_newest_that_the_driver_has(
    monkeypatch: pytest.MonkeyPatch, package: Path, driver: int, build: str | None
) -> None:
    monkeypatch.setattr(cute_object.driver, "cuda_version", lambda: (driver, 0))
    assert cute_object.dsl_build() == build
    monkeypatch.setattr(cute_object, "package_version", lambda name: "4.8.1")
    assert cute_object.dsl_version() == ("4.8.1" if build is None else f"4.8.1+{build}")
    monkeypatch.setattr(cute_object, "package_version", lambda name: "")
    assert cute_object.dsl_version() == ""


@pytest.mark.parametrize("spec", [None, SimpleNamespace(origin=None), SimpleNamespace(origin="/a/b.py")])
def test_a_dsl_that_lies_elsewhere_has_no_builds(monkeypatch: pytest.MonkeyPatch, spec: Any) -> None:
    monkeypatch.setattr(cute_object, "find_spec", lambda name: spec)
    assert cute_object.find_runtime() is None


@pytest.mark.parametrize(
    ("linker", "code", "content"),
    [("ld", 0, "library"), ("ld", 1, "object"), (None, 0, "object")],
)
def test_an_object_is_linked_where_there_is_a_linker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, linker: str | None, code: int, content: str
) -> None:
    def run(command: list[str], **_: Any) -> Any:
        assert command[0] == linker and command[-2:] == [str(out), "runtime.so"]
        Path(command[command.index("-o") + 1]).write_text("library")
        return subprocess.CompletedProcess(command, code, "", "no such symbol\nmore")

    runtime = ModuleType("cutlass.cute.runtime")
    runtime.find_runtime_libraries = lambda enable_tvm_ffi: ["runtime.so"]  # type: ignore[attr-defined]
    for name in ("cutlass", "cutlass.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cutlass.cute.runtime", runtime)
    monkeypatch.setattr(cute_object, "find_linker", lambda: linker)
    monkeypatch.setattr(cute_object.subprocess, "run", run)
    out = tmp_path / "a.o"
    out.write_text("object")
    cute_object.link(out)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.o", content)]
