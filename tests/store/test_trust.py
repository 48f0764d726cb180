"""Objects are native code: what the store refuses to hand out, and what an import can never cause."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tunegemm
from tests.store.test_database import DEVICE, KERNEL, PROBLEM, measurement
from tests.support.processes import environment
from tests.support.syntax import nodes
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import CompilePool
from tunegemm.compile.ptxas import Resources
from tunegemm.dispatch.launchers import prepare
from tunegemm.errors import ArtifactError
from tunegemm.generate import families
from tunegemm.store import Database
from tunegemm.store.exchange import dump, load

KEY = {"family": "cute_sm90", "tile_m": 128}
PACKAGE = Path(tunegemm.__file__).parent


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    store = ArtifactStore(tmp_path / "cache")
    scratch = store.scratch()
    scratch.write_bytes(b"native code")
    store.add(KEY, scratch, Resources(128, 0, 1024))
    assert store.find(KEY) is not None
    return store


def entry_of(store: ArtifactStore, suffix: str) -> Path:
    (path,) = store.root.rglob(f"*{suffix}")
    return path


def alter(path: Path) -> None:
    path.write_bytes(b"other code!")


def truncate(path: Path) -> None:
    os.truncate(path, 3)


def let_all_write(path: Path) -> None:
    path.chmod(0o666)


def let_group_write(path: Path) -> None:
    path.chmod(0o620)


def link(path: Path) -> None:
    """To the very same bytes: their hash is right, today."""
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


class TestObjects:
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (alter, "bytes changed"), (truncate, "bytes changed"), (let_all_write, "mode 0666"),
            (let_group_write, "mode 0620"), (link, "a symbolic link"), (pipe, "not a regular file"),
            (folder, "not a regular file"),
        ],
    )  # fmt: skip
    def test_an_object_that_is_not_as_it_was_made(
        self, store: ArtifactStore, change: Callable[[Path], None], named: str
    ) -> None:
        path = entry_of(store, ".o")
        change(path)
        with pytest.raises(ArtifactError, match=named) as caught:
            store.find(KEY)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)

    @pytest.mark.parametrize("change", [let_all_write, let_group_write, link])
    def test_the_entry_that_holds_the_hash_is_checked_too(
        self, store: ArtifactStore, change: Callable[[Path], None]
    ) -> None:
        change(entry_of(store, ".json"))
        with pytest.raises(ArtifactError):
            store.find(KEY)

    @pytest.mark.parametrize("which", ["root", "shard"])
    def test_a_folder_in_which_others_may_exchange_files(self, store: ArtifactStore, which: str) -> None:
        place = store.root if which == "root" else entry_of(store, ".o").parent
        place.chmod(0o777)
        with pytest.raises(ArtifactError, match=f"{place}: writable by other users"):
            store.find(KEY)

    @pytest.mark.parametrize("suffix", [".o", ".json"])
    def test_another_users_file(
        self, store: ArtifactStore, suffix: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if os.geteuid() == 0:
            os.chown(entry_of(store, suffix), 65534, 65534)
        else:  # only root may give a file away: then we are the other user
            monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
        with pytest.raises(ArtifactError, match="owned by another user"):
            store.find(KEY)

    def test_an_object_without_an_entry_is_not_there(self, store: ArtifactStore) -> None:
        """What somebody puts into the folder was neither hash-listed nor asked for."""
        entry_of(store, ".json").unlink()
        assert store.find(KEY) is None

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"key": {}}'])
    def test_a_damaged_entry_is_a_miss(self, store: ArtifactStore, text: str) -> None:
        entry_of(store, ".json").write_text(text)
        assert store.find(KEY) is None

    @pytest.mark.parametrize("resources", [None, [], {"registers": 1}, {"warnings": None}])
    def test_damaged_resources_are_a_miss(self, store: ArtifactStore, resources: object) -> None:
        path = entry_of(store, ".json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"resources": resources}))
        assert store.find(KEY) is None

    def test_an_entry_of_another_key_is_a_miss(self, store: ArtifactStore) -> None:
        path = entry_of(store, ".json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"key": {"family": "other"}}))
        assert store.find(KEY) is None


class TestServing:
    def test_a_launcher_is_loaded_once_and_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also when all records are read anew: captured graphs may hold its code."""
        monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(tmp_path))
        family = families.get("cute_sm90")
        space = families.load_space("cute_sm90")
        candidate = next(space.launches(next(k for k in space.kernels() if family.check(PROBLEM, k, DEVICE))))
        store = ArtifactStore()
        scratch = store.scratch()
        scratch.write_bytes(b"native code")
        store.add(family.kernel_key(PROBLEM, candidate, DEVICE), scratch, Resources(128, 0, 1024))
        monkeypatch.setattr(type(family), "load", lambda *_: lambda a, b, out: None)
        with Database.open(tmp_path / "t.sqlite", create=True) as database:
            database.confirm(PROBLEM, DEVICE, measurement(1.4, candidate))
            first, second = [prepare(database.records()[0], DEVICE) for _ in range(2)]
        assert first.launch is not None and first.launch is second.launch


