"""The command line: arguments and printing only; `tuning`, `report` and `store` compute what it prints.

`app` assembles the commands, one module each; `options` has the shared options, `progress` and `results` the
output of tuning. Imports every room; no room imports it.
"""

from tunegemm.cli.app import app, main

__all__ = ["app", "main"]
