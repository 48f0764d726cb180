"""The limits of NVIDIA's GPUs since Ampere, by compute capability, and datasheet figures of some parts."""

from __future__ import annotations

from dataclasses import dataclass

_KIB = 1024


@dataclass(frozen=True)
class Architecture:
    """Limits that hold for every part of one compute capability.

    Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; CCCL's
    `cuda::arch_traits` for 8.7, 10.3, 11.0 and 12.1; and the target notes of the PTX ISA for the
    instructions. The CuTe DSL also lists each architecture's shared memory; a test compares both lists.
    """

    capability: tuple[int, int]
    """Major and minor compute capability."""
    name: str
    """The generation."""
    compile_target: str
    """The compilers' name, such as ``sm_90a``."""
    smem_bytes_per_block: int
    """Largest shared memory of one block, after opting in."""
    smem_bytes_per_sm: int
    """Shared memory of one multiprocessor. Each resident block also costs 1 KiB of it."""
    threads_per_sm: int
    """Most resident threads."""
    max_cluster_size: int
    """Most blocks of a portable cluster; 1 where there are no clusters."""
    flops_per_cycle: int
    """Dense bf16 FLOP per cycle of the tensor cores of one multiprocessor, with fp32 sums (the datasheet's
    rate over multiprocessors and boost clock). GeForce parts do half of it up to Ada and in 12.0."""
    fp8: bool = True
    """Whether its tensor cores multiply fp8."""
    fp4: bool = False
    """Whether its tensor cores multiply fp4."""
    tma: bool = False
    """Whether it has the Tensor Memory Accelerator."""
    wgmma: bool = False
    """Whether a warpgroup multiplies from shared memory (wgmma, only on sm_90a)."""
    tcgen05: bool = False
    """Whether it has tensor memory, and tcgen05.mma."""
    registers_per_sm: int = 65536
    """32-bit registers of one multiprocessor."""
    registers_per_thread: int = 255
    """Most registers one thread can address."""
    threads_per_block: int = 1024
    """Most threads of one block."""

    @property
    def short_name(self) -> str:
        """Such as ``sm_90``."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def number(self) -> int:
        """The capability as Triton writes it, such as 90."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def instructions(self) -> tuple[str, ...]:
        """The instructions in which architectures differ for kernels, in words; all have mma.sync and
        cp.async."""
        flags = {
            "fp8": self.fp8,
            "fp4": self.fp4,
            "TMA": self.tma,
            "wgmma": self.wgmma,
            "tcgen05": self.tcgen05,
        }
        return tuple(name for name, has in flags.items() if has)

    def rate(self, device_name: str) -> int:
        """The `flops_per_cycle` of a part with this product name."""
        halved = "GeForce" in device_name and self.capability in _HALVED_GEFORCE
        return self.flops_per_cycle // 2 if halved else self.flops_per_cycle


_HALVED_GEFORCE = {(8, 6), (8, 9), (12, 0)}

#: Shared memory of a block and of a multiprocessor.
_SMALL, _AMPERE, _LARGE = ((kib * _KIB, (kib + 1) * _KIB) for kib in (99, 163, 227))

ARCHITECTURES: dict[tuple[int, int], Architecture] = {
    architecture.capability: architecture
    for architecture in (
        Architecture((8, 0), "Ampere", "sm_80", *_AMPERE, 2048, 1, 2048, fp8=False),
        Architecture((8, 6), "Ampere", "sm_86", *_SMALL, 1536, 1, 1024, fp8=False),
        Architecture((8, 7), "Ampere", "sm_87", *_AMPERE, 1536, 1, 2048, fp8=False),
        Architecture((8, 9), "Ada", "sm_89", *_SMALL, 1536, 1, 1024),
        Architecture((9, 0), "Hopper", "sm_90a", *_LARGE, 2048, 8, 4096, True, False, True, True),
        Architecture(
            (10, 0), "Blackwell", "sm_100a", *_LARGE, 2048, 8, 8192, fp4=True, tma=True, tcgen05=True
        ),
        Architecture(
            (10, 3), "Blackwell", "sm_103a", *_LARGE, 2048, 8, 8192, fp4=True, tma=True, tcgen05=True
        ),
        Architecture(
            (11, 0), "Blackwell", "sm_110a", *_LARGE, 1536, 8, 8192, fp4=True, tma=True, tcgen05=True
        ),
        Architecture((12, 0), "Blackwell", "sm_120a", *_SMALL, 1536, 8, 1024, True, True, True),
        Architecture((12, 1), "Blackwell", "sm_121a", *_SMALL, 1536, 8, 1024, True, True, True),
    )
}


def of_target(compile_target: str) -> Architecture:
    """The architecture with this compiler name."""
    return next(
        architecture
        for architecture in ARCHITECTURES.values()
        if architecture.compile_target == compile_target
    )


@dataclass(frozen=True)
class Part:
    """Datasheet figures of one product, for the roofline and for `model:NAME`."""

    device_name: str
    """The name that CUDA reports."""
    capability: tuple[int, int]
    sm_count: int
    peak_tflops: float
    """Dense bf16/fp16 tensor throughput with fp32 sums, TFLOP/s."""
    bandwidth_gbps: float
    """Device memory bandwidth, GB/s."""
    l2_bytes: int
    memory_bytes: int
    source: str = ""
    """The document by NVIDIA that gives the figures."""
    compared: str = ""
    """The figures that were compared with a public copy of the document, or with readings on such a card."""


