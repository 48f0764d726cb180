"""Where a product's gradients lie, and which products are single ones."""

from __future__ import annotations

import pytest
import torch

from tunegemm.dispatch.autograd import gradients, is_simple


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

    of_a, of_b = gradients(multiply, grad, (a, b), (True, True))
    assert of_a is not None and of_b is not None
    torch.testing.assert_close(of_a, grad @ b.mT)
    torch.testing.assert_close(of_b, a.mT @ grad)
    assert asked[0] == ((shape[-1], 5) if turned else (shape[-2], 5))
    assert asked[1] == (shape[-1], shape[-2])
    assert gradients(multiply, grad, (a, b), (False, False)) == (None, None)


def test_a_gradient_that_is_expanded_or_of_many_rows() -> None:
    a, b = torch.randn(2, 4, 3), torch.randn(3, 5)
    grad = torch.randn(1, 1, 5).expand(2, 4, 5)
    seen = []

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        seen.extend([left, right])
        return left @ right

    _, of_b = gradients(multiply, grad, (a, b), (True, True))
    assert of_b is not None
    torch.testing.assert_close(of_b, a.flatten(0, 1).t() @ grad.flatten(0, 1))
    assert not any(0 in each.stride() for each in seen)


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
