"""Fused layers of `transformers` by real kernels: against fp32, captured, compiled, from threads."""

from __future__ import annotations

import copy
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tunegemm
from tests.support.kernels import watch_launches
from tests.support.numerics import DTYPES, difference
from tests.support.processes import compile_workers
from tunegemm.choose.snapshot import Snapshot
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import CompilePool
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import TunegemmWarning
from tunegemm.generate import families
from tunegemm.serve.torch.layers import halves
from tunegemm.store.record import Record

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("all_tuned")]

WIDTH, INNER, LAYERS = 512, 768, 2
SIZE = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
#: Sequences and tokens: rows of decoding, whose kernels split K, and of prefill.
DECODE, PREFILL = (16, 1), (2, 256)
QKV, GATED, DOWN, SQUARE = (1024, WIDTH), (2 * INNER, WIDTH), (WIDTH, INNER), (WIDTH, WIDTH)
#: N, K and epilogue of each product of a fused layer.
FAMILIES: dict[str, list[tuple[tuple[int, int], str]]] = {
    "Llama": [(QKV, ""), (SQUARE, "residual"), (GATED, "swiglu"), (DOWN, "residual")],
    "Gemma": [(QKV, ""), (SQUARE, "residual"), (GATED, "geglu_tanh"), (DOWN, "residual")],
    "Qwen2": [(QKV, "bias_n"), (SQUARE, "residual"), (GATED, "swiglu"), (DOWN, "residual")],
    "Phi": [
        (QKV, "bias_n"), (SQUARE, "bias_n"), ((INNER, WIDTH), "bias_n+gelu_tanh"), (DOWN, "bias_n+residual"),
    ],
}  # fmt: skip
#: Of cute_sm90.
KERNEL: dict[str, Value] = {
    "schedule": "cooperative", "tile_m": 64, "tile_n": 64, "tile_k": 64, "stages": 6, "cluster_m": 1,
    "cluster_n": 1, "epi_n": 32, "swap_ab": False, "tile_scheduler": "static",
}  # fmt: skip
LAUNCH: dict[str, Value] = {
    "raster_order": "along_m", "swizzle_size": 1, "ctas": "all", "reduction": "pairs", "l2_hint": "none",
    "cluster_order": "index",
}  # fmt: skip
CASES = [*((family, "bf16") for family in FAMILIES), ("Llama", "fp16")]
THREADS, CALLS = 8, 40


def _problems(family: str, dtype: str) -> Iterator[Problem]:
    for sequences, tokens in (DECODE, PREFILL):
        for (n, k), epilogue in FAMILIES[family]:
            yield Problem(sequences * tokens, n, k, in_dtype=dtype, out_dtype=dtype, epilogue=epilogue)


@pytest.fixture(scope="module")
def records(device: Device) -> list[Record]:
    """Of all products of all cases, by one kernel for each epilogue, compiled at once."""
    family = families.get("cute_sm90")
    source, made = families.kernel_source_hash(family.name), []
    for problem in dict.fromkeys(problem for case in CASES for problem in _problems(*case)):
        splits = 2 if problem.m == DECODE[0] else 1
        candidate = Candidate.make(family.name, KERNEL, LAUNCH | {"split_k": splits})
        made.append(
            Record(problem, candidate, device.fingerprint, ratio=1.2, confirmed=True, kernel_source=source)
        )
    with CompilePool(ArtifactStore(), workers=compile_workers()) as pool:
        keys = [family.kernel_key(record.problem, record.candidate, device) for record in made]
        for result in [pool.submit(family.name, key) for key in keys]:
            assert result.result().artifact is not None, result.result().failure
    return made


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, records: list[Record]) -> list[Problem]:
    """The problems of the kernels that are launched from now on; they serve all products of these models."""
    seen: list[Problem] = []
    watch_launches(monkeypatch, lambda problem, *_: seen.append(problem), read=lambda: Snapshot(records))
    return seen


