"""Fills the generated blocks of README.md and docs/*.md from result files and from the command line itself.

A block starts with `<!-- generated: NAME -->` and ends with `<!-- end -->`. Figures come only from files
under benchmarks/results/; where a file is not there yet, the block says that nothing is measured yet.

    python docs/generate.py            # rewrite the blocks
    python docs/generate.py --check    # exit 1 when one is out of date
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"
BASELINE = "torch"
NOT_MEASURED = "*Nothing measured yet: `{path}` is not there.*"

_BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


class DocsError(Exception):
    """A block or a result file that cannot be used; the message names it."""


def documents(root: Path = ROOT) -> list[Path]:
    """The files that may hold generated blocks."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


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


def peers(results: Path) -> str:
    """The table of all providers, its geometric means, and where tunegemm loses."""
    data = load(results, "peers.json")
    if data is None:
        return not_measured(results, "peers.json")
    rows = data["rows"]
    all_ratios = [ratios(row) for row in rows]
    names = [name for name in dict.fromkeys(n for row in rows for n in row["providers"]) if name != BASELINE]
    names = [name for name in names if any(name in found for found in all_ratios)]
    lines = []
    for row, found in zip(rows, all_ratios, strict=True):
        us = row["providers"][BASELINE]["median_us"]
        flops = 2 * row["m"] * row["n"] * row["k"] * row.get("batch", 1)
        best = max(found.values())
        cells = [f"{us:.1f} us, {flops / us * 1e-6:.0f}"]
        for name in names:
            ratio = f"{found[name]:.3f}" if name in found else ""
            cells.append(f"**{ratio}**" if ratio and found[name] == best else ratio)
        lines.append([shape_of(row), *cells])
    means = []
    for name in names:
        values = [found[name] for found in all_ratios if name in found]
        means.append(
            f"{geometric_mean(values):.3f}" + ("" if len(values) == len(rows) else f" ({len(values)})")
        )
    lines.append(["*geometric mean*", "", *means])
    parts = [
        machine_line(data.get("meta", {})),
        "Speed relative to `torch.mm` in the same interleave: above 1 is faster, the best in bold; "
        "a mean over fewer shapes says over how many.",
        markdown_table(["M x N x K", "torch.mm, TFLOP/s", *names], lines),
        losses(rows, all_ratios),
    ]
    return "\n\n".join(part for part in parts if part)


def losses(rows: list[dict[str, Any]], all_ratios: list[dict[str, float]]) -> str:
    """Every shape where some peer is faster than tunegemm, by how much."""
    lost = []
    for row, found in zip(rows, all_ratios, strict=True):
        own = found.get("tunegemm")
        rivals = {name: value for name, value in found.items() if not name.startswith("tunegemm")}
        if own is None or not rivals:
            continue
        rival = max(rivals, key=lambda name: rivals[name])
        if rivals[rival] > own:
            lost.append(f"{shape_of(row)} ({rival}: {100 * (rivals[rival] / own - 1):.1f} % faster)")
    if not any("tunegemm" in found for found in all_ratios):
        return ""
    return f"Where tunegemm loses: {', '.join(lost)}." if lost else "tunegemm loses on none of these shapes."


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
    """How long tuning took, cold and warm."""
    data = load(results, "tuning_time.json")
    if data is None:
        return not_measured(results, "tuning_time.json")
    lines = []
    for row in data["rows"]:
        cold, warm = (f"{row[key]:.1f}" if row.get(key) is not None else "" for key in ("cold_s", "warm_s"))
        lines.append([shape_of(row), str(row["effort"]), str(row["measured"]), cold, warm])
    table = markdown_table(["M x N x K", "effort", "measured candidates", "cold s", "warm s"], lines)
    return "\n\n".join(part for part in (machine_line(data.get("meta", {})), table) if part)


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
BLOCKS: dict[str, Callable[[Path], str]] = {"peers": peers, "tuning-time": tuning_time, "cli": cli}


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
    for path in stale:
        print(f"{path}: {'out of date; run `make docs`' if check else 'rewritten'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
