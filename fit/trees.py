"""Shared code of the fits of predictions: reading measurements, boosted trees, folds, and result files.

Boosted trees (scikit-learn, needed by fits only) predict the logarithm of each launch's ratio. Validation
leaves out a fold of all (N, K), fits to the others and lets the trees choose.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import parser_of
from benchmarks.results import RESULTS
from tunegemm.choose.forest import CHECKSUM, FORMAT, MAX_LEAVES, digest, is_named
from tunegemm.choose.predictions import FEATURES, file_of
from tunegemm.describe.architectures import PARTS
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError
from tunegemm.model import shortlist
from tunegemm.model.shortlist import Choices
from tunegemm.model.terms import Columns, terms

FOLDS = 8
#: Weight of a launch that was measured on another GPU.
OF_OTHERS = 0.5
#: Largest fraction of served products that may be below 0.99 of torch, in validation.
LOSERS = 0.01
#: Margins to try, in log: the last one, at which nothing is served, and the step.
MOST_MARGIN, MARGIN_STEP = 0.3, 0.0025

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


def parser_of_fit(name: str, text: str | None) -> argparse.ArgumentParser:
    """The parser of a fit to one GPU's data."""
    parser = parser_of(name, text, gpu=False)
    parser.add_argument("--gpu", default="h200", help="folder of benchmarks/results that has the data")
    parser.add_argument("--also", help="another such folder, whose products are fitted to, too")
    parser.add_argument("--out", type=Path, help="folder of the fitted file (default: db)")
    parser.add_argument("--results", type=Path, help="folder of what was validated (default: results/GPU)")
    return parser


def device_of(meta: Mapping[str, Any]) -> Device:
    """The GPU of a result file."""
    part = next(name for name, part in PARTS.items() if part.device_name == meta["gpu"])
    return find_device(f"model:{part}")


def source(gpu: str, name: str) -> Path:
    """A GPU's file of measurements. Raises TunegemmError if it is missing."""
    path = RESULTS / gpu / name
    if not path.exists():
        raise TunegemmError(f"{path} is missing; `python -m fit.{name.split('.')[0]}` writes it")
    return path


def measured(gpu: str, most_rows: int) -> tuple[dict[str, Any], list[dict[str, Any]], Device]:
    """The head of a GPU's file of `fit.choices`, its products with at most so many rows, and the GPU.

    Raises TunegemmError if the file is missing.
    """
    content = lzma.decompress(source(gpu, "choices.json.xz").read_bytes()).decode()
    head, *rest = map(json.loads, content.splitlines())
    head["products"] = len(rest)
    rows = [row for row in rest if row["m"] <= most_rows and row["launches"]]
    return head, rows, device_of(head["meta"])


def launches_of(problem: Problem, launches: Sequence[Sequence[Any]], device: Device) -> Choices:
    """Launches of `fit.choices` by their numbers: place in the list, splits of k, second, along n,
    swizzle size."""
    rows = np.array([launch[:5] for launch in launches], dtype=np.int64).reshape(-1, 5)
    columns = Columns.of(
        [
            shortlist.launched(problem, shortlist.listed()[place], split_k, bool(adds), bool(along), swizzle)
            for place, split_k, adds, along, swizzle in rows.tolist()
        ]
    )
    return Choices(rows[:, 0], columns, terms(problem, columns, device))


def ratios_and_weights(launches: Sequence[Sequence[Any]]) -> tuple[Floats, Floats]:
    """Launches' ratios to torch.mm, in log, and their weights.

    Launches far behind matter little, and those that stopped early are less certain.
    """
    ratios, rounds = (np.array([launch[at] for launch in launches], dtype=float) for at in (5, 6))
    behind = np.clip((ratios.max() - ratios) / 0.25, 0, 2)
    return np.log(ratios), np.where(rounds > rounds.min(), 1.0, 0.35) * np.exp(-behind)


