"""What tests of kernel families share: a place for compiled objects, and a GPU to compile for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tunegemm.describe.device import Device, find_device
from tunegemm.generate.artifacts import ArtifactStore
from tunegemm.generate.compile import CompilePool


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompilePool]:
    with CompilePool(ArtifactStore(tmp_path_factory.mktemp("objects"))) as pool:
        yield pool


@pytest.fixture(scope="module")
def h200() -> Device:
    return find_device("model:h200")
