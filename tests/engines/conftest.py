"""The engines as pip has them, each in a folder of its own, without what needs a GPU. Torch is ours.

`make test-engines` installs them into build/engines, which takes minutes and some GB once. On a host without
a GPU vLLM's and SGLang's Python imports; their compiled products do not, and are not called.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import ROOT, environment
from tests.support.rooms import *  # noqa: F403 - fixtures

PINS = ROOT / "tests" / "data" / "engines"
ENGINES = ROOT / "build" / "engines"
#: What the tests have themselves, in the version they have, and libraries of a GPU.
LEFT_OUT = (
    "apache-tvm-ffi", "cuda-", "cupy", "flashinfer", "humming-kernels", "nccl", "numba-cuda", "numpy",
    "nvidia-", "nvtx", "pynvvideocodec", "quack", "setuptools", "sgl-", "sglang-kernel", "sympy", "tilelang",
    "tokenspeed", "torch", "triton", "z3-solver",
)  # fmt: skip

#: Of torchvision, whose wheel on the index is for another torch, the engines' modules want names only.
TORCHVISION = """
import sys
import types
from importlib.machinery import ModuleSpec

__version__ = "0.28.0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    modes = ("BILINEAR", "BICUBIC", "NEAREST", "NEAREST_EXACT", "LANCZOS", "BOX", "HAMMING")
    return type(name, (), {mode: mode for mode in modes})


class Finder:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = __getattr__
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
"""


def install(engine: str) -> Path:
    """The folder with an engine and what it imports, in the versions that pip chooses.

    engine: the name of a file of versions, or one package in its version, which needs no more than torch.
    """
    folder = ENGINES / engine
    ready = folder / ".ready"
    if not ready.exists():
        is_one = "==" in engine
        lines = [engine] if is_one else (PINS / f"{engine}.txt").read_text().splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        wanted = pins if is_one else [pin for pin in pins if not pin.startswith(LEFT_OUT)]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--upgrade"]
        subprocess.run([*pip, "--target", str(folder), *wanted], check=True)
        (folder / "torchvision").mkdir()
        (folder / "torchvision" / "__init__.py").write_text(TORCHVISION)
        facts = folder / "torchvision-0.28.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
        ready.touch()
    return folder


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip installs it, with its entry points."""
    folder = tmp_path_factory.mktemp("unpacked")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(folder), str(wheel)], check=True)
    return folder


Run = Callable[..., dict[str, object]]


@pytest.fixture
def run(unpacked: Path, tmp_path: Path) -> Run:
    """Runs code beside an engine in a process of its own; returns what it leaves in the variable `found`."""

    def run(engine: str, code: str, **variables: str) -> dict[str, object]:
        answer = tmp_path / "answer.json"
        program = tmp_path / "program.py"
        ending = (
            f"\n    import json, pathlib\n    pathlib.Path({str(answer)!r}).write_text(json.dumps(found))\n"
        )
        body = "".join(f"    {line}\n" for line in code.splitlines())
        # A module with a guard, as processes that are spawned import it again.
        program.write_text(f"found = {{}}\nif __name__ == '__main__':\n{body}{ending}")
        own = environment(
            TUNEGEMM_DB="", HOME=str(tmp_path), XDG_DATA_HOME=str(tmp_path / "data"),
            VLLM_NO_USAGE_STATS="1", **variables,
        )  # fmt: skip
        own["PYTHONPATH"] = os.pathsep.join(map(str, (unpacked, install(engine), ROOT)))
        done = subprocess.run(
            [sys.executable, str(program)], cwd=tmp_path, env=own, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return {**json.loads(answer.read_text()), "output": done.stdout + done.stderr}

    return run
