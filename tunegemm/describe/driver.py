"""Asks CUDA's driver about its GPUs, through ctypes.

On an H200's host importing torch takes 3 s and cuda.bindings 16 ms; the first process of a tuning needs
nothing else from either (2026-11-23, 2026-11-21).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# CUdevice_attribute of cuda.h.
_SM_COUNT, _L2_BYTES, _MAJOR, _MINOR = 16, 38, 75, 76
_CLOCK_KHZ, _MEMORY_KHZ, _BUS_BITS = 13, 36, 37
_NAME_BYTES = 256


@dataclass(frozen=True)
class Properties:
    """The properties of a GPU."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    l2_bytes: int
    memory_bytes: int
    clock_khz: int = 0
    """Highest clock of its multiprocessors; 0 if the driver does not say."""
    bandwidth_gbps: float = 0.0
    """Bandwidth of device memory, from its clock and width; 0 if the driver does not report them."""


def cuda_version() -> tuple[int, int]:
    """The newest CUDA that the driver supports; (0, 0) without a driver. It also works in a process that sees
    no GPU, in which CUDA does not start."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10


def device_count() -> int:
    """How many GPUs this process may use; 0 without a driver."""
    count = ctypes.c_int()
    try:
        _ask("cuDeviceGetCount", ctypes.byref(count))
    except (OSError, RuntimeError):
        return 0
    return count.value


def properties(index: int) -> Properties:
    """The properties of one device. Raises RuntimeError or OSError if it is not there."""
    device = _device(index)
    name, memory_bytes = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    _ask("cuDeviceGetName", name, _NAME_BYTES, device)
    _ask("cuDeviceTotalMem_v2", ctypes.byref(memory_bytes), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _ask("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    def if_known(number: int) -> int:  # virtual GPUs report no clocks
        try:
            return attribute(number)
        except RuntimeError:
            return 0

    return Properties(
        name.value.decode(errors="replace"), (attribute(_MAJOR), attribute(_MINOR)), attribute(_SM_COUNT),
        attribute(_L2_BYTES), memory_bytes.value, if_known(_CLOCK_KHZ),
        2 * if_known(_MEMORY_KHZ) * if_known(_BUS_BITS) / 8 / 1e6,  # two transfers a clock
    )  # fmt: skip


@contextmanager
def primary_context(index: int) -> Iterator[Any]:
    """The driver's library, with the device's primary context current, which is also torch's context.

    Raises RuntimeError or OSError, for example if the GPU's memory is full or another process uses it
    exclusively.
    """
    _ask("cuCtxPushCurrent_v2", retained_context(index))
    try:
        yield library_of_cuda()
    finally:
        _ask("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def ensure_context(index: int) -> bool:
    """Give a thread without a CUDA context the device's primary one. Returns whether it had none.

    A thread has none before its first call of CUDA's runtime, and until then launches by the driver or by
    cuBLASLt fail in it. Raises the errors of `primary_context`.
    """
    current = ctypes.c_void_p()
    _ask("cuCtxGetCurrent", ctypes.byref(current))
    if current.value is not None:
        return False
    _ask("cuCtxSetCurrent", retained_context(index))
    return True


@functools.cache
def retained_context(index: int) -> ctypes.c_void_p:
    """Retained until the process ends, because creating it takes some 0.2 s."""
    context = ctypes.c_void_p()
    _ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(index))
    return context


def _device(index: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _ask("cuDeviceGet", ctypes.byref(device), index)
    return device


def _ask(function: str, *arguments: Any) -> None:
    if failed := getattr(library_of_cuda(), function)(*arguments):
        raise RuntimeError(f"{function} failed with CUDA's error {failed}")


@functools.cache
def library_of_cuda() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    if failed := library.cuInit(0):
        raise RuntimeError(f"CUDA does not start: error {failed}")
    return library
