"""Predictions: what an H200 or an H100 may take for products that nobody tuned, and when it may not."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.first_use import DIMENSIONS
from fit.trees import put_model
from tunegemm.choose import predictions
from tunegemm.choose.policies import Policy
from tunegemm.choose.predictions import FEATURES, Fitted, load, outlook
from tunegemm.choose.selection import select
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError, TunegemmWarning
from tunegemm.generate import families
from tunegemm.generate.cublaslt.choice import LibraryChoice
from tunegemm.model import shortlist
from tunegemm.report.explain import explain_problem
from tunegemm.resources import data_path

H200 = "NVIDIA H200"
#: The GPUs that were measured: each has a file of its own.
PARTS = ("h200", "h100-sxm")


@pytest.fixture(scope="module", params=PARTS)
def selector(request: pytest.FixtureRequest) -> Fitted:
    return selector_of(request.param)


def selector_of(part: str) -> Fitted:
    found = Fitted.of("plain", find_device(f"model:{part}").name)
    assert found is not None
    return found


def decides(found: predictions.Offers) -> bool:
    """Whether the trees were asked about the product."""
    return bool(found.options) or "is predicted at" in found.refusal or "too little" in found.refusal


def odd_problems(count: int, seed: int = 5) -> list[Problem]:
    """Of few rows, with extents that no model has."""
    chance = random.Random(seed)

    def extent() -> int:
        return chance.choice(DIMENSIONS) if chance.random() < 0.5 else 8 * chance.randint(32, 2048)

    return [Problem.parse(f"{chance.randint(1, 64)}x{extent()}x{extent()}") for _ in range(count)]


@pytest.fixture(scope="module")
def served(device: Device) -> Problem:
    """A problem that is served by prediction."""
    return next(problem for problem in odd_problems(200) if outlook(problem, device).options)


@pytest.mark.parametrize("part", PARTS)
def test_every_option_is_legal_and_passes_its_margin(part: str) -> None:
    device, count = find_device(f"model:{part}"), 0
    for problem in odd_problems(150):
        found = outlook(problem, device)
        assert decides(found) and bool(found.options) != bool(found.refusal)
        expected = [option.expected for option in found.options]
        assert expected == sorted(expected, reverse=True)
        for option in found.options:
            candidate = option.record.candidate
            assert families.get(candidate.family).check(problem, candidate, device).runs, (problem, candidate)
            assert candidate.kernel in shortlist.listed()
            assert 1 < option.bound < option.expected and option.record.ratio == option.bound
        count += bool(found.options)
    assert 150 * 0.2 < count < 150 * 0.9


def test_what_torch_launches_counts(selector: Fitted, device: Device) -> None:
    """One problem, two answers of the library: the worse its tiles, the more is to be gained."""
    real = replace(device, spec="cuda:0")
    problem = Problem.parse("8x9216x4608")
    asked: list[tuple[Problem, int]] = []

    def best(choice: LibraryChoice | None) -> float:
        def ask(problem: Problem, index: int) -> LibraryChoice | None:
            asked.append((problem, index))
            return choice

        margins = {name: (-9.0,) * len(selector.rows) for name in selector.margins}
        return replace(selector, margins=margins).outlook(problem, real, ask=ask).options[0].expected

    good, bad = best(LibraryChoice(8, 64, 1, 4, 1)), best(LibraryChoice(64, 64, 1, 1, 1))
    assert bad > good
    assert best(None) not in (good, bad)
    assert asked == [(problem, 0)] * 3


def test_the_most_rows_are_those_of_the_fit(selector: Fitted, device: Device, served: Problem) -> None:
    most = selector.rows[-1]
    last, beyond = (selector.outlook(replace(served, m=m), device) for m in (most, most + 1))
    assert decides(last) and not decides(beyond) and beyond.rows[0] == most + 1
    assert beyond.refusal == f"predictions are for up to {most} rows"


@pytest.mark.parametrize(
    "change",
    [
        {"in_dtype": "fp16", "out_dtype": "fp32"},
        {"epilogue": "relu"},
        {"batch": 2},
        {"alignment": 8},
        {"m": 129},
        {"n": 1 << 19},
    ],
)
def test_other_products_are_not_predicted(device: Device, served: Problem, change: dict[str, object]) -> None:
    problem = replace(served, **change)  # type: ignore[arg-type]
    found = outlook(problem, device)
    assert not decides(found) and not found.options
    assert select(Snapshot(), problem, device).outcome == "miss"


def test_leads_are_kept_up_to_a_number(
    selector: Fitted, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions, "MOST_LEADS", 2)
    fitted, asked = replace(selector), []

    def asked_for(problem: Problem, *_: object) -> tuple[object, ...]:
        asked.append(problem.m)
        return "known", 0.0, 0.25, None, np.array([-1.0, 0.75])

    monkeypatch.setattr(Fitted, "asked_of", lambda _, *given: asked_for(*given))
    first, second, third = (Problem(m, 64, 64) for m in (1, 2, 3))
    for problem in (first, second, first, second, third, third, first, second):
        assert fitted.lead_of(problem, device, lambda *_: None) == 0.5
    assert asked == [1, 2, 3, 1, 2], "the third takes the place of both"
    monkeypatch.setattr(Fitted, "asked_of", lambda *_: ("known", 0.0, 0.25, None, np.array([])))
    assert fitted.lead_of(replace(first, n=72), device, lambda *_: None) == -math.inf


def test_ranges_of_rows_that_are_decided_as_one() -> None:
    """Each doubling has eight, and every number of rows above 256 is in one of them."""
    assert predictions.ends(300) == [256, 279] and predictions.ends(255) == []
    assert predictions.ends(512) == [256, 279, 304, 332, 362, 395, 431, 470, 512]
    fitted = replace(selector_of("h200"), rows=(64, 512))
    found = {m: fitted.range_of(m) for m in range(250, 520)}
    assert [m for m, ends in found.items() if ends is None] == [*range(250, 256), *range(512, 520)]
    for m, ends in found.items():
        assert ends is None or (ends[0] <= m <= ends[1] and ends in itertools.pairwise(predictions.ends(512)))


@pytest.mark.parametrize("part", PARTS)
def test_logits_of_few_rows_are_predicted(part: str) -> None:
    """Vocabularies are wider than what else is measured, with an N, a K and margins of their own."""
    device = find_device(f"model:{part}")
    found = [outlook(Problem.parse(f"{m}x{n}x4096"), device) for m in (1, 8, 24, 60) for n in (65024, 201088)]
    assert all(decides(each) for each in found) and any(each.options for each in found)
    option = next(each.options[0] for each in found if each.options)
    assert option.expected < 1.25 and "products measured on this kind of GPU" in option.basis
    many = outlook(Problem.parse("96x128256x4096"), device)
    assert not decides(many) and many.rows[0] == 65, "of fewer rows they may be"
    narrow = outlook(Problem.parse("16x128256x512"), device)
    assert not decides(narrow) and "and K from 1024" in narrow.refusal


def test_only_the_gpu_that_was_measured_is_served(device: Device, served: Problem) -> None:
    other = find_device("model:h100-nvl")
    assert not outlook(served, other).options
    text = str(explain_problem(served, other))
    assert "there are no predictions for NVIDIA H100 NVL, which was not measured" in text
    part = replace(device, fingerprint=replace(device.fingerprint, mig="1g.18gb"))
    assert not outlook(served, part).options
    assert not outlook(served, device.with_sm_budget(64)).options


def test_policies_refuse_options(device: Device) -> None:
    """Splits of k are nothing for `no_workspace`; the best that is left is offered, or nothing."""
    split = next(
        problem
        for problem in odd_problems(400)
        if (found := outlook(problem, device).options)
        and int(found[0].record.candidate.params.get("split_k", 1)) > 1
    )
    policy = Policy("no_workspace")
    kept = outlook(split, device, policy.refusal)
    for option in kept.options:
        assert not policy.refusal(split, option.record.candidate)
    assert kept.options or "k splits keep their sums in a workspace" in kept.refusal
    nothing = outlook(split, device, lambda problem, candidate: "not today")
    assert not nothing.options and "not today" in nothing.refusal


def test_explain_says_what_is_expected_and_how_sure(device: Device, served: Problem) -> None:
    found = explain_problem(served, device)
    option = outlook(served, device).options[0]
    assert found.outcome == "predicted" and found.offer is not None and found.record is None
    assert (
        f"dispatch  predicted, {option.record.label}: {option.expected:.3f} x torch expected, at least"
        in str(found)
    )
    assert "products measured on this kind of GPU" in str(found) and "lost over 1 %" in str(found)
    facts = json.loads(json.dumps(found.asdict()))
    assert facts["predicted"]["least_ratio"] == pytest.approx(option.bound)
    assert facts["expected_ratio"] == pytest.approx(option.expected)


def written(folder: Path, **changes: object) -> Path:
    """A copy of the shipped file with other content and a checksum that fits."""
    path = folder / "predictions-h200.jsonl"
    for line in data_path("db", path.name).read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        name = data.pop("model")
        for known in ("checksum", "format", "features"):
            del data[known]
        put_model(folder, H200, name, data | (changes if name == "plain" else {}))
    return path


def test_a_file_that_is_altered_truncated_or_of_another_list_is_refused(tmp_path: Path) -> None:
    assert Fitted.of("plain", H200, tmp_path) is None
    path = written(tmp_path)
    assert Fitted.of("plain", H200, tmp_path) is not None
    assert path.read_bytes() == data_path("db", path.name).read_bytes(), "what is put stays as it is"
    text = path.read_text(encoding="utf-8").splitlines()[sorted(FEATURES).index("plain")]
    for damaged in (text[: len(text) // 2], text.replace('"base":', '"base":1', 1), "[]", "", "null"):
        path.write_text(damaged, encoding="utf-8")
        with pytest.raises(TunegemmError, match=r"is damaged.*install tunegemm again"):
            Fitted.of("plain", H200, tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TunegemmError, match="is damaged"):
        Fitted.of("plain", H200, tmp_path)
    path.unlink()
    written(tmp_path, list="other")
    with pytest.raises(TunegemmError, match=r"another db/selector\.toml"):
        Fitted.of("plain", H200, tmp_path)


def test_a_damaged_file_is_one_warning_and_torch(
    device: Device, served: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "predictions-h200.jsonl").write_text("{", encoding="utf-8")
    shutil.copy(data_path("db", "selector.toml"), tmp_path)
    monkeypatch.setattr(predictions, "data_path", lambda *parts: tmp_path.joinpath(*parts[1:]))
    load.cache_clear()
    try:
        with pytest.warns(TunegemmWarning, match="there are no predictions until then") as said:
            first = select(Snapshot(), served, device)
        assert len(said) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = select(Snapshot(), served, device)
    finally:
        load.cache_clear()
    assert first.outcome == second.outcome == "miss" and "is damaged" in second.why


def test_the_file_is_small() -> None:
    for path in data_path("db", "selector.toml").parent.glob("predictions-*.jsonl"):
        assert path.stat().st_size < 1 << 20


def test_planning_a_new_shape_is_quick(device: Device) -> None:
    """Of processor time, as other tests run beside: some 1.7 ms on a machine of two cores; here five."""
    problems = odd_problems(60, seed=9)
    outlook(problems[0], device)
    taken = []
    for problem in problems:
        start = time.thread_time()
        outlook(problem, device)
        taken.append(time.thread_time() - start)
    assert sorted(taken)[len(taken) // 4] < 5e-3
