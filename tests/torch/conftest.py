from collections.abc import Iterator

import pytest
import torch

from tests.support.fusing import serve_recorded
from tests.support.rooms import *  # noqa: F403 - fixtures
from tests.support.serving import Kernel
from tunegemm.torch import takeover


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """All problems of CPU tensors are served by it."""
    kernel = Kernel()
    serve_recorded(monkeypatch, kernel)
    return kernel


@pytest.fixture
def clean() -> Iterator[None]:
    """Nothing is taken over behind a test, and what Dynamo compiled is forgotten."""
    yield
    assert not takeover.active
    torch._dynamo.reset()
