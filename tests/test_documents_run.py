"""Code blocks of the README and the guide run as printed, from the built wheel, in an empty folder.

Python blocks of one document run in one process, in their order. Commands run one by one, a tuning with few
trials. `_NOT_HERE` lists what does not run, and why. On a host without a GPU those that measure end with one
line that says what they need, which is what their reader would see there. A shell starts the commands of the
README and those that start a program; the others run in a fork of a process that has imported the packages
of others which most of them import.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import typer.main

from tests.support.forks import Forks
from tunegemm.cli import app
from tunegemm.report.doctor import VARIABLES

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "docs" / "quickstart.md",
    ROOT / "docs" / "reference" / "python.md",
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Blocks of Python that need a GPU say so in their first line.
_NEEDS_GPU = "# on a GPU"
#: Lines for other hosts or for set-up, and what runs them instead.
_NOT_HERE = {
    "make ": ".ci/run; tests/test_make.py",
    "pip ": "make; tests/test_recipes.py installs the wheel",
    "createdb ": "tests/store/test_durability.py",
    "ray ": "tests/tuning/test_cluster.py",
    "export ": "the commands below them, in tests/tuning/test_cluster.py and tests/test_recipes.py",
    "tunegemm pack --from llama.json ": "the quickstart's, of few products: this compiles a model's kernels",
}
#: On a GPU it measures for half an hour; elsewhere it prints what ships.
_LONG_ON_A_GPU = "tunegemm tune --from llama.json "
#: For every tuning: all trials would compile hundreds of kernels, in five minutes, and show no more of the
#: commands. A second worker would import the compiler again, for as
#: much of the processor's time as it saves.
_FEW_TRIALS = " --workers 1 --trials 1"
#: Of a tuning beside one that differs in its shapes alone: a family whose kernels compile in a second.
_QUICK = " --families triton_tma"
#: Of groups in other layouts and dtypes: a small tile compiles in half the time.
_SMALL = " --kernels ^..128x64x64"
#: What a shell reads in a command.
_SHELLS = re.compile(r"[|&;<>$*?~`]")
#: Rows of operands in Python blocks, whose products a CPU computes; 16 take seconds less.
_ROWS = re.compile(r"\(512, ")
#: What the commands call the program below.
_CALLED = re.compile(r"\bpython (serve|train)\.py( --steps \d+)?")
#: What a host without a GPU says of a command that measures, or that shows what was measured.
_WITHOUT_GPU = re.compile(r"\Atunegemm: .*(on a GPU|no CUDA device here|for the recorded H200: ).*\n\Z")

#: Its product is a recorded one, so that it can be tuned without a GPU, too.
PROGRAM = """
import torch
half = {"dtype": torch.bfloat16}
torch.nn.functional.linear(torch.ones(16, 4096, **half), torch.ones(4096, 4096, **half))
"""
#: Of the model that the guide names, what its layers need.
CONFIG = """{
  "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
  "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256, "torch_dtype": "bfloat16"
}"""


def blocks(document: Path, language: str) -> list[str]:
    return [text for found, text in _BLOCK.findall(document.read_text()) if found == language]


def written(documents: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """The command lines of the documents, without their comments."""
    for document in documents:
        for block in blocks(document, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                if command := " ".join(shlex.split(line, comments=True)):
                    yield document, command


def commands() -> list[tuple[Path, str]]:
    """Those that run here, each once, by whatever name it calls the program."""
    found: dict[str, tuple[Path, str]] = {}
    for document, command in written(DOCUMENTS):
        if not command.startswith(tuple(_NOT_HERE)):
            found.setdefault(_CALLED.sub("python program", command), (document, command))
    return list(found.values())


def wrong_in(command: str) -> str | None:
    """What a line that is not run here names and is not there."""
    program, *words = command.split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if program == "make":
        known = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
        wanted = [word for word in words if "=" not in word]
    elif program == "pip":
        known = ["install", "uninstall", "-c", "constraints.txt", "-e", project["name"]]
        known += project["optional-dependencies"]
        wanted = [name for word in words for name in re.sub(r"^\.\[(.*)\]$", r"\1", word).split(",")]
        known += [word for word in words if word.startswith("dist/tunegemm-") and word.endswith(".whl")]
    elif program == "export":
        known, wanted = [*VARIABLES, "RAY_ADDRESS"], [word.partition("=")[0] for word in words]
    elif program == "ray":
        known, wanted = ["start", "--head", "--address"], [word.partition("=")[0] for word in words]
    elif program == "tunegemm":
        command_of = typer.main.get_command(app).get_command(None, words[0])  # type: ignore[attr-defined]
        known = [flag for one in command_of.params for flag in one.opts]
        wanted = [word for word in words if word.startswith("--")]
    else:
        known, wanted = ["tunegemm"], words
    return next((word for word in wanted if word not in known), None)


def test_lines_that_are_not_run_name_what_is_there() -> None:
    lines = [line for _, line in written(DOCUMENTS) if line.startswith(tuple(_NOT_HERE))]
    lines += [line for _, line in written([ROOT / "CONTRIBUTING.md"]) if line.startswith("make ")]
    assert {line: wrong for line in lines if (wrong := wrong_in(line)) is not None} == {}
    for prefix in _NOT_HERE:
        assert any(line.startswith(prefix) for line in lines), f"no document has a line {prefix}"
    for line in ("make tuned", "pip install -e .[tuned]", "export TUNEGEMM_PAK=x", "tunegemm pack --form x"):
        assert wrong_in(line) is not None, line


@pytest.fixture(scope="module")
def installed(wheel: Path, shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who installed the wheel: its `tunegemm` and `python` are on the path."""
    folder = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--no-index")
    subprocess.run([*pip, "--target", str(folder / "site"), str(wheel)], check=True)
    home = folder / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TUNEGEMM_")}
    environment = kept | {
        "PATH": f"{folder / 'site' / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "site"),
        "HOME": str(home),
        "XDG_DATA_HOME": str(home / "data"),
        "XDG_CACHE_HOME": str(shared_folder / "cache"),  # kernels that other tests have compiled are there
        "COLUMNS": "160",
    }
    asked = "import shutil, tunegemm; print(tunegemm.__file__, shutil.which('tunegemm'))"
    for place in subprocess.check_output(
        ["python", "-c", asked], cwd=home, env=environment, text=True
    ).split():
        assert Path(place).is_relative_to(folder / "site"), place
    return environment


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a reader works in: what the commands name is there."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("train.py", "serve.py"):
        (folder / name).write_text(PROGRAM)
    (folder / "Llama-3.1-8B").mkdir()
    (folder / "Llama-3.1-8B" / "config.json").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """With what takes most of a command's time: its imports."""
    heavy = ("matplotlib.pyplot", "optuna", "pandas", "rich.table", "sqlalchemy.orm", "typer")
    running = Forks("torch._inductor", *heavy)
    yield running
    running.close()


