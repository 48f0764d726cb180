"""A backend whose GPU cannot be used. The measuring process that imports this need not import torch."""

from __future__ import annotations

from collections.abc import Callable

from tunegemm.describe.device import Device


class BrokenBackend:
    @classmethod
    def prepare(cls, device: Callable[[], Device]) -> None:
        pass

    def __init__(self, device: Device) -> None:
        pass

    def open(self, *, warm_up_s: float = 0.0) -> None:
        raise RuntimeError("no CUDA-capable device is detected")
