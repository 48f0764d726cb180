"""Linear layers of models by their config.json: those that transformers builds of the same config."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tunegemm.describe.problem import Problem
from tunegemm.describe.workload import read
from tunegemm.describe.workload.engines import ENGINES, Shapes, shapes
from tunegemm.describe.workload.models import read_model
from tunegemm.describe.workload.products import Workload
from tunegemm.errors import WorkloadError

_SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "dtype": "bfloat16", "pad_token_id": None,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip

_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_INDEXED = {"q_lora_rank": 20, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
_SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip

#: A class of transformers and what its config says beside `_SMALL`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mistral": ("MistralConfig", {"head_dim": 32}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3, biases": ("Qwen3Config", {"attention_bias": True}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 20}),
    "gemma3_text": ("Gemma3TextConfig", {}),
    "phi3": ("Phi3Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {"num_experts": 4, "shared_expert_intermediate_size": 48, "moe_intermediate_size": 16,
         "mlp_only_layers": [1]},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 2}
    ),
    "deepseek_v2": ("DeepseekV2Config", {**_LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT, "q_lora_rank": 20, "attention_bias": True}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 16}),
    "qwen3_next": ("Qwen3NextConfig", {**_DELTA, **_SPARSE, "shared_expert_intermediate_size": 48}),
    "qwen3_5_text": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig", {**_DELTA, **_SPARSE, "shared_expert_intermediate_size": 48}
    ),
    "glm4": ("Glm4Config", {"attention_bias": True, "head_dim": 16}),
    "glm4_moe": ("Glm4MoeConfig", {**_ROUTED, "attention_bias": True, "head_dim": 16}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**_LATENT, **_INDEXED}),
    "deepseek_v32": ("DeepseekV32Config", {**_LATENT, **_INDEXED}),
    "kimi_linear": (
        "KimiLinearConfig",
        {"kv_lora_rank": 24, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
         "v_head_dim": 12,
         "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "linear_num_heads": 2,
         "moe_router_activation_func": "sigmoid",
         "linear_head_dim": 8, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        {"num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 8,
         "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
         "layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
    "gemma4_text, experts": (
        "Gemma4TextConfig",
        {"num_hidden_layers": 2, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0,
         "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True,
         "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "llama4_text": (
        "Llama4TextConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "head_dim": 16,
         "intermediate_size_mlp": 112},
    ),
    "minimax": ("MiniMaxConfig", {"num_local_experts": 4, "head_dim": 16}),
    "minimax_m2": ("MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "nemotron_h": (
        "NemotronHConfig",
        {"n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40,
         "moe_latent_size": 32, "head_dim": 16, "hybrid_override_pattern": "M*-E", "num_hidden_layers": 4},
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 24,
         "v_head_dim": 16, "swa_num_key_value_heads": 4,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2,
         "moe_layer_start_index": 1, "head_dim": 16},
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}),
    "cohere2": ("Cohere2Config", {"head_dim": 16}),
}  # fmt: skip


def config_of(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    kind, more = MODELS[name]
    return getattr(transformers, kind)(**{**_SMALL, **more})


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    config = config_of(request.param)
    config.save_pretrained(tmp_path)
    return config, tmp_path


def counted(found: Shapes) -> Counter[tuple[int, int, bool]]:
    """Columns, depth and bias of each matrix of one step of one row, but for experts."""
    products = [product for product in found.workload.products if product.kind.op != "grouped_mm"]
    rows = [(p.kind.n, p.kind.k, p.kind.bias == "vector", p.calls) for p in products]
    return Counter({(n, k, bias): calls for n, k, bias, calls in rows})


def test_they_are_the_layers_of_the_model(saved: tuple[Any, Path]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config, folder = saved
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected: Counter[tuple[int, int, bool]] = Counter()
    grouped: Counter[tuple[int, int, int, str]] = Counter()
    mixers: list[str] = []  # Mamba's are left out
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            first = module.gate_up_proj if hasattr(module, "gate_up_proj") else module.up_proj
            for weight in (first, module.down_proj):
                experts, *sides = weight.shape
                is_transposed = getattr(module, "is_transposed", False)
                # Llama 4's are the other way round, and no grouped product in transformers.
                n, k = reversed(sides) if getattr(module, "is_transposed", True) else sides
                grouped[experts, n, k, "n" if is_transposed else "k"] += 1
        if name.endswith("shared_expert_gate"):
            continue  # of one column
        if "mamba" in type(module).__name__.lower():
            mixers.append(f"{name}.")
        if name.startswith(tuple(mixers)) and mixers:
            continue
        gates = name.endswith((".gate", ".router")) and hasattr(module, "weight")
        in_fp32 = config.model_type.startswith(("deepseek", "glm", "kimi", "nemotron", "mimo", "ernie"))
        if isinstance(module, torch.nn.Linear) or (gates and not in_fp32):
            bias = getattr(module, "bias", None) is not None
            expected[*module.weight.shape, bias] += 1
    found = shapes(read_model(str(folder)), "transformers", rows=[1])
    assert counted(found) == expected and list(found.refused) == ["mamba"] * bool(mixers)
    products = [one for one in found.workload.products if one.kind.op == "grouped_mm"]
    kinds = {(one.kind.groups, one.kind.n, one.kind.k, one.kind.b_major): one.calls for one in products}
    assert kinds == grouped
    each = getattr(config, "num_experts_per_tok", getattr(config, "top_k_experts", 1))
    assert all(one.kind.m == each and one.kind.groups for one in products)


def test_experts_are_what_an_engine_looks_up(tmp_path: Path) -> None:
    """Rows are tokens times experts of each; ranks divide features; what an engine keeps is left out."""
    config_of("mixtral").save_pretrained(tmp_path)
    model = read_model(str(tmp_path))
    found = shapes(model, "transformers", ranks=2, rows=[8])
    assert {name: count for name, count in found.layers.items() if "experts" in name} == {
        "experts_gate_up 96x64 of 4 bf16 grouped+swiglu": 3, "experts_down 64x48 of 4 bf16 grouped": 3
    }  # fmt: skip
    found.workload.write(tmp_path / "shapes.json")
    problems = [demand.problem for demand in read(tmp_path / "shapes.json")[0]]
    parsed = Problem.parse("16x96x64", groups=4, epilogue="swiglu")
    assert [problem for problem in problems if problem.groups] == [
        Problem.parse("16x64x48", groups=4), parsed
    ]  # fmt: skip
    for engine in ("vllm", "sglang"):
        assert {*shapes(model, engine).refused.values()} == {
            f"{engine} computes experts with its own kernels"
        }
    config_of("gpt_oss").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(values | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    refused = shapes(read_model(str(tmp_path)), "transformers").refused
    assert {*refused.values()} == {"quantised with mxfp4, which has no kernels"} and len(refused) == 2
    values |= {"model_type": "mixtral", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    refused = shapes(read_model(str(tmp_path)), "transformers").refused
    assert {*refused.values()} == {"transformers computes quantised experts with its own kernels"}


def plainly(workload: Workload) -> dict[tuple[int, int, int, str, str], int]:
    """Its products without a batch, which attention has, and how often each is computed."""
    return {
        (one.kind.m, one.kind.n, one.kind.k, one.kind.op, one.kind.in_dtype): one.calls
        for one in workload.products
        if one.kind.batch == 1
    }


def test_what_the_model_really_multiplies(tmp_path: Path) -> None:
    """A forward pass that is recorded: its products are those that were foreseen, as often."""
    import torch
    from transformers import AutoModelForCausalLM

    import tunegemm

    for name in ("qwen2", "phi3", "gemma2"):
        config = config_of(name)
        config.save_pretrained(tmp_path / name)
        model = AutoModelForCausalLM.from_config(config)
        with tunegemm.record(tmp_path / "recorded.json"), torch.no_grad():
            model(torch.arange(6)[None])
        document = json.loads((tmp_path / "recorded.json").read_text())
        recorded = Workload.from_document(document, "")[0]
        foreseen = shapes(read_model(str(tmp_path / name)), "transformers", rows=[6]).workload
        assert plainly(foreseen) == plainly(recorded), name


def test_engines_merge_what_has_one_input(saved: tuple[Any, Path]) -> None:
    _, folder = saved
    model = read_model(str(folder))
    apart, merged = (counted(shapes(model, engine, rows=[8])) for engine in ("transformers", "vllm"))
    padding = -1000 % 64
    size = {True: 0, False: 0}
    for counts, is_merged in ((apart, False), (merged, True)):
        size[is_merged] = sum(n * k * calls for (n, k, _), calls in counts.items())
    assert size[True] == size[False] + padding * 64
    assert merged.total() <= apart.total()


def shapes_of(tmp_path: Path, engine: str = "vllm", ranks: int = 1, **values: Any) -> list[str]:
    llama = {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**llama, **values}))
    return list(shapes(read_model(str(tmp_path)), engine, ranks=ranks, rows=[16]).layers)


def test_of_llama_3_8b(tmp_path: Path) -> None:
    assert shapes_of(tmp_path) == [
        "qkv 6144x4096 bf16", "o 4096x4096 bf16", "gate_up 28672x4096 bf16", "down 4096x14336 bf16",
        "logits 128256x4096 bf16",
    ]  # fmt: skip
    assert shapes_of(tmp_path, ranks=4) == [
        "qkv 1536x4096 bf16", "o 4096x1024 bf16", "gate_up 7168x4096 bf16", "down 4096x3584 bf16",
        "logits 32064x4096 bf16",
    ]  # fmt: skip
    # Sixteen ranks share eight heads of keys and values.
    assert shapes_of(tmp_path, ranks=16)[0] == "qkv 512x4096 bf16"
    assert shapes_of(tmp_path, engine="transformers")[:3] == [
        "qkv 4096x4096 bf16", "qkv 1024x4096 bf16", "o 4096x4096 bf16",
    ]  # fmt: skip


def test_of_deepseek_v3(tmp_path: Path) -> None:
    """As db/products.toml has them."""
    published = {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536,
        "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "n_routed_experts": 256, "first_k_dense_replace": 3, "num_hidden_layers": 61, "vocab_size": 129280,
        "num_experts_per_tok": 8,
    }  # fmt: skip
    assert shapes_of(tmp_path, **published) == [
        "q_kv_a 2112x7168 bf16", "q_b 24576x1536 bf16", "kv_b 32768x512 bf16", "o 7168x16384 bf16",
        "gate_up 36864x7168 bf16", "down 7168x18432 bf16",
        "gate_up 4096x7168 bf16", "down 7168x2048 bf16",
        "logits 129280x7168 bf16",
    ]  # fmt: skip


def test_rows_are_those_of_the_engines_steps(tmp_path: Path) -> None:
    shapes_of(tmp_path)
    model = read_model(str(tmp_path))
    rows: dict[str, dict[str, set[int]]] = {}
    for engine in ENGINES:
        products = shapes(model, engine).workload.products
        logits = {p.kind.m for p in products if p.kind.n == 128256}
        rows[engine] = {"layers": {p.kind.m for p in products if p.kind.n != 128256}, "logits": logits}
    assert {1, 2, 4, 8, 16, 248, 256, 272, 512, 8192, 16384} <= rows["vllm"]["layers"]
    assert not {3, 264, 520} & rows["vllm"]["layers"]
    assert max(rows["vllm"]["logits"]) == 512 and len(rows["vllm"]["logits"]) == 51
    assert {1, 12, 24, 256, 8192} <= rows["sglang"]["layers"] and 272 not in rows["sglang"]["layers"]
    assert 272 in {p.kind.m for p in shapes(model, "sglang", ranks=4).workload.products}
    assert {p.kind.m for p in shapes(model, "vllm", rows=[7, 4096]).workload.products} == {7, 4096}
    assert {
        p.kind.m for p in shapes(model, "vllm", rows=[7, 4096]).workload.products if p.kind.n == 128256
    } == {7}


def test_kv_b_is_absorbed_where_engines_decode(tmp_path: Path) -> None:
    config_of("deepseek_v3").save_pretrained(tmp_path)
    model = read_model(str(tmp_path))
    kv_b = {p.kind.m for p in shapes(model, "vllm").workload.products if p.kind.k == _LATENT["kv_lora_rank"]}
    assert min(kv_b) == 1024
    other = shapes(model, "transformers").workload.products
    assert min(p.kind.m for p in other if p.kind.k == _LATENT["kv_lora_rank"]) == 1


def test_a_bias_is_added_by_the_first_rank_alone(tmp_path: Path) -> None:
    found = shapes_of(tmp_path, ranks=2, attention_bias=True)
    assert "qkv 3072x4096 bf16 bias_n" in found and "qkv 3072x4096 bf16" not in found
    assert {"o 4096x2048 bf16 bias_n", "o 4096x2048 bf16"} <= {*found}


def compressed(
    weights: dict[str, Any], inputs: dict[str, Any] | None, *, targets: Any = ("Linear",), **more: Any
) -> dict[str, Any]:
    named = [*targets] if isinstance(targets, tuple) else targets
    group = {"weights": weights, "input_activations": inputs, "targets": named}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


def by(strategy: str, kind: str = "float", bits: int = 8) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8_e4m3 scale_tensor"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8_e4m3 scale_rowwise"),
        ({"quant_method": "fbgemm_fp8"}, "fp8_e4m3 scale_rowwise"),
        (compressed(by("channel"), by("token")), "fp8_e4m3 scale_rowwise"),
        (compressed(by("channel"), by("token"), targets=None), "fp8_e4m3 scale_rowwise"),
        (compressed(by("channel"), by("token"), targets=["Conv"]), "bf16"),
        (compressed(by("tensor"), by("tensor")), "fp8_e4m3 scale_tensor"),
        (compressed(by("channel", "int"), by("token", "int")), "int8 scale_rowwise"),
        ({"quant_method": "mxfp4"}, "bf16"),
        ({"quant_method": "FBGEMM_FP8"}, "fp8_e4m3 scale_rowwise"),
        ({"quant_method": "modelopt", "quant_algo": "fp8"}, "fp8_e4m3 scale_tensor"),
        ({"quant_method": "fp8", "ignored_layers": "self_attn"}, "bf16"),
    ],
)  # fmt: skip
def test_quantised_layers_are_scaled(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    found = shapes_of(tmp_path, quantization_config=config)
    assert found[0] == f"qkv 6144x4096 {expected}" and found[-1] == "logits 128256x4096 bf16"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "no block scales in engines"),
        ({"quant_method": "awq"}, "quantised with 'awq'"),
        ({"load_in_8bit": True}, "quantised with an unnamed method"),
        (compressed(by("channel", "int", 4), None), "only its weights are quantised"),
        (compressed(by("block"), by("group")), "of groups or blocks"),
        (compressed(by("tensor"), by("tensor", "int")), "neither fp8 nor int8"),
        (compressed({"type": []}, {"strategy": {}}, ignore=[1, None], targets=3), "neither fp8 nor int8"),
    ],
)
def test_what_has_no_kernels_is_left_out(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    assert shapes_of(tmp_path, quantization_config=config) == ["logits 128256x4096 bf16"]
    refused = shapes(read_model(str(tmp_path)), "vllm").refused
    assert refused.keys() == {
        "qkv 6144x4096", "o 4096x4096", "gate_up 28672x4096", "down 4096x14336"
    }  # fmt: skip
    assert all(reason in line for line in refused.values())


MODELOPT = {"producer": {"name": "modelopt"}, "quant_algo": "FP8", "exclude_modules": ["lm_head", "*o_proj"]}


@pytest.mark.parametrize(
    ("file", "document", "expected"),
    [
        ("config.json", {"compression_config": compressed(by("channel"), by("token"))}, "scale_rowwise"),
        ("config.json", {"quantization_config": MODELOPT}, "scale_tensor"),
        ("config.json", {"quantization": {"group_size": 64, "bits": 4}}, "an unnamed method"),
        ("config.json", {"quantization_config": {"quant_method": "modelopt", **MODELOPT}}, "scale_tensor"),
        ("hf_quant_config.json", {"quantization": MODELOPT}, "scale_tensor"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "ModelOpt's 'NVFP4'"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "quantised with 'gptq'"),
        ("quant_config.json", {"w_bit": 4, "zero_point": True}, "quantised with 'awq'"),
        (
            "hf_quant_config.json",
            {"quantization": {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {f"model.layers.{i}.mlp": {"quant_algo": "FP8"} for i in range(32)},
            }},
            "scale_tensor",
        ),
    ],
)  # fmt: skip
def test_quantisation_that_stands_elsewhere(
    tmp_path: Path, file: str, document: dict[str, Any], expected: str
) -> None:
    """In the names of older tools, and in files beside config.json, as engines look for it."""
    if file == "config.json":
        found = shapes_of(tmp_path, **document)
    else:
        (tmp_path / file).write_text(json.dumps(document))
        found = shapes_of(tmp_path)
    refused = shapes(read_model(str(tmp_path)), "vllm").refused
    said = [*found, *refused.values()]
    assert any(expected in one for one in said) and "gate_up 28672x4096 bf16" not in found, said
    if "exclude_modules" in str(document):
        assert "o 4096x4096 bf16" in found


@pytest.mark.parametrize("text", ['{"quantization": {"quant_al', "[]", ""])
def test_a_damaged_file_beside_the_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(WorkloadError, match=r"hf_quant_config\.json: .*; download it again"):
        shapes_of(tmp_path)


def test_modules_that_are_not_quantised(tmp_path: Path) -> None:
    named = {"quant_method": "fp8", "modules_to_not_convert": ["model.language_model.layers.3", "o_proj"]}
    found = shapes_of(tmp_path, quantization_config=named)
    assert {"qkv 6144x4096 bf16", "qkv 6144x4096 fp8_e4m3 scale_rowwise", "o 4096x4096 bf16"} <= {*found}
    assert "o 4096x4096 fp8_e4m3 scale_rowwise" not in found
    by_regex = compressed(by("channel"), by("token"), ignore=["lm_head", "re:.*self_attn.*", "re:("])
    assert shapes_of(tmp_path, quantization_config=by_regex)[:3] == [
        "qkv 6144x4096 bf16", "o 4096x4096 bf16", "gate_up 28672x4096 fp8_e4m3 scale_rowwise",
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["{}.gate_proj|{}.up_proj", "{}*", "re:{}"])
@pytest.mark.parametrize(
    "mlp",
    [
        "model.layers.3.mlp", "model.language_model.layers.3.mlp", "language_model.model.layers.3.mlp",
        "language_model.model.layers.3.feed_forward", "backbone.layers.3.mixer",
    ],
)  # fmt: skip
def test_checkpoints_name_modules_that_are_not_quantised(tmp_path: Path, mlp: str, end: str) -> None:
    """By whole names, patterns and regexes, as multimodal models, Llama 4 and Nemotron-H have them."""
    names = end.format(*[mlp] * end.count("{")).split("|")
    found = shapes_of(tmp_path, quantization_config={"quant_method": "fp8", "ignored_layers": names})
    assert {"gate_up 28672x4096 bf16", "gate_up 28672x4096 fp8_e4m3 scale_rowwise"} <= {*found}


def test_tune_reads_the_problems(tmp_path: Path) -> None:
    shapes_of(tmp_path, attention_bias=True, quantization_config={"quant_method": "fbgemm_fp8"})
    shapes(read_model(str(tmp_path)), "vllm", rows=[64]).workload.write(tmp_path / "shapes.json")
    demands, refused = read(tmp_path / "shapes.json")
    found = {(d.problem.shape, d.problem.in_dtype, d.problem.epilogue): d.calls for d in demands}
    assert found["64x6144x4096", "fp8_e4m3", "scale_rowwise+bias_n"] == 32
    assert found["64x28672x4096", "fp8_e4m3", "scale_rowwise"] == 32
    assert found["64x128256x4096", "bf16", ""] == 1 and not refused


@pytest.mark.parametrize(
    ("ranks", "values", "said"),
    [
        (3, {}, r"--tp 3: model\.layers\.0\.self_attn\.q_proj has 32 heads; give a divisor"),
        (64, {}, "--tp 64: .*has 32 heads"),
        (8, {"intermediate_size": 14337}, "--tp 8: .*gate_proj has 14337 features"),
        (1, {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
         "'MambaForCausalLM' is not known: its config lacks the fields of a decoder.*tunegemm record"),
        (1, {"model_type": None}, "a model without a model_type is not known"),
        (1, {"hidden_size": None}, "no hidden_size, which llama has"),
        (1, {"hidden_size": "big"}, "hidden_size 'big' is not a whole number"),
        (1, {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        (1, {"torch_dtype": "float32"}, "its weights are fp32; add the dtype they will have: --dtype bf16"),
        (1, {"torch_dtype": "float64"}, "float64"),
        (1, {"quantization_config": "fp8"}, "quantization_config is not an object"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(tmp_path: Path, ranks: int, values: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        shapes_of(tmp_path, ranks=ranks, **values)


def test_a_model_that_sees_has_its_text_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3Config(text_config=config_of("gemma3_text"))
    config.save_pretrained(tmp_path)
    assert read_model(str(tmp_path)).layers[0].parts[0].columns == 4 * 256


@pytest.mark.parametrize("variable", ["", "HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_a_home_of_nobody_is_no_place(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(each, raising=False)
    if variable:
        monkeypatch.setenv(variable, "~nosuchuser/x")
    name = "org/other" if variable else "~nosuchuser/x"
    with pytest.raises(WorkloadError, match=f"'{name}': neither .* tunegemm downloads nothing"):
        read_model(name)


def test_a_name_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "hub" / "models--org--small"
    for revision in ("aaa", "bbb"):
        folder = cached / "snapshots" / revision
        folder.mkdir(parents=True)
        shapes_of(folder, vocab_size=64 if revision == "bbb" else 128)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert read_model("org/small").layers[-1].parts[0].columns == 128  # some revision
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("bbb")
    assert read_model("org/small").layers[-1].parts[0].columns == 64
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert read_model("org/small").layers[-1].parts[0].columns == 64
    with pytest.raises(WorkloadError, match=r"'org/other': neither .* tunegemm downloads nothing"):
        read_model("org/other")
    with pytest.raises(WorkloadError, match="neither a config"):
        read_model("../" * 3 + "etc")
    (cached / "snapshots" / "bbb" / "config.json").unlink()
    assert read_model("org/small").layers[-1].parts[0].columns == 128


@pytest.mark.parametrize("text", ["", "[]", "{", "\0", '"llama"'])
def test_files_that_are_no_config(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    why = "" if text else " (the file is empty)"
    said = re.escape(f"{path}: not a model's config.json{why}") + ".*; give the model's own, or its folder"
    with pytest.raises(WorkloadError, match=said):
        read_model(str(path))
    with pytest.raises(WorkloadError, match=r"none\.json"):
        read_model(str(tmp_path / "none.json"))


def test_a_list_of_shapes_is_sent_to_the_command_that_reads_it(tmp_path: Path) -> None:
    shapes_of(tmp_path)
    path = tmp_path / "my shapes.json"
    shapes(read_model(str(tmp_path)), "vllm", rows=[64]).workload.write(path)
    with pytest.raises(WorkloadError, match=re.escape(f"tune it with: tunegemm tune --from '{path}'")):
        read_model(str(path))
