"""Tunes the products whose records ship (db/products.toml) that have no record yet.

    python -m fit.campaign --budget 600          # on a GPU
    python -m fit.campaign --budget 600 --again --rows 4096,2048     # the search has learned since
    python -m fit.campaign --budget 600 --kinds swiglu,fp8           # not plain bf16, but these
    python -m fit.campaign --records db/records --lost benchmarks/results/h200/first_use.json

The last one writes the tuned records beside the shipped ones, without records that gain under 1 % or that
lost when `benchmarks.first_use` measured them again. A run's results are in its database; the next run with
that database continues. Kernels are in the object store (TUNEGEMM_CACHE_DIR). Writes
results/GPU/campaign.json: for each product the time of its tuning.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.batch_invariance import KINDS, of_kind
from benchmarks.command import command, parser_of
from benchmarks.results import Results, meta, problem_fields, results_path
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.resources import data_path
from tunegemm.store import Database
from tunegemm.store.record import Record
from tunegemm.store.shipped import read_shipped, write_records
from tunegemm.tuning.progress import Request
from tunegemm.tuning.tuner import Tuner

#: Records below this ratio are within the error of a final race at the power cap.
LEAST = 1.01
#: A product that was slower than this in a second measurement.
LOST = 0.99
#: Most rows for which logits are tuned: those of each sequence's last token.
MOST_LOGITS_ROWS = 256

METHOD = "Tuner.tune_all of one process, quick; seconds of wall time each"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("fit.campaign", __doc__)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds")
    parser.add_argument(
        "--records", type=Path, metavar="FOLDER", help="write shipped and found records there"
    )
    parser.add_argument("--lost", type=Path, metavar="FILE", help="of benchmarks.first_use")
    parser.add_argument("--compiled-only", action="store_true", help="only kernels of the object store")
    parser.add_argument("--rows", help="M,... in place of the list's")
    parser.add_argument("--kinds", default="bf16", help=f"of {', '.join(KINDS)}; default: %(default)s")
    parser.add_argument("--again", action="store_true", help="tune products with a shipped record, too")
    parser.add_argument("--db", type=Path, default=Path("campaign.sqlite"))
    options = parser.parse_args(arguments)
    if options.records:
        with Database.open(options.db, read_only=True) as database:
            result = list(kept(database.records(), options.lost))
        write_records(best([*read_shipped()[0], *result]), options.records)
        return
    rows = [int(m) for m in options.rows.split(",")] if options.rows else None
    problems = [product for kind in options.kinds.split(",") for product in products(rows, kind)]
    run(problems, find_device(options.device), options)


def products(rows: list[int] | None = None, kind: str = "bf16") -> Iterator[Problem]:
    """The list's products in the order of tuning: all layers of the first rows, then of the others.

    kind: a key of `KINDS`. swiglu covers only layers whose halved result is the input of another layer of the
    model with the reverse extents. Raises ProblemError for an unknown kind.
    """
    listed = tomllib.loads(data_path("db", "products.toml").read_text(encoding="utf-8"))
    layers: dict[str, None] = {}
    for of_model in listed["models"].values():
        layers |= dict.fromkeys(item for item in of_model if kind != "swiglu" or _down(item) in of_model)
    logits = dict.fromkeys(listed["logits"].values()) if kind == "bf16" else {}
    for m in rows or listed["rows"]:
        for layer in layers | (logits if m <= MOST_LOGITS_ROWS else {}):
            yield of_kind(f"{m}x{layer}", kind)


def _down(layer: str) -> str:
    """The layer after the product of a layer's two halves."""
    out_features, _, in_features = layer.partition("x")
    return f"{in_features}x{int(out_features) // 2}"


def kept(records: list[Record], measured_again: Path | None) -> Iterator[Record]:
    """Records worth shipping, including those of torch.mm, which show that nothing is faster. Excludes
    records of an unfinished tuning.
    """
    rows = json.loads(measured_again.read_text())["rows"] if measured_again else []
    lost = {Problem.parse(f"{row['m']}x{row['n']}x{row['k']}") for row in rows if row["ratio"] < LOST}
    for record in records:
        is_faster = record.ratio >= LEAST and record.problem not in lost
        if record.confirmed and (record.is_torch or is_faster):
            yield record


def best(records: Iterable[Record]) -> list[Record]:
    """Of each product on each GPU the record of the highest ratio, of equals the earlier."""
    of_product: dict[tuple[Problem, str], Record] = {}
    for record in records:
        value = of_product.setdefault((record.problem, record.fingerprint.device_name), record)
        if record.ratio > value.ratio:
            of_product[record.problem, record.fingerprint.device_name] = record
    return list(of_product.values())


def run(problems: list[Problem], device: Device, options: argparse.Namespace) -> None:
    """Tunes until the budget is spent."""
    results = Results(results_path(options.out, device, "campaign.json"), meta(device, METHOD))
    deadline = time.monotonic() + options.budget
    with (
        Database.open(options.db, create=True) as database,
        Tuner(device, database, compiled_only=options.compiled_only) as tuner,
    ):
        known = {r.problem for r in database.records()}
        if not options.again:
            known |= {r.problem for r in read_shipped()[0] if r.fingerprint.device_name == device.name}
        known |= set(database.problems())

        left = [problem for problem in problems if problem not in known]

        def requests() -> Iterator[Request]:
            for problem, following in itertools.zip_longest(left, left[1:]):
                if time.monotonic() > deadline:
                    return
                yield Request(problem, following=following)

        for result in tuner.tune_all(requests()):
            best = result.best
            row = problem_fields(result.problem) | {
                "seconds": round(result.seconds, 2), "measured": len({o.candidate for o in result.outcomes}),
                "ratio": round(best.ratio, 4) if best else None,
                "noise": round(best.noise, 5) if best else None,
                "steady": bool(best and best.is_steady),
                "best": result.labels.get(best.candidate.digest, "") if best else "", "note": result.note,
                "compiled_only": options.compiled_only,
            }  # fmt: skip
            if epilogue := result.problem.epilogue:
                row["epilogue"] = epilogue
            results.put(row)
            print(result.problem, row["seconds"], row["ratio"], row["best"], row["note"], flush=True)


if __name__ == "__main__":
    sys.exit(main())
