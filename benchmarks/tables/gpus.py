"""The tables of GPUs: each architecture's features, and which of them was compiled, run by proxy, or run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.tables.reading import load, markdown_table
from tunegemm.describe.architectures import ALIASES, ARCHITECTURES, PARTS, Architecture
from tunegemm.describe.device import find_device
from tunegemm.generate import families

#: Architectures on which the project itself has measured.
_MEASURED = {(9, 0): "H100, H200"}


def gpus(results: Path) -> str:
    """A row for each architecture."""
    data = load(results.parent, "compiled.json")
    counts: dict[str, list[dict[str, Any]]] = {}
    for row in data["rows"] if data else ():
        counts.setdefault(row["architecture"], []).append(row)
    proxy = any((folder / "portable.json").exists() for folder in results.parent.iterdir())
    lines = []
    for architecture in ARCHITECTURES.values():
        part = next(name for name, part in PARTS.items() if part.capability == architecture.capability)
        tried = ", ".join(f"`{name}`" for name in families.of_device(find_device(part)))
        lines.append([
            architecture.short_name, architecture.name, f"{architecture.smem_bytes_per_block // 1024} KiB",
            ", ".join(architecture.instructions) or "none of these", tried,
            _compiled(counts.get(architecture.short_name, [])), _ran(architecture, proxy),
        ])  # fmt: skip
    header = ["", "generation", "shared memory", "has", "families", "compiled without it", "run"]
    return markdown_table(header, lines)


def _compiled(rows: list[dict[str, Any]]) -> str:
    results = [
        f"{row['family']} ({row['version']}) {row['clean']} of {row['kernels']}" for row in rows
        if row["kernels"]
    ]  # fmt: skip
    return "; ".join(results) or "not counted"


def _ran(architecture: Architecture, proxy: bool) -> str:
    if here := _MEASURED.get(architecture.capability):
        return here
    return "by proxy: the same source on a Hopper" if proxy else "no"


def parts(_: Path) -> str:
    """A row for each part that `model:NAME` knows."""
    named = {name: [alias for alias, whole in ALIASES.items() if whole == name] for name in PARTS}
    lines = [
        [
            ", ".join(f"`{item}`" for item in [name, *named[name]]), part.device_name,
            ARCHITECTURES[part.capability].short_name, str(part.sm_count), f"{part.peak_tflops:g}",
            f"{part.bandwidth_gbps:g}", f"{part.peak_tflops * 1e3 / part.bandwidth_gbps:.0f}",
            part.source, part.compared or "none",
        ]
        for name, part in PARTS.items()
    ]  # fmt: skip
    header = [
        "name", "as CUDA reports it", "", "SMs", "bf16, TFLOP/s", "GB/s", "ridge point, FLOP/B", "source",
        "compared",
    ]  # fmt: skip
    return markdown_table(header, lines)