def model_of(family: str = "Llama", dtype: str = "bf16") -> Any:
    """Without a head; its input are embeddings."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        config = getattr(transformers, f"{family}Config")(**SIZE)
        model = transformers.AutoModel.from_config(config).to(DTYPES[dtype]).eval()
        for name, each in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(each)
    return model


def fused(model: Any) -> Any:
    other = copy.deepcopy(model)
    tunegemm.patch(other, fuse=True)
    return other


def given(rows: tuple[int, int], dtype: str = "bf16", seed: int = 1) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*rows, WIDTH, device="cuda", generator=generator).to(DTYPES[dtype])


def run(model: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(inputs_embeds=x, use_cache=False).last_hidden_state
    return result


def assert_as_exact(
    ours: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor, bound: float = 1.25
) -> None:
    """No further from fp32 than torch, but for what rounding in other places makes."""
    assert ours.shape == torchs.shape and ours.dtype == torchs.dtype
    assert difference(ours, exact) <= bound * difference(torchs, exact) + 1e-6


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_a_family(launches: list[Problem], family: str, dtype: str) -> None:
    plain = model_of(family, dtype)
    exact, model = copy.deepcopy(plain).float(), fused(plain)
    with torch.no_grad():
        for rows in (DECODE, PREFILL):
            for seed in range(3):
                x = given(rows, dtype, seed)
                launches.clear()
                result = run(model, x)
                assert_as_exact(result, run(plain, x), run(exact, x.float()))
                wanted = [problem for problem in _problems(family, dtype) if problem.m == x.shape[:2].numel()]
                assert Counter(launches) == Counter(wanted * LAYERS)
                assert torch.equal(run(model, x), result)
        tunegemm.unpatch(model)
        assert torch.equal(run(model, x), run(plain, x)), "unpatched, bit for bit"
    for mine, torchs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, torchs) and mine.stride() == torchs.stride()


@pytest.mark.parametrize("rows", [DECODE, PREFILL])
def test_captured(launches: list[Problem], rows: tuple[int, int]) -> None:
    model, x = fused(model_of()), given(rows)
    with torch.no_grad():
        expected = [run(model, given(rows, seed=seed)) for seed in (2, 3)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run(model, x)
    assert len(launches) == 3 * 4 * LAYERS
    for seed, right in zip((2, 3), expected, strict=True):
        x.copy_(given(rows, seed=seed))
        graph.replay()
        assert torch.equal(result, right)


def test_threads_on_one_stream_get_their_own_results(launches: list[Problem]) -> None:
    """Each has its own input; the layers, their weights and what they hold for each other are shared."""
    model = fused(model_of())
    inputs = [given((DECODE, PREFILL)[index % 2], seed=index) for index in range(THREADS)]
    wrong = torch.zeros(THREADS, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        expected = [run(model, x) for x in inputs]
    torch.cuda.synchronize()
    launches.clear()
    begin, errors = threading.Barrier(THREADS), []

    def work(index: int) -> None:
        try:
            begin.wait(60)
            with torch.no_grad():
                for _ in range(CALLS):
                    wrong[index] += (run(model, inputs[index]) != expected[index]).any()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and wrong.tolist() == [0] * THREADS
    assert len(launches) == THREADS * CALLS * 4 * LAYERS


def test_reduce_overhead(launches: list[Problem]) -> None:
    """Sums across modules are Inductor's, and the products before them have no records here."""
    warnings.simplefilter("ignore", TunegemmWarning)
    plain = model_of()
    exact, model = copy.deepcopy(plain).float(), fused(plain)
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        for seed in (0, 1, 2, 0):  # compiled, recorded and replayed
            x = given(DECODE, seed=seed)
            torch.compiler.cudagraph_mark_step_begin()
            assert_as_exact(run(compiled, x).clone(), run(plain, x), run(exact, x.float()))
    assert {problem.epilogue for problem in launches} >= {"", "swiglu"}
    assert {(problem.n, problem.k) for problem in launches} >= {QKV, GATED}


