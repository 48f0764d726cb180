"""Which layers are timed, in which order, and how choices are drawn from the times. No GPU needed."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.expert_choices import BEGIN, END, TABLE, Cell, drawn, rows_of, text_of
from benchmarks.experts import ANCHOR, LAYERS, ROWS, SKEWS, order
from benchmarks.experts import drawn as drawn_layers
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
        assert max(counts.values()) <= 2 * min(counts[int(rows)] for rows in ROWS) + 1


def test_drawn_layers_are_in_no_list_and_the_same_each_time() -> None:
    found = drawn_layers(30)
    assert len(found) == 30 and found == drawn_layers(30)
    assert not {*found.values()} & {*LAYERS.values(), *drawn_layers(30, seed=1).values()}
    assert all(n % 64 == k % 64 == 0 and groups * n * k * 2 < 1 << 32 for groups, n, k in found.values())


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


def test_a_cell_has_the_kernel_that_is_best_in_the_mean_and_nowhere_worse() -> None:
    small, large = (configs("fp8")[name].label for name in ("co64x32", "co256x128"))
    rows = [
        row(64, {f"{small} l1": 1.4, f"{small} s4": 1.3, f"{large} s4": 1.5}),
        row(256, {f"{small} l1": 1.2, f"{small} s4": 1.25, f"{large} s4": 0.9}),
        row(4096, {f"{large} s4": 1.01}),
        row(64, {f"{small} l1": 1.4}, groups=8, right=False),
        # What a row of the served kernel alone says.
        row(1024, {}, us=None, kernel=large, ratio=0.95),
        row(8 * 128, {}, groups=8, us=None, kernel=large, ratio=1.1),
    ]
    found = drawn(rows)
    most = 2**31 - 1
    assert found == {
        Cell("fp8", most, most, 12): ("co64x32", "l1"),
        Cell("fp8", most, most, 256): None,
        Cell("fp8", most, most, 64): None,
    }
    assert drawn([*rows, row(8, {}, us=None, kernel=small, ratio=0.9)])[Cell("fp8", most, most, 12)] is None


def test_large_groups_want_uniform_rows_or_a_larger_gain() -> None:
    label, most = configs("fp8")["pp128x128"].label, 2**31 - 1
    timed = [row(32 * 1024, {f"{label} s4": 1.05}), row(32 * 100, {f"{label} s1": 1.1})]
    large, between = Cell("fp8", most, most, 2047), Cell("fp8", most, most, 511)
    found = drawn(timed)
    assert found[large] is None and found[between] is None
    for more in (row(32 * 1024, {f"{label} s4": 1.3}), row(32 * 1024, {f"{label} s4": 1.01}, skew="uniform")):
        assert drawn([*timed, more])[large] == drawn([*timed, more])[between] == ("pp128x128", "s4")
    assert between not in drawn(timed[:1])


def test_a_layer_in_no_list_rules_kernels_out_and_chooses_none() -> None:
    label, cell = configs("fp8")["pp128x128"].label, Cell("fp8", 2**31 - 1, 2**31 - 1, 256)
    listed, other = (
        row(32 * 128, {f"{label} s4": 1.3, f"{label} s1": 1.2}),
        row(32 * 128, {f"{label} s4": 0.9}, n=1088),
    )
    assert cell not in drawn([other])
    assert drawn([listed])[cell] == ("pp128x128", "s4")
    assert drawn([listed, other])[cell] == ("pp128x128", "s1")
    assert drawn([listed, other | {"n": 64}])[cell] == ("pp128x128", "s4")  # of another band


def test_what_is_drawn_is_a_table(tmp_path: Path) -> None:
    most = 2**31 - 1
    found = {
        Cell("fp8", most, most, 12): ("co64x32", "l1"),
        Cell("fp8", most, most, 64): ("co64x32", "l1"),
        Cell("fp8", most, most, 256): None,
        Cell("fp8", 16, most, 12): ("co128x128", "s4"),
    }
    text = "".join(text_of(found))  # type: ignore[arg-type]
    tables = tomllib.loads(text)["choices"]
    assert [(each["groups"], each["rows_per_group"], each["kernel"]) for each in tables] == [
        ([1, 16], [0, 12], "co128x128"), ([17, most], [0, 64], "co64x32"), ([17, most], [64, 256], ""),
    ]  # fmt: skip
    path = tmp_path / "grouped.toml"
    head, rest = TABLE.read_text().split(BEGIN)
    path.write_text(head + BEGIN + text + "\n" + END + rest.partition(END)[2])
    choice = choose(32, 4096, 4096, 1024, path, dtype="fp8_e4m3", every=True)
    assert choice is not None and choice.config == configs("fp8")["co64x32"] and choice.l2_hint == 1
    assert choose(32, 4096, 4096, 4096, path, dtype="fp8_e4m3", every=True) is None


def test_the_table_is_what_is_drawn_of_the_committed_rows() -> None:
    text = "".join(text_of(drawn(rows_of(TABLE.parent.parent / "benchmarks" / "results"))))
    assert f"{BEGIN}{text}\n{END}" in TABLE.read_text()
