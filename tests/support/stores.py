"""The two kinds of database, for tests of what must hold for both."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunegemm.store import Database

#: A file, or the URL of a database on a server.
Location = Path | str


class Store:
    """The contract: what is tested in classes of this base holds for SQLite and for PostgreSQL."""

    @pytest.fixture(params=["sqlite", "postgresql"])
    def location(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Location]:
        if request.param == "sqlite":
            yield tmp_path / "tuning.sqlite"
            return
        template = request.getfixturevalue("empty_on_server")
        postgres = request.getfixturevalue("postgres")
        url = postgres.create(template)
        yield url
        postgres.drop(url)

    @pytest.fixture
    def database(self, location: Location) -> Iterator[Database]:
        with Database.open(location, create=True) as database:
            yield database


def damage(location: Location, statement: str) -> None:
    """Changes rows behind the program's back."""
    if isinstance(location, str):
        import psycopg

        with psycopg.connect(location) as server:
            assert server.execute(statement.encode()).rowcount > 0
        return
    connection = sqlite3.connect(location)
    with connection:
        assert connection.execute(statement).rowcount > 0
    connection.close()
