"""Facts about a database that need no SQLAlchemy: dispatch checks them before it reads a database."""

from __future__ import annotations

#: The newest revision under db/migrations/versions. Held here so that opening an up-to-date database
#: does not load Alembic; a test compares it with Alembic's head.
SCHEMA_VERSION = "0007"

#: The oldest revision there, which databases are brought up from.
OLDEST_SCHEMA = "0007"

#: Not Alembic's default name: Optuna's storages claim that one, should both live on one server.
VERSION_TABLE = "tunegemm_alembic_version"

#: What best means, of records that are chosen by speed alone: the column `policy` of theirs.
FASTEST = "fastest"
