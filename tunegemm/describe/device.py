"""Capacity and peak speed of a GPU. Only this module, `driver` and `clusters` ask CUDA or NVML."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import runpy
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tunegemm.describe import driver
from tunegemm.describe.architectures import ALIASES, ARCHITECTURES, PARTS, Architecture, Part, part_named
from tunegemm.describe.clusters import active_clusters, gpcs_of_clusters
from tunegemm.describe.problem import Problem
from tunegemm.errors import DeviceError
from tunegemm.untrusted import digits, shown

#: Clusters of this size that a GPU holds, from the driver, for a chip that is cut less evenly than possible:
#: they reach 120 of the 132 multiprocessors (benchmarks/results/h200/power_roof.json).
_COUNTED_CLUSTERS = {("NVIDIA H200", 4): 30}


@dataclass(frozen=True)
class Fingerprint:
    """A change in any of these fields makes a record stale. Absent packages are empty strings."""

    device_name: str
    sm_count: int
    """SMs of the device, or of its MIG instance."""
    capability: str
    """Compute capability, such as ``9.0``."""
    mig: str
    """MIG profile, such as ``1g.18gb``; empty for a whole GPU."""
    sm_budget: int
    """SMs that a launch may fill; `sm_count` unless some are kept for others."""
    driver: str
    cuda: str
    torch: str
    cutlass_dsl: str
    triton: str

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def digest(self) -> str:
        """SHA-256 (16 hex digits) over the fields as canonical JSON: its name in the database."""
        text = json.dumps(self.asdict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


#: torch.mm reaches about 70 % of an H200's dense bf16 peak at 4096 and more rows (README, 2026-11-20). This
#: replaces an unknown time.
USUAL_EFFICIENCY = 0.7


@dataclass(frozen=True)
class Device:
    """One GPU to tune for: real (`cuda:N`), recorded (`replay:NAME`) or modelled (`model:NAME`)."""

    spec: str
    """The name that selected it, such as ``cuda:0`` or ``replay:h200``."""
    name: str
    """Product name, as CUDA reports it."""
    architecture: Architecture
    sm_count: int
    l2_bytes: int
    memory_bytes: int
    peak_tflops: float
    """Dense bf16 rate from the datasheet, else from the driver's clocks (but not for a MIG slice of a
    Hopper); 0 if unknown."""
    bandwidth_gbps: float
    """Memory bandwidth, as `peak_tflops`."""
    fingerprint: Fingerprint

    @property
    def is_real(self) -> bool:
        """Whether times on this device are measurements."""
        return self.spec.startswith("cuda")

    def resident_clusters(self, cluster_size: int) -> int:
        """Clusters of this size that run at once, with one block per multiprocessor."""
        if cluster_size == 1:
            return self.sm_count
        if self.fingerprint.sm_budget < self.fingerprint.sm_count:  # so that no launch fills more
            return max(1, self.sm_count // cluster_size)
        if self.is_real:
            counted = active_clusters(self.index, cluster_size, self.architecture.smem_bytes_per_block)
            if counted is not None:
                return counted
        return _COUNTED_CLUSTERS.get((self.name, cluster_size)) or even_cut(self.sm_count, cluster_size)

    def gpcs_of_clusters(self, cluster_size: int, clusters: int) -> tuple[int, ...] | None:
        """The GPC number of each cluster of a grid, with one block per multiprocessor. None where that is
        unknown, for example if some multiprocessors are kept for others."""
        if not self.is_real or self.fingerprint.sm_budget < self.fingerprint.sm_count:
            return None
        return gpcs_of_clusters(self.index, cluster_size, clusters, self.architecture.smem_bytes_per_block)

    def with_sm_budget(self, sm_budget: int) -> Device:
        """The device as if it had only this many multiprocessors; its fingerprint says so."""
        return replace(
            self,
            sm_count=sm_budget,
            peak_tflops=self.peak_tflops * sm_budget / self.sm_count,
            fingerprint=replace(self.fingerprint, sm_budget=sm_budget),
        )

    @property
    def is_known_part(self) -> bool:
        """Whether its peaks come from a datasheet."""
        return part_named(self.name) is not None

    @property
    def flops_per_cycle(self) -> int:
        """Dense bf16 FLOP per cycle of one multiprocessor's tensor cores."""
        return self.architecture.rate(self.name)

    @property
    def index(self) -> int:
        """The CUDA ordinal of a real device; 0 for others."""
        return int(self.spec.partition(":")[2] or 0) if self.is_real else 0

    def lacks_memory(self, problem: Problem) -> str | None:
        """Why the problem's operands and output together exceed the device's memory; None if they fit.

        It assumes packed operands. A program's operands may share memory, for example batch entries that are
        one matrix.
        """
        if problem.memory_bytes <= self.memory_bytes:
            return None
        need_gb, have_gb = problem.memory_bytes / 1e9, self.memory_bytes / 1e9
        return f"{problem}: operands and output of {need_gb:.4g} GB > {have_gb:.4g} GB of {self.name}"

    def peak_tflops_of(self, problem: Problem) -> float:
        """Dense rate for the problem's operands; 0 if `peak_tflops` is."""
        return self.peak_tflops * problem.relative_rate

    def roofline_us(self, problem: Problem) -> float:
        """The floor in us: the larger of arithmetic and memory time at datasheet peaks; 0 if unknown.

        S. Williams et al., "Roofline: an insightful visual performance model", CACM 52(4), 2009.
        """
        if not self.peak_tflops:
            return 0.0
        return max(
            problem.flops / (self.peak_tflops_of(problem) * 1e6), problem.bytes / (self.bandwidth_gbps * 1e3)
        )


