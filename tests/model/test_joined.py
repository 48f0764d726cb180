"""Which kernel computes one A with several weights. No GPU needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunegemm.errors import BadValueError
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.model.joined import candidates, choose, listed

LLAMA = (4096, 1024, 1024)


@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_few_rows_are_the_narrow_mode_and_many_the_wide_one(dtype: str, gpu: str) -> None:
    for rows in (1, 16, 17, 33, 64, 129, 256, 1000, 4096, 100_000):
        for gate, bias in (("", False), ("", True), ("swiglu", False), ("geglu", False), ("reglu", True)):
            ns = (14336, 14336) if gate else LLAMA
            choice = choose(rows, ns, 4096, gate=gate, dtype=dtype, bias=bias, gpu=gpu)
            assert choice is not None and choice.config in listed()
            assert isinstance(choice.config, GroupedConfig) == (rows <= (192 if gate else 32))
            assert choice.config.in_dtype == dtype and choice.config.fused.gated == bool(gate)
            if not isinstance(choice.config, GroupedConfig):
                assert ("bias_n" in choice.config.fused.steps) == bias


def test_a_tile_of_many_rows_is_wider_than_no_weight_but_the_last() -> None:
    choice = choose(1000, (4096, 16, 1024), 4096)
    assert choice is not None and isinstance(choice.config, GroupedConfig)
    choice = choose(40, (40, 1024, 16), 4096)
    assert choice is not None and isinstance(choice.config, GroupedConfig)
    choice = choose(1000, (4096, 1024, 16), 4096)
    assert choice is not None and not isinstance(choice.config, GroupedConfig)


def test_what_no_kernel_is_for_has_no_choice() -> None:
    assert choose(1, LLAMA, 4096, dtype="fp8_e4m3") is None and candidates(gate="swish") == ()


def test_a_damaged_table_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "joined.toml"
    path.write_text(
        'dtypes = ["bf16"]\n[few]\nparameters = ["tile_m"]\nx = { values = [1, 2], rows = [1, 1] }\n'
    )
    with pytest.raises(BadValueError, match="reinstall the package"):
        listed(path)


def test_kernels_beside_the_wide_ones_serve_up_to_512_rows() -> None:
    beside = [each for gate in ("", "swiglu") for each in candidates(gate=gate) if each.wider is not None]
    assert beside and all(each.serves(512) and not each.serves(513) for each in beside)


@pytest.mark.parametrize(
    ("gate", "bias"),
    [("", False), ("", True), ("swiglu", False), ("swiglu", True), ("geglu", False), ("reglu", True)],
)
def test_three_tiles_of_rows_are_not_computed_as_four(gate: str, bias: bool) -> None:
    """A table whose clusters all lie along the rows did that: gates of 384 rows were slower than torch's."""
    for ns in ((14336,), (3584,), (25600,)) if gate else (LLAMA, (5120, 5120, 5120), (8192, 1024, 1024)):
        three, four = (
            min(
                each.estimate(rows, ns, 4096, "NVIDIA H200")
                for each in candidates(gate=gate, bias=bias)
                if each.fits(rows, ns) and each.serves(rows)
            )
            for rows in (384, 512)
        )
        assert three < 0.85 * four
