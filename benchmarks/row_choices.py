"""Launches beside torch.mm on plain products of 129 to 16,384 rows that are drawn by seed, in steady state.

    python -m benchmarks.row_choices --budget 480             # on a GPU; compiles what does not ship

N and K are drawn as `benchmarks.choices` draws them, no dimensions of `benchmarks.first_use`; M is
log-uniform. Of the kernels that ship for many rows (`choose.rows`), of some of db/selector.toml up to 512
rows, and of what else cuBLASLt's heuristic names, those that the model takes for fast and some by chance race
torch.mm in one short interleave. The `FINALISTS` of which most is expected then have steady-state timing
beside two captures of torch.mm, where the chip lowers its clocks (docs/decisions/0023), and longer
interleaved timing elsewhere. With `--screened` the interleave is all, of six times as many products. Writes
results/GPU/row_choices.json after each product.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any
from zlib import crc32

import numpy as np

from benchmarks.choices import extent_of, torch_mm
from benchmarks.command import command, parser_of
from benchmarks.results import Results, meta, problem_fields, results_path
from tunegemm.choose import rows
from tunegemm.choose.fitted import MANY_ROWS
from tunegemm.choose.invariance import order_here
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import library
from tunegemm.generate.cublaslt.choice import parse_label
from tunegemm.measure.backend import Backend, warm_us
from tunegemm.measure.operands import check, count_sets, expected, make_operands, restore, tolerance
from tunegemm.measure.race import Replay, race, steady_race
from tunegemm.measure.settings import RaceSettings
from tunegemm.measure.statistics import aa_noise
from tunegemm.model import rank as model
from tunegemm.model import shortlist
from tunegemm.model.features import order_features
from tunegemm.model.terms import Columns

METHOD = (
    "torch.mm(out=) twice, and each launch, in one CUDA graph each over operand sets that together pass 3x "
    "the L2: {screen} rounds in shuffled order at clocks that all share, in which `screened` is; then the "
    "{finalists} of which most is expected, with torch.mm twice: where the chip had lowered its clocks "
    "(turn_ms) three turns each at thirds of 950 ms, the second half of each timed, else {rounds} such "
    "rounds more; `ratio`: of torch's mean of both to the launch's"
)
LEAST_ROWS, MOST_ROWS = MANY_ROWS, 16384
#: Numbers of the sources of launches.
LARGE, LISTED, LIBRARY = range(3)
#: Rows up to which kernels of db/selector.toml are tried: those that added most to the best of
#: `benchmarks.choices` between 129 and 1,024 rows, by their places.
LISTED_ROWS = 512
LISTED_PLACES = (35, 41, 48, 54, 59, 60, 79, 83, 84, 85, 86, 89, 103, 104, 109, 111)
#: Algorithms that the heuristic is asked for, and the workspace that torch gives it.
REQUESTED, WORKSPACE_BYTES = 8, 32 << 20
SCREEN, ROUNDS, FINALISTS = 3, 11, 6
#: How far behind the fastest launches may be that are screened once more.
NEAR = 0.1
MIN_REPLAY_MS = 0.35
#: Work of torch.mm before the chip says whether it has lowered its clocks, and before turns that are timed.
SETTLE_S, SETTLE_STEADY_S = 0.12, 0.4
#: A round of eight: three turns of 79 ms each (`race.steady_race`).
STEADY = RaceSettings(1, MIN_REPLAY_MS, race_after=9, race_margin=math.inf, steady_ms=950, steady_groups=(8,))
#: Launches that are screened: the best by the model of each source and some by chance; of a product that
#: takes torch so long, fewer.
BEST = {LARGE: 11, LISTED: 6, LIBRARY: 7}
BY_CHANCE = {LARGE: 4, LISTED: 3, LIBRARY: 0}
LONG_US, BEST_OF_LONG = 4000.0, {LARGE: 8, LISTED: 3, LIBRARY: 4}
MAX_FLOP, MAX_BYTES = 1.5e13, 4e9
CHECKED_FLOP = 2e12
HANGS_S = 60.0


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("row_choices", __doc__)
    parser.add_argument("--budget", type=float, default=480, help="seconds; begin no product later than that")
    parser.add_argument("--count", type=int, default=100_000, help="most products")
    parser.add_argument("--seed", default="train", help="of the products")
    parser.add_argument("--screened", action="store_true", help="interleaved alone, of many more products")
    options = parser.parse_args(arguments)
    run(find_device(options.device), options)


def drawn(seed: str) -> Iterator[Problem]:
    """Products without end, other ones than first_use's; the same for each seed."""
    chance = random.Random(f"rows {seed}")
    low, high = math.log2(LEAST_ROWS), math.log2(MOST_ROWS)
    while True:
        m = round(2 ** chance.uniform(low, high))
        problem = Problem.parse(f"{m}x{extent_of(chance)}x{extent_of(chance)}")
        if problem.flops <= MAX_FLOP and problem.bytes <= MAX_BYTES:
            yield problem


