"""A GPU that is not there: what the driver would say of a part, and times by the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import pytest

from tunegemm.describe import driver
from tunegemm.describe.architectures import ALIASES, PARTS
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Measurement, Outcome
from tunegemm.measure.settings import Job, RaceSettings
from tunegemm.model.rank import predict

#: One part of each architecture but Hopper.
CARDS = ("a100", "rtx3060", "orin", "rtx4060", "b200", "b300", "thor", "rtx5090", "gb10")


class ModelledTimes:
    """In place of the measuring worker: torch.mm takes 1.2 times the best roofline that a kernel could have,
    and NVML says nothing, as on some laptops and in WSL2.
    """

    def __init__(self, device: Device, child: Any = None) -> None:
        self.device, self.seconds = device, dict[str, float]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def discover(self, problem: Problem) -> list[Candidate]:
        return [TORCH_MM]

    def swept(self, problem: Problem) -> None:
        """Every candidate can be measured."""

    def measure(self, problem: Problem, jobs: Sequence[Job], settings: RaceSettings) -> Iterator[Outcome]:
        baseline_us = 1.2 * self.device.roofline_us(problem) + 3
        for job in jobs:
            is_torch = job.candidate == TORCH_MM
            us = baseline_us if is_torch else predict(problem, job.candidate, self.device).total_us
            assert is_torch or (job.artifact is not None and job.artifact.stat().st_size)
            yield Measurement(
                job.candidate, (us,) * 3, (baseline_us,) * 3, 1e-3, 0.01, {"sm_clock_mhz": None}
            )


def plug_in(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """From now on this host has these parts alone, which time as modelled."""
    found = [
        driver.Properties(
            part.device_name, part.capability, part.sm_count, part.l2_bytes, part.memory_bytes, 1_500_000, 0.0
        )
        for part in (PARTS[ALIASES.get(name, name)] for name in names)
    ]
    monkeypatch.setattr("tunegemm.describe.device.torch_version", lambda: ("2.13.0", "13.0"))
    monkeypatch.setattr(driver, "device_count", lambda: len(found))
    monkeypatch.setattr(driver, "properties", found.__getitem__)
    monkeypatch.setattr(driver, "cuda_version", lambda: (13, 0))
    monkeypatch.setattr("tunegemm.tuning.tuner.MeasureWorker", ModelledTimes)
    monkeypatch.setattr("tunegemm.cli.session.begin_to_measure", lambda stack: None)
    monkeypatch.setattr("torch.cuda.init", lambda: None)
