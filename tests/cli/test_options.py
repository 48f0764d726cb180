"""How arguments are read, without running anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunegemm.cli import app, options
from tunegemm.cli.options import UsageError, parse_families, parse_problems, parse_seconds, write_text
from tunegemm.describe.problem import Problem
from tunegemm.errors import SpaceError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5", 1.5), ("10m", 600), ("1h30m", 5400), ("2H", 7200), (" 1m30s ", 90)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0m", "-5", "5x", "m", "10m1h", "nan", "1e3", "inf"])
def test_no_durations(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration; for example"):
        parse_seconds(text)


def test_problems_keep_their_order_and_come_once() -> None:
    problems = parse_problems(["8x8x8", "4x4x4", "8x8x8x1"], "half", "fp32", "TT")
    assert problems == [
        Problem(8, 8, 8, 1, "fp16", "fp32", "k", "n"),
        Problem(4, 4, 4, 1, "fp16", "fp32", "k", "n"),
    ]


def test_families() -> None:
    assert parse_families(None) is None
    with pytest.raises(SpaceError, match="'nothing' is not known"):
        parse_families("nothing")


def test_unwritable_report(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent/x\.csv: No such file or directory; choose another --out"):
        write_text(tmp_path / "absent" / "x.csv", "")
    write_text(tmp_path / "x.csv", "a,b\n")
    assert (tmp_path / "x.csv").read_text() == "a,b\n"


class TestRunner:
    """The same answers through Typer's own runner, as an embedding program would see them."""

    runner = CliRunner()

    def test_help_of_every_command(self) -> None:
        top = self.runner.invoke(app, ["--help"])
        assert top.exit_code == 0
        for name in ("tune", "leaderboard", "space", "doctor"):
            assert name in top.stdout
            page = self.runner.invoke(app, [name, "-h"])
            assert page.exit_code == 0
            assert "Usage:" in page.stdout

    @pytest.mark.parametrize("words", [[], ["db"]])
    def test_without_a_command_it_helps(self, words: list[str]) -> None:
        result = self.runner.invoke(app, words)
        assert result.exit_code == 0
        assert "Commands:" in result.stdout

    def test_version(self) -> None:
        import tunegemm

        assert self.runner.invoke(app, ["--version"]).stdout == f"tunegemm {tunegemm.__version__}\n"

    def test_refusal(self) -> None:
        result = self.runner.invoke(app, ["tune", "--shape", "0x4x4"])
        assert result.exit_code == 2
        assert result.stderr == f"tunegemm: m=0 in 0x4x4: every extent must be from 1 to {2**31 - 1}\n"
        assert result.stdout == ""

    def test_interruption_before_the_tuner_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(**_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(options, "parse_problems", interrupt)
        assert self.runner.invoke(app, ["tune", "--shape", "1x1x1"]).exit_code == 130
