"""Commands that do their work, without a GPU: real kernels, recorded or modelled times."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.commands import TUNEGEMM, here
from tests.support.stores import damage
from tunegemm.store.schema import OLDEST_SCHEMA, VERSION_TABLE

SHAPE = "4096x4096x4096"

TUNE = f"tune --shape {SHAPE} --device replay:h200 --families cute_sm90 --workers 1 --trials 2".split()


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    """A replayed tuning as JSON. Its kernels stay compiled for the other tests."""
    run = here(*TUNE, "--json")
    assert run.stderr == ""
    return [json.loads(line) for line in run.stdout.splitlines()]


class TestTune:
    def test_json(self, documents: list[dict[str, Any]]) -> None:
        (document,) = documents
        assert document["shape"] == SHAPE
        assert document["source"] == "replayed"
        assert document["device"] == "replay:h200"
        assert document["interrupted"] is False
        best, outcomes = document["best"], document["outcomes"]
        assert isinstance(best, dict) and isinstance(outcomes, list)
        measured = {outcome["digest"] for outcome in outcomes if "median_us" in outcome}
        assert best["candidate"]["family"] == "cute_sm90"
        assert best["median_us"] > 0
        assert best["tflops"] == pytest.approx(2 * 4096**3 / best["median_us"] * 1e-6)
        assert 1 <= len(measured) <= 2 + 1, "the final race measures candidates again, and torch.mm besides"

    def test_what_no_kernel_can_have_ends_with_the_reason(self) -> None:
        run = here("tune", "--shape", SHAPE, "--dtype", "int8", "--layout", "nn", "--json", code=1)
        reason = "4096x4096x4096 int8 nn can have no kernel: layout nn of int8: WGMMA reads all but 16-bit"
        assert run.stderr.startswith(f"tunegemm: {reason}") and run.stderr.count("\n") == 1
        assert json.loads(run.stdout)["note"].startswith(reason)

    def test_text(self, documents: list[dict[str, Any]]) -> None:
        run = here(*TUNE)
        assert "replayed, not measured here; nothing stored" in run.stdout
        assert f"tunegemm tune --shape {SHAPE}" in run.stdout
        assert "compiled" in run.stderr, "progress is told on stderr"
        assert "\x1b[" not in run.stdout, "no control sequences in a pipe"

    def test_nothing_replayed_is_stored(self, tmp_path: Path, documents: list[dict[str, Any]]) -> None:
        database = tmp_path / "tuning.sqlite"
        here(*TUNE, "--db", str(database))
        run = here("leaderboard", "--db", str(database), code=2)
        assert "no measurements yet; run `tunegemm tune --shape MxNxK` on a GPU first" in run.stderr

    @pytest.mark.slow
    def test_modelled_is_labelled(self) -> None:
        words = "tune --shape 1000x2048x512 --device model:h200 --families cute_sm90 --trials 1"
        run = here(*words.split())
        assert "a model's ranking, no measurement; nothing stored" in run.stdout

    def test_without_a_gpu_one_line_says_what_happens(self, documents: list[dict[str, Any]]) -> None:
        from tunegemm.describe.device import cuda_device_count

        if cuda_device_count():
            pytest.skip("there is a GPU here")
        run = here("tune", "--shape", SHAPE, "--families", "cute_sm90", "--trials", "2")
        first = run.stderr.splitlines()[0]
        assert first.startswith("No CUDA GPU here: candidates are compiled for sm_90a; times come from")
        assert first.endswith("where it has none, a model ranks the kernels. Nothing is stored.")
        run = here("tune", "--shape", "72x72x72", "--families", "cublaslt", "--trials", "1", code=None)
        assert "72x72x72 bf16 tn has no times of cublaslt on replay:h200" in run.stderr

    @pytest.mark.slow
    def test_with_backward_tunes_the_products_of_the_backward_pass(self) -> None:
        from tunegemm.describe.problem import Problem

        forward = Problem.parse("512x768x1024")
        command = [*TUNEGEMM, "tune", "--shape", forward.shape, "--with-backward", "--device", "model:h200"]
        command += ["--families", "cute_sm90", "--compiled-only", "--json"]  # whatever is compiled by now
        run = subprocess.run(command, capture_output=True, text=True, timeout=170)
        tuned = [Problem(**json.loads(line)["problem"]) for line in run.stdout.splitlines()]
        assert tuned == [forward, *forward.backward()], run.stderr
        assert [problem.layout for problem in tuned] == ["tn", "tt", "nt"]

    @pytest.mark.slow
    def test_interrupt(self) -> None:
        """Ctrl-C ends it within seconds, with the command that goes on and exit code 130."""
        more = "--shape 8192x8192x8192 --effort exhaustive --seed 7"
        process = subprocess.Popen(
            [*TUNEGEMM, *TUNE[:-2], *more.split()],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # A shell's background job, as a CI run may be, ignores SIGINT and hands that on.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        assert process.stderr is not None
        # The stage in which thousands of kernels are compiled; a line that counts them comes after 30 s only.
        assert any(" · screen · " in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        lead, again = errors.splitlines()[-2:]
        assert lead.endswith("Go on with:")
        again = again.strip()  # alone on its line, to be copied
        assert again.startswith("tunegemm tune --shape 4096x4096x4096 --shape 8192x8192x8192 ")
        for words in ("--effort exhaustive", "--seed 7", "--device replay:h200", "--families cute_sm90"):
            assert words in again


@pytest.mark.gpu
def test_tune_store_and_show_on_a_gpu(tmp_path: Path) -> None:
    database = str(tmp_path / "tuning.sqlite")
    run = here("tune", "--shape", "512x512x512", "--trials", "4", "--db", database)
    assert "tunegemm.matmul(a, b) now uses this kernel for 512x512x512 bf16 tn" in run.stdout
    for form in ("table", "csv", "json", "md"):
        assert here("leaderboard", "--db", database, "--format", form).stdout.strip()


class TestSpace:
    ARGUMENTS = ("space", "--shape", SHAPE, "--family", "triton_tma", "--device", "model:h200")

    def test_json_adds_up(self) -> None:
        run = here(*self.ARGUMENTS, "--format", "json")
        (count,) = json.loads(run.stdout)
        assert count["size"] == count["kernels"] * count["launches"]
        assert count["feasible"] + sum(count["rejected"].values()) == count["size"]
        assert 0 < count["feasible"] < count["size"]
        assert set(count["examples"]) == set(count["rejected"])

    def test_table(self) -> None:
        run = here(*self.ARGUMENTS)
        assert "(the whole space)" in run.stdout
        assert re.search(r"feasible\s+.*[\d,]+ of [\d,]+ kernels", run.stdout)

    @pytest.mark.slow
    def test_shipped_spaces(self) -> None:
        run = here("space", "--shape", SHAPE, "--device", "model:h200", "--format", "json")
        counts = {count["family"]: count for count in json.loads(run.stdout)}
        assert counts["cute_sm90"]["feasible"] > 100
        assert "cublaslt" in counts


class TestDoctor:
    def test_findings(self) -> None:
        run = here("doctor", "--json")
        names = [check["name"] for check in json.loads(run.stdout)]
        assert names[:2] == ["tunegemm", "packages"]
        assert {"database", "kernel cache", "dispatch", "family cute_sm90", "family cublaslt"} <= set(names)


class TestProgress:
    def progress(self, **changes: object) -> object:
        from tunegemm.describe.problem import Problem
        from tunegemm.tuning.progress import Progress

        facts: dict[str, object] = {
            "problem": Problem.parse(SHAPE), "stage": "screen", "feasible": 812,
            "compiled": 24, "to_compile": 96,
            "library": 9, "measured": 12, "planned": 400,
            "failures": {"compile": 2, "wrong": 0, "timeout": 1},
            "best_label": "pp128x192x64", "best_us": 205.31, "best_ratio": 1.0432, "elapsed_s": 12.3,
        }  # fmt: skip
        return Progress(**(facts | changes))  # type: ignore[arg-type]

    def lines(self, terminal: bool, *updates: object) -> str:
        from tunegemm.cli.progress import ProgressView

        file = io.StringIO()
        with ProgressView(Console(file=file, force_terminal=terminal, width=160)) as view:
            for update in updates:
                view.update(update)  # type: ignore[arg-type]
        return file.getvalue()

    def test_a_pipe_gets_a_line_per_stage(self) -> None:
        text = self.lines(False, self.progress(), self.progress(compiled=25), self.progress(stage="explore"))
        assert text.splitlines() == [
            f"{SHAPE} bf16 tn · {stage} · feasible 812 · compiled 24 (+96) · library 9 · measured 12/400 · "
            "failed 3 (compile 2, timeout 1) · best pp128x192x64 at 205.3 us, 1.043 x torch.mm · 12 s"
            for stage in ("screen", "explore")
        ]

    def test_a_long_stage_is_not_silent_in_a_log(self) -> None:
        updates = [self.progress(elapsed_s=float(second)) for second in range(100)]
        assert [line.rpartition(" · ")[2] for line in self.lines(False, *updates).splitlines()] == [
            "0 s", "30 s", "60 s", "90 s",
        ]  # fmt: skip

    def test_the_last_line_of_a_log_says_what_was_waited_for(self) -> None:
        seconds = {"start": 3.21, "checks": 0.04, "compiling": 7.0}
        text = self.lines(False, self.progress(seconds=seconds), self.progress(seconds=seconds, stage="done"))
        first, last = text.splitlines()
        assert first.endswith(" · 12 s") and last.endswith(" · 12 s (start 3.2, compiling 7.0)")

    def test_before_the_first_measurement(self) -> None:
        nothing = dict.fromkeys(("feasible", "compiled", "to_compile", "library", "measured"), 0)
        text = self.lines(
            False,
            self.progress(stage="library", best_us=None, best_ratio=None, failures={}, planned=0, **nothing),
        )
        assert text == f"{SHAPE} bf16 tn · library · 12 s\n"

    def test_where_nothing_is_timed_kernels_are_compiled_only(self) -> None:
        text = self.lines(False, self.progress(stage="compile", library=0, measured=0, best_us=None))
        assert "compiled 24 (+96)" in text
        assert "measured" not in text

    def test_a_clock_estimates_what_is_left(self) -> None:
        from tunegemm.cli.progress import ProgressView

        def clock(elapsed_s: float, **changes: object) -> str:
            return view.clock(self.progress(**changes), elapsed_s)  # type: ignore[arg-type]

        view = ProgressView(Console(file=io.StringIO()), budget_s=20.0)
        assert clock(15.0) == "15 s, about 316 s to go, 5 s of the budget left"
        assert clock(20.0, planned=16) == "20 s, about 1 s to go, the budget is spent: ending"
        assert clock(21.0, planned=15) == "21 s, the budget is spent: ending"
        assert clock(1.0, measured=0) == "1 s, 19 s of the budget left"
        assert ProgressView(Console(file=io.StringIO())).clock(self.progress(measured=0), 1.0) == "1 s"  # type: ignore[arg-type]

    def test_a_place_among_several_and_a_bar_of_what_is_done(self) -> None:
        from rich.progress_bar import ProgressBar

        from tunegemm.cli.progress import ProgressView
        from tunegemm.describe.problem import Problem

        view = ProgressView(Console(file=io.StringIO()), total=2)
        places = [view.place()]
        for _ in range(2):
            view.end(Problem.parse(SHAPE))
            places.append(view.place())
        assert places == ["[1/2] ", "[2/2] ", "[2/2] "]
        assert ProgressView(Console(file=io.StringIO())).place() == ""
        for changes, total, completed in (
            ({}, 400, 15), ({"planned": 10}, 10, 10), ({"planned": 0}, 1, 0),
            ({"stage": "compile"}, 400, 24),
        ):  # fmt: skip
            shown = view.rendered(self.progress(**changes), 0.0)  # type: ignore[arg-type]
            (bar,) = (
                cell
                for column in shown.renderables[0].columns  # type: ignore[union-attr]
                for cell in column.cells
                if isinstance(cell, ProgressBar)
            )
            assert (bar.total, bar.completed) == (total, completed)

    def test_a_terminal_gets_a_live_view(self) -> None:
        text = self.lines(True, self.progress())
        assert "best pp128x192x64 at 205.3 us" in text
        assert "\x1b[" in text


class TestExplain:
    CANDIDATE = "cute_sm80,tile_m=128,tile_n=128,tile_k=32,stages=3,warps_m=2,warps_n=2,smem_swizzle=2"

    def empty(self, tmp_path: Path) -> str:
        from tunegemm.store import Database

        with Database.open(tmp_path / "empty.sqlite", create=True) as database:
            return database.name

    def explain(self, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
        where = ("--device", "model:h200", "--db", self.empty(tmp_path), "--json")
        return json.loads(here("explain", *arguments, *where).stdout)

    def test_the_seeds_figures(self, tmp_path: Path) -> None:
        """4096^3 fp16 is 1365 FLOP/B, a 128x128x32 tile 64; an H200 has 989.4 TFLOP/s over 4.8 TB/s."""
        (found,) = self.explain(tmp_path, "--shape", SHAPE, "--dtype", "fp16", "--candidate", self.CANDIDATE)
        assert found["flops_per_byte"] == pytest.approx(1365.33, abs=0.01)
        assert found["tile"]["flops_per_smem_byte"] == 64
        assert found["tile"]["smem_bytes"] == 3 * 2 * 128 * 32 * 2
        assert found["tile"]["verdict"] == "feasible" and found["tile"]["waves"] == 8
        assert found["ridge_flops_per_byte"] == pytest.approx(206.125)
        assert found["bound"] == "compute" and found["roofline_tflops"] == pytest.approx(989.4)
        assert found["record"] is None and found["why_not"]

    def test_a_memory_bound_shape_and_no_tile(self, tmp_path: Path) -> None:
        first, second = self.explain(tmp_path, "--shape", "96x4096x4096", "--shape", "64x64x64x2")
        assert first["bound"] == second["bound"] == "memory" and first["tile"] is None
        assert first["roofline_us"] == pytest.approx(first["bytes"] / 4.8e6)

    def test_text(self, tmp_path: Path) -> None:
        run = here(
            "explain", "--shape", "4096x4096x1001", "--device", "model:h200", "--db", self.empty(tmp_path)
        )
        assert "4096x4096x1001 bf16 tn align2 on NVIDIA H200" in run.stdout
        assert "compute-bound" in run.stdout and "dispatch  torch:" in run.stdout

    @pytest.mark.parametrize("name", ["TUNEGEMM_DB", "TUNEGEMM_PACK"])
    def test_a_file_that_a_variable_names_and_that_is_not_there_ends_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        place = tmp_path / "absent"
        monkeypatch.setenv(name, str(place))
        run = here("explain", "--shape", SHAPE, "--device", "model:h200", code=2)
        assert f"{name}={place}: no such file; correct" in run.stderr and run.stdout == ""
        checks = json.loads(here("doctor", "--json", code=1).stdout)
        (failed,) = (one for one in checks if one["status"] == "fail")
        assert str(place) in failed["detail"] and "correct" in failed["remedy"]

    @pytest.mark.parametrize("place", ["/etc/passwd", "/nowhere.sqlite"])
    def test_a_database_that_cannot_be_read_ends_it(self, place: str) -> None:
        run = here("explain", "--shape", SHAPE, "--device", "model:h200", "--db", place, code=2)
        assert run.stdout == "" and place in run.stderr and run.stderr.count("\n") == 1


class TestDatabaseUpgrade:
    def test_a_database_of_before_the_first_schema_is_refused_with_the_command_that_mends_it(
        self, tmp_path: Path
    ) -> None:
        old = tmp_path / "old.sqlite"
        shutil.copy(Path(__file__).parents[1] / "data" / f"schema-{OLDEST_SCHEMA}.sqlite", old)
        assert "up to date" in here("db", "upgrade", str(old)).stdout
        here("leaderboard", "--db", str(old))
        damage(old, f"UPDATE {VERSION_TABLE} SET version_num = '0001'")
        for command in (("leaderboard", "--db"), ("db", "upgrade")):
            said = here(*command, str(old), code=2).stderr
            assert f"schema 0001 is older than {OLDEST_SCHEMA}" in said and said.count("\n") == 1
            assert "run `tunegemm db upgrade` of a checkout at commit" in said

    def test_the_cause_is_the_true_one(self, tmp_path: Path) -> None:
        for place, named in ((tmp_path, "a folder"), (Path("/dev/null"), "a device")):
            assert f"{place}: {named}, not a database file" in here("db", "upgrade", place, code=2).stderr

    def test_a_missing_database_is_not_made(self, tmp_path: Path) -> None:
        missing = tmp_path / "none.sqlite"
        assert str(missing) in here("db", "upgrade", str(missing), code=2).stderr
        assert not missing.exists()
