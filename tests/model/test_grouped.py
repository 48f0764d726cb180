"""The table of grouped kernels: what it chooses, that each kernel is one, and what a damaged one says."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import BadValueError
from tunegemm.generate import families, grouped
from tunegemm.generate.cute_sm90.config import SMEM_LIMIT
from tunegemm.generate.families import kernel_source_hash
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.parted.config import PartedConfig
from tunegemm.model.grouped import (
    choose,
    choose_along_k,
    configs,
    kinds,
    listed,
    listed_along_k,
    maker_of,
    shipped_kernel,
)

TABLE = """
[kernels]
parameters = ["schedule", "tile_m", "tile_n", "tile_k", "stages", "epi_n", "narrow", "cluster_m"]
few = ["cooperative", 64, 32, 64, 16, 32, 8, 1]
many = ["cooperative", 128, 256, 64, 4, 32, 64, 2]
[kinds]
bf16 = {}
gated = { gate = "swiglu" }
n_major = { major = "n" }
fp8 = { dtype = "fp8_e4m3" }
[gated]
few = { epi_n = 16 }
[n_major]
many = { narrow = 128 }
[[choices]]
rows_per_group = [0, 8]
kernel = "few"
l2_hint = 1
[[choices]]
kinds = ["n_major"]
groups = [64, 128]
kernel = "few"
[[choices]]
rows = [9, 4096]
n = [4096, 8192]
kernel = ""
[[choices]]
kernel = "many"
swizzle_size = 2
"""


def test_the_first_choice_that_holds_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "grouped.toml"
    path.write_text(TABLE)
    few, torchs, many = (choose(8, n, 512, rows, path) for n, rows in ((4096, 64), (4096, 65), (1024, 65)))
    assert few is not None and (few.config.tile_n, few.swizzle_size, few.l2_hint) == (32, 8, 1)
    assert torchs is None
    assert many is not None and (many.config.tile_n, many.swizzle_size, many.l2_hint) == (256, 2, 0)
    assert {few.config, many.config} < set(listed(path))
    assert (few.config.cluster_size, many.config.cluster_size) == (1, 2)


def test_gated_and_n_major_kernels_are_variants(tmp_path: Path) -> None:
    path = tmp_path / "grouped.toml"
    path.write_text(TABLE)
    plain, gated = (choose(8, 4096, 512, 64, path, gate=gate) for gate in ("", "swiglu"))
    assert plain is not None and gated is not None
    assert (gated.config.epilogue, gated.config.epi_n, gated.l2_hint) == ("swiglu", 16, 1)
    assert gated.config == replace(plain.config, epilogue="swiglu", epi_n=16)
    # Where torch's is as fast, its gate is one kernel more.
    assert choose(8, 4096, 512, 65, path) is None
    other = choose(8, 4096, 512, 65, path, gate="swiglu")
    assert other is not None and other.config.tile_n == 256
    found = listed(path)
    assert len(found) == len(set(found)) == 8
    assert {(config.epilogue, config.a_major) for config in found} == {
        ("", "k"), ("swiglu", "k"), ("", "m"), ("scale_rowwise", "k")
    }  # fmt: skip
    along_n = choose(8, 1024, 512, 65, path, major="n")
    assert along_n is not None and (along_n.config.a_major, along_n.config.narrow) == ("m", 128)
    assert choose(8, 1024, 512, 65, path, major="n", gate="swiglu") is None


def test_a_choice_may_be_for_some_kinds(tmp_path: Path) -> None:
    path = tmp_path / "grouped.toml"
    path.write_text(TABLE)
    along_k, along_n = (choose(64, 1024, 512, 1024, path, major=major) for major in "kn")
    assert along_k is not None and along_k.config.tile_n == 256
    assert along_n is not None and (along_n.config.tile_n, along_n.config.a_major) == (32, "m")
    assert all(config.tile_n == 32 for config in listed(path) if config.epi_n == 16)


def test_few_rows_have_a_kernel_where_k_is_whole_units(tmp_path: Path) -> None:
    path = tmp_path / "grouped.toml"
    path.write_text(
        TABLE.replace('kernel = "few"\nl2_hint = 1', 'kernel = "few"\nl2_hint = 1\nfew = true', 1)
    )
    few, other, beyond = (choose(8, 1024, k, rows, path) for k, rows in ((512, 64), (516, 64), (512, 65)))
    assert few is not None and other is not None and beyond is not None
    assert few.is_few and few.label == "few bf16"
    assert not other.is_few and other.label == other.config.label == few.config.label
    assert not beyond.is_few


@pytest.mark.parametrize("gate", ["", "swiglu"])
@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", ""])
def test_one_order_of_sums_has_a_kernel_for_any_number_of_rows(gpu: str, gate: str) -> None:
    others = 0
    kinds = [{"gate": gate}] if gate else [{}, {"major": "n"}, {"dtype": "fp16"}, {"dtype": "fp8_e4m3"}]
    for kind, groups, n, k in itertools.product(kinds, (1, 8, 128), (512, 14336), (2048, 7168)):
        for rows in (1, 2, 16, 300, 4096, 1 << 15, 1 << 20):
            words: dict[str, Any] = {"gpu": gpu, **kind}
            choice, usual = (
                choose(groups, n, k, rows, **words, ordered=True),
                choose(groups, n, k, rows, **words),
            )
            assert choice is not None and not choice.is_few, (kind, groups, n, k, rows)
            others += choice != usual
            assert not isinstance(choice.config, PartedConfig)
            reorders = usual is None or usual.is_few or isinstance(usual.config, PartedConfig)
            assert reorders or choice == usual
            assert choice.config in listed()  # which ships
    assert others


def test_a_choice_may_be_for_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "grouped.toml"
    path.write_text(TABLE.replace("rows = [9, 4096]", 'gpu = "H200"\nrows = [9, 4096]'))
    names = ("NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3", "")
    found = [choose(8, 4096, 512, 65, path, gpu=name) for name in names]
    assert [each is None for each in found] == [True, True, False, False]
    path.write_text(TABLE.replace('kernel = "many"', 'gpu = "H200"\nkernel = "many"'))
    assert any(config.tile_n == 256 for config in listed(path)), "it ships for all"


def test_a_kind_without_a_line_is_torchs(tmp_path: Path) -> None:
    path = tmp_path / "grouped.toml"
    path.write_text(TABLE.replace('n_major = { major = "n" }\n', "").replace("n_major", "fp8"))
    assert kinds(path) == ("bf16", "gated", "fp8")
    assert choose(8, 1024, 512, 65, path, major="n") is None
    assert choose(8, 1024, 512, 65, path, gate="geglu") is None
    found = choose(8, 1024, 512, 65, path, dtype="fp8_e4m3")
    assert found is not None and found.config in listed(path, "fp8")
    assert (found.config.tile_k, found.config.out_dtype, found.config.fused.scales) == (128, "bf16", True)
    assert len(listed(path, "fp8")) == 2 and len(listed(path)) == 6


ALONG_K = """
[along_k.kernels]
parameters = ["tile_m", "tile_n", "stages", "cluster_m", "cluster_n", "epi_n"]
small = [128, 128, 5, 2, 1, 64]
large = [128, 256, 4, 2, 1, 32]
[[along_k.choices]]
rows_per_group = [0, 256]
kernel = "small"
swizzle_size = 4
[[along_k.choices]]
n = [0, 8191]
kernel = ""
[[along_k.choices]]
kernel = "large"
"""


def test_groups_along_k_have_choices_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "grouped.toml"
    path.write_text(TABLE)
    assert choose_along_k(8, 8192, 512, 65, path) is None and listed_along_k(path) == ()
    path = tmp_path / "with.toml"
    path.write_text(TABLE + ALONG_K)
    small, torchs, large = (
        choose_along_k(8, n, 512, rows, path) for n, rows in ((512, 64), (512, 4096), (8192, 4096))
    )
    assert small is not None and torchs is None and large is not None
    assert (small.config.tile_n, small.swizzle_size) == (128, 4)
    assert (large.config.a_major, large.config.b_major, large.swizzle_size) == ("m", "n", 8)
    assert listed_along_k(path) == (small.config, large.config)
    path = tmp_path / "of one GPU.toml"
    path.write_text(TABLE + ALONG_K.replace("rows_per_group = [0, 256]\n", 'gpu = "H200"\n'))
    assert choose_along_k(8, 512, 512, 64, path, gpu="NVIDIA H200") == small
    assert choose_along_k(8, 512, 512, 64, path, gpu="NVIDIA H100") is None


def test_weights_gradients_are_served_where_they_were_timed() -> None:
    (kernel,) = listed_along_k()
    for extents in ((128, 1536, 2048, 4096), (8, 28672, 4096, 32768)):
        found = choose_along_k(*extents)
        assert found is not None and found.config == kernel
    assert choose_along_k(8, 28672, 4096, 2048) is None and choose_along_k(8, 28672, 512, 4096) is None


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"large"', '"larger"', "larger is not among small, large"),
        ("swizzle_size = 4", "swizzle = 4", "swizzle is not among groups"),
        ("5, 2, 1, 64]", "5]", "zip"),
    ],
)
def test_a_damaged_table_of_groups_along_k_is_named(
    tmp_path: Path, before: str, after: str, words: str
) -> None:
    path = tmp_path / "grouped.toml"
    path.write_text(TABLE + ALONG_K.replace(before, after))
    with pytest.raises(BadValueError, match=words):
        choose(8, 1, 1, 1, path)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('kinds = ["n_major"]', 'kinds = ["m_major"]', "m_major is not among bf16, gated"),
        ("rows = [9", "lines = [9", "lines is not among groups, n, k, rows, rows_per_group"),
        ('kernel = "few"', 'kernel = "fewer"', "fewer"),
        (", 2]\n[kinds", "]\n[kinds", "zip"),
        ("[kernels]", "[kernels", "grouped.toml"),
    ],
)
def test_a_damaged_table_is_named(tmp_path: Path, before: str, after: str, words: str) -> None:
    path = tmp_path / "grouped.toml"
    path.write_text(TABLE.replace(before, after))
    with pytest.raises(BadValueError, match=words):
        choose(8, 1, 1, 1, path)


def test_each_kernel_fits_a_multiprocessor() -> None:
    assert listed()
    for config in itertools.chain.from_iterable(listed(kind=kind) for kind in kinds()):
        beside = getattr(config, "extra_bytes", 0)
        assert config.smem_bytes + beside <= SMEM_LIMIT, config.label
        assert config.tile_n % config.staged_rows == 0 and all(width % 8 == 0 for width in config.widths)
    # 176 rows are no multiple of the 32 that a gated kernel stores at a time.
    assert "pp128x176" in configs("bf16") and "pp128x176" not in configs("gated")
    for groups, rows in itertools.product((1, 8, 32, 128, 512), (1, 16, 1024, 16384, 1 << 20)):
        choose(groups, 4096, 4096, rows)


def test_tiles_that_their_step_does_not_divide_are_no_kernels(tmp_path: Path) -> None:
    """352 rows would be two tiles of 192, beyond the main loops of 176."""
    path = tmp_path / "grouped.toml"
    text = TABLE.replace("[kernels]\n", "[kernels]\nw16 = W 16, 1]\nw32 = W 32, 1]\n", 1)
    path.write_text(text.replace("W", '["pingpong", 128, 176, 64, 5, 16,'))
    assert "w16" in configs("bf16", path) and "w32" not in configs("bf16", path)


def test_a_kernel_is_named_by_all_that_it_is_compiled_of() -> None:
    keys = [maker_of(config).key_of(config) for config in listed()]
    assert len({tuple(sorted(key.items())) for key in keys}) == len(keys)
    for config, key in zip(listed(), keys, strict=True):
        assert type(config).from_mapping(key) == config
    # cute_sm90's sources are in it, too: the kernel is made of its parts.
    assert keys[0]["source"] != kernel_source_hash("cute_sm90")


def test_widths_double_from_the_narrowest() -> None:
    config = GroupedConfig.from_mapping(
        dict(grouped.FAMILY.key_of(listed()[0])) | {"tile_n": 256, "narrow": 64}
    )
    assert config.widths == (64, 128, 256)
    assert GroupedConfig.from_mapping(dict(grouped.FAMILY.key_of(config)) | {"narrow": 0}).widths == (256,)


def test_widths_are_all_multiples_where_doubling_does_not_lead_to_the_tile() -> None:
    key = dict(grouped.FAMILY.key_of(listed()[0])) | {"tile_n": 192}
    assert GroupedConfig.from_mapping(key | {"narrow": 32}).widths == (32, 64, 96, 128, 160, 192)
    assert GroupedConfig.from_mapping(key | {"narrow": 48}).widths == (48, 96, 192)


@pytest.mark.parametrize(("dtype", "epilogue"), [("bf16", ""), ("fp8_e4m3", "scale_rowwise")])
def test_a_shipped_kernel_is_a_candidate_of_the_space(dtype: str, epilogue: str) -> None:
    """Which counts k in 16-bit elements, as its rules do."""
    problem = Problem(4096, 4096, 4096, groups=32, in_dtype=dtype, out_dtype="bf16", epilogue=epilogue)
    found = shipped_kernel(problem, "NVIDIA H200")
    assert found is not None and families.get("grouped").check(problem, found, find_device("model:h200"))
