"""What launchers share: operands that TMA refuses, as the kernel gets to see them."""

import pytest
import torch

from tunegemm.describe.problem import Problem
from tunegemm.generate.launching import through_aligned_copies, tma_reader, tma_takes
from tunegemm.measure.operands import make_operands

REFUSED = [
    Problem.parse("33x24x17"),
    Problem.parse("33x25x16"),
    Problem.parse("31x29x27", layout="tt"),
    Problem.parse("31x29x27", layout="nn"),
    Problem.parse("31x29x27", layout="nt", out_dtype="fp32"),
    Problem.parse("16x24x32", alignment=2),
    Problem.parse("16x24x32", layout="tt", alignment=8),
    Problem.parse("31x24x16x3", layout="nt"),
    Problem.parse("5x7x11x2"),
    Problem.parse("1x9x1"),
]


@pytest.mark.parametrize("problem", REFUSED, ids=str)
def test_the_kernel_sees_aligned_operands_and_the_result_comes_back(problem: Problem) -> None:
    assert not tma_takes(problem)
    operands = make_operands(problem, torch.device("cpu"), 0)
    read = tma_reader(problem)

    def kernel(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        read(a, b, out)  # raises where TMA would
        assert Problem.from_tensors(a, b).layout == Problem.from_tensors(operands.a, operands.b).layout
        out.copy_(a.float() @ b.float())

    through_aligned_copies(problem, kernel)(operands.a, operands.b, operands.out)
    expected = (operands.a.float() @ operands.b.float()).to(operands.out.dtype)
    assert torch.equal(operands.out, expected)


def test_one_matrix_for_a_batch_is_copied_once() -> None:
    problem = Problem.parse("5x7x11x3", layout="tt")
    operands = make_operands(problem, torch.device("cpu"), 0)
    seen: list[torch.Tensor] = []
    launch = through_aligned_copies(problem, lambda *given: seen.extend(given))
    launch(operands.a, operands.b[1].expand_as(operands.b), operands.out)
    assert seen[1].stride(0) == 0 and seen[1].data_ptr() % 16 == seen[1].stride(1) % 8 == 0
    assert torch.equal(seen[1], operands.b[1].expand_as(operands.b))


def test_aligned_operands_are_not_copied() -> None:
    problem = Problem.parse("16x24x32", alignment=2)
    aligned = make_operands(Problem.parse("16x24x32"), torch.device("cpu"), 0)
    seen: list[int] = []
    launch = through_aligned_copies(
        problem, lambda *operands: seen.extend(tensor.data_ptr() for tensor in operands)
    )
    launch(aligned.a, aligned.b, aligned.out)
    assert not tma_takes(problem)
    assert seen == [aligned.a.data_ptr(), aligned.b.data_ptr(), aligned.out.data_ptr()]


@pytest.mark.parametrize("shape", ["4096x4096x4096", "16x24x32x5"])
def test_what_tma_takes(shape: str) -> None:
    assert tma_takes(Problem.parse(shape))
