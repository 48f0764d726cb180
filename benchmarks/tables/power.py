"""Tables of large products at the power cap: joules by the model and measured, and speeds to the roof."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results import geometric_mean
from benchmarks.tables.reading import extents_of, load, machine_line, markdown_table, not_measured

#: What the terms of `tunegemm.generate.energy` are called in a table.
_TERMS = {
    "flops": "multiplications", "filled": "bytes into shared memory", "l2_read": "reads of L2",
    "stored": "finished tiles", "dram": "device memory and crossings", "static": "what always flows",
}  # fmt: skip


#: What is counted, in MB, and of which launches.
_MOVED = {"l2_read": "L2", "crossing": "crossing", "dram": "device memory"}
#: What of power_roof.json has loads and an epilogue as a product has.
_LOADED = "near 100 %, stores k 4096"
_MOVERS = ("`torch.mm`", "own, median", "own, fewest")


def power_kernels(results: Path) -> str:
    """Measured and predicted joules by launch, and which term's joules go with what is missing."""
    name = "power_kernels.json"
    data = load(results, name)
    if data is None:
        return not_measured(results, name)
    lines = [
        [
            extents_of(row), f"`{row['label']}`", f"{row['measured_mj']:.1f}", f"{row['predicted_mj']:.1f}",
            f"{row['error']:+.1%}", f"{row['clock_mhz']:.0f}", f"{row['power_w']:.0f}", f"{row['us']:.1f}",
            f"{row['predicted_us']:.1f}", f"{row['torch_us']:.1f}", f"{row['tflops']:.0f}",
            _percent(row["share_of_roof"]),
        ]
        for row in data["rows"]
    ]  # fmt: skip
    header = [
        "product", "launch", "mJ", "predicted", "error", "MHz", "W", "us", "us by model", "torch.mm, us",
        "TFLOP/s", "of the roof",
    ]  # fmt: skip
    said = (
        f"{data['within_5_percent']:.0%} of {data['pairs']} launches are within 5 %; root mean square "
        f"{data['rms']:.1%}, mean {data['mean']:+.1%}, worst {data['worst']:+.1%}."
    )
    if counted := data.get("counted"):
        said += (
            f" With the bytes that the hardware counted, {counted['within_5_percent']:.0%} of "
            f"{counted['launches']}: {counted['rms']:.1%}, {counted['mean']:+.1%}, {counted['worst']:+.1%}."
        )
    parts = [
        machine_line(data["meta"]), said, _residuals(data["residuals"]), _shares(data["rows"]),
        markdown_table(header, lines),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts))


def _shares(rows: list[dict[str, Any]]) -> str:
    """Where the joules of each product's most frugal launch go, as parts of what was measured."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        one = best.setdefault(extents_of(row), row)
        if row["measured_mj"] < one["measured_mj"]:
            best[extents_of(row)] = row
    lines = []
    for product, row in best.items():
        terms = row["terms_mj"] | {"dram": row["terms_mj"]["dram"] + row["terms_mj"]["crossing"]}
        shares = [f"{terms[name] / row['measured_mj']:.1%}" for name in _TERMS]
        missing = f"{1 - row['predicted_mj'] / row['measured_mj']:+.1%}"
        lines.append([product, f"`{row['label']}`", *shares, missing])
    return markdown_table(["product", "fewest joules", *_TERMS.values(), "not told"], lines)


def _residuals(found: dict[str, Any]) -> str:
    rows = [(said, found[name]) for name, said in _TERMS.items() if name in found]
    lines = [
        [
            said, f"{term['alone']:+.3f}", f"{term['explains']:.0%}",
            f"{term['part']:+.3f} ± {term['error']:.3f}" if "part" in term else "",
        ]
        for said, term in rows
    ]  # fmt: skip
    header = ["what is missing, as a part of a term's joules", "alone", "explains", "beside the others"]
    return markdown_table(header, lines)


def moved_bytes(results: Path) -> str:
    """What launches of each product move: torch.mm, the median of our own, and that of the fewest bytes."""
    name = "moved_bytes.json"
    data = load(results, name)
    if data is None:
        return not_measured(results, name)
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in data["rows"]:
        rows.setdefault(extents_of(row), []).append(row)
    lines = []
    for product, counted in rows.items():
        torch = next(row for row in counted if '"cublaslt"' in row["candidate"])
        own = [row for row in counted if row is not torch]
        middle = {kind: median(row[kind] for row in own) for kind in _MOVED}
        least = min(own, key=lambda row: row["dram"])
        figures = [f"{one[kind] / 1e6:.0f}" for one in (torch, middle, least) for kind in _MOVED]
        lines.append([product, str(len(own)), *figures])
    header = ["product", "launches", *(f"{who}: {kind}" for who in _MOVERS for kind in _MOVED.values())]
    said = "; ".join(
        f"{word} {data[kind]['model_to_counted']:.2f} (spread {data[kind]['spread']:.2f})"
        for kind, word in _MOVED.items()
    )
    told = f"The model's bytes over those counted, geometric mean over {data['launches']} launches: {said}."
    return "\n\n".join([machine_line(data["meta"]), told, markdown_table(header, lines)])


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