def test_nan_and_inf_stay_in_their_rows(launches: list[Problem]) -> None:
    """A hook looks at what the gate gives; the layer that has it has no record here."""
    warnings.simplefilter("ignore", TunegemmWarning)
    plain = model_of().layers[0].mlp
    model = fused(plain)
    gates: list[torch.Tensor] = []
    for each in (plain, model):
        each.down_proj.register_forward_pre_hook(lambda _, inputs: gates.append(inputs[0]))
    for rows in (DECODE, PREFILL):
        x = given(rows)
        odd = (float("nan"), float("inf"), -float("inf"), 3e38)
        for row, value in enumerate(odd):
            x.flatten(0, 1)[3 * row, row] = value
        gates.clear()
        with torch.no_grad():
            plain(x), model(x)
        torchs, ours = (gate.flatten(0, 1) for gate in gates)
        assert torch.equal(ours.isnan(), torchs.isnan()) and torch.equal(ours.isinf(), torchs.isinf())
        finite = torchs.isfinite()
        assert 0 < int((~finite).sum()) <= len(odd) * INNER
        close = torch.isclose(ours.float(), torchs.float(), rtol=2e-2, atol=2e-2)
        assert bool((close | ~finite).all())
    assert {problem.epilogue for problem in launches} >= {"swiglu"}


def test_without_kernels_few_rows_are_joined_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEGEMM_MODE", "exact")
    watch_launches(monkeypatch, lambda *_: pytest.fail("there is no kernel"), read=Snapshot)
    plain = model_of("Qwen2")
    exact, model = copy.deepcopy(plain).float(), fused(plain)
    layer = model.layers[0].self_attn
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        for rows in (DECODE, PREFILL):
            x = given(rows)
            assert_as_exact(run(model, x), run(plain, x), run(exact, x.float()))
            storages = {each(x).untyped_storage().data_ptr() for each in (layer.q_proj, layer.k_proj)}
            assert len(storages) == (1 if rows is DECODE else 2)


def test_a_training_step(launches: list[Problem]) -> None:
    """Products of the backward pass have no records here."""
    warnings.simplefilter("ignore", TunegemmWarning)
    plain = model_of().train()
    exact, model = copy.deepcopy(plain).float(), fused(plain)
    found = []
    for each, call in ((model, model), (plain, plain), (exact, exact), (model, torch.compile(model))):
        x = given(PREFILL).to(next(each.parameters()).dtype).requires_grad_()
        each.zero_grad()
        launches.clear()
        result = run(call, x)
        upstream = torch.linspace(-1, 1, result.numel(), device="cuda").view(result.shape)
        result.backward(upstream.to(torch.bfloat16).to(result.dtype))
        found.append([x.grad, *(one.grad for one in each.parameters() if one.grad is not None)])
    for eager, torchs, right, compiled in zip(*found, strict=True):
        assert_as_exact(eager, torchs, right, 1.5)
        assert_as_exact(compiled, torchs, right, 1.5)
    assert QKV not in {(problem.n, problem.k) for problem in launches}, "layer by layer"


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 7168), (64, 7168), (65, 14336), (256, 7168), (256, 51200), (1000, 16384), (1025, 7168)],
)
def test_gate_and_up_in_one_weight(rows, columns, in_turns):
    x, weight = given((1, rows))[0], given((1, columns), seed=2)[0] / WIDTH**0.5
    result = halves.gated(x, halves.one_group(weight), (), "swiglu", in_turns=in_turns)
    assert result is not None, "its kernel ships"
    both = x.double() @ weight.double().t()
    gate, up = (both[:, ::2], both[:, 1::2]) if in_turns else both.chunk(2, -1)
    assert difference(result, nn.functional.silu(gate) * up) < 6e-3


@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_after_one_another(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model that was patched in training mode has them."""

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (nn.Linear(WIDTH, 7168, bias) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(self.gate(x)) * self.up(x)

    found: list[bool] = []
    by_kernel = halves.gated

    def gated(*arguments: Any, **keywords: Any) -> Any:
        result = by_kernel(*arguments, **keywords)
        found.append(result is not None)
        return result

    monkeypatch.setattr(halves, "gated", gated)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = MLP().bfloat16()
    exact = copy.deepcopy(model).double()
    tunegemm.patch(model, fuse=True)
    model.eval()
    with torch.no_grad():
        for rows in ((1, 1), (16, 1), (3, 40), (2, 128), (1, 1000), (1, 2000)):
            x = given(rows)
            assert difference(model(x), exact(x.double())) < 6e-3
    assert found == [True] * 6
