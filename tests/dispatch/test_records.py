"""Dispatch without a GPU: records and misses, real databases, other processes, forks."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from dataclasses import replace

import pytest
import torch

from tests.support.serving import BF16, CANDIDATE, ByAddress, Kernel, Row, dispatcher_of, operands, quietly
from tunegemm.choose.snapshot import Snapshot
from tunegemm.compile.pool import CompilePool
from tunegemm.describe.command import tune_command
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.forms import MATMUL, form_of
from tunegemm.dispatch.launchers import TORCH, Prepared, is_torch
from tunegemm.dispatch.planning import LOOK_SECONDS, Planner
from tunegemm.errors import ArtifactError, DatabaseError, DeviceError, TunegemmWarning
from tunegemm.generate import families
from tunegemm.measure.outcome import Measurement

# Misses


def test_a_miss_warns_once_and_names_the_command(serve, kernel):
    dispatcher = serve(Problem(32, 48, 128))
    a, b = operands()
    with pytest.warns(TunegemmWarning) as caught:
        for _ in range(3):
            assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
    assert len(caught) == 1 and not kernel.calls
    assert "tunegemm tune --shape 32x48x64 --dtype bf16 --layout tn" in str(caught[0].message)
    assert caught[0].filename == __file__
    padded = torch.zeros(32, 72, dtype=BF16)[:, :64]
    quietly(dispatcher.matmul, padded, b)  # another key of the same problem
    with pytest.warns(TunegemmWarning, match="--dtype fp16 --layout tt"):
        dispatcher.matmul(a.half(), b.half().contiguous())
    assert tune_command(Problem(1, 2, 3, 4)).startswith("tunegemm tune --shape 1x2x3x4 ")


def test_cpu_tensors_warn_once_with_the_command():
    dispatcher = Dispatcher(Planner(read=lambda: pytest.fail("read for CPU tensors")))
    a, b = operands()
    with pytest.warns(TunegemmWarning) as caught:
        for _ in range(2):
            assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
        dispatcher.matmul(a, b[:, :16].t().contiguous().t())  # another weight, of the same model, say
    assert len(caught) == 1
    assert "on cpu" in str(caught[0].message) and "tunegemm tune --shape 32x48x64" in str(caught[0].message)


def test_a_product_that_no_kernel_can_have_is_told_so_and_not_to_be_tuned(serve, kernel):
    a = torch.ones(32, 64, dtype=torch.int8)
    for dispatcher in (serve(), Dispatcher()):
        with pytest.warns(TunegemmWarning, match="layout tt of int8: WGMMA reads") as caught:
            dispatcher.fused(form_of(MATMUL, "", torch.int32), a, a.t().contiguous(), ())
        assert "tunegemm tune" not in str(caught[0].message)


def test_misaligned_addresses_are_another_problem(serve, kernel):
    """A view at an odd offset has a record of its own alignment or none, and aligned ones keep theirs."""
    dispatcher = serve(Problem(32, 48, 64))
    a, b = operands()
    room = torch.zeros(32 * 64 + 8, dtype=BF16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for offset, hits in ((0, 1), (1, 1), (4, 1), (8, 2)):
            moved = room[offset : offset + 32 * 64].view(32, 64).copy_(a)
            assert torch.equal(dispatcher.matmul(moved, b), torch.matmul(a, b))
            assert len(kernel.calls) == hits
    said = [str(warning.message) for warning in caught]
    assert ["--alignment 2" in said[0], "--alignment 8" in said[1], len(said)] == [True, True, 2]


@pytest.mark.parametrize(("pad", "offset", "alignment"), [(1, 0, 2), (0, 1, 2), (2, 0, 4), (0, 4, 8)])
def test_a_record_of_their_alignment_serves_unaligned_operands(serve, kernel, pad, offset, alignment):
    dispatcher = serve(Problem(32, 48, 64, alignment=alignment), prepared=Prepared(kernel))
    a, b = operands()
    room = torch.zeros(offset + 32 * (64 + pad), dtype=BF16)
    moved = room[offset:].view(32, 64 + pad)[:, :64].copy_(a)
    assert torch.equal(quietly(dispatcher.matmul, moved, b), torch.matmul(a, b))
    out = torch.zeros(32 * 48 + 1, dtype=BF16)[1:].view(32, 48)
    assert torch.equal(quietly(dispatcher.matmul, moved, b, out=out), torch.matmul(a, b))
    assert torch.equal(quietly(dispatcher.linear, moved, b.t()), torch.matmul(a, b))
    assert len(kernel.calls) == 3


def test_library_algorithms_get_aligned_addresses(serve, kernel):
    """Packed rows of 2002 bytes: the library was asked about operands that start at 16 bytes."""
    dispatcher = serve(Problem(32, 48, 1001, alignment=2), prepared=Prepared(kernel, packed=True))
    a, b = operands(k=1001)
    assert torch.equal(quietly(dispatcher.matmul, a, b), torch.matmul(a, b)) and len(kernel.calls) == 1
    moved = torch.zeros(32 * 1001 + 1, dtype=BF16)[1:].view(32, 1001).copy_(a)
    assert torch.equal(quietly(dispatcher.matmul, moved, b), torch.matmul(a, b)) and len(kernel.calls) == 1


def test_foreign_record_says_what_differs(device, kernel):
    foreign = replace(device.fingerprint, driver="1.2", sm_count=78, sm_budget=70)
    dispatcher = dispatcher_of([Row(Problem(32, 48, 64), foreign)], Prepared(kernel))
    with pytest.warns(TunegemmWarning, match=r"sm_count 78 \(here 132\), sm_budget 70 \(here 132\)"):
        dispatcher.matmul(*operands())
    assert not kernel.calls


def test_the_better_grade_wins_then_the_narrower_layer(device):
    problem = Problem(32, 48, 64)
    here = replace(device.fingerprint, driver="580.20.1")
    patched = replace(here, driver="580.10.9")
    system, user, project = (
        Row(problem, here, layer=layer, ratio=ratio)
        for layer, ratio in (("system", 1.3), ("user", 1.2), ("project", 1.1))
    )
    in_doubt = Row(problem, patched, layer="project", ratio=1.4)
    assert Snapshot([project, system, user, in_doubt]).find(problem, here) is project
    assert Snapshot([system, user, in_doubt]).find(problem, here) is user
    assert Snapshot([system, in_doubt]).find(problem, here) is system
    assert Snapshot([in_doubt]).find(problem, here) is in_doubt, "used, though it wants verification"
    stale = replace(project, kernel_source="0" * 16)
    assert Snapshot([stale]).find(problem, here) is None
    assert "kernel sources of cute_sm90 changed" in Snapshot([stale]).why_not(problem, here)


def test_packed_only_launchers_get_packed_operands(serve, kernel):
    dispatcher = serve(Problem(32, 48, 64), prepared=Prepared(kernel, packed=True))
    a, b = operands()
    quietly(dispatcher.matmul, torch.zeros(32, 72, dtype=BF16)[:, :64], b)
    assert not kernel.calls
    quietly(dispatcher.matmul, a, b)
    assert len(kernel.calls) == 1


@pytest.mark.parametrize(
    "error", [ArtifactError("damaged\nobject"), ValueError("no such tile"), RuntimeError("CUDA")]
)
def test_a_kernel_that_cannot_be_prepared_is_a_miss(serve, error):
    def prepare(record, device):
        raise error

    dispatcher, (a, b) = serve(Problem(32, 48, 64), prepare=prepare), operands()
    with pytest.warns(TunegemmWarning, match=f"{str(error).splitlines()[0]}.*tunegemm tune"):
        assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))


@pytest.mark.parametrize("error", [RuntimeError("refused"), AttributeError("no such symbol")])
def test_a_failing_launch_is_torchs_from_then_on(serve, error):
    calls = []

    def launch(a, b, out):
        calls.append(1)
        raise error

    dispatcher = serve(Problem(32, 48, 64), prepared=Prepared(launch))
    a, b = operands()
    with pytest.warns(TunegemmWarning, match=rf"failed to launch \({error}\)"):
        for _ in range(3):
            assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
    assert len(calls) == 1


def test_refresh_reads_the_database_again(device, kernel):
    rows: list[Row] = []
    dispatcher, (a, b) = dispatcher_of(rows, Prepared(kernel)), operands()
    with pytest.warns(TunegemmWarning):
        dispatcher.matmul(a, b)
    rows.append(Row(Problem(32, 48, 64), device.fingerprint))
    quietly(dispatcher.matmul, a, b)
    assert not kernel.calls
    dispatcher.planner.refresh()
    quietly(dispatcher.matmul, a, b)
    assert len(kernel.calls) == 1


def test_mode_off_reads_nothing(monkeypatch, kernel):
    monkeypatch.setenv("TUNEGEMM_MODE", "off")
    dispatcher = dispatcher_of(read=lambda: pytest.fail("read"), find=lambda _: pytest.fail("asked"))
    a, b = operands()
    assert torch.equal(quietly(dispatcher.matmul, a, b), torch.matmul(a, b))
    monkeypatch.setenv("TUNEGEMM_MODE", "of")
    with pytest.warns(TunegemmWarning, match="'of'"):
        Dispatcher(Planner(read=lambda: Snapshot())).matmul(a, b)


# The real database and object store


def test_records_of_a_real_database_are_dispatched(monkeypatch, tmp_path, device, kernel):
    """Published through Database, read by the default reader from TUNEGEMM_DB; one problem is torch's."""
    from tunegemm.store import Database

    path = tmp_path / "tuning.sqlite"
    real = replace(device, spec="cuda:0")
    baseline = Candidate.make("cublaslt", {"algorithm": "torch.mm"})
    with Database.open(path, create=True) as database:
        for m, candidate in ((32, CANDIDATE), (16, baseline)):
            samples = (10.0, 11.0, 10.5)
            database.confirm(Problem(m, 48, 64), real, Measurement(candidate, samples, samples, 1e-3, 0.003))
    monkeypatch.setenv("TUNEGEMM_DB", str(path))
    dispatcher = dispatcher_of(
        find=lambda _: real,
        prepare=lambda record, _: TORCH if is_torch(record.candidate) else Prepared(kernel, tma=True),
    )
    a, b = operands()
    for m, hits in ((32, 1), (16, 1), (32, 2)):
        assert torch.equal(quietly(dispatcher.matmul, a[:m], b), torch.matmul(a[:m], b))
        assert len(kernel.calls) == hits
    with pytest.warns(TunegemmWarning, match="no record"):
        dispatcher.matmul(*operands(8, 480))


