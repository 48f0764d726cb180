"""Leaderboards: candidates of one problem, or the best of many problems, as pandas frames with renderers.

Rows are ranked by evidence, and by the ratio to torch.mm within equal evidence (`tunegemm.measure.evidence`).
Each ratio is to the baseline in the same rounds; ratios of different evidence do not compare. The kernel that
is dispatched comes first.
"""

from __future__ import annotations

import functools
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from tunegemm.describe.architectures import PARTS, part_named
from tunegemm.describe.device import Device, Fingerprint, device_from_part
from tunegemm.describe.problem import Problem
from tunegemm.describe.stored import FIELDS, document_of, problem_of
from tunegemm.measure.evidence import Evidence
from tunegemm.measure.statistics import NOISE_FLOOR, tie
from tunegemm.report.text import clean, fitted, markdown, significant
from tunegemm.store.codec import FINGERPRINT_FIELDS
from tunegemm.store.frames import by_evidence, of_records
from tunegemm.store.layers import of_databases
from tunegemm.store.shipped import read_shipped

if TYPE_CHECKING:
    import pandas
    from rich.table import Table

    from tunegemm.store import Database

_NOTHING = "There are no measurements for this device and software."

#: The baseline's name, in tables and as the label of the candidate that calls it.
BASELINE = "torch.mm"

#: The family whose candidates are the vendor's library.
VENDOR_FAMILY = "cublaslt"


#: How to show each column: its heading, and the digits after the point; None for text, -1 for a time, which
#: gets four significant digits.
COLUMNS: Mapping[str, tuple[str, int | None]] = {
    "rank": ("rank", 0),
    "problem": ("problem", None),
    "ratio_to_torch_mm": ("ratio to torch.mm", 3),
    "candidate": ("candidate", None),
    "median_us": ("median us", -1),
    "torch_mm_us": ("torch.mm us", -1),
    "tflops": ("TFLOP/s", 1),
    "percent_of_roofline": ("% of roofline", 1),
    "spread_percent": ("spread %", 1),
    "family": ("family", None),
    "device": ("device", None),
}

#: Columns that a summary may be sorted by, by the words of a command line, and whether the least is first.
SORTS: Mapping[str, tuple[str, bool]] = {
    "problem": ("", True), "ratio": ("ratio_to_torch_mm", False), "time": ("median_us", False),
}  # fmt: skip

#: Columns that a narrow terminal omits, in this order, so that candidates stay readable: the title names the
#: device, the label shows the family, and the other figures follow from those that stay.
_DISPENSABLE = ("family", "spread_percent", "percent_of_roofline", "tflops", "torch_mm_us", "device")

#: Text wider than this may fold at its spaces before a column is left out.
_READABLE = {"candidate": 36, "problem": 16}


