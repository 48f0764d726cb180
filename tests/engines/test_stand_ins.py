"""What the plug-ins decide by values, with stand-ins for the parts of vLLM and SGLang that they ask."""

from __future__ import annotations

import logging
import os
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.serving import BF16
from tunegemm.dispatch import extension
from tunegemm.engines import common, sglang, transformers, vllm
from tunegemm.engines.vllm import GATES
from tunegemm.groups.routing import Gate
from tunegemm.torch import ops

Plant = Any
LINEAR, LAYERS = "vllm.model_executor.kernels.linear", "vllm.model_executor.layers"


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Gives a module of an engine these names."""

    def plant(module: str, **names: object) -> Any:
        result = sys.modules.get(module) or types.ModuleType(module)
        monkeypatch.setitem(sys.modules, module, result)
        for name, value in names.items():
            setattr(result, name, value)
        return result

    return plant


class Cutlass:
    """vLLM's own class for fp8 layers."""

    layer_param_names = ("weight", "weight_scale")

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, f"for {compute_capability}"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply_scaled_mm(self, **words: Any) -> str:
        return "cutlass"


@pytest.fixture
def fp8(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The kernels of fp8 layers after two registrations, and what vLLM's parts say."""
    monkeypatch.setattr(common, "own", {})
    envs, capability = SimpleNamespace(VLLM_DISABLED_KERNELS=[]), SimpleNamespace(to_int=lambda: 90)
    platform = SimpleNamespace(get_device_capability=lambda: capability)
    kernels: list[type] = [Cutlass]
    plant(LINEAR, _POSSIBLE_FP8_KERNELS={"cuda": kernels}, CutlassFP8ScaledMMLinearKernel=Cutlass)
    plant("vllm.platforms", PlatformEnum=SimpleNamespace(CUDA="cuda"), current_platform=platform)
    plant("vllm", _custom_ops=SimpleNamespace(cutlass_scaled_mm=lambda a, b, **words: words), envs=envs)
    plant(f"{LAYERS}.quantization.utils", replace_parameter=setattr)
    vllm.fp8_layers()
    vllm.fp8_layers()
    return SimpleNamespace(kernels=kernels, envs=envs, platform=platform)


def test_fp8_kernels_have_ours_once_and_first(fp8: Any, plant: Plant) -> None:
    assert [kernel.__name__ for kernel in fp8.kernels] == [vllm.FP8_KERNEL, "Cutlass"]
    words = {"out_dtype": 1, "scale_a": 2, "scale_b": 3, "bias": 4}
    assert common.own["vllm_fp8"](None, None, 2, 3, 4, 1) == words  # type: ignore[arg-type]
    plant(LINEAR, _POSSIBLE_FP8_KERNELS={"cuda": None})
    with pytest.raises(common.Misfit, match="no fp8 kernels"):
        vllm.fp8_layers()


def test_hopper_alone_is_supported(fp8: Any) -> None:
    ours: Any = fp8.kernels[0]
    assert [ours.is_supported(each)[0] for each in (80, 89, 90, 100, None)] == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert ours.is_supported(90) == (True, "for 90")
    fp8.platform.get_device_capability = lambda: None
    assert ours.is_supported() == (False, "requires compute capability 90 (Hopper)")
    fp8.envs.VLLM_TEST_FORCE_FP8_MARLIN = True
    assert "Marlin" in ours.is_supported(90)[1]
    fp8.envs.VLLM_DISABLED_KERNELS = ["Cutlass"]
    assert ours.is_supported(90) == (False, "falls back to Cutlass, which is disabled")


@pytest.mark.parametrize(("per_tensor", "scales", "after"), [(True, 1, 1), (False, 1, 48), (False, 48, 48)])
def test_one_scale_becomes_one_for_each_column(fp8: Any, per_tensor: bool, scales: int, after: int) -> None:
    kernel: Any = fp8.kernels[0]()
    shape = SimpleNamespace(is_per_tensor=lambda: per_tensor)
    kernel.config = SimpleNamespace(
        activation_quant_key=SimpleNamespace(scale=SimpleNamespace(group_shape=shape))
    )
    layer: Any = SimpleNamespace(weight=torch.empty(64, 48), weight_scale=torch.full((scales, 1), 0.5))
    kernel.process_weights_after_loading(layer)
    assert torch.equal(layer.weight_scale, torch.full((after, 1), 0.5))


@pytest.mark.parametrize(
    ("a_shape", "columns", "bias", "by"),
    [((16, 64), 48, None, "ours"), ((16, 64), 48, BF16, "ours"), ((16, 64), 48, torch.float16, "cutlass"),
     ((16, 60), 48, None, "cutlass"), ((16, 64), 40, None, "cutlass"), ((16, 60), 40, BF16, "cutlass")],
)  # fmt: skip
def test_fp8_products_without_padding_are_ours(
    fp8: Any, monkeypatch: pytest.MonkeyPatch, a_shape: tuple[int, int], columns: int, bias: Any, by: str
) -> None:
    ours = SimpleNamespace(engine_scaled_mm=lambda a, b, *_: torch.empty(a.shape[0], b.shape[1]))
    monkeypatch.setattr(vllm.torch.ops, "tunegemm", ours, raising=False)
    result = fp8.kernels[0]().apply_scaled_mm(
        A=torch.empty(a_shape), B=torch.empty(64, 48), out_dtype=BF16, As=None, Bs=None,
        bias=None if bias is None else torch.empty(48, dtype=bias), output_shape=[2, 8, columns],
    )  # fmt: skip
    assert by == (result if isinstance(result, str) else "ours")
    assert by == "cutlass" or result.shape == (2, 8, 48)


class TritonFp8BlockScaledMMKernel(Cutlass):
    """vLLM's own class for fp8 layers with block scales."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, "theirs"

    def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> str:
        return "triton"


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "invariant", "why"),
    [(1, 128, BF16, False, "theirs"), (128, 128, BF16, False, "blocks of"), (1, 64, BF16, False, "blocks of"),
     (1, 128, torch.float16, False, "and bf16"), (1, 128, BF16, True, "batch-invariant")],
)  # fmt: skip
def test_layers_with_block_scales_have_ours_before_the_engines(
    fp8: Any, plant: Plant, monkeypatch: pytest.MonkeyPatch,
    rows: int, columns: int, dtype: Any, invariant: bool, why: str,
) -> None:  # fmt: skip
    own, kernels = TritonFp8BlockScaledMMKernel, [Cutlass, TritonFp8BlockScaledMMKernel]
    of_cuda = {"cuda": kernels}
    plant(LINEAR, _POSSIBLE_FP8_BLOCK_KERNELS=of_cuda, TritonFp8BlockScaledMMKernel=own)
    plant(f"{LAYERS}.quantization.utils.fp8_utils", per_token_group_quant_fp8=None)
    monkeypatch.setattr(extension, "policy", lambda: SimpleNamespace(is_batch_invariant=invariant))
    vllm.block_layers()
    vllm.block_layers()
    assert [kernel.__name__ for kernel in kernels] == ["Cutlass", vllm.BLOCK_KERNEL, own.__name__]
    ours: Any = kernels[1]
    scales = [
        SimpleNamespace(scale=SimpleNamespace(group_shape=each)) for each in ((rows, columns), (128, 128))
    ]
    config = SimpleNamespace(activation_quant_key=scales[0], weight_quant_key=scales[1], out_dtype=dtype)
    served, said = ours.can_implement(config)
    assert served is (why == "theirs") and why in said
    assert [ours.is_supported(each)[0] for each in (89, 90, 100)] == [False, True, False]
    ours(config)
    assert common.own["vllm_TritonFp8BlockScaledMMKernel"](None, None, None, None) == "triton"  # type: ignore
    for wrong in (None, [Cutlass]):
        of_cuda["cuda"] = wrong  # type: ignore[assignment]
        with pytest.raises(common.Misfit, match="block scales"):
            vllm.block_layers()


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize(
    ("before", "gets"), [({}, True), ({"a": 1}, True), ({"tunegemm": "as it is"}, False), ("text", False)]
)
def test_the_compile_caches_key_gets_our_facts_once(
    plant: Plant, gates: bool, before: Any, gets: bool
) -> None:
    class Config:
        additional_config: Any = before

        def __post_init__(self) -> None:
            pass

    plant("vllm.config.vllm", VllmConfig=Config)
    vllm.configuration(gates=gates)
    config = Config()
    config.__post_init__()
    facts = vllm.facts_of(config)
    if not gets:
        assert config.additional_config == before and facts == {}
        return
    assert config.additional_config == {**before, "tunegemm": facts}
    served = {"served": extension.fingerprint(), "records": extension.fingerprint(anywhere=True)}
    assert facts == served | ({GATES: "with their product"} if gates else {})


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_says_what_is_served(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    caplog.set_level(logging.INFO)
    seen: list[int] = []
    monkeypatch.setattr(common, "served", lambda model, most, **_: seen.append(most) or "all of it")
    plant("vllm", __version__="0.30.0")
    limits = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=300))
    worker = SimpleNamespace(get_model=lambda: None)
    vllm.report(SimpleNamespace(vllm_config=limits, worker=worker, rpc_rank=rank))
    plant("sglang", __version__="0.5.23")
    plant("sglang.srt.runtime_context", get_parallel=lambda: SimpleNamespace(tp_rank=rank))
    for size in (1, 0, -1, None):
        sizes = SimpleNamespace(chunked_prefill_size=size)
        sglang.report(SimpleNamespace(server_args=sizes, model=None))
    assert seen == [300, 1, 8192, 8192, 8192]
    assert len(caplog.messages) == (0 if rank else 5)
    if not rank:
        assert " in vLLM 0.30.0: all of it" in caplog.messages[0]
        assert " in SGLang 0.5.23: all of it, logits by its own; " in caplog.messages[1]


@pytest.mark.parametrize(
    ("mode", "policy", "backend", "dtype", "by"),
    [(False, False, "", BF16, "ours"), (True, False, "", BF16, "theirs"), (True, True, "", BF16, "ours"),
     (False, True, "", BF16, "ours"), (False, False, "cutedsl", BF16, "theirs"),
     (False, False, "gemv", BF16, "theirs"), (False, False, "", torch.float64, "theirs")],
)  # fmt: skip
def test_sglangs_layers_keep_what_the_user_chose(
    plant: Plant, monkeypatch: pytest.MonkeyPatch,
    mode: bool, policy: bool, backend: str, dtype: torch.dtype, by: str,
) -> None:  # fmt: skip
    hooks: dict[str, Any] = {}
    registry = SimpleNamespace(register=lambda target, hook, kind: hooks.__setitem__(target, hook))
    kind = SimpleNamespace(AROUND="around")
    plant("sglang.srt.plugins.hook_registry", HookRegistry=registry, HookType=kind)

    class Method:
        def apply(self, layer: Any, x: Any, bias: Any = None) -> None:
            pass

    chosen = SimpleNamespace(is_cutedsl=lambda: backend == "cutedsl", is_gemv=lambda: backend == "gemv")
    plant(
        "sglang.srt.layers.quantization.unquant", UnquantizedLinearMethod=Method,
        get_bf16_gemm_backend=lambda: chosen, is_batch_invariant_mode_enabled=lambda: mode,
    )  # fmt: skip
    monkeypatch.setattr(sglang, "hooked", set())
    monkeypatch.setattr(ops, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(extension, "policy", lambda: SimpleNamespace(is_batch_invariant=policy))
    monkeypatch.setattr(common, "linear", lambda *_: "ours")
    sglang.sixteen_bits()
    (hook,) = hooks.values()
    layer = SimpleNamespace(weight=torch.empty(8, 8, dtype=dtype))
    assert hook(lambda *_: "theirs", None, layer, torch.empty(2, 8, dtype=dtype)) == by
    hooks.clear()
    sglang.sixteen_bits()
    assert not hooks, "once"


def test_sglangs_fp8_product_is_ours_on_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = SimpleNamespace(engine_scaled_mm=lambda *_: "ours")
    monkeypatch.setattr(sglang.torch.ops, "tunegemm", ours, raising=False)
    for device, by in (("cuda", "theirs"), ("cpu", "ours")):
        monkeypatch.setattr(ops, "DEVICE_TYPE", device)
        assert sglang.scaled_mm(lambda *_: "theirs", torch.empty(2, 8), *[None] * 3, BF16) == by  # type: ignore[arg-type]


@pytest.mark.parametrize("computes", [True, False])
def test_sglangs_processes_that_compute_say_so(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, computes: bool
) -> None:
    around: list[str] = []
    monkeypatch.setattr(sglang, "around", lambda target, *_: around.append(target))
    monkeypatch.setenv(sglang.RECORDS, "")
    monkeypatch.delenv(sglang.RECORDS)  # and again behind the test
    if computes:
        plant(sglang.SCHEDULER)
    sglang.start_line()
    assert os.environ[sglang.RECORDS] == extension.fingerprint(anywhere=True) and not caplog.messages
    assert around == [f"{sglang.RUNNER}.ModelRunner.load_model"] * computes
    monkeypatch.setenv(sglang.RECORDS, "others")
    sglang.start_line()
    assert len(caplog.messages) == 1 and "others" in caplog.messages[0]


def gated_by(
    activation: Any, limit: Any = None, alpha: Any = None, *, own: Any = None, other: Any = None
) -> Any:
    """A layer of experts as transformers has them: its class's gate is `own`, or transformers' default."""

    class Experts:
        def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = (own or other)(both)
            return result

    layer: Any = Experts()
    layer.act_fn = activation
    for name, value in (("limit", limit), ("alpha", alpha)):
        if value is not None:
            setattr(layer, name, value)
    return layer


class SiLU(torch.nn.Module):
    """Torch's in its name alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * x


@pytest.mark.parametrize(
    ("activation", "name"),
    [(torch.nn.SiLU(), "silu"), (torch.nn.ReLU(), "relu"), (torch.nn.GELU(), "gelu"),
     (torch.nn.GELU("tanh"), "gelu_tanh"), (torch.nn.Tanh(), ""), (SiLU(), ""),
     (torch.nn.functional.silu, "")],
)  # fmt: skip
def test_transformers_default_gate_has_a_name(activation: Any, name: str) -> None:
    layer = gated_by(activation)
    gate = type(layer)._apply_gate
    assert transformers.activation_of(layer, gate) == (name or layer._apply_gate)
    if name:
        hook = activation.register_forward_hook(lambda *_: None)
        assert transformers.activation_of(layer, gate) == layer._apply_gate
        hook.remove()
        activation.forward = lambda x: x
        assert transformers.activation_of(layer, gate) == layer._apply_gate
        del activation.forward


def test_another_gate_is_ours_if_it_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "equal_gates", {})
    ours = Gate(1.5, 3.0)
    assert transformers.activation_of(gated_by(None, 3.0, 1.5, own=ours), None) == ours
    for layer in (
        gated_by(None, 3.0, 1.25, own=ours), gated_by(None, own=ours), gated_by(None, "3", own=ours),
        gated_by(None, 3.0, 1.5, own=lambda both: both.no_such_method()),
    ):  # fmt: skip
        assert transformers.activation_of(layer, None) == layer._apply_gate
    plain = Gate(1.0, 3.0)
    assert transformers.activation_of(gated_by(None, 3, own=plain), None) == plain, "alpha is 1 by default"
    kept = {gate for _, gate in transformers.equal_gates}
    assert kept == {ours, plain, Gate(1.25, 3.0)}


