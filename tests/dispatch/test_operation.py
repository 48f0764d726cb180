"""The device layer without a GPU: verdicts, compilation, workspace sizes, refusals before a launch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.generate import test_cute_sm80, test_cute_sm90, test_triton_tma
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch.operation import Operation
from tunegemm.errors import DeviceError, OperationError, SpaceError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import ALGORITHM_PARAMETERS, FAMILY, TORCH_MM
from tunegemm.store.shipped import read_shipped

PROBLEM = Problem.parse("512x512x65536")
HOPPER = test_cute_sm90.candidate(tile_n=64).with_launch(
    **test_cute_sm90.LAUNCH, l2_hint="none", cluster_order="index"
)
AMPERE = test_cute_sm80.candidate().with_launch(**test_cute_sm80.LAUNCH)
TRITON = test_triton_tma.candidate().with_launch(**test_triton_tma.LAUNCH)


@pytest.fixture(scope="module")
def gpu(h200: Device) -> Device:
    """The same as a device that could launch, as far as anybody asks who does not launch."""
    return replace(h200, spec="cuda:0")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    return ArtifactStore(tmp_path_factory.mktemp("objects"))


class TestCanImplement:
    def test_the_familys_verdict(self, h200: Device) -> None:
        assert Operation(PROBLEM, HOPPER, h200).can_implement()
        deep = Candidate.make(
            "cute_sm90", dict(HOPPER.compile_params) | {"stages": 12}, dict(HOPPER.launch_params)
        )
        verdict = Operation(PROBLEM, deep, h200).can_implement()
        assert verdict.rule == "ring_memory" and "B >" in verdict.reason
        fused = replace(PROBLEM, epilogue="relu")
        assert Operation(fused, HOPPER, h200).can_implement()
        assert Operation(fused, AMPERE, h200).can_implement().rule == "epilogue"

    def test_parameters_that_are_missing_or_unknown_or_have_no_such_value(self, h200: Device) -> None:
        kernel, launch = dict(HOPPER.compile_params), dict(HOPPER.launch_params)
        without = {name: value for name, value in kernel.items() if name != "stages"}
        for candidate, reason in (
            (
                Candidate.make("cute_sm90", without, launch),
                "compile parameter 'stages' is missing; use one of 3, 4",
            ),
            (
                Candidate.make("cute_sm90", kernel),
                "launch parameter 'raster_order' is missing; use one of along_m",
            ),
            (Candidate.make("cute_sm90", kernel | {"stage": 3}, launch), "'stage' is not a compile"),
            (Candidate.make("cute_sm90", kernel, launch | {"warps": 3}), "'warps' is not a launch"),
            (
                Candidate.make("cute_sm90", kernel, launch | {"l2_hint": "b"}),
                "launch parameter 'l2_hint' is 'b'; use one of none, a_first, b_first, streamed",
            ),
            (
                Candidate.make("cute_sm90", kernel | {"schedule": "foo"}, launch),
                "compile parameter 'schedule' is 'foo'; use one of cooperative, pingpong",
            ),
            (
                Candidate.make("cute_sm90", kernel | {"tile_m": 0}, launch),
                "compile parameter 'tile_m' is 0; use a whole number from 1",
            ),
            (Candidate.make("cute_sm90", kernel | {"stages": "4"}, launch), "'stages' is '4'; use a whole"),
            (Candidate.make("cute_sm90", kernel, launch | {"split_k": True}), "'split_k' is True; use"),
        ):
            verdict = Operation(PROBLEM, candidate, h200).can_implement()
            assert verdict.rule == "parameters" and reason in verdict.reason
        with pytest.raises(OperationError, match=r"cannot compute 512x512x65536.*'stages' is missing"):
            Operation(PROBLEM, Candidate.make("cute_sm90", without, launch), h200).compile()

    def test_every_shipped_record_is_one(self, h200: Device) -> None:
        """Whole, as no parameter came later; a record that lacks one cannot be packed or compiled."""
        records, bad = read_shipped()
        refused = [
            (str(record.problem), verdict.reason)
            for record in records
            if not (verdict := Operation(record.problem, record.candidate, h200).can_implement())
        ]
        assert (refused, bad) == ([], []) and len(records) > 200

    def test_a_device_by_its_name(self) -> None:
        ampere = Operation(PROBLEM, HOPPER, "model:a100-sxm-80gb")
        assert ampere.can_implement().rule == "architecture"
        with pytest.raises(DeviceError, match="no such part"):
            Operation(PROBLEM, HOPPER, "model:none")
        with pytest.raises(SpaceError, match="not known"):
            Operation(PROBLEM, Candidate.make("none", {}), "model:h200")


def test_compile_is_of_the_store(h200: Device, store: ArtifactStore) -> None:
    resources = Operation(PROBLEM, HOPPER, h200, store=store).compile()
    assert resources is not None and resources.registers > 0 and resources.spill_bytes == 0
    (compiled,) = store.root.glob("*/*.o")
    changed = compiled.stat().st_mtime_ns
    other = HOPPER.with_launch(split_k=4)  # a launch argument
    assert Operation(replace(PROBLEM, m=1024), other, h200, store=store).compile() == resources
    assert [path.stat().st_mtime_ns for path in store.root.glob("*/*.o")] == [changed]


def test_a_kernel_that_does_not_compile(h200: Device, tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    operation = Operation(PROBLEM, HOPPER, h200, store=store)
    key = families.get(HOPPER.family).kernel_key(PROBLEM, HOPPER, h200)
    store.add_failure(key, "the compiler aborted by SIGABRT")
    with pytest.raises(
        OperationError, match=r"co128x64x64.* does not compile: the compiler aborted by SIGABRT"
    ):
        operation.compile()


class TestWorkspaceBytes:
    def test_of_split_k(self, h200: Device, store: ArtifactStore) -> None:
        """4 x 8 tiles of 128x64 in parts: the fp32 sums of each, and a counter for each of two warpgroups."""
        sizes = {
            split_k: Operation(
                PROBLEM, HOPPER.with_launch(split_k=split_k), h200, store=store
            ).workspace_bytes
            for split_k in (1, 2, 8)
        }
        assert sizes == {split_k: split_k * (512 * 512 * 4 + 32 * 2 * 4) for split_k in (2, 8)} | {1: 0}

    @pytest.mark.parametrize("candidate", [AMPERE, TRITON], ids=lambda candidate: candidate.family)
    def test_of_families_whose_blocks_share_a_counter(self, h200: Device, candidate: Candidate) -> None:
        family = families.get(candidate.family)
        assert family.workspace(PROBLEM, candidate, h200) is None
        memory = family.workspace(PROBLEM, candidate.with_launch(split_k=4), h200)
        assert memory is not None
        assert (memory.partial_bytes, memory.counter_bytes) == (4 * 512 * 512 * 4, 16 * 4)

    def test_of_the_library(self, h200: Device) -> None:
        assert Operation(PROBLEM, TORCH_MM, h200).workspace_bytes == 0
        assert Operation(PROBLEM, TORCH_MM, h200).compile() is None
        algorithm = Candidate.make(
            "cublaslt",
            {"algorithm": "cublaslt"},
            dict.fromkeys(ALGORITHM_PARAMETERS, 1) | {"workspace_bytes": 1 << 20},
        )
        memory = FAMILY.workspace(PROBLEM, algorithm, h200)
        assert memory is not None and memory.num_bytes == 1 << 20


@pytest.mark.slow
def test_the_documents_example(capsys: pytest.CaptureFixture[str]) -> None:
    """What it prints is what its comments say."""
    text = (Path(__file__).parents[2] / "docs" / "guide" / "operation.md").read_text()
    block = text.split("```python\n")[1].split("```")[0]
    exec(block, {})
    printed = capsys.readouterr().out.splitlines()
    said = [line.split("# ")[1].removesuffix("...") for line in block.splitlines() if "  # " in line]
    assert len(printed) == len(said) == 3
    assert all(line.startswith(start) for line, start in zip(printed, said, strict=True)), printed


class TestRefusals:
    def test_a_device_that_cannot_launch(self, h200: Device, store: ArtifactStore) -> None:
        with pytest.raises(DeviceError, match="model:h200 is not a GPU"):
            Operation(PROBLEM, HOPPER, h200, store=store).initialize()

    def test_run_before_initialize(self, h200: Device) -> None:
        a = torch.zeros(512, 65536)
        with pytest.raises(OperationError, match=r"call initialize\(\) once before run"):
            Operation(PROBLEM, HOPPER, h200).run(a, a.t(), a)

    def test_workspaces_that_do_not_do(self, gpu: Device, store: ArtifactStore) -> None:
        operation = Operation(PROBLEM, HOPPER.with_launch(split_k=8), gpu, store=store)
        with pytest.raises(OperationError, match=r"workspace on cpu; co128x64x64 .* runs on cuda:0"):
            operation.initialize(torch.empty(operation.workspace_bytes, dtype=torch.uint8))
        with pytest.raises(OperationError, match=r"workspace 65536 is not a tensor; give a tensor on cuda:0"):
            operation.initialize(0x10000)  # type: ignore[arg-type]


@pytest.mark.parametrize("needs", [True, False])
def test_without_a_workspace_memory_is_taken_where_the_kernel_needs_it(
    needs: bool, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the current stream, and the kernel is loaded with it; tests/gpu/test_device_layer.py launches."""

    class Memory:
        num_bytes, done = 16, list[object]()

        def lend(self, address: int | None) -> None:
            self.done.append(address)

        def take(self, stream: int) -> None:
            self.done.append(f"of stream {stream}")

    memory, loaded = Memory() if needs else None, list[object]()
    family = type(families.get(HOPPER.family))
    monkeypatch.setattr(family, "load", lambda *words: loaded.append(words[-1]))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(cuda_stream=7))
    operation = Operation(PROBLEM, HOPPER, gpu)
    operation.__dict__["_memory"] = memory
    monkeypatch.setattr(operation, "compile", lambda: None)
    operation.initialize()
    assert loaded == [memory] and Memory.done == [None, "of stream 7"] * needs
