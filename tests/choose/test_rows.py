"""Predictions for plain products of many rows. No GPU needed: what its library would name is given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunegemm.choose import predictions, rows
from tunegemm.choose.forest import Forest
from tunegemm.choose.predictions import MANY_ROWS, outlook
from tunegemm.choose.selection import select
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.cublaslt import choice, library
from tunegemm.model.features import OF_ROWS
from tunegemm.store.packing import _shortlisted
from tunegemm.store.shipped import read_shipped

SHAPES = ("129x1000x4096", "300x4096x1736", "2048x5120x4096", "16384x4096x14336")


def all_equal(feature: str) -> Forest:
    """Trees that expect 0.1 of every launch, and 0.1 more of those of which the feature is above 0."""
    right = {"nodes": [[OF_ROWS.index(feature), 0.0, 0b10]], "leaves": [0.0, 0.1]}
    return Forest.of({"base": 0.1, "trees": [right]}, len(OF_ROWS))


@pytest.fixture
def algorithms() -> list[Candidate]:
    """Such as the heuristic names."""
    named = {
        record.candidate
        for record in read_shipped()[0]
        if record.candidate.params.get("algorithm") == "cublaslt" and not record.problem.epilogue
    }
    return [one for one in sorted(named, key=str) if rows.stand_in(library.label(one))][:5]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, algorithms: list[Candidate]) -> Device:
    """An H200 whose library names these algorithms, and whose model expects much of everything."""
    known = choice.parse_label(library.label(algorithms[0]))
    monkeypatch.setattr(library, "algorithms", lambda *_: algorithms)
    fitted = rows.Rows(
        forest=all_equal("by_gpc"), rows=(512, 16384), extents=(256, 28672),
        margins={"plain": (0.05, 0.05)}, served={"plain": {"products": 100, "under_099": 1}},
        kernels={rows.LARGE: (0, 1, 2, 15, 16), rows.LISTED: (84, 104), rows.LIBRARY: (1, 2)},
        fitted_to={"products": 100},
    )  # fmt: skip
    monkeypatch.setattr(
        predictions,
        "load",
        lambda model, gpu: _Asking(fitted, known) if model is rows.Rows else "nothing is predicted here",
    )
    return replace(find_device("model:h200"), spec="cuda:0")


class _Asking:
    """The model with a library that is there."""

    def __init__(self, fitted: rows.Rows, known: choice.LibraryChoice | None) -> None:
        self._fitted, self._known = fitted, known

    def outlook(self, *asked: object) -> object:
        return self._fitted.outlook(*asked, ask=lambda problem, index: self._known)  # type: ignore[arg-type]


def test_options_are_legal_compiled_and_of_the_places_that_may_serve(device: Device) -> None:
    ships = {str(key) for _, key in _shortlisted().values()}
    for shape in SHAPES:
        problem = Problem.parse(shape)
        found = outlook(problem, device)
        assert found.decides and found.options, found.refusal
        for option in found.options:
            candidate = option.record.candidate
            family = families.get(candidate.family)
            assert family.check(problem, candidate, device).runs
            assert candidate["cluster_order"] == "gpc", "those are expected to be ahead"
            assert str(families.generator(candidate.family).kernel_key(problem, candidate, device)) in ships
            assert 1 < option.bound < option.expected


def test_the_library_has_other_algorithms(device: Device, algorithms: list[Candidate]) -> None:
    problem = Problem.parse(SHAPES[2])
    found = outlook(problem, device, lambda _, one: "" if one.family == "cublaslt" else "not that one")
    assert [one.record.candidate for one in found.options] == algorithms[1:3]


@pytest.mark.parametrize(
    "change",
    [{"in_dtype": "fp16", "out_dtype": "fp16"}, {"batch": 2}, {"alignment": 8}, {"n": 32768}, {"m": 20000}],
)
def test_other_products_of_many_rows_are_not_predicted(device: Device, change: dict[str, object]) -> None:
    problem = replace(Problem.parse(SHAPES[2]), **change)  # type: ignore[arg-type]
    found = outlook(problem, device)
    assert not found.decides and not found.options
    assert found.rows is not None and found.rows[0] >= MANY_ROWS


def test_without_a_library_to_ask_nothing_is_served() -> None:
    for part in ("h200", "h100-sxm", "h100-nvl"):
        device = find_device(f"model:{part}")
        for shape in SHAPES:
            assert not outlook(Problem.parse(shape), device).options
            assert select(Snapshot(), Problem.parse(shape), device).outcome == "miss"
