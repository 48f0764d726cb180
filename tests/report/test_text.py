"""How tables fit a terminal, and how figures and words are written."""

from __future__ import annotations

import math

import pytest

from tunegemm.report.text import clean, counted, fitted, significant, to_json

COLUMNS = {"name": ["alpha beta", "c"], "us": ["12.5", "9"], "note": ["12345678", ""]}


def of_width(width: int | None) -> dict[str, tuple[int | None, int | None]]:
    """The width and the least width of each column that is left."""
    rows = list(zip(*COLUMNS.values(), strict=True))
    table = fitted("t", list(COLUMNS), rows, {"name": 7}, dispensable=["note", "missing"], width=width)
    assert table.row_count == 2
    return {str(column.header): (column.width, column.min_width) for column in table.columns}


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (None, {"name": (None, 7), "us": (None, 4), "note": (None, 8)}),
        (32, {"name": (None, 7), "us": (None, 4), "note": (None, 8)}),
        (31, {"name": (None, 7), "us": (4, 4), "note": (8, 8)}),  # a line of each has 10 + 4 + 8 + 10
        (29, {"name": (None, 7), "us": (4, 4), "note": (8, 8)}),
        (28, {"name": (None, 7), "us": (None, 4)}),  # 7 + 4 + 8 + 10 do not fit
        (21, {"name": (None, 7), "us": (None, 4)}),
        (20, {"name": (None, 7), "us": (4, 4)}),
        (18, {"name": (None, 7), "us": (4, 4)}),
        (17, {"name": (None, 5), "us": (4, 4)}),
    ],
)
def test_columns_at_the_width_where_they_change(
    width: int | None, columns: dict[str, tuple[int | None, int | None]]
) -> None:
    assert of_width(width) == columns


def test_figures_and_counts() -> None:
    assert [significant(value) for value in (0.0, -1.0, math.inf, math.nan)] == [""] * 4
    written = [significant(value) for value in (1.0, 9.9999, 1234.5, 123456.0, 0.00123456, 1e-9)]
    assert written == ["1.000", "10.000", "1234", "123456", "0.001235", "0.000000001000"]
    assert significant(9.9e-10) == "9.9e-10" and significant(12.345, 3) == "12.3"
    assert [counted(count, "kernel") for count in (0, 1, 2000)] == ["0 kernels", "1 kernel", "2,000 kernels"]
    assert (clean("x" * 500), clean("x" * 501)) == ("x" * 500, "x" * 499 + "\u2026")
    assert counted(3, "process") == "3 processes"
    assert to_json({"a": [math.nan, (1.5, -math.inf)], "b": "\u00e9"}, None) == (
        '{"a": [null, [1.5, null]], "b": "\\u00e9"}'
    )
