"""Base classes of commands: a single-value option may be given once only, and `--help` has examples."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from tunegemm.cli.arguments import UsageError
from tunegemm.cli.options import flat

#: Two command lines for each command; the text after `#` explains them.
EXAMPLES: dict[str, tuple[str, str]] = {
    "tune": (
        "tunegemm tune --shape 512x6144x4096 --shape 512x28672x4096",
        "tunegemm tune --from shapes.json --budget 10m   # where a program loses most",
    ),
    "record": (
        "tunegemm record -- python train.py --steps 20",
        "tunegemm record --out serve.json -- vllm serve MODEL",
    ),
    "shapes": (
        "tunegemm shapes Llama-3.1-8B/config.json",
        "tunegemm shapes Llama-3.1-8B/config.json --rows 1,2,4,8 --out llama.json",
    ),
    "run": ("tunegemm run -- python train.py", "tunegemm run --env   # for a container or a service"),
    "leaderboard": (
        "tunegemm leaderboard --sort ratio --limit 20",
        "tunegemm leaderboard --shape 512x6144x4096 --dtype bf16",
    ),
    "verify": ("tunegemm verify", "tunegemm verify --predicted --from shapes.json"),
    "pack": (
        "tunegemm pack --out llama.pack --from shapes.json",
        "tunegemm pack --out h200.pack --gpu h200",
    ),
    "load": ("tunegemm load llama.pack", "tunegemm load llama.pack --sha256 DIGEST"),
    "unload": ("tunegemm unload llama", "tunegemm unload --all"),
    "history": ("tunegemm history --shape 512x6144x4096", "tunegemm history --shape 512x6144x4096 --json"),
    "report": (
        "tunegemm report --out report.html",
        "tunegemm report --device replay:h200   # the recorded H200",
    ),
    "space": (
        "tunegemm space --shape 512x6144x4096",
        "tunegemm space --shape 16x4096x4096 --families skinny,triton_tma",
    ),
    "explain": (
        "tunegemm explain --shape 512x6144x4096",
        "tunegemm explain --shape 512x6144x4096 --candidate cute_sm90,tile_m=256",
    ),
    "doctor": ("tunegemm doctor", "tunegemm doctor --json"),
    "db export": ("tunegemm db export --out all.json", "tunegemm db export --records records"),
    "db import": ("tunegemm db import all.json", "tunegemm db import a.json b.json --db team.sqlite"),
    "db merge": (
        "tunegemm db merge a.sqlite b.sqlite --into all.sqlite",
        "tunegemm db merge URL --into mine.sqlite",
    ),
    "db upgrade": ("tunegemm db upgrade old.sqlite", "tunegemm db upgrade a.sqlite b.sqlite"),
    "db layers": ("tunegemm db layers", "TUNEGEMM_DB=team.sqlite tunegemm db layers"),
}


#: Groups of a command's options; all other options come last.
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "tune": {
        "What to tune": (
            "shape", "dtype", "out_dtype", "layout", "alignment", "epilogue", "accumulation", "groups",
            "from_files", "with_backward",
        ),
        "How long": ("effort", "trials", "budget"),
        "Search": (
            "seed", "skews", "families", "kernels", "candidate", "workers", "compiled_only", "energy",
            "sampler", "study",
        ),
        "Where": ("device", "devices", "ray", "db"),
        "Output": ("top", "quiet", "verbose", "as_json"),
    },
}  # fmt: skip
#: What Click calls types and bounds, in words.
_WORDS = {
    "<int range>": "N",
    "<integer>": "N",
    "<text>": "TEXT",
    " <str>": "",
    " <list[str]>": "",
    " <list[Path]>": "",
    "<path>": "FILE",
    "; x>=0": "",
}


def _in_words(text: str) -> str:
    for word, plain in _WORDS.items():
        text = text.replace(word, plain)
    return text


def summary(text: str) -> str:
    """The first paragraph of a command's help, in one line."""
    return " ".join(text.strip().split("\n\n")[0].split())


class Command(TyperCommand):
    """A command that prints each example on one line, and rejects an option given twice; Click would silently
    take the last value.

    Repeatable options are lists; flags may be repeated.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups = GROUPS.get(" ".join(ctx.command_path.split()[1:]), {})
        listed: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *groups, "Options")}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                title = next((title for title, names in groups.items() if param.name in names), "Options")
                title = title if param.param_type_name == "option" else "Arguments"
                listed[title].append((_in_words(record[0]), _in_words(record[1])))
        for title, rows in listed.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        name = " ".join(ctx.command_path.split()[1:])
        if name in EXAMPLES:
            formatter.write("\nExamples:\n")
            formatter.write("".join(f"  {line}\n" for line in EXAMPLES[name]))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for parameter, count in Counter(order).items():
            if parameter.param_type_name == "option" and count > 1 and _takes_one_value(parameter):
                raise UsageError(
                    f"{parameter.opts[0]} takes one value and occurs {count} times; give it once"
                )
        return super().parse_args(ctx, args)


def _takes_one_value(option: Any) -> bool:
    return not (option.multiple or option.count or (option.is_flag and not option.secondary_opts))


class App(typer.Typer):
    """An application of such commands, which may take groups of options."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **how: Any
    ) -> Callable[..., Any]:
        add = super().command

        def register(command: Callable[..., Any]) -> Callable[..., Any]:
            # Click would cut a summary where its line ends.
            short = summary(inspect.getdoc(command) or "")
            return add(name, cls=cls or Command, short_help=short, **how)(flat(command))

        return register
