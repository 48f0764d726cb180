"""Tables of what users wait for: tuning, calls, other dtypes, whole models, bits at any batch."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.results import geometric_mean
from benchmarks.tables.reading import (
    Columns,
    Data,
    Row,
    clocks_of,
    extents_of,
    groups_of,
    load,
    machine_line,
    markdown_table,
    mean_of,
    not_measured,
    of_file,
    shape_of,
    table_of,
)
from tunegemm.report.text import counted

#: `at_cap` of rows; peers do not say.
_POWER = {"at the cap": True, "below it": False, "": None}


@of_file("tuning_time.json")
def tuning_time(data: Data) -> list[str]:
    """Times of one product's tuning in a separate process: without compiled kernels, and with its kernels."""
    columns: Columns = {
        "M x N x K": shape_of, "power": lambda row: "at the cap" if row["at_cap"] else "below it",
        "cold s": "{cold_s:.1f}", "first measurement s": "{first_s:.1f}", "warm s": "{warm_s:.1f}",
        "but for imports s": "{searched_s:.1f}", "next s": "{next_s:.1f}", "measured": "{measured}",
        "compiled": "{compiled}", "times torch.mm": "{ratio:.3f}",
    }  # fmt: skip
    return [table_of(data["rows"], columns)]


@of_file("tuning_many.json")
def tuning_many(data: Data) -> list[str]:
    """The command's time for the products of several models, and peers' times for one product each."""
    commands, products = [], []
    for mode, rows in groups_of(data["rows"], lambda row: row["mode"]).items():
        item = data[mode] | {"mode": mode}
        if "seconds" in item:
            last = max(row["last_s"] for row in rows if row["done"])
            item["mean"] = f"{item['geometric_mean']:.3f}" if item["geometric_mean"] else "-"
            commands.append(item | {"each": (last - item["first_s"]) / item["done"]})
        for name, at in _POWER.items():
            products += _seconds([mode, name], (row for row in rows if row.get("at_cap") is at))
    columns: Columns = {
        "mode": "{mode}", "s": "{seconds:.0f}", "done": "{done} of {products}",
        "first measurement s": "{first_s:.1f}", "s a product": "{each:.2f}", "compiled": "{compiled}",
        "times torch.mm": "{mean}",
    }  # fmt: skip
    header = ["mode", "power", "products", "median s", "90 % within s"]
    return [table_of(commands, columns), markdown_table(header, products)]


def _seconds(names: list[str], rows: Iterable[Row]) -> list[list[str]]:
    """A line of how many products were timed, and the median and 90th percentile; none without a product."""
    seconds = sorted(row["seconds"] for row in rows if row["seconds"] is not None)
    if not seconds:
        return []
    many = seconds[int(0.9 * (len(seconds) - 1))]
    return [[*names, str(len(seconds)), f"{median(seconds):.1f}", f"{many:.1f}"]]


@of_file("campaign.json")
def campaign(data: Data) -> list[str]:
    """How long a product took where many were tuned in one process."""
    lines = []
    for compiled, steady in itertools.product((False, True), repeat=2):
        rows = (row for row in data["rows"] if (row["compiled_only"], row["steady"]) == (compiled, steady))
        kernels = "compiled before" if compiled else "compiled meanwhile"
        lines += _seconds([kernels, "steady state" if steady else "interleaved"], rows)
    return [markdown_table(["kernels", "final race", "products", "median s", "90 % within s"], lines)]


@of_file("search.json")
def search(data: Data) -> list[str]:
    """By strategy, how far behind the best of a sweep the best of its first candidates is: the median and the
    ninth decile."""
    columns = {"strategy": "{strategy}", "timing": "{timing}", "sweeps": "{sweeps}"}
    columns |= {f"after {n}": f"{{median_{n}:.2%}}/{{ninth_{n}:.2%}}" for n in (16, 32, 64)}
    return [table_of(data["strategies"], columns)]


