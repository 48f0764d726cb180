"""Result files: rows under a `meta` that describes their origin, and the peers' table made from them.

A file holds rows of one machine state only: same GPU, driver, packages and method. A run adds to it or
replaces rows of the same problem, and writes after each, so that a run that is cut short loses nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.stale import blobs_now, hash_of, measured_by, stale
from tunegemm.describe.device import Device, TelemetryReader, package_version
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError

#: The result files: a folder for each GPU, named by `folder_of`.
RESULTS = Path(__file__).parent / "results"
#: Facts under `meta` that rows of one file must share.
SHARED = ("gpu", "driver", "packages", "method")
_KEY = (
    "m", "n", "k", "batch", "dtype", "accumulation", "layout", "epilogue", "effort", "call", "workload",
    "mode", "layers", "label", "model", "rows", "phase", "sequences", "groups", "skew", "tuned",
    "timing", "strategy", "streams", "captures",
)  # fmt: skip
_PACKAGES = (
    "tunegemm", "torch", "triton", "nvidia-cutlass-dsl", "nvmath-python", "quack-kernels",
    "nvidia-cublas", "apache-tvm-ffi",
)  # fmt: skip

#: Options that name where files go.
_PLACES = ("--out", "--database", "--scratch")


class ResultsError(TunegemmError):
    """A result file that cannot accept the rows of this run."""


def results_path(out: Path | None, device: Device, name: str) -> Path:
    """``OUT/NAME``, by default in the folder of the GPU beside this file, such as ``results/h200``."""
    return (out or folder_of(device.name)) / name


def folder_of(gpu: str) -> Path:
    """The folder of a GPU's results, by the name that its driver gives it."""
    return RESULTS / "-".join(gpu.removeprefix("NVIDIA").lower().split())


def meta(device: Device, method: str, *packages: str) -> dict[str, Any]:
    """How this run measures its rows. packages: further ones that rows depend on."""
    command = command_line(sys.argv)
    versions = {name: version for name in _PACKAGES if (version := package_version(name))}
    versions |= {"cuda": device.fingerprint.cuda, "python": platform.python_version()}
    return {
        "command": command, "code": hash_of(blobs_now(measured_by(command))),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "gpu": device.name,
        "driver": device.fingerprint.driver,
        "packages": versions | {name: package_version(name) for name in packages},
        "clocks": TelemetryReader(device.index).read(), "method": method,
    }  # fmt: skip


def command_line(arguments: list[str]) -> str:
    """The command that repeats this run, without the place of its files, which does not affect a figure."""
    program = Path(arguments[0])
    words = ["python", "-m", f"{program.parent.name}.{program.stem}"]
    rest = iter(arguments[1:])
    for word in rest:
        if word in _PLACES:
            next(rest, None)
        elif not word.startswith(tuple(f"{place}=" for place in _PLACES)):
            words.append(word)
    return " ".join(words)


def own_environment(folder: Path) -> dict[str, str]:
    """Of a process that has none of the user's data, but the same packages, in any folder."""
    paths = os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))
    return os.environ | {"XDG_DATA_HOME": str(folder / "data"), "PYTHONPATH": paths}


def problem_fields(problem: Problem) -> dict[str, Any]:
    """The columns that name a problem in every result file."""
    return {
        "m": problem.m, "n": problem.n, "k": problem.k, "batch": problem.batch,
        "dtype": problem.in_dtype, "layout": problem.layout,
    }  # fmt: skip


class Results:
    """One result file, written after every row."""

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        """Takes over the rows that the file has. Raises ResultsError when they are of another state."""
        self.path = path
        self.meta = dict(meta)
        self._begun = time.monotonic()
        self._earlier_s: float | None = 0.0
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        """Further entries of the file, beside `meta` and `rows`: at first those that it has."""
        if path.exists():
            old = _read(path)
            foreign = [name for name in SHARED if old["meta"].get(name) != self.meta.get(name)]
            if foreign:
                raise ResultsError(
                    f"{path} has rows of another {' and '.join(foreign)}; give another --out, or remove it"
                )
            self.rows = old["rows"]
            self._earlier_s = old["meta"].get("gpu_seconds")
            if self.rows and old["meta"].get("code") != self.meta.get("code"):
                self.meta.pop("code", None)  # it has rows of other code, too
            self.summary = {name: value for name, value in old.items() if name not in ("meta", "rows")}
            earlier = old["meta"].get("earlier_commands", [])
            commands = [*earlier, old["meta"].get("command", "")]
            self.meta["earlier_commands"] = [c for c in dict.fromkeys(commands) if c != self.meta["command"]]

    @classmethod
    def of(cls, out: Path | None, device: Device, name: str, method: str, *packages: str) -> Results:
        """The file NAME of a GPU, for rows that this run measures; as `meta`."""
        return cls(results_path(out, device, name), meta(device, method, *packages))

    def find(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """The row of the same problem, if there is one."""
        return next((old for old in self.rows if _key(old) == _key(row)), None)

    def put(self, *rows: dict[str, Any]) -> None:
        """Adds rows, or replaces rows of the same problems in place, and writes the file."""
        for row in rows:
            old = self.find(row)
            if old is None:
                self.rows.append(row)
            else:
                self.rows[self.rows.index(old)] = row
        if self._earlier_s is not None:
            self.meta["gpu_seconds"] = round(self._earlier_s + time.monotonic() - self._begun, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join("  " + json.dumps(row) for row in self.rows)
        summary = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in self.summary.items())
        text = f'{{"meta": {json.dumps(self.meta, indent=1)},\n{summary}"rows": [\n{lines}\n]}}\n'
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(self.path)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _KEY)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
        if not isinstance(data["rows"], list) or not isinstance(data["meta"], dict):
            raise ValueError("no rows and meta")
        return dict(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path}: not a result file ({error}); give another --out, or remove it") from None


def told(row: Mapping[str, Any]) -> str:
    """A row in one line: its words and numbers."""
    return ", ".join(f"{name} {value}" for name, value in row.items() if isinstance(value, str | int | float))


def report(
    results: Results | None, rows: Iterable[dict[str, Any]], brief: Callable[[dict[str, Any]], str] = told,
    ratios: Sequence[str] = (),
) -> int:  # fmt: skip
    """Writes each row as it comes, if there is a file, and prints it, then the mean of these of its fields.
    Returns how many rows are wrong: those that are not `right`, or that name what is `wrong`.
    """
    done, count = [], 0
    for row in rows:
        if results is not None:
            results.put(row)
        wrong = not row.get("right", True) or bool(row.get("wrong"))
        print(f"{brief(row)}{' WRONG' * wrong}", *(row.get("wrong") or ()), flush=True)
        done.append(row)
        count += wrong
    for name in ratios:
        if values := [row[name] for row in done if row.get(name)]:
            print(f"{name}: {geometric_mean(values):.3f}, least {min(values):.3f}")
    return count


def geometric_mean(values: Iterable[float]) -> float:
    """NaN for no values."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints stale files, oldest first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=main.__doc__)
    parser.add_argument(
        "--stale", action="store_true", required=True,
        help="list the published files whose code has changed since, with the command that renews each",
    )  # fmt: skip
    parser.parse_args(arguments)
    for item in stale():
        print(item)


if __name__ == "__main__":
    main()
