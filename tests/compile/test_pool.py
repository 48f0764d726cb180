"""The compile pool with real workers: what one candidate breaks, only that candidate pays for."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.support.processes import environment
from tests.support.waiting import until
from tunegemm.compile.artifacts import ArtifactStore, digest
from tunegemm.compile.pool import WORKER_BYTES, CompilePool, Ready, Urgency, default_workers
from tunegemm.compile.worker import one_line
from tunegemm.errors import ArtifactError, CompileError
from tunegemm.store.packs import Pack

PLANTED = "tests.support.planted.compile_families"


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "cache")


def key(name: str, what: str = "fine") -> dict[str, str | int | bool]:
    return {"name": name, "what": what}


def test_a_crash_a_hang_and_an_error_cost_one_candidate_each(store: ArtifactStore) -> None:
    with CompilePool(store, workers=2, timeout_s=3.0, families_module=PLANTED) as pool:
        futures = {
            what: pool.submit("planted", key(what, what))
            for what in ("fine", "abort", "leave", "hang", "raise", "spill", "warn", "print")
        }
        others = [pool.submit("planted", key(f"other{i}")) for i in range(8)]
        results = {what: future.result() for what, future in futures.items()}
        assert all(future.result().artifact for future in others)
    assert results["fine"].artifact is not None
    assert results["print"].artifact is not None
    assert results["abort"].failure == "the compiler aborted by SIGABRT"
    assert results["leave"].failure == "the compiler ended with exit code 0"
    assert results["hang"].failure == "compile took longer than 3 s"
    assert results["raise"].failure == "ValueError: refuses: fatal register shortage"
    assert results["spill"].failure == "spills 64 B to local memory"
    assert results["warn"].failure == "ptxas warns C7510"


def test_objects_and_refusals_are_answered_from_the_store(store: ArtifactStore) -> None:
    with CompilePool(store, workers=1, families_module=PLANTED) as pool:
        first = pool.submit("planted", key("a")).result()
        pool.submit("planted", key("b", "abort")).result()
    with CompilePool(store, workers=1, families_module="no.such.module") as pool:
        again = pool.submit("planted", key("a")).result()
        refused = pool.submit("planted", key("b", "abort")).result()
    assert pool.compiled == 0 and again.artifact == first.artifact
    assert refused.failure == "the compiler aborted by SIGABRT"


@pytest.mark.parametrize(
    "what",
    ["memory", "import", *(f"errno {n}" for n in (errno.ENOMEM, errno.EMFILE, errno.EAGAIN, errno.ENOENT))],
)
def test_what_the_machine_lacked_is_no_failure_of_the_candidate(store: ArtifactStore, what: str) -> None:
    """Nor for a pool that goes on: asked again, it compiles again."""
    with CompilePool(store, workers=1, families_module=PLANTED) as pool:
        first = pool.submit("planted", key("a", what))
        assert first.result().failure and first.result().is_transient
        assert pool.submit("planted", key("b")).result().artifact is not None, "by a worker of its own"
        again = pool.submit("planted", key("a", what))
        assert again is not first and again.result().failure
    assert store.failure(key("a", what)) is None


def test_a_fault_of_the_code_around_kernels_is_not_remembered_of_one(store: ArtifactStore) -> None:
    """No kernel's key changes when its author mends it: it failed until somebody emptied the cache."""
    with CompilePool(store, workers=1, families_module=PLANTED) as pool:
        result = pool.submit("own", key("a", "raise")).result()
    assert result.is_transient and store.failure(key("a", "raise")) is None
    assert re.match(r"own's own code failed at compile_families.py:\d+: ValueError: refuses", result.failure)


