"""Tables of policy `batch_invariant`: what it costs, a decode under it, and how its kernels are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import geometric_mean
from benchmarks.tables.reading import extents_of, load, machine_line, markdown_table, not_measured

#: Others that the policy is compared with, by the ends of fields of a row.
_OTHERS = {"fastest": "`fastest`", "torch": "torch", "triton": "Triton, one tile"}
#: Ends of the ranges of N that are told apart.
_COLUMNS = (2560, 8192)


def batch_invariance(results: Path) -> str:
    """Differing bits, and speeds beside the policy `fastest`, torch and a Triton kernel of one tile."""
    data = load(results, "batch_invariance.json")
    if data is None:
        return not_measured(results, "batch_invariance.json")
    rows = data["rows"]
    groups = {"all": rows}
    groups |= _by(rows, lambda row: " ".join(filter(None, (row["dtype"], _epilogue(row)))))
    groups |= _by(rows, lambda row: f"M = {row['m']}")
    lines = []
    for name, group in groups.items():
        shapes = {(row["n"], row["k"], row["dtype"], row["epilogue"]): row for row in group}
        cells = [name, str(len(group)), str(sum(row["differing"] for row in shapes.values()))]
        for other in _OTHERS:
            found = [row for row in group if row.get(f"ratio_to_{other}")]
            if not found:
                cells += ["", ""]
                continue
            ratios = [row[f"ratio_to_{other}"] for row in found]
            worst = min(found, key=lambda row: row[f"ratio_to_{other}"])
            where = extents_of(worst) + (f" {_epilogue(worst)}" if _epilogue(worst) else "")
            cells += [f"{geometric_mean(ratios):.3f}", f"{min(ratios):.3f} ({where})"]
        lines.append(cells)
    header = ["products", "timed", "M with other bits"]
    for other in _OTHERS.values():
        header += [f"to {other}", "worst"]
    theirs = {
        (row["n"], row["k"], row["dtype"], row["epilogue"]): row["triton_differing"]
        for row in rows
        if row.get("triton_differing") is not None
    }
    said = "The Triton kernel is not in this file."
    if theirs:
        unlike = sum(map(bool, theirs.values()))
        said = f"Of the Triton kernel's {len(theirs)} products {unlike} have rows with other bits."
    return "\n\n".join([machine_line(data["meta"]), markdown_table(header, lines), said])


def _epilogue(row: Mapping[str, Any]) -> str:
    return "" if row["epilogue"] == "none" else str(row["epilogue"])


def _by(rows: Sequence[dict[str, Any]], name: Any) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups


def class_order(results: Path) -> str:
    """How far the kernel that is chosen is behind the best of the class, on products held out."""
    from benchmarks.order_fit import RANGES

    data = load(results.parent, "order.json")
    if data is None:
        return not_measured(results.parent, "order.json")
    header = [
        "GPU",
        "rows",
        "products",
        "chosen, to the best",
        "by the model, to the best",
        "best, times torch",
    ]
    lines = []
    for gpu, group in _by(data["rows"], lambda row: row["gpu"]).items():
        for low, high in zip((0, *RANGES), RANGES, strict=False):
            rows = [row for row in group if low < row["m"] <= high]
            if rows:
                means = [
                    geometric_mean(row["chosen"] / row["best"] for row in rows),
                    geometric_mean(row["by_model"] / row["best"] for row in rows),
                    geometric_mean(row["best"] for row in rows),
                ]
                lines.append([gpu, f"{low + 1}-{high}", str(len(rows)), *(f"{mean:.3f}" for mean in means)])
    return markdown_table(header, lines)


def class_splits(results: Path) -> str:
    """What other classes would gain: the best launch of any class, and the best whose splits a second kernel
    adds, of so many products for which such were measured."""
    from benchmarks.order_fit import RANGES, is_ordered
    from benchmarks.selector_fit import measured
    from tunegemm.describe.problem import Problem

    path = results / "choices.json.xz"
    if not path.exists():
        return not_measured(results, "choices.json.xz")
    head, products, _ = measured(path, RANGES[-1])
    found = []
    for line in products:
        problem = Problem.parse(f"{line['m']}x{line['n']}x{line['k']}")
        whole = [one[5] for one in line["launches"] if is_ordered(problem, one)]
        split = [one[5] for one in line["launches"] if one[1] > 1 and one[2]]
        if whole:
            best = max(one[5] for one in line["launches"])
            found.append((line["m"], line["n"], max(whole), best, max(split, default=None)))
    header = [
        "N", "rows", "products", "best of the class, times torch", "best of any, times torch",
        "class to any", "split, a second kernel adds: to the class",
    ]  # fmt: skip
    lines = []
    for least, most in zip((0, *_COLUMNS), (*_COLUMNS, None), strict=True):
        for low, high in zip((0, *RANGES), RANGES, strict=False):
            rows = [
                row
                for row in found
                if low < row[0] <= high and least < row[1] and (not most or row[1] <= most)
            ]
            if not rows:
                continue
            splits = [split / own for *_, own, _, split in rows if split is not None]
            means = [
                geometric_mean(own for *_, own, _, _ in rows),
                geometric_mean(best for *_, best, _ in rows),
                geometric_mean(own / best for *_, own, best, _ in rows),
            ]
            name = f"up to {most}" if most else f"over {least}"
            told = f"{geometric_mean(splits):.3f} ({len(splits)})" if splits else ""
            cells = [name, f"{low + 1}-{high}", str(len(rows)), *(f"{mean:.3f}" for mean in means), told]
            lines.append(cells)
    return "\n\n".join([machine_line(head["meta"]), markdown_table(header, lines)])
