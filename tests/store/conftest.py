"""What tests of the store share: a file that is a database, or will be one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tunegemm.store import Database


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.sqlite"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    with Database.open(path, create=True) as database:
        yield database
