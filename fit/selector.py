"""Fits the selector to the measurements of `fit.choices`, and validates it on unseen products.

    python -m fit.selector            # into db/predictions-h200.jsonl, results/h200/selector.json
    python -m fit.selector --gpu h100-80gb-hbm3 --also h200
    python -m fit.selector --logits --also h100-80gb-hbm3     # the model `wide`, logits.json

The second command also fits to another GPU's measurements, at half the weight, and validates on the GPU's
own. Boosted trees (scikit-learn, needed here only) predict the logarithm of each launch's ratio to torch.mm
from `model.features`. Every product is fitted twice: as it is, and as if torch's kernel were unknown.
Validation leaves out all products of a folder of (N, K), fits to the others, and lets the trees choose: the
*chosen* launch's measured ratio against the predicted one gives the margins by rows. Choosing the best
prediction among many is optimistic, and this includes that. With `--logits`, the fit includes products that
are wider than all others, and validation uses only these.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import command
from benchmarks.results import RESULTS
from fit.choices import ROWS_OF_LOGITS
from fit.trees import (
    LOSERS,
    MARGIN_STEP,
    MOST_MARGIN,
    OF_OTHERS,
    Floats,
    Mask,
    boosted,
    launches_of,
    measured,
    parser_of_fit,
    put_model,
    ratios_and_weights,
    trees_of,
    validated,
    write_validation,
)
from tunegemm.choose.forest import Forest
from tunegemm.choose.predictions import WIDE, digest_of_list
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError
from tunegemm.generate.cublaslt.choice import parse_label
from tunegemm.model import shortlist
from tunegemm.model.features import features_of_choices

#: Most rows of fitted products, and most rows that are served: of 129 to 256 rows one in seven products would
#: gain, 1 % in all, and some lost 0.06 in validation. Beyond 256, lasting work runs at the power cap, where
#: leads in an interleave do not hold.
FITTED_ROWS, SERVED_ROWS = 256, 128
#: Kernels of the list to keep for serving: each covers products that the ones before do not.
KERNELS = 40
#: Ends of the ranges of rows with separate margins.
RANGES = (8, 32, 64, 128)
#: How much lasting work reduces a lead, in log, by range: 14 of first_use's listed products with 64 rows,
#: timed in steady state, were 0.017 below their records; the 13 in an interleave 0.
SUSTAINED_LOSS = (0.0, 0.0, 0.02, 0.02)
#: The slowest acceptable product, and the largest fraction of all products that may be slower, in validation.
#: The ranges together are half of all products.
SLOWEST, SLOWER = 0.972, 0.002
#: Least margin to try, in log.
LEAST_MARGIN = 0.03
SETTINGS: dict[str, Any] = {
    "max_iter": 320, "learning_rate": 0.07, "min_samples_leaf": 15, "max_features": 0.4
}  # fmt: skip


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of_fit("fit.selector", __doc__)
    parser.add_argument("--logits", action="store_true", help="products as wide as vocabularies")
    fit(parser.parse_args(arguments))


class Frame:
    """All launches of all products as rows."""

    def __init__(self, lines: list[dict[str, Any]], devices: list[Device]) -> None:
        """devices: of each line; those of the first line's device count as this GPU's own."""
        self.rows = lines
        self.own = np.array([device == devices[0] for device in devices])
        known, unknown, logs, weights, places, product = [], [], [], [], [], []
        for number, (line, device) in enumerate(zip(lines, devices, strict=True)):
            problem = Problem.parse(f"{line['m']}x{line['n']}x{line['k']}")
            launches = line["launches"]
            result = launches_of(problem, launches, device)
            library = parse_label(line["library"][0]) if line["library"] else None
            known.append(features_of_choices(problem, result, device, library))
            unknown.append(features_of_choices(problem, result, device, None))
            log, weight = ratios_and_weights(launches)
            logs.append(log)
            weights.append(weight * (1.0 if self.own[number] else OF_OTHERS))
            places.append(result.kernels)
            product += [number] * len(launches)
        self.known, self.unknown = np.vstack(known), np.vstack(unknown)
        self.logs, self.weights = np.concatenate(logs), np.concatenate(weights)
        self.places, self.product = np.concatenate(places), np.array(product)
        self.m = np.array([line["m"] for line in lines])
        self.is_wide = np.array([is_wide(line) for line in lines])
        self.extents = [(lines[number]["n"], lines[number]["k"]) for number in product]


def fit(options: argparse.Namespace) -> None:
    """Validates, fits to everything, and writes both files."""
    gpu = options.gpu
    head, own, device = measured(gpu, FITTED_ROWS)
    rows, devices = list(own), [device] * len(own)
    if options.also:
        other, more, another = measured(options.also, FITTED_ROWS)
        if other["kernels"] != head["kernels"]:
            raise TunegemmError(
                f"{options.also} was measured with another db/selector.toml; measure it again"
            )
        rows, devices = rows + more, devices + [another] * len(more)
    wide = [row for row in own if is_wide(row)]
    head["products"] = len(wide) if options.logits else head["products"] - len(wide)
    if not options.logits:
        devices = [each for row, each in zip(rows, devices, strict=True) if not is_wide(row)]
        rows, own = ([row for row in some if not is_wide(row)] for some in (rows, own))
    frame = Frame(rows, devices)
    kept = keep(frame)
    labels = [head["kernels"][place] for place in kept]
    print(f"{len(own)} of {len(frame.rows)} products, {len(frame.logs)} launches; kept: {labels}")
    known, unknown = validated(frame.extents, lambda rows: fitted(frame, rows), frame.known, frame.unknown)
    expected = {"known": known, "unknown": unknown}
    some_kept = np.isin(np.arange(len(frame.rows)), frame.product[np.isin(frame.places, kept)])
    is_asked = frame.own & (frame.m <= SERVED_ROWS) & (frame.is_wide == options.logits)
    served = np.flatnonzero(is_asked & some_kept)
    ranges = sum(high <= ROWS_OF_LOGITS[-1][-1] for high in RANGES) if options.logits else len(RANGES)
    report: dict[str, Any] = {}
    margins: dict[str, list[float]] = {}
    for name in ("known", "unknown"):
        chosen = np.array([choose(frame, expected[name], number, kept) for number in served.tolist()])
        margins[name] = calibrate(frame.m[served], expected[name][chosen], frame.logs[chosen])[:ranges]
        report[name] = summary(frame, served, chosen, expected[name], margins[name], head["products"])
        print(name, json.dumps({k: v for k, v in report[name].items() if k != "rows"}))
    if options.logits:
        sizes = [[row[name] for row in wide] for name in "nk"]
    else:  # N and K are drawn alike
        sizes = [[row[name] for row in own for name in "nk"]] * 2
    model = fitted(frame, np.ones(len(frame.logs), dtype=bool))
    forest = trees_of(model)
    data = {
        "gpu": head["meta"]["gpu"],
        "fitted_to": {
            "products": len(own),
            "of_others": len(rows) - len(own),
            "date": head["meta"]["date"][:10],
            "file": "choices.json.xz",
        },
        "list": digest_of_list(),
        "kernels": kept,
        "rows": list(RANGES[:ranges]),
        "extents": [[min(each), max(each)] for each in sizes],
        "sustained_loss": list(SUSTAINED_LOSS[:ranges]),
        "margins": margins,
        "served": {
            name: {
                "products": item["products"],
                "share": item["share"],
                "geometric_mean": item["geometric_mean"],
                "under_099": item["under_099"],
            }
            for name, item in report.items()
        },
        **forest,
    }
    check = Forest.of(forest)(frame.known[:500])
    print("trees as arrays agree to", float(np.abs(check - model.predict(frame.known[:500])).max()))
    put_model(options.out, data["gpu"], "wide" if options.logits else "plain", data)
    rows = [
        row | {"torch_known": name == "known"} for name, item in report.items() for row in item.pop("rows")
    ]
    also = f" --also {options.also}" if options.also else ""
    logits = " --logits" if options.logits else ""
    head["meta"]["command"] = f"python -m fit.selector{logits} --gpu {gpu}{also}"
    place = (options.results or RESULTS / gpu) / ("logits.json" if options.logits else "selector.json")
    write_validation(place, head["meta"], report, rows)


def is_wide(row: dict[str, Any]) -> bool:
    """Whether a product is one of the wide ones that `fit.choices --logits` draws."""
    return bool(row["n"] > WIDE)


def keep(frame: Frame) -> list[int]:
    """Places in the list: each kernel adds most to the best of those before, on served products."""
    products = np.flatnonzero(frame.own & (frame.m <= SERVED_ROWS))
    best = np.zeros((len(frame.rows), len(shortlist.listed())))
    np.maximum.at(best, (frame.product, frame.places), frame.logs)
    best = best[products]
    reached, kept = np.zeros(len(products)), []
    for _ in range(KERNELS):
        place = int(np.maximum(best, reached[:, None]).mean(axis=0).argmax())
        reached = np.maximum(reached, best[:, place])
        kept.append(place)
    return sorted(kept)


def fitted(frame: Frame, rows: Mask) -> Any:
    """A model of some rows, each with and without the knowledge of torch's kernel."""
    return boosted(
        np.vstack([frame.known[rows], frame.unknown[rows]]), np.concatenate([frame.logs[rows]] * 2),
        np.concatenate([frame.weights[rows], 0.5 * frame.weights[rows]]), **SETTINGS,
    )  # fmt: skip


