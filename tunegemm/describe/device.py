"""What a GPU can hold and how fast it can be. Only this module, `driver` and `clusters` ask CUDA or NVML."""

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
from tunegemm.describe.clusters import active_clusters, gpcs_of_clusters
from tunegemm.describe.problem import Problem
from tunegemm.errors import DeviceError
from tunegemm.untrusted import digits, shown


@dataclass(frozen=True)
class Architecture:
    """Limits that hold for every part of one compute capability.

    Sources: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
    """

    capability: tuple[int, int]
    """Major and minor compute capability."""
    compile_target: str
    """What the compilers call it, such as ``sm_90a``."""
    smem_bytes_per_block: int
    """Largest shared memory of one block, after opting in."""
    smem_bytes_per_sm: int
    """Shared memory of one multiprocessor. Each resident block also costs 1 KiB of it."""
    threads_per_sm: int
    """Most resident threads."""
    max_cluster_size: int
    """Most blocks of a portable cluster; 1 where there are no clusters."""
    registers_per_sm: int = 65536
    """32-bit registers of one multiprocessor."""
    registers_per_thread: int = 255
    """Most registers one thread can address."""
    threads_per_block: int = 1024
    """Most threads of one block."""


_KIB = 1024
ARCHITECTURES: dict[tuple[int, int], Architecture] = {
    architecture.capability: architecture
    for architecture in (
        Architecture((8, 0), "sm_80", 163 * _KIB, 164 * _KIB, 2048, 1),
        Architecture((8, 6), "sm_86", 99 * _KIB, 100 * _KIB, 1536, 1),
        Architecture((8, 9), "sm_89", 99 * _KIB, 100 * _KIB, 1536, 1),
        Architecture((9, 0), "sm_90a", 227 * _KIB, 228 * _KIB, 2048, 8),
        Architecture((10, 0), "sm_100a", 227 * _KIB, 228 * _KIB, 2048, 8),
        Architecture((12, 0), "sm_120a", 99 * _KIB, 100 * _KIB, 1536, 8),
    )
}


@dataclass(frozen=True)
class Part:
    """Datasheet figures of one product, for the roofline and for `model:NAME`."""

    device_name: str
    """The name that CUDA reports."""
    capability: tuple[int, int]
    sm_count: int
    peak_tflops: float
    """Dense bf16/fp16 tensor throughput, TFLOP/s."""
    bandwidth_gbps: float
    """Device memory bandwidth, GB/s."""
    l2_bytes: int
    memory_bytes: int


# Datasheets of NVIDIA H100 (SXM, PCIe, NVL), H200 and A100, dense rates without sparsity.
PARTS: dict[str, Part] = {
    "h200": Part("NVIDIA H200", (9, 0), 132, 989.4, 4800, 60 * _KIB**2, 141 * 10**9),
    "h100-sxm": Part("NVIDIA H100 80GB HBM3", (9, 0), 132, 989.4, 3350, 50 * _KIB**2, 80 * 10**9),
    "h100-pcie": Part("NVIDIA H100 PCIe", (9, 0), 114, 756.5, 2039, 50 * _KIB**2, 80 * 10**9),
    "h100-nvl": Part("NVIDIA H100 NVL", (9, 0), 132, 835.0, 3938, 50 * _KIB**2, 94 * 10**9),
    "a100-sxm-80gb": Part("NVIDIA A100-SXM4-80GB", (8, 0), 108, 312.0, 2039, 40 * _KIB**2, 80 * 10**9),
    "a100-sxm-40gb": Part("NVIDIA A100-SXM4-40GB", (8, 0), 108, 312.0, 1555, 40 * _KIB**2, 40 * 10**9),
    "a100-pcie-80gb": Part("NVIDIA A100 80GB PCIe", (8, 0), 108, 312.0, 1935, 40 * _KIB**2, 80 * 10**9),
}


#: Clusters of so many blocks that a GPU holds, where the driver was asked and its chip is less evenly cut
#: than could be: 120 of the 132 multiprocessors (benchmarks/results/h200/power_roof.json).
_COUNTED_CLUSTERS = {("NVIDIA H200", 4): 30}


@dataclass(frozen=True)
class Fingerprint:
    """What makes a record stale when it changes. Empty strings stand for packages that are absent."""

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


#: torch.mm reaches about 70 % of an H200's dense bf16 peak at 4096 and more rows (README, 2026-11-20): what
#: stands in for a time that is not known.
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
    """Datasheet dense bf16 rate; 0 if the part is not in `PARTS`."""
    bandwidth_gbps: float
    """Datasheet memory bandwidth; 0 if the part is not in `PARTS`."""
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
    def index(self) -> int:
        """The CUDA ordinal of a real device; 0 for others."""
        return int(self.spec.partition(":")[2] or 0) if self.is_real else 0

    def lacks_memory(self, problem: Problem) -> str | None:
        """Why the problem's operands and output do not fit into the device's memory together; None if they
        do.

        Assumes packed operands; those of a program may share memory, such as batch entries that are one
        matrix.
        """
        if problem.memory_bytes <= self.memory_bytes:
            return None
        need_gb, have_gb = problem.memory_bytes / 1e9, self.memory_bytes / 1e9
        return f"{problem}: operands and output of {need_gb:.4g} GB > {have_gb:.4g} GB of {self.name}"

    def peak_tflops_of(self, problem: Problem) -> float:
        """Datasheet dense rate for the problem's operands; 0 if the part is not in `PARTS`."""
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


