"""Every option of every command with values that a stranger tries: one line or a result, never a traceback.

Commands and options are those that the program has, so that a new one is tried, too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.cli.test_damage import FORBIDDEN
from tests.support.commands import here
from tests.support.recorded import SHAPES, fill
from tunegemm.cli import app
from tunegemm.store import Database

DIGITS = "9" * 5000
WORDS = (
    "", " ", ",", "-", "--", "0", "-1", "1", "1.5", "nan", "inf", "1e999", DIGITS, "\N{SUPERSCRIPT TWO}", "x",
    "x" * 5000, "\x1b[31m", "[/b]", "$\\foo_{", "\u202e", "two\nlines", "caf\u00e9", "null", "true", "json",
    "all", "h200", "64x64x64", SHAPES[0], "0x0x0", f"{DIGITS}x1x1", "1x1x1x1x1", "bf16", "tn", "relu",
    "relu+relu", "cute_sm80", "cute_sm80,tile_m=0", "cuda:0", f"cuda:{DIGITS}", "cuda:\N{SUPERSCRIPT TWO}",
    "model:", "replay:../x", "replay:h200", "2020-01-01", "9999-12-31T23:59:59-23:59", "0001-01-01",
    "127.0.0.1:1", f"h:{DIGITS}", "postgresql://127.0.0.1:1/x", "mysql://x", "sqlite://", ":memory:",
    "file:x?mode=memory", "~nosuchuser/x", "/dev/null", "/dev/full", "/dev/zero", "/proc/x", "nowhere/x", ".",
    "folder", "pipe", "junk", "tuning.sqlite", "rows.json", "link",
)  # fmt: skip
#: What lets a command get further: half of these options have it.
USUAL = {
    "--shape": SHAPES[0], "--db": "tuning.sqlite", "--out": "out", "--into": "new.sqlite", "--device": "h200",
    "--since": "2020-01-01", "--top": "3", "--family": "cute_sm90", "--families": "cute_sm90",
    "--from": "rows.json",
}  # fmt: skip

#: What keeps a command short and on this host, whatever came before it.
ENDS = {
    "tune": ["--device", "model:h200", "--families", "skinny", "--budget", "0.001", "--workers", "1"],
    "space": ["--family", "skinny"],
    "pack": ["--no-compile"],
    "record": ["--", "true"],
}


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    pending: list[tuple[tuple[str, ...], Any]] = [((), typer.main.get_command(app))]
    while pending:
        words, command = pending.pop()
        inner = getattr(command, "commands", {})
        pending += [((*words, name), each) for name, each in inner.items()]
        if words and not inner:
            yield words, command


COMMANDS = sorted(commands(), key=lambda pair: pair[0])


@st.composite
def lines(draw: st.DrawFn, part: int) -> list[str]:
    """One of a quarter of the commands, with what it requires and some of its options, of any words."""
    words, command = draw(st.sampled_from(COMMANDS[part::4]))
    line = [*words]
    for parameter in command.params:
        required, is_option = parameter.required, parameter.param_type_name == "option"
        if parameter.name == "help" or not (required or draw(st.integers(0, 2)) == 0):
            continue
        if words == ("record",) and not is_option:  # its program really runs
            continue
        if is_option:
            line.append(parameter.opts[0])
        if not getattr(parameter, "is_flag", False):
            usual = USUAL.get(parameter.opts[0])
            line.append(usual if usual and draw(st.booleans()) else draw(st.sampled_from(WORDS)))
    return line + ENDS.get(words[0], [])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("db") / "tuning.sqlite", SHAPES[:1], each=8)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
def test_any_value_of_any_option(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, thorough: bool
) -> None:
    cases = 40 if thorough else 10
    place, outside = tmp_path / "place", tmp_path / "outside"
    outside.mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("TUNEGEMM_DB", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)

    def check(line: list[str]) -> None:
        shutil.rmtree(place, ignore_errors=True)
        (place / "folder").mkdir(parents=True)
        os.mkfifo(place / "pipe")
        (place / "junk").write_text("{" * 100)
        (place / "rows.json").write_text('{"format": "tunegemm-database/1", "rows": [{"kind": "x"}]}')
        shutil.copyfile(original, place / "tuning.sqlite")
        (place / "link").symlink_to("tuning.sqlite")
        done = here(*line, code=None, cwd=place)
        assert done.returncode in (0, 1, 2), done
        if done.returncode == 2:
            *before, last = done.stderr.splitlines()
            assert last.startswith("tunegemm: ") and "Traceback" not in done.stderr, done
            assert len(last) <= 2100 and not any(said.startswith("Usage:") for said in before), done
        assert not FORBIDDEN.search(done.stdout + done.stderr), done
        with Database.open(place / "tuning.sqlite", read_only=True) as database:
            assert database.records(), f"{line} cost the database its record"
        assert not list(outside.iterdir())

    settings(
        max_examples=cases, deadline=None, database=None, derandomize=cases < 20,
        phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
    )(given(lines(part))(check))()  # fmt: skip
