"""The linear layers of a model's blocks, as the fields of its config.json describe them.

The fields decide which attention a block has (with heads, latent vectors, linear, Mamba's), whether it has
experts, a shared expert or a dense layer, and all sizes; the model's name does not matter. Names decide only
what no field says: a default that a family's code fills in, and which matrices are stored as one. Sizes are
those of the models of transformers (5.23, models/*/modeling_*.py), which the tests build.
"""

from __future__ import annotations

from typing import Any

from tunegemm.describe.workload.matrices import Config, Layer, Linear
from tunegemm.errors import WorkloadError
from tunegemm.untrusted import shown

#: Values that a family's code uses for fields that its config omits.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256},
    "gemma3_text": {
        "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208
    },
    "gemma4_text": {"global_head_dim": 512},
    "gpt_oss": {"head_dim": 64, "attention_bias": True},
    "minimax": {"layer_types": ["full_attention", "linear_attention"]},
    "nemotron_h": {"head_dim": 128},
    "qwen3": {"head_dim": 128},
}  # fmt: skip
#: Prefixes of names: families with a bias in q, k and v, and those without a bias after attention.
_QKV_BIAS, _NO_OUT_BIAS = ("qwen2",), ("qwen2", "glm", "mimo", "step")
#: Families that store gate and up as one matrix, and those that store q, k and v so, too.
_ONE_MLP, _ONE_QKV = ("phi3", "glm", "glm4"), ("phi3",)
#: Families that keep experts' weights with their columns contiguous.
_TRANSPOSED = ("gpt_oss",)

#: Activations after which each block multiplies by a gate, as in Llama; and those without a gate.
_GATED, _PLAIN = ("silu", "swish"), ("relu2",)
#: Fields of structures that this module does not read: a list without them would be wrong.
_UNKNOWN = (
    "altup_num_inputs", "block_auto_adjust_ff_dim", "block_configs", "cross_attention_layers",
    "is_encoder_decoder", "laurel_rank", "num_mem_blocks", "o_lora_rank", "zero_expert_num",
)  # fmt: skip
#: Families that share the fields of others but have another structure, which no field shows.
_OTHERWISE = frozenset({
    "afmoe", "axk2", "bailing_hybrid", "beam", "bitnet", "doge", "dots3_note", "dots3_note_text", "fuyu",
    "hrm_text", "hy_v4", "minimax_m3_vl_text", "olmo_hybrid", "persimmon", "phi4_multimodal",
})  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EACH = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")

_LETTERS = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
#: Other names of types of blocks.
_TYPES = {
    "attention": "full_attention", "full_attention": "full_attention",
    "chunked_attention": "full_attention", "indexed_attention": "full_attention",
    "sliding_attention": "sliding_attention", "linear_attention": "linear_attention", "mamba": "mamba",
    "mamba2": "mamba", "mlp": "mlp", "moe": "moe", "conv": "conv",
}  # fmt: skip
#: Layers without served products, by the type of their block.
_LEFT_OUT = {"mamba": "Mamba layers are not supported", "conv": "short convolutions are not supported"}


def completed(config: Config) -> Config:
    """The config with the defaults of its family's code. Raises WorkloadError for a structure that this
    module cannot read."""
    present = {name: value for name, value in config.values.items() if value is not None}
    result = Config({**DEFAULTS.get(config.family, {}), **present}, config.where)
    if unknown := next((name for name in _UNKNOWN if result.get(name)), None):
        raise WorkloadError(
            f"{config.where}: models with {unknown} are not known; `tunegemm record` counts the products "
            "of any program"
        )
    return result


def is_read(config: Config) -> bool:
    """Whether the config has the fields of a model with such blocks."""
    activation = config.get("hidden_act", "hidden_activation", "mlp_hidden_act")
    gated = activation in (*_GATED, *_PLAIN) or (activation is not None and config.family.startswith("gemma"))
    gated = gated or (activation is None and config.get("rms_norm_eps") is not None)  # as in Step's
    attends = all(config.get(name) for name in ("hidden_size", "num_attention_heads"))
    return config.family in _FAMILIES or (attends and gated and config.family not in _OTHERWISE)


#: Families whose configs may leave the activation out.
_FAMILIES = frozenset({
    "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "gpt_oss", "llama", "mistral", "mixtral",
    "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
})  # fmt: skip


