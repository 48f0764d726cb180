"""Fits what is predicted of plain products of many rows to what `benchmarks.row_choices` measured.

    python -m benchmarks.row_fit --gpu h200 --also h100-80gb-hbm3

That writes db/rows-h200.json and results/h200/rows.json. Boosted trees (scikit-learn, needed here only)
expect the logarithm of each launch's ratio to torch.mm in steady state, of the kernels that ship for many
rows. A sample in steady state is off by 2 %, and what was screened says the same to some 2 %: both are
weighed (`estimated`). Validation leaves out all products of a fold of
(N, K), fits to the others and lets the trees choose: the least margin is taken with which at most `LOSERS` of
all products are under 0.99 of torch by that estimate.
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
from benchmarks.row_choices import LARGE, MOST_ROWS
from tunegemm.choose import rows
from tunegemm.choose.forest import written
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.generate.cublaslt.choice import LibraryChoice, parse_label
from tunegemm.model import shortlist
from tunegemm.model.features import OF_ROWS
from tunegemm.model.terms import Columns
from tunegemm.resources import data_path

#: Rows up to which none are served: of 95 such products none passed the margin, and to ask the trees takes
#: milliseconds for each new number of rows.
NONE_TO = 1024
#: Most of all products that may be under 0.99 of torch, in validation.
LOSERS = 0.005
LEAST_MARGIN = 0.03
#: Kernels that are kept for serving: each adds what the ones before lack.
KERNELS = 16
#: Weight of what was screened only.
OF_SCREENED = 0.4
#: Standard deviations, in log, of what both GPUs' products have: of what screening says of steady state, in
#: common for a product's launches and of each; of steady-state timing, of torch's mean of two and of each.
SAYS, SAYS_EACH, TIMED, TIMED_EACH = 0.016, 0.014, 0.0157, 0.022
SETTINGS: dict[str, Any] = {
    "max_iter": 200, "learning_rate": 0.05, "min_samples_leaf": 15, "max_features": 0.4
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
    """The launches of the kernels that may serve, of all products of a GPU, as rows."""

    def __init__(self, gpu: str) -> None:
        data = json.loads(source(gpu, "row_choices.json").read_text(encoding="utf-8"))
        self.meta, device = data["meta"], device_of(data["meta"])
        self.all_products = len(data["rows"])
        every = [_of_all(row, device) for row in data["rows"]]
        lead, clock = _steadily(every)
        print(f"{gpu}: {len(every)} products; of a lead {lead:.2f} is left, of the clock {clock:.2f}")
        self.rows: list[dict[str, Any]] = []
        tables, logs, weights, product = [], [], [], []
        for row, (numbers, slowed) in zip(data["rows"], every, strict=True):
            problem = Problem.parse(f"{row['m']}x{row['n']}x{row['k']}")
            torchs = parse_label(row["algorithms"][0][0])
            if torchs is None or problem.k % rows.UNIT_OF_K:
                continue
            mine = numbers[:, 0] == LARGE
            found = modelled(problem, numbers[mine], torchs, device)
            tables.append(rows.row_table(problem, found, device, torchs))
            log = estimated(numbers, slowed, lead, clock)[mine]
            logs.append(log)
            weight = np.where(np.isfinite(numbers[mine, 8]), 1.0, OF_SCREENED)
            weights.append(weight * np.exp(-np.clip(-log / 0.12, 0, 2)))
            product += [len(self.rows)] * int(mine.sum())
            self.rows.append(row)
        self.table, self.logs, self.weights = np.vstack(tables), np.concatenate(logs), np.concatenate(weights)
        self.product = np.array(product)
        self.places = self.table[:, OF_ROWS.index("place")].astype(int)
        self.extents = [(self.rows[number]["n"], self.rows[number]["k"]) for number in product]


def modelled(problem: Problem, numbers: Floats, torchs: LibraryChoice, device: Device) -> rows.Launches:
    """The launches of the kernels that may serve as `benchmarks.row_choices` wrote them, and torch's own."""
    kernels = shortlist.large_kernels(rows.PLAIN)
    launches = [
        shortlist.launched_by_gpc(
            problem, kernels[int(one[1])].kernel, along_n=bool(one[4]), streamed=bool(one[6])
        )
        for one in numbers
    ]
    places = np.append(numbers[:, 1].astype(int), -1)
    return rows.modelled(problem, device, places, Columns.of([*launches, rows.stand_in_of(torchs)]))


def _of_all(row: dict[str, Any], device: Device) -> tuple[Floats, Floats]:
    """All launches of a product as numbers, of whatever source, and by how much more than torch's kernel the
    power cap slows each, by the model; not known of others than those that may serve."""
    numbers = np.array(row["launches"], dtype=float)
    slowed = np.full(len(numbers), np.nan)
    torchs = parse_label(row["algorithms"][0][0])
    if torchs is not None:
        problem = Problem.parse(f"{row['m']}x{row['n']}x{row['k']}")
        mine = numbers[:, 0] == LARGE
        found = modelled(problem, numbers[mine], torchs, device)
        slowed[mine] = found.slowed[:-1] - found.slowed[-1]
    return numbers, slowed


def _steadily(every: Sequence[tuple[Floats, Floats]]) -> tuple[float, float]:
    """What of a lead at shared clocks is left in steady state, and of the clock that the model expects."""
    screened, slowed, final = (
        np.concatenate(columns)
        for columns in zip(
            *((np.log(numbers[:, 7]), slowed, np.log(numbers[:, 8])) for numbers, slowed in every),
            strict=True,
        )
    )
    known = np.isfinite(final) & np.isfinite(slowed)
    terms = np.stack([screened[known], -slowed[known]], axis=1)
    lead, clock = np.linalg.lstsq(terms, final[known], rcond=None)[0].tolist()
    return lead, clock


