"""The tables of GPUs: each architecture's features, and which of them was compiled, run by proxy, or run."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables.reading import Row, groups_of, load, table_of
from tunegemm.describe.architectures import ALIASES, ARCHITECTURES, PARTS, Architecture
from tunegemm.describe.device import find_device
from tunegemm.generate import families

#: Architectures on which the project itself has measured.
_MEASURED = {(9, 0): "H100, H200"}


def gpus(results: Path) -> str:
    """A row for each architecture."""
    data = load(results.parent, "compiled.json")
    counts = groups_of(data["rows"] if data else (), lambda row: row["architecture"])
    by_proxy = any((folder / "portable.json").exists() for folder in results.parent.iterdir())
    not_measured = "by proxy: the same source on a Hopper" if by_proxy else "no"
    return table_of(ARCHITECTURES.values(), {
        "": lambda each: each.short_name, "generation": lambda each: each.name,
        "shared memory": lambda each: f"{each.smem_bytes_per_block // 1024} KiB",
        "has": lambda each: ", ".join(each.instructions) or "none of these", "families": _families,
        "compiled without it": lambda each: _compiled(counts.get(each.short_name, [])),
        "run": lambda each: _MEASURED.get(each.capability, not_measured),
    })  # fmt: skip


def _families(architecture: Architecture) -> str:
    part = next(name for name, part in PARTS.items() if part.capability == architecture.capability)
    return ", ".join(f"`{name}`" for name in families.of_device(find_device(part)))


def _compiled(rows: list[Row]) -> str:
    counts = "{family} ({version}) {clean} of {kernels}"
    return "; ".join(counts.format_map(row) for row in rows if row["kernels"]) or "not counted"


def parts(_: Path) -> str:
    """A row for each part that `model:NAME` knows."""
    named = {name: [alias for alias, whole in ALIASES.items() if whole == name] for name in PARTS}
    return table_of([{"name": name, "part": part} for name, part in PARTS.items()], {
        "name": lambda row: ", ".join(f"`{item}`" for item in (row["name"], *named[row["name"]])),
        "as CUDA reports it": "{part.device_name}",
        "": lambda row: ARCHITECTURES[row["part"].capability].short_name, "SMs": "{part.sm_count}",
        "bf16, TFLOP/s": "{part.peak_tflops:g}", "GB/s": "{part.bandwidth_gbps:g}",
        "ridge point, FLOP/B":
            lambda row: f"{row['part'].peak_tflops * 1e3 / row['part'].bandwidth_gbps:.0f}",
        "source": "{part.source}", "compared": lambda row: row["part"].compared or "none",
    })  # fmt: skip
