"""Every option of `tunegemm tune` with a value that works and one that is refused, and the pairs that its
help documents. Times are recorded or modelled, and nothing is compiled."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer.main

import tunegemm
from tests.support.commands import here, process
from tests.support.processes import ROOT, environment
from tunegemm.cli import app
from tunegemm.cli.tune import again
from tunegemm.describe.device import cuda_device_count

SHAPE = ("--shape", "512x6144x4096")
#: The recorded times of a library: nothing is compiled.
REPLAY = ("--device", "replay:h200", "--families", "cublaslt")
#: A model's order of what is compiled already.
MODEL = ("--device", "model:h200", "--compiled-only", "--families", "skinny")
GROUPS = ("--shape", "64x64x64", "--groups", "4", "--device", "model:h200", "--compiled-only")

#: Of each option words that work, words that are refused, and what the refusal says.
USES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "--shape": ((*SHAPE, *REPLAY), ("--shape", "512x6144", *REPLAY), "shape '512x6144' is not MxNxK"),
    "--dtype": (
        ("--shape", "64x64x64", *MODEL, "--dtype", "fp16"),
        (*SHAPE, "--dtype", "int4"),
        "dtype 'int4' is not known",
    ),
    "--out-dtype": (
        ("--shape", "64x64x64", *MODEL, "--out-dtype", "fp32"),
        (*SHAPE, "--out-dtype", "int4"),
        "dtype 'int4' is not known",
    ),
    "--layout": (
        ("--shape", "64x64x64", *MODEL, "--layout", "tn"),
        (*SHAPE, "--layout", "rc"),
        "layout 'rc' is not known",
    ),
    "--alignment": (
        ("--shape", "64x64x64", *MODEL, "--alignment", "8"),
        (*SHAPE, "--alignment", "3"),
        "alignment",
    ),
    "--epilogue": (
        ("--shape", "64x64x64", *MODEL, "--epilogue", "bias_n+gelu_tanh"),
        (*SHAPE, "--epilogue", "sigmoidal"),
        "'sigmoidal'",
    ),
    "--accumulation": (
        ("--shape", "64x64x64", *MODEL, "--dtype", "fp8_e4m3", "--accumulation", "two_level"),
        (*SHAPE, "--accumulation", "slow"),
        "'slow'",
    ),
    "--groups": (
        GROUPS,
        (*SHAPE, "--groups", "-1"),
        "'-1'",
    ),
    "--from": (
        ("--from", "one.csv", *REPLAY),
        ("--from", "absent.json"),
        "absent.json",
    ),
    "--with-backward": (
        ("--shape", "64x64x64", *MODEL[:-1], "cute_sm90", "--with-backward"),
        ("--from", "one.csv", "--with-backward"),
        "--with-backward with --from",
    ),
    "--effort": ((*SHAPE, *REPLAY, "--effort", "full"), (*SHAPE, "--effort", "hard"), "'hard'"),
    "--trials": ((*SHAPE, *REPLAY, "--trials", "1"), (*SHAPE, "--trials", "0"), "--trials 0: must be"),
    "--budget": ((*SHAPE, *REPLAY, "--budget", "90s"), (*SHAPE, "--budget", "soon"), "not a duration"),
    "--seed": ((*SHAPE, *REPLAY, "--seed", "7"), (*SHAPE, "--seed", "-1"), "'-1'"),
    "--skews": (
        (*GROUPS, "--skews", "uniform"),
        (*SHAPE, "--skews", "uniform"),
        "--skews is for rows in groups",
    ),
    "--families": ((*SHAPE, *REPLAY), (*SHAPE, "--families", "cutlass"), "'cutlass' is not known"),
    "--kernels": (
        (*SHAPE, "--device", "replay:h200", "--compiled-only", "--kernels", "^co128x192x64"),
        (*SHAPE, "--kernels", "("),
        "not a regular expression",
    ),
    "--candidate": (
        (*SHAPE, "--device", "replay:h200", "--candidate", "cublaslt"),
        (*SHAPE, "--device", "replay:h200", "--candidate", "cublaslt,algorithm=none"),
        "algorithm=none; use one of",
    ),
    "--workers": ((*SHAPE, *REPLAY, "--workers", "1"), (*SHAPE, "--workers", "0"), "--workers 0: must be"),
    "--compiled-only": (
        ("--shape", "64x64x64", *MODEL),
        (*SHAPE, "--compiled-only", "--candidate", "cublaslt"),
        "--compiled-only with --candidate",
    ),
    "--energy": (
        (*SHAPE, *REPLAY, "--energy"),
        (*SHAPE, "--energy=1"),
        "--energy",
    ),
    "--sampler": ((*SHAPE, *REPLAY, "--sampler", "random"), (*SHAPE, "--sampler", "best"), "'best'"),
    "--study": (
        (*SHAPE, *REPLAY, "--study", "study.log"),
        (*SHAPE, *REPLAY, "--study", "/etc/passwd"),
        "/etc/passwd",
    ),
    "--device": ((*SHAPE, *REPLAY), (*SHAPE, "--device", "tpu:0"), "device 'tpu:0' is not known"),
    # Both tune in tests/tuning/test_cluster.py::test_the_command_tunes_on_several_gpus.
    "--devices": ((), (*SHAPE, "--devices", "0,0"), "names GPU 0 twice"),
    "--ray": ((), (*SHAPE, "--ray", "--devices", "all"), "--devices and --ray: give one of them"),
    "--db": ((*SHAPE, *REPLAY, "--db", "new.sqlite"), (*SHAPE, *REPLAY, "--db", "/etc/passwd"), "passwd"),
    "--top": ((*SHAPE, *REPLAY, "--top", "1"), (*SHAPE, "--top", "0"), "--top 0: must be 1 or more"),
    "--quiet": ((*SHAPE, *REPLAY, "-q"), (*SHAPE, "-q", "-v"), "--quiet and --verbose: give one of them"),
    "--verbose": ((*SHAPE, *REPLAY, "-v"), (*SHAPE, "-q", "-v"), "--quiet and --verbose: give one of them"),
    "--json": ((*SHAPE, *REPLAY, "--json"), (*SHAPE, "-q", "--json"), "--quiet and --json: give one of them"),
}  # fmt: skip
#: Pairs of which the help of one names the other, or that the guides print.
PAIRS: list[tuple[str, ...]] = [
    (*SHAPE, "--device", "replay:h200", "--candidate", "cublaslt", "--candidate", "cublaslt"),
    (*SHAPE, "--device", "replay:h200", "--candidate", "cublaslt", "-q"),
    (*SHAPE, "--device", "replay:h200", "--candidate", "cublaslt", "--json"),
    (*SHAPE, "--device", "replay:h200", "--candidate", "cublaslt", "--top", "3", "--seed", "1"),
    ("--from", "one.csv", "--from", "two.csv", "--budget", "5", *REPLAY),
    ("--from", "one.csv", *REPLAY, "--effort", "quick", "--json"),
    (*SHAPE, *REPLAY, "--effort", "full", "--trials", "2", "--budget", "1m"),
    (*SHAPE, *REPLAY, "--sampler", "tpe", "--study", "pair.log"),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    for name in ("one", "two"):
        (folder / f"{name}.csv").write_text("GemmTunableOp_BFloat16_TN,tn_6144_512_4096\n")
    return folder


def test_each_option_is_here() -> None:
    command = typer.main.get_command(app).get_command(None, "tune")  # type: ignore[attr-defined]
    long = {next(flag for flag in one.opts if flag.startswith("--")) for one in command.params}
    assert set(USES) == long - {"--help"}


@pytest.mark.parametrize("option", [option for option, (words, *_) in USES.items() if words])
def test_a_value_that_works(option: str, place: Path) -> None:
    words = USES[option][0]
    done = here("tune", *words, cwd=place, code=None if "--compiled-only" in words else 0)
    # A cache without kernels has none to rank: the command names the problem and ends with 1.
    assert done.returncode == 0 or "; leave out --compiled-only\n" in done.stderr, done


@pytest.mark.parametrize("option", USES)
def test_a_value_that_is_refused(option: str, place: Path) -> None:
    done = here("tune", *USES[option][1], cwd=place, code=2)
    assert USES[option][2] in done.stderr and done.stderr.count("\n") == 1 and not done.stdout, done


@pytest.mark.parametrize("words", PAIRS, ids=" ".join)
def test_pairs(words: tuple[str, ...], place: Path) -> None:
    done = here("tune", *words, cwd=place)
    assert "512x6144x4096" in done.stdout


def test_a_named_candidate_is_raced_and_nothing_else(place: Path) -> None:
    done = here("tune", *SHAPE, "--device", "replay:h200", "--candidate", "cublaslt", "--json", cwd=place)
    outcomes = json.loads(done.stdout)["outcomes"]
    assert {(one["label"], one["tuning_stage"]) for one in outcomes} == {("torch.mm", "final")}


def test_energy_that_nothing_meters_is_said(place: Path) -> None:
    done = here("tune", *SHAPE, *REPLAY, "--energy", "-q", cwd=place)
    assert done.stderr == "tunegemm: --energy needs a GPU; replay:h200 meters nothing\n"


def test_a_command_to_go_on_with_repeats_no_password() -> None:
    words = [
        "--shape",
        "64x64x64",
        "--db",
        "postgresql://me:secret@host/x",
        "--study",
        "mysql://me:secret@host/y",
    ]
    context = typer.main.get_command(app).commands["tune"].make_context("tune", words)  # type: ignore[attr-defined]
    command = again(context, [tunegemm.Problem.parse("64x64x64")])
    assert "secret" not in command and command.count("://me:") == 2
    assert "--db" not in again(context, [], db=None) and "--study" not in again(context, [], study=None)


def test_a_problem_without_a_kernel_has_the_command_that_counts_why(place: Path) -> None:
    words = ("--shape", "4096x64x64", "--dtype", "fp16", "--device", "model:h200")
    done = here("tune", *words, "--families", "skinny", cwd=place, code=1)
    command = done.stderr.partition("`tunegemm ")[2].partition("`")[0]
    assert command == "space --shape 4096x64x64 --dtype fp16 --layout tn"
    assert "first rejection" in here(*command.split(), "--families", "skinny", cwd=place).stdout


def test_patterns_without_a_match_are_refused(place: Path) -> None:
    done = here("tune", *SHAPE, "--device", "replay:h200", "--kernels", "zzz", cwd=place, code=2)
    assert "--kernels 'zzz': no feasible kernel for 512x6144x4096 bf16 tn has a matching label" in done.stderr


def test_help_is_in_groups_and_of_the_terminals_width() -> None:
    text = process("tune", "--help", env=environment(COLUMNS="120")).stdout
    headings = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    assert headings == ["What to tune", "How long", "Search", "Where", "Output", "Options", "Examples"]
    assert 100 < max(map(len, text.splitlines())) <= 120 and "<int" not in text
    assert "MODEL_CONFIG" in here("shapes", "--help").stdout


@pytest.mark.skipif(cuda_device_count() > 0, reason="a GPU measures")
def test_a_programs_products_without_a_gpu_are_told_from_what_ships(place: Path) -> None:
    done = here("tune", "--from", "one.csv", cwd=place)
    assert done.stdout.startswith(
        "No CUDA GPU here. 1 of 1 products have a shipped record for NVIDIA H200, 1.0"
    )
    assert "512x6144x4096 bf16 tn x 1: 1.0" in done.stdout and done.stderr == ""
    shown = json.loads(here("tune", "--from", "one.csv", "--json", cwd=place).stdout)
    assert shown["source"] == "shipped" and shown["best"]["ratio"] > 1 and shown["shape"] == "512x6144x4096"
    (place / "mixed.csv").write_text(
        "GemmTunableOp_BFloat16_TN,tn_4096_1024_14336\nGemmTunableOp_Half_TN,odd\n"
    )
    done = here("tune", "--from", "one.csv", "--from", "mixed.csv", cwd=place)
    head, first, torchs, left, *_ = done.stdout.splitlines()
    assert head.endswith("2 of 2 products have a shipped record for NVIDIA H200, 1.00 to 1.02 x torch.mm:")
    assert torchs == "  1024x4096x14336 bf16 tn x 1: torch.mm is the fastest"
    assert left.startswith("Left out: mixed.csv: line 2: extents 'odd' are not like")
    quiet = here("tune", "--from", "one.csv", "--from", "mixed.csv", "-q", cwd=place)
    assert quiet.stdout.splitlines() == [first, torchs] and quiet.stderr == ""


@pytest.mark.parametrize(
    ("where", "verdict"),
    [
        pytest.param(REPLAY, r"(?P<first>[^,]+) wins, ", id="replay"),
        pytest.param(
            ("--device", "model:h200", "--families", "triton_tma"),
            r": (?P<first>.+) is first \(a model's ranking",
            id="model",
            marks=pytest.mark.slow,  # it compiles four kernels
        ),
    ],
)
def test_what_the_last_line_names_first_is_the_first_row(
    where: tuple[str, ...], verdict: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    done = here("tune", "--shape", "8448x9216x256", *where, "--trials", "4", cwd=place)
    named = re.search(verdict, done.stdout)
    lines = [line for line in done.stdout.splitlines() if "│" in line]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    labels = [next(cell for cell in row if " " in cell or cell == "torch.mm") for row in rows]
    assert named is not None and len(rows) >= 4 and float(rows[0][0]) > 0
    assert named["first"].rpartition(", ")[2].strip() == labels[0]


@pytest.mark.skipif(cuda_device_count() > 0, reason="a GPU measures")
def test_a_shape_has_one_figure(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of steady state; figures of a recording, whose kernels share one clock, come second and say so."""
    for name in ("TUNEGEMM_DB", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(place) if name == "XDG_DATA_HOME" else "")
    shape, replay = ("--shape", "8448x9216x256"), ("--device", "replay:h200")
    verdict = here("tune", *shape, *replay, "--trials", "4", "--families", "cublaslt", cwd=place).stdout
    verdict = verdict.partition("8448x9216x256 bf16 tn: ")[2]
    assert verdict.startswith("1.194 x torch.mm in steady state")
    assert "In this replay, where all kernels share one clock, " in verdict
    for command in ("explain", "leaderboard", "history"):
        assert "1.194" in here(command, *shape, cwd=place).stdout
    assert "where all kernels share one clock" in here("report", *shape, *replay, cwd=place).stdout
    page = (place / "report.html").read_text()
    assert "runs at 1.194 \u00d7 the speed of torch.mm on NVIDIA H200 in steady state</h1>" in page
    assert "In this recording the geometric mean is 1.45" in page
    assert re.search(r"^\| 8448x9216x256 \|.*\| 1\.19 \|$", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_torch_is_1000_where_it_is_the_record(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raced against itself it was 0.990, which is noise."""
    for name in ("TUNEGEMM_DB", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(place) if name == "XDG_DATA_HOME" else "")
    said = {
        command: here(command, "--shape", "1024x4096x14336", cwd=place).stdout
        for command in ("explain", "leaderboard", "history")
    }
    assert "0.990" not in "".join(said.values()), said
    assert "1.000" in said["leaderboard"] and "1.000 of torch.mm" in said["history"]
    assert re.search(r"dispatch +torch.mm: [\d.]+ us, the fastest, [\d.]+ % of the roofline", said["explain"])
    assert re.search(r"evidence +[\d.]+ us, as the baseline [\d.]+ us, noise", said["explain"])


def test_an_open_database_without_a_location_has_what_ships(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNEGEMM_DB", str(tmp_path / "own.sqlite"))
    with tunegemm.Database.open() as database:
        frame = database.frame(tunegemm.Problem.parse("512x6144x4096"), family="cute_sm90")
    assert "NVIDIA H200" in set(frame["device_name"]) and set(frame["origin"]) == {"shipped"}
    with tunegemm.Database.open(tmp_path / "own.sqlite") as database:
        assert database.frame().empty


def test_what_ships_has_a_history(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TUNEGEMM_DB", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path) if name == "XDG_DATA_HOME" else "")
    done = here("history", *SHAPE, cwd=tmp_path)
    assert "NVIDIA H200" in done.stdout and "shipped" in done.stdout
    assert json.loads(here("history", *SHAPE, "--json", cwd=tmp_path).stdout)[0]["label"] in done.stdout


@pytest.mark.skipif(cuda_device_count() > 0, reason="a GPU has measured")
def test_a_report_of_nothing_names_the_recorded_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TUNEGEMM_DB", str(tmp_path / "none.sqlite"))
    done = here("report", cwd=tmp_path, code=2)
    assert "tunegemm report --device replay:h200" in done.stderr


@pytest.mark.skipif(cuda_device_count() > 0, reason="on a GPU the whole space is measured")
@pytest.mark.parametrize("flag", ["--trials", "--effort", "--budget", "--families", "--kernels", "--from"])
def test_a_candidate_is_not_searched_for(flag: str, place: Path) -> None:
    value = {"--trials": "2", "--effort": "full", "--budget": "9", "--families": "skinny", "--kernels": "co"}
    words = ["--from", "one.csv"] if flag == "--from" else [*SHAPE, flag, value[flag]]
    done = here("tune", *words, "--candidate", "cublaslt", cwd=place, code=2)
    assert f"{flag} with --candidate, which does not search" in done.stderr
