"""`tunegemm verify`: race the stored top five again and report what moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tunegemm.cli import options

if TYPE_CHECKING:
    from tunegemm.tuning.verify import Verification


def command(
    shape: options.SomeShapes = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also records of this very software, not only those marked.")
    ] = False,
    top: Annotated[int, options.count_option("--top", "Stored candidates per record.")] = 5,
    device: options.GpuSpec = None,
    db: options.DatabaseLocation = None,
    workers: options.Workers = None,
) -> None:
    """Race the records that another driver or library patch left in doubt, and their stored rivals, again."""
    shapes = options.parse_shapes(shape)
    from tunegemm.store import Database
    from tunegemm.store.layers import read_records
    from tunegemm.tuning.tuner import Tuner, open_gpu
    from tunegemm.tuning.verify import due, verify

    opened = open_gpu(device)
    with Database.open(db) as database, Tuner(opened, database, workers=workers) as tuner:
        records = database.records() if db is not None else read_records()[0]
        wanted = [record for record in records if not shapes or record.problem.shape in shapes]
        marked = due(wanted, opened.fingerprint, everything=everything)
        if not marked:
            options.say(f"nothing to verify: {len(wanted)} records, none in doubt on {opened.name}")
        for judgement, record in marked:
            verification = verify(tuner, record, judgement, top)
            options.say(*lines(verification))
            if verification.result.interrupted:
                raise typer.Exit(130)


def lines(verification: Verification) -> list[str]:
    """What to print of one record."""
    best = verification.result.best
    if best is None:
        outcome = f"nothing could be measured ({verification.result.note})"
    elif verification.replaced:
        label = verification.result.labels[best.candidate.digest]
        outcome = f"the record moved from {verification.record.label} to {label}"
    else:
        outcome = f"{verification.record.label} stays the record"
    reason = verification.judgement.reason or "same software"
    found = [f"{verification.record.problem}: {outcome}  [{reason}]"]
    for move in verification.moves:
        after = move.reason if move.after is None else f"{move.after:.3f}"
        before = "?" if move.before is None else f"{move.before:.3f}"
        found.append(f"  {'moved' if move.moved else 'same':6} {before} to {after} of torch.mm  {move.label}")
    return found
