"""`tunegemm history` and `tunegemm regress`: what was the record when, and what a new toolchain changed."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from tunegemm.cli import arguments, options, printing
from tunegemm.cli.arguments import UsageError
from tunegemm.describe.command import tune_command
from tunegemm.report.text import to_json

if TYPE_CHECKING:
    from tunegemm.store.history import Comparison

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def history(
    problems: options.Problems,
    as_json: AsJson = False,
    db: options.DatabaseLocation = None,
) -> None:
    """Print every record that a shape ever had, oldest first."""
    from tunegemm.store import Database

    with Database.open(db, read_only=True) as database:
        found = {problem: database.history(problem) for problem in problems}
        location = database.name
    missing = [problem for problem, choices in found.items() if not choices]
    if missing:
        raise UsageError(
            f"{location}: no record of {missing[0]}; run `{tune_command(missing[0])}` on a GPU first"
        )
    if as_json:
        names = ("label", "median_us", "ratio", "confirmed", "kernel_source")
        documents = [
            {
                "problem": str(problem),
                "chosen_at": choice.chosen_at.isoformat(),
                "candidate": choice.candidate.digest,
                "fingerprint": choice.fingerprint.digest,
                **{name: getattr(choice, name) for name in names},
            }
            for problem, choices in found.items()
            for choice in choices
        ]
        typer.echo(to_json(documents))
        return
    for problem, choices in found.items():
        printing.say(problem)
        for record in choices:
            printing.say(
                f"  {record.chosen_at:%Y-%m-%d %H:%M}  {record.median_us:9.2f} us"
                f"  {record.ratio:6.3f} of torch.mm  {'final race' if record.confirmed else 'search':10}"
                f"  {record.label}  [{record.fingerprint.device_name}, {record.fingerprint.digest}]"
            )


def regress(
    since: Annotated[
        str,
        typer.Option(
            "--since", metavar="DATE|FINGERPRINT", help="ISO 8601, or the start of a fingerprint's digest."
        ),
    ],
    shape: options.SomeShapes = None,
    as_json: AsJson = False,
    db: options.DatabaseLocation = None,
) -> None:
    """Compare each shape's record with the one before. Exit code 1 when one is slower, beyond the noise."""
    moment = parse_since(since)
    shapes = arguments.parse_shapes(shape)
    from tunegemm.store import Database
    from tunegemm.store.history import regressions

    with Database.open(db, read_only=True) as database:
        problems = [p for p in database.problems() if not shapes or p.shape in shapes]
        if unknown := [shape for shape in shapes if shape not in {p.shape for p in problems}]:
            raise UsageError(f"{database.name}: nothing measured of {unknown[0]}; see `tunegemm leaderboard`")
        arguments.require_fingerprint(database, moment if isinstance(moment, str) else None, "--since")
        found = [one for problem in problems for one in regressions(database, problem, moment)]
    if not found:
        raise UsageError(
            f"--since {since}: no shape has a final race both before and since; "
            "run `tunegemm verify --all` under the new software first"
        )
    if as_json:
        typer.echo(to_json([_document(one) for one in found]))
    else:
        for one in found:
            printing.say(_line(one))
    if any(one.verdict == "slower" for one in found):
        raise typer.Exit(1)


def parse_since(text: str) -> datetime | str:
    """A date or time (UTC unless it says otherwise), or the start of a digest. Raises UsageError."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        if re.fullmatch(r"[0-9a-f]{4,16}", text):
            return text
        raise UsageError(
            f"--since {text!r}: neither a date such as 2026-11-20 nor a fingerprint's digest"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _line(one: Comparison) -> str:
    before, after = one.before, one.after
    return (
        f"{one.verdict:6}  {one.problem}  {before.median_us:.2f} to {after.median_us:.2f} us, "
        f"{before.ratio:.3f} to {after.ratio:.3f} of torch.mm ({100 * one.change:+.1f} % by {one.by})  "
        f"{before.label} to {after.label}  [{one.changed}]"
    )


def _document(one: Comparison) -> dict[str, object]:
    names = ("label", "median_us", "baseline_median_us", "ratio", "noise")
    both = {"before": one.before, "after": one.after}
    facts = {name: getattr(one, name) for name in ("verdict", "change", "by", "changed")}
    return {"problem": str(one.problem), **facts} | {
        which: {name: getattr(record, name) for name in names}
        | {
            "candidate": record.candidate.digest,
            "fingerprint": record.fingerprint.digest,
            "measured_at": record.measured_at.isoformat(),
        }
        for which, record in both.items()
    }
