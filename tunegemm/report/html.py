"""`tunegemm report`: the evidence for one device as a page to read, sort, filter and print."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from html import escape

import tunegemm
from tunegemm.device import Fingerprint
from tunegemm.report import analysis, figures
from tunegemm.report.evidence import Details, Evidence, Winner
from tunegemm.report.page import page, select

#: Rows of the table; what is more is counted under it, and in the roofline and the figures above all the same.
MOST_ROWS = 2_000


def report(evidence: Evidence, *, command: str = "tunegemm report") -> str:
    """The whole page. command: how it was made, for the footer."""
    sections = [
        ("speed", "Speed", _speed(evidence)),
        ("roofline", "Roofline", _roofline(evidence)),
        ("shapes", "Search by shape", _shapes(evidence)),
        ("failures", "Failures", _failures(evidence)),
        ("environment", "Environment", _environment(evidence)),
    ]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title">{text}</section>' for name, _, text in sections
    )
    return page(
        f"tunegemm: {evidence.device.name}",
        f'{_header(evidence)}<main><nav aria-label="Sections">{links}</nav>{body}</main>{_footer(evidence, command)}',
    )


def _header(evidence: Evidence) -> str:
    count, mean = len(evidence.winners), evidence.mean_ratio
    shapes = f"{count:,} tuned product{'s' * (count != 1)}"
    verb = "runs" if count == 1 else "run"
    if 0.995 < mean < 1.005:
        headline = f"{shapes} {verb} as fast as torch.mm on {evidence.device.name}"
    else:
        headline = f"{shapes} {verb} at {mean:.3f} \u00d7 the speed of torch.mm on {evidence.device.name}"
    dates = sorted(winner.measured_at.date().isoformat() for winner in evidence.winners)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    if evidence.source == "recorded":
        notice = (
            f'<p class="notice"><strong>Recorded {escape(evidence.device.name)}.</strong> Every time on this page '
            f"was recorded on that GPU, {when}; nothing was measured on the machine that wrote the page. What "
            "is shown as a record is what would win by tunegemm's rule; no final race was run.</p>"
        )
    else:
        notice = ""
    return (
        f'<header><p class="eyebrow">tunegemm report</p><h1>{escape(headline)}</h1>'
        f'<p class="lead">{escape(evidence.origin)} {when}. Geometric mean over the shapes, each against torch.mm '
        f"in the same interleave.</p>{notice}{_keys(evidence)}</header>"
    )


def _keys(evidence: Evidence) -> str:
    verdicts = evidence.verdicts()
    shares = " ".join(
        f'<span class="{verdict}" title="{figures.WORDS[verdict]}">{symbol}&nbsp;{verdicts[verdict]}'
        f'<span class="hidden"> {figures.WORDS[verdict]}</span></span>'
        for verdict, symbol in figures.SYMBOLS.items()
    )
    best = evidence.winners[0]
    failed = sum(group.count for group in evidence.failures)
    roofs = [w.percent_of_roofline for w in evidence.winners if w.percent_of_roofline is not None]
    cells = [
        ("faster, equal, slower than torch.mm", shares),
        ("largest speed-up", f"{best.ratio:.2f}\u00d7 <small>{escape(best.problem.shape)}</small>"),
        ("measurements", f"{evidence.measurements:,} <small>{failed:,} failures</small>"),
    ]
    if roofs:
        middle = statistics.median(roofs)
        cells.append(("median share of the roofline", f"{middle:.0f} % <small>best {max(roofs):.0f} %</small>"))
    return f'<dl class="keys">{"".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in cells)}</dl>'


def _speed(evidence: Evidence) -> str:
    winners = evidence.winners[:MOST_ROWS]
    scale = figures.forest_scale(winners)
    families = sorted({winner.candidate.family for winner in winners})
    dtypes = sorted({_dtypes(winner) for winner in winners})
    layouts = sorted({winner.problem.layout for winner in winners})
    verdicts = [(verdict, f"{symbol} {figures.WORDS[verdict]}") for verdict, symbol in figures.SYMBOLS.items()]
    controls = (
        '<form class="controls" data-filters="records" hidden><label>Shape or kernel'
        '<input type="search" name="words" placeholder="4096 pp128" autocomplete="off"></label>'
        + select("verdict", "Against torch.mm", verdicts)
        + select("family", "Family", [(name, name) for name in families])
        + select("dtype", "Types", [(name, name) for name in dtypes])
        + select("layout", "Layout", [(name, name) for name in layouts])
        + '<button type="reset">Clear</button><output aria-live="polite"></output></form>'
    )
    detailed = {details.problem: _anchor(details) for details in evidence.details}
    rows = "".join(
        _speed_row(row, winner, figures.forest(winner, scale), detailed.get(winner.problem, ""))
        for row, winner in enumerate(winners)
    )
    roof = '<th scope="col" class="n wide" data-sort="number">% of roofline</th>'
    head = (
        '<th scope="col" data-sort="text">M \u00d7 N \u00d7 K</th>'
        '<th scope="col" class="n" data-sort="number" aria-sort="descending">Speed <small>\u00d7 torch.mm</small></th>'
        f'<th scope="col" class="forest">{figures.forest_axis(scale)}'
        '<span class="hidden">Interval, drawn</span></th>'
        '<th scope="col" class="n" data-sort="number">Time <small>\u00b5s</small></th>'
        '<th scope="col" class="n wide" data-sort="number">torch.mm <small>\u00b5s</small></th>'
        '<th scope="col" class="n" data-sort="number">TFLOP/s</th>'
        f'{roof}<th scope="col" class="wide" data-sort="text">Fastest kernel</th>'
    )
    hidden = len(evidence.winners) - len(winners)
    more = f"<p class=note>{hidden:,} further records are not listed; `tunegemm leaderboard` has them.</p>" if hidden else ""
    marks = "".join(
        f'<li><span class="{verdict}">{symbol}</span> {figures.WORDS[verdict]}</li>'
        for verdict, symbol in figures.SYMBOLS.items()
    )
    return (
        '<h2 id="speed-title">How much faster than torch.mm?</h2>'
        f'<ul class="legend">{marks}<li><span class="swatch" style="background:var(--grid)"></span> noise of the '
        f"interleave</li></ul>{controls}"
        '<div class="scroll" tabindex="0" role="region" aria-label="Records">'
        f'<table id="records" data-sortable><caption class="hidden">The record of every shape</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{more}"
        '<p class="note">Marks are medians of the ratios within each round, whiskers their 95 % intervals by order '
        "statistics (under six rounds: the whole range). Equal: closer than the noise that two captures of one "
        "kernel show, or an interval across 1. Times are medians of device time per product.</p>"
    )


def _speed_row(row: int, winner: Winner, cell: str, anchor: str) -> str:
    problem = winner.problem
    shape = problem.shape.replace("x", " \u00d7 ")
    named = f'<a href="#{anchor}">{shape}</a>' if anchor else shape
    share = "" if winner.percent_of_roofline is None else f"{winner.percent_of_roofline:.1f}"
    unsettled = "" if winner.settled else " \u00b7 no final race"
    words = f"{problem} {winner.label} {winner.candidate.family}".lower()
    symbol = f'<span class="{winner.verdict}" aria-hidden="true">{figures.SYMBOLS[winner.verdict]}</span>'
    size = problem.m * 10**12 + problem.n * 10**6 + problem.k
    return (
        f'<tr data-row="{row}" data-verdict="{winner.verdict}" data-family="{escape(winner.candidate.family)}" '
        f'data-dtype="{escape(_dtypes(winner))}" data-layout="{problem.layout}" data-text="{escape(words)}">'
        f'<th scope="row" data-v="{size}">{named}<small>{escape(_dtypes(winner))} {problem.layout}</small></th>'
        f'<td class="n" data-v="{winner.ratio:.6g}">{symbol} {winner.ratio:.3f}'
        f'<span class="hidden"> {figures.WORDS[winner.verdict]}</span>'
        f"<small>{winner.low:.3f} to {winner.high:.3f}</small></td>"
        f'<td class="forest">{cell}</td>'
        f'<td class="n" data-v="{winner.median_us:.6g}">{figures.significant(winner.median_us)}</td>'
        f'<td class="n wide" data-v="{winner.baseline_median_us:.6g}">'
        f"{figures.significant(winner.baseline_median_us)}</td>"
        f'<td class="n" data-v="{winner.tflops:.6g}">{figures.significant(winner.tflops, 3)}</td>'
        f'<td class="n wide" data-v="{winner.percent_of_roofline or 0:.4g}">{share}</td>'
        f'<td class="wide"><span class="mono">{escape(winner.label)}</span>'
        f"<small>{escape(winner.candidate.family)} \u00b7 {winner.rounds} rounds{unsettled}</small></td></tr>"
    )


def _dtypes(winner: Winner) -> str:
    problem = winner.problem
    return problem.in_dtype + ("" if problem.in_dtype == problem.out_dtype else f">{problem.out_dtype}")


def _roofline(evidence: Evidence) -> str:
    marks = ", ".join(f"{symbol} {figures.WORDS[verdict]}" for verdict, symbol in figures.SYMBOLS.items())
    names = "" if len(evidence.winners) > figures.NAMED_MARKS else " The dash is torch.mm on the same shape."
    return (
        '<h2 id="roofline-title">How much of the GPU is used?</h2>'
        "<p>A product can be no faster than its arithmetic at the tensor cores' peak, or than one pass of its "
        "operands through device memory. The distance to the line is what is left.</p>"
        f'<figure><div class="scroll">{figures.roofline(evidence.device, evidence.winners)}</div>'
        f"<figcaption>Every record of {escape(evidence.device.name)}: throughput over arithmetic intensity, both "
        f"axes logarithmic. {marks}.{names} Peaks are the datasheet's; under load the clock, and with it the "
        "reachable peak, is lower.</figcaption></figure>"
    )


def _shapes(evidence: Evidence) -> str:
    left_out = len(evidence.winners) - len(evidence.details)
    options = "".join(
        f'<option value="{_anchor(details)}">{escape(str(details.problem))}</option>' for details in evidence.details
    )
    more = f" {left_out:,} further shapes have theirs with <code>--shape</code>." if left_out else ""
    chooser = (
        '<form class="controls" hidden><label>Shape<select id="choose-shape">'
        f'{options}<option value="">all, one below the other</option></select></label></form>'
    )
    how = (
        "The order is that of a search replayed on the recording, with the default effort; heat map and "
        "importance are over everything that was recorded."
        if evidence.source == "recorded"
        else "Trials are in the order in which they were measured."
    )
    return (
        '<h2 id="shapes-title">What did the search find, and what decided?</h2>'
        f"<p>{how}{more}</p>{chooser}" + "".join(_shape(details) for details in evidence.details)
    )


def _anchor(details: Details) -> str:
    return "shape-" + "".join(c if c.isalnum() else "-" for c in str(details.problem))


def _shape(details: Details) -> str:
    winner = details.winner
    title = f"<h3>{escape(str(details.problem))}</h3>"
    lead = (
        f'<p class="lead"><span class="mono">{escape(winner.label)}</span>, {winner.ratio:.3f} \u00d7 torch.mm '
        f"({winner.low:.3f} to {winner.high:.3f}), {figures.significant(winner.median_us)} \u00b5s.</p>"
    )
    parts = []
    tried = [trial for trial in details.sequence if trial.stage != "race"]
    if tried:
        at = analysis.best_so_far(tried)[-1][0]
        raced = " Diamonds: the final race." if len(tried) < len(details.sequence) else ""
        parts.append(
            f"<figure><h3>How soon was it found?</h3>{figures.convergence(details)}<figcaption>Dots: trials of the "
            f"search; squares: the vendor's algorithms; line: the best so far, last improved at trial {at} of "
            f"{len(tried)}.{raced}</figcaption></figure>"
        )
    bars = "".join(
        (f"<p class=note>{escape(family)}</p>" if number else "") + figures.importance_bars(found)
        for number, (family, found) in enumerate(analysis.importances(details.trials).items())
    )
    bars = bars or '<p class="note">Too few candidates were tried to tell.</p>'
    parts.append(
        f"<figure><h3>Which parameters decide?</h3>{bars}<figcaption>PED-ANOVA (Optuna): how the fastest tenth "
        "differs from all that were tried. Solid: compile-time parameters, each kernel at its best launch. "
        "Hatched: launch parameters, relative to the best launch of the same kernel. Shares of each group.</figcaption></figure>"
    )
    maps = ""
    grids = analysis.tile_grids(details.trials)
    if grids:
        top = max((trial for grid in grids for trial in grid.best.values()), key=lambda trial: trial.ratio)
        maps = "<h3>Which tiles are fast?</h3>" + "".join(
            f"<figure><p class=note>{escape(grid.title)}</p>{figures.heat_map(grid, top)}</figure>" for grid in grids
        )
        maps += (
            '<p class="note">In each cell the best speed relative to torch.mm over stages, clusters and launches; '
            "rows tile_m, columns tile_n; framed: the best of all; a dot: not tried. Blue above 1, orange below, "
            "deeper is further.</p>"
        )
    return f'<div class="shape" id="{_anchor(details)}">{title}{lead}<div class="pair">{"".join(parts)}</div>{maps}</div>'


def _failures(evidence: Evidence) -> str:
    title = '<h2 id="failures-title">What failed, and why?</h2>'
    if not evidence.failures:
        return f"{title}<p>No candidate failed: every kernel that feasibility let through compiled and ran correctly.</p>"
    total = sum(group.count for group in evidence.failures)
    stages = Counter[str]()
    for group in evidence.failures:
        stages[group.stage] += group.count
    most = max(stages.values())
    bars = "".join(
        figures.bar_row(stage, count / most, f"{count:,}") for stage, count in stages.most_common()
    )
    rows = "".join(
        f'<tr><th scope="row">{escape(group.stage)}</th><td>{escape(group.reason)}</td>'
        f'<td>{escape(", ".join(group.families))}</td><td class="n" data-v="{group.count}">{group.count:,}</td></tr>'
        for group in evidence.failures[:100]
    )
    more = f'<p class="note">{len(evidence.failures) - 100} rarer reasons are not listed.</p>' if len(evidence.failures) > 100 else ""
    return (
        f"{title}<p>{total:,} candidates, on all shapes of this device. Reasons that differ in numbers only are one row, "
        f'with an example.</p><figure><table class="bars"><tbody>{bars}</tbody></table></figure>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Failures by reason"><table data-sortable><thead><tr>'
        '<th scope="col" data-sort="text">Stage</th><th scope="col" data-sort="text">Reason</th>'
        '<th scope="col" data-sort="text">Family</th><th scope="col" class="n" data-sort="number">Candidates</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>{more}"
    )


#: The fields of a fingerprint that are not the device itself.
_SOFTWARE = [field.name for field in fields(Fingerprint) if field.name not in ("device_name", "sm_count")]


def _environment(evidence: Evidence) -> str:
    device, found = evidence.device, evidence.fingerprints()
    rows = [("GPU", f"{device.name}, {next(iter(found)).sm_count} multiprocessors")]
    if device.peak_tflops:
        rows.append(
            ("Datasheet", f"{device.peak_tflops:g} TFLOP/s dense bf16, {device.bandwidth_gbps / 1000:g} TB/s, "
             f"{device.memory_bytes / 1e9:.0f} GB, L2 {device.l2_bytes / 2**20:.0f} MiB")
        )  # fmt: skip
    winners = evidence.winners
    rows += [
        ("SM clock while measuring", _range((w.sm_clock_mhz for w in winners), "MHz")),
        ("Board power while measuring", _range((w.power_w for w in winners), "W")),
        ("GPU temperature", _range((w.temperature_c for w in winners), "\u00b0C")),
        ("Clock limits", _throttling(winners)),
        ("Noise of the interleaves", _range((100 * w.noise for w in winners), "%", 2)),
        ("Database", evidence.location),
    ]
    if evidence.other_devices:
        rows.append(("Other devices in it", ", ".join(evidence.other_devices)))
    facts = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
    return (
        '<h2 id="environment-title">Under which conditions?</h2>'
        f'<table class="facts"><tbody>{facts}</tbody></table><h3>Software</h3>{_software(found)}'
        '<p class="note">Clocks, power and temperature are of the measurement behind each record: lowest, median and '
        "highest over the shapes.</p>"
    )


def _software(found: dict[Fingerprint, int]) -> str:
    head = "".join(f'<th scope="col">{name.replace("_", " ")}</th>' for name in _SOFTWARE)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(str(getattr(one, name)) or '\u2013')}</td>" for name in _SOFTWARE)
        + f'<td class="n">{count}</td></tr>'
        for one, count in found.items()
    )  # fmt: skip
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Software"><table><thead><tr>'
        f'{head}<th scope="col" class="n">Records</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _range(values: Iterable[float | None], unit: str, digits: int = 0) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return "unknown"
    low, middle, high = (f"{v:.{digits}f}" for v in (known[0], statistics.median(known), known[-1]))
    return f"{low} {unit}" if low == high else f"{low} \u2013 {middle} \u2013 {high} {unit}"


def _throttling(winners: Iterable[Winner]) -> str:
    counted = Counter(reason for winner in winners for reason in winner.throttle_reasons)
    return ", ".join(f"{reason} ({count} records)" for reason, count in counted.most_common()) or "none seen"


def _footer(evidence: Evidence, command: str) -> str:
    return (
        f"<footer><p>{escape(evidence.origin)} Written by tunegemm {escape(tunegemm.__version__)}: "
        f"<code>{escape(command)}</code>. This page is one file and loads nothing.</p></footer>"
    )
