"""Rows of `exchange` as files: JSON, CSV, Parquet, Kernel Tuner's T4 and vLLM's configuration files.

The first three hold every row. T4 and vLLM's hold what those programs read; the rest goes into fields
of our own that they ignore, so that a file made here can be imported here, too.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.errors import DatabaseError
from tunegemm.files import replacing
from tunegemm.store.exchange import Row

FORMAT = "tunegemm-database/1"
T4_VERSION = "1.0.0"

_PROBLEM = tuple(Problem.__dataclass_fields__)
_FINGERPRINT = tuple(Fingerprint.__dataclass_fields__)
_INTEGERS = ("m", "n", "k", "batch", "alignment", "sm_count", "sm_budget")
_LISTS = ("samples_us", "baseline_us")
_OBJECTS = ("candidate", "evidence", "resources")
_NUMBERS = ("relative_error", "noise")
_TEXTS = ("label", "kernel_source", "origin", "policy", "measured_at", "stage", "reason")
_CHOICE = ("measurement", "settled", "chosen_at")
#: For the reader of a table only; computed anew from the samples on import.
_DERIVED = ("median_us", "baseline_median_us", "ratio")
COLUMNS = (
    "kind", "id", *_PROBLEM, *_FINGERPRINT, *_TEXTS, *_DERIVED, *_NUMBERS, *_LISTS, *_OBJECTS, *_CHOICE,
)  # fmt: skip

#: What T4 calls a failure at each of our stages.
_INVALIDITY = {
    "compile": "compile", "load": "runtime", "launch": "runtime", "wrong": "correctness",
    "timeout": "timeout", "crash": "runtime",
}  # fmt: skip


class Format(StrEnum):
    """Names of file formats, as on the command line."""

    json = "json"
    csv = "csv"
    parquet = "parquet"
    t4 = "t4"
    vllm = "vllm"


def write(rows: Iterable[Row], path: Path, format: Format) -> list[Path]:
    """Write rows to a file, or for `vllm` to a folder with one file per N, K and device. Returns the files.

    Raises DatabaseError when it cannot be written, and for T4, which describes one problem and device,
    when the rows are of several.
    """
    try:
        if format is Format.vllm:
            return _write_vllm(rows, path)
        writers: dict[Format, Callable[[Iterable[Row], Path], None]] = {
            Format.json: _write_json, Format.csv: _write_csv, Format.parquet: _write_parquet,
            Format.t4: _write_t4,
        }  # fmt: skip
        with replacing(path) as part:
            writers[format](rows, part)
    except OSError as error:
        raise DatabaseError(f"{path}: {error.strerror}; choose another --out") from None
    return [path]


def read(path: Path, format: Format) -> Iterator[Row]:
    """The rows of a file, unchecked. Raises DatabaseError for a file that is not of that format."""
    readers: dict[Format, Callable[[Path], Iterator[Row]]] = {
        Format.json: _read_json, Format.csv: _read_csv, Format.parquet: _read_parquet,
        Format.t4: _read_t4, Format.vllm: _read_vllm,
    }  # fmt: skip
    try:
        yield from readers[format](path)
    except OSError as error:
        raise DatabaseError(f"{path}: {error.strerror}; give a file that can be read") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DatabaseError(f"{path}: not a {format} export ({reason}); check --format") from None


def _write_json(rows: Iterable[Row], path: Path) -> None:
    with path.open("w") as file:
        file.write(f'{{"format": "{FORMAT}", "rows": [')
        for number, row in enumerate(rows):
            file.write(("," if number else "") + "\n" + json.dumps(row, sort_keys=True, allow_nan=False))
        file.write("\n]}\n")


def _read_json(path: Path) -> Iterator[Row]:
    data = json.loads(path.read_text())
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}, not {FORMAT}")
    yield from data["rows"]


def _write_csv(rows: Iterable[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows:
            flat = _flat(row)
            for name in (*_LISTS, *_DERIVED, *_NUMBERS, "settled"):
                if flat.get(name) is not None:
                    flat[name] = json.dumps(flat[name])
            writer.writerow(flat)


def _read_csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(1 << 24)
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if not reader.fieldnames or "kind" not in reader.fieldnames:
            raise ValueError("it has no column `kind`")
        for texts in reader:
            flat: Row = {name: text for name, text in texts.items() if name in COLUMNS and text != ""}
            for name in (*_INTEGERS, *_LISTS, *_NUMBERS, "settled"):
                if name in flat:
                    flat[name] = _from_text(flat[name])
            yield _nested(flat)


def _write_parquet(rows: Iterable[Row], path: Path) -> None:
    pyarrow, parquet = _pyarrow()
    types = dict.fromkeys(COLUMNS, pyarrow.string())
    types |= dict.fromkeys(_INTEGERS, pyarrow.int64())
    types |= dict.fromkeys((*_NUMBERS, *_DERIVED), pyarrow.float64())
    types |= dict.fromkeys(_LISTS, pyarrow.list_(pyarrow.float64())) | {"settled": pyarrow.bool_()}
    schema = pyarrow.schema(list(types.items()))
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        batch: list[Row] = []
        for row in rows:
            batch.append(_flat(row))
            if len(batch) == 10_000:
                writer.write_table(pyarrow.Table.from_pylist(batch, schema))
                batch = []
        writer.write_table(pyarrow.Table.from_pylist(batch, schema))


def _read_parquet(path: Path) -> Iterator[Row]:
    _, parquet = _pyarrow()
    with path.open("rb") as file:
        for batch in parquet.ParquetFile(file).iter_batches():
            for flat in batch.to_pylist():
                yield _nested({name: value for name, value in flat.items() if value is not None})


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise DatabaseError("Parquet needs pyarrow: pip install 'tunegemm[parquet]'") from None
    return pyarrow, parquet


def _flat(row: Row) -> Row:
    """A row as one line of a table: objects as JSON text, the figures that people look for computed."""
    flat = {name: value for name, value in row.items() if name in COLUMNS}
    flat |= row.get("problem") or {}
    flat |= row.get("fingerprint") or {}
    for name in _OBJECTS:
        if flat.get(name) is not None:
            flat[name] = json.dumps(flat[name], sort_keys=True, separators=(",", ":"))
    if row["kind"] == "measurement":
        samples, baseline = row["samples_us"], row["baseline_us"]
        flat["median_us"], flat["baseline_median_us"] = map(statistics.median, (samples, baseline))
        flat["ratio"] = statistics.median(b / s for b, s in zip(baseline, samples, strict=True))
    return flat


def _nested(flat: Row) -> Row:
    row = {name: value for name, value in flat.items() if name not in (*_PROBLEM, *_FINGERPRINT, *_DERIVED)}
    if row.get("kind") != "choice":
        row["problem"] = {name: flat[name] for name in _PROBLEM if name in flat}
        # A table does not tell an empty text from none; of a device's facts any may be empty.
        row["fingerprint"] = {name: flat.get(name, "") for name in _FINGERPRINT}
    for name in _OBJECTS:
        if name in row:
            row[name] = _from_text(row[name])
    return row


def _from_text(text: Any) -> Any:
    """JSON's value, or the text itself, which the checks will then name."""
    try:
        return json.loads(text)
    except (ValueError, TypeError):
        return text


