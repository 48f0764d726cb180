"""`tunegemm tune`: find the fastest kernel of one or more shapes, and remember it."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunegemm.cli import help, options
from tunegemm.describe.command import command_line
from tunegemm.describe.problem import Problem
from tunegemm.describe.workload import read_all
from tunegemm.report.text import clean, counted, significant, to_json
from tunegemm.tuning.efforts import Effort

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tunegemm.describe.device import Device
    from tunegemm.describe.space import Candidate
    from tunegemm.describe.workload import Demand
    from tunegemm.measure.outcome import Outcome
    from tunegemm.measure.worker import Child
    from tunegemm.report.leaderboard import Leaderboard
    from tunegemm.store import Database
    from tunegemm.tuning.cluster import Pool
    from tunegemm.tuning.progress import Progress, TuneResult
    from tunegemm.tuning.tuner import Tuner


class Command(help.Command):
    """Lets `--ray` stand without an address; an option of Typer's takes a value always or never."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = []
        for word, following in zip(args, [*args[1:], "-"], strict=False):
            words += [word, "auto"] if word == "--ray" and following.startswith("-") else [word]
        return super().parse_args(ctx, words)


def command(
    asked_for: list[Problem],
    context: typer.Context,
    from_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Tune a program's products: JSON of `tunegemm record`, TunableOp's CSV or CUTLASS's JSON. "
            "May be repeated, as for a file of each rank: calls of the same product add up.",
        ),
    ] = None,
    effort: Annotated[
        Effort | None,
        typer.Option(
            "--effort",
            help="How much of the space to try. Default: quick; with --from and --budget full for those that "
            "may gain most, in the time that is left.",
        ),
    ] = None,
    trials: Annotated[
        int | None, options.count_option("--trials", "Most candidates to measure per shape.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="TIME",
            help="Most time per shape, or with --from in all: 90, 90s, 10m, 1h30m.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the search.")] = 0,
    families: options.Families = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            "--kernels", metavar="REGEX", help="Only generated kernels whose label has a match, as ^pp128x."
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            "--candidate",
            metavar="FAMILY[,NAME=VALUE]",
            help="Instead of a search: race this one beside torch.mm and the record; may be repeated.",
        ),
    ] = None,
    device: options.DeviceSpec = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="all|0,1",
            help="Several GPUs of this host: all, or their numbers. More than one needs the extra `ray`.",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="[HOST:PORT]",
            help="The GPUs of the Ray cluster of that head. Without an address: that of RAY_ADDRESS, or one "
            "started for this with all GPUs of this host.",
        ),
    ] = None,
    db: options.DatabaseLocation = None,
    workers: options.Workers = None,
    with_backward: Annotated[
        bool,
        typer.Option("--with-backward", help="Tune the two products of each shape's backward pass, too."),
    ] = False,
    compiled_only: Annotated[
        bool,
        typer.Option(
            "--compiled-only", help="Compile nothing: try kernels of the cache and those that ship."
        ),
    ] = False,
    energy: Annotated[
        bool, typer.Option("--energy", help="Meter the finalists' energy, a second each, for min_energy.")
    ] = False,
    sampler: Annotated[
        str | None,
        typer.Option(
            "--sampler",
            metavar="NAME",
            help="Optuna sampler of the search: roofline (the default), tpe, gp, random, cmaes or "
            "package.module:Class.",
        ),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(
            "--study",
            metavar="FILE|URL",
            help="Keep the Optuna study of each shape there, for optuna-dashboard: a journal file, or "
            "sqlite:///FILE.",
        ),
    ] = None,
    top: Annotated[int, options.count_option("--top", "Rows to print per shape.")] = 10,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Print a line for each shape and nothing else.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Print all rows, and each candidate that failed.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON document per shape, one per line, and nothing else."),
    ] = False,
) -> None:
    """Find and remember the fastest kernel for each shape, or for the products of a program."""
    if bool(asked_for) == bool(from_files):
        raise options.UsageError(
            "give either --shape or --from: --shape 4096x4096x4096, or --from shapes.json"
        )
    if quiet and (verbose or as_json):
        raise options.UsageError(f"--quiet and {'--verbose' if verbose else '--json'}: give one of them")
    if candidate and (of_search := search_options(context)):
        raise options.UsageError(f"{', '.join(of_search)} with --candidate, which searches nothing")
    if from_files:
        of_shapes = {"dtype", "out_dtype", "layout", "alignment", "epilogue", "accumulation", "with_backward"}
        if given := [flag for name, flag in given_options(context).items() if name in of_shapes]:
            raise options.UsageError(f"{', '.join(given)} with --from: the file says that of each product")
    demands, refused = read_all(from_files) if from_files else ([], [])
    problems: dict[Problem, Problem] = {}  # each with the first that asks for it
    for forward in asked_for:
        for problem in (forward, *(forward.backward() if with_backward else ())):
            problems.setdefault(problem, forward)
    budget_seconds = options.parse_seconds(budget) if budget is not None else None
    where = [("--device", device), ("--devices", devices), ("--ray", ray)]
    if len(named := [flag for flag, value in where if value is not None]) > 1:
        raise options.UsageError(f"{' and '.join(named)}: give one of them")
    gpus = options.parse_gpus(devices) if devices is not None else ()
    how: dict[str, Any] = {
        "families": options.parse_families(families), "workers": workers, "seed": seed,
        "compiled_only": compiled_only, "energy": energy, "matching": options.parse_pattern(kernels),
        "sampler": sampler, "study": study,
    }  # fmt: skip
    if sampler is not None:
        from tunegemm.search.samplers import check_sampler

        check_sampler(sampler)  # before anything is begun
    with ExitStack() as stack:
        if ray is None and len(gpus) <= 1 and (device is None or device.startswith("cuda")):
            how["child"] = begin_to_measure(stack)
        from tunegemm.cli.progress import ProgressView
        from tunegemm.store.connection import display
        from tunegemm.tuning.progress import Request
        from tunegemm.tuning.tuner import Tuner

        out, log = options.stdout_console(), options.stderr_console()
        tuning: Tuner | Pool
        database: Database | None
        if ray is not None or len(gpus) > 1:
            tuning, database = open_pool(stack, gpus, ray, db, how)
        else:
            tuning, database = open_tuner(stack, f"cuda:{gpus[0]}" if gpus else device, problems, db, how)
        options.require_memory(tuning.device, problems)
        if not (named or tuning.device.is_real or as_json or quiet):
            wanted = [*problems, *(demand.problem for demand in demands)]
            options.say(without_gpu(tuning.device, wanted, how["families"]), err=True)
        if study is not None:
            require_studies(tuning, study, database, [*problems, *(demand.problem for demand in demands)])
        if demands:
            lacking = {demand.problem: tuning.device.lacks_memory(demand.problem) for demand in demands}
            ended = tune_program(
                out,
                log,
                tuning,
                [demand for demand in demands if lacking[demand.problem] is None],
                [*filter(None, lacking.values()), *refused],
                budget_seconds=budget_seconds,
                effort=effort,
                trials=trials,
                as_json=as_json,
                quiet=quiet,
            )
            if not (tuning.device.is_real or as_json or ended):
                say_gpu_command(context, [])
            raise typer.Exit(ended)
        requests = [
            Request(one, effort or "quick", trials, budget_seconds, following)
            for one, following in itertools.zip_longest(problems, list(problems)[1:])
        ]
        found, cut, unfinished = 0, [], set(problems)
        results: list[TuneResult] = []
        view = ProgressView(log, total=len(requests), budget_s=budget_seconds)
        stack.enter_context(view)
        if candidate:
            if not isinstance(tuning, Tuner):
                raise options.UsageError("--candidate is raced on one GPU; give --device cuda:N")
            made = race_named(tuning, list(problems), candidate)
        else:
            made = tuning.tune_all(requests, None if as_json or quiet else loading_pandas(view.update))
        for result in made:
            found += result.best is not None or bool(result.predictions)
            results.append(result)
            with view.ended(result.problem):
                if as_json:
                    typer.echo(to_json(result_document(result), indent=None))
                if not (result.outcomes or result.predictions or result.interrupted):
                    # Nothing was tried: the reason is all there is to say, also beside a JSON document.
                    options.say(f"tunegemm: {result.note}", err=True)
                elif not as_json:
                    stored = display(database.location) if database else ""
                    show_result(out, result, None if verbose else top, stored, budget_seconds, quiet, verbose)
            if result.interrupted:
                cut.append(result)
            else:
                unfinished.discard(result.problem)
        if cut:
            left = {problems[problem] for problem in unfinished}
            again = resume_command(context, [problem for problem in asked_for if problem in left])
            options.say_command(f"{interruption(cut)} Go on with:", again, err=True)
            raise typer.Exit(130)
        if not (as_json or quiet) and len(results) > 1:
            out.print(results_table(results))
        if found and not (as_json or quiet or tuning.device.is_real):
            say_gpu_command(context, asked_for)
    if found < len(problems):
        raise typer.Exit(1)


