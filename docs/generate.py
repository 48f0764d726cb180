"""Fills the generated blocks of README.md and docs/ from result files and from the command line itself.

A block starts with `<!-- generated: NAME -->` and ends with `<!-- end -->`. Figures come only from files
under benchmarks/results/; where a file is not there yet, the block says that nothing is measured yet. The
figures in docs/figures that are drawn of the same files are drawn anew as well.

    python docs/generate.py            # rewrite the blocks
    python docs/generate.py --check    # exit 1 when one is out of date
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"
SHAPES = ROOT / "benchmarks" / "shapes.toml"
BASELINE = "torch"
#: Columns of the tables of providers, beside torch.mm; what else was timed with them is in docs/families.md.
MAIN = ("cublaslt", "quack", "inductor", "tunegemm_cute", "tunegemm")
ODD = ("cublaslt", "inductor", "cute_sm80", "tunegemm")
#: What a user could pick instead.
PEERS = (BASELINE, "cublaslt", "quack", "inductor")
NOT_MEASURED = "*Nothing measured yet: `{path}` is not there.*"

_BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


class DocsError(Exception):
    """A block or a result file that cannot be used; the message names it."""


def documents(root: Path = ROOT) -> list[Path]:
    """The files that may hold generated blocks."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def refresh(text: str, results: Path = RESULTS) -> str:
    """The text with every generated block rendered anew. Raises DocsError for a block that nothing fills."""

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in BLOCKS:
            raise DocsError(f"no generator for block {name!r}; use one of {', '.join(BLOCKS)}")
        return f"{match[1]}{BLOCKS[name](results).rstrip()}\n{match[4]}"

    if text.count("<!-- generated:") != len(_BLOCK.findall(text)):
        raise DocsError("a generated block has no end mark")
    return _BLOCK.sub(fill, text)


