"""The direction of imports, the cost of `import tunegemm`, and the public names."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tunegemm
from tests.support.forks import Forks
from tests.support.processes import loaded_after
from tests.support.syntax import nodes

PACKAGE = Path(tunegemm.__file__).parent

#: The ground floor's files, then the rooms. A file imports only from its own room and from those to its left.
ORDER = (
    "errors", "extras", "resources", "files", "untrusted", "describe", "compile", "generate", "model",
    "measure", "search", "store", "choose", "tuning", "dispatch", "groups", "torch", "layers", "engines",
    "report", "cli", "serve", "testing",
)  # fmt: skip

PUBLIC = [
    "Candidate", "Database", "Device", "Epilogue", "Failure", "Measurement", "Operation", "Problem",
    "Progress", "Record", "Space", "TuneResult", "TunegemmError", "TunegemmWarning", "addmm", "baddbmm",
    "bmm", "disable", "enable", "experts", "explain", "gated_linear", "grouped_mm", "interleave", "linear",
    "matmul", "mm", "patch", "policy", "quantize", "record", "refresh", "scaled_grouped_mm", "scaled_mm",
    "tune", "unpatch",
]  # fmt: skip


def module_of(path: Path, package: Path = PACKAGE) -> str:
    """The dotted name of a source file."""
    parts = ("tunegemm", *path.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The entry of ORDER that a module belongs to; empty for the package's `__init__` and `__main__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else ""


@functools.cache
def imports(package: Path) -> list[tuple[str, int, str]]:
    """Each import of a module of the package: who, in which line, which one.

    Of every scope and form, those for type checkers too: what only types need is needed all the same.
    """
    files = {module_of(path, package): path for path in package.rglob("*.py")}
    all_found = []
    for module, path in sorted(files.items()):
        inside = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in nodes(path):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:  # relative: resolved against the package that holds this module
                    above = inside.split(".")[: len(inside.split(".")) - node.level + 1]
                    base = ".".join([*above, *([base] if base else [])])
                names = [f"{base}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                # The longest beginning that is a file: the rest is a name in it.
                parts = name.split(".")
                beginnings = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
                found = next((one for one in beginnings if one in files), None)
                if found is not None and found != module:
                    all_found.append((module, node.lineno, found))
    return all_found


def upward(package: Path) -> list[str]:
    """Imports that run from a room to one further right."""
    return [
        f"{module}:{line} imports {other}"
        for module, line, other in imports(package)
        if room(module) and room(other) and ORDER.index(room(other)) > ORDER.index(room(module))
    ]


def circles(package: Path) -> list[str]:
    """A circle of files, if there is one. The package's own `__init__` names everything, lazily."""
    graph: dict[str, set[str]] = {}
    for module, _, other in imports(package):
        if room(module) and room(other):
            graph.setdefault(module, set()).add(other)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def test_every_module_has_its_place() -> None:
    rooms = {room(module_of(path)) for path in PACKAGE.rglob("*.py")} - {""}
    assert rooms <= set(ORDER), f"not in ORDER: {sorted(rooms - set(ORDER))}"


def test_no_import_runs_up() -> None:
    assert upward(PACKAGE) == []


def test_commands_and_reports_name_no_room_of_run_time() -> None:
    """What these offer, commands take from values of `describe` and from `dispatch.extension`."""
    above = {"groups", "torch", "layers", "engines"}
    shown = [one for one in imports(PACKAGE) if room(one[0]) in ("report", "cli") and room(one[2]) in above]
    assert shown == []


def test_no_circle_of_files() -> None:
    assert circles(PACKAGE) == []


