"""Products of groups along k by real kernels: each against fp32, whatever lies in rows of other groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import tunegemm
from tunegemm.generate import along_k
from tunegemm.generate.along_k import AlongK
from tunegemm.groups import grouped
from tunegemm.model.grouped import AlongKChoice, listed_along_k
from tunegemm.store.provided import provide_grouped

pytestmark = pytest.mark.gpu

BF16, NAN = torch.bfloat16, float("nan")
#: Rows of each group, M and N. k tiles end inside groups; tiles hang over M and N.
DIVISIONS: dict[str, tuple[list[int], int, int]] = {
    "exact": ([64, 128], 256, 256),
    "ragged": ([1, 131, 0, 7, 63, 65], 256, 512),
    "empty": ([0, 0, 3, 0, 0], 128, 192),
    "nothing": ([0, 0, 0], 128, 256),
    "edges": ([9, 8, 17, 33, 65, 2], 200, 264),
    "one hot": ([0, 1500, 0, 0, 0, 0, 0, 0], 1024, 512),
    "many": ([group % 71 for group in range(300)], 136, 128),
    "first": ([300, *[0] * 69], 384, 320),
    "last": ([*[0] * 69, 301], 384, 320),
    "one row each": ([1] * 40, 264, 72),
    "long": ([1000, 3001, 64], 640, 1032),
}


@cache
def loaded() -> dict[str, AlongK]:
    """Every kernel of the table by its label."""
    provided = provide_grouped("along_k")
    assert not provided.failures
    found = {}
    for config in listed_along_k():
        artifact = provided.of(along_k.FAMILY.key_of(config))
        assert artifact is not None and artifact.resources.spill_bytes == 0, config.label
        assert not artifact.resources.warnings, config.label
        found[config.label] = AlongK.load(config, artifact.path)
    return found


def operands(sizes: list[int], m: int, n: int, before: int = 0, behind: int = 37) -> tuple[torch.Tensor, ...]:
    """a, b and the groups' ends; rows before the first group (which is empty then) and behind the last one
    are NaN.
    """
    torch.manual_seed(0)
    rows = before + sum(sizes)
    a, b = (torch.randn(rows + behind, width, device="cuda") for width in (m, n))
    for each in (a, b):
        each[:before] = each[rows:] = NAN
    ends = before + torch.tensor(sizes, device="cuda").cumsum(0)
    return a.to(BF16), b.to(BF16), ends.to(torch.int32)


def expected(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    found, first = [], 0
    for end in ends.tolist():
        found.append(a[first:end].float().t() @ b[first:end].float())
        first = end
    return torch.stack(found)


def check(result: torch.Tensor, reference: torch.Tensor) -> None:
    """Each group by itself, so that a small one counts as a large one."""
    for group, (ours, theirs) in enumerate(zip(result.float(), reference, strict=True)):
        norm = theirs.norm().item()
        assert (ours - theirs).norm().item() <= 4e-3 * norm, group  # what is not a number is not less
        if not norm:
            assert not ours.any()


def launched(kernel: AlongK, a: Any, b: Any, ends: Any, **words: int) -> torch.Tensor:
    """By a kernel, into an output that was poisoned and has poisoned neighbours."""
    groups, m, n = len(ends), a.shape[1], b.shape[1]
    memory = torch.full((groups + 2, m, n + 8), NAN, device="cuda", dtype=BF16)
    out = memory[1:-1, :, :n]
    kernel.launch(a, b, out, ends, **{"blocks": 132} | words)
    assert memory[0].isnan().all() and memory[-1].isnan().all() and memory[:, :, n:].isnan().all()
    return out


@pytest.mark.parametrize("name", DIVISIONS)
def test_each_kernel_is_right_and_adds_no_other_rows(name: str) -> None:
    a, b, ends = operands(*DIVISIONS[name])
    reference = expected(a, b, ends)
    for kernel in loaded().values():
        for words in ({}, {"blocks": 7, "swizzle_size": 1}):
            check(launched(kernel, a, b, ends, **words), reference)


@pytest.mark.parametrize("poisoned", range(5))
def test_what_is_no_number_stays_in_its_group(poisoned: int) -> None:
    sizes = [70, 1, 64, 130, 30]
    a, b, ends = operands(sizes, 256, 264)
    reference = expected(a, b, ends)
    first, end = ends[poisoned].item() - sizes[poisoned], ends[poisoned].item()
    a[first:end], b[first:end] = NAN, float("inf")
    for kernel in loaded().values():
        result = launched(kernel, a, b, ends)
        assert result[poisoned].isnan().all()
        others = [group for group in range(5) if group != poisoned]
        check(result[others], reference[others])


def test_groups_may_begin_behind_row_0_and_operands_may_have_strides() -> None:
    a, b, ends = operands([70, 0, 3], 200, 136, before=41)
    ends = torch.cat((torch.full_like(ends[:1], 41), ends))  # the first group has what is not a number
    wide_a, wide_b = (
        torch.full((len(each), each.shape[1] + 64), NAN, device="cuda", dtype=BF16) for each in (a, b)
    )
    wide_a[:, 8 : a.shape[1] + 8], wide_b[:, 16 : b.shape[1] + 16] = a, b
    reference = expected(a, b, ends)
    for kernel in loaded().values():
        result = launched(kernel, wide_a[:, 8 : a.shape[1] + 8], wide_b[:, 16 : b.shape[1] + 16], ends)
        assert result[0].isnan().all()
        check(result[1:], reference[1:])


def test_offsets_that_are_none_read_no_other_memory() -> None:
    a, b, _ = operands([150], 256, 256, behind=0)
    for ends in ([-5, 40, 20, 2**31 - 1, 7], [2**31 - 1, -(2**31), 150, 151, 0]):
        offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        for kernel in loaded().values():
            assert not launched(kernel, a, b, offsets).isnan().any()


def test_many_random_divisions() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b, _ = operands([1500], 136, 264, behind=0)
    for _ in range(100):
        cuts = torch.randint(0, 1501, (9,), generator=generator).sort().values
        ends = cuts.to(torch.int32).cuda()
        reference = expected(a, b, ends)
        for kernel in loaded().values():
            check(launched(kernel, a, b, ends), reference)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whatever the table says, a kernel of groups along k serves. Gives the shapes of what it wrote."""
    loaded()
    found: list[Any] = []
    of = AlongK.of

    def counted(kernel: AlongK, a: Any, b: Any, out: Any, offsets: Any, **words: int) -> Callable[..., None]:
        launch = of(kernel, a, b, out, offsets, **words)

        def launch_and_count(*operands: Any) -> None:
            found.append(operands[2].shape)
            launch(*operands)

        return launch_and_count

    monkeypatch.setattr(AlongK, "of", counted)
    monkeypatch.setattr(grouped, "groups", grouped.Groups())
    choice = AlongKChoice(listed_along_k()[0], 8)
    monkeypatch.setattr(grouped, "choose_along_k", lambda *extents, gpu: choice)
    return found


