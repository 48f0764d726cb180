"""The kinds of work that `benchmarks.power_roof` meters: kernels, what they do, and how to compile them.

Nothing here needs a GPU. Bytes and flops of a variant are counted from its construction.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tunegemm.errors import TunegemmError

_SOURCE = Path(__file__).with_suffix("").with_name("power_roof.cu")
#: Columns of the accumulator of one instruction, m64 nN k16.
WIDTHS = (64, 96, 128, 160, 192, 208, 256)
#: The same with three consumer warpgroups.
WIDEST_OF_THREE = 192
OPERANDS = ("smem", "registers")
WAITS = ("try", "hint", "spin")
#: Shared memory that a block may have, less the alignment of the ring and its barriers.
_SMEM_BYTES = 232448
_ALIGNMENT_BYTES = 1024
_BARRIER_BYTES = 256
_MOST_STAGES = 8
_STEP_K = 64
_ROW_BYTES = 2 * _STEP_K
_PANEL_BYTES = 64 * 128
_PANELS = 2
#: Warnings by which ptxas says that it makes WGMMA wait, or ignores registers that were asked for.
_SERIAL = ("C7508", "C7510", "C7511", "C7512", "C7514", "C7517")

#: Bytes over which the copies walk, all blocks over all of them. A half of L2 keeps what its multiprocessors
#: read, whichever half it belongs to: all of the first, not all of the second; the third is eight times L2.
FOOTPRINTS = {"near": 8 << 20, "halves": 40 << 20, "dram": 512 << 20}
#: Bytes over which the epilogue's stores walk.
STORES = {"l2": 16 << 20, "dram": 512 << 20}


class RoofError(TunegemmError):
    """A kernel that cannot be built, or a chip that cannot be metered."""


@dataclass(frozen=True)
class Build:
    """One compiled kernel."""

    width: int = 256
    """Columns of the instruction's accumulator, n of m64 nN k16."""
    operand: str = "smem"
    """Where operand A is: ``smem`` or ``registers``."""
    warpgroups: int = 2
    """Consumers, each with 64 rows of the tile."""
    across: int = 1
    """Instructions side by side, for a tile of more columns."""
    cluster: tuple[int, int] = (1, 1)
    """Blocks along m and n: the first number shares B by multicast, the second A."""
    store: bool = False
    """Whether every finished tile is stored."""
    multiply: bool = True
    """False: stages are fetched and released, no more."""
    wait: str = "try"
    """How barriers are waited for: ``try_wait``, the same with a hint of 1 ms, or ``test_wait`` in a loop."""

    def __post_init__(self) -> None:
        for name, allowed in (("width", WIDTHS), ("operand", OPERANDS), ("wait", WAITS)):
            if (value := getattr(self, name)) not in allowed:
                raise RoofError(f"{name} {value!r}: use one of {', '.join(map(str, allowed))}")
        if not 1 <= self.warpgroups <= 3:
            raise RoofError(f"warpgroups {self.warpgroups}: registers are enough for 1, 2 or 3")
        if not self.fits_registers:
            raise RoofError(f"{self.warpgroups} warpgroups of n {self.width}: registers are too few")
        if self.cluster[0] * self.cluster[1] not in (1, 2, 4, 8):
            raise RoofError(f"cluster {self.cluster}: use 1, 2, 4 or 8 blocks")
        if self.store and self.width % 64:
            raise RoofError(f"width {self.width}: tiles are stored in panels of 64 columns")

    @property
    def fits_registers(self) -> bool:
        """Whether ptxas compiles it without spills.

        Four warpgroups start with 128 registers a thread, and no instruction may have more than that leaves
        (C7602), whatever setmaxnreg says later; all accumulators have what setmaxnreg gives.
        """
        widest = WIDEST_OF_THREE if self.warpgroups == 3 else max(WIDTHS)
        return self.width <= widest and self.columns <= 256

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def columns(self) -> int:
        return self.across * self.width

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def step_flops(self) -> int:
        """Of one stage, by one block."""
        return 2 * self.rows * self.columns * _STEP_K if self.multiply else 0

    @property
    def stage_a_bytes(self) -> int:
        return self.rows * _ROW_BYTES if self.operand == "smem" else 0

    @property
    def stage_b_bytes(self) -> int:
        return self.columns * _ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        """What one stage of a block's ring holds."""
        return self.stage_a_bytes + self.stage_b_bytes

    @property
    def share_bytes(self) -> int:
        """What one block reads of L2 for a stage; its neighbours in the cluster read the rest."""
        return self.stage_a_bytes // self.cluster[1] + self.stage_b_bytes // self.cluster[0]

    @property
    def stages(self) -> int:
        return min(_MOST_STAGES, (_SMEM_BYTES - self._other_smem_bytes) // self.stage_bytes)

    @property
    def smem_bytes(self) -> int:
        return self.stages * self.stage_bytes + self._other_smem_bytes

    @property
    def tile_bytes(self) -> int:
        """Of one stored tile, bf16."""
        return 2 * self.rows * self.columns

    @property
    def _other_smem_bytes(self) -> int:
        panels = self.warpgroups * _PANELS * _PANEL_BYTES if self.store else 0
        return panels + _ALIGNMENT_BYTES + _BARRIER_BYTES

    def source(self) -> str:
        """CUDA C++ of the kernel."""
        macros = {
            "WIDTH": self.width, "ACROSS": self.across, "FROM_REGISTERS": int(self.operand == "registers"),
            "STAGES": self.stages, "WARPGROUPS": self.warpgroups,
            "CLUSTER_M": self.cluster[0], "CLUSTER_N": self.cluster[1],
            "STORE": int(self.store), "MULTIPLY": int(self.multiply), "WAIT": WAITS.index(self.wait),
        }  # fmt: skip
        defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
        types = "typedef unsigned long long u64;\ntypedef unsigned int u32;\ntypedef unsigned short u16;\n\n"
        return defines + types + instruction(self.width, self.operand) + "\n" + _SOURCE.read_text()


def instruction(width: int, operand: str) -> str:
    """The device function `multiply_add`: one WGMMA of 64 x `width` x 16, onto `sums` or in their place."""
    count = width // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    if operand == "registers":
        a_type, a_text, scales = "const u32 (&a)[4]", "{%A, %B, %C, %D}", "1, 1, 0"
        inputs = ['"r"(a[0])', '"r"(a[1])', '"r"(a[2])', '"r"(a[3])']
    else:
        a_type, a_text, scales = "u64 a", "%A", "1, 1, 0, 0"
        inputs = ['"l"(a)']
    for letter, index in zip("ABCD", range(count, count + len(inputs)), strict=False):
        a_text = a_text.replace(f"%{letter}", f"%{index}")
    b_index = count + len(inputs)
    return (
        f"__device__ __forceinline__ void multiply_add("
        f"float (&sums)[{count}], {a_type}, u64 b, u32 keep) {{\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{b_index + 1}, 0;\\n"\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {{{sums}}}, {a_text}, %{b_index}, '
        f'p, {scales}; }}"\n'
        f'    : {outputs}\n    : {", ".join(inputs)}, "l"(b), "r"(keep));\n}}\n'
    )


@dataclass(frozen=True)
class Variant:
    """One kind of work that is metered in steady state."""

    build: Build
    loads_percent: int = 0
    """Of the ring's stages, how many are fetched."""
    footprint: str = "near"
    """What the copies walk over: a key of `FOOTPRINTS`."""
    together: bool = False
    """Whether all blocks fetch the same bytes at the same time."""
    tile_steps: int = 64
    """Stages after which the accumulators begin anew: k is 64 times as much."""
    stores: str = "l2"
    """What the stores walk over: a key of `STORES`."""
    blocks: int | None = None
    """Blocks of the grid; None: as many as the chip holds."""
    data: str = "normal"
    """``normal``: random bf16 of a standard normal distribution; ``zeros``."""
    hold: bool = False
    """Whether the blocks only wait for their first stage."""
    again: int = 0
    """Number of a repetition."""

    @property
    def label(self) -> str:
        """What a row is told apart by."""
        build, (along_m, along_n) = self.build, self.build.cluster
        instructions = f"n{build.width}" + f" x{build.across}" * (build.across > 1)
        words = [build.operand, instructions, f"{build.warpgroups} wg"]
        if self.hold:
            words = ["waiting", f"{build.warpgroups} wg", build.wait]
        elif not build.multiply:
            words = ["copies only", f"{build.rows}x{build.columns}"]
        if build.cluster != (1, 1):
            words.append(f"cluster {along_m}x{along_n}")
        if self.loads_percent:
            words.append(f"{self.footprint} {self.loads_percent} %" + (" together" if self.together else ""))
        if build.store:
            words.append(f"stores k {64 * self.tile_steps} to {self.stores}")
        elif self.tile_steps != 64:
            words.append(f"k {64 * self.tile_steps}")
        if build.wait != "try" and not self.hold:
            words.append(build.wait)
        words += [f"{self.blocks} blocks"] * (self.blocks is not None) + ["zeros"] * (self.data == "zeros")
        return ", ".join([*words, *([f"again {self.again}"] if self.again else [])])

    def counts(self, blocks: int, steps: int) -> dict[str, float]:
        """What one launch of so many blocks and stages does, by construction: flops and bytes."""
        stages = blocks * steps
        fetched = stages * self.loads_percent / 100
        tiles = stages // self.tile_steps if self.build.store else 0
        return {
            "flops": float(stages * self.build.step_flops),
            "filled_bytes": fetched * self.build.stage_bytes,
            "l2_read_bytes": fetched * self.build.share_bytes,
            "stored_bytes": float(tiles * self.build.tile_bytes),
        }


def variants() -> list[Variant]:
    """All that is metered, in the order of the table."""
    return list(dict.fromkeys(_variants()))


def _variants() -> Iterator[Variant]:
    wide, flat = Build(), Build(128)
    large = Build(128, warpgroups=3, across=2)  # 192x256
    for operand in OPERANDS:
        yield from (Variant(Build(width, operand)) for width in WIDTHS)
        for warpgroups in (1, 3):
            widest = WIDEST_OF_THREE if warpgroups == 3 else max(WIDTHS)
            widths = (64, 128, widest) if operand == "smem" else (widest,)
            yield from (Variant(Build(width, operand, warpgroups)) for width in widths)
    yield from (Variant(build) for build in (large, Build(128, across=2)))
    yield from (Variant(wide, again=number) for number in (1, 2))
    yield Variant(wide, data="zeros")
    yield from (Variant(wide, blocks=blocks) for blocks in (33, 66, 99))
    yield Variant(wide, 50, blocks=66)
    yield from (Variant(wide, percent) for percent in (25, 50, 75, 100))
    yield from (Variant(wide, percent, "halves") for percent in (50, 100))
    yield from (Variant(wide, percent, "dram") for percent in (25, 50, 100))
    yield from (Variant(wide, 100, footprint, together=True) for footprint in ("near", "dram"))
    yield from (Variant(build, 100) for build in (flat, Build(192), large, Build(operand="registers")))
    for cluster in ((2, 1), (1, 2), (2, 2), (4, 1)):
        yield from (Variant(replace(wide, cluster=cluster), percent) for percent in (0, 50, 100))
    for cluster in ((2, 1), (2, 2)):
        yield Variant(replace(wide, cluster=cluster), 100, "halves")
    for build, steps in ((wide, 8), (wide, 64), (replace(wide, cluster=(2, 1)), 64), (flat, 8)):
        yield from (Variant(replace(build, store=True), percent, tile_steps=steps) for percent in (0, 100))
    yield Variant(replace(wide, store=True), tile_steps=8, stores="dram")
    for cluster in ((1, 1), (2, 1), (2, 2)):
        copies = replace(wide, cluster=cluster, multiply=False)
        footprints = FOOTPRINTS if cluster == (1, 1) else ("near", "dram")
        yield from (Variant(copies, 100, footprint) for footprint in footprints)
    yield from (Variant(replace(wide, wait=wait), hold=True) for wait in WAITS)
    yield Variant(wide, hold=True, blocks=1)
    yield from (Variant(replace(wide, wait=wait), 100) for wait in ("hint", "spin"))


def compile_all(builds: list[Build], folder: Path) -> dict[Build, Path]:
    """The cubin of each build, from the folder or compiled into it, as many at a time as there are cores.

    Raises RoofError when a kernel does not compile as meant.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(builds, pool.map(lambda build: compile_one(build, folder), builds), strict=True))


def compile_one(build: Build, folder: Path) -> Path:
    """The build's cubin, named by the digest of its source."""
    text = build.source()
    cubin = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.cubin"
    if cubin.exists():
        return cubin
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        raise RoofError("nvcc is not on PATH; install CUDA's toolkit, 12.3 or later")
    source, temporary = cubin.with_suffix(".cu"), cubin.with_suffix(".part")
    source.write_text(text)
    command = [
        nvcc, "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-O3", "-Xptxas=-v",
        "-o", str(temporary), str(source),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RoofError(f"nvcc on {build}: {done.stderr.strip().splitlines()[-1]}")
    if told := [line for line in done.stderr.splitlines() if _is_bad(line)]:
        raise RoofError(f"ptxas on {build}: {told[0].strip()}")
    temporary.replace(cubin)
    return cubin


def _is_bad(line: str) -> bool:
    spills = "bytes spill stores" in line and " 0 bytes spill stores" not in line
    return spills or any(code in line for code in _SERIAL)