@dataclass(frozen=True)
class Leaderboard:
    """Rows, best first, with their title and a note."""

    title: str
    note: str
    """One or two sentences: the source of the times, and the rows left out."""
    frame: pandas.DataFrame = field(compare=False)
    """The rows. Columns of one problem: ``rank``, ``tie`` (closer to the first of its rank than the noise),
    ``problem``, ``ratio_to_torch_mm``, ``candidate`` (its label), ``median_us``, ``torch_mm_us`` (torch's
    time in the same rounds), ``tflops``, ``percent_of_roofline``, ``spread_percent``, ``family``,
    ``device``, ``evidence`` (``screen`` to ``final``; the better comes first), ``chosen`` (whether it is
    dispatched), ``origin`` (source of an import)."""

    @classmethod
    def from_frame(cls, problem: Problem, frame: pandas.DataFrame) -> Leaderboard:
        """Rows of `Database.frame`: for each device the fingerprint measured last, each ranked separately."""
        import pandas

        for name, cell in document_of(problem).items():
            frame = frame[frame[name] == cell]
        groups = _groups(frame)
        boards = [_ranked(group, problem, device) for device, group in groups]
        ranked = pandas.concat(boards or [_ranked(frame, problem, _device_named(""))], ignore_index=True)
        title = f"{problem} on {_names(ranked)}" if groups else str(problem)
        return cls(title, _stored_note(frame, groups), ranked)

    @classmethod
    def summary(cls, frame: pandas.DataFrame) -> Leaderboard:
        """The best candidate of every problem in `Database.frame`. The note has the geometric mean."""
        ordered = by_evidence(_newest(frame), "ratio", first="confirmed")
        return cls.best_of_all(ordered.drop_duplicates(_PLACE, keep="last"))

    @classmethod
    def best_of_all(cls, leaders: pandas.DataFrame) -> Leaderboard:
        """As `summary`, from the rows of `store.queries.latest_records`: one per problem and device."""
        result = leaders.sort_values(_PLACE, kind="stable")
        known = functools.cache(problem_of)
        problems = [known(*fields) for fields in result[_PROBLEM_FIELDS].itertuples(index=False, name=None)]
        flops = [problem.flops for problem in problems]
        devices = {name: _device_named(name) for name in result["device_name"].unique()}
        floors = [
            devices[name].roofline_us(problem) or math.nan
            for problem, name in zip(problems, result["device_name"], strict=True)
        ]
        # If nothing beat torch.mm, it is the best.
        lost = ~result["confirmed"] & (result["ratio"] < 1)
        median_us = result["median_us"].where(~lost, result["baseline_median_us"])
        label = result["label"].where(result["label"] != "", result["family"] + " " + result["candidate"])
        table = result.assign(
            problem=list(map(str, problems)),
            candidate=label.where(~lost, BASELINE),
            median_us=median_us,
            torch_mm_us=result["baseline_median_us"],
            tflops=flops / median_us / 1e6,
            ratio_to_torch_mm=result["ratio"].where(~lost, 1.0),
            percent_of_roofline=[100 * floor for floor in floors] / median_us,
            spread_percent=100 * result["spread"].where(~lost, result["baseline_spread"]),
            family=result["family"].where(~lost, VENDOR_FAMILY),
            device=result["device_name"],
        )[[name for name in COLUMNS if name != "rank"]].reset_index(drop=True)
        title = f"Best per problem on {_names(table)}" if len(table) else "Best per problem"
        return cls(title, _mean_note(table), table)

    def top(self, count: int | None) -> Leaderboard:
        """The first `count` rows per device, and the baseline's row wherever it is; all rows for None."""
        if count is None or self.frame.empty or "rank" not in self.frame:
            return self
        position = self.frame.groupby("device").cumcount()
        kept = (position < count) | (self.frame["candidate"] == BASELINE)
        note = self.note if kept.all() else f"{self.note} Rows not shown: {(~kept).sum()}."
        return replace(self, frame=self.frame[kept].reset_index(drop=True), note=note)

    def table(self, top: int | None = None, *, width: int | None = None) -> Table:
        """For a terminal, with Rich. The row that is dispatched is bold.

        width: of the terminal in characters; columns that do not fit are left out, the least useful first.
        """
        from rich.text import Text

        board = self.top(top)
        shown, rows = board._cells(), board.frame.to_dict("records")
        columns: dict[str, list[str | Text]] = {COLUMNS[name][0]: [*cells] for name, cells in shown.items()}
        ratio, usual = "ratio_to_torch_mm", NOISE_FLOOR
        if ratio in shown:  # beyond the usual noise green for faster, red for slower
            colours = [
                "green" if r[ratio] > 1 + usual else "red" if r[ratio] < 1 - usual else "" for r in rows
            ]
            columns[COLUMNS[ratio][0]] = list(map(Text, shown[ratio], colours))
        words = {COLUMNS[name][0]: _READABLE.get(name, 999) for name in shown if COLUMNS[name][1] is None}
        return fitted(
            board.title, list(columns), list(zip(*columns.values(), strict=True)), words,
            dispensable=[COLUMNS[name][0] for name in _DISPENSABLE], width=width, caption=board.note,
            styles=["bold" if row.get("chosen") else "" for row in rows],
        )  # fmt: skip

    def markdown(self, top: int | None = None) -> str:
        """A table in GitHub's Markdown, under the title and the note."""
        board = self.top(top)
        cells = board._cells()
        lines = [[COLUMNS[name][0] for name in cells]]
        lines.append(["---" if COLUMNS[name][1] is None else "---:" for name in cells])
        lines += [list(map(markdown, row)) for row in zip(*cells.values(), strict=True)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"**{markdown(board.title)}**\n\n{table}\n\n{markdown(board.note)}\n"

    def csv(self, top: int | None = None) -> str:
        """Comma-separated, one header line, plain numbers; the column ``source`` says how the times were
        obtained."""
        frame = self.top(top).frame.assign(source="measured")
        frame = frame.map(lambda value: clean(value) if isinstance(value, str) else value)
        return str(frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))

    def as_dict(self, top: int | None = None) -> dict[str, Any]:
        """Title, source, note and rows, in JSON types only; unknown figures are None."""
        board = self.top(top)
        rows = [
            {name: _plain(value) for name, value in row.items()} for row in board.frame.to_dict("records")
        ]
        return {"title": board.title, "source": "measured", "note": board.note, "rows": rows}

    def plain(self, top: int | None = None) -> str:
        """The table for a file: without colours, and wide enough for every column."""
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=240).print(self.table(top, width=240))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"

    def _cells(self) -> dict[str, list[str]]:
        """The columns in readable form, without empty ones and those that the title covers."""
        hidden = {"problem"} if "rank" in self.frame else set()
        hidden |= {"device"} if self.frame["device"].nunique() == 1 else set()
        rows = self.frame.to_dict("records")
        names = [name for name in COLUMNS if name in self.frame.columns and name not in hidden]
        result = {name: [_cell(name, row) for row in rows] for name in names}
        return {name: cells for name, cells in result.items() if any(cells) or not rows}

    def sorted_by(self, key: str) -> Leaderboard:
        """The rows in another order of `SORTS`."""
        column, ascending = SORTS[key]
        frame = self.frame.sort_values(column, ascending=ascending, kind="stable") if column else self.frame
        return replace(self, frame=frame.reset_index(drop=True))

    def limited(self, count: int | None) -> Leaderboard:
        """No more than the first `count` rows; all for None."""
        if count is None or len(self.frame) <= count:
            return self
        note = f"{self.note} The first {count} of {len(self.frame):,} rows."
        return replace(self, frame=self.frame.head(count), note=note)


