"""Which layers are timed, in which order, and how choices are drawn from the times. No GPU needed."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experts import ANCHOR, LAYERS, ROWS, SKEWS, order
from benchmarks.experts import drawn as drawn_layers
from fit.expert_choices import BEGIN, END, TABLE, Cell, drawn, held_out, rows_of, text_of
from tunegemm.model.grouped import choose, configs


def test_the_anchors_layers_come_first_and_all_families_are_there() -> None:
    assert LAYERS["deepseek-v3-up"] == (32, 4096, 7168) and LAYERS["deepseek-v3-down"] == (32, 7168, 2048)
    assert [LAYERS[name] for name in ANCHOR[:2]] == [(8, 28672, 4096), (8, 4096, 14336)]
    families = ("mixtral", "qwen3-30b", "qwen3-235b", "deepseek-v3", "gpt-oss", "glm")
    assert all(any(name.startswith(family) for name in LAYERS) for family in families)


def test_each_turn_of_all_layers_has_other_rows_and_skews() -> None:
    layers = [*LAYERS]
    plan = [*order(layers, ROWS, SKEWS)]
    assert len(plan) == len({*plan}) == len(layers) * len(ROWS) * len(SKEWS)
    for turns in (1, 5, 12):
        part = plan[: turns * len(layers)]
        assert set(Counter(name for name, _, _ in part).values()) == {turns}
        counts = Counter(rows for _, rows, _ in part)
        assert max(counts.values()) <= 2 * min(counts[int(rows)] for rows in ROWS) + 3


def test_drawn_layers_are_in_no_list_and_the_same_each_time() -> None:
    found = drawn_layers(30)
    assert len(found) == 30 and found == drawn_layers(30)
    assert not {*found.values()} & {*LAYERS.values(), *drawn_layers(30, seed=1).values()}
    assert all(n % 64 == k % 64 == 0 and groups * n * k * 2 < 1 << 32 for groups, n, k in found.values())


MOST = 2**31 - 1


def row(rows: int, ratios: dict[str, float], groups: int = 32, **more: Any) -> dict[str, Any]:
    us = {"torch": 100.0} | {label: 100 / ratio for label, ratio in ratios.items()}
    return {
        "dtype": "fp8_e4m3",
        "groups": groups,
        "n": 4096,
        "k": 7168,
        "rows": rows,
        "skew": "typical",
        "torch_us": 100.0,
        "us": us,
    } | more


def served(rows: int, label: str, ratio: float, **more: Any) -> dict[str, Any]:
    """A row that times the served kernel alone."""
    return row(rows, {}, us=None, kernel=label, ratio=ratio, **more)


def test_a_cell_has_the_kernel_that_is_best_in_the_mean_and_loses_no_problem() -> None:
    small, large = (configs("fp8")[name].label for name in ("co64x32", "co256x128"))
    rows = [
        row(64, {f"{small} l1": 1.4, f"{small} s4": 1.3, f"{large} s4": 1.8}),
        row(256, {f"{small} l1": 1.2, f"{small} s4": 1.25, f"{large} s4": 0.9}),
        row(4096, {f"{large} s4": 1.01}),
        row(64, {f"{small} l1": 0.4}, groups=8, right=False),
    ]
    found = drawn({"H200": rows})
    assert found[Cell("H200", "fp8", MOST, 12)] == ("co64x32", "l1")
    assert found[Cell("H200", "fp8", MOST, 192)] is None, "it gains too little"
    assert Cell("H200", "fp8", MOST, 64) not in found
    # A kernel that loses one division is out, whatever it gains by another, but for the race's noise.
    uniform = row(256, {f"{small} l1": 1.2, f"{small} s4": 1.25, f"{large} s4": 1.3}, skew="uniform")
    assert drawn({"H200": [*rows, uniform]})[Cell("H200", "fp8", MOST, 12)] == ("co64x32", "s4")
    noisy = [each | {"noise": 0.09} for each in (*rows, uniform)]
    assert drawn({"H200": noisy})[Cell("H200", "fp8", MOST, 12)] == ("co256x128", "s4")
    # So does what is served, in the mean.
    lost = [served(8, small, 0.9), served(16, small, 1.05)]
    assert drawn({"H200": [*rows, *lost[1:]]})[Cell("H200", "fp8", MOST, 12)] == ("co64x32", "l1")
    assert drawn({"H200": [*rows, *lost]})[Cell("H200", "fp8", MOST, 12)] is None


def test_a_gpu_goes_by_anothers_races_up_to_so_many_rows_a_group() -> None:
    label = configs("fp8")["pp128x128"].label
    races = [row(rows, {f"{label} s4": 1.3}, n=n) for rows in (32 * 100, 32 * 512) for n in (4096, 8192)]
    found = drawn({"H200": races})
    assert found == {
        Cell("H200", "fp8", MOST, 192): ("pp128x128", "s4"),
        Cell("H200", "fp8", MOST, 256): ("pp128x128", "s4"),
        Cell("H200", "fp8", MOST, 1023): ("pp128x128", "s4"),
        Cell("", "fp8", MOST, 192): ("pp128x128", "s4"),
        Cell("", "fp8", MOST, 256): ("pp128x128", "s4"),
    }
    # Its own say more, as soon as there are enough.
    for number, choice in ((1, ("pp128x128", "s4")), (2, ("pp128x128", "l1"))):
        own = [row(3200, {f"{label} s4": 1.1, f"{label} l1": 1.2}, n=n) for n in (64, 128)[:number]]
        assert drawn({"H200": races, "": own})[Cell("", "fp8", MOST, 192)] == choice
    lost = {"H200": races, "": [served(3200, label, 0.9)]}
    assert drawn(lost)[Cell("", "fp8", MOST, 192)] is None
    assert drawn(lost)[Cell("H200", "fp8", MOST, 192)] == ("pp128x128", "s4")


def test_a_kernel_that_is_newer_than_races_is_paired_with_the_best_of_those_before() -> None:
    label, newer = (configs("fp8")[name].label for name in ("pp128x128", "co256x128"))
    old = [row(3200, {f"{label} s4": ratio}, n=n) for n, ratio in ((64, 1.1), (128, 1.2), (256, 1.8))]
    new = [
        row(3200, {f"{label} s4": 1.1, f"{newer} s4": ratio}, n=n) for n, ratio in ((64, 1.2), (128, 1.15))
    ]
    cell = Cell("H200", "fp8", MOST, 192)
    assert drawn({"H200": [*old, new[0]]})[cell] == ("pp128x128", "s4"), "it ran once"
    assert drawn({"H200": [*old[2:], *new]})[cell] == ("co256x128", "s4"), (
        "by 7 %, of less than the others' mean"
    )
    slow = [each | {"us": each["us"] | {f"{newer} s4": 100 / 1.05}} for each in new]
    assert drawn({"H200": [*old[2:], *slow]})[cell] == ("pp128x128", "s4")


def test_a_layer_that_is_held_out_goes_by_the_others() -> None:
    label = configs("fp8")["pp128x128"].label
    one = row(3200, {f"{label} s4": 1.1, f"{label} s1": 1.3})
    other = row(3200, {f"{label} s4": 1.2, f"{label} s1": 1.1}, n=64)
    uniform = row(3200, {f"{label} s4": 0.99, f"{label} s1": 1.0}, n=64, skew="uniform")
    found = sorted(held_out({"H200": [one, other, uniform]}))
    cell = Cell("H200", "fp8", MOST, 192)
    assert [(each, least) for each, _, least in found] == [(cell, 1.0), (cell, pytest.approx(1.1))]
    assert found[0][1] == pytest.approx((1.1 * 1.0) ** 0.5)


def test_what_is_drawn_is_a_table(tmp_path: Path) -> None:
    few, some = ("co64x32", "l1"), ("co128x128", "s4")
    found = {
        Cell("H200", "fp8", MOST, 12): few,
        Cell("H200", "fp8", MOST, 64): some,
        Cell("H200", "fp8", MOST, 192): some,
        Cell("H200", "fp8", MOST, 256): some,
        Cell("", "fp8", MOST, 12): few,
        Cell("", "fp8", MOST, 64): few,
        Cell("", "fp8", MOST, 192): None,
        Cell("", "fp8", MOST, 256): None,
        Cell("", "fp8", 3072, 192): some,
        Cell("", "fp8", 3072, 256): some,
    }
    text = "".join(text_of(found))  # type: ignore[arg-type]
    tables = tomllib.loads(text)["choices"]
    assert [
        (each.get("gpu"), each["k"], each["rows_per_group"], each["kernel"]) for each in tables
    ] == [
        ("H200", [3073, MOST], [12, 256], "co128x128"),
        (None, [1, 3072], [64, 256], "co128x128"),
        (None, [3073, MOST], [0, 64], "co64x32"),
        (None, [3073, MOST], [64, 256], ""),
    ]  # fmt: skip
    path = tmp_path / "grouped.toml"
    head, rest = TABLE.read_text().split(BEGIN)
    path.write_text(head + BEGIN + text + "\n" + END + rest.partition(END)[2])
    for gpu, kernel in (("NVIDIA H200", "co128x128"), ("NVIDIA H100 80GB HBM3", "")):
        choice = choose(32, 4096, 4096, 4096, path, gpu=gpu, dtype="fp8_e4m3")
        assert (choice and choice.config) == (configs("fp8")[kernel] if kernel else None)
    choice = choose(32, 4096, 4096, 64, path, gpu="NVIDIA H200", dtype="fp8_e4m3")
    assert choice is not None and choice.config == configs("fp8")["co64x32"] and choice.l2_hint == 1


def test_the_table_is_what_is_drawn_of_the_committed_rows() -> None:
    text = "".join(text_of(drawn(rows_of(TABLE.parent.parent / "benchmarks" / "results"))))
    assert f"{BEGIN}{text}\n{END}" in TABLE.read_text()