def estimated(numbers: Floats, slowed: Floats, lead: float, clock: float) -> Floats:
    """The log of each launch's ratio in steady state, by what was screened and what was timed, each by its
    spread: of what all of a product have in common, and of what each has more."""
    final = np.log(numbers[:, 8])
    said = lead * np.log(numbers[:, 7]) - clock * np.where(np.isfinite(slowed), slowed, 0.0)
    timed = np.isfinite(final)
    if not timed.any():
        return said
    count = timed.sum()
    missing = final[timed] - said[timed]
    common, each = SAYS**2 + SAYS_EACH**2 / count, SAYS_EACH**2 / (SAYS_EACH**2 + TIMED_EACH**2)
    moved = missing.mean() * common / (common + TIMED**2 + TIMED_EACH**2 / count)
    result: Floats = said + moved * SAYS**2 / common
    result[timed] = said[timed] + moved + each * (missing - missing.mean())
    return result


def fit(options: argparse.Namespace) -> None:
    """Validates, fits to everything, and writes both files."""
    frame = Frame(options.gpu)
    frames = [frame, *([Frame(options.also)] if options.also else [])]
    table, logs = np.vstack([one.table for one in frames]), np.concatenate([one.logs for one in frames])
    weights = np.concatenate([one.weights for one in frames])
    weights[len(frame.logs) :] *= OF_OTHERS
    extents = [extent for one in frames for extent in one.extents]

    def fitted(some: Mask) -> Any:
        return boosted(table[some], logs[some], weights[some], **SETTINGS)

    (expected,) = validated(extents, fitted, table)
    kept = keep(frame)
    may = np.isin(frame.places, kept)
    of_each = [np.flatnonzero((frame.product == number) & may) for number in range(len(frame.rows))]
    asked = [number for number, some in enumerate(of_each) if len(some)]
    chosen = np.array([of_each[number][expected[of_each[number]].argmax()] for number in asked])
    hopes, got = expected[chosen], frame.logs[chosen]
    for one in np.arange(0.01, 0.06, 0.005).tolist():
        print(f"{one:.3f}", json.dumps(summary(frame.all_products, hopes > one, got)))
    hopes = np.where([frame.rows[number]["m"] > NONE_TO for number in asked], hopes, 0.0)
    margin = least_margin(frame.all_products, hopes, got)
    served = hopes > margin
    best = [max(0.0, float(frame.logs[frame.product == number].max())) for number in asked]
    report = summary(frame.all_products, served, got)
    report["best"] = round(float(np.exp(sum(best) / frame.all_products)), 4)
    print(margin, kept, json.dumps(report))
    head = frame.meta | {
        "command": f"python -m benchmarks.row_fit --gpu {options.gpu}"
        + (f" --also {options.also}" if options.also else "")
    }
    data = {
        "gpu": frame.meta["gpu"],
        "fitted_to": {
            "products": len(frame.rows),
            "of_others": sum(len(one.rows) for one in frames[1:]),
            "date": frame.meta["date"][:10],
        },
        "list": rows.digest_of_list(),
        "kernels": kept,
        "rows": [NONE_TO, MOST_ROWS],
        "extents": [int(extreme(row[name] for row in frame.rows for name in "nk")) for extreme in (min, max)],
        "margins": {"plain": [None, margin if margin < MOST_MARGIN else None]},
        "served": {"plain": {name: report[name] for name in ("products", "share", "under_099")}},
        **trees_of(fitted(np.ones(len(logs), dtype=bool))),
    }
    write((options.out or data_path("db")) / f"rows-{options.gpu}.json", written(data, OF_ROWS))
    lines = [
        {name: frame.rows[number][name] for name in "mnk"}
        | {
            "expected": round(float(np.exp(hope)), 4),
            "got": round(float(np.exp(one)), 4),
            "served": bool(taken),
        }
        for number, hope, one, taken in zip(asked, hopes, got, served, strict=True)
    ]
    write_validation((options.results or RESULTS / options.gpu) / "rows.json", head, report, lines)


def keep(frame: Frame) -> list[int]:
    """Places in the list: each kernel adds most to the best of those before it."""
    best = np.zeros((len(frame.rows), int(frame.places.max()) + 1))
    np.maximum.at(best, (frame.product, frame.places), frame.logs)
    reached, kept = np.zeros(len(frame.rows)), []
    for _ in range(KERNELS):
        place = int(np.maximum(best, reached[:, None]).mean(axis=0).argmax())
        reached = np.maximum(reached, best[:, place])
        kept.append(place)
    return sorted(set(kept))


def least_margin(products: int, hopes: Floats, got: Floats) -> float:
    """The least with which few lose; `MOST_MARGIN` where there is none."""
    for margin in np.arange(LEAST_MARGIN, MOST_MARGIN, MARGIN_STEP):
        if ((hopes > margin) & (got < np.log(0.99))).sum() <= LOSERS * products:
            return round(float(margin), 4)
    return MOST_MARGIN


def summary(products: int, served: Mask, got: Floats) -> dict[str, Any]:
    """Of the validation: what is served, and what all products have then."""
    final = np.where(served, got, 0.0)
    return {
        "products": products,
        "share": round(float(served.sum()) / products, 3),
        "geometric_mean": round(float(np.exp(final.sum() / products)), 4),
        "of_served": round(float(np.exp(got[served].mean())), 4) if served.any() else None,
        "under_099": int((final < np.log(0.99)).sum()),
        "slowest": round(float(np.exp(final.min())), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
