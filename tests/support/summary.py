"""A plugin of pytest that writes what became of the tests as it goes, so that a limit of time leaves names.

``-p tests.support.summary`` with TUNEGEMM_TEST_SUMMARY, a folder: `summary.json` and `summary.txt` in it.
With TUNEGEMM_TEST_PART several runs write one summary, each its own part.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

#: Between two writings where nothing fails.
_EVERY_S = 2.0
_PARTS = ("passed", "failed", "skipped")


class Summary:
    """The file of a folder: what is known of the run, and its parts by their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self.known: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        except (OSError, ValueError):
            self.known = {"parts": {}}

    def begin(self, **facts: Any) -> None:
        """A run with these facts, of which nothing is known yet."""
        self.known = facts | {"parts": {}}
        self.write()

    def write(self) -> None:
        for name, text in (
            ("summary.json", json.dumps(self.known, indent=1) + "\n"),
            ("summary.txt", text_of(self.known)),
        ):
            part = self.folder / f".{name}"
            part.write_text(text)
            part.replace(self.folder / name)


def text_of(known: Mapping[str, Any]) -> str:
    """The summary to be read."""
    lines = [f"{name}: {value}" for name, value in known.items() if name != "parts"]
    for name, part in known["parts"].items():
        counts = ", ".join(f"{part[kind]} {kind}" for kind in _PARTS)
        lines.append(f"\n{name}: {counts}, {len(part['not_run'])} not run; {part['seconds']:.0f} s")
        lines += [f"  FAILED  {test}" for test in part["failures"]]
        lines += [f"  NOT RUN {test}" for test in part["not_run"]]
    return "\n".join(lines) + "\n"


def facts_of_checkout(root: Path) -> dict[str, str]:
    """The commit, with a mark where files differ from it, the GPU and torch's version."""

    def said(*command: str) -> str:
        try:
            ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return ran.stdout.strip() if ran.returncode == 0 else ""

    commit = said("git", "rev-parse", "HEAD") or "unknown"
    commit += " with changes" if said("git", "status", "--porcelain", "--untracked-files=no") else ""
    gpu = said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    import torch

    return {"commit": commit, "gpu": gpu.replace("\n", "; ") or "none", "torch": str(torch.__version__)}


class _Writer:
    """Writes reports of the one process that hears of all of them."""

    def __init__(self, folder: Path, part: str) -> None:
        self._summary, self._begun, self._written = Summary(folder), time.monotonic(), 0.0
        self._collected: dict[str, None] = {}
        self._finished: set[str] = set()
        self._part: dict[str, Any] = dict.fromkeys(_PARTS, 0) | {
            "seconds": 0.0, "failures": [], "not_run": []
        }  # fmt: skip
        self._summary.known["parts"][part] = self._part

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._collect(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # a file that cannot be read has no tests
            self._fail(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._fail(report.nodeid if report.when == "call" else f"{report.nodeid} ({report.when})")
        elif report.skipped:
            self._part["skipped"] += 1
        elif report.when == "call":
            self._part["passed"] += 1
        if report.when == "teardown":
            self._finished.add(report.nodeid)
            if time.monotonic() > self._written + _EVERY_S:
                self._write()

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _collect(self, ids: list[str]) -> None:
        before = len(self._collected)
        self._collected |= dict.fromkeys(ids)
        if len(self._collected) > before:
            self._write()

    def _fail(self, name: str) -> None:
        self._part["failed"] += 1
        self._part["failures"].append(name)
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        self._part["seconds"] = round(self._written - self._begun, 1)
        self._part["not_run"] = [name for name in self._collected if name not in self._finished]
        self._summary.write()


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get("TUNEGEMM_TEST_SUMMARY")
    if folder and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(Path(folder), os.environ.get("TUNEGEMM_TEST_PART", "tests")))