def of_all_layers(read: Callable[[Database], pandas.DataFrame]) -> tuple[pandas.DataFrame, list[str]]:
    """The result of `read` for each layer's database, with the shipped records; and one line for each layer
    that cannot be read.

    For each problem and device only the narrowest layer that has it counts, with all its rows. Otherwise the
    fingerprints of several layers would compete by date. read: `Database.frame` or
    `store.queries.latest_records`; shipped records fill the columns that are known for them.
    """
    import pandas

    records, warnings = read_shipped()
    shipped = of_records(sorted(records, key=lambda record: record.measured_at))
    # Of each problem and device, those of the toolchain that was measured last.
    shipped = shipped.assign(origin="", spread=math.nan, baseline_spread=math.nan)
    shipped = shipped.drop_duplicates(_PLACE, keep="last")
    frames = [shipped, *of_databases(read, warnings)]
    numbered = [frame.assign(_layer=number) for number, frame in enumerate(frames) if len(frame)]
    if not numbered:
        return shipped, warnings
    together = pandas.concat(numbered, ignore_index=True)
    narrowest = together.groupby(_PLACE)["_layer"].transform("max")
    return together[together["_layer"] == narrowest].drop(columns="_layer"), warnings


_PROBLEM_FIELDS = list(FIELDS)
_PLACE = [*_PROBLEM_FIELDS, "device_name"]


def _ranked(frame: pandas.DataFrame, problem: Problem, device: Device) -> pandas.DataFrame:
    """The board of one problem on one device, from rows of `Database.frame`."""
    import pandas

    unnamed = frame["family"] + " " + frame["candidate"]
    label = frame["label"].where(frame["label"] != "", unnamed)
    chosen = frame["confirmed"].astype(bool)
    # torch.mm as a candidate beside itself differs from 1 by the noise.
    ratio = frame["ratio"].where(label != BASELINE, 1.0)
    torch_us = frame["baseline_median_us"].where(label != BASELINE, frame["median_us"])
    rows = _placed(frame.assign(label=label, chosen=chosen, ratio=ratio, baseline_median_us=torch_us))
    if len(rows) and not rows["label"].eq(BASELINE).any():
        # Take the interleave of the leader, whose baseline belongs to the leader's time.
        baseline = rows.iloc[[0]].assign(label=BASELINE, family=VENDOR_FAMILY, ratio=1.0, chosen=False)
        baseline = baseline.assign(median_us=rows["baseline_median_us"], spread=rows["baseline_spread"])
        rows = _placed(pandas.concat([rows, baseline], ignore_index=True))
    ranks: list[int] = []
    ordered = list(rows.itertuples())
    for position, row in enumerate(ordered):
        first = ordered[ranks[-1] - 1] if ranks else row
        alike = (row.own, row.level) == (first.own, first.level)
        ranks.append(ranks[-1] if ranks and alike and tie(row, first) else position + 1)
    if len(rows):
        # Races run at other clocks: the leader keeps its own time, and the others' times follow from their
        # ratios.
        torch_us = rows["baseline_median_us"].iloc[0]
        rows = rows.assign(
            median_us=(torch_us / rows["ratio"]).where(rows.index > 0, rows["median_us"]),
            baseline_median_us=torch_us,
        )
    return pandas.DataFrame(
        {
            "rank": ranks,
            "tie": [ranks.count(rank) > 1 for rank in ranks],
            "problem": str(problem),
            "ratio_to_torch_mm": rows["ratio"],
            "candidate": rows["label"],
            "median_us": rows["median_us"],
            "torch_mm_us": rows["baseline_median_us"],
            "tflops": problem.flops / rows["median_us"] / 1e6,
            "percent_of_roofline": 100 * (device.roofline_us(problem) or math.nan) / rows["median_us"],
            "spread_percent": 100 * rows["spread"],
            "family": rows["family"],
            "device": device.name,
            "evidence": [Evidence(level).name.lower() for level in rows["level"]],
            "chosen": rows["chosen"],
            "origin": rows["origin"],
        }
    )


