"""What `tunegemm doctor` finds of this host: packages, the cache, the database, settings."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.recorded import SHAPES, fill
from tunegemm.generate import families
from tunegemm.report import doctor
from tunegemm.store import Database


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The finding of that name, here, without looks at devices and families."""
    monkeypatch.setattr(doctor, "devices", list)
    monkeypatch.setattr(doctor, "families_here", list)
    return lambda name: next(check for check in doctor.examine() if check.name == name)


def test_a_cache_that_takes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[str], Any]
) -> None:
    monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert check("kernel cache").status == "ok" and not list(tmp_path.iterdir()), "nothing is left behind"
    file = tmp_path / "file"
    file.touch()
    for place in (file, Path("/proc/cache")):  # root, too, makes no files there
        monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(place))
        found = check("kernel cache")
        assert found.status == "fail" and "is not writable" in found.detail
        assert "TUNEGEMM_CACHE_DIR" in found.remedy


def test_a_database_that_takes_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[str], Any]
) -> None:
    monkeypatch.setenv("TUNEGEMM_DB", "/proc/tuning.sqlite")
    assert check("database").status == "fail"
    path = tmp_path / "tuning.sqlite"
    monkeypatch.setenv("TUNEGEMM_DB", str(path))
    assert check("database").status == "fail"
    Database.open(path, create=True).close()
    assert check("database").status == "ok"
    monkeypatch.setattr("tunegemm.store.connection.BUSY_TIMEOUT_S", 0)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert check("database").status == "fail", "reading works, writing does not"


def test_settings_of_dispatch_that_are_not_known(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[str], Any]
) -> None:
    monkeypatch.delenv("TUNEGEMM_CI", raising=False)
    assert check("dispatch").detail == "mode predict, policy fastest"
    monkeypatch.setenv("TUNEGEMM_MODE", "nera")
    monkeypatch.setenv("TUNEGEMM_POLICY", "slowest")
    found = check("dispatch")
    assert found.status == "note"
    assert "TUNEGEMM_MODE='nera' is not known" in found.detail and "'slowest'" in found.detail


def test_a_cache_that_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[str], Any]
) -> None:
    """As `find` would refuse its kernels."""
    monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(tmp_path))
    (tmp_path / "objects" / "ab").mkdir(parents=True, mode=0o700)
    (tmp_path / "objects").chmod(0o700)
    assert check("kernel cache").status == "ok"
    for folder in (tmp_path / "objects" / "ab", tmp_path / "objects"):
        folder.chmod(0o777)
        found = check("kernel cache")
        assert found.status == "fail" and "writable by other users (mode 0777)" in found.detail
        folder.chmod(0o700)


def test_every_setting_is_judged(monkeypatch: pytest.MonkeyPatch, check: Callable[[str], Any]) -> None:
    monkeypatch.setenv("TUNEGEMM_ONLINE_BUDGET", "abc")
    monkeypatch.setenv("TUNEGEMM_TEST_SAMPLE", "x")
    monkeypatch.setenv("TUNEGEMM_CACHEDIR", "/tmp")
    monkeypatch.setenv("TUNEGEMM_RECORD", "/proc/none/shapes.json")
    monkeypatch.setenv("TUNEGEMM_WORKERS", "8")
    found = check("dispatch")
    assert found.status == "note"
    for said in (
        "TUNEGEMM_ONLINE_BUDGET='abc'",
        "TUNEGEMM_TEST_SAMPLE='x' is not a number from 1",
        "did you mean TUNEGEMM_CACHE_DIR?",
        "TUNEGEMM_WORKERS is not known; known variables are TUNEGEMM_CACHE_DIR, TUNEGEMM_CHECK_GROUPS",
        "TUNEGEMM_RECORD is not",
    ):
        assert said in found.detail


def test_damaged_rows_are_counted_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[str], Any]
) -> None:
    path = fill(tmp_path / "t.sqlite", SHAPES[:1], each=7)
    monkeypatch.setenv("TUNEGEMM_DB", str(path))
    assert check("database").status == "ok"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("UPDATE measurements SET samples_us = '[]' WHERE id = 2")
        connection.execute("UPDATE measurements SET ratio = -1 WHERE id = 3")
        connection.execute("UPDATE measurements SET evidence = '[1]' WHERE id = 4")
    found = check("database")
    assert found.status == "note" and "3 damaged rows" in found.detail
    for said in ("measurements 2: samples_us", "measurements 3: ratio -1", "measurements 4: evidence"):
        assert said in found.detail
    for last, more in ((6, ""), (7, "; and 1 more")):  # five are named
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"UPDATE measurements SET samples_us = '[]' WHERE id > 4 AND id <= {last}")
        found = check("database")
        assert f"{last - 1} damaged rows" in found.detail and ("more" in found.detail) == bool(more)
        assert found.detail.endswith(more)


def test_packages_that_are_missing_are_named_with_what_installs_them(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[str], Any]
) -> None:
    assert check("packages").status == "ok" and "torch " in check("packages").detail
    version = doctor.package_version
    remedies = {"torch": "pip install torch", "optuna": "pip install 'tunegemm[tune]', to tune here"}
    for absent, remedy in remedies.items():
        monkeypatch.setattr(doctor, "package_version", lambda name, a=absent: name != a and version(name))
        found = check("packages")
        assert (found.status, found.remedy) == ("fail" if absent == "torch" else "note", remedy)
        assert found.detail.startswith(f"missing: {absent}; found: ")


@pytest.mark.parametrize("compiles", [True, False])
def test_each_family_says_what_keeps_it_from_serving(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def family(compiling: str | None, launching: str | None = None) -> Any:
        return SimpleNamespace(unavailable=lambda **given: launching if given else compiling)

    known = {"a": family(None), "b": family(None)} if compiles else {}
    known |= {"c": family("no ptxas"), "d": family("no CUDA", "no CUDA")}
    monkeypatch.setattr(families, "NAMES", tuple(known))
    monkeypatch.setattr(families, "get", known.__getitem__)
    monkeypatch.setattr(families, "unusable", lambda: ["e: broken; reinstall it"])
    monkeypatch.setattr(doctor, "lack_of", lambda name: "of Ampere" if name == "b" else "")
    found = [(check.name, check.status, check.detail) for check in doctor.families_here()]
    status = "note" if compiles else "fail"
    assert found[-3:] == [
        ("family c", status, "launches kernels from packs but cannot compile: no ptxas"),
        ("family d", status, "no CUDA"),
        ("families", "note", "e: broken"),
    ]
    assert found[:-3] == (
        [("family a", "ok", "available"), ("family b", "note", "no kernels for the GPUs here: of Ampere")]
        if compiles
        else []
    )


@pytest.mark.parametrize(
    ("refusals", "lack"),
    [((), ""), (("no TMA",), "no TMA"), (("no TMA", ""), ""), (("", "no TMA"), ""), (("one", "two"), "one")],
)
def test_a_family_lacks_what_every_gpu_here_lacks(
    refusals: tuple[str, ...], lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "cuda_device_count", lambda: len(refusals))
    monkeypatch.setattr(doctor, "find_device", lambda spec: int(spec.removeprefix("cuda:")))
    monkeypatch.setattr(families, "refusal_here", lambda family, place: refusals[place])
    assert doctor.lack_of("triton_tma") == lack
