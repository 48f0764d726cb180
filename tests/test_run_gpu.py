"""What a run of tests leaves behind that is ended before its end."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import run_gpu
from tests.support import sampled
from tests.support.forks import Forks
from tests.support.kernels import take_shipped
from tests.support.processes import environment
from tests.support.summary import Summary, facts_of_checkout
from tests.support.waiting import until
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.ptxas import Resources
from tunegemm.store import packing, packs

#: A file of tests of each outcome. One is skipped, to be counted so. One hangs longer than the limit allows.
TESTS = """
import time
from pathlib import Path
import pytest
def test_passes(): pass
@pytest.mark.parametrize("n", [1, 2])
def test_fails(n): assert n == 1
@pytest.fixture
def broken(): raise OSError("no")
def test_ends_in_an_error(broken): pass
@pytest.mark.skip(reason="the summary must count it")
def test_skipped(): pass
def test_hangs():
    Path("{hangs}").touch()
    time.sleep(600)  # longer than the limit that the test gives
def test_behind_it(): pass
"""


@pytest.mark.slow
def test_the_tests_of_a_gpu_can_be_collected(forks: Forks) -> None:
    """Where there is none, a run of all tests leaves them out: here they are imported and parametrized."""
    folder = Path(__file__).parent / "gpu"
    plain = ["-q", "--collect-only", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist"]
    code = f"import pytest, sys; sys.exit(pytest.main({[*plain, str(folder)]}))"
    done = forks.run(code, cwd=folder.parents[1], env=environment())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs that file, whose limit of time comes once a test hangs; its part of the summary."""
    hangs, out = tmp_path / "hangs", tmp_path / "out"
    (tmp_path / "test_some.py").write_text(TESTS.replace("{hangs}", str(hangs)))
    Summary(out).begin(commit="abc")

    class Limited(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if hangs.exists():
                return super().wait(timeout)
            until(lambda: hangs.exists() or self.poll() is not None, seconds=150)
            if self.poll() is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Limited)
    monkeypatch.setattr(run_gpu, "_GRACE_S", 60.0)

    def run(*options: str) -> dict[str, Any]:
        own = {"TUNEGEMM_TEST_SUMMARY": str(out), "TUNEGEMM_TEST_PART": "some"}
        plain = ["-q", "-p", "tests.support.summary", "-p", "no:cacheprovider", "--timeout", "0"]
        command = [sys.executable, "-m", "pytest", *plain, *options, str(tmp_path / "test_some.py")]
        status = run_gpu.run(command, time.monotonic() + 300, own)
        assert (status is None) == (not options)
        known = json.loads((out / "summary.json").read_text())
        assert known["commit"] == "abc"
        return dict(known["parts"]["some"])

    return run


@pytest.mark.slow
def test_names_survive_the_limit_of_time(run, tmp_path: Path) -> None:
    part = run()
    file = part["not_run"][0].partition("::")[0]
    assert (part["passed"], part["failed"], part["skipped"]) == (2, 2, 1)
    assert part["failures"] == [f"{file}::test_fails[2]", f"{file}::test_ends_in_an_error (setup)"]
    assert part["not_run"] == [f"{file}::test_hangs", f"{file}::test_behind_it"]
    text = (tmp_path / "out" / "summary.txt").read_text()
    assert "commit: abc" in text and "2 passed, 2 failed, 1 skipped, 2 not run" in text
    for name in (*part["failures"], *part["not_run"]):
        assert name in text


@pytest.mark.slow
def test_processes_are_counted_together(run) -> None:
    part = run("-n", "2", "-k", "not hangs")
    assert (part["passed"], part["failed"], part["skipped"], part["not_run"]) == (3, 2, 1, [])


