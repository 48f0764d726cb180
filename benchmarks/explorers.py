"""Compares what explores behind the model's order: the project's Gaussian process and Optuna's.

    python -m benchmarks.explorers --seeds 0,1            # results/explorers.json
    python -m benchmarks.explorers --seeds 0,1 --most 3   # the next three sweeps: Optuna's take 1 s an ask

Each gets the same first 16 candidates of the model with their recorded ratios, then suggests four at a time
up to 64 in all; where it has nothing new, the model's next best kernel follows, as in a tuning. Where the
best of the sweep is among those 16 nothing is left to find, and none is asked. `model` has no explorer: the
model's next. Seed 0 has all recorded candidates; every other seed leaves out a fifth of them by chance and
seeds Optuna's process, too. Times are CPU seconds of one suggestion, the median. Rows that are there stay.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.command import command, parser_of
from benchmarks.results import RESULTS, command_line
from benchmarks.search import Values, by_model, recorded_values, root_of, search_of
from tunegemm.describe.device import Device, package_version
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.feasibility import Verdict
from tunegemm.measure.replay import open_replay
from tunegemm.search import Search
from tunegemm.search.delegate import Delegate
from tunegemm.search.search import Explorer
from tunegemm.search.surrogate import Surrogate
from tunegemm.tuning.begin import opinions

FIRST, BATCH, COUNTS = 16, 4, (16, 32, 48, 64)
FAMILY = "cute_sm90"
STRATEGIES = ("model", "own", "gp")


def made(name: str, search: Search, problem: Problem, device: Device, seed: int) -> Explorer:
    """The explorer of a strategy."""

    def verdict(candidate: Candidate) -> Verdict:
        return Verdict("recorded", f"{candidate} is not in the recording")

    def reject(candidate: Candidate, verdict: Verdict) -> None: ...

    if name == "gp":
        from optuna.samplers import GPSampler

        sampler = GPSampler(seed=seed, n_startup_trials=1, warn_independent_sampling=False)
        return Delegate(sampler, [search], verdict=verdict, reject=reject)
    return Surrogate(
        search, verdict=verdict, reject=reject, features=lambda some: opinions(problem, some, device)
    )


def asked(search: Search, order: Sequence[Candidate], values: Values, explores: Explorer) -> list[Candidate]:
    """The first of the order, which were told, and what the explorer suggests."""
    found = list(order[:FIRST])
    while len(found) < max(COUNTS):
        batch: list[Candidate] = []
        while len(batch) < BATCH:
            chosen = explores.suggest()
            if chosen is None or not search.is_open(chosen):
                chosen = next(filter(search.is_open, search.ranked), None)
            if chosen is None:
                break
            search.claim(chosen)
            explores.start(chosen)
            batch.append(chosen)
        for candidate in batch:
            search.tell(candidate, values[candidate])
            explores.tell(candidate, values[candidate])
        found += batch
        if not batch:
            break
    return found


class Timed:
    """An explorer, and the CPU seconds of each of its suggestions."""

    def __init__(self, explores: Explorer) -> None:
        self._explores, self.seconds = explores, list[float]()
        self.start, self.tell = explores.start, explores.tell

    def suggest(self) -> Candidate | None:
        begin = time.process_time()
        found = self._explores.suggest()
        self.seconds.append(time.process_time() - begin)
        return found


def rows_of(problem: Problem, values: Values, device: Device, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each strategy."""
    if seed:
        kept = random.Random(seed).sample(list(values), len(values) * 4 // 5)
        values = {candidate: values[candidate] for candidate in kept}
    order = list(by_model(problem, values, device, seed))
    best = max(value for value in values.values() if value is not None)
    for name in STRATEGIES:
        row: dict[str, Any] = {"strategy": name, "seed": seed, "candidates": len(values)}
        found = order
        if name != "model" and max(values[one] or 0.0 for one in order[:FIRST]) < best:
            search = search_of(order, values, trials=max(COUNTS))
            for candidate in order[:FIRST]:
                search.claim(candidate)
                search.tell(candidate, values[candidate])
            timed = Timed(made(name, search, problem, device, seed))
            found = asked(search, order, values, timed)
            row["ask_ms"] = round(statistics.median(timed.seconds) * 1000, 1)
        ratios = [values[candidate] or 0.0 for candidate in found]
        yield row | {"regret": [round(1 - max(ratios[:count]) / best, 5) for count in COUNTS]}


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each GPU and of both, by strategy: the regret's median, 90th percentile and mean."""
    found = []
    for gpu, name in itertools.product(["all", *dict.fromkeys(row["gpu"] for row in rows)], STRATEGIES):
        mine = [row for row in rows if row["strategy"] == name and gpu in ("all", row["gpu"])]
        one: dict[str, Any] = {"of": gpu, "strategy": name, "replays": len(mine)}
        for place, count in enumerate(COUNTS):
            values = sorted(row["regret"][place] for row in mine)
            one[f"median_{count}"] = round(statistics.median(values), 5)
            one[f"ninth_{count}"] = round(values[int(0.9 * (len(values) - 1))], 5)
            one[f"mean_{count}"] = round(statistics.fmean(values), 5)
        if times := [row["ask_ms"] for row in mine if "ask_ms" in row]:
            one["ask_ms"] = round(statistics.median(times), 1)
        found.append(one)
    return found


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.explorers", __doc__, gpu=False)
    parser.add_argument(
        "--recorded", default="h100-drawn,h200-drawn,h200", help="GPUs (default: %(default)s)"
    )
    parser.add_argument("--seeds", default="0,1", help="which (default: %(default)s)")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="end after so many that were asked for")
    parser.add_argument("--out", type=Path, default=RESULTS / "explorers.json", help="the file")
    options = parser.parse_args(arguments)
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    done = {(row["of"], row["seed"]) for row in rows}
    for recorded, seed in itertools.product(options.recorded.split(","), map(int, options.seeds.split(","))):
        replay = open_replay(recorded, root=root_of(recorded))
        for problem in replay.problems():
            place = f"{recorded}, {problem}"
            values = recorded_values(replay.sweep(problem), FAMILY)
            if len(values) <= max(COUNTS) or (place, seed) in done:
                continue
            of_sweep = {"of": place, "gpu": replay.device.name}
            added = [of_sweep | row for row in rows_of(problem, values, replay.device, seed)]
            rows += added
            print(f"{place}, seed {seed}, {len(values)} candidates", flush=True)
            write(options.out, rows)
            options.most -= any("ask_ms" in row for row in added)
            if not options.most:
                return
    for one in summary(rows):
        print(*one.values())


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    versions = {name: package_version(name) for name in ("tunegemm", "optuna", "torch", "scipy")}
    head = {
        "command": command_line(sys.argv), "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "packages": versions, "counts": COUNTS, "method": (__doc__ or "").split("\n\n")[2].replace("\n", " "),
    }  # fmt: skip
    lines = ",\n".join(json.dumps(row) for row in rows)
    entries = f'"strategies": {json.dumps(summary(rows), indent=1)},\n"rows": [\n{lines}\n]'
    path.write_text(f'{{"meta": {json.dumps(head)},\n{entries}}}\n')


if __name__ == "__main__":
    sys.exit(main())
