"""`tunegemm verify`: race the stored top five, or predicted kernels, again and say what is the record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunegemm.cli import arguments, options, printing
from tunegemm.cli.options import option
from tunegemm.cli.results import failure_line
from tunegemm.describe.problem import Problem
from tunegemm.describe.workload import read

if TYPE_CHECKING:
    from tunegemm.choose.neighbours import Offer
    from tunegemm.store import Record
    from tunegemm.store.validity import Judgement
    from tunegemm.tuning.progress import TuneResult


def command(
    shape: options.SomeShapes = None,
    predicted: Annotated[
        bool,
        typer.Option("--predicted", help="Race the predicted kernels of the products in --shape or --from."),
    ] = False,
    from_files: Annotated[
        list[Path] | None,
        option(
            "FILE",
            "With --predicted: a program's products, as `tune --from` reads them. May be repeated.",
            "--from",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Race all records, not only those marked for verification.")
    ] = False,
    top: Annotated[int, options.count_option("Stored candidates to race per record.")] = 5,
    device: options.GpuSpec = None,
    db: options.DatabaseLocation = None,
    workers: options.Workers = None,
) -> None:
    """Race records of another driver or library patch again, together with their stored rivals.

    With --predicted: race the predicted kernels; the winner, or torch.mm, becomes the record.
    """
    if from_files and not predicted:
        raise arguments.UsageError(
            f"--from {from_files[0]}: works with --predicted only; select records with --shape"
        )
    if predicted:
        if everything:
            raise arguments.UsageError("--predicted and --all: give one of them")
        if bool(shape) == bool(from_files):
            raise arguments.UsageError(
                "--predicted: name products by either --shape 8x9216x4608 or --from shapes.json"
            )
        named = [Problem.parse(text) for text in arguments.expanded(shape)]
        demands, refused = read(*from_files) if from_files else ([], [])
        named += [demand.problem for demand in demands]
        printing.say(*(f"left out: {line}" for line in refused), err=True)
        verify_predicted(list(dict.fromkeys(named)), device, db, workers)
        return
    shapes = arguments.parse_shapes(shape)
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
            printing.say(f"nothing to verify: all {len(wanted)} records are current on {opened.name}")
        for judgement, record in marked:
            result = verify(tuner, record, top)
            printing.say(*filter(None, (outcome_line(record, judgement, result), failure_line(result))))
            if result.interrupted:
                raise typer.Exit(130)


def verify_predicted(problems: list[Problem], spec: str | None, db: str | None, workers: int | None) -> None:
    """Races the predicted kernels of each problem and prints the outcome; for other problems, the reason."""
    import torch

    from tunegemm.choose.snapshot import Snapshot, read_snapshot
    from tunegemm.store import Database
    from tunegemm.tuning.tuner import Tuner, open_gpu
    from tunegemm.tuning.verify import measure, predictions

    opened = open_gpu(spec)
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's heuristics need CUDA, as in a program
    with Database.open(db, create=True) as database, Tuner(opened, database, workers=workers) as tuner:
        snapshot = Snapshot(database.records()) if db is not None else read_snapshot()
        for problem in problems:
            options, why = predictions(snapshot, problem, opened)
            if not options:
                printing.say(f"{problem}: {why}")
                continue
            result = measure(tuner, problem, options)
            printing.say(prediction_line(options[0], result))
            if result.interrupted:
                raise typer.Exit(130)


def prediction_line(predicted: Offer, result: TuneResult) -> str:
    """What became of a product's prediction: of the kernel with the highest predicted speed."""
    from tunegemm.generate.cublaslt import is_torch
    from tunegemm.measure.outcome import Measurement

    kernel, best = predicted.record, result.best
    text = f"{result.problem}: {kernel.label} was predicted at {predicted.expected:.3f} x torch.mm"
    if best is None:
        return f"{text}; nothing could be measured ({result.note})"
    ratios = {one.candidate: one.ratio for one in result.outcomes if isinstance(one, Measurement)}
    measured = ratios.get(kernel.candidate)
    text += " and failed" if measured is None else f" and measured at {measured:.3f}"
    if best.candidate == kernel.candidate:
        outcome = "won, and is the record"
    elif is_torch(best.candidate):
        outcome = "lost, and torch.mm is the record"
    else:
        name = result.label(best.candidate)
        outcome = f"the record is {name}, also predicted, and measured at {best.ratio:.3f}"
    return f"{text}: {result.note or outcome}"


def outcome_line(record: Record, judgement: Judgement, result: TuneResult) -> str:
    """What became of one record."""
    best = result.best
    if best is None:
        outcome = f"nothing could be measured ({result.note})"
    elif best.candidate == record.candidate:
        outcome = f"{record.label} stays the record, from {record.ratio:.3f} to {best.ratio:.3f} of torch.mm"
    else:
        outcome = f"the record moved from {record.label} to {result.label(best.candidate)}"
    return f"{record.problem}: {outcome}  [{judgement.reason or 'same software'}]"
