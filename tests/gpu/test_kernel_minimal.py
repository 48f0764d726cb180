"""The kernel that readers begin with is right: against fp32, on random data, into a poisoned output."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.minimal import compile_minimal
from tests.support.numerics import TOLERANCE, poisoned, relative_error
from tunegemm.generate.cute_launch import load_function

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_minimal(tmp_path_factory.mktemp("minimal"))[0]


@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 64), (128, 256, 320), (2048, 1152, 1024)])
@pytest.mark.parametrize("blocks", [1, 7, 132])
def test_right(compiled: Path, m: int, n: int, k: int, blocks: int) -> None:
    """With fewer blocks than tiles each computes several; with more, some none."""
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = torch.randn(n, k, device="cuda").bfloat16()
    whole = poisoned(m + 2, n)
    out = whole[:m]
    stream = torch.cuda.current_stream().cuda_stream
    load_function(compiled)(a.data_ptr(), b.data_ptr(), out.data_ptr(), m, n, k, blocks, stream)
    torch.cuda.synchronize()
    assert relative_error(out, a, b.t()) < TOLERANCE["bf16"]
    assert whole[m:].isnan().all(), "wrote behind its output"


def test_it_runs_by_itself() -> None:
    words = [sys.executable, "-m", "tunegemm.generate.cute_sm90.kernel_minimal"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    checked, timed = done.stdout.splitlines()
    assert checked.endswith("right") and "torch.mm" in timed and "us" in timed
