"""What a type checker sees of the package: its names, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tunegemm

RIGHT = """
import torch, tunegemm
from tunegemm import Problem, linear
x: torch.Tensor = tunegemm.matmul(torch.ones(2, 2), torch.ones(2, 2), activation="relu")
y: torch.Tensor = linear(x, x)
problem: Problem = Problem.parse("8x8x8")
"""
WRONG = {
    "tunegemm.mathmul": "import tunegemm\ntunegemm.mathmul\n",
    "from tunegemm import": "from tunegemm import mathmul\n",
    "result": "import torch, tunegemm\nx: str = tunegemm.matmul(torch.ones(1), torch.ones(1))\n",
    "keyword": "import torch, tunegemm\ntunegemm.matmul(torch.ones(1), torch.ones(1), biass=None)\n",
}


@pytest.mark.slow
def test_mypy_knows_the_names(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    for number, text in enumerate(WRONG.values()):
        (tmp_path / f"wrong{number}.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", "", "--follow-imports", "silent", "."]
    environment = {"MYPYPATH": str(Path(tunegemm.__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert "right.py" not in done.stdout, done.stdout + done.stderr
    for number, name in enumerate(WRONG):
        assert f"wrong{number}.py" in done.stdout, (name, done.stdout + done.stderr)