@of_file("first_use.json")
def first_use(data: Data) -> list[str]:
    """The gains of an installed package with nothing tuned: shipped products, and others."""
    unseen = [row for row in data["rows"] if not row["listed"]]
    groups = {
        "with a shipped record": [row for row in data["rows"] if row["listed"]],
        "without": unseen,
        "without, up to 256 rows": [row for row in unseen if row["m"] <= 256],
        "without, served by prediction": [row for row in unseen if row["predicted"]],
    }
    lines = []
    for name, rows in groups.items():
        if rows:
            served = sum(row["served"] for row in rows)
            worst = f"{min(row['ratio'] for row in rows):.3f}"
            lines.append([name, str(len(rows)), str(served), mean_of(rows), worst, _below(0.99, rows)])
    header = ["products", "timed", "served", "times torch.mm", "worst", "below 0.99"]
    said = ""
    if results := [row for row in unseen if row.get("expected")]:
        said = f"Predicted products: {mean_of(results, 'expected')} expected, {mean_of(results)} measured. "
    first, *others = data["rows"]
    said += f"The process's first product took {first['first_ms']:.0f} ms after the benchmark's imports, any "
    said += f"other first call at most {max(row['first_ms'] for row in others):.0f} ms."
    return [markdown_table(header, lines), said]


def _below(limit: float, rows: Iterable[Row]) -> str:
    """The products whose ratio is lower."""
    return ", ".join(f"{shape_of(row)} {row['ratio']:.3f}" for row in rows if row["ratio"] < limit) or "none"


def experts(results: Path) -> str:
    """`tunegemm.grouped_mm` beside torch's, and gate and up with swiglu, by rows."""
    parts = []
    columns: Columns = {
        "product": lambda item: item[0][0], "rows in all": lambda item: str(item[0][1]),
        "timed": lambda item: str(len(item[1])),
        "older choices": lambda item: str(sum("kernels" in row for row in item[1]) or ""),
        "times torch's": lambda item: mean_of(item[1]),
        "worst": lambda item: f"{min(row['ratio'] for row in item[1]):.3f}",
        "times the best peer's": lambda item: mean_of(item[1], "ratio_to_best_peer"),
        "share of bound": lambda item: mean_of(item[1], "share_of_bound"),
        "most noise": lambda item: f"{max(row['noise'] for row in item[1]):.1%}",
    }  # fmt: skip
    for folder in sorted(results.parent.glob("h*")):
        if (data := load(folder, "experts.json")) is not None:
            groups = groups_of(data["rows"], lambda row: (_kind(row), row["rows"]))
            parts += [machine_line(data["meta"]), table_of(sorted(groups.items()), columns)]
    return "\n\n".join(parts) or not_measured(results, "experts.json")


def _kind(row: Row) -> str:
    named = "n-major" if row.get("layout") == "nn" else row.get("epilogue", "") or "plain"
    return " ".join(word for word in (row["dtype"], named) if word != "bf16")


@of_file("expert_layers.json")
def expert_layers(data: Data) -> list[str]:
    """Layers of transformers' models by `tunegemm.experts` beside transformers' own ways, and vLLM's."""
    columns: Columns = {
        "layer": "{model}", "tokens": "{rows}", "best of transformers": "{best_peer}",
        "its us": lambda row: f"{row['us'][row['best_peer']]:.0f}", "tunegemm's us": "{us[tunegemm]:.0f}",
        "times in a graph": "{ratio:.3f}", "times in eager calls": "{eager_ratio:.3f}",
        "times vLLM's in a graph": lambda row: f"{row['vllm_ratio']:.3f}" if "vllm_ratio" in row else "",
    }  # fmt: skip
    rows = data["rows"]
    least = min(row["ratio"] for row in rows)
    return [table_of(rows, columns), f"Geometric mean in a graph {mean_of(rows)}, lowest {least:.3f}."]


#: A table of all numbers of rows separates those up to this from those above.
FEW_ROWS = 256
#: Relative to torch's speed: no product that a package serves without tuning may be slower.
LEAST = 0.98


@of_file("first_use_kinds.json")
def first_use_kinds(data: Data) -> list[str]:
    """The same of products in fp16, in fp8 and with epilogues, by kind."""
    lines = []
    groups = groups_of(data["rows"], lambda row: (row["dtype"], row["epilogue"], row["m"] > FEW_ROWS))
    for (dtype, epilogue, _), rows in sorted(groups.items()):
        served = [row for row in rows if row["served"]]
        of_served = (
            f"{geometric_mean([row[name] or 1.0 for row in served] or [1.0]):.3f}"
            for name in ("ratio", "expected")
        )
        lines.append([
            f"{dtype} {epilogue}".strip(), f"{min(row['m'] for row in rows)}-{max(row['m'] for row in rows)}",
            str(len(rows)), str(len(served)), mean_of(rows), f"{min(row['ratio'] for row in rows):.3f}",
            *of_served, _below(LEAST, rows),
        ])  # fmt: skip
    header = [
        "kind", "rows", "timed", "served", "times torch", "worst", "of the served", "expected of them",
        f"below {LEAST}",
    ]  # fmt: skip
    rows = data["rows"]
    said = (
        f"{sum(row['served'] for row in rows) / len(rows):.0%} of {len(rows)} products were served. "
        f"Geometric mean of all: {mean_of(rows)} of torch; "
        f"{sum(row['ratio'] < LEAST for row in rows)} below {LEAST}."
    )
    return [markdown_table(header, lines), said]


