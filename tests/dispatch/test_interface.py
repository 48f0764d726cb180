"""A product family of its own, built from outside on `dispatch.extension` and nothing else of dispatch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tunegemm
from tests.support.planted import compile_families
from tests.support.serving import calls_of, dispatcher_of, operands
from tests.support.waiting import until
from tunegemm.choose.snapshot import Snapshot
from tunegemm.dispatch import api, extension
from tunegemm.dispatch.background import make_pool
from tunegemm.dispatch.states import State
from tunegemm.errors import ArtifactError, TunegemmWarning


class Doubled:
    """``2 * (a @ b)``, by a kernel that is compiled when it is first asked for."""

    def __init__(self, what: str = "fine") -> None:
        self.launches, self.what = extension.LaunchCache(), what
        self.decided = self.launched = 0

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        key = a.numel(), b.numel()
        known = self.launches.find(key, a, b)
        if known is None:
            launch, waits = self.decide(a, b)
            known = self.launches.keep(key, launch, a, b, waits=waits)
        return torch.mm(a, b) * 2 if known.launch is None else known.launch(a, b)

    def decide(self, a: torch.Tensor, b: torch.Tensor) -> tuple[Callable[..., Any] | None, bool]:
        """The launch, None where torch computes; and whether its kernel is being compiled."""
        self.decided += 1
        if extension.is_off() or a.device.type != extension.device_type() or not extension.may_load(a.device):
            return None, False
        if extension.policy().is_batch_invariant:  # which this kernel is not
            return None, False
        key = {"name": f"doubled {a.dtype}", "what": self.what}
        try:
            artifact = extension.compiled("doubled", key)
        except ArtifactError as error:
            extension.warn(f"products doubled are torch's: {error}")
            return None, False
        return (None, True) if artifact is None else (self._launch, False)

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.launched += 1
        return torch.mm(a, b).mul_(2)


@pytest.fixture(autouse=True)
def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TUNEGEMM_COMPILE", "1")
    monkeypatch.setattr(extension, "LOOK_SECONDS", 0.05)
    before = api.serve_by(dispatcher_of([], pool=partial(make_pool, compile_families.__name__)))
    yield
    api.serve_by(before)


@pytest.fixture
def doubled() -> Doubled:
    """The family, with its kernel there."""
    family = Doubled()
    a, b = operands()
    assert torch.equal(family(a, b), torch.mm(a, b) * 2) and family.launched == 0
    until(lambda: family(a, b) is not None and family.launched)
    return family


def test_its_kernel_is_compiled_while_torch_computes_and_is_decided_on_once(doubled: Doubled) -> None:
    a, b = operands()
    decided = doubled.decided
    for other in (a, a.clone(), a + 1):
        assert torch.equal(doubled(other, b), torch.mm(other, b) * 2)
    assert doubled.decided == decided and doubled.launched == 4
    python, c = calls_of(lambda: doubled(a, b))
    assert [name for name in python if name.startswith("tunegemm.")] == ["tunegemm.dispatch.extension.find"]
    assert "check" in c


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strides": lambda x: x.t().contiguous().t() if x.is_contiguous() else x.contiguous(),
    "dtype": lambda x: x.half(),
    "lazy": torch._neg_view,
    "requires_grad": lambda x: x.detach().requires_grad_(),
    "inference": torch.Tensor.clone,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_is_decided_by_itself(doubled: Doubled, layout: str) -> None:
    doubled.what = "raise" if layout == "dtype" else "fine"  # a kernel of its own, which torch stands in for
    decided = doubled.decided
    with torch.inference_mode(layout == "inference"), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", TunegemmWarning)
        a, b = map(LAYOUTS[layout], operands())
        doubled(a, b)
        assert doubled.decided == decided + 1
    doubled(*operands())
    assert doubled.decided == decided + 1, "the first layout is known beside it"


def test_a_capture_finds_what_was_decided_for_operands_of_other_modes(
    doubled: Doubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch captures with copies of its own, and nothing can be decided then."""
    a, b = operands()
    doubled.launches.keep((a.numel(), b.numel()), doubled.decide, a, b)
    with torch.inference_mode():
        other = torch.empty_like(a).copy_(a)
    assert doubled.launches.find((a.numel(), b.numel()), other, b) is None
    monkeypatch.setattr(extension, "capturing", lambda device: True)
    found = doubled.launches.find((a.numel(), b.numel()), other, b)
    assert found is not None and found.launch == doubled.decide
    for another in (other[:16], other.double(), torch._neg_view(other)):
        assert doubled.launches.find((a.numel(), b.numel()), another, b) is None


def test_what_is_kept_ends_with_a_refresh_and_with_another_policy(doubled: Doubled) -> None:
    a, b = operands()
    decided, launched = doubled.decided, doubled.launched
    with tunegemm.policy("batch_invariant"):
        doubled(a, b), doubled(a, b)
        assert (doubled.decided, doubled.launched) == (decided + 1, launched)
    doubled(a, b)
    assert (doubled.decided, doubled.launched) == (decided + 1, launched + 1), "each policy has its own"
    tunegemm.refresh()
    doubled(a, b)
    assert (doubled.decided, doubled.launched) == (decided + 2, launched + 2)


def test_what_torch_computes_is_decided_anew_when_records_are_published() -> None:
    class Torchs(Doubled):
        def decide(self, a: torch.Tensor, b: torch.Tensor) -> tuple[None, bool]:
            self.decided += 1
            return None, False

    published = ["before"]
    read = lambda: Snapshot([], modified=published[0])  # noqa: E731
    api.serve_by(dispatcher_of(read=read, modified=lambda: published[0]))
    family, (a, b) = Torchs(), operands()
    with pytest.warns(TunegemmWarning, match="no record"):
        api.dispatcher.matmul(a, b)  # reads the records
    for stamp, decided in (("before", 1), ("after", 2)):
        family(a, b)
        published[0], api.dispatcher.planner.quick.until = stamp, 0.0
        family(a, b)
        assert family.decided == decided


def test_a_kernel_that_does_not_compile_is_said_once() -> None:
    family, (a, b) = Doubled("raise"), operands()
    with pytest.warns(
        TunegemmWarning, match="products doubled are torch's: .*fatal register shortage"
    ) as said:
        until(lambda: family(a, b) is not None and family.decided and said.list)
    family(a[:8], b)  # warnings are errors here


def test_layouts_and_keys_are_bounded(doubled: Doubled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "MAX_PLANS", 8)
    a, b = operands()
    for rows in range(1, 33):
        doubled(a[:rows], b)
        kept = api.dispatcher.planner.state.launches[doubled.launches]
        assert 0 < len(kept) <= 8
    for stride in range(64, 96):
        doubled(torch.zeros(32, stride, dtype=a.dtype)[:, :64], b)
    assert max(map(len, kept.values())) == 4


def test_threads_under_policies_of_their_own_each_find_theirs(doubled: Doubled) -> None:
    a, b = operands()
    expected = torch.mm(a, b) * 2

    def run(prefer: Any) -> bool:
        with tunegemm.policy(prefer):
            return all(torch.equal(doubled(a, b), expected) for _ in range(50))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, ("batch_invariant", "deterministic") * 2))


def test_a_state_has_five_caches() -> None:
    """Each is a kind of key to remember; what rooms above keep is in `launches`."""
    caches = {name for name, value in vars(State()).items() if isinstance(value, dict | set)}
    assert caches - {"torchs", "paying"} == {"plans", "recent", "launches", "prepared", "misses"}
