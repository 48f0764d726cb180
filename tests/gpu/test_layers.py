"""Models through the backend by real kernels: against fp32, captured, generating, trained, from threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import tunegemm
from tests.support.layers import BF16
from tests.support.numerics import difference
from tunegemm.dispatch import extension
from tunegemm.generate.joined import JoinedKernel
from tunegemm.layers import backend
from tunegemm.store.provided import provide_joined

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

SIZE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
FAMILIES = ("Llama", "Gemma", "Qwen2", "Phi3")


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> Iterator[None]:
    """Kernels of several weights are there from the first call on."""
    provided = provide_joined()
    assert not provided.failures
    before = extension.packs.find
    extension.packs.find = lambda key: before(key) or provided.of(key)
    yield
    extension.packs.find = before


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Rows and rows of the weights of each kind of launch that was bound from now on."""
    seen: list[tuple[int, ...]] = []
    own = JoinedKernel.bound

    def bound(self: Any, a: Any, weights: Any, *others: Any, **words: Any) -> Callable[[int, int], None]:
        seen.append((len(a), *(len(weight) for weight in weights)))
        return own(self, a, weights, *others, **words)

    monkeypatch.setattr(JoinedKernel, "bound", bound)
    return seen


def model_of(family: str = "Llama") -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZE)
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config).to(BF16).eval()


def tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 512, (rows, length), generator=generator).cuda()


def logits(model: Callable[..., Any], ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


@pytest.mark.parametrize("rows", [(1, 7), (2, 32), (1, 200), (2, 512)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_fp32(family: str, rows: tuple[int, int], launches: list[Any]) -> None:
    torch._dynamo.reset()
    tunegemm.refresh()  # or launches at addresses that come back are known
    model, ids = model_of(family), tokens(*rows)
    exact = logits(copy.deepcopy(model).float(), ids)
    run = torch.compile(model, backend=backend.tunegemm)
    for _ in range(2):
        assert difference(logits(run, ids), exact) <= 1.3 * difference(logits(model, ids), exact)
    assert launches, "gates, or q, k and v"


@pytest.mark.parametrize("rows", [(1, 7), (2, 512)], ids=str)
def test_gates_under_inductor_are_kernels(rows: tuple[int, int], launches: list[Any]) -> None:
    """Without `enable` there are none, compiled before in the same process."""
    model, ids = model_of(), tokens(*rows)
    exact = logits(copy.deepcopy(model).float(), ids)
    for enabled in (nullcontext, tunegemm.enable):
        torch._dynamo.reset()
        tunegemm.refresh()
        with enabled():
            found = logits(torch.compile(model, dynamic=False), ids)
        assert difference(found, exact) <= 1.3 * difference(logits(model, ids), exact)
        assert bool(launches) is (enabled is not nullcontext)


def test_a_captured_step_and_eager_ones_are_the_same() -> None:
    torch._dynamo.reset()
    model, ids = model_of(), tokens(1, 16)
    run = torch.compile(model, backend=backend.tunegemm)
    expected = logits(run, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = logits(run, ids)
    other = tokens(1, 16, 2)
    ids.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, logits(run, other)) and not torch.equal(captured, expected)


def test_generation_gives_the_models_tokens() -> None:
    torch._dynamo.reset()
    model, ids = model_of(), tokens(2, 12)
    words = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **words)
    model.forward = torch.compile(model.forward, backend=backend.tunegemm, dynamic=True)
    found = model.generate(ids, **words)
    same = (found == expected).float().mean()
    assert found.shape == expected.shape and same > 0.8, "bits of sums differ, and with them a near tie"


def test_patched_mlps_and_trained_weights() -> None:
    model, ids = model_of(), tokens(1, 24)
    tunegemm.patch(model, fuse=True)
    plain = copy.deepcopy(model)
    tunegemm.unpatch(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(2):
        exact = logits(copy.deepcopy(plain).float(), ids)
        assert difference(logits(model, ids), exact) <= 1.3 * difference(logits(plain, ids), exact)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.load_state_dict(model.state_dict())


def test_eight_threads_of_streams_of_their_own() -> None:
    torch._dynamo.reset()
    model = model_of()
    run = torch.compile(model, backend=backend.tunegemm, dynamic=True)
    inputs = [tokens(1, length, length) for length in (3, 8, 17, 40, 64, 100, 129, 200)]
    expected = [logits(run, ids) for ids in inputs]
    torch.cuda.synchronize()
    wrong: list[Any] = []

    def work(place: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(25):
                    which = (place + turn) % len(inputs)
                    found, right = logits(run, inputs[which]), expected[which]
                    # Beyond 128 rows torch multiplies, too, whose bits differ from stream to stream.
                    is_ours = inputs[which].shape[1] <= 128
                    if not (torch.equal(found, right) if is_ours else difference(found, right) < 1e-2):
                        wrong.append(which)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
