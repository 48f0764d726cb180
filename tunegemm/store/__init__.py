"""The tuning database: measurements, failures, and the best record per problem and device.

`Record` is a plain value; `Database` needs SQLAlchemy and therefore loads on first use.

`database` publishes (`publishing`) and reads (`rows`, `frames`, `queries`) through `connection`, `models` and
`migrations`. `codec` alone converts between values, rows and JSON. `layers` combines what dispatch reads:
databases (`lookup`), `shipped` records, `packs`; `checks` validates what comes from elsewhere. `validity`
says what a record is worth here, `history` what changed; `exchange` moves rows between databases. Imports
`describe`, `generate`, `measure`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunegemm.store.record import Record

if TYPE_CHECKING:
    from tunegemm.store.database import Database

__all__ = ["Database", "Record"]


def __getattr__(name: str) -> Any:
    if name == "Database":
        from tunegemm.store.database import Database

        return Database
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
