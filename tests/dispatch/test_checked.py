"""What a launch asks of its operands: places, devices, and that what it writes is nobody else's memory."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tunegemm.describe.problem import Problem
from tunegemm.dispatch.launchers import are_apart, is_apart_from
from tunegemm.dispatch.operation import Checked, Extent, share_memory
from tunegemm.errors import ProblemError
from tunegemm.measure.operands import make_operands

CPU = torch.device("cpu")
EVERYTHING = "alpha+scale_tensor+beta_c+bias_n+gelu_tanh+residual+amax"
BF16 = torch.bfloat16


def bytes_of(view: torch.Tensor) -> set[int]:
    """The addresses of all its bytes."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride
    item = view.element_size()
    return {view.data_ptr() + int(at) * item + byte for at in offsets.flatten() for byte in range(item)}


def test_what_shares_memory_is_found_and_columns_side_by_side_are_apart() -> None:
    """Against the bytes themselves, for random views of one buffer."""
    draw, room = random.Random(5), torch.zeros(4096, dtype=torch.uint8)
    found = {True: 0, False: 0}
    for _ in range(3000):
        views = []
        for _ in range(2):
            pitch = draw.choice((16, 16, 32, 24))
            shape = (draw.choice((1, 2)), draw.choice((1, 2, 5)), draw.choice((1, 4, 8)))
            start = 2 * draw.randrange(24)
            strides = (pitch * draw.choice((5, 6)), pitch, 1)
            views.append(room.view(BF16).as_strided(shape, strides, start))
        one, two = views
        said = share_memory(one.data_ptr(), Extent.of(one), two.data_ptr(), Extent.of(two))
        shared = bool(bytes_of(one) & bytes_of(two))
        assert said or not shared, (one.shape, one.stride(), two.shape, two.stride())
        first, last = sorted((bytes_of(one), bytes_of(two)), key=min)
        assert not said or max(first) >= min(last), "one behind the other"
        found[shared] += 1
        if one.stride()[1] == two.stride()[1] == 16 and one.shape[1] == two.shape[1] == 5:
            columns = [view.storage_offset() % 16 for view in views]
            if all(at + view.shape[2] <= 16 for at, view in zip(columns, views, strict=True)):
                inside = [set(range(at, at + view.shape[2])) for at, view in zip(columns, views, strict=True)]
                assert not said or bool(inside[0] & inside[1]), "columns side by side"
    assert min(found.values()) > 300


def given(problem: Problem) -> list[Any]:
    return list(make_operands(problem, CPU, 0).arguments)


def run(problem: Problem, arguments: list[Any]) -> None:
    a, b, out, *operands = arguments
    Checked(problem, CPU)(a, b, out, operands)