@of_file("dtypes.json")
def dtypes(data: Data) -> list[str]:
    """Our best kernel beside torch's own call: the geometric mean of each dtype, the least and the most."""
    lines = []
    rows = [row for row in data["rows"] if "ratio" in row["providers"]["tunegemm_cute"]]
    for name, group in groups_of(rows, _accumulated).items():
        ratios = {extents_of(row): row["providers"]["tunegemm_cute"]["ratio"] for row in group}
        least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
        ends = [f"{ratios[shape]:.3f} ({shape})" for shape in (least, most)]
        clocks = ", ".join(dict.fromkeys(map(clocks_of, group)))
        lines.append([name, clocks, f"**{geometric_mean(ratios.values()):.3f}** of {len(group)}", *ends])
    return [markdown_table(["dtype", "clocks", "times torch", "least", "most"], lines)]


def _accumulated(row: Row) -> str:
    """The dtype, and how it differs from a plain product with fast accumulation."""
    words = [row["dtype"], *(row[name] for name in ("accumulation", "epilogue"))]
    return " ".join(word for word in words if word not in ("fast", "none"))


def _by_rows(data: Data, sides: dict[str, str]) -> list[str]:
    """The geometric mean of all layers' ratios to each side, and the least, for each number of rows. Rows of
    earlier kernels name their commit.
    """
    lines = []
    for count, rows in sorted(groups_of(data["rows"], lambda row: row["m"]).items()):
        commits = sorted({row["kernels"] for row in rows if "kernels" in row})
        line = [" ".join([f"{count:,}", *(f"({commit})" for commit in commits)]), str(len(rows))]
        for side in sides:
            ratios = [row[f"ratio_to_{side}"] for row in rows if row.get(f"ratio_to_{side}")]
            line.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "refuses")
        lines.append(line)
    return [markdown_table(["rows", "products", *sides.values()], lines)]


@of_file("blocks.json")
def blocks(data: Data) -> list[str]:
    """Block-scaled fp8 products beside torch's, bf16 ones and DeepGEMM's."""
    return _by_rows(data, {"torch": "times torch", "bf16": "bf16", "deepgemm": "DeepGEMM"})


@of_file("blocks-vllm.json")
def blocks_in_vllm(data: Data) -> list[str]:
    """Block-scaled fp8 products beside vLLM's own."""
    return _by_rows(data, {"cutlass": "times CUTLASS", "triton": "Triton"})


@of_file("block_groups.json")
def block_groups(data: Data) -> list[str]:
    """Groups of rows with block scales beside bf16 ones and DeepGEMM's."""
    return _by_rows(data, {"bf16": "times bf16", "deepgemm": "DeepGEMM"})


@of_file("dispatch.json")
def dispatch(data: Data) -> list[str]:
    """The host's time for a call, beside torch's own."""
    columns: Columns = {
        "call": "{call}", "torch, us": "{torch_us:.2f}", "tunegemm, us": "{tunegemm_us:.2f}",
        "ratio": "{ratio:.3f}",
    }  # fmt: skip
    said = (
        "`import tunegemm` takes {import_ms:.1f} ms beyond torch's import, loading dispatch "
        "{import_and_matmul_ms:.0f} ms. A record takes {bytes_per_record:.0f} bytes. A process's first "
        "product takes {first_call_few_records_ms:.0f} ms with few records and {first_call_ms:.0f} ms with "
        "{records}: {first_call_parts[warm][records_ms]:.0f} ms to read the records, "
        "{first_call_parts[warm][kernel_ms]:.0f} ms to load the kernel, "
        "{first_call_parts[warm][device_ms]:.0f} ms to query the device."
    )
    return [table_of(data["rows"], columns), said.format_map(data)]


def _clients(data: Data) -> list[str]:
    """A model end to end: milliseconds by workload and mode, with and without tunegemm."""
    rows = data["rows"]
    tuned = any(row.get("tuned") for row in rows)
    more: dict[str, Callable[[Row], str]] = {  # columns that some files have
        "tokens": lambda row: f"{row['tokens']}" if "tokens" in row and tuned else "",
        "products tuned and served": lambda row: (
            f"{'yes' if row.get('tuned') else 'no'}, {row['served']}" if "served" in row and tuned else ""
        ),
        "peak memory, times torch's": lambda row: (
            f"{row['tunegemm_peak_mib'] / row['torch_peak_mib']:.3f}" if "torch_peak_mib" in row else ""
        ),
    }
    columns: Columns = {
        "workload, mode": "{workload}, {mode}",
        "layers": lambda row: " of ".join(str(row[name]) for name in ("layers", "model") if name in row),
        "torch, ms": lambda row: f"{row['torch_us'] / 1e3:.3f}",
        "tunegemm, ms": lambda row: f"{row['tunegemm_us'] / 1e3:.3f}", "times torch": "{ratio:.3f}",
        "noise": "{noise:.1%}", **{name: of for name, of in more.items() if any(map(of, rows))},
        "torch's error": "{torch_error:.2e}", "tunegemm's error": "{tunegemm_error:.2e}",
    }  # fmt: skip
    said = f"Slower than torch by more than the noise: {_slower(rows, 'workload', 'mode')}."
    return [table_of(rows, columns), said]


clients = of_file("clients.json")(_clients)
clients_training = of_file("clients_training.json")(_clients)


@of_file("llama.json")
def llama(data: Data) -> list[str]:
    """A model of `transformers` patched and compiled: times torch, and first calls."""
    timed = [row for row in data["rows"] if "ratio" in row]
    lines = []
    for name, rows in groups_of(timed, lambda row: row["workload"]).items():
        ratios = [f"{row['ratio']:.3f}" for row in rows]
        lines.append([name, f"{rows[0]['torch_ms']:.1f}", f"{rows[0]['noise']:.0%}", *ratios])
    table = markdown_table(["workload", "torch, ms", "noise", "patch", "backend"], lines)
    first = [row for row in data["rows"] if "seconds" in row]
    said = []
    for (workload, layers), rows in groups_of(first, lambda row: (row["workload"], row["layers"])).items():
        each = (f"{row['mode']} {row['seconds']:.1f} s ({counted(row['graphs'], 'graph')})" for row in rows)
        said.append(f"{workload.capitalize()}, {layers} layers: {', '.join(each)}.")
    return [table, *([" ".join(said)] if said else [])]


@of_file("layers.json")
def layers(data: Data) -> list[str]:
    """Layers of models by mode and rows: times torch, merged weights and Inductor, and the host's time."""
    tables = []
    for mode in ("graph", "backend", "inductor"):
        rows = [row for row in data["rows"] if row["mode"] == mode and "ratio" in row]
        lines = []
        for size, some in groups_of(rows, lambda row: row["rows"]).items():
            least = min(some, key=lambda row: row["ratio"])
            names = [f"ratio_to_{other}" for other in ("merged", "inductor")]
            others = filter(None, [[row[name] for row in some if name in row] for name in names])
            lines.append([
                size, str(len(some)), mean_of(some), f"{least['ratio']:.3f} ({least['model']})",
                ", ".join(f"{geometric_mean(ratios):.3f}" for ratios in others),
                f"{median(row['noise'] for row in some):.1%}",
            ])  # fmt: skip
            host = [row["host_us"] / row["torch_host_us"] for row in some if "host_us" in row]
            lines[-1] += [f"{geometric_mean(host):.2f}"] if host else []
        more = ["times torch", "lowest", "times merged, Inductor", "noise", "host time / torch's"]
        if lines:
            tables.append(markdown_table([mode, "models", *more][: len(lines[0])], lines))
    eager = groups_of((row for row in data["rows"] if row["mode"] == "patched"), lambda row: row["rows"])
    if eager:
        tables.append("- patched: " + ", ".join(f"{size} {mean_of(eager[size])}" for size in sorted(eager)))
    slower = _slower(data["rows"], "model", "rows", "mode")
    return [*tables, f"- slower than torch by more than the noise: {slower}"]


#: Of vllm.json's rows.
_MODES = {"fastest": "", "batch_invariant": ", batch-invariant"}