def _write_t4(rows: Iterable[Row], path: Path) -> None:
    shared: Row = {}
    results = []
    for row in rows:
        if row["kind"] == "choice":
            continue
        of = {name: row[name] for name in ("problem", "fingerprint")}
        if shared and of != shared:
            raise DatabaseError(
                "T4 describes one problem on one device and software, this export has several; "
                "narrow it with --shape, --dtype, --layout and --fingerprint"
            )
        shared = of
        results.append(_t4_result(row))
    if not results:
        raise DatabaseError("nothing to export: no measurement and no failure of that shape")
    metadata = {"timeunit": "milliseconds", "tunegemm": shared}
    document = {"schema_version": T4_VERSION, "metadata": metadata, "results": results}
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def _t4_result(row: Row) -> Row:
    candidate = row["candidate"]
    correct = row["kind"] == "measurement"
    times: Row = {"runtimes": [sample / 1e3 for sample in row["samples_us"]] if correct else []}
    resources = row.get("resources") or {}
    if resources.get("compile_seconds") is not None:
        times["compilation_time"] = 1e3 * resources["compile_seconds"]
    measurements = []
    if correct:
        milliseconds = [sample / 1e3 for sample in row["baseline_us"]]
        measurements = [
            {"name": "time", "value": statistics.median(times["runtimes"]), "unit": "ms"},
            {"name": "torch_mm_time", "value": statistics.median(milliseconds), "unit": "ms"},
            {"name": "relative_error", "value": row["relative_error"], "unit": ""},
        ]
    return {
        "timestamp": row["measured_at"],
        "configuration": {"family": candidate["family"], **candidate["compile"], **candidate["launch"]},
        "objectives": ["time"],
        "times": times,
        "invalidity": "correct" if correct else _INVALIDITY[row["stage"]],
        "correctness": 1 if correct else 0,
        "measurements": measurements,
        "tunegemm": {name: value for name, value in row.items() if name not in ("problem", "fingerprint")},
    }


