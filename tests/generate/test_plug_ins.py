"""Families of other packages: installed, known to every command, and harmless where they are broken."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.support.plug_ins import PLAIN, answer, install, run, write_package
from tunegemm.errors import SpaceError
from tunegemm.generate import families

ROOT = Path(__file__).parents[2]
KNOWN = """
import json, logging
from tunegemm.generate import families
print(json.dumps([families.NAMES, list(families.unusable())]))
"""
#: A plug-in without a kernel: the shipped library's family under another name.
BORROWED = """
from pathlib import Path
from tunegemm.generate.cublaslt import CublasLt
class Borrowed(CublasLt):
    name = {name!r}
    space_file = Path(__file__).with_name("space.toml")
FAMILY = Borrowed()
"""
SPACE = (
    'family = "{name}"\n[compile]\nalgorithm = ["torch.mm"]\n[launch]\nrequested = [1]\nworkspace_mib = [1]\n'
)
#: Makes of it a generator whose rule is a function.
GENERATING = (
    "FAMILY.__dict__.update(compiled=True, sources=(Path(__file__),), unlisted={}, rules=(print,),"
    " kernel_key=print, smem_bytes=print, compile=print)"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where somebody has installed a package with the family `plain_triton`."""
    return install(PLAIN, tmp_path_factory.mktemp("plain") / "installed")


def borrowed(folder: Path, package: str, name: str, space: str | None = None, **more: str) -> Path:
    module = package.replace("-", "_")
    files = {f"{module}/__init__.py": BORROWED.format(name=name)}
    files[f"{module}/space.toml"] = SPACE.format(name=name) if space is None else space
    return write_package(folder / package, package, {name: module} | more, files)


def tunegemm(plain: Path, home: Path, *words: str) -> str:
    places = {name: str(home / name) for name in ("TUNEGEMM_DB", "TUNEGEMM_CACHE_DIR")}
    done = run("-m", "tunegemm", *words, folders=(plain,), **places)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_shipped_families_are_declared_as_any_others_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][families.GROUP] == families.SHIPPED


def test_shipped_families_are_found_without_a_look_at_what_is_installed() -> None:
    code = """
import importlib.metadata, json
def refuse(**_): raise AssertionError("looked")
importlib.metadata.entry_points = refuse
from tunegemm.generate import families
from tunegemm.describe.problem import Problem
found = [families.get(name).name for name in families.SHIPPED]
found += [bool(families.kernel_source_hash("cute_sm90")), families.refusal_by_all(Problem(64, 64, 64))]
print(json.dumps(found))
"""
    assert answer(code) == [*families.SHIPPED, True, ""]


def test_a_library_is_no_generator() -> None:
    assert families.generator("skinny") is families.get("skinny")
    with pytest.raises(SpaceError, match="'cublaslt' is a library"):
        families.generator("cublaslt")
    with pytest.raises(SpaceError, match="'nothing' is not known"):
        families.generator("nothing")


def test_its_space_is_counted_by_its_rules(plain: Path, tmp_path: Path) -> None:
    table = tunegemm(plain, tmp_path, "space", "--shape", "512x512x512", "--family", "plain_triton")
    assert "registers" in table and "smem" in table


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
def test_its_kernels_are_compiled_and_ranked(plain: Path, tmp_path: Path) -> None:
    words = ("--shape", "512x512x512", "--device", "model:h200", "--families", "plain_triton", "--json")
    found = json.loads(tunegemm(plain, tmp_path, "tune", *words, "--trials", "2"))
    assert [p["candidate"]["family"] for p in found["predictions"]] == ["plain_triton"] * 2
    assert not found["outcomes"], "no kernel failed to compile"
    assert len(list((tmp_path / "TUNEGEMM_CACHE_DIR").rglob("*.o"))) == 2


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("one_core")
def test_it_conforms(plain: Path) -> None:
    """Its author's tests, which are those that every shipped family passes; it is installed for them."""
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-rf")
    done = run(*words, str(PLAIN / "family_tests.py"), folders=(plain,))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "failed" not in done.stdout


