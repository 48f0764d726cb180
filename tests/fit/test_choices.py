"""Which products the selector is fitted to, and how files of what was measured grow. No GPU needed."""

from __future__ import annotations

import json
import lzma
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.first_use import DIMENSIONS
from fit import choices
from tunegemm.errors import TunegemmError


def test_drawn_logits_are_wide_of_few_rows_and_no_dimensions_of_first_use() -> None:
    found = list(islice(choices.drawn_logits("a"), 300))
    assert found == list(islice(choices.drawn_logits("a"), 300))
    assert found != list(islice(choices.drawn_logits("b"), 300))
    (fewest, most), (least_k, most_k) = choices.LOGITS
    for problem in found:
        assert fewest < problem.n <= most + 128 and problem.n % 8 == 0 and problem.bytes <= choices.MAX_BYTES
        assert least_k <= problem.k <= most_k and not {problem.n, problem.k} & set(DIMENSIONS)
    for least, greatest in choices.ROWS_OF_LOGITS:
        assert sum(least <= problem.m <= greatest for problem in found) > 75


def test_lines_are_added_to_the_file_of_their_gpu(tmp_path: Path) -> None:
    meta: dict[str, Any] = {"gpu": "NVIDIA H200", "date": "2026-11-27"}

    def lines(name: str, kernels: list[str], *products: dict[str, int]) -> None:
        head = {"meta": meta | {"command": name}, "kernels": kernels}
        text = "\n".join(map(json.dumps, [head, {"begin": [1, 2, 3]}, *products]))
        (tmp_path / "x.jsonl").write_text(text + "\n" + '{"m": ')

    lines("first", ["a"], {"m": 1, "n": 8, "k": 8}, {"m": 2, "n": 8, "k": 8})
    choices.collect(tmp_path, tmp_path)
    lines("second", ["a"], {"m": 2, "n": 8, "k": 8, "turn": 2}, {"m": 3, "n": 8, "k": 8})
    choices.collect(tmp_path, tmp_path)
    head, *rows = map(json.loads, lzma.decompress((tmp_path / "choices.json.xz").read_bytes()).splitlines())
    assert [row["m"] for row in rows] == [1, 2, 3] and rows[1]["turn"] == 2
    assert head["meta"]["commands"] == ["first", "second"] and head["kernels"] == ["a"]
    lines("third", ["b"], {"m": 4, "n": 8, "k": 8})
    with pytest.raises(TunegemmError, match="differs"):
        choices.collect(tmp_path, tmp_path)