#: Whose blocks `make test` runs, too.


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_python_blocks_run(document: Path, installed: dict[str, str], forks: Forks, tmp_path: Path) -> None:
    import torch

    found = [
        b for b in blocks(document, "python") if torch.cuda.is_available() or not b.startswith(_NEEDS_GPU)
    ]
    found = [_ROWS.sub("(16, ", re.sub(r"\btrials=\d+", "trials=1", block)) for block in found]
    quiet = "import warnings; warnings.simplefilter('ignore')"
    run = forks.run("\n".join([quiet, *found]), env=installed, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_run(installed: dict[str, str], place: Path, forks: Forks) -> None:
    """All in one test and in their order: what one writes or compiles the next one finds."""
    import torch

    failed: list[str] = []
    tuned: set[frozenset[str]] = set()
    for document, command in commands():
        if command.startswith(_LONG_ON_A_GPU) and torch.cuda.is_available():
            continue
        if command.startswith("tunegemm tune "):
            kind = frozenset(word for word in command.split() if word.startswith("--")) - {"--budget"}
            is_another = "--groups" in kind and any("--groups" in one for one in tuned)
            command += _FEW_TRIALS + (_QUICK if kind in tuned else _SMALL if is_another else "")
            tuned.add(kind)
        words = shlex.split(command)
        is_plain = (
            words[0] == "tunegemm" and words[1] not in ("run", "record") and not _SHELLS.search(command)
        )
        if document.stem == "README" or not is_plain:
            shell = ["/bin/sh", "-c", command]
            run = subprocess.run(shell, cwd=place, env=installed, capture_output=True, text=True, timeout=300)
        else:
            code = f"import sys; sys.argv = {words}; from tunegemm.cli import main; sys.exit(main())"
            run = forks.run(code, env=installed, cwd=place)
        said = run.stdout + run.stderr
        fine = run.returncode == 0 or (not torch.cuda.is_available() and _WITHOUT_GPU.search(said))
        if not fine or "Traceback" in said:
            failed.append(f"{document.name}: {command} -> {run.returncode}\n{said[-800:]}")
    assert not failed, "\n\n".join(failed)
