"""What a stored record is worth when something changed since: one function, against a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.store import Record
from tunegemm.store.validity import Grade, Judgement, judge_stored

HERE = Fingerprint("NVIDIA H200", 132, "9.0", "", 132, "580.159.04", "13.0", "2.11.0+cu130", "4.8.1", "3.6.0")


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunegemm.store.validity.kernel_source_hash", lambda family: "now")


def judge(
    there: Fingerprint, here: Fingerprint, family: str = "cute_sm90", source: str = "now", layer: str = "user"
) -> Judgement:
    candidate = Candidate.make(family, {})
    return judge_stored(Record(Problem(8, 8, 8), candidate, there, kernel_source=source, layer=layer), here)


def grade(family: str = "cute_sm90", source: str = "now", **changes: object) -> tuple[Grade, str]:
    judgement = judge(replace(HERE, **changes), HERE, family, source)  # type: ignore[arg-type]
    return judgement.grade, judgement.reason


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Grade.SAME),
        # Patches: used, and marked.
        ({"driver": "580.82.07"}, Grade.VERIFY),
        ({"torch": "2.11.1+cu130"}, Grade.VERIFY),
        ({"torch": "2.11.0"}, Grade.VERIFY),
        ({"cutlass_dsl": "4.8.2"}, Grade.VERIFY),
        ({"driver": "580.82.07", "cutlass_dsl": "4.8.0"}, Grade.VERIFY),
        # More than patches: where a search begins.
        ({"driver": "590.48.01"}, Grade.SEED),
        ({"cuda": "12.8"}, Grade.SEED),
        ({"torch": "2.10.0+cu130"}, Grade.SEED),
        ({"cutlass_dsl": "4.7.1"}, Grade.SEED),
        ({"cutlass_dsl": "5.8.1"}, Grade.SEED),
        ({"cutlass_dsl": ""}, Grade.SEED),
        ({"driver": ""}, Grade.SEED),
        ({"source": "then"}, Grade.SEED),
        ({"driver": "580.82.07", "torch": "2.10.0"}, Grade.SEED),
        # Another GPU, or another part of it.
        ({"device_name": "NVIDIA H100 80GB HBM3"}, Grade.SEED),
        ({"sm_count": 114, "sm_budget": 114}, Grade.SEED),
        ({"sm_budget": 100}, Grade.SEED),
        ({"mig": "1g.18gb", "sm_count": 16, "sm_budget": 16}, Grade.SEED),
        ({"device_name": "NVIDIA A100-SXM4-80GB", "capability": "8.0"}, Grade.FOREIGN),
        # Only the family's own compiler counts.
        ({"triton": "2.0.0"}, Grade.SAME),
        ({"triton": "3.6.1", "family": "triton_tma"}, Grade.VERIFY),
        ({"triton": "3.7.0", "family": "gluon_wgmma"}, Grade.SEED),
        ({"cutlass_dsl": "3.0.0", "family": "triton_tma"}, Grade.SAME),
        ({"cutlass_dsl": "3.0.0", "triton": "", "family": "cublaslt"}, Grade.SAME),
        ({"torch": "2.12.0", "family": "cublaslt"}, Grade.SEED),
        ({"triton": "3.7.0", "family": "something_new"}, Grade.SEED),
    ],
)  # fmt: skip
def test_the_table(changes: dict[str, str], expected: Grade) -> None:
    found, reason = grade(**changes)  # type: ignore[arg-type]
    assert found is expected
    assert bool(reason) == (expected is not Grade.SAME)
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Grade.SAME),
        ({"torch": "2.10.0+cu126", "cuda": "12.6"}, Grade.VERIFY),
        ({"driver": "570.10"}, Grade.VERIFY),
        # What cannot load the kernel compiles it.
        ({"driver": "590.48.01"}, Grade.VERIFY),
        ({"cutlass_dsl": "4.7.1"}, Grade.VERIFY),
        ({"cutlass_dsl": "5.0.0", "driver": "610.1"}, Grade.VERIFY),
        ({"triton": "3.9.0", "family": "triton_tma"}, Grade.VERIFY),
        # Software that is not known, or not there at all, promises nothing.
        ({"driver": ""}, Grade.SEED),
        ({"cutlass_dsl": ""}, Grade.SEED),
        ({"source": "then"}, Grade.SEED),
        ({"device_name": "NVIDIA H100 80GB HBM3"}, Grade.SEED),
        ({"cutlass_dsl": "4.7.1", "capability": "8.0"}, Grade.FOREIGN),
    ],
)
def test_a_record_that_brings_its_kernel_outlives_software(changes: dict[str, str], expected: Grade) -> None:
    changes = dict(changes)
    source, family = changes.pop("source", "now"), changes.pop("family", "cute_sm90")
    there = replace(HERE, **changes)  # type: ignore[arg-type]
    for one, other in ((there, HERE), (HERE, there)):
        assert judge(one, other, family, source, "system").grade is expected


def test_the_reason_names_what_differs_there_and_here() -> None:
    assert grade(driver="580.82.07")[1] == "driver 580.82.07 (here 580.159.04)"
    assert grade(cutlass_dsl="")[1] == "cutlass_dsl none (here 4.8.1)"
    assert grade(source="then")[1] == "kernel sources of cute_sm90 changed since"


@pytest.mark.parametrize("name", Fingerprint.__dataclass_fields__)
def test_every_fact_of_a_fingerprint_has_a_say(name: str) -> None:
    """A field that is added to the fingerprint cannot be forgotten here."""
    value = getattr(HERE, name)
    changed = replace(HERE, **{name: value + 1 if isinstance(value, int) else "7.7.7"})
    grades = {judge(changed, HERE, family).grade for family in ("cute_sm90", "triton_tma")}
    assert grades != {Grade.SAME}