def test_calls_are_served_and_captured(served: list[Any]) -> None:
    a, b, ends = operands([50, 0, 30, 20], 512, 256)
    reference = expected(a, b, ends)
    check(tunegemm.grouped_mm(a.t(), b, offs=ends), reference)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = tunegemm.grouped_mm(a.t(), b, offs=ends)
    graph.replay()
    check(result, reference)
    ends.copy_(torch.tensor([0, 70, 71, 71]))
    graph.replay()
    check(result, expected(a, b, ends))
    assert len(served) == 2  # a replay is no call


def test_gradients_are_as_torchs(served: list[Any]) -> None:
    sizes = [50, 0, 30, 20]
    torch.manual_seed(0)
    a = torch.randn(sum(sizes), 256, device="cuda", dtype=BF16)
    weights = torch.randn(4, 512, 256, device="cuda", dtype=BF16) / 16
    ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    found = []
    for call in (tunegemm.grouped_mm, torch._grouped_mm):
        x, w = (each.detach().clone().requires_grad_() for each in (a, weights))
        (call(x, w.mT, offs=ends).float() ** 2).sum().backward()
        found.append((x.grad, w.grad))
    assert len(served) == 1
    for ours, theirs in zip(*found, strict=True):
        assert (ours.float() - theirs.float()).norm() < 1e-2 * theirs.float().norm()
        assert ours.stride() == theirs.stride()
    assert not found[0][1][1].any()
    reference = expected(2 * torch.cat(
        [a[end - size : end].float() @ weights[group].float().t()
         for group, (size, end) in enumerate(zip(sizes, ends.tolist(), strict=True))]
    ), a, ends)  # fmt: skip
    assert (found[0][1].float() - reference).norm() < 1e-2 * reference.norm()


def test_a_takeover_serves_torchs_operator_and_compiled_code_the_gradient(served: list[Any]) -> None:
    a, b, ends = operands([50, 0, 30, 20], 512, 256)
    with tunegemm.enable():
        check(torch.nn.functional.grouped_mm(a.t(), b, offs=ends), expected(a, b, ends))
    assert len(served) == 1

    a, ends = a[:100], ends.clone()
    weights = (torch.randn(4, 256, 512, device="cuda", dtype=BF16) / 16).requires_grad_()
    torch.compile(tunegemm.grouped_mm, fullgraph=True)(a, weights.mT, offs=ends).float().sum().backward()
    ones = torch.ones(100, 256, device="cuda")
    assert weights.grad is not None
    check(weights.grad, expected(ones, a, ends))
    assert len(served) == 2
