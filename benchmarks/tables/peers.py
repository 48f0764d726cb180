"""Tables of products beside a user's alternatives, and the products on which tunegemm loses."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from benchmarks.results import geometric_mean
from benchmarks.tables.reading import (
    BASELINE,
    ROOT,
    Data,
    markdown_table,
    of_file,
    ratios,
    shape_of,
)

SHAPES = ROOT / "benchmarks" / "shapes.toml"
#: Columns of the tables of providers, beside torch.mm.
MAIN = ("cublaslt", "quack", "inductor", "tunegemm_cute", "tunegemm")
ODD = ("cublaslt", "inductor", "cute_sm80", "tunegemm")
#: The products of the README's table.
SUMMARY = (
    "16x4096x4096", "128x7168x16384", "512x6144x4096", "1024x1024x1024", "8448x9216x256", "4096x4096x4096",
    "4096x28672x4096", "8192x8192x8192",
)  # fmt: skip
#: What a user could pick instead.
PEERS = (BASELINE, "cublaslt", "quack", "inductor")


@of_file("peers.json")
def peers(data: Data) -> list[str]:
    """The providers over all shapes but the odd ones, their geometric means, and tunegemm's losses."""
    rows = even_rows(data["rows"])
    return [*providers(rows, MAIN), missing_shapes(rows)]


@of_file("peers.json", machine=False)
def peers_odd(data: Data) -> list[str]:
    """The same over the odd shapes."""
    odd = odd_shapes()
    rows = [row for row in data["rows"] if shape_of(row) in odd]
    results = [ratios(row) for row in rows]
    best = max((result.get("inductor", 0) for result in results), default=0)
    ours = geometric_mean([result["tunegemm"] for result in results if "tunegemm" in result])
    said = (
        f"Inductor is up to {best:.1f} times as fast as `torch.mm`, `tunegemm` {ours:.2f} times on average."
    )
    return [*providers(rows, ODD), said]


@of_file("peers.json", machine=False)
def summary(data: Data) -> list[str]:
    """A few products and the geometric means over all of them, for the README."""
    rows = even_rows(data["rows"])
    result = {shape_of(row): ratios(row) for row in rows}
    names = [
        name
        for name in ("cublaslt", "quack", "inductor", "tunegemm")
        if any(name in r for r in result.values())
    ]
    chosen = [shape for shape in SUMMARY if shape in result]
    lines = [
        [shape, *(f"{result[shape][n]:.2f}" if n in result[shape] else "" for n in names)] for shape in chosen
    ]
    means = ["*geometric mean*"]
    for name in names:
        values = [item[name] for item in result.values() if name in item]
        means.append(f"{geometric_mean(values):.3f} ({len(values)})")
    own = {shape: item["tunegemm"] for shape, item in result.items() if "tunegemm" in item}
    slower = sorted((ratio, shape) for shape, ratio in own.items() if ratio < 1)
    losses = ", ".join(f"{shape} {ratio:.3f}" for ratio, shape in slower) or "none"
    gpu, date = data.get("meta", {}).get("gpu", ""), str(data.get("meta", {}).get("date", ""))[:10]
    return [
        f"{gpu}, {date}, bf16, all tuned before: speed relative to `torch.mm` in one race per product, in "
        "steady state at the power cap. Brackets: how many have a figure.",
        markdown_table(["M x N x K", *names], [*lines, means]),
        f"Slower than `torch.mm`, of {len(own)}: {losses}.",
    ]


def even_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of products that TMA can read: all but those of the group `odd`."""
    odd = odd_shapes()
    return [row for row in rows if shape_of(row) not in odd]


def odd_shapes() -> set[str]:
    """The shapes of the group `odd`."""
    return set(tomllib.loads(SHAPES.read_text())["odd"]["shapes"])


def missing_shapes(rows: list[dict[str, Any]]) -> str:
    """Which of the benchmarks' shapes have no row."""
    from benchmarks.shapes import select

    result = {shape_of(row) for row in rows} | odd_shapes()
    missing = [problem.shape for problem in select([]) if problem.shape not in result]
    return f"Not timed in this run: {', '.join(missing)}." if missing else ""


