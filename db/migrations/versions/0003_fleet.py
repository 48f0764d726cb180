"""Fleet: tasks, and claims of them. Records hold what dispatch reads, an index what is compared."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
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
    # A column that must not be null is added with a default, filled, and then loses it.
    with op.batch_alter_table("records") as table:
        table.add_column(sa.Column("candidate_id", sa.Integer(), nullable=False, server_default="0"))
        table.add_column(sa.Column("ratio", sa.Double(), nullable=False, server_default="0"))
        table.add_column(sa.Column("kernel_source", sa.String(length=16), nullable=False, server_default=""))
    for name in ("candidate_id", "ratio", "kernel_source"):
        op.execute(
            f"UPDATE records SET {name} ="
            f" (SELECT {name} FROM measurements WHERE measurements.id = records.measurement_id)"
        )
    with op.batch_alter_table("records") as table:
        for name in ("candidate_id", "ratio", "kernel_source"):
            table.alter_column(name, server_default=None)
        table.create_foreign_key("fk_records_candidate_id", "candidates", ["candidate_id"], ["id"])
    op.create_index(
        "ix_measurements_compared",
        "measurements",
        ["candidate_id", "fingerprint_id", "problem_id", "policy", "ratio"],
    )


def downgrade() -> None:
    raise NotImplementedError("a tuning database is not migrated back: keep a copy of the file")
