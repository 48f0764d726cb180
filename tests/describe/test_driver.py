"""What the driver is asked for, by a stand-in for its library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from tunegemm.describe import clusters, driver


class Library:
    """One device; `current` is the thread's context. A call that is named in `fails` returns 999."""

    def __init__(self, current: int = 0, *fails: str) -> None:
        self.current, self.fails, self.calls = current, fails, list[str]()

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            target = getattr(arguments[0], "_obj", None) if arguments else None
            if name == "cuCtxGetCurrent":
                target.value = self.current or None  # type: ignore[union-attr]
            elif name == "cuDevicePrimaryCtxRetain":
                target.value = 77  # type: ignore[union-attr]
            elif name == "cuCtxSetCurrent":
                self.current = arguments[0].value
            elif name == "cuOccupancyMaxActiveClusters":
                target.value = self.current  # type: ignore[union-attr]
            return 999 if name in self.fails else 0

        return call


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Library], Library]:
    def install(library: Library) -> Library:
        driver.retained_context.cache_clear()
        monkeypatch.setattr(driver, "library_of_cuda", lambda: library)
        return library

    yield install  # type: ignore[misc]
    driver.retained_context.cache_clear()


def test_a_thread_without_a_context_gets_the_devices(use: Callable[[Library], Library]) -> None:
    library = use(Library())
    assert driver.ensure_context(0) and library.current == 77
    assert not driver.ensure_context(0)
    assert not use(Library(5)).calls and not driver.ensure_context(0)
    use(Library(0, "cuDeviceGet"))
    with pytest.raises(RuntimeError, match="cuDeviceGet failed with CUDA's error 999"):
        driver.ensure_context(0)


def test_a_context_is_left_as_it_was(use: Callable[[Library], Library]) -> None:
    library = use(Library())
    with pytest.raises(ZeroDivisionError), driver.primary_context(0) as found:
        assert found is library and library.calls[-1] == "cuCtxPushCurrent_v2"
        raise ZeroDivisionError
    assert library.calls[-1] == "cuCtxPopCurrent_v2"


def test_clusters_that_the_driver_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(library: Any) -> int | None:
        clusters.active_clusters.cache_clear()
        monkeypatch.setattr(clusters, "loaded", lambda *_: nullcontext((library, ctypes.c_void_p())))
        return clusters.active_clusters(0, 2, 1024)

    assert [counted(Library(count)) for count in (0, 66)] == [None, 66]
    assert counted(Library(66, "cuOccupancyMaxActiveClusters")) is None

    def fails(*_: Any) -> Any:
        raise OSError("no driver")

    clusters.active_clusters.cache_clear()
    monkeypatch.setattr(clusters, "loaded", fails)
    assert clusters.active_clusters(0, 2, 1024) is None
    clusters.active_clusters.cache_clear()
