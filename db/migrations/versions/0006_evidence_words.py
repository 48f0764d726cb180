"""The words of evidence; and records that were chosen by ratios of unlike evidence are chosen anew."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_WORDS = {"heat": "qualifying", "alone": "steady_final"}

#: The best evidence of each candidate, and of those that are not slower than torch.mm the best one, for every
#: record that won no final race. Rows of older kernel sources than the newest of the family come last.
_CHOSEN = """
WITH results AS (
    SELECT m.id, m.problem_id, m.fingerprint_id, m.candidate_id, m.ratio, m.kernel_source, m.policy,
        CASE WHEN m.origin = '' THEN 1 ELSE 0 END AS here,
        CASE m.policy WHEN 'final' THEN 3 WHEN 'steady_final' THEN 3 WHEN 'qualifying' THEN 2
            WHEN 'race' THEN 1 ELSE 0 END AS evidence,
        CASE WHEN c.json = '{"compile":{"algorithm":"torch.mm"},"family":"cublaslt","launch":{}}'
            THEN 1 ELSE 0 END AS torch,
        first_value(m.kernel_source) OVER (
            PARTITION BY m.problem_id, m.fingerprint_id, c.family ORDER BY m.id DESC) AS newest
    FROM measurements m JOIN candidates c ON c.id = m.candidate_id
    JOIN records r ON r.problem_id = m.problem_id AND r.fingerprint_id = m.fingerprint_id
    WHERE r.policy = 'fastest' AND NOT r.confirmed
), candidate AS (
    SELECT results.*, CASE WHEN kernel_source = newest THEN 1 ELSE 0 END AS is_current, row_number() OVER (
        PARTITION BY problem_id, fingerprint_id, candidate_id
        ORDER BY here DESC, CASE WHEN kernel_source = newest THEN 1 ELSE 0 END DESC, evidence DESC, id DESC
    ) AS place
    FROM results
), eligible AS (
    SELECT candidate.*, row_number() OVER (
        PARTITION BY problem_id, fingerprint_id
        ORDER BY here DESC, is_current DESC, evidence DESC, ratio DESC, id
    ) AS rank
    FROM candidate WHERE place = 1 AND (ratio >= 1 OR torch = 1)
)
SELECT r.id AS record_id, r.measurement_id AS old_id, e.id, e.problem_id, e.fingerprint_id, e.candidate_id,
    e.ratio, e.kernel_source, e.policy
FROM records r
LEFT JOIN eligible e ON e.rank = 1 AND e.problem_id = r.problem_id AND e.fingerprint_id = r.fingerprint_id
WHERE r.policy = 'fastest' AND NOT r.confirmed
"""

_CHOICE = "problem_id, fingerprint_id, policy, measurement_id, confirmed, chosen_at"


def upgrade() -> None:
    connection = op.get_bind()
    for table in ("records", "choices"):
        op.execute(f"ALTER TABLE {table} RENAME COLUMN settled TO confirmed")
    for old, new in _WORDS.items():
        connection.execute(
            sa.text("UPDATE measurements SET policy = :new WHERE policy = :old"), {"old": old, "new": new}
        )
    op.drop_index("ix_measurements_compared", "measurements")
    op.create_index(
        "ix_measurements_compared",
        "measurements",
        ["candidate_id", "fingerprint_id", "problem_id", "policy", "origin", "ratio"],
    )
    op.add_column("records", sa.Column("measured_by", sa.String(16), nullable=False, server_default="screen"))
    op.execute(
        "UPDATE records SET measured_by = COALESCE("
        "(SELECT m.policy FROM measurements m WHERE m.id = records.measurement_id), 'screen')"
    )
    _choose_anew(connection)


def _choose_anew(connection: sa.Connection) -> None:
    for row in connection.execute(sa.text(_CHOSEN)).mappings().all():
        if row["id"] is None:
            connection.execute(sa.text("DELETE FROM records WHERE id = :record_id"), dict(row))
        elif row["id"] != row["old_id"]:
            connection.execute(
                sa.text(
                    "UPDATE records SET measurement_id = :id, candidate_id = :candidate_id, ratio = :ratio, "
                    "kernel_source = :kernel_source, measured_by = :policy WHERE id = :record_id"
                ),
                dict(row),
            )
            connection.execute(
                sa.text(
                    f"INSERT INTO choices ({_CHOICE}) SELECT {_CHOICE} FROM records WHERE id = :record_id"
                ),
                dict(row),
            )


def downgrade() -> None:
    raise NotImplementedError("a tuning database is not migrated back: keep a copy of the file")