@pytest.mark.parametrize("content", [None, b"", b"no database" * 100])
def test_missing_and_corrupt_databases_warn_once(monkeypatch, tmp_path, content):
    path = tmp_path / "tuning.sqlite"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("TUNEGEMM_DB", str(path))
    dispatcher, (a, b) = dispatcher_of(), operands()
    with pytest.warns(TunegemmWarning, match=r"tuning\.sqlite") as caught:
        assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
        assert torch.equal(dispatcher.matmul(a[:16], b), torch.matmul(a[:16], b))
    assert sum("tuning.sqlite" in str(w.message) for w in caught) == 1
    assert (path.read_bytes() if path.exists() else None) == content


def test_a_kernel_that_is_not_in_the_object_store_is_not_compiled_in_a_call(monkeypatch, tmp_path, device):
    """The shipped family and the default preparation, with an empty store."""
    monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    family = families.get("cute_sm90")
    problem = Problem(256, 256, 256)
    space = families.load_space("cute_sm90")
    kernel = next(k for k in space.kernels() if family.check(problem, k, device))
    candidate = next(space.launches(kernel))
    monkeypatch.setattr(CompilePool, "submit", lambda *_: pytest.fail("compiled"))
    dispatcher = dispatcher_of([Row(problem, device.fingerprint, candidate)])
    a, b = operands(256, 256, 256)
    with pytest.warns(TunegemmWarning, match="not in the object store.*tunegemm tune --shape 256x256x256"):
        assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
    assert not (tmp_path / "cache").exists()


