"""An option given twice adds up or is refused, by every command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.support.commands import here
from tunegemm.cli.app import app


def options(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command's options that take a value."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from options(inner, (*path, name))
    if path and not hasattr(command, "commands"):
        yield from ((path, one) for one in command.params if getattr(one, "is_flag", True) is False)


GROUP = get_command(app)
OPTIONS = list(options(GROUP))


def named(case: tuple[tuple[str, ...], Any]) -> str:
    return " ".join((*case[0], case[1].opts[0]))


def test_every_command_has_its_options_here() -> None:
    assert {path[0] for path, _ in OPTIONS} >= {"tune", "record", "space", "db", "pack", "verify", "explain"}
    assert {option.opts[0] for _, option in OPTIONS if option.multiple} == {
        "--shape",
        "--from",
        "--candidate",
    }


@pytest.mark.parametrize("case", [one for one in OPTIONS if not one[1].multiple], ids=named)
def test_one_that_takes_one_value_is_refused(
    case: tuple[tuple[str, ...], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path, option = case
    flag = option.opts[0]
    with pytest.raises(SystemExit, match="2"):
        GROUP.main([*path, flag, "1", flag, "2"], prog_name="tunegemm")
    told = capsys.readouterr().err
    assert told == f"tunegemm: {flag} takes one value and occurs 2 times; give it once\n"


@pytest.mark.parametrize("words", [["--top=3", "--top", "4"], ["--layout", "tn", "--layout=tn"]])
def test_however_it_is_written(words: list[str]) -> None:
    told = here("tune", "--shape", "8x8x8", *words, code=2).stderr
    assert "occurs 2 times" in told and len(told.splitlines()) == 1


def test_a_flag_may_be_said_twice_and_what_follows_dashes_is_the_programs(tmp_path: Path) -> None:
    assert "is given" not in here("tune", "--json", "--json", code=2).stderr
    here("record", "--", "true", "--out", "a", "--out", "b", cwd=tmp_path)


def test_files_add_up(tmp_path: Path) -> None:
    for rank, extents in enumerate(("512_256_1024", "768_256_1024")):
        (tmp_path / f"untuned{rank}.csv").write_text(
            f"GemmTunableOp_BFloat16_TN,tn_16_8_32\nGemmTunableOp_BFloat16_TN,tn_{extents}\n"
        )
    files = [word for rank in (0, 1) for word in ("--from", str(tmp_path / f"untuned{rank}.csv"))]
    run = here("tune", *files, "--device", "model:h200", "--compiled-only", "--budget", "0.001", code=None)
    assert "8x16x32" in run.stdout and "256x512x1024" in run.stdout and "256x768x1024" in run.stdout
    row = next(line for line in run.stdout.splitlines() if "8x16x32" in line)
    assert "│     2 │" in row, row
