"""`tunegemm leaderboard` over a real database file. Its rows are given by the tests, not measured."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tunegemm.cli import app
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.measure.outcome import Measurement
from tunegemm.store import Database

SHAPES = ("256x256x256", "512x256x128")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bf16 problems and an fp16 one with three candidates each: 10, 20 and 30 us beside torch.mm's 15."""
    path = tmp_path_factory.mktemp("db") / "tuning.sqlite"
    device = dataclasses.replace(find_device("model:h200"), spec="cuda:0")
    problems = [Problem.parse(shape) for shape in SHAPES] + [Problem.parse(SHAPES[0], dtype="fp16")]
    with Database.open(path, create=True) as store:
        for problem in problems:
            for us in (20.0, 10.0, 30.0):
                candidate = Candidate.make("cute_sm90", {"tile_m": int(us)})
                measurement = Measurement(candidate, (us,) * 5, (15.0,) * 5, 1e-3, 0.002)
                store.publish(problem, device, measurement, label=f"tile {us:.0f}")
    return path


def leaderboard(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["leaderboard", *map(str, arguments)])
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def rows(text: str) -> list[dict[str, Any]]:
    return [row for board in json.loads(text) for row in board["rows"]]


def test_json_is_a_list_of_boards_best_first(database: Path) -> None:
    boards = json.loads(leaderboard("--db", database, "--shape", SHAPES[1], "--format", "json"))
    (board,) = boards
    own = [row for row in board["rows"] if row["family"] == "cute_sm90"]
    assert [row["candidate"] for row in own] == ["tile 10", "tile 20", "tile 30"]
    assert own[0]["ratio_to_torch_mm"] == pytest.approx(1.5)
    assert board["source"] == "measured"


def test_a_fresh_one_has_the_shipped_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNEGEMM_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = rows(leaderboard("--format", "json"))
    assert len(found) > 90


def test_csv_has_one_header_over_several_shapes(database: Path) -> None:
    text = leaderboard(
        "--db", database, "--shape", SHAPES[0], "--shape", SHAPES[1], "--dtype", "bf16", "--format", "csv"
    )
    found = list(csv.DictReader(io.StringIO(text)))
    assert {row["problem"] for row in found} == {f"{shape} bf16 tn" for shape in SHAPES}
    assert text.count("median_us") == 1
    assert all(float(row["median_us"]) > 0 for row in found)


def test_without_a_shape_the_best_of_each(database: Path) -> None:
    found = rows(leaderboard("--db", database, "--format", "json"))
    assert sorted(row["problem"] for row in found) == [
        "256x256x256 bf16 tn", "256x256x256 fp16 tn", "512x256x128 bf16 tn",
    ]  # fmt: skip
    assert {row["candidate"] for row in found} == {"tile 10"}


@pytest.mark.parametrize(("option", "value"), [("--dtype", "half"), ("--dtype", "fp16")])
def test_filters(database: Path, option: str, value: str) -> None:
    found = rows(leaderboard("--db", database, option, value, "--format", "json"))
    assert [row["problem"] for row in found] == ["256x256x256 fp16 tn"]


def test_top(database: Path) -> None:
    found = rows(leaderboard("--db", database, "--shape", SHAPES[1], "--format", "json", "--top", "1"))
    assert [row["candidate"] for row in found if row["family"] == "cute_sm90"] == ["tile 10"]


@pytest.mark.parametrize("form", ["table", "csv", "json", "md"])
def test_out(database: Path, form: str, tmp_path: Path) -> None:
    path = tmp_path / "report"
    assert leaderboard("--db", database, "--format", form, "--out", path) == ""
    assert path.read_text() == leaderboard("--db", database, "--format", form)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--shape", "1x2x3"), "run `tunegemm tune --shape 1x2x3 --dtype bf16 --layout tn` on a GPU first"),
        (("--shape", SHAPES[1], "--dtype", "fp16"), f"no measurement of {SHAPES[1]} fp16; the database has"),
        (("--layout", "nt"), "no measurement of nt; the database has"),
        (("--dtype", "int4"), "dtype 'int4' is not known"),
        (("--out-dtype", "int4"), "dtype 'int4' is not known"),
        (("--layout", "zz"), "layout 'zz' is not known"),
        (("--format", "xml"), "'xml' is not one of"),
        (("--top", "0"), "--top 0: must be 1 or more"),
        (("--out", "/nowhere/x"), "/nowhere/x: No such file or directory; choose another --out"),
    ],
)
def test_refusals(database: Path, arguments: tuple[str, ...], named: str) -> None:
    result = CliRunner().invoke(app, ["leaderboard", "--db", str(database), *arguments])
    assert result.exit_code == 2
    assert named in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two products on an H200 and one on an H100, at 10 and 12 us beside torch.mm's 15."""
    path = tmp_path_factory.mktemp("db") / "tuning.sqlite"
    with Database.open(path, create=True) as store:
        for name, shapes in (("h200", SHAPES), ("h100-sxm", SHAPES[:1])):
            device = dataclasses.replace(find_device(f"model:{name}"), spec="cuda:0")
            for us, shape in zip((12.0, 10.0), shapes, strict=False):
                candidate = Candidate.make("cute_sm90", {"tile_m": int(us)})
                measurement = Measurement(candidate, (us,) * 5, (15.0,) * 5, 1e-3, 0.002)
                store.publish(Problem.parse(shape), device, measurement, label=f"tile {us:.0f}")
    return path


def test_one_gpu_at_a_time_unless_all_are_asked_for(two_devices: Path) -> None:
    shown = rows(text := leaderboard("--db", two_devices, "--format", "json"))
    assert [row["device"] for row in shown] == ["NVIDIA H200"] * 2
    assert "Not shown: NVIDIA H100 80GB HBM3; name one with --device, or all." in text
    every = rows(leaderboard("--db", two_devices, "--device", "all", "--format", "json"))
    assert len(every) == 3
    one = rows(leaderboard("--db", two_devices, "--device", "h100", "--format", "json"))
    assert [row["device"] for row in one] == ["NVIDIA H100 80GB HBM3"]


def test_sorted_and_limited(two_devices: Path) -> None:
    def labels(*arguments: str) -> list[str]:
        found = rows(leaderboard("--db", two_devices, "--format", "json", *arguments))
        return [row["candidate"] for row in found]

    assert labels() == ["tile 12", "tile 10"], "by the shape"
    assert labels("--sort", "ratio") == ["tile 10", "tile 12"]
    assert labels("--sort", "time") == ["tile 12", "tile 10"]
    assert labels("--sort", "ratio", "--limit", "1") == ["tile 10"]


def test_no_column_is_empty_and_torch_stands_beside_each_time(two_devices: Path) -> None:
    table = leaderboard("--db", two_devices, "--shape", SHAPES[1], "--format", "md")
    head, _, *body = [line for line in table.splitlines() if line.startswith("|")]
    columns = list(zip(*(line.strip("|").split("|") for line in (head, *body)), strict=True))
    assert all(any(cell.strip() for cell in cells) for _, *cells in columns)
    found = {head.strip(): [cell.strip() for cell in cells] for head, *cells in columns}
    assert found["torch.mm us"] == ["15.00", "15.00"] and found["ratio to torch.mm"] == ["1.500", "1.000"]


def test_torch_timed_as_a_candidate_is_1000(tmp_path: Path) -> None:
    from tunegemm.generate.cublaslt import TORCH_MM

    device = dataclasses.replace(find_device("model:h200"), spec="cuda:0")
    with Database.open(tmp_path / "t.sqlite", create=True) as store:
        measurement = Measurement(TORCH_MM, (15.0,) * 5, (15.1,) * 5, 1e-3, 0.002)
        store.publish(Problem.parse(SHAPES[0]), device, measurement, label="torch.mm")
    (row,) = rows(leaderboard("--db", tmp_path / "t.sqlite", "--shape", SHAPES[0], "--format", "json"))
    assert (row["ratio_to_torch_mm"], row["torch_mm_us"]) == (1.0, 15.0)
