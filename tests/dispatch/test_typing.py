"""What type checkers see of the package: its names, with their types, and no others."""

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

#: Right in pyright's strict mode, too, where a type that is not known is an error.
RIGHT = """
import torch
import tunegemm
from tunegemm import Candidate, Database, Device, Epilogue, Operation, Problem, TunegemmError, linear

a = torch.ones(8, 8)
c: torch.Tensor = tunegemm.matmul(a, a, bias=a[0], activation="relu", out_dtype=torch.float32)
c = linear(a, a, a[0], "gelu")
c = tunegemm.gated_linear(a, tunegemm.interleave(a, a))
c = tunegemm.addmm(a, a, a, beta=2, alpha=0.5)
c = tunegemm.baddbmm(a[None], tunegemm.bmm(a[None], a[None]), a[None])
c = tunegemm.scaled_mm(a, a, a, a, out_dtype=torch.bfloat16)
c = tunegemm.grouped_mm(a, a[None], offs=torch.ones(1, dtype=torch.int32), bias=a[0])
c = tunegemm.experts(a, a[None], a[None, :, :4], a[:, :1].long(), a[:, :1], activation="gelu")
with tunegemm.policy("deterministic", max_sms=100):
    c = tunegemm.matmul(a, a, epilogue="alpha", operands=(2.0,))
with tunegemm.enable(), tunegemm.record("x.json") as recording:
    print(recording)
tunegemm.disable()
layers: int = tunegemm.patch(torch.nn.Linear(8, 8)) + tunegemm.unpatch(torch.nn.Linear(8, 8))
print(tunegemm.explain(a, a).problem, Epilogue.parse("relu"))
with Database.open("t.sqlite", create=True) as database:
    result = tunegemm.tune("8x8x8", device="model:h200", database=database, effort="full", trials=3)
    for record in database.records():
        print(record.problem, record.ratio, record.candidate)
if result.best is not None:
    candidate: Candidate = result.best.candidate
    print(result.best.ratio, candidate.family)
device: Device = result.device
try:
    operation = Operation(Problem.from_tensors(a, a), Candidate.make("cute_sm80", {"tile_m": 1}))
    print(operation)
except TunegemmError as error:
    print(error)
"""
WRONG = {
    "tunegemm.mathmul": "import tunegemm\nprint(tunegemm.mathmul)\n",
    "from tunegemm import": "from tunegemm import mathmul\nprint(mathmul)\n",
    "result": "import torch, tunegemm\nx: str = tunegemm.matmul(torch.ones(1), torch.ones(1))\n",
    "keyword": "import torch, tunegemm\ntunegemm.matmul(torch.ones(1), torch.ones(1), biass=None)\n",
    "policy": "import tunegemm\ntunegemm.policy('fatsest')\n",
}
ROOT = Path(tunegemm.__file__).parents[1]


def mypy(folder: Path) -> set[str]:
    """Names of the files in which it finds an error.

    With the settings of `make check`, strict ones, and so with its cache: what that read of torch, a quarter
    of a minute's work, is not read again.
    """
    settings = ROOT / "pyproject.toml"
    shared = ["--config-file", str(settings), "--cache-dir", str(ROOT / ".mypy_cache")]
    alone = ["--config-file", "", "--strict"]  # of an installed package
    command = [sys.executable, "-m", "mypy", *(shared if settings.exists() else alone)]
    environment = {"MYPYPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([*command, "."], cwd=folder, capture_output=True, text=True, env=environment)
    assert "Found" in done.stdout, done.stdout + done.stderr
    return {line.partition(":")[0] for line in done.stdout.splitlines() if ": error: " in line}


def pyright(folder: Path) -> set[str]:
    """The same by pyright, or by basedpyright, whose wheel brings the Node.js that it runs in."""
    if importlib.util.find_spec("basedpyright"):
        program = [sys.executable, "-m", "basedpyright"]
    elif found := shutil.which("basedpyright") or shutil.which("pyright"):
        program = [found]
    else:
        missing = "needs basedpyright or pyright; there is none here"
        assert not os.environ.get("TUNEGEMM_CI"), missing
        pytest.skip(missing)
    config = {"extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run(
        [*program, "--outputjson", "--pythonpath", sys.executable, "."],
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert document["summary"]["filesAnalyzed"] == len(WRONG) + 1, done.stdout
    return {Path(one["file"]).name for one in document["generalDiagnostics"] if one["severity"] == "error"}


@pytest.mark.slow  # not `long`: begun later, it finds the cache that `make check` fills beside it
@pytest.mark.timeout(600)  # without a cache, beside other work, mypy took three minutes
@pytest.mark.parametrize("check", [mypy, pyright])
def test_type_checkers_know_the_names(check, tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    for number, text in enumerate(WRONG.values()):
        (tmp_path / f"wrong{number}.py").write_text(text)
    assert check(tmp_path) == {f"wrong{number}.py" for number in range(len(WRONG))}, list(WRONG)
