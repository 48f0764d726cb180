"""The benchmarks of whole programs without a GPU: their results, tables and files; no times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tunegemm
from benchmarks import clients
from benchmarks.providers import is_settled
from benchmarks.results import Results
from tests.store.test_database import DEVICE, measurement
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.api import refresh
from tunegemm.store import Database

CPU = ("--device", "cpu", "--tiny")


@pytest.fixture(autouse=True)
def _dispatch_anew() -> Iterator[None]:
    yield
    refresh()


@pytest.mark.slow
def test_every_workload_gives_torchs_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert clients.main([*CPU, "--modes", "eager"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "15 linear layers patched", "7 in each of two layers, and the head"
    told = [line.split(":")[0] for line in lines if ": error" in line]
    assert [line.split(" of ")[0] for line in told] == [f"{name} eager" for name in clients.WORKLOADS]


@pytest.mark.slow
def test_a_training_step_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*CPU, "--modes", "eager", "--workloads", "train", "--layers", "1", "--sequences", "2"]
    assert clients.main(words) == 0
    assert "train eager of 128 tokens: error" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "layers"), [("8B", 2), ("1B", 16), ("tiny", 2)])
def test_sizes(model: str, layers: int) -> None:
    assert clients.Size.of(model, None).layers == layers and clients.Size.of(model, 3).layers == 3


def test_a_wrong_result_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: torch.nn.Module) -> int:
        head = model.lm_head
        head.forward = lambda x: 1.1 * torch.nn.functional.linear(x, head.weight)  # type: ignore[method-assign]
        return 1

    monkeypatch.setattr(tunegemm, "patch", spoil)
    assert clients.main([*CPU, "--modes", "eager", "--workloads", "prefill", "--layers", "1"]) == 1
    assert capsys.readouterr().out.rstrip().endswith(" WRONG")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--modes", "graph"), "--modes graph needs a GPU"),
        (("--modes", "fast"), "--modes 'fast' is not known; use some of eager,graph,compile"),
        (("--workloads", "serve"), "--workloads 'serve' is not known"),
    ],
)
def test_what_cannot_run_is_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str
) -> None:
    assert clients.main([*CPU, "--layers", "1", *words]) == 2
    assert named in capsys.readouterr().err


def test_rows_of_modes_and_layers_stand_beside_each_other(tmp_path: Path) -> None:
    results = Results(tmp_path / "clients.json", {"gpu": "", "driver": "", "packages": {}, "method": ""})
    first = {"workload": "train", "mode": "eager", "layers": 2, "dtype": "bf16"}
    results.put(first, first | {"mode": "graph"}, first | {"layers": 8}, first | {"right": True})
    assert len(results.rows) == 3 and results.rows[0]["right"]
    assert len(json.loads(results.path.read_text())["rows"]) == 3


def test_a_record_of_older_kernels_is_tuned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch leaves it to torch: a table of peers once had torch's own time for tunegemm's."""
    problem = Problem.parse("64x64x64")
    with Database.open(tmp_path / "tuning.sqlite", create=True) as database:
        assert not is_settled(database, problem, DEVICE)
        database.confirm(problem, DEVICE, measurement(1.1), label="of these kernels")
        assert is_settled(database, problem, DEVICE)
        monkeypatch.setattr("tunegemm.store.validity.kernel_source_hash", lambda family: "of other kernels")
        assert not is_settled(database, problem, DEVICE)