def test_programs_are_cases(tmp_path: Path) -> None:
    programs = {
        "a.py": "print('0 of 3\\nPASS')", "b.py": "print('PASS\\nFAIL')", "c.py": "1 / 0",
        "d.py": "print('30 comparisons, 0 differ')", "e.py": "print('30 comparisons, 10 differ')",
        "some_common.py": "1 / 0",
    }  # fmt: skip
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    cases = run_gpu.cases_in(tmp_path)
    part = run_gpu.run_cases(cases, tmp_path, time.monotonic() + 170)
    assert (part["passed"], sorted(part["failures"]), part["not_run"]) == (2, ["b.py", "c.py", "e.py"], [])
    assert Summary(tmp_path / "cases").known["parts"]["cases"] == part
    part = run_gpu.run_cases(cases, tmp_path, time.monotonic())
    assert part["not_run"] == [f"{name}.py" for name in "abcde"]
    assert Summary(tmp_path / "cases").known["parts"]["cases"] == part


def test_what_runs() -> None:
    measuring, others = run_gpu._MEASURING, run_gpu.computing()
    assert sorted([*measuring, *others]) == sorted((run_gpu.ROOT / "tests" / "gpu").glob("test_*.py"))
    files = [path.name for path in run_gpu.marked()]
    assert "test_device.py" in files and "test_problem.py" not in files and "test_edges.py" not in files
    assert set(facts_of_checkout(run_gpu.ROOT)) == {"commit", "gpu", "torch"}


def test_files_begin_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_gpu.in_processes(1) == []
    for version, more in (("3.10.1", 1), ("3.8.0", 1), ("3.7.0", 0)):
        monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
        assert run_gpu.in_processes(9)[:4] == ["-n", "9", "--dist", "loadfile"]
        assert run_gpu.in_processes(9)[4:] == ["--no-loadscope-reorder"] * more


def test_compiling_is_outside_the_timeout_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(run_gpu, "run", lambda *given: asked.append(given))
    monkeypatch.delenv("TUNEGEMM_TEST_OBJECTS", raising=False)
    run_gpu.run_pytest("some", [tmp_path], tmp_path, 0.0)
    monkeypatch.setenv("TUNEGEMM_TEST_OBJECTS", "elsewhere")
    run_gpu.run_pytest("some", [tmp_path], tmp_path, 0.0)
    assert all("timeout_func_only=true" in command for command, *_ in asked)
    folders = [environment["TUNEGEMM_TEST_OBJECTS"] for *_, environment in asked]
    assert folders == [str(tmp_path / "objects"), "elsewhere"]


def test_few_cases_have_each_two_values_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def pairs(cases: list[Any]) -> set[Any]:
        return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}

    every = [case for case in itertools.product("abc", range(4), "xy", "pq") if case[:2] != ("a", 0)]
    monkeypatch.setattr(sampled, "IS_WHOLE", False)
    few, more = sampled.covering(every), sampled.covering(every, given=every[5:9])
    assert pairs(few) == pairs(more) == pairs(every) and len(few) <= 12
    assert {*every[5:9]} < {*more} and more == sorted(more) and sampled.covering(every) == few
    monkeypatch.setattr(sampled, "IS_WHOLE", True)
    assert sampled.covering(iter(every)) == every


def test_kernels_that_ship_are_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of another build of their compiler, too; those of another version are left out."""
    here = packing.toolchain()["cutlass_dsl"]
    for there, is_taken in ((here.partition("+")[0] + "+other", True), ("1.0.0", False)):
        pack = packs.Pack(tmp_path / there, "1", {"cutlass_dsl": there}, (), is_package=True)
        scratch = pack.store.scratch()
        scratch.write_bytes(b"an object")
        pack.store.add({"tile_m": 64, "cutlass_dsl": there}, scratch, Resources(1, 0, 0))
        monkeypatch.setattr(packs, "shipped", lambda pack=pack: pack)
        store = ArtifactStore(tmp_path / f"own {there}")
        for _ in range(2):
            take_shipped(store)
            assert (store.find({"tile_m": 64, "cutlass_dsl": here}) is not None) == is_taken
    monkeypatch.setattr(packs, "shipped", lambda: None)
    take_shipped(store)
