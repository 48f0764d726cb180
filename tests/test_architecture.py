"""The direction of imports, the cost of `import tunegemm`, and the public names."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tunegemm

PACKAGE = Path(tunegemm.__file__).parent

#: A module imports only from modules to its left.
ORDER = (
    "errors", "resources", "files", "untrusted", "describe", "generate", "measure", "search", "store",
    "tuning", "serve", "report", "cli",
)  # fmt: skip

PUBLIC = [
    "Candidate", "Database", "Device", "Epilogue", "Operation", "Problem", "TunegemmError", "addmm",
    "baddbmm", "bmm", "disable", "enable", "explain", "gated_linear", "interleave", "linear", "matmul",
    "patch", "policy", "record", "scaled_mm", "tune", "unpatch",
]  # fmt: skip


def room(path: Path, package: Path = PACKAGE) -> str:
    """The entry of ORDER that a source file belongs to; empty for the package's `__init__`, `__main__`."""
    first = path.relative_to(package).parts[0]
    name = first.removesuffix(".py")
    return "" if name in ("__init__", "__main__") else name


def imported_rooms(path: Path, package: Path = PACKAGE) -> Iterator[tuple[int, str]]:
    """Line and room of each import of tunegemm in a file, of every scope and form."""
    module = ("tunegemm", *path.relative_to(package).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative: resolved against the package that holds this module
                parts = (*module[: len(module) - node.level], *([base] if base else []))
                base = ".".join(parts)
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "tunegemm" and len(parts) > 1:
                yield node.lineno, parts[1]


def violations(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        own = room(path, package)
        if not own:
            continue
        for line, other in imported_rooms(path, package):
            if other not in ORDER:
                continue  # a public name of the package itself, judged below
            if own not in ORDER or ORDER.index(other) > ORDER.index(own):
                found.append(f"{path.relative_to(package)}:{line} imports {other}")
    return found


def test_every_module_has_its_place() -> None:
    rooms = {room(path) for path in PACKAGE.rglob("*.py")} - {""}
    assert rooms <= set(ORDER), f"not in ORDER: {sorted(rooms - set(ORDER))}"


def test_imports_point_one_way() -> None:
    assert violations(PACKAGE) == []


def test_the_check_sees_every_form_of_import(tmp_path: Path) -> None:
    package = tmp_path / "tunegemm"
    (package / "search").mkdir(parents=True)
    (package / "search" / "a.py").write_text(
        "import tunegemm.cli\n"
        "from tunegemm import store\n"
        "from tunegemm.tuning import tune\n"
        "from tunegemm.describe import predict\n"
        "def f():\n    from ..serve import matmul\n    from .b import c\n"
    )
    assert [line.partition(" ")[2] for line in violations(package)] == [
        "imports cli", "imports store", "imports tuning", "imports serve",
    ]  # fmt: skip


def test_no_module_imports_from_the_package_root() -> None:
    """`from tunegemm import matmul` inside the package would load modules from the wrong end."""
    found = [
        f"{path.relative_to(PACKAGE)}:{line} imports tunegemm.{name}"
        for path in PACKAGE.rglob("*.py")
        if room(path)
        for line, name in imported_rooms(path)
        if name in PUBLIC
    ]
    assert found == []


def loaded_after(statement: str) -> set[str]:
    """Top-level and tunegemm modules in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


HEAVY = {"torch", "cutlass", "triton", "optuna", "sqlalchemy", "alembic", "pandas", "numpy", "typer"}


def test_import_is_cheap() -> None:
    loaded = loaded_after("import tunegemm; tunegemm.Problem; tunegemm.Candidate; tunegemm.Device")
    assert loaded & HEAVY == set()
    assert not loaded & {"tunegemm.generate", "tunegemm.tuning", "tunegemm.cli"}


def test_dispatch_leaves_tuning_out() -> None:
    """The hot path of `tunegemm.matmul` knows neither search nor SQL; only torch is loaded."""
    loaded = loaded_after("import tunegemm; tunegemm.matmul")
    assert loaded & {"optuna", "sqlalchemy", "alembic", "pandas", "typer"} == set()
    assert not loaded & {"tunegemm.search", "tunegemm.tuning", "tunegemm.cli"}


def test_command_line_starts_light() -> None:
    """Shell completion and `--help` must not wait for torch."""
    loaded = loaded_after("import tunegemm.cli")
    assert loaded & (HEAVY - {"typer"}) == set()


def test_public_names_are_pinned() -> None:
    assert tunegemm.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(tunegemm))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_resolves(name: str) -> None:
    value = getattr(tunegemm, name)
    assert value.__name__ == name
    assert value.__module__.startswith("tunegemm.")


def test_unknown_public_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'matmull'"):
        _ = tunegemm.matmull
