"""Alembic's entry. tunegemm hands over its open transaction; the command line opens TUNEGEMM_DB itself."""

from alembic import context
from sqlalchemy.types import TypeDecorator

from tunegemm.store.connection import connect, resolve, writer
from tunegemm.store.models import Base
from tunegemm.store.schema import VERSION_TABLE


def render_item(kind, item, _):
    """A migration names the column types of its day, not the program's classes, which may change."""
    return f"sa.{item.impl!r}" if kind == "type" and isinstance(item, TypeDecorator) else False


def run(connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        render_item=render_item,
        render_as_batch=True,  # SQLite alters a table by copying it
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    with writer(connect(resolve(None), read_only=False)).begin() as opened:
        run(opened)
