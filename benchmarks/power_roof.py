"""What a Hopper chip draws for one multiplication, one byte, one second: the table behind the power cap.

    python -m benchmarks.power_roof              # writes results/GPU/power_roof.json, some four minutes
    python -m benchmarks.power_roof --only near  # variants whose label has the words, into the same file
    python -m benchmarks.power_roof --compile    # the kernels alone; needs nvcc and no GPU
    python -m benchmarks.power_roof --fit FILE   # the fit alone, on a file that is there

Kernels of known work (benchmarks/power_variants.py) run one after another, each in steady state, while NVML's
energy counter is read; what each term of work costs is fitted to all of them (benchmarks/power_fit.py). With
`ncu` on PATH the bytes that L2 and device memory moved are counted first; without, they are those of the
kernels' construction, and bytes that cross between the halves of L2 are no term.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.counters import METRICS, rows_of
from benchmarks.power_fit import FitError, fit, table
from benchmarks.power_variants import FOOTPRINTS, STORES, Build, RoofError, Variant, compile_all, variants
from benchmarks.results import Results, meta, results_path
from tunegemm.describe.device import Device, TelemetryReader, find_device
from tunegemm.errors import TunegemmError

METHOD = (
    "after five seconds of one variant each runs alone, in shuffled order, launches of some 10 ms without a "
    "pause: first warm_s, then from one step of NVML's energy counter to another at least window_s later; "
    "launches counted by events over that window; SM clock = cycles over nanoseconds, both read inside the "
    "kernel, mean over the window; operands normal(0, 1) in bf16; L2, crossing and DRAM bytes from Nsight "
    "Compute where counted says so (one launch after three, caches not flushed), else by construction"
)
_ENTRY = b"roof"
#: What a launch takes, so that the host has time to read NVML while some are queued.
LAUNCH_MS = 10.0
_HOLD_NS = 10_000_000
_QUEUED = 4
_TRIAL_STEPS = 512
_SECTOR_BYTES = 32
#: Shared memory of which a multiprocessor has room for one block's only.
_ONE_BLOCK_BYTES = 200 << 10
_FIRST_WARM_S = 5.0
_COUNTING_SECONDS = 280


class Work(ctypes.Structure):
    """The kernel's argument, as power_roof.cu declares it."""

    _fields_ = (
        ("source", ctypes.c_uint64),
        ("stored", ctypes.c_uint64),
        ("meter", ctypes.c_uint64),
        ("footprint_bytes", ctypes.c_uint64),
        ("hold_ns", ctypes.c_uint64),
        ("steps", ctypes.c_uint32),
        ("tile_steps", ctypes.c_uint32),
        ("loads_percent", ctypes.c_uint32),
        ("together", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Window:
    """What was seen of one kind of work from one step of the energy counter to another."""

    seconds: float
    joules: float
    launches_per_s: float
    sm_clock_mhz: float | None
    """NVML's, mean of the samples."""
    temperature_c: float | None
    throttle_reasons: tuple[str, ...]


@dataclass
class EnergyCounter:
    """NVML's total energy, which moves in steps of 20 to 100 ms."""

    reader: TelemetryReader
    last_mj: float | None = None

    def step_mj(self) -> float | None:
        """The new reading if the counter has moved since the last call; None else."""
        now_mj = self.reader.energy_mj()
        if now_mj is None:
            raise RoofError("NVML tells no energy on this GPU; there is nothing to fit")
        moved = self.last_mj is not None and now_mj != self.last_mj
        self.last_mj = now_mj
        return now_mj if moved else None


@dataclass
class Samples:
    """The chip's state over a window."""

    reader: TelemetryReader
    every_s: float = 0.05
    clocks_mhz: list[int] = field(default_factory=list)
    temperatures_c: list[int] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)
    next_s: float = 0.0

    def take(self, now_s: float) -> None:
        """Reads the chip, unless it did so a moment ago."""
        if now_s < self.next_s:
            return
        self.next_s = now_s + self.every_s
        now = self.reader.read()
        self.clocks_mhz += [now.sm_clock_mhz] if now.sm_clock_mhz is not None else []
        self.temperatures_c += [now.temperature_c] if now.temperature_c is not None else []
        self.reasons.update(now.throttle_reasons)


class Chip:
    """One GPU with the operands and kernels of all variants."""

    def __init__(self, device: Device, cubins: Mapping[Build, Path]) -> None:
        import torch
        from cuda.bindings import driver

        self.device, self._driver, self._torch, self._cubins = device, driver, torch, cubins
        self._torch_device = torch.device("cuda", device.index)
        torch.cuda.set_device(self._torch_device)
        torch.manual_seed(0)
        elements = max(FOOTPRINTS.values()) // 2
        normal = torch.randn(elements, dtype=torch.bfloat16, device=self._torch_device)
        self.sources = {"normal": normal, "zeros": torch.zeros_like(normal[: min(FOOTPRINTS.values()) // 2])}
        self.stored = normal.new_zeros(max(STORES.values()) // 2)
        self.meter = torch.zeros(4, dtype=torch.int64, device=self._torch_device)
        self._functions: dict[Build, Any] = {}

    def blocks(self, variant: Variant) -> int:
        """Blocks of the variant's grid: whole clusters, one block per multiprocessor."""
        build = variant.build
        most = self.device.resident_clusters(build.cluster[0] * build.cluster[1])
        most *= build.cluster[0] * build.cluster[1]
        return most if variant.blocks is None else min(most, variant.blocks)

    def launcher(self, variant: Variant, steps: int) -> Callable[[], None]:
        """Launches the variant on torch's stream."""
        driver, build = self._driver, variant.build
        work = self._work(variant, steps)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.blocks(variant), 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = build.threads, 1, 1
        config.sharedMemBytes = build.smem_bytes
        config.hStream = self._torch.cuda.current_stream().cuda_stream
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x = build.cluster[0] * build.cluster[1]
        cluster.value.clusterDim.y, cluster.value.clusterDim.z = 1, 1
        config.attrs, config.numAttrs = [cluster], 1
        function = self._function(build)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(work))

        def launch(keep: Work = work) -> None:
            self._check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(arguments), 0))

        return launch

    def _work(self, variant: Variant, steps: int) -> Work:
        source = self.sources[variant.data]
        slots = STORES[variant.stores] // variant.build.tile_bytes
        return Work(
            source.data_ptr(), self.stored.data_ptr(), self.meter.data_ptr(), FOOTPRINTS[variant.footprint],
            _HOLD_NS if variant.hold else 0, steps, variant.tile_steps, variant.loads_percent,
            int(variant.together), slots,
        )  # fmt: skip

    def _function(self, build: Build) -> Any:
        if build not in self._functions:
            driver = self._driver
            module = self._check(driver.cuModuleLoad(str(self._cubins[build]).encode()))
            function = self._check(driver.cuModuleGetFunction(module, _ENTRY))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(driver.cuFuncSetAttribute(function, attribute, build.smem_bytes))
            self._functions[build] = function
        return self._functions[build]

    def _check(self, answer: tuple[Any, ...]) -> Any:
        error, *values = answer
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RoofError(f"the driver answered {error.name}")
        return values[0] if values else None

    def steps_of_launch(self, variant: Variant) -> int:
        """Stages that take a launch some 10 ms, whole tiles."""
        if variant.hold:
            return 1
        milliseconds = [self.launch_ms(self.launcher(variant, _TRIAL_STEPS)) for _ in range(2)][-1]
        tiles = _TRIAL_STEPS * LAUNCH_MS / milliseconds / variant.tile_steps
        return max(1, round(tiles)) * variant.tile_steps

    def launch_ms(self, launch: Callable[[], None]) -> float:
        """How long one launch takes, by events."""
        before, after = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        launch()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after))

    def measure(self, launch: Callable[[], None] | None, warm_s: float, window_s: float) -> Window:
        """Launches without a pause, warms up, and meters from one step of the counter to another.

        launch None: the chip is left alone.
        """
        events: deque[Any] = deque()
        reader = TelemetryReader(self.device.index)
        counter, samples = EnergyCounter(reader), Samples(reader)
        started_s, done = time.monotonic(), 0
        first: tuple[float, float, int, Any] | None = None
        while True:
            while launch is not None and len(events) <= _QUEUED:
                launch()
                events.append(self._torch.cuda.Event(enable_timing=True))
                events[-1].record()
            while len(events) > 1 and events[1].query():  # events[0] is the last known to be done
                events.popleft()
                done += 1
            now_s = time.monotonic()
            if now_s - started_s < warm_s:
                continue
            samples.take(now_s)
            if (energy_mj := counter.step_mj()) is None:
                time.sleep(0.0005)
            elif first is None:
                first = (now_s, energy_mj, done, events[0] if events else None)
                self.meter.zero_()
                samples = Samples(reader)
            elif now_s - first[0] >= window_s:
                break
        last = events[0] if events else None
        self._torch.cuda.synchronize()
        launches_per_s = 0.0 if last is None else 1e3 * (done - first[2]) / first[3].elapsed_time(last)
        return Window(
            now_s - first[0], (energy_mj - first[1]) * 1e-3, launches_per_s,
            statistics.mean(samples.clocks_mhz) if samples.clocks_mhz else None,
            statistics.mean(samples.temperatures_c) if samples.temperatures_c else None,
            tuple(sorted(samples.reasons)),
        )  # fmt: skip

    def kernel_clock_mhz(self) -> float | None:
        """Mean SM clock that block 0 had since the meter was set to zero."""
        cycles, nanoseconds = self.meter[:2].tolist()
        return 1e3 * cycles / nanoseconds if nanoseconds else None

    def error(self, build: Build) -> float:
        """||D - reference|| / ||reference|| of a tile that a build with an epilogue stores, in fp64."""
        torch = self._torch
        variant = Variant(build, tile_steps=build.stages)
        self.stored.zero_()
        self.launcher(variant, build.stages)()
        torch.cuda.synchronize()
        ring = self.sources["normal"].view(torch.int16)[: build.stages * build.stage_bytes // 2]
        stages = ring.view(torch.bfloat16).double().view(build.stages, -1, 64)
        stages = _unswizzled(torch, stages)
        a, b = stages[:, : build.rows], stages[:, build.rows :]
        wanted = torch.einsum("smk,snk->mn", a, b)
        panels = self.stored[: build.rows * build.columns].double().view(-1, 64, 64)
        tile = _unswizzled(torch, panels).view(build.warpgroups, build.columns // 64, 64, 64)
        found = tile.transpose(1, 2).reshape(build.rows, build.columns)
        return float((found - wanted).norm() / wanted.norm())

    def latency_cycles(self, lines: int, stride_bytes: int) -> Any:
        """Cycles of a read that hits L2, by block (rows, one per multiprocessor) and line."""
        torch, driver = self._torch, self._driver
        blocks = self.device.sm_count
        cycles = torch.zeros(blocks, lines, dtype=torch.int32, device=self._torch_device)
        multiprocessor = torch.zeros(blocks, dtype=torch.int32, device=self._torch_device)
        any_cubin = next(iter(self._cubins.values()))
        module = self._check(driver.cuModuleLoad(str(any_cubin).encode()))
        function = self._check(driver.cuModuleGetFunction(module, b"latency"))
        source, word = self.sources["normal"].data_ptr(), ctypes.c_uint32
        values = (source, lines, stride_bytes, cycles.data_ptr(), multiprocessor.data_ptr())
        arguments = (values, (ctypes.c_void_p, word, word, ctypes.c_void_p, ctypes.c_void_p))
        stream = torch.cuda.current_stream().cuda_stream
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._check(driver.cuFuncSetAttribute(function, attribute, _ONE_BLOCK_BYTES))
        self._check(
            driver.cuLaunchKernel(function, blocks, 1, 1, 32, 1, 1, _ONE_BLOCK_BYTES, stream, arguments, 0)
        )
        return cycles[multiprocessor.argsort()].cpu()


def _unswizzled(torch: Any, rows: Any) -> Any:
    """Rows of 64 bf16 whose eight chunks of 16 bytes are at their index xor the row's last three bits."""
    count = rows.shape[-2]
    row = torch.arange(count, device=rows.device)[:, None]
    chunk = torch.arange(8, device=rows.device)[None, :] ^ (row % 8)
    chunks = rows.view(*rows.shape[:-1], 8, 8)
    return chunks[..., row, chunk, :].reshape(rows.shape)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input, no GPU or no nvcc, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.power_roof", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", help="words that the labels of the variants to measure have")
    parser.add_argument("--warm-s", type=float, default=1.5, help="seconds of a variant before it is metered")
    parser.add_argument("--window-s", type=float, default=1.0, help="seconds that it is metered, at least")
    parser.add_argument(
        "--build", type=Path, default=Path("build/power_roof"), help="folder of the compiled kernels"
    )
    parser.add_argument("--compile", action="store_true", help="compile the kernels, and no more")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit this result file anew, and no more")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--counted", action="store_true", help=argparse.SUPPRESS)  # the one that ncu profiles
    options = parser.parse_args(arguments)
    try:
        if options.fit:
            return refit(options.fit)
        chosen = [v for v in variants() if not options.only or options.only in v.label]
        if not chosen:
            raise RoofError(f"no label has {options.only!r}; one is {variants()[0].label!r}")
        if options.compile:
            compile_all(list(dict.fromkeys(variant.build for variant in chosen)), options.build)
            return 0
        device = find_device(options.device)
        if device.architecture.capability != (9, 0):
            raise RoofError(f"{device.name}: the kernels are for Hopper, sm_90a")
        cubins = compile_all(list(dict.fromkeys(variant.build for variant in chosen)), options.build)
        chip = Chip(device, cubins)
        if options.counted:
            run_for_counters(chip, chosen)
            return 0
        run(chip, chosen, options)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(chip: Chip, chosen: list[Variant], options: argparse.Namespace) -> None:
    """Checks, counts and measures the variants, writes each row as it comes, and fits."""
    path = results_path(options.out, chip.device, "power_roof.json")
    told = {"warm_s": options.warm_s, "window_s": options.window_s}
    results = Results(path, meta(chip.device, METHOD) | told)
    results.summary |= results.earlier_summary
    for build in dict.fromkeys(v.build for v in chosen if v.build.store and v.build.cluster == (1, 1)):
        if (error := chip.error(build)) > 0.01:
            raise RoofError(f"{build}: its tile is wrong by {error:.3g}")
    results.summary["latency"] = latencies(chip)
    counted = count(chosen, options)
    rest = chip.measure(None, options.warm_s, options.window_s)
    results.put({"workload": "nothing runs", "power_w": round(rest.joules / rest.seconds, 2), **state(rest)})
    chip.measure(chip.launcher(chosen[0], chip.steps_of_launch(chosen[0])), _FIRST_WARM_S, 0.0)
    for variant in random.Random(0).sample(chosen, len(chosen)):
        row = measured(chip, variant, counted.get(variant.label, {}), options)
        results.put(row)
        print(
            f"{row['workload']}: {row['power_w']:.0f} W, {row['sm_clock_mhz']:.0f} MHz, "
            f"{row['tflops']:.0f} TFLOP/s, {row['filled_tbps']:.2f} TB/s filled", flush=True,
        )  # fmt: skip
    try:
        refit(path)
    except FitError as error:  # of some variants alone
        print(error)
    print(f"written: {path}")