class TestImports:
    def test_an_imported_record_loads_no_code_before_it_is_compiled_here(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = tmp_path / "cache"
        monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(cache))
        family = families.get("cute_sm90")
        space = families.load_space("cute_sm90")
        kernel = next(k for k in space.kernels() if family.check(PROBLEM, k, DEVICE))
        candidate = next(space.launches(kernel))
        with Database.open(tmp_path / "theirs.sqlite", create=True) as theirs:
            theirs.confirm(PROBLEM, DEVICE, measurement(1.4, candidate))
            rows = list(dump(theirs))
        with Database.open(tmp_path / "ours.sqlite", create=True) as ours:
            assert load(ours, rows, origin="stranger").added == 1
            (record,) = ours.records()
        assert not cache.exists()
        monkeypatch.setattr(CompilePool, "submit", lambda *_: pytest.fail("compiled"))
        monkeypatch.setattr(type(family), "load", lambda *_: pytest.fail("loaded"))
        with pytest.raises(ArtifactError, match="not in the object store"):
            prepare(record, DEVICE)

    def test_importing_runs_no_compiler_and_no_kernel_package(self, tmp_path: Path) -> None:
        with Database.open(tmp_path / "theirs.sqlite", create=True) as theirs:
            theirs.confirm(PROBLEM, DEVICE, measurement(1.1, KERNEL))
            (tmp_path / "rows.json").write_text(
                json.dumps({"format": "tunegemm-database/1", "rows": list(dump(theirs))})
            )
        code = (
            "import sys; from tunegemm.cli.app import app\n"
            "try: app(sys.argv[1:])\n"
            "except SystemExit as end: print(end.code, sorted({'cutlass', 'triton'} & set(sys.modules)))"
        )
        arguments = ["db", "import", str(tmp_path / "rows.json"), "--db", str(tmp_path / "ours.sqlite")]
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True, text=True, env=environment(),
        )  # fmt: skip
        assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


#: Modules and functions that make code or objects of bytes.
_FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def test_nothing_stored_is_ever_unpickled_or_evaluated() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in nodes(path):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = [node.func.id] if node.func.id in ("eval", "exec", "compile", "__import__") else []
                names = [f"call:{name}" for name in names]
            elif isinstance(node, ast.Attribute):
                names = [node.attr] if node.attr in ("read_pickle", "to_pickle", "PickleType") else []
                names = [f"call:{name}" for name in names]
            found += [
                f"{path.relative_to(PACKAGE)}:{node.lineno} {name}"
                for name in names
                if name.startswith("call:") or name.partition(".")[0] in _FORBIDDEN
            ]
    # A user's epilogue runs in a process that defined it, from the source of a function of its own; the
    # database holds its name and hash only (describe/epilogue.py, `Custom`).
    # The source of an MLP's class is compiled, and never run, to see that it is the code that runs.
    own = [line for line in found if line.startswith(("describe/epilogue.py:", "layers/mlp.py:"))]
    assert sorted(line.split()[1] for line in own) == ["call:compile", "call:compile", "call:exec"]
    assert found == own