def layers_of(config: Config) -> list[Layer]:
    """Linear layers of all blocks, in order."""
    types = block_types(config)
    # In such a pattern each block has one layer; otherwise an attention, or its replacement, and an mlp.
    is_pattern = not {"mlp", "moe"}.isdisjoint(types)
    hidden, width = config.number("hidden_size"), config.count("hidden_size_per_layer_input")
    results = []
    for index, kind in enumerate(types):
        of_block = _of_block(config, index, kind)
        if kind not in ("mlp", "moe"):
            results += _mixer(of_block, index, kind)
        if not is_pattern or kind in ("mlp", "moe"):
            results += _feed_forward(of_block, index, kind)
        if width:
            at = f"model.layers.{index}"
            results.append(_layer("per_layer_gate", Linear(f"{at}.per_layer_input_gate", width, hidden)))
            results.append(_layer("per_layer_up", Linear(f"{at}.per_layer_projection", hidden, width)))
    if width:
        of_all = Linear("model.per_layer_model_projection", width * len(types), hidden)
        results.append(_layer("per_layer", of_all))
    return results


def block_types(config: Config) -> list[str]:
    """The attention of each block, or its replacement. Raises WorkloadError for an unknown type."""
    if pattern := config.word("hybrid_override_pattern"):
        blocks = len(pattern)
        listed: list[Any] = [_LETTERS.get(letter, letter) for letter in pattern]
    else:
        listed = config.each("layer_types") or config.each("layers_block_type")
        blocks = config.number("num_hidden_layers", default=len(listed) or None)
    if blocks > 10_000:
        raise WorkloadError(f"{config.where}: num_hidden_layers is {blocks}; give a model's config.json")
    if sizes := config.each("attn_type_list"):  # MiniMax
        listed = ["full_attention" if size else "linear_attention" for size in sizes]
    elif sizes := config.each("hybrid_layer_pattern"):  # MiMo
        listed = ["sliding_attention" if size else "full_attention" for size in sizes]
    elif isinstance(linear := config.get("linear_attn_config"), dict) and "kda_layers" in linear:  # Kimi
        of_kda = set(Config(linear, config.where).each("kda_layers"))
        listed = ["linear_attention" if index + 1 in of_kda else "full_attention" for index in range(blocks)]
    elif period := config.count("attn_layer_period"):  # Jamba
        offset = config.count("attn_layer_offset")
        listed = ["full_attention" if index % period == offset else "mamba" for index in range(blocks)]
    elif attending := config.each("attn_layer_indices"):  # Bamba
        listed = ["full_attention" if index in attending else "mamba" for index in range(blocks)]
    elif not listed and config.get("linear_num_value_heads"):  # Qwen
        every = config.number("full_attention_interval", default=4)
        listed = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(blocks)]
    results = [listed[index % len(listed)] if listed else "full_attention" for index in range(blocks)]
    if config.family.startswith("gemma4"):
        results[-1:] = ["full_attention"]
    if strange := next((result for result in results if result not in _TYPES), None):
        raise WorkloadError(
            f"{config.where}: blocks of type {shown(strange)} are not known; `tunegemm record` counts the "
            "products of any program"
        )
    types = [_TYPES[result] for result in results]
    is_mamba = config.get("mamba_num_heads", "mamba_n_heads", "mamba_d_state", "ssm_state_size")
    return ["mamba" if item == "linear_attention" and is_mamba else item for item in types]


