"""Which kernels ship compiled, by the names that messages give them; nothing is compiled here."""

from __future__ import annotations

import pytest

from tunegemm.generate import routing
from tunegemm.model.grouped import kinds
from tunegemm.store import provided


@pytest.fixture(autouse=True)
def _keys_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provided, "provide_keys", lambda keys: keys)


def named(kind: str = "", *, every: bool = False) -> dict[str, set[str]]:
    """The names by family, of groups' kernels that are provided."""
    found: dict[str, set[str]] = {}
    for name, (family, _) in provided.provide_grouped(kind, every=every).items():  # type: ignore[attr-defined]
        found.setdefault(family, set()).add(name)
    return found


def test_all_that_serves_ships() -> None:
    found = named()
    assert found["routing"] == set(routing.kernels())
    assert found["grouped"] and all(name.startswith("grouped ") for name in found["grouped"])
    assert found["along_k"] <= named("along_k")["along_k"]


def test_a_kind_is_provided_alone() -> None:
    assert named("routing") == {"routing": set(routing.kernels())}
    assert named("along_k").keys() == {"along_k"}
    for kind in kinds():
        some, every = named(kind), named(kind, every=True)
        assert not {"routing", "along_k"} & (some.keys() | every.keys())
        for family, names in some.items():
            assert names <= every[family]
