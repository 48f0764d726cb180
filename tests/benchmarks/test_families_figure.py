"""The heat map of kernel families is drawn of the committed result file, and says what is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import families

ROWS = json.loads(families.RESULTS.read_text())["rows"]
#: The families that there were when the file was measured.
TIMED = set(families.PROVIDER) - {"skinny"}


def test_it_is_drawn_of_the_committed_file(tmp_path: Path) -> None:
    out = tmp_path / "families.svg"
    assert families.main(["--out", str(out)]) == 0
    text = out.read_text()
    for standing in families.standings(ROWS):
        assert standing.shape in text
        assert all(f"{ratio:.2f}" in text for ratio in standing.ratios.values())
    assert all(family in text for family in TIMED)


def test_every_shape_has_one_place_and_a_winner() -> None:
    found = families.standings(ROWS)
    assert len(found) == len(ROWS) == len({standing.shape for standing in found})
    kinds = [families.CLASSES.index(standing.kind) for standing in found]
    assert kinds == sorted(kinds) and set(kinds) == set(range(len(families.CLASSES)))
    for standing in found:
        assert standing.ratios[standing.winners[0]] == max(standing.ratios.values())
        odd = standing.kind == families.CLASSES[-1]
        timed = {"cute_sm80", "cute_sm90", "cublaslt"} if odd else TIMED
        assert set(standing.ratios) == timed


@pytest.mark.parametrize(("noise", "winners"), [(0.0, ("cublaslt",)), (0.03, ("cublaslt", "cute_sm90"))])
def test_what_is_within_the_noise_wins_too(noise: float, winners: tuple[str, ...]) -> None:
    ratios = {"cute_sm90": 1.00, "triton_tma": 0.90, "cublaslt": 1.02}
    standing = families.Standing("8x8x8", 8, 8, 8, families.CLASSES[0], ratios, noise)
    assert standing.winners == winners


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "peers.json").write_text("[]")
    assert families.main(["--results", str(tmp_path / "peers.json"), "--out", str(tmp_path / "a.svg")]) == 2
    assert "peers.json" in capsys.readouterr().err
    assert families.main(["--out", str(tmp_path / "families.pdf")]) == 2
    assert "families.pdf" in capsys.readouterr().err
