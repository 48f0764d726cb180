"""Which kernel computes groups with block scales. No GPU needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunegemm.errors import BadValueError
from tunegemm.model.block_groups import choose, invariant, listed
from tunegemm.resources import data_path


@pytest.mark.parametrize("groups", [1, 8])
def test_the_first_serves_whose_rows_a_group_are_enough(groups: int) -> None:
    """Of each kernel at its most rows, and at one row more, which the next one serves."""
    kernels, most = listed(), [3, 12, 24, 64]
    assert len(set(kernels)) == len(kernels)
    assert [choose(rows * groups, groups) for rows in most] == list(kernels[:-1])
    assert [choose(rows * groups + 1, groups) for rows in most] == list(kernels[1:])
    assert choose(10**9, groups) == kernels[-1]


def test_batch_invariance_has_a_kernel_that_promotes_each_row_alone() -> None:
    assert invariant().few and invariant() in listed()


SHIPPED = data_path("db", "block_groups.toml").read_text()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (SHIPPED.replace(str(2**31 - 1), str(2**31 - 2)), "the last kernel must serve any number of rows; "),
        ("parameters = []\nkernels = { a = { values = [], rows_per_group = 5 } }\n", ""),
    ],
)
def test_a_damaged_table_says_what_to_do(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "block_groups.toml"
    path.write_text(text)
    with pytest.raises(BadValueError, match=f"{reason}reinstall the package"):
        listed(path)