def measured(
    chip: Chip, variant: Variant, counted: Mapping[str, float], options: argparse.Namespace
) -> dict[str, Any]:
    """The variant's row: what it is, what it drew, and how much of each kind of work it did in a second."""
    steps, blocks = chip.steps_of_launch(variant), chip.blocks(variant)
    window = chip.measure(chip.launcher(variant, steps), options.warm_s, options.window_s)
    clock_mhz = chip.kernel_clock_mhz() or window.sm_clock_mhz or 0.0
    per_launch = work_of_launch(variant, blocks, steps, counted, chip.device.l2_bytes)
    per_s = {name: amount * window.launches_per_s for name, amount in per_launch.items()}
    build = variant.build
    return {
        "workload": variant.label,
        "width": build.width, "operand": build.operand, "warpgroups": build.warpgroups,
        "across": build.across, "cluster": list(build.cluster), "store": build.store, "wait": build.wait,
        "multiply": build.multiply, "loads_percent": variant.loads_percent, "footprint": variant.footprint,
        "together": variant.together, "k": 64 * variant.tile_steps, "stores": variant.stores,
        "data": variant.data, "hold": variant.hold, "again": variant.again, "stages": build.stages,
        "blocks": blocks, "launch_ms": round(1e3 / window.launches_per_s, 4),
        "power_w": round(window.joules / window.seconds, 2), **state(window),
        "sm_clock_mhz": round(clock_mhz, 1), "tflops": round(per_s["flops"] / 1e12, 2),
        "filled_tbps": round(per_s["filled_bytes"] / 1e12, 4),
        "per_s": {name: float(f"{amount:.6g}") for name, amount in per_s.items()}
        | {"sm_cycles": float(f"{blocks * clock_mhz * 1e6:.6g}")},
        "counted": bool(counted),
    }  # fmt: skip


