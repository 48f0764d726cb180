"""What programs beside vLLM begin with, and the versions of it."""

from __future__ import annotations

import pytest

engine = pytest.mark.parametrize("engine", ["vllm-0.26.0", "vllm-0.33.0"])

LOADS = """
import torch
import vllm.plugins
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

def load():
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()

def config(**more):
    return VllmConfig(device_config=DeviceConfig(device="cpu"), **more)
"""

HOPPER = """
import sys
import types
import vllm.platforms
sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("")  # wants CUDA's driver
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability

class Hopper(NonNvmlCudaPlatform):
    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(9, 0)

def on(module):
    module.current_platform = Hopper()
"""

LAYERS = """
import torch.distributed
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

def ranks(path):
    init_distributed_environment(1, 0, f"file://{path}", 0, backend="gloo")
    initialize_model_parallel(1, 1)

def filled(layer):
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randint(-2, 3, parameter.shape))
    return layer
"""

LIVE = """
import os
from pathlib import Path
from benchmarks import vllm_engine
from benchmarks.vllm import doors
doors(Path.cwd())
import vllm.platforms
from tests.support.vllm_worker import Worker
vllm.platforms.current_platform.device_type = "cpu"
def start(setting, **more):
    arguments = vllm_engine.arguments(setting, Path.cwd() / setting.name) | more
    stand_in = {"worker_cls": "tests.support.vllm_worker.Worker", "distributed_executor_backend": "uni"}
    return vllm.LLM(**stand_in, **arguments)
"""

#: Runs `rank(number, path, queue)` of the module rank_of_tests in two processes; path is what a file gives.
RANKS = """
import multiprocessing
from pathlib import Path
import rank_of_tests
context = multiprocessing.get_context("spawn")
queue = context.Queue()
path = str(Path(rank_of_tests.__file__).with_name("ranks"))
processes = [context.Process(target=rank_of_tests.rank, args=(n, path, queue)) for n in range(2)]
for process in processes:
    process.start()
found["ranks"] = sorted(queue.get(timeout=300) for _ in processes)
for process in processes:
    process.join()
"""
