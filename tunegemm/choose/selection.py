"""Selects the kernels that may serve a problem, the best first, and says why: for dispatch and `explain`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tunegemm.choose.policies import FASTEST, Policy
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device, Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.generate.cublaslt.names import ADDED
from tunegemm.measure.evidence import leaders, may_be_record, standing
from tunegemm.store.record import Record
from tunegemm.store.validity import Grade, judge_stored

if TYPE_CHECKING:
    from tunegemm.choose.neighbours import Offer, Offers

#: Dtypes for which torch's grouped product waits for the device. The times of its products do not show the
#: wait, and graphs do not allow it.
WAITS = ("fp16",)

Outcome = Literal["hit", "predicted", "near", "miss"]


@dataclass(frozen=True)
class Selection:
    """What dispatch should do with a problem."""

    outcome: Outcome
    options: tuple[Record, ...]
    """The records that may be launched, the best first; empty if torch computes the product."""
    why: str
    """One clause: the reason for the first option, or why there is no option."""
    offers: tuple[Offer, ...] = ()
    """The options that were not measured for this problem, but for others, or predicted."""
    neighbours: tuple[Record, ...] = ()
    """The neighbouring records that were considered, if the problem has no record."""
    rows: tuple[int, int] | None = None
    """For a miss: the numbers of rows at which the otherwise same problem misses for the same reasons; None
    if this is known for no other number."""

    @property
    def advises_tuning(self) -> bool:
        """Whether torch is only a stopgap. It is not if recorded neighbours speak for torch."""
        return self.outcome == "miss" and not self.neighbours


def select(
    snapshot: Snapshot,
    problem: Problem,
    device: Device,
    *,
    near: bool = True,
    policy: Policy = FASTEST,
    rivals: Callable[[Problem], Sequence[Record]] = lambda problem: (),
) -> Selection:
    """Select the kernels that a problem launches on a device: a hit, a prediction, a near hit, or a miss.

    near: whether predictions and neighbours may serve it. Predictions come first, if the device's kind was
    measured; neighbours decide about all other products, and if a prediction promises no gain. rivals:
    returns further measurements of a problem; called only if the policy wants another candidate than the
    fastest.
    """
    if problem.groups:
        return _in_groups(snapshot, problem, device, near, policy.is_batch_invariant)
    record = snapshot.find(problem, device.fingerprint)
    if policy.is_batch_invariant:
        return _batch_invariant(snapshot, record, problem, device, policy, rivals, near)
    if record is not None:
        if not (policy.replaces_torch or may_be_record(record)):
            return Selection("miss", (), f"its record is slower than torch.mm ({record.ratio:.3f} x torch)")
        if policy == FASTEST:
            return Selection("hit", (record,), _grade(record, device))
        return _by_policy(record, problem, device, policy, rivals(problem))
    why = snapshot.why_not(problem, device.fingerprint)
    if not near:
        return Selection("miss", (), why)
    # Imports the model, too: a hit does not need it.
    from tunegemm.choose.predictions import outlook

    ahead = outlook(problem, device, policy.refusal)
    if ahead.options:
        return _offered("predicted", ahead)
    from tunegemm.choose.neighbours import neighbourhood

    why = f"{why}; {ahead.refusal}" if ahead.refusal else why
    around = neighbourhood(snapshot, problem, device, policy.refusal)
    if not around.options and problem.epilogue in ADDED and device.is_real:
        return _added(snapshot, problem, device, policy, why, around)
    if not around.options:
        rows = None
        if ahead.rows is not None and around.rows is not None:
            rows = max(ahead.rows[0], around.rows[0]), min(ahead.rows[1], around.rows[1])
        return Selection("miss", (), f"{why}; {around.refusal}", neighbours=around.neighbours, rows=rows)
    return _offered("near", around)


def _offered(outcome: Outcome, found: Offers) -> Selection:
    options = tuple(offer.record for offer in found.options)
    return Selection(outcome, options, str(found.options[0]), found.options, found.neighbours)


def bucket(rows: int) -> int:
    """The bucket of a number of rows. Numbers up to the same power of two share records."""
    return (rows - 1).bit_length()


def recorded(
    snapshot: Snapshot, problem: Problem, fingerprint: Fingerprint, *, near: bool = True
) -> Record | None:
    """The record of a grouped product, which may be torch's kernel; None if there is no usable one.

    near: whether records with other rows in the same `bucket` count; the nearest number of rows wins. A
    record of torch's kernel counts only if torch won a race, not merely for lack of other candidates.
    """
    usable = [
        record
        for record in snapshot.usable(problem, fingerprint)
        if may_be_record(record)
        and (not record.is_torch or (record.confirmed and problem.in_dtype not in WAITS))
        and (record.problem.m == problem.m or (near and bucket(record.problem.m) == bucket(problem.m)))
    ]
    return min(usable, key=lambda record: abs(math.log(record.problem.m / problem.m)), default=None)


def _in_groups(snapshot: Snapshot, problem: Problem, device: Device, near: bool, ordered: bool) -> Selection:
    """Select as `tunegemm.grouped_mm` does: by a record, else by the table that ships.

    ordered: whether to ignore records of torch's kernel.
    """
    record = recorded(snapshot, problem, device.fingerprint, near=near)
    if record is None or (ordered and record.is_torch):
        why_not = (
            snapshot.why_not(problem, device.fingerprint)
            if record is None
            else "its record names torch's own kernel"
        )
        if not device.architecture.wgmma:
            return Selection("miss", (), f"{why_not}; kernels for groups need Hopper")
        from tunegemm.model.grouped import chosen

        choice = chosen(problem, device.fingerprint.device_name, ordered=ordered)
        if choice is None:
            return Selection("miss", (), f"{why_not}, and no shipped kernel is known to be faster")
        why = f"{choice.label}, which db/grouped.toml names for such groups; {why_not}"
        return Selection("predicted", (), why)
    rows = "" if record.problem.m == problem.m else f"by the record of {record.problem.m} rows"
    return Selection("hit", (record,), "; ".join(filter(None, (rows, _grade(record, device)))))


def _added(
    snapshot: Snapshot, problem: Problem, device: Device, policy: Policy, why: str, around: Offers
) -> Selection:
    """Select for a product of `ADDED` on which none of our kernels promises a gain: the library may."""
    from tunegemm.choose.predictions import by_the_library

    before = "+".join(problem.fused.steps[:-1])
    product = select(snapshot, replace(problem, epilogue=before), device, policy=policy).options
    ahead = by_the_library(problem, device, product, policy.refusal)
    if ahead.options:
        return _offered("predicted", ahead)
    why = f"{why}; {around.refusal}; {ahead.refusal}"
    return Selection("miss", (), why, neighbours=around.neighbours)


def _grade(record: Record, device: Device) -> str:
    judgement = judge_stored(record, device.fingerprint)
    return "" if judgement.grade == Grade.SAME else f"to be verified: {judgement.reason}"


def _by_policy(
    record: Record, problem: Problem, device: Device, policy: Policy, rivals: Sequence[Record]
) -> Selection:
    """The record, or its best rival that the policy allows; torch if that is slower than torch."""
    usable = [rival for rival in rivals if judge_stored(rival, device.fingerprint).usable]
    refusal = policy.refusal(problem, record.candidate)
    if policy.prefer == "min_energy" and not refusal:
        return _least_energy(record, problem, usable)
    if not refusal:
        return Selection("hit", (record,), _grade(record, device))
    # torch cannot leave multiprocessors free, so a slower kernel may be the one that the policy wants.
    for rival in leaders(usable):
        fast = policy.replaces_torch or may_be_record(rival)
        if fast and not policy.refusal(problem, rival.candidate):
            why = f"{policy} refuses the record ({refusal})"
            return Selection("hit", (rival,), why)
    return Selection(
        "miss",
        (),
        f"{policy} refuses its record ({refusal}), and no other measured candidate is as fast as torch",
    )


def _batch_invariant(
    snapshot: Snapshot,
    record: Record | None,
    problem: Problem,
    device: Device,
    policy: Policy,
    rivals: Callable[[Problem], Sequence[Record]],
    near: bool,
) -> Selection:
    """The best measured kernel of the class, followed by those that were measured for other problems.

    Each is legal here, so a kernel that is not compiled costs only speed. Never torch: its bits depend on m.
    """
    from tunegemm.choose.invariance import invariant_options

    if not device.architecture.wgmma:
        why = f"{policy}: equal bits were tested on Hopper only, not on {device.name}"
        return Selection("miss", (), why)
    if record is not None and not policy.refusal(problem, record.candidate):
        own: tuple[Record, ...] = (record,)
        why = _grade(record, device)
    else:
        asked = () if record is None else rivals(problem)
        usable = leaders([rival for rival in asked if judge_stored(rival, device.fingerprint).usable])
        own = tuple(rival for rival in usable if not policy.refusal(problem, rival.candidate))[:1]
        refusal = "it has no record" if record is None else policy.refusal(problem, record.candidate)
        why = f"{policy} refuses the record ({refusal})"
    offers = invariant_options(snapshot, problem, device, policy) if near else ()
    options = (*own, *(offer.record for offer in offers))
    if own:
        return Selection("hit", options, why, offers)
    if options:
        return Selection("near", options, str(offers[0]), offers)
    return Selection(
        "miss",
        (),
        f"{policy} has no kernel of its reduction class for this product, so torch computes it outside the "
        "promise: a row's bits may depend on the number of rows",
    )


def _least_energy(record: Record, problem: Problem, usable: Sequence[Record]) -> Selection:
    fast = {best.candidate for best in leaders(usable) if may_be_record(best)}
    measured = {
        rival.candidate: (energy_mj, rival)
        for rival in sorted(usable, key=standing)  # the better evidence of a candidate comes last
        if rival.candidate in fast
        and isinstance(energy_mj := rival.telemetry.get("energy_mj"), int | float)
        and energy_mj > 0
    }
    if not measured:
        return Selection(
            "hit", (record,), "the energy of its candidates was not measured (`tunegemm tune --energy`)"
        )
    energy_mj, best = min(measured.values(), key=lambda pair: pair[0])
    return Selection("hit", (best,), f"{energy_mj:.3g} mJ each, the least measured")


def read_rivals(problem: Problem) -> list[Record]:
    """Read every measurement of a problem in the user's and the project's database. Loads SQLAlchemy."""
    from tunegemm.store.layers import of_databases

    return [entry for database in of_databases(lambda d: d.measurements(problem), []) for entry in database]
