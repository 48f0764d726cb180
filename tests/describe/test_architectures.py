"""Ten architectures: their limits, their parts, and what is refused on them. No GPU needed."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tunegemm.choose.policies import Policy
from tunegemm.choose.selection import select
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe import device as devices
from tunegemm.describe import driver
from tunegemm.describe.architectures import ALIASES, ARCHITECTURES, PARTS, Architecture
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import DeviceError
from tunegemm.generate import families
from tunegemm.store.shipped import read_shipped
from tunegemm.tuning.kernels import Kernels

OTHERS = [name for name, part in PARTS.items() if part.capability != (9, 0)]
RTX4060 = driver.Properties(
    "NVIDIA GeForce RTX 4060 Laptop GPU", (8, 9), 24, 32 << 20, 8 << 30, 2250000, 256.0
)


def test_there_are_ten_and_each_has_a_part() -> None:
    assert [one.number for one in ARCHITECTURES.values()] == [80, 86, 87, 89, 90, 100, 103, 110, 120, 121]
    assert {part.capability for part in PARTS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda one: one.short_name)
def test_shared_memory_is_what_the_dsl_knows(architecture: Architecture) -> None:
    dsl = pytest.importorskip("cutlass.cutlass_dsl.cutlass")
    assert architecture.smem_bytes_per_block == dsl.SMEM_CAPACITY_MAP[architecture.short_name]


@pytest.mark.parametrize("name", PARTS)
def test_peaks_are_multiprocessors_times_a_clock_that_gpus_have(name: str) -> None:
    device = find_device(name)
    clock_ghz = device.peak_tflops * 1e3 / (device.sm_count * device.flops_per_cycle)
    assert 1.1 < clock_ghz < 2.7
    assert device.architecture.tma == (device.architecture.max_cluster_size > 1)


def test_a_part_is_known_by_its_name_alone() -> None:
    assert find_device("a100") == replace(find_device("model:a100-sxm-80gb"), spec="model:a100")
    assert find_device("rtx4090").spec == "model:rtx4090"
    assert all(find_device(alias).name == PARTS[name].device_name for alias, name in ALIASES.items())


def opened(
    monkeypatch: pytest.MonkeyPatch, found: driver.Properties, cuda: tuple[int, int] = (0, 0)
) -> Device:
    """A GPU that the driver would describe so."""
    monkeypatch.setattr("tunegemm.describe.device.torch_version", lambda: ("2.13.0", "13.0"))
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(driver, "properties", lambda index: found)
    monkeypatch.setattr(driver, "cuda_version", lambda: cuda)
    return find_device("cuda:0")


def test_a_card_without_a_datasheet_has_the_peaks_of_its_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    laptop = opened(monkeypatch, RTX4060)
    assert laptop.peak_tflops == pytest.approx(24 * 512 * 2.25e9 / 1e12)
    assert laptop.bandwidth_gbps == 256 and not laptop.is_known_part
    assert opened(monkeypatch, replace(RTX4060, name=PARTS["l4"].device_name)).peak_tflops == 121
    slice_of_h200 = replace(RTX4060, name="NVIDIA H200 MIG 1g.18gb", capability=(9, 0))
    assert opened(monkeypatch, slice_of_h200).peak_tflops == 0, "its share of the memory is not known"


@pytest.mark.parametrize(
    ("change", "cuda", "line"),
    [
        ({"capability": (7, 5)}, (13, 0), "is sm_75 and has no cp.async, .*; use a GPU from Ampere"),
        ({"capability": (13, 0)}, (13, 0), "is sm_130, which tunegemm does not support; supported are sm_80"),
        ({}, (12, 8), "supports CUDA 12.8, and torch was built for CUDA 13.0; upgrade the driver"),
    ],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, object], cuda: tuple[int, int], line: str
) -> None:
    with pytest.raises(DeviceError, match=line) as caught:
        opened(monkeypatch, replace(RTX4060, **change), cuda)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_an_older_driver_of_the_same_major_version_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunegemm.describe.device.torch_version", lambda: ("2.11.0", "12.8"))
    monkeypatch.setattr(driver, "cuda_version", lambda: (12, 4))
    assert devices.too_old_driver("a card") == ""


@pytest.mark.parametrize("name", OTHERS)
def test_families_of_hopper_are_refused_and_not_tried(name: str, caplog: pytest.LogCaptureFixture) -> None:
    device = find_device(name)
    for family in ("cute_sm90", "gluon_wgmma", "grouped"):
        with pytest.raises(
            DeviceError, match=rf"'{family}' has no kernels for .* has no WGMMA.*; use .*cublaslt"
        ):
            Kernels(device, [family])
    with caplog.at_level(logging.WARNING):
        tried = Kernels(device).families
    assert {"cute_sm80", "skinny", "cublaslt"} <= set(tried) and not caplog.records
    assert not {"cute_sm90", "gluon_wgmma", "grouped"} & set(tried)


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_that_ships_is_served(name: str) -> None:
    """Records, predictions and tables are of Hopper: every product is torch's until it is tuned."""
    records, _ = read_shipped()
    snapshot, device = Snapshot(records), find_device(name)
    problems = {record.problem for record in records[::150]}
    problems |= {Problem.parse(shape) for shape in ("16x4096x4096", "64x28672x8192", "4096x4096x4096")}
    problems |= {Problem.parse("16x151936x4096"), Problem.parse("16x4096x4096", epilogue="bias_n+gelu")}
    problems |= {Problem.parse("256x4096x4096", groups=8), Problem.parse("16x4096x4096", epilogue="residual")}
    for problem in problems:
        selection = select(snapshot, problem, device)
        assert selection.outcome == "miss" and not selection.options, (problem, selection.why)


@pytest.mark.parametrize("name", OTHERS)
def test_which_kernels_give_the_same_bits_is_said_of_hopper_alone(name: str) -> None:
    selection = select(
        Snapshot([]), Problem.parse("16x4096x4096"), find_device(name), policy=Policy("batch_invariant")
    )
    assert selection.outcome == "miss" and "equal bits were tested on Hopper only" in selection.why


def test_hopper_tries_what_it_did() -> None:
    expected = [name for name in families.SHIPPED if name not in families.ONLY_IF_ASKED]
    assert list(families.of_device(find_device("h200"))) == expected
