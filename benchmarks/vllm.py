"""Times vLLM with and without tunegemm's plug-in: tokens per second of a Llama model with random weights.

    python -m benchmarks.vllm --only bf16 --seconds 230   # or fp8, blocks, invariant: VLLM_BATCH_INVARIANT=1

With a quarter of Llama-3-8B's layers, a decode step would take 1 ms of the GPU and 2 of the host's
scheduling, which hides kernels. The three engines of a kind, two of them without the plug-in, start
together, have separate CPUs, and alternate. Writes results/GPU/vllm.json.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import tunegemm
from benchmarks.command import add_names, command, parser_of
from benchmarks.results import Results, report
from benchmarks.tables.reading import groups_of, mean_of
from benchmarks.vllm_engine import SEQUENCES, Engine, Setting, variables
from tunegemm.describe.device import find_device
from tunegemm.measure.statistics import aa_noise

METHOD = (
    "tokens per second of vLLM's EngineCore, its scheduler and its worker, of requests that are all there: "
    "three engines that wait for each other, one with the plug-in and two equal ones without, in shuffled "
    "order in each round, a sample of each of 0.25 s at least, medians over rounds; of decode the median "
    "step of all sequences, of prefill the median run (the first 64 prompts of 256); ratio the median over "
    "rounds of one engine's sample to the mean of the other two's; noise of those two; logits of one prompt "
    "and three tokens behind it, as long as the tokens are the same, the largest difference over their "
    "standard deviation"
)
KINDS = ("bf16", "fp8", "blocks", "invariant")
PHASES = ("decode", "prefill")
#: Work before samples, and the least number of rounds of samples.
WARM_SECONDS, LEAST_ROUNDS = 0.3, 3
#: Prompts that run beside the prompt whose logits are compared, if bits must be the same.
_OTHERS = (15, 63, 255)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.vllm", __doc__, gpu=False)
    add_names(parser, "only", KINDS)
    add_names(parser, "sequences", map(str, SEQUENCES))
    add_names(parser, "phases", PHASES)
    parser.add_argument(
        "--seconds", type=float, default=240.0,
        help="of each kind, the start of its engines with it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, default=32, help="of the model (default: %(default)s)")
    parser.add_argument(
        "--scratch", type=Path, help="folder of the model, caches and output (default: temporary)"
    )
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    options = parser.parse_args(arguments)
    scratch = options.scratch or Path(tempfile.gettempdir()) / "tunegemm-vllm"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # engines are to end with their owner
    doors(scratch)
    points = [(phase, int(count)) for phase in options.phases for count in options.sequences]
    results = Results.of(options.out, find_device("cuda:0"), "vllm.json", METHOD, "vllm")
    for kind in options.only:
        end = time.monotonic() + options.seconds
        with engines(settings_of(kind, options.layers), scratch) as (theirs, again, ours):
            results.summary[f"logits_{kind}"] = compared(theirs, ours, kind == "invariant")
            results.summary[f"served_{kind}"] = ours.said()
            print(f"{kind}: {results.summary[f'logits_{kind}']}; {'; '.join(ours.said())}", flush=True)
            for number, (phase, count) in enumerate(points):
                seconds = (end - time.monotonic()) / (len(points) - number)
                report(results, [measure(theirs, again, ours, phase, count, seconds)])
    for of, rows in groups_of(
        results.rows, lambda row: f"{row['dtype']} {row['mode']} {row['phase']}"
    ).items():
        print(f"{of}: geometric mean {mean_of(rows)}, least {min(row['ratio'] for row in rows):.3f}")


def settings_of(kind: str, layers: int) -> tuple[Setting, Setting, Setting]:
    """Two equal engines without the plug-in, and one with it."""
    is_invariant = kind == "invariant"
    theirs = Setting("bf16" if is_invariant else kind, False, is_invariant, layers)
    return theirs, replace(theirs, again=True), replace(theirs, served=True)


def doors(scratch: Path) -> None:
    """Puts entry points on the path, as of installed packages: this benchmark's, and tunegemm's where it is a
    checkout."""
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    group = "vllm.general_plugins"
    result = {"tunegemm-benchmarks": f"[{group}]\ntunegemm_benchmarks = benchmarks.vllm_engine:settle\n"}
    if not entry_points(group=group, name="tunegemm"):
        result["tunegemm"] = "".join(
            f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for name, entries in project.items()
        )
    for name, text in result.items():
        version = tunegemm.__version__
        folder = scratch / "doors" / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "entry_points.txt").write_text(text)
    sys.path.append(str(scratch / "doors"))  # processes that are spawned have the same path


@contextmanager
def engines(settings: Sequence[Setting], scratch: Path) -> Iterator[list[Engine]]:
    """Starts engines together, each on an equal part of the CPUs, and ends them."""
    started: list[Engine] = []
    cpus = sorted(os.sched_getaffinity(0))
    share = len(cpus) // len(settings)
    try:
        for number, setting in enumerate(settings):
            own = cpus[number * share : (number + 1) * share]
            started.append(Engine(setting, scratch / setting.name, variables(setting, scratch), own))
        for engine in started:
            engine.wait()
            print(f"{engine.setting.name} started after {engine.seconds:.0f} s", flush=True)
        yield started
    finally:
        for engine in started:
            engine.stop()


def measure(
    theirs: Engine, again: Engine, ours: Engine, phase: str, sequences: int, seconds: float
) -> dict[str, Any]:
    """The row of one phase and number of sequences, of as many rounds as take so many seconds.

    theirs, again: two equal engines without the plug-in.
    """
    end = time.monotonic() + seconds
    samples: dict[str, list[float]] = {"vllm": [], "again": [], "tunegemm": []}
    order = [("vllm", theirs), ("again", again), ("tunegemm", ours)]
    for _, engine in order:
        engine.ask("sample", phase, sequences, WARM_SECONDS)
    source, rounds, longest = random.Random(0), 0, 0.0
    while rounds < LEAST_ROUNDS or time.monotonic() + longest < end:
        begin = time.monotonic()
        source.shuffle(order)
        for name, engine in order:
            samples[name].append(engine.ask("sample", phase, sequences))
        rounds += 1
        longest = max(longest, time.monotonic() - begin)
    setting = ours.setting
    pairs = zip(samples["tunegemm"], samples["vllm"], samples["again"], strict=True)
    return {
        "dtype": setting.dtype, "mode": "batch_invariant" if setting.is_invariant else "fastest",
        "phase": phase, "sequences": sequences, "layers": setting.layers,
        "tokens_per_s": round(statistics.median(samples["tunegemm"]), 1),
        "engine_tokens_per_s": round(statistics.median(samples["vllm"] + samples["again"]), 1),
        "ratio": round(statistics.median(mine / ((item + two) / 2) for mine, item, two in pairs), 5),
        "noise": round(aa_noise(samples["again"], samples["vllm"]), 5), "rounds": rounds,
    }  # fmt: skip


def compared(theirs: Engine, ours: Engine, is_invariant: bool) -> dict[str, Any]:
    """How far apart logits are; for a batch-invariant engine also whether bits change with other prompts."""
    first, second = theirs.ask("logits", 4), ours.ask("logits", 4)
    differences = []
    for (their_token, their_bytes), (our_token, our_bytes) in zip(first, second, strict=True):
        item, two = (np.frombuffer(each, np.float32) for each in (their_bytes, our_bytes))
        differences.append(float(np.abs(item - two).max() / item.std()))
        if their_token != our_token:
            break
    result: dict[str, Any] = {
        "positions": len(differences),
        "largest_difference": round(max(differences), 5),
        "finite": all(np.isfinite(np.frombuffer(each, np.float32)).all() for _, each in second),
    }
    if is_invariant:
        for name, engine, alone in (("vllm", theirs, first), ("tunegemm", ours, second)):
            runs = [alone, *(engine.ask("logits", 4, others) for others in _OTHERS)]
            result[f"bits_same_{name}"] = all(item == two for item, two in pairwise(runs))
    return result


if __name__ == "__main__":
    sys.exit(main())
