"""What every test shares: a home of its own for the cache and the database, and the `gpu` marker."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tunegemm
from tunegemm.describe.device import Device, cuda_device_count, find_device

if TYPE_CHECKING:
    from tests.support.browser import Browser
    from tests.support.forks import Forks
    from tests.support.kernels import Kernels
    from tests.support.postgres import Cluster
    from tunegemm.compile.pool import CompilePool
    from tunegemm.describe.problem import Problem
    from tunegemm.measure.replay import Sweep


ROOT = Path(tunegemm.__file__).parent.parent

if "PYTEST_XDIST_WORKER" in os.environ:
    # A processor each, before anything loads torch: threads that wait for their turns spend other threads'.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")

if not cuda_device_count():
    # Inductor compiles C++ here, what is between our products: in this process, as others would import torch
    # first. CI alone has it use vectors, for which it compiles programs that try the processor.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if "TUNEGEMM_CI" not in os.environ:
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without a GPU its tests are left out, unless they are named: reading them takes longer than many rooms.

    tests/test_run_gpu.py collects them all once, and so sees a name that they still use and the package lost.
    """
    if collection_path != ROOT / "tests" / "gpu" or cuda_device_count():
        return None
    named = [Path(config.invocation_params.dir, one.partition("::")[0]).resolve() for one in config.args]
    return None if any(one.is_relative_to(collection_path) for one in named) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Processes take what is left from the end of each other's lists: short tests are to be there.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if "engines" not in config.option.markexpr:
        left_out = {item for item in items if item.get_closest_marker("engines")}
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not cuda_device_count():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; there is none here"))


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays: later collections need not search it


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws half its usual number of cases, a third where slow tests are left out.

    And garbage of cycles is looked for more seldom: there is little of it beside all that is imported here,
    and to look as often as Python does takes a tenth of the time. A test of what is freed collects itself.
    """
    gc.set_threshold(20_000, 50, 100)
    import hypothesis

    hypothesis.settings.register_profile("quick", max_examples=33)
    hypothesis.settings.register_profile("thorough", max_examples=50)
    hypothesis.settings.load_profile("quick" if "not slow" in config.option.markexpr else "thorough")


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> bool:
    """Whether slow tests run, too: then a test that draws its cases draws more, in place of a slow twin."""
    return "not slow" not in pytestconfig.option.markexpr


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all the processes that run the tests."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, shared_folder: Path) -> Iterator[None]:
    """Keeps the user's tuning database and compiled kernels out of the tests, and the tests out of them."""
    home = tmp_path_factory.mktemp("home")
    own = {
        "TUNEGEMM_DB": str(home / "tuning.sqlite"),
        "TUNEGEMM_CACHE_DIR": str(shared_folder / "cache" / "tunegemm"),
        "XDG_DATA_HOME": str(home / "data"),
        "TUNEGEMM_PACK": "",
        "TUNEGEMM_COMPILE": "0",  # where a test says so, missing kernels are compiled
    }
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    from tunegemm.store import Database

    Database.open(own["TUNEGEMM_DB"], create=True).close()  # explain refuses a name without a file
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def _nothing_in_front_of_torch() -> Iterator[None]:
    """Other threads, as pytest-xdist has them, keep our functions in front of ATen's after `enable`."""
    yield
    if (aten := sys.modules.get("tunegemm.torch.aten")) is not None:
        aten.replacements.leave()


@pytest.fixture(scope="session", autouse=True)
def _read_recordings_once() -> Iterator[None]:
    """Each process keeps the shipped recordings that it reads: one takes up to half a second."""
    from tunegemm.measure import replay

    read = replay.read_sweep
    keep = functools.lru_cache(maxsize=8)(read)

    def read_once(path: Path, problem: Problem) -> Sweep:
        return (keep if path.is_relative_to(ROOT / "db" / "sweeps") else read)(path, problem)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "read_sweep", read_once)
        yield


@pytest.fixture(scope="module")
def device() -> Device:
    """The GPU of GPU tests."""
    return find_device("cuda:0")


@pytest.fixture(scope="module")
def kernels(device: Device, pool: CompilePool) -> Kernels:
    """Compiles and loads kernels for it. A module that needs many overrides this and begins them at once."""
    from tests.support.kernels import Kernels

    return Kernels(pool, device)


@pytest.fixture
def one_core() -> Iterator[None]:
    """What a test starts has one processor: a second compile worker would import the compilers once more, for
    as much of the processors' time as it saves.
    """
    cores = os.sched_getaffinity(0)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture(scope="session")
def h200() -> Device:
    """A GPU to choose kernels and compile for; there need be none."""
    return find_device("model:h200")


@pytest.fixture(scope="session")
def pool(shared_folder: Path) -> Iterator[CompilePool]:
    """Its workers import the compilers once; what any process of the session has compiled is there.

    TUNEGEMM_TEST_OBJECTS names a folder that keeps what was compiled from one run of the tests to the next.
    """
    from tests.support.processes import compile_workers
    from tunegemm.compile.artifacts import ArtifactStore
    from tunegemm.compile.pool import CompilePool

    store = ArtifactStore(Path(os.environ.get("TUNEGEMM_TEST_OBJECTS", shared_folder / "objects")))
    with CompilePool(store, workers=compile_workers()) as pool:
        yield pool


@pytest.fixture
def tuning_pool(pool: CompilePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tunings of this process compile in that pool, whose workers have imported the compilers."""
    monkeypatch.setattr("tunegemm.tuning.tuner.CompilePool", lambda *_, **__: pool)
    monkeypatch.setattr(pool, "close", pool.drop_waiting)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, built offline by the backend that pip would use."""
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("the package under test is installed; there is no source tree to build from")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Runs programs that import torch, without the time that takes."""
    from tests.support.forks import Forks

    running = Forks()
    yield running
    running.close()


@pytest.fixture
def all_tuned() -> Iterator[None]:
    """Fails a test that has anything to warn of, such as an untuned product; leaves torch as it was."""
    import torch

    from tunegemm.errors import TunegemmWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", TunegemmWarning)
        yield
    tunegemm.disable()
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium. `.ci/run` demands one; elsewhere its tests are skipped."""
    from tests.support.browser import executable, start

    program = executable()
    if program is None:
        missing = "needs Chromium, Debian's package `chromium`; there is none here"
        assert not os.environ.get("TUNEGEMM_CI"), missing
        pytest.skip(missing)
    with start(program) as running:
        yield running


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """A PostgreSQL server of the tests' own. `.ci/run` demands one; elsewhere its tests are skipped."""
    from tests.support.postgres import binary, cluster

    if binary("initdb") is None:
        missing = "needs PostgreSQL's server, Debian's package `postgresql`; there is none here"
        assert not os.environ.get("TUNEGEMM_CI"), missing
        pytest.skip(missing)
    with cluster() as running:
        yield running


@pytest.fixture(scope="session")
def empty_on_server(postgres: Cluster) -> str:
    """The name of a database with the schema and nothing in it, to copy."""
    from tunegemm.store import Database

    url = postgres.create()
    Database.open(url, create=True).close()
    return url.rpartition("/")[2]
