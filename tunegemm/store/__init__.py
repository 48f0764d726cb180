"""The tuning database: what was measured, what failed, and the best record per problem and device.

`Record` is a plain value; `Database` brings SQLAlchemy and therefore loads on first use.

`database` publishes (`publishing`) and reads (`rows`, `frames`, `queries`), by `connection`,
`models` and `migrations`. `codec` alone makes values of what is stored, rows and JSON, and back. `layers`
puts together what dispatch reads: databases by `lookup`, `shipped` records, `packs`; `checks` says whether
what comes from elsewhere can be. `validity` says what a record is worth here, `history` what changed;
`exchange` brings rows from one database to another. Imports `describe`, `generate`, `measure`.
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
