"""`tunegemm fleet work` on a real GPU: two shapes, one worker killed, another that takes over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import environment
from tests.support.waiting import until
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.store import Database
from tunegemm.store.claims import Claims, Task

pytestmark = pytest.mark.gpu

PROBLEMS = (Problem(512, 768, 1024), Problem(256, 384, 512))


def worker(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tunegemm", "fleet", "work", "--db", str(path), "--lease", "5s"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


@pytest.mark.timeout(300)
def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    path, fingerprint = tmp_path / "tuning.sqlite", find_device("cuda:0").fingerprint
    with Database.open(path) as database:
        claims = Claims(database)
        claims.add([Task(problem, trials=6) for problem in PROBLEMS])
        doomed = worker(path)
        until(lambda: claims.holdings() or doomed.poll() is not None, seconds=120)
        assert doomed.poll() is None, doomed.stderr and doomed.stderr.read()
        doomed.kill()
        doomed.communicate()
        out, err = worker(path).communicate(timeout=200)
        assert "All shapes are done." in err, err
        assert [str(problem) for problem in PROBLEMS if f"for {problem}" not in out] == []
        (progress,) = claims.progress()
        assert (progress.done, progress.failed, progress.waiting, progress.claimed) == (2, 0, 0, 0)
        for problem in PROBLEMS:
            record = database.best(problem, fingerprint)
            assert record is not None and record.confirmed
