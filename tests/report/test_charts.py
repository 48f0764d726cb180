"""Image files of the figures: that they are images, show what they should, and are the same every time."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.recorded import SHAPES, fill
from tunegemm.errors import TunegemmError
from tunegemm.measure.replay import open_replay
from tunegemm.report.charts import KINDS, save
from tunegemm.report.evidence import Evidence, from_database, from_recording
from tunegemm.store import Database


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return from_recording(open_replay("h200"), shapes=SHAPES)


@pytest.mark.parametrize("kind", KINDS)
def test_svg(kind: str, evidence: Evidence, tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        save(kind, evidence, tmp_path / name)
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    words = " ".join(ElementTree.fromstring(text).itertext())
    assert "Recorded on an NVIDIA H200 (replay:h200); nothing was measured here. 2026-11-20." in words
    expected = {
        "roofline": ["989.4 TFLOP/s, tensor cores", *SHAPES],
        "speedup": ["times the speed of torch.mm", *SHAPES],
        "heatmap": ["cute_sm90 pingpong", "1.45", "tile_n"],
        "convergence": ["best so far", SHAPES[1]],
        "importance": ["PED-ANOVA", "tile_n", "swizzle_size"],
    }
    for said in expected[kind]:
        assert said in words


def test_png(evidence: Evidence, tmp_path: Path) -> None:
    save("speedup", evidence, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_from_a_database(tmp_path: Path) -> None:
    with Database.open(fill(tmp_path / "t.sqlite", SHAPES[:1]), read_only=True) as database:
        stored = from_database(database)
    for kind in KINDS:
        save(kind, stored, tmp_path / f"{kind}.svg")
        assert (tmp_path / f"{kind}.svg").stat().st_size > 5_000


def test_refusals(evidence: Evidence, tmp_path: Path) -> None:
    with pytest.raises(TunegemmError, match=r"a\.gif: plots are \.png or \.svg"):
        save("roofline", evidence, tmp_path / "a.gif")
    with pytest.raises(TunegemmError, match="No such file or directory; choose another --out"):
        save("roofline", evidence, tmp_path / "absent" / "a.svg")


def test_the_figure_in_the_readme_is_current(tmp_path: Path) -> None:
    """By its words and marks: another matplotlib may place them a little differently."""
    committed = Path(__file__).parents[2] / "docs" / "figures" / "recorded_speedup.svg"
    save("speedup", from_recording(open_replay("h200"), detailed=0), tmp_path / "fresh.svg")

    def content(path: Path) -> tuple[list[str], int]:
        root = ElementTree.fromstring(path.read_text())
        return [text.strip() for text in root.itertext() if text.strip()], sum(
            "use" in e.tag for e in root.iter()
        )

    assert content(committed) == content(tmp_path / "fresh.svg")
