"""Identity: alignment, capability, MIG, SM budget, kernel sources per family. History of records."""

import hashlib
import json
import math

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_POLICY = "fastest"
_FACTS = ("device_name", "sm_count", "driver", "cuda", "torch", "cutlass_dsl", "triton")
_KEY = ("m", "n", "k", "batch", "in_dtype", "out_dtype", "a_major", "b_major", "out_major")


def upgrade() -> None:
    bind = op.get_bind()
    _add_alignment(bind)
    _add_kernel_source()
    _add_policy_and_choices()
    _split_fingerprints(bind)


def _add_alignment(bind) -> None:
    op.add_column("problems", sa.Column("alignment", sa.Integer(), nullable=False, server_default="16"))
    with op.batch_alter_table("problems") as table:
        table.drop_constraint("uq_problems_all", type_="unique")
        table.create_unique_constraint("uq_problems_all", [*_KEY, "alignment"])
    problems = sa.table("problems", sa.column("id"), *map(sa.column, [*_KEY, "alignment"]))
    for row in bind.execute(sa.select(problems)).all():
        alignment = _packed_alignment(row)
        if alignment != 16:
            bind.execute(problems.update().where(problems.c.id == row.id).values(alignment=alignment))


def _packed_alignment(row) -> int:
    """Everything was measured on packed operands of two-byte elements."""
    try:
        steps = []
        for leading, lines in (
            (row.k, row.m) if row.a_major == "k" else (row.m, row.k),
            (row.k, row.n) if row.b_major == "k" else (row.n, row.k),
        ):
            steps += [leading] * (lines > 1) + [leading * lines] * (row.batch > 1)
        return math.gcd(16, *(2 * step for step in steps))
    except TypeError:  # a damaged row stays one
        return 16


def _add_kernel_source() -> None:
    """From the fingerprint to the outcomes, where each has its own family's; a library has none.

    The one hash of all sources was that of cute_sm90's, the only family that had any.
    """
    for name in ("measurements", "failures"):
        op.add_column(name, sa.Column("kernel_source", sa.String(16), nullable=False, server_default=""))
        op.add_column(name, sa.Column("origin", sa.Text(), nullable=False, server_default=""))
        op.execute(
            f"UPDATE {name} SET kernel_source = (SELECT kernel_source FROM fingerprints"
            f" WHERE fingerprints.id = {name}.fingerprint_id) WHERE candidate_id IN"
            " (SELECT id FROM candidates WHERE family <> 'cublaslt')"
        )


def _split_fingerprints(bind) -> None:
    op.add_column("fingerprints", sa.Column("capability", sa.String(8), nullable=False, server_default=""))
    op.add_column("fingerprints", sa.Column("mig", sa.String(32), nullable=False, server_default=""))
    op.add_column("fingerprints", sa.Column("sm_budget", sa.Integer(), nullable=False, server_default="0"))
    with op.batch_alter_table("fingerprints") as table:
        table.drop_column("kernel_source")
    names = ["id", "digest", *_FACTS, "capability", "mig", "sm_budget"]
    fingerprints = sa.table("fingerprints", *map(sa.column, names))
    kept = {}
    for row in bind.execute(sa.select(fingerprints).order_by(fingerprints.c.id)).all():
        facts = {name: getattr(row, name) for name in _FACTS}
        facts |= {"capability": _capability(row.device_name), "mig": _mig(row.device_name)}
        facts |= {"sm_budget": row.sm_count}
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        if digest in kept:
            _merge_fingerprint(bind, row.id, kept[digest])
            bind.execute(fingerprints.delete().where(fingerprints.c.id == row.id))
            continue
        kept[digest] = row.id
        bind.execute(fingerprints.update().where(fingerprints.c.id == row.id).values(digest=digest, **facts))


def _capability(device_name) -> str:
    """The name's GPU generation; tunegemm 0.1 tuned on Hopper, and its library candidates on any GPU."""
    for mark, capability in (
        ("H100", "9.0"),
        ("H200", "9.0"),
        ("H800", "9.0"),
        ("H20", "9.0"),
        ("A100", "8.0"),
    ):
        if mark in str(device_name):
            return capability
    return ""


def _mig(device_name) -> str:
    return str(device_name).partition(" MIG ")[2].partition(" ")[0]


def _merge_fingerprint(bind, old, new) -> None:
    """Two that differed in nothing but the kernel sources are one; so are their records, all of them in
    `choices` already: the settled one stays, else the later."""
    columns = ("id", "problem_id", "fingerprint_id", "settled", "chosen_at")
    records = sa.table("records", *map(sa.column, columns))
    rows = bind.execute(sa.select(records).where(records.c.fingerprint_id.in_((old, new)))).all()
    best = {}
    for row in sorted(rows, key=lambda row: (bool(row.settled), str(row.chosen_at))):
        best[row.problem_id] = row.id
    for row in rows:
        if best[row.problem_id] != row.id:
            bind.execute(records.delete().where(records.c.id == row.id))
    for name in ("measurements", "failures", "records", "choices"):
        table = sa.table(name, sa.column("fingerprint_id"))
        bind.execute(table.update().where(table.c.fingerprint_id == old).values(fingerprint_id=new))


def _add_policy_and_choices() -> None:
    op.add_column("records", sa.Column("policy", sa.String(32), nullable=False, server_default=_POLICY))
    with op.batch_alter_table("records") as table:
        table.drop_constraint("uq_records_problem_id_fingerprint_id", type_="unique")
        table.create_unique_constraint(
            "uq_records_problem_id_fingerprint_id_policy", ["problem_id", "fingerprint_id", "policy"]
        )
    op.create_table(
        "choices",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("fingerprint_id", sa.Integer(), nullable=False),
        sa.Column("policy", sa.String(length=32), nullable=False),
        sa.Column("measurement_id", sa.Integer(), nullable=False),
        sa.Column("settled", sa.Boolean(), nullable=False),
        sa.Column("chosen_at", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["fingerprint_id"], ["fingerprints.id"], name="fk_choices_fingerprint_id"),
        sa.ForeignKeyConstraint(["measurement_id"], ["measurements.id"], name="fk_choices_measurement_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_choices_problem_id"),
        sa.PrimaryKeyConstraint("id", name="pk_choices"),
    )
    op.create_index(
        "ix_choices_problem_id_fingerprint_id_policy", "choices", ["problem_id", "fingerprint_id", "policy"]
    )
    names = "problem_id, fingerprint_id, policy, measurement_id, settled, chosen_at"
    op.execute(f"INSERT INTO choices ({names}) SELECT {names} FROM records ORDER BY chosen_at")


def downgrade() -> None:
    raise NotImplementedError("a tuning database is not migrated back: keep a copy of the file")
