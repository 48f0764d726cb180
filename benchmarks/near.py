"""Near hits: what dispatch's rule would have done where the answer is recorded, and, on a GPU, what it does.

    python -m benchmarks.near                                 # replays; needs no GPU
    python -m benchmarks.near --measure --n-k 4096x4096 --m 1-256 --anchors 16,32,64,128,256

The replay asks of what is committed (`db/records`, `db/sweeps`, `benchmarks/results`), and measures nothing:

- *left out*: every shipped record in turn is taken away, and the rule is asked for its problem. It loses
  where it picks a kernel that was measured there and was slower than torch.mm.
- *plan_ms*: what the rule costs for a new m, measured on the CPU that replays; no kernel is loaded.
- *sessions*: the ratio of one kernel in two sessions of the same GPU: the noise that no rule can undercut.

`--measure` tunes the anchors into a database of its own, asks the rule for every m, and races what it picks
against torch.mm. Its rows are measured: ``{m, outcome, picked, expected_ratio, ratio}``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.results import Results, meta, problem_fields, results_path
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.families import completed, kernel_source_hash
from tunegemm.measure.outcome import Measurement
from tunegemm.measure.replay import ReplayDevice, open_replay
from tunegemm.serve.neighbours import neighbourhood
from tunegemm.serve.selection import select
from tunegemm.serve.snapshot import Snapshot
from tunegemm.store import Database, Record
from tunegemm.store.shipped import read_shipped

PEERS = Path(__file__).parent / "results" / "h200" / "peers.json"
METHOD = (
    "anchors tuned into an empty database; for every m the kernel that dispatch would take without a record "
    "of its own, raced against torch.mm as a final race is; ratio above 1 is faster than torch.mm"
)


def replay(device: ReplayDevice) -> dict[str, Any]:
    """All four answers, from what is recorded."""
    records = [
        # As if the kernels were those of today: the question is the rule, not this checkout.
        replace(
            record,
            kernel_source=kernel_source_hash(record.candidate.family),
            candidate=completed(record.candidate),
        )
        for record in read_shipped()[0]
        if record.fingerprint.device_name == device.device.name
    ]
    here = replace(device.device, fingerprint=records[0].fingerprint)
    return {
        "source": "replayed",
        "device": here.name,
        "left_out": left_out(records, here, truths(records, device)),
        "sessions": sessions(records),
        "plan_ms": plan_ms(records, here),
    }


def truths(records: Iterable[Record], device: ReplayDevice) -> dict[tuple[Problem, Candidate], float]:
    """Recorded ratios by problem and kernel, of records and sweeps; of several launches the slowest."""
    found: dict[tuple[Problem, Candidate], float] = {}
    for problem in device.problems():
        for outcome in device.sweep(problem).outcomes.values():
            if isinstance(outcome, Measurement):
                key = problem, outcome.candidate.kernel
                found[key] = min(outcome.ratio, found.get(key, math.inf))
    return found | {(record.problem, record.candidate.kernel): record.ratio for record in records}


def left_out(
    records: Sequence[Record], device: Device, recorded: Mapping[tuple[Problem, Candidate], float]
) -> dict[str, Any]:
    """What the rule says of every record's problem without the record."""
    answers, lost = [], 0
    for record in records:
        others = Snapshot(other for other in records if other.problem != record.problem)
        found = neighbourhood(others, record.problem, device)
        answer = {"problem": str(record.problem), "tuned_ratio": round(record.ratio, 3)}
        if found.options:
            pick = found.options[0]
            ratio = recorded.get((record.problem, pick.record.candidate.kernel))
            # Where the pick was not measured: even the tuned kernel lost, so that the pick would have.
            lost += (record.ratio if ratio is None else ratio) < 0.99
            answer |= {"picked_from": pick.origin.problem.shape, "ratio": ratio}
            answer |= {"expected_ratio": round(pick.record.ratio, 3)}
        else:
            answer["refused"] = found.refusal
        answers.append(answer)
    picked = sum("picked_from" in answer for answer in answers)
    return {"problems": len(records), "picked": picked, "lost": lost, "answers": answers}


def sessions(records: Sequence[Record]) -> dict[str, Any]:
    """How far two sessions' ratios of one kernel are apart."""
    rows = {
        tuple(row[name] for name in ("m", "n", "k")): row for row in json.loads(PEERS.read_text())["rows"]
    }
    apart = []
    for record in records:
        row = rows.get((record.problem.m, record.problem.n, record.problem.k))
        same = [p for p in row["providers"].values() if p.get("label") == record.label] if row else []
        if same:
            apart.append(abs(same[0]["ratio"] / record.ratio - 1))
    return {
        "kernels": len(apart),
        "median": round(statistics.median(apart), 4),
        "above_2_percent": sum(one > 0.02 for one in apart),
        "largest": round(max(apart), 3),
    }


def plan_ms(records: Sequence[Record], device: Device) -> float:
    """Median over m of asking the rule, of n and k that have records."""
    snapshot, times = Snapshot(records), []
    for m in range(17, 128):
        start = time.perf_counter()
        neighbourhood(snapshot, Problem(m, 4096, 4096), device)
        times.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(times), 2)


def measure(n_k: str, extents: Sequence[int], anchors: Sequence[int], effort: Any, out: Path | None) -> None:
    """Rows of one n and k on this machine's GPU."""
    from tunegemm.tuning.tuner import Tuner

    device = find_device("cuda:0")
    results = Results(results_path(out, device, "near.json"), meta(device, METHOD))
    with tempfile.TemporaryDirectory() as folder:
        database = Database.open(Path(folder, "near.sqlite"))
        races = Database.open(Path(folder, "races.sqlite"))
        with database, races:
            with Tuner(device, database) as tuner:
                for m in anchors:
                    tuner.tune(Problem.parse(f"{m}x{n_k}"), effort=effort)
            snapshot = Snapshot(database.records())
            with Tuner(device, races) as tuner:
                for m in extents:
                    problem = Problem.parse(f"{m}x{n_k}")
                    found = select(snapshot, problem, device)
                    row = problem_fields(problem) | {"epilogue": "none", "anchors": list(anchors)}
                    row |= {"outcome": found.outcome, "why": found.why}
                    if found.outcome == "near":
                        record = found.options[0]
                        raced = [
                            one.ratio
                            for one in tuner.race(problem, [record.candidate]).outcomes
                            if isinstance(one, Measurement) and one.candidate == record.candidate
                        ]
                        ratio = raced[-1] if raced else None
                        row |= {
                            "picked": families.get(record.candidate.family).label(record.candidate),
                            "expected_ratio": round(record.ratio, 4),
                            "ratio": None if ratio is None else round(ratio, 4),
                        }
                    print(row, flush=True)
                    results.put(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help="on a GPU, what is picked against torch.mm")
    parser.add_argument("--n-k", default="4096x4096", metavar="NxK")
    parser.add_argument("--m", default="2-256", metavar="FROM-TO")
    parser.add_argument("--anchors", default="16,32,64,128,256", metavar="M,M")
    parser.add_argument("--effort", default="quick", choices=("quick", "full"))
    options = parser.parse_args()
    if options.measure:
        first, last = map(int, options.m.split("-"))
        anchors = [int(m) for m in options.anchors.split(",")]
        extents = [m for m in range(first, last + 1) if m not in anchors]
        measure(options.n_k, extents, anchors, options.effort, options.out)
        return
    text = json.dumps(replay(open_replay("h200")), indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
