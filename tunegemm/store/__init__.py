"""The tuning database: what was measured, what failed, and the best record per problem and device.

`Record` is a plain value; `Database` brings SQLAlchemy and therefore loads on first use.
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
