"""Names that a stranger chose, through every command and format; printed commands that parse again."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.cli.test_damage import COMMANDS, FORBIDDEN
from tests.support.commands import here, process
from tests.support.recorded import SHAPES, fill
from tests.tuning.test_progress import result
from tunegemm.cli import app, options
from tunegemm.cli.results import interruption, verdict_line
from tunegemm.cli.tune import say_gpu_command
from tunegemm.describe.command import tune_command
from tunegemm.describe.device import Fingerprint, find_device
from tunegemm.describe.epilogue import ACTIVATIONS, GATED
from tunegemm.describe.problem import ACCUMULATIONS, LAYOUTS, OUTPUT_DTYPES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import ProblemError
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Measurement
from tunegemm.report.text import clean, markdown, to_json
from tunegemm.tuning.progress import Source, TuneResult

#: What a terminal, Rich, HTML, Markdown, SVG, matplotlib and a table each take for something else.
NAME = "H [/b] \x1b[31m $\\foo_{ <script>alert(1)</script> | two\nlines \u202eback\u200f \x9b31m `code` &amp;"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded measurements whose device, labels, failures and origins have that name."""
    path = fill(tmp_path_factory.mktemp("db") / "tuning.sqlite", each=12)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE fingerprints SET device_name = ?", (NAME,))
        names = [field.name for field in dataclasses.fields(Fingerprint)]
        for key, *facts in connection.execute(f"SELECT id, {', '.join(names)} FROM fingerprints").fetchall():
            # Else its rows are damaged, and nothing is printed of them.
            digest = Fingerprint(*facts).digest
            connection.execute("UPDATE fingerprints SET digest = ? WHERE id = ?", (digest, key))
        connection.execute("UPDATE candidates SET label = ?", (NAME,))
        connection.execute("UPDATE failures SET reason = ?", (NAME,))
        connection.execute("UPDATE measurements SET origin = ?", (NAME,))
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_it_as_text(command: str, database: Path, tmp_path: Path) -> None:
    words = [
        word.replace("DB", str(database)).replace("OUT", str(tmp_path / "out")) for word in command.split()
    ]
    result = CliRunner().invoke(app, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert not FORBIDDEN.search(result.stdout + result.stderr), result.stdout + result.stderr
    if words[0] in ("report", "leaderboard") and "h200" not in words:
        assert result.exit_code == 0, result.stderr
    if words[-1] == "md":
        assert not re.search(r"(?<!\\)<script>alert", result.stdout)
    if "json" in words and result.exit_code == 0 and "--out" not in words:
        json.loads(result.stdout)
    for path in tmp_path.glob("out*"):
        if path.suffix == ".html":
            page = path.read_text(encoding="utf-8")
            assert "<script>alert" not in page and page.count("<script>") == 1 and "\x1b" not in page
            assert "&lt;script&gt;" in page
        if path.suffix == ".svg":
            shown = " ".join(ElementTree.fromstring(path.read_text(encoding="utf-8")).itertext())
            assert not FORBIDDEN.search(shown)


def test_a_markdown_table_keeps_its_columns(database: Path) -> None:
    result = CliRunner().invoke(app, ["leaderboard", "--db", str(database), "--format", "md"])
    rows = [line for line in result.stdout.splitlines() if line.startswith("|")]
    columns = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
    assert len(rows) == 2 + len(SHAPES) and len(columns) == 1


def test_imported_rows_are_not_called_measured_here(database: Path) -> None:
    said = CliRunner().invoke(app, ["leaderboard", "--db", str(database), "--shape", SHAPES[0]]).stdout
    assert "Imported from H [/b]" in " ".join(said.split()) and "Measured on" not in said


@given(st.text(max_size=700))
def test_clean_is_one_printable_line(text: str) -> None:
    shown = clean(text)
    assert shown.isprintable()
    assert text != shown or text.isprintable()
    assert clean(shown) == shown or len(shown) > 500
    assert not re.search(r"(?<!\\)[|<]", markdown(text).replace("\\\\", ""))


@given(
    st.recursive(st.none() | st.floats() | st.text() | st.integers(), lambda one: st.lists(one, max_size=3))
)
def test_json_is_json_in_printable_letters(document: object) -> None:
    text = to_json(document)
    assert text.isascii() and "\x1b" not in text
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


STEPS = (
    ("", "alpha"), ("", "scale_tensor", "scale_rowwise"), ("", "beta_c"), ("", "bias_n", "bias_m"),
    ("", *ACTIVATIONS, *GATED), ("", "residual"), ("", "amax"),
)  # fmt: skip


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    extents = [draw(st.integers(1, 5000)) for _ in range(3)]
    in_dtype = draw(st.sampled_from(list(OUTPUT_DTYPES)))
    a_major, b_major = draw(st.sampled_from(list(LAYOUTS.values())))
    try:
        return Problem(
            *extents, draw(st.sampled_from([1, 1, 7])), in_dtype,
            draw(st.sampled_from([*OUTPUT_DTYPES[in_dtype], "bf16", "fp32"])), a_major, b_major,
            alignment=draw(st.sampled_from([0, 1, 2, 4, 8, 16])),
            epilogue="+".join(filter(None, (draw(st.sampled_from(steps)) for steps in STEPS))),
            accumulation=draw(st.sampled_from(ACCUMULATIONS)),
        )  # fmt: skip
    except ProblemError:
        assume(False)
        raise


def parsed(line: str) -> list[Problem]:
    """What `tunegemm tune` makes of a command line, by its own parser."""
    program, command, *arguments = shlex.split(line)
    assert (program, command) == ("tunegemm", "tune")
    given_ = typer.main.get_command(app).commands["tune"].make_context("tune", arguments).params  # type: ignore[attr-defined]
    names = ("shape", "dtype", "out_dtype", "layout", "alignment", "epilogue", "accumulation")
    return options.parse_problems(*(given_[name] for name in names))


@settings(deadline=None)
@given(problems())
def test_a_printed_command_tunes_the_very_problem(problem: Problem) -> None:
    assert parsed(tune_command(problem)) == [problem]


def test_a_tuning_without_a_gpu_ends_with_its_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Alone on its line, with every option but those that only hold here."""
    words = ["--shape", "64x64x64", "--dtype", "fp8_e4m3", "--alignment", "8", "--epilogue", "bias_n+relu"]
    words += ["--accumulation", "two_level", "--families", "cute_sm90", "--trials", "3"]
    given_ = ["--device", "replay:h200", *words]
    context = typer.main.get_command(app).commands["tune"].make_context("tune", given_)  # type: ignore[attr-defined]
    say_gpu_command(context, [Problem.parse("64x64x64")])
    lead, line = capsys.readouterr().out.splitlines()
    assert lead.endswith(":")
    assert sorted(shlex.split(line)) == sorted(["tunegemm", "tune", *words])
    assert [str(problem) for problem in parsed(line)] == ["64x64x64 fp8_e4m3 two_level tn align8 bias_n+relu"]


def test_the_verdict_says_what_won_by_how_much_and_what_is_called_now() -> None:
    device, problem = find_device("model:h200"), Problem.parse("512x6144x4096")
    ours = Candidate.make("cute_sm90", {"tile_m": 64})

    def verdict(source: Source, best: Measurement) -> str:
        labels = {ours.digest: "co64"}
        return verdict_line(
            TuneResult(problem, device, source, best, (best,), (), labels, 1.0, 1), "t.sqlite"
        )

    won = Measurement(ours, (10.0,) * 8, (12.0,) * 8, 0.0, 0.002)
    line = verdict("measured", won)
    assert "co64 wins, 1.200 x torch.mm (10.00 us, torch.mm 12.00 us)" in line
    assert "tunegemm.matmul(a, b) now uses this kernel for 512x6144x4096 bf16 tn (from t.sqlite)" in line
    assert line.endswith("1.0 s, 1 kernel compiled.")
    assert "within the noise" in verdict("measured", Measurement(ours, (10.0,) * 8, (10.1,) * 8, 0.0, 0.02))
    lost = Measurement(TORCH_MM, (10.0,) * 8, (10.0,) * 8, 0.0, 0.0)
    assert "torch.mm is the fastest, or ties with the best kernel" in verdict("measured", lost)
    assert "now calls torch.mm" in verdict("measured", lost)
    assert "replayed, not measured here; nothing stored" in verdict("replayed", won)


@pytest.mark.slow
def test_a_pipe_gets_no_blanks_at_the_ends_of_lines() -> None:
    said = process("leaderboard", "--limit", "5").stdout + here("doctor").stdout
    assert said and not [line for line in said.splitlines() if line != line.rstrip()]


def test_what_no_option_names_is_a_call() -> None:
    import tunegemm

    problem = Problem(32, 48, 64, out_major="m")
    call = tune_command(problem)
    assert call.startswith("tunegemm.tune(") and eval(call[14:-1], {"tunegemm": tunegemm}) == problem


def test_an_interruption_says_how_many_candidates_were_measured() -> None:
    """Each once, here, and no failures: a result that was known already kept nothing."""
    again, other = result(), result(problem=Problem.parse("64x64x64"))
    kept = [result(), again, other, result(problem=Problem.parse("8x8x8"), source="database")]
    assert interruption(kept) == "Interrupted: 4 measured candidates kept."
    failed = result().outcomes[2:]
    assert interruption([result(outcomes=failed)]) == "Interrupted: 0 measured candidates kept."
