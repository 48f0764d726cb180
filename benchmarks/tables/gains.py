"""The README's first table: who gains how much, of the result files of both GPUs."""

from __future__ import annotations

from pathlib import Path

import pandas

from benchmarks.results import geometric_mean
from benchmarks.tables.peers import even_rows
from benchmarks.tables.reading import BASELINE, Row, load, markdown_table, not_measured, ratios

#: Folders of result files beside each other, as the table's columns.
GPUS = {"h200": "H200", "h100-80gb-hbm3": "H100"}


#: Each line: its caption, its result file, and the rows of the file that it sums up, as pandas queries them.
LINES = (
    ("one product, tuned, up to 64 rows", "peers.json", "m <= 64"),
    ("one product, tuned, 128 to 512 rows", "peers.json", "128 <= m <= 512"),
    ("one product, tuned, 1024 rows and more", "peers.json", "m >= 1024"),
    ("one product with a shipped record", "first_use.json", "listed"),
    ("one product nobody tuned, up to 128 rows", "first_use.json", "not listed and m <= 128"),
    ("one product nobody tuned, more rows", "first_use.json", "not listed and m > 128"),
    ("8B layers decoding 1 to 64 sequences", "clients.json",
     "workload in ('decode-1', 'decode-16', 'decode-64') and mode == 'graph'"),
    ("8B layers reading 4096 tokens", "clients.json", "workload == 'prefill' and mode in ('eager', 'graph')"),
    ("layers by the backend, CUDA graphs", "layers.json", "mode == 'graph'"),
    ("8B layers in training", "clients.json", "workload == 'train' and mode in ('eager', 'graph')"),
    *((f"vLLM, {dtype.replace('blocks', 'block-scaled fp8')} {phase}", "vllm.json",
       f"dtype == '{dtype}' and mode == 'fastest' and phase == '{phase}'")
      for dtype in ("bf16", "fp8", "blocks") for phase in ("decode", "prefill")),
    ("fp8 with block scales, up to 64 rows", "blocks.json", "m <= 64"),
    ("fp8 with block scales, more rows", "blocks.json", "m > 64"),
    ("a layer of experts, beside transformers", "expert_layers.json", "rows > 0"),
)  # fmt: skip


def gains(results: Path) -> str:
    """Who gains how much: geometric mean and least of each kind of use, on both GPUs."""
    lines = [
        [said, *(_cell(results.with_name(folder), name, query) for folder in GPUS)]
        for said, name, query in LINES
    ]
    lines = [line for line in lines if any(line[1:])]
    if not lines:
        return not_measured(results, "peers.json")
    return markdown_table(["what runs", *GPUS.values()], lines)


def _cell(results: Path, name: str, query: str) -> str:
    if (data := load(results, name)) is None:
        return ""
    rows = even_rows(data["rows"]) if name == "peers.json" else data["rows"]
    chosen = pandas.DataFrame(rows).query(query).index
    result = [ratio for row in (rows[i] for i in chosen) if (ratio := _ratio(row)) is not None]
    return f"{geometric_mean(result):.3f} ({min(result):.3f})" if result else ""


def _ratio(row: Row) -> float | None:
    """A row's ratio to torch; None where torch refuses the product."""
    if BASELINE in row.get("providers", {}):
        return ratios(row)["tunegemm"]
    ratio: float | None = row["ratio_to_torch"] if "ratio_to_torch" in row else row["ratio"]
    return ratio
