"""What serving needs: it works without the packages of extras, and changes none of an engine beside it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.forks import Forks
from tests.support.processes import ROOT, environment
from tunegemm.errors import ExtraError, TunegemmError
from tunegemm.extras import BASE, EXTRAS, lack, named, require
from tunegemm.generate import generator
from tunegemm.generate.generator import Package

Run = Callable[[str], subprocess.CompletedProcess[str]]

#: What pip installs of each engine; see the files.
ENGINES = {path.stem: path for path in sorted((ROOT / "tests" / "data" / "engines").glob("*.txt"))}

#: Runs first: packages of the extras, and what only they bring, cannot be imported.
_BLOCKED = f"""
import sys
class Blocker:
    names = {sorted({name for names in EXTRAS.values() for name in names} | {"mako", "scipy"})!r}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
for name in [name for name in sys.modules if name.partition(".")[0] in Blocker.names]:  # torch has some
    del sys.modules[name]
sys.meta_path.insert(0, Blocker())
"""

#: Products as on an H200, but for the launch: of CPU tensors, planned by a record.
_SERVES = """
import torch
torch._C._cuda_getCurrentRawStream = lambda index: 0  # a CPU build of torch has none
import tunegemm
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.families import kernel_source_hash
from tunegemm.dispatch import api
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.planning import Planner
from tunegemm.torch import ops
from tunegemm.choose.snapshot import Snapshot, read_snapshot
from tunegemm.store.record import Record
served = []
def prepare(record, device):
    from tunegemm.dispatch.launchers import Prepared
    def kernel(a, b, out, *operands):
        served.append(record.candidate.family)
        out.copy_(a.float() @ b.float())
    return Prepared(kernel, tma=True)
device = find_device("model:h200")
def read():
    assert len(read_snapshot()) > 100  # what ships
    problem, candidate = Problem(512, 768, 1024), Candidate.make("cute_sm90", {"tile_m": 128})
    known = {"ratio": 1.1, "kernel_source": kernel_source_hash("cute_sm90"), "layer": ""}
    return Snapshot([Record(problem, candidate, device.fingerprint, **known)])
api.serve_by(Dispatcher(Planner(device_type="cpu", read=read, find=lambda spec: device, prepare=prepare)))
ops.DEVICE_TYPE = "cpu"
half = {"dtype": torch.bfloat16}
a, weight = torch.ones(512, 1024, **half), torch.ones(768, 1024, **half)
assert tunegemm.matmul(a, weight.t())[0, 0] == 1024
assert tunegemm.linear(a, weight)[0, 0] == 1024
assert tunegemm.matmul(torch.ones(48, 1024, **half), weight.t())[0, 0] == 1024
model = torch.nn.Linear(1024, 768, bias=False, **half)
tunegemm.patch(model)
model(a).sum().backward()
with torch.no_grad():
    model(a)
with tunegemm.policy("deterministic"):
    tunegemm.matmul(a, weight.t())
with tunegemm.record("shapes.json"):
    tunegemm.matmul(a, weight.t())
tunegemm.Operation
print(served)
"""


@pytest.fixture
def run(forks: Forks, tmp_path: Path) -> Run:
    """Runs a program on a host without the extras, in a folder that is its home."""
    own = environment(TUNEGEMM_DB="", HOME=str(tmp_path), XDG_DATA_HOME=str(tmp_path / "data"))
    return lambda code: forks.run(_BLOCKED + code, env=own, cwd=tmp_path)


def test_a_host_without_extras_serves(run: Run, tmp_path: Path) -> None:
    done = run(_SERVES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cute_sm90") >= 4, done.stdout  # the record's kernel, not torch's product
    assert (tmp_path / "shapes.json").exists()


def test_what_is_missing_is_named_with_its_extra(run: Run) -> None:
    done = run(
        """
import tunegemm
print(tunegemm.explain.__name__)
for call in (lambda: tunegemm.tune("64x64x64", device="model:h200"), lambda: tunegemm.Database):
    try:
        call()
    except tunegemm.TunegemmError as error:
        print(error)
