"""`tunegemm tune --devices all` on real GPUs: with several of them by Ray, with one without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import environment
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.store import Database

pytestmark = pytest.mark.gpu

PROBLEMS = (Problem(512, 768, 1024), Problem(256, 384, 512))


@pytest.mark.timeout(300)
def test_all_gpus_of_this_host(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    shapes = [word for problem in PROBLEMS for word in ("--shape", problem.shape)]
    command = [sys.executable, "-m", "tunegemm", "tune", *shapes, "--devices", "all"]
    done = subprocess.run(
        [*command, "--trials", "6", "--db", path], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert [str(problem) for problem in PROBLEMS if f"for {problem}" not in done.stdout] == []
    with Database.open(path, create=True) as database:
        for problem in PROBLEMS:
            record = database.best(problem, find_device("cuda:0").fingerprint)
            # Beside other tests on the GPU, no kernel may win the race clearly.
            assert record is not None
