"""The command line: arguments and printing only. What it prints is made by `tuning`, `report` and `database`."""

from tunegemm.cli.app import app, main

__all__ = ["app", "main"]
