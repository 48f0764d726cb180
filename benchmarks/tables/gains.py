"""The README's first table: who gains how much, of the result files of both GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.results import geometric_mean
from benchmarks.tables.peers import even_rows
from benchmarks.tables.reading import BASELINE, Row, load, markdown_table, not_measured, ratios

#: Folders of result files beside each other, as the table's columns.
GPUS = {"h200": "H200", "h100-80gb-hbm3": "H100"}


def _client(row: Row, workloads: str, modes: str) -> bool:
    return row["workload"] in workloads.split() and row["mode"] in modes.split()


def _vllm(dtype: str, phase: str) -> Callable[[Row], bool]:
    return lambda row: (row["dtype"], row["mode"], row["phase"]) == (dtype, "fastest", phase)


#: Each line: its caption, its result file, and the rows of the file that it sums up.
LINES: tuple[tuple[str, str, Callable[[Row], bool]], ...] = (
    ("one product, tuned, up to 64 rows", "peers.json", lambda row: row["m"] <= 64),
    ("one product, tuned, 128 to 512 rows", "peers.json", lambda row: 128 <= row["m"] <= 512),
    ("one product, tuned, 1024 rows and more", "peers.json", lambda row: row["m"] >= 1024),
    ("one product with a shipped record", "first_use.json", lambda row: row["listed"]),
    ("one product nobody tuned, up to 128 rows", "first_use.json",
     lambda row: not row["listed"] and row["m"] <= 128),
    ("one product nobody tuned, more rows", "first_use.json",
     lambda row: not row["listed"] and row["m"] > 128),
    ("8B layers decoding 1 to 64 sequences", "clients.json",
     lambda row: _client(row, "decode-1 decode-16 decode-64", "graph")),
    ("8B layers reading 4096 tokens", "clients.json", lambda row: _client(row, "prefill", "eager graph")),
    ("layers by the backend, CUDA graphs", "layers.json", lambda row: row["mode"] == "graph"),
    ("8B layers in training", "clients.json", lambda row: _client(row, "train", "eager graph")),
    ("vLLM, bf16 decode", "vllm.json", _vllm("bf16", "decode")),
    ("vLLM, bf16 prefill", "vllm.json", _vllm("bf16", "prefill")),
    ("vLLM, fp8 decode", "vllm.json", _vllm("fp8", "decode")),
    ("vLLM, fp8 prefill", "vllm.json", _vllm("fp8", "prefill")),
    ("fp8 with block scales, up to 64 rows", "blocks.json", lambda row: row["m"] <= 64),
    ("fp8 with block scales, more rows", "blocks.json", lambda row: row["m"] > 64),
    ("a layer of experts, beside transformers", "expert_layers.json", lambda row: True),
)  # fmt: skip


def gains(results: Path) -> str:
    """Who gains how much: geometric mean and least of each kind of use, on both GPUs."""
    lines = [
        [said, *(_cell(results.with_name(folder), name, belongs) for folder in GPUS)]
        for said, name, belongs in LINES
    ]
    lines = [line for line in lines if any(line[1:])]
    if not lines:
        return not_measured(results, "peers.json")
    return markdown_table(["what runs", *GPUS.values()], lines)


def _cell(results: Path, name: str, belongs: Callable[[Row], bool]) -> str:
    if (data := load(results, name)) is None:
        return ""
    rows = even_rows(data["rows"]) if name == "peers.json" else data["rows"]
    result = [ratio for row in rows if belongs(row) and (ratio := _ratio(row)) is not None]
    return f"{geometric_mean(result):.3f} ({min(result):.3f})" if result else ""


def _ratio(row: Row) -> float | None:
    """A row's ratio to torch; None where torch refuses the product."""
    if BASELINE in row.get("providers", {}):
        return ratios(row)["tunegemm"]
    ratio: float | None = row["ratio_to_torch"] if "ratio_to_torch" in row else row["ratio"]
    return ratio
