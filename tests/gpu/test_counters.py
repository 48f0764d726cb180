"""Counters of split-K, stream-K and products along k, on streams of every kind beside one that is busy."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.gpu.test_along_k import loaded
from tests.gpu.test_splits import STATIC, STREAM, candidate
from tests.support.kernels import Kernels
from tests.support.numerics import TOLERANCE, difference
from tunegemm.describe.problem import Problem
from tunegemm.generate import workspace

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
#: Cycles of a kernel that keeps a stream busy: a second, at most.
BUSY = 1_500_000_000
KINDS = ("pairs", "second kernel", "stream-K", "along k")


@pytest.fixture(scope="module")
def products(kernels: Kernels) -> dict[str, tuple[Callable[[torch.Tensor], None], torch.Tensor]]:
    """By kind: what launches a product into an output, and the right one."""
    problem = Problem.parse("512x512x8192")
    torch.manual_seed(0)
    a, b = (torch.randn(512, 8192, device="cuda", dtype=BF16) for _ in range(2))
    wanted = a.float() @ b.float().t()
    found: dict[str, Any] = {}
    for kind, kernel, words in (
        ("pairs", STATIC[0], {"split_k": 4, "reduction": "pairs"}),
        ("second kernel", STATIC[0], {"split_k": 4, "reduction": "second_kernel"}),
        ("stream-K", STREAM[0], {"reduction": "pairs"}),
    ):
        launch = kernels.load(problem, candidate(kernel, **words))
        found[kind] = partial(launch, a, b.t()), wanted
    x, y = (torch.randn(2048, 512, device="cuda", dtype=BF16) for _ in range(2))
    ends = torch.arange(256, 2049, 256, device="cuda", dtype=torch.int32)
    parts = [x[e - 256 : e].float().t() @ y[e - 256 : e].float() for e in ends.tolist()]
    along = next(iter(loaded().values()))

    def launch_along(out: torch.Tensor) -> None:
        along.launch(x, y, out, ends, blocks=132)

    found["along k"] = launch_along, torch.stack(parts)
    torch.cuda.synchronize()
    return found


def wrong(products: Any, kind: str, outs: list[torch.Tensor]) -> list[int]:
    """Which of the outputs are wrong."""
    bound = TOLERANCE["bf16"]
    return [i for i, out in enumerate(outs) if not difference(out, products[kind][1]) < bound]


def made(products: Any, kind: str, count: int = 1) -> list[torch.Tensor]:
    wanted = products[kind][1]
    return [torch.full(wanted.shape, torch.nan, device="cuda", dtype=BF16) for _ in range(count)]


def create() -> int:
    """A stream that this process may end: its handle."""
    place = ctypes.c_uint64()
    torch.cuda.check_error(int(torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(place))))
    return place.value


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_launch_while_the_default_stream_is_busy(
    products: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that stream still has to write, to memory that its owner has let go of, meets no counter."""
    monkeypatch.setattr(workspace, "_blocks", {})
    monkeypatch.setattr(workspace, "_addresses", {})
    launch, _ = products[kind]
    side, outs = torch.cuda.Stream(), made(products, kind, 3)
    with torch.cuda.stream(side):
        torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    size = workspace._BLOCK_BYTES
    owned = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(400)]
    owned[0].fill_(0x5A)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY)
    for each in owned:
        each.fill_(0x5A)
    places = [each.data_ptr() for each in owned]
    del owned, each
    with torch.cuda.stream(side):
        address = workspace._block(0, side.cuda_stream)
        assert address and not any(place <= address < place + size for place in places)
        launch(outs[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for out in outs[1:]:
            launch(out)
    torch.cuda.synchronize()
    assert wrong(products, kind, outs) == []


@pytest.mark.parametrize("kind", KINDS)
def test_streams_that_end_and_come_back_under_their_handle(products: Any, kind: str) -> None:
    launch, _ = products[kind]
    outs, handles = made(products, kind, 12), []
    torch.cuda.synchronize()
    for first, second in zip(outs[::2], outs[1::2], strict=True):
        handle = create()
        handles.append(handle)
        with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
            assert workspace._block(0, handle) == 0
            torch.cuda._sleep(BUSY // 100)
            launch(first)
            launch(second)
        torch.cuda.cudart().cudaStreamDestroy(handle)  # what is queued goes on
    torch.cuda.synchronize()
    assert wrong(products, kind, outs) == [], f"{len(set(handles))} handles of {len(handles)} streams"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streams", ["of each thread", "one", "of the pool", "default"])
def test_threads_on_streams_beside_a_busy_default_one(products: Any, kind: str, streams: str) -> None:
    launch, _ = products[kind]
    one = torch.cuda.Stream()
    outs = made(products, kind, 8 * 10)
    torch.cuda.synchronize()
    begin = threading.Barrier(9)

    def stream_of() -> Any:
        if streams == "of each thread":
            return torch.cuda.ExternalStream(2)
        return {"one": one, "default": torch.cuda.default_stream()}.get(streams) or torch.cuda.Stream()

    def work(mine: list[torch.Tensor]) -> None:
        with torch.cuda.stream(stream_of()):
            begin.wait()
            for out in mine:
                launch(out)
        torch.cuda.synchronize()

    threads = [threading.Thread(target=work, args=(outs[10 * i : 10 * i + 10],)) for i in range(8)]
    for thread in threads:
        thread.start()
    begin.wait()
    for _ in range(20):
        torch.empty(workspace._BLOCK_BYTES, dtype=torch.uint8, device="cuda").fill_(0x5A)
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert wrong(products, kind, outs) == []


def test_only_streams_that_last_have_a_block() -> None:
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
        with torch.cuda.stream(stream):
            assert workspace._block(0, stream.cuda_stream), stream
    with torch.cuda.stream(torch.cuda.ExternalStream(2)):
        assert workspace._block(0, 2) == 0
    torch.cuda.synchronize()
    assert not any(block.any() for block in workspace._blocks.values())