def test_a_worker_for_which_there_is_no_memory(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with CompilePool(store, workers=1, families_module=PLANTED) as pool:
        with monkeypatch.context() as short:
            short.setattr(subprocess, "Popen", refuse)
            result = pool.submit("planted", key("a")).result()
        assert result.is_transient and "Cannot allocate memory" in result.failure
        assert pool.submit("planted", key("a")).result().artifact is not None
    assert not [*store.root.glob("new-*")]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_an_object_that_cannot_be_written_ends_the_search(store: ArtifactStore, number: int) -> None:
    what = f"errno {number}"
    with (
        CompilePool(store, workers=1, families_module=PLANTED) as pool,
        pytest.raises(ArtifactError, match=f"{os.strerror(number)}.*TUNEGEMM_CACHE_DIR"),
    ):
        pool.submit("planted", key("a", what)).result()
    assert store.failure(key("a", what)) is None


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFBIG, errno.ENOENT])
def test_a_transient_failure_that_an_older_release_remembered_is_forgotten(
    store: ArtifactStore, number: int
) -> None:
    store.add_failure(key("a"), one_line(OSError(number, os.strerror(number))))
    with CompilePool(store, workers=1, families_module=PLANTED) as pool:
        assert pool.submit("planted", key("a")).result().artifact is not None


def test_what_is_shipped_is_not_compiled_again(store: ArtifactStore, tmp_path: Path) -> None:
    """By whatever compilers it was: those of a user's machine are seldom the package's."""
    here, there = {"compiler": "here"}, {"compiler": "there"}
    shipped = Pack(tmp_path / "shipped", "0.1", there, ())
    with CompilePool(shipped.store, workers=1, families_module=PLANTED) as pool:
        theirs = pool.submit("planted", key("a") | there).result()
    a, b = key("a") | here, key("b") | here
    with CompilePool(store, workers=1, families_module=PLANTED, shipped=shipped) as pool:
        assert a in pool.ready() and b not in pool.ready()
        found = pool.submit("planted", a).result()
        pool.submit("planted", b).result()
        assert a in pool.ready() and b in pool.ready() and pool.compiled == 1
    assert found.artifact == theirs.artifact
    assert store.names() == {digest(b)}
    # One's own comes first, and without a shipped one it is compiled.
    with CompilePool(store, workers=1, families_module=PLANTED) as pool:
        assert a not in pool.ready()
        own = pool.submit("planted", a).result()
        assert a in pool.ready()
    assert own.artifact is not None and theirs.artifact is not None
    with CompilePool(store, workers=1, families_module=PLANTED, shipped=shipped) as pool:
        first = pool.submit("planted", a).result()
    assert first.artifact is not None and first.artifact.path == own.artifact.path != theirs.artifact.path


def test_a_time_out_is_tried_again(store: ArtifactStore) -> None:
    with CompilePool(store, workers=1, timeout_s=1.0, families_module=PLANTED) as pool:
        pool.submit("planted", key("slow", "hang")).result()
    assert store.failure(key("slow", "hang")) is None


def test_equal_keys_are_compiled_once(store: ArtifactStore) -> None:
    with CompilePool(store, workers=1, families_module=PLANTED) as pool:
        assert pool.submit("planted", key("a")) is pool.submit("planted", key("a"))


