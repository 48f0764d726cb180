"""Boosted trees as arrays: numpy evaluates them for dozens of rows at once in a fraction of a millisecond.

A tree has at most 16 leaves, numbered from left to right. A row that goes right at a node cannot reach the
leaves on the node's left, so the node's mask leaves them out. The lowest bit set in all masks is the row's
leaf.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunegemm.errors import FileError, TunegemmError
from tunegemm.files import cause

#: The version of the files that hold trees.
FORMAT = 2
#: Starts the checksum, which ends a line of such a file and covers everything before it.
CHECKSUM = ',"checksum":"'
MAX_LEAVES = 16
_ALL = (1 << MAX_LEAVES) - 1
#: The position of the lowest bit set in each mask.
_LOWEST = np.zeros(_ALL + 1, dtype=np.int64)
for _bit in reversed(range(MAX_LEAVES)):
    _LOWEST[1 << _bit :: 1 << (_bit + 1)] = _bit


@dataclass(frozen=True)
class Forest:
    """The sum of all trees."""

    base: float
    feature: NDArray[np.int64]
    """The column that a node compares: nodes x trees."""
    threshold: NDArray[np.float64]
    """A row goes right if its value is above this."""
    mask: NDArray[np.uint16]
    """The leaves that a row can still reach after it goes right."""
    leaves: NDArray[np.float64]
    """Values: trees x leaves."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Forest:
        """Build it from JSON: `base`, and `trees` with nodes (feature, threshold, mask) and leaves."""
        trees: Sequence[Mapping[str, Any]] = data["trees"]
        nodes = max(len(tree["nodes"]) for tree in trees)
        feature = np.zeros((nodes, len(trees)), dtype=np.int64)
        threshold = np.full((nodes, len(trees)), np.inf)
        mask = np.full((nodes, len(trees)), _ALL, dtype=np.uint16)
        leaves = np.zeros((len(trees), MAX_LEAVES))
        for number, tree in enumerate(trees):
            for place, (column, limit, left) in enumerate(tree["nodes"]):
                feature[place, number], threshold[place, number] = column, limit
                mask[place, number] = left
            leaves[number, : len(tree["leaves"])] = tree["leaves"]
        return cls(float(data["base"]), feature, threshold, mask, leaves)

    def __call__(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate the forest: one value for each row."""
        seen = rows[:, self.feature.ravel()] > self.threshold.ravel()
        masks = np.where(seen, self.mask.ravel(), np.uint16(_ALL))
        left = np.bitwise_and.reduce(masks.reshape(len(rows), *self.feature.shape), axis=1)
        trees = np.arange(self.feature.shape[1])
        return self.base + self.leaves[trees, _LOWEST[left]].sum(axis=1)


def read(path: Path, features: Sequence[str], name: str = "") -> tuple[Forest, dict[str, Any]]:
    """Read the trees from a file of lines that `fit.trees` writes, with all other data of their line.

    name: the line's name; by default the file has a single line without a name. Raises TunegemmError if the
    line is missing, damaged, or of another version or other features, and FileError if the file cannot be
    read.
    """
    try:
        line = next(line for line in path.read_text(encoding="utf-8").splitlines() if is_named(line, name))
        text, _, end = line.rpartition(CHECKSUM)
        data: dict[str, Any] = json.loads(f"{text}}}")
        intact = end == f'{digest(text)}"}}' and data["format"] == FORMAT
    except OSError as error:
        raise FileError(f"{path}: {cause(error, 'install tunegemm again')}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, StopIteration) as error:
        raise TunegemmError(f"{path} is damaged ({type(error).__name__}); install tunegemm again") from None
    if not intact or data["features"] != list(features):
        raise TunegemmError(f"{path} is damaged or of another version; install tunegemm again")
    return Forest.of(data), data  # the checksum is right, so nothing else is checked


def is_named(line: str, name: str) -> bool:
    """Whether a line has this name; any line has no name."""
    return not name or line.startswith(f'{{"model":"{name}",')


def digest(text: str) -> str:
    """The checksum of a line's text."""
    return hashlib.sha256(text.encode()).hexdigest()
