"""What `tunegemm run` asks for and starts, without starting it."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tunegemm.cli import app, program


def test_a_program_or_its_environment_but_not_both(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(_: object, words: list[str], variables: dict[str, str], command: str) -> int:
        started.append((words, variables["TUNEGEMM_ENABLE"]))
        return 7

    monkeypatch.setattr(program.Signals, "run", start)
    run = CliRunner().invoke(app, ["run", "--", "python", "serve.py"])
    assert run.exit_code == 7 and started == [(["python", "serve.py"], "1")]
    assert "served nothing" in run.stderr
    shown = CliRunner().invoke(app, ["run", "--env"])
    assert shown.exit_code == 0 and "export TUNEGEMM_ENABLE=1\n" in shown.stdout
    for words in (["run"], ["run", "--env", "--", "python"]):
        assert CliRunner().invoke(app, words).exit_code == 2
    assert len(started) == 1


@pytest.mark.parametrize(
    ("witnessed_s", "matched_s", "is_for_all", "left_s"),
    [([], None, False, []), ([98.5], None, True, []), ([98.0], None, False, [98.0]),
     ([97.0, 99.0], None, True, []), ([], 99.95, True, []), ([], 99.9, False, [])],
)  # fmt: skip
def test_a_signal_is_for_all_if_the_witness_got_it_a_moment_ago(
    monkeypatch: pytest.MonkeyPatch,
    witnessed_s: list[float], matched_s: float | None, is_for_all: bool, left_s: list[float],
) -> None:  # fmt: skip
    monkeypatch.setattr(program, "time", SimpleNamespace(monotonic=lambda: 100.0))
    signals, deadlines = program.Signals(), []
    signals.witnessed_s[15] = witnessed_s
    if matched_s is not None:
        signals.matched_s[15] = matched_s
    monkeypatch.setattr(signals, "listen", deadlines.append)
    assert signals.is_for_all(15) == is_for_all
    assert signals.witnessed_s[15] == left_s
    assert deadlines == ([] if is_for_all else [101.0])


def test_what_the_witness_wrote_is_heard_until_a_deadline() -> None:
    reading, writing = os.pipe()
    signals = program.Signals()
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        signals.witness = SimpleNamespace(stdout=pipe)  # type: ignore[assignment]
        assert not signals.listen(time.monotonic() - 1.0)
        os.write(writing, b"15 98.500000\n10 99.000000\n15 99.250000\n")
        assert signals.listen(time.monotonic() - 1.0), "what is there is read even then"
        assert signals.witnessed_s == {15: [98.5, 99.25], 10: [99.0]}
        os.close(writing)
        assert not signals.listen(time.monotonic() + 60.0), "it was killed"
