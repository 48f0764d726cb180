"""Predictions for plain products of many rows. No GPU needed: what its library would choose is given."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunegemm.choose import predictions, rows
from tunegemm.choose.fitted import MANY_ROWS
from tunegemm.choose.predictions import load, outlook
from tunegemm.choose.selection import select
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError
from tunegemm.generate import families
from tunegemm.generate.cublaslt.choice import LibraryChoice
from tunegemm.model import shortlist
from tunegemm.model.features import OF_ROWS
from tunegemm.resources import data_path

PARTS = ("h200", "h100-sxm")
#: What torch's library chose of them, of products of short K that were measured at 1.08 to 1.18 of it.
SHORT = {
    "5584x6144x768": LibraryChoice(128, 256, 2, 1, 1),
    "11463x5824x512": LibraryChoice(144, 256, 2, 1, 1),
    "1691x12248x512": LibraryChoice(160, 256, 1, 2, 1),
}


@pytest.fixture(params=PARTS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A GPU whose library chooses as was measured."""
    found = replace(find_device(f"model:{request.param}"), spec="cuda:0")
    fitted = load(rows.Rows, found.name)
    assert isinstance(fitted, rows.Rows)
    monkeypatch.setattr(predictions, "load", lambda model, gpu: _Asking(fitted))
    return found


class _Asking:
    """The model with a library that is there."""

    def __init__(self, fitted: rows.Rows) -> None:
        self._fitted = fitted

    def outlook(self, *asked: Any) -> Any:
        of_others = LibraryChoice(128, 256, 1, 2, 1)
        return self._fitted.outlook(*asked, ask=lambda problem, index: SHORT.get(problem.shape, of_others))


def test_options_are_legal_ship_and_pass_their_margin(device: Device) -> None:
    ships = [
        families.generator(one.family).kernel_key(rows.PLAIN, one, device)
        for one in shortlist.large_lists()[rows.PLAIN]
    ]
    count = 0
    for shape in SHORT:
        problem = Problem.parse(shape)
        found = outlook(problem, device)
        assert found.decides and bool(found.options) != bool(found.refusal)
        count += bool(found.options)
        for option in found.options:
            candidate = option.record.candidate
            family = families.generator(candidate.family)
            assert family.check(problem, candidate, device).runs and candidate["cluster_order"] == "gpc"
            assert family.kernel_key(problem, candidate, device) in ships
            assert 1 < option.bound < option.expected < 1.3 and option.record.ratio == option.bound
            assert "products of many rows measured on this kind of GPU" in option.basis
    assert count >= 2
    chosen = select(Snapshot(), Problem.parse("5584x6144x768"), device)
    assert chosen.outcome == "predicted" and "x torch expected, at least" in chosen.why


@pytest.mark.parametrize(
    "change",
    [
        {"in_dtype": "fp16", "out_dtype": "fp16"},
        {"batch": 2},
        {"alignment": 8},
        {"n": 32768},
        {"m": 20000},
        {"k": 776},
        {"m": 200},
    ],
)
def test_other_products_of_many_rows_are_not_predicted(device: Device, change: dict[str, Any]) -> None:
    found = outlook(replace(Problem.parse("5584x6144x768"), **change), device)
    assert not found.decides and not found.options
    assert found.rows is not None and found.rows[0] >= MANY_ROWS, "fewer rows have another model"


def test_what_torch_launches_must_be_known(device: Device) -> None:
    """Whatever the model would say of it: a library that cannot be asked, and a device that is none."""
    fitted = load(rows.Rows, device.name)
    assert isinstance(fitted, rows.Rows)
    eager = replace(fitted, margins={"plain": (-9.0,) * len(fitted.rows)})
    for shape in SHORT:
        problem = Problem.parse(shape)
        assert eager.outlook(problem, device, ask=lambda *_: SHORT["1691x12248x512"]).options
        assert not eager.outlook(problem, device, ask=lambda *_: None).options
        modelled = eager.outlook(problem, replace(device, spec="model:h200"))
        assert not modelled.options and not modelled.decides


def test_launches_are_of_the_places_asked_for_and_torchs_comes_last(device: Device) -> None:
    problem, torchs = Problem.parse("2048x5120x4096"), LibraryChoice(128, 256, 1, 2, 1)
    every = rows.launches(problem, device, torchs)
    some = rows.launches(problem, device, torchs, (1, 5, 9))
    assert some.place.tolist() == [1, 5, 9, -1]
    table = rows.row_table(problem, every, device, torchs)
    assert table.shape == (len(every.place) - 1, len(OF_ROWS)) and np.isfinite(table).all()
    chosen = rows.row_table(problem, some, device, torchs)
    places = every.place.tolist()
    assert np.array_equal(chosen, table[[places.index(place) for place in (1, 5, 9)]])
    assert len(every.place) - 1 == len(shortlist.large_kernels(rows.PLAIN))


def test_planning_a_new_shape_is_quick(device: Device) -> None:
    """Of processor time: some 3 ms on a machine of two cores; here eight. The files are small."""
    taken = []
    for m in range(5000, 5400, 20):
        start = time.thread_time()
        outlook(Problem.parse(f"{m}x6144x768"), device)
        taken.append(time.thread_time() - start)
    assert sorted(taken)[len(taken) // 4] < 8e-3
    for path in data_path("db", "selector.toml").parent.glob("rows-*.json"):
        assert path.stat().st_size < 1 << 20


def test_a_file_of_other_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(data_path("db") / "rows-h200.json", tmp_path)
    assert rows.Rows.of("NVIDIA H200", tmp_path) is not None
    monkeypatch.setattr(rows, "digest_of_list", lambda: "another")
    with pytest.raises(TunegemmError, match="fitted to other kernels"):
        rows.Rows.of("NVIDIA H200", tmp_path)
