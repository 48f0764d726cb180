"""What launchers share: operands that TMA refuses, as the kernel gets to see them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.numerics import POISON, room_of
from tunegemm.describe.epilogue import MAX_WORDS
from tunegemm.describe.problem import Problem
from tunegemm.errors import ProblemError
from tunegemm.generate import launching
from tunegemm.generate.launching import (
    AddressLauncher,
    operand_reader,
    through_aligned_copies,
    tma_takes,
    words_binder,
    words_reader,
)
from tunegemm.generate.takes import NotTaken
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
    read = operand_reader(problem)

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
        operand_reader(problem)(a, b, to)
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


@pytest.mark.parametrize(
    ("problem", "operand", "strides", "offset", "reads"),
    [
        (Problem(4, 24, 16), "a", (16, 1), 0, 16), (Problem(4, 24, 16), "a", (24, 1), 0, 24),
        (Problem(4, 24, 16), "a", (20, 1), 0, None), (Problem(4, 24, 16), "a", (16, 1), 4, None),
        (Problem(1, 24, 20, b_major="n"), "a", (3, 1), 0, 24),
        (Problem(4, 24, 16, a_major="m"), "a", (1, 8), 0, 8),
        (Problem(4, 24, 16), "b", (1, 24), 0, 24), (Problem(4, 24, 16), "b", (1, 20), 0, None),
        (Problem(8, 1, 20, a_major="m", out_major="m"), "b", (1, 3), 0, 24),
        (Problem(4, 24, 16, b_major="n"), "b", (40, 1), 0, 40),
        (Problem(4, 24, 16), "out", (32, 1), 0, 32), (Problem(4, 24, 16), "out", (28, 1), 0, None),
        (Problem(4, 24, 16), "out", (24, 1), 4, None), (Problem(1, 20, 16), "out", (3, 1), 0, 24),
        (Problem(4, 24, 16, out_major="m"), "out", (1, 8), 0, 8),
        (Problem(4, 24, 16, out_dtype="fp32"), "out", (28, 1), 0, 28),
    ],
)  # fmt: skip
def test_addresses_and_leading_dimensions_in_units_are_read(
    problem: Problem, operand: str, strides: tuple[int, int], offset: int, reads: int | None
) -> None:
    """What is read of a mode of extent 1 is its packed stride, rounded up."""
    made = make_operands(problem, torch.device("cpu"), 0)
    given = {"a": made.a, "b": made.b, "out": made.out}
    room = torch.empty(2048, dtype=given[operand].dtype)
    assert room.data_ptr() % 16 == 0
    given[operand] = room.as_strided(given[operand].shape, strides, offset)
    if reads is None:
        with pytest.raises(NotTaken, match="multiple"):
            operand_reader(problem)(**given)
        return
    places = operand_reader(problem)(**given)
    assert places[:3] == tuple(tensor.data_ptr() for tensor in given.values())
    assert places[3 + list(given).index(operand)] == reads


@pytest.mark.parametrize(("step", "reads"), [(64, 64), (80, 80), (0, 0), (68, None)])
def test_batch_entries_are_in_units_apart(step: int, reads: int | None) -> None:
    problem = Problem(4, 24, 16, 3)
    made = make_operands(problem, torch.device("cpu"), 0)
    a = torch.empty(2048, dtype=made.a.dtype).as_strided((3, 4, 16), (step, 16, 1))
    if reads is None:
        with pytest.raises(NotTaken, match="batch stride 68 is not a multiple of 8"):
            operand_reader(problem)(a, made.b, made.out)
    else:
        assert operand_reader(problem)(a, made.b, made.out)[6:] == (reads, 24 * 16, 4 * 24)
    alone = make_operands(Problem(4, 24, 15), torch.device("cpu"), 0)
    assert operand_reader(Problem(4, 24, 15), 2, 2)(alone.a, alone.b, alone.out)[6:] == (60, 360, 96)


def test_launches_of_other_strides_are_made_once_and_kept_up_to_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launching, "MAX_MADE", 2)
    made: list[int] = []
    launched: list[tuple[int, ...]] = []

    def make(stride: int) -> Any:
        made.append(stride)
        return lambda *words: launched.append(words)

    launcher = AddressLauncher(
        lambda a, b, out: (0, 0, 0, a.stride(0)), make, lambda operands: (*operands, 9)
    )
    tensors = {stride: torch.empty(2, 40)[:, :8].as_strided((2, 8), (stride, 1)) for stride in (8, 16, 24)}
    for stride in (8, 16, 8, 16, 24, 24, 8):
        launcher(tensors[stride], tensors[8], tensors[8], 5)
    assert made == [8, 16, 24, 8] and len(launched) == 7
    addresses = tuple(tensors[stride].data_ptr() for stride in (8, 8, 8))
    assert launched[0] == (*addresses, 5, 9)


@pytest.mark.parametrize(
    ("problem", "takes"),
    [
        (Problem(4096, 4096, 4096), True), (Problem(16, 24, 32, 5), True), (Problem(4, 24, 16), True),
        (Problem(4, 20, 16), False), (Problem(8, 20, 16, out_major="m"), True),
        (Problem(4, 20, 16, out_dtype="fp32"), True), (Problem(4, 24, 16, alignment=8), False),
        (Problem(3, 24, 16, 2), True), (Problem(4, 48, 16, epilogue="swiglu"), True),
        (Problem(4, 40, 16, epilogue="swiglu"), False),
    ],
)  # fmt: skip
def test_tma_takes_lines_of_whole_units(problem: Problem, takes: bool) -> None:
    assert tma_takes(problem) == takes


@pytest.mark.parametrize(
    ("epilogue", "change", "says"),
    [
        ("bias_n", lambda x: x, ""), ("bias_n", lambda x: x[:-1], r"bias of shape \(23,\); .* takes \(24,\)"),
        ("bias_n", lambda x: x.half(), r"bias of dtype torch\.float16; its epilogue takes bf16"),
        ("bias_n", lambda x: torch.stack((x, x), 1)[:, 0], "packed, aligned vector"),
        ("bias_n", lambda x: torch.cat((x[:1], x))[1:], "packed, aligned vector"),
        ("residual", lambda x: x, ""), ("residual", lambda x: torch.cat((x, x), 1)[:, :24], ""),
        ("residual", lambda x: torch.cat((x, x[:, :4]), 1)[:, :24], "lines of 16 bytes"),
        ("residual", lambda x: torch.cat((x[:, :4], x, x[:, :4]), 1)[:, 4:28], "lines of 16 bytes"),
        ("residual", lambda x: x.t().contiguous().t(), "lines of 16 bytes"),
    ],
)  # fmt: skip
def test_words_of_an_epilogues_tensor(epilogue: str, change: Callable[..., torch.Tensor], says: str) -> None:
    problem = Problem(4, 24, 16, epilogue=epilogue)
    tensor = change(*make_operands(problem, torch.device("cpu"), 0).fused)
    if says:
        with pytest.raises(ValueError, match=says):
            words_reader(problem)([tensor])
        return
    words = words_reader(problem)([tensor])
    lines = [tensor.stride(0), 0] if epilogue == "residual" else []
    assert words[: 1 + len(lines)] == [tensor.data_ptr(), *lines] and len(words) == MAX_WORDS
    assert not any(words[1 + len(lines) :])
    bind = words_binder(problem, [tensor])
    other = torch.empty(512, dtype=tensor.dtype)
    assert list(bind([other], []) or ()) == [other.data_ptr(), *words[1:]]
    assert bind([other[1:]], []) is None, "less aligned than it needs"


def test_words_of_a_number_and_of_several_operands() -> None:
    problem = Problem(4, 24, 16, epilogue="alpha+bias_n")
    bias = torch.empty(24, dtype=torch.bfloat16)
    one, large = 0x3F800000, 0x7F800000
    assert words_reader(problem)([1.0, bias])[:2] == [one, bias.data_ptr()]
    bind = words_binder(problem, [1.0, bias])
    assert list(bind([bias], [1e300]) or ())[:2] == [large, bias.data_ptr()]
    assert list(bind([bias], [-1e300]) or ())[:1] == [large + (1 << 31)]
    assert bind([torch.empty(25, dtype=torch.bfloat16)[1:]], [1.0]) is None
    with pytest.raises(ProblemError, match=r"takes 2 operands \(alpha, bias\), not 1"):
        words_reader(problem)([1.0])
    three = replace(problem, epilogue="alpha+bias_n+residual")
    residual = torch.zeros(4, 64, dtype=torch.bfloat16)[:, :24]
    words = words_reader(three)([1.0, bias, residual])
    assert words == [one, bias.data_ptr(), residual.data_ptr(), 64, 0] + [0] * 7
