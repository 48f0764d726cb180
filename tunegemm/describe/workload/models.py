"""A model's linear layers, from the config.json that its weights come with.

Sizes, biases and names are those of the models in Hugging Face's transformers (5.23, models/*/modeling_*.py),
which the tests build. Nothing is ever downloaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tunegemm.describe.problem import normalize_dtype
from tunegemm.errors import BadValueError, ProblemError, WorkloadError
from tunegemm.files import read_text
from tunegemm.untrusted import decoded, line, listed, shown, whole

_MOST = 2**31 - 1


@dataclass(frozen=True)
class Linear:
    """One matrix of a model: ``y = x @ weight.T``."""

    path: str
    """Its module, as quantisation configs name it."""
    columns: int
    """Output features."""
    depth: int
    """Input features."""
    bias: bool = False
    split: Literal["columns", "depth", ""] = ""
    """What tensor parallelism divides; empty where each rank has all of it."""
    units: int = 1
    """Parts into which that can be divided at most: heads, or features."""
    shared: bool = False
    """Whether ranks beyond `units` have the same part: heads of keys and values."""

    def of_rank(self, ranks: int) -> tuple[int, int]:
        """Columns and depth of one rank's part. Raises WorkloadError where ranks cannot divide it."""
        if not self.split or ranks == 1:
            return self.columns, self.depth
        parts = min(ranks, self.units) if self.shared else ranks
        if self.units % parts or ranks % parts:
            what = "features" if self.units in (self.columns, self.depth) else "heads"
            raise WorkloadError(f"--tp {ranks}: {self.path} has {self.units} {what}; give a divisor of them")
        if self.split == "columns":
            return self.columns // parts, self.depth
        return self.columns, self.depth // parts


@dataclass(frozen=True)
class Layer:
    """Linear layers of the same input, which engines merge into one."""

    name: str
    parts: tuple[Linear, ...]
    is_one: bool = False
    """Whether the model itself has them as one matrix."""
    only_prefill: bool = False
    """Whether engines compute it in another way where they decode: absorbed into the attention."""
    experts: int = 0
    """How many there are of each matrix, whose products are grouped; 0 where every row has the same."""
    each: int = 1
    """Experts that compute a row."""
    gate: str = ""
    """What becomes of gate and up, as in an epilogue; empty where no kernel takes it along."""
    transposed: bool = False
    """Whether weights are kept with their columns contiguous."""


@dataclass(frozen=True)
class Config:
    """A config.json, and the numbers in it."""

    values: Mapping[str, Any]
    where: str

    def number(self, name: str, default: int | None = None) -> int:
        """Raises WorkloadError where it is neither there nor known from the others."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise WorkloadError(
                    f"{self.where}: no {name}, which {self.family} has; give a full config.json"
                )
            return default
        try:
            return whole(value, name, 1, _MOST)
        except BadValueError as error:
            raise WorkloadError(f"{self.where}: {error}") from None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)

    @property
    def family(self) -> str:
        """Its ``model_type``."""
        return str(self.values.get("model_type") or "")


Layers = Callable[[Config, int], list[Layer]]


def _attention(
    config: Config, at: str, *, bias: bool = False, out_bias: bool = False, head: int | None = None,
    is_one: bool = False,
) -> list[Layer]:  # fmt: skip
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    pairs = config.number("num_key_value_heads", heads)
    size = config.number("head_dim", head or hidden // heads)
    q = Linear(f"{at}.self_attn.q_proj", heads * size, hidden, bias, "columns", heads)
    k, v = (
        Linear(f"{at}.self_attn.{name}_proj", pairs * size, hidden, bias, "columns", pairs, shared=True)
        for name in "kv"
    )
    o = Linear(f"{at}.self_attn.o_proj", hidden, heads * size, out_bias, "depth", heads)
    return [Layer("qkv", (q, k, v), is_one), Layer("o", (o,))]


def _mlp(
    config: Config, at: str, name: str = "mlp", width: int = 0, *, bias: bool = False, is_one: bool = False
) -> list[Layer]:
    hidden, width = config.number("hidden_size"), width or config.number("intermediate_size")
    gate, up = (
        Linear(f"{at}.{name}.{part}_proj", width, hidden, bias, "columns", width) for part in ("gate", "up")
    )
    down = Linear(f"{at}.{name}.down_proj", hidden, width, bias, "depth", width)
    return [Layer("gate_up", (gate, up), is_one), Layer("down", (down,))]


def _router(config: Config, path: str, bias: bool = False) -> Layer:
    return Layer("router", (Linear(path, _count(config), config.number("hidden_size"), bias),))


def _count(config: Config) -> int:
    """Experts of a layer. Which of the first two names a family writes has changed."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return config.number(next((name for name in names if name in config.values), names[0]))


