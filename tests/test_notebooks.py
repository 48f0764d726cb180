"""Every notebook runs from its first to its last cell; the committed ones have no outputs that go stale."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbformat: pip install -e '.[notebooks]'")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install -e '.[notebooks]'")
pytest.importorskip("ipykernel", reason="needs ipykernel: pip install -e '.[notebooks]'")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

#: Words that the last outputs of each must hold: that it ran is not that it showed something.
SHOWN = {
    "01_tune_a_shape": ["replayed", "x torch.mm, 95 % interval", "nothing was measured here"],
    "02_query_the_database": ["rows, 6 records", "cublaslt", "pingpong"],
    "03_why_the_winner_wins": ["ridge at 206 FLOP per byte", "rank correlation", "image/png"],
    "04_compare_search_strategies": ["2500 candidates", "after 32", "image/png"],
    "05_tune_a_models_shapes": ["64x1536x512 bf16 tn", "modelled - ", "tunegemm tune --from shapes.json"],
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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a minute each on two free cores."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    shown = "\n".join(words(output) for cell in notebook.cells for output in cell.get("outputs", ()))
    for expected in SHOWN[path.stem]:
        assert expected in shown, f"{expected!r} is not in\n{shown}"


def words(output: Any) -> str:
    data = output.get("data", {})
    return "\n".join([output.get("text", ""), data.get("text/plain", ""), *data])
