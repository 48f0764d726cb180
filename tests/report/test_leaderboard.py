"""Ranking, ties and renderers of leaderboards, from memory and from a real database."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tunegemm.describe.architectures import PARTS
from tunegemm.describe.device import Device, Fingerprint, device_from_part
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.measure.evidence import QUALIFYING, SCREEN, STEADY_FINAL
from tunegemm.measure.outcome import Failure, Measurement
from tunegemm.measure.statistics import winner
from tunegemm.report.leaderboard import Leaderboard, of_all_layers
from tunegemm.report.text import to_json
from tunegemm.store import Database
from tunegemm.store.locations import user_location
from tunegemm.store.queries import latest_records
from tunegemm.store.shipped import latest_confirmed, write_records

FINGERPRINT = Fingerprint(
    "NVIDIA H200", 132, "9.0", "", 132, "580.159.04", "13.0", "2.11.0", "4.8.1", "3.6.0"
)
DEVICE = device_from_part("cuda:0", PARTS["h200"], FINGERPRINT)
PROBLEM = Problem.parse("4096x4096x4096")
SMALL = Problem.parse("64x24576x1536")


def candidate(tile_n: int, family: str = "cute_sm90") -> Candidate:
    return Candidate.make(family, {"tile_n": tile_n})


def measurement(ratio: float, tile_n: int, *, family: str = "cute_sm90", clock: float = 1.0) -> Measurement:
    """A measurement with that ratio; `clock` slows the whole interleave, the baseline with it."""
    baseline = tuple(clock * time for time in (199.0, 200.0, 201.0, 202.0))
    samples = tuple(time / ratio for time in baseline)
    return Measurement(candidate(tile_n, family), samples, baseline, 1.7e-3, 0.004)


def labels(*outcomes: Measurement | Failure) -> dict[str, str]:
    return {o.candidate.digest: f"n{o.candidate['tile_n']}" for o in outcomes}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database.open(tmp_path / "t.sqlite", create=True) as database:
        yield database


def board_of(
    outcomes: Sequence[Measurement | Failure],
    names: Mapping[str, str] | None = None,
    *,
    problem: Problem = PROBLEM,
    device: Device = DEVICE,
    best: Measurement | None = None,
) -> Leaderboard:
    """The board of a database in which these were published, each as it was timed, and one confirmed."""
    with (
        TemporaryDirectory() as folder,
        Database.open(Path(folder, "t.sqlite"), create=True) as database,
    ):
        keys = {}
        for outcome in outcomes:
            is_steady = isinstance(outcome, Measurement) and outcome.is_steady
            method = STEADY_FINAL if best else QUALIFYING if is_steady else SCREEN
            label = (names or {}).get(outcome.candidate.digest, "")
            keys[outcome.candidate] = database.publish(problem, device, outcome, label=label, method=method)
        if best is not None:
            database.confirm(problem, device, best, stored_as=keys[best.candidate])
        return Leaderboard.from_frame(problem, database.frame(problem))


def texts(board: Leaderboard, top: int | None = None) -> list[str]:
    """The board in every format."""
    return [board.plain(top), board.markdown(top), board.csv(top), to_json(board.as_dict(top))]


def ranks(board: Leaderboard) -> list[tuple[int, bool, str]]:
    frame = board.frame
    return list(zip(frame["rank"], frame["tie"], frame["candidate"], strict=True))


class TestRanking:
    def test_by_ratio_and_not_by_time(self) -> None:
        # The second was measured while the chip was 10 % slower, with its baseline.
        fast, faster = measurement(1.03, 128), measurement(1.07, 256, clock=1.1)
        assert faster.median_us > fast.median_us
        board = board_of([fast, faster], labels(fast, faster))
        assert ranks(board) == [(1, False, "n256"), (2, False, "n128"), (3, False, "torch.mm")]

    def test_the_baselines_row_is_of_the_leaders_interleave(self) -> None:
        outcomes = [measurement(1.03, 128), measurement(1.07, 256, clock=1.1)]
        frame = board_of(outcomes).frame.set_index("candidate")
        baseline = frame.loc["torch.mm"]
        assert baseline["median_us"] == pytest.approx(200.5 * 1.1)
        assert baseline["ratio_to_torch_mm"] == 1
        assert baseline["spread_percent"] > 0

    def test_a_measured_torch_mm_is_not_shown_twice(self) -> None:
        outcomes = [measurement(1.03, 128), measurement(0.999, 1, family="cublaslt")]
        names = {outcomes[1].candidate.digest: "torch.mm"}
        board = board_of(outcomes, names)
        assert list(board.frame["candidate"]).count("torch.mm") == 1
        assert len(board.frame) == 2

    def test_closer_than_the_noise_is_a_tie_with_the_first_of_the_rank(self) -> None:
        # Each is within 0.4 % of its neighbour, but the third is not within 0.4 % of the first.
        outcomes = [measurement(1.050, 1), measurement(1.047, 2), measurement(1.044, 3), measurement(0.9, 4)]
        board = board_of(outcomes, labels(*outcomes))
        assert ranks(board) == [
            (1, True, "n1"), (1, True, "n2"), (3, False, "n3"), (4, False, "torch.mm"), (5, False, "n4"),
        ]  # fmt: skip
        assert "1=" in board.markdown()

    def test_a_winner_among_ties_is_marked_as_one_of_them(self) -> None:
        # A noise under the floor is luck: of two within the floor the cheaper one wins, and comes first.
        ahead, cheaper = (
            Measurement(
                Candidate.make("cublaslt", {"workspace_bytes": n}), (100 / ratio,) * 3, (100.0,) * 3, 0, 0
            )
            for n, ratio in ((1 << 20, 1.042), (0, 1.0395))
        )
        best = winner(PROBLEM, [ahead, cheaper])
        board = board_of([ahead, cheaper], best=best)
        assert best is cheaper and list(board.frame["chosen"]) == [True, False, False]
        assert list(board.frame["rank"]) == [1, 1, 3] and list(board.frame["tie"]) == [True, True, False]
        assert "closer than the noise, here up to 0.3 %" in board.note

    def test_better_evidence_comes_before_a_higher_ratio(self) -> None:
        turns = {"turn_ms": 160.0}
        alone = [
            dataclasses.replace(measurement(ratio, n), telemetry=turns)
            for ratio, n in ((0.98, 64), (1.02, 128))
        ]
        shared = measurement(1.06, 256)
        board = board_of([*alone, shared], labels(*alone, shared))
        assert [label for _, _, label in ranks(board)] == ["n128", "torch.mm", "n64", "n256"]
        assert list(board.frame["evidence"]) == ["steady", "steady", "steady", "screen"]
        assert "Ordered by evidence (2 steady, 1 screen)" in board.note
        assert "Ordered" not in board_of(alone).note
        assert "Ordered" not in board_of([shared]).note

    def test_the_last_measurement_counts_and_failures_have_no_row(self) -> None:
        outcomes = [
            measurement(1.2, 128),
            Failure(candidate(64), "crash", "illegal address"),
            measurement(1.02, 128),
        ]
        frame = board_of(outcomes).frame
        assert len(frame) == 2
        assert frame["ratio_to_torch_mm"].iloc[0] == pytest.approx(1.02)

    def test_figures(self) -> None:
        board = board_of([measurement(1.0025, 128)])
        row = board.frame.iloc[0]
        assert row["median_us"] == pytest.approx(200.0)
        assert row["tflops"] == pytest.approx(2 * 4096**3 / 200e-6 / 1e12)
        assert row["percent_of_roofline"] == pytest.approx(100 * row["tflops"] / 989.4, rel=1e-6)
        memory_bound = board_of([measurement(1.0025, 128)], problem=SMALL).frame.iloc[0]
        assert memory_bound["percent_of_roofline"] == pytest.approx(100 * SMALL.bytes / 4800e9 / 200e-6)

    def test_an_unknown_peak_leaves_its_column_empty(self) -> None:
        unheard = dataclasses.replace(FINGERPRINT, device_name="NVIDIA Unheard")
        device = dataclasses.replace(DEVICE, fingerprint=unheard)
        board = board_of([measurement(1.05, 128)], device=device)
        assert board.frame["percent_of_roofline"].isna().all()
        assert board.as_dict()["rows"][0]["percent_of_roofline"] is None
        assert not any("nan" in text.lower() for text in texts(board))


class TestRendering:
    @pytest.fixture
    def board(self) -> Leaderboard:
        outcomes = [measurement(1.05, 128), measurement(1.02, 64), measurement(0.5, 32)]
        return board_of(outcomes, labels(*outcomes))

    def test_table(self, board: Leaderboard) -> None:
        text = board.plain()
        assert "4096x4096x4096 bf16 tn on NVIDIA H200" in text
        row = next(line for line in text.splitlines() if "n128" in line)
        assert row.replace("│", " ").split() == [
            "1", "1.050", "n128", "191.0", "200.5", "719.8", "72.7", "1.2", "cute_sm90",
        ]  # fmt: skip

    def test_markdown(self, board: Leaderboard) -> None:
        lines = board.markdown().splitlines()
        assert lines[0] == "**4096x4096x4096 bf16 tn on NVIDIA H200**"
        assert lines[2].startswith("| rank | ratio to torch.mm | candidate | median us | torch.mm us |")
        assert lines[3].startswith("| ---: | ---: | --- | ---: | ---: |")
        assert lines[4] == "| 1 | 1.050 | n128 | 191.0 | 200.5 | 719.8 | 72.7 | 1.2 | cute_sm90 |"
        assert lines[8] == ""

    def test_json_has_plain_numbers(self, board: Leaderboard) -> None:
        data = json.loads(to_json(board.as_dict()))
        assert data["source"] == "measured"
        first = data["rows"][0]
        assert first["rank"] == 1 and first["tie"] is False and first["chosen"] is False
        assert first["median_us"] == pytest.approx(190.952)
        assert first["ratio_to_torch_mm"] == 1.05

    def test_csv_reads_back(self, board: Leaderboard) -> None:
        rows = list(csv.DictReader(io.StringIO(board.csv())))
        assert [row["candidate"] for row in rows] == ["n128", "n64", "torch.mm", "n32"]
        assert float(rows[0]["tflops"]) == pytest.approx(719.7, rel=1e-3)

    def test_top_keeps_the_baseline_and_says_what_is_missing(self, board: Leaderboard) -> None:
        top = board.top(1)
        assert list(top.frame["candidate"]) == ["n128", "torch.mm"]
        assert list(top.frame["rank"]) == [1, 3]
        assert "Rows not shown: 2." in top.note
        assert board.top(None) is board
        assert "not shown" not in board.top(9).note

    def test_a_narrow_terminal_folds_words_and_keeps_numbers(self, board: Leaderboard) -> None:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=80).print(board.table(width=80))
        rows = [line for line in text.getvalue().splitlines() if "n128" in line]
        assert all(figure in rows[0] for figure in ("n128", "191.0", "719.8", "1.050", "72.7"))
        assert rows[0].endswith("│")

    @pytest.mark.parametrize(("width", "missing"), [(80, 4), (120, 0), (160, 0)])
    def test_candidates_stay_on_a_line_in_any_usual_terminal(self, width: int, missing: int) -> None:
        from rich.console import Console

        outcomes = [measurement(1.05, 128), measurement(1.02, 64)]
        names = {
            o.candidate.digest: f"pp128x{o.candidate['tile_n']:03}x128 s12 c2x2 e16 rm w8 all"
            for o in outcomes
        }
        board = board_of(outcomes, names)
        text = io.StringIO()
        Console(file=text, width=width).print(board.table(width=width))
        lines = text.getvalue().splitlines()
        for name, ratio in zip(names.values(), ("1.050", "1.020"), strict=True):
            assert any(name in line and ratio in line for line in lines)
        assert max(len(line.rstrip()) for line in lines) <= width
        everything = board.table()
        assert len(everything.columns) - len(board.table(width=width).columns) == missing
        headers = [column.header for column in everything.columns]
        assert headers[:3] == ["rank", "ratio to torch.mm", "candidate"], "the ratio leads"
        assert "device" not in headers, "the title names the one there is"

    def test_labels_with_markup_stay_text(self) -> None:
        outcome = measurement(1.05, 128)
        board = board_of([outcome], {outcome.candidate.digest: "a|b [red]x"})
        assert "a|b [red]x" in board.plain()
        assert "a\\|b \\[red\\]x" in board.markdown()


class TestStored:
    def test_a_board_from_the_database(self, database: Database) -> None:
        database.publish(PROBLEM, DEVICE, measurement(1.08, 64), label="lucky")
        database.publish(PROBLEM, DEVICE, measurement(0.97, 32))
        database.confirm(PROBLEM, DEVICE, measurement(1.05, 128), label="winner")
        board = Leaderboard.from_frame(PROBLEM, database.frame(PROBLEM))
        assert ranks(board) == [
            (1, False, "winner"), (2, False, "torch.mm"), (3, False, "lucky"),
            (4, False, f"cute_sm90 {candidate(32).digest}"),
        ]  # fmt: skip
        assert list(board.frame["chosen"]) == [True, False, False, False]
        assert list(board.frame["evidence"]) == ["final", "final", "screen", "screen"]
        assert board.frame["percent_of_roofline"].iloc[0] == pytest.approx(72.8, abs=0.1)
        assert "Measured on NVIDIA H200, driver 580.159.04, torch 2.11.0." in board.note

    def test_only_the_latest_software_of_a_device(self, database: Database) -> None:
        newer = dataclasses.replace(DEVICE, fingerprint=dataclasses.replace(FINGERPRINT, torch="2.12.0"))
        database.publish(PROBLEM, DEVICE, measurement(1.30, 64), label="old")
        database.publish(PROBLEM, newer, measurement(1.05, 64), label="new")
        frame = database.frame()
        latest = Leaderboard.from_frame(PROBLEM, frame)
        assert latest.frame["ratio_to_torch_mm"].iloc[0] == pytest.approx(1.05)
        assert "Rows of other devices or software versions, not shown: 1." in latest.note

    def test_devices_are_ranked_apart(self, database: Database) -> None:
        other = dataclasses.replace(
            DEVICE, fingerprint=dataclasses.replace(FINGERPRINT, device_name="NVIDIA Unheard")
        )
        database.publish(PROBLEM, DEVICE, measurement(1.05, 64), label="a")
        database.publish(PROBLEM, other, measurement(1.20, 64), label="a")
        board = Leaderboard.from_frame(PROBLEM, database.frame())
        assert list(zip(board.frame["device"], board.frame["rank"], strict=True)) == [
            ("NVIDIA H200", 1), ("NVIDIA H200", 2), ("NVIDIA Unheard", 1), ("NVIDIA Unheard", 2),
        ]  # fmt: skip
        assert list(board.frame["percent_of_roofline"].isna()) == [False, False, True, True]
        assert len(board.top(1).frame) == 4  # each device's first, and its torch.mm

    def test_a_problem_that_was_not_measured(self, database: Database) -> None:
        board = Leaderboard.from_frame(SMALL, database.frame())
        assert board.frame.empty
        assert board.note == "There are no measurements for this device and software."
        assert board.plain()

    def test_summary(self, database: Database) -> None:
        database.confirm(PROBLEM, DEVICE, measurement(1.10, 128), label="pp")
        database.publish(PROBLEM, DEVICE, measurement(1.04, 7, family="cublaslt"), label="a66")
        database.publish(SMALL, DEVICE, measurement(0.95, 64), label="slow")
        board = Leaderboard.summary(database.frame())
        small, large = board.as_dict()["rows"]
        assert (large["problem"], large["candidate"]) == (str(PROBLEM), "pp")
        assert large["ratio_to_torch_mm"] == 1.1
        # Where nothing beats torch.mm, torch.mm is the best.
        assert (small["problem"], small["candidate"]) == (str(SMALL), "torch.mm")
        assert board.note == "Geometric mean over 2 rows, to torch.mm: 1.049."
        for text in (board.plain(1), board.csv(1), board.markdown(1)):
            assert "4096x4096x4096 bf16 tn" in text

    def test_the_best_is_of_what_had_the_chip_to_itself(self, database: Database) -> None:
        database.publish(PROBLEM, DEVICE, measurement(1.06, 9, family="cublaslt"), label="hungry")
        database.publish(PROBLEM, DEVICE, measurement(1.03, 128), label="pp", method="steady_final")
        for board in (
            Leaderboard.summary(database.frame()),
            Leaderboard.best_of_all(latest_records(database)),
        ):
            (row,) = board.as_dict()["rows"]
            assert (row["candidate"], row["ratio_to_torch_mm"]) == ("pp", 1.03)

    def test_an_empty_summary(self, database: Database) -> None:
        board = Leaderboard.summary(database.frame())
        assert board.frame.empty and "There are no measurements" in board.plain()

    def test_of_all_layers_the_narrowest_that_has_a_problem_counts_with_all_its_rows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        project = tmp_path / "project.sqlite"
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
        monkeypatch.setenv("TUNEGEMM_DB", str(project))
        monkeypatch.setattr("tunegemm.store.shipped.data_path", lambda *_: tmp_path / "records")
        of_layers = {user_location(): (1.2, [SMALL, PROBLEM]), project: (1.1, [PROBLEM])}
        for location, (ratio, problems) in of_layers.items():
            with Database.open(location, create=True) as database:
                for problem in problems:
                    database.confirm(problem, DEVICE, measurement(ratio, 64))
                    database.publish(problem, DEVICE, measurement(ratio - 0.01, 128))
        with Database.open(tmp_path / "shipped.sqlite", create=True) as database:
            for problem in (Problem.parse("8x8x8"), SMALL, PROBLEM):
                database.confirm(problem, DEVICE, measurement(1.3, 64))
            database.confirm(Problem.parse("16x8x8"), DEVICE, measurement(1.4, 7, family="cublaslt"))
            write_records(latest_confirmed(database.records()), tmp_path / "records")
        frame, warnings = of_all_layers(lambda database: database.frame())
        assert not warnings and "_layer" not in frame
        found = sorted(zip(frame["m"], frame["ratio"].round(2), strict=True))
        assert found == [(8, 1.3), (16, 1.4), (64, 1.19), (64, 1.2), (4096, 1.09), (4096, 1.1)]
