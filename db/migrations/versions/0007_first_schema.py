"""The first schema: that of version 0.1.0. Earlier ones, of its development, are not in the tree."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "candidates",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=16), nullable=False),
        sa.Column("family", sa.String(length=64), nullable=False),
        sa.Column("json", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_candidates"),
        sa.UniqueConstraint("digest", name="uq_candidates_digest"),
    )
    op.create_table(
        "fingerprints",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=16), nullable=False),
        sa.Column("device_name", sa.String(length=128), nullable=False),
        sa.Column("sm_count", sa.Integer(), nullable=False),
        sa.Column("capability", sa.String(length=8), server_default="", nullable=False),
        sa.Column("mig", sa.String(length=32), server_default="", nullable=False),
        sa.Column("sm_budget", sa.Integer(), server_default="0", nullable=False),
        sa.Column("driver", sa.String(length=64), nullable=False),
        sa.Column("cuda", sa.String(length=64), nullable=False),
        sa.Column("torch", sa.String(length=64), nullable=False),
        sa.Column("cutlass_dsl", sa.String(length=64), nullable=False),
        sa.Column("triton", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_fingerprints"),
        sa.UniqueConstraint("digest", name="uq_fingerprints_digest"),
    )
    op.create_table(
        "problems",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("m", sa.Integer(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("batch", sa.Integer(), nullable=False),
        sa.Column("in_dtype", sa.String(length=16), nullable=False),
        sa.Column("out_dtype", sa.String(length=16), nullable=False),
        sa.Column("a_major", sa.String(length=1), nullable=False),
        sa.Column("b_major", sa.String(length=1), nullable=False),
        sa.Column("out_major", sa.String(length=1), nullable=False),
        sa.Column("alignment", sa.Integer(), server_default="16", nullable=False),
        sa.Column("epilogue", sa.String(length=128), server_default="", nullable=False),
        sa.Column("accumulation", sa.String(length=16), server_default="fast", nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_problems"),
        sa.UniqueConstraint(
            "m",
            "n",
            "k",
            "batch",
            "in_dtype",
            "out_dtype",
            "a_major",
            "b_major",
            "out_major",
            "alignment",
            "epilogue",
            "accumulation",
            name="uq_problems_all",
        ),
    )
    op.create_table(
        "failures",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("candidate_id", sa.Integer(), nullable=False),
        sa.Column("fingerprint_id", sa.Integer(), nullable=False),
        sa.Column("kernel_source", sa.String(length=16), server_default="", nullable=False),
        sa.Column("origin", sa.Text(), server_default="", nullable=False),
        sa.Column("stage", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidates.id"], name="fk_failures_candidate_id"),
        sa.ForeignKeyConstraint(["fingerprint_id"], ["fingerprints.id"], name="fk_failures_fingerprint_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_failures_problem_id"),
        sa.PrimaryKeyConstraint("id", name="pk_failures"),
    )
    with op.batch_alter_table("failures") as batch_op:
        batch_op.create_index(
            "ix_failures_problem_id_fingerprint_id_candidate_id",
            ["problem_id", "fingerprint_id", "candidate_id"],
            unique=False,
        )

    op.create_table(
        "measurements",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("candidate_id", sa.Integer(), nullable=False),
        sa.Column("fingerprint_id", sa.Integer(), nullable=False),
        sa.Column("kernel_source", sa.String(length=16), server_default="", nullable=False),
        sa.Column("origin", sa.Text(), server_default="", nullable=False),
        sa.Column("policy", sa.String(length=16), nullable=False),
        sa.Column("samples_us", sa.Text(), nullable=False),
        sa.Column("baseline_us", sa.Text(), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=False),
        sa.Column("baseline_median_us", sa.Double(), nullable=False),
        sa.Column("ratio", sa.Double(), nullable=False),
        sa.Column("spread", sa.Double(), nullable=False),
        sa.Column("baseline_spread", sa.Double(), nullable=False),
        sa.Column("noise", sa.Double(), nullable=False),
        sa.Column("relative_error", sa.Double(), nullable=False),
        sa.Column("sm_clock_mhz", sa.Double(), nullable=True),
        sa.Column("power_w", sa.Double(), nullable=True),
        sa.Column("temperature_c", sa.Double(), nullable=True),
        sa.Column("throttle_reasons", sa.Text(), nullable=True),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("registers", sa.Integer(), nullable=True),
        sa.Column("spill_bytes", sa.Integer(), nullable=True),
        sa.Column("smem_bytes", sa.Integer(), nullable=True),
        sa.Column("warnings", sa.Text(), nullable=True),
        sa.Column("compile_seconds", sa.Double(), nullable=True),
        sa.Column("created_at", sa.String(length=32), nullable=False),
        sa.CheckConstraint("baseline_median_us > 0", name=op.f("ck_measurements_baseline_median_us")),
        sa.CheckConstraint("median_us > 0", name=op.f("ck_measurements_median_us")),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidates.id"], name="fk_measurements_candidate_id"),
        sa.ForeignKeyConstraint(
            ["fingerprint_id"], ["fingerprints.id"], name="fk_measurements_fingerprint_id"
        ),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_measurements_problem_id"),
        sa.PrimaryKeyConstraint("id", name="pk_measurements"),
    )
    with op.batch_alter_table("measurements") as batch_op:
        batch_op.create_index(
            "ix_measurements_compared",
            ["candidate_id", "fingerprint_id", "problem_id", "policy", "origin", "ratio"],
            unique=False,
        )
        batch_op.create_index(
            "ix_measurements_problem_id_fingerprint_id_candidate_id",
            ["problem_id", "fingerprint_id", "candidate_id"],
            unique=False,
        )

    op.create_table(
        "choices",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("fingerprint_id", sa.Integer(), nullable=False),
        sa.Column("policy", sa.String(length=32), nullable=False),
        sa.Column("measurement_id", sa.Integer(), nullable=False),
        sa.Column("confirmed", sa.Boolean(), nullable=False),
        sa.Column("chosen_at", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["fingerprint_id"], ["fingerprints.id"], name="fk_choices_fingerprint_id"),
        sa.ForeignKeyConstraint(["measurement_id"], ["measurements.id"], name="fk_choices_measurement_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_choices_problem_id"),
        sa.PrimaryKeyConstraint("id", name="pk_choices"),
    )
    with op.batch_alter_table("choices") as batch_op:
        batch_op.create_index(
            "ix_choices_problem_id_fingerprint_id_policy",
            ["problem_id", "fingerprint_id", "policy"],
            unique=False,
        )

    op.create_table(
        "records",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("fingerprint_id", sa.Integer(), nullable=False),
        sa.Column("policy", sa.String(length=32), server_default="fastest", nullable=False),
        sa.Column("measurement_id", sa.Integer(), nullable=False),
        sa.Column("candidate_id", sa.Integer(), nullable=False),
        sa.Column("ratio", sa.Double(), nullable=False),
        sa.Column("kernel_source", sa.String(length=16), nullable=False),
        sa.Column("measured_by", sa.String(length=16), server_default="screen", nullable=False),
        sa.Column("confirmed", sa.Boolean(), nullable=False),
        sa.Column("chosen_at", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidates.id"], name="fk_records_candidate_id"),
        sa.ForeignKeyConstraint(["fingerprint_id"], ["fingerprints.id"], name="fk_records_fingerprint_id"),
        sa.ForeignKeyConstraint(["measurement_id"], ["measurements.id"], name="fk_records_measurement_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_records_problem_id"),
        sa.PrimaryKeyConstraint("id", name="pk_records"),
        sa.UniqueConstraint(
            "problem_id", "fingerprint_id", "policy", name="uq_records_problem_id_fingerprint_id_policy"
        ),
    )
    with op.batch_alter_table("records") as batch_op:
        batch_op.create_index("ix_records_fingerprint_id", ["fingerprint_id"], unique=False)


def downgrade() -> None:
    raise NotImplementedError("a tuning database is not migrated back: keep a copy of the file")
