"""Models, migrations, generated documents and dataclasses say the same; PostgreSQL could say it too."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.resources import data_path
from tunegemm.store import Database, rows
from tunegemm.store.migrations import alembic_config
from tunegemm.store.models import Base, FingerprintRow, ProblemRow
from tunegemm.store.schema import SCHEMA_VERSION, VERSION_TABLE

FOLDER = data_path("db", "migrations").parent
DOCUMENTS = runpy.run_path(str(FOLDER.parent / "docs" / "database.py"))


def test_the_schema_version_is_alembics_head() -> None:
    assert ScriptDirectory.from_config(alembic_config()).get_heads() == [SCHEMA_VERSION]


def test_migrations_build_what_the_models_say(tmp_path: Path) -> None:
    with Database.open(tmp_path / "t.sqlite") as database, database._engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, Base.metadata) == []


@pytest.mark.parametrize(("value", "row"), [(Problem, ProblemRow), (Fingerprint, FingerprintRow)])
def test_a_column_per_field(value: type, row: type[Base]) -> None:
    fields = [field.name for field in dataclasses.fields(value)]
    columns = [column.name for column in row.__table__.columns if column.name not in ("id", "digest")]
    assert columns == fields, "a new field needs a column, a migration and a new SCHEMA_VERSION"


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