@pytest.mark.parametrize(
    ("facts", "dtype", "compiling", "by"),
    [({}, BF16, False, "ours"), ({"has_gate": False}, BF16, False, "theirs"),
     ({"has_post_expert_norm": True}, BF16, False, "theirs"), ({}, torch.float32, False, "ours"),
     ({}, torch.float32, True, "theirs"), ({}, BF16, True, "ours"),
     ({"is_transposed": True}, BF16, False, "ours"),
     ({"_is_expert_parallel": False}, BF16, False, "ours")],
)  # fmt: skip
@pytest.mark.parametrize("before", [BF16, torch.float32])
def test_layers_of_transformers_with_a_gate_are_ours(
    plant: Plant, monkeypatch: pytest.MonkeyPatch,
    facts: dict[str, Any], dtype: torch.dtype, compiling: bool, by: str, before: torch.dtype,
) -> None:  # fmt: skip
    seen: list[Any] = []

    def ours(
        hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *_: Any, **words: Any
    ) -> torch.Tensor:
        seen.append((hidden.dtype, tuple(gate_up.shape), tuple(down.shape), words["elsewhere"]))
        return hidden

    moe = plant("transformers.integrations.moe", grouped_mm_experts_forward=lambda *_: "theirs")
    plant("transformers.integrations", moe=moe)
    monkeypatch.setattr(transformers, "experts", ours)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    layer = gated_by(torch.nn.SiLU())
    layer.gate_up_proj, layer.down_proj = (
        torch.empty(3, 8, 16, dtype=dtype),
        torch.empty(3, 16, 4, dtype=dtype),
    )
    vars(layer).update(facts)
    result = transformers.experts_forward(layer, torch.empty(2, 16, dtype=before), None, None)  # type: ignore[arg-type]
    assert isinstance(result, str) == (by == "theirs")
    if by == "ours":
        turned = facts.get("is_transposed", False)
        shapes = ((3, 16, 8), (3, 4, 16)) if turned else ((3, 8, 16), (3, 16, 4))
        assert seen == [(dtype, *shapes, facts.get("_is_expert_parallel", True))]
        assert result.dtype is before
