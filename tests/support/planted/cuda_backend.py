"""The CUDA backend with a kernel family that breaks the device on demand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from tunegemm.describe.device import Device
from tunegemm.describe.space import Candidate
from tunegemm.measure.backend import CudaBackend


@triton.jit
def store_at(address, value):
    """One store to any address."""
    tl.store(address.to(tl.pointer_type(tl.float32)), value)


class PlantedFamily:
    name = "planted"
    compiled = False

    def smem_bytes(self, problem: Any, candidate: Candidate) -> int:
        return 0

    def load(self, problem: Any, candidate: Candidate, device: Device, artifact: Path | None) -> Any:
        what = candidate["what"]

        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            if what == "hang":
                torch.cuda._sleep(1 << 62)
            if what == "illegal-address":
                store_at[(1,)](1 << 44, 1.0)
            if what == "device-assert":
                index = torch.full((1,), 1 << 40, dtype=torch.int64, device=out.device)
                out.view(-1)[index] = 0
            if what == "abort":
                os.abort()
            if what == "not-capturable":
                torch.mm(a, b, out=out)
                torch.cuda.synchronize()
                return
            torch.mm(a, b, out=out)
            if what == "wrong":
                out[-64:, -64:] = out[:64, :64]
            elif what == "outside":
                out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()

        return launch


class PlantedBackend(CudaBackend):
    def family(self, name: str) -> Any:
        return PlantedFamily() if name == "planted" else super().family(name)