def state(window: Window) -> dict[str, Any]:
    """The columns that say how long was metered, and the chip's state meanwhile."""
    return {
        "window_s": round(window.seconds, 3),
        "joules": round(window.joules, 3),
        "nvml_clock_mhz": None if window.sm_clock_mhz is None else round(window.sm_clock_mhz, 1),
        "temperature_c": None if window.temperature_c is None else round(window.temperature_c, 1),
        "throttle_reasons": list(window.throttle_reasons),
    }


def work_of_launch(
    variant: Variant, blocks: int, steps: int, counted: Mapping[str, float], l2_bytes: int
) -> dict[str, float]:
    """Flops and bytes of one launch; `counted` has bytes per stage of a block, as the hardware counted."""
    work = variant.counts(blocks, steps)
    if counted:
        work |= {name: amount * blocks * steps for name, amount in counted.items()}
        return work
    misses = variant.loads_percent and FOOTPRINTS[variant.footprint] > 4 * l2_bytes
    stores_miss = variant.build.store and STORES[variant.stores] > 4 * l2_bytes
    dram = (work["l2_read_bytes"] if misses else 0.0) + (work["stored_bytes"] if stores_miss else 0.0)
    return work | {"crossing_bytes": 0.0, "dram_bytes": dram}


def latencies(chip: Chip) -> dict[str, Any]:
    """Whether a line that L2 holds is nearer to some multiprocessors than to others.

    Every multiprocessor reads each of 4096 lines, 2 KiB apart, five times; the least of the last three
    counts.
    """
    cycles = chip.latency_cycles(4096, 2048).double()
    one = cycles[0].sort().values
    percentiles = {str(p): float(one[round(p / 100 * (len(one) - 1))]) for p in (1, 10, 25, 50, 75, 90, 99)}
    centred = cycles - cycles.mean(0, keepdim=True)  # what a line's place costs all of them is no distance
    norms = centred.norm(dim=1).clamp(min=1e-9)
    likeness = centred @ centred[0] / (norms * norms[0])
    return {
        "lines": 4096,
        "cycles_of_one_sm_by_percentile": percentiles,
        "sms_whose_near_lines_are_those_of_the_first": int((likeness > 0.5).sum()),
        "sms_whose_near_lines_are_others": int((likeness < -0.5).sum()),
    }


