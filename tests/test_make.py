"""What `make` does in a fresh clone: the steps of its set-up, and what it says of one that fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fit import shipping
from tests.support.processes import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make; there is none here")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in (
        "fit/shipping.py",
        "db/selector.toml",
        "db/invariant.toml",
        "db/grouped.toml",
        "db/joined.toml",
        "db/blocks.toml",
        "db/block_groups.toml",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "VENV"))}
    return subprocess.run(["make", *words], cwd=folder, env=own, capture_output=True, text=True, timeout=60)


def python(folder: Path, text: str) -> str:
    """An interpreter of one's own: a shell script."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_tuning_installs_no_test_tools_and_compiles_no_other_kernels(clone: Path) -> None:
    plan = make(clone, "-n", "tune").stdout
    assert "-e '.[tune" in plan and "[test" not in plan
    assert "tunegemm tune --shape 8448x9216x256 --dtype bf16 --layout tn" in plan
    assert "fit.shipping" not in plan
    assert "fit.shipping" in make(clone, "-n", "kernels").stdout
    assert "-e '.[test,dev" in make(clone, "-n", "test").stdout


def test_help_compiles_no_kernels_into_a_folder_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "ship", lambda folder: pytest.fail(f"compiles into {folder}"))
    monkeypatch.setattr("sys.argv", ["shipping", "--help"])
    assert shipping.main() == 2


def test_tests_of_a_gpu_run_by_the_python_that_is_given(clone: Path) -> None:
    plan = make(clone, "-n", "test-gpu", "GPU_WORKERS=3").stdout
    assert "-e '.[test,dev" in plan and ".venv/bin/python -m tests.run_gpu --workers 3 --limit 590\n" in plan
    plan = make(clone, "-n", "test-gpu", "PYTEST_PYTHON=python3", "CASES=x").stdout
    assert plan == "python3 -m tests.run_gpu --workers 9 --limit 590 --cases x\n", "without network"


def test_each_step_is_a_line_with_its_seconds(clone: Path) -> None:
    """An interpreter that makes a copy of itself in place of an environment, and installs nothing."""
    program = python(clone, 'echo noise; [ "$2" = venv ] && mkdir -p .venv/bin && cp "$0" .venv/bin/; exit 0')
    done = make(clone, "tune", f"PYTHON={program}", "SHAPE=64x64x64")
    assert done.returncode == 0, done
    making, installing, tuning, *_ = done.stdout.splitlines()
    assert making.startswith("Making .venv ... ") and making.endswith(" s")
    assert installing.startswith("Installing what tuning needs") and installing.endswith(" s")
    assert tuning.startswith("Tuning 64x64x64 bf16 tn, with the kernels that this asks for; make kernels")
    assert make(clone, "tune").stdout.splitlines()[0].startswith("Tuning")  # what is there is not made again


def test_help_has_every_target(clone: Path) -> None:
    text = make(clone, "help").stdout
    (line,) = re.findall(r"^\.PHONY: (.*)$", (clone / "Makefile").read_text(), re.MULTILINE)
    targets = set(line.split()) - {"help", "ready"}  # the second is what others depend on
    assert targets == set(re.findall(r"make ([\w-]+)", text))
    assert all(len(row) <= 80 for row in text.splitlines())


@pytest.mark.parametrize(
    ("fails", "step", "remedy"),
    [
        ("venv", "Making .venv", "See that Python is 3.11 or later"),
        ("pip", "Installing what tuning needs", "the package index can be reached"),
    ],
)
def test_a_step_that_fails_says_which_and_how_to_go_on(
    clone: Path, fails: str, step: str, remedy: str
) -> None:
    program = python(
        clone,
        f'[ "$2" = {fails} ] && echo "no such luck" >&2 && exit 7\n'
        '[ "$2" = venv ] && mkdir -p .venv/bin && cp "$0" .venv/bin/python; exit 0',
    )
    done = make(clone, "tune", f"PYTHON={program}")
    assert done.returncode != 0
    *_, said, line = done.stdout.splitlines()
    assert said == "no such luck"
    assert line.startswith(f"make: this step failed: {step}") and remedy in line and "setup.log" in line
    assert re.search(r"8 GB here \(\d+\.\d GB are free\) and 4 GB for pip in /\S+ \(\d+\.\d GB\);", line)
    assert (clone / ".venv" / "setup.log").read_text() == "no such luck\n"
    program = python(clone, '[ "$2" = venv ] && mkdir -p .venv/bin; cp "$0" .venv/bin/python; exit 0')
    shutil.copy(program, clone / ".venv" / "bin" / "python") if fails == "pip" else None
    again = make(clone, "tune", f"PYTHON={program}")
    assert again.returncode == 0, again
    assert ("Making" in again.stdout) == (fails == "venv")  # from where it was
