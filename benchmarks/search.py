"""Compares search strategies on recorded sweeps: how far behind the best is the best of the first candidates?

    python -m benchmarks.search --recorded h100-drawn --strategies chance,model,roofline --seeds 3

Every strategy may request the recorded candidates of one family and gets the recorded ratio to torch.mm; no
GPU is used. Sweeps named NAME-steady were timed in steady state. *chance* is a uniform draw without repeats,
*model* the model's order, cycles and energy in turn, each kernel at its recorded launches; the others are
`tunegemm tune --sampler` of that name: a study of the effort quick, asked by the same door as in a tuning.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.command import add_names, command, parser_of
from benchmarks.results import Results, command_line, problem_fields, results_path
from tunegemm.describe.device import Device, package_version
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError
from tunegemm.generate.feasibility import Verdict
from tunegemm.measure.outcome import Measurement
from tunegemm.measure.replay import ReplayDevice, Sweep, open_replay
from tunegemm.model import rank as model
from tunegemm.search import Portfolio, Search, first_of_each_kernel
from tunegemm.search.efforts import EFFORTS
from tunegemm.search.samplers import NAMES, sampler_of
from tunegemm.search.study import ProblemStudy, StudySpace

FAMILY = "cute_sm90"
COUNTS = (8, 16, 32, 64)
STEADY = "-steady"
#: Sweeps that everybody may replay, and those that are used only to compare searches.
FOLDERS = ("db/sweeps", "benchmarks/sweeps")
METHOD = (
    "recorded ratios to torch.mm of one family's candidates; regret: 1 less the best of the first so many "
    "over the best of all, for each seed"
)

#: The value of each candidate; None where it failed.
Values = Mapping[Candidate, float | None]
#: A strategy yields candidates, most promising first, endlessly or up to the last.
Strategy = Callable[[Problem, Values, Device, int], Iterator[Candidate]]


def by_chance(problem: Problem, values: Values, device: Device, seed: int) -> Iterator[Candidate]:
    yield from random.Random(seed).sample(list(values), len(values))


def by_model(problem: Problem, values: Values, device: Device, seed: int) -> Iterator[Candidate]:
    rankings = model.alternate_rankings(model.rank(problem, values, device))
    yield from (ranking.candidate for ranking in rankings)


def by_sampler(name: str, problem: Problem, values: Values, device: Device, seed: int) -> Iterator[Candidate]:
    """What a study asks for, as in a tuning."""
    study = study_of_sweep(problem, values, device, sampler=name, trials=max(COUNTS), seed=seed)
    while batch := study.ask():
        for candidate in batch:
            yield candidate
            study.tell(candidate, values[candidate])


def study_of_sweep(
    problem: Problem, values: Values, device: Device, *, sampler: str, trials: int, seed: int = 0
) -> ProblemStudy:
    """The study of a quick tuning with the recorded candidates of one family only."""
    launch_names = {name for candidate in values for name, _ in candidate.launch_params}
    lists = {
        name: sorted({each[name] for each in values if name in each.params}, key=lambda v: (str(type(v)), v))
        for name in sorted(launch_names)
    }
    search = Search(
        first_of_each_kernel(list(by_model(problem, values, device, seed))), lists,
        EFFORTS["quick"].plan, allowed=values.__contains__, trials=trials,
    )  # fmt: skip
    return ProblemStudy(
        Portfolio([search], EFFORTS["quick"].plan), StudySpace([], candidates=values),
        verdict=lambda point: Verdict("recorded", f"{point} is not in the recording"),
        sampler=sampler_of(sampler, seed=seed), seed=seed,
    )  # fmt: skip


STRATEGIES: dict[str, Strategy] = {
    "chance": by_chance,
    "model": by_model,
    **{name: lambda *arguments, name=name: by_sampler(name, *arguments) for name in NAMES},
}
#: Seeds of strategies that ignore the seed, and of the strategy whose requests take 0.3 s.
_SEEDS = {"model": 1, "roofline": 1, "gp": 2}


def recorded_values(sweep: Sweep) -> dict[Candidate, float | None]:
    """The recorded ratio of each candidate of `FAMILY`, None where it failed."""
    return {
        candidate: outcome.ratio if isinstance(outcome, Measurement) else None
        for candidate, outcome in sweep.outcomes.items()
        if candidate.family == FAMILY
    }


def regrets(asked: Iterator[Candidate], values: Values) -> list[float]:
    """After each of `COUNTS`; a strategy that ends early keeps its best value."""
    best = max(value for value in values.values() if value is not None)
    results = [values[candidate] or 0.0 for candidate in islice(asked, max(COUNTS))]
    return [round(1 - max(results[:count], default=0.0) / best, 5) for count in COUNTS]


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each strategy and timing, over sweeps and seeds: the regret's median and 90th percentile."""
    results = []
    for timing in dict.fromkeys(row["timing"] for row in rows):
        for name in STRATEGIES:
            mine = [row for row in rows if (row["timing"], row["strategy"]) == (timing, name)]
            if not mine:  # it supports none of these sweeps
                continue
            item: dict[str, Any] = {"timing": timing, "strategy": name, "sweeps": len(mine)}
            for count in COUNTS:
                values = sorted(value for row in mine for value in row["regret"][str(count)])
                item[f"median_{count}"] = round(statistics.median(values), 5)
                item[f"ninth_{count}"] = round(values[int(0.9 * (len(values) - 1))], 5)
            results.append(item)
    return results


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.search", __doc__, gpu=False)
    parser.add_argument("--recorded", default="h200", help="name of the recorded GPU (%(default)s)")
    parser.add_argument("--sweeps", type=Path, help=f"folder of recordings (default: {', '.join(FOLDERS)})")
    add_names(parser, "strategies", STRATEGIES)
    parser.add_argument("--seeds", type=int, default=10, help="of strategies by chance (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder of search.json (default: that of the GPU)")
    options = parser.parse_args(arguments)
    roots = [Path(__file__).parents[1] / folder for folder in FOLDERS]
    root = options.sweeps or next((one for one in roots if (one / options.recorded).is_dir()), roots[0])
    replays = {"interleaved": open_replay(options.recorded, root=root)}
    if (root / (options.recorded + STEADY)).is_dir():
        replays["steady"] = open_replay(options.recorded + STEADY, root=root)
    device = replays["interleaved"].device
    results = Results(results_path(options.out, device, "search.json"), meta_of(replays["interleaved"]))
    # Keep rows of existing strategies that were compared after as many candidates.
    wanted = {str(count) for count in COUNTS}
    results.rows = [
        row for row in results.rows if row["strategy"] in STRATEGIES and row["regret"].keys() == wanted
    ]
    sweeps = [
        (timing, problem, sweep, values)
        for timing, replay in replays.items() for problem in replay.problems()
        if any((values := recorded_values(sweep := replay.sweep(problem))).values())
    ]  # fmt: skip
    for timing, problem, sweep, values in sweeps:
        of_sweep = problem_fields(problem) | {
            "timing": timing, "recorded": sweep.recorded_at[:10], "candidates": len(values)
        }  # fmt: skip
        rows = []
        for name in options.strategies:
            seeds = range(min(options.seeds, _SEEDS.get(name, options.seeds)))
            asked = (STRATEGIES[name](problem, values, replays[timing].device, seed) for seed in seeds)
            try:
                result = zip(*(regrets(each, values) for each in asked), strict=True)
            except TunegemmError as error:
                print(f"{problem}: {error}", file=sys.stderr)
                continue
            by_count = {str(count): list(item) for count, item in zip(COUNTS, result, strict=True)}
            rows.append(of_sweep | {"strategy": name, "regret": by_count})
        print(f"{problem}, {timing}, {len(values)} candidates", flush=True)
        results.put(*rows)
    if not sweeps:
        raise TunegemmError(f"no sweep of {options.recorded} has a measured candidate of {FAMILY}")
    results.summary = {"strategies": summary(results.rows)}
    results.put()
    for item in results.summary["strategies"]:
        print(*item.values())
    print(f"written: {results.path}")


def meta_of(replay: ReplayDevice) -> dict[str, Any]:
    """The origin of rows from a recording: its GPU and driver, and today's packages."""
    return {
        "command": command_line(sys.argv), "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": replay.device.name, "driver": replay.device.fingerprint.driver,
        "packages": {name: found for name in ("tunegemm", "optuna") if (found := package_version(name))},
        "method": METHOD,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