"""
    )
    remedy = "is not installed; pip install 'tunegemm[tune]' brings it"
    assert done.stdout.splitlines() == ["explain", f"alembic {remedy}", f"sqlalchemy {remedy}"], done.stderr
    assert done.returncode == 0


def test_a_database_on_a_server_is_a_warning(run: Run) -> None:
    asked = "from tunegemm.store.layers import read_lookups; print(*read_lookups()[2])"
    done = run(f"import os; os.environ['TUNEGEMM_DB'] = 'postgresql://host/name'; {asked}")
    assert "tunegemm[tune]" in done.stdout, done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_online_tuning_says_what_it_lacks(run: Run) -> None:
    done = run(
        """
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.background import OnlineTuning
online = OnlineTuning(wait=lambda device: True)
online.later(Problem(64, 64, 64), find_device("model:h200"), (), lambda _, warning: print(warning))
while not online.is_idle:
    pass
"""
    )
    assert done.stdout.startswith("tuning online failed") and "'tunegemm[tune]'" in done.stdout, done


COMMAND = """
from tunegemm.cli import main
sys.argv = ["tunegemm", *{words}]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--version"], ["run", "--", "true"], ["doctor"]])
def test_commands_of_a_host_that_serves_need_no_extra(run: Run, words: list[str]) -> None:
    done = run(COMMAND.format(words=words))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done
    assert "pip install" not in done.stderr and (words != ["doctor"] or "tunegemm[tune]" in done.stdout), done


@pytest.mark.slow  # starts the command twice
def test_commands_that_need_more_say_so_in_one_line(run: Run) -> None:
    done = run(COMMAND.format(words=["tune", "--shape", "64x64x64", "--device", "model:h200"]))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "tunegemm: sqlalchemy is not installed; pip install 'tunegemm[tune]' brings it"
    ]
    done = run(COMMAND.format(words=["explain", "--shape", "512x6144x4096", "--device", "model:h200"]))
    assert done.returncode == 0, done.stderr


def test_a_host_without_any_package_is_told_so() -> None:
    """As after `pip install --no-deps`: -S leaves out all that is installed."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tunegemm.cli"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "tunegemm: typer is not installed; pip install typer\n")


@pytest.mark.parametrize("name", [name for name in BASE if name != "typer"])
def test_a_package_that_every_command_needs_is_named(name: str, run: Run) -> None:
    blocked = f"Blocker.names.append({name!r}); sys.modules.pop({name!r}, None)\n"
    done = run(blocked + COMMAND.format(words=["doctor"]))
    assert (done.returncode, done.stderr) == (2, f"tunegemm: {name} is not installed; pip install {name}\n")


def test_a_package_that_python_does_not_find_is_there() -> None:
    """As the DSL of `pip install --target`, where Python ignores its .pth file."""
    said = str(Package("no_module_of_it", "pytest").missing())
    assert said.startswith(
        f"pytest {pytest.__version__} is installed, but Python finds no module no_module_of_it"
    )
    assert Package("no_module_of_it", "no-such-package").missing() == (
        "no-such-package is not installed; pip install no-such-package"
    )


@pytest.mark.parametrize(
    ("version", "is_older"), [("4.8", False), ("4.8rc1", False), ("", False), ("4.7.9", True), ("4", True)]
)
def test_versions_that_are_not_just_numbers(
    version: str, is_older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "package_version", lambda name: version)
    said = Package("pytest", "pytest", (4, 8)).missing()
    assert said == (f"pytest {version} is older than 4.8; pip install 'pytest>=4.8'" if is_older else None)


def test_an_error_names_the_extra() -> None:
    assert lack(ModuleNotFoundError("", name="torchvision")) is None
    assert lack(ImportError("cannot import name", name="optuna")) is None  # it is there
    with pytest.raises(ExtraError, match=r"matplotlib.*'tunegemm\[report\]'"), named():
        raise ModuleNotFoundError("", name="matplotlib.figure")
    with pytest.raises(ModuleNotFoundError, match="torchvision"), named():
        raise ModuleNotFoundError("torchvision", name="torchvision")
    assert issubclass(ExtraError, TunegemmError) and issubclass(ExtraError, ImportError)
    require("tune")  # the tests have it


def project() -> dict[str, list[str]]:
    """The requirements of the package by extra; those of every installation under an empty name."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": table["dependencies"], **table["optional-dependencies"]}


