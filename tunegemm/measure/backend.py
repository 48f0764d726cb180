"""The device of the measuring process.

The protocol of jobs, checks and rounds (`session`) knows CUDA only by the methods of `CudaBackend`; tests run
it on CPU tensors through another class that has them.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

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


#: Metering takes at most this many times the requested time.
LONGEST_METERING = 4


def warm_us(backend: CudaBackend, launcher: Launcher, sets: list[Operands]) -> float:
    """Rough microseconds of a product in a graph that ran before; decides the length of a replay.

    A plain launch would not do: on an idle device it takes as long as the host does, 50 to 100 us beside
    compilers.
    """
    backend.launch(launcher, sets[0])
    replay = backend.capture(launcher, sets, 1)
    for _ in range(2):
        replay.start()
        product_us = replay.finish()
    return product_us


def metered_mj(backend: CudaBackend, replay: Replay, products: int, energy_ms: float) -> float | None:
    """Millijoules of one product of a replay, by the device's energy meter over `energy_ms`.

    None if there is no meter or its reading does not change. The meter updates every 20 to 100 ms, so
    products are counted from one update to another.
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
    """One device, in the process that its errors may kill. It replays graphs on its own stream and times them
    with events.
    """

    @classmethod
    def prepare(cls, device: Callable[[], Device]) -> None:
        """Do what needs no device yet, such as imports. Calling `device` waits until the device is known."""

        def start() -> None:
            if driver.device_count():
                with suppress(OSError, RuntimeError), driver.primary_context(device().index):
                    pass  # `open` reports errors

        # Start the driver and the device's context while torch is imported: they take 0.45 and 0.15 s, torch
        # takes 1.4 s (H200, 2026-11-25).
        threading.Thread(target=start, daemon=True).start()
        importlib.import_module("torch")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: Any = None
        self.reader: TelemetryReader | None = None

    @property
    def torch_device(self) -> torch.device:
        """The torch device of the operands."""

        import torch

        return torch.device("cuda", self._device.index)

    def open(self, *, warm_up_s: float = 0.5) -> None:
        """Take the device, and keep it busy for `warm_up_s` seconds.

        Raises RuntimeError or TunegemmError if the device cannot be used.
        """
        import torch

        torch.cuda.set_device(self._device.index)
        set_fp32_precision("ieee")  # for the reference; no other product depends on it
        self._stream = torch.cuda.Stream()
        torch.cuda.set_stream(self._stream)
        self.reader = TelemetryReader(self._device.index)
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
        """The kernel family of a job."""
        return families.get(name)

    def free_bytes(self) -> int:
        """The free device memory in bytes."""
        import torch

        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device.index)[0])

    def launch(self, launcher: Launcher, operands: Operands) -> None:
        """Run one product and wait for it. Raises RuntimeError if the device fails."""
        import torch

        launcher(*operands.arguments)
        # Wait for the whole device: a kernel on another stream than the current one must finish before its
        # result is read.
        torch.cuda.synchronize()

    def capture(self, launcher: Launcher, sets: list[Operands], passes: int) -> Replay:
        """A replay of `passes` passes over all sets.

        Raises RuntimeError if the capture fails. The process is unusable afterwards, because torch's
        allocator stays in its capturing state.
        """
        return _GraphReplay(launcher, sets, passes)

    def alive(self) -> bool:
        """Whether the device still works after an error."""
        import torch

        try:
            torch.cuda.synchronize()
            torch.zeros(1, device=self.torch_device).item()
        except RuntimeError:  # every call after an illegal address fails: the context is lost
            return False
        return True

    def telemetry(self) -> dict[str, Any]:
        """The current clocks, power and temperature."""
        return {} if self.reader is None else self.reader.read()

    def energy_mj(self) -> float | None:
        """The device's energy meter, in millijoules since an arbitrary start; None if it has none."""
        return None if self.reader is None else self.reader.energy_mj()

    def release(self) -> None:
        """Free cached device memory."""
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
        self._launcher = launcher  # owns workspaces and loaded modules that the graph uses
        # `torch.cuda.graph` would also collect garbage and empty the cache, tens of milliseconds each time.
        torch.cuda.synchronize()
        self._graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(passes):
                for operands in sets:
                    launcher(*operands.arguments)
        except BaseException:
            with suppress(RuntimeError):  # an invalidated capture cannot be ended cleanly
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
