"""Processes that publish at the same time, and processes that are killed while they publish."""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.database import device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.measure.outcome import Measurement
from tunegemm.store import Database

#: Longest life of a process that will be killed, s: from its first publication up to some 50, or from its
#: start until the new file has its schema and more.
_LIFE_S, _CREATION_S = 0.05, 0.5

#: Children are forked from a process that has loaded everything and nothing is open in: they start at once.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tunegemm.store.database", "tunegemm.store.migrations"])


def measurement(candidate: Candidate, ratio: float) -> Measurement:
    baseline = (210.5, 211.25, 209.0, 210.0)
    return Measurement(
        candidate, tuple(time / ratio for time in baseline), baseline, 1.7e-3, 0.002, {"rounds": 4}
    )


def _kernel(**launch: int) -> Candidate:
    return Candidate.make("cute_sm90", {"tile_m": 128, "tile_n": 256}, launch)


def concurrent(path: Path, writers: int, each: int) -> dict[str, Any]:
    """Seconds, the slowest publication, and how many rows are there afterwards."""
    results = []
    begin = time.perf_counter()
    for writer in range(writers):
        receiver, sender = _PROCESSES.Pipe(duplex=False)
        process = _PROCESSES.Process(target=_publish_many, args=(path, writer, each, sender))
        process.start()
        sender.close()
        results.append((process, receiver))
    slowest = [receiver.recv() for _, receiver in results]  # EOFError when one died of an error
    for process, _ in results:
        process.join()
    seconds = time.perf_counter() - begin
    with Database.open(path, read_only=True) as database:
        kept = database.measurements(Problem(64, 64, 64), device().fingerprint)
    return {
        "name": "concurrent",
        "writers": writers,
        "publications_each": each,
        "seconds": round(seconds, 2),
        "slowest_ms": round(1e3 * max(slowest), 1),
        "kept": len({(m.candidate["writer"], m.candidate["index"]) for m in kept}),
    }


def _publish_many(path: Path, writer: int, count: int, result: Connection) -> None:
    slowest, here = 0.0, device()
    with Database.open(path, create=True) as database:
        for index in range(count):
            found = measurement(_kernel(writer=writer, index=index), 1 + writer / 100 + index / 10_000)
            begin = time.perf_counter()
            database.publish(Problem(64, 64, 64), here, found)
            slowest = max(slowest, time.perf_counter() - begin)
    result.send(slowest)


def killed(path: Path, kills: int, seed: int = 0) -> dict[str, Any]:
    """How many publications were acknowledged before a kill, and how many of those are missing after it."""
    chance = random.Random(seed)
    fingerprint = device().fingerprint
    acknowledged = missing = 0
    for number in range(1, kills + 1):
        # Every tenth while it makes a new file, the others while they publish into one.
        creates = number % 10 == 0
        file = path.with_name(f"{number}-{path.name}") if creates else path
        receiver, sender = _PROCESSES.Pipe(duplex=False)
        process = _PROCESSES.Process(target=_publish_until_killed, args=(file, number, sender))
        process.start()
        sender.close()
        if not creates:
            receiver.recv_bytes()
        # At any moment of its work: what is tested is that no moment is a bad one.
        time.sleep(chance.uniform(0, _CREATION_S if creates else _LIFE_S))
        process.kill()
        process.join()
        told = _count(receiver) + (not creates)
        acknowledged += told
        # As the next process would: it recovers what the killed one left.
        with Database.open(file, create=True) as database:
            kept = database.measurements(Problem(number, 64, 64), fingerprint)
            missing += len(set(range(told)) - {m.candidate["index"] for m in kept})
    with closing(sqlite3.connect(path)) as connection:
        (sound,) = connection.execute("PRAGMA integrity_check").fetchone()
        dangling = connection.execute("PRAGMA foreign_key_check").fetchall()
    return {
        "name": "killed",
        "kills": kills,
        "acknowledged": acknowledged,
        "missing": missing,
        "integrity": sound if not dangling else f"{len(dangling)} dangling references",
    }


def _publish_until_killed(path: Path, number: int, acknowledge: Connection) -> None:
    here, index = device(), 0
    with Database.open(path, create=True) as database:
        while True:
            database.publish(
                Problem(number, 64, 64), here, measurement(_kernel(index=index), 1 + index / 1e5)
            )
            acknowledge.send_bytes(b"kept")
            index += 1


def _count(receiver: Connection) -> int:
    told = 0
    try:
        while True:
            receiver.recv_bytes()
            told += 1
    except (EOFError, OSError):  # the other end is closed; within a message when it was killed there
        return told