def boosted(table: Floats, logs: Floats, weights: Floats, **settings: Any) -> Any:
    """Trees of some launches. Raises TunegemmError without scikit-learn."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError:
        raise TunegemmError("scikit-learn is not installed; pip install 'tunegemm[fit]'") from None
    model = HistGradientBoostingRegressor(
        max_leaf_nodes=MAX_LEAVES, l2_regularization=1.0, random_state=0, early_stopping=False, **settings
    )
    return model.fit(table, logs, sample_weight=weights)


def validated(
    extents: Sequence[tuple[int, int]], fit: Callable[[Mask], Any], *tables: Floats
) -> list[Floats]:
    """By table, the models' predictions for launches with unseen N and K.

    extents: N and K of each launch. fit: makes a model from some launches.
    """
    numbers = {extent: number for number, extent in enumerate(dict.fromkeys(extents))}
    fold_of = np.random.default_rng(0).permutation(len(numbers)) % FOLDS
    folds = fold_of[[numbers[extent] for extent in extents]]
    results = [np.zeros(len(extents)) for _ in tables]
    for fold in range(FOLDS):
        left_out = folds == fold
        model = fit(~left_out)
        for expected, table in zip(results, tables, strict=True):
            expected[left_out] = model.predict(table[left_out])
        print(f"fold {fold + 1} of {FOLDS}", flush=True)
    return results


def trees_of(model: Any) -> dict[str, Any]:
    """`Forest`'s data of a fitted model."""
    trees = []
    for (predictor,) in model._predictors:
        inner: list[list[float]] = []
        leaves: list[float] = []
        _add_nodes(predictor.nodes, 0, inner, leaves)
        trees.append({"nodes": inner, "leaves": leaves})
    return {"base": float(model._baseline_prediction.ravel()[0]), "trees": trees}


def _add_nodes(nodes: Any, at: int, inner: list[list[float]], leaves: list[float]) -> int:
    """Adds a node and all nodes and leaves below it; returns the bits of these leaves."""
    node = nodes[at]
    if node["is_leaf"]:
        leaves.append(round(float(node["value"]), 7))
        return 1 << (len(leaves) - 1)
    entry = [int(node["feature_idx"]), float(node["num_threshold"]), 0]
    inner.append(entry)
    left = _add_nodes(nodes, int(node["left"]), inner, leaves)
    entry[2] = ~left & ((1 << MAX_LEAVES) - 1)
    return left | _add_nodes(nodes, int(node["right"]), inner, leaves)


def write(path: Path, text: str) -> None:
    """Writes a fitted file."""
    path.write_text(text)
    print(f"written: {path}, {path.stat().st_size} B")


def written(data: Mapping[str, Any], features: Sequence[str], name: str = "") -> str:
    """A line of trees: its name, data for `Forest.of`, other data for readers, and a checksum of all."""
    named = {"model": name} if name else {}
    whole = {**named, "format": FORMAT, "features": list(features), **data}
    text = json.dumps(whole, separators=(",", ":")).removesuffix("}")
    return f'{text}{CHECKSUM}{digest(text)}"}}\n'


def put_model(folder: Path | None, gpu: str, name: str, data: Mapping[str, Any]) -> None:
    """Writes a fitted model into its GPU's file, in place of the one of that name. folder: by default db."""
    path = file_of(gpu, folder)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    others = [line for line in lines if not is_named(line, name)]
    path.write_text("".join(sorted([*others, written(data, FEATURES[name], name)])), encoding="utf-8")
    print(f"written: {path}, {path.stat().st_size} B")


def write_validation(path: Path, meta: Mapping[str, Any], summary: Any, rows: Sequence[Any]) -> None:
    """Writes the result file of a validation."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = f'{{"meta": {json.dumps(meta)},\n"summary": {json.dumps(summary)},\n'
    write(path, f'{head}"rows": [\n{lines}\n]}}\n')
