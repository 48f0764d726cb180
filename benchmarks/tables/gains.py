"""The README's first table: who gains how much, of the result files of both GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results import geometric_mean
from benchmarks.tables.peers import even_rows
from benchmarks.tables.reading import BASELINE, load, markdown_table, not_measured, ratios

Row = dict[str, Any]
#: Folders of result files beside each other, as the table's columns.
GPUS = {"h200": "H200", "h100-80gb-hbm3": "H100"}


def _tuned(least: int, most: int) -> Callable[[Row], bool]:
    return lambda row: least <= row["m"] <= most


def _client(workloads: tuple[str, ...], modes: tuple[str, ...]) -> Callable[[Row], bool]:
    return lambda row: row["workload"] in workloads and row["mode"] in modes


def _vllm(dtype: str, mode: str, phase: str) -> Callable[[Row], bool]:
    return lambda row: (row["dtype"], row["mode"], row["phase"]) == (dtype, mode, phase)


#: Each line: its caption, its result file, and the rows of the file that it sums up.
LINES: tuple[tuple[str, str, Callable[[Row], bool]], ...] = (
    ("one product, tuned, up to 64 rows", "peers.json", _tuned(1, 64)),
    ("one product, tuned, 128 to 512 rows", "peers.json", _tuned(128, 512)),
    ("one product, tuned, 1024 rows and more", "peers.json", _tuned(1024, 1 << 30)),
    ("one product with a shipped record", "first_use.json", lambda row: row["listed"]),
    (
        "one product nobody tuned, up to 128 rows",
        "first_use.json",
        lambda row: not row["listed"] and row["m"] <= 128,
    ),
    (
        "one product nobody tuned, more rows",
        "first_use.json",
        lambda row: not row["listed"] and row["m"] > 128,
    ),
    (
        "8B layers decoding 1 to 64 sequences",
        "clients.json",
        _client(("decode-1", "decode-16", "decode-64"), ("graph",)),
    ),
    ("8B layers reading 4096 tokens", "clients.json", _client(("prefill",), ("eager", "graph"))),
    ("layers by the backend, CUDA graphs", "layers.json", lambda row: row["mode"] == "graph"),
    ("8B layers in training", "clients.json", _client(("train",), ("eager", "graph"))),
    ("vLLM, bf16 decode", "vllm.json", _vllm("bf16", "fastest", "decode")),
    ("vLLM, bf16 prefill", "vllm.json", _vllm("bf16", "fastest", "prefill")),
    ("vLLM, fp8 decode", "vllm.json", _vllm("fp8", "fastest", "decode")),
    ("vLLM, fp8 prefill", "vllm.json", _vllm("fp8", "fastest", "prefill")),
    ("a layer of experts, beside transformers", "expert_layers.json", lambda row: True),
)


def gains(results: Path) -> str:
    """Who gains how much: geometric mean and least of each kind of use, on both GPUs."""
    lines = []
    for said, name, belongs in LINES:
        cells = [_cell(results.with_name(folder), name, belongs) for folder in GPUS]
        if any(cells):
            lines.append([said, *cells])
    return (
        markdown_table(["what runs", *GPUS.values()], lines) if lines else not_measured(results, "peers.json")
    )


def _cell(results: Path, name: str, belongs: Callable[[Row], bool]) -> str:
    if (data := load(results, name)) is None:
        return ""
    rows = even_rows(data["rows"]) if name == "peers.json" else data["rows"]
    result = [_ratio(row) for row in rows if belongs(row)]
    return f"{geometric_mean(result):.3f} ({min(result):.3f})" if result else ""


def _ratio(row: Row) -> float:
    return ratios(row)["tunegemm"] if BASELINE in row.get("providers", {}) else row["ratio"]
