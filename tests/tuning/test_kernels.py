"""Which kernels a tuning knows: what is ranked can be launched, and is compiled where it must be."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.processes import loaded_after
from tests.tuning.planted import DEVICE, PROBLEM, small_space
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import Ready
from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import SpaceError
from tunegemm.generate import families, generator
from tunegemm.measure.groups import checked_skews
from tunegemm.tuning.kernels import Kernels


@pytest.fixture
def kernels(tmp_path: Path) -> Kernels:
    made = Kernels(DEVICE, folder=tmp_path)
    made.space = small_space
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM, Problem.parse("4096x4096x4096"), Problem.parse("16x1000x8192", layout="nt"),
        replace(PROBLEM, epilogue="relu"), Problem.parse("64x64x63"), replace(PROBLEM, alignment=2),
        Problem.parse("512x512x65536", dtype="fp16"), Problem.parse("64x512x512", dtype="fp8_e4m3"),
    ],
    ids=str,
)  # fmt: skip
def test_every_ranked_launch_is_feasible(kernels: Kernels, problem: Problem) -> None:
    found = 0
    for name in kernels.generators:
        ranking = kernels.ranked(problem, name)
        launches = [prediction.candidate for prediction in ranking.predictions]
        assert all(kernels.is_feasible(problem, launch) for launch in launches)
        assert len({launch.kernel for launch in launches}) == len(launches) == ranking.feasible
        some = kernels.ranked(problem, name, most=5)
        assert some.feasible == ranking.feasible
        assert {p.candidate for p in some.predictions} <= set(launches)
        assert len(some.predictions) >= min(5, len(launches))
        found += len(launches)
    assert found


def test_of_compiled_kernels_those_that_are_there(kernels: Kernels, tmp_path: Path) -> None:
    """In the order of clusters that was compiled, whichever the model would have; whatever else is there."""
    family = families.get("cute_sm90")
    large = Problem.parse("4096x4096x4096")
    chosen = [p.candidate for p in kernels.ranked(large, "cute_sm90").predictions[:6]]
    assert {launch["cluster_order"] for launch in chosen} == {"gpc"}
    plain = [launch.with_launch(cluster_order="index") for launch in chosen]
    unlike = Problem.parse("4096x4096x4096", dtype="fp16")
    for number, compiled in enumerate((chosen[:3], plain[:3], plain[:2] + chosen[2:4])):
        store = ArtifactStore(tmp_path / str(number))
        for problem, launch in [*((large, launch) for launch in compiled), (unlike, chosen[5])]:
            (scratch := store.scratch()).touch()
            store.add(family.kernel_key(problem, launch, DEVICE), scratch, Resources(1, 0, 1))
        next(store.root.glob("*/*.json")).with_name("cut.json").write_text("{")
        (store.root / "00").mkdir(mode=0o700, exist_ok=True)
        (store.root / "00" / "of nothing.o").touch()
        keys = Ready(frozenset(store.names()), store=store)
        ranked = kernels.ranked(large, "cute_sm90", compiled=keys)
        found = [p.candidate for p in ranked.predictions]
        assert {(c.kernel, c["cluster_order"]) for c in found} == {
            (c.kernel, c["cluster_order"]) for c in compiled
        }
        assert ranked.feasible == len(compiled)
        assert all(kernels.is_compiled(large, c, keys) for c in found)
    assert kernels.ranked(large, "cute_sm90", compiled=Ready()).predictions == []


def test_the_latest_rankings_are_remembered(kernels: Kernels) -> None:
    first = kernels.ranked(PROBLEM, "triton_tma")
    assert kernels.ranked(PROBLEM, "triton_tma") is first
    assert kernels.ranked(PROBLEM, "triton_tma", most=3) is not first
    for m in range(64, 64 * 18, 64):
        kernels.ranked(replace(PROBLEM, m=m, k=1024), "triton_tma")
    again = kernels.ranked(PROBLEM, "triton_tma")
    assert again is not first and again == first, "of all that were asked for only the latest are kept"


def test_families_that_lack_a_package_are_left_out_with_a_word_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cutlass", None)
    monkeypatch.setattr(generator, "package_version", lambda name: "")
    assert "cute_sm90" not in Kernels(DEVICE).families
    (said,) = caplog.messages
    assert said.startswith("not tried: cute_sm90, ")
    assert said.endswith("; nvidia-cutlass-dsl is not installed; pip install nvidia-cutlass-dsl")


def test_kernels_are_found_without_torch() -> None:
    """Its import takes a tuning's first process a second and more."""
    program = (
        "from tunegemm.describe.device import find_device; from tunegemm.tuning.kernels import Kernels\n"
        "Kernels(find_device('model:h200'), None, None).families"
    )
    assert "torch" not in loaded_after(program)


def test_one_name_stands_for_a_sequence_of_one() -> None:
    device = find_device("model:h200")
    assert Kernels(device, "cublaslt").families == ("cublaslt",)
    assert Kernels(device, "cublaslt, skinny").families == ("cublaslt", "skinny")
    assert checked_skews("typical") == ("typical",)
    for none in ([], " ,", 3):
        with pytest.raises(SpaceError, match=r"^families .*: give names of cute_sm90, .*, or None for all$"):
            Kernels(device, none)  # type: ignore[arg-type]
