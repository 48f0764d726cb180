"""Lists the result of `tunegemm shapes` for each public config in tests/data/model_configs.json.

    python -m benchmarks.configs [vllm|sglang|transformers] > configs.csv

One row per model: its published size in billions of parameters, and whether its config is read whole, in part
or rejected. Then the matrices, each with its number of layers, and the skipped layers, each with the reason.
For a rejected config the message. Needs no GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas

from benchmarks.command import command, parser_of
from tunegemm.describe.workload.engines import shapes
from tunegemm.describe.workload.models import read_model
from tunegemm.errors import WorkloadError

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "data" / "model_configs.json"


def rows(engine: str = "vllm") -> Iterator[dict[str, Any]]:
    """One row per model, in the file's order."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        for name, model in json.loads(CONFIGS.read_text()).items():
            path.write_text(json.dumps(model["config"]))
            row = {"model": name, "billions": model.get("billions"), "read": "refused", "matrices": ""}
            try:
                result = shapes(read_model(str(path)), engine, rows=[16])
            except WorkloadError as error:
                yield row | {"left_out": str(error).replace(str(path), "config.json")}
                continue
            yield row | {
                "read": "in part" if result.refused else "whole",
                "matrices": ", ".join(f"{count} x {matrix}" for matrix, count in result.layers.items()),
                "left_out": "; ".join(f"{layer}: {reason}" for layer, reason in result.refused.items()),
            }


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.configs", __doc__, gpu=False)
    parser.add_argument("engine", nargs="?", default="vllm", choices=("vllm", "sglang", "transformers"))
    pandas.DataFrame(rows(parser.parse_args(arguments).engine)).to_csv(sys.stdout, index=False)


if __name__ == "__main__":
    sys.exit(main())
