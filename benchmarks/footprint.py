"""Peak memory of a piece of work: this process, its children, and the GPU."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import psutil

from tunegemm.describe.device import Device


class Footprint:
    """Samples memory from a thread while it is entered; peaks are in MB (10**6 bytes).

    Host memory is the proportional set size, in which a page that n processes share counts 1/n for each:
    compile workers are forked from one server and share most of their libraries.
    """

    def __init__(self, device: Device | None = None, *, interval: float = 0.5) -> None:
        """`device` is a real one, or None to leave the GPU out.

        A sample costs some milliseconds per child, mostly in the kernel: often enough is twice a second.
        """
        self._device = device
        self._interval = interval
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.host_mb = 0.0
        """This process."""
        self.children_mb = 0.0
        """All descendants together: compile workers, their server, the measuring worker."""
        self.gpu_mb = 0.0
        """Growth of the device's used memory since the start, whoever used it."""

    def __enter__(self) -> Self:
        before = self._gpu_bytes()

        def watch() -> None:
            while not self._stop.wait(self._interval):
                self._sample(before)

        self._sample(before)
        self._thread = threading.Thread(target=watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self, before: int) -> None:
        self.host_mb = max(self.host_mb, _pss_bytes(self._process) / 1e6)
        self.children_mb = max(
            self.children_mb, sum(map(_pss_bytes, self._process.children(recursive=True))) / 1e6
        )
        self.gpu_mb = max(self.gpu_mb, (self._gpu_bytes() - before) / 1e6)

    def _gpu_bytes(self) -> int:
        if self._device is None:
            return 0
        import torch

        return int(torch.cuda.device_memory_used(self._device.index))


def _pss_bytes(process: psutil.Process) -> int:
    """Proportional set size; 0 for a process that has ended."""
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
