"""Every dtype beside torch's own call for it, one interleave per product.

    python -m benchmarks.dtypes                            # tunes products without a record
    python -m benchmarks.dtypes --dtypes int8,tf32 --shapes 4096x4096x4096 --trials 24

Writes results/GPU/dtypes.json after each product and adds to what is there, so that it can run in slices: per
product `torch`, its call, and `tunegemm_cute`, the best kernel of `cute_sm90` that tuning found.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import add_names, command, parser_of
from benchmarks.interleave import METHOD
from benchmarks.peers import compared
from benchmarks.providers import Contender, Options, Provider, family_best
from benchmarks.results import Results
from benchmarks.shapes import LISTED
from benchmarks.tables import programs
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.generate.cublaslt.eager import torch_mm
from tunegemm.store import Database
from tunegemm.tuning.tuner import Tuner


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.dtypes", __doc__)
    add_names(parser, "dtypes", LISTED["dtypes"])
    parser.add_argument(
        "--shapes", default=",".join(LISTED["shapes"]["dtypes"]), help="MxNxK,... (default: eight)"
    )
    parser.add_argument("--trials", type=int, default=32, help="candidates per product (default: 32)")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds per product")
    parser.add_argument("--db", type=Path, help="tuning database (default: TUNEGEMM_DB or the user's)")
    options = parser.parse_args(arguments)
    pairs = itertools.product(options.dtypes, options.shapes.split(","))
    problems = [Problem.parse(shape, **LISTED["dtypes"][name]) for name, shape in pairs]
    device = find_device(options.device)
    known: dict[str, Provider] = {
        "torch": lambda problem, *_: [Contender(torch_mm(problem))],
        "tunegemm_cute": family_best("cute_sm90"),
    }
    results = Results.of(options.out, device, "dtypes.json", METHOD)
    with (
        Database.open(options.db, create=True) as database,
        Tuner(device, database, families=["cute_sm90"]) as tuner,
    ):
        rows = compared(
            problems, device, [*known], Options(0.0, options.db), options.rounds, tuner,
            trials=options.trials, known=known,
        )  # fmt: skip
        for problem, row in zip(problems, rows, strict=True):
            results.put(row | {"accumulation": problem.accumulation})
    print(programs.dtypes(results.path.parent), f"written: {results.path}", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
