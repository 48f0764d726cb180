"""Fits what is predicted of plain products of many rows to what `benchmarks.row_choices` measured.

    python -m benchmarks.row_fit --gpu h200 --also h100-80gb-hbm3     # db/rows-h200.json

The validation goes to results/GPU/rows.json. Boosted trees (scikit-learn, needed here only) expect the
logarithm of each launch's ratio to torch.mm in steady state. What was screened only has what its ratio at
shared clocks says of that, at less weight. Validation leaves out all products of a fold of (N, K), fits to
the others and lets the trees choose: the least margin is taken with which at most `LOSERS` of all products
are under 0.99 of torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import command, parser_of
from benchmarks.fits import (
    MARGIN_STEP,
    MOST_MARGIN,
    OF_OTHERS,
    RESULTS,
    Floats,
    Mask,
    boosted,
    device_of,
    source,
    trees_of,
    validated,
    write,
    write_validation,
)
from benchmarks.row_choices import LEAST_ROWS, MOST_ROWS
from tunegemm.choose import rows
from tunegemm.choose.forest import written
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt.choice import parse_label
from tunegemm.model import shortlist
from tunegemm.model.features import OF_ROWS
from tunegemm.model.terms import Columns
from tunegemm.resources import data_path

#: Most of all products that may be under 0.99 of torch, in validation.
LOSERS = 0.005
LEAST_MARGIN = 0.015
#: Ends of the ranges of rows that have a margin of their own.
RANGES = (512, 2048, MOST_ROWS)
#: Kernels of ours that are kept for serving.
KERNELS = 24
#: Weight of what was screened only.
OF_SCREENED = 0.25
SETTINGS: dict[str, Any] = {
    "max_iter": 200, "learning_rate": 0.06, "min_samples_leaf": 12, "max_features": 0.4
}  # fmt: skip


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("row_fit", __doc__, gpu=False)
    parser.add_argument("--gpu", default="h200", help="folder of benchmarks/results that has the data")
    parser.add_argument("--also", help="another such folder, whose products are fitted to, too")
    parser.add_argument("--out", type=Path, help="folder of rows-GPU.json (default: db)")
    parser.add_argument("--results", type=Path, help="folder of rows.json (default: results/GPU)")
    fit(parser.parse_args(arguments))


class Frame:
    """All launches of all products of a GPU as rows."""

    def __init__(self, gpu: str) -> None:
        data = json.loads(source(gpu, "row_choices.json").read_text(encoding="utf-8"))
        self.meta, device = data["meta"], device_of(data["meta"])
        self.rows = [
            row
            for row in data["rows"]
            if row["algorithms"] and parse_label(row["algorithms"][0][0]) and row["launches"]
        ]
        tables, product, screened, final, at = [], [], [], [], []
        for number, row in enumerate(self.rows):
            problem = Problem.parse(f"{row['m']}x{row['n']}x{row['k']}")
            launches, found = measured(problem, row, device)
            torchs = parse_label(row["algorithms"][0][0])
            assert torchs is not None  # as `measured` has it
            tables.append(rows.row_table(problem, found, device, torchs))
            product += [number] * len(launches)
            screened += [one[7] for one in launches]
            final += [one[8] or np.nan for one in launches]
            at += [row.get("is_capped", row["turn_ms"] > 0)] * len(launches)
        self.table, self.product = np.vstack(tables), np.array(product)
        self.screened, self.final = np.log(screened), np.log(final)
        self.is_final = np.isfinite(self.final)
        self.extents = [(self.rows[number]["n"], self.rows[number]["k"]) for number in product]
        self.capped = np.array(at)
        self.lead, self.clock = self._steadily()
        self.logs = np.where(self.is_final, self.final, self._said(self.lead, self.clock))
        self.weights = np.where(self.is_final, 1.0, OF_SCREENED) * np.exp(-np.clip(-self.logs / 0.12, 0, 2))
        self.m = np.array([row["m"] for row in self.rows])

    def named(self) -> Any:
        """Source and place of each launch."""
        return self.table[:, [OF_ROWS.index(name) for name in ("source", "place")]].astype(int)

    def _slowed(self) -> Floats:
        """How much more than torch's kernel the power cap slows each, by the model."""
        ahead, steadily = (self.table[:, OF_ROWS.index(name)] for name in ("ahead", "ahead_steady"))
        found: Floats = np.where(self.capped, ahead - steadily, 0.0)
        return found

    def _said(self, lead: float, clock: float) -> Floats:
        return np.where(self.capped, lead * self.screened - clock * self._slowed(), self.screened)

    def _steadily(self) -> tuple[float, float]:
        """What of a lead at shared clocks is left in steady state, and of the clock that is predicted."""
        rows = self.is_final & self.capped
        if rows.sum() < 50:
            return 0.8, 0.45
        terms = np.stack([self.screened[rows], -self._slowed()[rows]], axis=1)
        lead, clock = np.linalg.lstsq(terms, self.final[rows], rcond=None)[0]
        return float(lead), float(clock)


