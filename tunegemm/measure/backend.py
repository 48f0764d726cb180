"""What the measuring process needs of a device, and CUDA's way of giving it.

The protocol of jobs, checks and rounds (`session`) knows no CUDA; it is tested on CPU tensors through
another implementation of `Backend`.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from tunegemm.describe import driver
from tunegemm.describe.device import Device, TelemetryReader
from tunegemm.describe.precision import set_fp32_precision
from tunegemm.generate import families
from tunegemm.generate.family import Family
from tunegemm.generate.launching import Launcher
from tunegemm.measure.operands import Operands
from tunegemm.measure.race import Replay

if TYPE_CHECKING:
    import torch


#: Metering takes so many times the time asked for, at most.
LONGEST_METERING = 4


class Backend(Protocol):
    """One device, in the process that may die of it."""

    @classmethod
    def prepare(cls, device: Callable[[], Device]) -> None:
        """What can be done before the device is known, such as imports; `device` waits for it."""

    def __init__(self, device: Device) -> None: ...

    @property
    def torch_device(self) -> torch.device:
        """Where operands live."""

    def open(self, *, warm_up_s: float = 0.5) -> None:
        """Take the device, and keep it busy for so long. Raises RuntimeError or TunegemmError when it cannot
        be used.
        """

    def family(self, name: str) -> Family:
        """The kernel family of a job."""

    def free_bytes(self) -> int:
        """Device memory that is free now."""

    def launch(self, launcher: Launcher, operands: Operands) -> None:
        """Run one product and wait for it. Raises RuntimeError when the device failed."""

    def capture(self, launcher: Launcher, sets: list[Operands], passes: int) -> Replay:
        """A replay of `passes` passes over all sets. Raises RuntimeError when it cannot be captured; the
        process is of no more use then (torch's allocator stays in its capturing state)."""

    def alive(self) -> bool:
        """Whether the device still works after an error."""

    def telemetry(self) -> dict[str, Any]:
        """Clocks, power, temperature, now."""

    def energy_mj(self) -> float | None:
        """The device's energy meter, millijoules since some beginning; None where it has none."""

    def release(self) -> None:
        """Give cached device memory back."""


def warm_us(backend: Backend, launcher: Launcher, sets: list[Operands]) -> float:
    """Microseconds of a product in a graph that ran before, roughly: decides how long a replay is made.

    Not those of a launch: on an idle device that takes as long as the host does, 50 to 100 beside compilers.
    """
    backend.launch(launcher, sets[0])
    replay = backend.capture(launcher, sets, 1)
    for _ in range(2):
        replay.start()
        product_us = replay.finish()
    return product_us


def metered_mj(backend: Backend, replay: Replay, products: int, energy_ms: float) -> float | None:
    """Energy of one product of a replay, by the device's meter over so much time, millijoules; None where the
    meter stands still.

    It moves in steps of 20 to 100 ms: products are counted from one step to another.
    """
    longest_s = LONGEST_METERING * energy_ms * 1e-3
    started = time.monotonic()
    last, first, first_s, replays = backend.energy_mj(), None, 0.0, 0
    while time.monotonic() - started < longest_s:
        replay.start()
        replay.finish()
        replays += 1
        now = backend.energy_mj()
        if now is None:
            return None
        if now != last:
            last, now_s = now, time.monotonic()
            if first is None:
                first, first_s, replays = now, now_s, 0
            elif (now_s - first_s) * 1e3 >= energy_ms:
                return (now - first) / (replays * products)
    return None


class CudaBackend:
    """A CUDA device: graphs on a stream of their own, events for clocks."""

    @classmethod
    def prepare(cls, device: Callable[[], Device]) -> None:
        def start() -> None:
            if driver.device_count():
                with suppress(OSError, RuntimeError), driver.primary_context(device().index):
                    pass  # what is wrong with it `open` says

        # The driver starts while torch is read, and so does the device's context: they take 0.45 and 0.15 s,
        # torch 1.4 (H200, 2026-11-25).
        threading.Thread(target=start, daemon=True).start()
        importlib.import_module("torch")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: Any = None
        self._reader: TelemetryReader | None = None

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cuda", self._device.index)

    def open(self, *, warm_up_s: float = 0.5) -> None:
        import torch

        torch.cuda.set_device(self._device.index)
        set_fp32_precision("ieee")  # for the reference; others' products ignore it
        self._stream = torch.cuda.Stream()
        torch.cuda.set_stream(self._stream)
        self._reader = TelemetryReader(self._device.index)
        if not warm_up_s:
            return
        # SM clocks fall from 1980 to about 1500 MHz within a second of dense work, once the GPU is at its
        # power cap (H200, 2026-11-20).
        x = torch.rand(4096, 4096, dtype=torch.bfloat16, device=self.torch_device)
        until = time.monotonic() + warm_up_s
        while time.monotonic() < until:
            for _ in range(50):
                torch.mm(x, x)
            self._stream.synchronize()
        del x
        torch.cuda.empty_cache()

    def family(self, name: str) -> Family:
        return families.get(name)

    def free_bytes(self) -> int:
        import torch

        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device.index)[0])

    def launch(self, launcher: Launcher, operands: Operands) -> None:
        import torch

        launcher(*operands.arguments)
        # The whole device: a kernel that is launched on another stream than the current one must not
        # be read back before it ran.
        torch.cuda.synchronize()

    def capture(self, launcher: Launcher, sets: list[Operands], passes: int) -> Replay:
        return _GraphReplay(launcher, sets, passes)

    def alive(self) -> bool:
        import torch

        try:
            torch.cuda.synchronize()
            torch.zeros(1, device=self.torch_device).item()
        except RuntimeError:  # every call after an illegal address fails: the context is lost
            return False
        return True

    def telemetry(self) -> dict[str, Any]:
        if self._reader is None:
            return {}
        now = self._reader.read()
        return {
            "sm_clock_mhz": now.sm_clock_mhz,
            "power_w": now.power_w,
            "temperature_c": now.temperature_c,
            "throttle_reasons": list(now.throttle_reasons),
        }

    def energy_mj(self) -> float | None:
        return None if self._reader is None else self._reader.energy_mj()

    def release(self) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class _GraphReplay:
    """A captured graph between two events."""

    def __init__(self, launcher: Launcher, sets: list[Operands], passes: int) -> None:
        import torch

        self._graph: Any = torch.cuda.CUDAGraph()
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._products = passes * len(sets)
        self._timed = 1
        self._launcher = launcher  # the graph uses what it owns: workspaces, loaded modules
        # Not `torch.cuda.graph`: it collects garbage and empties the cache, tens of milliseconds each time.
        torch.cuda.synchronize()
        self._graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(passes):
                for operands in sets:
                    launcher(*operands.arguments)
        except BaseException:
            with suppress(RuntimeError):  # a capture that was invalidated cannot be ended cleanly
                self._graph.capture_end()
            raise
        self._graph.capture_end()

    def start(self, untimed: int = 0, timed: int = 1) -> None:
        for _ in range(untimed):
            self._graph.replay()
        self._start.record()
        for _ in range(timed):
            self._graph.replay()
        self._end.record()
        self._timed = timed

    def finish(self) -> float:
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3 / (self._products * self._timed)
