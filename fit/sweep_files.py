"""Writes the files of recorded sweeps, which `tunegemm.measure.replay` reads."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DeviceError
from tunegemm.files import replacing
from tunegemm.generate.families import kernel_source_hash
from tunegemm.measure.outcome import Failure, Outcome
from tunegemm.measure.replay import FORMAT, read_device, stem, sweep_path


def write_sweep(
    root: Path, name: str, device: Device, problem: Problem, outcomes: Iterable[Outcome], *,
    recorded_at: datetime, command: str,
) -> Path:  # fmt: skip
    """Record one problem's outcomes under ``root/name/`` and return the file.

    The same input gives the same bytes. The last of several outcomes of one candidate stays. Samples are kept
    to 0.001 us. Raises DeviceError if the device cannot measure, or if the folder belongs to another GPU.
    """
    if not device.is_real:
        raise DeviceError(f"{device.spec} measures nothing: record sweeps on a cuda device")
    if recorded_at.tzinfo is None:
        raise ValueError(f"recorded_at {recorded_at} has no time zone")
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    _write_device(folder / "device.json", device)
    by_candidate = {outcome.candidate: outcome for outcome in outcomes}
    families = {candidate.family for candidate in by_candidate}
    data = {
        "format": FORMAT,
        "problem": stem(problem),
        "recorded_at": recorded_at.isoformat(timespec="seconds"),
        "command": command,
        "fingerprint": device.fingerprint.asdict(),
        "kernel_sources": {name: kernel_source_hash(name) for name in sorted(families)},
    } | _to_columns(list(by_candidate.values()))
    path = sweep_path(folder, problem)
    text = json.dumps(data, separators=(",", ":"), sort_keys=True, allow_nan=False)
    _replace(path, lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    return path


def _write_device(path: Path, device: Device) -> None:
    facts: dict[str, Any] = {
        "name": device.name,
        "capability": list(device.architecture.capability),
        "sm_count": device.sm_count,
        "l2_bytes": device.l2_bytes,
        "memory_bytes": device.memory_bytes,
        "peak_tflops": device.peak_tflops,
        "bandwidth_gbps": device.bandwidth_gbps,
        "fingerprint": device.fingerprint.asdict(),
    }
    if path.exists():
        old = read_device(path, device.spec)
        if (old.name, old.architecture, old.sm_count) != (device.name, device.architecture, device.sm_count):
            raise DeviceError(f"{path} describes {old.name}, not {device.name}; record under another name")
    _replace(path, (json.dumps(facts, indent=2) + "\n").encode())


def _replace(path: Path, content: bytes) -> None:
    with replacing(path) as part:
        part.write_bytes(content)


def _to_columns(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    families: dict[str, dict[str, Any]] = {}
    interleaves: dict[str, int] = {}
    measured: dict[str, list[Any]] = {
        key: [] for key in ("row", "interleave", "samples_us", "relative_error", "evidence")
    }
    failed: dict[str, list[Any]] = {key: [] for key in ("row", "stage", "reason")}
    # Rows are numbered family by family, so that the candidates' columns need no row numbers of their own.
    ordered = sorted(outcomes, key=lambda outcome: (outcome.candidate.family, _names(outcome.candidate)))
    for row, outcome in enumerate(ordered):
        candidate = outcome.candidate
        key = json.dumps([candidate.family, *_names(candidate)])
        columns = families.setdefault(key, {"count": 0, "compile": {}, "launch": {}})
        columns["count"] += 1
        for table, pairs in (("compile", candidate.compile_params), ("launch", candidate.launch_params)):
            for parameter, value in pairs:
                columns[table].setdefault(parameter, []).append(value)
        if isinstance(outcome, Failure):
            for column, value in (("row", row), ("stage", outcome.stage), ("reason", outcome.reason)):
                failed[column].append(value)
            continue
        shared = json.dumps(
            {"baseline_us": _rounded(outcome.baseline_us), "noise": outcome.noise}, sort_keys=True
        )
        measured["row"].append(row)
        measured["interleave"].append(interleaves.setdefault(shared, len(interleaves)))
        measured["samples_us"].append(_rounded(outcome.samples_us))
        measured["relative_error"].append(outcome.relative_error)
        measured["evidence"].append(outcome.telemetry)
    return {
        "candidates": [{"family": json.loads(key)[0], **columns} for key, columns in families.items()],
        "interleaves": [json.loads(shared) for shared in interleaves],
        "measured": measured,
        "failed": failed,
    }


def _names(candidate: Candidate) -> tuple[list[str], list[str]]:
    """Parameter names per table: library candidates of one family need not have the same."""
    return [name for name, _ in candidate.compile_params], [name for name, _ in candidate.launch_params]


def _rounded(samples: Iterable[float]) -> list[float]:
    return [round(sample, 3) for sample in samples]