def measured(problem: Problem, row: dict[str, Any], device: Device) -> tuple[list[list[Any]], rows.Launches]:
    """A product's launches as `benchmarks.row_choices` wrote them, and what the model says of each and, last,
    of torch's own."""
    labels = [label for label, _ in row["algorithms"]]
    launches = [one for one in row["launches"] if one[0] != rows.LIBRARY or rows.stand_in(labels[one[1]])]
    stands = [rows.stand_in(label) for label in labels]
    columns = Columns.of(
        [one for launch in [*launches, _TORCHS] if (one := _kernel(problem, launch, stands))]
    )
    sources, places = (np.array([launch[at] for launch in [*launches, _TORCHS]]) for at in (0, 1))
    return launches, rows.of_columns(problem, device, sources, places, columns)


_TORCHS: list[Any] = [rows.LIBRARY, 0]


def _kernel(problem: Problem, launch: list[Any], stands: list[Candidate | None]) -> Candidate | None:
    """A kernel at its launch; of an algorithm what stands for it in the model."""
    number, place = launch[:2]
    if number == rows.LIBRARY:
        return stands[place]
    split_k, second, along_n, swizzle, streamed = launch[2:7]
    if number == rows.LARGE:
        kernel = shortlist.large_kernels(Problem.parse("64x4096x4096"))[place].kernel
        return shortlist.launched_by_gpc(problem, kernel, along_n=bool(along_n), streamed=bool(streamed))
    kernel = shortlist.listed()[place]
    return shortlist.launched(problem, kernel, split_k, bool(second), bool(along_n), swizzle)