def run(device: Device, options: argparse.Namespace) -> None:
    """Times products until the budget is spent, and writes a row of each."""
    from tunegemm.measure.backend import CudaBackend

    started = time.monotonic()
    method = METHOD.format(screen=SCREEN, finalists=FINALISTS, rounds=ROUNDS)
    results = Results(results_path(options.out, device, "row_choices.json"), meta(device, method))
    compile_missing(device)
    backend = CudaBackend(device)
    backend.open()
    done = 0
    for problem in drawn(options.seed):
        if time.monotonic() - started > options.budget or done == options.count:
            break
        if results.find(problem_fields(problem)):
            continue
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        begun = time.monotonic()
        try:
            row = measure(problem, device, backend, is_final=not options.screened)
        except (TunegemmError, ValueError, RuntimeError, MemoryError) as error:
            faulthandler.cancel_dump_traceback_later()
            print(f"{problem.shape}: {type(error).__name__}: {error}"[:300], flush=True)
            if not backend.alive():
                raise
            backend.release()
            continue
        faulthandler.cancel_dump_traceback_later()
        results.put(row | {"seconds": round(time.monotonic() - begun, 2)})
        done += 1
        if done <= 3 or done % 20 == 0:
            told = sorted((f"{one[8] or one[7]:.3f}" for one in row["launches"]), reverse=True)[:FINALISTS]
            print(
                f"{done} in {time.monotonic() - started:.0f} s; {problem.shape}: {row['torch_us']} us, turns "
                f"of {row['turn_ms']} ms, noise {row['noise']}, best {' '.join(told)} of "
                f"{len(row['launches'])}, {time.monotonic() - begun:.2f} s {row['steps']}, "
                f"failed {row['failed']}, wrong {row['wrong']}",
                flush=True,
            )
    print(f"{done} products in {time.monotonic() - started:.0f} s; written: {results.path}")


def kernels() -> list[Candidate]:
    """Those that `choose.rows` may launch."""
    usual = Problem.parse("64x4096x4096")
    listed = (shortlist.launched(usual, shortlist.listed()[place]) for place in LISTED_PLACES)
    return [*shortlist.large_kernels(usual), *listed]


def compile_missing(device: Device) -> None:
    """Compiles the kernels that neither ship nor were compiled; prints why one cannot be."""
    from tunegemm.compile.artifacts import ArtifactStore
    from tunegemm.compile.pool import CompilePool
    from tunegemm.store import packs

    started, usual, jobs = time.monotonic(), Problem.parse("64x4096x4096"), []
    for launch in kernels():
        family = families.generator(launch.family)
        if packs.find(key := family.kernel_key(usual, launch, device)) is None:
            jobs.append((family.label(launch), launch.family, key))
    if not jobs:
        return
    with CompilePool(ArtifactStore()) as pool:
        futures = [(name, pool.submit(family, key)) for name, family, key in jobs]
        failed = {name: result.failure for name, one in futures if not (result := one.result()).artifact}
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - started:.0f} s", flush=True)
    for name, why in failed.items():
        print(f"left out: {name}: {why}", flush=True)


@dataclass(frozen=True)
class Launch:
    """A launch that is tried."""

    source: int
    place: int
    candidate: Candidate
    slowed: float
    """What the power cap takes from its speed, by the model, in log."""


