"""Fills the generated blocks of README.md and docs/ from result files and from the command line itself.

A block starts with `<!-- generated: NAME -->` and ends with `<!-- end -->`. Figures come only from files
under benchmarks/results/, as benchmarks/tables tells them; where a file is not there yet, the block says that
nothing is measured yet. The figures in docs/figures that are drawn of the same files are drawn anew as well.

    python docs/generate.py            # rewrite the blocks
    python docs/generate.py --check    # exit 1 when one is out of date
"""

from __future__ import annotations

import argparse
import functools
import itertools
import operator
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.tables.gains import gains
from benchmarks.tables.peers import even_rows, peers, peers_odd, summary
from benchmarks.tables.programs import (
    batch_invariance,
    block_groups,
    blocks,
    blocks_in_vllm,
    campaign,
    clients,
    clients_training,
    dispatch,
    dtypes,
    expert_layers,
    experts,
    first_use,
    first_use_kinds,
    layers,
    llama,
    search,
    tuning_many,
    tuning_time,
    vllm,
)
from benchmarks.tables.reading import DocsError, Row, groups_of, load, markdown_table, mean_of, table_of
from tunegemm.describe.architectures import ALIASES, ARCHITECTURES, PARTS, Architecture
from tunegemm.describe.device import find_device
from tunegemm.generate import families
from tunegemm.model.grouped import choose

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"
#: Beside it, the results of a block or figure that is of an H100; its name has this ending.
H100, OF_H100 = "h100-80gb-hbm3", "-h100"

#: The product of the sample of output: one that a shipped kernel wins by much.
SAMPLE = "128x7168x16384"
#: Help of as many words is repeated at each command that has the option.
_SHORT = 6
#: Values of a parameter that are listed one by one.
_MANY = 3

_BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def documents(root: Path = ROOT) -> list[Path]:
    """The files that may hold generated blocks."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def refresh(text: str, results: Path = RESULTS) -> str:
    """The text with every generated block rendered anew. Raises DocsError for a block that nothing fills."""

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        block = name.removesuffix(OF_H100)
        if block not in BLOCKS:
            raise DocsError(f"no generator for block {name!r}; use one of {', '.join(BLOCKS)}")
        body = BLOCKS[block](results_of(name, results))
        return f"{match[1]}{body.rstrip()}\n{match[4]}"

    if text.count("<!-- generated:") != len(_BLOCK.findall(text)):
        raise DocsError("a generated block has no end mark")
    return _BLOCK.sub(fill, text)


def results_of(name: str, results: Path) -> Path:
    """The folder that a block or figure is of, given the one of an H200."""
    return results.with_name(H100) if name.endswith(OF_H100) else results


def cli(_: Path) -> str:
    """Every command with its options, from the commands themselves."""
    import typer.main

    from tunegemm.cli import app
    from tunegemm.cli.help import EXAMPLES

    group: Any = typer.main.get_command(app)
    commands: dict[str, Any] = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", {})
        commands |= {f"{name} {sub}": found for sub, found in inner.items()} or {name: command}
    parts = []
    shared: dict[tuple[str, str], str] = {}  # those of several commands are described at the first
    for name, command in commands.items():
        rows = []
        known: dict[str, list[str]] = {}
        for option in command.params:
            is_option = option.param_type_name == "option"
            flags = ", ".join(f"`{flag}`" for flag in (option.opts if is_option else [option.metavar]))
            words = (option.help or "").replace("|", "\\|")
            first = shared.setdefault((flags, words), name)
            if first == name or len(words.split()) <= _SHORT:
                rows.append([flags, words])
            else:
                known.setdefault(first, []).append(flags)
        rows += [[", ".join(flags), f"As in `tunegemm {first}`."] for first, flags in known.items()]
        lines = [f"| {flags} | {words} |" for flags, words in rows]
        table = "\n".join(["| option | |", "|---|---|", *lines]) if rows else ""
        examples = "\n".join(["```bash", *EXAMPLES[name], "```"])
        parts.append(f"#### `tunegemm {name}`\n\n{command.help.strip()}\n\n{examples}\n\n{table}".rstrip())
    return "\n\n".join(parts)


def shipped(_: Path) -> str:
    """How many records ship for which GPU."""
    from tunegemm.store.shipped import read_shipped

    counts = Counter(record.fingerprint.device_name for record in read_shipped()[0])
    listed = ", ".join(f"{count:,} of an {name}" for name, count in counts.most_common())
    return f"Records that ship: {listed}."


#: Packages of the table of versions.
_VERSIONS = (
    "python",
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "transformers",
    "vllm",
    "sglang",
)


def versions(results: Path) -> str:
    """Which versions are required, tested and measured, from the files that say so."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["bench"]]
    split = (re.fullmatch(r"([\w.-]+)(.*)", one) for one in listed)
    required = {found[1]: found[2] for found in split if found}
    required["python"] = project["requires-python"]
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for path in sorted((ROOT / "tests" / "data" / "engines").glob("*.txt")):
        engine, version = path.stem.split("-")
        pinned[engine] = f"{pinned[engine]}, {version}" if engine in pinned else version
    measured: dict[str, str] = {}
    for name in ("clients.json", "dispatch.json", "vllm.json"):
        if (data := load(results, name)) is not None:
            measured |= data.get("meta", {}).get("packages", {})
    rows = [
        [name, required.get(name, ""), pinned.get(name, ""), measured.get(name, "")] for name in _VERSIONS
    ]
    return markdown_table(["package", "required", "tested", "measured"], rows)


