"""Which record serves rows in groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.serving import Row
from tunegemm.choose.policies import Policy
from tunegemm.choose.selection import bucket, recorded, select
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.families import kernel_source_hash

H200 = find_device("model:h200")
KERNEL = Candidate.make(
    "grouped",
    {"schedule": "cooperative", "tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 6, "epi_n": 32,
     "narrow": 16, "cluster_m": 1},
    {"swizzle_size": 4, "l2_hint": "none"},
)  # fmt: skip


def of_rows(rows: int, groups: int = 32) -> Problem:
    return Problem.parse(f"{rows}x2048x7168", groups=groups)


def row(problem: Problem, candidate: Candidate = KERNEL, ratio: float = 1.2) -> Row:
    return Row(problem, H200.fingerprint, candidate, ratio, kernel_source_hash(candidate.family))


@pytest.mark.parametrize(
    ("rows", "number"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (2048, 11), (2049, 12), (4096, 12)]
)
def test_a_bucket_ends_at_a_power_of_two(rows: int, number: int) -> None:
    assert bucket(rows) == number


def test_a_record_serves_rows_of_its_bucket_and_no_other_product() -> None:
    snapshot = Snapshot([row(of_rows(2100)), row(of_rows(4096)), row(Problem.parse("4096x2048x7168"))])

    def found(problem: Problem, near: bool = True) -> int:
        record = recorded(snapshot, problem, H200.fingerprint, near=near)
        return record.problem.m if record else 0

    assert [found(of_rows(rows)) for rows in (2049, 2100, 3000, 4000, 4096)] == [2100, 2100, 4096, 4096, 4096]
    assert found(of_rows(2048)) == 0 == found(of_rows(4097))
    assert found(of_rows(4096, groups=16)) == 0 == found(replace(of_rows(4096), n=2056))
    assert found(of_rows(4095), near=False) == 0 and found(of_rows(4096), near=False) == 4096
    plain = snapshot.find(Problem.parse("4096x2048x7168"), H200.fingerprint)
    assert plain is not None and not plain.problem.groups


def test_a_record_of_another_gpu_or_one_that_lost_to_torch_serves_nothing() -> None:
    other = find_device("model:h100-sxm").fingerprint
    foreign = Row(of_rows(4096), other, KERNEL, 1.2, kernel_source_hash("grouped"))
    for one in (foreign, row(of_rows(4096), ratio=0.9)):
        assert recorded(Snapshot([one]), of_rows(4096), H200.fingerprint) is None
    won = replace(row(of_rows(4096), TORCH_MM, 1.0), confirmed=True)
    torchs = recorded(Snapshot([won]), of_rows(4096), H200.fingerprint)
    assert torchs is not None and torchs.is_torch
    alone = replace(won, confirmed=False)
    assert recorded(Snapshot([alone]), of_rows(4096), H200.fingerprint) is None, "nothing else was measured"


def test_a_selection_says_by_what_it_goes() -> None:
    snapshot = Snapshot([row(of_rows(4096))])
    exact, near = (select(snapshot, of_rows(rows), H200) for rows in (4096, 3000))
    assert (exact.outcome, near.outcome) == ("hit", "hit") and exact.options == near.options
    assert "by the record of 4096 rows" in near.why and "rows" not in exact.why
    table = select(snapshot, of_rows(64), H200)
    assert (table.outcome, table.options) == ("predicted", ()) and "db/grouped.toml" in table.why
    outdated = replace(H200.fingerprint, triton="0.1")
    foreign = Row(of_rows(64), outdated, KERNEL, 1.2, kernel_source_hash("grouped"))
    assert "its record is foreign: triton 0.1" in select(Snapshot([foreign]), of_rows(64), H200).why
    torchs = select(Snapshot(), Problem.of_groups(64, 2048, 7168, 32, gate="geglu"), H200)
    assert torchs.outcome == "miss" and "no shipped kernel" in torchs.why


def test_one_order_of_sums_is_said_of_groups_too() -> None:
    """Where the policy has another kernel than speed: one row, and a product that torch's won."""
    policy = Policy("batch_invariant")
    one = Problem.of_groups(1, 1024, 4096, 8)
    assert "few" in select(Snapshot(), one, H200).why
    assert "few" not in select(Snapshot(), one, H200, policy=policy).why
    many = of_rows(64)
    torchs = Snapshot([replace(row(many, TORCH_MM, 1.0), confirmed=True)])
    assert select(torchs, many, H200).outcome == "hit"
    found = select(torchs, many, H200, policy=policy)
    assert found.outcome == "predicted" and "its record names torch's own kernel" in found.why
