"""No list of work: Ray hands problems out (`tunegemm tune --devices`, `--ray`)."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("claims")
    op.drop_table("tasks")


def downgrade() -> None:
    raise NotImplementedError("a tuning database is not migrated back: keep a copy of the file")
