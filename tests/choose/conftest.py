"""What most of the room asks about."""

from __future__ import annotations

import pytest

from tunegemm.describe.device import Device, find_device


@pytest.fixture(scope="module")
def device() -> Device:
    return find_device("model:h200")
