"""Tables of what users wait for: tuning, calls, other dtypes, whole models, bits at any batch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results import geometric_mean
from benchmarks.tables.reading import (
    Data,
    clocks_of,
    extents_of,
    load,
    machine_line,
    markdown_table,
    not_measured,
    of_file,
    shape_of,
)
from tunegemm.model.grouped import choose

#: `at_cap` of rows; peers do not say.
_POWER = {"at the cap": True, "below it": False, "": None}


@of_file("tuning_time.json")
def tuning_time(data: Data) -> list[str]:
    """Times of one product's tuning in a separate process: without compiled kernels, and with its kernels."""
    lines = []
    for row in data["rows"]:
        seconds = [f"{row[key]:.1f}" for key in ("cold_s", "first_s", "warm_s", "searched_s", "next_s")]
        where = "at the cap" if row["at_cap"] else "below it"
        counts = [str(row[key]) for key in ("measured", "compiled")]
        lines.append([shape_of(row), where, *seconds, *counts, f"{row['ratio']:.3f}"])
    header = [
        "M x N x K", "power", "cold s", "first measurement s", "warm s", "but for imports s", "next s",
        "measured", "compiled", "times torch.mm",
    ]  # fmt: skip
    return [markdown_table(header, lines)]


def _tuned_many(data: Data) -> list[str]:
    """The command's time for the products of several models, and peers' times for one product each."""
    commands, products = [], []
    for mode in dict.fromkeys(row["mode"] for row in data["rows"]):
        item, rows = data[mode], [row for row in data["rows"] if row["mode"] == mode]
        done = f"{item['done']} of {item['products']}"
        mean = f"{item['geometric_mean']:.3f}" if item["geometric_mean"] else "-"
        if "seconds" in item:
            first, compiled = f"{item['first_s']:.1f}", str(item["compiled"])
            last = max(row["last_s"] for row in rows if row["done"])
            each = f"{(last - item['first_s']) / item['done']:.2f}"
            commands.append([mode, f"{item['seconds']:.0f}", done, first, each, compiled, mean])
        groups = {name: [row for row in rows if row.get("at_cap") is at] for name, at in _POWER.items()}
        for name, group in groups.items():
            if seconds := sorted(row["seconds"] for row in group if row["seconds"] is not None):
                middle, many = median(seconds), seconds[int(0.9 * (len(seconds) - 1))]
                products.append([mode, name, str(len(seconds)), f"{middle:.1f}", f"{many:.1f}"])
    return [
        markdown_table(
            ["mode", "s", "done", "first measurement s", "s a product", "compiled", "times torch.mm"],
            commands,
        ),
        markdown_table(["mode", "power", "products", "median s", "90 % within s"], products),
    ]


tuning_many = of_file("tuning_many.json")(_tuned_many)


@of_file("search.json")
def search(data: Data) -> list[str]:
    """By strategy, how far behind the best of a sweep the best of its first candidates is."""
    lines = [
        [
            item["strategy"], item["timing"], str(item["sweeps"]),
            *(_regret(item, count) for count in (16, 32, 64)),
        ]
        for item in data["strategies"]
    ]  # fmt: skip
    header = ["strategy", "timing", "sweeps", "after 16", "after 32", "after 64"]
    return [markdown_table(header, lines)]


#: The explorers after the model's first candidates, by their names in the replay.
_EXPLORERS = {"model": "none: the model's next", "own": "our process", "gp": "`GPSampler`"}


@of_file("../explorers.json", machine=False)
def explorers(data: Data) -> list[str]:
    """By recorded sweeps, the regret after 64 candidates of each explorer and the CPU time of its asks."""
    lines = [
        [
            item["of"], _EXPLORERS[item["strategy"]], str(item["replays"]), f"{item['mean_64']:.2%}",
            f"{item['ninth_64']:.2%}", f"{item['ask_ms']:.0f} ms" if "ask_ms" in item else "",
        ]
        for item in data["strategies"] if item["of"] in ("all", "h100-drawn")
    ]  # fmt: skip
    header = ["sweeps", "explorer", "replays", "mean", "90th percentile", "CPU of a suggestion"]
    return [markdown_table(header, lines)]