def test_the_table_is_that_of_the_project() -> None:
    for extra, names in EXTRAS.items():
        required = {canonicalize_name(Requirement(text).name) for text in project()[extra]}
        assert {*names} == required - {"tunegemm"}, extra
    assert {*BASE} <= {Requirement(text).name for text in project()[""]}


def conflicts(requirements: Iterable[str], pins: dict[str, str]) -> tuple[set[str], set[str]]:
    """What requirements add to an environment and would change in it, with all that they require."""
    added: set[str] = set()
    changed: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        if name == "tunegemm":
            waiting += [Requirement(text) for extra in wanted.extras for text in project()[extra]]
        elif name in pins:
            if not wanted.specifier.contains(pins[name], prereleases=True):
                changed.add(f"{name} {pins[name]}, not {wanted.specifier}")
        elif name not in added:
            added.add(name)
            waiting += [Requirement(text) for text in metadata.requires(name) or ()]
    return added, changed


def pinned(path: Path) -> dict[str, str]:
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "vllm-0.26.0"])
def test_beside_an_engine_nothing_of_its_packages_changes(engine: str) -> None:
    pins = pinned(ENGINES[engine])
    assert len(pins) > 150
    assert conflicts(project()[""], pins) == ({"platformdirs"}, set())
    added, changed = conflicts([*project()["tune"], *project()["report"]], pins)
    assert changed == set() and {"optuna", "sqlalchemy"} <= added
    assert conflicts(project()["cu13"], pins)[1] == set()


def test_vllm_of_an_older_dsl_wants_another_one() -> None:
    """Its DSL 4.6 has no runtime that loads the shipped kernels, and does not compile them."""
    _, changed = conflicts(project()[""], pinned(ENGINES["vllm-0.26.0"]))
    assert changed == {"nvidia-cutlass-dsl 4.6.0, not <5,>=4.8.0"}


@pytest.mark.engines
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "vllm-0.26.0"])
def test_the_wheel_changes_nothing_that_pip_installed_of_an_engine(
    engine: str, wheel: Path, tmp_path: Path
) -> None:
    """pip resolves both together; and beside an engine that is there it installs the wheel and platformdirs.

    The environment has of each of the engine's packages what pip goes by, as the index has it, and no code:
    that would be 9 GB.
    """
    name, _, version = engine.rpartition("-")
    report = tmp_path / "report.json"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    pip += ["--only-binary", ":all:", "--target", str(tmp_path / "nowhere"), "--report", str(report)]
    pip += ["--constraint", str(ENGINES[engine]), f"{name}=={version}", str(wheel)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    installed = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    found = {canonicalize_name(one["name"]): one["version"] for one in installed}
    pins = pinned(ENGINES[engine])
    assert {name: found[name] for name in pins} == pins
    assert found.keys() - pins.keys() == {"tunegemm", "platformdirs"}

    venv.create(tmp_path / "clean", with_pip=True)
    python = str(tmp_path / "clean" / "bin" / "python")
    (packages,) = (tmp_path / "clean" / "lib").glob("*/site-packages")
    for one in installed:
        if canonicalize_name(one["name"]) in pins:
            folder = packages / f"{one['name'].replace('-', '_')}-{one['version']}.dist-info"
            folder.mkdir()
            lines = [f"{field.title()}: {one[field]}" for field in ("metadata_version", "name", "version")]
            lines += [f"Requires-Dist: {text}" for text in one.get("requires_dist", ())]
            lines += [f"Provides-Extra: {text}" for text in one.get("provides_extra", ())]
            (folder / "METADATA").write_text("\n".join(lines).replace("Metadata_V", "Metadata-V") + "\n")
            (folder / "INSTALLER").write_text("pip\n")
            (folder / "RECORD").write_text("")

    def freeze() -> set[str]:
        asked = subprocess.run([python, "-m", "pip", "freeze", "--all"], capture_output=True, text=True)
        return set(asked.stdout.splitlines())

    before = freeze()
    assert len(before) >= len(pins)
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    after = freeze()
    assert before <= after and {line.split("==")[0].split(" @")[0] for line in after - before} == {
        "tunegemm", "platformdirs",
    }  # fmt: skip
    subprocess.run([python, "-m", "pip", "check"], check=True)