PROBLEMS = [
    Problem(40, 48, 64),
    Problem(40, 48, 64, 3),
    Problem(40, 48, 64, epilogue=EVERYTHING),
    Problem(40, 48, 64, 2, out_major="m", epilogue="beta_c+residual"),
    Problem(40, 48, 64, epilogue="beta_c+swiglu+residual+amax"),
    Problem(40, 48, 64, in_dtype="fp8_e4m3", out_dtype="fp8_e4m3", epilogue="scale_rowwise+residual"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_right_operands_pass_again_and_again(problem: Problem) -> None:
    check = Checked(problem, CPU)
    for _ in range(3):
        a, b, out, *operands = given(problem)
        check(a, b, out, operands)


@pytest.mark.parametrize("name", ["a", "b", "c", "bias", "residual", "scale_a", "amax"])
def test_what_is_written_must_not_meet_what_is_read(name: str) -> None:
    """On the first run and on one whose shapes are known."""
    problem = PROBLEMS[2]
    names = ["a", "b", "out", *(one.name for one in problem.fused.operands)]
    check, right = Checked(problem, CPU), given(problem)
    check(*right[:3], right[3:])
    place = names.index(name)
    room = torch.zeros(1 << 16, dtype=torch.uint8)
    wrong = list(right)
    wrong[2] = room[8192 : 8192 + 40 * 48 * 2].view(BF16).view(40, 48)
    old = right[place]
    size = old.numel() * old.element_size()
    # Its last bytes are the output's first ones.
    memory = room[8192 + 16 - size :][:size].view(old.dtype)
    wrong[place] = memory.view(old.shape) if name != "b" else memory.view(48, 64).t()
    for fresh in (check, Checked(problem, CPU)):
        with pytest.raises(ProblemError, match=f"{name} shares memory with out, which the kernel writes"):
            fresh(*wrong[:3], wrong[3:])
    check(*right[:3], right[3:])


def test_an_amax_must_not_be_a_scale() -> None:
    problem = PROBLEMS[2]
    arguments = given(problem)
    arguments[-1] = arguments[4]
    with pytest.raises(ProblemError, match="scale_a shares memory with amax, which the kernel writes"):
        run(problem, arguments)


def test_out_is_a() -> None:
    problem = Problem(48, 48, 48)
    a, b, _ = given(problem)
    with pytest.raises(ProblemError, match="a shares memory with out"):
        run(problem, [a, b, a])


class TestMatricesThatAreTheOutput:
    def test_the_whole_of_it_may_be(self) -> None:
        for epilogue in ("residual", "beta_c"):
            arguments = given(Problem(40, 48, 64, epilogue=epilogue))
            arguments[-1] = arguments[2]
            run(Problem(40, 48, 64, epilogue=epilogue), arguments)

    def test_some_rows_before_or_behind_may_not(self) -> None:
        problem = Problem(40, 48, 64, epilogue="residual")
        a, b, *_ = given(problem)
        room = torch.zeros(64, 48, dtype=BF16)
        for first in (0, 16):
            with pytest.raises(ProblemError, match=r"residual shares memory with out.* or out itself"):
                run(problem, [a, b, room[8:48], room[first : first + 40]])

    def test_nor_with_other_strides_shape_or_dtype(self) -> None:
        a, b, *_ = given(Problem(40, 48, 64))
        room = torch.zeros(80, 48, dtype=BF16)
        problem = Problem(40, 48, 64, epilogue="residual")
        with pytest.raises(ProblemError, match="residual shares memory with out"):
            run(problem, [a, b, room[0::2], room[:40]])
        gated = Problem(40, 48, 64, epilogue="beta_c+swiglu")
        with pytest.raises(ProblemError, match="c shares memory with out"):
            run(gated, [a, b, room[:40, :24], 1.0, room[:40]])

    def test_columns_beside_it_may_be(self) -> None:
        problem = Problem(40, 48, 64, epilogue="residual")
        a, b, *_ = given(problem)
        room = torch.zeros(40, 96, dtype=BF16)
        run(problem, [a, b, room[:, :48], room[:, 48:]])


class TestPlacesAndKinds:
    @pytest.mark.parametrize("name", ["scale_b", "c", "bias", "residual", "amax"])
    def test_another_device(self, name: str) -> None:
        problem = PROBLEMS[2]
        arguments = given(problem)
        place = 3 + [one.name for one in problem.fused.operands].index(name)
        arguments[place] = arguments[place].to("meta")
        with pytest.raises(ProblemError, match=f"{name} is on meta; .* needs it on cpu"):
            run(problem, arguments)

    def test_no_tensor_and_no_number(self) -> None:
        problem = Problem(40, 48, 64, epilogue="alpha+bias_n")
        a, b, out, alpha, bias = given(problem)
        with pytest.raises(ProblemError, match=r"bias 1.0 is not a tensor; .* needs a tensor on cpu"):
            run(problem, [a, b, out, alpha, 1.0])
        check = Checked(problem, CPU)
        check(a, b, out, [alpha, bias])
        with pytest.raises(ProblemError, match=r"alpha tensor\(1.\) is not a number; give a float"):
            check(a, b, out, [torch.tensor(1.0), bias])

    def test_a_wrong_number_of_operands(self) -> None:
        problem = Problem(40, 48, 64, epilogue="alpha+bias_n")
        with pytest.raises(ProblemError, match=r"takes 2 operands \(alpha, bias\), not 1"):
            run(problem, given(problem)[:4])


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("span", range(4))
def test_an_output_is_apart_if_it_has_none_of_their_bytes(start: int, span: int) -> None:
    """At small addresses, against the bytes themselves."""

    class Room(NamedTuple):
        address: int
        size: int

        def untyped_storage(self) -> Room:
            return self

        def data_ptr(self) -> int:
            return self.address

        def nbytes(self) -> int:
            return self.size

    def shares(one: Room, *others: Room) -> bool:
        own = range(one.address, one.address + one.size)
        return any({*own} & {*range(other.address, other.address + other.size)} for other in others)

    out = Room(start, span)
    for other, extent, second in itertools.product(range(6), range(1, 4), (0, 3)):
        rooms = Room(other, extent), Room(second, 2)
        assert is_apart_from(out, rooms) == (not shares(out, *rooms)) or not span  # type: ignore[arg-type]
        plan: Any = SimpleNamespace(spans=(extent, 2, span), address_bytes=2)
        apart = start % 2 == 0 and not shares(out, *rooms)
        assert are_apart(plan, other, second, start) == apart or not span


def test_two_storages_may_be_the_same_memory() -> None:
    """Of plans, too: what came by a buffer has a storage of its own each time."""
    memory = bytearray(4096)
    one, two, three = (
        torch.frombuffer(memory, dtype=BF16, offset=offset, count=512) for offset in (0, 1000, 2048)
    )
    assert one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr()
    assert not is_apart_from(one, (three, two))
    assert is_apart_from(one, (three,))
