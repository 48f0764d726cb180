"""Models, migrations, generated documents and dataclasses say the same; PostgreSQL could say it too."""

from __future__ import annotations

import runpy
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from tests.support.stores import Location, Store, damage
from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.stored import FIELDS
from tunegemm.errors import DatabaseError
from tunegemm.resources import data_path
from tunegemm.store import Database, codec, migrations, rows
from tunegemm.store.connection import connect, migrating, resolve
from tunegemm.store.migrations import alembic_config
from tunegemm.store.models import Base, FingerprintRow, ProblemRow
from tunegemm.store.schema import OLDEST_SCHEMA, SCHEMA_VERSION, VERSION_TABLE

FOLDER = data_path("db", "migrations").parent
SAMPLES = Path(__file__).parents[1] / "data"
NEXT = f"{int(SCHEMA_VERSION) + 1:04}"
REVISION = f"""
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "{NEXT}", "{SCHEMA_VERSION}", None, None


def upgrade():
    with op.batch_alter_table("problems", recreate="always") as table:
        table.add_column(sa.Column("note", sa.Text(), nullable=False, server_default="none"))
"""
DOCUMENTS = runpy.run_path(str(FOLDER.parent / "docs" / "database.py"))


def test_the_schema_version_is_alembics_head() -> None:
    assert ScriptDirectory.from_config(alembic_config()).get_heads() == [SCHEMA_VERSION]


def described(engine: Engine) -> dict[str, Any]:
    """All that a database says of its tables, in no order."""
    told, found = inspect(engine), {}
    for name in told.get_table_names():
        columns = {
            column["name"]: (str(column["type"]), column["nullable"], column["default"])
            for column in told.get_columns(name)
        }
        parts = [
            told.get_pk_constraint(name), *told.get_foreign_keys(name), *told.get_indexes(name),
            *told.get_unique_constraints(name), *told.get_check_constraints(name),
        ]  # fmt: skip
        found[name] = columns, sorted(repr(sorted(part.items(), key=str)) for part in parts)
    return found