@dataclass(frozen=True)
class Telemetry:
    """The chip's state at one moment, from NVML. What NVML does not report is None."""

    sm_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    throttle_reasons: tuple[str, ...]
    """Names of the active clock-limiting reasons, such as ``sw_power_cap``."""


def find_device(spec: str = "cuda:0") -> Device:
    """The device named ``cuda``, ``cuda:N``, or ``model:NAME`` (a known part, such as ``model:h200``).

    Raises DeviceError when it is not there. Recorded devices are opened by `tunegemm.measure.replay`.
    """
    kind, _, name = spec.partition(":")
    if kind == "cuda":
        return _cuda_device(spec, name)
    if kind == "model":
        if name not in PARTS:
            raise DeviceError(f"device {spec!r}: no such part; use model: with one of {', '.join(PARTS)}")
        part = PARTS[name]
        return device_from_part(
            spec, part, current_fingerprint(part.device_name, part.sm_count, part.capability)
        )
    raise DeviceError(f"device {spec!r} is not known; use cuda:N, replay:NAME or model:NAME")


def device_from_part(spec: str, part: Part, fingerprint: Fingerprint) -> Device:
    """A device with a part's datasheet figures."""
    return Device(
        spec, part.device_name, ARCHITECTURES[part.capability], part.sm_count, part.l2_bytes,
        part.memory_bytes, part.peak_tflops, part.bandwidth_gbps, fingerprint,
    )  # fmt: skip


def cuda_device_count() -> int:
    """GPUs that torch can use; 0 on a machine without one."""
    return driver.device_count() if _torch_version()[1] else 0


def _cuda_device(spec: str, name: str) -> Device:
    count = cuda_device_count()
    index = digits(name or "0")
    if index is None:
        raise DeviceError(f"device {shown(spec)} is not known; use cuda:N with a number")
    if index >= count:
        remedy = f"use cuda:0 to cuda:{count - 1}" if count else "without a GPU use replay:h200 or model:h200"
        raise DeviceError(f"device {spec!r}: {count} CUDA device(s) here; {remedy}")
    found = driver.properties(index)
    if found.capability not in ARCHITECTURES:
        known = ", ".join(f"sm_{a}{b}" for a, b in ARCHITECTURES)
        raise DeviceError(f"{found.name} is sm_{''.join(map(str, found.capability))}; tunegemm knows {known}")
    part = next((part for part in PARTS.values() if part.device_name == found.name), None)
    return Device(
        spec=f"cuda:{index}",
        name=found.name,
        architecture=ARCHITECTURES[found.capability],
        sm_count=found.sm_count,
        l2_bytes=found.l2_bytes,
        memory_bytes=found.memory_bytes,
        peak_tflops=part.peak_tflops if part else 0.0,
        bandwidth_gbps=part.bandwidth_gbps if part else 0.0,
        fingerprint=current_fingerprint(found.name, found.sm_count, found.capability, real=True),
    )


def current_fingerprint(
    device_name: str, sm_count: int, capability: tuple[int, int], *, real: bool = False
) -> Fingerprint:
    """The fingerprint of a device under this machine's packages and, for a real device, its driver."""
    mig = re.search(r"\bMIG (\S+)", device_name)  # "NVIDIA H200 MIG 1g.18gb"
    torch, cuda = _torch_version()
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
def _torch_version() -> tuple[str, str]:
    """torch's version and the CUDA it was built for, empty for none; without importing it."""
    found = importlib.util.find_spec("torch")
    file = Path(found.origin or "").with_name("version.py") if found else Path()
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


@functools.cache
def even_cut(sm_count: int, cluster_size: int) -> int:
    """Clusters that fit a Hopper chip of so many multiprocessors, at best.

    A cluster lives in one graphics processing cluster. Hopper has 8 of them, cut unevenly by yield, always by
    whole pairs of multiprocessors; the most even cut of 132 is 2 x 18 + 6 x 16, which holds 66 clusters of 2
    and 32 of 4. The driver's own figure may be lower on a less even chip.
    """
    gpcs = 8
    pairs, odd = divmod(sm_count // 2, gpcs)
    sizes = [2 * (pairs + 1)] * odd + [2 * pairs] * (gpcs - odd)
    return max(1, sum(size // cluster_size for size in sizes))


def driver_version() -> str:
    """Ask the kernel module where it answers: starting NVML looks at every GPU of the host."""
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

    def read(self) -> Telemetry:
        """One reading, about 0.1 ms; all None when NVML does not answer."""
        return Telemetry(
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", _CLOCK_SM),
            power_w=None if (mw := self._ask("nvmlDeviceGetPowerUsage")) is None else mw / 1000,
            temperature_c=self._ask("nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
            throttle_reasons=self._throttle_reasons(),
        )

    def energy_mj(self) -> float | None:
        """The board's energy since the driver was loaded; None when NVML does not answer."""
        energy_mj = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if energy_mj is None else float(energy_mj)

    def busy_percent(self) -> int | None:
        """The share of the last second or less in which a kernel of any process ran; None when not known."""
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        return None if rates is None else int(rates.gpu)

    def _ask(self, function: str, *arguments: Any) -> Any:
        if self._handle is None:
            return None
        with suppress(Exception):  # not supported of this device, or by this version
            return getattr(self._nvml, function)(self._handle, *arguments)
        return None

    def _throttle_reasons(self) -> tuple[str, ...]:
        mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons") or 0
        return tuple(name for bit, name in _THROTTLE_REASONS.items() if mask & bit)
