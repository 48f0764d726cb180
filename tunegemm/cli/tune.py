"""`tunegemm tune`: find and store the fastest kernel for one or more shapes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunegemm.cli import arguments, help, options, printing
from tunegemm.cli.session import Session, open_session
from tunegemm.cli.tune_options import Output, Place, Search
from tunegemm.describe.command import command_line
from tunegemm.describe.problem import Problem
from tunegemm.describe.stored import document_of
from tunegemm.describe.workload import read
from tunegemm.report.text import clean, to_json

if TYPE_CHECKING:
    from tunegemm.describe.device import Device
    from tunegemm.describe.space import Candidate
    from tunegemm.describe.workload import Demand
    from tunegemm.tuning.program import TunedDemand
    from tunegemm.tuning.progress import Progress, TuneResult
    from tunegemm.tuning.tuner import Tuner

#: Exit codes.
DONE, NOTHING_FOUND, INTERRUPTED = 0, 1, 130


class Command(help.Command):
    """Allows `--ray` without an address; a Typer option takes a value either always or never."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = []
        for word, following in zip(args, [*args[1:], "-"], strict=False):
            words += [word, "auto"] if word == "--ray" and following.startswith("-") else [word]
        return super().parse_args(ctx, words)


def command(
    context: typer.Context,
    *,
    asked_for: options.SomeProblems,
    from_files: Annotated[
        list[Path] | None,
        options.option(
            "FILE",
            "Tune a program's products: JSON of `tunegemm record`, TunableOp's CSV or CUTLASS's JSON. May be "
            "repeated, for example with one file per rank; calls of the same product add up.",
            "--from",
        ),
    ] = None,
    with_backward: Annotated[
        bool,
        typer.Option("--with-backward", help="Also tune the two products of each shape's backward pass."),
    ] = False,
    search: Annotated[Search, options.Group(Search)],
    place: Annotated[Place, options.Group(Place)],
    output: Annotated[Output, options.Group(Output)],
) -> None:
    """Find and store the fastest kernel for each shape, or for the products of a program."""
    refuse_contradictions(context, asked_for, from_files, search, output)
    demands, refused = read(*from_files) if from_files else ([], [])
    problems: dict[Problem, Problem] = {}  # each with the shape that asks for it
    for forward in asked_for:
        for problem in (forward, *(forward.backward() if with_backward else ())):
            problems.setdefault(problem, forward)
    with ExitStack() as stack:
        session = open_session(stack, context, list(problems), bool(demands), search, place, output)
        ended = tune_program(session, demands, refused) if demands else tune_shapes(session, problems)
    raise typer.Exit(ended)


def refuse_contradictions(
    context: typer.Context,
    asked_for: Sequence[Problem],
    from_files: Sequence[Path] | None,
    search: Search,
    output: Output,
) -> None:
    """Raises UsageError for options that exclude each other."""
    if bool(asked_for) == bool(from_files):
        raise arguments.UsageError(
            "give either --shape or --from: --shape 4096x4096x4096, or --from shapes.json"
        )
    if output.quiet and (output.verbose or output.as_json):
        other = "--verbose" if output.verbose else "--json"
        raise arguments.UsageError(f"--quiet and {other}: give one of them")
    value = given_options(context)
    of_searches = [flag for name, flag in value.items() if name in ("from_files", *Search.OF_SEARCHES)]
    if search.candidate and of_searches:
        raise arguments.UsageError(
            f"{', '.join(of_searches)} with --candidate, which does not search; leave it out"
        )
    if search.skews is not None and not (from_files or any(problem.groups for problem in asked_for)):
        raise arguments.UsageError("--skews is for rows in groups; add --groups")
    if from_files:
        names = {*options.Group(options.parse_problems).parameters(), "with_backward"} - {"shape"}
        if of_shapes := ", ".join(flag for name, flag in value.items() if name in names):
            raise arguments.UsageError(
                f"{of_shapes} with --from: the file defines it for each product; leave it out"
            )


def tune_shapes(session: Session, problems: Mapping[Problem, Problem]) -> int:
    """Tunes each problem by itself and prints its result. Returns the exit code.

    problems: each with the command line's shape that requests it.
    """
    from tunegemm.cli import results
    from tunegemm.cli.progress import ProgressView

    output, answer = session.output, []
    budget_s = session.search.budget_s
    with ProgressView(printing.stderr_console(), total=len(problems), budget_s=budget_s) as view:
        for result in tuned(session, list(problems), None if output.is_bare else view.update):
            answer.append(result)
            with view.ended(result.problem):
                show(session, result)
    if cut := [result for result in answer if result.interrupted]:
        done = {result.problem for result in answer if not result.interrupted}
        left = dict.fromkeys(shape for problem, shape in problems.items() if problem not in done)
        command = again(session.context, list(left))
        printing.say_command(f"{results.interruption(cut)} Go on with:", command, err=True)
        return INTERRUPTED
    useful = sum(result.best is not None or bool(result.predictions) for result in answer)
    if useful and not (session.is_real or output.is_bare):
        say_gpu_command(session.context, list(dict.fromkeys(problems.values())))
    return DONE if useful == len(problems) else NOTHING_FOUND


