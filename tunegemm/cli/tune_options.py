"""The options of `tunegemm tune`, in groups: what to try, where, and what to print."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tunegemm.cli import arguments
from tunegemm.cli.options import DatabaseLocation, DeviceSpec, Families, Workers, count_option, option
from tunegemm.measure.settings import SKEWS
from tunegemm.search.efforts import Effort


def _samplers() -> Iterable[str]:
    from tunegemm.search.samplers import NAMES

    return NAMES


@dataclass(frozen=True)
class Search:
    """What is tried, and how much of it."""

    effort: Annotated[
        Effort | None,
        typer.Option(
            help="How much of the space to try. Default: quick. With --from and --budget, full searches "
            "follow while time remains."
        ),
    ] = None
    trials: Annotated[int | None, count_option("Maximum number of candidates per shape.")] = None
    budget: Annotated[
        str | None,
        option(
            "TIME",
            "Time limit per shape, or with --from for all shapes: 90, 90s, 10m or 1h30m. The start of the "
            "GPU does not count.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the search.")] = 0
    skews: Annotated[
        str | None,
        option(
            "NAME,...",
            f"Divisions of the rows into groups for timing: {', '.join(SKEWS)}. Default: all.",
            values=SKEWS,
        ),
    ] = None
    families: Families = None
    kernels: Annotated[
        str | None, option("REGEX", "Only generated kernels whose label matches, such as ^pp128x.")
    ] = None
    candidate: Annotated[
        list[str] | None,
        option(
            "FAMILY[,NAME=VALUE]",
            "Do not search: race this candidate against torch.mm and the record. May be repeated. Missing "
            "parameters come from the record, or else from the model's first choice.",
        ),
    ] = None
    workers: Workers = None
    compiled_only: Annotated[
        bool, typer.Option("--compiled-only", help="Compile nothing: try only cached and shipped kernels.")
    ] = False
    energy: Annotated[
        bool,
        typer.Option(
            "--energy", help="Measure the energy of each finalist, for a second each, for policy min_energy."
        ),
    ] = False
    sampler: Annotated[
        str | None,
        option(
            "NAME",
            "Optuna sampler of the search: roofline (the default), tpe, gp, random, cmaes or "
            "package.module:Class.",
            values=_samplers,
        ),
    ] = None
    study: Annotated[
        str | None,
        option(
            "FILE|URL",
            "Save the Optuna study of each shape for optuna-dashboard, in a journal file or in "
            "sqlite:///FILE.",
        ),
    ] = None

    #: Options without effect if candidates are named.
    OF_SEARCHES = ("effort", "trials", "budget", "families", "kernels", "compiled_only")

    @property
    def budget_s(self) -> float | None:
        """The budget in seconds. Raises UsageError for an invalid duration."""
        return arguments.parse_seconds(self.budget) if self.budget is not None else None

    def tuner_options(self) -> dict[str, Any]:
        """Keyword arguments of `Tuner`. Raises TunegemmError for an invalid option."""
        result: dict[str, Any] = {
            "families": arguments.parse_families(self.families), "workers": self.workers, "seed": self.seed,
            "compiled_only": self.compiled_only, "energy": self.energy,
            "matching": arguments.parse_pattern(self.kernels), "sampler": self.sampler, "study": self.study,
        }  # fmt: skip
        if self.skews is not None:
            from tunegemm.measure.groups import checked_skews

            result["skews"] = checked_skews(self.skews)
        if self.sampler is not None:
            from tunegemm.search.samplers import sampler_of

            sampler_of(self.sampler, seed=0)
        return result


@dataclass(frozen=True)
class Place:
    """Which GPUs measure, and where the results go."""

    device: DeviceSpec = None
    devices: Annotated[
        str | None,
        option(
            "all|0,1",
            "Several GPUs of this host: all, or their numbers. More than one needs the extra `ray`.",
        ),
    ] = None
    ray: Annotated[
        str | None,
        option(
            "[HOST:PORT]",
            "Use all GPUs of the Ray cluster with this head. Without an address: the cluster of RAY_ADDRESS, "
            "or a new one with all GPUs of this host.",
        ),
    ] = None
    db: DatabaseLocation = None

    @property
    def is_named(self) -> bool:
        """Whether the user named a GPU. Raises UsageError if several options do."""
        values = {"--device": self.device, "--devices": self.devices, "--ray": self.ray}
        named = [flag for flag, value in values.items() if value is not None]
        if len(named) > 1:
            raise arguments.UsageError(f"{' and '.join(named)}: give one of them")
        return bool(named)


@dataclass(frozen=True)
class Output:
    """How much to print, and in which form."""

    top: Annotated[int, count_option("Rows to print per shape.")] = 10
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Print a line for each shape and nothing else.")
    ] = False
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Print all rows, and each candidate that failed.")
    ] = False
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON document per shape, one per line, and nothing else."),
    ] = False

    @property
    def is_bare(self) -> bool:
        """Whether to print results only."""
        return self.quiet or self.as_json