@pytest.mark.gpu
def test_it_is_measured_and_remembered(plain: Path, tmp_path: Path) -> None:
    shape = ("--shape", "500x520x264")
    words = (*shape, "--device", "cuda:0", "--families", "plain_triton,cublaslt", "--json")
    tunegemm(plain, tmp_path, "tune", *words)
    board = tunegemm(plain, tmp_path, "leaderboard", *shape, "--format", "json")
    assert "plain_triton" in board, board


def test_an_entry_point_may_name_the_object_itself(tmp_path: Path) -> None:
    folder = borrowed(tmp_path, "good-one", "good", own="good_one:FAMILY")
    names, unusable = answer(KNOWN, folder)  # type: ignore[misc]
    assert names == [*families.SHIPPED, "good"]
    assert len(unusable) == 1 and "its name is 'good'" in unusable[0], "of the entry point `own`"


@pytest.mark.parametrize(
    ("package", "name", "change", "reason"),
    [
        ("absent", "absent", None, "ModuleNotFoundError: No module named 'absent'"),
        ("broken", "broken", "1 / 0", "ZeroDivisionError"),
        ("empty", "empty", "x = 1", "it has no name, parameters"),
        ("thief", "cute_sm90", "", "tunegemm has a family of that name"),
        ("renamed", "renamed", "FAMILY.name = 'other'", "its name is 'other'"),
        ("a-b", "a-b", "", "an identifier"),
        (
            "spaceless",
            "spaceless",
            "FAMILY.__class__.space_file = Path('nothing.toml')",
            "nothing.toml: No such file",
        ),
        ("plain", "plain", GENERATING, "is no rule; tunegemm.generate.feasibility.rule makes one"),
        ("lazy", "lazy", "FAMILY.compiled = True", "it has no sources, unlisted, rules, kernel_key"),
    ],
)
def test_a_broken_one_is_one_line_and_harms_no_other(
    tmp_path: Path, package: str, name: str, change: str | None, reason: str
) -> None:
    module = package.replace("-", "_")
    good = borrowed(tmp_path, "good-one", "good")
    bad = borrowed(tmp_path, package, name)
    source = bad / module / "__init__.py"
    if change is None:
        source.unlink()
        (bad / module / "space.toml").unlink()
        source.parent.rmdir()
    elif package in ("broken", "empty"):
        source.write_text(change + "\n")
    else:
        source.write_text(source.read_text() + change + "\n")
    done = run("-c", KNOWN, folders=(good, bad))
    names, unusable = json.loads(done.stdout.splitlines()[-1])
    assert names == [*families.SHIPPED, "good"]
    (line,) = unusable
    assert done.stderr.splitlines() == [line], "said once"
    assert reason in line and f"upgrade or uninstall the package {package}" in line and name in line


def test_a_bad_space_file_is_named(tmp_path: Path) -> None:
    folder = borrowed(tmp_path, "odd", "odd", SPACE.format(name="odd").replace("requested", "reqested"))
    names, (line,) = answer(KNOWN, folder)  # type: ignore[misc]
    assert "odd" not in names and "did you mean 'requested'" in line and "space.toml" in line
    names, (line,) = answer(KNOWN, borrowed(tmp_path, "two", "two", SPACE.format(name="one")))  # type: ignore[misc]
    assert "two" not in names and "is of family 'one'" in line


def test_of_two_packages_with_one_name_the_first_has_it(tmp_path: Path) -> None:
    folders = [borrowed(tmp_path, package, "twice") for package in ("alpha", "beta")]
    names, (line,) = answer(KNOWN, *folders)  # type: ignore[misc]
    assert names == [*families.SHIPPED, "twice"]
    assert "alpha has a family of that name" in line and "uninstall the package beta" in line


def test_a_command_that_asks_for_a_broken_one_says_why(tmp_path: Path) -> None:
    folder = borrowed(tmp_path, "broken", "broken")
    (folder / "broken" / "__init__.py").write_text("import nothing_of_the_kind\n")
    done = run("-m", "tunegemm", "space", "--shape", "64x64x64", "--family", "broken", folders=(folder,))
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "nothing_of_the_kind" in done.stderr and "uninstall the package broken" in done.stderr
