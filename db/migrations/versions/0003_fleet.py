"""Fleet: tasks, and claims of them."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tasks",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("effort", sa.String(length=16), nullable=False),
        sa.Column("trials", sa.Integer(), nullable=True),
        sa.Column("budget_seconds", sa.Double(), nullable=True),
        sa.Column("added_at", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_tasks_problem_id"),
        sa.PrimaryKeyConstraint("id", name="pk_tasks"),
        sa.UniqueConstraint("problem_id", name="uq_tasks_problem_id"),
    )
    op.create_table(
        "claims",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("fingerprint_id", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=128), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("claimed_at", sa.String(length=32), nullable=True),
        sa.Column("expires_at", sa.String(length=32), nullable=True),
        sa.Column("finished_at", sa.String(length=32), nullable=True),
        sa.Column("failure", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["fingerprint_id"], ["fingerprints.id"], name="fk_claims_fingerprint_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_claims_problem_id"),
        sa.PrimaryKeyConstraint("id", name="pk_claims"),
        sa.UniqueConstraint("problem_id", "fingerprint_id", name="uq_claims_problem_id_fingerprint_id"),
    )
    op.create_index("ix_claims_fingerprint_id", "claims", ["fingerprint_id"])


def downgrade() -> None:
    raise NotImplementedError("a tuning database is not migrated back: keep a copy of the file")
