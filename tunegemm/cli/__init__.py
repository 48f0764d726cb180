"""The command line: arguments and printing only; `tuning`, `report` and `store` make what it prints.

`app` assembles the commands, one module each; `options` has what they share, `progress` and `results` print
while tuning. Imports every room; no room imports it.
"""

import sys

from tunegemm.extras import lack

try:
    from tunegemm.cli.app import app, main
except ModuleNotFoundError as error:  # a host that only serves has the command, but not what it needs
    if (lacking := lack(error)) is None:
        raise
    _line = f"tunegemm: the command line: {lacking}"

    def main() -> None:
        print(_line, file=sys.stderr)
        sys.exit(2)


__all__ = ["app", "main"]
