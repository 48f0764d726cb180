"""Kernels that quantise: what they are compiled of, take and refuse. No GPU needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tunegemm.generate import quantize
from tunegemm.generate.quantize import CONFIGS, QuantizeConfig, Quantizer, refusal
from tunegemm.generate.takes import NotTaken

X = torch.empty(5, 400, dtype=torch.bfloat16)
VALUES, SCALES = torch.empty(5, 400, dtype=torch.float8_e4m3fn), torch.empty(4, 5).t()


def test_a_kernel_is_named_by_all_that_it_is_compiled_of() -> None:
    keys = [quantize.FAMILY.key_of(config) for config in CONFIGS]
    assert len({tuple(sorted(key.items())) for key in keys}) == len(keys) == 6
    assert [QuantizeConfig.from_mapping(key) for key in keys] == list(CONFIGS)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_it_compiles_without_spills(config: QuantizeConfig, tmp_path: Path) -> None:
    if (missing := quantize.FAMILY.unavailable()) is not None:
        pytest.skip(missing)
    report = quantize.FAMILY.compile(quantize.FAMILY.key_of(config), tmp_path / "kernel.o")
    assert report.spill_bytes == 0 and report.warnings == ()
    assert report.registers is not None and report.registers <= 96


def test_a_launch_says_where_values_and_scales_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from tunegemm.generate.quantize.kernel import Arguments

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    seen: list[Any] = []
    kernel = Quantizer(QuantizeConfig("bf16"), lambda *given: seen.append(given))
    launch = kernel.bound(X, VALUES, SCALES, power_of_two=True)
    launch(16, 32, 4)
    *words, stream = seen.pop()
    given = Arguments(*words)
    assert stream == 7 and (given.x_address, given.values_address, given.scales_address) == (16, 32, 4)
    assert (given.rows, given.k, given.power_of_two) == (5, 400, 1)
    assert (given.x_stride, given.values_stride) == (400, 400)
    assert (given.scales_row_stride, given.scales_block_stride) == (1, 5)
    for addresses in ((8, 32, 4), (16, 40, 4), (16, 32, 2)):
        with pytest.raises(NotTaken, match=r"clone\(\)"):
            launch(*addresses)
    with pytest.raises(NotTaken, match="torch"):
        Quantizer(QuantizeConfig("fp16"), lambda *given: seen.append(given)).bound(X, VALUES, SCALES)
    assert not seen


@pytest.mark.parametrize(
    ("x", "gated", "reason"),
    [
        (X, False, ""),
        (X, True, ""),
        (X.half(), True, ""),
        (X.float(), False, ""),
        (torch.empty(8, 500)[::2, 4:404], False, ""),
        (torch.empty(2, 501)[:1, :400], False, ""),
        (X.double(), False, "float64"),
        (X[None], False, "3 dimensions"),
        (X[:0], False, "rows is 0"),
        (X[:, :396], False, "whole 16 bytes"),
        (X[:, :392], True, "whole 16 bytes"),
        (torch.empty(5, 401)[:, :400], False, "whole 16 bytes"),
        (torch.empty(400, 8).t(), False, "whole 16 bytes"),
    ],
)
def test_what_no_kernel_takes_is_refused(x: torch.Tensor, gated: bool, reason: str) -> None:
    found = refusal(x, gated)
    assert found == "" if not reason else reason in found, found
