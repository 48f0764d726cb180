"""Fits the order in which policy `batch_invariant` tries kernels to the measurements of `fit.choices`.

    python -m fit.order                  # db/order.json, results/order.json
    python -m fit.order --keep 28        # prints lines for db/invariant.toml, too

Boosted trees (scikit-learn, needed here only) predict for each launch with undivided k its lag behind the
best such launch of its product, in log, from `model.features.OF_ORDER`. The products of all measured GPUs are
fitted together. Validation leaves out a fold of all (N, K), fits to the others and lets the trees choose:
rows `{gpu, m, n, k, chosen, by_model, best}` of speeds relative to torch.mm, where the best is that of all
measured launches of the class.
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
from benchmarks.results import RESULTS, geometric_mean
from fit.trees import (
    FOLDS,
    Floats,
    Mask,
    boosted,
    launches_of,
    measured,
    ratios_and_weights,
    trees_of,
    validated,
    write,
    write_validation,
    written,
)
from tunegemm.choose.invariance import ranked
from tunegemm.describe.problem import Problem
from tunegemm.generate import families
from tunegemm.generate.tiles import ORDERED
from tunegemm.model import shortlist
from tunegemm.model.features import OF_ORDER, family_numbers, features
from tunegemm.resources import data_path

GPUS = ("h200", "h100-80gb-hbm3")
MOST_ROWS = 16384
#: Beyond this lag, all launches count as equal.
FARTHEST = -0.5
SETTINGS: dict[str, Any] = {
    "max_iter": 400, "learning_rate": 0.08, "min_samples_leaf": 20, "max_features": 0.5
}  # fmt: skip
#: Ends of the ranges of rows in the summary.
RANGES = (16, 64, 256, 1024, MOST_ROWS)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("fit.order", __doc__, gpu=False)
    parser.add_argument("--keep", type=int, default=0, help="print so many kernels that serve best")
    parser.add_argument("--out", type=Path, help="folder of order.json (default: db)")
    parser.add_argument("--results", type=Path, help="folder of the validation's file (default: results)")
    fit(parser.parse_args(arguments))


class Frame:
    """All launches of the class, of all products, as rows."""

    def __init__(self, gpus: tuple[str, ...] = GPUS) -> None:
        self.meta: dict[str, Any] = {}
        self.products: list[dict[str, Any]] = []
        tables, logs, weights, product = [], [], [], []
        for gpu in gpus:
            head, lines, device = measured(gpu, MOST_ROWS)
            self.meta[gpu] = head["meta"]["date"][:10]
            for line in lines:
                problem = Problem.parse(f"{line['m']}x{line['n']}x{line['k']}")
                whole = [item for item in line["launches"] if is_ordered(problem, item)]
                if not whole:
                    continue
                result = launches_of(problem, whole, device)
                families_of = family_numbers([shortlist.listed()[place] for place in result.kernels])
                tables.append(features(OF_ORDER, problem, result.columns, result.terms, families_of, device))
                log, weight = ratios_and_weights(whole)
                logs.append(log)
                weights.append(weight)
                product += [len(self.products)] * len(whole)
                self.products.append(line | {"gpu": gpu, "problem": problem, "device": device})
        self.table, self.logs = np.vstack(tables), np.concatenate(logs)
        self.weights, self.product = np.concatenate(weights), np.array(product)
        best = np.full(len(self.products), -np.inf)
        np.maximum.at(best, self.product, self.logs)
        self.behind = np.maximum(self.logs - best[self.product], FARTHEST)
        self.extents = [(self.products[number]["n"], self.products[number]["k"]) for number in product]


def is_ordered(problem: Problem, launch: list[Any]) -> bool:
    place, split_k, second, along_n, swizzle = launch[:5]
    kernel = shortlist.listed()[place]
    candidate = shortlist.launched(problem, kernel, split_k, bool(second), bool(along_n), swizzle)
    return families.reduction_class(problem, candidate) == ORDERED


def fit(options: argparse.Namespace) -> None:
    """Validates, fits to everything, and writes both files."""
    frame = Frame()
    print(f"{len(frame.products)} products, {len(frame.logs)} launches of the class")
    (expected,) = validated(frame.extents, lambda rows: fitted(frame, rows), frame.table)
    rows = chosen(frame, expected)
    summary = {
        gpu: {f"to {high}": _means([row for row in rows if row["gpu"] == gpu and low < row["m"] <= high])
              for low, high in zip((0, *RANGES), RANGES, strict=False)}
        for gpu in frame.meta
    }  # fmt: skip
    for gpu, ranges in summary.items():
        print(gpu, json.dumps(ranges))
    model = fitted(frame, np.ones(len(frame.logs), dtype=bool))
    data = {
        "fitted_to": {"products": len(frame.products), "measured": frame.meta},
        **trees_of(model),
    }
    write((options.out or data_path("db")) / "order.json", written(data, OF_ORDER))
    meta = {"command": "python -m fit.order", "measured": frame.meta, "folds": FOLDS}
    write_validation((options.results or RESULTS) / "order.json", meta, summary, rows)
    if options.keep:
        for gated in (False, True):
            print("gated" if gated else "all")
            for kernel in keep(frame, model, options.keep, gated):
                print(kernel)


def fitted(frame: Frame, rows: Mask) -> Any:
    """A model of some rows."""
    return boosted(frame.table[rows], frame.behind[rows], frame.weights[rows], **SETTINGS)


def chosen(frame: Frame, expected: Floats) -> list[dict[str, Any]]:
    """The choices of the trees, of the model and of hindsight for each product."""
    us = frame.table[:, OF_ORDER.index("log_us")]
    results = []
    for number, line in enumerate(frame.products):
        rows = np.flatnonzero(frame.product == number)
        ratios = np.exp(frame.logs[rows])
        results.append(
            {name: line[name] for name in ("gpu", "m", "n", "k")}
            | {
                "chosen": round(float(ratios[expected[rows].argmax()]), 4),
                "by_model": round(float(ratios[us[rows].argmin()]), 4),
                "best": round(float(ratios.max()), 4),
            }
        )
    return results


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    if not rows:
        return {"products": 0}
    return {"products": len(rows)} | {
        name: round(geometric_mean(row[name] for row in rows), 4) for name in ("chosen", "by_model", "best")
    }


def keep(frame: Frame, model: Any, count: int, gated: bool) -> list[str]:
    """Lines of the kernels that serve best together, each adding most to those before; unmeasured figures of
    a product come from the trees."""
    kernels = [
        kernel
        for kernel in shortlist.listed()
        if kernel.family == "cute_sm90"
        and kernel["tile_scheduler"] == "static"
        and not (gated and kernel["swap_ab"])
    ]
    table = np.zeros((len(frame.products), len(kernels)))
    for number, line in enumerate(frame.products):
        result = {
            prediction.candidate: prediction.expected
            for prediction in ranked(line["problem"], kernels, line["device"], model.predict)
        }
        by_kernel = {
            tuple(item[name] for name in families.get("cute_sm90").parameters["compile"]): log
            for item, log in result.items()
        }
        for place, kernel in enumerate(kernels):
            names = families.get("cute_sm90").parameters["compile"]
            table[number, place] = by_kernel.get(tuple(kernel[name] for name in names), FARTHEST)
    table = np.maximum(table, 2 * FARTHEST)
    reached, lines = np.full(len(table), 2 * FARTHEST), []
    for _ in range(count):
        place = int(np.maximum(table, reached[:, None]).mean(axis=0).argmax())
        reached = np.maximum(reached, table[:, place])
        kernel = kernels[place]
        names = (
            "schedule", "tile_m", "tile_n", "tile_k", "stages", "cluster_m", "cluster_n", "epi_n", "swap_ab",
        )  # fmt: skip
        lines.append(json.dumps([kernel[name] for name in names]) + f",  # {np.exp(reached.mean()):.4f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