# Records of other processes, and forks


def test_records_published_meanwhile_are_found_by_products_left_to_torch(device, monkeypatch):
    """A look at files every few seconds at most, and only when torch would compute the product."""
    monkeypatch.setenv("TUNEGEMM_MODE", "exact")
    known, later = ByAddress(Problem(32, 48, 64)), Kernel()
    rows, looks, now = [Row(known.problem, device.fingerprint)], [], [0.0]
    monkeypatch.setattr("tunegemm.dispatch.planning.time.monotonic", lambda: now[0])

    def modified():
        looks.append(now[0])
        return len(rows)

    dispatcher = dispatcher_of(
        read=lambda: Snapshot(rows, modified=modified()),
        prepare=lambda record, _: Prepared(known.launcher if record.problem == known.problem else later),
        modified=modified,
    )
    a, b = operands()
    quietly(dispatcher.matmul, a, b)
    with pytest.warns(TunegemmWarning, match="no record"):
        dispatcher.matmul(a[:16], b)
    rows.append(Row(Problem(16, 48, 64), device.fingerprint))
    quietly(dispatcher.matmul, a[:16], b)
    assert not later.calls and looks == [0.0], "too early to look again"
    now[0] = LOOK_SECONDS + 1
    for _ in range(3):
        quietly(dispatcher.matmul, a, b)
    assert looks == [0.0], "a known product never looks"
    plans = dict(dispatcher.planner.state.plans)
    assert torch.equal(quietly(dispatcher.matmul, a[:16], b), torch.matmul(a[:16], b))
    assert len(later.calls) == 1 and len(looks) == 3
    kept = {key: plan for key, plan in plans.items() if plan is not None}
    assert kept.items() <= dispatcher.planner.state.plans.items(), "plans of tuned kernels stay"


