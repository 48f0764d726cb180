"""Attention in graphs of the backend: a causal mask that a graph computes itself is left out, no other is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tunegemm.layers import backend, masks


def causal(length: int) -> torch.Tensor:
    place = torch.arange(length)
    return place[None, None, None, :] <= place[None, None, :, None]


def window(length: int) -> torch.Tensor:
    place = torch.arange(length)
    return causal(length) & (place[None, None, None, :] + 3 > place[None, None, :, None])


def anti_causal(length: int) -> torch.Tensor:
    place = torch.arange(length)
    return place[None, None, None, :] >= place[None, None, :, None]


def one_row_for_all(length: int) -> torch.Tensor:
    return causal(length)[:, :, -1:]


def changed(length: int) -> torch.Tensor:
    mask = causal(length) | causal(length)
    mask[..., 0] = length % 2 == 0
    return mask


def attention(make: Callable[[int], torch.Tensor], *extra: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        keys = F.pad(x, (0, 0, 0, extra[0])) if extra else x
        return F.scaled_dot_product_attention(
            x, keys, keys, attn_mask=make(keys.shape[-2])[..., : x.shape[-2], :]
        )

    return forward


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call that `masks` makes is without a mask."""
    found: list[bool] = []
    monkeypatch.setattr(masks, "sdpa", lambda *given, own=masks.sdpa, **words: (
        found.append(words["attn_mask"] is None), own(*given, **words)
    )[1])  # fmt: skip
    return found


def check(
    forward: Callable[..., torch.Tensor], *given: Any, lengths: tuple[int, ...] = (16, 7, 24, 7, 1)
) -> None:
    torch._dynamo.reset()
    run = torch.compile(forward, backend=backend.tunegemm, fullgraph=True)
    for length in lengths:
        x = torch.randn(2, 3, length, 8)
        torch.testing.assert_close(run(x, *given), forward(x, *given))


def test_a_causal_mask_is_left_out_at_every_length(seen: list[bool]) -> None:
    check(attention(causal))
    assert len(seen) == 5 and all(seen)


@pytest.mark.parametrize("make", [window, anti_causal])
def test_other_masks_stay(seen: list[bool], make: Callable[[int], torch.Tensor]) -> None:
    check(attention(make))
    assert seen == [False] * 4 + [True], "a mask of one row is causal"


def test_a_mask_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host waits for that."""
    looked: list[int] = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *each: looked.append(1) or equal(*each))  # type: ignore[func-returns-value]
    for make, found in ((causal, None), (window, window(6))):
        mask = masks.Mask(make)  # type: ignore[arg-type]
        for _ in range(3):
            result = mask(6)
            assert (result is None) == (found is None) and (found is None or equal(result, found))
    assert len(looked) == 2


@pytest.mark.parametrize("make", [lambda n: causal(n).expand(4, 1, n, n), lambda n: causal(n)[None]])
def test_a_mask_of_more_batches_is_torchs_to_refuse(seen: list[bool], make: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    forward, x = attention(make), torch.randn(1, 3, 8, 8)
    for call in (forward, torch.compile(forward, backend=backend.tunegemm)):
        with pytest.raises(RuntimeError):
            call(x)
    assert not seen


@pytest.mark.parametrize("make", [one_row_for_all, changed])
def test_a_mask_that_is_no_square_or_is_written_to_stays(
    seen: list[bool], make: Callable[[int], torch.Tensor]
) -> None:
    check(attention(make), lengths=(16, 7, 24, 7))
    assert not seen


def test_more_keys_than_queries_keep_the_mask(seen: list[bool]) -> None:
    check(attention(causal, 5))
    assert not seen


def test_a_mask_that_depends_on_an_input_stays(seen: list[bool]) -> None:
    def forward(x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=causal(x.shape[-2]) & allowed)

    check(forward, torch.tensor(True))
    assert not seen


def test_a_mask_that_the_graph_returns_stays(seen: list[bool]) -> None:
    def forward(x: torch.Tensor) -> Any:
        mask = causal(x.shape[-2])
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask), mask

    check(forward)
    assert not seen


def test_layers_share_one_mask_and_keep_their_own_words(seen: list[bool]) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        mask = causal(x.shape[-2])
        x = F.scaled_dot_product_attention(x, x, x, mask, 0.0, False, scale=0.5)
        return F.scaled_dot_product_attention(x, x[:, :1], x[:, :1], attn_mask=mask, enable_gqa=True)

    check(forward)
    assert len(seen) == 10 and all(seen)


def test_gradients_pass() -> None:
    x, run = (
        torch.randn(1, 2, 8, 4, requires_grad=True),
        torch.compile(attention(causal), backend=backend.tunegemm),
    )
    (ours,) = torch.autograd.grad(run(x).square().sum(), x)
    (torchs,) = torch.autograd.grad(attention(causal)(x).square().sum(), x)
    torch.testing.assert_close(ours, torchs)


@pytest.mark.slow
@pytest.mark.parametrize("sliding_window", [pytest.param(None, marks=pytest.mark.slow), 16])
def test_a_model_of_transformers(seen: list[bool], sliding_window: int | None) -> None:
    """Its mask has parts for packed sequences; its eager code passes none where it is causal."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, sliding_window=sliding_window,
    )  # fmt: skip
    torch._dynamo.reset()
    model = transformers.MistralForCausalLM(config).eval()
    run = torch.compile(model, backend=backend.tunegemm)
    with torch.inference_mode():
        for length in (32, 20):
            ids = torch.randint(128, (2, length))
            expected, result = (call(ids, use_cache=False).logits for call in (model, run))
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert seen == [sliding_window is None] * 2
