"""As tests/groups/test_groups_as_torch.py, by real kernels, each of which serves whatever it takes."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.functional import grouped_mm as torchs

import tunegemm
from tests.support.as_torch import outcome_of
from tests.support.groups_as_torch import BF16, Sample, disagreements, ends, filled, samples, scaled_samples
from tunegemm.generate import routing as routing_kernels
from tunegemm.groups import grouped
from tunegemm.model.grouped import AlongKChoice, GroupedChoice, configs, kinds, listed, listed_along_k
from tunegemm.store.provided import provide_grouped

pytestmark = pytest.mark.gpu

KERNELS = ("co64x32", "co128x128", "pp128x128", "co256x128", "co128x256", "few")


class Planted:
    """Counts launches of kernels of the process."""

    def __init__(self) -> None:
        self.calls: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    for kind in (*kinds(), "along_k", "routing"):
        assert not provide_grouped(kind).failures


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    """One kernel serves all that it takes."""
    is_few, found = request.param == "few", Planted()
    names = {("bf16", "", "k"): "bf16", ("fp16", "", "k"): "fp16", ("bf16", "", "n"): "n_major"}
    names |= {("fp8_e4m3", "", "k"): "fp8", ("bf16", "swiglu", "k"): "gated"}

    def choose(*_: int, dtype: str, gate: str, major: str, **__: Any) -> GroupedChoice | None:
        if (kind := names.get((dtype, gate, major))) is None:
            return None
        few = is_few and f"few {dtype} {bool(gate)}" in routing_kernels.kernels() and major == "k"
        config = configs(kind)["co64x32" if is_few else request.param]
        return GroupedChoice(config if config in (there := listed(kind=kind)) else there[0], 8, 0, few)

    groups = grouped.Groups()
    load = groups.load

    def counted(choice: Any, index: int) -> Any:
        of = load(choice, index)
        if of is None:
            return None

        def of_counted(*operands: Any, **words: Any) -> Callable[..., None]:
            launch = of(*operands, **words)

            def launch_counted(*operands: Any) -> None:
                launch(*operands)
                found.calls.append(choice)

            return launch_counted

        return of_counted

    monkeypatch.setattr(groups, "load", counted)
    monkeypatch.setattr(grouped, "groups", groups)
    monkeypatch.setattr(grouped, "choose", choose)
    along = AlongKChoice(listed_along_k()[0], 8)
    monkeypatch.setattr(grouped, "choose_along_k", lambda *extents, gpu: along)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield found
    tunegemm.disable()
    torch.cuda.synchronize()


def in_units(sample: Sample) -> bool:
    """Whether groups have whole units of 16 bytes: at others torch's gradient of weights ends the context."""
    offs = sample.keywords.get("offs")
    return offs is None or not any(end % 8 for end in offs.flatten().tolist())


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_samples_mean_what_torchs_mean(kernel: Planted, dtype: torch.dtype) -> None:
    found: list[str] = []
    for sample in samples("cuda", dtype):
        for grad in (False, True):
            if not grad or (sample.is_whole and dtype is BF16 and in_units(sample)):
                found += disagreements(kernel, torchs, tunegemm.grouped_mm, sample, grad=grad)
    assert not found, "\n".join(found)


def test_products_with_scales_mean_what_torchs_mean(kernel: Planted) -> None:
    found: list[str] = []
    for sample in scaled_samples("cuda"):
        found += disagreements(kernel, torch._scaled_grouped_mm, tunegemm.scaled_grouped_mm, sample)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "ends_of", [[8, 4, 8, 16], [4, 4, 8, 30], [-4, 4, 8, 16], [2**31 - 1] * 4, [16, 0, 16, 0]]
)
def test_ends_of_no_division_write_and_read_nothing_else(kernel: Planted, ends_of: list[int]) -> None:
    """Torch's kernel ends the context at some of them. Ours computes rows of some group or none, whose values
    have no meaning.
    """
    a, w = filled((16, 64), "cuda", BF16, 1), filled((4, 48, 64), "cuda", BF16, 2)
    y = filled((16, 48), "cuda", BF16, 4)
    before = [each.clone() for each in (a, w, y)]
    # What results get next, and what lies behind it: their memory is the allocator's.
    poisoned = [torch.full((16, 48), 776.0, device="cuda", dtype=BF16) for _ in range(64)]
    del poisoned[::2]
    offs = ends(ends_of, "cuda")
    rows = tunegemm.grouped_mm(a, w.mT, offs=offs)
    along = tunegemm.grouped_mm(a.t(), y, offs=offs)
    torch.cuda.synchronize()
    assert len(kernel.calls) == 2 and rows.shape == (16, 48) and along.shape == (4, 64, 48)
    assert all(map(torch.equal, (a, w, y), before))
    assert all(bool((each == 776.0).all()) for each in poisoned)


