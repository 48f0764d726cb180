"""Lists published results that other code than today's produced: ``python -m benchmarks.results --stale``.

A result belongs to the files that its benchmark measures (`MEASURED`), by a hash of their contents. A file
without a hash in its `meta` belongs to the commit that last changed it.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

_KERNELS = ("tunegemm/generate", "search_spaces")
_CHOICES = ("tunegemm/choose", "tunegemm/model", "db/records", "db/selector.toml", "db/order.json",
            "db/predictions-h100-80gb-hbm3.jsonl", "db/predictions-h200.jsonl")  # fmt: skip
SERVED = (*_KERNELS, *_CHOICES, "tunegemm/dispatch")
_TUNED = (
    *_KERNELS, "tunegemm/compile", "tunegemm/measure", "tunegemm/model", "tunegemm/search", "tunegemm/tuning"
)  # fmt: skip
_GROUPS = ("tunegemm/generate/grouped", "tunegemm/generate/along_k", "tunegemm/generate/routing",
           "tunegemm/choose", "tunegemm/dispatch", "db/grouped.toml")  # fmt: skip
_GRAPHS, _HARNESS = "benchmarks/graphs.py", "benchmarks/harness.py"
#: Products and models, of the benchmarks that import `benchmarks.shapes`.
_LISTS = ("benchmarks/shapes.py", "benchmarks/listed.toml")
_SEARCHED = ("tunegemm/search", "tunegemm/model")
_FITTED = ("tunegemm/model", "fit/trees.py")

#: How modules of benchmarks and fits begin.
_FOLDERS = ("benchmarks.", "fit.")
#: The files and folders that each benchmark measures, besides its own file; `SERVED` for the others.
MEASURED: dict[str, tuple[str, ...]] = {
    "blocks": (*SERVED, "tunegemm/groups/scaled_groups.py", "db/block_groups.toml", _GRAPHS),
    "campaign": _TUNED, "choices": _KERNELS, "clients": (*SERVED, _HARNESS), "database": ("tunegemm/store",),
    "dtypes": _TUNED,
    "expert_layers": (*_GROUPS, _GRAPHS), "experts": (*_GROUPS, _GRAPHS), "fixed_tiles": _KERNELS,
    "joined": (*SERVED, _GRAPHS), "kind_choices": _KERNELS,
    "kinds": _FITTED, "layers": (*SERVED, _HARNESS), "llama": (*SERVED, _HARNESS), "order": _FITTED,
    "peers": _TUNED, "search": _SEARCHED,
    "vllm": (*SERVED, "benchmarks/vllm_engine.py"),
    "selector": _FITTED, "sweep": _TUNED, "tuning_many": _TUNED, "tuning_time": _TUNED,
}  # fmt: skip


@dataclass(frozen=True)
class Stale:
    """A result file whose code has changed since."""

    path: Path
    date: str
    """When it was measured."""
    command: str
    """The command that renews it: the last one that wrote it."""
    earlier: int
    """How many commands wrote others of its rows."""
    gpu_s: float | None
    """Their GPU time; None if it is unknown."""
    changed: tuple[str, ...]
    """Files that differ; empty where only the hash is known."""

    def __str__(self) -> str:
        seconds = "GPU seconds unknown" if self.gpu_s is None else f"{self.gpu_s:.0f} GPU seconds"
        more = f" (and {self.earlier} earlier commands)" if self.earlier else ""
        some = self.changed and f"{len(self.changed)} files have changed, such as {self.changed[0]}"
        files = some or "its code has changed"
        shown = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{self.date or 'no date':25}  {shown}: {files}; {seconds}\n    {self.command}{more}"


def measured_by(command: str) -> tuple[str, ...]:
    """The files that a command line measures, such as ``python -m benchmarks.peers --tune``."""
    name = next((word.split(".")[1] for word in command.split() if word.startswith(_FOLDERS)), "")
    places = [f"{folder}{name}.py" for folder in ("benchmarks/", "fit/")]
    found = (*(place for place in places if (ROOT / place).is_file()), *MEASURED.get(name, SERVED))
    programs = [ROOT / place for place in found if place.endswith(".py")]
    return (*found, *_LISTS) if any("benchmarks.shapes" in each.read_text() for each in programs) else found


def hash_of(blobs: Mapping[str, str]) -> str:
    """One for all files, by their paths and contents."""
    text = "\n".join(f"{path} {blobs[path]}" for path in sorted(blobs))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def blobs_now(places: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """The files there, each with git's hash of its content."""
    result = {}
    for place in places:
        path = root / place
        files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
        for file in files:
            if "__pycache__" not in file.parts:
                content = file.read_bytes()
                blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
                result[file.relative_to(root).as_posix()] = blob.hexdigest()
    return result


def blobs_at(commit: str, places: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """The same of a commit."""
    said = _git(root, "ls-tree", "-r", commit, "--", *places)
    lines = (line.split("\t", 1) for line in said.splitlines())
    return {path: facts.split()[2] for facts, path in lines}


def stale(folder: Path = RESULTS, root: Path = ROOT) -> list[Stale]:
    """The files of a folder whose code has changed, oldest first."""
    now: dict[tuple[str, ...], dict[str, str]] = {}
    results = []
    for path, meta in _metas(folder):
        places = measured_by(command := str(meta.get("command", "")))
        if places not in now:
            now[places] = blobs_now(places, root)
        changed: tuple[str, ...] = ()
        if "code" in meta:
            is_stale = meta["code"] != hash_of(now[places])
        else:
            commit = _git(root, "log", "-1", "--format=%H", "--", str(path)).strip()
            then = blobs_at(commit, places, root) if commit else {}
            names = sorted({*then, *now[places]})
            changed = tuple(name for name in names if then.get(name) != now[places].get(name))
            is_stale = bool(changed)
        if is_stale:
            date, earlier = str(meta.get("date", "")), len(meta.get("earlier_commands", ()))
            results.append(Stale(path, date, command, earlier, meta.get("gpu_seconds"), changed))
    return sorted(results, key=lambda result: (result.date, str(result.path)))


def _metas(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(folder.rglob("*.json*")):
        content = path.read_bytes()
        text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
        first, _ = json.JSONDecoder().raw_decode(text)  # in some files it is a line before the rows
        yield path, first.get("meta", first)


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout
