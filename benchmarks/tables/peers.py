"""Tables of products beside a user's alternatives, and the products on which tunegemm loses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks import shapes
from benchmarks.results import geometric_mean
from benchmarks.tables.reading import BASELINE, Data, Row, markdown_table, of_file, ratios, shape_of

#: Columns of the tables of providers, beside torch.mm.
MAIN = ("cublaslt", "quack", "inductor", "tunegemm_cute", "tunegemm")
ODD = ("cublaslt", "inductor", "cute_sm80", "tunegemm")
#: Columns of the README's table.
_SUMMED = ("cublaslt", "quack", "inductor", "tunegemm")
#: What a user could pick instead.
PEERS = (BASELINE, "cublaslt", "quack", "inductor")


@of_file("peers.json")
def peers(data: Data) -> list[str]:
    """The providers over all shapes but the odd ones, their geometric means, and tunegemm's losses."""
    rows = even_rows(data["rows"])
    return [*providers(rows, MAIN), missing_shapes(rows)]


@of_file("peers.json", machine=False)
def peers_odd(data: Data) -> list[str]:
    """The same over the odd shapes."""
    odd = odd_shapes()
    rows = [row for row in data["rows"] if shape_of(row) in odd]
    results = [ratios(row) for row in rows]
    best = max((result.get("inductor", 0) for result in results), default=0)
    ours = geometric_mean(result["tunegemm"] for result in results if "tunegemm" in result)
    said = (
        f"Inductor is up to {best:.1f} times as fast as `torch.mm`, `tunegemm` {ours:.2f} times on average."
    )
    return [*providers(rows, ODD), said]


@of_file("peers.json", machine=False)
def summary(data: Data) -> list[str]:
    """A few products and the geometric means over all of them, for the README."""
    result = {shape_of(row): ratios(row) for row in even_rows(data["rows"])}
    names = [name for name in _SUMMED if any(name in each for each in result.values())]
    lines = [
        [shape, *(f"{result[shape][n]:.2f}" if n in result[shape] else "" for n in names)]
        for shape in shapes.LISTED["shapes"]["summary"] if shape in result
    ]  # fmt: skip
    means = ["*geometric mean*", *(_mean(result.values(), name) for name in names)]
    own = {shape: item["tunegemm"] for shape, item in result.items() if "tunegemm" in item}
    slower = sorted((ratio, shape) for shape, ratio in own.items() if ratio < 1)
    losses = ", ".join(f"{shape} {ratio:.3f}" for ratio, shape in slower) or "none"
    meta = data.get("meta", {})
    return [
        f"{meta.get('gpu', '')}, {meta.get('date', '')[:10]}, bf16, all tuned beforehand: speed relative to "
        "`torch.mm` in one race per product, in steady state at the power cap. In brackets: the number of "
        "products measured.",
        markdown_table(["M x N x K", *names], [*lines, means]),
        f"Of {len(own)} products tunegemm loses to `torch.mm` on: {losses}.",
    ]


def _mean(results: Iterable[Mapping[str, float]], name: str, usual: int = 0) -> str:
    """A provider's geometric mean, and behind it of how many ratios, if these are not as many as usual."""
    values = [each[name] for each in results if name in each]
    return f"{geometric_mean(values):.3f}" + (f" ({len(values)})" if len(values) != usual else "")


def even_rows(rows: list[Row]) -> list[Row]:
    """The rows of products that TMA can read: all but those of the group `odd`."""
    odd = odd_shapes()
    return [row for row in rows if shape_of(row) not in odd]


def odd_shapes() -> set[str]:
    """The shapes of the group `odd`."""
    return {problem.shape for problem in shapes.select(["odd"])}


def missing_shapes(rows: list[Row]) -> str:
    """Which of the benchmarks' shapes have no row."""
    result = {shape_of(row) for row in rows} | odd_shapes()
    missing = [problem.shape for problem in shapes.select([]) if problem.shape not in result]
    return f"Not timed in this run: {', '.join(missing)}." if missing else ""


