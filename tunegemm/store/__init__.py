"""The tuning database: measurements, failures, and the best record per problem and device.

`Record` is a plain value; `Database` needs SQLAlchemy and therefore loads on first use.

`database` publishes (`publishing`) and reads (`rows`, `frames`, `queries`) through `connection`, `models` and
`migrations`. `codec` alone converts between values, rows and JSON. `layers` combines the sources of dispatch:
databases (`lookup`), `shipped` records and `packs`; `checks` validates records from elsewhere. `validity`
grades a record for this machine, `history` compares records, `exchange` moves rows between databases. Imports
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