def test_the_checks_see_every_form_of_import(tmp_path: Path) -> None:
    package = tmp_path / "tunegemm"
    for name, text in {
        "search/a.py": (
            "import tunegemm.cli\nfrom tunegemm import store\nfrom tunegemm.tuning import tune\n"
            "from tunegemm.describe import problem\n"
            "def f():\n    from ..dispatch import matmul\n    from .b import c\n"
        ),
        "search/b.py": "if TYPE_CHECKING:\n    from tunegemm.search import a\n",
        "describe/problem.py": "",
        **{
            f"{name}/__init__.py": "" for name in ("search", "cli", "store", "tuning", "dispatch", "describe")
        },
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert [line.partition(" ")[2] for line in upward(package)] == [
        "imports tunegemm.cli", "imports tunegemm.store", "imports tunegemm.tuning",
        "imports tunegemm.dispatch",
    ]  # fmt: skip
    assert len(circles(package)) == 1 and "search.b" in circles(package)[0]


def test_no_module_imports_from_the_package_root() -> None:
    """`from tunegemm import matmul` inside the package would load modules from the wrong end."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if room(module_of(path))
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module == "tunegemm" and not node.level
        and {alias.name for alias in node.names} & set(PUBLIC)
    ]  # fmt: skip
    assert found == []


#: Private names of the package that tests may touch, with the reason.
TOUCHED = {
    "_swizzle": "cute_sm80's kernel, whose text is hashed into records",
    "_address": "cute_sm80's kernel, whose text is hashed into records",
    **dict.fromkeys(
        ("_allocation", "_block", "_blocks", "_addresses", "_BLOCK_BYTES", "_counter"),
        "counters of streams, which no result shows",
    ),
    "_memory": "the sanitizer is shown memory that the public door refuses, for it is too little",
}


def private_names(folder: Path) -> set[str]:
    """Names with one underscore that the files of a folder define or assign to."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
                found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.endswith("_")}


def last_name(node: ast.expr) -> str:
    """Of what is called, as `setattr` of `monkeypatch.setattr`."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


#: What has private names that others leave alone.
FOLDERS = ("tunegemm", "benchmarks", "fit")


def touches(text: str, private: set[str]) -> Iterator[tuple[int, str]]:
    """Lines of a program, and of those in its strings, that reach for such a name of another object."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in private:
            base = ast.unparse(node.value)
            if base not in ("self", "cls") and not base.startswith("torch"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and last_name(node.func).endswith(("setattr", "getattr", "patch")):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and argument.value in private:
                    yield node.lineno, argument.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for base, name in re.findall(r"([\w.]+)\.(_[a-z]\w*)", node.value):
                if name in private and base not in ("self", "cls") and not base.startswith("torch"):
                    yield node.lineno, name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FOLDERS:
            yield from ((node.lineno, name.name) for name in node.names if name.name.startswith("_"))


def test_tests_and_benchmarks_touch_no_private_name() -> None:
    """What they need has a public door, or shows in what the object does."""
    root = PACKAGE.parent
    private = set().union(*(private_names(root / folder) for folder in FOLDERS))
    found = [
        f"{path.relative_to(root)}:{line} {name}"
        for folder in ("tests", "benchmarks", "fit")
        for path in sorted((root / folder).rglob("*.py"))
        for line, name in touches(path.read_text(), private - set(TOUCHED))
    ]
    assert found == []


def test_what_measures_knows_nothing_of_what_makes_data_and_the_package_of_neither() -> None:
    root = PACKAGE.parent
    allowed = {"tunegemm": {"tunegemm"}, "benchmarks": {"tunegemm", "benchmarks"}}
    found = [
        f"{path.relative_to(root)} imports {module}"
        for folder, own in allowed.items()
        for path in sorted((root / folder).rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name]
        if module.partition(".")[0] in {"tunegemm", "benchmarks", "fit"} - own
    ]
    assert found == []


def test_that_check_sees_every_way_to_a_name() -> None:
    text = (
        "from tunegemm.store import _open\nonline._nobody\nonline.part._nobody = 1\nself._nobody\n"
        "monkeypatch.setattr(online, '_nobody', 1)\nmonkeypatch.setattr('tunegemm.online._nobody', 1)\n"
        "torch._nobody\nonline.nobody\nprogram = 'print(online._nobody)'\n"
    )
    assert [line for line, _ in sorted(touches(text, {"_nobody"}))] == [1, 2, 3, 5, 6, 9]


HEAVY = {"torch", "cutlass", "triton", "optuna", "sqlalchemy", "alembic", "pandas", "numpy", "typer"}


def test_import_is_cheap() -> None:
    loaded = loaded_after("import tunegemm; tunegemm.Problem; tunegemm.Candidate; tunegemm.Device")
    assert loaded & HEAVY == set()
    assert not loaded & {"tunegemm.generate", "tunegemm.tuning", "tunegemm.cli"}


def test_dispatch_leaves_tuning_out(forks: Forks) -> None:
    """The hot path of `tunegemm.matmul` knows neither search nor SQL; only torch is loaded."""
    run = forks.run(
        "import tunegemm; tunegemm.matmul; import sys; print(*sorted(sys.modules))", env=os.environ
    )
    loaded = set(run.stdout.split())
    assert "tunegemm.dispatch.api" in loaded, run.stderr
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
