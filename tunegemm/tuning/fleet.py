"""A fleet's worker: claim a task, tune it, say so; until all tasks are done under this device's fingerprint.

While it tunes, a thread renews the claim. What is measured is published as it is measured, so a worker that
dies loses nothing but its claim: the one that takes over goes on from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tunegemm.describe.device import Fingerprint
from tunegemm.errors import DatabaseError, ProblemError
from tunegemm.store.claims import Claim, Claims, Task, worker_name
from tunegemm.tuning.progress import TuneResult

#: How long a claim lasts unless it is renewed, seconds: for that long a dead worker's problem waits.
LEASE_S = 120.0
#: Renewals within one lease: two may fail before the claim is lost.
_RENEWALS = 3
#: Longest pause between two looks for work, seconds.
_LONGEST_PAUSE_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Worked:
    """One task that this worker tuned."""

    claim: Claim
    result: TuneResult
    kept: bool
    """False when the claim expired meanwhile, and another worker has taken over."""


def work(
    claims: Claims,
    fingerprint: Fingerprint,
    tune: Callable[[Task], TuneResult],
    *,
    lease_s: float = LEASE_S,
    stay: bool = False,
) -> Iterator[Worked]:
    """Tunes task after task, and yields each.

    Ends when all tasks are done or failed under the fingerprint, or after an interrupted tuning. While
    other workers hold the last ones it waits, since one of them may die. stay: wait for new tasks, too.
    A ProblemError out of `tune` is the task's failure; any other exception gives the claim back, counted as
    an attempt, and ends the worker.
    """
    name = worker_name()
    while True:
        claim = claims.claim(fingerprint, name, lease_s)
        if claim is None:
            if not stay and not claims.unfinished(fingerprint):
                return
            time.sleep(min(lease_s / 4, _LONGEST_PAUSE_S))
            continue
        try:
            with _renewed(claims, claim, lease_s):
                result = tune(claim.task)
        except ProblemError as error:
            # Too large for this GPU: no other attempt helps, and other tasks may fit.
            claims.finish(claim, str(error))
            _log.warning("%s", error)
            continue
        except BaseException as error:
            claims.give_back(claim, tried=not isinstance(error, KeyboardInterrupt))
            raise
        if result.interrupted:
            kept = claims.give_back(claim, tried=False)
        else:
            kept = claims.finish(
                claim, "" if result.best is not None else result.note or "no candidate works"
            )
        yield Worked(claim, result, kept)
        if result.interrupted:
            return


@contextmanager
def _renewed(claims: Claims, claim: Claim, lease_s: float) -> Iterator[None]:
    """Renews a claim from a thread while its task is tuned."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(lease_s / _RENEWALS):
            try:
                if not claims.renew(claim, lease_s):
                    return  # another worker has it; what is measured here is published all the same
            except DatabaseError as error:  # the server may be back before the lease ends
                _log.warning("claim of %s not renewed: %s", claim.task.problem, error)

    thread = threading.Thread(target=renew, name="tunegemm-claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