class TestMigrations(Store):
    @pytest.fixture
    def built(self, location: Location, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
        """A database that went through every migration, as one of the first release did."""
        file = isinstance(location, Path)
        empty = tmp_path / "built.sqlite" if file else request.getfixturevalue("postgres").create()
        engine, config = connect(resolve(empty), read_only=False), alembic_config()
        with migrating(engine) as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        yield engine
        engine.dispose()

    def test_they_build_what_the_models_say(self, built: Engine) -> None:
        with built.connect() as connection:
            context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
            assert compare_metadata(context, Base.metadata) == []

    def test_a_new_database_is_what_they_build(self, built: Engine, database: Database) -> None:
        assert described(database.engine) == described(built)


class TestTheNextRevision:
    """What brings users' databases up, tried with a revision that alters a table which others refer to."""

    @pytest.fixture
    def old(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A database of the newest schema, in a program that knows one more."""
        old = tmp_path / "old.sqlite"
        shutil.copy(SAMPLES / f"schema-{SCHEMA_VERSION}.sqlite", old)
        shutil.copytree(FOLDER / "migrations", tmp_path / "db" / "migrations")
        (tmp_path / "db" / "migrations" / "versions" / f"{NEXT}_note.py").write_text(REVISION)
        monkeypatch.setattr(migrations, "SCHEMA_VERSION", NEXT)
        monkeypatch.setattr(migrations, "data_path", tmp_path.joinpath)
        return old

    def test_readers_name_the_command_and_a_writer_migrates(self, old: Path) -> None:
        with pytest.raises(DatabaseError, match=f"{SCHEMA_VERSION} is older than {NEXT}; run `tunegemm db u"):
            Database.open(old, read_only=True)
        with Database.open(old, create=True) as database:
            (record,) = database.records()
        assert (record.label, record.confirmed) == ("pp128x256", True)
        with closing(sqlite3.connect(old)) as connection:
            assert connection.execute("SELECT note FROM problems").fetchall() == [("none",)]
            assert connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchall() == [(NEXT,)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        Database.open(old, read_only=True).close()

    def test_a_dangling_row_stops_it_and_nothing_is_changed(self, old: Path) -> None:
        damage(old, "UPDATE measurements SET candidate_id = 77 WHERE id = 1")
        before = old.read_bytes()
        with pytest.raises(DatabaseError, match="'measurements' refers to a missing one in 'candidates'"):
            Database.open(old, create=True)
        assert old.read_bytes() == before

    def test_tables_that_are_not_those_of_the_schema_are_said_to_be(self, old: Path) -> None:
        with closing(sqlite3.connect(old)) as connection, connection:
            connection.execute("DROP TABLE problems")
        before = old.read_bytes()
        with pytest.raises(DatabaseError, match=f"do not match its schema {SCHEMA_VERSION}|no such table"):
            Database.open(old, create=True)
        assert old.read_bytes() == before


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("'9999'", f"its schema 9999 is newer than {SCHEMA_VERSION}.*upgrade tunegemm"),
        ("x'ff00'", "is not a number of ours"),
        ("NULL", "its schema null is not a number of ours"),
        ("7", "its schema 7 is not a number of ours"),
        ("'seven'", "is not a number of ours"),
        ("'0000'", "its schema 0000 is older"),
        ("'0006'", f"its schema 0006 is older than {OLDEST_SCHEMA}.*or choose another path"),
    ],
)
def test_a_mark_that_its_tables_belie(tmp_path: Path, version: str, said: str) -> None:
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as connection, connection:
        connection.execute(f"CREATE TABLE {VERSION_TABLE} (version_num)")
        connection.execute(f"INSERT INTO {VERSION_TABLE} VALUES ({version})")
        connection.execute("CREATE TABLE problems (id)")
    before = (tmp_path / "t.sqlite").read_bytes()
    with pytest.raises(DatabaseError, match=said):
        Database.open(tmp_path / "t.sqlite", create=True)
    with pytest.raises(DatabaseError, match=said):
        Database.open(tmp_path / "t.sqlite", read_only=True)
    assert (tmp_path / "t.sqlite").read_bytes() == before


@pytest.mark.parametrize(
    ("fields", "row"), [(FIELDS, ProblemRow), (codec.FINGERPRINT_FIELDS, FingerprintRow)]
)
def test_a_column_per_field(fields: tuple[str, ...], row: type[Base]) -> None:
    columns = [column.name for column in row.__table__.columns if column.name not in ("id", "digest")]
    assert columns == [*fields], "a new field needs a column, a migration and a new SCHEMA_VERSION"


def test_every_column_is_documented() -> None:
    undocumented = [
        str(column) for table in Base.metadata.tables.values() for column in table.columns if not column.doc
    ]
    assert undocumented == []


def test_schema_sql_is_up_to_date() -> None:
    assert (FOLDER / "schema.sql").read_text() == DOCUMENTS["schema_sql"](), "run python docs/database.py"


def test_the_data_dictionary_is_up_to_date() -> None:
    assert (FOLDER / "README.md").read_text() == DOCUMENTS["data_dictionary"](), "run python docs/database.py"


def test_tables_and_queries_compile_for_postgresql() -> None:
    dialect = postgresql.dialect()
    for table in Base.metadata.sorted_tables:
        CreateTable(table).compile(dialect=dialect)
        for index in table.indexes:
            CreateIndex(index).compile(dialect=dialect)
            assert len(str(index.name)) <= 63
        for constraint in table.constraints:
            assert len(str(constraint.name)) <= 63
    problem, fingerprint = Problem(64, 64, 64), Fingerprint("", 0, "", "", 0, "", "", "", "", "")
    query = rows.where_problem(rows.where_fingerprint(rows.records_query(), fingerprint), problem)
    query.compile(dialect=dialect)
