"""A pack on a GPU: what it brings is launched where nothing else is, eagerly and within a CUDA graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tunegemm
from tests.store.test_packs import RECORDS
from tests.support.processes import compile_workers
from tunegemm.describe.device import find_device
from tunegemm.store import packing, packs

pytestmark = pytest.mark.gpu


def test_a_pack_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    here = find_device("cuda:0").fingerprint
    records = [replace(record, fingerprint=here) for record in RECORDS]
    packed = packing.pack(records, tmp_path / "a.pack", workers=compile_workers())
    assert packed.left_out == {}
    for name, folder in (("XDG_DATA_HOME", "data"), ("TUNEGEMM_CACHE_DIR", "cache")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.delenv("TUNEGEMM_DB", raising=False)
    monkeypatch.chdir(tmp_path)
    packs.install(packed.path)
    tunegemm.refresh()
    try:
        for record in records:
            m, n, k = record.problem.m, record.problem.n, record.problem.k
            a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t()
            out = tunegemm.matmul(a, b)
            torch.testing.assert_close(out.float(), a.float() @ b.float(), rtol=2e-2, atol=2e-1)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = tunegemm.matmul(a, b)
            graph.replay()
            assert torch.equal(captured, out)
        assert [str(warning.message) for warning in recwarn if "left" in str(warning.message)] == []
    finally:
        tunegemm.refresh()
