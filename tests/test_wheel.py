"""What is in a wheel, built offline by the backend that pip would use."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tunegemm
from tunegemm.resources import data_path

ROOT = Path(tunegemm.__file__).parent.parent


def tracked(folder: str) -> set[str]:
    """Files of a folder that git knows, or all of them outside of a clone (an unpacked sdist)."""
    listing = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0 and listing.stdout:
        return {name for name in listing.stdout.splitlines() if (ROOT / name).exists()}
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("folder", ["search_spaces", "db"])
def test_wheel_carries_the_data(wheel: Path, folder: str) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"tunegemm/{name}" for name in tracked(folder)}
    assert expected, f"{folder}/ is empty"
    assert expected <= names


def test_wheel_carries_the_modules_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert tracked("tunegemm") <= names
    assert "tunegemm/py.typed" in names
    foreign = {name for name in names if not name.startswith(("tunegemm/", "tunegemm-"))}
    assert foreign == set()
    assert not {name for name in names if "__pycache__" in name or name.endswith((".sqlite", ".pyc"))}


def test_wheel_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = f"tunegemm-{tunegemm.__version__}.dist-info"
    assert "tunegemm = tunegemm.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()


def test_installed_wheel_finds_its_data(wheel: Path, tmp_path: Path) -> None:
    """Unpacked somewhere else, the package reads its own folders, not the checkout's."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "from tunegemm.resources import data_path; from tunegemm.generate.families import load_space;"
        "print(data_path('search_spaces')); print(load_space('cute_sm90').compile_size > 0)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout.split() == [str(tmp_path / "tunegemm" / "search_spaces"), "True"], run.stderr


def test_missing_data_names_both_places() -> None:
    with pytest.raises(FileNotFoundError, match=r"search_spaces/nothing\.toml is in neither .* nor "):
        data_path("search_spaces", "nothing.toml")