def _placed(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Sorted by dispatch, then evidence, then ratio."""
    ordered = by_evidence(rows.sort_values("label", ascending=False), "ratio", first="chosen")
    return ordered[::-1].reset_index(drop=True)


def problems_of(frame: pandas.DataFrame) -> list[Problem]:
    """The problems of the rows, smallest first."""
    rows = frame[_PROBLEM_FIELDS].drop_duplicates().itertuples(index=False)
    return sorted(problem_of(*row) for row in rows)


def _newest(frame: pandas.DataFrame) -> pandas.DataFrame:
    """For each problem and device the rows of the fingerprint that was measured last."""
    latest = frame.groupby(_PLACE)["measured_at"].transform("max")
    newest = frame[frame["measured_at"] == latest][[*_PLACE, "fingerprint"]].drop_duplicates(_PLACE)
    return frame.merge(newest, on=[*_PLACE, "fingerprint"])


def _groups(frame: pandas.DataFrame) -> list[tuple[Device, pandas.DataFrame]]:
    """The rows of one problem to show, by device."""
    groups = [group for _, group in _newest(frame).groupby("device_name")]
    first = [group[list(FINGERPRINT_FIELDS)].head(1).to_dict("records")[0] for group in groups]
    return [(known_device(Fingerprint(**facts)), group) for facts, group in zip(first, groups, strict=True)]


def known_device(fingerprint: Fingerprint) -> Device:
    """A device by its stored name, for the roofline; its peaks are 0, unknown, if no part has the name."""
    name = fingerprint.device_name
    unknown = replace(next(iter(PARTS.values())), device_name=name, peak_tflops=0.0, bandwidth_gbps=0.0)
    return device_from_part("stored", part_named(name) or unknown, fingerprint)


def _device_named(name: str) -> Device:
    """As `known_device`; a device's software has no part in its roofline."""
    return known_device(Fingerprint(name, 0, "", "", 0, "", "", "", "", ""))


def _names(frame: pandas.DataFrame) -> str:
    return ", ".join(dict.fromkeys(frame["device"]))


def _how_to_read(rows: pandas.DataFrame) -> str:
    """The meaning of ties, and of rows whose ratios do not compare with those before them."""
    if rows.empty:
        return ""
    noise = max(NOISE_FLOOR, rows["noise"].max())
    note = (
        "Each ratio is to torch.mm in the same rounds; times are at the clock of the first row's race. "
        f"= marks ties: closer than the noise, here up to {100 * noise:.1f} %."
    )
    result = Counter(map(Evidence, by_evidence(rows)["level"]))
    if len(result) < 2:
        return note
    counts = ", ".join(
        f"{count} {level.name.lower()}" for level, count in sorted(result.items(), reverse=True)
    )
    return f"{note} Ordered by evidence ({counts}): compare ratios only within one kind."


def _stored_note(rows: pandas.DataFrame, groups: list[tuple[Device, pandas.DataFrame]]) -> str:
    import pandas

    if not groups:
        return _NOTHING
    parts = [
        f"Measured on {shown.name}, driver {shown.fingerprint.driver}, torch {shown.fingerprint.torch}."
        if not group["origin"].astype(bool).all()
        else f"Imported from {', '.join(sorted(set(group['origin'])))}; measured on another {shown.name}."
        for shown, group in groups
    ]
    shown_rows = pandas.concat([group for _, group in groups])
    imported = int(shown_rows["origin"].astype(bool).sum())
    if 0 < imported < len(shown_rows):
        parts.append(f"Imported: {imported} of the rows.")
    parts.append(_how_to_read(shown_rows))
    if left_out := len(rows) - len(shown_rows):
        parts.append(f"Rows of other devices or software versions, not shown: {left_out}.")
    return " ".join(parts)


def _mean_note(table: pandas.DataFrame) -> str:
    if table.empty:
        return _NOTHING
    mean = geometric_mean(table["ratio_to_torch_mm"])
    return f"Geometric mean over {len(table):,} rows, to torch.mm: {mean:.3f}."


def _cell(name: str, row: Mapping[Any, Any]) -> str:
    value, decimals = row[name], COLUMNS[name][1]
    if decimals is None:
        return clean(value) if isinstance(value, str) else ""
    if math.isnan(value):
        return ""
    if name == "rank":
        return f"{value}=" if row.get("tie") else str(value)
    return significant(value) if decimals < 0 else f"{value:.{decimals}f}"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
