"""Packages that bring kernel families, installed as a user installs them, for fresh processes to find."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.processes import environment

PLAIN = Path(__file__).parent / "planted" / "new_family"
"""A family of another package, `plain_triton`."""


def install(source: Path, target: Path) -> Path:
    """A package's folder, built and installed without a network into a folder for PYTHONPATH."""
    copy = target.with_name(f"{target.name}-source")  # the build leaves files beside what it builds
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    words = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [sys.executable, *words, "--target", str(target), str(copy)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target


def write_package(folder: Path, name: str, entry_points: dict[str, str], files: dict[str, str]) -> Path:
    """A package as pip leaves it, of modules and data files; for what would take pip a second each."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{family} = {place}" for family, place in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[tunegemm.families]", *lines, ""]))
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def run(*words: str, folders: tuple[Path, ...], **variables: str) -> subprocess.CompletedProcess[str]:
    """Python, with packages of these folders installed."""
    installed = environment(**variables)
    installed["PYTHONPATH"] = os.pathsep.join([*map(str, folders), installed["PYTHONPATH"]])
    return subprocess.run([sys.executable, *words], env=installed, capture_output=True, text=True)


def answer(code: str, *folders: Path) -> object:
    """What a fresh process prints as JSON last; its errors in the message where it fails."""
    done = run("-c", code, folders=folders)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
