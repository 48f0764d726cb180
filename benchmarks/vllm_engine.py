"""One vLLM engine in separate processes, controlled by its owner: the engine that `benchmarks.vllm` times.

An owner of several engines uses them in turns: an idle engine uses nothing of the GPU but memory.

It times the steps of vLLM's `EngineCore`: its scheduler and its worker, as in an engine's process, which is
this process. The parts outside the core, which read prompts and return tokens, are excluded: they run beside
the core, and delay single steps by more than the effect to be measured.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import random
import re
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy

from benchmarks.shapes import LISTED
from tunegemm.errors import TunegemmError

#: vLLM's name of the model.
ARCHITECTURE = "LlamaForCausalLM"
#: Numbers of sequences to time, with CUDA graphs.
SEQUENCES = (1, 16, 64, 256)
#: Tokens of a prompt, where prompts are timed and where the tokens behind them are.
PROMPT, SHORT = 512, 16
#: Tokens that each sequence generates in a timed run.
GENERATED = 64
#: Prompts of a run at most: they are four steps, and more prompts are more of the same steps.
MOST_PROMPTS = 64
#: Tokens of a step, as of vLLM's server.
STEP = 8192
#: Rows that have CUDA graphs: vLLM's own go as far.
CAPTURED = (*SEQUENCES, PROMPT)
#: Of an engine's cache of keys and values, for each layer: 32,768 tokens.
CACHE_BYTES = 128 << 20
#: The length of a sample. The GPU's and the host's clocks change within seconds: many short alternating
#: samples are better than few long ones.
SAMPLE_SECONDS = 0.25
#: Where a process waits for the engine, which compiles as it starts.
START_SECONDS = 240.0
WORK_SECONDS = 120.0


@dataclass(frozen=True)
class Setting:
    """An engine to start."""

    dtype: str
    served: bool
    """Whether by tunegemm's plug-in."""
    is_invariant: bool = False
    layers: int = 32
    again: bool = False
    """Whether it is the second of two equal engines."""

    @property
    def name(self) -> str:
        words = [self.dtype, "invariant" * self.is_invariant, "tunegemm" if self.served else "vllm"]
        return "-".join(filter(None, (*words, "again" * self.again)))


def model_config(setting: Setting) -> dict[str, Any]:
    """The config of a model like Llama-3-8B with so many layers, for `transformers`."""
    facts: dict[str, Any] = LISTED["vllm"]["model"] | {"num_hidden_layers": setting.layers}
    quantization = LISTED["vllm"].get(setting.dtype)
    return facts | ({"quantization_config": quantization} if quantization else {})


class EngineError(TunegemmError):
    """An engine that did not start, or ended; names the file with its output."""


class Engine:
    """The owner's side: starts the processes and sends them one request at a time."""

    def __init__(
        self, setting: Setting, folder: Path, variables: dict[str, str], cores: Sequence[int] = ()
    ) -> None:
        """folder: gets the model's config and the output. variables: of the environment. cores: the CPUs to
        run on; all if empty."""
        self.setting = setting
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log"
        self.seconds = 0.0
        """That it took to start."""
        self._began = time.monotonic()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs, setting, folder, variables, cores))
        self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Until it has started. Raises EngineError."""
        self._receive(START_SECONDS - (time.monotonic() - self._began))
        self.seconds = time.monotonic() - self._began

    def ask(self, name: str, *arguments: Any) -> Any:
        """Calls a function below by its name. Raises EngineError if it fails."""
        self._pipe.send((name, arguments))
        return self._receive(WORK_SECONDS)

    def _receive(self, seconds: float) -> Any:
        try:
            in_time = self._pipe.poll(max(seconds, 0.0))
            worked, answer = self._pipe.recv() if in_time else (False, "no answer in time")
        except (EOFError, ConnectionError):
            worked, answer = False, "it ended"
        if not worked:
            raise EngineError(f"{self.setting.name}: {answer}; its output is in {self.log}")
        return answer

    def stop(self) -> None:
        """Ends the engine and its child processes. It has nothing to save."""
        if (pid := self._process.pid) is not None:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(10)

    def said(self) -> list[str]:
        """The plug-in's lines in the output, each once, without vLLM's prefix."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        said = re.compile(r"tunegemm( [\d.]+ in vLLM|:| leaves| serves).*")
        lines = (re.sub(r"^.*?(?=tunegemm[ :])", "", line) for line in text.splitlines())
        return list(dict.fromkeys(filter(said.match, lines)))


