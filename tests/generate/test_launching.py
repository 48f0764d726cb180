"""What launchers share: operands that TMA refuses, as the kernel gets to see them."""

from dataclasses import replace

import pytest
import torch

from tests.support.numerics import POISON, room_of
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


#: Extents of the output's lines from one unit of 16 bytes to the next, in either major, with a batch, of one
#: line, and of elements of 1, 2 and 4 bytes.
RAGGED = [
    *(Problem.parse(f"16x{n}x32") for n in (25, 26, 27, 28, 30, 31)),
    Problem.parse("1x25x32"),
    Problem.parse("16x1x32"),
    Problem.parse("16x28x32x3"),
    Problem.parse("16x26x32", out_dtype="fp32"),
    Problem.parse("16x24x32", dtype="fp8_e4m3", out_dtype="fp8_e4m3"),
    Problem.parse("16x24x32", dtype="fp8_e4m3", out_dtype="fp8_e5m2"),
    Problem.parse("16x56x32", epilogue="swiglu"),
    Problem(27, 24, 32, out_major="m"),
    Problem(28, 24, 32, 2, out_major="m"),
]


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("problem", RAGGED, ids=str)
def test_nothing_is_stored_beyond_a_view_of_the_output(problem: Problem, gap: int) -> None:
    """By a kernel that stores whole units of 16 bytes of a line, as TMA does."""
    assert not tma_takes(problem)
    operands = make_operands(replace(problem, alignment=0), torch.device("cpu"), 0)
    memory, out = room_of(problem, gap, "cpu")
    rows, unit = problem.out_major == "n", 16 // out.element_size()

    def kernel(a: torch.Tensor, b: torch.Tensor, to: torch.Tensor, *_: torch.Tensor) -> None:
        tma_reader(problem)(a, b, to)
        lines = to if rows else to.mT
        extent = -(-lines.shape[-1] // unit) * unit
        room = lines.untyped_storage().nbytes() // lines.element_size() - lines.storage_offset()
        steps = zip(lines.shape[:-1], lines.stride()[:-1], strict=True)
        last = sum((size - 1) * step for size, step in steps)
        assert last + extent <= room, "beyond the memory"
        lines.as_strided((*lines.shape[:-1], extent), lines.stride(), lines.storage_offset()).fill_(1.0)

    through_aligned_copies(problem, kernel)(operands.a, operands.b, out)
    assert bool((out.float() == 1).all()), "the result"
    assert int((memory.float() != POISON).sum()) == out.numel(), "wrote outside its output"


def test_an_output_of_whole_units_is_written_in_place() -> None:
    problem = Problem.parse("16x24x27")
    operands = make_operands(problem, torch.device("cpu"), 0)
    out = torch.zeros(16, 40).bfloat16()[:, :24]
    seen: list[torch.Tensor] = []
    through_aligned_copies(problem, lambda *given: seen.extend(given))(operands.a, operands.b, out)
    assert seen[2] is out


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