def worth_trying(
    problem: Problem, algorithms: Sequence[Candidate], device: Device, *, is_long: bool
) -> list[Launch]:
    """The launches that are screened."""
    chance = random.Random(crc32(problem.shape.encode()))
    found: dict[int, list[Launch]] = {LARGE: [], LISTED: [], LIBRARY: []}
    torchs = parse_label(library.label(algorithms[0]))
    if torchs is None:
        return []
    large = rows.launches(problem, device, torchs)
    families_of = ["cute_sm90"] * (len(large.place) - 1)
    for number in best_first(problem, large, families_of, device):
        place, one = int(large.place[number]), large.candidate(problem, number)
        found[LARGE].append(Launch(LARGE, place, one, float(large.slowed[number])))
    if problem.m <= LISTED_ROWS:
        few = shortlist.choices(problem, device, LISTED_PLACES)
        listed = rows.modelled(problem, device, few.kernels, few.columns)
        families_of = [shortlist.listed()[place].family for place in few.kernels.tolist()]
        for number in best_first(problem, listed, families_of, device):
            place, one = int(few.kernels[number]), few.candidate(problem, number)
            found[LISTED].append(Launch(LISTED, place, one, float(listed.slowed[number])))
    for place, one in enumerate(algorithms):
        choice = parse_label(library.label(one))
        if not place or choice is None:
            continue
        columns = Columns.of([rows.stand_in_of(choice)])
        slowed = rows.modelled(problem, device, np.zeros(1, np.int64), columns).slowed
        found[LIBRARY].append(Launch(LIBRARY, place, one, float(slowed[0])))
    chosen: list[Launch] = []
    for source, best in (BEST_OF_LONG if is_long else BEST).items():
        first, rest = found[source][:best], found[source][best:]
        chosen += first + chance.sample(rest, min(len(rest), 1 if is_long else BY_CHANCE[source]))
    if problem.m > LISTED_ROWS:
        chosen += [replace(one, candidate=turned(problem, one.candidate)) for one in found[LARGE][:2]]
    return chosen


def best_first(
    problem: Problem, found: rows.Launches, families_of: Sequence[str], device: Device
) -> list[int]:
    """The numbers of launches by what is expected of them in steady state: by the trees of db/order.json at
    one clock for all, and by the clock that the table of joules leaves each."""
    mine = found.take(slice(len(families_of)))
    expected = order_here()(order_features(problem, mine.columns, mine.terms, families_of, device))
    order: list[int] = np.argsort(model.STEADY_CLOCK * mine.slowed - model.STEADY_LEAD * expected).tolist()
    return order


def turned(problem: Problem, launch: Candidate) -> Candidate:
    """The same kernel with its tiles along the other dimension."""
    other = {"along_m": "along_n", "along_n": "along_m"}[str(launch["raster_order"])]
    return launch.with_launch(
        **dict(launch.launch_params)
        | {"raster_order": other, "l2_hint": model.l2_hint(problem, launch.kernel)}
    )


