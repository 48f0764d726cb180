"""What ``make test-gpu`` runs: the tests of a GPU, within a limit of time, and their summary.

First what measures, one test at a time; then what only computes, in many processes, a file in each. Beside
these run the programs of a folder given by ``--cases``, which print PASS last, or how many results differ.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.summary import Summary, facts_of_checkout, text_of

ROOT = Path(__file__).parent.parent
_GPU = ROOT / "tests" / "gpu"
_MEASURING = (_GPU / "test_feedback.py", _GPU / "test_measure.py")
#: Of the others those that take longest, by what they compile, tune or start: they begin first.
_LONGEST = (
    "sanitizer", "conformance", "bounds", "threads", "fused", "torch", "dispatch", "batch_invariance",
    "epilogue", "dtypes", "groups", "joined", "cute_sm80", "as_torch", "device_layer", "skinny", "edges",
    "splits", "layers", "groups_as_torch", "cluster", "triton",
)  # fmt: skip
#: Before the limit pytest is interrupted, so that it says what was going on.
_GRACE_S = 10.0
#: What a case may take: some compile kernels, beside all other processes.
_CASE_S = 180.0
_CASES_AT_ONCE = 4
_PASSED = re.compile(r"PASS\b|.*\b0 differ$")


def main(arguments: Sequence[str] | None = None) -> int:
    """The status to exit with: 0 where everything ran and nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "test-gpu")
    parser.add_argument("--workers", type=int, default=9, help="processes that compute at once")
    parser.add_argument("--limit", type=float, default=590.0, help="seconds that all may take")
    parser.add_argument("--cases", type=Path, help="a folder of programs that print PASS or FAIL last")
    given = parser.parse_args(arguments)
    end = time.monotonic() + given.limit
    Summary(given.out).begin(**facts_of_checkout(ROOT), begun=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    run_pytest("measuring", [*_MEASURING, *marked()], given.out, end)
    with ThreadPoolExecutor(1) as beside:
        cases = beside.submit(run_cases, cases_in(given.cases), given.out, end) if given.cases else None
        run_pytest("computing", computing(), given.out, end, *in_processes(given.workers))
    summary = Summary(given.out)
    if cases is not None:
        summary.known["parts"]["cases"] = cases.result()
        summary.write()
    known = summary.known
    print(text_of(known), f"in {given.out}/summary.json and summary.txt", sep="")
    return int(any(part["failures"] or part["not_run"] for part in known["parts"].values()))


def marked() -> list[Path]:
    """Files elsewhere that have tests of a GPU; the others' packages may not be installed."""
    found = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if _GPU not in path.parents)
    return [path for path in found if "pytest.mark.gpu" in path.read_text()]


def computing() -> list[Path]:
    """The files of tests/gpu that do not measure, in the order in which they begin."""
    first = [_GPU / f"test_{name}.py" for name in _LONGEST]
    return [*first, *sorted({*_GPU.glob("test_*.py")}.difference(first, _MEASURING))]


def in_processes(count: int) -> list[str]:
    """Options of pytest: a file in each process, in their order. An older xdist begins with most tests."""
    if importlib.util.find_spec("xdist") is None or count < 2:
        return []
    major, minor = map(int, importlib.metadata.version("pytest-xdist").split(".")[:2])
    keeps_order = ["--no-loadscope-reorder"] if (major, minor) >= (3, 8) else []
    return ["-n", str(count), "--dist", "loadfile", *keeps_order]


def run_pytest(part: str, paths: Sequence[Path], out: Path, end: float, *options: str) -> None:
    """One run of pytest, which writes its part of the summary."""
    plain = ["-q", "-m", "gpu", "-p", "tests.support.summary", *options]
    if importlib.util.find_spec("pytest_timeout") is None:  # then its option is not known, which is an error
        plain += ["-o", "addopts=-rs --strict-markers --import-mode=importlib"]
    else:  # a module's kernels, which its fixtures compile, may take longer than a test
        plain += ["-o", "timeout_func_only=true"]
    ran = run([sys.executable, "-m", "pytest", *plain, *map(str, paths)], end, {
        "TUNEGEMM_TEST_SUMMARY": str(out), "TUNEGEMM_TEST_PART": part,
        "TUNEGEMM_TEST_OBJECTS": os.environ.get("TUNEGEMM_TEST_OBJECTS", str(out / "objects")),
    })  # fmt: skip
    summary = Summary(out)
    if part not in summary.known["parts"]:
        empty = {"passed": 0, "failed": 1, "skipped": 0, "seconds": 0.0, "not_run": []}
        summary.known["parts"][part] = empty | {"failures": [f"pytest ended with {ran} before any test"]}
    if ran is None:
        summary.known["parts"][part]["limit"] = "the limit of time ended it"
    summary.write()


def cases_in(folder: Path) -> list[Path]:
    """The programs of a folder."""
    return sorted(path for path in folder.glob("*.py") if not path.stem.endswith("_common"))


def run_cases(cases: Sequence[Path], out: Path, end: float) -> dict[str, Any]:
    """Their part of the summary, which out/cases keeps meanwhile: pytest writes the other. Each program is a
    process of its own, so that one that faults takes nothing along.
    """
    part: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "failures": []}
    part["not_run"] = [case.name for case in cases]
    begun, summary, lock = time.monotonic(), Summary(out / "cases"), threading.Lock()
    summary.begin(cases=len(cases))
    summary.known["parts"]["cases"] = part
    summary.write()

    def run_case(case: Path) -> None:
        if time.monotonic() > end - _GRACE_S:
            return
        log = out / "cases" / f"{case.stem}.log"
        run([sys.executable, str(case)], min(end, time.monotonic() + _CASE_S), {}, log)
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        has_failed = not last or not _PASSED.match(last[0])
        with lock:
            part["not_run"].remove(case.name)
            part["failed" if has_failed else "passed"] += 1
            part["failures"] += [case.name] * has_failed
            part["seconds"] = round(time.monotonic() - begun, 1)
            summary.write()

    with ThreadPoolExecutor(_CASES_AT_ONCE) as pool:
        list(pool.map(run_case, cases))
    return part


def run(
    command: Sequence[str], end: float, environment: dict[str, str], log: Path | None = None
) -> int | None:
    """The status of a command, which is ended, with all that it began, at a time; None then. log: what gets
    its output."""
    own = os.environ | environment
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), own.get("PYTHONPATH"))))
    with (
        contextlib.nullcontext() if log is None else log.open("w") as output,
        subprocess.Popen(
            command, cwd=ROOT, env=own, start_new_session=True, stdout=output, stderr=output
        ) as process,
    ):
        try:
            return process.wait(max(0.1, end - _GRACE_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            return None
        finally:  # with what it has begun, also where this process is interrupted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
