"""The tables. Each column's `doc` is its entry in the data dictionary, db/README.md.

Measurements, failures and choices are a history: rows are added, never changed. Only `records` (which
measurement is the best) and a candidate's label are updated. A change here needs a migration in
db/migrations/versions and a new `tunegemm.store.schema.SCHEMA_VERSION`; tests compare the two.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, ClassVar

from sqlalchemy import (
    CheckConstraint,
    Dialect,
    Double,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from tunegemm.store.codec import plain
from tunegemm.store.schema import FASTEST


class JsonText(TypeDecorator[Any]):
    """JSON kept as text. Text that is not JSON reads as None: one damaged row must not fail a whole query.

    A server's own JSON type would raise inside the driver, before the row could be skipped.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(plain(value), sort_keys=True, separators=(",", ":"))

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        try:
            return None if value is None else json.loads(value)
        except (ValueError, TypeError, RecursionError):
            return None


class UtcTime(TypeDecorator[datetime]):
    """A moment as ISO 8601 text in UTC, which sorts by time. Damaged text reads as None, as in `JsonText`."""

    impl = String(32)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> str | None:
        return None if value is None else value.astimezone(UTC).isoformat(timespec="microseconds")

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        try:
            moment = None if value is None else datetime.fromisoformat(value)
            return moment.astimezone(UTC) if moment is not None and moment.tzinfo else None
        except (ValueError, TypeError, OverflowError):
            return None


class Base(DeclarativeBase):
    """Names its constraints, so that a later migration can refer to them on every server."""

    #: A plain Float is 4 bytes wide on some servers.
    type_annotation_map: ClassVar[dict[Any, Any]] = {float: Double}
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class FingerprintRow(Base):
    """Devices with their software: a record is valid only under the fingerprint of its measurement."""

    __tablename__ = "fingerprints"

    id: Mapped[int] = mapped_column(primary_key=True, doc="Key.")
    digest: Mapped[str] = mapped_column(
        String(16), unique=True, doc="SHA-256 (16 hex digits) of the fields below as canonical JSON."
    )
    device_name: Mapped[str] = mapped_column(String(128), doc="Product name, as CUDA reports it.")
    sm_count: Mapped[int] = mapped_column(doc="Streaming multiprocessors of the device or MIG instance.")
    capability: Mapped[str] = mapped_column(
        String(8), server_default="", doc="Compute capability, such as 9.0."
    )
    mig: Mapped[str] = mapped_column(
        String(32), server_default="", doc="MIG profile, such as 1g.18gb; empty for a whole GPU."
    )
    sm_budget: Mapped[int] = mapped_column(server_default="0", doc="Multiprocessors that a launch may fill.")
    driver: Mapped[str] = mapped_column(String(64), doc="NVIDIA driver version.")
    cuda: Mapped[str] = mapped_column(String(64), doc="CUDA version that torch was built for.")
    torch: Mapped[str] = mapped_column(String(64), doc="torch version; decides the baseline's cuBLAS too.")
    cutlass_dsl: Mapped[str] = mapped_column(String(64), doc="nvidia-cutlass-dsl version; empty when absent.")
    triton: Mapped[str] = mapped_column(String(64), doc="triton version; empty when absent.")


