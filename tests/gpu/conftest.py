"""What GPU tests share: kernels that ship are not compiled again."""

from __future__ import annotations

import pytest

from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import CompilePool


@pytest.fixture(scope="session", autouse=True)
def _shipped_kernels(_own_home: None, pool: CompilePool) -> None:
    """They are in the store of the fixture `kernels`, and in the user's, which kernels of lists come from."""
    from tests.support.kernels import take_shipped

    for store in (pool.store, ArtifactStore()):
        take_shipped(store)