def find_device(spec: str = "cuda:0") -> Device:
    """The device named ``cuda``, ``cuda:N``, or ``model:NAME`` (a known part, such as ``model:h200``; its
    name alone works, too).

    Raises DeviceError if it is not there. `tunegemm.measure.replay` opens recorded devices.
    """
    kind, colon, name = spec.partition(":")
    if kind == "cuda":
        return _cuda_device(spec, name)
    if not colon and (kind in PARTS or kind in ALIASES):
        kind, name = "model", kind
    if kind == "model":
        if (part := PARTS.get(ALIASES.get(name, name))) is None:
            raise DeviceError(f"device {spec!r}: no such part; use model: with one of {', '.join(PARTS)}")
        fingerprint = current_fingerprint(part.device_name, part.sm_count, part.capability)
        return device_from_part(f"model:{name}", part, fingerprint)
    if kind == "replay":
        raise DeviceError(f"device {spec!r} has only recorded times; here use cuda:N or model:NAME")
    raise DeviceError(f"device {spec!r} is not known; use cuda:N, replay:NAME or model:NAME")


def device_from_part(spec: str, part: Part, fingerprint: Fingerprint) -> Device:
    """A device with a part's datasheet figures."""
    return Device(
        spec, part.device_name, ARCHITECTURES[part.capability], part.sm_count, part.l2_bytes,
        part.memory_bytes, part.peak_tflops, part.bandwidth_gbps, fingerprint,
    )  # fmt: skip


def cuda_device_count() -> int:
    """GPUs that torch can use; 0 on a machine without one."""
    return driver.device_count() if torch_version()[1] else 0


def _cuda_device(spec: str, name: str) -> Device:
    count = cuda_device_count()
    index = digits(name or "0")
    if index is None:
        raise DeviceError(f"device {shown(spec)} is not known; use cuda:N with a number")
    if index >= count:
        remedy = f"use cuda:0 to cuda:{count - 1}" if count else "without a GPU use replay:h200 or model:h200"
        raise DeviceError(f"device {spec!r}: {count} CUDA device(s) here; {remedy}")
    return _device_of(f"cuda:{index}", driver.properties(index))


def _device_of(spec: str, gpu: driver.Properties) -> Device:
    """The device that the driver describes. Raises DeviceError if no kernel here can run on it."""
    name = f"sm_{''.join(map(str, gpu.capability))}"
    if gpu.capability < min(ARCHITECTURES):
        oldest = ARCHITECTURES[min(ARCHITECTURES)]
        raise DeviceError(
            f"{gpu.name} is {name} and has no cp.async, which all kernels here use; use a GPU from "
            f"{oldest.name} ({oldest.short_name}) on, or torch.mm"
        )
    if (architecture := ARCHITECTURES.get(gpu.capability)) is None:
        known = ", ".join(architecture.short_name for architecture in ARCHITECTURES.values())
        raise DeviceError(f"{gpu.name} is {name}, which tunegemm does not support; supported are {known}")
    if refusal := too_old_driver(gpu.name):
        raise DeviceError(refusal)
    part = part_named(gpu.name)
    peak_tflops, bandwidth_gbps = (part.peak_tflops, part.bandwidth_gbps) if part else (0.0, 0.0)
    if part is None and not architecture.wgmma:
        # A Hopper GPU outside `PARTS` is a MIG slice; the clocks do not reveal its share of the memory.
        rate = gpu.sm_count * architecture.rate(gpu.name)
        peak_tflops, bandwidth_gbps = rate * gpu.clock_khz / 1e9, gpu.bandwidth_gbps
    return Device(
        spec, gpu.name, architecture, gpu.sm_count, gpu.l2_bytes, gpu.memory_bytes, peak_tflops,
        bandwidth_gbps, current_fingerprint(gpu.name, gpu.sm_count, gpu.capability, real=True),
    )  # fmt: skip


def too_old_driver(device_name: str) -> str:
    """Why torch's CUDA does not start with this driver; empty if it does, or if either version is unknown.

    Within one major version an older driver works (CUDA Compatibility, minor version compatibility).
    """
    built, supported = torch_version()[1], driver.cuda_version()
    major = digits(built.partition(".")[0]) or 0
    if not supported[0] or major <= supported[0]:
        return ""
    return (
        f"{device_name}: its driver {driver_version()} supports CUDA {'.'.join(map(str, supported))}, and "
        f"torch was built for CUDA {built}; upgrade the driver, or install a torch for CUDA {supported[0]}"
    )


