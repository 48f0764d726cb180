"""Times the listed kernels beside torch.mm on products drawn by seed, for the fit of the selector.

    python -m fit.choices --device cuda:0 --part 0/2 --budget 200 --out build/choices
    python -m fit.choices --device cuda:1 --part 1/2 --budget 200 --out build/choices
    python -m fit.choices --logits --seed logits --budget 50 --out build/choices
    python -m fit.choices --collect build/choices    # adds their rows to results/GPU/choices.json.xz

All kernels of db/selector.toml that suit a product race torch.mm in one interleave, each at suitable
launches; those near the fastest continue for longer. A line is written after each product, so that an
interrupted run loses nothing and a second run continues it. N and K are not dimensions of
`benchmarks.first_use`. With `--logits`, products are as wide as vocabularies, with few rows. The kernels are
those of `make kernels`; none is compiled here.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import lzma
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import command, parser_of
from benchmarks.first_use import DIMENSIONS
from benchmarks.results import folder_of, meta
from tunegemm.choose.predictions import WIDE
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import ArtifactError, TunegemmError
from tunegemm.generate import families
from tunegemm.measure.backend import CudaBackend, warm_us
from tunegemm.measure.operands import (
    Operands,
    check,
    count_sets,
    expected,
    make_operands,
    restore,
    tolerance,
)
from tunegemm.measure.race import Replay, race
from tunegemm.measure.settings import RaceSettings
from tunegemm.measure.statistics import aa_noise
from tunegemm.model import shortlist

METHOD = (
    "torch.mm(out=), twice, and launches of db/selector.toml in one CUDA graph each over operand sets that "
    "together pass 3x the L2, in shuffled order in each round: {screen} rounds with all, then {rounds} with "
    "those within {margin:.0%} of the fastest; ratio: median over the last rounds of torch's sample to the "
    "kernel's"
)
#: Rounds with all launches, rounds with those near the fastest, and the definition of near.
SCREEN, ROUNDS, MARGIN = 2, 9, 0.12
MIN_REPLAY_MS = 0.35
#: Most launches to time per product, and most that continue; fewer for many rows, where a product takes long.
MOST, MOST_NEAR, MOST_OF_MANY_ROWS = 52, 14, 24
MANY_ROWS = 1024
#: Slowest launch to try, by the model, relative to its fastest.
SLOWEST = 1.7
#: Longest product, in floating-point operations, and largest, in bytes.
MAX_FLOP, MAX_BYTES = 4e12, 3e9
#: For products as wide as vocabularies: ranges of N and K, and of rows; all ranges of rows are equally
#: frequent.
LOGITS = (WIDE, 262_144), (1024, 8192)
ROWS_OF_LOGITS = (1, 8), (9, 32), (33, 64)
#: A product that takes longer hangs; the process ends, and a second run continues with the next product.
HANGS_S = 30.0


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("fit.choices", __doc__)
    parser.add_argument("--part", default="0/1", help="which of how many equal shares of the products")
    parser.add_argument("--budget", type=float, default=200, help="seconds; begin no product later than that")
    parser.add_argument("--seed", default="train", help="of the products")
    parser.add_argument("--count", type=int, default=100_000, help="most products")
    parser.add_argument("--rows", default="1-16384", help="FEWEST-MOST, of the products drawn")
    parser.add_argument("--logits", action="store_true", help="products as wide as vocabularies, of few rows")
    parser.add_argument("--out", type=Path, default=Path("build/choices"), help="folder of the lines")
    parser.add_argument(
        "--collect", type=Path, help="measure nothing; add the lines of that folder to the file"
    )
    parser.add_argument("--results", type=Path, help="with --collect: folder of the result file")
    options = parser.parse_args(arguments)
    if options.collect is not None:
        collect(options.collect, options.results)
        return
    run(find_device(options.device), options)


def drawn(seed: str) -> Iterator[Problem]:
    """Products without end, different from those of first_use; the same for each seed.

    Most have 256 rows or fewer, log-uniform; N and K are mostly multiples of 64 or 128, else of 8.
    """
    chance = random.Random(f"choices {seed}")
    while True:
        low, high = chance.choices(((0, 8), (8, 10), (10, 14)), (0.78, 0.14, 0.08))[0]
        problem = Problem.parse(
            f"{round(2 ** chance.uniform(low, high))}x{extent_of(chance)}x{extent_of(chance)}"
        )
        if problem.flops <= MAX_FLOP and problem.bytes <= MAX_BYTES:
            yield problem


def drawn_logits(seed: str) -> Iterator[Problem]:
    """Products without end as wide as vocabularies, of log-uniform extents; the same for each seed."""
    chance = random.Random(f"logits {seed}")
    while True:
        ranges = chance.choice(ROWS_OF_LOGITS), *LOGITS
        m, n, k = (2 ** chance.uniform(math.log2(least), math.log2(most)) for least, most in ranges)
        unit = chance.choice((8, 32, 64, 64, 128, 128, 256))
        problem = Problem.parse(f"{round(m)}x{unit * round(n / unit)}x{64 * round(k / 64)}")
        is_wide = problem.n > WIDE and problem.bytes <= MAX_BYTES
        if is_wide and not {problem.n, problem.k} & set(DIMENSIONS):
            yield problem


def extent_of(chance: random.Random) -> int:
    """An N or a K."""
    while True:
        if chance.random() < 0.7:
            unit = chance.choice((64, 128, 128, 256))
            result = unit * round(2 ** chance.uniform(math.log2(512), math.log2(28672)) / unit)
        else:
            result = 8 * chance.randint(32, 2048)
        if result not in DIMENSIONS:
            return result


def _two_numbers(option: str, text: str, separator: str) -> tuple[int, int]:
    """Raises TunegemmError where the text is not two numbers."""
    first, _, second = text.partition(separator)
    if not (first.isdecimal() and second.isdecimal()):
        raise TunegemmError(f"{option} {text}: give two numbers, such as 0{separator}2")
    return int(first), int(second)


def run(device: Device, options: argparse.Namespace) -> None:
    """Times this part's products until the budget is spent, and writes a line for each.

    Raises TunegemmError for an invalid part or invalid rows.
    """
    from tunegemm.measure.backend import CudaBackend

    part, parts = _two_numbers("--part", options.part, "/")
    fewest, most = _two_numbers("--rows", options.rows, "-")
    if not (part < parts and 1 <= fewest <= most <= 16384):
        raise TunegemmError(f"--part {options.part} --rows {options.rows}: there is nothing to measure")
    started = time.monotonic()
    path = options.out / f"{options.seed}-{part}-of-{parts}.jsonl"
    begun = {tuple(line["begin"]) for line in _lines(path) if "begin" in line}
    draw = drawn_logits if options.logits else drawn
    suitable = (problem for problem in draw(options.seed) if fewest <= problem.m <= most)
    problems = itertools.islice(itertools.islice(suitable, part, None, parts), options.count)
    path.parent.mkdir(parents=True, exist_ok=True)
    backend = CudaBackend(device)
    backend.open()
    done = 0
    with path.open("a", buffering=1) as file:
        method = METHOD.format(screen=SCREEN, rounds=ROUNDS, margin=MARGIN)
        kernels = [families.get(kernel.family).label(kernel) for kernel in shortlist.listed()]
        file.write(json.dumps({"meta": meta(device, method), "kernels": kernels}) + "\n")
        for problem in problems:
            if time.monotonic() - started > options.budget:
                break
            extents = (problem.m, problem.n, problem.k)
            if extents in begun:
                continue
            file.write(json.dumps({"begin": extents}) + "\n")
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            begin = time.monotonic()
            row = measure(problem, device, backend)
            row["seconds"] = round(time.monotonic() - begin, 3)
            faulthandler.cancel_dump_traceback_later()
            file.write(json.dumps(row) + "\n")
            done += 1
            if done <= 3 or done % 20 == 0:
                best = max((item[5] for item in row["launches"]), default=0)
                print(
                    f"{done} in {time.monotonic() - started:.0f} s; {problem.shape}: {row['torch_us']} us, "
                    f"best {best} of {len(row['launches'])}, {row['seconds']} s, failed {row['failed']}",
                    flush=True,
                )
    print(f"{done} products in {time.monotonic() - started:.0f} s; written: {path}")


def measure(problem: Problem, device: Device, backend: CudaBackend) -> dict[str, Any]:
    """The row of one product. Its `launches` are lists: place in the list of kernels, splits of k, whether a
    second kernel adds them, whether tiles go along n, swizzle size, ratio to torch.mm, rounds."""
    count = count_sets(problem, device.l2_bytes, backend.free_bytes())
    sets = [make_operands(problem, backend.torch_device, index) for index in range(count)]
    chosen = worth_trying(problem, device)
    torch_us = warm_us(backend, torch_mm, sets)
    passes = max(1, math.ceil(MIN_REPLAY_MS * 1e3 / (torch_us * count)))
    replays: list[Replay] = [backend.capture(torch_mm, sets, passes) for _ in range(2)]
    rows: list[int] = []
    launchers: list[Any] = []
    failed: dict[str, str] = {}
    for row in range(len(chosen)):
        candidate = chosen.candidate(problem, row)
        family = families.get(candidate.family)
        try:
            artifact = _object(int(chosen.kernels[row]), problem.in_dtype, device)
            launcher = family.load(problem, candidate, device, artifact)
            backend.launch(launcher, sets[0])
            replay = backend.capture(launcher, sets, passes)
        except (TunegemmError, ValueError, RuntimeError) as error:
            failed[family.label(candidate)] = f"{type(error).__name__}: {error}"[:160]
            if not backend.alive():
                raise
            continue
        rows.append(row)
        launchers.append(launcher)
        replays.append(replay)
    for replay in replays:  # a first replay is uploaded within its timing
        replay.start()
        replay.finish()
    everybody = RaceSettings(SCREEN, MIN_REPLAY_MS, race_after=SCREEN + 1, race_margin=math.inf)
    first = race(replays, len(replays), everybody, lambda _: None)
    torch_first = [min(pair) for pair in zip(first[0], first[1], strict=True)]
    ratios = [_ratio(torch_first, samples) for samples in first[2:]]
    rounds = [SCREEN] * len(rows)
    order = sorted(range(len(rows)), key=lambda number: -ratios[number])
    near = [number for number in order[:MOST_NEAR] if ratios[number] > ratios[order[0]] * (1 - MARGIN)]
    settings = RaceSettings(ROUNDS, MIN_REPLAY_MS, race_after=ROUNDS + 1, race_margin=math.inf, seed=1)
    samples = race(
        [*replays[:2], *(replays[2 + number] for number in near)], len(near) + 2, settings, lambda _: None
    )
    for number, own in zip(near, samples[2:], strict=True):
        ratios[number] = _ratio(samples[1], own)
        rounds[number] = ROUNDS
    telemetry = backend.telemetry()
    errors = _check(problem, sets, [launchers[number] for number in near[:2]], backend)
    library = _library_choice(problem, device)
    del replays
    backend.release()
    c = chosen.columns
    columns = chosen.kernels, c.split_k, c.second, c.along_n, c.swizzle
    return {
        "m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.in_dtype,
        "torch_us": round(statistics.median(samples[1]), 3),
        "library": library,
        "noise": round(aa_noise(samples[0], samples[1]), 5),
        "telemetry": {name: telemetry.get(name) for name in ("sm_clock_mhz", "power_w", "throttle_reasons")},
        "sets": count,
        "passes": passes,
        "errors": errors,
        "failed": failed,
        "launches": [
            [
                *(int(column[row]) for column in columns), round(ratios[number], 4), rounds[number],
            ]
            for number, row in enumerate(rows)
        ],
    }  # fmt: skip


def worth_trying(problem: Problem, device: Device) -> shortlist.Choices:
    """The launches that the model predicts to be fast, and the kernels that it knows little about.

    The model cannot separate launches that only wait for memory: tiles with fewer empty rows go first.
    """
    result = shortlist.choices(problem, device)
    tile_rows = np.where(result.columns.swap_ab, result.columns.tile_n, result.columns.tile_m)
    empty = np.maximum(1.0, tile_rows / max(16, problem.m))
    score = result.terms.total_us * (1 + 0.08 * np.log2(empty))
    score /= score.min()
    other = np.array([shortlist.listed()[number].family != "cute_sm90" for number in result.kernels.tolist()])
    score = np.where((other | result.columns.streams) & (empty < 2), 0.9 + 0.1 * score, score)
    order = np.argsort(score, kind="stable")
    order = order[score[order] <= SLOWEST]
    return result.take(order[: MOST if problem.m <= MANY_ROWS else MOST_OF_MANY_ROWS])


def torch_mm(a: Any, b: Any, out: Any) -> None:
    """The baseline."""
    import torch

    torch.mm(a, b, out=out)


def _ratio(baseline: Sequence[float], own: Sequence[float]) -> float:
    return statistics.median(b / s for b, s in zip(baseline, own, strict=True))


def _check(
    problem: Problem, sets: Sequence[Operands], launchers: Sequence[Any], backend: CudaBackend
) -> list[str]:
    """The error in the results of launchers; empty if all are right."""
    wanted, result = expected(problem, sets[0]), []
    for launcher in launchers:
        restore(sets[0])
        backend.launch(launcher, sets[0])
        if objection := check(sets[0], wanted).objection(tolerance(problem)):
            result.append(objection)
    return result


@cache
def _object(number: int, dtype: str, device: Device) -> Path:
    """The compiled object of a listed kernel. Raises ArtifactError where `make kernels` did not make it."""
    from tunegemm.store import packs

    kernel = shortlist.listed()[number]
    problem = Problem.parse("64x4096x4096", dtype=dtype)
    family = families.generator(kernel.family)
    result = packs.find(family.kernel_key(problem, shortlist.launched(problem, kernel), device))
    if result is None:
        raise ArtifactError(f"{family.label(kernel)} is not compiled; run `make kernels`")
    return result.path


def _library_choice(problem: Problem, device: Device) -> list[str]:
    """The first algorithms that cuBLASLt names, with the workspace that torch gives it."""
    if families.get("cublaslt").unavailable() is not None:
        return []
    from tunegemm.generate.cublaslt import library

    try:
        return [
            library.label(algorithm) for algorithm in library.algorithms(problem, device.index, 2, 32 << 20)
        ]
    except RuntimeError as error:
        return [f"unknown: {error}"[:120]]


def _lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file; a killed run may have left half a line."""
    if not path.exists():
        return []
    results = []
    for text in path.read_text().splitlines():
        try:
            results.append(json.loads(text))
        except ValueError:
            continue
    return results