def _experts(
    config: Config, at: str, width: str, *, gate: str = "swiglu", transposed: bool = False
) -> list[Layer]:
    """width: the name of the features of each."""
    size, hidden = config.number(width), config.number("hidden_size")
    each = config.number("num_experts_per_tok")
    common: dict[str, Any] = {"experts": _count(config), "each": each, "transposed": transposed}
    gate_up = tuple(
        Linear(f"{at}.{part}_proj", size, hidden, False, "columns", size) for part in ("gate", "up")
    )
    down = Linear(f"{at}.down_proj", hidden, size, False, "depth", size)
    silu = config.values.get("hidden_act", "silu") == "silu"
    return [
        Layer("experts_gate_up", gate_up, True, gate=gate * silu, **common),
        Layer("experts_down", (down,), **common),
    ]


def _at(index: int) -> str:
    return f"model.layers.{index}"


def _dense(head: int | None = None, bias: bool | None = None, out_bias: bool | None = None) -> Layers:
    """Llama and those that differ from it in biases and the default size of a head."""

    def layers(config: Config, index: int) -> list[Layer]:
        of_all = config.flag("attention_bias")
        biases = {
            "bias": of_all if bias is None else bias, "out_bias": of_all if out_bias is None else out_bias
        }  # fmt: skip
        attention = _attention(config, _at(index), head=head, **biases)
        return [*attention, *_mlp(config, _at(index), bias=config.flag("mlp_bias"))]

    return layers


def _phi3(config: Config, index: int) -> list[Layer]:
    return [*_attention(config, _at(index), is_one=True), *_mlp(config, _at(index), is_one=True)]


def _mixtral(config: Config, index: int) -> list[Layer]:
    at = f"{_at(index)}.block_sparse_moe"
    experts = _experts(config, f"{at}.experts", "intermediate_size")
    return [*_attention(config, _at(index)), _router(config, f"{at}.gate"), *experts]


def _gpt_oss(config: Config, index: int) -> list[Layer]:
    bias = config.flag("attention_bias", True)
    at = f"{_at(index)}.mlp"
    router = _router(config, f"{at}.router", bias=True)
    # Its gate is clamped, which is none of the kernels'.
    experts = _experts(config, f"{at}.experts", "intermediate_size", gate="", transposed=True)
    return [*_attention(config, _at(index), bias=bias, out_bias=bias, head=64), router, *experts]


def _qwen_moe(bias: str, default: bool, out_bias: str, head: int | None) -> Layers:
    def layers(config: Config, index: int) -> list[Layer]:
        at = _at(index)
        attention = _attention(
            config, at, bias=config.flag(bias, default), out_bias=config.flag(out_bias), head=head
        )
        alone = listed(config.values.get("mlp_only_layers") or [], "mlp_only_layers")
        if index in alone or (index + 1) % config.number("decoder_sparse_step", 1):
            return [*attention, *_mlp(config, at)]
        experts = _experts(config, f"{at}.mlp.experts", "moe_intermediate_size")
        found = [*attention, _router(config, f"{at}.mlp.gate"), *experts]
        if config.family == "qwen2_moe":
            width = config.number("shared_expert_intermediate_size")
            found += _mlp(config, at, "mlp.shared_expert", width)
        return found

    return layers


def _deepseek(config: Config, index: int) -> list[Layer]:
    """Attention by latent vectors: q and kv are each projected down, then up by heads."""
    at, hidden, heads = _at(index), config.number("hidden_size"), config.number("num_attention_heads")
    latent, rope = config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
    nope, value = config.number("qk_nope_head_dim"), config.number("v_head_dim")
    bias, attention = config.flag("attention_bias"), f"{at}.self_attn"
    kv_a = Linear(f"{attention}.kv_a_proj_with_mqa", latent + rope, hidden, bias)
    columns = heads * (nope + rope)
    if config.values.get("q_lora_rank") is None:
        q = Linear(f"{attention}.q_proj", columns, hidden, False, "columns", heads)
        found = [Layer("q", (q,)), Layer("kv_a", (kv_a,))]
    else:
        rank = config.number("q_lora_rank")
        q_a = Linear(f"{attention}.q_a_proj", rank, hidden, bias)
        q_b = Linear(f"{attention}.q_b_proj", columns, rank, False, "columns", heads)
        found = [Layer("q_kv_a", (q_a, kv_a)), Layer("q_b", (q_b,))]
    kv_b = Linear(f"{attention}.kv_b_proj", heads * (nope + value), latent, False, "columns", heads)
    o = Linear(f"{attention}.o_proj", hidden, heads * value, bias, "depth", heads)
    found += [Layer("kv_b", (kv_b,), only_prefill=True), Layer("o", (o,))]
    if config.values.get("n_routed_experts") is None or index < config.number("first_k_dense_replace", 0):
        return [*found, *_mlp(config, at, bias=config.flag("mlp_bias"))]
    # What gates the experts is computed in fp32.
    found += _experts(config, f"{at}.mlp.experts", "moe_intermediate_size")
    width = config.number("moe_intermediate_size") * config.number("n_shared_experts", 1)
    return [*found, *_mlp(config, at, "mlp.shared_experts", width, bias=config.flag("mlp_bias"))]


