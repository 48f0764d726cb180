"""fit/blocks.py: races whose times are known are fitted back to them, and kernels that never win leave."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.blocks import LAYERS
from fit import blocks as fit
from tunegemm.errors import TunegemmError
from tunegemm.model.blocks import Listed, candidates, choose, splits_of, table
from tunegemm.resources import data_path

TABLE = data_path("db", "blocks.toml")
GPU = "NVIDIA H200"
ROWS = (1, 16, 17, 24, 32, 48, 64, 96, 192, 512, 2048, 8192)
#: Like the kernel that they are named for, but always slower than that.
TWIN, OF = "many64x128p1t2twin", "many64x128p1t2"


def true_times() -> dict[str, Listed]:
    """The kernels of the table and the twin, with times that the table does not know, and torch's."""
    result = {}
    for name, each in fit.named(TABLE).items():
        chance = random.Random(name)  # no other kernel of the table changes what it draws
        times = {word: getattr(each, word) * chance.uniform(0.75, 1.3) for word in fit.WORDS}
        result[name] = replace(each, **times)
    slow = {word: 1.5 * getattr(result[OF], word) for word in fit.WORDS}
    return result | {TWIN: replace(result[OF], name=TWIN, **slow)}


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A race of the true times with 1 % of noise."""
    rows = []
    for (n, k), m in itertools.product(LAYERS.values(), ROWS):
        us: dict[str, float] = {"bf16": 1.0, "tunegemm": 1.0}
        for each in true_times().values():
            if each.first_row <= m <= each.last_row:
                for split in [1] if each.name == "torch" else splits_of(each.config, m, n, k)[:3]:
                    noise = random.Random(f"{each.name} {m} {n} {k} {split}").gauss(0, 0.01)
                    time = each.estimate(m, n, k, split, GPU) * 1e-3 * math.exp(noise)
                    us["torch" if each.name == "torch" else f"{each.name} k{split}"] = time
        rows.append({"m": m, "n": n, "k": k, "us": us, "wrong": []})
    text = TABLE.read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"{OF} = "))
    data = {
        "meta": {"gpu": GPU, "date": "2026-12-01T00:00:00+00:00"},
        "table": text.replace(line, f"{line}\n{line.replace(OF, TWIN)}"),
        "rows": rows,
    }
    path = tmp_path_factory.mktemp("race") / "blocks-race.json"
    path.write_text(json.dumps(data))
    return path


def off(each: Listed) -> float:
    """The larger error of the logarithms of its two times."""
    true = true_times()[each.name]
    return max(abs(math.log(getattr(each, word) / getattr(true, word))) for word in fit.WORDS[:2])


def test_known_times_are_fitted_back(race: Path) -> None:
    kernels, cells, where = fit.read(race)
    assert len(cells) == len(LAYERS) * len(ROWS) and where == "H200, 2026-12-01"
    assert kernels.keys() == true_times().keys()
    before, after = [], []
    for each in kernels.values():
        found, error = fit.fitted(each, cells)
        assert error < 0.015, each.name
        before.append(off(each))
        after.append(off(found))
    assert max(after) < 0.05 and sum(after) < 0.1 * sum(before)


def test_the_table_is_written_anew_without_what_never_wins(
    race: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its comments; it loses little to the best of the race."""
    path = tmp_path / "blocks.toml"
    path.write_text(TABLE.read_text())
    assert fit.main([str(race), "--most-loss", "0.0005", "--write", str(path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"without {TWIN}: [-+]0.000%", printed) and "standard deviation 1." in printed
    comments, new_comments = (
        [line for line in each.read_text().splitlines() if line.startswith("#")] for each in (TABLE, path)
    )
    place = next(number for number, line in enumerate(comments) if line.startswith("# Fitted "))
    assert new_comments[:place] == comments[:place] and new_comments[place].startswith(
        "# Fitted by fit.blocks"
    )
    assert all(len(line) <= 120 for line in new_comments[place:])
    kernels, torchs = table(path)
    assert off(torchs) < 0.05 and torchs.split_ns == 0
    names = {each.name for each in kernels}
    assert TWIN not in names and 8 < len(names) <= len(fit.named(TABLE)) - 1
    assert all(off(each) < 0.05 for each in kernels)
    for dtype in ("bf16", "fp32"):
        old = {each.name: each.config for each in candidates(dtype)}
        assert all(old[each.name] == each.config for each in candidates(dtype, path))
        assert fit.covers(candidates(path=path))
    _, cells, _ = fit.read(race)
    chances = []
    for cell in cells:
        choice = choose(*cell.shape, gpu=GPU, path=path)
        assert choice is not None
        best = min(ns for name in cell.ns.keys() - {"torch"} for ns in cell.ns[name].values())
        true = true_times()[choice.name].estimate(*cell.shape, choice.split_k, GPU)
        chances.append(math.log(true / best))
    assert sum(chances) < 0.02 * len(chances)


def test_a_kernel_without_a_time_stays_as_it_is(race: Path, tmp_path: Path) -> None:
    """Rows that no race had decide nothing about it."""
    data = json.loads(race.read_text())
    data["rows"] = [row for row in data["rows"] if row["m"] > 32]
    few = tmp_path / "few.json"
    few.write_text(json.dumps(data))
    path = tmp_path / "blocks.toml"
    path.write_text(TABLE.read_text())
    assert fit.main([str(few), "--write", str(path)]) == 0
    old, new = (fit.named(each) for each in (TABLE, path))
    assert new["few64x16t2"] == old["few64x16t2"]
    assert new["few128x16t2"] == old["few128x16t2"]


def test_all_rows_keep_a_kernel_of_each_dtype(race: Path) -> None:
    """The slowest of these stays: of 129 rows and more no other has fp32 results."""
    cells = fit.read(race)[1]
    few, many, slow = (true_times()[name] for name in ("few64x32t2", "many192x128p1", "many64x16t2"))
    few = replace(few, first_row=1, last_row=128)
    assert fit.covers([few, slow]) and not fit.covers([few, many]) and not fit.covers([many, slow])
    assert fit.Races(cells).loss([few, many]) - fit.Races(cells).loss([few, many, slow]) < 0.001
    left = fit.selected([few, many, slow], fit.Races(cells, "torch"), most_loss=0.001)
    assert [each.name for each in left] == [few.name, many.name, slow.name]


def test_rows_end_where_another_kernel_is_faster_than_estimated(race: Path) -> None:
    """A kernel that takes twice its estimate at 8192 rows is not for these."""
    kernels, cells, _ = fit.read(race)
    del kernels["torch"]
    true = [each for each in true_times().values() if each.name in kernels]
    largest = next(shape for _, shape, _ in cells if shape[0] == 8192)
    name = min(true, key=lambda each: each.estimate(*largest, 1, GPU)).name
    slow = []
    for gpu, shape, ns in cells:
        more = {name: {1: 2 * ns[name][1]}} if shape[0] == 8192 else {}
        slow.append(fit.Cell(gpu, shape, {**ns, **more}))
    left = {each.name: each for each in fit.selected(true, fit.Races(slow), most_loss=-1.0)}
    assert left[name].last_row == 8191 and left[name].first_row == kernels[name].first_row
    assert fit.covers([*left.values()])


def test_what_is_no_race_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "blocks.json"
    path.write_text('{"meta": {}, "rows": []}')
    with pytest.raises(TunegemmError, match="has no table"):
        fit.read(path)
