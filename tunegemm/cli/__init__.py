"""The command line: arguments and printing only; `tuning`, `report` and `store` make what it prints.

`app` assembles the commands, one module each; `options` has what they share, `progress` and `results` print
while tuning. Imports every room; no room imports it.
"""

from tunegemm.cli.app import app, main

__all__ = ["app", "main"]
