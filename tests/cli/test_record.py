"""`tunegemm record` around real programs in processes of their own, and `tune --from` what it wrote."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import TUNEGEMM, here, process
from tests.support.waiting import until

PROGRAM = """
import gc, importlib.util, sys
gc.disable()  # it would search what is imported for garbage, for a fifth of the time that takes
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


def test_a_script_is_recorded_and_the_command_to_copy_is_alone_on_its_line(tmp_path: Path) -> None:
    text = "half = dict(dtype=torch.bfloat16)\n"
    text += "for n in range(1, 12):\n    torch.randn(8, 64, **half) @ torch.randn(64 * n, 64, **half).t()\n"
    text += "torch.nn.functional.linear(torch.randn(512, 4096, **half), torch.randn(6144, 4096, **half))\n"
    program = [sys.executable, script(tmp_path, PROGRAM + text), "3", "--out", "x"]
    run = process("record", "--", *program, cwd=tmp_path)
    assert run.stdout == "done __main__ ['3', '--out', 'x']\n"
    recorded = calls(tmp_path / "shapes.json")
    assert len(recorded) == 13 and recorded["8x24x16"] == 3 and sum(recorded.values()) == 15
    assert json.loads((tmp_path / "shapes.json").read_text())["program"] == program
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shapes.json", "train.py"]
    lines = run.stderr.splitlines()
    assert "13 products, 15 calls in 1 process, in shapes.json" in lines[0]
    assert lines[1:] == [
        "Tune them where they lose most:", "  tunegemm tune --from shapes.json --budget 10m"
    ]  # fmt: skip


@pytest.mark.slow
def test_its_exit_code_and_what_came_before_an_exception_and_what_has_no_kernel(tmp_path: Path) -> None:
    """And a program of products that no kernel is called for is not told to tune them."""
    more = "for _ in range(3):\n    torch.mm(a, b).addmm_(a, b)\nraise SystemExit(7)"
    failing = script(tmp_path, PROGRAM + more)
    run = process("record", "--out", "a.json", sys.executable, failing, "2", cwd=tmp_path, code=7)
    products = json.loads((tmp_path / "a.json").read_text())["products"]
    assert sorted((product["op"], product["calls"]) for product in products) == [("addmm", 3), ("mm", 5)]
    assert "2 products, 8 calls in 1 process," in run.stderr
    assert "only torch can compute 1 of them (3 calls), the first because: addmm 8x24x16: in place" in (
        run.stderr
    )
    assert "tunegemm tune --from a.json" in run.stderr
    alone = script(tmp_path, "import torch\ntorch.ones(8, 16) @ torch.ones(16, 24)\n")
    run = process("record", "--", sys.executable, alone, cwd=tmp_path)
    assert "1 product, 1 call in 1 process, in shapes.json" in run.stderr
    assert "mm 8x24x16: fp32 operands have kernels where tf32 is allowed" in run.stderr
    assert "Tune them" not in run.stderr


@pytest.mark.slow
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


COUNTING = """
import os, pathlib, signal, time, torch
log = open("heard", "a", buffering=1)
for number in map(int, pathlib.Path("numbers").read_text().split()):
    signal.signal(number, lambda number, _: print(number, file=log))
a = torch.ones(8, 8)
a @ a
open("ready", "w").close()
while not os.path.exists("end"):  # signals are what is tested: none says that this is over
    time.sleep(0.05)  # a signal also ends it
a @ a
"""
SENT = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN]


Recorded = Callable[..., subprocess.Popen[bytes]]


def heed_signals() -> None:
    """Those that whoever runs the tests may ignore, as `nohup` does: its children would inherit that."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def recorded_group(tmp_path: Path) -> Iterator[Recorded]:
    """`tunegemm record` in a process group of its own, its program ready; no process outlives a test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(text: str, folder: Path = tmp_path) -> subprocess.Popen[bytes]:
        folder.mkdir(exist_ok=True)
        run = subprocess.Popen(
            [*TUNEGEMM, "record", "--", sys.executable, script(folder, text)], cwd=folder,
            stderr=subprocess.PIPE, start_new_session=True, env=os.environ | {"TMPDIR": str(folder)},
            preexec_fn=heed_signals,
        )  # fmt: skip
        started.append(run)
        until((folder / "ready").exists)
        return run

    yield start
    for run in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


@pytest.mark.slow
def test_a_program_gets_each_signal_once_and_its_recording_is_kept(
    tmp_path: Path, recorded_group: Recorded
) -> None:
    """Those sent to the group, and those sent to `tunegemm record` alone."""
    (tmp_path / "numbers").write_text(" ".join(str(int(number)) for number in SENT))
    run, sent = recorded_group(COUNTING), []

    def heard() -> list[int]:
        return [int(line) for line in (tmp_path / "heard").read_text().split()]

    for number in SENT:
        for send in (os.killpg, os.kill):
            send(run.pid, number)
            sent.append(int(number))
            until(lambda: len(heard()) >= len(sent))
            time.sleep(0.2)  # a second delivery, which must not come, would come now
    time.sleep(1.5)  # longer than it waits to hand a signal on
    assert heard() == sent
    (tmp_path / "end").touch()
    run.communicate(timeout=120)
    assert run.returncode == 0 and calls(tmp_path / "shapes.json") == {"8x8x8": 2}


