"""Shares problems out among the tuners of a fleet: each problem is tuned once under each fingerprint.

A *task* asks for a problem to be tuned; a *claim* says who does so under one fingerprint, and until when.
The worker renews its claim while it tunes; the claim of one that died expires, and another takes it over.
Moments are those of the server's clock, so that the hosts' own need not agree.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from sqlalchemy import Connection, Table, case, delete, exists, func, literal, or_, select, update

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.store.database import Database
from tunegemm.store.models import ClaimRow, FingerprintRow, ProblemRow, TaskRow
from tunegemm.store.publishing import fingerprint_key, insert_missing, problem_key
from tunegemm.store.rows import fingerprint_values, readable

#: A problem that this many workers died of, or gave back, is called failed: it would end the others too.
MAX_ATTEMPTS = 3

_TASKS, _CLAIMS = cast(Table, TaskRow.__table__), cast(Table, ClaimRow.__table__)
_PROBLEM_COLUMNS = [getattr(ProblemRow, field.name) for field in fields(Problem)]


@dataclass(frozen=True)
class Task:
    """A problem to tune, and how much to try."""

    problem: Problem
    effort: str = "quick"
    trials: int | None = None
    """Most candidates to measure; None for the effort's own number."""
    budget_seconds: float | None = None
    """Most time; None for no limit."""


@dataclass(frozen=True)
class Claim:
    """A task that one worker holds under one fingerprint."""

    id: int
    worker: str
    attempt: int
    """1 for the first worker that tries, more for one that took over. Tells a claim from a later one."""
    task: Task


@dataclass(frozen=True)
class Progress:
    """How far the tasks are under one fingerprint."""

    device_name: str
    driver: str
    torch: str
    waiting: int
    """Claimed by nobody, or by a worker that died."""
    claimed: int
    """Being tuned."""
    done: int
    failed: int


@dataclass(frozen=True)
class Holding:
    """A claim that is held, or a task that failed: what `fleet status` lists."""

    problem: Problem
    device_name: str
    worker: str
    since: datetime
    failure: str
    """Empty for a claim that is held."""


def worker_name() -> str:
    """A name for this process that no other has: host, process and a random part."""
    return f"{socket.gethostname()[:64]}/{os.getpid()}/{secrets.token_hex(3)}"


