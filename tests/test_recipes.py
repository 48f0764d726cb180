"""The recipes of the guides as they stand: the Dockerfile's steps, compose, systemd and Slurm.

Each runs in a virtual environment with what `pip install` of the wheel brings and nothing else: pip
installs the wheel without a network, beside links to the packages that its requirements name. A folder stands
for the image's root. The engine, `srun` and `torchrun` are small programs of that name.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
import venv
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.commands import here
from tests.support.processes import ROOT
from tunegemm.describe.device import cuda_device_count, find_device
from tunegemm.describe.problem import Problem
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.families import kernel_source_hash
from tunegemm.store import Record, packing

pytestmark = [pytest.mark.long, pytest.mark.slow]

#: Recipes are the blocks of these languages; `sh` and `python` are run by test_documents_run.py.
LANGUAGES = ("bash", "docker", "ini", "yaml")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

#: What an engine does here: it multiplies, and says how it was started and what serves it.
ENGINE = """#!{python}
import json, os, sys
import torch
torch.ones(2, 2) @ torch.ones(2, 2)
enabled = "tunegemm" in sys.modules
from tunegemm.store.layers import read_texts
records, warnings = read_texts()
packed = sum(one.layer == "pack" for one in records)
policy = os.environ.get("TUNEGEMM_POLICY", "fastest")
print(json.dumps([sys.argv[1:], enabled, packed, warnings, policy]))
"""
#: Runs what follows its own options.
PASSES_ON = '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n'


def recipes() -> list[tuple[str, str]]:
    documents = [
        ROOT / "README.md",
        ROOT / "docs" / "quickstart.md",
        *sorted((ROOT / "docs/guide").glob("*.md")),
    ]
    found = [block for path in documents for block in _BLOCK.findall(path.read_text())]
    return [(language, text) for language, text in found if language in LANGUAGES]


def required(names: Iterable[str]) -> set[str]:
    """Names of the installed packages that these requirements bring, with all that they require."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in names]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        applies = one.marker is None or any(one.marker.evaluate({"extra": e}) for e in ("", *one.extras))
        if applies and name not in found:
            found.add(name)
            waiting += [Requirement(text) for text in metadata.requires(name) or ()]
    return found


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a host with an engine, torch and the other packages that a base installation requires."""
    root = tmp_path_factory.mktemp("image")
    for name in ("opt", "tmp", "home", "var/lib/vllm"):
        (root / name).mkdir(parents=True)
    venv.create(root / "opt/venv")
    (site,) = (root / "opt/venv/lib").glob("*/site-packages")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in {"pip", *required(wanted)}:
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__", "bin"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    python = root / "opt/venv/bin/python"
    programs = {"vllm": ENGINE.format(python=python), "srun": PASSES_ON}
    programs["pip"] = f'#!/bin/bash\nexec {python} -m pip "$@"\n'  # ensurepip unpacks another in five seconds
    programs["torchrun"] = '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec python "$@"\n'
    for name, text in programs.items():
        (root / "opt/venv/bin" / name).write_text(text)
        (root / "opt/venv/bin" / name).chmod(0o755)
    return root


@pytest.fixture(scope="module")
def context(wheel: Path, image: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the Dockerfile: the wheel and a pack."""
    folder = tmp_path_factory.mktemp("context")
    (folder / "dist").mkdir()
    shutil.copy(wheel, folder / "dist")
    at, device = datetime(2026, 11, 21, tzinfo=UTC), find_device("model:h200")
    known = (
        Problem.parse("64x64x64"),
        TORCH_MM,
        device.fingerprint,
        "torch.mm",
        9.0,
        9.0,
        1.0,
        0.01,
        1e-3,
        True,
        at,
    )
    packing.pack([Record(*known, kernel_source_hash(TORCH_MM.family))], folder / "llama.pack", workers=1)
    (model := folder / "model").mkdir()
    facts = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps(facts | {"num_hidden_layers": 1, "vocab_size": 1024}))
    (folder / "train.py").write_text("import torch\nprint(torch.ones(2, 2) @ torch.ones(2, 2))\n")
    here("shapes", model, "--rows", "64", "--out", folder / "shapes.json")
    return folder


def in_image(text: str, root: Path) -> str:
    """Absolute paths of a recipe, in the folder that stands for the image's root."""
    return re.sub(r"(?<![\w.])/(opt|tmp|var)/", rf"{root}/\1/", text)


