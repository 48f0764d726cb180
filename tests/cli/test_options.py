"""How arguments are read, without running anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from tunegemm.cli import app, arguments, options
from tunegemm.cli.arguments import UsageError, parse_seconds
from tunegemm.cli.options import parse_problems
from tunegemm.cli.tune import given_options
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError
from tunegemm.files import write_text


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


def test_short_options_are_said_again_by_their_long_names() -> None:
    """In the command to copy for a GPU."""
    command = typer.main.get_command(app).get_command(None, "tune")  # type: ignore[attr-defined]
    with command.make_context("tune", ["--shape", "8x8x8", "-q", "--family", "skinny"]) as context:
        flags = given_options(context)
    assert flags["quiet"] == "--quiet" and all(flag.startswith("--") for flag in flags.values())


def test_unwritable_report(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent/x\.csv: No such file or directory; choose another --out"):
        write_text(tmp_path / "absent" / "x.csv", "", UsageError)
    write_text(tmp_path / "x.csv", "a,b\n", UsageError)
    assert (tmp_path / "x.csv").read_text() == "a,b\n"


class TestRunner:
    """The same answers through Typer's own runner, as an embedding program would see them."""

    runner = CliRunner()

    @pytest.mark.parametrize("words", [[], ["db"]])
    def test_without_a_command_it_helps(self, words: list[str]) -> None:
        result = self.runner.invoke(app, words)
        assert result.exit_code == 0
        assert "Commands:" in result.stdout

    def test_version(self) -> None:
        import tunegemm

        assert self.runner.invoke(app, ["--version"]).stdout == f"tunegemm {tunegemm.__version__}\n"

    def test_extents_are_in_the_shape(self) -> None:
        result = self.runner.invoke(app, ["tune", "--m", "512:4096:512"])
        assert result.exit_code == 2 and "No such option: --m" in result.stderr
        assert "--shape 512:4096:512x6144x4096" in result.stderr

    def test_interruption_before_the_tuner_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Problem, "parse", interrupt)
        assert self.runner.invoke(app, ["tune", "--shape", "1x1x1"]).exit_code == 130


def test_a_group_of_options_is_one_value_of_the_command() -> None:
    import inspect
    from typing import Annotated

    seen: list[object] = []

    def point(x: int = 1, y: str = "no") -> tuple[int, str]:
        return x, y

    def command(
        name: str, at: Annotated[tuple[int, str], options.Group(point, required=("y",))], loud: bool = False
    ) -> None:
        seen.extend([name, at, loud])

    command.__annotations__["at"] = Annotated[tuple[int, str], options.Group(point, required=("y",))]
    command.__annotations__ |= {"name": str, "loud": bool}
    flat = options.flat(command)
    parameters = inspect.signature(flat).parameters
    assert list(parameters) == ["name", "x", "y", "loud"]
    assert parameters["y"].default is inspect.Parameter.empty and parameters["x"].default == 1
    flat(name="n", x=3, y="z", loud=True)
    assert seen == ["n", (3, "z"), True]


class TestShapes:
    @pytest.mark.parametrize(
        ("text", "shapes"),
        [
            ("8x16x24", ["8x16x24"]),
            ("{512,1024}x6144x4096", ["512x6144x4096", "1024x6144x4096"]),
            ("512:2048:512x8x8", ["512x8x8", "1024x8x8", "1536x8x8", "2048x8x8"]),
            ("{1,16:48:16}x8x{8,64}x2", [f"{m}x8x{k}x2" for m in (1, 16, 32, 48) for k in (8, 64)]),
        ],
    )
    def test_ranges_and_lists(self, text: str, shapes: list[str]) -> None:
        assert [problem.shape for problem in options.parse_problems([text])] == shapes
        assert arguments.parse_shapes([text]) == shapes

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("512:4096x8x8", "'512:4096' is not FIRST:LAST:STEP"),
            ("8:4:2x8x8", "'8:4:2' is not FIRST:LAST:STEP"),
            ("1:9:0x8x8", "'1:9:0' is not FIRST:LAST:STEP"),
            ("1:999999999:1x8x8", "more than 1000 shapes"),
            ("{1,2}x1:999:1x8", "more than 1000 shapes"),
            ("{a,b}x8x8", "ax8x8"),
        ],
    )
    def test_bad_ones_are_named(self, text: str, named: str) -> None:
        with pytest.raises(TunegemmError, match=re.escape(named)):
            options.parse_problems([text])


class TestHelp:
    def test_summaries_are_whole_and_every_command_has_two_examples_that_parse(self) -> None:
        import shlex

        import typer.main

        from tunegemm.cli.help import EXAMPLES, summary

        group: Any = typer.main.get_command(app)
        commands = {name: command for name, command in group.commands.items() if name != "db"}
        commands |= {f"db {name}": one for name, one in group.commands["db"].commands.items()}
        assert set(commands) == set(EXAMPLES)
        said = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
        for name, command in commands.items():
            if not name.startswith("db "):
                assert summary(command.help) in said
            shown = CliRunner().invoke(app, [*name.split(), "--help"]).stdout
            assert "Usage:" in shown and CliRunner().invoke(app, [*name.split(), "-h"]).stdout == shown
            for example in EXAMPLES[name]:
                assert f"\n  {example}\n" in shown, "whole, on a line of its own"
                words = shlex.split(example, comments=True)
                words = words[words.index("tunegemm") + 1 + len(name.split()) :]
                command.make_context(name, words, resilient_parsing=False)

    def test_metavars_are_words(self) -> None:
        shown = CliRunner().invoke(app, ["tune", "--help"]).stdout
        assert "<str>" not in shown and "TEXT" not in shown
        assert "--dtype DTYPE" in shown and "--layout LAYOUT" in shown
        of_databases = [f"db {name}" for name in ("export", "import", "merge", "upgrade")]
        for command in ("load", "record", "run", "unload", *of_databases):
            assert "<" not in CliRunner().invoke(app, [*command.split(), "--help"]).stdout, command

    @pytest.mark.parametrize("flag", ["--family", "--families"])
    @pytest.mark.parametrize("command", ["tune", "space", "leaderboard", "pack"])
    def test_families_have_one_option(self, command: str, flag: str) -> None:
        words = [command, flag, "nonsense"] + (["--out", "x"] if command == "pack" else [])
        words += ["--shape", "8x8x8"] if command != "pack" else []
        assert "'nonsense' is not known" in CliRunner().invoke(app, words).stderr
