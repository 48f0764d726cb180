"""Missing kernels are compiled while torch computes: real workers and a real kernel, all but the launch."""

from __future__ import annotations

import errno
import functools
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

import tunegemm
from tests.support.processes import environment
from tests.support.serving import BF16, Kernel, Row, dispatcher_of, operands, quietly, serve_with, uncached
from tests.support.waiting import until
from tunegemm.choose.policies import Policy
from tunegemm.choose.predictions import outlook
from tunegemm.compile.artifacts import ArtifactStore, Key
from tunegemm.compile.pool import CompilePool, CompileResult
from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import background, planning
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.forms import MATMUL, form_of
from tunegemm.dispatch.launchers import Prepared, prepare
from tunegemm.errors import TunegemmWarning
from tunegemm.generate import families, generator
from tunegemm.generate.families import kernel_source_hash
from tunegemm.report.explain import candidate_of
from tunegemm.store import packs
from tunegemm.store.packs import Pack

PROBLEM, WIDER = Problem(128, 128, 64), Problem(128, 256, 64)  # one kernel serves both
CANDIDATE = candidate_of("cute_sm90")
FAMILY = families.get("cute_sm90")
SHIPPED = packs.shipped


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that has no kernels yet, and compiles; the folder of its cache."""
    for name, folder in (("XDG_DATA_HOME", "data"), ("TUNEGEMM_CACHE_DIR", "cache")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("TUNEGEMM_COMPILE", "1")
    monkeypatch.setenv("TUNEGEMM_MODE", "exact")
    monkeypatch.setattr(planning, "LOOK_SECONDS", 3600.0)  # what brings new plans is not that
    monkeypatch.setattr(packs, "shipped", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def key(device: Device) -> Key:
    return FAMILY.kernel_key(PROBLEM, CANDIDATE, device)


@pytest.fixture(scope="module")
def compiled(pool: CompilePool, key: Key) -> Path:
    """The object, as another host made it."""
    artifact = pool.submit(FAMILY.name, key).result().artifact
    assert artifact is not None
    return artifact.path


def pools_by(monkeypatch: pytest.MonkeyPatch, make: Callable[[], CompilePool]) -> None:
    """Planners make their pools so."""
    init = planning.Planner.__init__
    monkeypatch.setattr(init, "__kwdefaults__", {**init.__kwdefaults__, "pool": make})


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[CompilePool]:
    """Those that were made."""
    made: list[CompilePool] = []

    def make() -> CompilePool:
        made.append(background.make_pool())
        return made[-1]

    pools_by(monkeypatch, make)
    return made


@pytest.fixture
def known(pools: list[CompilePool], compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools find the object when they are asked for it: that it is compiled is shown elsewhere."""
    make = Flawed(0, "", KeyError(), compiled)

    def kept() -> CompilePool:
        pools.append(make())
        return pools[-1]

    pools_by(monkeypatch, kept)


@pytest.fixture
def serving(device: Device, kernel: Kernel, pools: list[CompilePool]) -> Callable[..., Dispatcher]:
    """A dispatcher whose kernels are really loaded, and launched on CPU tensors by torch."""

    def loaded(record, device) -> Prepared:
        assert prepare(record, device).launch is not None
        return Prepared(kernel, tma=True)

    def make(*rows, find=lambda _: device, prepare=loaded) -> Dispatcher:
        found = rows or [Row(one, device.fingerprint, CANDIDATE) for one in (PROBLEM, WIDER)]
        return dispatcher_of(found, find=find, prepare=prepare)

    return make


@functools.cache
def matrices(problem: Problem = PROBLEM) -> tuple[torch.Tensor, torch.Tensor]:
    """The same each time, as a weight is: what dispatch remembers of it has to be forgotten."""
    return operands(problem.m, problem.n, problem.k)


def right(dispatcher: Dispatcher, problem: Problem = PROBLEM) -> bool:
    """Whether a product is right, and draws no warning."""
    a, b = matrices(problem)
    return torch.equal(quietly(dispatcher.matmul, a, b), (a.float() @ b.float()).to(BF16))


def is_served(dispatcher: Dispatcher, kernel: Kernel, problem: Problem = PROBLEM) -> bool:
    """Whether a kernel of ours computes the product."""
    before = len(kernel.calls)
    assert right(dispatcher, problem)
    return len(kernel.calls) > before


