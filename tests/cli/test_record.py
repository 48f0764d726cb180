"""`tunegemm record` around real programs in processes of their own, and `tune --from` what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import TUNEGEMM, here, process
from tests.support.waiting import until
from tunegemm.describe.device import cuda_device_count

PROGRAM = """
import importlib.util, sys
assert importlib.util.find_spec("torch") is not None  # as libraries do to see what is installed
import torch
a, b = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(16, 24, dtype=torch.bfloat16)
for _ in range(int(sys.argv[1])):
    a @ b
print("done", __name__, sys.argv[1:], flush=True)
"""


def calls(path: Path) -> dict[str, int]:
    products = json.loads(path.read_text())["products"]
    return {f"{p['m']}x{p['n']}x{p['k']}": p["calls"] for p in products}


def script(folder: Path, text: str = PROGRAM) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def test_a_script(tmp_path: Path) -> None:
    program = [sys.executable, script(tmp_path), "3", "--out", "x"]
    run = process("record", "--", *program, cwd=tmp_path)
    assert run.stdout == "done __main__ ['3', '--out', 'x']\n"
    assert "1 product, 3 calls in 1 process, in shapes.json" in run.stderr
    assert calls(tmp_path / "shapes.json") == {"8x24x16": 3}
    assert json.loads((tmp_path / "shapes.json").read_text())["program"] == program
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shapes.json", "train.py"]


def test_its_exit_code_and_what_came_before_an_exception(tmp_path: Path) -> None:
    failing = script(tmp_path, PROGRAM + "raise SystemExit(7)")
    process("record", "--out", "a.json", sys.executable, failing, "2", cwd=tmp_path, code=7)
    assert calls(tmp_path / "a.json") == {"8x24x16": 2}


def test_processes_of_a_shell(tmp_path: Path) -> None:
    """Not a Python program: whatever Python it starts is recorded, forked children of it, too."""
    forking = script(
        tmp_path,
        PROGRAM
        + "import multiprocessing as mp\n"
        + "def child():\n    torch.mm(b.t(), a.t())\n"
        + "p = mp.get_context('fork').Process(target=child); p.start(); p.join(); assert p.exitcode == 0\n",
    )
    command = f"{sys.executable} {forking} 2; exec {sys.executable} {forking} 5"
    run = process("record", "--", "sh", "-c", command, cwd=tmp_path)
    assert calls(tmp_path / "shapes.json") == {"8x24x16": 7, "24x8x16": 2}
    assert "in 4 processes" in run.stderr


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    """What was written before SIGTERM is kept; `tunegemm record` hands the signal on."""
    waiting = script(tmp_path, PROGRAM + "import signal; signal.alarm(100); signal.pause()")
    process = subprocess.Popen(
        [*TUNEGEMM, "record", "--", sys.executable, waiting, "2"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline().startswith("done")
    until(lambda: any(calls(part) for part in tmp_path.glob("tunegemm-record-*/[!.]*.json")))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert calls(tmp_path / "shapes.json") == {"8x24x16": 2}


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.was_customized = True\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    program = [sys.executable, "-c", "import sys; print(sys.was_customized, 'torch' in sys.modules)"]
    run = process("record", "--", *program, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    assert run.stdout == "True False\n"
    assert "nothing recorded" in run.stderr and not (tmp_path / "shapes.json").exists()


def test_bad_input(tmp_path: Path) -> None:
    assert (
        "a script runs as: tunegemm record -- python train.py"
        in here("record", "train.py", code=2, cwd=tmp_path).stderr
    )
    # As on a full disk, its file cannot be written at the end.
    program = [sys.executable, "-c", "import os, runpy, sys; os.mkdir('taken'); del sys.argv[0]; "
               "runpy.run_path(sys.argv[0])", script(tmp_path), "3"]  # fmt: skip
    beside = {"cwd": tmp_path, "env": os.environ | {"TMPDIR": str(tmp_path)}}
    told = process("record", "--out", "taken", "--", *program, code=2, **beside).stderr
    assert calls(Path(told.strip().rpartition(" is in ")[2])) == {"8x24x16": 3}, told
    told = here("record", "--out", "taken", "--", "touch", "ran", code=2, cwd=tmp_path).stderr
    assert "Is a directory; name a file in it" in told and not (tmp_path / "ran").exists()
    assert "folder does not exist" in here("record", "--out", "no/x", "true", code=2, cwd=tmp_path).stderr


class TestTuneFrom:
    @pytest.fixture
    def shapes(self, tmp_path: Path) -> str:
        from tunegemm.describe.workload import Product, Workload
        from tunegemm.describe.workload.products import Kind

        kind = Kind(4096, 4096, 4096, 1, "bf16", "bf16", "k", "k", "n", 16)
        small = Kind(512, 6144, 4096, 1, "bf16", "bf16", "k", "k", "n", 16, "addmm", "matrix")
        fp32 = Kind(64, 64, 64, 1, "fp32", "fp32", "k", "k", "n", 16)
        path = tmp_path / "shapes.json"
        products = Product(kind, 10, timed=10, median_us=200.0), Product(small, 1000), Product(fp32, 5)
        Workload(products).write(path)
        return str(path)

    OPTIONS = ("--device", "replay:h200", "--families", "cute_sm90", "--workers", "1", "--trials", "3")

    @pytest.mark.slow
    def test_the_most_headroom_first(self, shapes: str) -> None:
        run = here("tune", "--from", shapes, *self.OPTIONS)
        first, second = run.stderr.splitlines()
        assert first.startswith("[1/2] 512x6144x4096 bf16 tn x 1000 · quick · ")
        assert second.startswith("[2/2] 4096x4096x4096 bf16 tn x 10 · quick · ") and "x torch.mm" in second
        assert (
            "Expected saving: " in run.stdout and "replayed, not measured here; nothing stored" in run.stdout
        )
        assert "512x6144x4096 bf16 tn +" in run.stdout and "tuned as the plain product" in run.stdout
        assert "Left out: mm 64x64x64: input dtype 'fp32' has no kernels" in run.stdout

    def test_a_budget_that_ends(self, shapes: str) -> None:
        run = here("tune", "--from", shapes, *self.OPTIONS, "--budget", "0.001", code=1)
        assert len(run.stderr.splitlines()) == 1
        assert "not reached" in run.stdout

    @pytest.mark.slow
    def test_replayed_times_get_no_second_pass(self, shapes: str) -> None:
        """Nothing of them is stored, however much of the budget is left."""
        run = here("tune", "--from", shapes, *self.OPTIONS, "--budget", "10m")
        passes = [line.split(" · ")[1] for line in run.stderr.splitlines()]
        assert passes == ["quick", "quick"]

    def test_what_no_memory_holds_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "shapes.csv"
        path.write_text("GemmTunableOp_BFloat16_TN,tn_200000_200000_200000_ld_200000_200000_200000\n")
        run = here("tune", "--from", str(path), "--device", "model:h200", code=1)
        assert "Left out: 200000x200000x200000 bf16 tn: operands and output of 240 GB > 141 GB" in run.stdout

    def test_json(self, shapes: str) -> None:
        run = here("tune", "--from", shapes, *self.OPTIONS, "--json")
        documents = [json.loads(line) for line in run.stdout.splitlines()]
        assert [document["calls"] for document in documents] == [1000, 10]
        assert all(document["saving_s"] >= 0 for document in documents)
        assert run.stderr == ""

    @pytest.mark.slow
    def test_a_modelled_device_saves_nothing(self, shapes: str) -> None:
        run = here(
            "tune", "--from", shapes, "--device", "model:h200", "--families", "cute_sm90", "--trials", "2"
        )
        assert "Expected saving" not in run.stdout
        assert "~" in run.stdout and "estimated from the roofline" in run.stdout

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ((), "give either --shape or --from"),
            (("--from", "x", "--shape", "8x8x8"), "give either --shape or --from"),
            (("--from", "x", "--layout", "tt"), "--layout with --from"),
            (("--from", "x", "--with-backward"), "--with-backward with --from"),
            (("--from", "x"), "x: No such file"),
        ],
    )
    def test_bad_input(self, arguments: tuple[str, ...], named: str) -> None:
        assert named in here("tune", *arguments, code=2).stderr


def test_it_ends_with_the_costliest_products_and_what_is_known_of_them(tmp_path: Path) -> None:
    """Ten of twelve; of the one that ships a record its ratio; the command to copy alone on its line."""
    text = "import torch\nhalf = dict(dtype=torch.bfloat16)\n"
    text += "for n in range(1, 12):\n    torch.randn(8, 64, **half) @ torch.randn(64 * n, 64, **half).t()\n"
    text += "torch.nn.functional.linear(torch.randn(512, 4096, **half), torch.randn(6144, 4096, **half))\n"
    run = process("record", "--", sys.executable, script(tmp_path, text), cwd=tmp_path)
    lines = run.stderr.splitlines()
    assert "12 products, 12 calls in 1 process" in lines[0]
    assert "10 costliest" in lines[1]
    rows = [line for line in lines if " bf16 tn " in line]
    assert len(rows) == 10 and "512x6144x4096" in rows[0]
    if not cuda_device_count():
        assert "x torch.mm" in rows[0] and "none" in rows[1]
    assert lines[-1] == "  tunegemm tune --from shapes.json --budget 10m"
