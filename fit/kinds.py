"""Fits the gains of shipped kernels on fp8 and fused products to the measurements of `fit.kind_choices`.

    python -m fit.kinds                  # into db/predictions-h200.jsonl, results/h200/kinds.json
    python -m fit.kinds --gpu h100-80gb-hbm3 --also h200

The second command also fits to another GPU's measurements, at half the weight, and validates on the GPU's
own. Boosted trees (scikit-learn, needed here only) predict the logarithm of each launch's ratio to torch's
own operations from `model.features.OF_GAIN`. Validation leaves out all products of a fold of (N, K), fits to
the others and lets the trees choose among a product's launches. The chosen launch's measured ratio against
the predicted one gives the margins, by kind and rows: with them, no served product of the GPU is below 0.98
of torch. Kernels that save one of torch's need no more, because they also save its start; of the others at
most one in a hundred may be below 0.99.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import command
from benchmarks.results import RESULTS, geometric_mean
from fit.trees import (
    LOSERS,
    MARGIN_STEP,
    MOST_MARGIN,
    OF_OTHERS,
    Floats,
    Mask,
    boosted,
    device_of,
    parser_of_fit,
    put_model,
    source,
    trees_of,
    validated,
    write_validation,
)
from tunegemm.choose.invariance import Ranked, features_of
from tunegemm.choose.operators import kernels_after
from tunegemm.choose.predictions import name_of
from tunegemm.describe.epilogue import GATED
from tunegemm.describe.problem import Problem
from tunegemm.generate.cublaslt.choice import LibraryChoice
from tunegemm.model import shortlist

#: Ends of the ranges of rows with separate margins, by kind.
RANGES = (16, 64, 256, 16384)
#: Products that must have been measured in a range before it is served. If a kind has fewer than `OWN`,
#: similar kinds count, too, and a margin is at least the standard deviation of the errors.
FEWEST, OWN = 20, 60
#: Least margin to try, in log: these kinds have fewer products than plain ones.
LEAST_MARGIN = 0.04
#: A served product may not be slower than this in validation.
SLOWEST = 0.98
SETTINGS: dict[str, Any] = {
    "max_iter": 150, "learning_rate": 0.08, "min_samples_leaf": 15, "max_features": 0.5
}  # fmt: skip


@command
def main(arguments: Sequence[str] | None = None) -> None:
    fit(parser_of_fit("fit.kinds", __doc__).parse_args(arguments))


class Frame:
    """All launches of all products as rows."""

    def __init__(self, gpu: str) -> None:
        data = json.loads(source(gpu, "kind_choices.json").read_text(encoding="utf-8"))
        self.meta = data["meta"]
        device = device_of(self.meta)
        self.rows = [row for row in data["rows"] if row["m"] <= RANGES[-1] and row["launches"]]
        sums = {row["epilogue"] for row in self.rows if "added" in row}
        tables, logs, product = [], [], []
        for number, row in enumerate(self.rows):
            shape = f"{row['m']}x{row['n']}x{row['k']}"
            problem = Problem.parse(shape, dtype=row["dtype"], epilogue=row["epilogue"])
            row["kind"], row["alike"] = name_of(problem), _alike(problem)
            row["gated"] = problem.fused.gated
            row["beside"] = math.log(row.get("added") or 1.0)
            # Where the library's sums were timed, the fit learns from other products, too; margins do not.
            row["counts"] = problem.epilogue not in sums or "added" in row
            row["saves"] = kernels_after(problem) > 0
            launches = [item for item in row["launches"] if item[4] is not None]
            library = LibraryChoice(*row["library"]) if row["library"] else None
            tables.append(
                features_of(problem, [_ranked(problem, launch) for launch in launches], device, library)
            )
            logs.append(np.log([launch[4] for launch in launches]))
            product += [number] * len(launches)
        self.table, self.logs, self.product = np.vstack(tables), np.concatenate(logs), np.array(product)

    @property
    def extents(self) -> list[tuple[int, int]]:
        """N and K of the product of each launch."""
        return [(self.rows[number]["n"], self.rows[number]["k"]) for number in self.product]


def _alike(problem: Problem) -> str:
    """The kinds that a kind's few products are counted with."""
    last = problem.fused.steps[-1]
    return f"{problem.in_dtype} {'gate' if last in GATED else 'gelu' if last.startswith('gelu') else last}"


def _ranked(problem: Problem, launch: list[Any]) -> Ranked:
    place, along_n, swizzle, expected, _, by_gpc, streamed = (*launch, 0, 0)[:7]  # files of before have five
    if by_gpc:
        kernel = shortlist.large_kernels(problem)[place].kernel
        launched = shortlist.launched_by_gpc(problem, kernel, along_n=bool(along_n), streamed=bool(streamed))
        return Ranked(kernel, launched, expected)
    kernel = shortlist.ordered_kernels(problem)[place]
    candidate = shortlist.launched(problem, kernel, along_n=bool(along_n), swizzle=swizzle)
    return Ranked(kernel, candidate, expected)


