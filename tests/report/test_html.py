"""The HTML report: what is in the page, where it says its times come from, and that it needs no network."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import re
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.recorded import SHAPES, fill, recorded_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError
from tunegemm.measure.outcome import Failure, Measurement
from tunegemm.measure.replay import open_replay
from tunegemm.report import html as report_page
from tunegemm.report.contents import Contents, from_database, from_recording
from tunegemm.report.html import report
from tunegemm.store import Database

#: The page of the six recorded shapes with all their trials is 155 KB; a reader may rely on less than this.
MOST_BYTES = 250_000


@pytest.fixture(scope="module")
def recording() -> Contents:
    return from_recording(open_replay("h200"))


@pytest.fixture(scope="module")
def recorded_page(recording: Contents) -> str:
    return report(recording, command="tunegemm report --device replay:h200")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("db") / "tuning.sqlite")


@pytest.fixture(scope="module")
def stored(path: Path) -> Contents:
    with Database.open(path, read_only=True) as database:
        return from_database(database)


@pytest.fixture(scope="module")
def stored_text(stored: Contents) -> str:
    return text_of(report(stored))


def text_of(page: str) -> str:
    """The words of a page, without its styles and script."""
    body = re.sub(r"<(style|script)>.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


class TestRecording:
    def test_it_says_that_nothing_was_measured_here(self, recorded_page: str) -> None:
        text = text_of(recorded_page)
        assert "Recorded NVIDIA H200." in text
        assert "nothing was measured on the machine that wrote the page" in text
        assert "no final race was run" in text
        assert "Measured on" not in text
        assert "The order is that of a search replayed on the recording" in text

    def test_every_record_is_in_table_and_roofline(self, recording: Contents, recorded_page: str) -> None:
        assert len(recording.winners) == len(open_replay("h200").problems()) >= 6
        for row, winner in enumerate(recording.winners):
            assert f"{winner.record.ratio:.3f}" in recorded_page
            assert html.escape(winner.record.label) in recorded_page
            # A table row, its mark and its name in the roofline, the mark of torch.mm.
            assert recorded_page.count(f'data-row="{row}"') >= 3

    def test_size(self, recorded_page: str) -> None:
        assert len(recorded_page.encode()) < MOST_BYTES

    def test_the_figures_are_well_formed(self, recorded_page: str) -> None:
        drawn = re.findall(r"<svg.*?</svg>", recorded_page, flags=re.DOTALL)
        assert len(drawn) == 7
        for figure in drawn:
            ElementTree.fromstring(figure)
        assert "nan" not in re.sub(r"[a-z]+nan|nan[a-z]+", "", " ".join(drawn))

    def test_nothing_comes_from_elsewhere(self, recorded_page: str) -> None:
        assert not re.search(r"https?://|//[a-z]|@import|\burl\(", recorded_page.replace("// ", ""))
        assert not re.search(r"<(img|iframe|object|embed|audio|video)\b", recorded_page)
        assert re.findall(r'<link[^>]*href="([^"]*)"', recorded_page) == ["data:,"]
        (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', recorded_page)
        (script,) = re.findall(r"<script>(.*?)</script>", recorded_page, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in html.unescape(policy)
        assert policy.startswith("default-src")

    def test_one_shape(self) -> None:
        one = from_recording(open_replay("h200"), shapes=[SHAPES[1]])
        assert [details.problem.shape for details in one.details] == [SHAPES[1]]
        assert one.measurements == 2509
        with pytest.raises(TunegemmError, match=r"replay:h200 has no record of 1x2x3; it has 128x7168x16384"):
            from_recording(open_replay("h200"), shapes=["1x2x3"])


class TestDatabase:
    def test_counts_and_order(self, stored: Contents) -> None:
        assert stored.measurements == 2 * 69  # nine vendor's algorithms and 60 others of each shape
        assert [winner.record.problem.shape for winner in stored.winners] == [SHAPES[1], SHAPES[0]]
        assert all(
            winner.record.confirmed and winner.low <= winner.record.ratio <= winner.high
            for winner in stored.winners
        )
        assert all(len(details.trials) == 69 for details in stored.details)
        assert stored.details[0].sequence is stored.details[0].trials

    def test_replayed_evidence_is_called_recorded_even_in_a_database(self, stored_text: str) -> None:
        assert "Recorded NVIDIA H200." in stored_text and "2026-11-20" in stored_text
        assert "Measured on" not in stored_text
        assert "Trials are in the order in which they were measured." in stored_text

    def test_real_evidence_is_called_measured(self, tmp_path: Path) -> None:
        with Database.open(tmp_path / "t.sqlite", create=True) as database:
            sample = Measurement(
                Candidate.make("cute_sm90", {"tile_m": 1}), (9.0,) * 8, (10.0,) * 8, 0.0, 0.0
            )
            database.publish(Problem.parse("64x64x64"), recorded_device(), sample, label="one")
            contents = from_database(database)
        text = text_of(report(contents))
        assert "Measured on NVIDIA H200." in text
        assert "Recorded" not in text
        assert "1 tuned product runs at 1.111 \u00d7 the speed of torch.mm" in text
        assert "Too few candidates were tried to tell." in text
        assert "No candidate failed" in text

    def test_failures_by_reason(self, stored: Contents, stored_text: str) -> None:
        (group,) = stored.failures
        assert (group.stage, group.count, group.families) == ("wrong", 6, ("cute_sm90",))
        assert "What failed, and why? 6 candidates" in stored_text
        assert re.search(r"relative error \d\.1 > 0\.01", stored_text)

    def test_environment(self, stored_text: str) -> None:
        for words in ("SM clock while measuring", "MHz", "Board power", " W ", "sw_power_cap", "580.159.04",
                      "2.11.0+cu130", "989.4 TFLOP/s dense bf16", "132 multiprocessors"):  # fmt: skip
            assert words in stored_text

    def test_the_shapes_measured_last_have_details(self, path: Path) -> None:
        with Database.open(path, read_only=True) as database:
            one = from_database(database, detailed=1)
            assert [details.problem.shape for details in one.details] == [SHAPES[0]]
            assert len(one.winners) == 2
            assert "1 further shapes: select them with --shape" in text_of(report(one))
            assert from_database(database, detailed=0).details == ()

    @pytest.mark.parametrize(
        ("choice", "message"),
        [
            ({"device": "A100"}, "device 'A100' was never measured here; use one of NVIDIA H200"),
            ({"shapes": ["8x8x8"]}, "has no record of 8x8x8; it has 128x7168x16384, 8448x9216x256"),
        ],
    )
    def test_what_is_not_there_is_named(self, path: Path, choice: dict[str, object], message: str) -> None:
        with (
            Database.open(path, read_only=True) as database,
            pytest.raises(TunegemmError, match=f"{message}$"),
        ):
            from_database(database, **choice)  # type: ignore[arg-type]

    def test_an_empty_database(self, tmp_path: Path) -> None:
        with (
            Database.open(tmp_path / "t.sqlite", create=True) as database,
            pytest.raises(TunegemmError, match="no measurements yet; run `tunegemm tune"),
        ):
            from_database(database)

    def test_names_from_a_database_stay_text(self, tmp_path: Path) -> None:
        """An imported database may hold anything; its words must not become markup or script."""
        device = recorded_device()
        nasty = "\"><script>alert(1)</script><b a='"
        fingerprint = dataclasses.replace(device.fingerprint, device_name=nasty, driver=nasty)
        foreign = dataclasses.replace(device, name=nasty, fingerprint=fingerprint)
        problem = Problem.parse("64x64x64")
        candidate = Candidate.make(nasty, {nasty: nasty, "tile_m": 8, "tile_n": 8})
        with Database.open(tmp_path / "t.sqlite", create=True) as database:
            for ratio in range(30):
                sample = Measurement(
                    candidate.with_launch(x=ratio), (9.0,) * 8, (10.0 + ratio,) * 8, 0.0, 0.0
                )
                database.publish(problem, foreign, sample, label=nasty)
            database.publish(problem, foreign, Failure(candidate, "crash", nasty))
            page = report(from_database(database), command=nasty)
        assert "<script>alert" not in page
        assert page.count("<script>") == 1
        assert page.count("&lt;script&gt;alert(1)") > 10


def multiply(path: Path, problems: int, measurements: int) -> None:
    """Copies of the first problem, its first measurement and its record, made within SQLite."""
    with closing(sqlite3.connect(path)) as connection, connection:

        def copies(table: str, source: str, **own: str) -> None:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            values = ", ".join(own.get(name, f"first.{name}") for name in columns)
            connection.execute(
                f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {source}, "
                f"(SELECT * FROM {table} ORDER BY id LIMIT 1) AS first"
            )

        for name, last in (("p", problems + 1), ("q", measurements)):
            connection.execute(f"CREATE TEMP TABLE {name} (i INTEGER PRIMARY KEY)")
            numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {last})"
            connection.execute(f"INSERT INTO {name} {numbers} SELECT i FROM n")
        connection.execute("DELETE FROM p WHERE i = 1")
        key = "p.i * 10000 + q.i"
        copies("problems", "p", id="p.i", m="64 * p.i + 1")
        copies("measurements", "p, q", id=key, problem_id="p.i")
        copies("records", "p", id="p.i", problem_id="p.i", measurement_id="p.i * 10000 + 1")


def test_a_record_beside_its_searchs_curve_says_why(tmp_path: Path) -> None:
    problem, candidate = Problem.parse(SHAPES[0]), Candidate.make("cute_sm90", {"tile_m": 128})
    searched, raced = (
        Measurement(candidate, (us,) * 5, (1000.0,) * 5, 1e-3, 0.002) for us in (1000 / 1.37, 1000 / 1.452)
    )
    with Database.open(tmp_path / "t.sqlite", create=True) as database:
        database.publish(problem, recorded_device(), searched, label="pp")
        database.confirm(problem, recorded_device(), raced, label="pp")
        text = text_of(report(from_database(database)))
    assert "The search measured the record's candidate at 1.370" in text
    assert "its 1.452 is from its final race with 5 rounds. The two do not compare." in text


@pytest.mark.parametrize("cell", ["ratio", "median_us", "baseline_median_us"])
@pytest.mark.parametrize("value", [5e-324, 1e308])
def test_figures_that_no_axis_holds_are_unreadable(
    path: Path, tmp_path: Path, cell: str, value: float
) -> None:
    """One such row ended the report of all others."""
    shutil.copy(path, tmp_path)
    with closing(sqlite3.connect(tmp_path / path.name)) as connection, connection:
        (count,) = connection.execute("SELECT count(*) FROM records").fetchone()
        connection.execute(
            f"UPDATE measurements SET {cell} = ? WHERE id = (SELECT min(measurement_id) FROM records)",
            (value,),
        )
    with Database.open(tmp_path / path.name, read_only=True) as database:
        contents = from_database(database)
        assert len(contents.winners) == count - 1 and report(contents)
        assert database.frame()[cell].between(1e-9, 1e9).all()


class TestScale:
    @pytest.mark.slow
    def test_a_large_database_is_read_narrowly(self, tmp_path: Path) -> None:
        """100,000 measurements of 1,000 shapes: under a second; all of them as objects would take 20 s."""
        path = fill(tmp_path / "t.sqlite", SHAPES[:1], each=10)
        multiply(path, 1_000, 100)
        with Database.open(path, read_only=True) as database:
            begin = time.thread_time()
            contents = from_database(database)
            seconds = time.thread_time() - begin
        assert len(contents.winners) == 1_001
        assert contents.measurements > 100_000
        assert len(contents.details) == 12
        assert seconds < 5
        page = report(contents)
        assert len(page.encode()) < 3_000_000
        assert page.count("<tr data-row=") == 1_001


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_colours_are_readable_in_light_dark_and_print() -> None:
    """WCAG 2.1 AA: 4.5 for text."""
    css = (Path(report_page.__file__).parent / "assets" / "page.css").read_text()
    css = css.replace("#fff;", "#ffffff;").replace("#000;", "#000000;")
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    palettes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks]
    assert len(palettes) == 3
    for palette in palettes:
        for text in ("ink", "muted", "faster", "slower", "equal", "accent"):
            for ground in ("surface", "raised"):
                assert contrast(palette[text], palette[ground]) >= 4.5, (text, ground, palette[text])
        assert contrast(palette["ink"], palette["notice"]) >= 7
