"""Where a product's gradients lie, and which products are single ones."""

from __future__ import annotations

import pytest
import torch

from tunegemm.dispatch.autograd import differentiably, gradients, is_simple
from tunegemm.dispatch.autograd import turned as turned_of


@pytest.mark.parametrize(
    ("shape", "strides", "turned"),
    [
        ((4, 3), (3, 1), False),
        ((4, 3), (1, 4), True),
        ((4, 3), (1, 9), True),
        ((4, 3), (2, 8), False),
        ((4, 3), (1, 1), False),
        ((1, 3), (1, 4), False),
        ((4, 1), (1, 4), False),
        ((2, 4, 3), (12, 1, 4), True),
        ((2, 4, 3), (12, 3, 1), False),
    ],
)
def test_a_gradient_lies_as_its_operand_does(
    shape: tuple[int, ...], strides: tuple[int, ...], turned: bool
) -> None:
    a = torch.empty_strided(shape, strides).copy_(torch.randn(shape))
    b = torch.randn(*shape[:-2], shape[-1], 5)
    grad, asked = torch.randn(*shape[:-1], 5), []

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        asked.append(tuple(left.shape[-2:]))
        return left @ right

    columns = turned_of(a), turned_of(b)
    of_a, of_b = gradients(multiply, grad, (a, b), columns)
    assert of_a is not None and of_b is not None
    torch.testing.assert_close(of_a, grad @ b.mT)
    torch.testing.assert_close(of_b, a.mT @ grad)
    assert asked[0] == ((shape[-1], 5) if turned else (shape[-2], 5))
    assert asked[1] == (shape[-1], shape[-2])
    assert gradients(multiply, grad, (None, None), columns) == (None, None)


def test_a_gradient_that_is_expanded_or_of_many_rows() -> None:
    a, b = torch.randn(2, 4, 3), torch.randn(3, 5, requires_grad=True)
    grad = torch.randn(1, 1, 5).expand(2, 4, 5)
    seen = []

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        seen.append((left, right))
        return left @ right

    differentiably(multiply, a, b).backward(grad)
    torch.testing.assert_close(b.grad, a.flatten(0, 1).t() @ grad.flatten(0, 1))
    assert len(seen) == 2 and all(each.ndim == 2 and 0 not in each.stride() for pair in seen for each in pair)


def test_simple_products() -> None:
    def of(*shapes: tuple[int, ...]) -> bool:
        return is_simple(*(torch.empty(shape, device="meta") for shape in shapes))

    assert of((4, 3), (3, 5)) and of((2, 4, 3), (3, 5)) and of((2, 4, 3), (2, 3, 5))
    assert not any(
        of(*shapes)
        for shapes in (
            [(3,), (3, 5)], [(4, 3), (3,)], [(2, 4, 3), (1, 3, 5)], [(4, 3), (2, 3, 5)],
            [(1, 2, 4, 3), (1, 2, 3, 5)], [(3,), (2, 3, 5)],
        )
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)])
def test_a_bias_without_columns_has_a_gradient(shape: tuple[int, ...]) -> None:
    a, weight, bias = torch.randn(shape), torch.empty(0, 3), torch.empty(0, requires_grad=True)
    result = differentiably(lambda x, y: x @ y, a, weight, True, bias, lambda x, y, z: x @ y + z)
    result.sum().backward()
    assert bias.grad is not None and bias.grad.shape == (0,)
