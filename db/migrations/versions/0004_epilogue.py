"""Epilogue: what becomes of a product before it is stored is part of the problem."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_KEY = ("m", "n", "k", "batch", "in_dtype", "out_dtype", "a_major", "b_major", "out_major", "alignment")


def upgrade() -> None:
    op.add_column("problems", sa.Column("epilogue", sa.String(128), nullable=False, server_default=""))
    with op.batch_alter_table("problems") as table:
        table.drop_constraint("uq_problems_all", type_="unique")
        table.create_unique_constraint("uq_problems_all", [*_KEY, "epilogue"])


def downgrade() -> None:
    raise NotImplementedError("a tuning database is not migrated back: keep a copy of the file")
