"""Device: known parts, names that are none, the roofline, the fingerprint."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tests.support.processes import loaded_after
from tunegemm.describe import driver
from tunegemm.describe.architectures import ARCHITECTURES, PARTS
from tunegemm.describe.device import (
    TelemetryReader,
    cuda_device_count,
    current_fingerprint,
    find_device,
    package_version,
)
from tunegemm.describe.problem import Problem
from tunegemm.errors import DeviceError


class TestFindDevice:
    @pytest.mark.parametrize("name", PARTS)
    def test_every_part_is_a_device(self, name: str) -> None:
        device = find_device(f"model:{name}")
        assert device.name == PARTS[name].device_name
        assert device.architecture is ARCHITECTURES[PARTS[name].capability]
        assert not device.is_real
        assert device.fingerprint.driver == "", "no driver was asked for a modelled device"

    @pytest.mark.parametrize(
        ("spec", "named"),
        [
            ("model:h300", "device 'model:h300': no such part; use model: with one of h200, h100-sxm"),
            ("model", "device 'model': no such part"),
            ("tpu:0", "device 'tpu:0' is not known; use cuda:N, replay:NAME or model:NAME"),
            ("replay:h200", "device 'replay:h200' has only recorded times; here use cuda:N or model:NAME"),
            ("", "device '' is not known"),
            ("cuda:99", "device 'cuda:99': .* CUDA device"),
            ("cuda:9999999999999", "CUDA device"),
        ],
    )
    def test_refusals(self, spec: str, named: str) -> None:
        with pytest.raises(DeviceError, match=named) as caught:
            find_device(spec)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("spec", ["cuda:x", "cuda:-1", "cuda:0.5", "cuda:0:1"])
    def test_ordinals_that_are_none(self, spec: str) -> None:
        with pytest.raises(DeviceError, match=rf"device '{spec}' is not known; use cuda:N with a number"):
            find_device(spec)

    def test_without_a_gpu_the_message_says_what_else_there_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tunegemm.describe.driver.device_count", lambda: 0)
        with pytest.raises(DeviceError, match=r"0 CUDA device.* use replay:h200 or model:h200"):
            find_device("cuda:0")

    @pytest.mark.parametrize(
        ("name", "tflops"), [("NVIDIA H200", 989.4), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H800", 0.0)]
    )
    def test_a_real_one_has_the_figures_of_its_part(
        self, monkeypatch: pytest.MonkeyPatch, name: str, tflops: float
    ) -> None:
        facts = driver.Properties(name, (9, 0), 78, 50 * 2**20, 80 * 10**9)
        monkeypatch.setattr("tunegemm.describe.device.cuda_device_count", lambda: 2)
        monkeypatch.setattr(
            driver, "properties", {0: facts, 1: replace(facts, capability=(7, 5))}.__getitem__
        )
        found = find_device("cuda")
        assert (found.spec, found.name, found.sm_count, found.peak_tflops) == ("cuda:0", name, 78, tflops)
        assert (found.bandwidth_gbps > 0) == (tflops > 0) and found.memory_bytes == 80 * 10**9
        with pytest.raises(
            DeviceError, match=f"{name} is sm_75 and has no cp.async, .* use a GPU from Ampere"
        ):
            find_device("cuda:1")
        with pytest.raises(DeviceError, match=r"2 CUDA device.* use cuda:0 to cuda:1$"):
            find_device("cuda:2")

    @pytest.mark.gpu
    def test_the_real_one(self) -> None:
        device = find_device("cuda")
        assert device.spec == "cuda:0"
        assert device.is_real
        assert device.index == 0
        assert device.sm_count > 0
        assert device.fingerprint.driver
        assert cuda_device_count() >= 1


class TestWithoutTorch:
    """To import torch takes seconds, which a tuning's first process can do without."""

    def test_a_device_is_opened_without_it(self) -> None:
        program = "from tunegemm.tuning.tuner import open_device; open_device('model:h200'), open_device()"
        assert "torch" not in loaded_after(program)

    def test_its_version_is_the_one_that_it_says(self) -> None:
        program = "from tunegemm.describe.device import torch_version; print(*torch_version(), sep='|')"
        ran = subprocess.run(
            [sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True
        )
        assert ran.stdout.strip() == f"{torch.__version__}|{torch.version.cuda or ''}"


class TestLimits:
    def test_hopper(self) -> None:
        hopper = ARCHITECTURES[9, 0]
        assert hopper.compile_target == "sm_90a"
        assert hopper.smem_bytes_per_block == 232448
        assert hopper.max_cluster_size == 8

    @pytest.mark.parametrize("capability", ARCHITECTURES)
    def test_a_block_leaves_its_reserved_kibibyte(self, capability: tuple[int, int]) -> None:
        architecture = ARCHITECTURES[capability]
        assert architecture.smem_bytes_per_sm - architecture.smem_bytes_per_block == 1024
        assert architecture.compile_target.startswith(f"sm_{capability[0]}{capability[1]}")

    def test_part_names_are_unique(self) -> None:
        """A real device finds its datasheet by its product name."""
        names = [part.device_name for part in PARTS.values()]
        assert len(set(names)) == len(names)


class TestRoofline:
    H200 = find_device("model:h200")

    def test_compute_bound(self) -> None:
        assert self.H200.roofline_us(Problem(8192, 8192, 8192)) == pytest.approx(1111.3, rel=1e-4)

    def test_memory_bound(self) -> None:
        assert self.H200.roofline_us(Problem(1, 100_000, 24_000)) == pytest.approx(1000, rel=1e-3)

    def test_unknown_part(self) -> None:
        assert dataclasses.replace(self.H200, peak_tflops=0.0).roofline_us(Problem(8, 8, 8)) == 0.0


class TestFingerprint:
    def test_facts_of_this_machine(self) -> None:
        import torch

        fingerprint = current_fingerprint("NVIDIA H200", 132, (9, 0))
        assert (fingerprint.capability, fingerprint.mig, fingerprint.sm_budget) == ("9.0", "", 132)
        assert current_fingerprint("NVIDIA H200 MIG 1g.18gb", 16, (9, 0)).mig == "1g.18gb"
        assert fingerprint.torch == torch.__version__
        assert fingerprint.triton == package_version("triton") != ""
        assert set(fingerprint.asdict()) == {field.name for field in dataclasses.fields(fingerprint)}

    def test_absent_package(self) -> None:
        assert package_version("no-such-distribution") == ""


class Nvml:
    """NVML of a host with a GPU that is cut, and with old bindings."""

    SLICE = "11111111-2222-3333-4444-555555555555"
    HANDLES: ClassVar = {"GPU-0": "GPU 0", "GPU-3": "GPU 3", f"MIG-{SLICE}": "slice"}

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return self.HANDLES[uuid]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: str) -> str:
        return {"slice": "GPU 3"}[part]

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU {index}"

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return {"GPU 0": 100_000, "GPU 3": 650_000}[handle]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return 0x04 | 0x40 | 0x01


