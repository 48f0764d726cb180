"""What a new user meets beside results: values that a shell completes, pipes that close, narrow terminals."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tunegemm
from tests.support.commands import TUNEGEMM, here, process
from tests.support.processes import environment
from tunegemm.cli import app
from tunegemm.errors import TunegemmError


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("tune --dtype f", {"fp16", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3_e5m2", "fp8_e5m2_e4m3"}),
        ("tune --out-dtype int", {"int8", "int32"}),
        ("tune --layout t", {"tn", "tt"}),
        ("tune --accumulation t", {"two_level"}),
        ("tune --effort q", {"quick"}),
        ("tune --device r", {"replay:h200"}),
        ("tune --sampler g", {"gp"}),
        ("tune --skews uniform,t", {"uniform,typical"}),
        ("tune --families skinny,cub", {"skinny,cublaslt"}),
        ("leaderboard --layout n", {"nn", "nt"}),
        ("leaderboard --format m", {"md"}),
        ("shapes config.json --engine v", {"vllm"}),
    ],
)
def test_a_shell_completes_values(words: str, offered: set[str]) -> None:
    line = f"tunegemm {words}"
    asked = {"_TUNEGEMM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words.split()))}
    run = CliRunner().invoke(app, env=asked, prog_name="tunegemm")
    assert set(run.stdout.split()) == offered


def test_a_shell_asks_a_process() -> None:
    asked = {"_TUNEGEMM_COMPLETE": "complete_bash", "COMP_WORDS": "tunegemm un", "COMP_CWORD": "1"}
    assert process(env=environment(**asked)).stdout.split() == ["unload"]


def test_fish_gets_one_line_for_each_option() -> None:
    """It takes each line of a wrapped help text for an option."""
    asked = {"_TUNEGEMM_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    asked |= {"_TYPER_COMPLETE_ARGS": "tunegemm tune --dev", "COLUMNS": "40"}
    shown = process(env=environment(**asked)).stdout
    assert [line.split("\t")[0] for line in shown.splitlines()] == ["--device", "--devices"], shown


def test_closed_outputs_change_no_exit_code() -> None:
    """As of `2>&-`, and of a daemon."""
    command = [*TUNEGEMM, "tune", "--shape", "bad"]
    closed = subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *command], env=environment(), timeout=170)
    assert closed.returncode == 2


def test_tables_have_the_letters_of_the_outputs_encoding() -> None:
    done = process("leaderboard", "--limit", "1", env=environment(PYTHONIOENCODING="latin-1"))
    assert "| 1x576x7168 bf16 tn |" in done.stdout and "\\u" not in done.stdout


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly() -> None:
    command = subprocess.Popen(
        [*TUNEGEMM, "leaderboard", "--format", "csv"],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert command.stdout is not None and command.stderr is not None
    command.stdout.readline()
    command.stdout.close()
    assert command.stderr.read() == b"" and command.wait(60) in (0, 141)


@pytest.mark.slow
def test_a_narrow_terminal_cuts_no_path(tmp_path: Path) -> None:
    place = tmp_path / "a folder of a name" / ("long" * 20)
    place.mkdir(parents=True)
    ours, theirs = pty.openpty()
    names = environment(TUNEGEMM_CACHE_DIR=str(place), TUNEGEMM_DB=str(place / "t.sqlite"), COLUMNS="80")
    doctor = subprocess.Popen([*TUNEGEMM, "doctor"], env=names, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # how a terminal whose program has ended reads on Linux
        pass
    os.close(ours)
    doctor.wait(60)
    text = shown.decode()
    assert (
        f"/{'long' * 20}" in text
        and f"{'long' * 20}/t.sqlite" in text
        and "\N{HORIZONTAL ELLIPSIS}" not in text
    )


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a new user has: shipped records, and no database."""
    monkeypatch.setenv("TUNEGEMM_DB", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


@pytest.mark.usefixtures("shipped")
def test_a_candidate_begins_from_the_record() -> None:
    words = ("--shape", "8448x9216x256", "--device", "replay:h200", "--candidate", "cute_sm90,tile_m=256")
    assert "  tile      cute_sm90 pp256x192x64 s4 c1x2 e64 rm w1 all: " in here("explain", *words).stdout


@pytest.mark.usefixtures("shipped")
def test_shapes_counts_the_products_that_have_a_record(tmp_path: Path) -> None:
    facts = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    facts |= {"intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    said = here("shapes", "config.json", "--rows", "16,1024", cwd=tmp_path).stderr
    assert "wrote 10 products to shapes.json; " in said and "10 have a record for NVIDIA H200\n" in said


@pytest.mark.parametrize("name", ["TUNEGEMM_PACK", "TUNEGEMM_DB", "TUNEGEMM_MODE", "TUNEGEMM_POLICY"])
def test_explain_says_what_has_no_effect(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is neither a pack nor a database, and values of no mode or policy."""
    (tmp_path / "notes.txt").write_text("no database and no pack, but long enough to be read as either\n" * 9)
    monkeypatch.setenv(name, str(tmp_path / "notes.txt"))
    shown = here("explain", "--shape", "8448x9216x256", "--device", "replay:h200").stdout
    (line,) = (line for line in shown.splitlines() if line.startswith("  ignored "))
    assert "notes.txt" in line


def test_a_family_is_a_name_or_several_and_a_policy_shows_itself() -> None:
    found = tunegemm.tune("64x64x64", families="cublaslt", device="model:h200")
    assert found.note and "families" not in found.note, "no letters taken for names"
    # Nor is it said that a rule rejects what only a GPU can time.
    assert found.note.startswith("64x64x64 bf16 tn has no times of cublaslt on model:h200, and only a GPU")
    with pytest.raises(TunegemmError, match="'cutlass' is not known"):
        tunegemm.tune("64x64x64", families="cutlass", device="model:h200")
    with (policy := tunegemm.policy("deterministic")):
        assert repr(policy) == "<tunegemm.policy: deterministic>"