def choose(frame: Frame, expected: Floats, number: int, kept: list[int]) -> int:
    """The row of the product's launch with the best prediction."""
    rows = np.flatnonzero((frame.product == number) & np.isin(frame.places, kept))
    return int(rows[expected[rows].argmax()])


def calibrate(m: NDArray[np.int64], expected: Floats, got: Floats) -> list[float]:
    """For each range of rows, how far a chosen launch may fall short of its prediction.

    Each range keeps the bound for slight losers by itself. All ranges together keep the bound for heavy
    losers: a single range has too few products to detect two in a thousand.
    """
    ranges = np.searchsorted(RANGES, m)
    got = got - np.array(SUSTAINED_LOSS)[ranges]
    for floor in np.arange(LEAST_MARGIN, MOST_MARGIN, MARGIN_STEP).tolist():
        margins = [
            least_margin(expected[ranges == number] - loss, got[ranges == number], floor)
            for number, loss in enumerate(SUSTAINED_LOSS)
        ]
        final = np.where(is_served(m, expected, margins), got, 0.0)
        if (final < np.log(SLOWEST)).mean() <= SLOWER:
            return margins
    return [MOST_MARGIN] * len(RANGES)


def least_margin(expected: Floats, got: Floats, floor: float, slower: float = 1.0) -> float:
    """The least margin from `floor` on with few losers in validation, and with heavy losers at most the
    fraction `slower` of all; `MOST_MARGIN` if there is none."""
    for margin in np.arange(floor, MOST_MARGIN, MARGIN_STEP):
        final = np.where(expected > margin, got, 0.0)
        if (final < np.log(0.99)).mean() <= LOSERS and (final < np.log(SLOWEST)).mean() <= slower:
            return round(float(margin), 4)
    return MOST_MARGIN