def settle() -> None:
    """A plug-in for vLLM that shortens the start: it leaves kernels of routers uncompiled, because this model
    has no routers, and inspects the model's class in this process."""
    with contextlib.suppress(ImportError):
        routers: Any = importlib.import_module("vllm.model_executor.kernels.linear.cute_dsl.ll_bf16")
        routers._cutedsl_available = False
    with contextlib.suppress(ImportError):
        models: Any = importlib.import_module("vllm.model_executor.models")
        llama: Any = importlib.import_module("vllm.model_executor.models.llama")
        models.ModelRegistry.register_model(ARCHITECTURE, llama.LlamaForCausalLM)


def _live(
    pipe: Connection, setting: Setting, folder: Path, variables: dict[str, str], cores: Sequence[int]
) -> None:
    os.setsid()
    if cores:
        os.sched_setaffinity(0, cores)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(variables)
    try:
        vllm: Any = importlib.import_module("vllm")
        llm = vllm.LLM(**arguments(setting, folder))
        llm.apply_model(fill)
        gc.collect()
        gc.freeze()
        gc.disable()  # between samples it collects
        pipe.send((True, None))
        while True:
            name, words = pipe.recv()
            pipe.send((True, WORK[name](llm, *words)))
    except EOFError:
        pass
    except BaseException as error:
        traceback.print_exc()
        pipe.send((False, f"{type(error).__name__}: {error}".splitlines()[0][:300]))


