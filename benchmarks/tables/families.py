"""Tables of the kernel families: which wins where, and what each reaches."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import geometric_mean
from benchmarks.tables.peers import odd_shapes
from benchmarks.tables.reading import (
    BASELINE,
    load,
    machine_line,
    markdown_table,
    not_measured,
    ratios,
    shape_of,
)


def families(results: Path) -> str:
    """Per shape the fastest family; how often each is it."""
    data = load(results, "families.json")
    if data is None:
        return not_measured(results, "families.json")
    from benchmarks.families import standings, timed

    found = standings(data["rows"])
    lines = [
        [s.shape, s.kind, " = ".join(s.winners), f"{max(s.ratios.values()):.3f}", f"{100 * s.noise:.1f} %"]
        for s in found
    ]
    counts = []
    for family in timed(found):
        single = sum(s.winners == (family,) for s in found)
        shared = sum(family in s.winners for s in found) - single
        counts.append([f"`{family}`", str(single), str(shared)])
    return "\n\n".join(
        [
            machine_line(data.get("meta", {})),
            f"Over {len(found)} shapes:",
            markdown_table(["family", "fastest by itself", "fastest within the noise"], counts),
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
    for group, said in (
        ([row for row in rows if shape_of(row) not in odd], "shapes of even K"),
        ([row for row in rows if shape_of(row) in odd], "shapes of odd K"),
    ):
        if not group:
            continue
        values = [ratios(row)[name] for row in group]
        ahead = sum(value > 1 for value in values)
        parts.append(
            f"Over {len(values)} {said}: geometric mean {geometric_mean(values):.3f} of `torch.mm`, "
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