def collect(folder: Path, out: Path | None) -> None:
    """Adds the rows of all lines of a folder to the file of their GPU, with the `meta` of the first run and
    the `commands` of all. Raises TunegemmError unless all lines have the same GPU and list of kernels."""
    added = [(path, _lines(path)) for path in sorted(folder.glob("*.jsonl"))]
    gpu = next((line["meta"]["gpu"] for _, lines in added for line in lines if "meta" in line), None)
    if gpu is None:
        raise TunegemmError(f"{folder} has no lines from this command")
    path = (out or folder_of(gpu)) / "choices.json.xz"
    there = lzma.decompress(path.read_bytes()).decode().splitlines() if path.exists() else []
    runs: list[dict[str, Any]] = []
    commands: list[str] = []
    rows: dict[tuple[int, ...], dict[str, Any]] = {}
    kernels: list[str] = []
    for source, lines in [(path, list(map(json.loads, there))), *added]:
        for line in lines:
            if "meta" in line:
                runs.append(line["meta"])
                commands += line["meta"].get("commands") or [line["meta"]["command"]]
                kernels = kernels or line["kernels"]
                if kernels != line["kernels"] or gpu != line["meta"]["gpu"]:
                    raise TunegemmError(f"{source}: its list of kernels or its GPU differs; leave it out")
            elif "m" in line:
                rows[line["m"], line["n"], line["k"]] = line
    if not rows:
        raise TunegemmError(f"{folder} has no lines from this command")
    head = json.dumps({"meta": runs[0] | {"commands": commands}, "kernels": kernels})
    lines = [head, *(json.dumps(rows[key], separators=(",", ":")) for key in sorted(rows))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress("\n".join(lines).encode(), preset=9))
    print(f"{len(rows)} products; written: {path}")


if __name__ == "__main__":
    sys.exit(main())