def _read_t4(path: Path) -> Iterator[Row]:
    data = json.loads(path.read_text())
    shared = data.get("metadata", {}).get("tunegemm")
    for result in data["results"]:
        if shared is None or "tunegemm" not in result:
            # T4 names neither the operands nor the device: what another tuner measured cannot be placed.
            yield {"kind": "a result of another tuner, without problem, device and baseline"}
        else:
            yield {**result["tunegemm"], **shared}


def _write_vllm(rows: Iterable[Row], folder: Path) -> list[Path]:
    """As in vLLM's tuned configurations: a file per N, K and device, in it the best per M."""
    everything = list(rows)
    records = {row["measurement"] for row in everything if row["kind"] == "choice"}
    files: dict[str, dict[int, Row]] = {}
    for row in everything:
        if row["kind"] != "measurement" or (records and row["id"] not in records):
            continue
        problem, params = row["problem"], {**row["candidate"]["compile"], **row["candidate"]["launch"]}
        if problem["batch"] != 1 or "tile_m" not in params:
            continue  # a library's algorithm has no tile
        layout = Problem(**problem).layout
        device = row["fingerprint"]["device_name"].replace(" ", "_")
        accumulation = problem.get("accumulation", "fast")
        words = (
            [problem["in_dtype"]] + [layout] * (layout != "tn") + [accumulation] * (accumulation != "fast")
        )
        dtype = "_".join(words)
        name = f"N={problem['n']},K={problem['k']},device_name={device},dtype={dtype}.json"
        known = files.setdefault(name, {}).get(problem["m"])
        if known is None or _ratio(row) > _ratio(known["tunegemm"]):
            files[name][problem["m"]] = _vllm_config(params) | {"tunegemm": row}
    if not files:
        raise DatabaseError("nothing to export: no record of a kernel with tiles among those rows")
    folder.mkdir(parents=True, exist_ok=True)
    for name, by_m in files.items():
        text = json.dumps({str(m): config for m, config in sorted(by_m.items())}, indent=4)
        with replacing(folder / name) as part:
            part.write_text(text + "\n")
    return [folder / name for name in sorted(files)]


def _vllm_config(params: Row) -> Row:
    names = {
        "BLOCK_SIZE_M": "tile_m", "BLOCK_SIZE_N": "tile_n", "BLOCK_SIZE_K": "tile_k",
        "GROUP_SIZE_M": "swizzle_size", "num_warps": "num_warps", "num_stages": "stages",
    }  # fmt: skip
    return {theirs: params[ours] for theirs, ours in names.items() if ours in params}


def _ratio(row: Row) -> float:
    return statistics.median(b / s for b, s in zip(row["baseline_us"], row["samples_us"], strict=True))


def _read_vllm(path: Path) -> Iterator[Row]:
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        for config in json.loads(file.read_text()).values():
            # A file of vLLM's own has tiles but no times: there is nothing to store.
            yield config.get("tunegemm", {"kind": "a configuration without times"})