def measure(problem: Problem, device: Device, backend: Backend, *, is_final: bool = True) -> dict[str, Any]:
    """The row of one product. Its `launches` are lists: source (0: kernels for many rows, 1: of
    db/selector.toml, 2: algorithms), place in its list, splits of k, whether a second kernel adds them,
    whether tiles go along n, swizzle size, whether L2 lets go of what streams, `screened`, `ratio` or null.
    """
    steps = [time.monotonic()]
    algorithms = library.algorithms(problem, device.index, REQUESTED, WORKSPACE_BYTES)
    count = count_sets(problem, device.l2_bytes, backend.free_bytes())
    sets = [make_operands(problem, backend.torch_device, index) for index in range(count)]
    torch_us = warm_us(backend, torch_mm, sets)
    passes = max(1, math.ceil(MIN_REPLAY_MS * 1e3 / (torch_us * count)))
    tried = worth_trying(problem, algorithms, device, is_long=torch_us > LONG_US)
    replays: list[Replay] = [backend.capture(torch_mm, sets, passes) for _ in range(2)]
    kept: list[Launch] = []
    launchers: list[Any] = []
    failed: dict[str, str] = {}
    for one in tried:
        candidate = one.candidate
        family = families.get(candidate.family)
        try:
            launcher = family.load(problem, candidate, device, object_of(problem, candidate, device))
            backend.launch(launcher, sets[0])
            replay = backend.capture(launcher, sets, passes)
        except (TunegemmError, ValueError, RuntimeError) as error:
            failed[family.label(candidate)] = f"{type(error).__name__}: {error}"[:160]
            if not backend.alive():
                raise
            continue
        kept.append(one)
        launchers.append(launcher)
        replays.append(replay)
    steps.append(time.monotonic())
    for replay in replays:  # a first replay is uploaded within its timing
        replay.start()
        replay.finish()
    settle(replays[0], SETTLE_S)
    replays[0].start()
    again: list[list[float]] = []
    is_capped = bool(backend.telemetry().get("throttle_reasons"))
    replays[0].finish()

    def timed(some: Sequence[Replay], rounds: int) -> list[list[float]]:
        settings = RaceSettings(
            rounds, MIN_REPLAY_MS, race_after=rounds + 1, race_margin=math.inf,
            seed=crc32(problem.shape.encode()) + rounds,
        )  # fmt: skip
        return race(some, len(some), settings, lambda _: None)

    samples = timed(replays, SCREEN)
    steps.append(time.monotonic())
    torch_all = [fmean(pair) for pair in zip(samples[0], samples[1], strict=True)]
    screened = [ratio_of(torch_all, own) for own in samples[2:]]
    if not is_final:  # once more, of those that are near the fastest
        near = [place for place in range(len(kept)) if screened[place] > max(screened) * (1 - NEAR)]
        again = timed([*replays[:2], *(replays[2 + place] for place in near)], ROUNDS)
        torch_again = [fmean(pair) for pair in zip(again[0], again[1], strict=True)]
        for place, own in zip(near, again[2:], strict=True):
            screened[place] = ratio_of(torch_again, own)
    hopes = [
        model.STEADY_LEAD * math.log(ratio) - model.STEADY_CLOCK * (one.slowed if is_capped else 0)
        for ratio, one in zip(screened, kept, strict=True)
    ]
    finalists = sorted(range(len(kept)), key=lambda place: -hopes[place])[: FINALISTS if is_final else 0]
    last = [*replays[:2], *(replays[2 + place] for place in finalists)]
    if not is_final:
        finals = again[:2]
    elif is_capped:
        settle(replays[0], SETTLE_STEADY_S)
        products = passes * count
        each_us = [
            median(samples[0]),
            median(samples[1]),
            *(median(samples[2 + place]) for place in finalists),
        ]
        lasting = [(replay, us * products * 1e-6) for replay, us in zip(last, each_us, strict=True)]
        finals = steady_race(lasting, len(last), STEADY, lambda _: None)
    else:
        finals = timed(last, ROUNDS)
    torch_final = [fmean(pair) for pair in zip(finals[0], finals[1], strict=True)]
    ratios = {place: ratio_of(torch_final, own) for place, own in zip(finalists, finals[2:], strict=True)}
    steps.append(time.monotonic())
    telemetry = backend.telemetry()
    wrong: list[str] = []
    if is_final and problem.flops <= CHECKED_FLOP:
        wanted = expected(problem, sets[0])
        for place in sorted(ratios, key=lambda place: -ratios[place])[:3]:
            restore(sets[0])
            backend.launch(launchers[place], sets[0])
            if objection := check(sets[0], wanted).objection(tolerance(problem)):
                wrong.append(f"{kept[place].candidate}: {objection}")
        del wanted
    del replays, last
    backend.release()
    return problem_fields(problem) | {
        "torch_us": round(median(torch_final), 3),
        "algorithms": [[library.label(one), one["workspace_bytes"]] for one in algorithms],
        "noise": round(aa_noise(finals[0], finals[1]), 5),
        "is_capped": is_capped,
        "turn_ms": round(2 * STEADY.steady_ms / 24, 1) if is_capped and is_final else 0.0,
        "sm_clock_mhz": telemetry.get("sm_clock_mhz"), "power_w": telemetry.get("power_w"),
        "sets": count, "passes": passes, "failed": failed, "wrong": wrong,
        "steps": [round(end - begin, 2) for begin, end in itertools.pairwise(steps)],
        "launches": [
            [
                one.source, one.place, *launch_of(one.candidate),
                round(screened[place], 4), round(ratios[place], 4) if place in ratios else None,
            ]
            for place, one in enumerate(kept)
        ],
    }  # fmt: skip


def launch_of(candidate: Candidate) -> list[int]:
    """Splits of k, whether a second kernel adds them, whether tiles go along n, swizzle size, whether L2 lets
    go of what streams."""
    params = candidate.params
    return [
        int(params.get("split_k", 1)), int(params.get("reduction") == "second_kernel"),
        int(params.get("raster_order") == "along_n"), int(params.get("swizzle_size", 1)),
        int(params.get("l2_hint") == "streamed"),
    ]  # fmt: skip


def ratio_of(baseline: Sequence[float], own: Sequence[float]) -> float:
    """How many times as fast as the baseline, in the median of rounds."""
    return median(b / s for b, s in zip(baseline, own, strict=True))


def settle(replay: Replay, seconds: float) -> None:
    """Keeps the chip busy."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        replay.start()
        replay.finish()


def object_of(problem: Problem, candidate: Candidate, device: Device) -> Any:
    """The compiled object of a kernel; None where none is needed. Raises TunegemmError where there is
    none."""
    from tunegemm.store import packs

    if not families.get(candidate.family).compiled:
        return None
    found = packs.find(families.generator(candidate.family).kernel_key(problem, candidate, device))
    if found is None:
        raise TunegemmError("it is not compiled")
    return found.path


if __name__ == "__main__":
    sys.exit(main())
