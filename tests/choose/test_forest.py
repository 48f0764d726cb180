"""Trees as arrays: the same values as walking them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunegemm.choose.forest import MAX_LEAVES, Forest

WIDTH = 5


def grown(chance: np.random.Generator, leaves: int) -> tuple[Any, dict[str, Any]]:
    """A random tree of so many leaves, nested, and as `Forest` reads it."""

    def nested(count: int) -> Any:
        if count == 1:
            return float(chance.normal())
        left = int(chance.integers(1, count))
        return int(chance.integers(WIDTH)), float(chance.integers(-1, 2)), nested(left), nested(count - left)

    nodes: list[list[float]] = []
    values: list[float] = []

    def flat(tree: Any) -> int:
        if isinstance(tree, float):
            values.append(tree)
            return 1 << (len(values) - 1)
        column, limit, left, right = tree
        entry = [column, limit, 0]
        nodes.append(entry)
        below = flat(left)
        entry[2] = ~below & ((1 << MAX_LEAVES) - 1)
        return below | flat(right)

    tree = nested(leaves)
    flat(tree)
    return tree, {"nodes": nodes, "leaves": values}


def walked(tree: Any, row: np.ndarray) -> float:
    while not isinstance(tree, float):
        column, limit, left, right = tree
        tree = right if row[column] > limit else left
    return tree


def test_a_forest_is_the_sum_of_its_trees() -> None:
    chance = np.random.default_rng(3)
    pairs = [grown(chance, leaves) for leaves in (1, 2, 3, 7, 15, 16, 16, 16)]
    forest = Forest.of({"base": 0.5, "trees": [data for _, data in pairs]})
    rows = chance.normal(size=(200, WIDTH)).round()  # some are equal to a threshold
    wanted = [0.5 + sum(walked(tree, row) for tree, _ in pairs) for row in rows]
    np.testing.assert_allclose(forest(rows), wanted, rtol=1e-12)
