"""What a backend says of its device, and how energy is metered, on stand-ins for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tunegemm.describe.device import find_device
from tunegemm.measure import backend as own
from tunegemm.measure.backend import LONGEST_METERING, CudaBackend, metered_mj


def test_telemetry_is_the_readers() -> None:
    backend = CudaBackend(find_device("model:h200"))
    assert backend.telemetry() == {} and backend.energy_mj() is None
    facts = {"sm_clock_mhz": 1980, "power_w": 500.0, "throttle_reasons": ["sw_power_cap"]}
    backend.reader = SimpleNamespace(read=lambda: facts, energy_mj=lambda: 7.0)  # type: ignore[assignment]
    assert backend.telemetry() == facts
    assert backend.energy_mj() == 7.0


class Meter:
    """A replay takes a millisecond; the meter shows 100 mJ more at each of these milliseconds."""

    def __init__(self, *updates: int) -> None:
        self.now_ms, self.updates, self.replays = 0, updates, 0

    def start(self) -> None:
        self.replays += 1

    def finish(self) -> None:
        self.now_ms += 1

    def energy_mj(self) -> float | None:
        return 100.0 * sum(update <= self.now_ms for update in self.updates) if self.updates else None


@pytest.mark.parametrize(
    ("updates", "energy_ms", "replays", "mj"),
    [
        ((3, 7, 13), 4.0, 7, 100 / (4 * 5)),  # from 3 to 7, exactly as long as asked
        ((3, 7, 13), 4.5, 13, 200 / (10 * 5)),
        ((3, 7, 13), 10.5, 10.5 * LONGEST_METERING, None),
        ((3,), 4.0, 4 * LONGEST_METERING, None),
        ((), 4.0, 1, None),
    ],
)
def test_energy_is_counted_from_one_update_to_another(
    updates: tuple[int, ...], energy_ms: float, replays: float, mj: float | None, monkeypatch: Any
) -> None:
    meter = Meter(*updates)
    monkeypatch.setattr(own, "time", SimpleNamespace(monotonic=lambda: meter.now_ms / 1000))
    found = metered_mj(meter, meter, 5, energy_ms)  # type: ignore[arg-type]
    assert found == (None if mj is None else pytest.approx(mj))
    assert meter.replays == pytest.approx(replays, abs=0.5)
