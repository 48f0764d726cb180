"""What `tunegemm run` asks for and starts, without starting it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tunegemm.cli import app, program


def test_a_program_or_its_environment_but_not_both(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(words: list[str], variables: dict[str, str], *given: object) -> int:
        started.append((words, variables["TUNEGEMM_ENABLE"]))
        return 7

    monkeypatch.setattr(program, "run", start)
    run = CliRunner().invoke(app, ["run", "--", "python", "serve.py"])
    assert run.exit_code == 7 and started == [(["python", "serve.py"], "1")]
    assert "served nothing" in run.stderr
    shown = CliRunner().invoke(app, ["run", "--env"])
    assert shown.exit_code == 0 and "export TUNEGEMM_ENABLE=1\n" in shown.stdout
    for words in (["run"], ["run", "--env", "--", "python"]):
        assert CliRunner().invoke(app, words).exit_code == 2
    assert len(started) == 1