#: What reads a config, by its ``model_type``.
FAMILIES: dict[str, Layers] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _dense(head=256),
    "gemma2": _dense(head=256),
    "gemma3_text": _dense(head=256),
    "gpt_oss": _gpt_oss,
    "llama": _dense(),
    "mistral": _dense(bias=False, out_bias=False),
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen2": _dense(bias=True, out_bias=False),
    "qwen2_moe": _qwen_moe("qkv_bias", True, "", None),
    "qwen3": _dense(head=128),
    "qwen3_moe": _qwen_moe("attention_bias", False, "attention_bias", None),
}


@dataclass(frozen=True)
class Model:
    """What a config says of a model's products."""

    layers: tuple[Layer, ...]
    """Layers of all its blocks, in order, then the logits."""
    dtype: str
    """Dtype of weights and activations that are not quantised: bf16, fp16 or fp32."""
    quantization: Mapping[str, Any]
    """Its ``quantization_config``; empty without one."""
    where: str


def read_model(name: str) -> Model:
    """The model of a config.json, of a folder with one, or of a name in the local cache: ``org/model``.

    Raises WorkloadError where there is none, or one of a family that is not known.
    """
    path = _find(name)
    try:
        document = decoded(read_text(path, WorkloadError))
        if not isinstance(document, dict):
            raise BadValueError("it is not an object")
    except BadValueError as error:
        raise WorkloadError(f"{path}: not a model's config.json ({error})") from None
    values, nested = document, document.get("text_config")
    if values.get("model_type") not in FAMILIES and isinstance(nested, dict):
        values = nested  # of a model that sees, too
    config = Config(values, str(path))
    if config.family not in FAMILIES:
        given = document.get("architectures") or document.get("model_type")
        named = given[0] if isinstance(given, list) and given else given
        raise WorkloadError(
            f"{path}: {shown(named) if named else 'a model without a model_type'} is not known; known are "
            f"{', '.join(FAMILIES)}; `tunegemm record` counts the products of any program"
        )
    blocks = config.number("num_hidden_layers")
    if blocks > 10_000:
        raise WorkloadError(f"{path}: num_hidden_layers is {blocks}; give a model's config.json")
    layers = [layer for index in range(blocks) for layer in FAMILIES[config.family](config, index)]
    vocabulary = config.number("vocab_size")
    # Its columns are padded before they are divided, by the engine.
    layers.append(Layer("logits", (Linear("lm_head", vocabulary, config.number("hidden_size")),)))
    texts = (one.get(key) for one in (values, document) for key in ("dtype", "torch_dtype"))
    text = next(filter(None, texts), "bf16")
    try:
        if (dtype := normalize_dtype(line(text, "dtype", 40))) not in ("bf16", "fp16", "fp32"):
            raise BadValueError(f"dtype {text} is no model's")
        quantization = document.get("quantization_config") or values.get("quantization_config") or {}
        if not isinstance(quantization, dict):
            raise BadValueError("quantization_config is not an object")
    except (BadValueError, ProblemError) as error:
        raise WorkloadError(f"{path}: {error}") from None
    return Model(tuple(layers), dtype, quantization, str(path))


def _find(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.exists() or name.endswith(".json"):
        return path  # what is wrong with it reading it says
    cached = _cache() / f"models--{name.replace('/', '--')}"
    if not re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", name, re.ASCII) or not cached.is_dir():
        raise WorkloadError(
            f"{shown(name)}: neither a config.json, a folder with one, nor a model in {_cache()}; download "
            "its config.json first, nothing is downloaded here"
        )
    head = cached / "refs" / "main"
    revisions = [read_text(head).strip()] if head.is_file() else []
    revisions += sorted(one.name for one in (cached / "snapshots").glob("*"))
    for revision in revisions:
        if (found := cached / "snapshots" / revision / "config.json").is_file():
            return found
    raise WorkloadError(f"{cached}: no config.json in it; download the model's config.json first")


def _cache() -> Path:
    """Where Hugging Face's packages keep what they downloaded."""
    if hub := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(hub).expanduser()
    home = os.environ.get("HF_HOME")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (Path(home).expanduser() if home else caches / "huggingface") / "hub"