def run(words: list[str], root: Path, cwd: Path, **variables: str) -> CompletedProcess[str]:
    environment = {
        "PATH": f"{root / 'opt/venv/bin'}:/usr/bin:/bin", "HOME": str(root / "home"), "PIP_NO_INDEX": "1",
        "PIP_COMPILE": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "TMPDIR": str(root / "tmp"),
    }  # fmt: skip
    environment |= {name: in_image(value, root) for name, value in variables.items()}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=170)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def only(language: str) -> str:
    (text,) = (text for found, text in recipes() if found == language)
    return text


def build(text: str, image: Path, context: Path) -> tuple[list[str], list[str], dict[str, str]]:
    """Runs a Dockerfile's steps: its entry point, its command and its variables."""
    ends: dict[str, list[str]] = {"ENTRYPOINT": [], "CMD": []}
    variables: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        step, _, rest = line.partition(" ")
        if step in ends:
            ends[step] = json.loads(rest)
        elif step == "ENV":
            variables |= dict([rest.split("=", 1)])
        elif step == "COPY":
            *sources, target = rest.split()
            found = [path for one in sources for path in context.glob(one)]
            assert found, f"{line}: nothing to copy"
            for path in found:
                shutil.copy(path, in_image(target, image))
        elif step == "RUN":
            done = run(["/bin/sh", "-c", in_image(rest, image)], image, context, **variables)
            assert done.returncode == 0, done
        else:
            assert step == "FROM", f"{line}: not a step of these recipes"
    return ends["ENTRYPOINT"], ends["CMD"], variables


@pytest.fixture(scope="module")
def built(image: Path, context: Path) -> tuple[list[str], list[str], dict[str, str]]:
    return build(only("docker"), image, context)


Built = tuple[list[str], list[str], dict[str, str]]


def serves(done: CompletedProcess[str], *arguments: str, policy: str = "fastest") -> None:
    """The engine ran with these arguments, with tunegemm in its process and the pack's record."""
    assert done.returncode == 0, done
    assert json.loads(done.stdout.splitlines()[-1]) == [["serve", *arguments], True, 1, [], policy], done


def test_the_container(built: Built, image: Path, context: Path) -> None:
    entry, command, variables = built
    done = run([*entry, *command], image, context, **variables)
    serves(done, "MODEL")
    assert cuda_device_count() or "torch computes every product of vllm" in done.stderr
    doctor = run(["tunegemm", "doctor"], image, context, **variables)
    assert doctor.returncode == 0 and re.search(r"^ok +pack +\S+: 1 record", doctor.stdout, re.M), doctor


def test_compose(built: Built, image: Path, context: Path) -> None:
    entry, command, variables = built
    services = yaml.safe_load(only("yaml"))["services"]
    for one in services.values():
        assert (
            one["build"] == "."
            and one["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"
        )
        words = one.get("command", command)
        done = run([*entry, *words], image, context, **variables, **one["environment"])
        serves(done, *words, policy="deterministic")


def test_systemd(built: Built, image: Path, context: Path) -> None:
    unit: dict[str, dict[str, list[str]]] = {}
    for line in filter(None, only("ini").splitlines()):
        if line.startswith("["):
            section = unit.setdefault(line.strip("[]"), {})
        else:
            name, _, value = line.partition("=")
            section.setdefault(name, []).append(value)
    assert set(unit) == {"Unit", "Service", "Install"}
    assert set(unit["Service"]) <= {"Environment", "ExecStart", "DynamicUser", "StateDirectory", "Restart"}
    variables = dict(one.split("=", 1) for one in unit["Service"]["Environment"])
    (command,) = unit["Service"]["ExecStart"]
    assert command.startswith("/"), "systemd wants a whole path"
    serves(run(shlex.split(in_image(command, image)), image, context, **variables), "MODEL")


def test_slurm(built: Built, image: Path, context: Path) -> None:
    """Tuning wants the extra `tune`, whose packages come from the environment of this test."""
    text = only("bash")
    options = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    assert options and all(re.fullmatch(r"--[a-z-]+=[\w:.-]+", one) for one in options), options
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    whole = text if cuda_device_count() else text.replace("set -e\n", "")
    packages = str(Path(yaml.__file__).parent.parent)
    done = run(["bash", "-c", whole], image, context, PYTHONPATH=packages)
    assert done.returncode == 0 and "tensor([[2., 2.]," in done.stdout, done
    if not cuda_device_count():
        assert "tunegemm: --devices 'all': no CUDA device here" in done.stderr
