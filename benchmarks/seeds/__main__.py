"""Measures the tables of all seed documents anew, one result file each.

    python -m benchmarks.seeds               # all of them, some minutes on one GPU
    python -m benchmarks.seeds 001 003

Writes results/GPU/seed-000.json, seed-001.json, seed-003.json and seed-004.json. Seed 002 describes a layer
of the library and has no figures.
"""

from __future__ import annotations

import importlib
import sys

SEEDS = ("000", "001", "003", "004")


def main(arguments: list[str] | None = None) -> int:
    """Runs the named seeds, or all; options go to each of them. The first code that is not 0 ends it."""
    given = sys.argv[1:] if arguments is None else arguments
    wanted = [word for word in given if word in SEEDS] or SEEDS
    options = [word for word in given if word not in SEEDS]
    for seed in wanted:
        sys.argv[:] = [f"benchmarks/seeds/seed_{seed}.py", *options]  # what `meta` records as the command
        if code := importlib.import_module(f"benchmarks.seeds.seed_{seed}").main(options):
            return int(code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
