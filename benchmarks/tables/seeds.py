"""Tables of the seed documents' figures, measured anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.results import geometric_mean
from benchmarks.tables.reading import (
    BASELINE,
    load,
    machine_line,
    markdown_table,
    not_measured,
)


def seed_000(results: Path) -> str:
    """Eight launches of the article's tile beside its figures."""
    data = load(results, "seed-000.json")
    if data is None:
        return not_measured(results, "seed-000.json")
    (row,) = data["rows"]
    article, lines = row["article_tflops"], []
    for name, got in row["providers"].items():
        published = article.get(name.split(",")[0])
        us, tflops, ratio = f"{got['median_us']:.1f}", f"{got['tflops']:.0f}", f"{got['ratio']:.3f}"
        lines.append([name, us, tflops, ratio, str(published or "")])
    return "\n\n".join(
        [
            machine_line(data["meta"]),
            markdown_table(["launch", "us", "TFLOP/s", "times torch.mm", "article, TFLOP/s"], lines),
        ]
    )


def seed_001(results: Path) -> str:
    """The Ampere kernel under its roofline."""
    data = load(results, "seed-001.json")
    if data is None:
        return not_measured(results, "seed-001.json")
    (row,) = data["rows"]
    roof, lines = row["roofline"], []
    for name, got in row["providers"].items():
        lines.append(
            [
                name, f"{got['median_us']:.1f}", f"{got['tflops']:.0f}", f"{got['percent_of_peak']:.1f}",
                f"{got['percent_of_roofline']:.1f}", f"{got['ratio']:.3f}", f"{got['relative_error']:.1e}",
            ]
        )  # fmt: skip
    header = ["kernel", "us", "TFLOP/s", "% of peak", "% of roofline", "times torch.mm", "relative error"]
    said = (
        f"The product has {roof['flops_per_byte']:.0f} FLOP per byte of memory, more than the "
        f"{roof['ridge_flops_per_byte']:.0f} where the roofline bends ({roof['peak_tflops']:.0f} TFLOP/s, "
        f"{roof['bandwidth_gbps']} GB/s), so that the peak is its roof. The tile has "
        f"{roof['flops_per_smem_byte']:.0f} FLOP per byte that it loads, which memory alone could feed at "
        f"{roof['tile_tflops']:.0f} TFLOP/s: what goes beyond comes from L2."
    )
    return "\n\n".join([machine_line(data["meta"]), markdown_table(header, lines), said])


def seed_003(results: Path) -> str:
    """The tables of Gluon's tutorial, and our answers to its exercise."""
    data = load(results, "seed-003.json")
    if data is None:
        return not_measured(results, "seed-003.json")
    parts = [machine_line(data["meta"])]
    titles = {
        "lhs_and_n": "A in shared memory or (`R`) in registers, by N of the instruction",
        "blocking": "Blocking loop, tile by tile",
        "pipelined": "Pipelined loop, tile by tile",
        "exercise": "The exercise: loads and WGMMA both pipelined",
    }
    for table, title in titles.items():
        (row,) = [r for r in data["rows"] if any(p.get("table") == table for p in r["providers"].values())]
        unit = "us" if table == "lhs_and_n" else "TFLOP/s"
        column = "median_us" if table == "lhs_and_n" else "tflops"
        found = {name: p for name, p in row["providers"].items() if p.get("table") == table}
        baseline = row["providers"][BASELINE][column]
        shape = f"{row['m']}x{row['n']}x{row['k']} {row['dtype']}"
        lines = []
        for name, got in found.items():
            published = got.get("tutorial_us", got.get("tutorial_tflops"))
            cells = [f"`{name}`", f"{got[column]:.2f}", f"{got['ratio']:.3f}"]
            lines.append(cells if table == "exercise" else [*cells, f"{published:.2f}"])
        header = ["kernel", unit, "times torch.mm"] + ([] if table == "exercise" else [f"tutorial, {unit}"])
        parts += [f"**{title}**, {shape}; `torch.mm`: {baseline:.2f} {unit}.", markdown_table(header, lines)]
        if table == "exercise":
            best = max(found.values(), key=lambda got: got["ratio"])
            others = [p["tutorial_tflops"] for p in row["providers"].values() if "tutorial_tflops" in p]
            parts.append(
                f"The three fastest of {row['tried']} launches. The best: {best['ratio']:.3f} of `torch.mm`, "
                f"{best['tflops']:.0f} TFLOP/s; the tutorial's best: {max(others):.0f}. The noise of this "
                f"interleave was {100 * row['noise']:.1f} %: "
                + (
                    "the lead over `torch.mm` is within it."
                    if best["ratio"] - 1 < row["noise"]
                    else "the lead is beyond it."
                )
            )
    return "\n\n".join(parts)


def seed_004(results: Path) -> str:
    """simplegemm's sweep over K."""
    data = load(results, "seed-004.json")
    if data is None:
        return not_measured(results, "seed-004.json")
    rows = data["rows"]
    names = ("torch", "pp128x128x64", "cublaslt", "tunegemm_cute")
    lines = []
    for row in rows:
        got = [row["providers"][name] for name in names]
        ours = got[-1]
        lines.append(
            [
                str(row["k"]),
                *(f"{p['tflops']:.0f}" for p in got),
                f"{ours['ratio']:.3f}",
                f"`{ours['label']}`",
            ]
        )
    header = [
        "K",
        "cuBLAS",
        "the article's kernel",
        "best of cuBLASLt",
        "our best",
        "our best to cuBLAS",
        "its kernel",
    ]

    def to_ours(row: dict[str, Any], name: str) -> float:
        ours, other = row["providers"]["tunegemm_cute"], row["providers"][name]
        return float(ours["ratio"] / other["ratio"])

    said = []
    for name, what in (
        ("torch", "cuBLAS"),
        ("cublaslt", "the best of cuBLASLt"),
        ("pp128x128x64", "the article's kernel"),
    ):
        values = {row["k"]: to_ours(row, name) for row in rows}
        behind = [str(k) for k, value in values.items() if value <= 1]
        ahead = f"behind at K = {', '.join(behind)}" if behind else "ahead at every K"
        said.append(f"{geometric_mean(list(values.values())):.3f} times {what} ({ahead})")
    sentence = (
        f"Geometric mean of our best over the {len(rows)} values of K: {said[0]}, {said[1]} and {said[2]}."
    )
    return "\n\n".join([machine_line(data["meta"]), sentence, "TFLOP/s:", markdown_table(header, lines)])