class ProblemRow(Base):
    """Matrix products: D[m, n] = sum over k of A[m, k] * B[k, n], per batch entry."""

    __tablename__ = "problems"
    __table_args__ = (
        UniqueConstraint(
            *("m", "n", "k", "batch", "in_dtype", "out_dtype", "a_major", "b_major", "out_major"),
            *("alignment", "epilogue", "accumulation"),
            name="uq_problems_all",  # the convention's name would exceed PostgreSQL's 63 letters
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True, doc="Key.")
    m: Mapped[int] = mapped_column(doc="Rows of A and D.")
    n: Mapped[int] = mapped_column(doc="Columns of B and D.")
    k: Mapped[int] = mapped_column(doc="Columns of A, rows of B: the reduced extent.")
    batch: Mapped[int] = mapped_column(doc="Number of independent products.")
    in_dtype: Mapped[str] = mapped_column(String(16), doc="Element type of A and B, such as bf16.")
    out_dtype: Mapped[str] = mapped_column(String(16), doc="Element type of D, such as fp32.")
    a_major: Mapped[str] = mapped_column(String(1), doc="Contiguous mode of A: k or m.")
    b_major: Mapped[str] = mapped_column(String(1), doc="Contiguous mode of B: k or n.")
    out_major: Mapped[str] = mapped_column(String(1), doc="Contiguous mode of D: n or m.")
    alignment: Mapped[int] = mapped_column(
        server_default="16", doc="Bytes that divide the addresses and strides of A and B: 1, 2, 4, 8 or 16."
    )
    epilogue: Mapped[str] = mapped_column(
        String(128),
        server_default="",
        doc="Steps between the product and its store, such as bias_n+gelu; empty if there are none.",
    )
    accumulation: Mapped[str] = mapped_column(
        String(16), server_default="fast", doc="How sums over k are kept: fast, or for fp8 two_level."
    )


class CandidateRow(Base):
    """Points of a search space: how a kernel is compiled and launched."""

    __tablename__ = "candidates"

    id: Mapped[int] = mapped_column(primary_key=True, doc="Key.")
    digest: Mapped[str] = mapped_column(
        String(16), unique=True, doc="SHA-256 (16 hex digits) of `json`; rows where it differs are ignored."
    )
    family: Mapped[str] = mapped_column(String(64), doc="Kernel family, such as cute_sm90.")
    json: Mapped[str] = mapped_column(
        Text, doc="Canonical JSON with the keys family, compile and launch: the parameters by name."
    )
    label: Mapped[str] = mapped_column(
        Text, doc="Short name for tables, as last given; empty when never given."
    )


class MeasurementRow(Base):
    """History of correct candidates with their samples and the baseline's of the same interleave."""

    __tablename__ = "measurements"
    __table_args__ = (
        CheckConstraint("median_us > 0", name="median_us"),
        CheckConstraint("baseline_median_us > 0", name="baseline_median_us"),
        Index(None, "problem_id", "fingerprint_id", "candidate_id"),
        # The leaderboard of version 0.1 read by this index; the next revision of the schema may drop it.
        Index(
            *("ix_measurements_compared", "candidate_id", "fingerprint_id", "problem_id"),
            *("policy", "origin", "ratio"),
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True, doc="Key; grows with time.")
    problem_id: Mapped[int] = mapped_column(ForeignKey("problems.id"), doc="What was solved.")
    candidate_id: Mapped[int] = mapped_column(ForeignKey("candidates.id"), doc="What solved it.")
    fingerprint_id: Mapped[int] = mapped_column(ForeignKey("fingerprints.id"), doc="Where.")
    kernel_source: Mapped[str] = mapped_column(
        String(16),
        server_default="",
        doc="Hash of the sources of the candidate's family; empty for a library's kernels.",
    )
    origin: Mapped[str] = mapped_column(
        Text,
        server_default="",
        doc="Empty for measurements of this database, else the file that they were merged or imported from.",
    )
    method: Mapped[str] = mapped_column(
        "policy",
        String(16),
        doc="How it was measured. Interleaved: screen (few rounds, while searching), race (a final race's), "
        "final (its winner's). In steady-state timing: qualifying (before a final race), steady_final.",
    )
    samples_us: Mapped[list[float]] = mapped_column(
        JsonText, doc="JSON list: device time of one product per round, microseconds."
    )
    baseline_us: Mapped[list[float]] = mapped_column(
        JsonText, doc="JSON list: torch.mm in the same rounds and order, microseconds."
    )
    median_us: Mapped[float] = mapped_column(doc="Median of samples_us.")
    baseline_median_us: Mapped[float] = mapped_column(doc="Median of baseline_us.")
    ratio: Mapped[float] = mapped_column(
        doc="Speed relative to torch.mm, median of the rounds' ratios; above 1 is faster."
    )
    spread: Mapped[float] = mapped_column(doc="Interquartile range of samples_us over their median.")
    baseline_spread: Mapped[float] = mapped_column(
        doc="Interquartile range of baseline_us over their median."
    )
    noise: Mapped[float] = mapped_column(
        doc="A/A noise: relative difference of two captures of one kernel in this interleave."
    )
    relative_error: Mapped[float] = mapped_column(doc="||D - fp32 reference|| / ||fp32 reference||.")
    sm_clock_mhz: Mapped[float | None] = mapped_column(
        doc="SM clock while measuring, MHz; null when unknown."
    )
    power_w: Mapped[float | None] = mapped_column(doc="Board power, W; null when unknown.")
    temperature_c: Mapped[float | None] = mapped_column(
        doc="GPU temperature, degrees Celsius; null when unknown."
    )
    throttle_reasons: Mapped[list[str] | None] = mapped_column(
        JsonText, doc="JSON list of active clock limits, such as sw_power_cap; null when unknown."
    )
    telemetry: Mapped[dict[str, Any]] = mapped_column(
        "evidence",
        JsonText,
        doc="JSON object: further telemetry, such as operand sets, rounds and launch arguments.",
    )
    registers: Mapped[int | None] = mapped_column(doc="Registers per thread; null for a library's kernels.")
    spill_bytes: Mapped[int | None] = mapped_column(doc="Stack plus spills, bytes; null when unknown.")
    smem_bytes: Mapped[int | None] = mapped_column(
        doc="Dynamic shared memory of one block; null when unknown."
    )
    warnings: Mapped[list[str] | None] = mapped_column(
        JsonText, doc="JSON list of the compiler's performance warnings, such as C7510; null when unknown."
    )
    compile_seconds: Mapped[float | None] = mapped_column(
        doc="Wall time of the compilation, s; null when unknown."
    )
    created_at: Mapped[datetime] = mapped_column(UtcTime, doc="When it was published, ISO 8601, UTC.")


class FailureRow(Base):
    """History of candidates that did not compile, launch or finish, or gave wrong results."""

    __tablename__ = "failures"
    __table_args__ = (Index(None, "problem_id", "fingerprint_id", "candidate_id"),)

    id: Mapped[int] = mapped_column(primary_key=True, doc="Key; grows with time.")
    problem_id: Mapped[int] = mapped_column(ForeignKey("problems.id"), doc="For which problem.")
    candidate_id: Mapped[int] = mapped_column(ForeignKey("candidates.id"), doc="What failed.")
    fingerprint_id: Mapped[int] = mapped_column(ForeignKey("fingerprints.id"), doc="Where.")
    kernel_source: Mapped[str] = mapped_column(String(16), server_default="", doc="As in measurements.")
    origin: Mapped[str] = mapped_column(Text, server_default="", doc="As in measurements.")
    stage: Mapped[str] = mapped_column(String(16), doc="compile, load, launch, wrong, timeout or crash.")
    reason: Mapped[str] = mapped_column(Text, doc="One line.")
    created_at: Mapped[datetime] = mapped_column(UtcTime, doc="When it was published, ISO 8601, UTC.")


class RecordRow(Base):
    """The best measurement of a problem under a fingerprint: what dispatch launches.

    There is none if the best evidence of every candidate says that torch.mm is faster.
    """

    __tablename__ = "records"
    __table_args__ = (UniqueConstraint("problem_id", "fingerprint_id", "policy"),)

    id: Mapped[int] = mapped_column(primary_key=True, doc="Key.")
    problem_id: Mapped[int] = mapped_column(ForeignKey("problems.id"), doc="The problem.")
    fingerprint_id: Mapped[int] = mapped_column(ForeignKey("fingerprints.id"), index=True, doc="The device.")
    goal: Mapped[str] = mapped_column(
        "policy", String(32), server_default=FASTEST, doc="Meaning of best: fastest, relative to torch.mm."
    )
    measurement_id: Mapped[int] = mapped_column(ForeignKey("measurements.id"), doc="The best one.")
    candidate_id: Mapped[int] = mapped_column(
        ForeignKey("candidates.id"),
        doc="Copied from the measurement, like the next three, so that dispatch need not read that row.",
    )
    ratio: Mapped[float] = mapped_column(doc="The measurement's.")
    kernel_source: Mapped[str] = mapped_column(String(16), doc="The measurement's.")
    measured_by: Mapped[str] = mapped_column(
        String(16), server_default="screen", doc="How it was measured: the measurement's `policy`."
    )
    confirmed: Mapped[bool] = mapped_column(
        doc="True when it won a final race; false when it is the best so far of an unfinished search."
    )
    chosen_at: Mapped[datetime] = mapped_column(UtcTime, doc="When this measurement became the best, UTC.")


class ChoiceRow(Base):
    """History of records: every measurement that was ever the record, and since when.

    The latest is in `records`, unless its kernel turned out slower than torch.mm.
    """

    __tablename__ = "choices"
    __table_args__ = (Index(None, "problem_id", "fingerprint_id", "policy"),)

    id: Mapped[int] = mapped_column(primary_key=True, doc="Key; grows with time.")
    problem_id: Mapped[int] = mapped_column(ForeignKey("problems.id"), doc="The problem.")
    fingerprint_id: Mapped[int] = mapped_column(ForeignKey("fingerprints.id"), doc="The device.")
    goal: Mapped[str] = mapped_column("policy", String(32), doc="As in records.")
    measurement_id: Mapped[int] = mapped_column(ForeignKey("measurements.id"), doc="What became the record.")
    confirmed: Mapped[bool] = mapped_column(doc="As in records.")
    chosen_at: Mapped[datetime] = mapped_column(UtcTime, doc="When, ISO 8601, UTC.")
