"""Type checkers know the names of the package: pyright here, mypy in `make check`, of one file."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tunegemm

ROOT = Path(tunegemm.__file__).parents[1]


def pyright() -> list[str]:
    """The program, or basedpyright's, whose wheel brings the Node.js that it runs in."""
    if importlib.util.find_spec("basedpyright"):
        return [sys.executable, "-m", "basedpyright"]
    if found := shutil.which("basedpyright") or shutil.which("pyright"):
        return [found]
    missing = "needs basedpyright or pyright; there is none here"
    assert not os.environ.get("TUNEGEMM_CI"), missing
    pytest.skip(missing)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pyright_knows_the_names(tmp_path: Path) -> None:
    text = Path(__file__).with_name("typed.py").read_text()
    (tmp_path / "typed.py").write_text(text)
    assert text.count("# type: ignore") == 5
    config = {
        "extraPaths": [str(ROOT)], "typeCheckingMode": "strict", "enableTypeIgnoreComments": True,
        "reportUnnecessaryTypeIgnoreComment": "error",
    }  # fmt: skip
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run(
        [*pyright(), "--outputjson", "--pythonpath", sys.executable, "."],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert document["summary"]["filesAnalyzed"] == 1, done.stdout
    assert not [one for one in document["generalDiagnostics"] if one["severity"] == "error"], done.stdout
