"""Which kernel of groups is loaded, and for how many multiprocessors."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunegemm.describe.device import find_device
from tunegemm.dispatch import extension
from tunegemm.errors import ArtifactError
from tunegemm.groups import grouped, routing
from tunegemm.model.grouped import AlongKChoice, GroupedChoice, configs, listed_along_k

H200 = find_device("model:h200")
CONFIG = configs("bf16")["pp128x128"]


@pytest.mark.parametrize(
    ("choice", "budget", "is_few", "words"),
    [
        (GroupedChoice(CONFIG, 4, 2), 132, False, {"blocks": 132, "swizzle_size": 4, "l2_hint": 2}),
        (GroupedChoice(CONFIG, 4, 2), 100, False, {"blocks": 100, "swizzle_size": 4, "l2_hint": 2}),
        (GroupedChoice(CONFIG, 4, 2, is_few=True), 132, True, None),
        (GroupedChoice(CONFIG, 4, 2, is_few=True), 9, False, {"blocks": 9, "swizzle_size": 4, "l2_hint": 2}),
        (AlongKChoice(listed_along_k()[0], 8), 132, False, {"blocks": 132, "swizzle_size": 8}),
    ],
)  # fmt: skip
def test_a_kernel_is_bound_to_the_multiprocessors_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch, choice: Any, budget: int, is_few: bool, words: Any
) -> None:
    bound: list[Any] = []
    place = torch.device("cuda", 0)
    device = H200 if budget == 132 else H200.with_sm_budget(budget)

    def of(*operands: Any, **given: Any) -> Any:
        bound.append(given)
        return lambda *launched: bound.append(launched)

    monkeypatch.setattr(extension, "device_of", lambda place: device)
    monkeypatch.setattr(extension, "loaded", lambda maker, config, place: SimpleNamespace(of=of))
    monkeypatch.setattr(grouped.routing, "few", lambda config, index: ("few", config, index))
    kernel = grouped.Groups().load(choice, place)
    if is_few:
        assert kernel == ("few", CONFIG, 0)
        return
    assert kernel is not None
    kernel("a", "b")("c")
    assert bound == [words, ("c",)]
    monkeypatch.setattr(extension, "loaded", lambda *_: None)
    assert grouped.Groups().load(choice, place) is None


@pytest.mark.parametrize(
    ("reason", "artifact", "loads"), [(None, "a.o", True), (None, None, False), ("no Hopper", "a.o", None)]
)
def test_a_kernel_of_routing_is_loaded_once_it_is_compiled(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, artifact: str | None, loads: bool | None
) -> None:
    family = SimpleNamespace(
        name=f"routing {reason} {artifact}",  # what is loaded once is kept by name
        cannot_launch=lambda device: reason,
        key_of=lambda name: f"key of {name}",
        kernel=lambda name, path: (name, path),
    )
    asked: list[Any] = []
    found = None if artifact is None else SimpleNamespace(path=artifact)
    monkeypatch.setattr(routing.kernels, "FAMILY", family)
    monkeypatch.setattr(extension, "device_of", lambda place: H200)
    monkeypatch.setattr(extension, "compiled", lambda name, key: asked.append((name, key)) or found)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    if loads is None:
        with pytest.raises(ArtifactError, match="no Hopper"):
            routing.load_compiled("gate", 0)
    else:
        for _ in range(2):
            assert routing.load_compiled("gate", 0) == (("gate", "a.o") if loads else None)
        assert asked == [(family.name, "key of gate")] * (1 if loads else 2)
