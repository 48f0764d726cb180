"""A kernel family is one folder and one TOML file: in a copy of the package, it is tuned like any other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import environment

ROOT = Path(__file__).parents[2]
NEW = Path(__file__).parents[1] / "support" / "planted" / "new_family"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout to which somebody has added the family `plain_triton`."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("tunegemm", "search_spaces"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "db").symlink_to(ROOT / "db")
    shutil.copytree(NEW / "plain_triton", root / "tunegemm" / "generate" / "plain_triton")
    shutil.copy(NEW / "plain_triton.toml", root / "search_spaces")
    return root


def tunegemm(checkout: Path, *words: str, code: int = 0) -> str:
    """What the command prints there."""
    places = {name: str(checkout / name) for name in ("TUNEGEMM_DB", "TUNEGEMM_CACHE_DIR")}
    run = subprocess.run(
        [sys.executable, "-m", "tunegemm", *words],
        cwd=checkout, env=environment(checkout, **places), capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout + run.stderr


def test_its_space_is_counted_by_its_rules(checkout: Path) -> None:
    table = tunegemm(checkout, "space", "--shape", "512x512x512", "--family", "plain_triton")
    assert "registers" in table and "smem" in table


def test_its_kernels_are_compiled_and_ranked(checkout: Path) -> None:
    words = ("--shape", "512x512x512", "--device", "model:h200", "--families", "plain_triton", "--json")
    found = json.loads(tunegemm(checkout, "tune", *words, "--trials", "3"))
    assert [p["candidate"]["family"] for p in found["predictions"]] == ["plain_triton"] * 3
    assert not found["outcomes"], "no kernel failed to compile"
    assert len(list((checkout / "TUNEGEMM_CACHE_DIR").rglob("*.o"))) == 3


@pytest.mark.gpu
def test_it_is_measured_and_remembered(checkout: Path) -> None:
    shape = ("--shape", "500x520x264")
    words = (*shape, "--device", "cuda:0", "--families", "plain_triton,cublaslt", "--json")
    tunegemm(checkout, "tune", *words)
    board = tunegemm(checkout, "leaderboard", *shape, "--format", "json")
    assert "plain_triton" in board, board
