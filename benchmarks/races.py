"""What the final races of a tuning database show of the chip they ran on; measures nothing, needs no GPU.

    python -m benchmarks.races --db tuning.sqlite
    python -m benchmarks.races --db tuning.sqlite --out FILE.json

A row for each race: torch.mm in the first two rounds and from the ninth on, the candidates' ratios to it then
and then, and how the two agree. Where clocks settle before a race, early and late are alike; where they do
not, the order of the candidates at first is not that of the end (docs/decisions/0011-clocks-settle-first.md).
torch.mm as a candidate says what the race makes of the baseline itself. Steady-state races are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.results import command_line, problem_fields
from tunegemm.errors import TunegemmError
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.policy import FINAL
from tunegemm.store import Database
from tunegemm.store.record import Record

METHOD = (
    "final races with all their rounds, read from a tuning database; early is the median of the first two "
    "rounds, late that from the ninth on; ratios are to torch.mm in the same rounds; correlation is of early "
    "and late ratios over the candidates that stayed to the end; late_after_ms: device time of the rounds "
    "before torch.mm is first within 2 % of its late time; torch_as_candidate: ratio and products of a "
    "replay where torch.mm, the baseline, ran as a candidate, too"
)
_EARLY, _LATE = slice(0, 2), slice(8, None)
#: Fewer candidates have no order to speak of.
_FEWEST = 6


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.races", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--db", help="tuning database (default: TUNEGEMM_DB or the user's)")
    parser.add_argument(
        "--since", default="", help="races since then, such as 2026-11-22 or 2026-11-22T02:00"
    )
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON")
    options = parser.parse_args(arguments)
    try:
        with Database.open(options.db, read_only=True) as database:
            entries = [e for p in database.problems() for e in database.entries(p)]
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    found = races(entries, options.since)
    rows = [row for race in found if (row := describe(race)) is not None]
    print(*map(_brief, rows), summary(rows), sep="\n")
    if options.out is not None and rows:
        text = ",\n".join("  " + json.dumps(row) for row in rows)
        meta = json.dumps(_meta([race[-1] for race in found]), indent=1)
        options.out.write_text(f'{{"meta": {meta},\n"rows": [\n{text}\n]}}\n')
    return 0


def races(entries: Iterable[Record], since: str = "") -> list[list[Record]]:
    """Entries of one final race each, oldest first: they share the baseline's samples, as far as they go."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for entry in entries:
        first = entry.measurement.baseline_us[:3]
        if entry.policy != "screen" and entry.measured_at.isoformat() >= since:
            found.setdefault((entry.problem, entry.fingerprint, first), []).append(entry)
    return sorted(found.values(), key=lambda race: race[0].measured_at)


def describe(race: Sequence[Record]) -> dict[str, Any] | None:
    """A race's row; None for one that was cut short or in which few candidates stayed."""
    stayed = [entry for entry in race if len(entry.measurement.samples_us) == FINAL.rounds]
    if len(stayed) < _FEWEST:
        return None
    last, torchs = stayed[-1], stayed[0].measurement.baseline_us
    early_us, late_us = statistics.median(torchs[_EARLY]), statistics.median(torchs[_LATE])
    early = [_ratio(entry, _EARLY) for entry in stayed]
    late = [_ratio(entry, _LATE) for entry in stayed]
    at_first, at_last = early.index(max(early)), late.index(max(late))
    row: dict[str, Any] = problem_fields(last.problem) | {
        "epilogue": last.problem.epilogue,
        "date": last.measured_at.isoformat(timespec="seconds"),
        "sm_clock_mhz": last.measurement.evidence.get("sm_clock_mhz"),
        "settle_ms": last.measurement.evidence.get("settle_ms", 0),
        "noise": round(last.measurement.noise, 5),
        "torch_early_us": round(early_us, 2),
        "torch_late_us": round(late_us, 2),
        "late_after_ms": round(_milliseconds_before(race, torchs, late_us)),
        "candidates": len(stayed),
        "correlation": round(statistics.correlation(early, late), 2),
        "best_early": _named(stayed[at_first], early[at_first], late[at_first]),
        "best_late": _named(stayed[at_last], early[at_last], late[at_last])
        | {"rank_early": 1 + sum(ratio > early[at_last] for ratio in early)},
    }
    for entry in race:
        if entry.candidate == TORCH_MM:
            row["torch_as_candidate"] = {
                "ratio": round(entry.measurement.ratio, 4),
                "products": entry.measurement.evidence.get("products_per_replay"),
            }
    return row


def _ratio(entry: Record, rounds: slice) -> float:
    ours, torchs = entry.measurement.samples_us[rounds], entry.measurement.baseline_us[rounds]
    return statistics.median(b / s for b, s in zip(torchs, ours, strict=True))


def _milliseconds_before(race: Sequence[Record], torchs: Sequence[float], late_us: float) -> float:
    """Device time of the rounds before torch.mm takes what it takes later. It runs twice a round."""
    products = [entry.measurement.evidence.get("products_per_replay", 1) for entry in race]
    elapsed_us = 0.0
    for index, torch_us in enumerate(torchs):
        if torch_us > 0.98 * late_us:
            break
        elapsed_us += 2 * torch_us * max(products)
        for entry, count in zip(race, products, strict=True):
            elapsed_us += count * sum(entry.measurement.samples_us[index : index + 1])
    return elapsed_us * 1e-3


def _named(entry: Record, early: float, late: float) -> dict[str, Any]:
    return {"label": entry.label, "early": round(early, 4), "late": round(late, 4)}


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One line over all races."""
    if not rows:
        return f"no final race with {_FEWEST} candidates that stayed"
    slower = [row for row in rows if 1.08 < row["torch_late_us"] / row["torch_early_us"] < 1.4]
    agree = [row["correlation"] for row in slower]
    said = f"{len(rows)} races, torch.mm slower by 8 to 40 % at the end of {len(slower)}"
    if agree:
        first = sum(row["best_late"]["rank_early"] == 1 for row in slower)
        said += (
            f"; there early and late ratios correlate by {statistics.median(agree):.2f} in the median, "
            f"negatively in {sum(value < 0 for value in agree)}, and {first} had one winner"
        )
    return said


def _meta(entries: Sequence[Record]) -> dict[str, Any]:
    fingerprint = entries[-1].fingerprint
    foreign = {entry.fingerprint for entry in entries} - {fingerprint}
    return {
        "command": command_line(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": fingerprint.device_name,
        "driver": fingerprint.driver,
        "packages": {
            "torch": fingerprint.torch,
            "triton": fingerprint.triton,
            "nvidia-cutlass-dsl": fingerprint.cutlass_dsl,
            "cuda": fingerprint.cuda,
        },
        "other_fingerprints": sorted(other.digest for other in foreign),
        "clocks": "of each row",
        "method": METHOD,
    }


def _brief(row: dict[str, Any]) -> str:
    best = row["best_late"]
    return (
        f"{row['m']}x{row['n']}x{row['k']} {row['date'][:16]}: torch.mm {row['torch_early_us']:.1f} to "
        f"{row['torch_late_us']:.1f} us, correlation {row['correlation']:.2f}, {best['label']} at "
        f"{best['early']:.3f} (place {best['rank_early']}) and {best['late']:.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
