"""Counts of how a program's products were served, kept by the processes themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

#: Variables for our own processes, which `tunegemm run` and `record` must not serve or count: in a race
#: torch's product has to run torch's kernel.
UNATTACHED = {"TUNEGEMM_ENABLE": "0", "TUNEGEMM_RECORD_PARTS": ""}


@dataclass(frozen=True)
class Served:
    """Counts of how the products of one or more processes were served."""

    products: int = 0
    """Products that differ in shape or dtypes."""
    served: int = 0
    """How many of them a tuned kernel served at least once."""
    calls: int = 0
    served_calls: int = 0
    saved_s: float = 0.0
    """Seconds saved in the served calls, by the ratios of the records."""
    processes: int = 1
    """Processes that multiplied something."""

    def __str__(self) -> str:
        """One line, such as ``served 12 of 20 products (4,000 of 5,200 calls), saving about 0.31 s``."""
        text = f"served {self.served} of {self.products} products"
        text += f" ({self.served_calls:,} of {self.calls:,} calls)"
        if self.served:
            text += f", saving about {seconds(self.saved_s)}"
        return text + (f", in {self.processes} processes" if self.processes > 1 else "")

    @classmethod
    def together(cls, parts: Iterable[Served]) -> Served:
        """The sum over processes. A product of two processes counts twice, because each serves its own."""
        results = [asdict(part) for part in parts if part.calls]
        return cls(**{name: sum(part[name] for part in results) for name in asdict(cls())})

    @classmethod
    def read(cls, folder: Path) -> Served:
        """The sum over the processes that wrote into a folder; skips unreadable files."""
        parts = []
        for path in sorted(folder.glob("[!.]*.json")):
            with suppress(OSError, ValueError, TypeError):
                parts.append(cls(**json.loads(path.read_text())))
        return cls.together(parts)


def seconds(value: float) -> str:
    """A time in the unit that suits it."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value * 1e6:.1f} us"