def _regret(strategy: Mapping[str, Any], count: int) -> str:
    """Median and ninth decile; a dash where an older run did not go so far."""
    if f"median_{count}" not in strategy:
        return "-"
    return f"{strategy[f'median_{count}']:.2%}/{strategy[f'ninth_{count}']:.2%}"


@of_file("campaign.json")
def campaign(data: Data) -> list[str]:
    """How long a product took where many were tuned in one process."""
    lines = []
    for compiled in (False, True):
        for steady in (False, True):
            seconds = sorted(
                row["seconds"]
                for row in data["rows"]
                if (row["compiled_only"], row["steady"]) == (compiled, steady)
            )
            if seconds:
                kernels = "compiled before" if compiled else "compiled meanwhile"
                race = "steady state" if steady else "interleaved"
                many = seconds[int(0.9 * (len(seconds) - 1))]
                lines.append([kernels, race, str(len(seconds)), f"{median(seconds):.1f}", f"{many:.1f}"])
    header = ["kernels", "final race", "products", "median s", "90 % within s"]
    return [markdown_table(header, lines)]


@of_file("first_use.json")
def first_use(data: Data) -> list[str]:
    """The gains of an installed package with nothing tuned: shipped products, and others."""
    listed = [row for row in data["rows"] if row["listed"]]
    unseen = [row for row in data["rows"] if not row["listed"]]
    groups = {
        "with a shipped record": listed,
        "without": unseen,
        "without, up to 256 rows": [row for row in unseen if row["m"] <= 256],
        "without, served by prediction": [row for row in unseen if row["predicted"]],
    }
    lines = []
    for name, rows in groups.items():
        if results := [row["ratio"] for row in rows]:
            served = sum(row["served"] for row in rows)
            below = ", ".join(f"{shape_of(row)} {row['ratio']:.3f}" for row in rows if row["ratio"] < 0.99)
            mean, worst = f"{geometric_mean(results):.3f}", f"{min(results):.3f}"
            lines.append([name, str(len(rows)), str(served), mean, worst, below or "none"])
    header = ["products", "timed", "served", "times torch.mm", "worst", "below 0.99"]
    said = ""
    if results := [row for row in unseen if row.get("expected")]:
        expected, got = (geometric_mean([row[name] for row in results]) for name in ("expected", "ratio"))
        said = f"Predicted products: {expected:.3f} expected, {got:.3f} measured. "
    first, *others = data["rows"]
    said += f"The process's first product took {first['first_ms']:.0f} ms after the benchmark's imports, any "
    said += f"other first call at most {max(row['first_ms'] for row in others):.0f} ms."
    return [markdown_table(header, lines), said]


def experts(results: Path) -> str:
    """`tunegemm.grouped_mm` beside torch's, and gate and up with swiglu, by rows."""
    parts = []
    for folder in sorted(results.parent.glob("h*")):
        data = load(folder, "experts.json")
        if data is None:
            continue
        groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for row in data["rows"]:
            named = "n-major" if row.get("layout") == "nn" else row.get("epilogue", "") or "plain"
            kind = " ".join(word for word in (row["dtype"], named) if word != "bf16")
            groups.setdefault((kind, row["rows"]), []).append(row)
        lines = []
        for (kind, count), rows in sorted(groups.items()):
            mean, peer, share = (
                f"{geometric_mean([row[name] for row in rows]):.3f}"
                for name in ("ratio", "ratio_to_best_peer", "share_of_bound")
            )
            ratios, noise = [row["ratio"] for row in rows], max(row["noise"] for row in rows)
            lines.append(
                [kind, str(count), str(len(rows)), mean, f"{min(ratios):.3f}", peer, share,
                 f"{noise:.1%}"]
            )  # fmt: skip
        header = [
            "product", "rows in all", "timed", "times torch's", "worst", "times the best peer's",
            "share of bound", "most noise",
        ]  # fmt: skip
        parts += [machine_line(data["meta"]), markdown_table(header, lines)]
    return "\n\n".join(parts) or not_measured(results, "experts.json")