def _part(
    name: str, capability: tuple[int, int], sm_count: int, tflops: float, gbps: float, l2_mib: float, gb: int,
    source: str, compared: str,
) -> Part:  # fmt: skip
    l2_bytes, memory_bytes = int(l2_mib * _KIB**2), gb * 10**9
    name = name if name == "Orin" else f"NVIDIA {name}"
    return Part(name, capability, sm_count, tflops, gbps, l2_bytes, memory_bytes, source, compared)


#: Dense rates without sparsity. For Orin, Thor and GB10 NVIDIA publishes only sparse INT8 or FP4 rates; the
#: dense bf16 rate is a quarter or an eighth of these.
PARTS: dict[str, Part] = {
    "h200": _part("H200", (9, 0), 132, 989.4, 4800, 60, 141, "H200 datasheet", "bf16, GB/s"),
    "h100-sxm": _part(
        "H100 80GB HBM3", (9, 0), 132, 989.4, 3350, 50, 80, "H100 whitepaper", "SMs, bf16, GB/s, L2"
    ),
    "h100-pcie": _part("H100 PCIe", (9, 0), 114, 756.5, 2039, 50, 80, "H100 whitepaper", "SMs, bf16, L2"),
    "h100-nvl": _part("H100 NVL", (9, 0), 132, 835.0, 3938, 50, 94, "H100 NVL datasheet", "SMs"),
    "a100-sxm-80gb": _part(
        "A100-SXM4-80GB", (8, 0), 108, 312.0, 2039, 40, 80, "A100 datasheet", "SMs, bf16, L2"
    ),
    "a100-sxm-40gb": _part(
        "A100-SXM4-40GB", (8, 0), 108, 312.0, 1555, 40, 40, "A100 whitepaper", "SMs, bf16, GB/s, L2"
    ),
    "a100-pcie-80gb": _part(
        "A100 80GB PCIe", (8, 0), 108, 312.0, 1935, 40, 80, "A100 datasheet", "SMs, bf16, L2"
    ),
    "a10": _part("A10", (8, 6), 72, 125.0, 600, 6, 24, "A10 datasheet", "SMs, GB/s, L2"),
    "a40": _part("A40", (8, 6), 84, 149.7, 696, 6, 48, "A40 datasheet", "SMs, bf16, GB/s"),
    "rtx3060": _part("GeForce RTX 3060", (8, 6), 28, 25.5, 360, 3, 12, "GA10x whitepaper", "SMs, GB/s, L2"),
    "rtx3090": _part("GeForce RTX 3090", (8, 6), 82, 71.0, 936, 6, 24, "GA102 whitepaper", "L2"),
    "orin": _part("Orin", (8, 7), 16, 42.5, 204.8, 4, 64, "Jetson Orin brief", ""),
    "l4": _part("L4", (8, 9), 58, 121.0, 300, 48, 24, "L4 datasheet", ""),
    "l40s": _part("L40S", (8, 9), 142, 362.0, 864, 96, 48, "L40S datasheet", "SMs, bf16, GB/s, L2"),
    "rtx4060": _part("GeForce RTX 4060", (8, 9), 24, 30.2, 272, 24, 8, "Ada whitepaper", "SMs, GB/s, L2"),
    "rtx4090": _part("GeForce RTX 4090", (8, 9), 128, 165.2, 1008, 72, 24, "Ada whitepaper", "SMs, GB/s"),
    "b200": _part("B200", (10, 0), 148, 2250.0, 8000, 126, 180, "HGX B200 datasheet", "SMs, bf16, GB/s, L2"),
    "b300": _part("B300 SXM6 AC", (10, 3), 148, 2250.0, 8000, 126, 270, "HGX B300 datasheet", "GB/s"),
    "thor": _part("Thor", (11, 0), 20, 258.8, 273, 32, 128, "Jetson Thor brief", "SMs, bf16, L2"),
    "rtx5090": _part(
        "GeForce RTX 5090", (12, 0), 170, 209.5, 1792, 96, 32, "RTX Blackwell whitepaper", "SMs, GB/s, L2"
    ),
    "rtx-pro-6000": _part(
        "RTX PRO 6000 Blackwell Workstation Edition",
        (12, 0),
        188,
        503.8,
        1792,
        128,
        96,
        "RTX Blackwell PRO whitepaper",
        "SMs, GB/s, L2",
    ),
    "gb10": _part("GB10", (12, 1), 48, 125.0, 273, 24, 128, "DGX Spark datasheet", "SMs, bf16, GB/s"),
}


def part_named(device_name: str) -> Part | None:
    """The part with this CUDA name; None if its datasheet is not listed here."""
    return next((part for part in PARTS.values() if part.device_name == device_name), None)


#: Names of parts with several variants, mapped to the default variant.
ALIASES = {"a100": "a100-sxm-80gb", "h100": "h100-sxm", "dgx-spark": "gb10"}