def warnings_of(dispatcher: Dispatcher, *problems: Problem) -> list[str]:
    """What three rounds of products warn of; results are right."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for problem in problems * 3:
            a, b = matrices(problem)
            assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
    return [str(one.message) for one in caught if issubclass(one.category, TunegemmWarning)]


def test_a_missing_kernel_is_compiled_meanwhile_and_swapped_in(
    serving, kernel, key, pools, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tunegemm")
    dispatcher = serving()
    assert not is_served(dispatcher, kernel)
    assert ArtifactStore().find(key) is None, "the call did not wait for it"
    until(lambda: pools and pools[0].processes())
    (worker,) = (psutil.Process(one.pid) for one in pools[0].processes())
    # Until the new process is the worker's program, it has this one's environment.
    until(lambda: worker.environ().get("CUDA_VISIBLE_DEVICES") == "", seconds=5)
    until(lambda: worker.nice() >= 15, seconds=5)
    assert not is_served(dispatcher, kernel, WIDER), "by the same kernel"
    until(lambda: is_served(dispatcher, kernel))
    assert is_served(dispatcher, kernel, WIDER)
    assert pools[0].compiled == 1 and ArtifactStore().find(key) is not None
    until(lambda: not worker.is_running())
    until(lambda: caplog.records)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("1 missing kernel(s) compiled in the background in")


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("what", ["for another DSL", "launched", "altered", "of another processor", "cut"])
def test_a_shipped_kernel_that_does_not_run_here_is_compiled(
    what: str, serving, kernel, key, compiled, pools, tmp_path, monkeypatch, caplog
) -> None:
    """What is wrong with the package: an object, its compiler, the manifest; or the driver, at a launch."""
    content = compiled.read_bytes()
    if what == "of another processor":
        content = content[:18] + b"\xb7\0" + content[20:]
    toolchain = {"cutlass_dsl": "4.1.0+cu13" if what == "for another DSL" else str(key["cutlass_dsl"])}
    package = Pack(tmp_path / "package", "0.1", toolchain, (), is_package=True)
    path = add_compiled(package.store, {**key, **toolchain}, compiled, content)
    if what == "altered":
        path.write_bytes(content[:-1])
    monkeypatch.setattr(packs, "shipped", lambda: package)
    if what == "cut":
        (package.folder / "manifest.json").write_text('{"format": "tunegemm-pa')
        monkeypatch.setattr(packs, "data_path", lambda *_: package.folder)
        monkeypatch.setattr(packs, "shipped", functools.cache(SHIPPED.__wrapped__))
    refuses: list[bool] = []

    def loaded(record, device) -> Prepared:
        assert prepare(record, device).launch is not None
        of_the_package = ArtifactStore().find(key) is None

        def launch(a, b, out) -> None:
            if of_the_package and refuses:
                raise RuntimeError("the provided PTX was compiled with an unsupported toolchain")
            kernel(a, b, out)

        return Prepared(launch, tma=True)

    dispatcher = serving(prepare=loaded)
    if what == "launched":
        assert is_served(dispatcher, kernel) and is_served(dispatcher, kernel, WIDER) and not pools
        refuses.append(True)
        with pytest.warns(TunegemmWarning, match="failed to launch.*until it is compiled here"):
            dispatcher.matmul(*matrices())
    else:
        assert not is_served(dispatcher, kernel)
    until(lambda: is_served(dispatcher, kernel) and is_served(dispatcher, kernel, WIDER))
    assert len(pools) == 1 and ArtifactStore().find(key) is not None
    assert [one.getMessage()[:52] for one in caplog.records] == (
        ["the kernels that ship with the package cannot be use"] if what == "cut" else []
    )


def test_it_is_off_by_a_setting(serving, pools, monkeypatch) -> None:
    monkeypatch.setenv("TUNEGEMM_COMPILE", "0")
    said = warnings_of(serving(), PROBLEM)
    assert len(said) == 1 and "not in the object store" in said[0] and not pools


def test_nothing_is_compiled_in_a_forked_child(serving, pools) -> None:
    dispatcher = serving()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        torch.set_num_threads(1)  # OpenMP's other threads are not in the child
        said = warnings_of(dispatcher, PROBLEM)
        os._exit(0 if len(said) == 1 and "not in the object store" in said[0] and not pools else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.usefixtures("known")
def test_nothing_is_begun_while_a_graph_is_captured(serving, kernel, pools, monkeypatch) -> None:
    """Neither by a call, nor where compiled code asks what is served."""
    dispatcher, (a, b) = serving(), matrices()
    monkeypatch.setattr(planning, "capturing", lambda device: True)
    assert right(dispatcher)
    with pytest.warns(TunegemmWarning, match="not in the object store"):
        assert not dispatcher.planner.serves(form_of(MATMUL, ""), a, b, 0)
    assert not pools
    monkeypatch.setattr(planning, "capturing", lambda device: False)
    dispatcher.planner.refresh()
    until(lambda: is_served(dispatcher, kernel))


@pytest.mark.usefixtures("known")
def test_a_kernel_that_is_compiled_changes_no_other_decision(serving, device, kernel, monkeypatch) -> None:
    """A failed launch is not repeated, and a graph that is captured then keeps the kernels of its warm-up."""
    failing, plain, tries = Problem(16, 128, 64), Problem(32, 128, 64), []

    def failed(*_: torch.Tensor) -> None:
        tries.append(failing)
        raise RuntimeError("no such kernel")

    def loaded(record, device) -> Prepared:
        launches = {failing: failed, plain: kernel}
        if record.problem in launches:
            return Prepared(launches[record.problem])
        assert prepare(record, device).launch is not None
        return Prepared(kernel, tma=True)

    rows = [Row(one, device.fingerprint, CANDIDATE) for one in (PROBLEM, plain)]
    library, source = candidate_of("cublaslt"), kernel_source_hash("cublaslt")
    rows.append(Row(failing, device.fingerprint, library, kernel_source=source))
    dispatcher, form, (a, b) = serving(*rows, prepare=loaded), form_of(MATMUL, "gelu"), matrices(plain)
    with pytest.warns(TunegemmWarning, match="failed to launch"):
        dispatcher.matmul(*matrices(failing))
    with pytest.warns(TunegemmWarning, match="gelu on .*no record"):
        dispatcher.fused(form, a, b, ())
    served = kernel.calls.copy()
    assert len(served) == 1, "by the product's kernel"
    until(lambda: is_served(dispatcher, kernel))
    monkeypatch.setattr(planning, "capturing", lambda device: True)
    kernel.calls.clear()
    quietly(dispatcher.fused, form, a, b, ())
    assert kernel.calls == served
    monkeypatch.setattr(planning, "capturing", lambda device: False)
    assert right(dispatcher, failing) and len(tries) == 1


def test_a_cache_that_cannot_be_written_is_said_once(serving, kernel, host: Path, pools) -> None:
    """And no process is started for it."""
    host.write_text("a file where the folder would be")
    dispatcher = serving()
    assert right(dispatcher)
    until(lambda: not dispatcher.planner.compiler.waiting)
    said = warnings_of(dispatcher, PROBLEM, WIDER)
    assert len(said) == 1 and str(host) in said[0] and "TUNEGEMM_CACHE_DIR" in said[0]
    assert not kernel.calls and not pools[0].processes()


def add_compiled(store: ArtifactStore, key: Key, compiled: Path, content: bytes | None = None) -> Path:
    """Puts an object into a store as if it had been compiled there; content: what is in it instead."""
    scratch = store.scratch()
    scratch.write_bytes(compiled.read_bytes() if content is None else content)
    resources = json.loads(compiled.with_suffix(".json").read_text())["resources"]
    resources = Resources(**{**resources, "warnings": tuple(resources["warnings"])})
    return store.add(key, scratch, resources).path


class Flawed:
    """A pool that fails as nobody foresaw, so many times; then a real one, whose store has got the object."""

    def __init__(self, times: int, where: str, error: BaseException, compiled: Path | None = None) -> None:
        self.left, self.where, self.error, self.compiled = times, where, error, compiled

    def fail(self, where: str) -> None:
        if where == self.where and self.left:
            self.left -= 1
            raise self.error

    def __call__(self) -> CompilePool:
        self.fail("make")
        pool = background.make_pool()
        real = pool.submit

        def submit(family: str, key: Key) -> Future[CompileResult]:
            self.fail("submit")
            if self.where == "result" and self.left:
                self.left -= 1
                future: Future[CompileResult] = Future()
                future.set_exception(self.error)
                return future
            if self.compiled is not None:
                add_compiled(ArtifactStore(), key, self.compiled)
            return real(family, key)

        pool.submit = submit  # type: ignore[method-assign,assignment]
        return pool


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("make", TypeError("a pool of nothing")),
        ("make", MemoryError()),
        ("submit", OSError(errno.ENOMEM, "Cannot allocate memory")),
        ("result", MemoryError()),
    ],
)
def test_a_thread_that_fails_is_followed_by_another(
    where: str, error: BaseException, serving, kernel, compiled, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "RETRY_AFTER_S", (0.01, 0.01, 0.01))
    pools_by(monkeypatch, Flawed(2, where, error, compiled))
    dispatcher = serving()
    assert not is_served(dispatcher, kernel)
    until(lambda: is_served(dispatcher, kernel))
    logged = [one for one in caplog.records if "compiling in the background" in one.getMessage()]
    assert len(logged) == (where == "make"), "once, and what passes is not worth a line"


@pytest.mark.parametrize("where", ["make", "submit", "result"])
def test_what_always_fails_is_given_up_and_said_once(
    where: str, serving, kernel, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "RETRY_AFTER_S", (0.01, 0.01, 0.01))
    pools_by(monkeypatch, Flawed(99, where, TypeError("no such thing")))
    dispatcher = serving()
    assert right(dispatcher)
    until(lambda: not dispatcher.planner.compiler.waiting)
    said = warnings_of(dispatcher, PROBLEM)
    assert len(said) == 1 and "does not compile here (TypeError: no such thing)" in said[0]
    logged = [one for one in caplog.records if "compiling in the background" in one.getMessage()]
    assert len(logged) == 1 and logged[0].exc_info


def test_a_kernel_whose_retry_gets_no_thread_is_given_up(serving, kernel, monkeypatch) -> None:
    """Else it would count as under way for good."""
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if thread.name == "tunegemm-compile":
            if begun:
                raise RuntimeError("can't start new thread")
            begun.append(thread)
        start(thread)

    monkeypatch.setattr(background, "RETRY_AFTER_S", (0.01, 0.01, 0.01))
    monkeypatch.setattr(threading.Thread, "start", start_one)
    pools_by(monkeypatch, Flawed(99, "result", MemoryError()))
    dispatcher = serving()
    assert right(dispatcher)
    begun[0].join()
    until(lambda: not dispatcher.planner.compiler.waiting)
    assert "a thread cannot start" in warnings_of(dispatcher, PROBLEM)[0]


def test_a_planner_that_cannot_be_told_does_not_end_the_thread(device, compiled, caplog) -> None:
    def ready(kernel: str) -> None:
        told.append(kernel)
        raise KeyError("planner")

    told: list[str] = []
    compiler = background.BackgroundCompiler(ready, Flawed(0, "", KeyError(), compiled))
    for problem in (PROBLEM, replace(PROBLEM, in_dtype="fp16", out_dtype="fp16")):
        assert compiler.ask(Row(problem, device.fingerprint, CANDIDATE), device).kernel
        until(lambda: not compiler.waiting)
    assert len(told) == 2
    assert len([one for one in caplog.records if "compiling in the background" in one.getMessage()]) == 1


def test_a_kernel_that_does_not_compile_is_said_once_and_is_torchs(serving, kernel, key, pools) -> None:
    """As an earlier compile of it says, which the store remembers."""
    ArtifactStore().add_failure(key, "spills 64 B to local memory")
    dispatcher = serving()
    assert right(dispatcher)
    until(lambda: not dispatcher.planner.compiler.waiting)
    said = warnings_of(dispatcher, PROBLEM)
    assert len(said) == 1 and "does not compile here (spills 64 B" in said[0]
    assert not kernel.calls


@pytest.mark.slow
def test_of_predicted_kernels_the_best_that_compiles_serves(
    serving, device, kernel, pools, monkeypatch
) -> None:
    monkeypatch.setenv("TUNEGEMM_MODE", "predict")
    problem = Problem(2, 264, 264)
    first, second, *_ = (option.record.candidate for option in outlook(problem, device).options)
    keys = [families.get(one.family).kernel_key(problem, one, device) for one in (first, second)]
    ArtifactStore().add_failure(keys[0], "spills 64 B to local memory")
    dispatcher = serving(Row(PROBLEM, device.fingerprint))
    assert not is_served(dispatcher, kernel, problem)
    until(lambda: is_served(dispatcher, kernel, problem))
    assert ArtifactStore().find(keys[1]) is not None


@pytest.mark.parametrize("layer", ["system", "user"])
def test_without_the_dsl_what_is_missing_is_said_once(serving, device, pools, layer, monkeypatch) -> None:
    monkeypatch.setattr(generator, "find_spec", lambda name: None)
    monkeypatch.setattr(generator, "package_version", lambda name: "")
    here = replace(device, fingerprint=replace(device.fingerprint, cutlass_dsl=""))
    rows = [Row(one, device.fingerprint, CANDIDATE, layer=layer) for one in (PROBLEM, WIDER)]
    said = warnings_of(serving(*rows, find=lambda _: here), PROBLEM, WIDER)
    assert len(said) == 1 and "nvidia-cutlass-dsl is not installed; pip install" in said[0]
    assert not pools


@pytest.mark.usefixtures("known")
def test_a_policy_that_torch_cannot_keep_is_said_not_to_hold_meanwhile(serving, kernel) -> None:
    dispatcher = serving()
    dispatcher.planner.use(Policy("batch_invariant"))
    with pytest.warns(TunegemmWarning, match="batch_invariant does not hold until then"):
        dispatcher.matmul(*matrices())
    until(lambda: is_served(dispatcher, kernel))


@pytest.mark.slow
def test_two_kinds_of_gpus_in_one_process(serving, device, kernel, key, pools) -> None:
    """One kernel serves both Hopper GPUs; the third has no record of its own."""
    kinds = {f"cpu:{i}": find_device(f"model:{name}") for i, name in enumerate(("h200", "h100-nvl"))}
    kinds["cpu:2"] = find_device("model:a100-sxm-80gb")
    rows = [Row(PROBLEM, kinds[f"cpu:{i}"].fingerprint, CANDIDATE, ratio=9.0) for i in (0, 1)]
    dispatcher, form, (a, b) = serving(*rows, find=kinds.__getitem__), form_of(MATMUL, ""), matrices()

    def is_loaded(index: int) -> bool:
        assert quietly(dispatcher.planner.serves, form, a, b, index), "there, or to be"
        return dispatcher.planner.state.prepared[PROBLEM, index].launch is not None

    assert not is_loaded(0) and not is_loaded(1)
    with pytest.warns(TunegemmWarning, match="NVIDIA A100-SXM4-80GB: its record is foreign"):
        assert not dispatcher.planner.serves(form, a, b, 2)
    until(lambda: is_loaded(0) and is_loaded(1))
    assert pools[0].compiled == 1 and not dispatcher.planner.serves(form, a, b, 2)


@pytest.mark.slow
def test_code_that_was_compiled_meanwhile_takes_the_kernel(
    serving, device, kernel, pools, monkeypatch, all_tuned
) -> None:
    """By Inductor, which keeps its code."""
    rows = [Row(PROBLEM, device.fingerprint, CANDIDATE, ratio=9.0)]
    serve_with(monkeypatch, serving(*rows))
    (a, b), before = matrices(), len(kernel.calls)
    with uncached():
        multiply = torch.compile(lambda a, b: tunegemm.matmul(a, b) + 1, fullgraph=True)
        expected = torch.matmul(a, b) + 1

        def is_ours() -> bool:
            assert torch.equal(multiply(a, b), expected)
            return len(kernel.calls) > before

        assert not is_ours() or pools[0].compiled
        until(is_ours)


#: Asks for two kernels, and ends while the first is compiled.
_LEAVES = """
import time
import psutil, torch
from tests.dispatch.test_background import CANDIDATE, PROBLEM
from tests.support.serving import Row, operands
from tests.support.waiting import until
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.planning import Planner
from tunegemm.choose.snapshot import Snapshot
device = find_device("model:h200")
problems = [Problem(128, 128, 64, in_dtype=dtype, out_dtype=dtype) for dtype in ("bf16", "fp16")]
rows = [Row(problem, device.fingerprint, CANDIDATE) for problem in problems]
dispatcher = Dispatcher(Planner(device_type="cpu", read=lambda: Snapshot(rows), find=lambda _: device))
for dtype in (torch.bfloat16, torch.float16):
    dispatcher.matmul(*operands(128, 128, 64, dtype))
