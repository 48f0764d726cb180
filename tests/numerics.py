"""What the GPU tests of all kernel families share: operands on the GPU, and how exact a result must be."""

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# 3/4 of the unit in the last place for 16-bit outputs; fp32 outputs show the tensor cores' accumulation.
TOLERANCE = {"bf16": 4e-3, "fp16": 5e-4, "fp32": 1e-4}


def operand(
    row_major: bool, rows: int, columns: int, batch: int, pad: int, dtype: str, place: str = "cuda"
) -> torch.Tensor:
    """Random (batch, rows, columns); lines of memory are padded by `pad` elements."""
    outer, inner = (rows, columns) if row_major else (columns, rows)
    values = torch.randn(batch, outer, inner + pad, device=place).to(DTYPES[dtype])[:, :, :inner]
    return values if row_major else values.mT


def relative_error(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """||out - fp32 reference|| / ||fp32 reference||."""
    expected = torch.matmul(a.float(), b.float())
    return ((out.float() - expected).norm() / expected.norm()).item()
