"""Fused layers under FSDP2 and DDP, in a real process group of gloo."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.layers import by_torch, fuse, fused, given, made
from tests.support.processes import environment


def grads(model: torch.nn.Module) -> list[torch.Tensor]:
    model(given()).float().square().mean().backward()
    return [getattr(each.grad, "full_tensor", lambda each=each: each.grad)() for each in model.parameters()]


def shard(model: torch.nn.Module, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for each in (model.attention, model.mlp, model.plain, model):
        fully_shard(each, mesh=mesh)


def check_sharded(ranks: int, train: bool) -> None:
    """Results and gradients are those of the same model without a patch, sharded as well, bit for bit."""
    plain, model = made(train=train), made(train=train)
    assert "mlp.{w1,w3}" in fused(fuse(model))
    for each in (plain, model):
        shard(each, ranks)
    assert torch.equal(by_torch(model, given()), by_torch(plain, given()))
    for mine, torchs in zip(grads(model), grads(plain), strict=True):
        assert torch.equal(mine, torchs)


def check_replicated(train: bool) -> None:
    from torch.nn.parallel import DistributedDataParallel

    plain, model = made(train=train), made(train=train)
    fuse(model)
    replicas = DistributedDataParallel(model)
    grads(replicas)
    for mine, torchs in zip((each.grad for each in model.parameters()), grads(plain), strict=True):
        assert torch.equal(mine, torchs)


@pytest.mark.parametrize("train", [False, True])
def test_a_model_that_is_sharded_after_fusing(one_rank, train):
    check_sharded(1, train)
    check_replicated(train)


def test_who_else_asks_for_parameters_changes_nothing():
    model = made()
    fuse(model)
    before = model.mlp.w1.weight.data_ptr()
    assert [name for name, _ in model.mlp.w1.named_parameters(recurse=False)] == ["weight"]
    assert model.mlp.w1.weight.data_ptr() == before


SCRIPT = """
import sys
import torch.distributed as dist
from tests.serve.fused import test_layers_distributed as tests

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
for train in (False, True):
    tests.check_sharded(2, train)
    tests.check_replicated(train)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, str(rank), str(tmp_path / "store")],
            env=environment(), stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=150)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