def tuned(
    session: Session, problems: Sequence[Problem], update: Callable[[Progress], None] | None
) -> Iterator[TuneResult]:
    """The results one by one: of searches, or of races among the named candidates."""
    from tunegemm.tuning.progress import Request
    from tunegemm.tuning.tuner import Tuner

    search, tuning = session.search, session.tuning
    if search.kernels is not None and isinstance(tuning, Tuner):
        require_kernels(tuning, problems)
    if not search.candidate:
        requests = [
            Request(item, search.effort or "quick", search.trials, search.budget_s, following)
            for item, following in itertools.zip_longest(problems, problems[1:])
        ]
        return tuning.tune_all(requests, update)
    if not isinstance(tuning, Tuner):
        raise arguments.UsageError("--candidate needs one GPU; give --device cuda:N")
    return race_named(tuning, problems, search.candidate)


def require_kernels(tuner: Tuner, problems: Sequence[Problem]) -> None:
    """Raises UsageError for a problem without a feasible kernel that matches --kernels."""
    kernels = tuner.kernels
    for problem in problems:
        if not any(kernels.ranked(problem, family).predictions for family in kernels.generators):
            raise arguments.UsageError(
                f"--kernels {kernels.matching!r}: no feasible kernel for {problem} has a matching label; "
                f"{command_line('explain', {'shape': problem.shape})} shows one"
            )


def show(session: Session, result: TuneResult) -> None:
    """Prints one shape's result in the requested format."""
    from tunegemm.cli import results

    output = session.output
    if output.as_json:
        typer.echo(to_json(results.document(result), indent=None))
    if not (result.outcomes or result.predictions or result.interrupted):
        # Nothing was tried: print the reason, also beside a JSON document.
        printing.say(f"tunegemm: {result.note}", err=True)
        return
    where = session.database.name if session.database is not None else ""
    if output.quiet:
        if result.best is None and not result.predictions and (failed := results.failure_line(result)):
            printing.say(f"tunegemm: {failed}", err=True)
        printing.say(results.verdict_line(result, where))
    elif not output.as_json:
        if output.verbose:
            printing.say(*results.each_failure(result))
        top = None if output.verbose else output.top
        results.show(printing.stdout_console(), result, top, where, session.search.budget_s)


def tune_program(session: Session, demands: Sequence[Demand], refused: Sequence[str]) -> int:
    """Tunes a program's products within one budget and prints the savings. Returns the exit code.

    refused: reasons why some of its products are skipped.
    """
    from tunegemm.cli.results import closing_lines, left_out, savings_table
    from tunegemm.tuning.program import by_headroom

    device, output = session.tuning.device, session.output
    if not (session.is_real or session.is_named):  # compiling kernels would show no times
        show_shipped(demands, device, output)
        if not output.is_bare:
            printing.say(*left_out(refused))
            say_gpu_command(session.context, [])
        return DONE
    lacking = {demand.problem: device.lacks_memory(demand.problem) for demand in demands}
    plan = by_headroom([demand for demand in demands if lacking[demand.problem] is None], device)
    current, interrupted = spend_budget(session, plan)
    if not output.as_json:
        console = printing.stdout_console()
        console.print(savings_table(current, console.width))
        printing.say(*closing_lines(current, [*filter(None, lacking.values()), *refused]))
    if interrupted:
        printing.say("Interrupted: the measurements are kept; run the same command to continue.", err=True)
        return INTERRUPTED
    if not any(run.result and (run.result.best or run.result.predictions) for run in current):
        return NOTHING_FOUND
    if not (session.is_real or output.as_json):
        say_gpu_command(session.context, [])
    return DONE


def show_shipped(demands: Sequence[Demand], device: Device, output: Output) -> None:
    """Prints which of a program's products have a record on a device, and how much faster each is."""
    from tunegemm.choose.snapshot import read_snapshot

    snapshot = read_snapshot()
    result = {demand: snapshot.find(demand.problem, device.fingerprint) for demand in demands}
    if output.as_json:
        names = ("label", "median_us", "ratio", "confirmed")
        for demand, record in result.items():
            best = {name: getattr(record, name) for name in names} if record is not None else None
            problem = demand.problem
            facts: dict[str, Any] = {
                "source": "shipped",
                "problem": document_of(problem),
                "shape": problem.shape,
            }
            facts |= {"calls": demand.calls, "device_name": device.name, "best": best}
            typer.echo(to_json(facts, indent=None))
        return
    known = {demand: record for demand, record in result.items() if record is not None}
    ratios = sorted({f"{1 if record.is_torch else record.ratio:.2f}" for record in known.values()}, key=float)
    span = f", {' to '.join(dict.fromkeys((ratios[0], ratios[-1])))} x torch.mm:" if ratios else "."
    if not output.quiet:
        ship = f"{len(known)} of {len(result):,} products have a shipped record for {device.name}"
        printing.say(f"No CUDA GPU here. {ship}{span}")
    for demand in demands:
        figure = "no record"
        if (found := known.get(demand)) is not None:
            torchs = demand.problem.torch_call
            faster = f"{found.ratio:.3f} x {torchs}, {found.label}"
            figure = f"{torchs} is the fastest" if found.is_torch else faster
        printing.say(f"  {demand.problem} x {demand.calls}: {figure}")


