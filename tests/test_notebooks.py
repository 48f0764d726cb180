"""Every notebook runs from its first to its last cell; the committed ones have no outputs that go stale."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest

import tunegemm

nbformat = pytest.importorskip("nbformat", reason="needs nbformat: pip install -e '.[notebooks]'")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install -e '.[notebooks]'")
pytest.importorskip("ipykernel", reason="needs ipykernel: pip install -e '.[notebooks]'")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

#: Of a tuning: each compiles a kernel for three seconds, and one shows what more of them show.
_TRIALS = re.compile(r"\btrials=\d+")

#: Words that the last outputs of each must hold: that it ran is not that it showed something.
SHOWN = {
    "01_tune_a_shape": ["replayed", "x torch.mm, 95 % interval", "nothing was measured here", "image/png"],
    "02_query_the_database": ["rows, 3 records", "cublaslt", "schedule", "image/png"],
    "03_why_the_winner_wins": ["ridge at 206 FLOP per byte", "in the order of the model", "image/png"],
    "04_compare_search_strategies": ["2500 candidates", "after 32", "image/png"],
    "05_tune_a_models_shapes": [
        "64x1536x512 bf16 tn",
        "modelled - ",
        "tunegemm tune --from shapes.json",
        "image/png",
    ],
}


def test_each_is_known() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(SHOWN)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            ast.parse(cell.source)
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_uses_public_names_only(path: Path) -> None:
    """What a reader copies from it must not change without notice."""
    code = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code")
    inner = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            inner += [one.name for one in node.names if one.name.startswith("tunegemm.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tunegemm":
            inner += [f"{node.module}.{one.name}" for one in node.names if node.module != "tunegemm"]
            inner += [one.name for one in node.names if one.name not in tunegemm.__all__]
    inner += [name for name in re.findall(r"\btunegemm\.(\w+)", code) if name not in tunegemm.__all__]
    assert not inner


def test_outside_a_checkout_one_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = nbformat.read(ROOT / "notebooks" / "04_compare_search_strategies.ipynb", as_version=4).cells
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="in a checkout"):
        exec(next(cell.source for cell in cells if cell.cell_type == "code"), {})


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a minute each on two free cores."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = _TRIALS.sub("trials=1", cell.source)
    where = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    shown = "\n".join(words(output) for cell in notebook.cells for output in cell.get("outputs", ()))
    errors = [
        output["text"]
        for cell in notebook.cells for output in cell.get("outputs", ())
        if output["output_type"] == "stream" and output["name"] == "stderr"
        and output["text"].strip() and not re.search("kernel/s|s/kernel", output["text"])  # a tuning's bar
    ]  # fmt: skip
    assert not errors, "a warning, or something else that a reader should not meet"
    for expected in SHOWN[path.stem]:
        assert expected in shown, f"{expected!r} is not in\n{shown}"


def words(output: Any) -> str:
    data = output.get("data", {})
    return "\n".join([output.get("text", ""), data.get("text/plain", ""), *data])
