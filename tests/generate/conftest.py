"""What tests of kernel families share: a GPU to compile for."""

from __future__ import annotations

import pytest

from tunegemm.describe.device import Device, find_device


@pytest.fixture(scope="module")
def h200() -> Device:
    return find_device("model:h200")
