"""`tunegemm report`: a page with a device's records to read, sort, filter and print.

The words are in `assets/report.html`, the figures in `charts`; this module supplies the rest. The page needs
no network: its content security policy allows only its own script, by hash, and inline styles.
"""

from __future__ import annotations

import base64
import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

import tunegemm
from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.measure.statistics import NOISE_FLOOR
from tunegemm.report import analysis, charts
from tunegemm.report.contents import Contents, Details, Winner
from tunegemm.report.text import clean, significant

_ASSETS = Path(__file__).parent / "assets"

#: Rows of the table and of the failures; the roofline and the figures at the top count all.
MOST_ROWS, MOST_REASONS = 2_000, 100

#: Listed trials of a search: the fastest ones.
MOST_TRIALS = 300
#: The fields of a fingerprint that are not the device itself.
_SOFTWARE = [field.name for field in fields(Fingerprint) if field.name not in ("device_name", "sm_count")]


def report(contents: Contents, *, command: str = "tunegemm report") -> str:
    """The whole page. command: the command that made it, for the footer."""
    winners, listed = contents.winners, contents.winners[:MOST_ROWS]
    limits = analysis.ratio_limits(listed)
    roofs = [w.percent_of_roofline for w in winners if w.percent_of_roofline is not None]
    stages = Counter[str]()
    for failure in contents.failures:
        stages[failure.stage] += failure.count
    script = "\n" + (_ASSETS / "page.js").read_text(encoding="utf-8")
    template = _environment().get_template("report.html")
    return template.render(
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=(_ASSETS / "page.css").read_text(encoding="utf-8"),
        contents=contents,
        version=tunegemm.__version__,
        command=command,
        headline=headline(contents),
        mean=statistics.geometric_mean(winner.record.ratio for winner in winners),
        confirmed=any(winner.record.confirmed for winner in winners),
        symbols=charts.SYMBOLS,
        words=charts.WORDS,
        failed=sum(stages.values()),
        stages=stages.most_common(),
        most_reasons=MOST_REASONS,
        roofs=(statistics.median(roofs), max(roofs)) if roofs else None,
        listed=listed,
        anchors={details.problem: _anchor(details.problem) for details in contents.details},
        families=_choices(winner.record.candidate.family for winner in listed),
        dtypes=_choices(winner.record.problem.dtypes for winner in listed),
        layouts=_choices(winner.record.problem.layout for winner in listed),
        ticks=ticks(limits),
        forest=lambda winner: positions(winner, limits),
        significant=significant,
        heat=charts.heat_class,
        tip=lambda trial: Markup(escape(charts.trial_tip(trial))),  # of several lines, which are kept
        roofline=Markup(charts.inline_roofline(contents)),
        named=len(winners) <= charts.NAMED_MARKS,
        replayed=any(details.sequence != details.trials for details in contents.details),
        shapes=[_shape(details) for details in contents.details],
        facts=_facts(contents),
        software=_SOFTWARE,
    )


@cache
def _environment() -> Environment:
    """All text is escaped unless it is `Markup`."""
    return Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, finalize=_shown, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def _shown(value: Any) -> Any:
    """What a template prints: text from elsewhere as `clean` has it, and then escaped."""
    return clean(value, 2000) if type(value) is str and not value.isprintable() else value


def headline(contents: Contents) -> str:
    """The mean gain; for a recording, of the records in steady state, if there are any."""
    ratios = list(contents.steady.values()) or [winner.record.ratio for winner in contents.winners]
    count, mean = len(ratios), statistics.geometric_mean(ratios)
    runs = f"{count:,} tuned product{'s run' if count != 1 else ' runs'}"
    how = "as fast as torch.mm" if 0.995 < mean < 1.005 else f"at {mean:.3f} \u00d7 the speed of torch.mm"
    return f"{runs} {how} on {contents.device.name}{' in steady state' if contents.steady else ''}"


def _choices(values: Iterable[str]) -> list[tuple[str, str]]:
    return [(value, value) for value in sorted(set(values))]


def _anchor(problem: Problem) -> str:
    return "shape-" + "".join(letter if letter.isalnum() else "-" for letter in str(problem))