def fit(options: argparse.Namespace) -> None:
    """Validates, fits to everything, and writes both files."""
    frame = Frame(options.gpu)
    frames = [frame, *([Frame(options.also)] if options.also else [])]
    table, logs = (
        np.vstack([frame.table for frame in frames]),
        np.concatenate([frame.logs for frame in frames]),
    )
    weights = np.where(np.arange(len(logs)) < len(frame.logs), 1.0, OF_OTHERS)
    extents = [extent for frame in frames for extent in frame.extents]

    def fitted(rows: Mask) -> Any:
        return boosted(table[rows], logs[rows], weights[rows], **SETTINGS)

    (expected,) = validated(extents, fitted, table)
    of_products = (np.flatnonzero(frame.product == number) for number in range(len(frame.rows)))
    chosen = np.array([rows[expected[rows].argmax()] for rows in of_products])
    hopes, got = expected[chosen], frame.logs[chosen]
    m, kinds = np.array([row["m"] for row in frame.rows]), np.array([row["kind"] for row in frame.rows])
    margins: dict[str, list[float | None]] = {}
    served = np.zeros(len(frame.rows), dtype=bool)
    beside = np.array([row["beside"] for row in frame.rows])
    counts = np.array([row["counts"] for row in frame.rows])
    for kind in sorted(set(kinds)):
        margins[kind] = []
        alike = np.array([row["alike"] for row in frame.rows])
        for low, high in zip((0, *RANGES), RANGES, strict=False):
            within = (m > low) & (m <= high) & counts
            mine = (kinds == kind) & within
            similar = within & (alike == alike[kinds == kind][0])
            # Others are counted with this kind by what would compute this kind's products.
            instead = beside if beside[mine].any() else np.zeros_like(beside)
            margin = margin_of(frame, mine, similar, hopes, got, instead)
            usable = margin < MOST_MARGIN
            margins[kind].append(margin if usable else None)
            served |= mine & usable & (hopes > margin)
    final = np.where(served, got, beside)
    report = {kind: summary((kinds == kind) & counts, served, final, m) for kind in margins}
    for kind, item in report.items():
        print(kind, margins[kind], json.dumps(item))
    data = {
        "gpu": frame.meta["gpu"],
        "fitted_to": {
            "products": len(frame.rows),
            "of_others": sum(len(frame.rows) for frame in frames[1:]),
            "date": frame.meta["date"][:10],
        },
        "rows": list(RANGES),
        # Few gates, which are two weights in one, are wider than other products.
        "extents": [
            [
                int(extreme(row[name] for row in frame.rows if not row["gated"] for name in "nk"))
                for extreme in (min, max)
            ]
        ]
        * 2,
        "list": "",
        "kernels": [],
        "sustained_loss": [0.0] * len(RANGES),
        "margins": margins,
        "served": {
            kind: {name: item[name] for name in ("products", "under_099")} for kind, item in report.items()
        },
        **trees_of(fitted(np.ones(len(logs), dtype=bool))),
    }
    put_model(options.out, frame.meta["gpu"], "fused", data)
    rows = [
        {name: row[name] for name in ("m", "n", "k", "dtype", "epilogue")}
        | {
            "expected": round(float(np.exp(hope)), 4),
            "got": round(float(np.exp(item)), 4),
            "served": bool(taken),
        }
        for row, hope, item, taken in zip(frame.rows, hopes, got, served, strict=True)
    ]
    also = f" --also {options.also}" if options.also else ""
    meta = frame.meta | {"command": f"python -m fit.kinds --gpu {options.gpu}{also}"}
    write_validation((options.results or RESULTS / options.gpu) / "kinds.json", meta, report, rows)


def margin_of(frame: Frame, mine: Mask, alike: Mask, hopes: Floats, got: Floats, beside: Floats) -> float:
    """The margin of a kind's products with some rows, in log; `MOST_MARGIN` if none may be served.

    mine: which products. alike: those of similar kinds among them. beside: the ratio, in log, of what
    computes a product that is not served: torch, or the library where it adds a residual. The least margin
    that may be is taken; where the library adds, that with the best mean.
    """
    least = LEAST_MARGIN
    if mine.sum() < OWN:
        if not mine.any() or alike.sum() < FEWEST:
            return MOST_MARGIN
        mine = alike
        if mine.sum() < OWN:
            least = max(least, round(float(np.std(got[mine] - hopes[mine])), 4))
    saves = frame.rows[int(np.flatnonzero(mine)[0])]["saves"]
    means: dict[float, float] = {}
    for margin in np.arange(least, MOST_MARGIN, MARGIN_STEP):
        final = np.where(hopes[mine] > margin, got[mine], beside[mine])
        if final.min() >= np.log(SLOWEST) and (saves or (final < np.log(0.99)).mean() <= LOSERS):
            means[round(float(margin), 4)] = float(final.mean())
            if not beside[mine].any():
                break
    return max(means, key=lambda margin: means[margin], default=MOST_MARGIN)


def summary(mine: Mask, served: Mask, final: Floats, m: NDArray[np.int64]) -> dict[str, Any]:
    """A kind's products in validation: the number served, and the resulting figures of all."""

    def of(rows: Mask) -> dict[str, Any]:
        return {
            "products": int(rows.sum()),
            "served": int((served & rows).sum()),
            "geometric_mean": round(float(geometric_mean(np.exp(final[rows]))), 4) if rows.any() else None,
            "under_099": int((final[rows] < np.log(0.99)).sum()),
            "slowest": round(float(np.exp(final[rows].min())), 4) if rows.any() else None,
        }

    ranges = {
        f"to {high}": of(mine & (m > low) & (m <= high))
        for low, high in zip((0, *RANGES), RANGES, strict=False)
    }
    return of(mine) | {"by_rows": ranges}


if __name__ == "__main__":
    sys.exit(main())
