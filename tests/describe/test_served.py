"""What a program's products came to, in one line, and over several processes."""

from __future__ import annotations

import json
from pathlib import Path

from tunegemm.describe.served import Served


def test_the_line_says_how_many_and_what_they_save() -> None:
    one = Served(3, 2, 1500, 1200, 0.25)
    assert str(one) == "served 2 of 3 products (1,200 of 1,500 calls), saving about 250.00 ms"
    assert "saving" not in str(Served(3, 0, 5, 0, 0.0))
    both = Served.together([one, Served(2, 0, 4, 0, 0.0), Served()])
    assert (both.products, both.calls, both.processes) == (5, 1504, 2)
    assert str(both).endswith("saving about 250.00 ms, in 2 processes")
    assert str(Served(1, 1, 1, 1, 1.0)).endswith("saving about 1.00 s")


def test_parts_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(json.dumps({"products": 1, "calls": 2}))
    (tmp_path / "2.json").write_text("{")
    (tmp_path / "3.json").write_text(json.dumps({"unheard": 1}))
    assert Served.read(tmp_path) == Served(products=1, calls=2)
