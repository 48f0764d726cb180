"""Kernels of one A with several weights: what they are compiled of, take and refuse. No GPU needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tunegemm.describe.device import Device
from tunegemm.generate import joined
from tunegemm.generate.cute_sm90.config import SMEM_LIMIT, KernelConfig
from tunegemm.generate.families import kernel_source_hash
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.joined import JoinedKernel, refusal, tiles_of
from tunegemm.generate.takes import NotTaken
from tunegemm.model.joined import listed

CONFIGS = listed()
FEW = next(config for config in CONFIGS if isinstance(config, GroupedConfig) and not config.epilogue)
GATED_FEW = next(config for config in CONFIGS if isinstance(config, GroupedConfig) and config.fused.gated)
MANY = next(c for c in CONFIGS if not isinstance(c, GroupedConfig) and c.epilogue == "bias_n")
PLAIN_MANY = next(c for c in CONFIGS if not isinstance(c, GroupedConfig) and not c.epilogue)
GATED_MANY = next(c for c in CONFIGS if not isinstance(c, GroupedConfig) and c.epilogue == "bias_n+swiglu")
BF16 = torch.bfloat16


def test_a_kernel_is_named_by_all_that_it_is_compiled_of() -> None:
    keys = [joined.FAMILY.key_of(config) for config in CONFIGS]
    assert len({tuple(sorted(key.items())) for key in keys}) == len(keys) > 0
    for config, key in zip(CONFIGS, keys, strict=True):
        assert joined.FORMS[str(key["form"])].from_mapping(key) == config
        assert config.smem_bytes <= SMEM_LIMIT
    # The sources of both families are in it, too: the kernels are made of their parts.
    assert keys[0]["source"] not in (kernel_source_hash("cute_sm90"), kernel_source_hash("grouped"))
    names = {path.parent.parent.name for path in joined.FAMILY.sources}
    assert {"joined", "grouped", "cute_sm90"} <= names


@pytest.mark.parametrize(
    "config", [FEW, GATED_FEW, MANY, GATED_MANY], ids=lambda c: f"{c.label} {c.epilogue}"
)
@pytest.mark.slow
def test_it_compiles_without_warnings(config: KernelConfig, tmp_path: Path) -> None:
    """Warning C7511: ptxas serialises WGMMAs."""
    if (missing := joined.FAMILY.unavailable()) is not None:
        pytest.skip(missing)
    report = joined.FAMILY.compile(joined.FAMILY.key_of(config), tmp_path / "kernel.o")
    assert report.spill_bytes == 0 and report.warnings == ()
    assert report.smem_bytes <= SMEM_LIMIT


@pytest.mark.parametrize("config", [FEW, MANY], ids=lambda config: config.label)
def test_no_tile_is_of_two_weights(config: KernelConfig) -> None:
    columns = config.tile_columns if isinstance(config, GroupedConfig) else config.tile_n
    rows = config.tile_n if isinstance(config, GroupedConfig) else config.tile_m * config.cluster_m
    assert tiles_of(config, rows, [columns]) == 1
    assert tiles_of(config, rows, [columns + 8, 8]) == 3
    assert tiles_of(config, rows + 1, [columns + 8, 8]) == 6


class Seen(list[Any]):
    """A kernel's function that keeps what it is launched with, by name."""

    def __call__(self, *given: Any) -> None:
        pytest.importorskip("cutlass")
        from tunegemm.generate.joined.kernel.arguments import Arguments

        self.append(Arguments(*given[:-1])._asdict())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return Seen()


def test_a_launch_says_where_each_weight_lies(seen: Seen, h200: Device) -> None:
    a, out = torch.empty(3, 64, dtype=BF16), torch.empty(3, 400, dtype=BF16)[:, :376]
    weights = [torch.empty(n, 72, dtype=BF16)[:, :64] for n in (200, 72, 104)]
    bias = torch.empty(72, dtype=BF16)
    words = {"swizzle_size": 2, "along_m": False, "l2_hint": 2, "device": h200}
    JoinedKernel(FEW, seen).launch(a, weights, out, (None, bias, None), **words)
    (given,) = seen
    assert [given[name] for name in ("m", "k", "n", "n1", "n2")] == [3, 64, 200, 72, 104]
    assert [given[name] for name in ("lda", "ldb", "ldb1", "ldb2", "ldd")] == [64, 72, 72, 72, 400]
    addresses = [given[name] for name in ("b_address", "b1_address", "b2_address")]
    assert addresses == [weight.data_ptr() for weight in weights]
    assert (given["a_address"], given["d_address"]) == (a.data_ptr(), out.data_ptr())
    biases = [given[name] for name in ("bias_address", "bias1_address", "bias2_address")]
    assert biases == [0, bias.data_ptr(), 0]
    assert [given[name] for name in ("swizzle_size", "raster_along_m", "l2_hint")] == [2, 0, 2]
    assert given["clusters"] == 4 + 2 + 2


