"""What a record from elsewhere says is checked by one function, at every door; the shipped ones pass it."""

from __future__ import annotations

import json
import math
import time
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.store.test_database import DEVICE, FINGERPRINT, KERNEL, PROBLEM, measurement
from tests.support.serving import Row, operands
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, SearchSpace
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import Prepared, prepare
from tunegemm.dispatch.planning import Planner
from tunegemm.errors import TunegemmWarning
from tunegemm.generate import families
from tunegemm.generate.families import kernel_source_hash
from tunegemm.resources import data_path
from tunegemm.store import Database
from tunegemm.store.checks import objection, record_objection
from tunegemm.store.exchange import dump, load
from tunegemm.store.lookup import read_file
from tunegemm.store.record import Record
from tunegemm.store.shipped import read_shipped

Params = Mapping[str, Any]


def with_params(changes: Params, *left_out: str, base: Candidate = KERNEL) -> Candidate:
    """A candidate with other values, without some, and with some that its family does not know."""

    def changed(params: Params, known: Any) -> dict[str, Any]:
        values = {**params, **{name: value for name, value in changes.items() if name in known}}
        return {name: value for name, value in values.items() if name not in left_out}

    space = families.load_space(base.family)
    compiled, launched = dict(base.compile_params), dict(base.launch_params)
    unknown = {n: v for n, v in changes.items() if n not in {**space.compile_values, **space.launch_values}}
    return Candidate.make(
        base.family, changed(compiled, space.compile_values),
        changed(launched, space.launch_values) | unknown,
    )  # fmt: skip


NONSENSE: dict[str, Candidate] = {
    "negative": with_params({"swizzle_size": -1}), "zero": with_params({"split_k": 0}),
    "huge": with_params({"swizzle_size": 2**31 - 1}), "not listed": with_params({"swizzle_size": 5}),
    "text for a number": with_params({"swizzle_size": "8"}),
    "true for a number": with_params({"split_k": True}),
    "a word of no kernel": with_params({"raster_order": "spiral"}),
    "a boolean": with_params({"swap_ab": "no"}), "a tile of nothing": with_params({"tile_m": 0}),
    "a tile of no instruction": with_params({"tile_n": 100}),
    "a deep ring": with_params({"stages": 2**31 - 1}),
    "a further one": with_params({"wings": 2}), "nothing": Candidate.make("cute_sm90", {}),
    **{f"no {name}": with_params({}, name) for name in KERNEL.params},
    "no algorithm": Candidate.make("cublaslt", {}),
    "a part of one": Candidate.make("cublaslt", {"algorithm": "cublaslt"}),
}  # fmt: skip


@pytest.mark.parametrize("what", NONSENSE)
def test_a_nonsense_candidate_is_left_out_of_an_import_and_is_no_kernel(what: str, tmp_path: Path) -> None:
    candidate = NONSENSE[what]
    assert objection(PROBLEM, candidate, FINGERPRINT)
    with (
        Database.open(tmp_path / "a.sqlite", create=True) as source,
        Database.open(tmp_path / "b.sqlite", create=True) as target,
    ):
        source.confirm(PROBLEM, DEVICE, measurement(1.2, candidate))
        report = load(target, json.loads(json.dumps(list(dump(source)))), origin="elsewhere")
        assert report.added == 0 and len(report.skipped) == 2, "the measurement, and its choice"
        assert target.records() == []
    found = is_served(Row(SMALL, FINGERPRINT, candidate, kernel_source=kernel_source_hash(candidate.family)))
    assert not found[0] and len(found[1]) == 1, found


SMALL = Problem.parse("128x256x128")


def is_served(*rows: Record, prepare: Any = prepare) -> tuple[bool, list[str]]:
    """Whether torch does not compute a product, which is right in any case, and what is warned of."""
    planner = Planner(device_type="cpu", find=lambda _: DEVICE, prepare=prepare, read=lambda: Snapshot(rows))
    planner.compiler.is_on = False
    served = Dispatcher(planner)
    a, b = operands(SMALL.m, SMALL.n, SMALL.k)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(served.matmul(a, b), torch.matmul(a, b))
    plans = [*planner.state.plans.values()]
    return plans != [None], [str(w.message) for w in caught if issubclass(w.category, TunegemmWarning)]


@pytest.mark.parametrize(
    "figures",
    [
        {"relative_error": 1000.0}, {"relative_error": 0.05}, {"relative_error": -1.0},
        {"relative_error": math.inf}, {"ratio": math.inf}, {"ratio": 1e9}, {"ratio": 0.0},
    ],
)  # fmt: skip
def test_figures_of_no_right_kernel(figures: Params) -> None:
    assert record_objection(replace(Row(PROBLEM, FINGERPRINT, KERNEL), **figures))
    good = Row(SMALL, FINGERPRINT, KERNEL)
    if figures.get("ratio", 1.0) >= 1:
        served, said = is_served(replace(good, **figures))
        assert not served and len(said) == 1


@pytest.mark.parametrize(
    "error",
    [
        KeyError("epi_n"), TypeError("x"), ZeroDivisionError("y"), OverflowError("z"), AttributeError("w"),
        RecursionError("deep"), MemoryError(), AssertionError(), StopIteration(),
    ],
)  # fmt: skip
def test_whatever_preparing_raises_is_a_miss_and_one_warning(error: Exception) -> None:
    def refuse(record: Record, device: object) -> Prepared:
        raise error

    served, said = is_served(Row(SMALL, FINGERPRINT, KERNEL), prepare=refuse)
    assert not served and len(said) == 1 and (str(error) or type(error).__name__).strip("'") in said[0]


def test_a_wrong_kernels_record_in_a_database_is_not_served(tmp_path: Path) -> None:
    with Database.open(path := tmp_path / "a.sqlite", create=True) as database:
        database.confirm(SMALL, DEVICE, measurement(1.2, relative_error=1000.0))
    lookup = read_file(path, "project")
    assert lookup is not None
    (record,) = lookup.find(SMALL)
    assert record.relative_error == 1000.0 and not is_served(record)[0]


def test_what_ships_passes_soon() -> None:
    records, _ = read_shipped()
    start = time.process_time()
    assert [wrong for one in records if (wrong := record_objection(one))] == []
    assert (time.process_time() - start) / len(records) < 2e-3, "and a program asks for a few"


def test_spaces_that_ship_are_read_as_toml(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = sorted(data_path("search_spaces").glob("*.toml"))
    whole = [tomllib.loads(path.read_text()) for path in paths]
    monkeypatch.setattr(tomllib, "loads", lambda text: pytest.fail("asked for"))
    for path, data in zip(paths, whole, strict=True):
        space = SearchSpace.load(path)
        for table, values in (("compile", space.compile_values), ("launch", space.launch_values)):
            assert {name: [*listed] for name, listed in values.items()} == data[table]


def test_another_packages_space_may_be_any_toml(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text('family = "x"\n[compile]\ntile = [\n  0x40, # wide\n  1_28,\n]\n[launch]\nway = ["a"]\n')
    assert SearchSpace.load(path).compile_values == {"tile": (64, 128)}