until(lambda: psutil.Process().children())
(worker,) = psutil.Process().children()
print(dispatcher.planner.compiler.waiting, worker.pid, time.monotonic(), flush=True)
"""


#: The same program without a request. torch alone has taken 0.6 s to leave, and 2.3 s on slow, busy cores.
_LEAVES_IDLE = _LEAVES.partition("dispatcher =")[0] + "print(time.monotonic(), flush=True)\n"


def _leaving_s(program: str) -> tuple[float, list[str]]:
    """How long a program takes to end from the time that it prints last; and what it printed before that."""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    ended = time.monotonic()
    assert done.returncode == 0, done.stderr
    *printed, leaving = done.stdout.split()
    return ended - float(leaving), printed


@pytest.mark.slow
def test_a_process_ends_while_kernels_wait(host: Path) -> None:
    """Kernels that wait add less than a second to its end. The quickest of up to three ends counts."""
    waited, idle = [math.inf], [math.inf]
    while min(waited) >= min(idle) + 1 and len(waited) <= 3:
        seconds, (waiting, worker) = _leaving_s(_LEAVES)
        waited.append(seconds)
        assert waiting == "2"
        until(lambda worker=int(worker): not psutil.pid_exists(worker), seconds=2)
        assert not ArtifactStore().names()
        idle.append(_leaving_s(_LEAVES_IDLE)[0])
    assert min(waited) < min(idle) + 1, (waited, idle)