def test_a_launch_of_a_gate_has_the_rows_of_one_weight(seen: Seen, h200: Device) -> None:
    a, out = torch.empty(1, 64, dtype=BF16), torch.empty(1, 512, dtype=BF16)
    gate, up = torch.empty(512, 64, dtype=BF16), torch.empty(512, 64, dtype=BF16)
    for config in (GATED_FEW, GATED_MANY):
        JoinedKernel(config, seen).launch(a, (up, gate), out, device=h200)
        given = seen.pop()
        assert [given[name] for name in ("n", "n1", "n2", "lda", "ldd")] == [512, 0, 0, 64, 512]
        assert (given["b_address"], given["b1_address"]) == (up.data_ptr(), gate.data_ptr())
        assert given["clusters"] == tiles_of(config, 1, [512])


def test_a_kernel_refuses_what_is_for_another(seen: Seen, h200: Device) -> None:
    def bind(config: KernelConfig, ns: tuple[int, ...], dtype: torch.dtype = BF16, bias: bool = False) -> Any:
        weights = [torch.empty(n, 64, dtype=dtype) for n in ns]
        biases = [torch.empty(n, dtype=dtype) for n in ns] if bias else ()
        a, out = torch.empty(4, 64, dtype=dtype), torch.empty(4, sum(ns), dtype=dtype)
        return JoinedKernel(config, seen).bound(a, weights, out, biases, device=h200)

    wide = MANY.tile_n
    bind(MANY, (wide, 8), bias=True)
    launch = bind(FEW, (8, 8), bias=True)
    with pytest.raises(NotTaken, match="a 0x8"):
        launch(8, 16)
    for wrong, of in (
        ((FEW, (8, 8), torch.float16), "operands of torch.float16"),
        ((MANY, (wide - 8, 8)), f"a weight of {wide - 8} rows"),
        ((PLAIN_MANY, (512,), BF16, True), "which adds none"),
        ((FEW, (12, 8)), "N 12, 8"),
    ):
        with pytest.raises(NotTaken, match=of):
            bind(*wrong)
    assert not seen


def matrix(rows: int, columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype)


A, W, OUT = matrix(4, 64), matrix(24, 64), matrix(4, 48)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"a": matrix(1, 80)[:, :64], "out": matrix(1, 48)}, ""),
        ({"a": matrix(1, 68)[:, :64], "out": matrix(1, 48).as_strided((1, 48), (0, 1))}, ""),
        ({"biases": (None, torch.empty(24, dtype=BF16))}, ""),
        ({"gated": True, "out": matrix(4, 24), "weights": (W, matrix(24, 64))}, ""),
        ({"weights": ()}, "0 weights"),
        ({"weights": (W,) * 4}, "4 weights"),
        ({"gated": True, "weights": (W,)}, "1 weights"),
        ({"biases": (None,)}, "1 biases"),
        ({"a": matrix(4, 64, torch.float32)}, "operands of torch.float32"),
        ({"biases": (None, torch.empty(24, dtype=torch.float16))}, "a bias is (24,) torch.float16"),
        ({"out": OUT.to("meta")}, "the output is (4, 48) torch.bfloat16 on meta"),
        ({"a": A[None]}, "not a matrix"),
        ({"weights": (W, matrix(24, 72))}, "a weight is (24, 72)"),
        ({"gated": True, "weights": (W, matrix(16, 64))}, "a weight is (16, 64)"),
        ({"out": matrix(4, 56)}, "the output is (4, 56)"),
        ({"a": matrix(0, 64), "out": matrix(0, 48)}, "0 rows"),
        ({"weights": (W, matrix(20, 64)), "out": matrix(4, 44)}, "N 24, 20"),
        ({"a": matrix(4, 60), "weights": (matrix(24, 60), matrix(24, 60))}, "K 60"),
        ({"a": matrix(4, 72)[:, 1:65]}, "a begins at"),
        ({"a": matrix(64, 8).t()[:4]}, "a of strides (1, 8) is not contiguous"),
        ({"a": matrix(4, 68)[:, :64]}, "a of strides (68, 1): lines 136 B apart"),
        ({"weights": (W, matrix(1, 64).expand(24, 64))}, "a weight of strides (0, 1) overlaps itself"),
        ({"out": matrix(4, 100)[:, :48]}, "the output of strides (100, 1): lines 200 B apart"),
        ({"biases": (None, torch.empty(48, dtype=BF16)[::2])}, "a bias of strides (2,) is not contiguous"),
        ({"gated": True, "out": matrix(4, 24), "weights": (W, W)}, "gate and up 0 bytes apart"),
        ({"gated": True, "out": matrix(4, 24), "weights": (W, matrix(24, 72)[:, :64])}, "strides 64 and 72"),
    ],
)  # fmt: skip
def test_what_no_kernel_takes_is_refused(changes: dict[str, Any], reason: str) -> None:
    given = {"a": A, "weights": (W, W), "out": OUT} | changes
    found = refusal(given.pop("a"), given.pop("weights"), given.pop("out"), given.pop("biases", ()), **given)
    assert found == "" if not reason else reason in found, found