def sample(_: Path) -> str:
    """What `tunegemm explain` says of a shipped record, on the recorded GPU."""
    with TemporaryDirectory() as home:
        environment = dict(os.environ) | {"TUNEGEMM_DB": "", "XDG_DATA_HOME": home}
        environment |= {
            "PYTHONPATH": str(ROOT),
            "TUNEGEMM_MODE": "",
            "TUNEGEMM_POLICY": "",
            "TUNEGEMM_PACK": "",
        }
        run = subprocess.run(
            [sys.executable, "-m", "tunegemm", "explain", "--shape", SAMPLE, "--device", "replay:h200"],
            capture_output=True, text=True, check=True, env=environment, cwd=home,
        )  # fmt: skip
    return f"```text\n$ tunegemm explain --shape {SAMPLE}\n{run.stdout.rstrip()}\n```"


def labels(_: Path) -> str:
    """Which word of a kernel's label stands for which parameter: one is changed at a time."""
    from tunegemm.describe.space import Candidate

    parts = []
    for name in families.NAMES:
        family = families.get(name)
        if not family.compiled:
            continue
        space = families.load_space(name)
        values = {**space.compile_values, **space.launch_values}

        def label(
            family: Any = family, space: Any = space, values: Any = values, **changed: Any
        ) -> list[str]:
            chosen = {parameter: listed[0] for parameter, listed in values.items()} | changed
            tables = ({n: chosen[n] for n in table} for table in (space.compile_values, space.launch_values))
            return family.label(Candidate.make(family.name, *tables)).split()

        rows = []
        for parameter, listed in values.items():
            found = {value: label(**{parameter: value}) for value in listed}
            # A word may come twice, as `w4` for warps and for the swizzle size: counted, not looked up.
            shared = functools.reduce(operator.and_, map(Counter, found.values()))
            words = {value: " ".join(Counter(mine) - shared) for value, mine in found.items()}
            told = [f"`{word}` {value}" if word else f"nothing for {value}" for value, word in words.items()]
            if len(set(words.values())) < 2:
                told = [f"`{words[listed[0]]}`"]
            if len(told) > _MANY:
                told = [*told[: _MANY - 1], "...", told[-1]]
            rows.append(f"| `{parameter}` | {', '.join(told)} |")
        whole = " ".join(label())
        head = [f"## {name}", "", f"Such as `{whole}`.", "", "| parameter | words, and what they stand for |"]
        parts.append("\n".join([*head, "|---|---|", *rows]))
    return "\n\n".join(parts)


#: Architectures on which the project itself has measured.
_RUN_ON = {(9, 0): "H100, H200"}


def gpus(results: Path) -> str:
    """A row for each architecture."""
    data = load(results.parent, "compiled.json")
    counts = groups_of(data["rows"] if data else (), lambda row: row["architecture"])
    by_proxy = any((folder / "portable.json").exists() for folder in results.parent.iterdir())
    not_measured = "by proxy: the same source on a Hopper" if by_proxy else "no"
    return table_of(ARCHITECTURES.values(), {
        "": lambda each: each.short_name, "generation": lambda each: each.name,
        "shared memory": lambda each: f"{each.smem_bytes_per_block // 1024} KiB",
        "has": lambda each: ", ".join(each.instructions) or "none of these", "families": _families_of,
        "compiled without it": lambda each: _counted(counts.get(each.short_name, [])),
        "run": lambda each: _RUN_ON.get(each.capability, not_measured),
    })  # fmt: skip