def along_k(a: torch.Tensor, y: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The products of groups along k: torch's kernel ends the context where they are not of whole units."""
    bounds = pairwise([0, *offs.tolist()])
    return torch.stack([a[begin:end].float().t() @ y[begin:end].float() for begin, end in bounds]).to(a.dtype)


@pytest.mark.parametrize("where", ["one stream", "streams of their own", "default stream"])
def test_threads_beside_a_busy_default_stream(kernel: Planted, where: str) -> None:
    w, y = filled((4, 48, 64), "cuda", BF16, 2), filled((16, 48), "cuda", BF16, 4)
    one, wrong, count = torch.cuda.Stream(), [], 6
    operands = [filled((16, 64), "cuda", BF16, 10 + number) for number in range(count)]
    divisions = [ends([number, number, 8, 16], "cuda") for number in range(count)]
    calls: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda a, offs: tunegemm.grouped_mm(a, w.mT, offs=offs),
        lambda a, offs: tunegemm.grouped_mm(a.t(), y, offs=offs),
    ]
    expected = [[torchs(a, w.mT, offs=o), along_k(a, y, o)] for a, o in zip(operands, divisions, strict=True)]
    torch.cuda.synchronize()
    begin = threading.Barrier(count + 1)

    def work(number: int) -> None:
        stream = {"one stream": one, "default stream": torch.cuda.default_stream()}.get(where)
        with torch.cuda.stream(stream or torch.cuda.Stream()):
            begin.wait()
            found = [[call(operands[number], divisions[number]) for call in calls] for _ in range(100)]
            torch.cuda.current_stream().synchronize()
            for results in found:
                for result, right in zip(results, expected[number], strict=True):
                    if not float((result.float() - right.float()).abs().max()) < 0.5:
                        wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    torch.cuda._sleep(50_000_000)
    begin.wait()
    for _ in range(200):
        torch.empty(1 << 14, dtype=torch.uint8, device="cuda").fill_(0x5A)
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert wrong == [] and kernel.calls


@pytest.mark.parametrize("name", ["autocast", "deterministic", "vmap", "exported", "compiled", "graph"])
def test_surroundings_change_nothing(kernel: Planted, name: str) -> None:
    a, w = filled((16, 64), "cuda", BF16, 1), filled((4, 48, 64), "cuda", BF16, 2)
    offs = ends([1, 1, 9, 16], "cuda")

    def run(call: Callable[..., torch.Tensor]) -> Any:
        def of(x: torch.Tensor) -> torch.Tensor:
            return call(x, w.mT, offs=offs)

        torch._dynamo.reset()
        if name == "autocast":
            with torch.autocast("cuda", torch.float16):
                return of(a)
        if name == "vmap":
            return torch.vmap(of)(torch.stack((a, a)))[1]
        if name == "compiled":
            return torch.compile(of, backend="aot_eager", fullgraph=True)(a)
        if name == "exported":
            return torch.export.export(Module(of), (a,)).module()(a)
        if name == "graph":
            return captured(of, a)
        torch.use_deterministic_algorithms(True)
        try:
            return of(a)
        finally:
            torch.use_deterministic_algorithms(False)

    expected, result = (
        outcome_of(lambda call=call: run(call), (), {}) for call in (torchs, tunegemm.grouped_mm)
    )
    assert result.error is expected.error
    for one, other in zip(expected.results, result.results, strict=True):
        assert one.dtype is other.dtype and float((one.float() - other.float()).abs().max()) < 0.5


class Module(torch.nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return self.call(a)


def captured(call: Callable[[torch.Tensor], torch.Tensor], a: torch.Tensor) -> torch.Tensor:
    """What the second replay of a graph gives."""
    call(a)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(a)
    for _ in range(2):
        result.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    return result
