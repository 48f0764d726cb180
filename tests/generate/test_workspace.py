"""Device memory of launches: what is lent, whose counters are kept, how much a candidate may ask for.

Streams are stand-ins, and their memory is the CPU's; tests/gpu/test_counters.py has real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.support.hopper import hopper
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.generate import families
from tunegemm.generate import workspace as memory
from tunegemm.generate.workspace import MAX_WORKSPACE_BYTES, Workspace, exceeded_workspace
from tunegemm.store.shipped import read_shipped

H200 = find_device("model:h200")


def test_lent_memory_serves_every_stream() -> None:
    workspace = Workspace(partial_bytes=512, counter_bytes=64, index=0)
    assert workspace.num_bytes == 576
    workspace.lend(4096)
    assert workspace.take(0) == workspace.take(7) == (4096, 4608, None)
    workspace.lend(1 << 20)
    assert workspace.take(0) == (1 << 20, (1 << 20) + 512, None)


@dataclass
class Stream:
    """As torch's: what allocations and zeros were made on it, by which thread."""

    cuda_stream: int
    stream_id: int
    device: str = "cpu"
    made: list[tuple[torch.Tensor, bool]] = field(default_factory=list)


class Streams:
    """The current stream, of each thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.default = Stream(0, 0)
        self.main = threading.get_ident()
        self.local = threading.local()
        self.is_capturing = False
        zeros, empty = torch.zeros, torch.empty

        def remembered(make: Any) -> Any:
            def call(*shape: Any, dtype: Any, device: Any) -> torch.Tensor:
                found = make(*shape, dtype=dtype, device="cpu")
                if make is empty:
                    found.fill_(0x5A)
                self.current.made.append((found, threading.get_ident() == self.main))
                return found

            return call

        patch.setattr(torch, "zeros", remembered(zeros))
        patch.setattr(torch, "empty", remembered(empty))
        patch.setattr(torch.cuda, "current_stream", lambda index: self.current)
        patch.setattr(torch.cuda, "default_stream", lambda index: self.default)
        patch.setattr(torch.cuda, "stream", self.use)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.marks.append(stream))
        patch.setattr(memory, "_allocation", lambda index: self.allocate)
        for kept in ("_blocks", "_addresses"):
            patch.setattr(memory, kept, {})
        self.marks: list[Stream] = []

    @property
    def current(self) -> Stream:
        return getattr(self.local, "stream", self.default)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.local.stream = self.current, stream
        yield
        self.local.stream = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def taken(streams: Streams, workspace: Workspace, stream: Stream) -> tuple[int, Any]:
    """Where a launch's counters are, and what it holds until it is queued."""
    with streams.use(stream):
        _, counters, held = workspace.take(stream.cuda_stream)
    return counters, held


@pytest.mark.parametrize("partial_bytes", [0, 512])
def test_counters_are_kept_for_streams_that_last(streams: Streams, partial_bytes: int) -> None:
    """Of the stream's own memory and zeroed on it, by a thread whose allocations go nowhere else."""
    workspace = Workspace(partial_bytes, 64, 0)
    for stream in (streams.default, Stream(0x5581A0, 3), Stream(0x5581B0, 35)):
        found = {taken(streams, workspace, stream)[0] for _ in range(3)}
        blocks = [(block, by_caller) for block, by_caller in stream.made if block.numel() == 16384]
        ((block, by_caller),) = blocks
        assert found == {block.data_ptr()} and not by_caller and not block.any()
    assert len(memory._blocks) == 3


@pytest.mark.parametrize(
    "stream",
    [Stream(0x5581C0, 0x5581C0), Stream(2, 2), Stream(0x5581D0, 5)],
    ids=["external", "of each thread", "captured"],
)
def test_each_launch_zeroes_counters_of_its_own_elsewhere(streams: Streams, stream: Stream) -> None:
    workspace = Workspace(512, 64, 0)
    streams.is_capturing = stream.stream_id == 5
    held = []
    for _ in range(2):
        counters, own = taken(streams, workspace, stream)
        assert counters == own.data_ptr() + 512 and not own[512:].any() and own[:512].all()
        own[512:] = 1  # as if a launch had failed
        held.append(own)
    assert held[0].data_ptr() != held[1].data_ptr() and not memory._blocks
    # Torch takes the streams of all threads for one: its memory for them would be another's too early.
    assert len(streams.default.made) == (2 if stream.cuda_stream == 2 else 0)
    assert streams.marks == ([stream] * 2 if stream.cuda_stream == 2 else [])


def test_a_stream_known_by_its_handle_alone_has_its_block(streams: Streams) -> None:
    workspace, stream = Workspace(0, 64, 0), Stream(0x5581E0, 7)
    counters, _ = taken(streams, workspace, stream)
    assert taken(streams, workspace, Stream(0x5581E0, 0x5581E0))[0] == counters
    with streams.use(streams.default):  # a handle that is not the current stream's says nothing of it
        assert memory._block(0, 0x5581F0) == 0


def test_threads_share_a_streams_block(streams: Streams) -> None:
    workspace, stream = Workspace(0, 64, 0), Stream(0x558200, 9)
    found: list[int] = []
    begin = threading.Barrier(8)

    def work() -> None:
        begin.wait()
        found.extend(taken(streams, workspace, stream)[0] for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 400 and len(set(found)) == 1 and len(stream.made) == 1


def test_at_exit_no_thread_can_be_started(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    counters, own = taken(streams, Workspace(0, 64, 0), streams.default)
    assert counters == own.data_ptr() and not own.any() and not memory._blocks


def test_lacking_memory_is_heard(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        taken(streams, Workspace(0, 64, 0), streams.default)


def test_a_workspace_has_a_greatest_size() -> None:
    assert exceeded_workspace(None) is None
    assert exceeded_workspace(Workspace(MAX_WORKSPACE_BYTES - 8, 8, 0)) is None
    reason = exceeded_workspace(Workspace(MAX_WORKSPACE_BYTES, 8, 0))
    assert reason is not None and "workspace 268435464 B > 268435456 B" in reason


@pytest.mark.parametrize("scheduler", ["static", "stream_k"])
def test_a_candidate_that_asks_for_gigabytes_does_not_run(scheduler: str) -> None:
    """Also where the rule on splits, which is of speed, is all that objects to it."""
    problem, family = Problem.parse("65536x8192x4096"), families.get("cute_sm90")
    split = {"split_k": 8} if scheduler == "static" else {}
    candidate = hopper({"tile_m": 256, "tile_scheduler": scheduler}, split)
    verdict = family.check(problem, candidate, H200)
    assert (verdict.rule == "workspace") == (not verdict.runs) == (scheduler == "static"), verdict
    if scheduler == "static":
        assert "workspace 17180917760 B" in verdict.reason


def test_an_algorithm_of_the_library_is_bounded_as_well() -> None:
    record = next(r for r in read_shipped()[0] if r.candidate.params.get("workspace_bytes", 0))
    family = families.get("cublaslt")
    assert family.check(record.problem, record.candidate, H200)
    greedy = record.candidate.with_launch(workspace_bytes=MAX_WORKSPACE_BYTES + 1)
    assert family.check(record.problem, greedy, H200).rule == "workspace"


def test_what_ships_is_far_below_it() -> None:
    asked = [
        memory.num_bytes
        for record in read_shipped()[0]
        if (memory := families.get(record.candidate.family).workspace(record.problem, record.candidate, H200))
    ]
    assert len(asked) > 50 and max(asked) < MAX_WORKSPACE_BYTES // 4
