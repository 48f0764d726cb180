"""What every command is made of: an option that takes one value is taken once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from tunegemm.cli.arguments import UsageError
from tunegemm.cli.options import flat


class Command(TyperCommand):
    """A command that refuses an option given twice, of which Click would take the last value in silence.

    Options that may be repeated are lists, and flags are what they are.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for parameter, count in Counter(order).items():
            if parameter.param_type_name == "option" and count > 1 and _takes_one_value(parameter):
                raise UsageError(
                    f"{parameter.opts[0]} is given {count} times and takes one value; give it once"
                )
        return super().parse_args(ctx, args)


def _takes_one_value(option: Any) -> bool:
    return not (option.multiple or option.count or (option.is_flag and not option.secondary_opts))


class App(typer.Typer):
    """An application whose commands are such, and may take groups of options."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **how: Any
    ) -> Callable[..., Any]:
        register = super().command(name, cls=cls or Command, **how)
        return lambda command: register(flat(command))