def fit(options: argparse.Namespace) -> None:
    """Validates, fits to everything, and writes both files."""
    frame = Frame(options.gpu)
    frames = [frame, *([Frame(options.also)] if options.also else [])]
    for one in frames:
        print(f"{len(one.rows)} products, {len(one.logs)} launches; of leads {one.lead:.2f}, {one.clock:.2f}")
    table, logs = np.vstack([one.table for one in frames]), np.concatenate([one.logs for one in frames])
    weights = np.concatenate([one.weights for one in frames])
    weights[len(frame.logs) :] *= OF_OTHERS
    extents = [extent for one in frames for extent in one.extents]

    def fitted(some: Mask) -> Any:
        return boosted(table[some], logs[some], weights[some], **SETTINGS)

    (expected,) = validated(extents, fitted, table)
    kept = keep(frame)
    may = np.array([int(place) in kept[int(number)] for number, place in frame.named().tolist()])
    of_products = (np.flatnonzero((frame.product == number) & may) for number in range(len(frame.rows)))
    chosen = np.array([some[expected[: len(may)][some].argmax()] for some in of_products])
    hopes, got = expected[chosen], frame.logs[chosen]
    margins = calibrated(frame.m, hopes, got)
    served = hopes > np.array(margins)[np.searchsorted(RANGES, frame.m)]
    of_each = [np.flatnonzero(frame.product == number) for number in range(len(frame.rows))]
    best = np.array([max(0.0, frame.logs[some].max()) for some in of_each])
    report = summary(frame.m, served, got) | {"best": round(float(np.exp(best.mean())), 4)}
    for low, high in zip((LEAST_ROWS - 1, *RANGES), RANGES, strict=False):
        some = (frame.m > low) & (frame.m <= high)
        report[f"to {high}"] = summary(frame.m[some], served[some], got[some])
    print(margins, json.dumps(report))
    usable = [margin if margin < MOST_MARGIN else None for margin in margins]
    data = {
        "gpu": frame.meta["gpu"],
        "fitted_to": {
            "products": len(frame.rows),
            "of_others": sum(len(one.rows) for one in frames[1:]),
            "date": frame.meta["date"][:10],
        },
        "list": rows.digest_of_lists(),
        "kernels": {str(number): places for number, places in kept.items()},
        "rows": list(RANGES),
        "extents": [int(extreme(row[name] for row in frame.rows for name in "nk")) for extreme in (min, max)],
        "margins": {"plain": usable},
        "served": {"plain": {name: report[name] for name in ("products", "share", "under_099")}},
        **trees_of(fitted(np.ones(len(logs), dtype=bool))),
    }
    write((options.out or data_path("db")) / f"rows-{options.gpu}.json", written(data, OF_ROWS))
    lines = [
        {name: row[name] for name in "mnk"}
        | {
            "expected": round(float(np.exp(hope)), 4),
            "got": round(float(np.exp(one)), 4),
            "served": bool(taken),
        }
        for row, hope, one, taken in zip(frame.rows, hopes, got, served, strict=True)
    ]
    also = f" --also {options.also}" if options.also else ""
    meta = frame.meta | {"command": f"python -m benchmarks.row_fit --gpu {options.gpu}{also}"}
    write_validation((options.results or RESULTS / options.gpu) / "rows.json", meta, report, lines)


def keep(frame: Frame) -> dict[int, list[int]]:
    """Places by source: each adds most to the best of those before it. All algorithms are kept."""
    names = sorted({(int(one[0]), int(one[1])) for row in frame.rows for one in row["launches"]})
    number_of = {name: number for number, name in enumerate(names)}
    best = np.zeros((len(frame.rows), len(names)))
    columns = [number_of[number, place] for number, place in frame.named().tolist()]
    np.maximum.at(best, (frame.product, np.array(columns)), frame.logs)
    free = [number for number, (number_of_source, _) in enumerate(names) if number_of_source == rows.LIBRARY]
    reached = best[:, free].max(axis=1) if free else np.zeros(len(frame.rows))
    kept: dict[int, list[int]] = {
        rows.LARGE: [],
        rows.LISTED: [],
        rows.LIBRARY: list(range(1, rows.REQUESTED)),
    }
    for _ in range(KERNELS):
        gains = np.maximum(best, reached[:, None]).mean(axis=0) - reached.mean()
        at = int(gains.argmax())
        if gains[at] <= 0:
            break
        reached = np.maximum(reached, best[:, at])
        kept[names[at][0]].append(names[at][1])
    print("kept", kept, round(float(np.exp(reached.mean())), 4))
    return {number: sorted(places) for number, places in kept.items()}


def calibrated(m: Any, hopes: Floats, got: Floats) -> list[float]:
    """By range of rows the least margin with which few lose."""
    number = np.searchsorted(RANGES, m)
    return [_margin(hopes[number == one], got[number == one]) for one in range(len(RANGES))]


def _margin(hopes: Floats, got: Floats) -> float:
    for margin in np.arange(LEAST_MARGIN, MOST_MARGIN, MARGIN_STEP):
        final = np.where(hopes > margin, got, 0.0)
        if (final < np.log(0.99)).mean() <= LOSERS:
            return round(float(margin), 4)
    return MOST_MARGIN


def summary(m: Any, served: Mask, got: Floats) -> dict[str, Any]:
    """Of the validation: what is served, and what all products have then."""
    final = np.where(served, got, 0.0)
    return {
        "products": len(m),
        "share": round(float(served.mean()), 3),
        "geometric_mean": round(float(np.exp(final.mean())), 4),
        "under_099": int((final < np.log(0.99)).sum()),
        "slowest": round(float(np.exp(final.min())), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