def providers(rows: list[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """The paragraphs on some rows of peers.json."""
    all_ratios = [ratios(row) for row in rows]
    names = [name for name in columns if any(name in ratio for ratio in all_ratios)]
    in_turns = [row for row in rows if row.get("turn_ms")]
    lines = []
    for row, result in zip(rows, all_ratios, strict=True):
        us = row["providers"][BASELINE]["median_us"]
        flops = 2 * row["m"] * row["n"] * row["k"] * row.get("batch", 1)
        best = max(result[name] for name in (BASELINE, *names) if name in result)
        cells = [f"{us:.1f} us, {flops / us * 1e-6:.0f}"]
        for name in names:
            ratio = f"{result[name]:.3f}" if name in result else ""
            cells.append(f"**{ratio}**" if ratio and result[name] == best else ratio)
        lines.append([shape_of(row), *cells, *shared_clocks(row, in_turns)])
    means = []
    for name in names:
        values = [ratio[name] for ratio in all_ratios if name in ratio]
        means.append(
            f"{geometric_mean(values):.3f}" + ("" if len(values) == len(rows) else f" ({len(values)})")
        )
    shared = [float(shared_clocks(row, in_turns)[0]) for row in in_turns]
    means += [f"{geometric_mean(shared):.3f} ({len(shared)})"] if shared else []
    lines.append(["*geometric mean*", "", *means])
    rivals = [
        ratio["tunegemm"] / max(ratio[name] for name in PEERS if name in ratio)
        for ratio in all_ratios
        if "tunegemm" in ratio
    ]
    said = ""
    if rivals:
        said = f"`tunegemm` reaches {geometric_mean(rivals):.3f} of the best library in each interleave."
    header = ["M x N x K", "torch.mm, TFLOP/s", *names]
    explained = (
        "Speed relative to `torch.mm` in the same interleave: above 1 is faster, bold is best. A mean over "
        "fewer shapes has their number in brackets."
    )
    if in_turns:
        header.append("tunegemm, interleaved")
        own = [result["tunegemm"] for row, result in zip(rows, all_ratios, strict=True) if row.get("turn_ms")]
        said += (
            f" Over the {len(own)} shapes at the power cap it reaches {geometric_mean(own):.3f} of "
            f"`torch.mm`, interleaved {geometric_mean(shared):.3f}."
        )
        explained += (
            " At the power cap these are steady-state ratios; the last column has the interleaved ones, at "
            "one shared clock."
        )
    return [
        explained,
        markdown_table(header, lines),
        said,
        losses(rows, all_ratios),
    ]


def shared_clocks(row: dict[str, Any], in_turns: list[dict[str, Any]]) -> list[str]:
    """The cell of tunegemm's interleaved ratio; none where no row was timed in steady state."""
    if not in_turns:
        return []
    ratio = row["providers"].get("tunegemm", {}).get("ratio_shared")
    return [f"{ratio:.3f}" if ratio else ""]


def losses(rows: list[dict[str, Any]], all_ratios: list[dict[str, float]]) -> str:
    """Where tunegemm is slower than torch.mm, than a peer, or than one of its own families, by how much."""
    if not any("tunegemm" in ratio for ratio in all_ratios):
        return ""
    slower: list[str] = []
    beaten: list[str] = []
    tied: list[str] = []
    missed: list[str] = []
    for row, result in zip(rows, all_ratios, strict=True):
        own = result.get("tunegemm")
        if own is None:
            continue
        shape, noise = shape_of(row), row.get("noise", 0.0)
        if own < 1:
            slower.append(f"{shape} ({own:.4f})")
        rival = max((name for name in PEERS if name in result), key=lambda name: result[name])
        if result[rival] > own:
            (beaten if result[rival] > own * (1 + noise) else tied).append(
                f"{shape} ({rival}: {100 * (result[rival] / own - 1):.1f} % faster)"
            )
        family = max(
            (name for name in result if name not in (*PEERS, "tunegemm")), key=lambda n: result[n], default=""
        )
        if family and result[family] > own * (1 + noise):
            missed.append(f"{shape} ({family}: {100 * (result[family] / own - 1):.1f} %)")
    if not beaten:
        parts = ["No peer is faster than tunegemm by more than the noise of its race."]
    else:
        parts = [f"Slower than `torch.mm`: {', '.join(slower)}."] if slower else []
        parts.append(f"Where tunegemm loses: {', '.join(beaten)}.")
    if tied:
        parts.append(
            f"Within the noise a peer is ahead on {len(tied)} of {len(rows)} shapes: {', '.join(tied)}."
        )
    if missed:
        parts.append(
            "One of its own families beat the record in this interleave by more than the noise: "
            f"{', '.join(missed)}."
        )
    return "\n\n".join(parts)
