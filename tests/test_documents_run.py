"""Code blocks of the README and the guide run as printed, from the built wheel, in an empty folder.

Python blocks of one document run in one process, in their order. Commands run one by one; on a host without a
GPU those that measure end with one line that says what they need, which is what their reader would see there.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "docs" / "quickstart.md",
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Blocks of Python that need a GPU say so in their first line.
_NEEDS_GPU = "# on a GPU"
#: What a reader runs on other hosts or once: setting up, and servers that are not here.
_NOT_HERE = ("git ", "make ", "pip ", "createdb ", "ray ", "export ")
#: What a host without a GPU says of a command that measures: what it needs, or that it has no records.
_WITHOUT_GPU = re.compile(
    r"needs a GPU|on a GPU|no CUDA|needs? a CUDA|no GPU|is not here|nothing is measured|no records?"
)

#: Its product is a recorded one, so that it can be tuned without a GPU, too.
PROGRAM = """
import torch
half = {"dtype": torch.bfloat16}
torch.nn.functional.linear(torch.randn(512, 4096, **half), torch.randn(6144, 4096, **half))
"""


def blocks(document: Path, language: str) -> list[str]:
    return [text for found, text in _BLOCK.findall(document.read_text()) if found == language]


def commands() -> list[tuple[Path, str]]:
    """Each command line of the documents once, without its comment."""
    found: dict[str, Path] = {}
    for document in DOCUMENTS:
        for block in blocks(document, ""):
            for line in block.replace("\\\n", " ").splitlines():
                command = " ".join(shlex.split(line, comments=True)) if line.strip() else ""
                if command and not command.startswith(_NOT_HERE):
                    found.setdefault(command, document)
    return [(document, command) for command, document in found.items()]


#: Numbers of a kernel of a searched space; of others the first that is listed.
FEW = {"tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 4}


def shorten(space: Path) -> None:
    """Leaves a search space one of each list of numbers: what a tuning compiles are then ten kernels."""
    tables = tomllib.loads(space.read_text())
    for name, values in tables["compile"].items():
        if type(values[0]) is int:
            tables["compile"][name] = [FEW.get(name, values[0])]
    lines = [f"family = {json.dumps(tables['family'])}"]
    for table in ("compile", "launch"):
        lines += [f"[{table}]", *(f"{name} = {json.dumps(values)}" for name, values in tables[table].items())]
    space.write_text("\n".join(lines))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who installed the wheel: `tunegemm` and `python` are on the path.

    Only its search spaces are shorter: with the shipped ones the commands compile for ten minutes.
    """
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    for space in (folder / "site" / "tunegemm" / "search_spaces").glob("*.toml"):
        shorten(space)
    programs = folder / "bin"
    programs.mkdir()
    for name, words in (("tunegemm", "-m tunegemm "), ("python", "")):
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}"$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    home = folder / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TUNEGEMM_")}
    return kept | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "site"),
        "HOME": str(home),
        "XDG_DATA_HOME": str(home / "data"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "COLUMNS": "160",
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a reader works in: what the commands name is there."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("train.py", "serve.py"):
        (folder / name).write_text(PROGRAM)
    return folder


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_python_blocks_run(document: Path, installed: dict[str, str], tmp_path: Path) -> None:
    import torch

    found = [
        b for b in blocks(document, "python") if torch.cuda.is_available() or not b.startswith(_NEEDS_GPU)
    ]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(found)],
        cwd=tmp_path, env=installed, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_run(installed: dict[str, str], place: Path) -> None:
    """All in one test and in their order: what one writes the next one reads."""
    import torch

    failed = []
    for document, command in commands():
        run = subprocess.run(
            ["/bin/sh", "-c", command], cwd=place, env=installed, capture_output=True, text=True, timeout=120
        )
        said = run.stdout + run.stderr
        fine = run.returncode == 0 or (not torch.cuda.is_available() and _WITHOUT_GPU.search(said))
        if not fine or "Traceback" in said:
            failed.append(f"{document.name}: {command} -> {run.returncode}\n{said[-800:]}")
    assert not failed, "\n\n".join(failed)
