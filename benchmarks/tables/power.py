"""Tables of large products at the power cap: speeds beside the vendor's and to the roof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.results import geometric_mean
from benchmarks.tables.reading import extents_of, load, machine_line, markdown_table, not_measured

#: What of power_roof.json has loads and an epilogue as a product has.
_LOADED = "near 100 %, stores k 4096"


def power_cap(results: Path) -> str:
    """Our best kernel beside torch.mm and the best algorithm of cuBLASLt, and how far the roof is."""
    name = "power_cap.json"
    data = load(results, name)
    if data is None:
        return not_measured(results, name)
    ratios = "ratio_to_torch", "ratio_to_best_cublaslt"
    lines = [
        [
            extents_of(row), f"`{row['own']}`", *(_number(row[one], 3) for one in ratios),
            *(_number(row["tflops"].get(one), 0) for one in ("own", "torch", "cublaslt")),
            _percent(row["share_of_roof"]),
        ]
        for row in data["rows"]
    ]  # fmt: skip
    means = [_number(data.get(one), 3) for one in ratios]
    share = _percent(data.get("share_of_roof"))
    lines.append([f"geometric mean of {data['products']}", "", *means, "", "", "", share])
    header = [
        "product", "own", "times torch.mm", "times cuBLASLt", "TFLOP/s, own", "torch.mm", "cuBLASLt",
        "of the roof",
    ]  # fmt: skip
    parts = [machine_line(data["meta"]), markdown_table(header, lines), _with_loads(results, data["rows"])]
    return "\n\n".join(filter(None, parts))


def power_cap_kinds(results: Path) -> str:
    """Our kernels beside torch's own operations, of fp8 and SwiGLU."""
    name = "power_cap_kinds.json"
    data = load(results, name)
    if data is None:
        return not_measured(results, name)
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in data["rows"]:
        kind = f"{row['dtype']}, {row['epilogue']}" if row["epilogue"] else row["dtype"]
        kinds.setdefault(kind, []).append(row)
    lines = []
    for kind, rows in kinds.items():
        lines += [
            [
                kind, extents_of(row), f"`{row['own']}`", _number(row["ratio_to_torch"], 3),
                *(_number(row["tflops"].get(one), 0) for one in ("own", "torch")),
            ]
            for row in rows
        ]  # fmt: skip
        mean = geometric_mean(row["ratio_to_torch"] for row in rows)
        lines.append([kind, f"geometric mean of {len(rows)}", "", _number(mean, 3), "", ""])
    header = ["kind", "product", "own", "times torch", "TFLOP/s, own", "torch"]
    return "\n\n".join([machine_line(data["meta"]), markdown_table(header, lines)])


def _with_loads(results: Path, rows: list[dict[str, Any]]) -> str:
    """How far what loads all stages and stores its tiles is, of which the roof does neither."""
    metered = load(results, "power_roof.json")
    loaded = [row for row in metered["rows"] if _LOADED in row["workload"]] if metered else []
    if not loaded:
        return ""
    best = max(loaded, key=lambda row: row["tflops"])
    shares = sorted(row["tflops"]["own"] / best["tflops"] for row in rows)
    return (
        f"The roof's kernels with all loads, from near L2, and stored tiles make {best['tflops']:.0f} "
        f"TFLOP/s at most (*{best['workload']}*); ours are at {shares[0]:.1%} to {shares[-1]:.1%} of that."
    )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