def arguments(setting: Setting, folder: Path) -> dict[str, Any]:
    """What an engine is started with; writes the model's config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(setting)))
    return {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "seed": 0, "max_model_len": 2048, "max_num_seqs": max(SEQUENCES), "max_num_batched_tokens": STEP,
        "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": CACHE_BYTES * setting.layers,
        "enable_prefix_caching": False, "compilation_config": {"cudagraph_capture_sizes": list(CAPTURED)},
        "max_logprobs": -1,
        "logprobs_mode": "raw_logits", "kernel_config": {"enable_cutedsl_warmup": False},
    }  # fmt: skip


def fill(model: Any) -> None:
    """Gives a model weights as large as a trained model's, in place: vLLM's own are almost zero. Sent to the
    computing processes, so it imports its own modules."""
    import torch

    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    with torch.inference_mode():
        for name, parameter in sorted(model.named_parameters()):
            data = parameter.data
            if name.endswith(("weight_scale", "weight_scale_inv")):
                data.uniform_(0.01 / 32, 0.03 / 32, generator=generator)
            elif "norm" in name:
                data.fill_(1.0)
            elif data.is_floating_point() and data.dim() == 2:
                size = 32.0 if data.dtype.itemsize == 1 else 0.02
                # In the order of memory, because fp8 weights are transposed; in parts, to save memory.
                for part in (data if data.is_contiguous() else data.t()).split(8192):
                    values = torch.randn(part.shape, generator=generator, device=data.device)
                    part.copy_((values * size).to(data.dtype))


def prompts_of(count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    source = random.Random(seed)
    return [{"prompt_token_ids": source.choices(range(10, 128000), k=length)} for _ in range(count)]


def sampling(tokens: int, **more: Any) -> Any:
    vllm: Any = importlib.import_module("vllm")
    return vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)


_names = count()


def _steps(llm: Any, prompts: Sequence[dict[str, list[int]]], tokens: int) -> list[tuple[float, int]]:
    """Lets the core generate tokens after prompts that all arrive at once. Returns the time at which each
    step yielded tokens, in seconds, and for how many prompts; the first entry is the start, with none.

    Ends early once `MOST_PROMPTS` have their token, if only one token is requested.
    """
    api: Any = importlib.import_module("vllm.v1.engine")
    client = llm.llm_engine.engine_core
    core, names = client.engine_core, [f"timed-{next(_names)}" for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        client.add_request(
            api.EngineCoreRequest(
                request_id=name, prompt_token_ids=prompt["prompt_token_ids"], mm_features=None,
                sampling_params=sampling(tokens), pooling_params=None, arrival_time=time.time(),
                lora_request=None, cache_salt=None, data_parallel_rank=None,
            )
        )  # fmt: skip
    times, done, is_over = [(time.perf_counter(), 0)], 0, False
    while core.scheduler.has_requests() or core.batch_queue:
        outputs, executed = core.step_fn()
        core.post_step(executed)
        value = sum(len(each.outputs) for each in (outputs or {}).values())
        if value and not is_over:
            times.append((time.perf_counter(), value))
            done += value
            if tokens == 1 and done >= MOST_PROMPTS:
                is_over = True
                core.abort_requests(names)
    assert done >= min(len(prompts), MOST_PROMPTS) * tokens, f"{done} tokens of {len(prompts)} prompts"
    return times


def sample(llm: Any, phase: str, sequences: int, at_least: float = SAMPLE_SECONDS) -> float:
    """Tokens per second: of prompts in prefill, of tokens generated after the first ones in decode.

    For decode the median over steps of all sequences, for prefill that over runs of all prompts.
    at_least: seconds of the engine's work.
    """
    gc.collect()
    is_prefill, rates, spent, runs = phase == "prefill", list[float](), 0.0, 0
    while not runs or spent < at_least:
        prompts = prompts_of(sequences, PROMPT if is_prefill else SHORT, runs)
        times = _steps(llm, prompts, 1 if is_prefill else GENERATED + 1)
        begin, end = times[0][0], times[-1][0]
        if is_prefill:
            rates.append(PROMPT * sum(value for _, value in times) / (end - begin))
        else:
            full = [at for at, value in times if value == sequences]
            rates += [sequences / (later - earlier) for earlier, later in pairwise(full[1:])]
        spent += end - begin
        runs += 1
    return statistics.median(rates)


def logits(llm: Any, tokens: int, others: int = 0) -> list[tuple[int, bytes]]:
    """For each of some tokens that follow one prompt, the token and all logits, as float32.

    others: prompts of different lengths that run beside it.
    """
    prompts = prompts_of(1, 64, 1234) + [prompts_of(1, 16 + i % 64, i)[0] for i in range(others)]
    parameters = [sampling(tokens, logprobs=-1)] + [sampling(tokens) for _ in range(others)]
    output = llm.generate(prompts, parameters, use_tqdm=False)[0].outputs[0]
    results = []
    for token, position in zip(output.token_ids, output.logprobs, strict=True):
        values = numpy.empty(len(position), numpy.float32)
        values[list(position)] = [each.logprob for each in position.values()]
        results.append((int(token), values.tobytes()))
    return results


WORK: dict[str, Callable[..., Any]] = {"sample": sample, "logits": logits}


def variables(setting: Setting, scratch: Path) -> dict[str, str]:
    """The environment of an engine's processes: separate caches, no network."""
    cache = scratch / "caches" / setting.name
    return {
        "TUNEGEMM_VLLM": "1" if setting.served else "0",
        "VLLM_BATCH_INVARIANT": "1" if setting.is_invariant else "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions are sent to the processes that compute
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"), "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        # DeepGEMM compiles what runs, once for all engines; its warm-up compiles for every number of rows.
        "VLLM_DEEP_GEMM_WARMUP": "skip", "DG_JIT_CACHE_DIR": str(scratch / "caches" / "deep_gemm"),
    }  # fmt: skip