def test_an_epilogue_after_a_tuned_product_stays_in_graphs_when_records_are_published(device, monkeypatch):
    """A graph that is captured then has the kernel of its warm-up; another call gets the published one."""
    plain, form = Problem(32, 48, 64), form_of(MATMUL, "gelu")
    rows, now, kernel, by_both = [Row(plain, device.fingerprint)], [0.0], Kernel(), Kernel()
    monkeypatch.setattr("tunegemm.dispatch.planning.time.monotonic", lambda: now[0])
    dispatcher = dispatcher_of(
        read=lambda: Snapshot(rows, modified=len(rows)),
        prepare=lambda record, _: Prepared(kernel if record.problem == plain else by_both.of(record.problem)),
        modified=lambda: len(rows),
    )
    a, b = operands()
    with pytest.warns(TunegemmWarning, match="gelu on .*no record"):
        dispatcher.fused(form, a, b, ())
    assert len(kernel.calls) == 1
    rows.append(Row(replace(plain, epilogue="gelu"), device.fingerprint))
    now[0] = LOOK_SECONDS + 1
    assert dispatcher.planner.look() is dispatcher.planner.state
    monkeypatch.setattr("tunegemm.dispatch.planning.capturing", lambda device: True)
    for _ in range(2):
        quietly(dispatcher.fused, form, a, b, ())
    assert len(kernel.calls) == 3 and not by_both.calls
    monkeypatch.setattr("tunegemm.dispatch.planning.capturing", lambda device: False)
    quietly(dispatcher.fused, form, a, b, ())
    assert len(kernel.calls) == 3 and len(by_both.calls) == 1


def test_nothing_is_looked_for_during_graph_capture(monkeypatch):
    looks, now = [], [0.0]
    monkeypatch.setattr("tunegemm.dispatch.planning.time.monotonic", lambda: now[0])
    dispatcher = dispatcher_of(
        read=lambda: Snapshot(modified=looks.append(now[0])), modified=lambda: looks.append(now[0])
    )
    a, b = operands()
    with pytest.warns(TunegemmWarning, match="no record"):
        dispatcher.matmul(a, b)
    monkeypatch.setattr("tunegemm.dispatch.planning.capturing", lambda device: True)
    now[0] = LOOK_SECONDS + 1
    quietly(dispatcher.matmul, a, b)
    assert looks == [0.0]


def test_what_is_looked_at_changes_when_another_process_publishes(monkeypatch, tmp_path, device):
    from tunegemm.store import Database
    from tunegemm.store.layers import modified

    path = tmp_path / "tuning.sqlite"
    monkeypatch.setenv("TUNEGEMM_DB", str(path))
    before = modified()
    real = replace(device, spec="cuda:0")
    seen = [before]
    with Database.open(path, create=True) as database:
        for m in (16, 32):
            measured = Measurement(CANDIDATE, (1.0, 1.1, 1.2), (1.0, 1.1, 1.2), 1e-3, 0.003)
            database.confirm(Problem(m, 48, 64), real, measured)
            seen.append(modified())
        with Database.open(path, read_only=True) as reader:
            reader.lookup()
        assert modified() == seen[-1], "reading changes nothing"
    assert len(set(seen)) == 3
    monkeypatch.setenv("TUNEGEMM_DB", "postgresql://nowhere/tunegemm")
    assert len(modified()) == 2


def test_a_forked_child_starts_anew(by_address):
    """The parent's lock is held by a thread that the child does not have."""
    kernel, dispatcher = by_address
    a, b = operands()
    expected = quietly(dispatcher.matmul, a, b)
    held, done = threading.Event(), threading.Event()

    def hold():
        with dispatcher.planner.lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not pytest-timeout's, which is Python
        signal.alarm(20)  # ends a child that waits for the lock
        torch.set_num_threads(1)  # OpenMP's other threads are not in the child, and torch waits for them
        same = torch.equal(dispatcher.matmul(a, b), expected) and len(kernel.calls) == 2
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


def test_unreadable_database_and_unknown_device_warn_once():
    def broken():
        raise DatabaseError("/nowhere/tunegemm.sqlite: no such database")

    def unknown(spec):
        raise DeviceError(f"{spec} is sm_75")

    device = find_device("model:h200")
    a, b = operands()
    dispatcher = Dispatcher(Planner(device_type="cpu", read=broken, find=lambda _: device))
    with pytest.warns(TunegemmWarning, match="no such database"):
        assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
    dispatcher = Dispatcher(Planner(device_type="cpu", read=broken, find=unknown))
    with pytest.warns(TunegemmWarning, match="sm_75") as caught:
        dispatcher.matmul(a, b)
        dispatcher.matmul(a[:16], b)
    assert len(caught) == 1