class Claims:
    """The tasks and claims of one database. Safe to use from several threads and processes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, tasks: Iterable[Task], *, again: bool = False) -> int:
        """Ask for problems to be tuned; how many of them nobody had asked for before.

        For the others how much to try is replaced. again: those that are done or failed are tuned anew.
        """
        added = 0
        with self._database._writing() as connection:
            for task in tasks:
                how = asdict(task)
                problem = problem_key(connection, how.pop("problem"))
                row = {"problem_id": problem, "added_at": _now(connection), **how}
                insert = insert_missing(connection, _TASKS).returning(_TASKS.c.id)
                if connection.scalar(insert, row) is not None:
                    added += 1
                else:
                    connection.execute(update(TaskRow).where(TaskRow.problem_id == problem).values(**how))
                if again:
                    ended = (ClaimRow.problem_id == problem) & ClaimRow.finished_at.is_not(None)
                    connection.execute(delete(ClaimRow).where(ended))
        return added

    def claim(self, fingerprint: Fingerprint, worker: str, lease_s: float) -> Claim | None:
        """The oldest task that nobody tunes under this fingerprint, held for `lease_s`; None without one."""
        with self._database._writing() as connection:
            device = fingerprint_key(connection, fingerprint_values(fingerprint))
            _offer(connection, device)
            while True:
                now = _now(connection)
                row = connection.execute(_free(device, now)).one_or_none()
                if row is None:
                    return None
                claim_id, attempts, effort, trials, budget_seconds, last, *extents = row
                try:
                    problem = Problem(*extents)
                except (ValueError, TypeError) as error:
                    failure = f"not a readable problem: {error}"
                else:
                    failure = f"{attempts} workers gave up or died, the last one {last}"
                    if attempts < MAX_ATTEMPTS:
                        values = {
                            "worker": worker, "attempts": attempts + 1, "claimed_at": now,
                            "expires_at": now + timedelta(seconds=lease_s),
                        }  # fmt: skip
                        connection.execute(update(ClaimRow).where(ClaimRow.id == claim_id).values(**values))
                        task = Task(problem, effort, trials, budget_seconds)
                        return Claim(claim_id, worker, attempts + 1, task)
                ended = update(ClaimRow).where(ClaimRow.id == claim_id)
                connection.execute(ended.values(finished_at=now, failure=failure))

    def renew(self, claim: Claim, lease_s: float) -> bool:
        """Hold a claim for `lease_s` from now; False when it expired and another worker has it."""
        return self._change(claim, lambda now: {"expires_at": now + timedelta(seconds=lease_s)})

    def finish(self, claim: Claim, failure: str = "") -> bool:
        """Say that the task is done, or why it cannot be; False as for `renew`."""
        return self._change(claim, lambda now: {"finished_at": now, "failure": failure, "expires_at": None})

    def give_back(self, claim: Claim, *, tried: bool) -> bool:
        """Let another worker have it at once; False as for `renew`. tried: count it as an attempt."""
        attempts = claim.attempt - (not tried)
        return self._change(claim, lambda now: {"expires_at": now, "attempts": attempts})

    def unfinished(self, fingerprint: Fingerprint) -> int:
        """Tasks that are neither done nor failed under a fingerprint; some may be held by others."""
        ended = exists().where(
            ClaimRow.problem_id == TaskRow.problem_id,
            ClaimRow.fingerprint_id == FingerprintRow.id,
            ClaimRow.finished_at.is_not(None),
            FingerprintRow.digest == fingerprint.digest,
        )
        with self._database._reading() as session:
            return session.scalar(select(func.count()).select_from(TaskRow).where(~ended)) or 0

    def progress(self) -> list[Progress]:
        """One entry per fingerprint that had a worker, by device name."""
        with self._database._reading() as session:
            tasks = session.scalar(select(func.count()).select_from(TaskRow)) or 0
            held = ClaimRow.finished_at.is_(None) & (ClaimRow.expires_at > _now(session.connection()))
            ended = ClaimRow.finished_at.is_not(None)
            well = ended & (ClaimRow.failure == "")
            badly = ended & (ClaimRow.failure != "")
            facts = (FingerprintRow.device_name, FingerprintRow.driver, FingerprintRow.torch)
            counts = [func.sum(case((condition, 1), else_=0)) for condition in (held, well, badly)]
            query = select(*facts, *counts).join_from(ClaimRow, FingerprintRow)
            rows = session.execute(query.group_by(FingerprintRow.id, *facts).order_by(*facts)).all()
        return [
            Progress(name, driver, torch, tasks - claimed - done - failed, claimed, done, failed)
            for name, driver, torch, claimed, done, failed in rows
        ]

    def tasks(self) -> int:
        """How many problems were asked for."""
        with self._database._reading() as session:
            return session.scalar(select(func.count()).select_from(TaskRow)) or 0

    def holdings(self) -> list[Holding]:
        """The claims that are held, and the failures, oldest first."""
        with self._database._reading() as session:
            held = ClaimRow.finished_at.is_(None) & (ClaimRow.expires_at > _now(session.connection()))
            query = (
                select(*_PROBLEM_COLUMNS, FingerprintRow.device_name, ClaimRow.worker)
                .add_columns(func.coalesce(ClaimRow.finished_at, ClaimRow.claimed_at), ClaimRow.failure)
                .select_from(ClaimRow)
                .join(ProblemRow)
                .join(FingerprintRow)
                .where(held | (ClaimRow.failure != ""))
                .order_by(ClaimRow.claimed_at)
            )
            rows = session.execute(query).all()
        count = len(_PROBLEM_COLUMNS)
        return readable(rows, lambda row: Holding(Problem(*row[:count]), *row[count:]), "claim")

    def _change(self, claim: Claim, values: Callable[[datetime], Mapping[str, Any]]) -> bool:
        mine = (
            (ClaimRow.id == claim.id)
            & (ClaimRow.worker == claim.worker)
            & (ClaimRow.attempts == claim.attempt)
            & ClaimRow.finished_at.is_(None)
        )
        with self._database._writing() as connection:
            change = update(ClaimRow).where(mine).values(**values(_now(connection)))
            return connection.execute(change).rowcount == 1


def _offer(connection: Connection, device: int) -> None:
    """Adds the claims that nobody holds yet: one per task."""
    known = exists().where(ClaimRow.problem_id == TaskRow.problem_id, ClaimRow.fingerprint_id == device)
    names = ["problem_id", "fingerprint_id", "worker", "attempts", "failure"]
    missing = (
        select(TaskRow.problem_id, literal(device), literal(""), literal(0), literal(""))
        .where(~known)
        .order_by(TaskRow.id)  # one order, so that two hosts that do this do not wait for each other
    )
    connection.execute(insert_missing(connection, _CLAIMS).from_select(names, missing))


def _free(device: int, now: datetime) -> Any:
    """The oldest claim that may be taken. On a server those that others are taking are skipped; SQLite's
    transactions that write come one at a time, and there the clause is left out."""
    return (
        select(ClaimRow.id, ClaimRow.attempts, TaskRow.effort, TaskRow.trials, TaskRow.budget_seconds)
        .add_columns(ClaimRow.worker, *_PROBLEM_COLUMNS)
        .select_from(ClaimRow)
        .join(TaskRow, TaskRow.problem_id == ClaimRow.problem_id)
        .join(ProblemRow, ProblemRow.id == ClaimRow.problem_id)
        .where(
            ClaimRow.fingerprint_id == device,
            ClaimRow.finished_at.is_(None),
            or_(ClaimRow.expires_at.is_(None), ClaimRow.expires_at <= now),
        )
        .order_by(TaskRow.id)
        .limit(1)
        .with_for_update(of=ClaimRow, skip_locked=True)
    )


def _now(connection: Connection) -> datetime:
    if connection.dialect.name == "postgresql":
        return connection.scalars(select(func.clock_timestamp())).one().astimezone(UTC)
    return datetime.now(UTC)