def experts_served(_: Path) -> str:
    """What db/grouped.toml chooses of each kind, at a point of each band of rows a group, K, and GPU."""
    at = {"to 12": 8, "to 64": 32, "to 256": 128, "to 1023": 512, "more": 2048}
    columns = {"NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "other Hoppers"}
    kinds: dict[str, dict[str, Any]] = {
        "bf16": {}, "with swiglu": {"gate": "swiglu"}, "n-major": {"major": "n"}, "fp16": {"dtype": "fp16"},
        "fp8": {"dtype": "fp8_e4m3"},
    }  # fmt: skip
    lines: dict[tuple[str, ...], list[str]] = {}
    for (kind, words), k, gpu in itertools.product(kinds.items(), (2048, 7168), columns):
        counts = {rows: min(32, 16384 // rows) for rows in at.values()}
        results = [choose(count, 4096, k, count * rows, gpu=gpu, **words) for rows, count in counts.items()]
        labels = [each.label.split() if each else ["torch's"] for each in results]
        tiles = [f"{each[0]} drawn" if "drawn" in each else each[0] for each in labels]
        lines.setdefault((kind, "more" if k > 3072 else "to 3072", *tiles), []).append(columns[gpu])
    header = ["product", "K", *(f"rows a group {word}" for word in at), "on"]
    return markdown_table(header, [[*line, " and ".join(gpus)] for line, gpus in lines.items()])


@of_file("expert_layers.json")
def expert_layers(data: Data) -> list[str]:
    """Layers of transformers' models by `tunegemm.experts` beside transformers' own ways, and vLLM's."""
    lines = []
    for row in data["rows"]:
        theirs, ours = row["us"][row["best_peer"]], row["us"]["tunegemm"]
        times = [row["best_peer"], f"{theirs:.0f}", f"{ours:.0f}"]
        ratios = [f"{row[name]:.3f}" for name in ("ratio", "eager_ratio")]
        beside_vllm = f"{row['vllm_ratio']:.3f}" if "vllm_ratio" in row else ""
        lines.append([row["model"], str(row["rows"]), *times, *ratios, beside_vllm])
    header = [
        "layer", "tokens", "best of transformers", "its us", "tunegemm's us", "times in a graph",
        "times in eager calls", "times vLLM's in a graph",
    ]  # fmt: skip
    results = [row["ratio"] for row in data["rows"]]
    mean = f"Geometric mean in a graph {geometric_mean(results):.3f}, lowest {min(results):.3f}."
    return [markdown_table(header, lines), mean]


#: A table of all numbers of rows separates those up to this from those above.
FEW_ROWS = 256
#: Relative to torch's speed: no product that a package serves without tuning may be slower.
LEAST = 0.98


@of_file("first_use_kinds.json")
def first_use_kinds(data: Data) -> list[str]:
    """The same of products in fp16, in fp8 and with epilogues, by kind."""
    lines = []
    groups: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for row in data["rows"]:
        groups.setdefault((row["dtype"], row["epilogue"], row["m"] > FEW_ROWS), []).append(row)
    for (dtype, epilogue, _), rows in sorted(groups.items()):
        ratios = [row["ratio"] for row in rows]
        served = [row for row in rows if row["served"]]
        below = ", ".join(f"{shape_of(row)} {row['ratio']:.3f}" for row in rows if row["ratio"] < LEAST)
        lines.append(
            [
                f"{dtype} {epilogue}".strip(),
                f"{min(row['m'] for row in rows)}-{max(row['m'] for row in rows)}",
                str(len(rows)),
                str(len(served)),
                f"{geometric_mean(ratios):.3f}",
                f"{min(ratios):.3f}",
                f"{geometric_mean([row['ratio'] for row in served] or [1.0]):.3f}",
                f"{geometric_mean([row['expected'] or 1.0 for row in served] or [1.0]):.3f}",
                below or "none",
            ]
        )
    header = [
        "kind", "rows", "timed", "served", "times torch", "worst", "of the served", "expected of them",
        f"below {LEAST}",
    ]  # fmt: skip
    every = [row["ratio"] for row in data["rows"]]
    share = sum(row["served"] for row in data["rows"]) / len(every)
    said = (
        f"{share:.0%} of {len(every)} products were served. Geometric mean of all: "
        f"{geometric_mean(every):.3f} of torch; {sum(each < LEAST for each in every)} below {LEAST}."
    )
    return [markdown_table(header, lines), said]


@of_file("dtypes.json")
def dtypes(data: Data) -> list[str]:
    """Our best kernel beside torch's own call: the geometric mean of each dtype, the least and the most."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in data["rows"]:
        words = [row["dtype"], "" if row["accumulation"] == "fast" else row["accumulation"]]
        words += ["" if row["epilogue"] == "none" else row["epilogue"]]
        groups.setdefault(" ".join(word for word in words if word), []).append(row)
    lines = []
    for name, rows in groups.items():
        rows = [row for row in rows if "ratio" in row["providers"]["tunegemm_cute"]]
        ratios = {extents_of(row): row["providers"]["tunegemm_cute"]["ratio"] for row in rows}
        least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
        ends = [f"{ratios[shape]:.3f} ({shape})" for shape in (least, most)]
        clocks = ", ".join(dict.fromkeys(map(clocks_of, rows)))
        lines.append([name, clocks, f"**{geometric_mean(ratios.values()):.3f}** of {len(rows)}", *ends])
    return [markdown_table(["dtype", "clocks", "times torch", "least", "most"], lines)]


def _by_rows(data: Data, sides: dict[str, str]) -> list[str]:
    """The geometric mean of all layers' ratios to each side, and the least, for each number of rows. Rows of
    earlier kernels name their commit.
    """
    lines = []
    for count in sorted({row["m"] for row in data["rows"]}):
        rows = [row for row in data["rows"] if row["m"] == count]
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


@of_file("block_groups.json")
def block_groups(data: Data) -> list[str]:
    """Groups of rows with block scales beside bf16 ones and DeepGEMM's."""
    return _by_rows(data, {"bf16": "times bf16", "deepgemm": "DeepGEMM"})


@of_file("dispatch.json")
def dispatch(data: Data) -> list[str]:
    """The host's time for a call, beside torch's own."""
    lines = [
        [row["call"], f"{row['torch_us']:.2f}", f"{row['tunegemm_us']:.2f}", f"{row['ratio']:.3f}"]
        for row in data["rows"]
    ]
    table = markdown_table(["call", "torch, us", "tunegemm, us", "ratio"], lines)
    said = (
        f"`import tunegemm` takes {data['import_ms']:.1f} ms beyond torch's import, loading dispatch "
        f"{data['import_and_matmul_ms']:.0f} ms. A record takes {data['bytes_per_record']:.0f} bytes. "
        f"A process's first product takes {data['first_call_few_records_ms']:.0f} ms with few records and "
        f"{data['first_call_ms']:.0f} ms with {data['records']}"
    )
    if (parts := data.get("first_call_parts")) is not None:
        warm, cold = parts["warm"], parts["cold"]
        said += (
            f": {warm['records_ms']:.0f} ms to read the records, {warm['kernel_ms']:.0f} ms to load the "
            f"kernel, {warm['device_ms']:.0f} ms to query the device. With a cold page cache it takes "
            f"{cold['first_call_ms']:.0f} ms, and loading dispatch {cold['import_and_matmul_ms']:.0f} ms"
        )
    said += "."
    return [table, said]


def _clients(data: Data) -> list[str]:
    """A model end to end: milliseconds by workload and mode, with and without tunegemm."""
    rows: Sequence[Mapping[str, Any]] = data["rows"]
    tuned = any(row.get("tuned") for row in rows)
    more = {  # columns that some files have
        "tokens": lambda row: f"{row['tokens']}" if "tokens" in row and tuned else "",
        "products tuned and served": lambda row: (
            f"{'yes' if row.get('tuned') else 'no'}, {row['served']}" if "served" in row and tuned else ""
        ),
        "peak memory, times torch's": lambda row: (
            f"{row['tunegemm_peak_mib'] / row['torch_peak_mib']:.3f}" if "torch_peak_mib" in row else ""
        ),
    }
    shown = {name: of for name, of in more.items() if any(map(of, rows))}
    lines = []
    for row in rows:
        ours = [f"{row['tunegemm_us'] / 1e3:.3f}", f"{row['ratio']:.3f}"]
        errors = [f"{row[name]:.2e}" for name in ("torch_error", "tunegemm_error")]
        layers = f"{row['layers']} of {row['model']}" if "model" in row else str(row["layers"])
        cells = [f"{row['workload']}, {row['mode']}", layers, f"{row['torch_us'] / 1e3:.3f}"]
        others = [of(row) for of in shown.values()]
        lines.append([*cells, *ours, f"{100 * row['noise']:.1f}%", *others, *errors])
    header = [
        "workload, mode", "layers", "torch, ms", "tunegemm, ms", "times torch", "noise", *shown,
        "torch's error", "tunegemm's error",
    ]  # fmt: skip
    said = f"Slower than torch by more than the noise: {_slower(rows, 'workload', 'mode')}."
    return [markdown_table(header, lines), said]


clients = of_file("clients.json")(_clients)
clients_training = of_file("clients_training.json")(_clients)


@of_file("llama.json")
def llama(data: Data) -> list[str]:
    """A model of `transformers` patched and compiled: times torch, and first calls."""
    lines: dict[str, list[str]] = {}
    said = []
    for row in data["rows"]:
        if "ratio" in row:
            cells = [row["workload"], f"{row['torch_ms']:.1f}", f"{100 * row['noise']:.0f}%"]
            lines.setdefault(row["workload"], cells).append(f"{row['ratio']:.3f}")
        else:
            said.append(
                f"{row['seconds']:.1f} s by {row['mode']} ({row['graphs']} graph{'s' * (row['graphs'] > 1)})"
            )
    table = markdown_table(["workload", "torch, ms", "noise", "patch", "backend"], list(lines.values()))
    layers = next((row["layers"] for row in data["rows"] if "seconds" in row), 0)
    return [table, *([f"A first forward of {layers} layers: {', '.join(said)}."] if said else [])]


@of_file("layers.json")
def layers(data: Data) -> list[str]:
    """Layers of models by mode and rows: times torch, times merged weights, and the host's time."""
    tables = []
    for mode in ("graph", "backend", "inductor"):
        rows = [row for row in data["rows"] if row["mode"] == mode and "ratio" in row]
        lines = []
        for size in dict.fromkeys(row["rows"] for row in rows):
            some = [row for row in rows if row["rows"] == size]
            least = min(some, key=lambda row: row["ratio"])
            merged = [row["ratio_to_merged"] for row in some if "ratio_to_merged" in row]
            host = [row["host_us"] / row["torch_host_us"] for row in some if "host_us" in row]
            lines.append([
                size, str(len(some)), f"{geometric_mean([row['ratio'] for row in some]):.3f}",
                f"{least['ratio']:.3f} ({least['model']})", f"{geometric_mean(merged):.3f}" if merged else "",
                f"{geometric_mean(host):.2f}" if host else "",
                f"{100 * median(row['noise'] for row in some):.1f}%",
            ])  # fmt: skip
        if lines:
            header = [mode, "models", "times torch", "lowest", "times merged", "host time / torch's", "noise"]
            tables.append(markdown_table(header, lines))
    slower = _slower(data["rows"], "model", "rows", "mode")
    return [*tables, f"- slower than torch by more than the noise: {slower}"]


#: Of vllm.json's rows.
_MODES = {"fastest": "", "batch_invariant": ", batch-invariant"}


@of_file("vllm.json")
def vllm(data: Data) -> list[str]:
    """An engine with and without the plug-in: tokens per second by phase and number of sequences."""
    lines: list[list[str]] = []
    outcomes: dict[bool, list[str]] = {True: [], False: []}
    ratios: dict[str, list[float]] = {}
    for row in data["rows"]:
        kind = row["dtype"] + _MODES[row["mode"]]
        name = f"{kind} {row['phase']}"
        rates = [f"{row[key]:,.0f}" for key in ("engine_tokens_per_s", "tokens_per_s")]
        share = [f"{row['ratio']:.3f}", f"{100 * row['noise']:.1f}%"]
        shown = name + ", gate in the product" * row.get("gates", False)
        lines.append([shown, str(row["sequences"]), *rates, *share])
        ratios.setdefault(name, []).append(row["ratio"])
        if abs(row["ratio"] - 1) > row["noise"]:
            outcomes[row["ratio"] > 1].append(f"{name} of {row['sequences']} ({row['ratio']:.3f})")
    header = [
        "what", "sequences", "vLLM, tokens/s", "with tunegemm, tokens/s", "times vLLM", "noise",
    ]  # fmt: skip
    means = (f"{name} {geometric_mean(some):.3f}, least {min(some):.3f}" for name, some in ratios.items())
    said = (
        f"Geometric means: {'; '.join(means)}. "
        f"Slower than vLLM by more than the noise: {', '.join(outcomes[False]) or 'none'}; faster: "
        f"{len(outcomes[True])} of {len(data['rows'])}."
    )
    for way, where in ((False, "no product"), (True, "each product")):
        others = [row for row in data.get("other_rows", ()) if row["gates"] is way]
        apart = ", ".join(f"{row['phase']} of {row['sequences']} {row['ratio']:.3f}" for row in others)
        said += f" A run with the gate in {where}: {apart}." if others else ""
    for key, result in data.items():
        if key.startswith("logits_"):
            apart = result["largest_difference"]
            what = f"differ by at most {apart:g} of their standard deviation" if apart else "are the same"
            said += f" Logits of {key.removeprefix('logits_')} {what}."
            said += "".join(
                f" With other prompts beside them {'no bit' if same else 'bits'} of {who}'s "
                f"{'differs' if same else 'differ'}."
                for who in ("vllm", "tunegemm")
                if (same := result.get(f"bits_same_{who}")) is not None
            )
    return [markdown_table(header, lines), said]


#: Others that the policy is compared with, by the ends of fields of a row.
_OTHERS = {"fastest": "`fastest`", "torch": "torch", "triton": "Triton, one tile"}


@of_file("batch_invariance.json")
def batch_invariance(data: Data) -> list[str]:
    """Differing bits, and speeds beside the policy `fastest`, torch and a Triton kernel of one tile."""
    rows = data["rows"]
    groups = {"all": rows}
    groups |= _by(rows, lambda row: " ".join(filter(None, (row["dtype"], _epilogue(row)))))
    groups |= _by(rows, lambda row: f"M = {row['m']}")
    lines = []
    for name, group in groups.items():
        shapes = {(row["n"], row["k"], row["dtype"], row["epilogue"]): row for row in group}
        cells = [name, str(len(group)), str(sum(row["differing"] for row in shapes.values()))]
        for other in _OTHERS:
            results = [row for row in group if row.get(f"ratio_to_{other}")]
            if not results:
                cells += ["", ""]
                continue
            ratios = [row[f"ratio_to_{other}"] for row in results]
            worst = min(results, key=lambda row: row[f"ratio_to_{other}"])
            where = " ".join(
                filter(None, (extents_of(worst), "" if _epilogue(worst) in name else _epilogue(worst)))
            )
            cells += [f"{geometric_mean(ratios):.3f}", f"{min(ratios):.3f} ({where})"]
        lines.append(cells)
    header = ["products", "timed", "M with other bits"]
    for other in _OTHERS.values():
        header += [f"to {other}", "worst"]
    theirs = {
        (row["n"], row["k"], row["dtype"], row["epilogue"]): row["triton_differing"]
        for row in rows
        if row.get("triton_differing") is not None
    }
    said = "The Triton kernel is not in this file."
    if theirs:
        unlike = sum(map(bool, theirs.values()))
        said = f"{unlike} of the Triton kernel's {len(theirs)} products have rows with other bits."
    return [markdown_table(header, lines), said]


def _slower(rows: Sequence[Mapping[str, Any]], *names: str) -> str:
    """The rows that are slower than torch by more than their noise, by the fields that name them."""
    results = [
        f"{' '.join(str(row[name]) for name in names)} ({row['ratio']:.3f})"
        for row in rows
        if "ratio" in row and 1 - row["ratio"] > row["noise"]
    ]
    return ", ".join(results) or "none"


def _epilogue(row: Mapping[str, Any]) -> str:
    return "" if row["epilogue"] == "none" else str(row["epilogue"])


def _by(rows: Sequence[dict[str, Any]], name: Any) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups
