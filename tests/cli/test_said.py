"""What commands say of values, without what makes them."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.tuning.planted import DEVICE
from tunegemm.cli import app, arguments, db, doctor, leaderboard, pack, printing, verify
from tunegemm.cli.help import App
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DeviceError
from tunegemm.measure.outcome import Failure
from tunegemm.report.doctor import Check, described

PROBLEM = Problem(512, 512, 512)


def raced_again(best: str | None, ratio: float = 1.25) -> Any:
    winner = SimpleNamespace(candidate=best, ratio=ratio) if best else None
    failed = Failure(Candidate.make("skinny", {}), "launch", "refused")
    return SimpleNamespace(best=winner, note="no GPU", label=str.upper, outcomes=(failed,), interrupted=False)


@pytest.mark.parametrize(
    ("best", "reason", "line"),
    [
        ("b", "another driver", "the record moved from a to B  [another driver]"),
        ("a", "", "a stays the record, from 1.100 to 1.250 of torch.mm  [same software]"),
        (None, "", "nothing could be measured (no GPU)  [same software]"),
    ],
)
def test_a_verified_record_is_one_line(best: str | None, reason: str, line: str) -> None:
    record = SimpleNamespace(label="a", candidate="a", problem=PROBLEM, ratio=1.1)
    judgement = SimpleNamespace(reason=reason)
    assert verify.outcome_line(record, judgement, raced_again(best)) == f"512x512x512 bf16 tn: {line}"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "count", "numbers", "says"),
    [
        ("all", 3, (0, 1, 2), ""), ("0,2", 3, (0, 2), ""), (" 1 , 0", 2, (1, 0), ""),
        ("3", 3, None, "no GPU 3; this host has GPUs 0 to 2"),
        ("0,0", 3, None, "names GPU 0 twice"), ("x", 3, None, "not GPU numbers"),
        ("0,", 3, None, "not GPU numbers"),
        ("-1", 3, None, "not GPU numbers"), ("all", 0, None, "no CUDA device here"),
        ("0", 0, None, "no CUDA device here"),
    ],
)  # fmt: skip
def test_numbers_of_gpus(
    monkeypatch: pytest.MonkeyPatch, text: str, count: int, numbers: tuple[int, ...] | None, says: str
) -> None:
    monkeypatch.setattr("tunegemm.describe.device.cuda_device_count", lambda: count)
    if numbers is not None:
        assert arguments.parse_gpus(text) == numbers
        return
    with pytest.raises(DeviceError if count == 0 else arguments.UsageError, match=says):
        arguments.parse_gpus(text)


@pytest.mark.parametrize("count", [0, 1, 5, 6])
def test_a_leaderboard_without_rows_names_five_products(count: int) -> None:
    measured = [Problem(8 * (1 + number), 8, 8) for number in range(count)]
    said = leaderboard.what_lacks(["1x2x3", "--dtype=bf16"], measured, "cute_sm90")
    if not count:
        assert said == "no measurements with cute_sm90 yet"
        assert leaderboard.what_lacks(["1x2x3"], measured, None) == "no measurements yet"
        return
    assert said.startswith("no measurement of 1x2x3 --dtype=bf16; the database has 8x8x8 bf16")
    assert said.count("x8x8") == min(count, 5) and said.endswith("and 1 more") == (count == 6)


@pytest.mark.parametrize("refused", [0, 1])
def test_a_packs_contents_and_how_much_of_it_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refused: int
) -> None:
    records = [SimpleNamespace(fingerprint=SimpleNamespace(device_name=name)) for name in ("B", "A", "B")]
    verdicts = [SimpleNamespace(reason="another GPU")] * refused
    monkeypatch.setattr("tunegemm.store.packing.cannot_launch", lambda records: {"triton_tma": "lacks x"})
    monkeypatch.setattr("tunegemm.store.packing.refused_here", lambda records: verdicts)
    loaded: Any = SimpleNamespace(records=records, objects=lambda: 2)
    contents, troubles = described(loaded)
    assert contents == "3 records of A, B, 2 kernels"
    assert troubles == ["triton_tma: lacks x", *["1 unusable on this GPU: another GPU"] * refused]


def test_rows_left_out_are_grouped_by_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """Reasons that differ in numbers are one; of the kinds some are named."""
    kinds = [f"kind {'x' * n}" for n in range(1, db.NAMED + 1)]
    lines = ["row 1: no 7", "row 2: no 8", "row 3: other", *kinds]
    db.name_skipped(lines)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "left out: row 1: no 7 (and 1 more like it)"
    assert last == "left out: 2 more"
    db.name_skipped(lines[2:3])
    assert capsys.readouterr().err == "left out: row 3: other\n"


def test_a_doctors_lines_hang_where_their_words_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("GPU", "note", "none", "buy one"), Check("packages", "ok", "all")]
    said: list[Any] = []
    monkeypatch.setattr("tunegemm.report.doctor.examine", lambda db: checks)
    monkeypatch.setattr(printing, "say", lambda text, **words: said.append((text, words)))
    doctor.command(None, False)
    assert said == [
        ("  GPU       none -> buy one", {"hang": 16, "lead": "note", "colour": "yellow"}),
        ("  packages  all", {"hang": 16, "lead": "ok  ", "colour": "green"}),
    ]
    monkeypatch.setattr("tunegemm.report.doctor.examine", lambda db: [Check("GPU", "fail", "none")])
    with pytest.raises(typer.Exit):
        doctor.command(None, False)


@pytest.mark.parametrize(("width", "lines"), [(0, 1), (41, 1), (40, 2), (25, 2), (24, 1)])
def test_a_line_is_wrapped_if_it_and_its_hang_leave_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, lines: int
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: width > 0, raising=False)
    monkeypatch.setattr(printing.shutil, "get_terminal_size", lambda: SimpleNamespace(columns=width))
    text = "a-word " * 5 + "tail55"
    printing.say(text, hang=4)
    found = capsys.readouterr().out.splitlines()
    assert len(found) == lines and " ".join(" ".join(found).split()) == text
    assert all(line.startswith(("    a", "    t")) for line in found[1:])
    assert lines == 1 or all(len(line) <= width for line in found)
    command = f"tunegemm {text}"
    printing.say(command, hang=4)
    assert len(capsys.readouterr().out.splitlines()) == 1, "a command stays whole"
    printing.say_command("Go on with:", command)
    assert capsys.readouterr().out == f"Go on with:\n  {command}\n"


@pytest.mark.parametrize(("shapes", "raced"), [([], [512, 1024]), (["512x512x512"], [512]), (["8x8x8"], [])])
def test_the_records_of_named_shapes_are_verified(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    shapes: list[str],
    raced: list[int],
) -> None:
    facts = {"label": "a", "candidate": "a", "ratio": 1.1}
    records = [SimpleNamespace(problem=Problem(m, 512, 512), **facts) for m in (512, 1024)]
    opened = nullcontext(SimpleNamespace(records=lambda: records))
    seen: list[int] = []

    def verified(tuner: Any, record: Any, top: int) -> Any:
        seen.append(record.problem.m)
        return raced_again("a")

    monkeypatch.setattr("tunegemm.store.Database.open", lambda *_: opened)
    monkeypatch.setattr("tunegemm.tuning.tuner.Tuner", lambda *_, **__: opened)
    monkeypatch.setattr("tunegemm.tuning.tuner.open_gpu", lambda spec: DEVICE)
    monkeypatch.setattr(
        "tunegemm.tuning.verify.due",
        lambda wanted, *_, **__: [(SimpleNamespace(reason="why"), each) for each in wanted],
    )
    monkeypatch.setattr("tunegemm.tuning.verify.verify", verified)
    options = [word for shape in shapes for word in ("--shape", shape)]
    done = CliRunner().invoke(app, ["verify", *options, "--db", str(tmp_path / "a.sqlite")])
    assert done.exit_code == 0 and seen == raced, done.output
    assert done.stdout.count("Failed: launch 1 (refused)") == len(raced)
    assert ("nothing to verify: all 0 records are current on NVIDIA H200" in done.stdout) == (not raced)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (OSError(5, "Input/output error", "a/b"), 2, "tunegemm: a/b: Input/output error"),
        (OSError(5, "Input/output error"), 2, "tunegemm: the working directory: Input/output error"),
        (OSError("no\nnumber"), 2, "tunegemm: the working directory: no number"),
        (DeviceError("no GPU"), 2, "tunegemm: no GPU"), (KeyboardInterrupt(), 130, "tunegemm: interrupted"),
        (typer.BadParameter("'x' is none"), 2, "Invalid value: 'x' is none. See `tunegemm --help`."),
    ],
)  # fmt: skip
def test_an_error_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    says: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    main: Any = import_module("tunegemm.cli.app")
    monkeypatch.setattr(main.TyperGroup, "main", fail)
    with pytest.raises(SystemExit) as ended:
        main.OneLineErrors(name="tunegemm").main([])
    assert ended.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.removeprefix("tunegemm: ") == says.removeprefix("tunegemm: ")
    monkeypatch.setattr(main.TyperGroup, "main", lambda *_, **words: words.get("standalone_mode", True))
    with pytest.raises(SystemExit) as ended:
        main.OneLineErrors(name="tunegemm").main([])
    assert ended.value.code == 0
    assert main.OneLineErrors(name="tunegemm").main([], standalone_mode=False) is False


def test_hidden_commands_are_not_listed() -> None:
    own = App()

    @own.command()
    def shown() -> None:
        """Shown,

        in its first paragraph."""

    @own.command(hidden=True)
    def unseen() -> None:
        """Not listed."""

    text = CliRunner().invoke(own, ["--help"]).stdout
    assert "Shown," in text and "paragraph" not in text and "unseen" not in text


@pytest.mark.parametrize(
    ("files", "sha256", "says"),
    [
        (1, None, ""),
        (2, None, ""),
        (1, "a" * 64, ""),
        (2, "a" * 64, "applies to one file"),
        (1, "x", "64 hexa"),
    ],
)
def test_a_hash_is_of_one_pack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: int, sha256: str | None, says: str
) -> None:
    loaded: list[str | None] = []
    monkeypatch.setattr("tunegemm.report.doctor.described", lambda loaded: ("", []))
    monkeypatch.setattr(
        "tunegemm.store.packs.install",
        lambda file, sha256: loaded.append(sha256) or SimpleNamespace(name=str(file)),
    )
    paths = [tmp_path / str(number) for number in range(files)]
    if says:
        with pytest.raises(arguments.UsageError, match=says):
            pack.load_command(paths, sha256)
        assert loaded == []
    else:
        pack.load_command(paths, sha256)
        assert loaded == [sha256] * files


@pytest.mark.parametrize(
    ("names", "everything", "removed"),
    [(["a"], False, ["a"]), ([], True, ["x", "y"]), (None, True, ["x", "y"])],
)
def test_packs_are_unloaded_by_name_or_all(
    monkeypatch: pytest.MonkeyPatch, names: list[str] | None, everything: bool, removed: list[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr("tunegemm.store.packs.installed", lambda: [Path("x"), Path("y")])
    monkeypatch.setattr("tunegemm.store.packs.remove", lambda name: seen.append(name) or name)
    pack.unload_command(names, everything)
    assert seen == removed
    for wrong in ((["a"], True), ([], False), (None, False)):
        with pytest.raises(arguments.UsageError, match="or --all"):
            pack.unload_command(*wrong)
