"""The list of 100 products, the command that tunes it, and what is read of it; on recorded times."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psutil
import pytest

from benchmarks import shapes
from benchmarks.campaign import products
from benchmarks.tuning_many import _COMMANDS, LIST, documents, row_of, some, workload
from tunegemm.describe import workload as files
from tunegemm.errors import TunegemmError
from tunegemm.measure.replay import open_replay

RECORDED = open_replay("h200").problems()[:2]
#: Nothing to compile.
WORDS = ["--device", "replay:h200", "--families", "cublaslt", "--json"]


def test_the_list_is_100_products_whose_records_may_ship() -> None:
    listed = [shape.problem for shape in shapes.load(LIST)]
    assert len(listed) == 100 and set(listed) <= set(products())
    assert {1, 4, 16, 64, 256, 1024, 4096} <= {problem.m for problem in listed}


def test_a_file_for_tune_from_has_each_once(tmp_path: Path) -> None:
    listed = [shape.problem for shape in shapes.load(LIST)]
    workload(listed).write(tmp_path / "products.json")
    found, refused = files.read(tmp_path / "products.json")
    assert [demand.problem for demand in found] == listed and not refused
    assert {demand.calls for demand in found} == {1}


def test_some_are_spread_over_the_rows() -> None:
    listed = [shape.problem for shape in shapes.load(LIST)]
    chosen = some(listed, 10)
    assert len(set(chosen)) == 10 and max(Counter(problem.m for problem in chosen).values()) <= 2
    assert some(listed, 100) == sorted(listed, key=lambda problem: (problem.m, problem.n * problem.k))
    with pytest.raises(TunegemmError, match="--peers 101: give a number from 1 to 100"):
        some(listed, 101)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    workload(RECORDED).write(tmp_path / "products.json")
    return ["tune", "--from", str(tmp_path / "products.json"), *WORDS]


def test_a_row_of_each_product(words: list[str], tmp_path: Path) -> None:
    *found, end = documents(_COMMANDS["nothing_compiled"], words, tmp_path)
    assert end is None
    rows = [row_of(document) for document in found if document is not None]
    assert {(row["m"], row["n"], row["k"]) for row in rows} == {(p.m, p.n, p.k) for p in RECORDED}
    for row in rows:
        assert row["measured"] > 1 and row["compiled"] == row["failed"] == 0
        assert row["at_cap"] is False and row["ratio"] >= 1 and row["best"]


def test_what_is_interrupted_has_what_ended_before_and_leaves_no_process(
    words: list[str], tmp_path: Path
) -> None:
    """As where `timeout` ends it while it waits for the next product."""
    running = documents(_COMMANDS["nothing_compiled"], words, tmp_path)
    first = next(running)
    assert first is not None and first["best"] is not None
    (child,) = psutil.Process().children()
    with pytest.raises(KeyboardInterrupt):
        while True:
            running.throw(KeyboardInterrupt)
    assert not child.is_running()


def test_a_command_that_fails_is_an_error_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(TunegemmError, match=r"exit code 2: tunegemm: .*none\.json"):
        list(documents(_COMMANDS["installed"], ["tune", "--from", "none.json", *WORDS], tmp_path))
