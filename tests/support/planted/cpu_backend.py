"""A backend that measures on CPU tensors, and kernel families that misbehave on demand.

The measuring process imports this module by name; what runs is the worker's real protocol in real processes.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import torch

from tunegemm.describe.device import Device
from tunegemm.describe.epilogue import Epilogue
from tunegemm.describe.space import Candidate
from tunegemm.errors import ArtifactError
from tunegemm.generate import families


class PlantedFamily:
    """Launchers that do what their candidate's `what` says."""

    name = "planted"
    compiled = False

    def smem_bytes(self, problem: Any, candidate: Candidate) -> int:
        return 0

    def load(self, problem: Any, candidate: Candidate, device: Device, artifact: Path | None) -> Any:
        what = candidate["what"]
        if what == "load-error":
            raise ArtifactError("object is damaged\nsecond line")
        if what == "load-abort":
            os.abort()
        seen: list[Any] = []
        if problem.groups:
            return grouped_launcher(what, problem.gate)

        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            seen.append(out)
            first = seen[0]
            if what == "launch-error":
                raise RuntimeError("too many resources requested for launch")
            if what == "type-error":
                raise TypeError("a bug in a launcher")
            if what == "illegal-address":
                ctypes.string_at(0)
            if what == "hang" or (what == "hang-in-rounds" and len(seen) > 5):
                if told := os.environ.get("PLANTED_PID_FILE"):
                    Path(told).with_suffix(".hangs").touch()  # so that a test may wait for it
                time.sleep(3600)  # hangs: who measures is to be killed
            if what == "unwritten":
                torch.mm(a[:1], b, out=out[:1])
                return
            if what == "stale-pointers":
                torch.mm(a, b, out=first)
                return
            began = time.thread_time()
            torch.mm(a, b, out=out)
            took = time.thread_time() - began
            if what == "wrong":
                out.add_(1)
            elif what == "one-element":
                out[3, 5] = 0
            elif what == "outside":
                offset = out.storage_offset() + out.numel()
                out.as_strided((1,), (1,), offset).zero_()
            elif what == "slow" or (what == "slow-to-launch" and len(seen) < 3):
                work(max(2e-3, 4 * took))  # a processor without bf16 takes milliseconds itself

        launch.capturable = what != "not-capturable"  # type: ignore[attr-defined]
        return launch


def grouped_launcher(what: str, gate: str) -> Any:
    """Rows in groups, each by its own b, or gated by it."""
    known: list[list[int]] = []

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = a.float() @ b.float()
        return Epilogue((gate,)).gate(*found.chunk(2, dim=1)) if gate else found

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, ends: torch.Tensor) -> None:
        known.append(ends.tolist())
        first = 0
        for group, end in enumerate(known[0] if what == "groups-first-offsets" else known[-1]):
            out[first:end] = product(a[first:end], b[group])
            first = end
        if what == "groups-neighbour" and first > 1:  # the last group of a tile reaches into the one before
            out[:1] = product(a[:1], b[-1])
        elif what == "groups-behind" and first < len(a):
            behind = out.storage_offset() + first * out.stride(0)
            out.as_strided((1, out.shape[1]), out.stride(), behind).copy_(
                product(a[first : first + 1], b[-1])
            )

    return launch


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class CpuReplay:
    """Its median product, by the thread's own clock: that stands still while the machine does something else,
    and the median leaves out those that were slow when it came back.
    """

    def __init__(self, launcher: Any, sets: list[Any], passes: int) -> None:
        self._work = launcher, sets, passes
        self._timed = 1

    def start(self, untimed: int = 0, timed: int = 1) -> None:
        self._timed = timed

    def finish(self) -> float:
        launcher, sets, passes = self._work
        seconds = []
        for operands in sets * passes * self._timed:
            begin = time.thread_time()
            launcher(*operands.arguments)
            seconds.append(time.thread_time() - begin)
        return statistics.median(seconds) * 1e6


class CpuBackend:
    """Real products on the CPU; the memory is made small so that few sets are made."""

    @classmethod
    def prepare(cls, device: Callable[[], Device]) -> None:
        pass

    def __init__(self, device: Device) -> None:
        torch.set_num_threads(1)
        self.torch_device = torch.device("cpu")

    def open(self, *, warm_up_s: float = 0.0) -> None:
        if (path := os.environ.get("PLANTED_PID_FILE")) is not None:
            Path(path).write_text(str(os.getpid()))

    def family(self, name: str) -> Any:
        return PlantedFamily() if name == "planted" else families.get(name)

    def free_bytes(self) -> int:
        return 4 << 20

    def launch(self, launcher: Any, operands: Any) -> None:
        launcher(*operands.arguments)

    def capture(self, launcher: Any, sets: list[Any], passes: int) -> CpuReplay:
        if not getattr(launcher, "capturable", True):
            raise RuntimeError("operation not permitted when stream is capturing")
        return CpuReplay(launcher, sets, passes)

    def alive(self) -> bool:
        return True

    def telemetry(self) -> dict[str, Any]:
        return {"sm_clock_mhz": None}

    def energy_mj(self) -> float:
        """A GPU of 10 W whose meter moves every 20 ms."""
        return time.thread_time() // 0.02 * 0.02 * 10e3

    def release(self) -> None:
        pass


class ThrottledBackend(CpuBackend):
    """A GPU at its power cap."""

    def telemetry(self) -> dict[str, Any]:
        return {"sm_clock_mhz": 1500, "throttle_reasons": ["sw_power_cap"]}


class RecoveringBackend(CpuBackend):
    """A GPU that was at its power cap a moment before."""

    throttled_reads: Container[int] = (1,)

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._reads = 0

    def telemetry(self) -> dict[str, Any]:
        self._reads += 1
        at_cap = self._reads in self.throttled_reads
        return {"sm_clock_mhz": 1980, "throttle_reasons": ["sw_power_cap"] if at_cap else []}


class RestedBackend(RecoveringBackend):
    """A GPU that meets its power cap in each of two races, and has full clocks when they begin."""

    throttled_reads = (2, 4, 5)  # after the first race; when the second one settled, and after it
