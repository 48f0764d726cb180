"""Child processes of tests: where they find modules, and how many of them compile at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tunegemm.compile.pool import default_workers

ROOT = Path(__file__).resolve().parents[2]


def environment(checkout: Path = ROOT, **variables: str) -> dict[str, str]:
    """This process's, with a checkout before what PYTHONPATH names: packages may come through that, too."""
    path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH", "")]))
    return os.environ | variables | {"PYTHONPATH": path}


def run_interpreted(script: str) -> None:
    """Fails unless a program ends well whose Triton kernels are interpreted: none is compiled, on no GPU."""
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(TRITON_INTERPRET="1"),
    )
    assert run.returncode == 0, run.stdout + run.stderr


def loaded_after(statement: str, *arguments: str) -> set[str]:
    """Top-level and tunegemm modules in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", code, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    return set(json.loads(run.stdout.splitlines()[-1]))


def compile_workers() -> int:
    """Compile workers for one of the processes that run tests at the same time: its share of the cores. Of
    many processes only some compile at a time.
    """
    return max(1, default_workers() // min(4, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