def load(results: Path, name: str) -> dict[str, Any] | None:
    """A result file, or None where it is not there yet. Raises DocsError for one that is no result file."""
    path = results / name
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise DocsError(f"{path}: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list) or not data["rows"]:
        raise DocsError(f"{path}: no object with rows")
    return data


def not_measured(results: Path, name: str) -> str:
    path = results / name
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return NOT_MEASURED.format(path=shown)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with its first column left and the others right aligned."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shape_of(row: dict[str, Any]) -> str:
    """``MxNxK``, and what differs from one bf16 tn product without an epilogue."""
    text = f"{row['m']}x{row['n']}x{row['k']}" + (f"x{row['batch']}" if row.get("batch", 1) != 1 else "")
    usual = {"dtype": "bf16", "layout": "tn", "epilogue": "none"}
    return " ".join([text, *(str(row[key]) for key in usual if row.get(key) not in (None, "", usual[key]))])


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """Per provider its speed relative to torch.mm in the same interleave; without those that did not run."""
    times = {
        name: entry["median_us"]
        for name, entry in row["providers"].items()
        if entry and entry.get("median_us")
    }
    if BASELINE not in times:
        raise DocsError(f"{shape_of(row)}: no time of {BASELINE!r} to compare with")
    # Round by round where the row has it; older files have medians alone.
    return {name: row["providers"][name].get("ratio", times[BASELINE] / time) for name, time in times.items()}


def odd_shapes() -> set[str]:
    """The shapes of the group `odd`."""
    return set(tomllib.loads(SHAPES.read_text())["odd"]["shapes"])


def peers(results: Path) -> str:
    """The providers over all shapes but the odd ones, their geometric means, and where tunegemm loses."""
    data = load(results, "peers.json")
    if data is None:
        return not_measured(results, "peers.json")
    odd = odd_shapes()
    rows = [row for row in data["rows"] if shape_of(row) not in odd]
    parts = (machine_line(data.get("meta", {})), *providers(rows, MAIN), missing_shapes(rows))
    return "\n\n".join(part for part in parts if part)


def missing_shapes(rows: list[dict[str, Any]]) -> str:
    """Which of the benchmarks' shapes have no row."""
    from benchmarks.shapes import select

    found = {shape_of(row) for row in rows} | odd_shapes()
    missing = [problem.shape for problem in select([]) if problem.shape not in found]
    return f"Not timed in this run: {', '.join(missing)}." if missing else ""


def peers_odd(results: Path) -> str:
    """The same over the odd shapes."""
    data = load(results, "peers.json")
    if data is None:
        return not_measured(results, "peers.json")
    odd = odd_shapes()
    rows = [row for row in data["rows"] if shape_of(row) in odd]
    if not rows:
        return not_measured(results, "peers.json")
    found = [ratios(row) for row in rows]
    best = max(one.get("inductor", 0) for one in found)
    ours = geometric_mean([one["tunegemm"] for one in found if "tunegemm" in one])
    told = (
        f"Inductor is up to {best:.1f} times as fast as `torch.mm`, `tunegemm` {ours:.2f} times on average."
    )
    return "\n\n".join([*(part for part in providers(rows, ODD) if part), told])


def providers(rows: list[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """The paragraphs on some rows of peers.json."""
    all_ratios = [ratios(row) for row in rows]
    names = [name for name in columns if any(name in found for found in all_ratios)]
    in_turns = [row for row in rows if row.get("turn_ms")]
    lines = []
    for row, found in zip(rows, all_ratios, strict=True):
        us = row["providers"][BASELINE]["median_us"]
        flops = 2 * row["m"] * row["n"] * row["k"] * row.get("batch", 1)
        best = max(found[name] for name in (BASELINE, *names) if name in found)
        cells = [f"{us:.1f} us, {flops / us * 1e-6:.0f}"]
        for name in names:
            ratio = f"{found[name]:.3f}" if name in found else ""
            cells.append(f"**{ratio}**" if ratio and found[name] == best else ratio)
        lines.append([shape_of(row), *cells, *shared_clocks(row, in_turns)])
    means = []
    for name in names:
        values = [found[name] for found in all_ratios if name in found]
        means.append(
            f"{geometric_mean(values):.3f}" + ("" if len(values) == len(rows) else f" ({len(values)})")
        )
    shared = [float(shared_clocks(row, in_turns)[0]) for row in in_turns]
    means += [f"{geometric_mean(shared):.3f} ({len(shared)})"] if shared else []
    lines.append(["*geometric mean*", "", *means])
    rivals = [
        found["tunegemm"] / max(found[name] for name in PEERS if name in found)
        for found in all_ratios
        if "tunegemm" in found
    ]
    told = ""
    if rivals:
        told = f"To the best library of each interleave `tunegemm` is at {geometric_mean(rivals):.3f}."
    header = ["M x N x K", "torch.mm, TFLOP/s", *names]
    explained = (
        "Speed relative to `torch.mm` in the same interleave: above 1 is faster, the best in bold; "
        "a mean over fewer shapes says over how many."
    )
    if in_turns:
        header.append("tunegemm, shared clocks")
        own = [found["tunegemm"] for row, found in zip(rows, all_ratios, strict=True) if row.get("turn_ms")]
        told += (
            f" Over the {len(own)} shapes at the power cap it is at {geometric_mean(own):.3f} of `torch.mm`, "
            f"timed at shared clocks at {geometric_mean(shared):.3f}."
        )
        explained += (
            " At the power cap each had the chip to itself in its turns; the last column says what one "
            "replay after another gives there, where all share the clocks of their mixture."
        )
    return [
        explained,
        markdown_table(header, lines),
        told,
        losses(rows, all_ratios),
    ]


def shared_clocks(row: dict[str, Any], in_turns: list[dict[str, Any]]) -> list[str]:
    """The cell of tunegemm's ratio at clocks that all shared; none where no row was timed in turns."""
    if not in_turns:
        return []
    ratio = row["providers"].get("tunegemm", {}).get("ratio_shared")
    return [f"{ratio:.3f}" if ratio else ""]


def losses(rows: list[dict[str, Any]], all_ratios: list[dict[str, float]]) -> str:
    """Where tunegemm is slower than torch.mm, than a peer, or than one of its own families, by how much."""
    if not any("tunegemm" in found for found in all_ratios):
        return ""
    slower: list[str] = []
    beaten: list[str] = []
    tied: list[str] = []
    missed: list[str] = []
    for row, found in zip(rows, all_ratios, strict=True):
        own = found.get("tunegemm")
        if own is None:
            continue
        shape, noise = shape_of(row), row.get("noise", 0.0)
        if own < 1:
            slower.append(f"{shape} ({own:.4f})")
        rival = max((name for name in PEERS if name in found), key=lambda name: found[name])
        if found[rival] > own:
            (beaten if found[rival] > own * (1 + noise) else tied).append(
                f"{shape} ({rival}: {100 * (found[rival] / own - 1):.1f} % faster)"
            )
        family = max(
            (name for name in found if name not in (*PEERS, "tunegemm")), key=lambda n: found[n], default=""
        )
        if family and found[family] > own * (1 + noise):
            missed.append(f"{shape} ({family}: {100 * (found[family] / own - 1):.1f} %)")
    if not beaten:
        parts = ["tunegemm loses on none of these shapes."]
    else:
        parts = [f"Slower than `torch.mm`: {', '.join(slower)}."] if slower else []
        parts.append(f"Where tunegemm loses: {', '.join(beaten)}.")
    if tied:
        parts.append(f"Behind a peer by less than the noise: {', '.join(tied)}.")
    if missed:
        parts.append(
            "One of its own families was faster in this interleave than the record, by more than the noise: "
            f"{', '.join(missed)}."
        )
    return "\n\n".join(parts)


def families(results: Path) -> str:
    """Per shape the fastest family; how often each is it."""
    data = load(results, "families.json")
    if data is None:
        return not_measured(results, "families.json")
    from benchmarks.families import PROVIDER, standings

    found = standings(data["rows"])
    lines = [
        [s.shape, s.kind, " = ".join(s.winners), f"{max(s.ratios.values()):.3f}", f"{100 * s.noise:.1f} %"]
        for s in found
    ]
    counts = []
    for family in PROVIDER:
        alone = sum(s.winners == (family,) for s in found)
        shared = sum(family in s.winners for s in found) - alone
        counts.append([f"`{family}`", str(alone), str(shared)])
    return "\n\n".join(
        [
            machine_line(data.get("meta", {})),
            f"Over {len(found)} shapes:",
            markdown_table(["family", "fastest alone", "fastest within the noise"], counts),
            markdown_table(["M x N x K", "kind", "fastest", "times torch.mm", "noise"], lines),
        ]
    )


def family_figures(family: str, results: Path) -> str:
    """What one family reaches: its mean, and its worst shapes with what was faster there."""
    from benchmarks.families import PROVIDER

    name = PROVIDER[family]
    files = []
    for file in ("peers.json", "families.json"):
        if (data := load(results, file)) is not None:
            rows = [row for row in data["rows"] if "ratio" in row["providers"].get(name, {})]
            files.append((data, rows))
    if not files:
        return not_measured(results, "peers.json")
    # The newer one, unless it has few rows of the family.
    data, rows = files[0] if 2 * len(files[0][1]) > len(files[-1][1]) else files[-1]
    odd = odd_shapes()
    parts = [machine_line(data.get("meta", {}))]
    for group, told in (
        ([row for row in rows if shape_of(row) not in odd], "shapes of even K"),
        ([row for row in rows if shape_of(row) in odd], "shapes of odd K"),
    ):
        if not group:
            continue
        values = [ratios(row)[name] for row in group]
        ahead = sum(value > 1 for value in values)
        parts.append(
            f"Over {len(values)} {told}: geometric mean {geometric_mean(values):.3f} of `torch.mm`, "
            f"{min(values):.3f} to {max(values):.3f}, faster on {ahead}."
        )
    lines = []
    for row in sorted(rows, key=lambda row: ratios(row)[name])[:5]:
        found = ratios(row)
        best = max((p for p in found if p != "tunegemm"), key=lambda provider: found[provider])
        entry = row["providers"]
        label = entry[best].get("label") or {BASELINE: "torch.mm"}.get(best, best)
        lines.append(
            [
                shape_of(row),
                entry[name]["label"],
                f"{found[name]:.3f}",
                label if label.startswith((best, "torch")) else f"{best}, {label}",
                f"{found[best]:.3f}",
            ]
        )
    parts.append("Its five worst shapes:")
    parts.append(
        markdown_table(["M x N x K", "its best", "times torch.mm", "the fastest", "times torch.mm"], lines)
    )
    return "\n\n".join(part for part in parts if part)


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
    told = (
        f"The product has {roof['flops_per_byte']:.0f} FLOP per byte of memory, more than the "
        f"{roof['ridge_flops_per_byte']:.0f} where the roofline bends ({roof['peak_tflops']:.0f} TFLOP/s, "
        f"{roof['bandwidth_gbps']} GB/s), so that the peak is its roof. The tile has "
        f"{roof['flops_per_smem_byte']:.0f} FLOP per byte that it loads, which memory alone could feed at "
        f"{roof['tile_tflops']:.0f} TFLOP/s: what goes beyond comes from L2."
    )
    return "\n\n".join([machine_line(data["meta"]), markdown_table(header, lines), told])


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

    told = []
    for name, what in (
        ("torch", "cuBLAS"),
        ("cublaslt", "the best of cuBLASLt"),
        ("pp128x128x64", "the article's kernel"),
    ):
        values = {row["k"]: to_ours(row, name) for row in rows}
        behind = [str(k) for k, value in values.items() if value <= 1]
        ahead = f"behind at K = {', '.join(behind)}" if behind else "ahead at every K"
        told.append(f"{geometric_mean(list(values.values())):.3f} times {what} ({ahead})")
    sentence = (
        f"Geometric mean of our best over the {len(rows)} values of K: {told[0]}, {told[1]} and {told[2]}."
    )
    return "\n\n".join([machine_line(data["meta"]), sentence, "TFLOP/s:", markdown_table(header, lines)])


def machine_line(meta: dict[str, Any]) -> str:
    """On what, with what and when the rows of a result file were measured, as far as its meta says."""
    facts = [
        meta.get("gpu"),
        meta.get("driver") and f"driver {meta['driver']}",
        str(meta.get("date", ""))[:10],
    ]
    facts += [f"{name} {version}" for name, version in meta.get("packages", {}).items()]
    told = ", ".join(str(fact) for fact in facts if fact)
    return f"Measured on {told}." if told else ""


def tuning_time(results: Path) -> str:
    """How long tuning took: cold, after other shapes, and warm."""
    data = load(results, "tuning_time.json")
    if data is None:
        return not_measured(results, "tuning_time.json")
    lines = []
    for row in data["rows"]:
        seconds = [
            f"{row[key]:.1f}" if row.get(key) is not None else "" for key in ("cold_s", "first_s", "warm_s")
        ]
        compiled = row.get("first_compiled", row.get("compiled", ""))
        best = f"{row['best_ratio']:.3f}" if "best_ratio" in row else ""
        lines.append([shape_of(row), str(row["effort"]), str(row["measured"]), str(compiled), *seconds, best])
    header = [
        "M x N x K",
        "effort",
        "measured candidates",
        "compiled",
        "cold s",
        "next s",
        "warm s",
        "times torch.mm",
    ]
    table = markdown_table(header, lines)
    return "\n\n".join(part for part in (machine_line(data.get("meta", {})), table) if part)


def extents_of(row: dict[str, Any]) -> str:
    """The shape of a row whose dtype and epilogue have columns of their own."""
    return f"{row['m']}x{row['n']}x{row['k']}"


def dtypes(results: Path) -> str:
    """torch's own call and our best kernel for each dtype, with the geometric mean of each."""
    data = load(results, "dtypes.json")
    if data is None:
        return not_measured(results, "dtypes.json")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in data["rows"]:
        words = [row["dtype"], "" if row["accumulation"] == "fast" else row["accumulation"]]
        words += ["" if row["epilogue"] == "none" else row["epilogue"]]
        groups.setdefault(" ".join(word for word in words if word), []).append(row)
    lines = []
    for name, rows in groups.items():
        found = []
        for row in rows:
            torch, ours = row["providers"]["torch"], row["providers"]["tunegemm_cute"]
            if "ratio" in ours:
                found.append(ours["ratio"])
                speeds = (f"{torch['tflops']:.0f}", f"{ours['tflops']:.0f}", f"{ours['ratio']:.3f}")
                lines.append([name, extents_of(row), *speeds])
        mean = f"**{geometric_mean(found):.3f}**"
        lines.append([f"*{name}*", f"*geometric mean of {len(found)}*", "", "", mean])
    header = ["dtype", "M x N x K", "torch, TFLOP/s", "tunegemm, TFLOP/s", "times torch"]
    return "\n\n".join([machine_line(data["meta"]), markdown_table(header, lines)])


def epilogues(results: Path) -> str:
    """Fused products beside eager torch and torch.compile."""
    data = load(results, "epilogues.json")
    if data is None:
        return not_measured(results, "epilogues.json")
    names = {"compile": "torch.compile", "max_autotune": "max-autotune", "tunegemm_cute": "tunegemm"}
    lines: list[list[str]] = []
    found: dict[str, list[float]] = {name: [] for name in names}
    for row in sorted(data["rows"], key=lambda row: (row["epilogue"], row["n"], row["k"], row["m"])):
        times = ratios(row)
        for name in names:
            found[name].append(times[name])
        eager = f"{row['providers'][BASELINE]['median_us']:.1f} us"
        lines.append([extents_of(row), row["epilogue"], eager, *(f"{times[name]:.3f}" for name in names)])
    means = (f"{geometric_mean(found[name]):.3f}" for name in names)
    lines.append(["*geometric mean*", "", "", *means])
    header = ["M x N x K", "epilogue", "eager torch", *names.values()]
    return "\n\n".join([machine_line(data["meta"]), markdown_table(header, lines)])


def dispatch(results: Path) -> str:
    """What a call costs the host, beside torch's own."""
    data = load(results, "dispatch.json")
    if data is None:
        return not_measured(results, "dispatch.json")
    lines = [
        [row["call"], f"{row['torch_us']:.2f}", f"{row['tunegemm_us']:.2f}", f"{row['ratio']:.3f}"]
        for row in data["rows"]
    ]
    table = markdown_table(["call", "torch, us", "tunegemm, us", "ratio"], lines)
    told = (
        f"`import tunegemm` takes {data['import_ms']:.1f} ms beyond torch, with dispatch "
        f"{data['import_and_matmul_ms']:.0f} ms; a record in memory {data['bytes_per_record']:.0f} bytes. "
        f"A process's first product takes {data['first_call_ms']:.0f} ms with {data['records']} records and "
        f"{data['first_call_few_records_ms']:.0f} ms with few"
    )
    if (parts := data.get("first_call_parts")) is not None:
        warm, cold = parts["warm"], parts["cold"]
        told += (
            f": {warm['records_ms']:.0f} ms to read the records, {warm['kernel_ms']:.0f} ms to load the "
            f"kernel and {warm['device_ms']:.0f} ms to ask for the device. With its files dropped from the "
            f"page cache it takes {cold['first_call_ms']:.0f} ms, and the import "
            f"{cold['import_and_matmul_ms']:.0f} ms"
        )
    told += "."
    return "\n\n".join([machine_line(data["meta"]), table, told])


def clients(results: Path) -> str:
    """A model end to end: milliseconds by workload and mode, with and without tunegemm."""
    data = load(results, "clients.json")
    if data is None:
        return not_measured(results, "clients.json")
    lines = []
    for row in data["rows"]:
        ours = [f"{row['tunegemm_us'] / 1e3:.3f}", f"{row['ratio']:.3f}"] if "ratio" in row else ["", ""]
        errors = [
            "" if row[name] is None else f"{row[name]:.2e}" for name in ("torch_error", "tunegemm_error")
        ]
        cells = [f"{row['workload']}, {row['mode']}", str(row["layers"]), f"{row['torch_us'] / 1e3:.3f}"]
        lines.append([*cells, *ours, f"{100 * row['noise']:.1f} %", *errors])
    header = [
        "workload, mode", "layers", "torch, ms", "tunegemm, ms", "times torch", "noise", "torch's error",
        "tunegemm's error",
    ]  # fmt: skip
    slower = [
        f"{row['workload']} {row['mode']} ({row['ratio']:.3f})"
        for row in data["rows"]
        if "ratio" in row and 1 - row["ratio"] > row["noise"]
    ]
    told = f"Slower than torch by more than the noise: {', '.join(slower) or 'none'}."
    return "\n\n".join([machine_line(data["meta"]), markdown_table(header, lines), told])


def decode(results: Path) -> str:
    """Every M of a decode loop: per projection how it was served and how fast."""
    header = [
        "N x K", "hits", "near hits", "torch's", "geometric mean", "of near hits", "slower by over 1 %",
        "worst",
    ]  # fmt: skip
    data = load(results, "decode.json")
    if data is None:
        return not_measured(results, "decode.json")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in data["rows"]:
        groups.setdefault(f"{row['n']}x{row['k']}", []).append(row)
    lines = []
    for name, rows in [*groups.items(), ("all", data["rows"])]:
        found = [row["ratio"] for row in rows]
        near = [row["ratio"] for row in rows if row["outcome"] == "near"]
        lines.append(
            [
                name,
                *(str(sum(row["outcome"] == outcome for row in rows)) for outcome in ("hit", "near", "miss")),
                f"{geometric_mean(found):.3f}",
                f"{geometric_mean(near):.3f}" if near else "",
                str(sum(ratio < 0.99 for ratio in found)),
                f"{min(found):.3f}",
            ]
        )
    return "\n\n".join([machine_line(data["meta"]), markdown_table(header, lines)])


def cli(_: Path) -> str:
    """Every command with its options, from the commands themselves."""
    import typer.main

    from tunegemm.cli import app

    group: Any = typer.main.get_command(app)
    commands: dict[str, Any] = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", {})
        commands |= {f"{name} {sub}": found for sub, found in inner.items()} or {name: command}
    parts = []
    for name, command in commands.items():
        rows = []
        for option in command.params:
            is_option = option.param_type_name == "option"
            flags = ", ".join(f"`{flag}`" for flag in (option.opts if is_option else [option.metavar]))
            words = (option.help or "").replace("|", "\\|")
            rows.append([flags, words])
        lines = [f"| {flags} | {words} |" for flags, words in rows]
        table = "\n".join(["| option | |", "|---|---|", *lines]) if rows else ""
        parts.append(f"#### `tunegemm {name}`\n\n{command.help.strip()}\n\n{table}".rstrip())
    return "\n\n".join(parts)


#: What fills each block, given the folder of the result files.
BLOCKS: dict[str, Callable[[Path], str]] = {
    "peers": peers,
    "peers-odd": peers_odd,
    "tuning-time": tuning_time,
    "clients": clients,
    "dtypes": dtypes,
    "epilogues": epilogues,
    "dispatch": dispatch,
    "decode": decode,
    "cli": cli,
    "families": families,
    **{
        f"family-{name}": partial(family_figures, name)
        for name in ("cute_sm90", "gluon_wgmma", "triton_tma", "cute_sm80")
    },
    "seed-000": seed_000,
    "seed-001": seed_001,
    "seed-003": seed_003,
    "seed-004": seed_004,
}


def figures(results: Path = RESULTS) -> dict[Path, bytes]:
    """Content of each figure that is drawn of a result file, by its path."""
    found = {}
    for out, name in (("families.svg", "families.json"), ("seed-004.svg", "seed-004.json")):
        if (data := load(results, name)) is not None:
            from benchmarks import figures
            from benchmarks.families import draw

            drawn = draw if out == "families.svg" else figures.sweep_over_k
            found[ROOT / "docs" / "figures" / out] = figures.render(drawn, data["rows"], "svg")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill the generated blocks of the documents.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 when a block is out of date"
    )
    check = parser.parse_args(arguments).check
    stale = []
    for path in documents():
        text = path.read_text()
        try:
            fresh = refresh(text)
        except DocsError as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        if fresh != text:
            stale.append(path)
            if not check:
                path.write_text(fresh)
    for path, content in figures().items():
        if not path.exists() or path.read_bytes() != content:
            stale.append(path)
            if not check:
                path.write_bytes(content)
    for path in stale:
        print(f"{path}: {'out of date; run `make docs`' if check else 'rewritten'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
