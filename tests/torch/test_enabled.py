"""`tunegemm run` and `TUNEGEMM_ENABLE`: products of a program that nobody edited, counted and served."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.commands import here, process
from tests.support.serving import BF16, Kernel, Row, operands, serve_with
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.served import Served
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import Prepared
from tunegemm.torch import enabled, recording, takeover
from tunegemm.torch.enabled import MOST_PRODUCTS, Counts

PROGRAM = """
import gc, sys
gc.disable()  # it would search what is imported for garbage, for a fifth of the time that takes
import torch
from tunegemm.torch import takeover
print("served" if takeover.active else "torch's", sys.argv[1:], flush=True)
"""


def test_what_was_served_is_counted(
    monkeypatch: pytest.MonkeyPatch, serve, kernel: Kernel, device: Device
) -> None:
    """A product that has a record, called three times, and one that has none."""
    record = Row(Problem(32, 48, 64), device.fingerprint, ratio=1.25)
    object.__setattr__(record, "median_us", 8.0)
    served_by: Dispatcher = serve(Problem(32, 48, 64), prepare=lambda *_: Prepared(kernel, record=record))
    serve_with(monkeypatch, served_by)
    counts = Counts()
    a, b = operands()
    with takeover.begin(counts.counting):
        for _ in range(3):
            torch.mm(a, b)
        torch.mm(a[:8], b)
    torch.mm(a, b)
    assert len(kernel.calls) == 3
    found = counts.served()
    # What the stand-in of a kernel multiplies in fp32 is torch's, once a call.
    assert (found.products, found.served, found.calls, found.served_calls) == (3, 1, 7, 3)
    counts.clear()
    assert counts.served().calls == 0


def test_a_program_of_ragged_rows_is_counted_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, serve
) -> None:
    monkeypatch.setenv("TUNEGEMM_MODE", "off")
    serve_with(monkeypatch, serve())
    counts = Counts()
    a, b = torch.ones(5000, 1), torch.ones(1, 1)  # bf16 has a kernel compiled for each shape
    with takeover.begin(counts.counting):
        for _ in range(2):
            for m in range(1, 5001):
                torch.mm(a[:m], b)
    found = counts.served()
    assert found.calls == 10_000 and found.served == 0, "every call is counted"
    assert found.products == MOST_PRODUCTS + 1, "and further products as one"


def test_a_program_and_its_children_are_enabled(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    again = "if len(sys.argv) < 3: subprocess.run([sys.executable, *sys.argv, 'child'], check=True)\n"
    script.write_text(PROGRAM + "import subprocess\n" + again)
    run = process("run", "--", sys.executable, str(script), "--lr=1", cwd=tmp_path)
    assert run.stdout == "served ['--lr=1']\nserved ['--lr=1', 'child']\n"
    first, *_, last = run.stderr.splitlines()
    assert first.startswith("tunegemm: ") and "served" in last
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.slow
def test_its_exit_code_is_the_programs(tmp_path: Path) -> None:
    process("run", "--", sys.executable, "-c", "raise SystemExit(7)", cwd=tmp_path, code=7)
    run = here("run", "--", "no-such-program", cwd=tmp_path, code=2)
    assert "a script runs as: tunegemm run -- python no-such-program" in run.stderr
    assert "or --env alone" in here("run", code=2).stderr


@pytest.mark.slow
@pytest.mark.parametrize(("value", "printed"), [("1", "served"), ("0", "torch's")])
def test_the_variables_do_the_same(tmp_path: Path, value: str, printed: str) -> None:
    """Those that `run --env` prints, as a container has them; each process says what it served itself."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    exported = here("run", "--env").stdout
    assert exported.count("export ") == exported.count("\n") == 2
    run = subprocess.run(
        ["sh", "-c", f"{exported} TUNEGEMM_ENABLE={value} exec {sys.executable} train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=True, env=dict(os.environ),
    )  # fmt: skip
    assert run.stdout == f"{printed} []\n"
    assert run.stderr == "", "nothing was multiplied"


@pytest.mark.parametrize(
    ("ratio", "batch", "gains"),
    [(1.25, 1, [2.0]), (1.0, 1, []), (0.9, 1, []), (float("inf"), 1, []), (1.25, 3, [2.0])],
)
def test_what_a_call_saves(
    monkeypatch: pytest.MonkeyPatch, ratio: float, batch: int, gains: list[float]
) -> None:
    tuned = [(Problem(32, 48, 64, batch), SimpleNamespace(median_us=8.0, ratio=ratio))]
    planner = SimpleNamespace(tuned=lambda: tuned)
    monkeypatch.setattr(enabled.api, "dispatcher", SimpleNamespace(planner=planner))
    found = enabled.gains_by_place()
    lead = (batch,) if batch > 1 else ()
    assert found == {((*lead, 32, 64), (*lead, 64, 48), "bf16"): gain for gain in gains}


@pytest.mark.parametrize("calls", [0, 3])
@pytest.mark.parametrize("by_run", [True, False])
def test_a_process_says_what_it_served_or_writes_it_for_run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    calls: int,
    by_run: bool,
) -> None:
    writers: dict[str, Any] = {}
    served = Served(2, 1, calls, 1, 0.0)
    counts = SimpleNamespace(counting=None, clear=None, served=lambda: served)
    monkeypatch.setattr(enabled, "Counts", lambda: counts)
    monkeypatch.setattr(enabled, "keep_writing", lambda **given: writers.update(given))
    monkeypatch.setattr(takeover, "begin", lambda counting: None)
    monkeypatch.setenv("TUNEGEMM_ENABLE", "1")
    monkeypatch.setenv(enabled.PARTS, str(tmp_path) if by_run else "")
    enabled.serve_process()
    writers["last"]()
    files = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert files == ([asdict(served)] if by_run and calls else [])
    assert bool(capsys.readouterr().err) == bool(calls and not by_run)