def _shape(details: Details) -> dict[str, Any]:
    """One problem's search as the page shows it."""
    tried = details.tried
    grids = analysis.tile_grids(details.trials)
    tiles = [trial for grid in grids for trial in grid.best.values()]
    return {
        "problem": details.problem,
        "winner": details.winner,
        "anchor": _anchor(details.problem),
        "tried": len(tried),
        "found_at": analysis.best_so_far(tried)[-1][0] if tried else 0,
        "raced": len(tried) < len(details.sequence),
        "convergence": Markup(charts.inline_convergence(details)),
        "gap": analysis.gap(details),
        "listed": sorted(enumerate(tried, 1), key=lambda item: -item[1].ratio)[:MOST_TRIALS],
        "importances": analysis.importances(details.trials),
        "grids": grids,
        "top": max(tiles, key=lambda trial: trial.ratio, default=None),
    }


def place_of(value: float, limits: tuple[float, float]) -> float:
    """Percent of the way along a logarithmic axis, at most to its ends."""
    low, high = limits
    return 100 * min(max(math.log(value / low) / math.log(high / low), 0.0), 1.0)


def positions(winner: Winner, limits: tuple[float, float]) -> dict[str, float]:
    """Positions of a speed-up, its interval and the noise around 1, in percent of the axis."""
    noise = max(winner.record.noise, NOISE_FLOOR)
    ends = {
        "tie": 1 / (1 + noise), "tie_end": 1 + noise, "low": winner.low, "high": winner.high,
        "ratio": winner.record.ratio, "unity": 1.0,
    }  # fmt: skip
    return {name: place_of(value, limits) for name, value in ends.items()}


def ticks(limits: tuple[float, float]) -> list[tuple[float, str]]:
    """Places and names of the ticks, 1 first, none closer than its name is wide."""
    from matplotlib.ticker import MaxNLocator

    results: list[tuple[float, str]] = []
    low, high = limits
    found = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    for tick in (1.0, *(tick for tick in found if low <= tick <= high)):
        place = place_of(tick, limits)
        if all(abs(place - other) >= 14 for other, _ in results):
            results.append((place, f"{tick:g}"))
    return results


def _facts(contents: Contents) -> list[tuple[str, str]]:
    device, winners = contents.device, contents.winners
    facts = [("GPU", f"{device.name}, {winners[0].record.fingerprint.sm_count} multiprocessors")]
    if device.peak_tflops:
        sizes = (
            f"{device.peak_tflops:g} TFLOP/s dense bf16", f"{device.bandwidth_gbps / 1000:g} TB/s",
            f"{device.memory_bytes / 1e9:.0f} GB", f"L2 {device.l2_bytes / 2**20:.0f} MiB",
        )  # fmt: skip
        facts.append(("Datasheet", ", ".join(sizes)))
    throttled = Counter(
        reason for w in winners for reason in w.record.telemetry.get("throttle_reasons") or ()
    )
    limits = ", ".join(f"{reason} ({count} records)" for reason, count in throttled.most_common())
    telemetry = {
        "SM clock while measuring": ("sm_clock_mhz", "MHz"), "Board power while measuring": ("power_w", "W"),
        "GPU temperature": ("temperature_c", "\u00b0C"),
    }  # fmt: skip
    for words, (name, unit) in telemetry.items():
        facts.append((words, range_of((w.record.telemetry.get(name) for w in winners), unit)))
    facts += [
        ("Clock limits", limits or "none seen"),
        ("Noise of the interleaves", range_of((100 * w.record.noise for w in winners), "%", 2)),
        ("Source", contents.location),
    ]
    if contents.other_devices:
        facts.append(("Other devices in it", ", ".join(contents.other_devices)))
    return facts


def range_of(values: Iterable[float | None], unit: str, digits: int = 0) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return "unknown"
    low, middle, high = (f"{v:.{digits}f}" for v in (known[0], statistics.median(known), known[-1]))
    return f"{low} {unit}" if low == high else f"{low} \u2013 {middle} \u2013 {high} {unit}"
