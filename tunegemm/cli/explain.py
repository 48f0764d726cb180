"""`tunegemm explain`: a problem's roofline, a candidate's share of it, and what dispatch would launch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tunegemm.cli import options
from tunegemm.cli.space import open_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tunegemm.report.explain import Explanation
    from tunegemm.space import Candidate


def command(
    shape: options.Shapes,
    dtype: options.Dtype = "bf16",
    out_dtype: options.OutDtype = None,
    layout: options.Layout = "tn",
    alignment: options.Alignment = None,
    epilogue: options.EpilogueText = "",
    accumulation: options.Accumulation = "fast",
    candidate: Annotated[
        str | None,
        typer.Option(
            "--candidate",
            metavar="FAMILY[,NAME=VALUE]",
            help="Explain this candidate, not the record's. What is not given is its space's first value.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="SPEC", help="Default: cuda:0, or model:h200 without a GPU."),
    ] = None,
    db: options.OneDatabase = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON, a list over the shapes.")] = False,
) -> None:
    """Show the roofline of a shape, of a tile, and which kernel tunegemm.matmul would use."""
    problems = options.parse_problems(shape, dtype, out_dtype, layout, alignment, epilogue, accumulation)
    from tunegemm.report.explain import explain

    chosen = _candidate(candidate)
    opened = open_device(device)
    found = [explain(problem, opened, candidate=chosen, database=db) for problem in problems]
    if as_json:
        typer.echo(json.dumps([explanation.asdict() for explanation in found], indent=2))
        return
    for explanation in found:
        typer.echo(f"{explanation.problem} on {explanation.device.name}")
        for name, text in _lines(explanation):
            typer.echo(f"  {name:<10}{text}")


def _candidate(text: str | None) -> Candidate | None:
    if text is None:
        return None
    from tunegemm.report.explain import candidate_of

    family, *pairs = text.split(",")
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise options.UsageError(f"candidate {text!r}: {wrong[0]!r} is not NAME=VALUE")
    return candidate_of(family, dict(pair.split("=", 1) for pair in pairs))


def _lines(found: Explanation) -> Iterator[tuple[str, str]]:
    device = found.device
    peak_tflops = device.peak_tflops_of(found.problem)
    yield "work", f"{found.flops / 1e9:.3g} GFLOP, at least {found.bytes / 1e6:.3g} MB of device memory"
    yield (
        "intensity",
        f"{found.flops_per_byte:.0f} FLOP/B, ridge point {found.ridge_flops_per_byte:.0f}: "
        f"{found.bound}-bound ({peak_tflops:g} TFLOP/s, {device.bandwidth_gbps:g} GB/s)",
    )
    yield "roofline", f"{found.roofline_us:.1f} us, {found.roofline_tflops:.0f} TFLOP/s"
    if (tile := found.tile) is not None:
        yield "tile", f"{tile.candidate.family} {tile.label}: {tile.verdict}"
        yield (
            "",
            f"{tile.flops_per_smem_byte:.0f} FLOP per byte of shared memory filled: "
            f"{tile.tile_tflops:.0f} TFLOP/s from device memory alone, without L2",
        )
        yield (
            "",
            f"{tile.tiles} tiles on {device.sm_count} multiprocessors: {tile.waves} waves, "
            f"{tile.wave_efficiency:.0%} busy; {tile.smem_bytes} B of shared memory",
        )
    if (record := found.record) is None:
        yield "dispatch", f"torch: {found.why_not}"
    else:
        yield (
            "dispatch",
            f"{record.label}: {record.median_us:.1f} us, {record.ratio:.3f} x torch.mm, "
            f"{found.percent_of_roofline:.1f} % of the roofline, {found.percent_of_peak:.1f} % of peak"
            + (f"  [{record.layer} layer]" if record.layer else ""),
        )
