"""Boosted trees as arrays, evaluated by numpy for some dozens of rows at once in a fraction of a millisecond.

A tree has at most 16 leaves, numbered from left to right. A row that goes right at a node cannot reach the
leaves on its left: each node has a mask without them. What is left of all masks begins with the row's leaf.
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
#: What a line of such a file ends with, behind all that it is a checksum of.
_CHECKSUM = ',"checksum":"'
MAX_LEAVES = 16
_ALL = (1 << MAX_LEAVES) - 1
#: The place of the lowest bit of each mask.
_LOWEST = np.zeros(_ALL + 1, dtype=np.int64)
for _bit in reversed(range(MAX_LEAVES)):
    _LOWEST[1 << _bit :: 1 << (_bit + 1)] = _bit


@dataclass(frozen=True)
class Forest:
    """The sum of all trees."""

    base: float
    feature: NDArray[np.int64]
    """Which column a node compares: nodes x trees."""
    threshold: NDArray[np.float64]
    """A row goes right where its value is above."""
    mask: NDArray[np.uint16]
    """Leaves that a row which goes right still may reach."""
    leaves: NDArray[np.float64]
    """Values: trees x leaves."""

    @classmethod
    def of(cls, data: Mapping[str, Any], width: int) -> Forest:
        """From JSON: `base`, and `trees` of nodes (feature, threshold, mask) and leaves. width: columns.

        Raises TunegemmError where it is not that.
        """
        try:
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
            found = cls(float(data["base"]), feature, threshold, mask, leaves)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise TunegemmError(f"no trees: {type(error).__name__}: {error}") from None
        if not (feature.min() >= 0 and feature.max() < width and np.isfinite(leaves).all()):
            raise TunegemmError("no trees: a node reads a column that there is not, or a leaf is not finite")
        return found

    def __call__(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """A value for each row."""
        seen = rows[:, self.feature.ravel()] > self.threshold.ravel()
        masks = np.where(seen, self.mask.ravel(), np.uint16(_ALL))
        left = np.bitwise_and.reduce(masks.reshape(len(rows), *self.feature.shape), axis=1)
        trees = np.arange(self.feature.shape[1])
        found: NDArray[np.float64] = self.base + self.leaves[trees, _LOWEST[left]].sum(axis=1)
        return found


def read(path: Path, features: Sequence[str], name: str = "") -> tuple[Forest, dict[str, Any]]:
    """The trees of a file of `written` lines, and all that their line holds.

    name: of the line; by default the file has one without a name. Raises TunegemmError for a line that is not
    there, is damaged, or is of another version or features, and FileError for a file that cannot be read.
    """
    try:
        line = next(line for line in path.read_text(encoding="utf-8").splitlines() if _is_named(line, name))
        text, _, end = line.rpartition(_CHECKSUM)
        data: dict[str, Any] = json.loads(f"{text}}}")
        intact = end == f'{_digest(text)}"}}' and data["format"] == FORMAT
    except OSError as error:
        raise FileError(f"{path}: {cause(error, 'install tunegemm again')}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, StopIteration) as error:
        raise TunegemmError(f"{path} is damaged ({type(error).__name__}); install tunegemm again") from None
    if not intact or data["features"] != list(features):
        raise TunegemmError(f"{path} is damaged or of another version; install tunegemm again")
    return Forest.of(data, len(features)), data


def _is_named(line: str, name: str) -> bool:
    return not name or line.startswith(f'{{"model":"{name}",')


def written(data: Mapping[str, Any], features: Sequence[str], name: str = "") -> str:
    """A line: data of `Forest.of`, what else its readers want, a checksum of it all; and the line's name."""
    named = {"model": name} if name else {}
    whole = {**named, "format": FORMAT, "features": list(features), **data}
    text = json.dumps(whole, separators=(",", ":")).removesuffix("}")
    return f'{text}{_CHECKSUM}{_digest(text)}"}}\n'


def put(path: Path, data: Mapping[str, Any], features: Sequence[str], name: str) -> None:
    """Writes a named line into a file, in place of the one of that name."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    others = [line for line in lines if not _is_named(line, name)]
    path.write_text("".join(sorted([*others, written(data, features, name)])), encoding="utf-8")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
