"""The command line: arguments and printing only; `tuning`, `report` and `store` make what it prints.

`app` puts the commands together, one module each; `options` has what they share, `progress` and `results`
what is printed while tuning. Imports every room; none imports it.
"""

from tunegemm.cli.app import app, main

__all__ = ["app", "main"]
