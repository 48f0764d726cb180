"""Policies: what each admits, and which runner-up serves then."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.choose.test_neighbours import kernel
from tests.support.processes import environment
from tests.support.recorded import fill, recorded_device
from tunegemm.choose.policies import Policy, parse_policy, read_sample, read_switch
from tunegemm.choose.selection import read_rivals, select
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import PolicyError
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.cute_sm90 import Division
from tunegemm.measure.evidence import rank
from tunegemm.measure.replay import open_replay
from tunegemm.store import Database
from tunegemm.store.record import Record

PROBLEM = Problem.parse("128x7168x16384")
SPLITTING = Candidate.make(
    "cublaslt",
    {"algorithm": "cublaslt"},
    {"split_k": 3, "reduction_scheme": "OUTPUT_TYPE", "workspace_bytes": 4096},
)
PLAIN = Candidate.make(
    "cublaslt", {"algorithm": "cublaslt"}, {"split_k": 1, "reduction_scheme": "NONE", "workspace_bytes": 0}
)


@pytest.mark.parametrize(
    ("policy", "candidate", "clause"),
    [("deterministic", kernel(split_k=4), ""), ("deterministic", SPLITTING, "splits k"),
     ("deterministic", PLAIN, ""), ("deterministic", TORCH_MM, ""),
     ("batch_invariant", kernel(), ""), ("batch_invariant", kernel(split_k=4), "order of sums"),
     ("batch_invariant", PLAIN, "library"), ("batch_invariant", TORCH_MM, "library"),
     ("no_workspace", kernel(split_k=4), "keep their sums"), ("no_workspace", SPLITTING, "4096 B"),
     ("no_workspace", PLAIN, ""), ("no_workspace", kernel(), ""),
     ("min_energy", SPLITTING, ""), ("fastest", SPLITTING, ""),
     ("fastest,max_sms=100", SPLITTING, "library"), ("fastest,max_sms=100", kernel(), ""),
     ("fastest,max_sms=100", kernel().with_launch(ctas="tiles"), "one block"),
     ("fastest,max_sms=100", kernel().with_launch(occupancy=2), "one block")],
)  # fmt: skip
def test_what_a_policy_admits(policy, candidate, clause):
    refusal = parse_policy(policy).refusal(PROBLEM, candidate)
    assert clause in refusal and bool(clause) == bool(refusal)


def test_copies_of_operands_are_a_workspace():
    assert "copies" in Policy("no_workspace").refusal(Problem(128, 4096, 4001), kernel())


@pytest.mark.parametrize("text", ["quickest", "fastest,sms=3", "fastest,max_sms=many", "fastest,max_sms=0"])
def test_bad_policies_say_what_is_known(text):
    with pytest.raises(PolicyError, match=r"use one of|is not max_sms=NUMBER|give 1 or more"):
        parse_policy(text)


@pytest.mark.parametrize("sms", [1, 7, 100, 131, 132, 500])
@pytest.mark.parametrize("clusters", [(1, 1), (2, 1), (2, 2)])
def test_a_launch_fills_no_more_multiprocessors_than_it_may(sms, clusters):
    seen = Policy(max_sms=sms).device(open_replay("h200").device)
    cluster_m, cluster_n = clusters
    for ctas in ("all", "balanced"):
        candidate = kernel(128, 128, cluster_m=cluster_m, cluster_n=cluster_n, ctas=ctas)
        blocks = Division.of(Problem(8192, 8192, 512), candidate, seen).clusters * cluster_m * cluster_n
        assert blocks <= max(sms, cluster_m * cluster_n) and blocks <= 132
    assert seen.fingerprint.sm_budget == min(sms, 132)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Snapshot, list[Record]]:
    """The recorded candidates of a shape in a real database, and one that splits k as its record."""
    path = fill(tmp_path_factory.mktemp("policies") / "tuning.sqlite", ["128x7168x16384"])
    with Database.open(path, create=True) as database:
        entries = database.measurements(PROBLEM)
        best = max(entries, key=rank)
        split = replace(best.measurement, candidate=SPLITTING)
        database.confirm(PROBLEM, recorded_device(), split)
        return Snapshot(lookups=[database.lookup()]), database.measurements(PROBLEM)


def test_the_best_admitted_runner_up_serves(filled):
    snapshot, entries = filled
    device = recorded_device()
    fastest = select(snapshot, PROBLEM, device, rivals=lambda _: pytest.fail("asked for rivals"))
    assert fastest.options[0].candidate == SPLITTING
    for name in ("deterministic", "no_workspace"):
        policy = Policy(name)
        found = select(snapshot, PROBLEM, device, policy=policy, rivals=lambda _: entries)
        chosen = found.options[0].candidate
        assert found.outcome == "hit" and name in found.why
        assert not policy.refusal(PROBLEM, chosen)
        admitted = [entry for entry in entries if not policy.refusal(PROBLEM, entry.candidate)]
        assert found.options[0].ratio == max(admitted, key=rank).measurement.ratio >= 1


def test_without_a_runner_up_torch_serves(filled):
    snapshot, entries = filled
    slow = [entry for entry in entries if entry.measurement.ratio < 1]
    for rivals in ([], slow):
        found = select(
            snapshot, PROBLEM, recorded_device(), policy=Policy("deterministic"), rivals=lambda _, r=rivals: r
        )
        assert found.outcome == "miss" and "splits k" in found.why


def test_free_multiprocessors_are_worth_a_slower_kernel(filled):
    """Torch cannot leave any free, so that being slower than torch is no reason."""
    snapshot, entries = filled
    slow = [e for e in entries if e.measurement.ratio < 1 and e.candidate.family == "cute_sm90"]
    found = select(snapshot, PROBLEM, recorded_device(), policy=Policy(max_sms=120), rivals=lambda _: slow)
    assert found.outcome == "hit" and found.options[0].ratio < 1


@pytest.mark.parametrize("count", [0, -1, True, False, 2.0, 2.5, "8", (8,)])
def test_multiprocessors_are_a_whole_number(count: object) -> None:
    with pytest.raises(PolicyError, match="max_sms"):
        Policy(max_sms=count)  # type: ignore[arg-type]
    assert Policy(max_sms=np.int32(8)).max_sms == 8  # type: ignore[arg-type]


def test_least_energy_among_those_not_slower_than_torch(filled):
    snapshot, entries = filled
    device, policy = recorded_device(), Policy("min_energy")
    unknown = select(snapshot, PROBLEM, device, policy=policy, rivals=lambda _: entries)
    assert unknown.options[0].candidate == SPLITTING and "was not measured" in unknown.why

    def with_energy(entry: Record, energy_mj: float) -> Record:
        telemetry = {**entry.telemetry, "energy_mj": energy_mj}
        return replace(entry, telemetry=telemetry)

    fast = sorted((e for e in entries if e.measurement.ratio >= 1), key=lambda e: e.measurement.ratio)
    slow = next(e for e in entries if e.measurement.ratio < 1)
    measured = [with_energy(fast[0], 30.0), with_energy(fast[-1], 40.0), with_energy(slow, 5.0)]
    found = select(snapshot, PROBLEM, device, policy=policy, rivals=lambda _: measured)
    assert found.options[0].candidate == fast[0].candidate and "30 mJ" in found.why
    others = Policy("deterministic")  # energy does not choose for them
    least, *_, record = [each for each in fast if not others.refusal(PROBLEM, each.candidate)]
    rivals = [with_energy(least, 30.0), with_energy(record, 40.0)]
    found = select(Snapshot([record]), PROBLEM, device, policy=others, rivals=lambda _: rivals)
    assert found.options[0].candidate == record.candidate != least.candidate
    for nothing in (0.0, -1.0, math.nan):  # of a counter that did not move, or lost count
        rivals = [measured[0], with_energy(fast[-1], nothing)]
        found = select(snapshot, PROBLEM, device, policy=policy, rivals=lambda _, rivals=rivals: rivals)
        assert found.options[0].candidate == fast[0].candidate


def test_rivals_are_read_of_the_users_databases(monkeypatch, tmp_path: Path):
    path = fill(tmp_path / "tuning.sqlite", ["128x7168x16384"], each=5)
    monkeypatch.setenv("TUNEGEMM_DB", str(path))
    assert len(read_rivals(PROBLEM)) > 5 and read_rivals(Problem(8, 8, 8)) == []


@pytest.mark.parametrize(
    ("text", "served", "checked"), [("1", True, True), ("0", False, False), ("", True, False)]
)
def test_switches_are_0_or_1_or_as_usual(monkeypatch, text: str, served: bool, checked: bool):
    for name, expected in (("TUNEGEMM_VLLM", served), ("TUNEGEMM_CHECK_GROUPS", checked)):
        monkeypatch.setenv(name, text)
        assert read_switch(name, pytest.fail) == expected


@pytest.mark.parametrize(("text", "sample"), [("", 1), ("1", 1), ("30", 30), ("x", 1), ("0", 1), ("-2", 1)])
def test_how_many_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch, text: str, sample: int) -> None:
    monkeypatch.setenv("TUNEGEMM_TEST_SAMPLE", text)
    told: list[str] = []
    assert read_sample(told.append) == sample
    assert bool(told) == (text in ("x", "0", "-2"))


def test_a_sample_that_is_no_number_stops_no_test() -> None:
    command = [sys.executable, "-c", "import tunegemm.testing"]
    own = environment() | {"TUNEGEMM_TEST_SAMPLE": "x"}
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    assert done.returncode == 0 and "TUNEGEMM_TEST_SAMPLE='x' is not a number from 1" in done.stderr
