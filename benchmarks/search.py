"""Compares search strategies on recorded sweeps: how good is the best of the first 16, 32, 64, 96 trials?

    python benchmarks/search.py [--device h200] [--seeds 20] [--out FILE.json]

Every strategy may ask for recorded candidates of one family only, and gets the recorded ratio to
torch.mm; its figure is the best ratio found over the best ratio of the whole sweep (1 is the optimum),
the geometric mean over seeds. What is compared are recorded times: no GPU is used.

- random: a uniform draw without repeats
- model: the model's order, each kernel at its recorded launches
- tpe: Optuna's TPE over the same value lists, no model, infeasible suggestions skipped
- search: `tunegemm.search.Search` with the model's ranking, as `tunegemm tune` runs it
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate import model
from tunegemm.measure.outcome import Measurement
from tunegemm.measure.replay import open_replay
from tunegemm.measure.sweeps import Sweep
from tunegemm.search import Search, first_of_each_kernel
from tunegemm.search.sampler import Sampler

TRIALS = (16, 32, 64, 96)
#: Infeasible or repeated suggestions in a row before plain TPE gets a random candidate: 3 ms each.
_TPE_SKIPS = 20

#: A strategy: given the value of what it yields (None for a failure), it yields the next candidate.
Values = Mapping[Candidate, float | None]
Strategy = Callable[[Problem, Values, Device, int], Iterator[Candidate]]


def by_chance(problem: Problem, values: Values, device: Device, seed: int) -> Iterator[Candidate]:
    yield from random.Random(seed).sample(list(values), len(values))


def by_model(problem: Problem, values: Values, device: Device, seed: int) -> Iterator[Candidate]:
    yield from (prediction.candidate for prediction in model.rank(problem, values, device))


def by_tpe(problem: Problem, values: Values, device: Device, seed: int) -> Iterator[Candidate]:
    sampler = Sampler(value_lists(values), seed)
    constants = {name: listed[0] for name, listed in value_lists(values).items()}
    by_params = {tuple(sorted(candidate.params.items())): candidate for candidate in values}
    left = random.Random(seed).sample(list(values), len(values))
    seen: set[Candidate] = set()
    while len(seen) < len(values):
        points = (tuple(sorted((constants | sampler.suggest()).items())) for _ in range(_TPE_SKIPS))
        found = (by_params[point] for point in points if point in by_params and by_params[point] not in seen)
        candidate = next(found, None) or next(c for c in left if c not in seen)
        seen.add(candidate)
        sampler.start(candidate)
        yield candidate
        sampler.tell(candidate, values[candidate])


def by_search(problem: Problem, values: Values, device: Device, seed: int) -> Iterator[Candidate]:
    ranking = model.in_turn(model.rank(problem, values, device))
    ranked = first_of_each_kernel(prediction.candidate for prediction in ranking)
    launch_names = {name for candidate in values for name, _ in candidate.launch_params}
    launches = {name: listed for name, listed in value_lists(values).items() if name in launch_names}
    search = Search(
        ranked,
        launches,
        allowed=values.__contains__,
        effort="quick",
        trials=max(TRIALS),
        seed=seed,
    )
    while batch := search.ask():
        for candidate in batch:
            yield candidate
            search.tell(candidate, values[candidate])


STRATEGIES: dict[str, Strategy] = {"random": by_chance, "model": by_model, "tpe": by_tpe, "search": by_search}


def value_lists(candidates: Values) -> dict[str, tuple[Value, ...]]:
    lists: dict[str, set[Value]] = defaultdict(set)
    for candidate in candidates:
        for name, value in candidate.params.items():
            lists[name].add(value)
    return {
        name: tuple(sorted(listed, key=lambda v: (str(type(v)), v))) for name, listed in sorted(lists.items())
    }


def recorded_values(sweep: Sweep, family: str) -> dict[Candidate, float | None]:
    """The recorded ratio of each candidate of the family, None where it failed."""
    return {
        candidate: outcome.ratio if isinstance(outcome, Measurement) else None
        for candidate, outcome in sweep.outcomes.items()
        if candidate.family == family
    }


def best_after(asked: Iterator[Candidate], values: Values) -> dict[int, float]:
    """The best value after each count of `TRIALS`; a strategy that ends early keeps its best."""
    best, found = 0.0, {}
    for count in range(1, max(TRIALS) + 1):
        candidate = next(asked, None)
        if candidate is not None:
            best = max(best, values[candidate] or 0.0)
        if count in TRIALS:
            found[count] = best
    return found


def compare(problem: Problem, values: Values, device: Device, seeds: int) -> dict[str, dict[str, float]]:
    """Per strategy and count of trials the part of the optimum that was found."""
    optimum = max(value for value in values.values() if value is not None)
    rows = {}
    for name, strategy in STRATEGIES.items():
        runs = [best_after(strategy(problem, values, device, seed), values) for seed in range(seeds)]
        rows[name] = {
            str(count): round(statistics.geometric_mean(max(run[count], 1e-3) / optimum for run in runs), 4)
            for count in TRIALS
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="h200", help="name of the recorded device")
    parser.add_argument("--sweeps", type=Path, help="folder of recorded devices (default: db/sweeps)")
    parser.add_argument("--family", default="cute_sm90")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()

    replay = open_replay(arguments.device, root=arguments.sweeps)
    rows: list[dict[str, Any]] = []
    print(f"{'shape':24}{'candidates':>11}  {'strategy':10}" + "".join(f"{count:>8}" for count in TRIALS))
    for problem in replay.problems():
        values = recorded_values(replay.sweep(problem), arguments.family)
        if not any(values.values()):
            continue
        found = compare(problem, values, replay.device, arguments.seeds)
        rows.append({"problem": str(problem), "candidates": len(values), "found": found})
        for name, row in found.items():
            print(f"{problem!s:24}{len(values):>11}  {name:10}" + "".join(f"{v:8.4f}" for v in row.values()))
    if not rows:
        parser.exit(2, f"no sweep of {arguments.device} has a measured candidate of {arguments.family}\n")
    for name in STRATEGIES:
        means = [
            statistics.geometric_mean(row["found"][name][str(count)] for row in rows) for count in TRIALS
        ]
        print(f"{'geometric mean':35}  {name:10}" + "".join(f"{mean:8.4f}" for mean in means))
    if arguments.out:
        meta = {
            "device": replay.device.name,
            "source": f"replay:{arguments.device}",
            "seeds": arguments.seeds,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
