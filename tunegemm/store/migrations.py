"""Brings a database to the schema of this version, with Alembic and within the caller's transaction."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from tunegemm.errors import DatabaseError
from tunegemm.resources import data_path
from tunegemm.store.models import Base
from tunegemm.store.schema import OLDEST_SCHEMA, SCHEMA_VERSION, VERSION_TABLE
from tunegemm.untrusted import shown

if TYPE_CHECKING:
    from alembic.config import Config

#: Of before version 0.1.0; has all revisions of its development.
_READS_OLDER = "6f01e17"
#: Names the lock among those of other programs on the server; any number that is not changed will do.
_MIGRATION_LOCK = 7_463_311


def stored_version(connection: Connection) -> str | None:
    """The revision a database is at; None for an empty one.

    Raises DatabaseError for a database of something else: nothing is ever added to that.
    """
    tables = inspect(connection).get_table_names()
    if VERSION_TABLE in tables:
        version = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
        if not isinstance(version, str) or not re.fullmatch(r"\d{4}", version):
            raise DatabaseError(
                f"damaged: its schema {shown(version)} is not a number of ours; restore a copy, or choose "
                "another path"
            )
        return version
    if tables:
        raise DatabaseError(
            f"a database of another program (it has a table {sorted(tables)[0]!r}); choose another path"
        )
    return None


def upgrade(connection: Connection) -> None:
    """Create or migrate the schema; all of it or nothing, since the connection is in a transaction.

    One process at a time: SQLite's writers are, and on PostgreSQL the others wait for a lock.
    """
    if stored_version(connection) == SCHEMA_VERSION:
        return
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
    version = stored_version(connection)  # another process may have migrated it meanwhile
    if version == SCHEMA_VERSION:
        return
    if version is None:
        _create(connection)
        return
    _refuse_unknown(version)
    from alembic import command
    from alembic.util.exc import CommandError
    from sqlalchemy.exc import NoSuchTableError

    config = alembic_config()
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except (CommandError, KeyError, NoSuchTableError, ValueError) as error:  # KeyError: of a constraint
        raise DatabaseError(
            f"damaged: its tables do not match its schema {version} ({error}); restore a copy, or choose "
            "another path"
        ) from None
    if connection.dialect.name == "sqlite":
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
        if broken is not None:
            raise DatabaseError(
                f"a row of its table {broken[0]!r} refers to a missing one in {broken[2]!r}, so it was not "
                "migrated; delete the row, or use another database"
            )


def _create(connection: Connection) -> None:
    """Creates the schema that the migrations build step by step, and Alembic's mark; a test compares both."""
    Base.metadata.create_all(connection)
    key = f"CONSTRAINT {VERSION_TABLE}_pkc PRIMARY KEY (version_num)"
    connection.execute(text(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL, {key})"))
    connection.execute(text(f"INSERT INTO {VERSION_TABLE} VALUES ('{SCHEMA_VERSION}')"))


def require_current(connection: Connection) -> None:
    """For readers, which do not migrate. Raises DatabaseError unless the schema is this version's."""
    version = stored_version(connection)
    if version == SCHEMA_VERSION:
        return
    _refuse_unknown(version)
    raise DatabaseError(
        f"its schema {version or '(none)'} is older than {SCHEMA_VERSION}; run `tunegemm db upgrade` on it"
    )


def alembic_config() -> Config:
    """Alembic's configuration, without an .ini file: the wheel's or the checkout's db/migrations."""
    from alembic.config import Config

    config = Config()
    # ConfigParser takes "%" for an interpolation.
    config.set_main_option("script_location", str(data_path("db", "migrations")).replace("%", "%%"))
    return config


def _refuse_unknown(version: str | None) -> None:
    if version is not None and version > SCHEMA_VERSION:
        raise DatabaseError(
            f"its schema {version} is newer than {SCHEMA_VERSION}, the newest known here; upgrade tunegemm"
        )
    if version is not None and version < OLDEST_SCHEMA:
        raise DatabaseError(
            f"its schema {version} is older than {OLDEST_SCHEMA}, that of version 0.1.0; run `tunegemm db "
            f"upgrade` of a checkout at commit {_READS_OLDER} on it, or choose another path"
        )