def _of_block(config: Config, index: int, kind: str) -> Config:
    """The config for one block alone."""
    own = config.get("per_layer_config")
    result = dict(own.get(str(index)) or {}) if isinstance(own, dict) else {}
    if kind == "sliding_attention":
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"):
            if (value := config.get(f"swa_{name}")) is not None:
                result[name] = value
        if isinstance(other := config.get("attention_other_setting"), dict):
            result |= {
                name: other[name] for name in ("num_attention_heads", "num_attention_groups") if name in other
            }
    elif config.get("global_head_dim"):
        result.setdefault("head_dim", config.get("global_head_dim"))
        if config.flag("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            result.setdefault("num_key_value_heads", config.get("num_global_key_value_heads"))
    for name in ("intermediate_size", "moe_intermediate_size", "moe_topk", "num_shared_expert"):
        if isinstance(sizes := config.get(name), list) and sizes:  # Hunyuan has one for each block
            result[name] = sizes[index % len(sizes)]
    return Config({**config.values, **result}, config.where)


def _layer(name: str, *parts: Linear, **more: Any) -> Layer:
    return Layer(name, parts, **more)


def _mixer(config: Config, index: int, kind: str) -> list[Layer]:
    """A block's attention, or its replacement."""
    if why := _LEFT_OUT.get(kind):
        return [_layer(kind, left_out=why)]
    if kind == "linear_attention":
        return _linear_attention(config, f"model.layers.{index}.linear_attn")
    at = f"model.layers.{index}.self_attn"
    if config.get("kv_lora_rank"):
        return _latent_attention(config, at, index)
    if config.get("share_q_dim"):
        return _factored_attention(config, at)
    attention = _attention(config, at, kind, index)
    if config.get("mamba_d_ssm"):  # Falcon-H1 has Mamba beside it
        return [_layer("mamba", left_out=_LEFT_OUT["mamba"]), *attention]
    return attention


def _attention(config: Config, at: str, kind: str, index: int) -> list[Layer]:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    pairs = config.number("num_key_value_heads", "num_attention_groups", default=heads)
    size = config.number("head_dim", "attention_head_dim", default=max(1, hidden // heads))
    of_value = config.number("v_head_dim", default=size)
    begins = config.family.startswith
    bias = config.flag(
        "attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias", "use_bias", default=begins(_QKV_BIAS)
    )
    out_bias = config.flag("attention_out_bias", default=bias and not begins(_NO_OUT_BIAS))
    # A gate for attention's output is the second half of q (Qwen), or has a separate matrix (Step).
    doubled = 1 + config.flag("attn_output_gate", default=config.get("linear_num_value_heads") is not None)
    q = Linear(f"{at}.q_proj", heads * size * doubled, hidden, bias, "columns", heads)
    k = Linear(f"{at}.k_proj", pairs * size, hidden, bias, "columns", pairs, shared=True)
    v = Linear(f"{at}.v_proj", pairs * of_value, hidden, bias, "columns", pairs, shared=True)
    o = Linear(f"{at}.o_proj", hidden, heads * of_value, out_bias, "depth", heads)
    parts = [q, k, v]
    if config.flag("attention_k_eq_v") and kind != "sliding_attention":
        parts = [q, k]
    shared = config.count("num_kv_shared_layers")
    if shared and index >= config.number("num_hidden_layers") - shared:
        parts = [q]
    results = [_layer("qkv" if len(parts) > 1 else "q", *parts, is_one=config.family in _ONE_QKV)]
    gating = config.get("gating")
    by_head = config.flag("use_head_wise_attn_gate") or gating in (True, "per-head")
    if by_head or gating:
        width = heads if by_head else heads * size
        gate = Linear(f"{at}.g_proj", width, hidden, False, "columns", heads)
        results.append(_layer("attention_gate", gate))
    return [*results, _layer("o", o)]


def _latent_attention(config: Config, at: str, index: int) -> list[Layer]:
    """Attention by latent vectors: q and kv are each projected down, then up by heads."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    latent, rope = config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
    nope = config.number("qk_nope_head_dim")
    value = config.number("v_head_dim", default=nope)
    bias = config.flag("attention_bias")
    kv_a = Linear(f"{at}.kv_a_proj_with_mqa", latent + rope, hidden, bias)
    columns = heads * (nope + rope)
    if not (rank := config.count("q_lora_rank")):
        q = Linear(f"{at}.q_proj", columns, hidden, False, "columns", heads)
        results = [_layer("q", q), _layer("kv_a", kv_a)]
    else:
        q_a = Linear(f"{at}.q_a_proj", rank, hidden, bias)
        q_b = Linear(f"{at}.q_b_proj", columns, rank, False, "columns", heads)
        results = [_layer("q_kv_a", q_a, kv_a), _layer("q_b", q_b)]
    kv_b = Linear(f"{at}.kv_b_proj", heads * (nope + value), latent, False, "columns", heads)
    o = Linear(f"{at}.o_proj", hidden, heads * value, bias, "depth", heads)
    results += [_layer("kv_b", kv_b, only_prefill=True), _layer("o", o)]
    indexer = config.each("indexer_types")
    if rank and (indexes := config.count("index_n_heads")) and (indexer[index : index + 1] != ["shared"]):
        size, inner = config.number("index_head_dim"), f"{at}.indexer"
        results += [
            _layer("index_q", Linear(f"{inner}.wq_b", indexes * size, rank)),
            _layer("index_k", Linear(f"{inner}.wk", size, hidden)),
            _layer("index_weights", Linear(f"{inner}.weights_proj", indexes, hidden)),
        ]
    return results


def _factored_attention(config: Config, at: str) -> list[Layer]:
    """Step-3: q is projected down, then up by heads, which share one head of keys and of values."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    rank, size = config.number("share_q_dim"), config.number("head_dim")
    down = (
        Linear(f"{at}.{name}_proj", columns, hidden)
        for name, columns in (("q", rank), ("k", size), ("v", size))
    )
    q_b = Linear(f"{at}.wq", heads * size, rank, False, "columns", heads)
    o = Linear(f"{at}.o_proj", hidden, heads * size, False, "depth", heads)
    return [_layer("qkv", *down), _layer("q_b", q_b), _layer("o", o)]


def _linear_attention(config: Config, at: str) -> list[Layer]:
    hidden = config.number("hidden_size")

    def columns(name: str, width: int, heads: int) -> Linear:
        return Linear(f"{at}.{name}", width, hidden, False, "columns", heads)

    if value_heads := config.count("linear_num_value_heads"):  # Qwen's gated delta net
        heads = config.number("linear_num_key_heads")
        keys = heads * config.number("linear_key_head_dim")
        values = value_heads * config.number("linear_value_head_dim")
        is_one = config.family == "qwen3_next"
        return [
            _layer(
                "linear_qkvz", columns("in_proj_qkv", 2 * keys + values, heads),
                columns("in_proj_z", values, value_heads), is_one=is_one,
            ),
            _layer(
                "linear_ba", columns("in_proj_b", value_heads, value_heads),
                columns("in_proj_a", value_heads, value_heads), is_one=is_one,
            ),
            _layer("linear_o", Linear(f"{at}.out_proj", hidden, values, False, "depth", value_heads)),
        ]  # fmt: skip
    own = config.get("linear_attn_config")
    kda = Config({**config.values, **own} if isinstance(own, dict) else config.values, config.where)
    if isinstance(own, dict) or config.get("linear_num_heads"):  # Kimi's delta attention
        heads = kda.number("num_heads" if isinstance(own, dict) else "linear_num_heads")
        size = kda.number("head_dim" if isinstance(own, dict) else "linear_head_dim")
        width = heads * size
        results = [_layer(f"linear_{name}", columns(f"{name}_proj", width, heads)) for name in "qkv"]
        for name in "fg":
            results.append(_layer(f"linear_{name}_a", Linear(f"{at}.{name}_a_proj", size, hidden)))
            up = Linear(f"{at}.{name}_b_proj", width, size, False, "columns", heads)
            results.append(_layer(f"linear_{name}_b", up))
        o = Linear(f"{at}.o_proj", hidden, width, False, "depth", heads)
        return [*results, _layer("linear_beta", columns("b_proj", heads, heads)), _layer("linear_o", o)]
    if "minimax" in config.family:  # lightning attention: q, k and v are one matrix
        heads = config.number("num_attention_heads")
        width = heads * config.number("head_dim", default=max(1, hidden // heads))
        o = Linear(f"{at}.out_proj", hidden, width, False, "depth", heads)
        return [
            _layer("linear_qkv", columns("qkv_proj", 3 * width, heads)),
            _layer("output_gate", columns("output_gate", width, heads)),
            _layer("linear_o", o),
        ]
    return [_layer("linear_attention", left_out="no field defines its linear attention")]


def _feed_forward(config: Config, index: int, kind: str) -> list[Layer]:
    """A block's dense layer, or its experts and their shared layers."""
    at = f"model.layers.{index}"
    bias = config.flag("mlp_bias", "use_bias")
    wide = config.number("intermediate_size_mlp", "intermediate_size", default=0)
    if config.flag("use_double_wide_mlp"):
        first = config.number("num_hidden_layers") - config.count("num_kv_shared_layers")
        wide *= 1 + (index >= first)
    is_beside = config.flag("enable_moe_block")  # Gemma 4: both
    if not is_beside and not (kind == "moe" or (kind != "mlp" and is_sparse(config, index))):
        return _mlp(config, f"{at}.mlp", wide or config.number("intermediate_size"), bias)
    result = _mlp(config, f"{at}.mlp", wide, bias) if is_beside else []
    at = f"{at}.{'block_sparse_moe' if config.family == 'mixtral' else 'mlp'}"
    # Elsewhere the router is computed in fp32.
    is_fp32 = config.get("n_routed_experts", "moe_router_activation_func", "moe_num_experts") is not None
    if not is_fp32:
        router, in_bias = ("router", True) if config.family == "gpt_oss" else ("gate", False)
        parts = Linear(f"{at}.{router}", config.number(*_EXPERTS), config.number("hidden_size"), in_bias)
        result.append(_layer("router", parts))
    size = config.number("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    return result + _experts(config, f"{at}.experts", size) + _shared(config, at, size, bias)


def is_sparse(config: Config, index: int) -> bool:
    """Whether a block has experts."""
    if not config.count(*_EXPERTS):
        return False
    if kinds := config.each("mlp_layer_types"):
        return bool(kinds[index % len(kinds)] == "sparse")
    enumerated = config.get("moe_layers_enum")
    if isinstance(enumerated, str):
        return str(index) in enumerated.replace(" ", "").split(",")
    if (blocks := enumerated or config.get("moe_layers")) is not None:
        return index in config.each("moe_layers_enum" if enumerated else "moe_layers") if blocks else False
    if isinstance(config.get("moe_layer_freq"), list):
        frequencies = config.each("moe_layer_freq")
        return bool(frequencies[index % len(frequencies)])
    if index in config.each("mlp_only_layers"):
        return False
    if period := config.count("expert_layer_period"):
        return index % period == config.count("expert_layer_offset")
    first = config.count("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    every = config.number(
        "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "moe_layer_freq", default=1
    )
    last = config.get("moe_layer_end_index")
    if isinstance(last, int) and last >= 0 and index > last:
        return False
    return index >= first and (index + 1) % every == 0


def _gates(config: Config) -> bool:
    return config.get("mlp_hidden_act", "hidden_act") not in _PLAIN


def _mlp(config: Config, at: str, width: int, bias: bool = False) -> list[Layer]:
    hidden = config.number("hidden_size")
    gate, up = (Linear(f"{at}.{part}_proj", width, hidden, bias, "columns", width) for part in ("gate", "up"))
    down = Linear(f"{at}.down_proj", hidden, width, bias, "depth", width)
    first = (
        _layer("gate_up", gate, up, is_one=config.family in _ONE_MLP) if _gates(config) else _layer("up", up)
    )
    return [first, _layer("down", down)]


def _experts(config: Config, at: str, size: int) -> list[Layer]:
    each, experts = config.number(*_EACH), config.number(*_EXPERTS)
    common: dict[str, Any] = {"experts": experts, "each": each, "transposed": config.family in _TRANSPOSED}
    # Latent experts work with fewer features; a dense layer before and one after them convert.
    hidden = config.number("hidden_size")
    inner = config.number("moe_latent_size", default=hidden)
    layers: list[Layer] = []
    if inner != hidden:
        layers.append(_layer("latent_down", Linear(f"{at}.fc1_latent_proj", inner, hidden)))
        layers.append(_layer("latent_up", Linear(f"{at}.fc2_latent_proj", hidden, inner)))
    gate, up = (Linear(f"{at}.{part}_proj", size, inner, False, "columns", size) for part in ("gate", "up"))
    down = Linear(f"{at}.down_proj", inner, size, False, "depth", size)
    # Kernels have neither clamped gates nor gates other than silu.
    is_clamped = config.family == "gpt_oss" or config.get("swiglu_limit", "swiglu_limits")
    silu = (config.get("hidden_act", "hidden_activation") or "silu") in _GATED and not is_clamped
    if _gates(config):
        first = _layer("experts_gate_up", gate, up, is_one=True, gate="swiglu" * silu, **common)
    else:
        first = _layer("experts_up", up, is_one=True, **common)
    return [*layers, first, _layer("experts_down", down, **common)]


def _shared(config: Config, at: str, size: int, bias: bool) -> list[Layer]:
    """The layers that every row passes besides its experts."""
    width = config.count(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim",
        "shared_intermediate_size",
    )  # fmt: skip
    if not width:
        many = config.count(
            "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"
        )
        width = size * (many or config.family == "llama4_text")
    name = "shared_expert" if config.get("shared_expert_intermediate_size") else "shared_experts"
    return _mlp(config, f"{at}.{name}", width, bias) if width else []