@of_file("vllm.json")
def vllm(data: Data) -> list[str]:
    """An engine with and without the plug-in: tokens per second by phase and number of sequences."""
    rows = data["rows"]

    def name_of(row: Row) -> str:
        return f"{row['dtype'].replace('blocks', 'fp8-blocks')}{_MODES[row['mode']]} {row['phase']}"

    columns: Columns = {
        "what": lambda row: name_of(row) + ", gate in the product" * row.get("gates", False),
        "sequences": "{sequences}", "vLLM, tokens/s": "{engine_tokens_per_s:,.0f}",
        "with tunegemm, tokens/s": "{tokens_per_s:,.0f}", "times vLLM": "{ratio:.3f}", "noise": "{noise:.1%}",
    }  # fmt: skip
    means = (
        f"{name} {mean_of(some)}, least {min(row['ratio'] for row in some):.3f}"
        for name, some in groups_of(rows, name_of).items()
    )
    slower = _slower([row | {"name": f"{name_of(row)} of {row['sequences']}"} for row in rows], "name")
    said = (
        f"Geometric means: {'; '.join(means)}. "
        f"Slower than vLLM by more than the noise: {slower}; faster: "
        f"{sum(row['ratio'] - 1 > row['noise'] for row in rows)} of {len(rows)}."
    )
    day = data["meta"]["date"][:10]
    old = (row for row in rows if not row["date"].startswith(day))
    older = dict.fromkeys(f"{name_of(row)} ({row['date'][:10]})" for row in old)
    said += f" Rows of another day: {', '.join(older)}." if older else ""
    for key, result in data.items():
        if key.startswith("logits_"):
            apart = result["largest_difference"]
            what = f"differ by at most {apart:g} of their standard deviation" if apart else "are equal"
            said += f" The logits of {key.removeprefix('logits_')} {what}."
            said += "".join(
                f" Other prompts in the batch {'change no bit' if same else 'change bits'} of {who}'s."
                for who in ("vllm", "tunegemm")
                if (same := result.get(f"bits_same_{who}")) is not None
            )
    return [table_of(rows, columns), said]


#: Others that the policy is compared with, by the ends of fields of a row.
_OTHERS = {"fastest": "`fastest`", "torch": "torch", "triton": "Triton, one tile"}


@of_file("batch_invariance.json")
def batch_invariance(data: Data) -> list[str]:
    """Differing bits, and speeds beside the policy `fastest`, torch and a Triton kernel of one tile."""

    def epilogue(row: Row) -> str:
        return "" if row["epilogue"] == "none" else str(row["epilogue"])

    of_all_m = operator.itemgetter("n", "k", "dtype", "epilogue")
    rows = data["rows"]
    groups = {"all": rows} | groups_of(rows, lambda row: f"{row['dtype']} {epilogue(row)}".rstrip())
    groups |= groups_of(rows, lambda row: f"M = {row['m']}")
    lines = []
    for name, group in groups.items():
        differing = {of_all_m(row): row["differing"] for row in group}
        cells = [name, str(len(group)), str(sum(differing.values()))]
        for other in (f"ratio_to_{other}" for other in _OTHERS):
            results = [row for row in group if row.get(other)]
            if not results:
                cells += ["", ""]
                continue
            worst = min(results, key=lambda row: row[other])
            where = extents_of(worst) if epilogue(worst) in name else f"{extents_of(worst)} {epilogue(worst)}"
            cells += [mean_of(results, other), f"{worst[other]:.3f} ({where})"]
        lines.append(cells)
    header = ["products", "timed", "M with other bits"]
    for other in _OTHERS.values():
        header += [f"to {other}", "worst"]
    theirs = {
        of_all_m(row): row["triton_differing"] for row in rows if row.get("triton_differing") is not None
    }
    said = "The Triton kernel is not in this file."
    if theirs:
        unlike = sum(map(bool, theirs.values()))
        said = f"{unlike} of the Triton kernel's {len(theirs)} products have rows with other bits."
    return [markdown_table(header, lines), said]


def _slower(rows: Sequence[Row], *names: str) -> str:
    """The rows that are slower than torch by more than their noise, by the fields that name them."""
    results = [
        f"{' '.join(str(row[name]) for name in names)} ({row['ratio']:.3f})"
        for row in rows
        if "ratio" in row and 1 - row["ratio"] > row["noise"]
    ]
    return ", ".join(results) or "none"
