"""Claims, on both kinds of database: no problem twice, none lost, and a dead worker's is taken over."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from tests.store.test_database import DEVICE, FINGERPRINT, KERNEL, PROBLEM, measurement
from tests.support.processes import environment
from tests.support.stores import Location, Store, damage
from tunegemm.cli import app
from tunegemm.describe.problem import Problem
from tunegemm.errors import MeasureError, ProblemError
from tunegemm.store import Database
from tunegemm.store.claims import MAX_ATTEMPTS, Claim, Claims, Task, worker_name
from tunegemm.tuning import fleet
from tunegemm.tuning.progress import TuneResult

SMALL = Problem.parse("64x64x64")
#: As if the moment had come until which claims are held; they go by the database's clock.
EXPIRE = "UPDATE claims SET expires_at = '2000-01-01 00:00:00'"
UPGRADED = dataclasses.replace(FINGERPRINT, driver="590.00")


def problems(count: int) -> list[Problem]:
    return [Problem.parse(f"{64 * number}x64x64") for number in range(1, count + 1)]


@pytest.fixture
def claims(database: Database) -> Claims:
    return Claims(database)


class TestClaims(Store):
    def test_the_oldest_task_first_with_what_was_asked(self, claims: Claims) -> None:
        task = Task(PROBLEM, "full", 200, 90.5)
        assert claims.add([task, Task(SMALL)]) == 2
        first = claims.claim(FINGERPRINT, "a", 60)
        assert first is not None and first.task == task and first.attempt == 1
        second = claims.claim(FINGERPRINT, "b", 60)
        assert second is not None and second.task == Task(SMALL, "quick", None, None)
        assert claims.claim(FINGERPRINT, "c", 60) is None
        assert claims.unfinished(FINGERPRINT) == 2

    def test_asking_twice_adds_none_and_changes_how_much(self, claims: Claims) -> None:
        assert claims.add([Task(PROBLEM), Task(PROBLEM, "full")]) == 1
        assert claims.add([Task(PROBLEM, "exhaustive", 7)]) == 0
        claim = claims.claim(FINGERPRINT, "a", 60)
        assert claim is not None and claim.task == Task(PROBLEM, "exhaustive", 7)
        assert claims.tasks() == 1

    def test_each_fingerprint_tunes_each_problem(self, claims: Claims) -> None:
        claims.add([Task(PROBLEM)])
        here = claims.claim(FINGERPRINT, "a", 60)
        assert here is not None and claims.finish(here)
        assert claims.claim(FINGERPRINT, "a", 60) is None
        assert claims.unfinished(FINGERPRINT) == 0
        assert claims.unfinished(UPGRADED) == 1
        assert claims.claim(UPGRADED, "b", 60) is not None

    def test_an_expired_claim_is_taken_over_and_its_worker_notices(
        self, claims: Claims, location: Location
    ) -> None:
        claims.add([Task(PROBLEM)])
        dead = claims.claim(FINGERPRINT, "dead", 60)
        assert dead is not None
        assert claims.claim(FINGERPRINT, "b", 60) is None
        damage(location, EXPIRE)
        taken = claims.claim(FINGERPRINT, "b", 60)
        assert taken is not None and taken.attempt == 2
        assert not claims.renew(dead, 60)
        assert not claims.finish(dead)
        assert not claims.give_back(dead, tried=True)
        assert claims.renew(taken, 60) and claims.finish(taken)

    def test_a_renewed_claim_is_kept(self, claims: Claims, location: Location) -> None:
        claims.add([Task(PROBLEM)])
        held = claims.claim(FINGERPRINT, "a", 60)
        damage(location, EXPIRE)
        assert held is not None and claims.renew(held, 60)
        assert claims.claim(FINGERPRINT, "b", 60) is None

    def test_what_is_given_back_is_free_at_once(self, claims: Claims) -> None:
        claims.add([Task(PROBLEM)])
        first = claims.claim(FINGERPRINT, "a", 60)
        assert first is not None and claims.give_back(first, tried=False)
        second = claims.claim(FINGERPRINT, "b", 60)
        assert second is not None and second.attempt == 1

    def test_a_problem_that_ends_its_workers_fails(self, claims: Claims) -> None:
        claims.add([Task(PROBLEM), Task(SMALL)])
        for number in range(MAX_ATTEMPTS):
            claim = claims.claim(FINGERPRINT, f"w{number}", 60)
            assert claim is not None and claim.task.problem == PROBLEM
            assert claims.give_back(claim, tried=True)
        claim = claims.claim(FINGERPRINT, "next", 60)
        assert claim is not None and claim.task.problem == SMALL
        (failed, held) = sorted(claims.holdings(), key=lambda entry: entry.failure == "")
        assert failed.problem == PROBLEM and "3 workers gave up or died, the last one w2" in failed.failure
        assert (held.problem, held.worker) == (SMALL, "next")

    def test_again_reopens_what_ended_and_leaves_what_is_held(self, claims: Claims) -> None:
        claims.add([Task(PROBLEM), Task(SMALL)])
        done, held = claims.claim(FINGERPRINT, "a", 60), claims.claim(FINGERPRINT, "b", 60)
        assert done is not None and held is not None and claims.finish(done, "broken")
        assert claims.add([Task(PROBLEM), Task(SMALL)], again=True) == 0
        again = claims.claim(FINGERPRINT, "c", 60)
        assert again is not None and (again.task.problem, again.attempt) == (PROBLEM, 1)
        assert claims.renew(held, 60)

    def test_progress(self, claims: Claims) -> None:
        claims.add([Task(problem) for problem in problems(4)])
        assert claims.progress() == []
        done, failed, held = (claims.claim(FINGERPRINT, "a", 60) for _ in range(3))
        assert done and failed and held
        claims.finish(done)
        claims.finish(failed, "no candidate works")
        (progress,) = claims.progress()
        counts = (progress.waiting, progress.claimed, progress.done, progress.failed)
        assert (progress.device_name, counts) == ("NVIDIA H200", (1, 1, 1, 1))

    def test_a_damaged_problem_fails_and_the_next_one_is_tuned(
        self, claims: Claims, location: Location
    ) -> None:
        claims.add([Task(PROBLEM), Task(SMALL)])
        damage(location, "UPDATE problems SET in_dtype = 'int3' WHERE m = 4096")
        claim = claims.claim(FINGERPRINT, "a", 60)
        assert claim is not None and claim.task.problem == SMALL
        assert claims.progress()[0].failed == 1
        assert [entry.problem for entry in claims.holdings()] == [SMALL]

    def test_processes_share_the_problems_out(self, claims: Claims, location: Location) -> None:
        wanted = problems(60)
        claims.add([Task(problem) for problem in wanted])
        workers = [child("tune_all", location) for _ in range(4)]
        tuned = [worker.communicate(timeout=90)[0].split() for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0, 0, 0]
        together = [shape for shapes in tuned for shape in shapes]
        assert sorted(together) == sorted(problem.shape for problem in wanted)
        assert sum(bool(shapes) for shapes in tuned) > 1
        (progress,) = claims.progress()
        assert (progress.done, progress.claimed, progress.waiting) == (60, 0, 0)

    def test_a_killed_workers_problem_is_taken_over_after_its_lease(
        self, claims: Claims, database: Database, location: Location
    ) -> None:
        claims.add([Task(PROBLEM), Task(SMALL)])
        doomed = child("hang", location)
        assert doomed.stdout is not None and doomed.stdout.readline() == "published\n"
        doomed.kill()
        doomed.wait()
        killed = time.monotonic()
        tuned = [
            worked.claim
            for worked in fleet.work(claims, FINGERPRINT, lambda task: publish(database, task), lease_s=1.0)
        ]
        assert 0.2 < time.monotonic() - killed < 20
        assert [(claim.task.problem, claim.attempt) for claim in tuned] == [(SMALL, 1), (PROBLEM, 2)]
        assert len(database.measurements(PROBLEM, FINGERPRINT)) == 2  # the dead worker's is kept


def publish(database: Database, task: Task, *, interrupted: bool = False) -> TuneResult:
    """A tuning of one measurement."""
    found = measurement(1.05, KERNEL)
    database.publish(task.problem, DEVICE, found)
    return TuneResult(
        task.problem, DEVICE, "measured", found, (found,), (), {}, 0.0, 0, interrupted=interrupted
    )


class TestWorker(Store):
    def test_a_claim_is_renewed_while_its_task_is_tuned(self, claims: Claims, database: Database) -> None:
        claims.add([Task(PROBLEM)])
        rival = []
        renewals = threading.Semaphore(0)

        class Counted(Claims):
            def renew(self, claim: Claim, lease_s: float) -> bool:
                renewed = super().renew(claim, lease_s)
                renewals.release()
                return renewed

        def tune(task: Task) -> TuneResult:
            for _ in range(5):  # five thirds of the time that it is claimed for
                assert renewals.acquire(timeout=20)
            rival.append(claims.claim(FINGERPRINT, "rival", 60))
            return publish(database, task)

        (worked,) = fleet.work(Counted(database), FINGERPRINT, tune, lease_s=0.6)
        assert rival == [None] and worked.kept
        assert claims.unfinished(FINGERPRINT) == 0
        assert "tunegemm-claim" not in {thread.name for thread in threading.enumerate()}

    def test_an_error_gives_the_claim_back(self, claims: Claims) -> None:
        claims.add([Task(PROBLEM)])

        def tune(task: Task) -> TuneResult:
            raise MeasureError("the GPU went away")

        with pytest.raises(MeasureError):
            list(fleet.work(claims, FINGERPRINT, tune))
        claim = claims.claim(FINGERPRINT, "next", 60)
        assert claim is not None and claim.attempt == 2

    def test_a_task_too_large_for_the_gpu_does_not_stop_the_others(
        self, claims: Claims, database: Database
    ) -> None:
        claims.add([Task(PROBLEM), Task(SMALL)])

        def tune(task: Task) -> TuneResult:
            if task.problem == PROBLEM:
                raise ProblemError("too large")
            return publish(database, task)

        assert [worked.claim.task.problem for worked in fleet.work(claims, FINGERPRINT, tune)] == [SMALL]
        assert [entry.failure for entry in claims.holdings()] == ["too large"]

    def test_an_interrupted_tuning_is_left_to_others(self, claims: Claims, database: Database) -> None:
        claims.add([Task(PROBLEM), Task(SMALL)])
        tuned = list(fleet.work(claims, FINGERPRINT, lambda t: publish(database, t, interrupted=True)))
        assert len(tuned) == 1
        assert claims.unfinished(FINGERPRINT) == 2
        claim = claims.claim(FINGERPRINT, "next", 60)
        assert claim is not None and (claim.task.problem, claim.attempt) == (PROBLEM, 1)

    def test_a_tuning_without_winner_is_a_failure(self, claims: Claims) -> None:
        claims.add([Task(PROBLEM)])
        nothing = TuneResult(PROBLEM, DEVICE, "measured", None, (), (), {}, 0.0, 0, note="all failed")
        list(fleet.work(claims, FINGERPRINT, lambda task: nothing))
        assert [entry.failure for entry in claims.holdings()] == ["all failed"]


class TestCommands(Store):
    def run(self, *arguments: str) -> str:
        done = CliRunner().invoke(app, ["fleet", *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    def test_add_and_status(self, location: Location, claims: Claims) -> None:
        db = ("--db", str(location))
        said = self.run("add", "--shape", "64x64x64", "--shape", "128x64x64", "--budget", "1m", *db)
        assert said == "2 added; 2 in all. Tune them with: tunegemm fleet work\n"
        said = self.run("add", "--shape", "64x64x64", "--again", *db)
        assert said.startswith("0 added; 1 known already, to be tuned again; 2 in all.")
        assert claims.claim(FINGERPRINT, "host/7/abc", 60) is not None
        shown = self.run("status", *db)
        assert (
            "2 shapes to tune" in shown and "64x64x64 bf16 tn on NVIDIA H200: being tuned by host/7" in shown
        )
        document = json.loads(self.run("status", "--json", *db))
        assert document["tasks"] == 2
        assert [(row["waiting"], row["claimed"]) for row in document["progress"]] == [(1, 1)]

    def test_work_needs_a_gpu(self, location: Location) -> None:
        done = CliRunner().invoke(app, ["fleet", "work", "--device", "replay:h200", "--db", str(location)])
        assert done.exit_code == 2
        assert "device 'replay:h200' measures nothing, and this needs measurements; use cuda:N" in done.output


def child(role: str, location: Location) -> subprocess.Popen[str]:
    """Another process that runs one of the functions below."""
    command = [sys.executable, "-m", "tests.tuning.test_fleet", role, str(location)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())


def tune_all(database: Database) -> None:
    for worked in fleet.work(
        Claims(database), FINGERPRINT, lambda task: publish(database, task), lease_s=2.0
    ):
        print(worked.claim.task.problem.shape, flush=True)


def hang(database: Database) -> None:
    """Claims, measures once, and never comes back."""
    claim = Claims(database).claim(FINGERPRINT, worker_name(), 1.0)
    assert claim is not None
    publish(database, claim.task)
    print("published", flush=True)
    signal.pause()


if __name__ == "__main__":
    with Database.open(sys.argv[2]) as opened:
        {"tune_all": tune_all, "hang": hang}[sys.argv[1]](opened)