def _begun(store: ArtifactStore) -> list[str]:
    """Names of the kernels of a store, in the order in which they were added."""
    entries = sorted(store.root.glob("??/*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(path.read_text())["key"]["name"] for path in entries]


def test_what_is_urgent_passes_what_waits(store: ArtifactStore) -> None:
    """What becomes urgent, too; and each is compiled once."""
    with CompilePool(store, workers=1, families_module=PLANTED) as pool:
        first = pool.submit("planted", key("first", "print"))
        asked = {"next": Urgency.NEXT, "idle": Urgency.IDLE, "may": Urgency.IDLE, "now": Urgency.NOW}
        futures = [pool.submit("planted", key(name), urgency=how) for name, how in asked.items()]
        assert pool.submit("planted", key("may")) is futures[2]
        assert pool.submit("planted", key("next"), urgency=Urgency.IDLE) is futures[0], "it stays what it was"
        assert all(future.result().artifact for future in [first, *futures])
        assert pool.compiled == 5
    names = _begun(store)
    assert sorted(names) == ["first", "idle", "may", "next", "now"]
    names.remove("first")  # a worker takes a while to start: it may have been begun last
    assert names == ["now", "may", "next", "idle"]


def test_what_may_be_wanted_is_dropped_and_what_will_be_is_not(store: ArtifactStore) -> None:
    with CompilePool(store, workers=1, timeout_s=600, families_module=PLANTED) as pool:
        hanging = pool.submit("planted", key("first", "hang"))
        until(lambda: hanging.running())
        will, may = (pool.submit("planted", key(how.name), urgency=how) for how in Urgency if how)
        pool.drop_waiting(least=Urgency.IDLE)
        assert may.cancelled() and not will.cancelled()
        assert pool.submit("planted", key("IDLE")) is not may, "asked for again, it is a new job"
        pool.drop_waiting()
        assert will.cancelled() and hanging.running()


def test_closing_ends_workers_that_hang_and_leaves_no_file(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    started = time.monotonic()
    with CompilePool(store, workers=1, timeout_s=600, families_module=PLANTED) as pool:
        future = pool.submit("planted", key("slow", "hang"))
        until(lambda: any(path.stat().st_size for path in store.root.glob("new-*/*.o")))  # it hangs
    assert time.monotonic() - started < 20
    assert future.result().artifact is None
    assert store.failure(key("slow", "hang")) is None, "Ctrl-C says nothing of the kernel"
    assert not [*store.root.iterdir(), *temporary.iterdir()]


def test_what_killed_processes_left_is_deleted_when_it_is_old(store: ArtifactStore) -> None:
    of_another = store.scratch().parent
    folder, file = store.root / "new-folder", store.root / "new-file.o"
    (folder / "dumps").mkdir(parents=True)
    for path in (folder / "dumps" / "log", file, of_another / "log"):
        path.write_text("")
    for path in (folder, file):
        os.utime(path, times=(time.time() - 25 * 3600,) * 2)
    ours = store.scratch().parent
    assert {*store.root.iterdir()} == {of_another, ours}


def test_a_closed_pool_takes_no_job(store: ArtifactStore) -> None:
    with CompilePool(store, workers=1, families_module=PLANTED) as pool:
        waiting = [pool.submit("planted", key(name, "hang")) for name in ("a", "b")]
    assert waiting[1].cancelled()
    with pytest.raises(CompileError, match="closed"):
        pool.submit("planted", key("c"))


#: Leaves a job under way and others waiting; `end` says how the process goes.
_LEAVES = """
import sys, time
from tests.support.waiting import until
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import CompilePool
store = ArtifactStore(sys.argv[1])
planted = "tests.support.planted.compile_families"
pool = CompilePool(store, workers=1, families_module=planted, low_priority=True)
for name in "abc":
    pool.submit("planted", {"name": name, "what": "hang"})
until(lambda: any(path.stat().st_size for path in store.root.glob("new-*/*.o")))  # the first one hangs
print(*(worker.pid for worker in pool.processes()), flush=True)
if sys.argv[2] == "waits":
    time.sleep(600)  # until the test kills it
"""


@pytest.mark.parametrize("end", ["returns", "waits"])
def test_a_process_ends_at_once_and_so_do_its_workers_of_low_priority(tmp_path: Path, end: str) -> None:
    """Though the one worker hangs, and jobs wait: at the end of the program, and where it is killed."""
    command = [sys.executable, "-c", _LEAVES, str(tmp_path), end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        start = time.monotonic()
        if end == "waits":
            assert worker.nice() >= 15
            process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)
    assert time.monotonic() - start < 2
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, seconds=2)


def test_a_program_that_closed_its_outputs_has_whole_pipes_to_its_processes() -> None:
    """As a daemon: the pipe must not get the number that the process has as its output."""
    answer = "import sys, multiprocessing.connection as c; c.Connection(int(sys.argv[-1])).send(7)"
    program = (
        f"import os; os.closerange(0, 3); from tunegemm.compile.pool import own_process\n"
        f"os._exit(own_process('-c', {answer!r})[1].recv())"
    )
    assert subprocess.run([sys.executable, "-c", program], env=environment()).returncode == 7


@pytest.mark.parametrize("what", ["fine", "hang", "abort"])
def test_workers_that_ended_leave_no_pipes(store: ArtifactStore, what: str) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with CompilePool(store, workers=1, timeout_s=3.0, families_module=PLANTED) as pool:
        pool.submit("planted", key("a", what)).result()
        workers = pool.processes()
    assert set(Path("/proc/self/fd").iterdir()) <= before
    assert len(workers) == (what == "fine"), "kept, so that it was not the garbage collector that closed them"


def test_keys_of_what_is_ready_are_those_of_both_stores(store: ArtifactStore) -> None:
    _compiled(store)
    shipped = SimpleNamespace(each_key=lambda: iter([key("b")]), __contains__=lambda each: False)
    assert [*Ready(store=store).each_key()] == [key("a")]
    assert [*Ready(shipped=shipped, store=store).each_key()] == [key("a"), key("b")]  # type: ignore[arg-type]
    assert [*Ready().each_key()] == []


def test_workers_are_at_least_one_and_at_most_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= default_workers() <= len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    for available, workers in ((0.0, 1), (6.0, 3), (5.9, 2), (64.0, 8)):
        memory = SimpleNamespace(available=available * WORKER_BYTES)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        assert default_workers() == workers


def test_an_altered_object_is_refused(store: ArtifactStore) -> None:
    artifact = _compiled(store)
    artifact.write_bytes(b"something else")
    with pytest.raises(ArtifactError, match="its bytes changed"):
        store.find(key("a"))


def test_an_object_that_others_may_write_is_refused(store: ArtifactStore) -> None:
    artifact = _compiled(store)
    artifact.chmod(0o666)
    with pytest.raises(ArtifactError, match="writable by other users"):
        store.find(key("a"))


def test_an_object_in_whose_place_is_something_else_is_refused(store: ArtifactStore, tmp_path: Path) -> None:
    artifact = _compiled(store)
    assert store.names() == {digest(key("a"))} and [dict(each) for each in store.each_key()] == [key("a")]
    other = artifact.rename(tmp_path / "other.o")
    artifact.symlink_to(other)
    with pytest.raises(ArtifactError, match=r": a symbolic link; delete it"):
        store.find(key("a"))
    artifact.unlink()
    artifact.mkdir()
    with pytest.raises(ArtifactError, match=r": not a regular file; delete it"):
        store.find(key("a"))


def test_a_truncated_entry_is_a_miss_and_folders_are_private(store: ArtifactStore) -> None:
    artifact = _compiled(store)
    assert store.root.stat().st_mode & 0o777 == 0o700
    assert artifact.stat().st_mode & 0o777 == 0o600
    entry = artifact.with_suffix(".json")
    assert json.loads(entry.read_text())["key"] == key("a")
    entry.write_text(entry.read_text()[:20])
    assert store.find(key("a")) is None
    artifact.unlink()
    assert store.find(key("a")) is None


def test_a_cache_that_cannot_be_written_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ArtifactStore(tmp_path / "file")
    with pytest.raises(ArtifactError, match="choose another folder by TUNEGEMM_CACHE_DIR"):
        store.scratch()
    assert store.find(key("a")) is None, "what is no folder holds nothing"


def _compiled(store: ArtifactStore) -> Path:
    with CompilePool(store, workers=1, families_module=PLANTED) as pool:
        artifact = pool.submit("planted", key("a")).result().artifact
    assert artifact is not None
    return artifact.path


def test_an_error_of_a_compiler_is_a_line() -> None:
    assert one_line(ValueError("  first\n\nsecond ")) == "ValueError: first"
    fatal = RuntimeError("first\nptxas FATAL : no such arch\nlast")
    assert one_line(fatal) == "RuntimeError: ptxas FATAL : no such arch"
    assert one_line(KeyError()) == "KeyError: " and len(one_line(OSError("x" * 999))) == 300