def is_served(m: NDArray[np.int64], expected: Floats, margins: list[float]) -> Mask:
    ranges = np.searchsorted(RANGES, m)
    served: Mask = expected > np.array(margins)[ranges] + np.array(SUSTAINED_LOSS)[ranges]
    return served


def summary(
    frame: Frame,
    served: NDArray[np.int64],
    chosen: NDArray[np.int64],
    expected: Floats,
    margins: list[float],
    all_products: int,
) -> dict[str, Any]:
    """Of the validation: shares, means, losers, and a row for each product."""
    m, hopes, got = frame.m[served], expected[chosen], frame.logs[chosen]
    takes = is_served(m, hopes, margins)
    final = np.where(takes, got, 0.0)
    best = np.array([max(0.0, frame.logs[frame.product == number].max()) for number in served])
    by_rows = {}
    low = 1
    for high in RANGES:
        rows = (m >= low) & (m <= high)
        if not rows.any():
            continue
        by_rows[f"{low}-{high}"] = {
            "products": int(rows.sum()),
            "share": round(float(takes[rows].mean()), 3),
            "geometric_mean": round(float(np.exp(final[rows].mean())), 4),
            "best": round(float(np.exp(best[rows].mean())), 4),
            "under_099": int((final[rows] < np.log(0.99)).sum()),
        }
        low = high + 1
    return {
        "products_of_all_rows": all_products,
        "products": len(served),
        "share": round(float(takes.mean()), 4),
        "geometric_mean": round(float(np.exp(final.mean())), 4),
        "geometric_mean_of_all_rows": round(float(np.exp(final.sum() / all_products)), 4),
        "best": round(float(np.exp(best.mean())), 4),
        "under_099": int((final < np.log(0.99)).sum()),
        "under_097": int((final < np.log(0.97)).sum()),
        "slowest": round(float(np.exp(final.min())), 4),
        "margins": margins,
        "by_rows": by_rows,
        "rows": [
            {
                **{name: frame.rows[number][name] for name in "mnk"},
                "expected": round(float(np.exp(hope)), 4),
                "got": round(float(np.exp(item)), 4),
                "served": bool(taken),
            }
            for number, hope, item, taken in zip(served.tolist(), hopes, got, takes, strict=True)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
