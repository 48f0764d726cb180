"""Every algorithm id that cuBLASLt accepts for a product has a candidate, and the candidate is right."""

from __future__ import annotations

import pytest
import torch

from tests.support.numerics import Case
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.generate.cublaslt import FAMILY, library

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "problem",
    [Problem(1024, 2048, 512), Problem(16, 4096, 4096), Problem(300, 520, 1001), Problem(256, 512, 256, 3)],
    ids=str,
)
def test_each_is_there_once_and_right(problem: Problem, device: Device) -> None:
    torch.zeros(1, device="cuda")
    found = library.one_of_each_id(problem, device.index, 32 << 20)
    numbers = [candidate["algo_id"] for candidate in found]
    assert numbers and len(numbers) == len(set(numbers))
    print(problem, [FAMILY.label(one) for one in found])
    case = Case.of(problem, seed=3)
    for candidate in found:
        assert FAMILY.check(problem, candidate, device)
        case.check(FAMILY.load(problem, candidate, device, None), FAMILY.label(candidate), runs=2)
