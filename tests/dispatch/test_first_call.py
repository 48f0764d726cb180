"""What a process does before its first launch, with real compiled kernels: the compiler is not imported."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import database as synthetic
from tests.support.forks import Forks
from tests.support.processes import environment
from tests.support.stores import damage
from tunegemm.compile import cute_object
from tunegemm.compile.artifacts import Artifact, ArtifactStore
from tunegemm.compile.pool import CompilePool
from tunegemm.describe import driver
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.stored import problem_of
from tunegemm.generate import cute_launch, families
from tunegemm.measure.outcome import Measurement
from tunegemm.report.explain import candidate_of
from tunegemm.store import Database
from tunegemm.store.lookup import read_file
from tunegemm.store.schema import VERSION_TABLE

DEVICE = find_device("model:h200")
PROBLEM = Problem.parse("128x128x64")
CANDIDATE = candidate_of("cute_sm90")
KEY = families.get("cute_sm90").kernel_key(PROBLEM, CANDIDATE, DEVICE)
MEASURED = Measurement(CANDIDATE, (1.0, 1.1, 1.2), (2.0, 2.1, 2.2), 1e-3, 0.003)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first")


@pytest.fixture(scope="module")
def artifact(folder: Path) -> Artifact:
    with CompilePool(ArtifactStore(folder / "cache"), workers=1) as pool:
        result = pool.submit("cute_sm90", KEY).result()
    assert result.artifact is not None, result.failure
    return result.artifact


@pytest.fixture(scope="module")
def many_records(folder: Path) -> Path:
    path = folder / "tuning.sqlite"
    synthetic.build(path, shapes=2500, toolchains=2, measured=1)
    with Database.open(path, create=True) as database:
        database.confirm(PROBLEM, replace(DEVICE, spec="cuda:0"), MEASURED)
    return path


@pytest.fixture
def fresh_loader() -> Iterator[None]:
    cute_launch.forget()
    yield
    cute_launch.forget()


#: A first call on the CPU: everything is done but the launch itself.
_FIRST_CALL = """
import json, sys, time, warnings
import torch
torch._C._cuda_getCurrentRawStream = lambda index: 0  # a CPU build of torch has none
warnings.simplefilter("error")
a = torch.rand(128, 64, dtype=torch.bfloat16)
b = torch.rand(128, 64, dtype=torch.bfloat16).t()
torch.mm(a, b)
start = time.process_time()
import tunegemm
tunegemm.matmul
from tunegemm.describe.device import find_device
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.planning import Planner
from tunegemm.dispatch.launchers import Prepared, prepare
launched = []
def without_a_launch(record, device):
    assert prepare(record, device).launch is not None
    return Prepared(lambda *tensors: launched.append(tensors))