@pytest.mark.parametrize(
    ("uuid", "power_w"),
    [("3", 650.0), ("GPU-0", 100.0), (Nvml.SLICE, 650.0), (f"MIG-{Nvml.SLICE}", 650.0), ("7", None)],
)
def test_telemetry_is_that_of_the_gpu_whose_uuid_cuda_says(
    monkeypatch: pytest.MonkeyPatch, uuid: str, power_w: float | None
) -> None:
    """Of a slice it is the whole GPU's; of one that NVML does not know it is nothing."""
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuid))
    reasons = [] if power_w is None else ["sw_power_cap", "hw_thermal_slowdown"]
    reader = TelemetryReader(0)
    assert reader.read() == {
        "sm_clock_mhz": None, "power_w": power_w, "temperature_c": None, "throttle_reasons": reasons
    }  # fmt: skip
    assert (reader.energy_mj(), reader.busy_percent()) == (None, None)


def test_what_just_fits_into_memory_fits() -> None:
    problem, device = Problem.parse("64x64x64"), find_device("model:h200")
    assert replace(device, memory_bytes=problem.memory_bytes).lacks_memory(problem) is None
    lack = replace(device, memory_bytes=problem.memory_bytes - 1).lacks_memory(problem)
    assert lack is not None and "operands and output of 2.458e-05 GB > " in lack


def test_what_nvml_says_of_work_and_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: 1500  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=7)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="3"))
    reader = TelemetryReader(0)
    assert (reader.energy_mj(), reader.busy_percent()) == (1500.0, 7)


@pytest.mark.gpu
def test_telemetry_of_a_real_gpu() -> None:
    telemetry = TelemetryReader(0).read()
    assert 100 <= telemetry["sm_clock_mhz"] <= 4000
    assert 10 <= telemetry["power_w"] <= 2000
    assert 10 <= telemetry["temperature_c"] <= 110


@pytest.mark.gpu
@pytest.mark.parametrize("cluster_size", [2, 4, 8])
def test_the_driver_counts_clusters_as_its_own_bindings_say(cluster_size: int) -> None:
    """Its structures are declared in `describe.clusters`; cuda.bindings has them from NVIDIA's header."""
    import torch
    from cuda.bindings import driver

    from tunegemm.describe.clusters import PTX, active_clusters

    torch.ones(1, device="cuda:0")
    _, module = driver.cuModuleLoadData(PTX)
    _, function = driver.cuModuleGetFunction(module, b"whereabouts")
    smem_bytes = find_device("cuda:0").architecture.smem_bytes_per_block
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.cuFuncSetAttribute(function, limit, smem_bytes)
    cluster, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y = cluster_size, 1
    cluster.value.clusterDim.z = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = 1024 * cluster_size, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 128, 1, 1
    config.sharedMemBytes, config.attrs, config.numAttrs = smem_bytes, [cluster], 1
    error, count = driver.cuOccupancyMaxActiveClusters(function, config)
    assert error == driver.CUresult.CUDA_SUCCESS and count > 0
    assert active_clusters(0, cluster_size, smem_bytes) == int(count)