def _families_of(architecture: Architecture) -> str:
    part = next(name for name, part in PARTS.items() if part.capability == architecture.capability)
    return ", ".join(f"`{name}`" for name in families.of_device(find_device(part)))


def _counted(rows: list[Row]) -> str:
    counts = "{family} ({version}) {clean} of {kernels}"
    return "; ".join(counts.format_map(row) for row in rows if row["kernels"]) or "not counted"


def parts(_: Path) -> str:
    """A row for each part that `model:NAME` knows."""
    named = {name: [alias for alias, whole in ALIASES.items() if whole == name] for name in PARTS}
    return table_of([{"name": name, "part": part} for name, part in PARTS.items()], {
        "name": lambda row: ", ".join(f"`{item}`" for item in (row["name"], *named[row["name"]])),
        "as CUDA reports it": "{part.device_name}",
        "": lambda row: ARCHITECTURES[row["part"].capability].short_name, "SMs": "{part.sm_count}",
        "bf16, TFLOP/s": "{part.peak_tflops:g}", "GB/s": "{part.bandwidth_gbps:g}",
        "ridge point, FLOP/B":
            lambda row: f"{row['part'].peak_tflops * 1e3 / row['part'].bandwidth_gbps:.0f}",
        "source": "{part.source}", "compared": lambda row: row["part"].compared or "none",
    })  # fmt: skip


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


def experts_even(results: Path) -> str:
    """Products of experts.json whose kernels have tiles of equal size, by gate and skew."""
    rows = (load(results, "experts.json") or {"rows": []})["rows"]
    rows = [row for row in rows if row["rows"] >= 4096 and "kernels" not in row]
    even = [row for row in rows if re.match(r"pp128x1(76|92)\S+ s5 e16 ", row["kernel"])]
    skews = ("uniform", "typical", "hot")
    groups = groups_of(even, lambda row: (row["epilogue"], skews.index(row["skew"])))
    return table_of(sorted(groups.items()), {
        "product": lambda item: item[0][0] or "plain", "rows": lambda item: skews[item[0][1]],
        "timed": lambda item: str(len(item[1])), "times torch's": lambda item: mean_of(item[1]),
        "worst": lambda item: f"{min(row['ratio'] for row in item[1]):.3f}",
        "share of bound": lambda item: mean_of(item[1], "share_of_bound"),
    })  # fmt: skip


#: What fills each block, given the folder of the result files.
BLOCKS: dict[str, Callable[[Path], str]] = {
    "gains": gains,
    "summary": summary,
    "peers": peers,
    "peers-odd": peers_odd,
    "first-use": first_use,
    "first-use-kinds": first_use_kinds,
    "experts": experts,
    "experts-served": experts_served,
    "experts-even": experts_even,
    "expert-layers": expert_layers,
    "tuning-time": tuning_time,
    "tuning-many": tuning_many,
    "search": search,
    "campaign": campaign,
    "clients": clients,
    "clients-training": clients_training,
    "layers": layers,
    "llama": llama,
    "vllm": vllm,
    "dtypes": dtypes,
    "blocks": blocks,
    "blocks-in-vllm": blocks_in_vllm,
    "block-groups": block_groups,
    "dispatch": dispatch,
    "batch-invariance": batch_invariance,
    "gpus": gpus,
    "parts": parts,
    "cli": cli,
    "labels": labels,
    "sample": sample,
    "shipped": shipped,
    "versions": versions,
}


def figures(results: Path = RESULTS) -> dict[Path, bytes]:
    """Content of each figure that is drawn of a result file, by its path."""
    from benchmarks.figures import first_uses, products, render

    found = {}
    for out, name, draw in (
        ("products", "peers.json", products), ("first-use", "first_use.json", first_uses),
        (f"first-use{OF_H100}", "first_use.json", first_uses),
    ):  # fmt: skip
        if (data := load(results_of(out, results), name)) is not None:
            rows = even_rows(data["rows"]) if draw is products else data["rows"]
            found[ROOT / "docs" / "figures" / f"{out}.svg"] = render(draw, rows)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill the generated blocks of the documents.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 when a block is out of date"
    )
    check = parser.parse_args(arguments).check
    stale = []
    for path in documents():
        text = path.read_text()
        try:
            fresh = refresh(text)
        except DocsError as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        if fresh != text:
            stale.append(path)
            if not check:
                path.write_text(fresh)
    for path, content in figures().items():
        if not path.exists() or path.read_bytes() != content:
            stale.append(path)
            if not check:
                path.write_bytes(content)
    for path in stale:
        print(f"{path}: {'out of date; run `make docs`' if check else 'rewritten'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
