"""The DSL's builds for CUDA 12 and CUDA 13: what one compiled is no answer for the other, but in a pack."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.test_packs import CUTE, DEVICE, RECORDS
from tests.support.processes import compile_workers, environment
from tunegemm.compile import cute_object
from tunegemm.compile.artifacts import ArtifactStore, Key
from tunegemm.compile.pool import CompilePool
from tunegemm.describe.device import package_version
from tunegemm.dispatch.launchers import find_object
from tunegemm.errors import ArtifactError
from tunegemm.generate import families
from tunegemm.store import packing, packs


def key() -> Key:
    return families.get("cute_sm90").kernel_key(CUTE, RECORDS[0].candidate, DEVICE)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Makes this a host of its own with a build of the DSL, or with a DSL that has none."""
    here = cute_object.dsl_build()

    def become(build: str | None) -> None:
        monkeypatch.setattr(cute_object, "dsl_build", lambda: here if build == "here" else build)

    for name, folder in (("XDG_DATA_HOME", "data"), ("TUNEGEMM_CACHE_DIR", "cache")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    return become


@pytest.fixture(scope="module")
def said() -> list[str]:
    """By a process that has the DSL: the file of its build, and its switch while it compiles and later."""
    code = """
import sys, cutlass
print(sys.modules["cutlass._mlir._mlir_libs._cutlass_ir"].__file__)
from cutlass._mlir_helpers import op
from cutlass.base_dsl import dsl
from tunegemm.compile.cute_object import _without_locations
with _without_locations():
    dsl._set_enable_frame_filtering(True)  # as for remarks
    print(op._ENABLE_FRAME_FILTERING)
dsl._set_enable_frame_filtering(True)
print(op._ENABLE_FRAME_FILTERING)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_keys_name_the_build_that_compiles(said: list[str]) -> None:
    build = Path(said[0]).name.split(".")[1]
    assert key()["cutlass_dsl"] == f"{package_version('nvidia-cutlass-dsl')}+{build}"


def test_the_dsl_looks_up_no_source_lines_while_it_compiles(said: list[str]) -> None:
    """Its switch is there and obeys: where another version has none, compiling takes half as long again."""
    assert said[1:] == ["False", "True"]


@pytest.mark.slow
def test_a_worker_does_not_ask_the_driver_what_gpu_there_is(tmp_path: Path) -> None:
    """It sees none: on a host that has one, asking took each of 16 workers a minute."""
    code = f"""
import os, sys
from tunegemm.generate import families
families.import_compiler()
from cutlass.base_dsl import env_manager
env_manager.detect_gpu_arch = lambda prefix: os._exit(7)
families.get("cute_sm90").compile({dict(key())!r}, __import__("pathlib").Path({str(tmp_path / "a.o")!r}))
"""
    own = environment()
    own.pop("CUTE_DSL_ARCH", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=own)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.o").stat().st_size > 0


@pytest.mark.slow
def test_a_cache_whose_path_has_a_space(tmp_path: Path) -> None:
    """The compiler's files lie in it, and the compiler is given their folder in a line of options."""
    with CompilePool(ArtifactStore(tmp_path / "a folder"), workers=1) as pool:
        assert not pool.submit("cute_sm90", key()).result().failure


def test_objects_of_the_other_build_are_missing(host: Callable[[str | None], None]) -> None:
    packing.provide(RECORDS[:1], workers=compile_workers())
    assert find_object(RECORDS[0], DEVICE) is not None
    other = "cu12" if cute_object.dsl_build() == "cu13" else "cu13"
    host(other)
    assert ArtifactStore().find(key()) is None and packs.find(key()) is None
    with pytest.raises(ArtifactError, match="not in the object store"):
        find_object(RECORDS[0], DEVICE)
    host("here")
    assert find_object(RECORDS[0], DEVICE) is not None


@pytest.mark.slow
@pytest.mark.parametrize("packed_by", ["here", None])
def test_a_packs_objects_serve_hosts_of_either_build(
    host: Callable[[str | None], None], tmp_path: Path, packed_by: str | None
) -> None:
    """Also one that names no build, as packs did before."""
    host(packed_by)
    made = packing.pack(RECORDS[:1], tmp_path / "a.pack", workers=compile_workers())
    assert made.objects == 1
    packs.install(made.path)
    for path in ArtifactStore().root.rglob("*.*"):
        path.unlink()
    for build in ("cu12", "cu13", None):
        host(build)
        path = find_object(RECORDS[0], DEVICE)
        assert path is not None and path.is_relative_to(packs.user_folder())