def count(chosen: list[Variant], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Bytes per stage of a block that L2 read, passed between its halves, and device memory moved, by label.

    Nothing where `ncu` is not on PATH, or does not answer.
    """
    moving = [v for v in chosen if v.loads_percent or v.build.store]
    if not moving:
        return {}
    arguments = ["--counted", "--device", options.device, "--build", str(options.build)]
    arguments += ["--only", options.only] if options.only else []
    kernels, told = counted_kernels("benchmarks.power_roof", arguments)
    if len(kernels) != len(moving):
        print(f"ncu counted {len(kernels)} of {len(moving)} kernels; bytes by construction", file=sys.stderr)
        return {}
    return {
        variant.label: counted_bytes(kernel, told[variant.label])
        for variant, kernel in zip(moving, kernels, strict=True)
    }


def counted_kernels(module: str, arguments: list[str]) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The counters of each kernel that a program launches between profiler start and stop.

    Caches stay as they are. Beside them what the program prints as a line of JSON.
    """
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        return [], {}
    command = [
        ncu, "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--csv",
        "--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS.values()),
        sys.executable, "-m", module, *arguments,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COUNTING_SECONDS, env=os.environ, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"ncu on {module} took more than {_COUNTING_SECONDS} s", file=sys.stderr)
        return [], {}
    told = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    if done.returncode or told is None:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        print(f"ncu on {module} failed: {last}", file=sys.stderr)
        return [], {}
    return rows_of(done.stdout), json.loads(told)


def counted_bytes(kernel: Mapping[str, float], stages: int) -> dict[str, float]:
    """The counters of one launch as bytes per stage of a block, or per launch (`stages` 1)."""
    return {
        "arrived_bytes": kernel["l2_read_bytes"] / stages,
        "l2_read_bytes": kernel["l2_read_sectors"] * _SECTOR_BYTES / stages,
        "crossing_bytes": kernel["l2_fabric_sectors"] * _SECTOR_BYTES / stages,
        "dram_bytes": (kernel["dram_read_bytes"] + kernel["dram_write_bytes"]) / stages,
    }


def run_for_counters(chip: Chip, chosen: list[Variant]) -> None:
    """Runs in the process that ncu profiles: of each variant that moves bytes one launch after three."""
    import torch

    stages = {}
    for variant in (v for v in chosen if v.loads_percent or v.build.store):
        launch = chip.launcher(variant, _TRIAL_STEPS)
        for _ in range(3):
            launch()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        launch()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        stages[variant.label] = chip.blocks(variant) * _TRIAL_STEPS
    print(json.dumps(stages), flush=True)


def refit(path: Path) -> int:
    """Fits the rows of a result file, writes the table into it and prints it."""
    try:
        data = json.loads(path.read_text())
        rows, told = data["rows"], data["meta"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RoofError(f"{path}: not a result file ({error})") from None
    results = Results(path, told)
    results.meta = told
    results.summary = results.earlier_summary
    found = fit(rows)
    results.summary["fit"] = found.asdict()
    for row in rows:
        row.pop("terms_w", None)
        if terms := found.terms_w.get(row["workload"]):
            row["fitted_w"] = round(sum(terms.values()), 1)
            row["terms_w"] = {term: round(watts, 1) for term, watts in terms.items() if watts >= 0.05}
        else:
            row.pop("fitted_w", None)
    results.put(*rows)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
