"""What a call of torch's operators is, as torch itself decides it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunegemm.dispatch import library, unfused
from tunegemm.dispatch.forms import ADDMM, LINEAR, MATMUL, form_of
from tunegemm.dispatch.library import addmm_steps, block_scales, is_sum, scale_steps, takes_fp8

FP8 = torch.float8_e4m3fn
SHAPES: dict[int, list[tuple[int, ...]]] = {
    2: [(), (1,), (4,), (5,), (3, 5), (1, 5), (3, 1), (1, 1), (5, 3), (3, 4), (1, 3, 5)],
    3: [(), (5,), (3, 5), (2, 3, 5), (1, 3, 5), (2, 1, 1), (1, 1, 5), (3, 3, 5), (2, 3, 1), (2, 5, 3)],
}


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("beta", [0, 1, 0.5])
def test_a_sum_is_one_where_torch_adds_it(dimensions: int, beta: float) -> None:
    add = {2: torch.addmm, 3: torch.baddbmm}[dimensions]
    lefts = [(3, 4), (3, 5), (4,)] if dimensions == 2 else [(2, 3, 4), (1, 3, 4), (3, 4)]
    rights = [(4, 5), (5, 4)] if dimensions == 2 else [(2, 4, 5), (2, 5, 4)]
    seen = set()
    for left, right, shape in itertools.product(lefts, rights, SHAPES[dimensions]):
        a, b, c = (torch.randn(each) for each in (left, right, shape))
        try:
            expected = add(c, a, b, beta=beta, alpha=0.25)
        except RuntimeError:
            assert not is_sum(c, a, b, beta, dimensions), (left, right, shape)
            continue
        assert is_sum(c, a, b, beta, dimensions), (left, right, shape)
        text, tensors, numbers = addmm_steps(c, a, b, beta, 0.25)
        seen.add(text)
        product = a @ b * numbers[0]
        (term,) = tensors or (torch.zeros(()),)
        torch.testing.assert_close(product + (numbers[-1] if "beta_c" in text else 1) * term, expected)
    assert seen == {0: {"alpha"}, 1: {"alpha+bias_n", "alpha+beta_c"}, 0.5: {"alpha+beta_c"}}[beta]


def test_c_counts_where_it_is_not_read() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert is_sum(torch.randn(5), a, b, 0, 2)
    for c in (
        torch.randn(5, dtype=torch.float64),
        torch.empty(5, device="meta"),
        torch.randn(5).requires_grad_(),
    ):
        assert not is_sum(c, a, b, 0, 2) and is_sum(c, a, b, 1, 2)
    with torch.no_grad():
        assert is_sum(torch.randn(5).requires_grad_(), a, b, 0, 2)


def test_rows_of_a_bias_are_biases() -> None:
    a, b, row = torch.randn(3, 4), torch.randn(4, 5), torch.randn(1, 5)

    def text(c: torch.Tensor, a: torch.Tensor = a, beta: float = 1, alpha: float = 1) -> str:
        return addmm_steps(c, a, b, beta, alpha)[0]

    assert text(row) == text(row.expand(3, 5)) == text(row[0]) == "bias_n"
    assert text(row, a[:1]) == text(torch.randn(3, 5)) == text(row.expand(1, 5), a[:1]) == "beta_c"
    assert (text(row, beta=2), text(row, beta=0), text(row, alpha=2, beta=0)) == ("beta_c", "", "alpha")
    assert addmm_steps(row, a, b, 2, 3)[2] == (3.0, 2.0)
    with pytest.raises(TypeError, match="'2' is not a number"):
        addmm_steps(row, a, b, "2", 1)  # type: ignore[arg-type]


def test_scales_by_their_shapes() -> None:
    a, b = torch.empty(3, 16), torch.empty(16, 5)

    def text(of_a: tuple[int, ...], of_b: tuple[int, ...], bias: bool = False, **given: Any) -> str:
        x, y = given.get("x", a), given.get("y", b)
        return scale_steps(x, y, torch.empty(of_a), torch.empty(of_b), bias)

    assert text((), ()) == text((1,), (1, 1)) == "scale_tensor"
    assert text((3, 1), (1, 5)) == "scale_rowwise" and text((3, 1), (1, 5), True) == "scale_rowwise+bias_n"
    assert text((), (), True) == "scale_tensor+bias_n"
    for of_a, of_b in (((3, 1), ()), ((), (1, 5)), ((3,), (5,)), ((1, 3), (1, 5)), ((3, 1), (5, 1))):
        assert text(of_a, of_b) == ""
    assert text((), (), x=torch.empty(1, 3, 16)) == text((), (), y=torch.empty(16)) == ""


def test_fp8_operands_that_torch_multiplies_as_they_lie() -> None:
    fp8, other = torch.float8_e4m3fn, torch.float8_e5m2
    a, weight = torch.empty(3, 32, dtype=fp8), torch.empty(16, 32, dtype=fp8)
    assert (
        takes_fp8(a, weight.t()) and takes_fp8(a, weight.t().to(other)) and takes_fp8(a.to(other), weight.t())
    )
    for x, y in (
        (a.to(other), weight.t().to(other)), (a.t().contiguous().t(), weight.t()),
        (a, weight.t().contiguous()),
        (a[:, :24], weight[:, :24].t()), (a, weight[:8].t()), (a.bfloat16(), weight.t()),
        (a, weight.t().bfloat16()), (a[None], weight.t()), (a, weight.t()[None]),
        (a.to(torch.int8), weight.t().to(torch.int8)),
    ):  # fmt: skip
        assert not takes_fp8(x, y)


def test_operators_say_which_scales_are_of_blocks() -> None:
    a, b = torch.empty(5, 400), torch.empty(400, 300)
    scale_a, scale_b, scale = torch.empty(5, 4), torch.empty(4, 3), torch.ones(())
    plain: list[Any] = [a, b, scale_a, scale_b, None, None, torch.bfloat16, False]
    v2: list[Any] = [a, b, [scale_a], [4], [], [scale_b], [5], [], None, torch.bfloat16, [], False]
    for name, arguments in (("_scaled_mm", plain), ("_scaled_mm_v2", v2)):
        found = block_scales(name, arguments)
        assert found is not None
        assert [
            found[place] is each for place, each in enumerate((a, b, scale_a, scale_b, torch.bfloat16))
        ] == [True] * 5
    assert block_scales("_scaled_mm", [*plain[:4], torch.empty(300)]) is None  # a bias
    assert block_scales("_scaled_mm", [*plain[:5], scale]) is None  # of the result
    for place, other in ((3, [5]), (6, [4]), (4, [1]), (2, [scale_a, scale_a])):
        assert block_scales("_scaled_mm_v2", [*v2[:place], other, *v2[place + 1 :]]) is None


@pytest.mark.parametrize(
    ("text", "out_dtype", "on_cpu", "on_gpu"),
    [
        ("scale_tensor", None, True, True), ("scale_rowwise", torch.bfloat16, True, True),
        ("scale_rowwise", torch.float32, True, False), ("scale_rowwise", None, True, False),
        ("scale_tensor+bias_n", torch.float16, True, True),
        ("scale_tensor+bias_n", torch.float32, True, False),
        ("scale_rowwise+bias_n", torch.bfloat16, True, True),
    ],
)  # fmt: skip
def test_scales_that_torch_has_on_a_gpu(text: str, out_dtype: Any, on_cpu: bool, on_gpu: bool) -> None:
    given: Any = [SimpleNamespace(is_cuda=is_cuda) for is_cuda in (False, True)]
    assert [library.has_scales(text, a, out_dtype) for a in given] == [on_cpu, on_gpu]


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.mark.parametrize(("rows", "padded"), [(16, 17), (17, 17), (1, 17), (40, 40)])
def test_int8_products_of_few_rows_are_padded_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, rows: int, padded: int
) -> None:
    seen: list[int] = []
    multiply = torch._int_mm

    def of_int8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(a.shape[0])
        return multiply(a.as_subclass(torch.Tensor), b)

    monkeypatch.setattr("torch._int_mm", of_int8)
    a, b = torch.randint(-9, 9, (rows, 8), dtype=torch.int8), torch.randint(-9, 9, (8, 16), dtype=torch.int8)
    expected = a.int() @ b.int()
    for operand, shown in ((a, rows), (a.as_subclass(OnGpu), padded)):
        assert torch.equal(unfused.of_int8(operand, b), expected) and seen.pop() == shown


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize(
    ("a", "b"), [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((2, 2, 3, 4), (2, 4, 5))]
)
def test_a_value_for_each_column_is_added(a: tuple[int, ...], b: tuple[int, ...], out: bool) -> None:
    left, right, bias = torch.randn(a), torch.randn(b), torch.randn(5)
    expected = left @ right + bias
    room = torch.empty_like(expected) if out and len(a) == len(b) else None
    result = unfused.added(left, right, bias, room)
    torch.testing.assert_close(result, expected)
    assert room is None or result is room


@pytest.mark.parametrize(
    ("call", "text", "a", "b", "taken"),
    [
        (LINEAR, "bias_n", 2, 2, ("bias",)), (LINEAR, "bias_n", 1, 2, ("bias",)),
        (MATMUL, "bias_n", 2, 2, ("bias",)),
        (MATMUL, "bias_n", 3, 2, ("bias",)), (MATMUL, "bias_n", 3, 3, ("bias",)),
        (MATMUL, "bias_n", 1, 2, ()),
        (MATMUL, "bias_n", 4, 3, ()), (MATMUL, "beta_c", 2, 2, ("c",)), (MATMUL, "beta_c", 3, 2, ()),
        (MATMUL, "relu", 2, 2, ()), (ADDMM, "bias_n", 2, 2, ("bias",)),
    ],
)  # fmt: skip
def test_operands_that_autocast_casts(call: int, text: str, a: int, b: int, taken: tuple[str, ...]) -> None:
    left, right = torch.empty((2,) * a), torch.empty((2,) * b)
    assert unfused.taken_operands(form_of(call, text), left, right) == taken


@pytest.mark.parametrize(
    ("text", "dtype", "out_dtype", "rows", "taken"),
    [
        ("scale_tensor", FP8, torch.bfloat16, 32, ("scale_tensor",)),
        ("scale_tensor", FP8, torch.float32, 32, ("scale_tensor",)),
        ("scale_rowwise", FP8, torch.bfloat16, 32, ("scale_rowwise",)),
        ("scale_rowwise", FP8, torch.float32, 32, ()),
        ("scale_rowwise", FP8, torch.bfloat16, 24, ()), ("scale_tensor", FP8, torch.bfloat16, 24, ()),
        ("scale_tensor", torch.int8, torch.bfloat16, 32, ()), ("relu", torch.bfloat16, None, 32, ()),
        ("alpha", torch.bfloat16, None, 32, ("alpha",)), ("alpha", torch.bfloat16, torch.float32, 32, ()),
        ("alpha+beta_c", torch.bfloat16, None, 32, ("alpha", "beta_c")),
    ],
)  # fmt: skip
def test_steps_that_one_call_of_torch_takes(
    text: str, dtype: torch.dtype, out_dtype: Any, rows: int, taken: tuple[str, ...]
) -> None:
    form = form_of(MATMUL, text, out_dtype)
    a, b = torch.zeros(4, 32).to(dtype), torch.zeros(rows, 32).to(dtype).t()
    assert unfused.steps_taken(form, a, b, list(form.epilogue.steps), {}) == taken
