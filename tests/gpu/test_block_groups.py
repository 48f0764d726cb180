"""Groups of rows with block scales by real kernels: against fp64, on hostile scales, with poison around."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import tunegemm
from tests.gpu.test_blocks import NAN, POISON, beside_nan, drawn, near, reference, scales
from tunegemm.describe.device import find_device
from tunegemm.generate import block_groups
from tunegemm.generate.block_groups import BlockGroupKernel
from tunegemm.generate.block_groups.config import BlockGroupConfig
from tunegemm.generate.takes import NotTaken
from tunegemm.groups import quantize
from tunegemm.groups import scaled_groups as own
from tunegemm.model.block_groups import listed
from tunegemm.store import packs
from tunegemm.store.provided import Provided, provide_blocks

pytestmark = pytest.mark.gpu

WHERE = "cuda"
CONFIGS = listed()
#: Ends of groups, N and K: empty groups, groups of one row, edges of tiles and of blocks of scales.
CASES = (
    ([1], 128, 128), ([0, 3, 3, 20], 136, 400), ([5, 5, 70, 71, 135], 264, 256), ([128, 256, 300], 200, 2048),
    ([17, 600, 601], 640, 1040), ([33] * 40 + [97] * 30, 384, 896),
)  # fmt: skip


@cache
def kernel_of(config: BlockGroupConfig) -> BlockGroupKernel:
    """A kernel, compiled where it does not ship."""
    key = block_groups.FAMILY.key_of(config)
    artifact = packs.find(key) or compiled().of(key)
    assert artifact is not None and artifact.resources.spill_bytes == 0, config.label
    return BlockGroupKernel.load(config, artifact.path)


@cache
def compiled() -> Provided:
    provided = provide_blocks()
    assert not provided.failures
    return provided


class Groups:
    """Operands in poisoned memory, and what their product is in fp64."""

    def __init__(self, ends: list[int], n: int, k: int, kind: str = "usual") -> None:
        rows, along, across = ends[-1] + 3, -(-k // 128), -(-n // 128)  # three rows behind the last group
        self.ends = torch.tensor(ends, dtype=torch.int32, device=WHERE)
        self.a = beside_nan(drawn(rows, k), 16)
        weights = torch.full((len(ends), n + 2, k + 32), NAN, device=WHERE).to(self.a.dtype)
        self.weights = weights[:, 1:-1, 16:-16]
        self.weights.copy_(drawn(len(ends), n, k))
        self.scale_a = beside_nan(scales(kind, along, rows), 1).t() if rows % 2 else scales(kind, rows, along)
        self.scale_b = scales(kind, len(ends) * across, along).reshape(len(ends), across, along)
        self.memory = torch.full((rows + 2, n + 16), POISON, device=WHERE, dtype=torch.bfloat16)
        self.out = self.memory[1:-1, 8:-8]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.a, self.weights, self.scale_a, self.scale_b, self.ends, self.out

    def check(self, out: torch.Tensor) -> None:
        start = 0
        for group, end in enumerate(self.ends.tolist()):
            if end > start:
                part = slice(start, end)
                wanted, magnitude = reference(
                    self.a[part], self.weights[group], self.scale_a[part], self.scale_b[group]
                )
                assert near(out[part], wanted, magnitude, "bf16").all(), (group, start, end)
            start = max(start, end)

    def check_surroundings(self) -> None:
        """Rows behind the groups and memory around the result are as they were."""
        last = int(self.ends[-1])
        self.out[:last] = POISON
        assert (self.memory == POISON).all()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_a_kernel_is_right_for_every_division_and_scale(config: BlockGroupConfig) -> None:
    torch.manual_seed(0)
    kernel = kernel_of(config)
    for ends, n, k in CASES:
        for kind in ("usual", "hostile", "mixed", "special"):
            groups = Groups(ends, n, k, kind)
            kernel.launch(*groups.tensors, blocks=find_device("cuda:0").sm_count)
            groups.check(groups.out)
            groups.check_surroundings()


def test_every_number_of_rows_is_right_by_the_function() -> None:
    torch.manual_seed(1)
    for rows in range(1, 301):
        groups = Groups([rows // 3, rows // 3, rows], 256, 384)
        out = scaled(groups)
        groups.check(out)


def test_a_batch_invariant_row_does_not_see_the_scales_beside_it() -> None:
    torch.manual_seed(4)
    groups = Groups([70, 200], 256, 384)
    with tunegemm.policy("batch_invariant"):
        before = scaled(groups)
        groups.scale_a[1::2] *= 1e-30
        assert torch.equal(scaled(groups)[:200:2], before[:200:2])


def test_a_graph_follows_the_ends() -> None:
    torch.manual_seed(2)
    groups = Groups([40, 90, 170], 512, 1024)
    scaled(groups)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled(groups)
    for ends in ([40, 90, 170], [0, 0, 170], [170, 170, 170], [1, 2, 3]):
        groups.ends.copy_(torch.tensor(ends, dtype=torch.int32))
        out.fill_(NAN)
        graph.replay()
        groups.check(out)


def test_addresses_and_layouts_that_no_kernel_takes_are_refused() -> None:
    groups = Groups([5, 9], 128, 256)
    kernel, blocks = kernel_of(CONFIGS[0]), find_device("cuda:0").sm_count
    a, *others = groups.tensors
    moved = torch.empty(a.numel() + 1, device=WHERE, dtype=a.dtype)[1:].view(a.shape)
    with pytest.raises(NotTaken, match="at these addresses: a 0x"):
        kernel.launch(moved, *others, blocks=blocks)
    with pytest.raises(NotTaken, match="scale_a"):
        kernel.launch(a, others[0], groups.scale_a[:, :1], *others[2:], blocks=blocks)


def test_a_layer_of_experts_is_what_a_cpu_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels alone, `elsewhere` too, and in a graph that follows the router."""
    torch.manual_seed(3)
    count, hidden, inner, fp8 = 12, 640, 384, torch.float8_e4m3fn
    weights = {
        "gate_up": (torch.randn(count, 2 * inner, hidden) * 20).to(fp8),
        "down": (torch.randn(count, hidden, inner) * 20).to(fp8),
        "gate_up_scale": torch.rand(count, 6, 5) * 2e-3 + 1e-3,
        "down_scale": torch.rand(count, 5, 3) * 2e-3 + 1e-3,
    }
    cases = []
    for tokens in (1, 33, 33, 300):
        chosen = torch.rand(tokens, count + 2).argsort(1)[:, :3]  # two are of other processes
        x = torch.randn(tokens, hidden).bfloat16()
        given = {"x": x, "index": chosen, "weights": torch.rand(tokens, 3).bfloat16()}
        cases.append((given, tunegemm.experts(**given, **weights, elsewhere=True)))
    compiled()  # no call waits for a kernel
    monkeypatch.delattr(own, "emulated")
    monkeypatch.delattr(quantize, "by_torch")
    there = {name: each.to(WHERE) for name, each in weights.items()}

    def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
        expected = expected.to(WHERE).float()
        return bool((found.float() - expected).abs().max() < 0.02 * expected.abs().max())

    for given, expected in cases:
        moved = {name: each.to(WHERE) for name, each in given.items()}
        assert close(tunegemm.experts(**moved, **there, elsewhere=True), expected)
    (given, expected), (others, of_others) = cases[1:3]
    moved = {name: each.to(WHERE) for name, each in given.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tunegemm.experts(**moved, **there, elsewhere=True)
    graph.replay()
    assert close(found, expected)
    for name, each in others.items():
        moved[name].copy_(each)
    graph.replay()
    assert close(found, of_others)


def scaled(groups: Groups) -> Any:
    compiled()  # no call waits for a kernel
    return tunegemm.scaled_grouped_mm(
        groups.a, groups.weights.mT, groups.scale_a, groups.scale_b.mT, offs=groups.ends,
        out_dtype=torch.bfloat16,
    )  # fmt: skip
