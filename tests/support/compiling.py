"""A plugin of pytest: modules compile the kernels of their tests, and no test runs.

``-p tests.support.compiling`` with TUNEGEMM_TEST_OBJECTS, beside tests that measure: with the least priority,
and two cores stay theirs.
"""

from __future__ import annotations

import os

import pytest

#: Cores that it leaves alone, if there are more.
_THEIRS = 2


def pytest_configure() -> None:
    os.nice(19)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[_THEIRS:] or cores)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of each module that takes `kernels` stands for all: the fixture reads the others."""
    taking = [item for item in items if "kernels" in getattr(item, "fixturenames", ())]
    first = {item.path: item for item in reversed(taking)}
    for item in items:
        if item is not first.get(item.path):
            item.add_marker(pytest.mark.skip(reason="compiles nothing more"))


def pytest_pyfunc_call() -> bool:
    return True
