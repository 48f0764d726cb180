"""The command line: arguments and printing only; `tuning`, `report` and `database` make what it prints."""

from tunegemm.cli.app import app, main

__all__ = ["app", "main"]
