"""Which results are of other code than there is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import stale
from benchmarks.results import Results


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with three results of one commit, and code that changes after it."""
    for name in ("tunegemm/store/rows.py", "tunegemm/search/order.py", "benchmarks/database.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before = 1\n")
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    for name, date, command in (
        ("cpu/database.json", "2026-11-22", "python -m benchmarks.database"),
        ("h200/old.json", "2026-11-21", "python -m benchmarks.database --old"),
        ("h200/search.json", "2026-11-20", "python -m benchmarks.search"),
    ):
        path = tmp_path / "benchmarks" / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"meta": {"command": command, "date": date}, "rows": []}))
    own = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*own, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def listed(root: Path) -> list[str]:
    return [one.path.name for one in stale.stale(root / "benchmarks" / "results", root)]


def test_results_of_changed_code_are_listed_the_oldest_first(root: Path) -> None:
    assert listed(root) == []
    (root / "tunegemm" / "store" / "rows.py").write_text("after = 1\n")
    assert listed(root) == ["old.json", "database.json"], "the search does not measure it"
    (one, _) = stale.stale(root / "benchmarks" / "results", root)
    assert (one.changed, one.gpu_s) == (("tunegemm/store/rows.py",), None)
    assert "old.json: 1 files have changed" in str(one) and "GPU seconds unknown" in str(one)
    assert str(one).endswith("python -m benchmarks.database --old")
    (root / "tunegemm" / "store" / "rows.py").write_text("before = 1\n")
    (root / "tunegemm" / "store" / "new.py").touch()
    assert listed(root) == ["old.json", "database.json"]


def test_a_result_knows_its_code_and_its_seconds(root: Path) -> None:
    command = "python -m benchmarks.database"
    code = stale.hash_of(stale.blobs_now(stale.measured_by(command), root))
    path = root / "benchmarks" / "results" / "cpu" / "database.json"
    path.unlink()
    Results(path, {"command": command, "date": "2026-11-23", "code": code}).put({"m": 1})
    assert listed(root) == [], "not committed, and of the code that there is"
    (root / "benchmarks" / "database.py").write_text("after = 1\n")
    assert listed(root) == ["old.json", "database.json"]
    one = stale.stale(root / "benchmarks" / "results", root)[1]
    assert one.gpu_s is not None and one.gpu_s < 60 and "0 GPU seconds" in str(one)
    later = stale.hash_of(stale.blobs_now(stale.measured_by(command), root))
    Results(path, {"command": command, "date": "2026-11-24", "code": later}).put({"m": 2})
    assert "code" not in json.loads(path.read_text())["meta"], "it has rows of both"


def test_each_benchmark_measures_files_that_there_are() -> None:
    for name, places in stale.MEASURED.items():
        assert any((stale.ROOT / folder / f"{name}.py").is_file() for folder in ("benchmarks", "fit")), name
        assert all((stale.ROOT / place).exists() for place in places), name
    assert all((stale.ROOT / place).exists() for place in stale.SERVED)


def test_lists_belong_to_the_benchmarks_that_read_them() -> None:
    listed = "benchmarks/listed.toml"
    assert listed in stale.measured_by("python -m benchmarks.layers --rows 256")
    assert listed in stale.measured_by("python -m benchmarks.vllm"), "its engine reads them"
    assert listed not in stale.measured_by("python -m benchmarks.blocks")