def providers(rows: list[Row], columns: Sequence[str]) -> list[str]:
    """The paragraphs on some rows of peers.json."""
    all_ratios = [ratios(row) for row in rows]
    names = [name for name in columns if any(name in each for each in all_ratios)]
    # At the power cap tunegemm has an interleaved ratio, too.
    ours = [row["providers"].get("tunegemm", {}) for row in rows]
    at_cap = [timed for timed in ours if "ratio_shared" in timed]
    lines = []
    for row, result, timed in zip(rows, all_ratios, ours, strict=True):
        us = row["providers"][BASELINE]["median_us"]
        flops = 2 * row["m"] * row["n"] * row["k"] * row.get("batch", 1)
        best = max(result[name] for name in (BASELINE, *names) if name in result)
        cells = [f"{us:.1f} us, {flops / us * 1e-6:.0f}"]
        for name in names:
            ratio = f"{result[name]:.3f}" if name in result else ""
            cells.append(f"**{ratio}**" if ratio and result[name] == best else ratio)
        if at_cap:
            cells.append(f"{timed['ratio_shared']:.3f}" if "ratio_shared" in timed else "")
        lines.append([shape_of(row), *cells])
    means = [_mean(all_ratios, name, len(rows)) for name in names]
    rivals = [
        each["tunegemm"] / max(each[name] for name in PEERS if name in each)
        for each in all_ratios if "tunegemm" in each
    ]  # fmt: skip
    said = ""
    if rivals:
        said = f"`tunegemm` reaches {geometric_mean(rivals):.3f} of the best library in each interleave."
    header = ["M x N x K", "torch.mm, TFLOP/s", *names]
    explained = (
        "Speed relative to `torch.mm` in the same interleave: above 1 is faster, bold is best. A mean over "
        "fewer shapes has their number in brackets."
    )
    if at_cap:
        header.append("tunegemm, interleaved")
        own, shared = (geometric_mean(timed[name] for timed in at_cap) for name in ("ratio", "ratio_shared"))
        means.append(f"{shared:.3f} ({len(at_cap)})")
        said += (
            f" Over the {len(at_cap)} shapes at the power cap it reaches {own:.3f} of `torch.mm`, "
            f"interleaved {shared:.3f}."
        )
        explained += (
            " At the power cap these are steady-state ratios; the last column has the interleaved ones, at "
            "one shared clock."
        )
    table = markdown_table(header, [*lines, ["*geometric mean*", "", *means]])
    return [explained, table, said, losses(rows, all_ratios)]


def losses(rows: list[Row], all_ratios: list[dict[str, float]]) -> str:
    """Where tunegemm is slower than torch.mm, than a peer, or than one of its own families, by how much."""
    slower, beaten, tied, missed = (list[str]() for _ in range(4))
    for row, result in zip(rows, all_ratios, strict=True):
        if (own := result.get("tunegemm")) is None:
            continue
        shape, limit = shape_of(row), own * (1 + row.get("noise", 0.0))
        if own < 1:
            slower.append(f"{shape} ({own:.4f})")
        rival = max((name for name in PEERS if name in result), key=result.__getitem__)
        if result[rival] > own:
            where = beaten if result[rival] > limit else tied
            where.append(f"{shape} ({rival}: {100 * (result[rival] / own - 1):.1f} % faster)")
        families = [name for name in result if name not in (*PEERS, "tunegemm")]
        family = max(families, key=result.__getitem__, default="")
        if family and result[family] > limit:
            missed.append(f"{shape} ({family}: {100 * (result[family] / own - 1):.1f} %)")
    if not any("tunegemm" in each for each in all_ratios):
        return ""
    parts = ["No peer is faster than tunegemm by more than the noise of its race."]
    if beaten:
        parts = [f"Slower than `torch.mm`: {', '.join(slower)}."] if slower else []
        parts.append(f"Where tunegemm loses: {', '.join(beaten)}.")
    if tied:
        parts.append(
            f"Within the noise a peer is ahead on {len(tied)} of {len(rows)} shapes: {', '.join(tied)}."
        )
    if missed:
        parts.append(
            "One of its own families beat the record in this interleave by more than the noise: "
            f"{', '.join(missed)}."
        )
    return "\n\n".join(parts)