def current_fingerprint(
    device_name: str, sm_count: int, capability: tuple[int, int], *, real: bool = False
) -> Fingerprint:
    """The fingerprint of a device under this machine's packages and, for a real device, its driver."""
    mig = re.search(r"\bMIG (\S+)", device_name)  # "NVIDIA H200 MIG 1g.18gb"
    torch, cuda = torch_version()
    return Fingerprint(
        device_name=device_name,
        sm_count=sm_count,
        capability=".".join(map(str, capability)),
        mig=mig.group(1) if mig else "",
        sm_budget=sm_count,
        driver=driver_version() if real else "",
        cuda=cuda,
        torch=torch,
        cutlass_dsl=package_version("nvidia-cutlass-dsl"),
        triton=package_version("triton"),
    )


@functools.cache
def torch_version() -> tuple[str, str]:
    """The version of torch and of the CUDA it was built for, empty if absent; does not import torch."""
    result = importlib.util.find_spec("torch")
    file = Path(result.origin or "").with_name("version.py") if result else Path()
    if "torch" in sys.modules or not file.is_file():
        import torch

        return str(torch.__version__), torch.version.cuda or ""
    version = runpy.run_path(str(file))
    return str(version["__version__"]), version["cuda"] or ""


@functools.cache
def package_version(name: str) -> str:
    """Installed version of a distribution, or the empty string."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_older(version: str, release: tuple[int, ...]) -> bool:
    """Whether a version, such as ``3.7rc1``, comes before a release. One that is empty, as of a package in a
    frozen program, does not."""
    return bool(version) and tuple(map(int, re.findall(r"\d+", version)[: len(release)])) < release


@functools.cache
def even_cut(sm_count: int, cluster_size: int) -> int:
    """How many clusters fit a Hopper chip with this many multiprocessors, at best.

    A cluster lives in one graphics processing cluster. Hopper has 8 of them, cut unevenly by yield, always by
    whole pairs of multiprocessors. The most even cut of 132 is 2 x 18 + 6 x 16, which holds 66 clusters of 2
    and 32 of 4. On a less even chip the driver's own figure may be lower.
    """
    gpcs = 8
    pairs, odd = divmod(sm_count // 2, gpcs)
    sizes = [2 * (pairs + 1)] * odd + [2 * pairs] * (gpcs - odd)
    return max(1, sum(size // cluster_size for size in sizes))


def driver_version() -> str:
    """Ask the kernel module first: starting NVML looks at every GPU of the host."""
    with suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    with suppress(Exception):  # it may be missing, of another version than the driver, or forbidden
        import pynvml

        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    return ""


#: NVML_CLOCK_SM and NVML_TEMPERATURE_GPU of nvml.h.
_CLOCK_SM, _TEMPERATURE_GPU = 1, 0
#: nvmlClocksEventReason* of nvml.h, whose names differ between versions of its bindings.
_THROTTLE_REASONS = {
    0x04: "sw_power_cap", 0x08: "hw_slowdown", 0x20: "sw_thermal_slowdown", 0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}  # fmt: skip


class TelemetryReader:
    """Reads clocks, power and temperature of one GPU; keeps NVML open between reads."""

    def __init__(self, index: int) -> None:
        """`index` is the CUDA ordinal; it is matched to NVML's by UUID, since the two orders may differ."""
        import torch

        self._nvml: Any = None
        self._handle: Any = None
        with suppress(Exception):  # it may be missing, or forbidden
            import pynvml

            self._nvml = pynvml
            pynvml.nvmlInit()
            self._handle = self._find(str(torch.cuda.get_device_properties(index).uuid))

    def _find(self, uuid: str) -> Any:
        """NVML's GPU of CUDA's UUID, of a MIG slice the GPU that it is a part of: clocks and power are the
        whole GPU's. None where NVML does not know it: by its number it might be another.
        """
        bare = re.sub(r"^(GPU|MIG)-", "", uuid)
        with suppress(Exception):
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}")
        with suppress(Exception):
            part = self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}")
            return self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
        return None

    def read(self) -> dict[str, Any]:
        """One reading of the SM clock (MHz), power (W), temperature (C), and the names of the active
        clock-limiting reasons, about 0.1 ms; None where NVML does not answer.
        """
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons") or 0
        return {
            "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", _CLOCK_SM),
            "power_w": None if (mw := self._ask("nvmlDeviceGetPowerUsage")) is None else mw / 1000,
            "temperature_c": self._ask("nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
            "throttle_reasons": [name for bit, name in _THROTTLE_REASONS.items() if reasons & bit],
        }

    def energy_mj(self) -> float | None:
        """The board's energy since the driver was loaded; None when NVML does not answer."""
        energy_mj = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if energy_mj is None else float(energy_mj)

    def busy_percent(self) -> int | None:
        """The share of the last second or less in which any process ran a kernel; None if unknown."""
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        return None if rates is None else int(rates.gpu)

    def _ask(self, function: str, *arguments: Any) -> Any:
        if self._handle is None:
            return None
        with suppress(Exception):  # not supported of this device, or by this version
            return getattr(self._nvml, function)(self._handle, *arguments)
        return None
