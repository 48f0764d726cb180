"""The command line: arguments and printing only; `tuning`, `report` and `store` compute what it prints.

`app` assembles the commands, one module each; `options` has the shared options, `progress` and `results` the
output of tuning. Imports every room; no room imports it.
"""

import sys

from tunegemm.extras import lack

try:
    from tunegemm.cli.app import app, main
except ModuleNotFoundError as error:  # of `pip install --no-deps`; `app` reports what only some commands need
    if (lacking := lack(error)) is None:
        raise
    print(f"tunegemm: {lacking}", file=sys.stderr)
    sys.exit(2)

__all__ = ["app", "main"]