planner = Planner(device_type="cpu", find=lambda _: find_device("model:h200"), prepare=without_a_launch)
serving = Dispatcher(planner)
serving.matmul(a, b)
seconds = time.process_time() - start
print(json.dumps({"launched": len(launched), "seconds": seconds, "records": len(planner.state.snapshot),
                  "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


@pytest.mark.slow
def test_a_first_call_imports_no_compiler_and_no_sqlalchemy(
    artifact: Artifact, many_records: Path, folder: Path, forks: Forks
) -> None:
    """CPU time, which other processes lengthen little: 0.1 s, and twice that to compile bytecode."""
    variables = environment(
        TUNEGEMM_DB=str(many_records),
        TUNEGEMM_CACHE_DIR=str(folder / "cache"),
        XDG_DATA_HOME=str(folder / "none"),
    )
    done = forks.run(_FIRST_CALL, env=variables)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["launched"] == 1 and found["records"] > 10_000
    heavy = {"cutlass", "triton", "sqlalchemy", "alembic", "pandas", "optuna", "statistics", "tomllib"}
    assert heavy & set(found["modules"]) <= {"triton"}, "torch may import triton"
    times = [found["seconds"]]
    while min(times) >= 0.6 and len(times) < 6:  # a busy host lengthens CPU time, too, but not each time
        times.append(json.loads(forks.run(_FIRST_CALL, env=variables).stdout)["seconds"])
    assert min(times) < 0.6, times


def test_a_file_is_read_as_the_store_reads_it(many_records: Path, tmp_path: Path) -> None:
    lookup = read_file(many_records, "project")
    with Database.open(many_records, read_only=True, layer="project") as database:
        expected = database.lookup()
    assert lookup is not None and len(lookup) == len(expected) > 10_000
    assert lookup.problems() == expected.problems()
    for problem in (PROBLEM, problem_of(*lookup.problems()[7])):
        assert lookup.find(problem) == expected.find(problem) != []


@pytest.mark.parametrize("what", ["older", "damaged", "another's", "missing", "folder"])
def test_an_unusual_file_is_left_to_the_store(what: str, many_records: Path, tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    if what == "older":
        path.write_bytes((Path(__file__).parents[1] / "data" / "schema-0007.sqlite").read_bytes())
        assert read_file(path, "user") is not None
        damage(path, f"UPDATE {VERSION_TABLE} SET version_num = '0006'")
    elif what == "damaged":
        content = bytearray(many_records.read_bytes())
        content[200:5000:7] = b"x" * len(content[200:5000:7])
        path.write_bytes(content)
    elif what == "another's":
        import sqlite3

        sqlite3.connect(path).execute("CREATE TABLE mine (a)").connection.close()
    elif what == "folder":
        path.mkdir()
    assert read_file(path, "user") is None


def test_a_compiled_kernel_is_linked_and_every_load_is_its_own(
    artifact: Artifact, fresh_loader: None
) -> None:
    """A second device needs its own: an object keeps what it set up for the first."""
    content = artifact.path.read_bytes()
    assert content[16:18] == cute_launch.SHARED_LIBRARY
    before = _mapped()
    first, second = (cute_launch.load_library(content, artifact.path.parent) for _ in range(2))
    assert callable(first) and len(_mapped() - before) == 2
    del first, second
    gc.collect()
    assert _mapped() == before, "what nobody holds is unloaded"


def test_without_a_linker_the_compiler_loads_what_it_exported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fresh_loader: None
) -> None:
    monkeypatch.setattr(cute_object, "find_linker", lambda: None)
    out = folder / "relocatable.o"
    families.get("cute_sm90").compile(KEY, out)
    assert out.read_bytes()[16:18] != cute_launch.SHARED_LIBRARY
    assert callable(cute_launch.load_function(out))


def test_a_linker_that_fails_leaves_the_object_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cute_object, "find_linker", lambda: "/bin/false")
    path = folder / "odd.o"
    path.write_bytes(b"what the compiler exported")
    cute_object.link(path)
    assert path.read_bytes() == b"what the compiler exported"
    assert "cannot link" in caplog.text and not path.with_name("odd.o.so").exists()


def test_the_dsl_is_asked_where_its_runtime_is_elsewhere(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, fresh_loader: None
) -> None:
    monkeypatch.setattr(cute_object, "find_runtime", lambda: None)
    assert callable(cute_launch.load_function(artifact.path))


def test_a_library_that_cannot_be_loaded_names_the_remedy(folder: Path, artifact: Artifact) -> None:
    content = artifact.path.read_bytes()
    other = content[:18] + b"\xb7\0" + content[20:]  # of another processor
    with pytest.raises(RuntimeError, match=r"cannot be loaded \(.*TMPDIR"):
        cute_launch.load_library(other, folder)


def test_where_no_temporary_file_can_be_loaded_it_lies_beside_the_object(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_loader: None
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    before = sorted(artifact.path.parent.iterdir())
    assert callable(cute_launch.load_function(artifact.path))
    assert sorted(artifact.path.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("major", "chosen"), [(0, "cu13"), (12, "cu12"), (13, "cu13"), (14, "cu13"), (11, None)]
)
def test_the_runtime_is_of_the_newest_cuda_that_the_driver_knows(
    major: int, chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "nvidia_cutlass_dsl"
    for name in ("cu12", "cu13"):
        (root / name / "lib").mkdir(parents=True)
        (root / name / "lib" / cute_object.RUNTIME).touch()
    origin = str(root / "dsl_packages" / "cutlass" / "__init__.py")
    monkeypatch.setattr(cute_object, "find_spec", lambda _: type("Spec", (), {"origin": origin}))
    monkeypatch.setattr(driver, "cuda_version", lambda: (major, 0))
    found = cute_object.find_runtime()
    assert (found and found.parts[-3]) == chosen


def _mapped() -> set[str]:
    """Files of loaded kernels."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/tunegemm-" in line and ".so" in line}
