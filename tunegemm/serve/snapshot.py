"""What a `Planner` reads, for those who make one: see `choose.snapshot`."""

from tunegemm.choose.snapshot import Snapshot, read_snapshot

__all__ = ["Snapshot", "read_snapshot"]
