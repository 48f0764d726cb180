"""How sums over k are kept, of every problem: until now in one way only."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_KEY = (
    "m", "n", "k", "batch", "in_dtype", "out_dtype", "a_major", "b_major", "out_major", "alignment",
    "epilogue",
)  # fmt: skip


def upgrade() -> None:
    op.add_column("problems", sa.Column("accumulation", sa.String(16), nullable=False, server_default="fast"))
    with op.batch_alter_table("problems") as table:
        table.drop_constraint("uq_problems_all", type_="unique")
        table.create_unique_constraint("uq_problems_all", [*_KEY, "accumulation"])


def downgrade() -> None:
    raise NotImplementedError("a tuning database is not migrated back: keep a copy of the file")
