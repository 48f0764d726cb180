"""A worker for vLLM's real engine on a host without a GPU: it computes nothing, and every token is 7."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase


class _Given(AsyncModelRunnerOutput):
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        return self._output

    def get_kv_connector_output(self) -> None:  # vLLM 0.33 asks for it
        pass


class Worker(WorkerBase):
    """For `LLM(worker_cls=...)`."""

    #: Tokens of each step, in order.
    steps: ClassVar[list[int]] = []

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        self._left: dict[str, int] = {}

    def load_model(self, **_: Any) -> None:
        self._model = torch.nn.Module()

    def get_model(self) -> torch.nn.Module:
        return self._model

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]  # vLLM 0.33 asks for it

    def get_kv_cache_spec(self) -> dict[str, Any]:
        spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        return {"model.layers.0.self_attn.attn": spec}

    def determine_available_memory(self) -> int:
        return self.cache_config.kv_cache_memory_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> Any:
        return SimpleNamespace(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        self.steps.append(scheduler_output.total_num_scheduled_tokens)
        self._now = scheduler_output
        for new in scheduler_output.scheduled_new_reqs:
            self._left[new.req_id] = len(new.prompt_token_ids)
        return None if self._now.num_scheduled_tokens else ModelRunnerOutput([], {})

    def sample_tokens(self, grammar_output: Any) -> _Given:
        tokens = []
        for name, number in self._now.num_scheduled_tokens.items():
            self._left[name] -= number
            tokens.append([] if self._left[name] > 0 else [7])
        names = [*self._now.num_scheduled_tokens]
        places = {name: place for place, name in enumerate(names)}
        return _Given(ModelRunnerOutput(names, places, sampled_token_ids=tokens))

    def shutdown(self) -> None:
        pass