def spend_budget(session: Session, plan: Sequence[TunedDemand]) -> tuple[list[TunedDemand], bool]:
    """Tunes the products with the most to gain while the budget lasts, and prints a line for each.

    Returns the state of each product, and whether Ctrl-C ended the tuning.
    """
    from tunegemm.cli.progress import ProgressView
    from tunegemm.cli.results import document, progress_line
    from tunegemm.tuning.program import spend

    search, output, log = session.search, session.output, printing.stderr_console()
    current = {product.demand.problem: product for product in plan}
    interrupted = False
    with ExitStack() as stack:
        # A log gets only the line below for each product; on a terminal the bar shows progress.
        silent = output.is_bare or not log.is_terminal
        view = None if silent else stack.enter_context(ProgressView(log))
        for product in spend(
            session.tuning, plan, effort=search.effort, trials=search.trials, budget_seconds=search.budget_s,
            on_progress=view.update if view else None,
        ):  # fmt: skip
            current[product.demand.problem] = product
            assert product.result is not None
            if view is not None:
                view.end(product.demand.problem)
            interrupted = interrupted or product.result.interrupted
            if output.as_json:
                facts = {"calls": product.demand.calls, "saving_s": product.saving_s}
                typer.echo(to_json(document(product.result) | facts, indent=None))
            elif not output.quiet:
                finished = sum(each.result is not None for each in current.values())
                log.print(clean(progress_line(product, finished, len(plan))), soft_wrap=True)
    return list(current.values()), interrupted


def race_named(tuner: Tuner, problems: Sequence[Problem], named: Sequence[str]) -> Iterator[TuneResult]:
    """Races the candidates that a command line names against torch.mm and the record."""
    from tunegemm.choose.snapshot import read_snapshot
    from tunegemm.measure.replay import ReplayDevice
    from tunegemm.report.explain import candidate_of, ranked_by_model

    device, database = tuner.device, tuner.database
    snapshot = read_snapshot()
    for problem in problems:
        known: Candidate | None = None
        ranked: Callable[[str], Iterable[Candidate]] = functools.partial(ranked_by_model, problem, device)
        if device.is_real:
            record = database.best(problem, device.fingerprint) if database is not None else None
            record = record or snapshot.find(problem, device.fingerprint)
            known = record.candidate if record is not None else None
        elif isinstance(measurer := tuner.measurer_for(problem), ReplayDevice):
            ranked = functools.partial(measurer.fastest_first, problem)  # no other kernel's time is known
        candidates = [candidate_of(text, known, ranked) for text in named]
        for candidate in candidates:
            verdict = tuner.kernels.check(problem, candidate)
            if not verdict:
                raise arguments.UsageError(f"--candidate {candidate} cannot run {problem}: {verdict}")
        yield tuner.race(problem, [*candidates, *([known] if known is not None else [])])


def say_gpu_command(context: typer.Context, asked_for: Sequence[Problem]) -> None:
    """The same command, as it measures on a GPU."""
    served = " and ".join(dict.fromkeys(f"tunegemm.{item.our_call}" for item in asked_for)) or "its calls"
    printing.say_command(
        f"On your GPU, this command measures and stores the result for {served}:",
        again(context, asked_for, device=None, db=None),
    )


def again(context: typer.Context, problems: Sequence[Problem], **changes: object) -> str:
    """The same command line for these problems' shapes, without the passwords of URLs."""
    from tunegemm.store.connection import display

    value = {flag.removeprefix("--"): context.params[name] for name, flag in given_options(context).items()}
    value |= {name: display(value[name]) for name in ("db", "study") if value.get(name)}
    shapes = {"shape": [problem.shape for problem in problems]}
    return command_line("tune", {"shape": None} | value | shapes | changes)


def given_options(context: typer.Context) -> dict[str, str]:
    """The flags of the options that the command line has, by the options' names."""
    # Look at a value's source, not whether it equals the default: versions of Click and Typer pass another
    # empty list than the declared one.
    sources = {param: context.get_parameter_source(param.name or "") for param in context.command.params}
    return {
        option.name or "": next(flag for flag in option.opts if flag.startswith("--"))
        for option, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }
