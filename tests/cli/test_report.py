"""`tunegemm report`, and the leaderboard over a database of recorded measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.recorded import SHAPES, fill
from tunegemm.cli import app


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("db") / "tuning.sqlite")


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_a_page_of_a_database(database: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert "2 shapes. Recorded on an NVIDIA H200" in run("report", "--db", database, "--out", out)
    page = out.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and page.count('class="shape"') == 2
    run("report", "--db", database, "--shape", SHAPES[0], "--device", "h200", "--out", out)
    page = out.read_text(encoding="utf-8")
    assert page.count('class="shape"') == 1 and page.count("<tr data-row=") == 1
    assert f"tunegemm report --shape {SHAPES[0]} --device h200" in page


def test_a_page_of_the_recording_and_few_details(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    shown = run("report", "--device", "replay:h200", "--details", 1, "--out", out)
    assert "nothing was measured here" in shown
    page = out.read_text(encoding="utf-8")
    assert page.count('class="shape"') == 1 and "5 further shapes" in page


def test_one_family_and_one_device(database: Path) -> None:
    options = ("--shape", SHAPES[0], "--family", "cute_sm90", "--device", "h200", "--format", "json")
    (board,) = json.loads(run("leaderboard", "--db", database, *options))
    assert {row["family"] for row in board["rows"] if row["candidate"] != "torch.mm"} == {"cute_sm90"}
    assert len(board["rows"]) == 61  # sixty of the family and the baseline


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("report", "--device", "a100"), "device 'a100' was never measured here; use one of NVIDIA H200"),
        (("report", "--shape", "1x2x3"), "has no record of 1x2x3; it has"),
        (("report", "--shape", "1x2"), "shape '1x2' is not MxNxK"),
        (("report", "--details", "0"), "--details 0: must be 1 or more"),
        (("report", "--device", "replay:v100"), "no such recording; recorded: h200"),
        (("report", "--device", "replay:h200"), "--device replay:h200 and --db: a recording or a database"),
        (("report", "--device", ""), "device '' is not a name; use one of NVIDIA H200"),
        (("leaderboard", "--device", ""), "device '' is not a name; use one of NVIDIA H200"),
        (("verify", "--device", "tpu:0"), "device 'tpu:0' is not known; use cuda:N"),
        (("report", "--details", "9" * 5000), "See `tunegemm report --help`."),
        (("report", "--out", "/nowhere/x.html"), "choose another --out"),
        (("leaderboard", "--family", "x"), "kernel family 'x' is not known"),
        (("leaderboard", "--device", "x"), "device 'x' was never measured here"),
    ],
)
def test_refusals(database: Path, arguments: tuple[str, ...], named: str) -> None:
    result = CliRunner().invoke(app, [*arguments, "--db", str(database)])
    assert result.exit_code == 2
    assert named in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_a_database_the_recording_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", "--db", str(tmp_path / "absent.sqlite")])
    assert result.exit_code == 2
    assert "absent.sqlite: no such database" in result.stderr