def loading_pandas(update: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """The same, and from the first measurement on pandas is imported, while the GPU works: the table that is
    printed needs it, and it takes 0.4 s.
    """
    thread = threading.Thread(target=importlib.import_module, args=("pandas",), daemon=True)

    def told(progress: Progress) -> None:
        if progress.measured and thread.ident is None:
            thread.start()
        update(progress)

    return told


def begin_to_measure(stack: ExitStack) -> Child | None:
    """The measuring process, where there is a GPU: it imports torch while this process imports the rest."""
    from tunegemm.describe.device import cuda_device_count

    if not cuda_device_count():
        return None
    from tunegemm.measure.worker import Child

    return stack.enter_context(Child())


def open_tuner(
    stack: ExitStack, spec: str | None, problems: Iterable[Problem], db: str | None, how: Mapping[str, Any]
) -> tuple[Tuner, Database | None]:
    """The tuner of one device, and the database where its measurements go."""
    from tunegemm.store import Database
    from tunegemm.tuning.tuner import Tuner, open_device

    device = open_device(spec)
    options.require_memory(device, problems)  # before a database is made
    # Only what is measured is stored, so only a real device gets a database; a bad --db is told of anyway.
    wanted = device.is_real or db is not None
    database = stack.enter_context(Database.open(db)) if wanted else None
    tuner = Tuner(device, database if device.is_real else None, **how)
    return stack.enter_context(tuner), database


def open_pool(
    stack: ExitStack, gpus: Sequence[int], ray: str | None, db: str | None, how: Mapping[str, Any]
) -> tuple[Pool, Database]:
    """A tuner on each of several GPUs, and the database where their measurements go."""
    from tunegemm.store import Database
    from tunegemm.tuning import cluster

    cluster.import_ray()  # where it is not installed, nothing else is begun
    database = stack.enter_context(Database.open(db))
    stack.enter_context(cluster.started_here(gpus) if ray is None else cluster.connected(ray))
    cluster.refuse_file(database.location)
    if (study := how["study"]) is not None and "://" not in study:
        cluster.refuse_file(Path(study))
    place = database.location
    location = str(place) if isinstance(place, Path) else place.render_as_string(hide_password=False)
    opening = functools.partial(cluster.worker_tuner, location, **how)
    return stack.enter_context(cluster.Pool(opening)), database


def require_studies(
    tuning: Tuner | Pool, location: str, database: Database | None, problems: Sequence[Problem]
) -> None:
    """Raises StudyError where studies cannot be kept there, or are those of other problems."""
    from tunegemm.tuning.begin import study_name
    from tunegemm.tuning.studies import Studies

    with Studies(location, database=database.location if database is not None else None) as studies:
        studies.require([study_name(problem, tuning.device) for problem in problems])


def without_gpu(device: Device, problems: Sequence[Problem], families: Sequence[str] | None = None) -> str:
    """What a replayed tuning is worth: which times are known, and that nothing is stored."""
    from tunegemm.measure.replay import ReplayMeasurer, open_replay

    recording = ReplayMeasurer(open_replay(device.spec))
    unknown = []
    for problem in problems:
        known = recording.swept(problem)
        if not known or (families is not None and not any(c.family in families for c in known)):
            unknown.append(problem)
    recorded = set(recording.replay.problems())
    of = f" of {', '.join(families)}" if families is not None and recorded.issuperset(unknown) else ""
    times = f"times come from a recorded {device.name} ({device.spec})"
    if unknown:
        which = str(unknown[0]) if len(problems) == 1 else f"{len(unknown)} of {len(problems)} products"
        ranked = f"no time{of} was recorded of {which}: a model ranks the kernels"
        times = ranked if len(unknown) == len(problems) else f"{times}; {ranked}"
    return (
        f"No CUDA GPU here: candidates are really compiled for {device.architecture.compile_target}; "
        f"{times}. Nothing is stored as measured."
    )


def tune_program(
    out: Console,
    log: Console,
    tuning: Tuner | Pool,
    demands: Sequence[Demand],
    refused: Sequence[str],
    **how: Any,
) -> int:
    """Tunes a program's products within one budget and tells what it saves; the exit code."""
    from tunegemm.cli.progress import ProgressView
    from tunegemm.cli.savings import closing_lines, progress_line, savings_table
    from tunegemm.tuning.program import by_headroom, spend

    as_json, quiet = how.pop("as_json"), how.pop("quiet")
    plan = by_headroom(demands, tuning.device)
    current = {tuned.demand.problem: tuned for tuned in plan}
    interrupted = False
    with ExitStack() as stack:
        # In a log each product gets the one line below; on a terminal the bar shows what happens meanwhile.
        silent = as_json or quiet or not log.is_terminal
        view = None if silent else stack.enter_context(ProgressView(log))
        for tuned in spend(tuning, plan, on_progress=view.update if view else None, **how):
            current[tuned.demand.problem] = tuned
            assert tuned.result is not None
            if view is not None:
                view.end(tuned.demand.problem)
            interrupted = interrupted or tuned.result.interrupted
            if as_json:
                document = result_document(tuned.result)
                facts = {"calls": tuned.demand.calls, "saving_s": tuned.saving_s}
                typer.echo(to_json(document | facts, indent=None))
            elif not quiet:
                told = sum(each.result is not None for each in current.values())
                log.print(clean(progress_line(tuned, told, len(plan))), soft_wrap=True)
    if not as_json:
        out.print(savings_table(list(current.values())))
        options.say(*closing_lines(list(current.values()), refused))
    if interrupted:
        log.print("Interrupted: what was measured is kept; the same command goes on.")
        return 130
    return 0 if any(s.result and (s.result.best or s.result.predictions) for s in current.values()) else 1


def race_named(tuner: Tuner, problems: Sequence[Problem], named: Sequence[str]) -> Iterator[TuneResult]:
    """A race of the candidates that a command line names, beside torch.mm and the record there is."""
    from tunegemm.report.explain import candidate_of

    candidates = [candidate_of(text) for text in named]
    for problem in problems:
        for one in candidates:
            verdict = tuner.kernels.check(problem, one)
            if not verdict:
                raise options.UsageError(f"--candidate {one} cannot run {problem}: {verdict}")
        known = tuner.database.best(problem, tuner.device.fingerprint) if tuner.database is not None else None
        yield tuner.race(problem, [*candidates, *([known.candidate] if known is not None else [])])


def search_options(context: typer.Context) -> list[str]:
    """The given options that say how to search."""
    of_search = {"from_files", "effort", "trials", "budget", "families", "kernels", "compiled_only"}
    return [flag for name, flag in given_options(context).items() if name in of_search]


def show_result(
    console: Console,
    result: TuneResult,
    top: int | None,
    where: str,
    budget_seconds: float | None,
    quiet: bool = False,
    verbose: bool = False,
) -> None:
    """The leaderboard of one tuning, what failed, and how to use the winner."""
    if quiet:
        options.say(verdict_line(result, where))
        return
    if verbose:
        options.say(*each_failure(result))
    board = leaderboard(result)
    if not board.frame.empty:
        console.print(board.table(top, width=console.width))
    note = f"Note: {result.note}." if result.note and not result.predictions else ""
    over_s = result.seconds - (budget_seconds or result.seconds)
    if over_s > 1:
        note += (
            f" {over_s:.0f} s over the budget: what is being compiled and the final race are not cut short."
        )
    closing = [note.strip(), failure_line(result), verdict_line(result, where)]
    for line in [failure_line(result)] if result.interrupted else closing:
        if line:
            options.say(line)


def leaderboard(result: TuneResult) -> Leaderboard:
    """What was measured or replayed; without that the model's order of the kernels that were compiled."""
    from tunegemm.report.leaderboard import Leaderboard

    problem, device, labels = result.problem, result.device, result.labels
    if result.predictions:
        predictions = [(one.candidate, one.total_us) for one in result.predictions]
        return Leaderboard.from_predictions(problem, device, predictions, labels)
    best = result.best.candidate if result.best is not None else None
    return Leaderboard.from_outcomes(
        problem, device, result.outcomes, labels, source=result.source, best=best
    )


def each_failure(result: TuneResult) -> list[str]:
    """A line for each candidate that failed."""
    from tunegemm.measure.outcome import Failure

    failures = [outcome for outcome in result.outcomes if isinstance(outcome, Failure)]
    return [f"Failed: {result.label(one.candidate)}: {one.stage}: {one.reason}" for one in failures]


def failure_line(result: TuneResult) -> str:
    """How many candidates failed at which stage, and the first reason of each; empty when none did."""
    from tunegemm.measure.outcome import Failure

    failures = [outcome for outcome in result.outcomes if isinstance(outcome, Failure)]
    counts = Counter(failure.stage for failure in failures)
    reasons = {failure.stage: failure.reason for failure in reversed(failures)}
    parts = [f"{stage} {count} ({reasons[stage]})" for stage, count in counts.items()]
    return f"Failed: {'; '.join(parts)}" if parts else ""


def verdict_line(result: TuneResult, where: str) -> str:
    """What won, by how much, and what `matmul` calls from now on; empty without time to try anything."""
    from tunegemm.generate.cublaslt import is_torch

    problem, best, seconds = result.problem, result.best, f"{result.seconds:.1f} s"
    if best is None and not result.predictions:
        if not result.outcomes:
            return ""
        return f"No candidate for {problem} could be used, after {seconds}: see `tunegemm doctor`."
    if best is None:
        first = result.predictions[0].candidate
        return (
            f"{problem}: {result.label(first)} is first (a model's ranking, no measurement; nothing stored). "
            f"{seconds}, {counted(result.compiled, 'kernel')} compiled."
        )
    if is_torch(best.candidate):
        won = "no kernel is faster than torch.mm beyond the noise"
    else:
        times = f"{significant(best.median_us)} us, torch.mm {significant(best.baseline_median_us)} us"
        won = f"{result.labels.get(best.candidate.digest, best.candidate)} wins, {best.ratio:.3f} x torch.mm"
        won += f" ({times})" if best.baseline_us else ""
        won += ", which is within the noise" if best.ratio < 1 + best.noise else ""
    if result.source == "measured":
        calls = "calls torch.mm" if is_torch(best.candidate) else "uses this kernel"
        use = f"tunegemm.matmul(a, b) now {calls} for {problem} (from {where})"
    else:
        use = "replayed, not measured here; nothing stored"
    return f"{problem}: {won}; {use}. {seconds}, {counted(result.compiled, 'kernel')} compiled."


def results_table(results: Sequence[TuneResult]) -> Table:
    """The winner of each of several products."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Products tuned", title_justify="left")
    for heading in ("product", "ratio", "fastest", "us", "torch.mm us"):
        table.add_column(heading, justify="left" if heading in ("product", "fastest") else "right")
    for result in results:
        row = [clean(result.problem)]
        if (best := result.best) is not None:
            label = result.labels.get(best.candidate.digest, str(best.candidate))
            row += [f"{best.ratio:.3f}", clean(label), significant(best.median_us)]
            row.append(significant(best.baseline_median_us) if best.baseline_us else "")
        elif result.predictions:
            first = result.predictions[0].candidate
            row += ["", clean(f"{result.labels.get(first.digest, first)} (model)"), "", ""]
        else:
            row += ["", "none", "", ""]
        table.add_row(*map(Text, row))
    return table


def say_gpu_command(context: typer.Context, asked_for: Sequence[Problem]) -> None:
    """The same command, as it measures on a GPU."""
    given = {flag.removeprefix("--"): context.params[name] for name, flag in given_options(context).items()}
    given |= {"shape": [problem.shape for problem in asked_for], "device": None, "db": None}
    options.say_command("On your GPU this measures, and stores it for tunegemm.matmul:",
                        command_line("tune", {"shape": None} | given))  # fmt: skip


def interruption(results: Sequence[TuneResult]) -> str:
    """What interrupted tunings kept."""
    from tunegemm.measure.outcome import Measurement

    measured = {
        (result.problem, outcome.candidate)
        for result in results
        for outcome in result.outcomes
        if isinstance(outcome, Measurement) and result.source == "measured"
    }
    return f"Interrupted: {counted(len(measured), 'measured candidate')} kept."


def resume_command(context: typer.Context, remaining: list[Problem]) -> str:
    """The command line that goes on with the remaining problems: the same options, fewer shapes."""
    given = {flag.removeprefix("--"): context.params[name] for name, flag in given_options(context).items()}
    return command_line("tune", {"shape": None} | given | {"shape": [problem.shape for problem in remaining]})


def given_options(context: typer.Context) -> dict[str, str]:
    """The flags of the options whose values are not their defaults, by the options' names."""
    parameters = {parameter.name or "": parameter for parameter in context.command.params}
    return {name: one.opts[0] for name, one in parameters.items() if context.params.get(name) != one.default}


def result_document(result: TuneResult) -> dict[str, Any]:
    """One tuning as JSON: the best, every outcome, and where the times come from."""
    from tunegemm.measure.outcome import Measurement

    def named(candidate: Candidate) -> dict[str, Any]:
        label = result.labels.get(candidate.digest, str(candidate))
        return {"label": label, "candidate": json.loads(candidate.to_json()), "digest": candidate.digest}

    def outcome_document(outcome: Outcome) -> dict[str, Any]:
        if isinstance(outcome, Measurement):
            return named(outcome.candidate) | measurement_figures(outcome, result.problem, result.device)
        return named(outcome.candidate) | {"failed": outcome.stage, "reason": outcome.reason}

    names = ("source", "seconds", "compiled", "interrupted", "note")
    return {name: getattr(result, name) for name in names} | {
        "problem": asdict(result.problem),
        "shape": result.problem.shape,
        "device": result.device.spec,
        "device_name": result.device.name,
        "best": outcome_document(result.best) if result.best is not None else None,
        "predictions": [
            named(one.candidate) | {"predicted_us": one.total_us, "bound": one.bound}
            for one in result.predictions
        ],
        "outcomes": [outcome_document(outcome) for outcome in result.outcomes],
    }


def measurement_figures(measurement: Any, problem: Problem, device: Device) -> dict[str, float | None]:
    """The figures of one measurement; what a replay or a model cannot tell is None or not a number."""
    floor = device.roofline_us(problem)
    names = ("median_us", "baseline_median_us", "ratio", "spread", "relative_error", "noise")
    figures = {name: getattr(measurement, name) for name in names}
    if not measurement.baseline_us:
        figures |= {"baseline_median_us": None, "ratio": None}
    figures["tflops"] = problem.flops / measurement.median_us * 1e-6
    return figures | {"percent_of_roofline": 100 * floor / measurement.median_us if floor else None}