def has_written(folder: Path) -> bool:
    return any(calls(part) for part in folder.glob("tunegemm-record-*/[!.]*.json"))


@pytest.mark.slow
def test_programs_that_are_ended(tmp_path: Path, recorded_group: Recorded) -> None:
    """What was written is kept: `tunegemm record` hands on a signal that it alone gets; or a group is ended
    by one that the program does not handle, and once more while its recording is written.
    """
    ends = ((signal.SIGTERM, False), (signal.SIGHUP, True), (signal.SIGINT, True))
    folders = [tmp_path / f"{number.name} {is_to_all}" for number, is_to_all in ends]
    runs = [recorded_group(PROGRAM.replace("sys.argv[1]", "2") + WAITING, folder) for folder in folders]
    for folder, run, (number, is_to_all) in zip(folders, runs, ends, strict=True):
        until(functools.partial(has_written, folder))
        if is_to_all:
            os.killpg(run.pid, number)
            for _ in range(20):
                if run.poll() is not None:
                    break
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.pid, number)
                time.sleep(0.05)  # signals that come too close are one
        else:
            run.send_signal(number)
        run.communicate(timeout=120)
        # The program's code (Python's own after SIGINT is 130), unless all was written when the last came.
        assert run.returncode in ((128 + number, -number) if is_to_all else (128 + number,))
        assert calls(folder / "shapes.json") == {"8x24x16": 2}
        assert not [path for path in folder.iterdir() if path.name.startswith("tunegemm-record-")]


WAITING = "open('ready', 'w').close(); import signal; signal.alarm(100); signal.pause()"


def test_without_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.mkdtemp", none)
    assert "TMPDIR" in here("record", "true", code=2, cwd=tmp_path).stderr


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.was_customized = True\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    program = [sys.executable, "-c", "import sys; print(sys.was_customized, 'torch' in sys.modules)"]
    run = process("record", "--", *program, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    assert run.stdout == "True False\n"
    assert "recorded nothing" in run.stderr and not (tmp_path / "shapes.json").exists()


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
    assert calls(Path(told.strip().rpartition(" are in ")[2])) == {"8x24x16": 3}, told
    told = here("record", "--out", "taken", "--", "touch", "ran", code=2, cwd=tmp_path).stderr
    assert "Is a directory; give a file in it" in told and not (tmp_path / "ran").exists()
    assert "folder does not exist" in here("record", "--out", "no/x", "true", code=2, cwd=tmp_path).stderr


def test_what_a_command_reads_is_not_written_over(tmp_path: Path) -> None:
    program = script(tmp_path, PROGRAM)
    for words in (
        ("record", "--out", program, "--", sys.executable, program, "1"),
        ("pack", "--from", program, "--out", program),
    ):
        before = Path(program).read_bytes()
        assert "this command reads it" in here(*words, code=2).stderr
        assert Path(program).read_bytes() == before


class TestTuneFrom:
    @pytest.fixture
    def shapes(self, tmp_path: Path) -> str:
        from tunegemm.describe.workload import Product, Workload
        from tunegemm.describe.workload.products import Kind

        kind = Kind(4096, 4096, 4096, 1, "bf16", "bf16", "k", "k", "n", 16)
        small = Kind(512, 6144, 4096, 1, "bf16", "bf16", "k", "k", "n", 16)
        in_place = replace(small, op="addmm", bias="matrix", refusal="in place, as none is served")
        fp32 = Kind(64, 64, 64, 1, "fp32", "fp32", "k", "k", "n", 16)
        path = tmp_path / "shapes.json"
        products = (
            Product(kind, 10, timed=10, median_us=200.0), Product(small, 1000), Product(fp32, 5),
            Product(in_place, 9),
        )  # fmt: skip
        Workload(products).write(path)
        return str(path)

    #: The recorded times of a library: nothing is compiled.
    OPTIONS = ("--device", "replay:h200", "--families", "cublaslt", "--trials", "3")

    @pytest.mark.slow
    def test_the_most_headroom_first(self, shapes: str) -> None:
        run = here("tune", "--from", shapes, *self.OPTIONS)
        first, second = run.stderr.splitlines()
        assert first.startswith("[1/2] 512x6144x4096 bf16 tn x 1000 · quick · ")
        assert second.startswith("[2/2] 4096x4096x4096 bf16 tn x 10 · quick · ") and "x torch.mm" in second
        assert (
            "Expected saving: " in run.stdout and "replayed, not measured here; nothing stored" in run.stdout
        )
        assert "Left out: addmm 512x6144x4096: in place, as none is served" in run.stdout
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

    @pytest.mark.slow
    def test_json(self, shapes: str) -> None:
        run = here("tune", "--from", shapes, *self.OPTIONS, "--json")
        documents = [json.loads(line) for line in run.stdout.splitlines()]
        assert [document["calls"] for document in documents] == [1000, 10]
        assert all(document["saving_s"] >= 0 for document in documents)
        assert run.stderr == ""

    @pytest.mark.slow
    def test_a_modelled_device_saves_nothing(self, shapes: str) -> None:
        briefly = ("--families", "triton_tma", "--workers", "1", "--trials", "1")
        run = here("tune", "--from", shapes, "--device", "model:h200", *briefly)
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