def test_another_value_serves_nothing_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TUNEGEMM_ENABLE", "false")
    monkeypatch.setattr(takeover, "begin", pytest.fail)
    enabled.serve_process()
    said = "TUNEGEMM_ENABLE='false' is not known and has no effect; use 0 or 1 or unset it"
    assert capsys.readouterr().err == f"tunegemm: {said}\n"
    assert said in process("doctor", code=None).stdout


def test_a_takeover_says_what_it_is() -> None:
    assert BF16
    block = takeover.begin()
    assert "until tunegemm.disable()" in repr(block)
    takeover.disable()
    assert "ended" in repr(block)


@pytest.mark.slow
def test_processes_of_our_own_are_left_alone(tmp_path: Path) -> None:
    """Tuning in a container that serves by the variables: torch's product in a race is torch's."""
    script = tmp_path / "tune.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "from tunegemm.measure.worker import Child\n"
        "import torch\n"
        "from tunegemm.torch import takeover\n"
        "assert takeover.active, 'the program itself is served'\n"
        "before = subprocess.Popen\n"
        "def popen(*words, env, **more):\n"
        "    print(env['TUNEGEMM_ENABLE'], repr(env['TUNEGEMM_RECORD_PARTS']), flush=True)\n"
        "    return before(*words, env=env, **more)\n"
        "subprocess.Popen = popen\n"
        "with Child():\n"
        "    pass\n"
    )
    assert process("run", "--", sys.executable, str(script), cwd=tmp_path).stdout == "0 ''\n"
    exported = here("run", "--env").stdout
    command = f"{exported} exec {sys.executable} -m tunegemm record --out s.json -- {sys.executable} -c pass"
    run = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("enable", "record", "began"),
    [("1", "", "enabled"), ("0", "", ""), ("", "", ""), ("0", "parts", "parts"), ("1", "parts", "parts")],
)
def test_a_process_begins_as_its_variables_say_and_runs_the_environments_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, enable: str, record: str, began: str
) -> None:
    folder, seen, finders = Path(takeover.__file__).parent / "start", list[str](), list[str]()

    class AfterImport:
        def __init__(self, name: str, begin: Callable[[], None]) -> None:
            finders.append(name)
            begin()

    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.customized_in_a_test.append(__file__)\n")
    monkeypatch.setattr(sys, "customized_in_a_test", [], raising=False)
    monkeypatch.setattr(sys, "path", [str(folder), str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setitem(sys.modules, "after_import", SimpleNamespace(AfterImport=AfterImport))  # type: ignore[arg-type]
    monkeypatch.setattr(enabled, "serve_process", lambda: seen.append("enabled"))
    monkeypatch.setattr(recording, "record_process", seen.append)
    monkeypatch.setenv("TUNEGEMM_ENABLE", enable)
    monkeypatch.setenv("TUNEGEMM_RECORD_PARTS", record)
    runpy.run_path(str(folder / "sitecustomize.py"))
    assert seen == [began] * bool(began) and finders == ["torch"] * bool(began)
    assert sys.customized_in_a_test == [str(tmp_path / "sitecustomize.py")]  # type: ignore[attr-defined]
    (tmp_path / "sitecustomize.py").unlink()
    runpy.run_path(str(folder / "sitecustomize.py"))
    assert len(sys.customized_in_a_test) == 1, "there need be none"  # type: ignore[attr-defined]


def test_the_function_is_called_when_a_module_is_imported_and_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = Path(takeover.__file__).parent / "start" / "after_import.py"
    finder: Any = runpy.run_path(str(path))["AfterImport"]
    (tmp_path / "planted_module.py").write_text("value = 3\n")
    began: list[int] = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "planted_module", raising=False)
    own = finder("planted_module", lambda: began.append(sys.modules["planted_module"].value))
    sys.meta_path.insert(0, own)
    assert own.find_spec("another") is None
    assert importlib.util.find_spec("planted_module") is not None and began == [], "it is only looked for"
    import_module("planted_module")
    assert began == [3] and own not in sys.meta_path
    del sys.modules["planted_module"]
    assert finder("no_such_module", list).find_spec("no_such_module") is None


def test_places_of_products_name_dtypes_as_problems_do() -> None:
    shapes = torch.Size((3, 4)), torch.Size((4, 5))
    names = {
        dtype: enabled.place_of(*shapes, dtype)[2] for dtype in (torch.float32, torch.bfloat16, torch.uint8)
    }
    assert names == {torch.float32: "tf32", torch.bfloat16: "bf16", torch.uint8: "uint8"}
